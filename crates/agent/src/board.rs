//! The board: who is there, in memory that servers map and read without a system call (`struct shunt_board`).

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, Mode, SealFlags};
use shunt_wire::local::{BOARD_BYTES, BOARD_MAGIC, BoardHead, BoardPeer, Counters, VERSIONS};
use shunt_wire::peer::padded_name;
use shunt_wire::prefixes::Prefixes;
use zerocopy::{FromZeros, IntoBytes};

use crate::host;

/// The agent's end of the board. No `Debug`: it holds keys.
pub struct Board {
    memory: File,
    /// The same memory, as servers get it: no descriptor of theirs can write.
    read_only: File,
    head: BoardHead,
    peers: Vec<BoardPeer>,
}

impl Board {
    /// A board with this machine's name on it, and no peer.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(name: &str, frontend: bool, backend: bool, offer_lifetime_ms: u32, peers: &[&str]) -> io::Result<Self> {
        let memory = shared_memory("shunt-board", BOARD_BYTES as u64)?;
        rustix::fs::fchmod(&memory, Mode::from_raw_mode(0o444))?;
        let read_only = File::open(format!("/proc/self/fd/{}", memory.as_raw_fd()))?;
        let head = BoardHead {
            magic: BOARD_MAGIC,
            oldest: VERSIONS.oldest,
            newest: VERSIONS.newest,
            peers_at: size_of::<BoardHead>() as u32,
            peer_bytes: size_of::<BoardPeer>() as u32,
            alive: 1,
            frontend: frontend.into(),
            backend: backend.into(),
            offer_lifetime_ms,
            closed: 0,
            families: 0,
            beat: 0,
            peers: peers.len() as u32,
            netns: host::netns_cookie().unwrap_or(0),
            name: padded_name(name),
        };
        let blank = |name: &&str| BoardPeer { name: padded_name(name), ..BoardPeer::new_zeroed() };
        let board = Self { memory, read_only, head, peers: peers.iter().map(blank).collect() };
        board.write_head()?;
        (0..board.peers.len()).try_for_each(|index| board.write_peer(index))?;
        Ok(board)
    }

    /// What a server gets.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.read_only.as_fd()
    }

    /// Which clients each peer can send to: bits of [`BoardHead`].
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_families(&mut self, of: impl Fn(usize) -> u32) -> io::Result<()> {
        for (index, peer) in self.peers.iter_mut().enumerate() {
            peer.families = of(index);
            let at = Self::offset(index) + offset_of!(BoardPeer, families) as u64;
            self.memory.write_all_at(&peer.families.to_ne_bytes(), at)?;
        }
        self.head.families = self.peers.iter().fold(0, |all, peer| all | peer.families);
        self.memory.write_all_at(&self.head.families.to_ne_bytes(), offset_of!(BoardHead, families) as u64)
    }

    /// Says that the agent is at work. Servers relay where this has stopped.
    ///
    /// # Errors
    /// The kernel's.
    pub fn beat(&mut self) -> io::Result<()> {
        self.head.beat = self.head.beat.wrapping_add(1);
        self.memory.write_all_at(&self.head.beat.to_ne_bytes(), offset_of!(BoardHead, beat) as u64)
    }

    /// As which servers the peer sends payloads for this machine.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_prefixes(&mut self, index: usize, prefixes: &Prefixes) -> io::Result<()> {
        self.change(index, |peer| (peer.prefixes, peer.prefix) = prefixes.list())
    }

    /// A session with the peer begins.
    ///
    /// # Errors
    /// The kernel's.
    pub fn up(&mut self, index: usize, our_key: [u8; 16], their_key: [u8; 16]) -> io::Result<()> {
        self.change(index, |peer| (peer.state, peer.our_key, peer.their_key) = (BoardPeer::UP, our_key, their_key))
    }

    /// It ends; what was offered in it can still be fetched, and its keys stay.
    ///
    /// # Errors
    /// The kernel's.
    pub fn lost(&mut self, index: usize) -> io::Result<()> {
        self.change(index, |peer| peer.state = BoardPeer::LOST)
    }

    /// The peer is not trusted any more: nothing that it offered is good, and its keys are gone.
    ///
    /// # Errors
    /// The kernel's.
    pub fn down(&mut self, index: usize) -> io::Result<()> {
        self.change(index, |peer| (peer.state, peer.our_key, peer.their_key) = (BoardPeer::DOWN, [0; 16], [0; 16]))
    }

    /// What is relayed from now on: bits of [`closed`](shunt_wire::local::closed), for one peer or for all. Whether
    /// that is news.
    ///
    /// # Errors
    /// The kernel's.
    pub fn close(&mut self, peer: Option<usize>, bits: u32) -> io::Result<bool> {
        let (word, at) = match peer {
            None => (&mut self.head.closed, offset_of!(BoardHead, closed) as u64),
            Some(index) => (&mut self.peers[index].closed, Self::offset(index) + offset_of!(BoardPeer, closed) as u64),
        };
        if *word == bits {
            return Ok(false);
        }
        *word = bits;
        self.memory.write_all_at(&bits.to_ne_bytes(), at)?;
        Ok(true)
    }

    /// Of the session with the peer; `None` where there is none.
    pub fn epoch(&self, index: usize) -> Option<u32> {
        self.peers.get(index).filter(|peer| peer.state == BoardPeer::UP).map(|peer| peer.epoch)
    }

    /// Whether there is or was a session with the peer, whose keys are good.
    pub fn knows(&self, index: usize) -> bool {
        self.peers.get(index).is_some_and(|peer| peer.state != BoardPeer::DOWN)
    }

    /// A sequence lock (include/shunt.h): odd while the entry changes.
    fn change(&mut self, index: usize, edit: impl FnOnce(&mut BoardPeer)) -> io::Result<()> {
        self.peers[index].epoch = self.peers[index].epoch.wrapping_add(1);
        self.write_epoch(index)?;
        edit(&mut self.peers[index]);
        let at = Self::offset(index) + size_of::<u32>() as u64;
        self.memory.write_all_at(&self.peers[index].as_bytes()[size_of::<u32>()..], at)?;
        self.peers[index].epoch = self.peers[index].epoch.wrapping_add(1);
        self.write_epoch(index)
    }

    fn offset(index: usize) -> u64 {
        (size_of::<BoardHead>() + index * size_of::<BoardPeer>()) as u64
    }

    fn write_epoch(&self, index: usize) -> io::Result<()> {
        self.memory.write_all_at(&self.peers[index].epoch.to_ne_bytes(), Self::offset(index))
    }

    fn write_peer(&self, index: usize) -> io::Result<()> {
        self.memory.write_all_at(self.peers[index].as_bytes(), Self::offset(index))
    }

    fn write_head(&self) -> io::Result<()> {
        self.memory.write_all_at(self.head.as_bytes(), 0)
    }
}

impl Drop for Board {
    /// Servers that still map it see that nobody takes offers any more.
    fn drop(&mut self) {
        self.head.alive = 0;
        let _ = self.write_head();
    }
}

/// One server's counters: it writes, the agent reads (`struct shunt_counters`).
#[derive(Debug)]
pub struct WorkerCounters(File);

impl WorkerCounters {
    /// All zero.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new() -> io::Result<Self> {
        shared_memory("shunt-counters", size_of::<Counters>() as u64).map(Self)
    }

    /// What the server gets.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// As they are now.
    pub fn read(&self) -> Counters {
        let mut counters = Counters::new_zeroed();
        // The size is sealed: a short read cannot be.
        let _ = self.0.read_exact_at(counters.as_mut_bytes(), 0);
        counters
    }
}

fn shared_memory(name: &str, bytes: u64) -> io::Result<File> {
    let memory = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    memory.set_len(bytes)?;
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Head and peers, as servers read them.
    fn parts(board: &Board) -> (Vec<u8>, Vec<u8>) {
        let mut head = vec![0; BOARD_BYTES];
        board.memory.read_exact_at(&mut head, 0).unwrap();
        let peers = head.split_off(size_of::<BoardHead>());
        (head, peers)
    }

    fn first_peer(board: &Board) -> Vec<u8> {
        parts(board).1[..size_of::<BoardPeer>()].to_vec()
    }

    #[test]
    fn epochs_are_even_at_rest_and_grow_with_sessions() {
        let mut board = Board::new("fe", true, false, 30_000, &["be"]).unwrap();
        assert_eq!(board.epoch(0), None);
        board.up(0, [1; 16], [2; 16]).unwrap();
        let first = board.epoch(0).unwrap();
        assert_eq!(first % 2, 0);
        board.lost(0).unwrap();
        assert_eq!(board.epoch(0), None);
        board.up(0, [3; 16], [4; 16]).unwrap();
        assert!(board.epoch(0).unwrap() > first);
        let peer = first_peer(&board);
        assert_eq!(&peer[16..18], b"be");
        assert_eq!(peer[80..96], [3; 16]);
    }

    #[test]
    fn keys_outlive_a_session_but_not_trust() {
        let mut board = Board::new("fe", true, false, 30_000, &["be"]).unwrap();
        assert!(!board.knows(0) && !board.knows(1));
        board.up(0, [1; 16], [2; 16]).unwrap();
        assert!(board.knows(0));
        let up = first_peer(&board);
        board.lost(0).unwrap();
        let lost = first_peer(&board);
        assert!(board.knows(0) && board.epoch(0).is_none());
        assert_eq!((up[4], lost[4], &lost[80..112]), (1, 2, &up[80..112]));
        board.down(0).unwrap();
        let down = first_peer(&board);
        assert!(!board.knows(0));
        assert_eq!((down[4], &down[80..112]), (0, &[0; 32][..]));
    }

    #[test]
    fn families_are_one_word() {
        let mut board = Board::new("fe", true, false, 30_000, &["is", "be"]).unwrap();
        board.set_families(|index| if index == 1 { BoardHead::IPV6 } else { 0 }).unwrap();
        let (head, peers) = parts(&board);
        assert_eq!(head, board.head.as_bytes());
        assert_eq!(head[28..32], 2u32.to_ne_bytes());
        let of = |index: usize| &peers[index * size_of::<BoardPeer>() + 12..][..4];
        assert_eq!((of(0), of(1)), (&0u32.to_ne_bytes()[..], &2u32.to_ne_bytes()[..]));
    }

    #[test]
    fn closing_is_one_word_and_told_once() {
        let mut board = Board::new("fe", true, false, 30_000, &["be"]).unwrap();
        board.up(0, [1; 16], [2; 16]).unwrap();
        let epoch = board.epoch(0);
        assert!(board.close(None, 2).unwrap() && board.close(Some(0), 1).unwrap());
        assert!(!board.close(None, 2).unwrap() && !board.close(Some(0), 1).unwrap());
        let (head, peers) = parts(&board);
        assert_eq!((head[24], peers[8]), (2, 1));
        assert_eq!(board.epoch(0), epoch, "what was begun before goes on");
        board.down(0).unwrap();
        board.up(0, [1; 16], [2; 16]).unwrap();
        assert!(!board.close(Some(0), 1).unwrap(), "a new session changes nothing");
    }

    #[test]
    fn a_server_cannot_write_it() {
        let board = Board::new("fe", true, false, 30_000, &[]).unwrap();
        assert!(board.read_only.write_all_at(b"x", 0).is_err());
    }

    #[test]
    fn counters_keep_their_size() {
        let counters = WorkerCounters::new().unwrap();
        assert!(counters.0.set_len(8).is_err());
        counters.0.write_all_at(&7u64.to_ne_bytes(), 16).unwrap();
        assert_eq!(counters.read().value[2], 7);
    }
}
