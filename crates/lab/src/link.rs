//! Links with the properties of real networks: what one does to frames, as a plain value.
//!
//! Cubic and the kernel's other parts are real; the network between them is a queue in user space, so that it needs no
//! netem and its fates come from a seed. [`line::Line`] is one direction, without I/O; [`cable::Cable`] is the thread
//! that moves frames between two TAP devices through two of them.

pub(crate) mod cable;
mod frame;
mod line;

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::host::Role;
use crate::random::seed_or_random;

pub use cable::Cable;
pub use line::{Counts, Line};

/// What a link does to the frames of each direction. The default does nothing but carry them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// From end to end, one way: a round trip takes twice as long.
    pub delay: Duration,
    /// Up to so much more, evenly spread. By itself it reorders nothing: a frame waits for the one before it.
    pub jitter: Duration,
    /// Part of the frames that get lost, each independently of the others.
    pub loss: f64,
    /// Losses that come together, besides those.
    pub burst: Option<Burst>,
    /// Part of the frames that are late by [`Self::lateness`], so that others overtake them.
    pub reorder: f64,
    pub lateness: Duration,
    /// Part of the frames that arrive twice.
    pub duplicate: f64,
    /// Part of the frames that a router marks as having met congestion, of those whose senders understand that (RFC 3168).
    pub mark: f64,
    /// Pure ACKs leave together, once in so long, and of each connection only the newest goes unless it says more than
    /// that all has arrived: as modems and radios do that wait for their turn.
    pub ack_slot: Duration,
    /// Bits a second; `None`: as fast as the machine is.
    pub rate: Option<u64>,
    /// Bytes that may wait for their turn at [`Self::rate`]; a frame that does not fit is lost (tail drop).
    pub queue: usize,
    /// Of both devices, in bytes.
    pub mtu: u16,
    /// Where the fates come from; `None`: the environment's `SHUNT_SEED`, or a random one.
    pub seed: Option<u64>,
}

/// Whose ports have a link.
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

/// Losses that come together: Gilbert's model, in which a line that is bad loses every frame (Elliott: most).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Burst {
    /// Probability that a frame finds the line turned bad.
    pub begin: f64,
    /// Probability that a frame finds a bad line turned good.
    pub end: f64,
    /// Part of the frames that a bad line loses.
    pub loss: f64,
    /// A bad line turns good after this time at the latest: what is bad is a moment, and a TCP that waits for its timer,
    /// twice as long each time, would else meet the same burst again and again.
    pub longest: Duration,
}

/// Below the shortest retransmission timeout (200 ms).
const BURST_LONGEST: Duration = Duration::from_millis(100);

impl Burst {
    /// Bursts of `frames` on average that make a part `loss` of all frames.
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
    /// A long way: `delay` in each direction and nothing else.
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

    /// See [`Burst::of`].
    #[must_use]
    pub fn burst_loss(mut self, part: f64, frames: f64) -> Self {
        self.burst = Some(Burst::of(part, frames));
        self
    }

    /// Makes a part of the frames late by `lateness`.
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

    /// Marks a part of the frames, see [`Self::mark`].
    #[must_use]
    pub fn marking(mut self, part: f64) -> Self {
        self.mark = part;
        self
    }

    /// See [`Self::ack_slot`].
    #[must_use]
    pub fn ack_slot(mut self, slot: Duration) -> Self {
        self.ack_slot = slot;
        self
    }

    /// So many bits a second, before which so many bytes may wait.
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

    /// # Errors
    /// When a number means nothing.
    pub(crate) fn check(&self) -> Result<()> {
        let burst = self.burst.map_or([0.0; 3], |burst| [burst.begin, burst.end, burst.loss]);
        for part in [self.loss, self.reorder, self.duplicate, self.mark].into_iter().chain(burst) {
            ensure!((0.0..=1.0).contains(&part), "a link of {self:?}: {part} is no part of the frames");
        }
        ensure!(self.rate != Some(0), "a link of no bits a second");
        ensure!(self.mtu >= 576, "an MTU of {} bytes: RFC 791 has 576 at least", self.mtu);
        Ok(())
    }

    /// The seed, decided.
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
