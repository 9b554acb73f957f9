//! The store of this machine: which of its segments and files this program may read by itself, and the connection by which
//! it asks for them. One thread asks at a time, without the lock: the agent may be stopped.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use shunt_sys::lock::{Condvar, Mutex, MutexGuard};

use crate::place::SentFile;
use crate::reference::Holder;
use crate::segment::{Mapped, now_ms};
use crate::sources::Sources;
use crate::store::client::Connection;

/// Files of this machine that are open to be read.
pub(super) const FILES_MAX: usize = 64;
/// How long one stays open that nobody reads.
const FILE_IDLE_MS: u64 = 2_000;

#[derive(Debug, Default)]
pub(super) struct Own {
    state: Mutex<Local>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct Local {
    link: Link,
    /// Whose it is, once it has said so.
    pub(super) holder: Option<Holder>,
    /// By segment; `None`: this program may not.
    pub(super) mapped: HashMap<u32, Option<Arc<Mapped>>>,
    /// Which machines' programs can fetch from which stores, and when the store was asked for that.
    pub(super) sources: Option<Arc<Sources>>,
    pub(super) sources_asked_ms: u64,
    /// By segment and number, and when it was last read.
    pub(super) files: HashMap<(u32, u32), (Arc<SentFile>, u64)>,
}

#[derive(Debug, Default)]
enum Link {
    #[default]
    Unmade,
    Idle(Connection),
    /// A thread asks.
    Used,
    /// It was asked and has said nothing: nobody waits for it, and attempts are made until it answers.
    Silent,
}

/// Why there is no answer.
pub(super) enum NoAnswer {
    /// The store says nothing.
    Silent,
    /// There is no store, or its connection has broken.
    Broken,
}

/// Whether a store that was asked has said nothing in time.
pub(super) fn is_silence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

impl Own {
    pub(super) fn lock(&self) -> MutexGuard<'_, Local> {
        self.state.lock()
    }

    /// Asks the store, by a connection that `open` makes where there is none. Its answer, and whether it was silent, which
    /// nobody has known: then attempts are to be made.
    pub(super) fn ask<T>(
        &self,
        open: impl FnOnce() -> io::Result<Connection>,
        question: impl FnOnce(&Connection) -> io::Result<T>,
    ) -> (Result<T, NoAnswer>, bool) {
        let mut local = self.lock();
        let known = loop {
            match std::mem::replace(&mut local.link, Link::Used) {
                // The agent may have been started again.
                Link::Idle(connection) => break Some(connection).filter(Connection::is_served),
                Link::Unmade => break None,
                // Whoever asks waits for a second at most.
                Link::Used => local = self.changed.wait(local),
                Link::Silent => {
                    local.link = Link::Silent;
                    return (Err(NoAnswer::Silent), false);
                }
            }
        };
        if known.is_none() {
            // The next may be to an agent that has been started again.
            local.sources = None;
        }
        drop(local);
        let answered = known.map_or_else(open, Ok).and_then(|connection| Ok((question(&connection)?, connection)));
        let mut local = self.lock();
        let (link, answer, is_new) = match answered {
            Ok((answer, connection)) => {
                local.holder = Some(connection.holder());
                (Link::Idle(connection), Ok(answer), false)
            }
            Err(error) if is_silence(&error) => (Link::Silent, Err(NoAnswer::Silent), true),
            Err(_) => (Link::Unmade, Err(NoAnswer::Broken), false),
        };
        local.link = link;
        drop(local);
        self.changed.notify_all();
        (answer, is_new)
    }

    /// It answers again, or its listener is gone: then whoever asks is told so at once.
    pub(super) fn speaks(&self, connection: Option<Connection>) {
        let mut local = self.lock();
        local.sources = None;
        local.link = match connection {
            Some(connection) => {
                local.holder = Some(connection.holder());
                Link::Idle(connection)
            }
            None => Link::Unmade,
        };
    }
}

impl Local {
    /// Whether there is nobody at the other end any more: to somebody who says nothing no question helps.
    pub(super) fn is_cut_off(&self) -> bool {
        match &self.link {
            Link::Idle(connection) => !connection.is_served(),
            Link::Unmade => true,
            Link::Used | Link::Silent => false,
        }
    }

    pub(super) fn file(&mut self, name: (u32, u32)) -> Option<Arc<SentFile>> {
        let (file, used_ms) = self.files.get_mut(&name)?;
        *used_ms = now_ms();
        Some(Arc::clone(file))
    }

    pub(super) fn forget_files(&mut self) {
        let now_ms = now_ms();
        self.files.retain(|_, (_, used_ms)| now_ms < *used_ms + FILE_IDLE_MS);
    }
}
