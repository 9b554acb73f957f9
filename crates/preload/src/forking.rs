//! Steps before and after a fork. During the fork, the lock of the library's allocator is held. That lock is taken last
//! and released first, because the other steps at a fork allocate memory.

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
