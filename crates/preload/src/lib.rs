//! The library of `shunt run`. It replaces functions of glibc by ones that know on-demand buffers (crates/process).
//!
//! * [`hooks`]: the symbols that replace glibc's. Each only calls a function of crates/process, or glibc's own;
//! * [`load`]: sets up the process's state when the library is loaded;
//! * [`allocator`]: the library's own heap; [`forking`]: forks, with that heap's lock held.

mod allocator;
mod forking;
mod hooks;
mod load;

#[global_allocator]
static ALLOCATOR: allocator::Allocator = allocator::Allocator::new();
