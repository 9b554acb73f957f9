//! A fork with the library's allocator held: the last thing before it, because all others allocate, and the first to be given up
//! after it.

use shunt_process::forks;

use crate::allocator;

pub extern "C" fn before() {
    forks::before();
    allocator::before_fork();
}

pub extern "C" fn after_in_parent() {
    allocator::after_fork();
    forks::after_in_parent();
}

pub extern "C" fn after_in_child() {
    allocator::after_fork();
    forks::after_in_child();
}
