//! How much a backend has taken on.

use std::ops::{AddAssign, SubAssign};

/// Payloads that wait for their claim or are being sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// How many.
    pub payloads: u64,
    /// Their lengths in bytes.
    pub bytes: u64,
    /// How many of them have a socket.
    pub senders: u64,
}

impl Load {
    /// One payload that nobody has claimed.
    pub fn waiting(bytes: u64) -> Self {
        Self { payloads: 1, bytes, senders: 0 }
    }

    /// One payload that is being sent.
    pub fn sending(bytes: u64) -> Self {
        Self { payloads: 1, bytes, senders: 1 }
    }
}

impl AddAssign for Load {
    fn add_assign(&mut self, other: Self) {
        self.payloads += other.payloads;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.senders += other.senders;
    }
}

/// Of what was added before.
impl SubAssign for Load {
    fn sub_assign(&mut self, other: Self) {
        self.payloads -= other.payloads;
        self.bytes = self.bytes.saturating_sub(other.bytes);
        self.senders -= other.senders;
    }
}
