//! The one home of raw kernel interfaces that no library wraps.

pub mod repair;
pub mod sockopt;
pub mod netns;
