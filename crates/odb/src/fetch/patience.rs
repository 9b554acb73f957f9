//! How long anybody waits for a machine that says nothing: less than a second, of which only the time counts in which this process
//! could have heard it. A process that was stopped itself has not waited.

use std::cell::OnceCell;
use std::io;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::channel::{Channel, Moved};

/// How long a machine may say nothing to a process that waits for it. What else the process has to do meanwhile waits, too, and is to
/// come within a second (docs/silence.md).
pub(super) const PATIENCE: Duration = Duration::from_millis(900);
/// How long one waits at a time.
const SLICE: Duration = Duration::from_millis(50);
/// What counts of a slice at most.
const COUNTED: Duration = Duration::from_millis(100);

/// What has been waited, by one or more threads together.
#[derive(Debug)]
pub(super) struct Waited {
    spent: Duration,
    last: Instant,
}

impl Waited {
    pub(super) fn begin() -> Self {
        Self { spent: Duration::ZERO, last: Instant::now() }
    }

    /// How long to wait until the next look. `None`: patience is at its end.
    pub(super) fn slice(&mut self) -> Option<Duration> {
        self.slice_of(PATIENCE)
    }

    /// The same of so much patience.
    pub(super) fn slice_of(&mut self, patience: Duration) -> Option<Duration> {
        let now = Instant::now();
        self.spent += now.duration_since(self.last).min(COUNTED);
        self.last = now;
        let left = patience.checked_sub(self.spent).filter(|left| !left.is_zero())?;
        Some(left.min(SLICE))
    }
}

/// How long the other end of a connection has said nothing to those who waited for it.
#[derive(Debug, Default)]
pub(super) struct Silence {
    waited: Option<Waited>,
    /// Bytes that had moved when it began.
    moved: Moved,
}

/// Waits for the other end of a connection.
pub(super) struct Waiting<'a> {
    silence: Silence,
    /// Told once it takes long.
    tell: &'a dyn Fn(),
}

impl<'a> Waiting<'a> {
    /// Goes on where somebody else has stopped.
    pub(super) fn after(silence: Silence, tell: &'a dyn Fn()) -> Self {
        Self { silence, tell }
    }

    /// The rest is waited for by somebody else.
    pub(super) fn ends(self) -> Silence {
        self.silence
    }

    /// Waits until a connection may be ready.
    ///
    /// # Errors
    /// Nothing has moved there for as long as [`PATIENCE`].
    pub(super) fn wait(&mut self, channel: &Channel, what: PollFlags) -> io::Result<()> {
        let (silence, moved) = (&mut self.silence, channel.moved());
        // Where the kernel takes a share meanwhile, that is no answer to somebody who waits for one.
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

/// So long one waits for all bytes who can do with the first of them.
pub const LONG: Duration = Duration::from_millis(200);
/// How many are asked for then: as many as come in that time.
pub(super) const SOME: RangeInclusive<usize> = (32 << 10)..=(1 << 20);

/// A program's call that can end with some of its bytes, where the program has other things to do than to wait for all.
pub struct Call<'a> {
    /// When it fetched for the first time: most calls fetch nothing, and look at no clock.
    began: OnceCell<Instant>,
    may_end: &'a dyn Fn() -> bool,
}

impl<'a> Call<'a> {
    /// `may_end` is asked once it has fetched for [`LONG`]: false, where there is nothing to be done meanwhile.
    #[must_use]
    pub fn new(may_end: &'a dyn Fn() -> bool) -> Self {
        Self { began: OnceCell::new(), may_end }
    }

    fn is_long_at(&self) -> Instant {
        *self.began.get_or_init(Instant::now) + LONG
    }

    /// Whether it has taken long.
    #[must_use]
    pub fn is_long(&self) -> bool {
        Instant::now() >= self.is_long_at()
    }

    /// Whether it has, and may end.
    #[must_use]
    pub fn ends(&self) -> bool {
        self.is_long() && (self.may_end)()
    }
}

/// How long one waits whose program has other things to do meanwhile.
pub(super) struct Limit<'a> {
    /// When this fetch began; the call may be older.
    began: Instant,
    call: Option<&'a Call<'a>>,
    /// Nobody is to wait for the call from now on, however short it was.
    waits_no_more: bool,
    has_waited: bool,
    is_over: bool,
}

impl<'a> Limit<'a> {
    /// For all.
    pub(super) fn none() -> Self {
        Self { began: Instant::now(), call: None, waits_no_more: false, has_waited: false, is_over: false }
    }

    /// Until the call has taken [`LONG`]. Whether it may end is asked once.
    pub(super) fn of(call: &'a Call<'a>) -> Self {
        call.is_long_at();
        Self { call: Some(call), ..Self::none() }
    }

    pub(super) fn is_over(&mut self) -> bool {
        self.call.is_some_and(|call| self.waits_no_more || call.is_long()) && self.ends() || self.is_over
    }

    /// From here on it is as if the call had taken long.
    pub(super) fn wait_no_more(&mut self) {
        self.waits_no_more = true;
    }

    /// Somebody has waited.
    pub(super) fn waits(&mut self) {
        self.has_waited = true;
    }

    pub(super) fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// Ends it before, if the call may.
    pub(super) fn ends(&mut self) -> bool {
        if let Some(call) = self.call.take() {
            self.is_over = (call.may_end)();
        }
        self.is_over
    }

    /// How many to ask for the next time, where so many were asked for last, and so many of them came.
    pub(super) fn next(&self, asked: usize, came: usize) -> usize {
        let next = match self.is_over {
            true => came,
            false if self.began.elapsed() < LONG / 4 => asked.saturating_mul(2),
            false => asked,
        };
        next.clamp(*SOME.start(), *SOME.end())
    }
}
