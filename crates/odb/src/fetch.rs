//! Bytes from the stores that hold them, for one process. Payloads of this machine are copied from their segments, where the
//! store lets this program map them; for others there is a connection to each holder, which this machine's agent makes,
//! with one batch of fetches at a time on it.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use zerocopy::FromBytes;

use crate::channel::{Bench, Channel};
use crate::hold::{Return, Returns};
use crate::place::SentFile;
use crate::reference::{Holder, PayloadId, Reference};
use crate::segment::{Mapped, now_ms};
use crate::store::client::Connection;
use crate::store::messages::{Answer, FETCH, RETURN, Request};
use crate::store::session::{ANSWERS_MAX, request};
use crate::touched::Touched;

/// A holder that could not be reached is not asked again for so long: what waits for it fails at once.
const RETRY_MS: u64 = 1000;

/// How often a connection may break under the same fetch before that fails: an agent that reads its certificates again ends
/// all of them, and may do so many times in a row.
const RETRIES: u32 = 20;
/// From the third try on a fetch waits first, each time so much longer: for a second in all.
const PAUSE: Duration = Duration::from_millis(5);

/// What is in a file of this machine is read there for so long after it was sent; later the store is asked, which keeps
/// what is asked for.
const READ_HERE_MS: u64 = 10_000;
/// Files of this machine that are open to be read.
const FILES_MAX: usize = 64;
/// How long one stays open that nobody reads.
const FILE_IDLE_MS: u64 = 2_000;

/// A reader's ways to all stores.
#[derive(Debug)]
pub struct Holders {
    /// Where the store of this machine listens.
    path: PathBuf,
    /// Told of each connection to that store.
    connected: fn(&Connection),
    local: Mutex<Local>,
    streams: Mutex<HashMap<Holder, Arc<Mutex<Stream>>>>,
}

#[derive(Debug, Default)]
struct Local {
    connection: Option<Connection>,
    /// By segment; `None`: this program may not.
    mapped: HashMap<u32, Option<Arc<Mapped>>>,
    /// By segment and number, and when it was last read.
    files: HashMap<(u32, u32), (Arc<SentFile>, u64)>,
}

#[derive(Debug, Default)]
struct Stream {
    channel: Option<(Channel, Bench)>,
    /// When it could last not be reached; 0: never.
    failed_ms: u64,
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
    /// The machine, its agent or the way to it.
    #[error("{0:?} cannot be asked: {1}")]
    Holder(Holder, #[source] io::Error),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Holders {
    /// For a program of the machine whose store listens at `path`.
    #[must_use]
    pub fn new(path: PathBuf, connected: fn(&Connection)) -> Self {
        Self { path, connected, local: Mutex::default(), streams: Mutex::default() }
    }

    /// Fetches the bytes of a reference, all of them: `into` is as long as the reference.
    ///
    /// # Errors
    /// They cannot be had, now or later.
    pub fn fetch(&self, reference: &Reference, into: &mut [u8]) -> Result<(), FetchError> {
        self.fetch_all(&mut [Wanted { reference: *reference, into }])
    }

    /// Fetches the bytes of some references, those of one holder in a row together.
    ///
    /// # Errors
    /// Some cannot be had, now or later.
    pub fn fetch_all(&self, wanted: &mut [Wanted<'_>]) -> Result<(), FetchError> {
        let mut remote: Vec<&mut Wanted<'_>> = wanted.iter_mut().filter_map(|wanted| self.copy(wanted)).collect();
        let is_next = |one: &&mut Wanted<'_>, next: &&mut Wanted<'_>| {
            one.reference.payload.holder == next.reference.payload.holder
        };
        for of_one in remote.chunk_by_mut(is_next) {
            for batch in of_one.chunks_mut(ANSWERS_MAX) {
                self.fetch_batch(batch)?;
            }
        }
        Ok(())
    }

    /// Copies from this machine's memory; gives back what is not there.
    fn copy<'a, 'b>(&self, wanted: &'a mut Wanted<'b>) -> Option<&'a mut Wanted<'b>> {
        debug_assert_eq!(wanted.into.len() as u64, wanted.reference.length);
        let segment = wanted.reference.payload.segment;
        let Some(mapped) = self.mapped(&wanted.reference.payload) else { return Some(wanted) };
        if mapped.copy(&wanted.reference, wanted.into) || self.read_file(&mapped, wanted) {
            return None;
        }
        // A file that is to be had from the store, after a while: so it knows that somebody still reads there.
        if mapped.is_still_there(&wanted.reference) {
            return Some(wanted);
        }
        // Gone, or of a store before this one: the store says.
        lock(&self.local).mapped.remove(&segment);
        Some(wanted)
    }

    /// Reads from a file of this machine. False: it is not to be had so, or has changed.
    fn read_file(&self, mapped: &Mapped, wanted: &mut Wanted<'_>) -> bool {
        let reference = &wanted.reference;
        let Some((number, from)) = mapped.in_file(reference, READ_HERE_MS) else { return false };
        let Some(file) = self.file(reference.payload.segment, number) else { return false };
        file.read(from, wanted.into).is_ok() && file.is_unchanged() && mapped.is_still_there(reference)
    }

    fn file(&self, segment: u32, number: u32) -> Option<Arc<SentFile>> {
        let (mut local, now) = (lock(&self.local), now_ms());
        if let Some((file, used_ms)) = local.files.get_mut(&(segment, number)) {
            *used_ms = now;
            return Some(Arc::clone(file));
        }
        local.forget_files(now);
        if local.files.len() >= FILES_MAX {
            return None;
        }
        let file = Arc::new(local.connection.as_ref()?.open_file(segment, number).ok()??);
        local.files.insert((segment, number), (Arc::clone(&file), now));
        Some(file)
    }

    fn mapped(&self, payload: &PayloadId) -> Option<Arc<Mapped>> {
        let mut local = lock(&self.local);
        let connection = self.connected(&mut local).ok()?;
        if connection.holder() != payload.holder {
            return None;
        }
        if let Some(mapped) = local.mapped.get(&payload.segment) {
            return mapped.clone();
        }
        let mapped = match local.connection.as_ref()?.map(payload.segment) {
            Ok(mapped) => mapped.map(Arc::new),
            Err(_) => {
                local.connection = None;
                return None;
            }
        };
        local.mapped.insert(payload.segment, mapped.clone());
        mapped
    }

    fn connected<'a>(&self, local: &'a mut Local) -> io::Result<&'a Connection> {
        if local.connection.is_none() {
            let connection = Connection::open(&self.path)?;
            (self.connected)(&connection);
            local.connection = Some(connection);
        }
        local.connection.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// A new way to a holder, by this machine's agent, which may have been started again.
    fn reach(&self, holder: Holder) -> io::Result<(Channel, Bench)> {
        let mut local = lock(&self.local);
        let mut reached = self.connected(&mut local)?.reach(holder);
        if reached.is_err() {
            local.connection = None;
            reached = self.connected(&mut local)?.reach(holder);
        }
        let why = "this machine's agent has no peer of that name that lets it fetch, or cannot reach it";
        let channel = reached?.ok_or_else(|| io::Error::new(io::ErrorKind::HostUnreachable, why))?;
        Ok((channel, Bench::of(ANSWERS_MAX * size_of::<Request>())))
    }

    fn stream(&self, holder: Holder) -> Arc<Mutex<Stream>> {
        Arc::clone(lock(&self.streams).entry(holder).or_default())
    }

    fn fetch_batch(&self, batch: &mut [&mut Wanted<'_>]) -> Result<(), FetchError> {
        let Some(holder) = batch.first().map(|wanted| wanted.reference.payload.holder) else { return Ok(()) };
        let stream = self.stream(holder);
        let mut stream = lock(&stream);
        for turn in 0..RETRIES {
            if turn > 1 {
                std::thread::sleep(PAUSE * turn);
            }
            let fetched = self.try_fetch(&mut stream, holder, batch);
            // A connection that could be had and then broke: the store may have been started again, have closed an idle one,
            // or its agent all of them, because it has read its certificates again.
            if !matches!(fetched, Err(FetchError::Holder(..))) || stream.failed_ms != 0 {
                return fetched;
            }
        }
        self.try_fetch(&mut stream, holder, batch)
    }

    fn try_fetch(&self, stream: &mut Stream, holder: Holder, batch: &mut [&mut Wanted<'_>]) -> Result<(), FetchError> {
        let outcome = self.ready(stream, holder).and_then(|(channel, bench)| {
            let requests: Vec<_> =
                batch.iter().map(|wanted| request(FETCH, &wanted.reference, Touched::default())).collect();
            send(channel, bench, &requests)?;
            let mut gone = None;
            for wanted in batch.iter_mut() {
                if !receive(channel, wanted)? {
                    gone = Some(wanted.reference.payload);
                }
            }
            Ok(gone)
        });
        match outcome {
            Ok(None) => Ok(()),
            Ok(Some(payload)) => Err(FetchError::Gone(payload)),
            Err(error) => {
                stream.channel = None;
                Err(FetchError::Holder(holder, error))
            }
        }
    }

    fn ready<'a>(&self, stream: &'a mut Stream, holder: Holder) -> io::Result<&'a mut (Channel, Bench)> {
        if stream.channel.is_none() {
            if stream.failed_ms != 0 && now_ms() < stream.failed_ms + RETRY_MS {
                return Err(io::Error::new(io::ErrorKind::HostUnreachable, "it could not be reached a moment ago"));
            }
            stream.failed_ms = now_ms();
            stream.channel = Some(self.reach(holder)?);
            stream.failed_ms = 0;
        }
        stream.channel.as_mut().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Until the value is dropped nobody opens or closes connections: before a fork, so that the child can
    /// [`Still::forget`].
    #[must_use]
    pub fn hold_still(&self) -> Still<'_> {
        Still { local: lock(&self.local), streams: lock(&self.streams) }
    }

    /// Sends back the shares that nobody has a use for. Those whose holder cannot be reached end with their lease.
    pub fn send_returns(&self, returns: &Returns) {
        let mut by_holder: HashMap<Holder, Vec<_>> = HashMap::new();
        for Return { payload, weight, touched } in returns.take() {
            let about = Reference { payload, weight, offset: 0, length: 1 };
            by_holder.entry(payload.holder).or_default().push(request(RETURN, &about, touched));
        }
        for (holder, requests) in by_holder {
            let stream = self.stream(holder);
            let mut stream = lock(&stream);
            let sent = self.ready(&mut stream, holder).and_then(|(channel, bench)| {
                requests.chunks(ANSWERS_MAX).try_for_each(|some| send(channel, bench, some))
            });
            if sent.is_err() {
                stream.channel = None;
            }
        }
        lock(&self.local).mapped.retain(|_, mapped| mapped.as_ref().is_none_or(|mapped| mapped.is_live()));
    }

    /// Closes files that were not read for a while: somebody may have deleted them to make room.
    pub fn close_idle_files(&self) {
        lock(&self.local).forget_files(now_ms());
    }
}

impl Local {
    fn forget_files(&mut self, now_ms: u64) {
        self.files.retain(|_, (_, used_ms)| now_ms < *used_ms + FILE_IDLE_MS);
    }
}

/// [`Holders::hold_still`].
#[derive(Debug)]
pub struct Still<'a> {
    local: MutexGuard<'a, Local>,
    streams: MutexGuard<'a, HashMap<Holder, Arc<Mutex<Stream>>>>,
}

impl Still<'_> {
    /// In the child: the connections are the parent's.
    pub fn forget(&mut self) {
        self.streams.clear();
        *self.local = Local::default();
    }
}

fn send(channel: &mut Channel, bench: &mut Bench, requests: &[[u8; size_of::<Request>()]]) -> io::Result<()> {
    let bytes = requests.as_flattened();
    channel.put(bench, bytes.len(), |at, into| into.copy_from_slice(&bytes[at..at + into.len()]))?;
    channel.send(bench, false).map(drop)
}

/// False: it is gone.
fn receive(channel: &mut Channel, wanted: &mut Wanted<'_>) -> io::Result<bool> {
    let mut answer = [0; size_of::<Answer>()];
    take_all(channel, &mut answer)?;
    let answer = Answer::read_from_bytes(&answer).map_err(|_| io::ErrorKind::InvalidData)?;
    match (answer.found.get(), answer.length.get()) {
        (0, 0) => Ok(false),
        (1, length) if length == wanted.reference.length => take_all(channel, wanted.into).map(|()| true),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the store answered what was not asked")),
    }
}

fn take_all(channel: &mut Channel, mut into: &mut [u8]) -> io::Result<()> {
    while !into.is_empty() {
        match channel.take(into)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            got => into = &mut into[got..],
        }
    }
    Ok(())
}
