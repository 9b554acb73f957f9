//! On-demand buffers: a body is left where it is until a program reads it.
//!
//! A *payload* is a body that a program under `shunt run` has written. Its bytes stay in the *store* of that program's
//! machine, and a *reference* goes through the connection in their place. A *share* is a part of the right to fetch a
//! payload; each reference has one.
//!
//! * [`reference`]: place of a payload's bytes, and a share of the right to fetch them;
//! * [`frame`]: references, and bytes that are sent as they are (*real* bytes), in a connection;
//! * [`absent`]: memory of a process that stands for bytes of payloads;
//! * [`hold`]: shares of payloads that a process has, and their return;
//! * [`touched`], [`learnt`], [`content`]: what receivers read of payloads, which bytes writers therefore send as real
//!   bytes, and how they tell kinds of payloads apart;
//! * [`place`]: a range of memory or of a file that holds a reference's bytes;
//! * [`segment`], [`store`], [`fetch`]: memory for payloads, the store that serves them, and fetching from it;
//! * [`states`]: memory for the states of connections;
//! * [`sources`]: stores that each machine's programs can fetch from;
//! * [`link`]: a program's connection with its agent, by which other machines send payloads to the program's clients;
//! * [`channel`], [`records`]: connections between readers and stores, encrypted between machines.
//!
//! This crate touches neither a program's memory nor its sockets; crates/process does.
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
