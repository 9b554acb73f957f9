//! The agent's log, on standard error. It never delays the agent: if the disk is full or the reader does not read,
//! lines are lost and counted.
//!
//! ```text
//!   before start():  any thread ----------------------------------------------> output   a line without room is lost
//!   then:            any thread --> queue of WAITING lines --> thread "log" --> output
//! ```

use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::os::threads;

/// Most lines that may wait for a slow reader.
const WAITING: usize = 4096;
/// Time that the last lines of a process may take to be written.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// This process's log.
pub static LOG: Log = Log::new();

/// Queue of lines for an output that may be slow, and numbers of waiting and of lost lines.
pub struct Log {
    queue: OnceLock<SyncSender<Vec<u8>>>,
    /// Number of lines in the queue, together with the one that is being written.
    waiting: AtomicU64,
    lost: AtomicU64,
}

impl Log {
    const fn new() -> Self {
        Self { queue: OnceLock::new(), waiting: AtomicU64::new(0), lost: AtomicU64::new(0) }
    }

    /// Returns the number of lines that were lost.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Starts a thread without capabilities. From now on, this thread writes the lines to `output`. Call it after
    /// privileges were given up, and before system calls are restricted.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be made.
    pub fn start(&'static self, output: impl Write + Send + 'static) -> io::Result<()> {
        let (queue, lines) = sync_channel(WAITING);
        threads::start("log", "cannot start the thread that writes the log", vec![move || self.run(&lines, output)])?;
        let _ = self.queue.set(queue);
        Ok(())
    }

    fn run(&self, lines: &Receiver<Vec<u8>>, mut output: impl Write) {
        let mut told = 0;
        for line in lines {
            let lost = self.lost();
            if lost > told {
                let text = format!(
                    "shuntd: {} lines of this log are lost, because its reader did not read or its disk was full\n",
                    lost - told
                );
                if output.write_all(text.as_bytes()).is_ok() {
                    told = lost;
                }
            }
            if output.write_all(&line).is_err() {
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Writes a line, or queues it for the thread. Counts it as lost if neither is possible.
    pub fn take(&self, line: &[u8]) {
        let is_taken = match self.queue.get() {
            Some(queue) => {
                self.waiting.fetch_add(1, Ordering::Relaxed);
                let is_taken = queue.try_send(line.to_vec()).is_ok();
                self.waiting.fetch_sub(u64::from(!is_taken), Ordering::Relaxed);
                is_taken
            }
            None => has_room(io::stderr()) && io::stderr().write_all(line).is_ok(),
        };
        self.lost.fetch_add(u64::from(!is_taken), Ordering::Relaxed);
    }

    /// Waits until the last lines are written, for `LAST_WORDS` at most.
    pub fn finish(&self) {
        let deadline = Instant::now() + LAST_WORDS;
        while self.waiting.load(Ordering::Relaxed) > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Returns whether a line can be written at once. For a pipe, poll(2) says so if a page of the pipe is free.
fn has_room(output: impl std::os::fd::AsFd) -> bool {
    let mut ready = [PollFd::new(&output, PollFlags::OUT)];
    poll(&mut ready, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready == 1)
}

/// Takes the bytes of each call as one line. No call fails: after an error, tracing_subscriber might panic.
impl Write for &'static Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.take(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use shunt_testbed::wait_for;

    /// Returns a log that writes to `output`. The log's thread gives up only its own capabilities, not those of the
    /// test's thread.
    fn log_to(output: impl Write + Send + 'static) -> &'static Log {
        let log: &'static Log = Box::leak(Box::new(Log::new()));
        log.start(output).unwrap();
        log
    }

    #[test]
    fn a_full_disk_costs_lines_and_nothing_else() {
        let log = log_to(OpenOptions::new().write(true).open("/dev/full").unwrap());
        (0..10).for_each(|_| log.take(b"a line\n"));
        log.finish();
        wait_for("ten lines are lost", || log.lost() == 10).unwrap();
    }

    #[test]
    fn a_reader_that_does_not_read_costs_lines_and_is_told_how_many() {
        let (output, mut reader) = UnixStream::pair().unwrap();
        let log = log_to(output);
        let line = [&[b'x'; 1023][..], b"\n"].concat();
        while log.lost() == 0 {
            log.take(&line);
        }
        let mut text = String::new();
        while !text.contains("lines of this log are lost") {
            let mut some = [0; 4096];
            let bytes = reader.read(&mut some).unwrap();
            text = text.split_off(text.len().saturating_sub(100)) + &String::from_utf8_lossy(&some[..bytes]);
        }
    }
}
