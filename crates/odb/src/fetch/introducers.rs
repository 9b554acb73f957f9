//! Connections to this machine's store, on which this process asks for connections to stores. Each connection handles
//! one question at a time, and stays open for the next: later the store may refuse to open another one for this
//! process. A *store* has the payloads (bodies) of its machine's programs, and a payload's *holder* is the store that
//! has it.

use std::io;

use shunt_sys::lock::{Condvar, Mutex, MutexGuard};

use crate::channel::Channel;
use crate::reference::Holder;
use crate::store::client::Connection;

#[derive(Debug, Default)]
pub(super) struct Introducers {
    pool: Mutex<Pool>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct Pool {
    idle: Vec<Connection>,
    /// Number of connections by which threads are asking questions.
    asked: usize,
}

impl Pool {
    fn next(&mut self) -> Option<Connection> {
        self.idle.retain(Connection::is_served);
        let connection = self.idle.pop()?;
        self.asked += 1;
        Some(connection)
    }

    /// Forgets all connections, in a child of fork(2): they belong to the parent, and so do the threads that ask.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

impl Introducers {
    pub(super) fn lock(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock()
    }

    /// Makes sure that there is a connection, idle or in use. If there is none, `open` makes one.
    ///
    /// # Errors
    /// Returns the error of `open`.
    pub(super) fn have_one(&self, open: impl FnOnce() -> io::Result<Connection>) -> io::Result<()> {
        let mut pool = self.lock();
        pool.idle.retain(Connection::is_served);
        if pool.idle.is_empty() && pool.asked == 0 {
            drop(pool);
            let connection = open()?;
            self.lock().idle.push(connection);
        }
        Ok(())
    }

    /// Takes an idle connection, or one that `open` makes. The store may refuse this process, for example after the
    /// process has become another user. Then this waits for a connection to become idle, as long as another thread has
    /// one.
    ///
    /// # Errors
    /// Returns the error of `open` if there is no connection to wait for.
    pub(super) fn take(&self, open: impl FnOnce() -> io::Result<Connection>) -> io::Result<Introducer<'_>> {
        let taken = |connection| Introducer { introducers: self, connection: Some(connection) };
        let free = self.lock().next();
        if let Some(connection) = free {
            return Ok(taken(connection));
        }
        let refused = match open() {
            Ok(connection) => {
                self.lock().asked += 1;
                return Ok(taken(connection));
            }
            Err(refused) => refused,
        };
        let mut pool = self.lock();
        loop {
            if let Some(connection) = pool.next() {
                return Ok(taken(connection));
            }
            if pool.asked == 0 {
                return Err(refused);
            }
            pool = self.changed.wait(pool);
        }
    }
}

/// A connection that is taken for a question. Dropping this value closes the connection, unless it was kept
/// ([`Self::keep`]).
#[derive(Debug)]
pub(super) struct Introducer<'a> {
    introducers: &'a Introducers,
    connection: Option<Connection>,
}

impl Introducer<'_> {
    /// Asks for a connection to a store, this machine's or another's. `None`: it cannot be made now.
    ///
    /// # Errors
    /// Returns the error of [`Connection::reach`].
    pub(super) fn reach(&self, holder: Holder) -> io::Result<Option<Channel>> {
        self.connection.as_ref().ok_or(io::ErrorKind::NotConnected)?.reach(holder)
    }

    /// Puts the connection back, after its question was answered.
    pub(super) fn keep(mut self) {
        let connection = self.connection.take();
        self.introducers.lock().idle.extend(connection);
    }
}

impl Drop for Introducer<'_> {
    fn drop(&mut self) {
        self.introducers.lock().asked -= 1;
        self.introducers.changed.notify_all();
    }
}
