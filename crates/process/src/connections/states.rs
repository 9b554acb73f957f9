//! The states of connections, in memory that processes of one user share with those that they start: dup, fork, exec and
//! passed descriptors lead to the same state, found by the socket's cookie (SO_COOKIE).
//!
//! A state lives as long as its socket, which the kernel tells (SHUNT_ENDED): descriptors may be on their way between
//! processes, in programs that are about to start, or in ones that were killed.
//!
//! Other users' processes have other memory ([`crate::connections::users`]). To one of those a state goes by the socket itself
//! (SHUNT_CARRY): whoever passes a descriptor on leaves the state there, and whoever uses the connection next takes it. Of
//! two users that use a connection in turn without passing it, the second finds nothing, and gets ECONNRESET.

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
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::system::inside::{Held, Lock};
use crate::system::kernel::borrow;
use crate::system::process;
use crate::system::ranks::{Rank, Taken};

const COOKIE: usize = 0;
const RECEIVE_LOCK: usize = 8;
const SEND_LOCK: usize = 12;
/// Whether what is sent is framed: [`UNDECIDED`] and what follows it.
const FRAMES: usize = 16;
/// An error that the socket has told us and not yet the program.
const ERROR: usize = 20;
/// Where the state is: [`HERE`] and what follows it.
const WHERE: usize = 24;
const RECEIVING: usize = 32;
const SENDING: usize = RECEIVING + size_of::<Receiving>();
/// Whether the program has looked at what it has not taken (MSG_PEEK).
const SHOWN: usize = SENDING + size_of::<Sending>();
/// Bytes that the program knows are there (FIONREAD, MSG_PEEK), and has not read since.
const TOLD: usize = SHOWN + size_of::<u32>();
/// Whether the other end has said something since this one did.
const HEARD: usize = TOLD + size_of::<u32>();
const SAID: usize = HEARD + size_of::<u32>();
const _: () = assert!(SAID + size_of::<Said>() <= STATE_BYTES && SHOWN.is_multiple_of(4));
/// Where the part begins that another user's process gets: all but the cookie and the locks.
const ACCOUNT: usize = FRAMES;
const _: () = assert!(ACCOUNT + odb::CARRIED_BYTES == STATE_BYTES);

const UNDECIDED: u32 = 0;
const ALWAYS: u32 = 1;
const NEVER: u32 = 2;

const HERE: u32 = 0;
/// With the socket, for whoever uses it next.
const AWAY: u32 = 1;
/// Here, and it was with the socket: whoever passed it on may use it again.
const CAME: u32 = 2;

/// How long a state is waited for that another process is about to make, or to take from its socket.
const PATIENCE: Duration = Duration::from_millis(200);

/// In place of a cookie, while a state is made.
const TAKEN: u64 = u64::MAX;

/// All states: an open hash table by cookie, with what programs have learnt behind it ([`crate::connections::learning`]).
pub struct Connections {
    table: Arc<SharedMemory>,
    /// A TCP socket to ask the kernel with; without one, states of killed processes stay.
    asking: Option<OwnFd>,
    /// One thread at a time finds out whether a connection has a state.
    entering: Lock<()>,
}

/// One state, by its place in the table.
#[derive(Clone, Copy)]
pub struct Connection<'a> {
    table: &'a SharedMemory,
    at: usize,
}

/// What this end is saying, since the other last said something.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Said {
    /// Whom to, as a number; at first, which end has made the connection.
    pub upstream: u32,
    /// Its content type, as a number; 0: not known.
    pub content: u32,
    /// How much.
    pub bytes: u32,
    /// The other end (shunt_odb::sources), in two halves; 0: nobody has looked.
    pub end: [u32; 2],
}

impl Said {
    pub const ACCEPTED: u32 = 0;
    pub const CONNECTED: u32 = 1;
}

/// One direction's lock. Other processes wait for it, too.
pub struct Locked<'a> {
    word: &'a AtomicU32,
    _taken: Taken,
}

impl Connections {
    pub fn new(table: Arc<SharedMemory>, asking: Option<OwnFd>) -> Self {
        Self { table, asking, entering: Lock::new(Rank::Entering, ()) }
    }

    /// The memory's file, which says whose it is.
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

    /// The place of the state of a connection that this process has not used yet. `frames`: if nobody has, what this end
    /// sends is framed. `waits`: for a process that may be about to have made a state.
    ///
    /// # Errors
    /// No place is left: there are too many connections.
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
        // Somebody has: in this memory, a moment ago, or in another user's.
        patiently(|is_last| self.enter_begun(socket, !waits || is_last).transpose())
    }

    /// Enters a connection that somebody else has begun to use. `gives_up`: breaks it off where nobody says how far that one is;
    /// `None` in place of that.
    fn enter_begun(&self, socket: BorrowedFd<'_>, gives_up: bool) -> io::Result<Option<u32>> {
        let _alone = self.entering.lock();
        // Another may have entered it since, and left it again: whoever uses that state takes it back.
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

    /// Until the value is dropped no thread is about to enter a connection or to take one back: before a fork.
    pub fn hold_still(&self) -> Held<'_, ()> {
        self.entering.lock()
    }

    /// Whether a state is with its socket.
    #[inline]
    pub fn is_away(&self, place: u32) -> bool {
        self.at(place).is_away()
    }

    /// Whether a state has been with its socket, and somebody may look for it there again.
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

    /// Leaves a state with its socket, for whoever uses that next. Not while it is in use.
    pub fn leave(&self, socket: BorrowedFd<'_>, place: u32) {
        let connection = self.at(place);
        let Some((_receiving, _sending)) = connection.try_lock() else { return };
        // Another may have left it meanwhile, and somebody taken it: what is here would be old.
        if !connection.is_away() && odb::carry(socket, &connection.account()).is_ok() {
            connection.whereabouts().store(AWAY, Ordering::Release);
        }
    }

    /// Goes on in memory of this process alone, in place of another user's. Of `used`, descriptors with their places,
    /// what can be left with its socket is, and is taken back when it is used.
    pub fn move_to(&self, memory: &SharedMemory, used: impl Iterator<Item = (RawFd, u32)>) -> io::Result<()> {
        for (fd, place) in used {
            let (cookie, is_away) = self.part_with(fd, place);
            enter_moved(memory, place, cookie, is_away);
        }
        self.table.replace(memory)
    }

    /// The same in memory without a file, where the process can have none.
    pub fn move_alone(&self, used: impl Iterator<Item = (RawFd, u32)>) -> io::Result<()> {
        let parted: Vec<_> = used.map(|(fd, place)| (place, self.part_with(fd, place))).collect();
        // SAFETY: it lives as long as the process, which asks at most whose the file with that number is.
        unsafe { self.table.replace_by_own() }?;
        parted.into_iter().for_each(|(place, (cookie, is_away))| enter_moved(&self.table, place, cookie, is_away));
        Ok(())
    }

    /// Leaves a state with its socket: which that is, and whether it could be left.
    fn part_with(&self, fd: RawFd, place: u32) -> (u64, bool) {
        self.leave(borrow(fd), place);
        // The state in the new memory is another user's.
        odb::adopt_too(borrow(fd));
        (self.cookie(place).load(Ordering::Acquire), self.is_away(place))
    }

    /// A new state for a socket, before its first byte. `frames`: what this end sends is framed.
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

    /// Where a cookie's state may be. States that ended leave holes, so all of these are looked at. The kernel counts cookies: those of a
    /// few connections that were made one after the other are together, in as few pages, and far from those before and after.
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

    /// A descriptor that led to a state is closed, or a process that had some may have been killed: frees the state, if
    /// that was the last.
    pub fn closed(&self, place: u32) {
        let state = self.cookie(place);
        let cookie = state.load(Ordering::Acquire);
        if let Some(asking) = &self.asking
            && cookie != 0
            && cookie != TAKEN
            && odb::ended(asking, cookie)
        {
            // Another may have heard it too, and the place be another connection's.
            let _ = state.compare_exchange(cookie, 0, Ordering::Release, Ordering::Relaxed);
        }
    }

    /// The socket lives on without its connection (connect(2) with AF_UNSPEC).
    pub fn dissolved(&self, place: u32) {
        self.cookie(place).store(0, Ordering::Release);
    }
}

/// Tries again and again for [`PATIENCE`], and tells the last attempt so. Sleeps without a lock: a signal's handler may come by here, too.
fn patiently<T>(mut attempt: impl FnMut(bool) -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(done) = attempt(Instant::now() > until) {
            return done;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A state in new memory, at the place that it had.
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
    /// The lock of what comes in, with the state here ([`Self::lock`]).
    pub fn lock_receiving(&self, all: &Connections, fd: RawFd) -> Locked<'a> {
        self.lock(Rank::Receiving, Self::break_receiving, all, fd)
    }

    /// The lock of what goes out, likewise.
    pub fn lock_sending(&self, all: &Connections, fd: RawFd) -> Locked<'a> {
        self.lock(Rank::Sending, Self::break_sending, all, fd)
    }

    /// Takes a lock, and the state back where somebody has left it with its socket since this thread has looked. `broken`: what
    /// becomes of a direction whose owner was killed.
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

    /// Both locks, whoever had them.
    fn lock_both(&self) -> [Locked<'a>; 2] {
        [Rank::Receiving, Rank::Sending].map(|which| Locked::new(self.word_of(which), which).0)
    }

    /// Both, if nobody has either.
    fn try_lock(&self) -> Option<(Locked<'a>, Locked<'a>)> {
        let at_once = |which| Locked::at_once(self.word_of(which), which);
        Some((at_once(Rank::Receiving)?, at_once(Rank::Sending)?))
    }

    /// Whether the state is with its socket. Then what is here is old: a call that goes by it would mix up bytes.
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

    /// Nobody knows what is in the socket: both directions are of no use any more.
    fn break_off(&self) {
        let _locked = self.lock_both();
        self.begin_frames();
        self.break_receiving();
        self.break_sending();
        self.whereabouts().store(HERE, Ordering::Release);
    }

    /// The part that another user's process gets.
    fn account(&self) -> [u8; odb::CARRIED_BYTES] {
        let mut account = [0; odb::CARRIED_BYTES];
        self.table.read(self.at + ACCOUNT, &mut account);
        account
    }

    /// What [`Self::account`] said. It may be another user's, and anything.
    fn restore(&self, account: &[u8; odb::CARRIED_BYTES]) {
        let _locked = self.lock_both();
        let mut account = *account;
        account[WHERE - ACCOUNT..][..size_of::<u32>()].copy_from_slice(&AWAY.to_ne_bytes());
        self.table.write(self.at + ACCOUNT, &account);
        self.whereabouts().store(CAME, Ordering::Release);
    }

    /// The socket's (SO_COOKIE).
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

    /// With two lengths that the compiler knows: neither is a call of memcpy.
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

    /// Whether what is sent from now on is framed. The first who asks decides: a direction that has begun without
    /// frames never has any.
    pub fn frames(&self, all: &Connections, fd: RawFd) -> bool {
        let state = self.table.word(self.at + FRAMES);
        match state.load(Ordering::Acquire) {
            UNDECIDED => {
                // Not while it is being left with its socket, or whoever takes it would decide again.
                let _locked = self.lock_sending(all, fd);
                state.compare_exchange(UNDECIDED, NEVER, Ordering::AcqRel, Ordering::Acquire) == Err(ALWAYS)
            }
            decided => decided == ALWAYS,
        }
    }

    /// The other end looks for frames: what is sent is framed, unless it has begun already.
    pub fn begin_frames(&self) {
        let state = self.table.word(self.at + FRAMES);
        let _ = state.compare_exchange(UNDECIDED, ALWAYS, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// What the program has been shown, its next read has to have, too.
    pub fn set_shown(&self, shown: bool) {
        let state = self.table.word(self.at + SHOWN);
        if state.load(Ordering::Relaxed) != u32::from(shown) {
            state.store(u32::from(shown), Ordering::Relaxed);
        }
    }

    pub fn was_shown(&self) -> bool {
        self.table.word(self.at + SHOWN).load(Ordering::Relaxed) != 0
    }

    /// The program is told that so many bytes are there.
    pub fn tell(&self, bytes: usize) {
        self.table.word(self.at + TOLD).store(u32::try_from(bytes).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// The program has got `bytes`: whether it had been told of some, and has all of them now.
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

    /// What this end is saying: something new, where the other has said something meanwhile.
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

    /// The other end has said something.
    pub fn heard(&self) {
        let heard = self.table.word(self.at + HEARD);
        if heard.load(Ordering::Relaxed) == 0 {
            heard.store(1, Ordering::Relaxed);
        }
    }

    /// Keeps an error for the next call.
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

/// Bit of a lock: somebody waits.
const WAITED_FOR: u32 = 1 << 31;

impl<'a> Locked<'a> {
    /// The word is the owner's process id, so that a lock of a process that was killed does not stay. The second value:
    /// such a lock was taken over, and what it protects may be half changed.
    fn new(word: &'a AtomicU32, which: Rank) -> (Self, bool) {
        let (own, taken) = (process::own(), Taken::new(which));
        while let Err(owner) = word.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed) {
            if Self::wait(word, owner, own) {
                return (Self { word, _taken: taken }, true);
            }
        }
        (Self { word, _taken: taken }, false)
    }

    /// The lock, if nobody has it.
    fn at_once(word: &'a AtomicU32, which: Rank) -> Option<Self> {
        let own = process::own();
        let is_free = word.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed).is_ok();
        is_free.then(|| Self { word, _taken: Taken::tried(which) })
    }

    /// True: the owner has been killed, and this process owns the lock now.
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
    // By a descriptor, because a zombie still takes signals; its descriptor is readable.
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
