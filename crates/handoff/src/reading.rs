//! Reads of file bytes that are not in memory (in_memory.rs), by separate threads. So a disk that is slow, or hangs,
//! delays only the payloads that need its bytes.
//!
//! ```text
//!   payload --ask--> queue of its device --> thread: pread, fstat --> done --eventfd--> owner --> payload
//! ```
//!
//! A read cannot be cancelled. So a device gets one more thread only while there are more idle threads than threads
//! that are busy with it. The first device that hangs takes half of the threads, the next one half of the rest. At most
//! two threads read one file. The owner of a payload decides how long it waits. When the payload is dropped, a read
//! that has not begun never begins.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, preadv};
use shunt_wire::local::Reason;

use crate::identity::FileIdentity;
use crate::in_memory::{self, Found};

/// Number of threads that are to call [`Reads::work`].
pub const THREADS: usize = 32;
/// Length of one read in bytes, if the payload has as many left.
pub(crate) const READ_BYTES: usize = 256 << 10;
const THREADS_OF_A_FILE: usize = 2;
/// Largest number of reads that wait at a time. One device has at most half as many, so that a device that hangs leaves
/// room for others.
const QUEUE: usize = 64 << 10;
const QUEUE_OF_A_DEVICE: usize = QUEUE / 2;
/// Time for which a device counts as memory once its file system was found to be memory (tmpfs). After that the
/// device's number may belong to another device.
const KNOWN_FOR: Duration = Duration::from_secs(10);

/// Party for which a read is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Sender with this index.
    Sender(usize),
    /// Fetch with this index: a payload that is being sent to the frontend's agent.
    Fetch(usize),
}

/// Range of a file that is to be read.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The file.
    pub file: Arc<OwnedFd>,
    /// The file's identity when it was first examined.
    pub identity: FileIdentity,
    /// Offset of the first byte.
    pub at: u64,
    /// Number of bytes.
    pub bytes: usize,
}

enum Work {
    Read {
        owner: Owner,
        wanted: Wanted,
    },
    /// Closes a file. On FUSE this waits for a program (fuse(8)).
    Close(Arc<OwnedFd>),
}

impl Work {
    fn is_read(&self) -> bool {
        matches!(self, Self::Read { .. })
    }

    fn inode(&self) -> Option<u64> {
        match self {
            Self::Read { wanted, .. } => Some(wanted.identity.inode),
            Self::Close(_) => None,
        }
    }
}

/// A read that has ended.
#[derive(Debug)]
pub struct Done {
    /// Party for which the read was made.
    pub owner: Owner,
    pub(crate) id: u64,
    /// The bytes read, fewer than wanted at the end of the file, and the file's identity after the read.
    pub(crate) read: Result<(Vec<u8>, FileIdentity), Errno>,
}

/// Work of one device: the queue, by work number, and the inodes of the files that its threads are busy with.
#[derive(Default)]
struct Device {
    waiting: BTreeMap<u64, Work>,
    /// Number of reads in `waiting`.
    reads: usize,
    busy: Vec<Option<u64>>,
}

impl Device {
    fn add(&mut self, id: u64, work: Work) {
        self.reads += usize::from(work.is_read());
        self.waiting.insert(id, work);
    }

    fn remove(&mut self, id: u64) -> Option<Work> {
        let work = self.waiting.remove(&id)?;
        self.reads -= usize::from(work.is_read());
        Some(work)
    }

    fn take(&mut self) -> Option<(u64, Work)> {
        let is_free = |inode: Option<u64>| {
            inode.is_none() || self.busy.iter().filter(|busy| **busy == inode).count() < THREADS_OF_A_FILE
        };
        let id = *self.waiting.iter().find(|(_, work)| is_free(work.inode()))?.0;
        let work = self.remove(id)?;
        self.busy.push(work.inode());
        Some((id, work))
    }
}

#[derive(Default)]
struct State {
    devices: HashMap<u64, Device>,
    /// Number of reads that wait. Files that wait to be closed do not count, and take no read's place.
    waiting: usize,
    next: u64,
    idle: usize,
    done: Vec<Done>,
    /// Numbers of devices whose file systems are in memory, each with the time when that was found.
    memory: HashMap<u64, Instant>,
    read: u64,
}

impl State {
    fn add(&mut self, device: u64, work: Work) -> u64 {
        self.next += 1;
        self.waiting += usize::from(work.is_read());
        self.devices.entry(device).or_default().add(self.next, work);
        self.next
    }

    /// Takes work for an idle thread. Returns the device's number, the work's number, and the work itself.
    fn take(&mut self) -> Option<(u64, u64, Work)> {
        let idle = self.idle;
        let mut ready = self.devices.iter_mut().filter(|(_, device)| device.busy.len() < idle);
        let (number, (id, work)) = ready.find_map(|(number, device)| Some((*number, device.take()?)))?;
        self.idle -= 1;
        self.waiting -= usize::from(work.is_read());
        Some((number, id, work))
    }

    fn is_done(&mut self, number: u64, inode: Option<u64>) {
        self.idle += 1;
        let Some(device) = self.devices.get_mut(&number) else { return };
        if let Some(at) = device.busy.iter().position(|busy| *busy == inode) {
            device.busy.swap_remove(at);
        }
        if device.busy.is_empty() && device.waiting.is_empty() {
            self.devices.remove(&number);
        }
    }

    fn forget(&mut self, number: u64, id: u64) {
        let Some(device) = self.devices.get_mut(&number) else { return };
        self.waiting -= usize::from(device.remove(id).is_some());
    }
}

#[derive(Debug)]
struct Shared {
    /// Bytes that were found in memory a moment ago. They have a separate lock, because the event loop looks here
    /// before each send. A thread that looks for work may hold the lock of `state` while it goes through many reads.
    found: Mutex<Found>,
    state: Mutex<State>,
    work: Condvar,
    wake: OwnedFd,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("waiting", &self.waiting).field("idle", &self.idle).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All reads of an agent. Clones share them.
#[derive(Clone, Debug)]
pub struct Reads(Arc<Shared>);

/// A read that is wanted as long as this value lives.
#[derive(Debug)]
pub(crate) struct Ticket {
    shared: Arc<Shared>,
    device: u64,
    id: u64,
}

impl Ticket {
    pub(crate) fn is_of(&self, done: &Done) -> bool {
        self.id == done.id
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.shared.lock().forget(self.device, self.id);
    }
}

impl Reads {
    /// Makes an empty queue. No thread works on it yet.
    ///
    /// # Errors
    /// Returns the kernel's error of eventfd(2).
    pub fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(Shared { found: Mutex::default(), state: Mutex::default(), work: Condvar::new(), wake })))
    }

    /// Works on reads for ever, in one of [`THREADS`] threads.
    pub fn work(&self) -> ! {
        let mut state = self.0.lock();
        state.idle += 1;
        loop {
            let Some((device, id, work)) = state.take() else {
                state = self.0.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let inode = work.inode();
            let done = do_work(id, work);
            state = self.0.lock();
            if let Some((done, is_memory)) = done {
                if is_memory {
                    state.memory.insert(device, Instant::now());
                }
                state.read += 1;
                state.done.push(done);
                let _ = rustix::io::write(&self.0.wake, &1u64.to_ne_bytes());
            }
            state.is_done(device, inode);
            // Another thread may now begin work that the limits for a device or a file have held back.
            self.0.work.notify_one();
        }
    }

    /// Takes the reads that have ended since the last call.
    pub fn take_done(&self) -> Vec<Done> {
        let _ = rustix::io::read(&self.0.wake, &mut [0; 8]);
        std::mem::take(&mut self.0.lock().done)
    }

    /// Number of reads that have ended.
    pub fn made(&self) -> u64 {
        self.0.lock().read
    }

    /// Number of reads that wait for a thread, and of reads and closes that are under way.
    pub fn pending(&self) -> usize {
        let state = self.0.lock();
        state.waiting + state.devices.values().map(|device| device.busy.len()).sum::<usize>()
    }

    /// Gives this handle of a file to one of the threads, which drops the handle, because closing a file may wait. The
    /// file is closed with its last handle.
    pub fn close(&self, file: Arc<OwnedFd>) {
        let device = FileIdentity::at_hand(&*file).map_or(0, |identity| identity.device);
        self.0.lock().add(device, Work::Close(file));
        self.0.work.notify_one();
    }

    /// Queues a read for `owner`.
    ///
    /// # Errors
    /// [`Reason::Socket`] if too many reads wait. [`Reason::Limit`] is not used: a frontend would conclude from it that
    /// no byte was sent and no record sealed.
    pub(crate) fn ask(&self, owner: Owner, wanted: Wanted) -> Result<Ticket, Reason> {
        let mut state = self.0.lock();
        let device = wanted.identity.device;
        let of_device = state.devices.get(&device).map_or(0, |device| device.reads);
        if state.waiting >= QUEUE || of_device >= QUEUE_OF_A_DEVICE {
            return Err(Reason::Socket);
        }
        let id = state.add(device, Work::Read { owner, wanted });
        self.0.work.notify_one();
        Ok(Ticket { shared: self.0.clone(), device, id })
    }

    /// Number of bytes of a file, from `at` on, that were found in memory a moment ago.
    pub(crate) fn found(&self, file: &FileIdentity, at: u64) -> usize {
        self.0.found.lock().unwrap_or_else(PoisonError::into_inner).bytes_from(file, at, Instant::now())
    }

    /// Notes that `bytes` bytes of a file, from `at` on, are in memory now.
    pub(crate) fn note_found(&self, file: FileIdentity, at: u64, bytes: usize) {
        self.0.found.lock().unwrap_or_else(PoisonError::into_inner).note(file, at, bytes, Instant::now());
    }

    /// Whether a device is known to be memory, so that its reads never wait.
    pub(crate) fn is_memory(&self, device: u64) -> bool {
        self.0.lock().memory.get(&device).is_some_and(|since| since.elapsed() < KNOWN_FOR)
    }
}

impl AsFd for Reads {
    /// Descriptor that is readable when a read has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }
}

/// Does the work. Returns the result of a read, and whether the file is in a file system that is memory. `None` after a
/// close.
fn do_work(id: u64, work: Work) -> Option<(Done, bool)> {
    match work {
        Work::Close(file) => {
            drop(file);
            None
        }
        Work::Read { owner, wanted } => {
            let read = read(&wanted);
            Some((Done { owner, id, read }, in_memory::is_of_memory(&*wanted.file)))
        }
    }
}

fn read(wanted: &Wanted) -> Result<(Vec<u8>, FileIdentity), Errno> {
    let (mut bytes, mut done) = (vec![0; wanted.bytes], 0);
    while done < bytes.len() {
        match preadv(&*wanted.file, &mut [IoSliceMut::new(&mut bytes[done..])], wanted.at + done as u64) {
            Ok(0) => break,
            Ok(more) => done += more,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    bytes.truncate(done);
    Ok((bytes, FileIdentity::now(&*wanted.file)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(idle: usize) -> State {
        State { idle, ..State::default() }
    }

    fn wanted(device: u64, inode: u64) -> Work {
        let file = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
        let identity = FileIdentity { device, inode, size: 1, mtime_ns: 0, ctime_ns: 0 };
        Work::Read { owner: Owner::Fetch(0), wanted: Wanted { file, identity, at: 0, bytes: 1 } }
    }

    /// Adds 100 reads of a device, and returns how many of them begin while none ends.
    fn begun(state: &mut State, device: u64) -> usize {
        for inode in 0..100 {
            state.add(device, wanted(device, inode));
        }
        std::iter::from_fn(|| state.take()).inspect(|taken| assert_eq!(taken.0, device)).count()
    }

    #[test]
    fn a_device_that_hangs_leaves_threads_to_others() {
        let mut state = state(THREADS);
        let taken = [1, 2, 3, 4, 5].map(|device| begun(&mut state, device));
        assert_eq!(taken, [16, 8, 4, 2, 1]);
        assert_eq!(state.idle, 1);
        state.is_done(1, Some(0));
        assert_eq!(state.take().unwrap().0, 5, "the first one has more than its share");
        assert!(state.take().is_none());
    }

    #[test]
    fn a_file_that_hangs_leaves_threads_to_others_of_its_device() {
        let mut state = state(THREADS);
        for inode in [7, 7, 7, 7, 8] {
            state.add(1, wanted(1, inode));
        }
        let inodes: Vec<_> = std::iter::from_fn(|| state.take()).map(|(_, _, work)| work.inode()).collect();
        assert_eq!(inodes, [Some(7), Some(7), Some(8)]);
        state.is_done(1, Some(7));
        assert_eq!(state.take().unwrap().2.inode(), Some(7));
    }

    #[test]
    fn a_read_that_nobody_wants_any_more_is_not_begun() {
        let reads = Reads::new().unwrap();
        let Work::Read { owner, wanted } = wanted(1, 1) else { unreachable!("just made") };
        let ticket = reads.ask(owner, wanted.clone()).unwrap();
        assert_eq!((reads.pending(), Arc::strong_count(&wanted.file)), (1, 2));
        drop(ticket);
        assert_eq!((reads.pending(), Arc::strong_count(&wanted.file)), (0, 1), "its file is closed");
    }

    #[test]
    fn the_queue_of_reads_is_bounded() {
        let reads = Reads::new().unwrap();
        let Work::Read { owner, wanted } = wanted(1, 1) else { unreachable!("just made") };
        let of = |device| Wanted { identity: FileIdentity { device, ..wanted.identity }, ..wanted.clone() };
        let ask = |device| reads.ask(owner, of(device));
        reads.close(wanted.file.clone());
        let mut tickets: Vec<_> = (0..QUEUE_OF_A_DEVICE).map(|_| ask(1).unwrap()).collect();
        assert_eq!(ask(1).unwrap_err(), Reason::Socket, "a frontend would take `Limit` for: nothing was sealed");
        tickets.extend((0..QUEUE_OF_A_DEVICE).map(|_| ask(2).unwrap()));
        assert_eq!(ask(3).unwrap_err(), Reason::Socket);
        drop(tickets);
        assert_eq!(reads.pending(), 0);
        assert!(ask(3).is_ok());
    }
}
