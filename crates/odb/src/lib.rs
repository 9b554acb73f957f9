//! On-demand buffers: a body is left where it is until a program reads it.
//!
//! A *payload* is a body that a program under `shunt run` has written. Its bytes stay in the *store* of that program's
//! machine, and a *reference* goes through the connection in their place. A *share* is a part of the right to fetch a
//! payload; each reference has one. The *agent* is Shunt's daemon on each machine, and the store is a thread of it.
//!
//! * [`reference`]: place of a payload's bytes, and a share of the right to fetch them;
//! * [`frame`]: references, and bytes that are sent as they are (*real* bytes), in a connection;
//! * [`absent`]: memory of a process that stands for bytes of payloads;
//! * [`hold`]: a process's shares of payloads, and the return of these shares;
//! * [`touched`], [`learnt`], [`content`]: what receivers read of payloads, which bytes writers therefore send as real
//!   bytes, and how writers tell kinds of payloads apart;
//! * [`place`]: a range of memory or of a file that holds a reference's bytes;
//! * [`segment`], [`store`], [`fetch`]: memory for payloads, the store that serves them, and the fetching of payload
//!   bytes from it;
//! * [`times`], [`turns`]: mean durations of fetches, and roles of threads, one of which may wait for a silent peer;
//! * [`states`]: memory for the states of connections;
//! * [`sources`]: stores that each machine's programs can fetch from;
//! * [`link`]: a program's connection with its machine's agent. By it, the program has other machines send payloads to
//!   its clients;
//! * [`channel`], [`records`]: connections between readers and stores, encrypted between machines.
//!
//! This crate interposes no calls of programs; crates/process applies it to a program's memory and sockets.
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
