//! Patience with a silent machine: a thread waits for such a machine for less than a second. Only the time counts in
//! which this process ran and could have received something; a process that was stopped itself has not waited.

use std::cell::OnceCell;
use std::io;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::channel::{Channel, Moved};

/// Longest silence of a machine that a thread waits for. With its other work, the thread then takes less than a second
/// in all (docs/silence.md).
pub(super) const PATIENCE: Duration = Duration::from_millis(900);
/// Longest single wait, after which the waiting thread checks the state again.
const SLICE: Duration = Duration::from_millis(50);
/// Most time that counts for one such single wait. If a wait took longer, this process was stopped itself.
const COUNTED: Duration = Duration::from_millis(100);

/// Time waited for a machine, by one thread or by several together.
#[derive(Debug)]
pub(super) struct Waited {
    spent: Duration,
    last: Instant,
}

impl Waited {
    pub(super) fn begin() -> Self {
        Self { spent: Duration::ZERO, last: Instant::now() }
    }

    /// Returns how long to wait until the next check. `None`: [`PATIENCE`] is used up.
    pub(super) fn slice(&mut self) -> Option<Duration> {
        self.slice_of(PATIENCE)
    }

    /// The same as [`Self::slice`] for another patience.
    pub(super) fn slice_of(&mut self, patience: Duration) -> Option<Duration> {
        let now = Instant::now();
        self.spent += now.duration_since(self.last).min(COUNTED);
        self.last = now;
        let left = patience.checked_sub(self.spent).filter(|left| !left.is_zero())?;
        Some(left.min(SLICE))
    }
}

/// How long a connection's other end has sent nothing while threads waited for it. The waits of several threads add up.
#[derive(Debug, Default)]
pub(super) struct Silence {
    waited: Option<Waited>,
    /// Bytes that had been moved when the silence began.
    moved: Moved,
}

/// A wait for the other end of a connection.
pub(super) struct Waiting<'a> {
    silence: Silence,
    /// Called before each slice of the wait.
    tell: &'a dyn Fn(),
}

impl<'a> Waiting<'a> {
    /// Continues a silence that another wait has left.
    pub(super) fn after(silence: Silence, tell: &'a dyn Fn()) -> Self {
        Self { silence, tell }
    }

    /// Ends this wait, and returns the silence for the next one to continue.
    pub(super) fn ends(self) -> Silence {
        self.silence
    }

    /// Waits until a connection may be ready, for one slice of time at most ([`SLICE`]).
    ///
    /// # Errors
    /// `TimedOut` if the other end has been silent for [`PATIENCE`], else the kernel's error of poll(2).
    pub(super) fn wait(&mut self, channel: &Channel, what: PollFlags) -> io::Result<()> {
        let (silence, moved) = (&mut self.silence, channel.moved());
        // To a thread that waits for an answer, only received bytes show that the other end is alive. Bytes that the
        // kernel takes for sending do not.
        let takes_more = what == PollFlags::OUT && moved.sent != silence.moved.sent;
        if takes_more || moved.received != silence.moved.received {
            *silence = Silence { moved, waited: None };
        }
        let slice = silence.waited.get_or_insert_with(Waited::begin).slice().ok_or(io::ErrorKind::TimedOut)?;
        (self.tell)();
        let slice = Timespec { tv_sec: 0, tv_nsec: slice.subsec_nanos().into() };
        match poll(&mut [PollFd::new(channel, what)], Some(&slice)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Time that a program's call waits for all of its bytes, if the call may end with only the first of them.
pub const LONG: Duration = Duration::from_millis(200);
/// Smallest and largest number of bytes that a call that may end early asks for at a time. Between these limits, the
/// number doubles after each answer that comes quickly. If the call ends early, the number becomes that of the bytes
/// that came.
pub(super) const SOME: RangeInclusive<usize> = (32 << 10)..=(1 << 20);

/// A program's call that may end with a part of its bytes, because the program has other work than to wait for the
/// rest.
pub struct Call<'a> {
    /// Time of the call's first fetch. It is set only then, because most calls fetch nothing and need no clock.
    began: OnceCell<Instant>,
    may_end: &'a dyn Fn() -> bool,
}

impl<'a> Call<'a> {
    /// Makes a call. `may_end` returns false if the program has no other work. As a rule it is called after the call
    /// has fetched for [`LONG`]; earlier if other callers wait or rest.
    #[must_use]
    pub fn new(may_end: &'a dyn Fn() -> bool) -> Self {
        Self { began: OnceCell::new(), may_end }
    }

    fn is_long_at(&self) -> Instant {
        *self.began.get_or_init(Instant::now) + LONG
    }

    /// Whether the call has fetched for [`LONG`].
    #[must_use]
    pub fn is_long(&self) -> bool {
        Instant::now() >= self.is_long_at()
    }

    /// Whether the call has fetched for [`LONG`], and may end.
    #[must_use]
    pub fn ends(&self) -> bool {
        self.is_long() && (self.may_end)()
    }
}

/// Limit of a fetch for a call that may end early.
pub(super) struct Limit<'a> {
    /// Time at which this fetch began; the call may have begun earlier.
    began: Instant,
    call: Option<&'a Call<'a>>,
    /// Whether the call counts as long already before it has taken [`LONG`].
    waits_no_more: bool,
    has_waited: bool,
    is_over: bool,
}

impl<'a> Limit<'a> {
    /// Limit of a fetch that gets all of its bytes.
    pub(super) fn none() -> Self {
        Self { began: Instant::now(), call: None, waits_no_more: false, has_waited: false, is_over: false }
    }

    /// Limit that is reached when the call has taken [`LONG`], if the call may end then. The call's `may_end` is called
    /// only once.
    pub(super) fn of(call: &'a Call<'a>) -> Self {
        call.is_long_at();
        Self { call: Some(call), ..Self::none() }
    }

    pub(super) fn is_over(&mut self) -> bool {
        self.call.is_some_and(|call| self.waits_no_more || call.is_long()) && self.ends() || self.is_over
    }

    /// Treats the call from now on as if it had taken long.
    pub(super) fn wait_no_more(&mut self) {
        self.waits_no_more = true;
    }

    /// Notes that the fetch has waited.
    pub(super) fn waits(&mut self) {
        self.has_waited = true;
    }

    pub(super) fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// Reaches the limit early, if the call may end. Returns whether it is reached.
    pub(super) fn ends(&mut self) -> bool {
        if let Some(call) = self.call.take() {
            self.is_over = (call.may_end)();
        }
        self.is_over
    }

    /// Number of bytes to ask for next time, after `asked` were asked for and `came` of them came.
    pub(super) fn next(&self, asked: usize, came: usize) -> usize {
        let next = match self.is_over {
            true => came,
            false if self.began.elapsed() < LONG / 4 => asked.saturating_mul(2),
            false => asked,
        };
        next.clamp(*SOME.start(), *SOME.end())
    }
}
