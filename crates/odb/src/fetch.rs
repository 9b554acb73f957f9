//! Bytes from the stores that hold them, for one process. Payloads of this machine are copied from their segments, where the
//! store lets this program map them; for others there is a connection to each holder, which this machine's agent makes,
//! with one batch of fetches at a time on it.
//!
//! A holder that says nothing costs the process a second in all. From then on its bytes are lost, which is said at once, until
//! a thread of the library has had an answer of it ([`tender`]). Nobody else waits for it meanwhile.

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

/// How often a connection may break under the same fetch before that fails: an agent that reads its certificates again ends
/// all of them, and may do so many times in a row. Each that is made anew within a second is a sign of life.
const RETRIES: u32 = 20;
/// From the third try on a fetch waits first, each time so much longer: for a second in all.
const PAUSE: Duration = Duration::from_millis(5);

/// How long after the store let this process have no connections it is asked for them again.
const ASK_AGAIN_MS: u64 = 1000;

/// What is in a file of this machine is read there for so long after it was sent; later the store is asked, which keeps
/// what is asked for.
const READ_HERE_MS: u64 = 10_000;

/// A reader's ways to all stores.
#[derive(Debug)]
pub struct Holders(Arc<Shared>);

/// What its threads have in common. No lock of it is held while anybody waits for an agent or a store, and no two at a time.
#[derive(Debug)]
struct Shared {
    /// Where the store of this machine listens.
    path: PathBuf,
    /// Told of each connection to that store.
    connected: fn(&Connection),
    threads: Threads,
    own: Own,
    ways: Mutex<HashMap<Holder, Arc<Way>>>,
    introducers: Introducers,
    /// When the store let this process have no connections, in milliseconds of [`now_ms`].
    refused_ms: AtomicU64,
    tasks: Mutex<Tasks>,
    changed: Condvar,
}

/// Some bytes of a payload, and where they are to be: as long as the reference.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// Which.
    pub reference: Reference,
    /// Where to.
    pub into: &'a mut [u8],
}

/// Why bytes cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Its lease has ended, or somebody has given back more than there was.
    #[error("{0:?} is gone: its lease has ended")]
    Gone(PayloadId),
    /// The machine, its agent or the way to it: broken, or silent for a second.
    #[error("{0:?} cannot be asked: {1}")]
    Holder(Holder, #[source] io::Error),
}

/// What the store of this machine has answered; `None`: there is none.
fn spoken<T>(payload: &PayloadId, answer: Result<T, NoAnswer>) -> Result<Option<T>, FetchError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(NoAnswer::Broken) => Ok(None),
        Err(NoAnswer::Silent) => {
            let why = "this machine's agent says nothing";
            Err(FetchError::Holder(payload.holder, io::Error::new(io::ErrorKind::TimedOut, why)))
        }
    }
}

impl Holders {
    /// For a program of the machine whose store listens at `path`.
    #[must_use]
    pub fn new(path: PathBuf, connected: fn(&Connection)) -> Self {
        Self::with_threads(path, connected, Threads::default())
    }

    /// The same, with threads of the caller's making.
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

    /// Has the thread run that makes connections, before somebody needs one. False: there can be no more threads.
    pub fn start(&self) -> bool {
        self.0.start_tender()
    }

    /// Has that thread look at what there is to do ([`Threads::tick`]). Waits for nothing.
    pub fn wake(&self) {
        self.0.wake();
    }

    /// Whether this process can fetch: it has all connections to its machine's store that this takes, and so it goes on to,
    /// whatever user it becomes and in whatever root directory. Who is not ready must not have references sent to it. Takes a
    /// second for each connection, where the agent is stopped, and nothing for a second after it was not ready.
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

    /// Has a connection by which the bytes of a reference can be fetched: before memory stands for them, so that a reference to
    /// nobody ends its connection and no process. Waits for a second at most, and asks nobody about the payload.
    ///
    /// # Errors
    /// There is none.
    pub fn reach(&self, reference: &Reference) -> Result<(), FetchError> {
        self.0.reach_for(reference)
    }

    /// Whether programs at that end can fetch from that store: else it gets bytes. Asks this machine's store the first time, and
    /// once a second where that does not say.
    #[must_use]
    pub fn is_source(&self, end: End, store: &Holder) -> bool {
        self.0.sources().is_some_and(|sources| sources.have(end, store))
    }

    /// Fetches the bytes of a reference, all of them: `into` is as long as the reference.
    ///
    /// # Errors
    /// They cannot be had, now or later.
    pub fn fetch(&self, reference: &Reference, into: &mut [u8]) -> Result<(), FetchError> {
        self.fetch_all(&mut [Wanted { reference: *reference, into }], &|| ())
    }

    /// Fetches the first bytes of a reference, as a rule all of them: how many. Where the call has taken long and may end, they are
    /// fewer, or none: then the others have to be asked for again.
    ///
    /// # Errors
    /// They cannot be had, now or later.
    pub fn fetch_some(&self, reference: &Reference, into: &mut [u8], call: &Call<'_>) -> Result<usize, FetchError> {
        let mut wanted = Wanted { reference: *reference, into };
        let Some(remote) = self.0.copy(&mut wanted)? else { return Ok(reference.length as usize) };
        let asks = Asks { tell: &|| (), call: Some(call) };
        let fetched =
            self.0.by_way(reference, asks, Some(0), |line, returns| line.fetch_some(returns, remote, call))?;
        fetched.ok_or(FetchError::Gone(reference.payload))
    }

    /// Fetches the bytes of some references, those of one holder in a row together. `tell` hears, perhaps more than once, that
    /// this takes long.
    ///
    /// # Errors
    /// Some cannot be had, now or later.
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

    /// Until the value is dropped nobody opens or closes connections: before a fork, so that the child can
    /// [`Still::forget`].
    #[must_use]
    pub fn hold_still(&self) -> Still<'_> {
        let Shared { own, ways, introducers, tasks, .. } = &*self.0;
        Still { own: own.lock(), ways: ways.lock(), introducers: introducers.lock(), tasks: tasks.lock() }
    }

    /// Sends back the shares that nobody has a use for, as far as that takes no waiting. Those whose holder is lost end with
    /// their lease. True: some wait for a connection, and go the next time.
    pub fn send_returns(&self, returns: &Returns) -> bool {
        self.0.send_returns(returns)
    }

    /// Closes files that were not read for a while: somebody may have deleted them to make room.
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
    /// Copies from this machine's memory; gives back what is not there.
    fn copy<'a, 'b>(self: &Arc<Self>, wanted: &'a mut Wanted<'b>) -> Result<Option<&'a mut Wanted<'b>>, FetchError> {
        debug_assert_eq!(wanted.into.len() as u64, wanted.reference.length);
        let segment = wanted.reference.payload.segment;
        let Some(mapped) = self.mapped(&wanted.reference.payload)? else { return Ok(Some(wanted)) };
        if mapped.copy(&wanted.reference, wanted.into) || self.read_file(&mapped, wanted) {
            return Ok(None);
        }
        // A file that is to be had from the store, after a while: so it knows that somebody still reads there.
        if !mapped.is_still_there(&wanted.reference) {
            // Gone, or of a store before this one: the store says.
            self.own.lock().mapped.remove(&segment);
        }
        Ok(Some(wanted))
    }

    /// Reads from a file of this machine. False: it is not to be had so, or has changed.
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
                // Its agent is stopped, and true again when it goes on.
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

    /// Asks the store of this machine.
    fn ask<T>(self: &Arc<Self>, question: impl FnOnce(&Connection) -> io::Result<T>) -> Result<T, NoAnswer> {
        let (answer, is_new) = self.own.ask(|| self.open(), question);
        if is_new {
            self.begin_later(Task::Own);
        }
        answer
    }

    /// See [`Holders::reach`].
    fn reach_for(self: &Arc<Self>, reference: &Reference) -> Result<(), FetchError> {
        // All descriptors that a fetch takes are there then: a program may come to have as many as it may.
        if self.mapped(&reference.payload)?.is_some_and(|mapped| mapped.is_still_there(reference)) {
            return Ok(());
        }
        let holder = reference.payload.holder;
        let way = self.way_to_ask(holder);
        let make = |attempt| self.begin(Task::Reach(holder, Arc::clone(&way), attempt));
        way.open(reference, make, &|| ()).map_err(|error| FetchError::Holder(holder, error))
    }

    /// The way to a holder that somebody needs now.
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

    /// Asks a holder, as often as the connection breaks under the question. `ended` is the answer where a call ends before there is
    /// a connection.
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
                // A connection that could be had and then broke: the store may have been started again, have closed an idle
                // one, or its agent all of them, because it has read its certificates again.
                Err(error) => broken = error,
            }
        }
        if let Some(attempt) = way.give_up() {
            self.begin_later(reach(attempt));
        }
        Err(FetchError::Holder(holder, broken))
    }
}

/// [`Holders::hold_still`].
#[derive(Debug)]
pub struct Still<'a> {
    own: MutexGuard<'a, Local>,
    ways: MutexGuard<'a, HashMap<Holder, Arc<Way>>>,
    introducers: MutexGuard<'a, Pool>,
    tasks: MutexGuard<'a, Tasks>,
}

impl Still<'_> {
    /// In the child: the connections and the threads are the parent's.
    pub fn forget(&mut self) {
        self.ways.clear();
        self.introducers.forget();
        *self.own = Local::default();
        *self.tasks = Tasks::default();
    }
}
