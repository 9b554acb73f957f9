//! This machine, as its kernel shows it to any process: interfaces, routes, sockets; and the Unix sockets by which its
//! programs talk to each other. Nothing here changes the machine.
#![forbid(unsafe_code)]

pub mod errors;
pub mod interfaces;
pub mod packets;
pub mod routes;
pub mod sockets;
