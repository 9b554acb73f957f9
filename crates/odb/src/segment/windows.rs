//! How much of a segment one connection may have out: so much that it has come back before its lease ends.
//!
//! References take no room in a socket, so that a socket stands for as much as a segment holds, for a client that may take
//! hours. What a connection may not leave here now, it carries for real, and that is as slow as the client. A connection that begins is
//! given what others have had of late; what comes back soon lets it have more, and what comes back late, less.

use std::collections::HashMap;

/// Of a lease, the part after which a payload comes back late, and the one before which it comes back soon.
const LATE: u64 = 8;
const SOON: u64 = 40;
/// Bytes that are no risk: a client that takes them a lease long has stopped, by most servers' limits.
const LEAST: u64 = 64 << 10;
/// Connections that are remembered though they have nothing out.
const REMEMBERED: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct Window {
    out: u64,
    most: u64,
}

/// By connection, as the program numbers them.
#[derive(Debug)]
pub(super) struct Windows {
    lease_ms: u64,
    /// Of a connection that begins.
    first: u64,
    /// Of any: no connection has all of a segment.
    most: u64,
    windows: HashMap<u32, Window>,
}

impl Windows {
    /// For a segment of so many bytes of data.
    pub(super) fn new(room: u64, lease_ms: u64) -> Self {
        let most = (room / 4).max(LEAST);
        Self { lease_ms, first: most / 2, most, windows: HashMap::new() }
    }

    fn window(&self, connection: u32) -> Window {
        self.windows.get(&connection).copied().unwrap_or(Window { out: 0, most: self.first })
    }

    /// Whether a connection may leave `bytes` more. One payload it may always have.
    pub(super) fn has_room(&self, connection: u32, bytes: u64) -> bool {
        let Window { out, most } = self.window(connection);
        out == 0 || out.saturating_add(bytes) <= most
    }

    /// It has left some.
    pub(super) fn leaves(&mut self, connection: u32, bytes: u64) {
        let Window { out, most } = self.window(connection);
        self.windows.insert(connection, Window { out: out + bytes, most });
    }

    /// They have come back, `age_ms` later.
    pub(super) fn returns(&mut self, connection: u32, bytes: u64, age_ms: u64) {
        let (lease_ms, top) = (self.lease_ms, self.most);
        let settle = |most: u64, part: u64| match age_ms {
            late if late > lease_ms / LATE => (most - most / part).max(LEAST),
            soon if soon < lease_ms / SOON => most.saturating_add(bytes).min(top),
            _ => most,
        };
        let Window { out, most } = self.window(connection);
        let out = out.saturating_sub(bytes);
        // Of one slow client not all others think so.
        self.first = settle(self.first, 16);
        self.windows.insert(connection, Window { out, most: settle(most, 2) });
        if out == 0 && self.windows.len() > REMEMBERED {
            self.windows.remove(&connection);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE_MS: u64 = 120_000;
    const MIB: u64 = 1 << 20;

    /// A client that takes `rate` bytes a second of what a program has at once: the age of what it takes last.
    fn oldest(windows: &mut Windows, connection: u32, rate: u64) -> u64 {
        let (mut left, mut now_ms, mut oldest) = (64 * MIB, 0, 0);
        let mut out = std::collections::VecDeque::new();
        while left > 0 || !out.is_empty() {
            while left > 0 && windows.has_room(connection, 64 << 10) {
                windows.leaves(connection, 64 << 10);
                out.push_back(now_ms);
                left -= 64 << 10;
            }
            // What had no room goes for real.
            left = left.saturating_sub(256 << 10);
            let Some(born_ms) = out.pop_front() else { continue };
            now_ms += (64 << 10) * 1000 / rate;
            windows.returns(connection, 64 << 10, now_ms - born_ms);
            oldest = oldest.max(now_ms - born_ms);
        }
        oldest
    }

    #[test]
    fn what_a_slow_client_takes_comes_back_within_a_lease() {
        let mut windows = Windows::new(32 * MIB, LEASE_MS);
        assert!(oldest(&mut windows, 1, 64 << 10) < LEASE_MS);
        // The next ones begin with what that one has taught.
        for connection in 2..8 {
            assert!(oldest(&mut windows, connection, 4 << 10) < LEASE_MS, "connection {connection}");
        }
    }

    #[test]
    fn a_fast_client_has_a_quarter_of_the_segment() {
        let mut windows = Windows::new(32 * MIB, LEASE_MS);
        oldest(&mut windows, 1, 100 * MIB);
        assert!(windows.has_room(1, 8 * MIB) && windows.has_room(2, 8 * MIB));
        windows.leaves(1, MIB);
        assert!(!windows.has_room(1, 8 * MIB) && windows.has_room(2, 8 * MIB));
    }

    #[test]
    fn one_payload_has_room_whatever_its_length() {
        let mut windows = Windows::new(0, LEASE_MS);
        assert!(windows.has_room(1, MIB));
        windows.leaves(1, MIB);
        assert!(!windows.has_room(1, 1 << 10));
    }

    #[test]
    fn connections_without_anything_out_are_forgotten() {
        let mut windows = Windows::new(32 * MIB, LEASE_MS);
        for connection in 0..5000 {
            windows.leaves(connection, 1);
            windows.returns(connection, 1, 0);
        }
        assert_eq!(windows.windows.len(), REMEMBERED);
    }
}
