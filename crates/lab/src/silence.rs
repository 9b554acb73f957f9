//! The table of silence: each part of the service stops, is cut off without notice, or gets slow. Meanwhile responses
//! for other clients must continue.
//!
//! In a row, one client has read a part of its body when the path to that body goes silent. Another client sends its
//! request on this path during the silence. *Bystanders* are clients with other connections and other paths. The row
//! notes each bystander's longest wait for its next byte. docs/silence.md is the operator's page.

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
