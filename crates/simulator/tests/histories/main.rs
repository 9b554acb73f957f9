//! Named histories: each is of a fault that the agent had once. docs/internals/faults.md says which one, and `make
//! mutants` undoes each mend and sees its history fail.

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
