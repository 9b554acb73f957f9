//! Where bytes of a reference are, for as long as somebody sends them: the store's own readers, and the agent's senders.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use shunt_sys::lock::{Mutex, MutexGuard};

use super::Store;
use crate::place::Place;
use crate::reference::{PayloadId, Reference};

/// A store that several threads look into. Nobody holds it while bytes are copied or sent.
#[derive(Clone, Debug)]
pub struct Shelf(Arc<Mutex<Store>>);

impl Shelf {
    pub(crate) fn new(store: Store) -> Self {
        Self(Arc::new(Mutex::new(store)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Store> {
        self.0.lock()
    }

    /// Has the bytes of a reference stay where they are until the value is dropped. `None`: nobody can have them.
    #[must_use]
    pub fn pin(&self, reference: &Reference) -> Option<Pinned> {
        let place = self.lock().pin(reference)?;
        Some(Pinned { place, payload: reference.payload, shelf: self.clone() })
    }
}

/// Bytes of a payload that stay where they are.
#[derive(Debug)]
pub struct Pinned {
    place: Place,
    payload: PayloadId,
    shelf: Shelf,
}

impl Pinned {
    /// Where they are.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }
}

impl AsFd for Pinned {
    /// The segment's, or the file's.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.place.as_fd()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.shelf.lock().unpin(&self.payload);
    }
}
