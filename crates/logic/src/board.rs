//! Contents of the board, which servers read without a system call (`struct shunt_board`). The board is memory of the
//! agent that servers map. The daemon copies each change into this memory. The board has a head, and one entry for each
//! peer (another machine's agent) with its keys, its limits and its *epoch*. The epoch is a number that grows with each
//! change of the peer's session, keys or prefixes. An *offer* is a payload that a backend's server holds ready for one
//! peer. A *fetch* brings its payload through both agents.

use shunt_wire::local::{BOARD_MAGIC, BoardHead, BoardPeer, VERSIONS};
use shunt_wire::peer::padded_name;
use shunt_wire::prefixes::Prefixes;
use zerocopy::FromZeros;

/// Part of the board that has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The entry of a peer, under a new epoch.
    Peer(usize),
    /// The field `closed` of a peer's entry.
    PeerClosed(usize),
    /// The field `closed` of the head.
    Closed,
    /// The fields `families` of the head and of all peers' entries.
    Families,
    /// The field `peers` of the head: an entry was added.
    Peers,
}

/// The board's head, and the entries of the peers. This type has no `Debug`, because the entries hold keys.
pub struct Board {
    head: BoardHead,
    peers: Vec<BoardPeer>,
}

/// Facts about an agent, which the board has from the start.
#[derive(Clone, Copy, Debug)]
pub struct Role<'a> {
    /// Name of this machine.
    pub name: &'a str,
    /// Clients connect to this machine.
    pub is_frontend: bool,
    /// This machine sends payloads.
    pub is_backend: bool,
    /// Offer lifetime, in milliseconds.
    pub offer_lifetime_ms: u32,
    /// Cookie of the agent's network namespace (SO_NETNS_COOKIE), or 0 if it is not known.
    pub netns: u64,
}

impl Board {
    /// Returns the board of an agent without a session.
    pub fn new(role: &Role<'_>, peers: &[&str]) -> Self {
        let head = BoardHead {
            magic: BOARD_MAGIC,
            oldest: VERSIONS.oldest,
            newest: VERSIONS.newest,
            peers_at: size_of::<BoardHead>() as u32,
            peer_bytes: size_of::<BoardPeer>() as u32,
            alive: 1,
            frontend: role.is_frontend.into(),
            backend: role.is_backend.into(),
            offer_lifetime_ms: role.offer_lifetime_ms,
            closed: 0,
            families: 0,
            beat: 0,
            peers: peers.len() as u32,
            netns: role.netns,
            name: padded_name(role.name),
        };
        let blank = |name: &&str| BoardPeer { name: padded_name(name), ..BoardPeer::new_zeroed() };
        Self { head, peers: peers.iter().map(blank).collect() }
    }

    /// Returns the head. The daemon writes the fields `alive` and `beat` in servers' memory by itself.
    pub fn head(&self) -> &BoardHead {
        &self.head
    }

    /// Returns the peers' entries.
    pub fn peers(&self) -> &[BoardPeer] {
        &self.peers
    }

    /// Adds a peer's entry. Returns two changes: the entry, which has to be written first, and the number of entries.
    pub fn add_peer(&mut self, name: &str) -> [Change; 2] {
        self.peers.push(BoardPeer { name: padded_name(name), ..BoardPeer::new_zeroed() });
        self.head.peers = self.peers.len() as u32;
        let change = self.change(self.peers.len() - 1, |_| ());
        [change, Change::Peers]
    }

    /// Returns the epoch of the session with a peer, or `None` if there is no session.
    pub fn epoch(&self, peer: usize) -> Option<u32> {
        self.peers.get(peer).filter(|entry| entry.state == BoardPeer::UP).map(|entry| entry.epoch)
    }

    /// Returns whether the board has keys of a peer, from a present session or a lost one.
    pub fn knows(&self, peer: usize) -> bool {
        self.peers.get(peer).is_some_and(|entry| entry.state != BoardPeer::DOWN)
    }

    /// Notes that a session with the peer begins.
    pub fn up(&mut self, peer: usize, our_key: [u8; 16], their_key: [u8; 16]) -> Change {
        self.change(peer, |entry| (entry.state, entry.our_key, entry.their_key) = (BoardPeer::UP, our_key, their_key))
    }

    /// Notes that the session with a peer has ended. The keys stay, because the peer's offers can still be fetched.
    pub fn lost(&mut self, peer: usize) -> Change {
        self.change(peer, |entry| entry.state = BoardPeer::LOST)
    }

    /// Notes that the peer is not trusted any more. Its keys are erased.
    pub fn down(&mut self, peer: usize) -> Change {
        self.change(peer, |entry| {
            (entry.state, entry.our_key, entry.their_key) = (BoardPeer::DOWN, [0; 16], [0; 16]);
        })
    }

    /// Notes the server addresses in whose name the peer sends payloads for this machine.
    pub fn set_prefixes(&mut self, peer: usize, prefixes: &Prefixes) -> Change {
        self.change(peer, |entry| (entry.prefixes, entry.prefix) = prefixes.list())
    }

    /// Edits a peer's entry under a new epoch. An epoch in this copy is even, and grows by two. In servers' memory, the
    /// epoch is odd while the entry is being written (include/shunt.h).
    fn change(&mut self, peer: usize, edit: impl FnOnce(&mut BoardPeer)) -> Change {
        let entry = &mut self.peers[peer];
        entry.epoch = entry.epoch.wrapping_add(2);
        edit(entry);
        Change::Peer(peer)
    }

    /// Sets the kinds of new work that servers must not begin (bits of [`closed`](shunt_wire::local::closed)), for one
    /// peer or for all. Returns `None` if nothing changes.
    pub fn close(&mut self, peer: Option<usize>, bits: u32) -> Option<Change> {
        let (word, change) = match peer {
            None => (&mut self.head.closed, Change::Closed),
            Some(peer) => (&mut self.peers[peer].closed, Change::PeerClosed(peer)),
        };
        (std::mem::replace(word, bits) != bits).then_some(change)
    }

    /// Notes for each peer the IP versions of the clients that the peer can send to (`SHUNT_FAMILY_*`). Returns `None`
    /// if nothing changes.
    pub fn set_families(&mut self, of: impl Fn(usize) -> u32) -> Option<Change> {
        let mut is_other = false;
        for (index, entry) in self.peers.iter_mut().enumerate() {
            let families = of(index);
            is_other |= std::mem::replace(&mut entry.families, families) != families;
        }
        self.head.families = self.peers.iter().fold(0, |all, entry| all | entry.families);
        is_other.then_some(Change::Families)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn board() -> Board {
        let role = Role { name: "fe", is_frontend: true, is_backend: false, offer_lifetime_ms: 30_000, netns: 0 };
        Board::new(&role, &["is", "be"])
    }

    #[test]
    fn epochs_are_even_and_grow_with_sessions() {
        let mut board = board();
        assert_eq!(board.epoch(0), None);
        assert_eq!(board.up(0, [1; 16], [2; 16]), Change::Peer(0));
        let first = board.epoch(0).unwrap();
        assert_eq!(first % 2, 0);
        board.lost(0);
        assert_eq!(board.epoch(0), None);
        board.up(0, [3; 16], [4; 16]);
        assert!(board.epoch(0).unwrap() > first);
        assert_eq!(board.peers()[0].our_key, [3; 16]);
    }

    #[test]
    fn keys_outlive_a_session_but_not_trust() {
        let mut board = board();
        assert!(!board.knows(0) && !board.knows(7));
        board.up(0, [1; 16], [2; 16]);
        board.lost(0);
        assert!(board.knows(0) && board.peers()[0].their_key == [2; 16]);
        board.down(0);
        assert!(!board.knows(0) && board.peers()[0].their_key == [0; 16]);
    }

    #[test]
    fn families_and_closing_are_told_once() {
        let mut board = board();
        let ipv6_of_second = |index| if index == 1 { BoardHead::IPV6 } else { 0 };
        assert_eq!(board.set_families(ipv6_of_second), Some(Change::Families));
        assert_eq!((board.head().families, board.set_families(ipv6_of_second)), (BoardHead::IPV6, None));
        board.up(0, [1; 16], [2; 16]);
        let epoch = board.epoch(0);
        assert_eq!(
            (board.close(None, 2), board.close(Some(0), 1)),
            (Some(Change::Closed), Some(Change::PeerClosed(0)))
        );
        assert_eq!((board.close(None, 2), board.close(Some(0), 1)), (None, None));
        assert_eq!(board.epoch(0), epoch, "handoffs that have begun go on");
    }
}
