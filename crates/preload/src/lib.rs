//! The library of `shunt run`. It replaces functions of glibc and OpenSSL by ones that know on-demand buffers
//! (crates/process): bodies that stay where they were made until a program touches them.
//!
//! * [`hooks`]: the symbols that replace glibc's and OpenSSL's. Each only calls a function of crates/process, or the
//!   function that it replaces;
//! * [`load`]: sets up the process's state when the library is loaded;
//! * [`allocator`]: the library's own heap; [`forking`]: forks, with that heap's lock held.

mod allocator;
mod forking;
mod hooks;
mod load;

#[global_allocator]
static ALLOCATOR: allocator::Allocator = allocator::Allocator::new();
