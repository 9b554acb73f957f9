//! The table of silence: each part of the service stops, is cut off without notice, or gets slow, while responses for
//! other clients continue.
//!
//! A row holds a client in mid-payload on the path that goes silent, and has another client ask there afterwards. It
//! also watches bystanders, who use another connection and another path, and notes each one's longest wait for its next
//! byte. docs/silence.md is the operator's page.

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
