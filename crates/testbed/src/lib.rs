//! Support for tests and labs (hosts as network namespaces) on a machine that others use, too. Everything that they
//! make has a name that says to which process it belongs. A watchdog removes it when that process ends. Functions here
//! wait for conditions, compare bodies, draw random numbers, and report tests that cannot run.
#![forbid(unsafe_code)]

mod bpffs;
mod bytes;
mod group;
mod id;
pub mod machine;
mod proc;
pub mod random;
mod skip;
mod wait;
mod watchdog;

pub use bpffs::mount_bpffs;
pub use bytes::{Difference, assert_same_bytes, same_bytes};
pub use group::Group;
pub use id::LabId;
pub use proc::is_asleep;
pub use skip::{needs_root, skipped};
pub use wait::{Check, PATIENCE, until_group_stopped, until_stopped, wait_at_most, wait_for, wait_or_fail};
pub use watchdog::{Watchdog, labs, of_process, remove_leftovers, sweep};
