//! Connections to this machine's store by which others are reached. Each has one question at a time, and is kept as long as
//! what it has made, because the agent ends that by it.

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
    /// How many have a question now.
    asked: usize,
}

impl Pool {
    fn next(&mut self) -> Option<Connection> {
        self.idle.retain(Connection::is_served);
        let connection = self.idle.pop()?;
        self.asked += 1;
        Some(connection)
    }

    /// In a child of fork(2): they are the parent's, and so are the threads that ask.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

impl Introducers {
    pub(super) fn lock(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock()
    }

    /// Sees to it that there is one, now or when those that have a question have their answers: made by `open`.
    ///
    /// # Errors
    /// What `open` says.
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

    /// One that is free, or that `open` makes. Where the store lets this process in no more, as after it has become another
    /// user, the next that is free: then this waits as long as whoever has one.
    ///
    /// # Errors
    /// What `open` says, where there is none.
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

/// One for a question. Where it is not kept, it ends.
#[derive(Debug)]
pub(super) struct Introducer<'a> {
    introducers: &'a Introducers,
    connection: Option<Connection>,
}

impl Introducer<'_> {
    /// See [`Connection::reach`].
    ///
    /// # Errors
    /// The connection's.
    pub(super) fn reach(&self, holder: Holder) -> io::Result<Option<Channel>> {
        self.connection.as_ref().ok_or(io::ErrorKind::NotConnected)?.reach(holder)
    }

    /// It has its answer.
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
