//! Forks with the library's allocator held. Its lock is taken last, because everything else here allocates, and
//! released first.

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
