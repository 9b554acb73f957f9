//! States of connections between programs under Shunt (started by `shunt run`). A direction of such a connection is
//! *framed*: it carries frames of real bytes and of references (shunt_odb::frame).
//!
//! The states are in memory that processes of one user share with those that they start. A state is found by the
//! socket's cookie (SO_COOKIE), so dup, fork, exec and passed descriptors lead to the same state.
//!
//! A state lives as long as its socket, whose end the kernel reports (SHUNT_ENDED). A count of descriptors would be
//! wrong: some descriptors are on their way between processes, in programs that are about to start, or in killed
//! processes.
//!
//! Processes of another user have other memory ([`crate::connections::users`]). The socket itself carries a state to
//! them (SHUNT_CARRY). The process that passes a descriptor leaves the state with the socket, and the process that uses
//! the connection next takes it from there. If processes of two users use a connection in turn without passing it, the
//! second finds no state and gets ECONNRESET.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::futex;
use shunt_odb::frame::{End, Receiving, Sending};
use shunt_odb::learnt::TABLE_BYTES;
use shunt_odb::states::STATE_BYTES;
use shunt_sys::odb;
use shunt_sys::own::OwnFd;
use shunt_sys::shared::SharedMemory;
use shunt_wire::options::CARRIED_BYTES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::system::inside::{Held, Lock};
use crate::system::kernel::borrow;
use crate::system::process;
use crate::system::ranks::{Rank, Taken};

/// Offsets of the fields of a state, in bytes. This one is the socket's cookie.
const COOKIE: usize = 0;
const RECEIVE_LOCK: usize = 8;
const SEND_LOCK: usize = 12;
/// Field: whether the bytes that this end sends are framed ([`UNDECIDED`], [`ALWAYS`] or [`NEVER`]).
const FRAMES: usize = 16;
/// Field: error that the socket has reported and the program has not been told of; 0 if there is none.
const ERROR: usize = 20;
/// Field: where the state is ([`HERE`], [`AWAY`] or [`CAME`]).
const WHERE: usize = 24;
const RECEIVING: usize = 32;
const SENDING: usize = RECEIVING + size_of::<Receiving>();
/// Field: whether the program has seen bytes that it has not taken (MSG_PEEK).
const SHOWN: usize = SENDING + size_of::<Sending>();
/// Field: number of bytes that the program was told of (FIONREAD, MSG_PEEK), and has not read since.
const TOLD: usize = SHOWN + size_of::<u32>();
/// Field: whether the other end has sent something since this end last sent something.
const HEARD: usize = TOLD + size_of::<u32>();
/// Field: the message of this end ([`Said`]).
const SAID: usize = HEARD + size_of::<u32>();
const _: () = assert!(SAID + size_of::<Said>() <= STATE_BYTES && SHOWN.is_multiple_of(4));
/// Offset of the *account*, the part that another user's process gets: all but the cookie and the locks.
const ACCOUNT: usize = FRAMES;
const _: () = assert!(ACCOUNT + CARRIED_BYTES == STATE_BYTES);

const UNDECIDED: u32 = 0;
const ALWAYS: u32 = 1;
const NEVER: u32 = 2;

/// The state is in this memory.
const HERE: u32 = 0;
/// The state is with the socket, for the process that uses the connection next.
const AWAY: u32 = 1;
/// The state is here, and was with the socket before. The process that left it there may use the connection again. So a
/// process that closes its descriptor leaves the state with the socket once more.
const CAME: u32 = 2;

/// Longest wait for a state that another process is about to make, or to take from its socket.
const PATIENCE: Duration = Duration::from_millis(200);

/// Value in place of a cookie while a process makes the state.
const TAKEN: u64 = u64::MAX;

/// All states: a hash table with open addressing, by cookie. A *place* is the index of a state in the table. Behind the
/// table, the same memory has what programs have learnt about their receivers ([`crate::connections::learning`]).
pub struct Connections {
    table: Arc<SharedMemory>,
    /// A TCP socket by which the kernel is asked whether another socket has ended. Without it, states of ended sockets
    /// stay.
    asking: Option<OwnFd>,
    /// Lets one thread at a time find out whether a connection has a state.
    entering: Lock<()>,
}

/// One state, by its offset in the table.
#[derive(Clone, Copy)]
pub struct Connection<'a> {
    table: &'a SharedMemory,
    at: usize,
}

/// The message of this end: what it sends until the other end sends something.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Said {
    /// Hash of the receiver. Before it is computed: how this end got the connection, [`Self::ACCEPTED`] or
    /// [`Self::CONNECTED`].
    pub upstream: u32,
    /// Hash of the content type; 0 if it is not known.
    pub content: u32,
    /// Number of the message's bytes so far.
    pub bytes: u32,
    /// Number of the other end's machine (shunt_odb::sources::End), in two halves; 0 if it has not been looked up.
    pub end: [u32; 2],
}

impl Said {
    pub const ACCEPTED: u32 = 0;
    pub const CONNECTED: u32 = 1;
}

/// A held lock of one direction of a connection. Other processes wait for it, too.
pub struct Locked<'a> {
    word: &'a AtomicU32,
    _taken: Taken,
}

impl Connections {
    pub fn new(table: Arc<SharedMemory>, asking: Option<OwnFd>) -> Self {
        Self { table, asking, entering: Lock::new(Rank::Entering, ()) }
    }

    /// File of the memory. The owner of the file is the user whose states these are.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.table.as_fd()
    }

    fn places(&self) -> usize {
        (self.table.len() - TABLE_BYTES) / STATE_BYTES
    }

    pub fn at(&self, place: u32) -> Connection<'_> {
        Connection { table: &self.table, at: place as usize * STATE_BYTES }
    }

    /// The place of a socket's state, if it has one.
    fn find(&self, socket: BorrowedFd<'_>) -> Option<u32> {
        let cookie = rustix::net::sockopt::socket_cookie(socket).ok()?;
        self.probe(cookie).find(|place| self.cookie(*place).load(Ordering::Acquire) == cookie)
    }

    /// Returns the place of a connection's state, for a connection that this process has not used yet. `frames`:
    /// whether what this end sends is framed, if no other process has used the connection either. `waits`: whether to
    /// wait for a process that may be about to make the state.
    ///
    /// # Errors
    /// Returns an error if no place is left, because there are too many connections.
    pub fn enter(&self, socket: BorrowedFd<'_>, frames: bool, waits: bool) -> io::Result<u32> {
        {
            let _alone = self.entering.lock();
            if let Some(place) = self.find(socket) {
                return Ok(place);
            }
            if odb::adopt(socket) {
                return self.add(socket, frames);
            }
        }
        // Another process has begun to use the connection. Either it shares this memory and is about to enter the
        // state, or it has another user's memory.
        patiently(|is_last| self.enter_begun(socket, !waits || is_last).transpose())
    }

    /// Enters a connection that another process has begun to use. If the state is neither in this memory nor with the
    /// socket, returns `None`, or with `gives_up` breaks the connection off.
    fn enter_begun(&self, socket: BorrowedFd<'_>, gives_up: bool) -> io::Result<Option<u32>> {
        let _alone = self.entering.lock();
        // Another thread may have entered the connection meanwhile. It may even have left the state with the socket
        // again; then the next use takes it back.
        if let Some(place) = self.find(socket) {
            return Ok(Some(place));
        }
        if let Ok(account) = odb::take(socket) {
            let place = self.add(socket, false)?;
            self.at(place).restore(&account);
            return Ok(Some(place));
        }
        if !gives_up {
            return Ok(None);
        }
        let place = self.add(socket, false)?;
        odb::adopt_too(socket);
        self.at(place).break_off();
        Ok(Some(place))
    }

    /// Takes the lock of [`Self::enter`] for a fork: until the value is dropped, no thread enters a connection or takes
    /// a state back.
    pub fn hold_still(&self) -> Held<'_, ()> {
        self.entering.lock()
    }

    /// Whether a state is with its socket.
    #[inline]
    pub fn is_away(&self, place: u32) -> bool {
        self.at(place).is_away()
    }

    /// Whether a state is in this memory and was with its socket before, so that another process may look for it there
    /// again.
    pub fn has_come(&self, place: u32) -> bool {
        self.at(place).whereabouts().load(Ordering::Relaxed) == CAME
    }

    /// Takes a state back from its socket.
    #[cold]
    pub fn take_back(&self, socket: BorrowedFd<'_>, place: u32) {
        patiently(|is_last| {
            let _alone = self.entering.lock();
            if !self.is_away(place) {
                return Some(());
            }
            match odb::take(socket) {
                Ok(account) => self.at(place).restore(&account),
                Err(_) if is_last => self.at(place).break_off(),
                Err(_) => return None,
            }
            Some(())
        });
    }

    /// Leaves a state with its socket, for the process that uses the socket next. Does nothing if another thread or
    /// process is using the state.
    pub fn leave(&self, socket: BorrowedFd<'_>, place: u32) {
        let connection = self.at(place);
        let Some((_receiving, _sending)) = connection.try_lock() else { return };
        // Another process that shares this memory may have left the state already, and a third one may have taken it.
        // Then the state in this memory is old.
        if !connection.is_away() && odb::carry(socket, &connection.account()).is_ok() {
            connection.whereabouts().store(AWAY, Ordering::Release);
        }
    }

    /// Continues with `memory`, which only this process has, in place of memory that is another user's now. `used`:
    /// descriptors of connections, each with the place of its state. Each state is left with its socket if possible,
    /// and taken back when it is used. The other connections are broken off.
    pub fn move_to(&self, memory: &SharedMemory, used: impl Iterator<Item = (RawFd, u32)>) -> io::Result<()> {
        for (fd, place) in used {
            let (cookie, is_away) = self.part_with(fd, place);
            enter_moved(memory, place, cookie, is_away);
        }
        self.table.replace(memory)
    }

    /// Does what [`Self::move_to`] does, with new memory that needs no file, for a process that can have no more
    /// descriptors.
    pub fn move_alone(&self, used: impl Iterator<Item = (RawFd, u32)>) -> io::Result<()> {
        let parted: Vec<_> = used.map(|(fd, place)| (place, self.part_with(fd, place))).collect();
        // SAFETY: the table lives as long as the process. From now on its descriptor's number is used only to ask which
        // user owns the file that has that number.
        unsafe { self.table.replace_by_own() }?;
        parted.into_iter().for_each(|(place, (cookie, is_away))| enter_moved(&self.table, place, cookie, is_away));
        Ok(())
    }

    /// Leaves a state with its socket, if possible. Returns the socket's cookie, and whether the state is with the
    /// socket.
    fn part_with(&self, fd: RawFd, place: u32) -> (u64, bool) {
        self.leave(borrow(fd), place);
        // The new memory is another user's than the old. The kernel has to report the socket's end to the new user,
        // too.
        odb::adopt_too(borrow(fd));
        (self.cookie(place).load(Ordering::Acquire), self.is_away(place))
    }

    /// Adds a state for a socket, as it is before the connection's first byte. `frames`: what this end sends is framed.
    fn add(&self, socket: BorrowedFd<'_>, frames: bool) -> io::Result<u32> {
        let cookie = rustix::net::sockopt::socket_cookie(socket)?;
        let take =
            |place: &u32| self.cookie(*place).compare_exchange(0, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let taken = self.probe(cookie).find(take).or_else(|| {
            self.probe(cookie).for_each(|place| self.closed(place));
            self.probe(cookie).find(take)
        });
        let place = taken.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOBUFS))?;
        self.table.write(place as usize * STATE_BYTES + 8, &[0; STATE_BYTES - 8]);
        if frames {
            self.at(place).begin_frames();
            self.at(place).set_said(&Said { upstream: Said::CONNECTED, ..Said::default() });
        }
        self.cookie(place).store(cookie, Ordering::Release);
        Ok(place)
    }

    /// Places where the state of a cookie may be. Freed states leave holes, so a search looks at all of these places.
    /// The kernel assigns cookies in ascending order. States of connections that were made one after another lie
    /// together, in few pages, and far from those of older and newer connections.
    fn probe(&self, cookie: u64) -> impl Iterator<Item = u32> {
        const PROBES: u64 = 64;
        const TOGETHER: u64 = 16;
        let places = self.places() as u64;
        let group = (cookie / TOGETHER).wrapping_mul(0x9e37_79b9_7f4a_7c15) % (places / TOGETHER).max(1);
        let first = group * TOGETHER + cookie % TOGETHER;
        (0..PROBES.min(places)).map(move |step| ((first + step) % places) as u32)
    }

    fn cookie(&self, place: u32) -> &std::sync::atomic::AtomicU64 {
        self.table.long(place as usize * STATE_BYTES + COOKIE)
    }

    /// Frees the state at a place if its socket has ended. Called after a descriptor of the socket was closed. Also
    /// called when no place is free, because processes that were killed have freed no states.
    pub fn closed(&self, place: u32) {
        let state = self.cookie(place);
        let cookie = state.load(Ordering::Acquire);
        if let Some(asking) = &self.asking
            && cookie != 0
            && cookie != TAKEN
            && odb::ended(asking, cookie)
        {
            // Another process may have noticed the end, too, and the place may be another connection's by now.
            let _ = state.compare_exchange(cookie, 0, Ordering::Release, Ordering::Relaxed);
        }
    }

    /// Frees the state of a socket that lives on without its connection (connect(2) with AF_UNSPEC).
    pub fn dissolved(&self, place: u32) {
        self.cookie(place).store(0, Ordering::Release);
    }
}

/// Calls `attempt` every millisecond, until it returns something. After [`PATIENCE`] it is called with true, for the
/// last time. No lock is held between the calls, because a signal handler that interrupts the thread may call this
/// function, too.
fn patiently<T>(mut attempt: impl FnMut(bool) -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(done) = attempt(Instant::now() > until) {
            return done;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Enters a state in new memory, at the place that it had in the old memory. `is_away`: whether the state is with its
/// socket. If it is not, the connection is broken off.
fn enter_moved(memory: &SharedMemory, place: u32, cookie: u64, is_away: bool) {
    let moved = Connection { table: memory, at: place as usize * STATE_BYTES };
    memory.long(moved.at + COOKIE).store(cookie, Ordering::Relaxed);
    if is_away {
        moved.whereabouts().store(AWAY, Ordering::Relaxed);
    } else {
        moved.break_off();
    }
}

impl<'a> Connection<'a> {
    /// Takes the lock of the receiving direction, and makes sure that the state is in this memory ([`Self::lock`]).
    pub fn lock_receiving(&self, all: &Connections, fd: RawFd) -> Locked<'a> {
        self.lock(Rank::Receiving, Self::break_receiving, all, fd)
    }

    /// Takes the lock of the sending direction, and makes sure that the state is in this memory.
    pub fn lock_sending(&self, all: &Connections, fd: RawFd) -> Locked<'a> {
        self.lock(Rank::Sending, Self::break_sending, all, fd)
    }

    /// Takes the lock of a direction. If the state has been left with its socket, takes the state back first. `broken`
    /// is called if the process that held the lock was killed.
    fn lock(&self, which: Rank, broken: impl Fn(&Self), all: &Connections, fd: RawFd) -> Locked<'a> {
        loop {
            let (locked, abandoned) = Locked::new(self.word_of(which), which);
            if abandoned {
                broken(self);
            }
            if !self.is_away() {
                return locked;
            }
            drop(locked);
            all.take_back(borrow(fd), (self.at / STATE_BYTES) as u32);
        }
    }

    fn word_of(&self, which: Rank) -> &'a AtomicU32 {
        self.table.word(self.at + if which == Rank::Receiving { RECEIVE_LOCK } else { SEND_LOCK })
    }

    /// Takes both locks, even if a process that held one of them was killed.
    fn lock_both(&self) -> [Locked<'a>; 2] {
        [Rank::Receiving, Rank::Sending].map(|which| Locked::new(self.word_of(which), which).0)
    }

    /// Takes both locks, if both are free.
    fn try_lock(&self) -> Option<(Locked<'a>, Locked<'a>)> {
        let at_once = |which| Locked::at_once(self.word_of(which), which);
        Some((at_once(Rank::Receiving)?, at_once(Rank::Sending)?))
    }

    /// Whether the state is with its socket. Then the state in this memory is old: a call that used it would mix up
    /// bytes.
    #[inline]
    fn is_away(&self) -> bool {
        self.whereabouts().load(Ordering::Acquire) == AWAY
    }

    #[inline]
    fn whereabouts(&self) -> &'a AtomicU32 {
        self.table.word(self.at + WHERE)
    }

    fn break_receiving(&self) {
        let mut state = self.receiving();
        state.break_off();
        self.set_receiving(&state);
    }

    fn break_sending(&self) {
        let mut state = self.sending();
        state.break_off();
        self.set_sending(&state);
    }

    /// Breaks off both directions, because nobody knows what is in the socket.
    fn break_off(&self) {
        let _locked = self.lock_both();
        self.begin_frames();
        self.break_receiving();
        self.break_sending();
        self.whereabouts().store(HERE, Ordering::Release);
    }

    /// The part of the state that another user's process gets.
    fn account(&self) -> [u8; CARRIED_BYTES] {
        let mut account = [0; CARRIED_BYTES];
        self.table.read(self.at + ACCOUNT, &mut account);
        account
    }

    /// Restores what [`Self::account`] returned. It may come from another user, and be any bytes.
    fn restore(&self, account: &[u8; CARRIED_BYTES]) {
        let _locked = self.lock_both();
        let mut account = *account;
        account[WHERE - ACCOUNT..][..size_of::<u32>()].copy_from_slice(&AWAY.to_ne_bytes());
        self.table.write(self.at + ACCOUNT, &account);
        self.whereabouts().store(CAME, Ordering::Release);
    }

    /// Cookie of the socket (SO_COOKIE).
    pub fn cookie(&self) -> u64 {
        self.table.long(self.at + COOKIE).load(Ordering::Relaxed)
    }

    #[inline]
    pub fn receiving(&self) -> Receiving {
        self.load(RECEIVING)
    }

    #[inline]
    pub fn set_receiving(&self, state: &Receiving) {
        self.store(RECEIVING, state);
    }

    #[inline]
    pub fn sending(&self) -> Sending {
        self.load(SENDING)
    }

    #[inline]
    pub fn set_sending(&self, state: &Sending) {
        self.store(SENDING, state);
    }

    /// Reads a direction's state. The compiler knows both lengths, so neither read is a call of memcpy.
    #[inline]
    fn load<T: End>(&self, from: usize) -> T {
        let mut state = T::default();
        self.table.read(self.at + from, &mut state.as_mut_bytes()[..T::HEAD_BYTES]);
        if state.is_more() {
            self.table.read(self.at + from, state.as_mut_bytes());
        }
        state
    }

    #[inline]
    fn store<T: End>(&self, to: usize, state: &T) {
        if state.is_more() {
            self.table.write(self.at + to, state.as_bytes());
        } else {
            self.table.write(self.at + to, &state.as_bytes()[..T::HEAD_BYTES]);
        }
    }

    /// Whether what is sent from now on is framed. The first call decides: a direction that has begun without frames
    /// never has any.
    pub fn frames(&self, all: &Connections, fd: RawFd) -> bool {
        let state = self.table.word(self.at + FRAMES);
        match state.load(Ordering::Acquire) {
            UNDECIDED => {
                // Decided with the lock held, so that nobody leaves the state with its socket meanwhile. The process
                // that takes the state from the socket would decide once more.
                let _locked = self.lock_sending(all, fd);
                state.compare_exchange(UNDECIDED, NEVER, Ordering::AcqRel, Ordering::Acquire) == Err(ALWAYS)
            }
            decided => decided == ALWAYS,
        }
    }

    /// Makes this end frame everything that it sends from now on, unless the direction has begun without frames. Called
    /// once it is known that the other end looks for frames.
    pub fn begin_frames(&self) {
        let state = self.table.word(self.at + FRAMES);
        let _ = state.compare_exchange(UNDECIDED, ALWAYS, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Notes whether the program has been shown bytes that it has not taken. Its next read has to return all of these
    /// bytes, so it must not end early (`Read::splits`).
    pub fn set_shown(&self, shown: bool) {
        let state = self.table.word(self.at + SHOWN);
        if state.load(Ordering::Relaxed) != u32::from(shown) {
            state.store(u32::from(shown), Ordering::Relaxed);
        }
    }

    pub fn was_shown(&self) -> bool {
        self.table.word(self.at + SHOWN).load(Ordering::Relaxed) != 0
    }

    /// Notes that the program is told that it can read `bytes` bytes.
    pub fn tell(&self, bytes: usize) {
        self.table.word(self.at + TOLD).store(u32::try_from(bytes).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Notes that the program has got `bytes` bytes. Returns true if it had been told of bytes to read, and has now got
    /// all of these.
    pub fn took_told(&self, bytes: usize) -> bool {
        let told = self.table.word(self.at + TOLD);
        let before = told.load(Ordering::Relaxed);
        if before == 0 {
            return false;
        }
        let left = before.saturating_sub(u32::try_from(bytes).unwrap_or(u32::MAX));
        told.store(left, Ordering::Relaxed);
        left == 0
    }

    /// The message of this end. A new message begins with this call if the other end has sent something since the last
    /// call.
    pub fn said(&self) -> Said {
        let mut said = Said::default();
        self.table.read(self.at + SAID, said.as_mut_bytes());
        let heard = self.table.word(self.at + HEARD);
        if heard.load(Ordering::Relaxed) != 0 {
            heard.store(0, Ordering::Relaxed);
            said = Said { upstream: said.upstream, end: said.end, ..Said::default() };
        }
        said
    }

    pub fn set_said(&self, said: &Said) {
        self.table.write(self.at + SAID, said.as_bytes());
    }

    /// Notes that the other end has sent something.
    pub fn heard(&self) {
        let heard = self.table.word(self.at + HEARD);
        if heard.load(Ordering::Relaxed) == 0 {
            heard.store(1, Ordering::Relaxed);
        }
    }

    /// Keeps an error for the program's next call.
    pub fn keep_error(&self, errno: i32) {
        self.table.word(self.at + ERROR).store(errno.unsigned_abs(), Ordering::Relaxed);
    }

    pub fn take_error(&self) -> Option<i32> {
        let error = self.table.word(self.at + ERROR);
        if error.load(Ordering::Relaxed) == 0 {
            return None;
        }
        Some(error.swap(0, Ordering::Relaxed) as i32)
    }
}

/// Bit of a lock's word: somebody waits for the lock.
const WAITED_FOR: u32 = 1 << 31;

impl<'a> Locked<'a> {
    /// Takes a lock, after a wait if another thread has it. The lock's word is the owner's process id, so that a lock
    /// of a killed process can be taken over. The second value says whether this has happened: then the state that the
    /// lock protects may be half changed.
    fn new(word: &'a AtomicU32, which: Rank) -> (Self, bool) {
        let (own, taken) = (process::own(), Taken::new(which));
        while let Err(owner) = word.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed) {
            if Self::wait(word, owner, own) {
                return (Self { word, _taken: taken }, true);
            }
        }
        (Self { word, _taken: taken }, false)
    }

    /// Takes the lock, if it is free.
    fn at_once(word: &'a AtomicU32, which: Rank) -> Option<Self> {
        let own = process::own();
        let is_free = word.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed).is_ok();
        is_free.then(|| Self { word, _taken: Taken::tried(which) })
    }

    /// Waits for the lock, for 200 ms at most. Returns true if the owner was killed, and this process owns the lock
    /// now.
    fn wait(word: &AtomicU32, owner: u32, own: u32) -> bool {
        let marked = owner | WAITED_FOR;
        if owner != marked && word.compare_exchange(owner, marked, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return false;
        }
        let patience = rustix::fs::Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
        let waited = futex::wait(word, futex::Flags::empty(), marked, Some(&patience));
        let owner = owner & !WAITED_FOR;
        waited == Err(rustix::io::Errno::TIMEDOUT)
            && owner != own
            && !is_alive(owner)
            && word.compare_exchange(marked, own | WAITED_FOR, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
}

fn is_alive(process: u32) -> bool {
    let process = i32::try_from(process).ok().and_then(rustix::process::Pid::from_raw);
    let Some(process) = process else { return true };
    // A pidfd is readable once the process has ended. kill(2) would not tell: it succeeds for a zombie, too.
    match rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty()) {
        Ok(pidfd) => {
            let mut ended = [PollFd::new(&pidfd, PollFlags::IN)];
            poll(&mut ended, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0)
        }
        Err(error) => error != rustix::io::Errno::SRCH,
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if self.word.swap(0, Ordering::Release) & WAITED_FOR != 0 {
            let _ = futex::wake(self.word, futex::Flags::empty(), 1);
        }
    }
}
