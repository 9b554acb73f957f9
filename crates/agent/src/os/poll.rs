//! The agent's epoll(7) instance. It is level-triggered, so one `read` per wake-up is enough: an edge-triggered one
//! would need a second `read`, which finds nothing. A *peer* is another machine's agent, and a *server* a program of
//! this machine that is connected to the agent. A *fetch* brings a payload from a backend to a frontend's server. A
//! *sender* is this machine's kernel socket for a client. A *store* has the payloads of a machine's programs under
//! `shunt run`, and a *digest* is the SHA-256 of a file.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

/// Most events of one [`Poll::wait`].
pub const EVENTS_AT_ONCE: usize = 256;

/// Event source that became ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A termination signal.
    Signal,
    /// SIGHUP.
    Reload,
    /// A server wants to connect.
    LocalListener,
    /// An agent wants to connect.
    PeerListener,
    /// A server's connection, by its index.
    Local(usize),
    /// The connection with a peer, by the peer's index.
    Peer(usize),
    /// An accepted connection whose first frame has not come yet.
    Incoming(usize),
    /// The connection with a backend's agent, for a fetch that a server of this machine waits for.
    FetchOut(usize),
    /// The server that reads a fetch takes bytes again.
    FetchReader(usize),
    /// The connection with a frontend's agent, for a fetch that this machine serves.
    FetchIn(usize),
    /// A sender's socket has room again.
    Sender(usize),
    /// A program has a request for the agent.
    Store,
    /// Digests of more files are known, or are known not to exist.
    Digests,
    /// Threads have read bytes of files.
    Reads,
    /// A connection to another store that is being made for a program.
    Reaching(usize),
    /// A route to a peer's senders is found, has changed, or is lost.
    Routes,
    /// This machine's addresses have changed.
    Addresses,
    /// The BPF programs report that clients have acknowledged the ends of payloads.
    Reports,
}

impl Source {
    fn token(self) -> u64 {
        let (kind, index) = match self {
            Source::Signal => (0, 0),
            Source::LocalListener => (1, 0),
            Source::PeerListener => (2, 0),
            Source::Local(index) => (3, index),
            Source::Peer(index) => (4, index),
            Source::Incoming(index) => (5, index),
            Source::FetchOut(index) => (6, index),
            Source::FetchIn(index) => (7, index),
            Source::Sender(index) => (8, index),
            Source::Reload => (9, 0),
            Source::FetchReader(index) => (10, index),
            Source::Store => (11, 0),
            Source::Digests => (14, 0),
            Source::Reaching(index) => (12, index),
            Source::Routes => (13, 0),
            Source::Reports => (15, 0),
            Source::Reads => (16, 0),
            Source::Addresses => (17, 0),
        };
        kind << 56 | index as u64
    }

    fn of_token(token: u64) -> Self {
        let index = (token & ((1 << 56) - 1)) as usize;
        match token >> 56 {
            0 => Source::Signal,
            1 => Source::LocalListener,
            2 => Source::PeerListener,
            3 => Source::Local(index),
            4 => Source::Peer(index),
            5 => Source::Incoming(index),
            6 => Source::FetchOut(index),
            7 => Source::FetchIn(index),
            8 => Source::Sender(index),
            9 => Source::Reload,
            10 => Source::FetchReader(index),
            11 => Source::Store,
            12 => Source::Reaching(index),
            13 => Source::Routes,
            15 => Source::Reports,
            16 => Source::Reads,
            17 => Source::Addresses,
            _ => Source::Digests,
        }
    }
}

/// Events to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Bytes or connections to read, or the other end's close.
    Readable,
    /// The events of `Readable`, and room to write.
    Both,
    /// Room to write. The event is reported once.
    WritableOnce,
}

impl Interest {
    fn flags(self) -> EventFlags {
        match self {
            Interest::Readable => EventFlags::IN,
            Interest::Both => EventFlags::IN | EventFlags::OUT,
            Interest::WritableOnce => EventFlags::OUT | EventFlags::ONESHOT,
        }
    }
}

/// The epoll instance.
#[derive(Debug)]
pub struct Poll(OwnedFd);

impl Poll {
    /// Creates an epoll instance that waits for nothing yet.
    ///
    /// # Errors
    /// Returns the kernel's error of epoll_create1(2).
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Waits for `fd` from now on, or changes what is waited for. Closing the descriptor ends the wait.
    ///
    /// # Errors
    /// Returns the kernel's error of epoll_ctl(2).
    pub fn set(&self, fd: impl AsFd, source: Source, interest: Interest) -> io::Result<()> {
        let data = EventData::new_u64(source.token());
        match epoll::modify(&self.0, &fd, data, interest.flags()) {
            Err(Errno::NOENT) => Ok(epoll::add(&self.0, &fd, data, interest.flags())?),
            other => Ok(other?),
        }
    }

    /// Stops waiting for `fd`. Needed if a duplicate of the descriptor stays open elsewhere.
    pub fn remove(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.0, fd);
    }

    /// Waits until something is ready, for `timeout` at most. Puts up to [`EVENTS_AT_ONCE`] sources into `ready`, and
    /// none if the time is over.
    ///
    /// # Errors
    /// Returns the kernel's error of epoll_wait(2).
    pub fn wait(&self, ready: &mut Vec<Source>, timeout: Duration) -> io::Result<()> {
        ready.clear();
        let timeout = Timespec::try_from(timeout).expect("the agent's timeouts are short");
        // This array is on the stack: this program erases heap memory that it frees, which would take time at each
        // call.
        let mut events = [const { MaybeUninit::uninit() }; EVENTS_AT_ONCE];
        match epoll::wait(&self.0, &mut events, Some(&timeout)) {
            Ok((events, _)) => ready.extend(events.iter().map(|event| Source::of_token(event.data.u64()))),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back() {
        for source in [
            Source::Signal,
            Source::Local(0),
            Source::Peer(63),
            Source::Sender(65535),
            Source::FetchIn(9),
            Source::Reload,
            Source::FetchReader(3),
            Source::Store,
            Source::Digests,
            Source::Reaching(5),
            Source::Routes,
            Source::Reports,
            Source::Reads,
            Source::Addresses,
        ] {
            assert_eq!(Source::of_token(source.token()), source);
        }
    }
}
