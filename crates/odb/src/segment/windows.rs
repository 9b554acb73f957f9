//! How much of a segment one connection may have out: so much that it has come back before its lease ends.
//!
//! References take no room in a socket, so that a socket stands for as much as a segment holds, for a client that may take
//! hours. What a connection may not leave here now, it carries for real, and that is as slow as the client. A connection that begins is
//! given what others have had of late, a quarter of the segment at most; what comes back soon lets it have more, and what comes back
//! late, less. A quarter of the segment is for one payload of each connection, and another for those whose payloads come back
//! soon, while none of any is late: so nothing has to end ([`crate::store::Store::expire`]).

use std::collections::HashMap;

use super::SLOTS;

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
    /// What came back last came back soon.
    is_quick: bool,
}

/// By connection, as the program numbers them.
#[derive(Debug)]
pub(super) struct Windows {
    lease_ms: u64,
    /// Of a connection that begins.
    first: u64,
    /// Of any, and of all together but for quick ones: half of the segment.
    most: u64,
    /// Of all together.
    out: u64,
    windows: HashMap<u64, Window>,
}

/// What a payload counts for in a segment with so much room: a slot is scarce, too.
pub(super) fn charge(room: u64, bytes: u64) -> u64 {
    bytes.max(room / SLOTS as u64)
}

impl Windows {
    /// For a segment of so many bytes of data.
    pub(super) fn new(room: u64, lease_ms: u64) -> Self {
        let most = (room / 2).max(LEAST);
        Self { lease_ms, first: (most / 2).max(LEAST), most, out: 0, windows: HashMap::new() }
    }

    fn window(&self, connection: u64) -> Window {
        let new = Window { out: 0, most: self.first, is_quick: false };
        self.windows.get(&connection).copied().unwrap_or(new)
    }

    /// Whether a connection may leave `bytes` more, where the oldest of all has been out for `age_ms`. One payload it may have
    /// also where others have half of the segment, to show that it is quick.
    pub(super) fn has_room(&self, connection: u64, bytes: u64, age_ms: impl FnOnce() -> u64) -> bool {
        let Window { out, most, is_quick } = self.window(connection);
        let fits = |out: u64, most: u64| out.saturating_add(bytes) <= most;
        let shows = out == 0 && (self.out == 0 || fits(self.out, self.most / 2 * 3));
        let goes_on = || is_quick && age_ms() <= self.lease_ms / LATE;
        shows || fits(out, most) && (fits(self.out, self.most) || goes_on())
    }

    /// It has left some.
    pub(super) fn leaves(&mut self, connection: u64, bytes: u64) {
        let window = self.window(connection);
        self.windows.insert(connection, Window { out: window.out + bytes, ..window });
        self.out += bytes;
    }

    /// They have come back, `age_ms` later, if that is known.
    pub(super) fn returns(&mut self, connection: u64, bytes: u64, age_ms: Option<u64>) {
        let is_late = age_ms.is_some_and(|age_ms| age_ms > self.lease_ms / LATE);
        let is_soon = age_ms.is_some_and(|age_ms| age_ms < self.lease_ms / SOON);
        let top = self.most;
        let settle = |most: u64, part: u64| match () {
            () if is_late => (most - most / part).max(LEAST),
            () if is_soon => most.saturating_add(bytes).min(top),
            () => most,
        };
        let Window { out, most, is_quick } = self.window(connection);
        let out = out.saturating_sub(bytes);
        let is_quick = is_soon || is_quick && !is_late;
        self.out = self.out.saturating_sub(bytes);
        // Of one slow client not all others think so.
        self.first = settle(self.first, 16);
        self.windows.insert(connection, Window { out, most: settle(most, 2), is_quick });
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

    /// What clients of some rates, in bytes a second, have out for how long, of 256 MiB that a program has for each at once.
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
            self.clients.push((rate, 256 * MIB, VecDeque::new()));
            self.fill(self.clients.len() - 1);
        }

        fn fill(&mut self, at: usize) {
            while self.clients[at].1 > 0 && self.windows.has_room(at as u64, Self::PIECE, || self.oldest()) {
                self.windows.leaves(at as u64, Self::PIECE);
                self.clients[at].1 -= Self::PIECE;
                self.clients[at].2.push_back(self.now_ms);
            }
            // What has no room goes for real, as much as a socket takes.
            self.clients[at].1 = self.clients[at].1.saturating_sub(4 * Self::PIECE);
        }

        /// For so long: the greatest age of what was out while seven eighths of the segment were.
        fn pass(&mut self, seconds: u64) -> u64 {
            let mut oldest = 0;
            for _ in 0..seconds {
                self.now_ms += 1000;
                for at in 0..self.clients.len() {
                    for _ in 0..self.clients[at].0 / Self::PIECE {
                        let Some(born_ms) = self.clients[at].2.pop_front() else { break };
                        self.windows.returns(at as u64, Self::PIECE, Some(self.now_ms - born_ms));
                    }
                    self.fill(at);
                }
                if self.out() > self.windows.most / 4 * 7 {
                    oldest = oldest.max(self.oldest());
                }
            }
            oldest
        }
    }

    #[test]
    fn slow_clients_leave_half_of_the_segment_free() {
        for apart in [1, 10, 20] {
            let mut clients = Clients::new(32 * MIB);
            let mut oldest = 0;
            for _ in 0..20 {
                clients.begin(64 << 10);
                oldest = oldest.max(clients.pass(apart));
            }
            oldest = oldest.max(clients.pass(3000));
            assert!(oldest < LEASE_MS, "{oldest} ms, {apart} s apart");
            assert_eq!(clients.out(), 0);
        }
    }

    #[test]
    fn quick_clients_have_all_of_the_segment() {
        let mut clients = Clients::new(32 * MIB);
        clients.begin(16 * MIB);
        clients.begin(16 * MIB);
        clients.begin(16 * MIB);
        assert_eq!(clients.out(), (16 << 20) + Clients::PIECE, "nobody knows yet how they are");
        assert!(clients.pass(3) <= 1000);
        assert!(clients.out() > 24 * MIB, "{}", clients.out());
    }

    #[test]
    fn one_payload_has_room_whatever_its_length() {
        let mut windows = Windows::new(0, LEASE_MS);
        assert!(windows.has_room(1, MIB, || 0));
        windows.leaves(1, MIB);
        assert!(!windows.has_room(1, 1 << 10, || 0));
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
