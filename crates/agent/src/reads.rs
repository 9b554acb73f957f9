//! Reads that have ended: whoever waited for their bytes goes on.

use std::sync::Arc;

use shunt_handoff::reading::{Done, Owner, THREADS};

use crate::agent::Agent;
use crate::threads;

impl Agent {
    /// Has files read that are not in memory, where this machine sends any: after privileges were given up, and before
    /// system calls are restricted.
    ///
    /// # Errors
    /// Where a thread cannot be made.
    pub fn start_reads(&self) -> std::io::Result<()> {
        if self.senders.is_none() {
            return Ok(());
        }
        let work = |_| {
            let reads = self.reads.clone();
            move || reads.work()
        };
        threads::start("read", "files are not read", (0..THREADS).map(work).collect())
    }

    /// The same for which connections live, from where this machine is a frontend.
    ///
    /// # Errors
    /// Where a thread cannot be made.
    pub fn start_census(&mut self) -> std::io::Result<()> {
        self.frontend.as_mut().map_or(Ok(()), |frontend| frontend.start_census())
    }

    pub(crate) fn on_reads(&mut self) {
        for done in self.reads.take_done() {
            match done.owner {
                Owner::Sender(index) => self.on_sender_read(index, done),
                Owner::Fetch(index) => self.on_fetch_read(index, done),
            }
        }
    }

    fn on_sender_read(&mut self, index: usize, done: Done) {
        let Some(senders) = &mut self.senders else { return };
        match senders.take_read(index, done, self.now) {
            Ok(Some(progress)) => self.follow(progress),
            Ok(None) => {}
            Err(failure) => self.report(failure),
        }
        self.tell_frontends();
    }

    /// Offers that nobody has claimed: closing a file may wait as reading it may.
    pub(crate) fn expire_offers(&mut self) {
        let expired = self.offers.expire(self.now);
        if self.senders.is_some() {
            expired.into_iter().for_each(|file| self.reads.close(Arc::new(file.into())));
        }
    }
}
