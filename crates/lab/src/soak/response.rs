//! A response of the load: its path through the service, and how it ended.

use std::time::Instant;

use crate::answer::Ending;

/// Path of a response through the service: its backend, and the tiers before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// The first backend, through the intermediate.
    First,
    /// The second backend, straight from the frontend.
    Second,
}

impl Way {
    pub(super) fn of(second: bool) -> Self {
        if second { Self::Second } else { Self::First }
    }

    /// Beginning of the URL paths that lead to this backend. [`crate::faults::Bed`] has the nginx locations for them.
    pub(super) fn prefix(self) -> &'static str {
        match self {
            Self::First => "/t/",
            Self::Second => "/other/",
        }
    }
}

/// Result of one response.
#[derive(Debug, Clone, Copy)]
pub(super) struct Response {
    pub(super) way: Way,
    pub(super) size: u64,
    pub(super) ending: Ending,
    /// Time of the request or, if no connection was made, of the attempt to connect.
    pub(super) asked: Instant,
    /// Time when the response's connection was opened.
    pub(super) opened: Instant,
    pub(super) body_bytes: u64,
    /// Previous response on the same connection: its path, and the time of its request. When the present request comes,
    /// the frontend may not know yet that the client has received all of the previous response.
    pub(super) before: Option<(Way, Instant)>,
}
