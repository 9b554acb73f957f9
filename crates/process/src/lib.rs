//! On-demand buffers in a program's process (ARCHITECTURE.md). This is the library of `shunt run` without its
//! interposed symbols, so that tests can run it in processes that nothing was preloaded into.
//!
//! *Absent* memory of a program only stands for bytes. Their *holder* has them: a store on this or another machine.
//!
//! The library has layers. They are listed here from the lowest up, and each uses only lower ones.
//!
//! * [`system`]: system calls that are not interposed, glibc's own functions, locks, threads;
//! * [`memory`]: absent memory, large blocks of malloc, the threads that serve faults, and writes of absent memory to
//!   files and clients;
//! * [`store`]: the segment where this process leaves the bytes that it writes;
//! * [`connections`]: which descriptor is which connection, the state of each, and what a read and a write do with it;
//! * [`bypass`], [`tls`]: handoffs, in which the holder of absent memory's bytes sends them to a client;
//! * [`descriptors`], [`forks`]: what becomes of this state when descriptors and processes come and go.
//!
//! The interposed symbols (crates/preload) are the highest layer. A lower layer tells a higher one something by a
//! return value, or calls a function that the higher layer has given it ([`memory::Calls`]). tests/layers.rs checks the
//! order against the code.
//!
//! Rules that keep a program from hanging:
//!
//! * No lock but a connection's own is held while program memory is touched or bytes are fetched.
//! * Nothing here is allocated from glibc's heap: a thread that waits for absent memory may hold the heap's locks. So a
//!   thread that serves faults starts no thread.

pub mod bypass;
pub mod connections;
pub mod descriptors;
pub mod forks;
pub mod memory;
pub mod store;
pub mod system;
pub mod tls;
