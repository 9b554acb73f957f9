//! The table of silence: each part of the service stops, is cut off without a word, or gets slow, and somebody else's
//! responses go on.
//!
//! A row holds a client in mid-payload on the way that goes silent, has another client ask there afterwards, and watches
//! bystanders, who have another connection and another file: how long each of them waits for its next byte at worst.
//! docs/silence.md is the operator's page.

mod bystander;
mod command;
mod part;
mod row;
mod stores;
mod table;

pub use command::{Silence, run_rows};
pub use part::{Manner, Part};
pub use row::Outcome;
pub use table::{BYSTANDER_BOUND, page};
