//! On-demand buffers in a program's process (ARCHITECTURE.md): all of the library of `shunt run` but its symbols, so that tests
//! run it in processes that nothing was loaded into.
//!
//! In layers: each knows of those above it in this list, and of none below.
//!
//! * [`system`]: system calls that no symbol stands between, glibc's own functions, locks, threads;
//! * [`memory`]: absent memory, large blocks of malloc, the threads that serve faults; and writes of it to anywhere;
//! * [`store`]: where this process leaves what it writes;
//! * [`connections`]: which descriptor is which connection, the state of each, and what a read and a write do with it;
//! * [`bypass`], [`tls`]: absent memory that goes to clients from where it is;
//! * [`descriptors`], [`forks`]: what becomes of all that when descriptors and processes come and go.
//!
//! Above them are the symbols (crates/preload). What a lower layer has to tell an upper one it returns, or it was given a function
//! for it ([`memory::Calls`]). tests/layers.rs holds the list against the code.
//!
//! Rules that keep a program from hanging: no lock is held while program memory is touched or bytes are fetched, except
//! a connection's own; and nothing here is allocated from glibc, whose locks a faulting thread may hold. So whoever serves a fault
//! starts no thread.

pub mod bypass;
pub mod connections;
pub mod descriptors;
pub mod forks;
pub mod memory;
pub mod store;
pub mod system;
pub mod tls;
