//! Scripted histories (simulated runs of a service). Each history shows that a fault which the agent once had is
//! mended. docs/internals/faults.md describes the faults. `make mutants` undoes each mend, and checks that its history
//! then fails.

use std::time::Duration;

mod handoffs;
mod offers;
mod sessions;

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
