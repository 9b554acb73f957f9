//! Knowledge of a writer about its receivers: how much they read of each kind of payload. Bytes that they read are sent
//! as real bytes. If they read nearly all of a payload, all of it is sent so. No I/O: random numbers come as arguments.
//!
//! A *payload* is one large write of a program. Its *real* bytes are sent as they are. A payload that is sent by
//! *reference* stays in the writer's store. Its receiver fetches the bytes that it touches; until then these bytes are
//! *absent* at the receiver. The store *reports* to the writer which bytes were fetched. A *kind* is a number that
//! stands for all payloads that are likely read in the same way.
//!
//! ```text
//!   plan    decides how the next payload of a kind is sent: real, or by reference between a real head and a real tail
//!   learn   takes in what became of a payload that was sent by reference
//! ```
//!
//! The knowledge about a kind is eight bytes, of which any are valid, in memory that processes share ([`Table`]). A
//! process that was killed or a peer that lies can only make guesses worse.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use shunt_sys::shared::SharedMemory;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::touched::Touched;

/// Lengths to choose from, for the real bytes before a reference (head) and for those after it (tail). A receiver gets
/// the head by a separate read. The tail may share a page with absent bytes, which are fetched when that page is
/// touched. Only the receiver knows where its pages begin. So a tail, if there is one, is a page long: then the page of
/// its last byte has no absent bytes.
const HEADS: [usize; 4] = [0, 512, 4096, 16 << 10];
const TAILS: [usize; 2] = [0, 4096];
/// Smallest number of bytes between head and tail for which a reference is used.
pub const REFERENCE_MIN: usize = 4096;

/// Interval between probes. While a kind is sent as real bytes, about one payload in this many is sent by reference, to
/// see what becomes of it. Probes are more frequent if references cost only a little more than they save.
pub const PROBE_EVERY: u8 = 64;
/// A value of [`Learnt::until_probe`] above this means that the next payloads are probes. The difference is their
/// number.
const IN_A_ROW: u8 = 0xf0;

/// First guess of what a reference saves, in quarters of a microsecond. It is low: as a rule, one payload that is read
/// as a whole makes the mean negative.
const GUESS: i16 = 32;
/// Largest divisor for the step by which a report moves the mean. The first report moves the mean by half of the
/// difference between the two, the second by a third, and so on. The divisor does not grow beyond this.
const MEMORY: u8 = 16;
/// Number of reports of touches only next to the head or tail, after which the head or tail grows. A report without
/// touches sets the count back to zero.
const MISSED: u8 = 2;
/// Count of reports without a touch ([`Learnt::count_calm`]) at which head and tail shrink. A report of touches only
/// next to the head or tail sets the count back to zero.
const CALM: u8 = 64;
/// Number of bytes at each end of a reference. If a receiver has touched only these, and some of the outer half of
/// them, a longer head or tail could have avoided the touches.
const END_BYTES: u32 = 8192;

/// Way to send a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Sent as real bytes: the receiver would probably read it, or it is too short for a reference.
    Real,
    /// Sent by reference, except for some bytes at the beginning and at the end.
    Reference {
        /// Length of the real head, in bytes.
        head: usize,
        /// Length of the real tail, in bytes.
        tail: usize,
        /// Head and tail of this plan, which the writer passes to [`Learnt::learn`] with the report.
        sent: Sent,
        /// Whether this is only a probe.
        probe: bool,
    },
}

/// Head and tail with which a payload was sent, as indices into [`HEADS`] and [`TAILS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    head: u8,
    tail: u8,
}

/// Knowledge about a kind of payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Learnt {
    /// Mean of what a reference has saved, in quarters of a microsecond.
    saved: i16,
    reports: u8,
    until_probe: u8,
    head: u8,
    tail: u8,
    missed: u8,
    calm: u8,
}

impl Learnt {
    /// Makes empty knowledge. `begins`: the payloads of this kind are the first bytes of a message. A program that
    /// passes them on reads their beginning first. If a payload is the whole message, the program also reads bytes of
    /// the protocol at the payload's end.
    #[must_use]
    pub fn new(begins: bool) -> Self {
        let end = u8::from(begins);
        Self { saved: GUESS, reports: 0, until_probe: PROBE_EVERY, head: end, tail: end, missed: 0, calm: 0 }
    }

    /// Decides how a payload of `bytes` bytes is sent.
    pub fn plan(&mut self, bytes: usize, random: u8) -> Plan {
        let sent = Sent { head: self.head.min(HEADS.len() as u8 - 1), tail: self.tail.min(TAILS.len() as u8 - 1) };
        let (head, tail) = (HEADS[usize::from(sent.head)], TAILS[usize::from(sent.tail)]);
        let has_room = head + tail + REFERENCE_MIN <= bytes;
        if self.saved >= 0 && has_room {
            Plan::Reference { head, tail, sent, probe: false }
        } else if !self.is_due(bytes, random) {
            Plan::Real
        } else if has_room {
            Plan::Reference { head, tail, sent, probe: true }
        } else {
            Plan::Reference { head: 0, tail: 0, sent: Sent::default(), probe: true }
        }
    }

    /// Whether a payload is to be a probe.
    fn is_due(&mut self, bytes: usize, random: u8) -> bool {
        if self.until_probe > IN_A_ROW {
            self.until_probe -= 1;
            return true;
        }
        if self.saved >= 0 && self.reports == 0 {
            // This payload is too short for a reference, and nothing was reported of longer ones yet. So there is
            // nothing to probe.
            return false;
        }
        let every = self.probe_every(bytes);
        let left = self.until_probe.min(every).checked_sub(1);
        // The count is varied at random, so that the interval does not coincide with a rhythm of the program's own.
        self.until_probe = left.unwrap_or(every - every / 4 + random % (every / 2));
        left.is_none()
    }

    /// Interval between probes, in payloads. It is short if references cost only a little more than they save.
    fn probe_every(&self, bytes: usize) -> u8 {
        const OFTEN: i64 = 4;
        if self.saved >= 0 {
            return PROBE_EVERY;
        }
        let could_save = (bytes as i64 / 512).max(1);
        let every = i64::from(PROBE_EVERY) * 2 * -i64::from(self.saved) / could_save;
        every.clamp(OFTEN, i64::from(PROBE_EVERY)) as u8
    }

    /// Takes in what became of a payload, of which `bytes` bytes were sent by reference.
    pub fn learn(&mut self, bytes: u32, sent: Sent, touched: &Touched) {
        let touched = Touched { bytes: touched.bytes.min(bytes), end: touched.end.min(bytes), ..*touched };
        if touched.is_nothing() {
            self.missed = 0;
            self.count_calm(sent);
        } else if self.misses(bytes, sent, &touched) {
            return;
        }
        self.weigh(bytes, &touched);
        if self.saved < 0 && touched.is_nothing() {
            // The receiver may have changed: the next three payloads are probes, and their reports count more than
            // earlier ones.
            self.until_probe = IN_A_ROW + 3;
            self.reports = self.reports.min(3);
        }
    }

    /// Whether only bytes next to the head or tail were touched, and such touches can be avoided: the head or tail can
    /// grow, or has grown since. Then the touches do not count against references. Also makes the head or tail grow,
    /// after enough such reports.
    fn misses(&mut self, bytes: u32, sent: Sent, touched: &Touched) -> bool {
        let Touched { first, end, .. } = *touched;
        let (at_head, at_tail) = (first < END_BYTES / 2, end > bytes.saturating_sub(END_BYTES / 2));
        let is_at_ends = match (at_head, at_tail) {
            (true, true) => true,
            (true, false) => end <= END_BYTES,
            (false, true) => bytes.saturating_sub(first) <= END_BYTES,
            (false, false) => false,
        };
        if !is_at_ends || first >= end || touched.bytes > END_BYTES.min(bytes / 2) {
            return false;
        }
        let head_can_grow = at_head && usize::from(self.head) + 1 < HEADS.len();
        let tail_can_grow = at_tail && usize::from(self.tail) + 1 < TAILS.len();
        self.calm = 0;
        // Many reports may still come about payloads that were sent before the head or tail grew.
        if (sent.head, sent.tail) != (self.head, self.tail) || !head_can_grow && !tail_can_grow {
            return sent.head < self.head || sent.tail < self.tail;
        }
        self.missed = self.missed.saturating_add(1);
        if self.missed >= MISSED {
            self.missed = 0;
            self.head += u8::from(head_can_grow);
            self.tail += u8::from(tail_can_grow);
        }
        true
    }

    /// Counts a report without touches; several times if the payload had a shorter head or tail than payloads have now.
    /// At a count of [`CALM`] the head and tail become shorter, because the receivers perhaps read less than
    /// these contain.
    fn count_calm(&mut self, sent: Sent) {
        let is_less = sent.head < self.head || sent.tail < self.tail;
        self.calm = self.calm.saturating_add(if is_less { CALM / 4 } else { 1 });
        if self.calm >= CALM {
            self.calm = 0;
            self.head = self.head.saturating_sub(1);
            self.tail = self.tail.saturating_sub(1);
        }
    }

    /// Updates the mean. A page that is not read saves two microseconds. A page that is fetched costs one, and each
    /// fetch costs the time that it took besides the copying.
    fn weigh(&mut self, bytes: u32, touched: &Touched) {
        let saved = i64::from(bytes - touched.bytes) / 512;
        let cost = i64::from(touched.waited) + i64::from(touched.bytes) / 1024;
        let difference = (saved - cost).clamp(-8192, 8192) - i64::from(self.saved);
        self.reports = self.reports.saturating_add(1).clamp(2, MEMORY);
        let step = match difference / i64::from(self.reports) {
            0 => difference.signum(),
            step => step,
        };
        self.saved = (i64::from(self.saved) + step).clamp(i64::from(i16::MIN), i64::from(i16::MAX)) as i16;
    }
}

/// Note that a writer keeps with a payload until it learns what has become of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// Kind of the payload.
    pub kind: u64,
    /// Head and tail with which the payload was sent.
    pub sent: Sent,
}

/// Report on what has become of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// The writer's note.
    pub note: Note,
    /// Length of the payload's reference, in bytes.
    pub bytes: u32,
    /// Bytes of the payload that were needed.
    pub touched: Touched,
}

/// Number of kinds that a table holds. The entry of each is the kind's number and the knowledge about it.
const KINDS: usize = 1024;
const ENTRY_BYTES: usize = 16;
/// Size of a [`Table`], in bytes.
pub const TABLE_BYTES: usize = KINDS * ENTRY_BYTES;
/// Number of consecutive entries of a table among which a kind is looked for.
const PROBES: usize = 8;

/// Knowledge about all kinds, at the end of memory that processes share. If there are too many kinds, a new one
/// replaces an old one.
#[derive(Debug)]
pub struct Table(Arc<SharedMemory>);

impl Table {
    /// Uses the last [`TABLE_BYTES`] of this memory. `None` if it is too small, or its length is no multiple of 8.
    #[must_use]
    pub fn new(memory: impl Into<Arc<SharedMemory>>) -> Option<Self> {
        let memory = memory.into();
        (memory.len() >= TABLE_BYTES && memory.len().is_multiple_of(8)).then_some(Self(memory))
    }

    /// Offset of a kind's entry, or of the entry that it may take.
    fn entry(&self, kind: u64) -> usize {
        let base = self.0.len() - TABLE_BYTES;
        let at = |probe: usize| base + (kind as usize).wrapping_add(probe) % KINDS * ENTRY_BYTES;
        let is = |wanted: u64| (0..PROBES).map(at).find(|at| self.0.long(*at).load(Ordering::Acquire) == wanted);
        is(kind).or_else(|| is(0)).unwrap_or_else(|| at((kind >> 32) as usize % PROBES))
    }

    /// Changes the knowledge about a kind, in one atomic step.
    fn change<T>(&self, kind: u64, begins: bool, mut change: impl FnMut(&mut Learnt) -> T) -> T {
        let kind = kind.max(1);
        let entry = self.entry(kind);
        let value = self.0.long(entry + 8);
        if self.0.long(entry).swap(kind, Ordering::AcqRel) != kind {
            value.store(zerocopy::transmute!(Learnt::new(begins)), Ordering::Release);
        }
        loop {
            let before = value.load(Ordering::Acquire);
            let mut learnt: Learnt = zerocopy::transmute!(before);
            let changed = change(&mut learnt);
            let after: u64 = zerocopy::transmute!(learnt);
            if before == after || value.compare_exchange(before, after, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return changed;
            }
        }
    }

    /// Decides how a payload of a kind is sent ([`Learnt::new`], [`Learnt::plan`]).
    #[must_use]
    pub fn plan(&self, kind: u64, begins: bool, bytes: usize, random: u8) -> Plan {
        self.change(kind, begins, |learnt| learnt.plan(bytes, random))
    }

    /// Takes in a report, unless another kind has taken the table's entry of the report's kind.
    pub fn learn(&self, report: &Report) {
        let Report { note, bytes, touched } = report;
        if self.0.long(self.entry(note.kind.max(1))).load(Ordering::Acquire) == note.kind.max(1) {
            self.change(note.kind, false, |learnt| learnt.learn(*bytes, note.sent, touched));
        }
    }
}
