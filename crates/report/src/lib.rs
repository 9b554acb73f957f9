//! Tables and numbers for people at a terminal. `shunt stats`, `shunt doctor` and the lab print with them.
#![forbid(unsafe_code)]

pub mod number;
pub mod table;

pub use table::{Align, Paint, Table};
