//! Kernel interfaces that no library wraps as Shunt needs them, all in one crate.

pub mod cgroup;
pub mod erase;
pub mod lock;
pub mod locked;
pub mod mapped;
pub mod netns;
pub mod odb;
pub mod output;
pub mod own;
pub mod packet;
pub mod repair;
pub mod ringbuf;
pub mod shared;
pub mod sockopt;
pub mod tap;
pub mod userfaultfd;
