//! Presentation of results: tables, JSON, pictures, a page.

pub mod chart;
pub mod html;
pub mod number;
pub mod progress;
pub mod statistics;
pub mod table;

pub use number::Unit;
pub use progress::Progress;
pub use statistics::Sample;
pub use table::{Align, Paint, Table};
