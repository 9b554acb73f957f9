//! Reads of files whose bytes are not in the page cache, by separate threads. Senders and fetches continue when the
//! read that they wait for has ended. A *sender* is this machine's kernel socket for a client. A *fetch* brings a
//! payload through both agents to a frontend's server.

use std::fs::File;
use std::sync::Arc;

use shunt_handoff::reading::{Owner, THREADS};

use super::Daemon;
use crate::os::threads;

/// Number of threads on a machine that is no backend, where they only close files.
const CLOSING_THREADS: usize = 4;

impl Daemon {
    /// Starts the threads that read and close files. A machine that is no backend reads no files, but its servers may
    /// pass files to the agent all the same. To be called after privileges are given up, and before system calls are
    /// restricted.
    ///
    /// # Errors
    /// Returns the error if a thread cannot be made.
    pub fn start_reads(&self) -> std::io::Result<()> {
        let threads = if self.kernel.senders.is_some() { THREADS } else { CLOSING_THREADS };
        let work = |_| {
            let reads = self.kernel.reads.clone();
            move || reads.work()
        };
        threads::start("read", "cannot start the threads that read files", (0..threads).map(work).collect())
    }

    /// Passes on the results of reads that have ended.
    pub(crate) fn on_reads(&mut self) {
        for done in self.kernel.reads.take_done() {
            match done.owner {
                Owner::Sender(index) => self.on_sender_read(index, done),
                Owner::Fetch(index) => self.on_fetch_read(index, done),
            }
        }
    }

    /// Closes files that servers have passed, in a reading thread, because close(2) may block like read(2).
    pub(crate) fn close_files(&mut self, files: Vec<File>) {
        files.into_iter().for_each(|file| self.kernel.reads.close(Arc::new(file.into())));
    }
}
