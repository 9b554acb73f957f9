//! How long anybody waits for a machine that says nothing: less than a second, of which only the time counts in which this process
//! could have heard it. A process that was stopped itself has not waited.

use std::io;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::channel::Channel;

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
        let now = Instant::now();
        self.spent += now.duration_since(self.last).min(COUNTED);
        self.last = now;
        let left = PATIENCE.checked_sub(self.spent).filter(|left| !left.is_zero())?;
        Some(left.min(SLICE))
    }
}

/// Waits for the other end of a connection.
pub(super) struct Waiting<'a> {
    waited: Option<Waited>,
    /// Bytes that had moved when it began.
    moved: u64,
    /// Told once it takes long.
    tell: &'a dyn Fn(),
}

impl<'a> Waiting<'a> {
    pub(super) fn new(tell: &'a dyn Fn()) -> Self {
        Self { waited: None, moved: 0, tell }
    }

    /// Waits until a connection may be ready.
    ///
    /// # Errors
    /// Nothing has moved there for as long as [`PATIENCE`].
    pub(super) fn wait(&mut self, channel: &Channel, what: PollFlags) -> io::Result<()> {
        if self.moved != channel.moved() {
            (self.moved, self.waited) = (channel.moved(), None);
        }
        let slice = self.waited.get_or_insert_with(Waited::begin).slice().ok_or(io::ErrorKind::TimedOut)?;
        (self.tell)();
        let slice = Timespec { tv_sec: 0, tv_nsec: slice.subsec_nanos().into() };
        match poll(&mut [PollFd::new(channel, what)], Some(&slice)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
