//! The store of this machine: the segments and files that this program may read by itself, and the connection by which
//! it asks for them. One thread asks at a time. That thread holds no lock, because the agent (Shunt's daemon, of which
//! the store is a thread) may be stopped. A *segment* is shared memory with payloads of one program.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use shunt_sys::lock::{Condvar, Mutex, MutexGuard};

use crate::place::SentFile;
use crate::reference::Holder;
use crate::segment::{Mapped, now_ms};
use crate::sources::Sources;
use crate::store::client::Connection;

/// Most files of this machine's programs that this process has open for reading.
pub(super) const FILES_MAX: usize = 64;
/// Time after which a file that is not read is closed, in milliseconds.
const FILE_IDLE_MS: u64 = 2_000;

#[derive(Debug, Default)]
pub(super) struct Own {
    state: Mutex<Local>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct Local {
    link: Link,
    /// Name of the store, once the store has told it.
    pub(super) holder: Option<Holder>,
    /// Mapped segments by number; `None`: this program is not allowed to map the segment, or there is no such segment.
    pub(super) mapped: HashMap<u32, Option<Arc<Mapped>>>,
    /// Table of which machines' programs can fetch from which stores, and the time at which the store was last asked
    /// for the table.
    pub(super) sources: Option<Arc<Sources>>,
    pub(super) sources_asked_ms: u64,
    /// Open files by segment and number, with the time of the last read.
    pub(super) files: HashMap<(u32, u32), (Arc<SentFile>, u64)>,
}

#[derive(Debug, Default)]
enum Link {
    #[default]
    Unmade,
    Idle(Connection),
    /// A thread is asking.
    Used,
    /// The store has not answered in time: no thread waits for it, and attempts are made until it answers.
    Silent,
}

/// Reasons why there is no answer.
pub(super) enum NoAnswer {
    /// The store is silent.
    Silent,
    /// There is no store, or the connection to it has broken.
    Broken,
}

/// Whether an error means that the store has not answered in time.
pub(super) fn is_silence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

impl Own {
    pub(super) fn lock(&self) -> MutexGuard<'_, Local> {
        self.state.lock()
    }

    /// Asks the store, over a connection that `open` makes if there is none. Returns the answer and a flag. The flag is
    /// true if the store has just become silent: then the caller has to begin attempts to connect.
    pub(super) fn ask<T>(
        &self,
        open: impl FnOnce() -> io::Result<Connection>,
        question: impl FnOnce(&Connection) -> io::Result<T>,
    ) -> (Result<T, NoAnswer>, bool) {
        let mut local = self.lock();
        let known = loop {
            match std::mem::replace(&mut local.link, Link::Used) {
                // The agent may have been started again since the last question.
                Link::Idle(connection) => break Some(connection).filter(Connection::is_served),
                Link::Unmade => break None,
                // Another thread is asking. It waits for a second at most.
                Link::Used => local = self.changed.wait(local),
                Link::Silent => {
                    local.link = Link::Silent;
                    return (Err(NoAnswer::Silent), false);
                }
            }
        };
        if known.is_none() {
            // The next connection may lead to an agent that was started again, with another table of sources.
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

    /// Ends the state [`Link::Silent`]. `connection` is the one on which the store has answered. `None`: connecting has
    /// failed without a silence, or no thread can be started to try again. Then the next question makes the connection.
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
    /// Whether there is no open connection with the store. False while a thread uses the connection. Also false if the
    /// store is only silent: a silent store is not asked.
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
