//! How much of a segment one connection may have out: so much that it has come back before its lease ends.
//!
//! References take no room in a socket, so that a socket stands for as much as a segment holds, for a client that may take
//! hours. What a connection may not leave here now, it carries for real, and that is as slow as the client. A connection that begins is
//! given what others have had of late; what comes back soon lets it have more, and what comes back late, less. And while
//! something waits that is late, half of the segment stays free: then nothing has to end ([`crate::store::Store::expire`]).

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
    /// Of any, and of all together while something is late: half of the segment.
    most: u64,
    windows: HashMap<u32, Window>,
}

impl Windows {
    /// For a segment of so many bytes of data.
    pub(super) fn new(room: u64, lease_ms: u64) -> Self {
        let most = (room / 2).max(LEAST);
        Self { lease_ms, first: most, most, windows: HashMap::new() }
    }

    fn window(&self, connection: u32) -> Window {
        self.windows.get(&connection).copied().unwrap_or(Window { out: 0, most: self.first })
    }

    /// Whether a connection may leave `bytes` more, where `all` have so many out, the oldest for `age_ms`. One payload it may
    /// always have.
    pub(super) fn has_room(&self, connection: u32, bytes: u64, all: u64, age_ms: impl FnOnce() -> u64) -> bool {
        let Window { out, most } = self.window(connection);
        let fits = |out: u64, most: u64| out.saturating_add(bytes) <= most;
        out == 0 || fits(out, most) && (fits(all, self.most) || age_ms() <= self.lease_ms / LATE)
    }

    /// It has left some.
    pub(super) fn leaves(&mut self, connection: u32, bytes: u64) {
        let Window { out, most } = self.window(connection);
        self.windows.insert(connection, Window { out: out + bytes, most });
    }

    /// They have come back, `age_ms` later, if that is known.
    pub(super) fn returns(&mut self, connection: u32, bytes: u64, age_ms: Option<u64>) {
        let (lease_ms, top) = (self.lease_ms, self.most);
        let settle = |most: u64, part: u64| match age_ms {
            Some(late) if late > lease_ms / LATE => (most - most / part).max(LEAST),
            Some(soon) if soon < lease_ms / SOON => most.saturating_add(bytes).min(top),
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
    use std::collections::VecDeque;

    use super::*;

    const LEASE_MS: u64 = 120_000;
    const MIB: u64 = 1 << 20;

    /// What clients of some rates, in bytes a second, have out for how long, of 64 MiB that a program has for each at once.
    struct Clients {
        windows: Windows,
        now_ms: u64,
        /// Of each: its rate, what it is still to be sent, and when each 64 KiB that it has not taken were left.
        clients: Vec<(u64, u64, VecDeque<u64>)>,
    }

    impl Clients {
        const PIECE: u64 = 64 << 10;

        fn new(room: u64) -> Self {
            Self { windows: Windows::new(room, LEASE_MS), now_ms: 0, clients: Vec::new() }
        }

        fn out(&self) -> u64 {
            self.clients.iter().map(|(_, _, out)| out.len() as u64 * Self::PIECE).sum()
        }

        fn oldest(&self) -> u64 {
            let born = self.clients.iter().filter_map(|(_, _, out)| out.front()).min();
            self.now_ms - born.copied().unwrap_or(self.now_ms)
        }

        fn begin(&mut self, rate: u64) {
            self.clients.push((rate, 64 * MIB, VecDeque::new()));
            self.fill(self.clients.len() - 1);
        }

        fn fill(&mut self, at: usize) {
            while self.clients[at].1 > 0 && self.windows.has_room(at as u32, Self::PIECE, self.out(), || self.oldest())
            {
                self.windows.leaves(at as u32, Self::PIECE);
                self.clients[at].1 -= Self::PIECE;
                self.clients[at].2.push_back(self.now_ms);
            }
            // What has no room goes for real, as much as a socket takes.
            self.clients[at].1 = self.clients[at].1.saturating_sub(4 * Self::PIECE);
        }

        /// For so long: the greatest age of what was out while more than half of the segment was.
        fn pass(&mut self, seconds: u64) -> u64 {
            let mut oldest = 0;
            for _ in 0..seconds {
                self.now_ms += 1000;
                for at in 0..self.clients.len() {
                    for _ in 0..self.clients[at].0 / Self::PIECE {
                        let Some(born_ms) = self.clients[at].2.pop_front() else { break };
                        self.windows.returns(at as u32, Self::PIECE, Some(self.now_ms - born_ms));
                    }
                    self.fill(at);
                }
                if self.out() > self.windows.most {
                    oldest = oldest.max(self.oldest());
                }
            }
            oldest
        }
    }

    #[test]
    fn slow_clients_that_come_one_after_the_other_leave_half_of_the_segment_free() {
        let mut clients = Clients::new(32 * MIB);
        let mut oldest = 0;
        for _ in 0..20 {
            clients.begin(64 << 10);
            oldest = oldest.max(clients.pass(20));
        }
        oldest = oldest.max(clients.pass(2000));
        assert!(oldest < LEASE_MS, "{oldest} ms");
        assert_eq!(clients.out(), 0);
    }

    #[test]
    fn fast_clients_have_all_of_the_segment() {
        let mut clients = Clients::new(32 * MIB);
        clients.begin(100 * MIB);
        clients.begin(100 * MIB);
        assert_eq!(clients.out(), 32 * MIB);
        assert!(clients.pass(10) <= 1000);
        clients.begin(MIB);
        assert_eq!(clients.out(), 16 * MIB, "others have taught that clients are fast");
    }

    #[test]
    fn one_payload_has_room_whatever_its_length() {
        let mut windows = Windows::new(0, LEASE_MS);
        assert!(windows.has_room(1, MIB, 0, || 0));
        windows.leaves(1, MIB);
        assert!(!windows.has_room(1, 1 << 10, MIB, || 0));
    }

    #[test]
    fn connections_without_anything_out_are_forgotten() {
        let mut windows = Windows::new(32 * MIB, LEASE_MS);
        for connection in 0..5000 {
            windows.leaves(connection, 1);
            windows.returns(connection, 1, Some(0));
        }
        assert_eq!(windows.windows.len(), REMEMBERED);
    }
}
