//! The library of `shunt run`: calls of glibc, replaced by ones that know on-demand buffers (crates/process).
//!
//! * [`hooks`]: the symbols, and nothing but which function each means;
//! * [`load`]: what the process has of Shunt, found when the library is loaded;
//! * [`allocator`]: memory of the library's own; [`forking`]: a fork, with that held.

mod allocator;
mod forking;
mod hooks;
mod load;

#[global_allocator]
static ALLOCATOR: allocator::Allocator = allocator::Allocator::new();
