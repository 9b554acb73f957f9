//! Fetching of payload bytes from the stores that hold them, for one process. Payloads of this machine are copied from
//! their segments (shared memory), if the store lets this program map them. For other payloads this machine's agent
//! makes one connection to each holder. The connection carries one batch of fetches at a time. A *reference* names
//! bytes of a payload, with a *share* of the right to fetch them. The size of a share is its *weight*, a power of two.
//! The *holder* is the store that has the payload, and the payload's *lease* the time for which the holder keeps it. A
//! *source* is a store that a machine's programs can fetch from. The *agent* is Shunt's daemon on each machine, and the
//! store is a thread of it.
//!
//! A holder that says nothing costs the process a second in all. From then on the holder is *lost*, and fetches from it
//! fail at once. Threads of the library go on trying to reach it ([`tender`]), and no other thread waits for it.
//! Fetches try the holder again after such a thread has had an answer. They also do so after the holder has become a
//! source of this machine anew.

mod introducers;
mod line;
mod own;
mod patience;
mod rest;
mod tender;
mod way;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use shunt_sys::lock::{Condvar, Mutex, MutexGuard};

use crate::hold::Returns;
use crate::place::SentFile;
use crate::reference::{Holder, PayloadId, Reference};
use crate::segment::{Mapped, now_ms};
use crate::sources::{End, Sources};
use crate::store::client::{Connection, QUICK};
use crate::store::session::ANSWERS_MAX;
use introducers::{Introducers, Pool};
use line::{Line, Sent};
use own::{FILES_MAX, Local, NoAnswer, Own};
pub use patience::{Call, LONG};
pub use tender::Threads;
use tender::{Task, Tasks};
use way::{Asks, Way};

/// Number of times that a connection may break during one fetch before the fetch fails. An agent that reads its
/// certificates again ends all connections, and may do so many times in a row. A new connection that is made within a
/// second shows each time that the holder is alive.
const RETRIES: u32 = 20;
/// Pause before the third and each later try of a fetch, multiplied by the number of earlier tries. All pauses together
/// take about a second.
const PAUSE: Duration = Duration::from_millis(5);

/// Time in which a store that has refused this process is not asked again, in milliseconds.
const ASK_AGAIN_MS: u64 = 1000;

/// Age of a payload up to which this process reads the bytes of its file itself, in milliseconds. If the payload is
/// older, the process asks the store for the bytes. So the store learns that they are still read, and keeps them.
const READ_HERE_MS: u64 = 10_000;

/// Access of this process to all stores.
#[derive(Debug)]
pub struct Holders(Arc<Shared>);

/// State that the threads share. No lock is held while a thread waits for an agent or a store. Only
/// [`Holders::hold_still`] holds more than one.
#[derive(Debug)]
struct Shared {
    /// Path of the socket on which this machine's store listens.
    path: PathBuf,
    /// Called with each new connection over which this process asks this machine's store. Connections of `introducers`
    /// do not count.
    connected: fn(&Connection),
    threads: Threads,
    own: Own,
    ways: Mutex<HashMap<Holder, Arc<Way>>>,
    introducers: Introducers,
    /// Time at which the store refused this process, in milliseconds of [`now_ms`]; 0: it did not.
    refused_ms: AtomicU64,
    tasks: Mutex<Tasks>,
    changed: Condvar,
}

/// Bytes to fetch, and the buffer for them, which is as long as the reference.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// Bytes to fetch.
    pub reference: Reference,
    /// Buffer to fill.
    pub into: &'a mut [u8],
}

/// Reasons why bytes cannot be fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The payload is gone. As a rule its lease has ended. It is also gone if its file has changed, or if some program
    /// has given back more weight than it had.
    #[error("{0:?} is gone: its lease has ended")]
    Gone(PayloadId),
    /// The holder cannot be reached now: a machine, an agent or the connection is broken, or was silent for a second.
    #[error("cannot fetch from {0:?}: {1}")]
    Holder(Holder, #[source] io::Error),
}

/// Converts an answer of this machine's store. `None`: there is no store, or the connection to it has broken. A silent
/// store is an error.
fn spoken<T>(payload: &PayloadId, answer: Result<T, NoAnswer>) -> Result<Option<T>, FetchError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(NoAnswer::Broken) => Ok(None),
        Err(NoAnswer::Silent) => {
            let why = "this machine's agent does not answer";
            Err(FetchError::Holder(payload.holder, io::Error::new(io::ErrorKind::TimedOut, why)))
        }
    }
}

impl Holders {
    /// Makes the access for a program of the machine whose store listens at `path`. `connected` is called with each new
    /// connection over which the program asks this store.
    #[must_use]
    pub fn new(path: PathBuf, connected: fn(&Connection)) -> Self {
        Self::with_threads(path, connected, Threads::default())
    }

    /// The same as [`Self::new`], with threads that the caller starts.
    #[must_use]
    pub fn with_threads(path: PathBuf, connected: fn(&Connection), threads: Threads) -> Self {
        Self(Arc::new(Shared {
            path,
            connected,
            threads,
            own: Own::default(),
            ways: Mutex::default(),
            introducers: Introducers::default(),
            refused_ms: AtomicU64::new(0),
            tasks: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// Starts the thread that orders attempts to connect ([`tender`]), before a connection is needed. Returns false if
    /// no thread can be started.
    pub fn start(&self) -> bool {
        self.0.start_tender()
    }

    /// Makes the thread that [`Self::start`] has started call [`Threads::tick`] soon. Does not wait.
    pub fn wake(&self) {
        self.0.wake();
    }

    /// Whether this process can fetch: it has all connections to its machine's store that a fetch takes. The process
    /// keeps them, and so stays able to fetch, even if it becomes another user or changes its root directory. A process
    /// that is not ready must not be sent references. If the agent is stopped, the call takes a second. In the second
    /// after a failure, calls return false at once.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let Shared { path, introducers, refused_ms, .. } = &*self.0;
        let refused = refused_ms.load(Ordering::Relaxed);
        if refused != 0 && now_ms() < refused + ASK_AGAIN_MS {
            return false;
        }
        let is_ready =
            self.0.ask(|_| Ok(())).is_ok() && introducers.have_one(|| Connection::open_within(path, QUICK)).is_ok();
        refused_ms.store(if is_ready { 0 } else { now_ms() }, Ordering::Relaxed);
        is_ready
    }

    /// Makes sure that the bytes of a reference can be fetched: opens a connection to its holder. To be called before
    /// memory stands for these bytes. Then a reference whose holder does not exist ends only the connection that it
    /// came over, not the process. Waits for a second at most. The payload itself is not asked for.
    ///
    /// # Errors
    /// There is no connection.
    pub fn reach(&self, reference: &Reference) -> Result<(), FetchError> {
        self.0.reach_for(reference)
    }

    /// Whether programs on the machine with the address `end` can fetch from `store`. If not, they have to be sent the
    /// bytes themselves. The first call asks this machine's store for its table of sources. While there is no table,
    /// one call per second asks again.
    #[must_use]
    pub fn is_source(&self, end: End, store: &Holder) -> bool {
        self.0.sources().is_some_and(|sources| sources.have(end, store))
    }

    /// Fetches all bytes of a reference into `into`, which is as long as the reference.
    ///
    /// # Errors
    /// The bytes cannot be fetched, now or later.
    pub fn fetch(&self, reference: &Reference, into: &mut [u8]) -> Result<(), FetchError> {
        self.fetch_all(&mut [Wanted { reference: *reference, into }], &|| ())
    }

    /// Fetches the first bytes of a reference, as a rule all of them, and returns how many. A call that has taken long
    /// and may end gets only the bytes that have come, perhaps none. Then the caller has to ask for the rest again.
    ///
    /// # Errors
    /// The bytes cannot be fetched, now or later.
    pub fn fetch_some(&self, reference: &Reference, into: &mut [u8], call: &Call<'_>) -> Result<usize, FetchError> {
        let mut wanted = Wanted { reference: *reference, into };
        let Some(remote) = self.0.copy(&mut wanted)? else { return Ok(reference.length as usize) };
        let asks = Asks { tell: &|| (), call: Some(call) };
        let fetched =
            self.0.by_way(reference, asks, Some(0), |line, returns| line.fetch_some(returns, remote, call))?;
        fetched.ok_or(FetchError::Gone(reference.payload))
    }

    /// Fetches the bytes of several references; consecutive ones of one holder are fetched together. `tell` is called,
    /// perhaps more than once, when this takes long.
    ///
    /// # Errors
    /// Some of the bytes cannot be fetched, now or later.
    pub fn fetch_all(&self, wanted: &mut [Wanted<'_>], tell: &dyn Fn()) -> Result<(), FetchError> {
        let mut remote = Vec::new();
        for wanted in wanted {
            remote.extend(self.0.copy(wanted)?);
        }
        let is_next = |one: &&mut Wanted<'_>, next: &&mut Wanted<'_>| {
            one.reference.payload.holder == next.reference.payload.holder
        };
        for of_one in remote.chunk_by_mut(is_next) {
            for batch in of_one.chunks_mut(ANSWERS_MAX) {
                self.0.fetch_batch(batch, tell)?;
            }
        }
        Ok(())
    }

    /// Holds the locks of the state that threads share, until the value is dropped. To be held during a fork, so that
    /// the child can call [`Still::forget`].
    #[must_use]
    pub fn hold_still(&self) -> Still<'_> {
        let Shared { own, ways, introducers, tasks, .. } = &*self.0;
        Still { own: own.lock(), ways: ways.lock(), introducers: introducers.lock(), tasks: tasks.lock() }
    }

    /// Sends unused shares back to their holders, as far as that takes no waiting. Shares of lost holders are dropped;
    /// their weight ends with the payload's lease. Returns true if some shares still wait; a later call sends them.
    pub fn send_returns(&self, returns: &Returns) -> bool {
        self.0.send_returns(returns)
    }

    /// Closes files that were not read for a while, because they may have been deleted to free disk space.
    pub fn close_idle_files(&self) {
        self.0.own.lock().forget_files();
    }
}

impl Drop for Holders {
    fn drop(&mut self) {
        self.0.end_tender();
    }
}

impl Shared {
    /// Copies bytes from a segment or a file of this machine. Returns `wanted` if its bytes have to be fetched from
    /// their store.
    fn copy<'a, 'b>(self: &Arc<Self>, wanted: &'a mut Wanted<'b>) -> Result<Option<&'a mut Wanted<'b>>, FetchError> {
        debug_assert_eq!(wanted.into.len() as u64, wanted.reference.length);
        let segment = wanted.reference.payload.segment;
        let Some(mapped) = self.mapped(&wanted.reference.payload)? else { return Ok(Some(wanted)) };
        if mapped.copy(&wanted.reference, wanted.into) || self.read_file(&mapped, wanted) {
            return Ok(None);
        }
        // The payload may be in a file, and too old to be read here. Then the store is asked, so that the store knows
        // that the file is still read.
        if !mapped.is_still_there(&wanted.reference) {
            // The payload is gone, or the mapped segment belongs to an earlier store. So the mapping is dropped, and
            // the store is asked.
            self.own.lock().mapped.remove(&segment);
        }
        Ok(Some(wanted))
    }

    /// Reads bytes from a file of this machine. False: the file cannot be read here, or has changed.
    fn read_file(self: &Arc<Self>, mapped: &Mapped, wanted: &mut Wanted<'_>) -> bool {
        let reference = &wanted.reference;
        let Some((number, from)) = mapped.in_file(reference, READ_HERE_MS) else { return false };
        let Some(file) = self.file(reference.payload.segment, number) else { return false };
        file.read(from, wanted.into).is_ok() && file.is_unchanged() && mapped.is_still_there(reference)
    }

    fn file(self: &Arc<Self>, segment: u32, number: u32) -> Option<Arc<SentFile>> {
        {
            let mut local = self.own.lock();
            if let Some(file) = local.file((segment, number)) {
                return Some(file);
            }
            local.forget_files();
            if local.files.len() >= FILES_MAX {
                return None;
            }
        }
        let file = Arc::new(self.ask(|connection| connection.open_file(segment, number)).ok()??);
        self.own.lock().files.insert((segment, number), (Arc::clone(&file), now_ms()));
        Some(file)
    }

    fn mapped(self: &Arc<Self>, payload: &PayloadId) -> Result<Option<Arc<Mapped>>, FetchError> {
        let known = {
            let local = self.own.lock();
            let is_here = local.holder.map(|holder| holder == payload.holder);
            if is_here == Some(true)
                && let Some(mapped) = local.mapped.get(&payload.segment)
            {
                return Ok(mapped.clone());
            }
            is_here
        };
        let is_here = match known {
            Some(is_here) => Some(is_here),
            None => spoken(payload, self.ask(|store| Ok(store.holder())))?.map(|holder| holder == payload.holder),
        };
        if is_here != Some(true) {
            return Ok(None);
        }
        let asked = self.ask(|store| store.map(payload.segment));
        let Some(mapped) = spoken(payload, asked)? else { return Ok(None) };
        let mapped = mapped.map(Arc::new);
        self.own.lock().mapped.insert(payload.segment, mapped.clone());
        Ok(mapped)
    }

    fn sources(self: &Arc<Self>) -> Option<Arc<Sources>> {
        {
            let mut local = self.own.lock();
            match &local.sources {
                Some(sources) if sources.are_kept() => return Some(Arc::clone(sources)),
                // The store's agent is suspended (SIGSTOP), but the connection to it exists. These sources are valid
                // again as soon as it continues, so they are not asked for anew.
                Some(_) if !local.is_cut_off() => return None,
                _ => {}
            }
            let now_ms = now_ms();
            if local.sources_asked_ms != 0 && now_ms < local.sources_asked_ms + ASK_AGAIN_MS {
                return None;
            }
            local.sources_asked_ms = now_ms;
        }
        let sources = self.ask(Connection::sources).ok().flatten().map(Arc::new);
        self.own.lock().sources.clone_from(&sources);
        sources
    }

    /// Asks this machine's store a question.
    fn ask<T>(self: &Arc<Self>, question: impl FnOnce(&Connection) -> io::Result<T>) -> Result<T, NoAnswer> {
        let (answer, is_new) = self.own.ask(|| self.open(), question);
        if is_new {
            self.begin_later(Task::Own);
        }
        answer
    }

    /// Makes sure that the bytes of a reference can be fetched: maps their segment, or opens a connection to their
    /// holder.
    fn reach_for(self: &Arc<Self>, reference: &Reference) -> Result<(), FetchError> {
        // Maps the segment now. This opens all descriptors that a later fetch takes: later the program may have reached
        // its limit of descriptors.
        if self.mapped(&reference.payload)?.is_some_and(|mapped| mapped.is_still_there(reference)) {
            return Ok(());
        }
        let holder = reference.payload.holder;
        let way = self.way_to_ask(holder);
        let make = |attempt| self.begin(Task::Reach(holder, Arc::clone(&way), attempt));
        way.open(reference, make, &|| ()).map_err(|error| FetchError::Holder(holder, error))
    }

    /// Returns the state of the connection to a holder, for a thread that needs it now. First notes in this state how
    /// often the holder has become a source of this machine.
    fn way_to_ask(self: &Arc<Self>, holder: Holder) -> Arc<Way> {
        let way = self.way(holder);
        way.came(self.sources().map_or(0, |sources| sources.came(&holder)));
        way
    }

    fn way(&self, holder: Holder) -> Arc<Way> {
        Arc::clone(self.ways.lock().entry(holder).or_default())
    }

    fn fetch_batch(self: &Arc<Self>, batch: &mut [&mut Wanted<'_>], tell: &dyn Fn()) -> Result<(), FetchError> {
        let Some(about) = batch.first().map(|wanted| wanted.reference) else { return Ok(()) };
        let asks = Asks { tell, call: None };
        let gone = self.by_way(&about, asks, Some(about.payload), |line, returns| line.fetch(returns, batch, tell))?;
        gone.map_or(Ok(()), |payload| Err(FetchError::Gone(payload)))
    }

    /// Asks a holder, and repeats the question each time the connection breaks, up to [`RETRIES`] times. Returns
    /// `ended` if the program's call (`asks.call`) ends before there is a connection.
    fn by_way<T>(
        self: &Arc<Self>,
        about: &Reference,
        asks: Asks<'_>,
        ended: T,
        mut ask: impl FnMut(&mut Line, &mut Vec<Sent>) -> io::Result<T>,
    ) -> Result<T, FetchError> {
        let holder = about.payload.holder;
        let way = self.way_to_ask(holder);
        let reach = |attempt| Task::Reach(holder, Arc::clone(&way), attempt);
        let mut broken = io::ErrorKind::NotConnected.into();
        for time in 0..=RETRIES {
            if time > 1 {
                std::thread::sleep(PAUSE * time);
            }
            let taken = way.take(about, |attempt| self.begin(reach(attempt)), asks);
            let taken = taken.map_err(|error| FetchError::Holder(holder, error))?;
            let Some((mut turn, mut returns)) = taken else { return Ok(ended) };
            match turn.line().and_then(|line| ask(line, &mut returns)) {
                Ok(answer) => {
                    turn.put_back();
                    way.give_back(returns);
                    return Ok(answer);
                }
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    self.begin_later(reach(turn.lose()));
                    return Err(FetchError::Holder(holder, error));
                }
                // The connection was made and then broke. The store may have been started again, or have closed an idle
                // connection. Or its agent has ended all connections, because it has read its certificates again.
                Err(error) => broken = error,
            }
        }
        if let Some(attempt) = way.give_up() {
            self.begin_later(reach(attempt));
        }
        Err(FetchError::Holder(holder, broken))
    }
}

/// Locks held by [`Holders::hold_still`].
#[derive(Debug)]
pub struct Still<'a> {
    own: MutexGuard<'a, Local>,
    ways: MutexGuard<'a, HashMap<Holder, Arc<Way>>>,
    introducers: MutexGuard<'a, Pool>,
    tasks: MutexGuard<'a, Tasks>,
}

impl Still<'_> {
    /// Forgets all state, in the child of a fork: connections and threads belong to the parent.
    pub fn forget(&mut self) {
        self.ways.clear();
        self.introducers.forget();
        *self.own = Local::default();
        *self.tasks = Tasks::default();
    }
}
