//! One direction of a connection: frames of real bytes and of references. No I/O.
//!
//! ```text
//!   preamble (16)   once, where a direction is framed
//!   kind (1)  zero (3)  length (4, little-endian)   then, by kind:
//!     REAL       `length` bytes
//!     REFERENCE  a reference (REFERENCE_BYTES), standing for as many bytes as it says, and whether it counts (1)
//! ```
//!
//! The states are plain values without pointers, because processes share them (crates/process/src/connections/states.rs): any
//! bytes are a valid state.
//!
//! A real frame's length is a promise of a count, not of a write: where the kernel takes less, the writes that follow
//! make it up, whatever they are. So a direction that has carried only short writes for long promises more than it has
//! ([`Sending::short`]): the next ones need no header, and their receiver need not look for one. A reference is no promise:
//! where the kernel takes a part of one, the program is told that nothing was written, so it may go on with other bytes, or
//! none. Then the reference's last byte says that it does not count. So nobody ever has to wait until all of it is in the
//! socket.

use std::mem::offset_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::reference::{REFERENCE_BYTES, Reference, Weight};

/// What a framed direction begins with. Random, so that no protocol begins with it.
pub const PREAMBLE: [u8; 16] =
    [0xd6, 0x1f, 0x8b, 0x42, 0x93, 0x5e, 0xa7, 0x0c, 0xf1, 0x64, 0x2d, 0xb8, 0x7a, 0x90, 0xc3, 0x01];
/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 8;
/// The most that one real frame promises.
pub const REAL_MAX: usize = u32::MAX as usize;

const REAL: u8 = 1;
const REFERENCE: u8 = 2;

/// A reference and whether it counts.
const REFERENCE_FRAME_BYTES: usize = REFERENCE_BYTES + 1;
const VOID: u8 = 0;
const COUNTS: u8 = 1;

fn header(kind: u8, length: u32) -> [u8; HEADER_BYTES] {
    let [a, b, c, d] = length.to_le_bytes();
    [kind, 0, 0, 0, a, b, c, d]
}

/// The peer has sent what is no frame. Only a broken or hostile peer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other end of the connection sent something that is not a frame")]
pub struct NotAFrame;

/// What a receiver needs from the socket next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// To look at, without taking them, as many as are there of this many bytes: [`Receiving::saw_preamble`].
    Preamble(usize),
    /// To take at most this many: [`Receiving::took_header`].
    Header(usize),
    /// To take at most this many for the program: [`Receiving::took_real`].
    Real(u64),
    /// To take at most this many: [`Receiving::took_reference_part`].
    ReferencePart(usize),
    /// To look at one byte, the last of a reference's frame: [`Receiving::saw_reference`].
    Reference,
    /// Nothing of ours: the direction is not framed.
    Plain,
    /// The direction is of no use any more.
    Broken,
}

/// What the first bytes of a direction turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// The preamble: take it from the socket, all [`PREAMBLE`] of it.
    Framed,
    /// Something else, which is the program's.
    Plain,
    /// Too little to tell.
    Undecided,
}

const WANT_PREAMBLE: u32 = 0;
const WANT_HEADER: u32 = 1;
const WANT_REAL: u32 = 2;
const WANT_REFERENCE: u32 = 3;
const IS_PLAIN: u32 = 4;
const IS_BROKEN: u32 = 5;

/// In place of the number of a reference's bytes that are there.
const REFERENCE_KNOWN: u32 = REFERENCE_FRAME_BYTES as u32;

/// The receiving end of a direction. Zeros: before its first byte.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Receiving {
    stage: u32,
    /// Bytes of `header` that are there.
    header_bytes: u32,
    header: [u8; HEADER_BYTES],
    /// Of a real frame: bytes that are still to come.
    left: u64,
    /// Of a reference: bytes that the program has had.
    taken: u64,
    /// Of a reference that is partly taken: what is left of its weight, which need be no power of two.
    units: u64,
    /// Bytes of `reference` that are there. The byte behind them, which says whether it counts, stays in the socket,
    /// which is readable by it, until the program has had all. No more than that one: a kernel whose receive buffer is
    /// nearly full sends no window for the rest of a reference while its beginning is not taken. [`REFERENCE_KNOWN`]: it
    /// was seen, and the reference counts.
    reference_bytes: u32,
    reference: [u8; REFERENCE_BYTES],
}

/// The state of a direction's end, which as a rule is no more than its first bytes.
pub trait End: Default + FromBytes + IntoBytes + Immutable {
    /// Bytes of it that say all, unless [`End::is_more`].
    const HEAD_BYTES: usize;

    /// Whether what is behind those says something, too.
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

/// What has become of a reference by a read ([`Receiving::took_reference`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Took {
    /// The share of the payload that goes with the bytes that were read. `None`: what is left cannot be divided; then have
    /// the bytes fetched.
    pub share: Option<Weight>,
    /// What is left over when the reference is used up, to be given back.
    pub over: u64,
    /// Whether it is: then its last byte is taken from the socket.
    pub used_up: bool,
}

/// Of a reference that so many reads as long as this one take, each gets half of what is left: then nothing is left over.
const FEW_READS: u64 = 16;

/// What a read of some of a reference's bytes gets of its weight. Of a long one as many reads as there are bytes can get
/// some: each gets at least a quarter of what is its due.
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
    /// A direction that is not framed, and never will be.
    #[must_use]
    pub fn plain() -> Self {
        Self { stage: IS_PLAIN, ..Self::default() }
    }

    /// What is needed next.
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

    /// The first bytes that are in the socket.
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

    /// Bytes of a header, as many as [`Want::Header`] asked for or less.
    ///
    /// # Errors
    /// The direction is broken from here on.
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

    /// The program has got `bytes` real bytes, at most what [`Want::Real`] said.
    #[inline]
    pub fn took_real(&mut self, bytes: u64) {
        debug_assert!(self.stage == WANT_REAL && bytes <= self.left);
        self.left = self.left.saturating_sub(bytes);
        if self.left == 0 {
            self.stage = WANT_HEADER;
        }
    }

    /// Bytes of a reference, as many as [`Want::ReferencePart`] asked for or less.
    ///
    /// # Errors
    /// The direction is broken from here on.
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

    /// What is left of the reference whose last byte is in the socket: these bytes, with this weight. `None`: it does
    /// not count; then [`Self::took_void`].
    ///
    /// # Errors
    /// The direction is broken from here on.
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

    /// What [`Self::saw_reference`] has said already, as long as some of it is left.
    ///
    /// # Errors
    /// The direction is broken from here on.
    pub fn known_reference(&mut self) -> Result<Option<Reference>, NotAFrame> {
        let known = self.stage == WANT_REFERENCE && self.reference_bytes == REFERENCE_KNOWN;
        if known { self.saw_reference(COUNTS) } else { Ok(None) }
    }

    /// Whether the reference that is next comes straight from its payload's writer: whoever passes one on halves its share.
    #[must_use]
    pub fn is_from_writer(&self) -> bool {
        Reference::parse(&self.reference).is_some_and(|reference| reference.weight == Weight::WHOLE)
    }

    /// The program has got the first `bytes` of what [`Self::saw_reference`] said was left.
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

    /// The same for whoever has a share of this payload already: what is left keeps all of the weight, which is left over
    /// once the reference is used up.
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

    /// The last byte of a reference that does not count was taken from the socket.
    pub fn took_void(&mut self) {
        debug_assert!(self.stage == WANT_REFERENCE);
        self.stage = WANT_HEADER;
        self.taken = 0;
    }

    /// The direction is of no use any more: what the socket has does not begin where this state ends.
    pub fn break_off(&mut self) {
        self.broken();
    }

    fn broken(&mut self) -> NotAFrame {
        self.stage = IS_BROKEN;
        NotAFrame
    }
}

/// Room for what a direction may owe the socket: a preamble, a header and a reference.
const OWED_MAX: usize = 88;

/// The sending end of a framed direction. Zeros: before its first byte.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Sending {
    /// Of the real frame that is open: bytes that are still to be sent.
    left: u64,
    flags: u32,
    /// Bytes of `owed` that the socket has not taken.
    owed_bytes: u32,
    /// Bytes of short writes since the last long one.
    short_bytes: u32,
    zero: [u8; 4],
    owed: [u8; OWED_MAX],
}

/// Of the bytes of short writes in a row, so many are promised ahead: one part, no fewer and no more.
const AHEAD_PART: u32 = 8;
const AHEAD_MIN: u32 = 4 << 10;
const AHEAD_MAX: u32 = 64 << 10;

/// The preamble is sent, or owed.
const BEGAN: u32 = 1;
/// What is owed ends with the end of a reference.
const OWES_REFERENCE: u32 = 2;
/// Nothing can be sent any more.
const BROKEN: u32 = 4;

impl Default for Sending {
    fn default() -> Self {
        Self { left: 0, flags: 0, owed_bytes: 0, short_bytes: 0, zero: [0; 4], owed: [0; OWED_MAX] }
    }
}

impl Sending {
    /// Prepares for `bytes` real bytes, at least 1, and says how many of them may follow [`Self::owed`] in one write.
    #[inline]
    pub fn real(&mut self, bytes: usize) -> usize {
        self.promise(bytes, bytes)
    }

    /// The same of a write that is short. After many of those, and none that is long ([`Self::wrote`]), the frame promises
    /// more than this one has: what comes next is as short, or loses a part in [`AHEAD_PART`] of what was saved before.
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

    /// So many of a write's bytes have gone; `is_short`: the write was short, and all of it real.
    #[inline]
    pub fn wrote(&mut self, bytes: usize, is_short: bool) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.short_bytes = if is_short { self.short_bytes.saturating_add(bytes) } else { 0 };
    }

    /// Bytes of the real frame that is open, which only real bytes can make up.
    #[must_use]
    #[inline]
    pub fn promised(&self) -> u64 {
        self.left
    }

    /// Whether a reference may come next: no real frame is open, and nothing is owed.
    #[must_use]
    pub fn takes_reference(&self) -> bool {
        self.left == 0 && self.owed_bytes == 0
    }

    /// Puts a reference into what is owed.
    ///
    /// # Panics
    /// Where none may come ([`Self::takes_reference`]).
    pub fn reference(&mut self, reference: &Reference) {
        assert!(self.takes_reference(), "a reference inside a real frame");
        let mut frame = [COUNTS; HEADER_BYTES + REFERENCE_FRAME_BYTES];
        frame[..HEADER_BYTES].copy_from_slice(&header(REFERENCE, REFERENCE_FRAME_BYTES as u32));
        frame[HEADER_BYTES..HEADER_BYTES + REFERENCE_BYTES].copy_from_slice(&reference.emit());
        self.begin(&frame);
        self.flags |= OWES_REFERENCE;
    }

    /// The reference that is owed in part stands for nothing: the program is told that it was not written.
    pub fn void_reference(&mut self) {
        if self.flags & OWES_REFERENCE != 0 && self.owed_bytes > 0 {
            let last = self.owed().len() - 1;
            self.owed[last] = VOID;
        }
        self.flags &= !OWES_REFERENCE;
    }

    /// Nobody knows any more what the socket has taken.
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
        // There is room, unless another user has made this state up.
        let Some(room) = self.owed.get_mut(from..from.saturating_add(bytes.len())) else { return self.break_off() };
        room.copy_from_slice(bytes);
        self.owed_bytes += bytes.len() as u32;
    }

    /// What goes into the socket before anything else.
    #[must_use]
    #[inline]
    pub fn owed(&self) -> &[u8] {
        &self.owed[..(self.owed_bytes as usize).min(OWED_MAX)]
    }

    /// The socket took `bytes` of [`Self::owed`] and the real bytes behind them. Returns how many of those were real.
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
