//! Frames of one direction of a connection. *Real* bytes are sent as they are, and a *reference* is sent in place of
//! bytes. A direction is *framed* if it carries frames. No I/O. Numbers in parentheses are lengths in bytes:
//!
//! ```text
//!   preamble (16)   once, at the beginning of a framed direction
//!   kind (1)  zero (3)  length (4, little-endian)   then, by kind:
//!     REAL       `length` bytes
//!     REFERENCE  a reference (REFERENCE_BYTES), standing for as many bytes as it says, and whether it counts (1)
//! ```
//!
//! A reference names bytes of a payload, and has a *share* of the right to fetch them from the *holder*, the store that
//! has the payload. The size of the share is its *weight*, a power of two. The holder keeps the payload until the whole
//! weight has come back, or the time for which it keeps payloads is over.
//!
//! The states of both ends are plain values without pointers, because processes share them
//! (crates/process/src/connections/states.rs). Any bytes are a valid state.
//!
//! The length of a REAL frame promises a number of bytes, not a write. If the kernel takes fewer bytes of a write,
//! later writes complete the frame, whatever they contain. So a direction that has carried only short writes for long
//! promises more than the current write has ([`Sending::short`]). The next writes then need no header, and their
//! receiver need not look for one.
//!
//! A REFERENCE frame is no such promise. If the kernel takes only a part of one, the program is told that nothing was
//! written, and may continue with other bytes or none. Then the frame's last byte says that the reference does not
//! count. So no write has to wait until a whole reference is in the socket.

use std::mem::offset_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::reference::{REFERENCE_BYTES, Reference, Weight};

/// First bytes of a framed direction. They are random, so that no protocol begins with them.
pub const PREAMBLE: [u8; 16] =
    [0xd6, 0x1f, 0x8b, 0x42, 0x93, 0x5e, 0xa7, 0x0c, 0xf1, 0x64, 0x2d, 0xb8, 0x7a, 0x90, 0xc3, 0x01];
/// Length of a frame's header, in bytes.
pub const HEADER_BYTES: usize = 8;
/// Largest number of bytes that one real frame promises.
pub const REAL_MAX: usize = u32::MAX as usize;

const REAL: u8 = 1;
const REFERENCE: u8 = 2;

/// Length of a REFERENCE frame's body, in bytes: a reference, and whether it counts.
const REFERENCE_FRAME_BYTES: usize = REFERENCE_BYTES + 1;
const VOID: u8 = 0;
const COUNTS: u8 = 1;

fn header(kind: u8, length: u32) -> [u8; HEADER_BYTES] {
    let [a, b, c, d] = length.to_le_bytes();
    [kind, 0, 0, 0, a, b, c, d]
}

/// The peer has sent something that is no frame. Only a broken or hostile peer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other end of the connection sent something that is not a frame")]
pub struct NotAFrame;

/// Next step of a receiver: bytes to take from the socket or to look at, and the method to call with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Look at up to this many bytes without taking them, then call [`Receiving::saw_preamble`].
    Preamble(usize),
    /// Take at most this many bytes, then call [`Receiving::took_header`].
    Header(usize),
    /// Take at most this many bytes for the program, then call [`Receiving::took_real`].
    Real(u64),
    /// Take at most this many bytes, then call [`Receiving::took_reference_part`].
    ReferencePart(usize),
    /// Look at one byte without taking it, the last of a REFERENCE frame, then call [`Receiving::saw_reference`].
    Reference,
    /// Take nothing: the direction is not framed, and all its bytes are the program's.
    Plain,
    /// Take nothing: the direction is broken.
    Broken,
}

/// Result of looking at the first bytes of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// The preamble. The caller takes all of [`PREAMBLE`] from the socket.
    Framed,
    /// Other bytes, which belong to the program.
    Plain,
    /// Too few bytes to tell.
    Undecided,
}

const WANT_PREAMBLE: u32 = 0;
const WANT_HEADER: u32 = 1;
const WANT_REAL: u32 = 2;
const WANT_REFERENCE: u32 = 3;
const IS_PLAIN: u32 = 4;
const IS_BROKEN: u32 = 5;

/// Value of `Receiving::reference_bytes` once the frame's last byte was seen, and says that the reference counts.
const REFERENCE_KNOWN: u32 = REFERENCE_FRAME_BYTES as u32;

/// State of the receiving end of a direction. All zeros before the first byte.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Receiving {
    stage: u32,
    /// Number of bytes in `header` so far.
    header_bytes: u32,
    header: [u8; HEADER_BYTES],
    /// REAL frame: number of its bytes that the program has not got yet.
    left: u64,
    /// REFERENCE frame: number of its payload bytes that the program has got.
    taken: u64,
    /// REFERENCE frame of which the program has got some bytes: what is left of its weight, in units. This number need
    /// not be a power of two.
    units: u64,
    /// Number of bytes in `reference` so far, or [`REFERENCE_KNOWN`]. The byte after them says whether the reference
    /// counts. That byte stays in the socket, and keeps the socket readable, until the program has got all bytes of the
    /// reference. Only this one byte stays: a kernel whose receive buffer is nearly full opens no window for a frame's
    /// end while the frame's beginning is not taken.
    reference_bytes: u32,
    reference: [u8; REFERENCE_BYTES],
}

/// State of one end of a direction. As a rule only its first [`End::HEAD_BYTES`] bytes are in use.
pub trait End: Default + FromBytes + IntoBytes + Immutable {
    /// Number of leading bytes that hold the whole state, unless [`End::is_more`] returns true.
    const HEAD_BYTES: usize;

    /// Whether the bytes after [`End::HEAD_BYTES`] are part of the state now.
    fn is_more(&self) -> bool;
}

impl End for Receiving {
    const HEAD_BYTES: usize = offset_of!(Self, reference);

    #[inline]
    fn is_more(&self) -> bool {
        self.reference_bytes > 0
    }
}

impl End for Sending {
    const HEAD_BYTES: usize = offset_of!(Self, owed);

    #[inline]
    fn is_more(&self) -> bool {
        self.owed_bytes > 0
    }
}

/// Result of a read of some of a reference's bytes ([`Receiving::took_reference`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Took {
    /// Part of the reference's weight that the program keeps for the bytes that it has read. While the program keeps
    /// this share, the holder keeps the payload. `None` from [`Receiving::took_reference`]: the weight that is left
    /// cannot be divided, so the caller has to fetch these bytes at once. `None` from [`Receiving::took_more`]: the
    /// program has a share already.
    pub share: Option<Weight>,
    /// Units of weight that are left once the reference is used up. The caller gives them back to the holder.
    pub over: u64,
    /// Whether the reference is used up. Then the caller takes its last byte from the socket.
    pub used_up: bool,
}

/// Limit between large reads, of which few follow, and small ones. A read is large if the rest of the reference is
/// shorter than this many times the read. A large read gets half of the weight that is left, rounded down to a power of
/// two. If the weight was a power of two, so is the other half. Then the last read can get all that is left as one
/// share.
const FEW_READS: u64 = 16;

/// Share of a reference's weight for a read of `bytes` bytes, when the reference has `of` bytes and `units` of weight
/// left. If `of` is at least [`FEW_READS`] times `bytes`, the share is a quarter to a half of what is proportional to
/// the bytes, and at least one unit: even reads of one byte get some. `None`: one unit is left, which cannot be
/// divided.
fn share(units: u64, bytes: u64, of: u64) -> Option<Weight> {
    let due = match of / bytes.max(1) {
        0..FEW_READS => units / 2,
        _ => (u128::from(units) * u128::from(bytes) / u128::from(of) / 2) as u64,
    };
    Weight::most_of(due.max(1)).filter(|_| units > 1)
}

impl Default for Receiving {
    fn default() -> Self {
        Self {
            stage: WANT_PREAMBLE,
            header_bytes: 0,
            header: [0; 8],
            left: 0,
            taken: 0,
            units: 0,
            reference_bytes: 0,
            reference: [0; REFERENCE_BYTES],
        }
    }
}

impl Receiving {
    /// State of a direction that is not framed, and never will be.
    #[must_use]
    pub fn plain() -> Self {
        Self { stage: IS_PLAIN, ..Self::default() }
    }

    /// Returns the next step.
    #[must_use]
    #[inline]
    pub fn want(&self) -> Want {
        match self.stage {
            WANT_PREAMBLE => Want::Preamble(PREAMBLE.len()),
            WANT_HEADER => match HEADER_BYTES.checked_sub(self.header_bytes as usize) {
                None | Some(0) => Want::Broken,
                Some(missing) => Want::Header(missing),
            },
            WANT_REAL => Want::Real(self.left),
            WANT_REFERENCE => match REFERENCE_BYTES.checked_sub(self.reference_bytes as usize) {
                None if self.reference_bytes == REFERENCE_KNOWN => Want::Reference,
                None => Want::Broken,
                Some(0) => Want::Reference,
                Some(missing) => Want::ReferencePart(missing),
            },
            IS_PLAIN => Want::Plain,
            _ => Want::Broken,
        }
    }

    /// Takes in the first bytes of the direction, which the caller has looked at in the socket. Tells whether they are
    /// the preamble.
    pub fn saw_preamble(&mut self, bytes: &[u8]) -> Beginning {
        let expected = &PREAMBLE[..bytes.len().min(PREAMBLE.len())];
        if !bytes.starts_with(expected) {
            self.stage = IS_PLAIN;
            return Beginning::Plain;
        }
        if expected.len() < PREAMBLE.len() {
            return Beginning::Undecided;
        }
        self.stage = WANT_HEADER;
        Beginning::Framed
    }

    /// Takes bytes of a header, at most as many as [`Want::Header`] asked for.
    ///
    /// # Errors
    /// The bytes are no header; the direction is broken from now on.
    #[inline]
    pub fn took_header(&mut self, bytes: &[u8]) -> Result<(), NotAFrame> {
        let have = self.header_bytes as usize;
        let Some(room) = self.header.get_mut(have..have + bytes.len()) else {
            return Err(self.broken());
        };
        room.copy_from_slice(bytes);
        self.header_bytes += bytes.len() as u32;
        if (self.header_bytes as usize) < HEADER_BYTES {
            return Ok(());
        }
        let [kind, z0, z1, z2, a, b, c, d] = self.header;
        let length = u32::from_le_bytes([a, b, c, d]);
        self.header_bytes = 0;
        match (kind, [z0, z1, z2]) {
            (REAL, [0, 0, 0]) if length > 0 => {
                self.left = u64::from(length);
                self.stage = WANT_REAL;
                Ok(())
            }
            (REFERENCE, [0, 0, 0]) if length as usize == REFERENCE_FRAME_BYTES => {
                self.taken = 0;
                self.reference_bytes = 0;
                self.stage = WANT_REFERENCE;
                Ok(())
            }
            _ => Err(self.broken()),
        }
    }

    /// Notes that the program has got `bytes` real bytes, at most as many as [`Want::Real`] said.
    #[inline]
    pub fn took_real(&mut self, bytes: u64) {
        debug_assert!(self.stage == WANT_REAL && bytes <= self.left);
        self.left = self.left.saturating_sub(bytes);
        if self.left == 0 {
            self.stage = WANT_HEADER;
        }
    }

    /// Takes bytes of a reference, at most as many as [`Want::ReferencePart`] asked for.
    ///
    /// # Errors
    /// The bytes are more than were asked for; the direction is broken from now on.
    pub fn took_reference_part(&mut self, bytes: &[u8]) -> Result<(), NotAFrame> {
        let have = self.reference_bytes as usize;
        let end = have.saturating_add(bytes.len());
        match self.reference.get_mut(have..end) {
            Some(room) => room.copy_from_slice(bytes),
            None => return Err(self.broken()),
        }
        self.reference_bytes = end as u32;
        Ok(())
    }

    /// Returns the unused rest of the reference whose last byte, `last`, is in the socket: the bytes and the weight
    /// that are left. `None`: the reference does not count; the caller takes that byte and calls [`Self::took_void`].
    ///
    /// # Errors
    /// The bytes are no reference; the direction is broken from now on.
    pub fn saw_reference(&mut self, last: u8) -> Result<Option<Reference>, NotAFrame> {
        match last {
            COUNTS => self.reference_bytes = REFERENCE_KNOWN,
            VOID => return Ok(None),
            _ => return Err(self.broken()),
        }
        let Some(whole) = Reference::parse(&self.reference) else { return Err(self.broken()) };
        if self.taken == 0 {
            return Ok(Some(whole));
        }
        match (whole.length.checked_sub(self.taken), Weight::most_of(self.units)) {
            (Some(length @ 1..), Some(weight)) => {
                Ok(Some(Reference { weight, offset: whole.offset + self.taken, length, ..whole }))
            }
            _ => Err(self.broken()),
        }
    }

    /// Returns what [`Self::saw_reference`] would return, without another look at the socket. `None`: the last byte of
    /// the present reference was not seen yet, or no reference comes next.
    ///
    /// # Errors
    /// The state is invalid; the direction is broken from now on.
    pub fn known_reference(&mut self) -> Result<Option<Reference>, NotAFrame> {
        let known = self.stage == WANT_REFERENCE && self.reference_bytes == REFERENCE_KNOWN;
        if known { self.saw_reference(COUNTS) } else { Ok(None) }
    }

    /// Whether the present reference comes straight from its payload's writer. A program that passes a reference on
    /// halves its weight.
    #[must_use]
    pub fn is_from_writer(&self) -> bool {
        Reference::parse(&self.reference).is_some_and(|reference| reference.weight == Weight::WHOLE)
    }

    /// Notes that the program has got the first `bytes` of `left`, the rest that [`Self::saw_reference`] has returned.
    pub fn took_reference(&mut self, left: &Reference, bytes: u64) -> Took {
        debug_assert!(self.stage == WANT_REFERENCE && bytes <= left.length);
        let units = if self.taken == 0 { left.weight.units() } else { self.units };
        if bytes >= left.length {
            self.stage = WANT_HEADER;
            self.taken = 0;
            let share = Weight::most_of(units);
            return Took { share, over: units - share.map_or(0, Weight::units), used_up: true };
        }
        self.taken += bytes;
        let share = share(units, bytes, left.length);
        self.units = units - share.map_or(0, Weight::units);
        Took { share, over: 0, used_up: false }
    }

    /// The same as [`Self::took_reference`] for a program that has a share of this payload already. The read gets no
    /// weight. With the last read, all of the weight is left over ([`Took::over`]).
    pub fn took_more(&mut self, left: &Reference, bytes: u64) -> Took {
        if bytes >= left.length {
            let Took { share, over, used_up } = self.took_reference(left, bytes);
            return Took { share: None, over: over + share.map_or(0, Weight::units), used_up };
        }
        if self.taken == 0 {
            self.units = left.weight.units();
        }
        self.taken += bytes;
        Took { share: None, over: 0, used_up: false }
    }

    /// Notes that the last byte of a reference that does not count was taken from the socket.
    pub fn took_void(&mut self) {
        debug_assert!(self.stage == WANT_REFERENCE);
        self.stage = WANT_HEADER;
        self.taken = 0;
    }

    /// Marks the direction as broken: the bytes in the socket do not follow those that this state has seen.
    pub fn break_off(&mut self) {
        self.broken();
    }

    fn broken(&mut self) -> NotAFrame {
        self.stage = IS_BROKEN;
        NotAFrame
    }
}

/// Size of `owed` in bytes. At most 77 bytes are owed at once: a preamble (16), a header (8) and a REFERENCE frame's
/// body (53).
const OWED_MAX: usize = 88;

/// State of the sending end of a framed direction. All zeros before the first byte.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Sending {
    /// Number of bytes of the open REAL frame that are still to be sent.
    left: u64,
    flags: u32,
    /// Number of bytes in `owed` that the socket has not taken.
    owed_bytes: u32,
    /// Sum of the bytes of all short writes since the last long one.
    short_bytes: u32,
    zero: [u8; 4],
    /// Bytes that have to go into the socket before any others: the preamble, frames' headers and references.
    owed: [u8; OWED_MAX],
}

/// Divisor: a frame promises one eighth as many bytes ahead as the last short writes in a row had together. If that is
/// less than [`AHEAD_MIN`], nothing is promised ahead. More than [`AHEAD_MAX`] is never promised ahead.
const AHEAD_PART: u32 = 8;
const AHEAD_MIN: u32 = 4 << 10;
const AHEAD_MAX: u32 = 64 << 10;

/// Flag: the preamble was sent, or is owed.
const BEGAN: u32 = 1;
/// Flag: the last of the bytes owed are the end of a REFERENCE frame.
const OWES_REFERENCE: u32 = 2;
/// Flag: nothing can be sent any more.
const BROKEN: u32 = 4;

impl Default for Sending {
    fn default() -> Self {
        Self { left: 0, flags: 0, owed_bytes: 0, short_bytes: 0, zero: [0; 4], owed: [0; OWED_MAX] }
    }
}

impl Sending {
    /// Prepares to send `bytes` real bytes, at least 1. Returns how many of them may follow [`Self::owed`] in one
    /// write.
    #[inline]
    pub fn real(&mut self, bytes: usize) -> usize {
        self.promise(bytes, bytes)
    }

    /// The same as [`Self::real`] for a write that is too short for a reference. If the short writes in a row
    /// ([`Self::wrote`]) have had enough bytes, the frame promises more bytes than this write has, because the next
    /// writes are likely short, too. If a long write comes instead, its first bytes complete the frame, so they are
    /// real bytes. They are at most one eighth ([`AHEAD_PART`]) of the bytes that the short writes had together.
    #[inline]
    pub fn short(&mut self, bytes: usize) -> usize {
        let ahead = (self.short_bytes / AHEAD_PART).min(AHEAD_MAX) as usize;
        let ahead = if ahead < AHEAD_MIN as usize { 0 } else { ahead };
        self.promise(bytes, bytes.saturating_add(ahead))
    }

    #[inline]
    fn promise(&mut self, bytes: usize, most: usize) -> usize {
        if self.left == 0 {
            let promised = most.min(REAL_MAX);
            self.begin(&header(REAL, promised as u32));
            self.left = promised as u64;
        }
        usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes)
    }

    /// Notes that `bytes` of a write have been sent. `is_short`: the write was short, and all of its bytes were real.
    #[inline]
    pub fn wrote(&mut self, bytes: usize, is_short: bool) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.short_bytes = if is_short { self.short_bytes.saturating_add(bytes) } else { 0 };
    }

    /// Number of bytes that the open REAL frame still promises. Only real bytes can complete it.
    #[must_use]
    #[inline]
    pub fn promised(&self) -> u64 {
        self.left
    }

    /// Whether a reference may come next: no real frame is open, and no bytes are owed.
    #[must_use]
    pub fn takes_reference(&self) -> bool {
        self.left == 0 && self.owed_bytes == 0
    }

    /// Adds a REFERENCE frame to the bytes owed.
    ///
    /// # Panics
    /// Panics if no reference may come ([`Self::takes_reference`]).
    pub fn reference(&mut self, reference: &Reference) {
        assert!(self.takes_reference(), "a reference inside a real frame");
        let mut frame = [COUNTS; HEADER_BYTES + REFERENCE_FRAME_BYTES];
        frame[..HEADER_BYTES].copy_from_slice(&header(REFERENCE, REFERENCE_FRAME_BYTES as u32));
        frame[HEADER_BYTES..HEADER_BYTES + REFERENCE_BYTES].copy_from_slice(&reference.emit());
        self.begin(&frame);
        self.flags |= OWES_REFERENCE;
    }

    /// Voids the reference of which the socket has taken only a part: the last byte of its frame will say that the
    /// reference does not count. The caller tells the program that nothing was written.
    pub fn void_reference(&mut self) {
        if self.flags & OWES_REFERENCE != 0 && self.owed_bytes > 0 {
            let last = self.owed().len() - 1;
            self.owed[last] = VOID;
        }
        self.flags &= !OWES_REFERENCE;
    }

    /// Marks the direction as broken: it is not known which bytes the socket has taken.
    pub fn break_off(&mut self) {
        self.flags |= BROKEN;
    }

    /// Whether [`Self::break_off`] was called.
    #[must_use]
    #[inline]
    pub fn is_broken(&self) -> bool {
        self.flags & BROKEN != 0
    }

    fn begin(&mut self, frame: &[u8]) {
        if self.flags & BEGAN == 0 {
            self.flags |= BEGAN;
            self.owe(&PREAMBLE);
        }
        self.owe(frame);
    }

    fn owe(&mut self, bytes: &[u8]) {
        let from = self.owed_bytes as usize;
        // There is room, unless a program of another user has forged this state.
        let Some(room) = self.owed.get_mut(from..from.saturating_add(bytes.len())) else { return self.break_off() };
        room.copy_from_slice(bytes);
        self.owed_bytes += bytes.len() as u32;
    }

    /// Bytes that go into the socket before any others.
    #[must_use]
    #[inline]
    pub fn owed(&self) -> &[u8] {
        &self.owed[..(self.owed_bytes as usize).min(OWED_MAX)]
    }

    /// Notes that the socket has taken the first `bytes` bytes of [`Self::owed`] and the real bytes behind it. Returns
    /// how many of these bytes were real.
    #[inline]
    pub fn sent(&mut self, bytes: usize) -> usize {
        let owed = self.owed().len();
        let of_owed = bytes.min(owed);
        if of_owed < owed {
            self.owed.copy_within(of_owed..owed, 0);
        }
        self.owed_bytes = (owed - of_owed) as u32;
        if self.owed_bytes == 0 {
            self.flags &= !OWES_REFERENCE;
        }
        let real = bytes - of_owed;
        self.left = self.left.saturating_sub(real as u64);
        real
    }
}
