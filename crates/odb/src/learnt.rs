//! What a writer has learnt of its receivers: how much of a kind of payloads they look at. That much is sent for real, and
//! where they look at nearly all, everything is. No I/O: random numbers come as arguments.
//!
//! ```text
//!   plan    how the next payload of a kind goes: for real, or by reference between a head and a tail that are real
//!   learn   what became of one that went by reference
//! ```
//!
//! What is kept of a kind is eight bytes of which any are valid, in memory that processes share ([`Table`]): who
//! changes them, a process that was killed or a peer that lies, makes guesses worse and nothing else.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use shunt_sys::shared::SharedMemory;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::touched::Touched;

/// What may be sent for real before a reference, and behind it. A tail is a page at least: real bytes in the same page
/// as absent ones have the page fetched, and where the receiver's pages begin only the receiver knows.
const HEADS: [usize; 4] = [0, 512, 4096, 16 << 10];
const TAILS: [usize; 2] = [0, 4096];
/// Less than this between them does not go by reference.
pub const REFERENCE_MIN: usize = 4096;

/// While a kind goes for real, one payload in so many goes by reference, to see what becomes of it; more where it is close.
pub const PROBE_EVERY: u8 = 64;
/// Above this, [`Learnt::until_probe`] says how many come one after the other.
const IN_A_ROW: u8 = 0xf0;

/// In quarters of a microsecond: the first guess, until it is known. One payload that is read whole outweighs it.
const GUESS: i16 = 32;
/// Reports that count as much as all before them together, nearly.
const MEMORY: u8 = 16;
/// Reports in a row of a head or tail that is touched, until more of it is sent for real; and of one that is not, until less.
const MISSED: u8 = 2;
const CALM: u8 = 64;
/// What a touch at an end is: no further in than this.
const END_BYTES: u32 = 8192;

/// How a payload goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// All of it, because it would be touched.
    Real,
    /// By reference, but for so many bytes at its beginning and its end.
    Reference {
        /// Bytes.
        head: usize,
        /// Bytes.
        tail: usize,
        /// To tell what becomes of it by.
        sent: Sent,
        /// Only to see whether it is still touched.
        probe: bool,
    },
}

/// How a payload was sent: which of the heads and tails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    head: u8,
    tail: u8,
}

/// What is known of a kind of payloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Learnt {
    /// What a reference has saved, as a mean, in quarters of a microsecond.
    saved: i16,
    reports: u8,
    until_probe: u8,
    head: u8,
    tail: u8,
    missed: u8,
    calm: u8,
}

impl Learnt {
    /// Nothing. `begins`: the payloads begin what one end says to the other. Nobody passes on what he has not seen the
    /// beginning of; and where that is in one piece with the rest, the protocol's own bytes follow behind it, too.
    #[must_use]
    pub fn new(begins: bool) -> Self {
        let end = u8::from(begins);
        Self { saved: GUESS, reports: 0, until_probe: PROBE_EVERY, head: end, tail: end, missed: 0, calm: 0 }
    }

    /// How a payload of so many bytes goes.
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

    /// Whether a payload is one that goes by reference only to see.
    fn is_due(&mut self, bytes: usize, random: u8) -> bool {
        if self.until_probe > IN_A_ROW {
            self.until_probe -= 1;
            return true;
        }
        if self.saved >= 0 && self.reports == 0 {
            // None was long enough yet, and none was touched.
            return false;
        }
        let every = self.probe_every(bytes);
        let left = self.until_probe.min(every).checked_sub(1);
        // More or less: a rhythm of the program's own shall not meet ours.
        self.until_probe = left.unwrap_or(every - every / 4 + random % (every / 2));
        left.is_none()
    }

    /// The closer it is, the sooner is looked again.
    fn probe_every(&self, bytes: usize) -> u8 {
        const OFTEN: i64 = 4;
        if self.saved >= 0 {
            return PROBE_EVERY;
        }
        let could_save = (bytes as i64 / 512).max(1);
        let every = i64::from(PROBE_EVERY) * 2 * -i64::from(self.saved) / could_save;
        every.clamp(OFTEN, i64::from(PROBE_EVERY)) as u8
    }

    /// What became of a payload of which so many bytes were a reference.
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
            // Something may have changed: the next ones tell, and count more than those before.
            self.until_probe = IN_A_ROW + 3;
            self.reports = self.reports.min(3);
        }
    }

    /// A touch of nothing but an end, which sending more of it for real can avoid, is not held against references.
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
        // Of payloads that were sent before it grew, there may be many reports.
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

    /// Where no more than what was sent for real is looked at for long, perhaps less is.
    fn count_calm(&mut self, sent: Sent) {
        let is_less = sent.head < self.head || sent.tail < self.tail;
        self.calm = self.calm.saturating_add(if is_less { CALM / 4 } else { 1 });
        if self.calm >= CALM {
            self.calm = 0;
            self.head = self.head.saturating_sub(1);
            self.tail = self.tail.saturating_sub(1);
        }
    }

    /// A page that nobody looks at saves two microseconds, one that is fetched costs one, and the fetch itself what it took.
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

/// What a writer keeps with a payload until it knows what has become of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// Which kind it is of.
    pub kind: u64,
    /// How it was sent.
    pub sent: Sent,
}

/// What has become of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// What its writer has noted.
    pub note: Note,
    /// Bytes of it.
    pub bytes: u32,
    /// Of these.
    pub touched: Touched,
}

/// Kinds that are kept, and bytes for each: which, and what is known of it.
const KINDS: usize = 1024;
const ENTRY_BYTES: usize = 16;
/// Bytes of a [`Table`].
pub const TABLE_BYTES: usize = KINDS * ENTRY_BYTES;
const PROBES: usize = 8;

/// What is known of all kinds, at the end of some memory that processes share. Where there are too many, a newer one takes
/// an older one's place.
#[derive(Debug)]
pub struct Table(Arc<SharedMemory>);

impl Table {
    /// At the end of this memory.
    #[must_use]
    pub fn new(memory: impl Into<Arc<SharedMemory>>) -> Option<Self> {
        let memory = memory.into();
        (memory.len() >= TABLE_BYTES && memory.len().is_multiple_of(8)).then_some(Self(memory))
    }

    /// Where a kind is, or may be.
    fn entry(&self, kind: u64) -> usize {
        let base = self.0.len() - TABLE_BYTES;
        let at = |probe: usize| base + (kind as usize).wrapping_add(probe) % KINDS * ENTRY_BYTES;
        let is = |wanted: u64| (0..PROBES).map(at).find(|at| self.0.long(*at).load(Ordering::Acquire) == wanted);
        is(kind).or_else(|| is(0)).unwrap_or_else(|| at((kind >> 32) as usize % PROBES))
    }

    /// Changes what is known of a kind.
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

    /// How a payload of a kind goes ([`Learnt::new`], [`Learnt::plan`]).
    #[must_use]
    pub fn plan(&self, kind: u64, begins: bool, bytes: usize, random: u8) -> Plan {
        self.change(kind, begins, |learnt| learnt.plan(bytes, random))
    }

    /// What has become of one.
    pub fn learn(&self, report: &Report) {
        let Report { note, bytes, touched } = report;
        if self.0.long(self.entry(note.kind.max(1))).load(Ordering::Acquire) == note.kind.max(1) {
            self.change(note.kind, false, |learnt| learnt.learn(*bytes, note.sent, touched));
        }
    }
}
