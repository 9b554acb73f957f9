//! The board's memory, which servers map and read without a system call (`struct shunt_board`). The logic
//! (crates/logic) decides on the board's contents. The board says which peers (other machines' agents) there are, their
//! keys, and limits that are reached.

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, Mode, SealFlags};
use shunt_logic::board::{Board, Change};
use shunt_wire::local::{BOARD_BYTES, BoardHead, BoardPeer, Counters};
use zerocopy::{FromZeros, IntoBytes};

/// The agent's side of the board's memory.
#[derive(Debug)]
pub(crate) struct BoardMemory {
    memory: File,
    /// Read-only descriptor of the same memory. Servers get this one, so that they cannot write.
    read_only: File,
    beat: u32,
}

impl BoardMemory {
    /// Makes the memory, and fills it with the contents of `board`.
    ///
    /// # Errors
    /// Returns the kernel's error of memfd_create(2), or of one of the calls that set the memory up.
    pub(crate) fn new(board: &Board) -> io::Result<Self> {
        let memory = shared_memory("shunt-board", BOARD_BYTES as u64)?;
        rustix::fs::fchmod(&memory, Mode::from_raw_mode(0o444))?;
        let read_only = File::open(format!("/proc/self/fd/{}", memory.as_raw_fd()))?;
        memory.write_all_at(board.head().as_bytes(), 0)?;
        for (peer, entry) in board.peers().iter().enumerate() {
            memory.write_all_at(entry.as_bytes(), offset(peer))?;
        }
        Ok(Self { memory, read_only, beat: 0 })
    }

    /// Returns the read-only descriptor of the board, which servers get.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.read_only.as_fd()
    }

    /// Increments the beat, by which servers see that the agent is at work. While the beat does not change, servers
    /// relay bodies instead of handing off.
    ///
    /// # Errors
    /// Returns the kernel's error of pwrite(2).
    pub(crate) fn beat(&mut self) -> io::Result<()> {
        self.beat = self.beat.wrapping_add(1);
        self.memory.write_all_at(&self.beat.to_ne_bytes(), offset_of!(BoardHead, beat) as u64)
    }

    /// Copies a changed part of the board into the memory.
    ///
    /// # Errors
    /// Returns the kernel's error of pwrite(2).
    pub(crate) fn write(&self, board: &Board, change: Change) -> io::Result<()> {
        let word = |value: u32, at: u64| self.memory.write_all_at(&value.to_ne_bytes(), at);
        match change {
            Change::Peer(peer) => self.write_peer(peer, &board.peers()[peer]),
            Change::PeerClosed(peer) => {
                word(board.peers()[peer].closed, offset(peer) + offset_of!(BoardPeer, closed) as u64)
            }
            Change::Peers => word(board.head().peers, offset_of!(BoardHead, peers) as u64),
            Change::Closed => word(board.head().closed, offset_of!(BoardHead, closed) as u64),
            Change::Families => {
                for (peer, entry) in board.peers().iter().enumerate() {
                    word(entry.families, offset(peer) + offset_of!(BoardPeer, families) as u64)?;
                }
                word(board.head().families, offset_of!(BoardHead, families) as u64)
            }
        }
    }

    /// Writes a peer's entry under a sequence lock (include/shunt.h): the epoch is odd while the entry changes.
    fn write_peer(&self, peer: usize, entry: &BoardPeer) -> io::Result<()> {
        let epoch = |epoch: u32| self.memory.write_all_at(&epoch.to_ne_bytes(), offset(peer));
        epoch(entry.epoch.wrapping_sub(1))?;
        let body = size_of::<u32>();
        self.memory.write_all_at(&entry.as_bytes()[body..], offset(peer) + body as u64)?;
        epoch(entry.epoch)
    }
}

fn offset(peer: usize) -> u64 {
    (size_of::<BoardHead>() + peer * size_of::<BoardPeer>()) as u64
}

impl Drop for BoardMemory {
    /// Marks the agent as ended, so that servers that still map the board see that nobody takes offers any more.
    fn drop(&mut self) {
        let _ = self.memory.write_all_at(&0u32.to_ne_bytes(), offset_of!(BoardHead, alive) as u64);
    }
}

/// Memory of one server's counters, which the server writes and the agent reads (`struct shunt_counters`).
#[derive(Debug)]
pub(crate) struct WorkerCounters(File);

impl WorkerCounters {
    /// Makes the memory, with all counters zero.
    ///
    /// # Errors
    /// Returns the kernel's error of memfd_create(2), or of one of the calls that set the memory up.
    pub(crate) fn new() -> io::Result<Self> {
        shared_memory("shunt-counters", size_of::<Counters>() as u64).map(Self)
    }

    /// Returns the descriptor of the memory for the server.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Returns the counters' present values.
    pub(crate) fn read(&self) -> Counters {
        let mut counters = Counters::new_zeroed();
        // The size is sealed, so the read cannot be short.
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
    use shunt_logic::board::Role;

    fn board() -> Board {
        let role = Role { name: "fe", is_frontend: true, is_backend: false, offer_lifetime_ms: 30_000, netns: 0 };
        Board::new(&role, &["is", "be"])
    }

    /// Returns the bytes of the board's head, and the bytes behind it: the peers' entries.
    fn parts(memory: &BoardMemory) -> (Vec<u8>, Vec<u8>) {
        let mut head = vec![0; BOARD_BYTES];
        memory.memory.read_exact_at(&mut head, 0).unwrap();
        let peers = head.split_off(size_of::<BoardHead>());
        (head, peers)
    }

    #[test]
    fn each_change_reaches_the_memory() {
        let mut board = board();
        let memory = BoardMemory::new(&board).unwrap();
        let is_same = |board: &Board| {
            let (head, peers) = parts(&memory);
            let entries: Vec<u8> = board.peers().iter().flat_map(|entry| entry.as_bytes().to_vec()).collect();
            head == board.head().as_bytes() && peers.starts_with(&entries)
        };
        assert!(is_same(&board));
        let changes: [fn(&mut Board) -> Option<Change>; 6] = [
            |board| Some(board.up(1, [1; 16], [2; 16])),
            |board| Some(board.lost(1)),
            |board| Some(board.down(1)),
            |board| board.close(None, 2),
            |board| board.close(Some(1), 1),
            |board| board.set_families(|peer| peer as u32),
        ];
        for change in changes {
            let change = change(&mut board).unwrap();
            assert!(!is_same(&board), "{change:?}");
            memory.write(&board, change).unwrap();
            assert!(is_same(&board), "{change:?}");
        }
    }

    #[test]
    fn a_server_cannot_write_it_and_sees_the_agents_end() {
        let mut memory = BoardMemory::new(&board()).unwrap();
        assert!(memory.read_only.write_all_at(b"x", 0).is_err());
        memory.beat().unwrap();
        let servers = File::from(memory.descriptor().try_clone_to_owned().unwrap());
        let word = |at: usize| {
            let mut word = [0; 4];
            servers.read_exact_at(&mut word, at as u64).unwrap();
            u32::from_ne_bytes(word)
        };
        assert_eq!((word(offset_of!(BoardHead, alive)), word(offset_of!(BoardHead, beat))), (1, 1));
        drop(memory);
        assert_eq!(word(offset_of!(BoardHead, alive)), 0);
    }

    #[test]
    fn counters_keep_their_size() {
        let counters = WorkerCounters::new().unwrap();
        assert!(counters.0.set_len(8).is_err());
        counters.0.write_all_at(&7u64.to_ne_bytes(), 16).unwrap();
        assert_eq!(counters.read().value[2], 7);
    }
}
