//! Known failures in the table of mistakes. Each row of that table is a mistake of an operator with its expected
//! outcome. The rows here are known to have another outcome.

/// A row that fails, with the outcome that it has.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    pub name: &'static str,
    /// Outcome that is seen instead of the expected one.
    pub seen: &'static str,
    /// Whether the row fails each time. A row that fails only at times is allowed to pass.
    pub always: bool,
}

/// Rows that fail. A row that is listed as failing each time, and passes, must be removed from this list: a test says
/// so.
pub const KNOWN: &[Known] = &[];
