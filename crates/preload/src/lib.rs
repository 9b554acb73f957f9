//! The library of `shunt run`: calls of glibc, replaced by ones that know on-demand buffers (ARCHITECTURE.md).
//!
//! * [`hooks`]: the symbols, and nothing but which of the functions below each means;
//! * [`descriptors`], [`connections`]: which descriptor is which connection, and the state of a connection, which processes share;
//! * [`bypass`]: absent memory that goes to clients from where it is; [`outside`]: what a write to anywhere else does with
//!   it;
//! * [`send`], [`receive`], [`peek`], [`available`], [`pipe`]: what a write, a read, a look (MSG_PEEK), FIONREAD and a
//!   splice of a connection do; [`ahead`]: what is in its socket; [`kernel`]: by which calls;
//! * [`memory`], [`blocks`], [`faults`]: absent memory, large blocks of malloc, the threads that serve faults;
//! * [`learning`]: what of a write is not left in the store, because it would be looked at;
//! * [`counts`]: what it counts for `shunt stats`;
//! * [`tls`]: absent memory that goes to clients over TLS;
//! * [`users`]: what a process lets go of that becomes another user's;
//! * [`store`]: where this process leaves what it writes;
//! * [`inside`]: whether a thread is in the library, and its locks;
//! * [`allocator`]: memory of the library's own.
//!
//! Rules that keep a program from hanging: no lock is held while program memory is touched or bytes are fetched, except
//! a connection's own; and nothing here is allocated from glibc, whose locks a faulting thread may hold. So whoever serves a fault
//! starts no thread.

mod ahead;
mod allocator;
mod available;
mod blocks;
mod bypass;
mod connections;
mod counts;
mod descriptors;
mod faults;
mod hooks;
mod inside;
mod kernel;
mod learning;
mod memory;
mod outside;
mod parts;
mod peek;
mod pipe;
mod process;
mod receive;
mod runtime;
mod scarce;
mod send;
mod stack;
mod store;
mod tls;
mod users;
mod waiting;

#[global_allocator]
static ALLOCATOR: allocator::Allocator = allocator::Allocator::new();
