//! On-demand buffers: what a body is while nobody has looked at it.
//!
//! * [`reference`]: where its bytes are, and a share of the right to have them;
//! * [`frame`]: references and real bytes in a connection;
//! * [`absent`]: which memory of a process stands for which bytes;
//! * [`hold`]: the shares that a process has, and their return;
//! * [`touched`], [`learnt`], [`content`]: what receivers have looked at, what writers send for real because of that, and what
//!   they go by;
//! * [`place`]: a range of memory or of a file, where the bytes of a reference are;
//! * [`segment`], [`store`], [`fetch`]: where the bytes are kept, who serves them, and how they are had;
//! * [`states`]: memory for the states of connections;
//! * [`sources`]: which machines' programs can fetch from which stores;
//! * [`link`]: how a program has other machines send to its clients;
//! * [`channel`], [`records`]: what readers and stores speak over, encrypted between machines.
//!
//! Nothing here touches a program's memory or its sockets: crates/process does.
#![forbid(unsafe_code)]

pub mod absent;
pub mod channel;
pub mod content;
pub mod fetch;
pub mod frame;
pub mod hold;
pub mod learnt;
pub mod link;
pub mod place;
mod presence;
pub mod records;
pub mod reference;
pub mod segment;
pub mod sources;
pub mod states;
pub mod store;
pub mod times;
pub mod touched;
pub mod turns;
