//! Presentation of results: tables, JSON, pictures, a page.

pub mod chart;
pub mod html;
mod machine;
pub mod progress;
pub mod statistics;
mod unit;

pub(crate) use machine::Machine;
pub use progress::Progress;
pub use shunt_report::{Align, Paint, Table, number, table};
pub use statistics::Sample;
pub use unit::Unit;
