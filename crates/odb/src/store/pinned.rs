//! Payload bytes that stay where they are, in a segment of memory or in a file, while they are sent. The store sends
//! such bytes to *readers*, the programs that fetch them. The agent (Shunt's daemon) sends them to clients. A *store*
//! has the payloads of a machine's programs, and a *reference* names bytes of one payload.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use shunt_sys::lock::{Mutex, MutexGuard};

use super::Store;
use crate::place::Place;
use crate::reference::{PayloadId, Reference};

/// A store that several threads use. It is not locked while bytes are copied or sent.
#[derive(Clone, Debug)]
pub struct Shelf(Arc<Mutex<Store>>);

impl Shelf {
    pub(crate) fn new(store: Store) -> Self {
        Self(Arc::new(Mutex::new(store)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Store> {
        self.0.lock()
    }

    /// Keeps the bytes of a reference in place until the value is dropped. `None`: the bytes are gone.
    #[must_use]
    pub fn pin(&self, reference: &Reference) -> Option<Pinned> {
        let place = self.lock().pin(reference)?;
        Some(Pinned { place, payload: reference.payload, shelf: self.clone() })
    }
}

/// Bytes of a payload that stay in place.
#[derive(Debug)]
pub struct Pinned {
    place: Place,
    payload: PayloadId,
    shelf: Shelf,
}

impl Pinned {
    /// Place of the bytes.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }
}

impl AsFd for Pinned {
    /// Descriptor of the segment or file that holds the bytes.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.place.as_fd()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.shelf.lock().unpin(&self.payload);
    }
}
