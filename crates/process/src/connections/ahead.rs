//! Walks through bytes that were seen in a socket and not taken: frames, and the program's bytes in them. A *reference*
//! names bytes of a payload in a store.

use shunt_odb::frame::{Beginning, PREAMBLE, Receiving, Want};
use shunt_odb::reference::Reference;

/// Bytes of the program: real ones, or a reference to them.
pub enum Piece<'a> {
    Real(&'a [u8]),
    Reference(Reference),
}

/// Calls `wanted` with each piece in `bytes`, until it returns false. `receiving`: state of the receiving direction
/// before the first of `bytes`.
pub fn walk<'a>(receiving: &mut Receiving, mut bytes: &'a [u8], mut wanted: impl FnMut(Piece<'a>) -> bool) {
    while !bytes.is_empty() {
        let (used, piece) = match receiving.want() {
            Want::Preamble(length) => match receiving.saw_preamble(&bytes[..length.min(bytes.len())]) {
                Beginning::Framed => (PREAMBLE.len(), None),
                Beginning::Plain => (bytes.len(), Some(Piece::Real(bytes))),
                Beginning::Undecided => return,
            },
            Want::Header(length) => {
                let now = length.min(bytes.len());
                if receiving.took_header(&bytes[..now]).is_err() {
                    return;
                }
                (now, None)
            }
            Want::Real(left) => {
                let now = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                receiving.took_real(now as u64);
                (now, Some(Piece::Real(&bytes[..now])))
            }
            Want::ReferencePart(length) => {
                let now = length.min(bytes.len());
                if receiving.took_reference_part(&bytes[..now]).is_err() {
                    return;
                }
                (now, None)
            }
            Want::Reference => {
                let Ok(counts) = receiving.saw_reference(bytes[0]) else { return };
                match &counts {
                    None => receiving.took_void(),
                    Some(left) => _ = receiving.took_reference(left, left.length),
                }
                (1, counts.map(Piece::Reference))
            }
            Want::Plain | Want::Broken => return,
        };
        if piece.is_some_and(|piece| !wanted(piece)) {
            return;
        }
        bytes = &bytes[used..];
    }
}
