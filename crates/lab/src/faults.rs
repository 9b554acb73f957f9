//! The fault table: every fault at every step of a *handoff* (a backend sends a body on the frontend's connection with
//! the client). The table is data ([`table`]), and one engine ([`cell`]) runs its cells.
//!
//! A cell of the table is one fault at one step. The cell takes a response to the step and holds the response there.
//! Then the cell injects the fault, and compares each byte until the client's response ends. Meanwhile a bystander,
//! another client, downloads a body on a path that the fault does not break. Afterwards the cell repairs the service as
//! an operator would do it. The service must work as before, and hold no more than before: sockets, entries of BPF
//! maps, bodies that backends hold ready (offers), descriptors, processes. docs/faults.md is the operator's page.

mod bed;
mod cell;
mod client;
mod command;
mod fault;
mod ledger;
mod processes;
mod scarcity;
mod step;
mod table;

pub use bed::{Bed, TIMEOUT, Way, build_lab};
pub(crate) use bed::{DISK, LONG_FILE, QUEUED_FILE, files, settings, ways};
pub use cell::{Outcome, run};
pub use client::Client;
pub use command::{Faults, run_cells};
pub use fault::Fault;
pub use ledger::Ledger;
pub use processes::ProcessUse;
pub use step::Step;
pub use table::{End, Expected, expected};
