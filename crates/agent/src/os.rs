//! The daemon as a process of this machine: epoll, privileges, system calls and threads, its lock, interfaces, and
//! addresses.

pub(crate) mod alone;
pub(crate) mod closing;
pub(crate) mod holder;
pub(crate) mod own_addresses;
pub(crate) mod poll;
pub(crate) mod ports;
pub mod privileges;
pub(crate) mod random;
pub mod seccomp;
pub(crate) mod sender_addresses;
pub(crate) mod threads;
pub(crate) mod views;
