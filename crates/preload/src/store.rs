//! Where this process leaves what it writes: a segment of the machine's store, leased when it is first needed.

use std::io::IoSlice;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use shunt_odb::reference::Reference;
use shunt_odb::segment::{Writer, now_ms};
use shunt_odb::store::client::Connection;

/// After the store refused, or was not there: how long until it is asked again.
const RETRY_MS: u64 = 1000;

pub struct Store {
    path: PathBuf,
    leased: Mutex<Leased>,
}

#[derive(Default)]
struct Leased {
    /// While this is open the store knows that the segment's program lives.
    connection: Option<Connection>,
    writer: Option<Writer>,
    asked_ms: u64,
}

impl Store {
    pub fn new(path: PathBuf) -> Self {
        Self { path, leased: Mutex::default() }
    }

    /// Keeps a copy of some bytes. `None`: there is no room now; send them.
    pub fn put(&self, bytes: &[IoSlice<'_>]) -> Option<Reference> {
        let mut leased = self.leased.lock().unwrap_or_else(PoisonError::into_inner);
        leased.writer(&self.path)?.put(bytes)
    }

    /// Takes back what was not sent.
    pub fn withdraw(&self, reference: &Reference) {
        let mut leased = self.leased.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(writer) = &mut leased.writer {
            writer.withdraw(reference);
        }
    }

    /// The segment is the parent's, and a thread of the parent may have held the lock.
    pub fn after_fork(&self) {
        // A lock that was held at the fork stays held in the child: then this process sends real bytes.
        if let Ok(mut leased) = self.leased.try_lock() {
            *leased = Leased::default();
        }
    }
}

impl Leased {
    fn writer(&mut self, path: &Path) -> Option<&mut Writer> {
        if self.writer.as_ref().is_some_and(|writer| !writer.is_served()) {
            // The agent has ended, and perhaps begun again: what is left in that segment, those get who map it.
            *self = Self::default();
        }
        if self.writer.is_none() {
            let now = now_ms();
            if self.asked_ms != 0 && now < self.asked_ms + RETRY_MS {
                return None;
            }
            self.asked_ms = now;
            if self.connection.is_none() {
                self.connection = Connection::open(path).ok();
            }
            match self.connection.as_ref()?.lease() {
                Ok(writer) => self.writer = writer,
                Err(_) => self.connection = None,
            }
        }
        self.writer.as_mut()
    }
}
