//! Questions about this machine that any process may ask its kernel: interfaces, routes, sockets. Also the Unix sockets
//! by which its programs talk to each other (`packets`), the only part that changes files.
#![forbid(unsafe_code)]

pub mod errors;
pub mod holder;
pub mod interfaces;
pub mod packets;
pub mod routes;
pub mod sockets;
