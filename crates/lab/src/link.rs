//! Links with the properties of real networks: delay, loss, reordering, rate. [`Link`] holds them as a plain value.
//!
//! TCP, with its congestion control (cubic), is the kernel's own. The network between the hosts is a queue in user
//! space: it needs no netem, and a seed decides what becomes of each frame. [`line::Line`] is one direction, without
//! I/O. [`cable::Cable`] is the thread that moves frames between two TAP devices through two lines.

pub(crate) mod cable;
mod frame;
mod line;

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::host::Role;
use crate::random::seed_or_random;

pub use cable::Cable;
pub use line::{Counts, Line};

/// Properties of a link, the same for each direction. The default link carries every frame once, and delays none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Delay from end to end, one way: a round trip takes twice as long.
    pub delay: Duration,
    /// Largest additional delay of a frame. The additional delay of each frame is drawn at random, evenly from 0 to
    /// this. Jitter alone reorders nothing: a frame waits for the one before it.
    pub jitter: Duration,
    /// Fraction of the frames that get lost, each independently of the others.
    pub loss: f64,
    /// Losses that come together, besides the independent ones.
    pub burst: Option<Burst>,
    /// Fraction of the frames that arrive later than their turn, by [`Self::lateness`]. Others overtake them.
    pub reorder: f64,
    pub lateness: Duration,
    /// Fraction of the frames that arrive twice.
    pub duplicate: f64,
    /// Fraction of the frames that a router marks as having met congestion, among those whose senders accept marks
    /// (RFC 3168).
    pub mark: f64,
    /// Interval at which pure ACKs leave, all together, as from modems and radios that wait for their turn. A pure ACK
    /// is a segment that has only the ACK flag, no data and no SACK blocks. A pure ACK is left out if the next frame
    /// leaves at the same time, and is a newer pure ACK of the same connection. Zero: ACKs leave as they come.
    pub ack_slot: Duration,
    /// Rate in bits per second; `None`: no limit.
    pub rate: Option<u64>,
    /// Size of the queue in front of [`Self::rate`], in bytes; a frame that does not fit is lost (tail drop).
    pub queue: usize,
    /// MTU of both devices, in bytes.
    pub mtu: u16,
    /// Seed that decides what becomes of each frame; `None`: the environment's `SHUNT_SEED`, or a random one.
    pub seed: Option<u64>,
}

/// Names the hosts whose ports have a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whose {
    /// All hosts of a role.
    Role(Role),
    /// One host.
    Host(&'static str),
}

impl Whose {
    pub(crate) fn has(self, name: &str, role: Role) -> bool {
        match self {
            Self::Role(of) => of == role,
            Self::Host(host) => host == name,
        }
    }
}

/// Losses that come together. In Gilbert's model a bad line loses every frame, in Elliott's a fraction of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Burst {
    /// Probability that a good line turns bad at a frame.
    pub begin: f64,
    /// Probability that a bad line turns good at a frame.
    pub end: f64,
    /// Fraction of the frames that a bad line loses.
    pub loss: f64,
    /// Longest time that a line stays bad, because a burst models a short moment. Without this limit, a bad line would
    /// turn good only when frames come. A TCP that only retransmits by its timer, whose time doubles each time, would
    /// then meet the same burst again and again.
    pub longest: Duration,
}

/// Longest burst of [`Burst::of`], below the shortest retransmission timeout (200 ms).
const BURST_LONGEST: Duration = Duration::from_millis(100);

impl Burst {
    /// Bursts of `frames` frames on average, which lose a fraction `loss` of all frames.
    #[must_use]
    pub fn of(loss: f64, frames: f64) -> Self {
        let end = 1.0 / frames;
        Self { begin: end * loss / (1.0 - loss), end, loss: 1.0, longest: BURST_LONGEST }
    }
}

impl Default for Link {
    fn default() -> Self {
        Self {
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            loss: 0.0,
            burst: None,
            reorder: 0.0,
            lateness: Duration::ZERO,
            duplicate: 0.0,
            mark: 0.0,
            ack_slot: Duration::ZERO,
            rate: None,
            queue: 1 << 20,
            mtu: 1500,
            seed: None,
        }
    }
}

impl Link {
    /// A long path: `delay` in each direction and nothing else.
    #[must_use]
    pub fn wan(delay: Duration) -> Self {
        Self { delay, ..Self::default() }
    }

    #[must_use]
    pub fn jitter(mut self, jitter: Duration) -> Self {
        self.jitter = jitter;
        self
    }

    #[must_use]
    pub fn loss(mut self, part: f64) -> Self {
        self.loss = part;
        self
    }

    /// Adds losses in bursts of `frames` frames on average, which lose a fraction `part` of all frames.
    #[must_use]
    pub fn burst_loss(mut self, part: f64, frames: f64) -> Self {
        self.burst = Some(Burst::of(part, frames));
        self
    }

    /// Makes a fraction of the frames late by `lateness`.
    #[must_use]
    pub fn reorder(mut self, part: f64, lateness: Duration) -> Self {
        (self.reorder, self.lateness) = (part, lateness);
        self
    }

    #[must_use]
    pub fn duplicate(mut self, part: f64) -> Self {
        self.duplicate = part;
        self
    }

    /// Marks a fraction of the frames as having met congestion ([`Self::mark`]).
    #[must_use]
    pub fn marking(mut self, part: f64) -> Self {
        self.mark = part;
        self
    }

    /// Sets the interval [`Self::ack_slot`].
    #[must_use]
    pub fn ack_slot(mut self, slot: Duration) -> Self {
        self.ack_slot = slot;
        self
    }

    /// Limits the rate. Frames of up to `queue_bytes` bytes in total may wait until they can leave.
    #[must_use]
    pub fn rate(mut self, bits_per_second: u64, queue_bytes: usize) -> Self {
        (self.rate, self.queue) = (Some(bits_per_second), queue_bytes);
        self
    }

    #[must_use]
    pub fn mtu(mut self, bytes: u16) -> Self {
        self.mtu = bytes;
        self
    }

    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Checks that the link's numbers make sense.
    ///
    /// # Errors
    /// When a number makes no sense.
    pub(crate) fn check(&self) -> Result<()> {
        let burst = self.burst.map_or([0.0; 3], |burst| [burst.begin, burst.end, burst.loss]);
        for part in [self.loss, self.reorder, self.duplicate, self.mark].into_iter().chain(burst) {
            ensure!((0.0..=1.0).contains(&part), "a link of {self:?}: {part} is no part of the frames");
        }
        ensure!(self.rate != Some(0), "a link of no bits a second");
        ensure!(self.mtu >= 576, "an MTU of {} bytes: RFC 791 has 576 at least", self.mtu);
        Ok(())
    }

    /// Seed of this link: the configured one, the environment's, or a random one.
    pub(crate) fn seed_or_random(&self) -> u64 {
        seed_or_random(self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_mean_nothing_are_refused() {
        let link = Link::default();
        assert!(link.check().is_ok() && link.burst_loss(0.03, 4.0).check().is_ok());
        for bad in [link.loss(1.5), link.reorder(-0.1, Duration::ZERO), link.rate(0, 0), link.mtu(100)] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_named_seed_is_taken() {
        assert_eq!(Link::default().seed(7).seed_or_random(), 7);
    }
}
