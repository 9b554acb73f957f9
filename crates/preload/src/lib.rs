//! The library of `shunt run`. It replaces functions of glibc and OpenSSL by ones that know on-demand buffers
//! (crates/process): bodies that stay where they were made until a program touches them.
//!
//! * [`hooks`]: the symbols that replace glibc's and OpenSSL's. Most only call functions of crates/process, or the
//!   function that they replace;
//! * [`load`]: sets up the process's state when the library is loaded;
//! * [`allocator`]: the library's own heap; [`forking`]: steps before and after a fork, during which that heap's lock
//!   is held.

mod allocator;
mod forking;
mod hooks;
mod load;

#[global_allocator]
static ALLOCATOR: allocator::Allocator = allocator::Allocator::new();
