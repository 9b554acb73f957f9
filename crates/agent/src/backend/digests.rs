//! Digests (SHA-256) of files. Separate threads read the files, so a disk that is slow, or hangs, delays only these
//! threads.
//!
//! A digest belongs to one state of a file ([`FileIdentity`]), so it stays valid, and is kept for as long as there is
//! room. There are two kinds of requests for digests. `Want::Ahead` is for payloads under way, in case this machine is
//! lost and another one continues them. The threads for this kind have the lowest priority. `Want::Now` is for clients
//! that wait. Each kind has two threads, which read one file of a device at a time. So a file system that hangs takes
//! one thread of each kind.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use ring::digest::{Context, SHA256};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, pread};
use shunt_handoff::identity::FileIdentity;
use shunt_logic::machine::{Known, Sha256, Want};

use crate::os::threads;

/// Size of the largest file that has a digest, in bytes. Larger files take too long to read.
pub(crate) const MOST_BYTES: u64 = 1 << 30;
/// Time that must have passed since a file's last change before its digest is made. A file that has changed more
/// recently may still be written to, and its file system's clock may be coarse.
const QUIET: Duration = Duration::from_secs(3);
const THREADS_OF_A_KIND: usize = 2;
/// Most files that wait to be read, for each kind of request.
const QUEUE: usize = 256;
/// Most digests that are kept.
const KEPT: usize = 4096;
const READ_BYTES: usize = 256 << 10;
/// Lowest priority of nice(2). Under SCHED_IDLE, a busy machine would never finish a digest.
const LOWEST: i32 = 19;

struct Job {
    file: File,
    identity: FileIdentity,
}

/// Files that wait for one kind of request ([`Want`]), and the devices that this kind's threads read.
#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    wanted: HashSet<FileIdentity>,
    reading: Vec<u64>,
}

impl Queue {
    fn take(&mut self) -> Option<Job> {
        let at = self.jobs.iter().position(|job| !self.reading.contains(&job.identity.device))?;
        let job = self.jobs.remove(at)?;
        self.reading.push(job.identity.device);
        Some(job)
    }

    fn is_done(&mut self, identity: &FileIdentity) {
        self.wanted.remove(identity);
        self.reading.retain(|device| *device != identity.device);
    }
}

/// Results of reads. The oldest result is dropped to make room for a new one. The value `None` means that the file has
/// no digest, because it could not be read or has changed.
#[derive(Default)]
struct Cache {
    known: HashMap<FileIdentity, Option<Sha256>>,
    order: VecDeque<FileIdentity>,
}

impl Cache {
    fn insert(&mut self, identity: FileIdentity, digest: Option<Sha256>) {
        if self.known.insert(identity, digest).is_none() {
            self.order.push_back(identity);
        }
        if self.order.len() > KEPT
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }
}

#[derive(Default)]
struct State {
    ahead: Queue,
    now: Queue,
    cache: Cache,
    /// Number of digests that were computed.
    made: u64,
}

impl State {
    fn queue(&mut self, want: Want) -> &mut Queue {
        match want {
            Want::Ahead => &mut self.ahead,
            Want::Now => &mut self.now,
        }
    }
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    wake: Arc<OwnedFd>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, want: Want) -> ! {
        let mut buffer = vec![0; READ_BYTES];
        let mut state = self.lock();
        loop {
            let Some(job) = state.queue(want).take() else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let digest = digest_of(&job, &mut buffer).ok();
            state = self.lock();
            state.made += u64::from(digest.is_some());
            state.cache.insert(job.identity, digest);
            state.queue(want).is_done(&job.identity);
            self.work.notify_all();
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

/// Computes the digest of a job's file.
///
/// # Errors
/// Returns an error if the file cannot be read, or if it differs from the job's identity before or after the read.
fn digest_of(job: &Job, buffer: &mut [u8]) -> io::Result<Sha256> {
    let (mut context, mut at) = (Context::new(&SHA256), 0);
    let is_same = || job.file.metadata().is_ok_and(|meta| FileIdentity::of(&meta) == job.identity);
    let other = || io::Error::other("the file has changed");
    if !is_same() {
        return Err(other());
    }
    while at < job.identity.size {
        match pread(&job.file, &mut *buffer, at) {
            Ok(0) => return Err(other()),
            Ok(bytes) => {
                context.update(&buffer[..bytes]);
                at += bytes as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    if at != job.identity.size || !is_same() {
        return Err(other());
    }
    context.finish().as_ref().try_into().map_err(io::Error::other)
}

/// Returns whether, at the time `ago` before now, a file had been unchanged for 3 s, and has not changed since.
/// `identity` is the file's present state. If the answer is false, bytes that were read at that time may belong to an
/// earlier state of the file with the same times.
pub(crate) fn was_quiet(identity: &FileIdentity, ago: Duration) -> bool {
    identity.is_older_than(QUIET + ago, SystemTime::now())
}

/// The digests that are known, and the threads that make more.
pub(crate) struct Digests(Arc<Shared>);

impl Digests {
    /// Creates an empty cache. No thread runs yet.
    ///
    /// # Errors
    /// Returns the kernel's error of eventfd(2).
    pub(crate) fn new() -> io::Result<Self> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Self(Arc::new(Shared { state: Mutex::default(), work: Condvar::new(), wake })))
    }

    /// Starts the threads, which have no capability. Call it once the agent has given up its own capabilities, and
    /// before it restricts its system calls.
    ///
    /// # Errors
    /// Returns an error if a thread cannot be started.
    pub(crate) fn start(&self) -> io::Result<()> {
        let kinds = [Want::Ahead, Want::Now].into_iter().flat_map(|kind| [kind; THREADS_OF_A_KIND]);
        let work = |want| {
            let shared = self.0.clone();
            move || {
                if want == Want::Ahead {
                    let _ = rustix::process::setpriority_process(None, LOWEST);
                }
                shared.work(want)
            }
        };
        threads::start(
            "digest",
            "cannot start the threads for digests: no digests are made, and lost payloads cannot be continued over \
             TLS",
            kinds.map(work).collect(),
        )
    }

    /// Returns the eventfd that is readable when a digest is known, or a file turns out to have none.
    pub(crate) fn wake(&self) -> &OwnedFd {
        &self.0.wake
    }

    /// Clears the eventfd, so that the next digest makes it readable again.
    pub(crate) fn quiet(&self) {
        let _ = rustix::io::read(self.wake(), &mut [0; 8]);
    }

    /// Returns the number of digests that were computed.
    pub(crate) fn made(&self) -> u64 {
        self.0.lock().made
    }

    /// Returns a file's digest if it is known. If not, queues the file to be read. Does not queue a file that is queued
    /// already or has changed in the last 3 s, nor any file if the queue is full. A file that is too large never gets a
    /// digest.
    pub(crate) fn ask(&self, file: impl AsFd, identity: FileIdentity, want: Want) -> Known {
        let mut state = self.0.lock();
        if let Some(known) = state.cache.known.get(&identity) {
            return known.map_or(Known::Never, Known::Digest);
        }
        if identity.size > MOST_BYTES {
            return Known::Never;
        }
        let queue = state.queue(want);
        let is_due = identity.is_older_than(QUIET, SystemTime::now());
        if !is_due || queue.wanted.contains(&identity) || queue.jobs.len() >= QUEUE {
            return Known::NotYet;
        }
        let Ok(file) = file.as_fd().try_clone_to_owned().map(File::from) else { return Known::NotYet };
        queue.wanted.insert(identity);
        queue.jobs.push_back(Job { file, identity });
        self.0.work.notify_all();
        Known::NotYet
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::time::Instant;

    fn old_file(bytes: &[u8]) -> (File, FileIdentity) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let identity = |file: &File| FileIdentity::of(&file.metadata().unwrap());
        let deadline = Instant::now() + Duration::from_secs(30);
        while !identity(&file).is_older_than(QUIET, SystemTime::now()) {
            assert!(Instant::now() < deadline, "the file does not age");
            std::thread::sleep(Duration::from_millis(50));
        }
        let identity = identity(&file);
        (file, identity)
    }

    fn wait(digests: &Digests, file: &File, identity: FileIdentity) -> Known {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match digests.ask(file, identity, Want::Now) {
                Known::NotYet => assert!(Instant::now() < deadline, "no digest"),
                known => return known,
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_file_is_read_once_and_what_has_changed_never_is() {
        let digests = Digests::new().unwrap();
        let mut young = tempfile::tempfile().unwrap();
        young.write_all(b"x").unwrap();
        let identity = FileIdentity::of(&young.metadata().unwrap());
        assert_eq!(digests.ask(&young, identity, Want::Now), Known::NotYet);
        assert_eq!(digests.0.lock().now.jobs.len(), 0, "it may still be written to");
        digests.start().unwrap();
        let (file, identity) = old_file(&[7; 300_000]);
        let expected: Sha256 = ring::digest::digest(&SHA256, &[7; 300_000]).as_ref().try_into().unwrap();
        assert_eq!(wait(&digests, &file, identity), Known::Digest(expected));
        assert_eq!((wait(&digests, &file, identity), digests.made()), (Known::Digest(expected), 1));
        let other = FileIdentity { ctime_ns: identity.ctime_ns - 1, ..identity };
        assert_eq!(wait(&digests, &file, other), Known::Never);
        let larger = FileIdentity { size: MOST_BYTES + 1, ..identity };
        assert_eq!(digests.ask(&file, larger, Want::Now), Known::Never);
    }

    #[test]
    fn a_file_is_quiet_after_the_end_of_its_last_write() {
        let (_, identity) = old_file(b"old");
        assert!(was_quiet(&identity, Duration::ZERO));
        assert!(!was_quiet(&identity, Duration::from_secs(3600)), "an hour ago it was not there");
    }

    #[test]
    fn one_device_that_hangs_leaves_threads_to_others() {
        let mut queue = Queue::default();
        let mut add = |device, inode| {
            let identity = FileIdentity { device, inode, size: 1, mtime_ns: 0, ctime_ns: 0 };
            queue.jobs.push_back(Job { file: tempfile::tempfile().unwrap(), identity });
        };
        [(1, 1), (1, 2), (2, 3)].into_iter().for_each(|(device, inode)| add(device, inode));
        let hangs = queue.take().unwrap().identity;
        let other = queue.take().unwrap().identity;
        assert_eq!((hangs.device, other.device), (1, 2));
        assert!(queue.take().is_none(), "the rest is on the one that hangs");
        queue.is_done(&hangs);
        assert_eq!(queue.take().unwrap().identity.inode, 2);
    }

    #[test]
    fn the_number_of_remembered_digests_is_bounded() {
        let mut cache = Cache::default();
        let identity = |inode| FileIdentity { device: 1, inode, size: 1, mtime_ns: 0, ctime_ns: 0 };
        (0..KEPT as u64 + 10).for_each(|inode| cache.insert(identity(inode), None));
        assert_eq!((cache.known.len(), cache.order.len()), (KEPT, KEPT));
        assert!(!cache.known.contains_key(&identity(9)) && cache.known.contains_key(&identity(10)));
    }
}
