//! Rows of which it is known that they are not yet as they are to be.

/// A row that fails, and why.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    pub name: &'static str,
    /// What is seen in place of what is to be.
    pub seen: &'static str,
    /// Whether it fails each time; one that only may is no news when it passes.
    pub always: bool,
}

/// Rows that fail. One that passes is to be taken out: the test says so.
pub const KNOWN: &[Known] = &[];
