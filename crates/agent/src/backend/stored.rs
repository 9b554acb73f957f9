//! Payloads of this machine's store. The *store* has the payloads of this machine's programs under `shunt run`. A
//! *claim* is a frontend's message that asks for some of their bytes, and a *reference* names such bytes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use shunt_handoff::payload::{Kept, Payload, Source};
use shunt_odb::reference::{Holder, PayloadId, Reference, Weight};
use shunt_odb::store::pinned::{Pinned, Shelf};
use shunt_wire::local::Reason;
use shunt_wire::parts::{Part, Parts};

/// Bytes of a payload in this machine's store. The store keeps them until this value is dropped.
#[derive(Debug)]
struct Stored(Pinned);

impl AsFd for Stored {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Kept for Stored {
    fn send(&self, offset: u64, bytes: usize, socket: BorrowedFd<'_>) -> io::Result<usize> {
        self.0.place().send(offset, bytes, socket)
    }

    fn is_unchanged(&self) -> bool {
        self.0.place().is_unchanged()
    }
}

/// Converts a part of this machine's store into a reference, as programs write it.
fn reference(holder: Holder, part: &Part) -> Reference {
    let &Part { segment, slot, secret, offset, length } = part;
    let (segment, slot, secret) = (segment.get(), slot.get(), secret.get());
    let payload = PayloadId { holder, segment, slot, secret };
    Reference { payload, weight: Weight::WHOLE, offset: offset.get(), length: length.get() }
}

/// Builds the payload of a claim that asks for parts of the store. The claiming peer may have them, because the peer's
/// programs may read this store.
///
/// # Errors
/// Returns [`Reason::UnknownOffer`] if the store no longer has one of the parts.
pub(crate) fn payload(holder: Holder, shelf: &Shelf, parts: &Parts) -> Result<Payload, Reason> {
    let stored = |part: &Part| {
        let pinned = shelf.pin(&reference(holder, part)).ok_or(Reason::UnknownOffer)?;
        let (from, length) = (pinned.place().from(), pinned.place().length());
        Ok((Box::new(Stored(pinned)) as Box<dyn Source>, from, length))
    };
    Ok(Payload::of_sources(parts.as_slice().iter().map(stored).collect::<Result<Vec<_>, Reason>>()?))
}
