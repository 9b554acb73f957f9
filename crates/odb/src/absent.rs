//! Absent memory of a process: which addresses stand for which bytes of which payload (RZM in the paper on on-demand
//! buffers, Figures 4.3, 4.7, 4.8). A *payload* is a body in a store, and a *piece* is a range of such addresses.
//!
//! A fault in the middle of a piece divides it into two. Both parts keep the piece's *hold*: the process's share of the
//! payload, a part of the right to fetch it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::hold::Hold;

/// Contiguous addresses that stand for contiguous bytes.
#[derive(Clone, Debug)]
pub struct Piece {
    pub addresses: Range<usize>,
    pub hold: Arc<Hold>,
    /// Offset in the payload, of the byte that the first address stands for.
    pub offset: u64,
}

impl Piece {
    /// Returns the part of the piece that lies in `addresses`, which have to overlap it.
    fn cut(&self, addresses: &Range<usize>) -> Self {
        let start = self.addresses.start.max(addresses.start);
        let end = self.addresses.end.min(addresses.end);
        let offset = self.offset + (start - self.addresses.start) as u64;
        Self { addresses: start..end, hold: Arc::clone(&self.hold), offset }
    }

    /// Whether both pieces stand for the same bytes at the same addresses.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.addresses == other.addresses && self.offset == other.offset && Arc::ptr_eq(&self.hold, &other.hold)
    }
}

/// Pieces in the order of their addresses. As a rule there are few.
pub type Pieces = SmallVec<[Piece; 2]>;

/// All absent memory of a process.
#[derive(Debug, Default)]
pub struct Absent {
    /// Pieces by first address. They do not overlap, and none is empty.
    pieces: BTreeMap<usize, Piece>,
    bytes: usize,
}

impl Absent {
    /// Number of absent bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds a piece. It replaces pieces, or parts of them, that have the same addresses.
    pub fn insert(&mut self, piece: Piece) {
        if piece.addresses.is_empty() {
            return;
        }
        self.remove(&piece.addresses);
        self.bytes += piece.addresses.len();
        self.pieces.insert(piece.addresses.start, piece);
    }

    /// Forgets that some addresses are absent. Returns the pieces that covered them, cut to these addresses and in
    /// order.
    pub fn remove(&mut self, addresses: &Range<usize>) -> Pieces {
        let met: SmallVec<[usize; 2]> = self.meeting(addresses).map(|piece| piece.addresses.start).collect();
        let mut removed = Pieces::new();
        for start in met {
            let Some(piece) = self.pieces.remove(&start) else { continue };
            let inside = piece.cut(addresses);
            self.bytes -= inside.addresses.len();
            for outside in [piece.addresses.start..inside.addresses.start, inside.addresses.end..piece.addresses.end] {
                if !outside.is_empty() {
                    self.pieces.insert(outside.start, piece.cut(&outside));
                }
            }
            removed.push(inside);
        }
        removed
    }

    /// Returns the pieces that cover some addresses, cut to them and in order.
    #[must_use]
    pub fn within(&self, addresses: &Range<usize>) -> Pieces {
        self.meeting(addresses).map(|piece| piece.cut(addresses)).collect()
    }

    /// Whether any of these addresses is absent.
    #[must_use]
    pub fn meets(&self, addresses: &Range<usize>) -> bool {
        self.meeting(addresses).next().is_some()
    }

    /// Returns the whole piece that contains an address.
    #[must_use]
    pub fn around(&self, address: usize) -> Option<&Piece> {
        self.meeting(&(address..address + 1)).next()
    }

    /// All pieces, in order.
    pub fn all(&self) -> impl Iterator<Item = &Piece> {
        self.pieces.values()
    }

    /// Moves the pieces in the `bytes` bytes of memory at address `from` to address `to`, after mremap(2) has moved the
    /// memory.
    pub fn moved(&mut self, from: usize, to: usize, bytes: usize) {
        let pieces = self.remove(&(from..from + bytes));
        self.remove(&(to..to + bytes));
        for mut piece in pieces {
            let start = piece.addresses.start - from + to;
            piece.addresses = start..start + piece.addresses.len();
            self.insert(piece);
        }
    }

    fn meeting(&self, addresses: &Range<usize>) -> impl Iterator<Item = &Piece> {
        let before = self.pieces.range(..addresses.start).next_back().map(|(_, piece)| piece);
        let before = before.filter(|piece| piece.addresses.end > addresses.start && !addresses.is_empty());
        let end = addresses.end.max(addresses.start);
        before.into_iter().chain(self.pieces.range(addresses.start..end).map(|(_, piece)| piece))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hold::Returns;
    use crate::reference::{Holder, PayloadId, Weight};
    use proptest::prelude::*;

    const SPACE: usize = 64;

    #[derive(Clone, Debug)]
    enum Step {
        Insert(Range<usize>, u32, u64),
        Remove(Range<usize>),
        Move(usize, usize, usize),
    }

    fn range() -> impl Strategy<Value = Range<usize>> {
        (0..SPACE, 0..SPACE).prop_map(|(a, b)| a.min(b)..a.max(b))
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (range(), 0u32..5, 0u64..1000).prop_map(|(range, payload, offset)| Step::Insert(range, payload, offset)),
            range().prop_map(Step::Remove),
            (0..SPACE / 4, SPACE / 2..3 * SPACE / 4, 0..SPACE / 4)
                .prop_map(|(from, to, bytes)| Step::Move(from, to, bytes)),
        ]
    }

    fn hold(slot: u32, returns: &Arc<Returns>) -> Arc<Hold> {
        let payload = PayloadId { holder: Holder::named("be1"), segment: 0, slot, secret: 0 };
        Arc::new(Hold::new(payload, Weight::WHOLE, 1 << 20, returns))
    }

    proptest! {
        #[test]
        fn it_is_a_map_from_each_address_to_a_byte(steps in proptest::collection::vec(step(), 0..60), asked in range()) {
            let returns = Arc::new(Returns::default());
            let mut absent = Absent::default();
            let mut model: [Option<(u32, u64)>; SPACE] = [None; SPACE];
            for step in steps {
                match step {
                    Step::Insert(range, slot, offset) => {
                        absent.insert(Piece { addresses: range.clone(), hold: hold(slot, &returns), offset });
                        for (at, address) in range.enumerate() {
                            model[address] = Some((slot, offset + at as u64));
                        }
                    }
                    Step::Remove(range) => {
                        let removed: usize = absent.remove(&range).iter().map(|piece| piece.addresses.len()).sum();
                        let expected = model[range.clone()].iter().flatten().count();
                        prop_assert_eq!(removed, expected);
                        model[range].fill(None);
                    }
                    Step::Move(from, to, bytes) => {
                        absent.moved(from, to, bytes);
                        let moved = model[from..from + bytes].to_vec();
                        model[from..from + bytes].fill(None);
                        model[to..to + bytes].copy_from_slice(&moved);
                    }
                }
                for (address, expected) in model.iter().enumerate() {
                    let got = absent.around(address).map(|piece| {
                        (piece.hold.payload().slot, piece.offset + (address - piece.addresses.start) as u64)
                    });
                    prop_assert_eq!(got, *expected, "address {}", address);
                }
                prop_assert_eq!(absent.bytes(), model.iter().flatten().count());
            }
            let mut covered = 0;
            for piece in absent.within(&asked) {
                prop_assert!(piece.addresses.start >= asked.start && piece.addresses.end <= asked.end);
                covered += piece.addresses.len();
            }
            prop_assert_eq!(covered, model[asked.clone()].iter().flatten().count());
            prop_assert_eq!(absent.meets(&asked), covered > 0);
        }
    }

    #[test]
    fn a_fault_in_the_middle_makes_two_pieces_of_one_share() {
        let returns = Arc::new(Returns::default());
        let mut absent = Absent::default();
        absent.insert(Piece { addresses: 100..600, hold: hold(1, &returns), offset: 1000 });
        let faulted = absent.remove(&(300..400));
        assert_eq!(faulted.len(), 1);
        assert_eq!((faulted[0].addresses.clone(), faulted[0].offset), (300..400, 1200));
        let left: Vec<_> = absent.all().map(|piece| (piece.addresses.clone(), piece.offset)).collect();
        assert_eq!(left, [(100..300, 1000), (400..600, 1300)]);
        drop(faulted);
        absent.remove(&(0..300));
        assert_eq!(returns.waiting(), 0, "the last piece still has the share");
        absent.remove(&(0..1000));
        assert_eq!(returns.take().len(), 1, "one share went back, once");
    }
}
