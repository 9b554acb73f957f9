//! The buffer store (RAB in the paper on on-demand buffers) has the payloads of a machine's programs. A *payload* is a
//! body that a program has written. The payload outlives that program, for other programs that have references to it.
//!
//! The store is bounded. A program that asks for a segment when there is no room gets none, and sends the bytes
//! themselves. A *segment* is memory that the store leases to one program, and a *slot* its entry for one payload. A
//! payload's *lease* is the time for which the payload waits for programs that read it. A reference has a *share* of
//! the payload, whose size is its *weight*. A *stream* is all that a program writes to one connection.

pub mod caller;
pub mod client;
mod files;
pub(crate) mod messages;
pub(crate) mod packets;
pub mod pinned;
pub mod places;
mod programs;
pub mod server;
pub(crate) mod session;
pub mod usage;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;

use shunt_sys::shared::SharedMemory;

use crate::place::{Place, SentFile};
use crate::reference::{PayloadId, Reference, Weight};
use crate::segment::{DATA_BYTES_FROM, Found, Reader, SLOTS, Used, now_ms};
use crate::touched::Touched;
use files::Files;

/// Default path of the socket on which the machine's store listens.
pub const STORE_SOCKET: &str = "/run/shunt/store";

/// Limits of the store's memory, files, connections and leases.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most bytes of all segments together.
    pub bytes: usize,
    /// Bytes of payloads that one segment has room for.
    pub segment_bytes: usize,
    /// Lease of a payload: time that it waits for programs with references to it, in milliseconds. After that it is
    /// gone, unless its file, or another payload of its stream, is read.
    pub lease_ms: u64,
    /// Most connections of readers. Each connection may have several answers under way.
    pub readers: usize,
    /// Most connections of one user's programs. As a rule a program has two connections to fetch by, and one to lease
    /// segments by.
    pub programs_of_a_user: usize,
    /// Most open files that programs have sent.
    pub files: usize,
    /// Most open files of one user's programs.
    pub files_of_a_user: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 256 << 20,
            segment_bytes: 32 << 20,
            lease_ms: 120_000,
            readers: 1024,
            programs_of_a_user: 1024,
            files: 2048,
            files_of_a_user: 1024,
        }
    }
}

#[derive(Debug)]
struct Leased {
    reader: Reader,
    returned: HashMap<u32, Returned>,
    /// By slot: number of pins ([`Store::pin`]) that have not ended. A slot with a pin is not freed.
    pins: HashMap<u32, u32>,
    /// User of the program that writes the segment. The user's other programs may map it.
    user: u32,
    writer_lives: bool,
    files: Files,
    /// By stream: time at which some of its bytes were last read.
    streams: HashMap<u64, u64>,
}

/// Latest start of a payload's last lease, in leases after the payload was made. The first constant is for payloads in
/// files, which take no memory, and the second for copies. A payload outlives its first lease while its file, or
/// another payload of its stream, is read. The reason is that a program sends a long body at once, and the body's
/// reader may be slow. The limit is for payloads whose reader has crashed.
const LEASES_OF_FILE: u64 = 60;
const LEASES_OF_COPY: u64 = 15;

impl Leased {
    /// Notes that some bytes of a slot's payload were read at `now_ms`. This extends the leases of all payloads of its
    /// stream.
    fn is_read(&mut self, slot: u32, now_ms: u64) {
        let stream = self.reader.stream(slot);
        if stream != 0 && (self.streams.len() < SLOTS || self.streams.contains_key(&stream)) {
            self.streams.insert(stream, now_ms);
        }
    }

    /// Time at which a payload's present lease began. It is the time at which the payload was made, or the later one at
    /// which its file or some payload of its stream was last read. This is at most [`LEASES_OF_FILE`] or
    /// [`LEASES_OF_COPY`] leases after the payload was made.
    fn last_of_use(&self, used: &Used, lease_ms: u64) -> u64 {
        let file_ms = used.file.and_then(|number| self.files.used_ms(number)).unwrap_or(0);
        let read_ms = self.streams.get(&used.stream).copied().unwrap_or(0);
        let leases = if used.file.is_some() { LEASES_OF_FILE } else { LEASES_OF_COPY };
        let longest = used.born_ms.saturating_add(lease_ms.saturating_mul(leases));
        file_ms.max(read_ms).clamp(used.born_ms, longest)
    }
}

/// Part of a payload's weight that has come back, and the payload's bytes that were needed.
#[derive(Debug, Default)]
struct Returned {
    secret: u64,
    units: u64,
    touched: Touched,
}

/// All payloads of a machine. Does no I/O, except that it reads and writes the segments' memory.
#[derive(Debug)]
pub struct Store {
    limits: Limits,
    /// Segments by id. The id of a freed segment is not used again. Ids begin at a random number, so that a later store
    /// of this machine has other ones.
    segments: BTreeMap<u32, Leased>,
    next: u32,
    bytes: usize,
    is_closed: bool,
}

impl Store {
    /// Makes an empty store.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let mut first = [0; 4];
        // An id that can be guessed does no harm, because secrets protect the payloads.
        let _ = rustix::rand::getrandom(&mut first, rustix::rand::GetRandomFlags::empty());
        Self { limits, segments: BTreeMap::new(), next: u32::from_ne_bytes(first), bytes: 0, is_closed: false }
    }

    /// Bytes of all segments together.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of segments.
    #[must_use]
    pub fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Leases a segment to a program of a user, and returns the segment's id. `None`: the store is full or closed.
    ///
    /// # Errors
    /// Returns the kernel's error of making the memory.
    pub fn lease(&mut self, user: u32) -> io::Result<Option<u32>> {
        self.sweep();
        let bytes = DATA_BYTES_FROM + self.limits.segment_bytes;
        if self.is_closed || self.bytes + bytes > self.limits.bytes {
            return Ok(None);
        }
        let reader = Reader::new(SharedMemory::create("shunt-segment", bytes)?);
        reader.seen(now_ms());
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        self.bytes += bytes;
        let (returned, pins, files) = (HashMap::new(), HashMap::new(), Files::default());
        let streams = HashMap::new();
        self.segments.insert(id, Leased { reader, returned, pins, user, writer_lives: true, files, streams });
        Ok(Some(id))
    }

    /// Leases no segment from now on, so that the store becomes empty. Programs learn from their segments that they
    /// must write no more payloads there.
    pub fn close(&mut self) {
        self.is_closed = true;
        self.segments.values().for_each(|leased| leased.reader.end());
    }

    /// Number of payloads that may still be asked for.
    #[must_use]
    pub fn payloads(&self) -> usize {
        self.segments.values().map(|leased| leased.reader.used().count()).sum()
    }

    /// Memory of a segment.
    #[must_use]
    pub fn memory(&self, segment: u32) -> Option<Arc<SharedMemory>> {
        Some(Arc::clone(self.segments.get(&segment)?.reader.memory()))
    }

    /// Memory of a segment, if a program of this user may see all of it. Only programs of the user who writes the
    /// segment may, and root's. Other users' programs get only the bytes that they have references to.
    #[must_use]
    pub fn memory_for(&self, segment: u32, user: u32) -> Option<Arc<SharedMemory>> {
        Some(Arc::clone(self.leased_for(segment, user)?.reader.memory()))
    }

    fn leased_for(&self, segment: u32, user: u32) -> Option<&Leased> {
        const ROOT: u32 = 0;
        self.segments.get(&segment).filter(|leased| leased.user == user || user == ROOT)
    }

    /// Takes a file that a segment's program has sent, under a number that the program has chosen. An earlier file in
    /// the same place (number modulo [`crate::segment::FILES`]) can no longer be fetched. `None`: there are too many
    /// files, or there is no such segment.
    pub fn open_file(&mut self, segment: u32, number: u32, file: SentFile) -> Option<Arc<SentFile>> {
        let user = self.segments.get(&segment)?.user;
        let of_user = self.segments.values().filter(|leased| leased.user == user).map(|leased| leased.files.len());
        if self.files() >= self.limits.files || of_user.sum::<usize>() >= self.limits.files_of_a_user {
            return None;
        }
        let leased = self.segments.get_mut(&segment)?;
        Some(leased.files.open(&leased.reader, number, file, now_ms()))
    }

    /// File of a segment, if a program of this user may see all of the segment ([`Self::memory_for`]).
    #[must_use]
    pub fn file_for(&self, segment: u32, number: u32, user: u32) -> Option<Arc<SentFile>> {
        Some(Arc::clone(self.leased_for(segment, user)?.files.file(number)?))
    }

    /// Number of open files of all segments.
    #[must_use]
    pub fn files(&self) -> usize {
        self.segments.values().map(|leased| leased.files.len()).sum()
    }

    /// Pins the bytes of a reference: they stay in their place until [`Self::unpin`]. `None`: the bytes are gone.
    pub fn pin(&mut self, reference: &Reference) -> Option<Place> {
        let leased = self.segments.get_mut(&reference.payload.segment)?;
        let place = match leased.reader.find(reference)? {
            Found::Here(place) => Place::of_segment(leased.reader.memory(), place.start as u64, place.len() as u64),
            Found::InFile { number, bytes } => leased.files.place(number, bytes, now_ms())?,
        };
        *leased.pins.entry(reference.payload.slot).or_default() += 1;
        leased.is_read(reference.payload.slot, now_ms());
        Some(place)
    }

    /// Ends a [`Self::pin`].
    pub fn unpin(&mut self, payload: &PayloadId) {
        let Some(leased) = self.segments.get_mut(&payload.segment) else { return };
        if let Some(pins) = leased.pins.get_mut(&payload.slot) {
            *pins -= 1;
            if *pins == 0 {
                leased.pins.remove(&payload.slot);
            }
        }
        Self::free_if_whole(leased, payload);
    }

    /// Takes back a share of a payload. `touched` says which bytes the process that had the share needed.
    pub fn give_back(&mut self, payload: &PayloadId, weight: Weight, touched: Touched) {
        self.give_back_at(now_ms(), payload, weight, touched);
    }

    fn give_back_at(&mut self, now_ms: u64, payload: &PayloadId, weight: Weight, touched: Touched) {
        let Some(leased) = self.segments.get_mut(&payload.segment) else { return };
        let whole = Reference { payload: *payload, weight, offset: 0, length: 1 };
        if leased.reader.find(&whole).is_none() {
            return;
        }
        leased.is_read(payload.slot, now_ms);
        let returned = leased.returned.entry(payload.slot).or_default();
        if returned.secret != payload.secret {
            *returned = Returned { secret: payload.secret, ..Returned::default() };
        }
        returned.units = returned.units.saturating_add(weight.units());
        returned.touched = returned.touched.and(&touched);
        Self::free_if_whole(leased, payload);
    }

    fn free_if_whole(leased: &mut Leased, payload: &PayloadId) {
        let is_whole =
            |returned: &Returned| returned.secret == payload.secret && returned.units >= Weight::WHOLE.units();
        if leased.returned.get(&payload.slot).is_some_and(is_whole) && !leased.pins.contains_key(&payload.slot) {
            if let Some(returned) = leased.returned.remove(&payload.slot) {
                leased.reader.report(payload.slot, returned.touched);
            }
            leased.reader.free(payload.slot);
        }
    }

    /// Notes that the segment's program has ended. The program's payloads stay.
    pub fn writer_gone(&mut self, segment: u32) {
        if let Some(leased) = self.segments.get_mut(&segment) {
            leased.writer_lives = false;
        }
        self.sweep();
    }

    /// Writes into each segment that the store is alive, unless the store is closed. Frees payloads whose leases have
    /// ended, and closes idle files. `now_ms` is the time by [`crate::segment::now_ms`].
    pub fn expire(&mut self, now_ms: u64) {
        let lease_ms = self.limits.lease_ms;
        for leased in self.segments.values_mut() {
            if !self.is_closed {
                leased.reader.seen(now_ms);
            }
            let ended = leased.reader.used().filter(|used| {
                let since_ms = leased.last_of_use(used, lease_ms);
                now_ms.saturating_sub(since_ms) > lease_ms && !leased.pins.contains_key(&used.slot)
            });
            let ended: Vec<u32> = ended.map(|used| used.slot).collect();
            for slot in ended {
                leased.returned.remove(&slot);
                leased.reader.free(slot);
            }
            leased.streams.retain(|_, read_ms| now_ms.saturating_sub(*read_ms) <= lease_ms);
            leased.files.close_idle(&leased.reader, now_ms);
        }
        self.sweep();
    }

    /// Frees segments whose programs have ended and whose payloads are all gone.
    fn sweep(&mut self) {
        let bytes = &mut self.bytes;
        self.segments.retain(|_, leased| {
            let done = !leased.writer_lives && leased.pins.is_empty() && leased.reader.used().next().is_none();
            if done {
                leased.reader.end();
                *bytes -= leased.reader.memory().len();
            }
            !done
        });
    }
}

impl Drop for Store {
    /// Tells programs that nobody can fetch any more what they write.
    fn drop(&mut self) {
        self.segments.values().for_each(|leased| leased.reader.end());
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::fd::AsFd;

    use super::*;
    use crate::reference::Holder;
    use crate::segment::Writer;

    const LEASE_MS: u64 = 1_000;

    fn store() -> (Store, Writer) {
        let mut store = Store::new(Limits { lease_ms: LEASE_MS, ..Limits::default() });
        let id = store.lease(1000).unwrap().unwrap();
        let memory = SharedMemory::open(store.memory(id).unwrap().as_fd().try_clone_to_owned().unwrap()).unwrap();
        (store, Writer::new(memory, Holder::named("be1"), id).unwrap())
    }

    fn put(writer: &mut Writer, stream: u64) -> Reference {
        let reference = writer.put(&[IoSlice::new(&[7; 5000])]).unwrap();
        writer.is_part(&reference, stream);
        reference
    }

    fn is_there(store: &mut Store, reference: &Reference) -> bool {
        let leased = &store.segments[&reference.payload.segment];
        leased.reader.find(reference).is_some()
    }

    #[test]
    fn a_payload_that_is_read_slowly_is_kept_while_somebody_reads() {
        let (mut store, mut writer) = store();
        let slow: Vec<Reference> = (0..40).map(|_| put(&mut writer, 1)).collect();
        let (left, alone) = (put(&mut writer, 2), put(&mut writer, 0));
        let begun = now_ms();
        for (turn, reference) in slow.iter().enumerate() {
            // Each payload is read less than a lease after the one before it. The last ones are read long after their
            // own leases.
            let now = begun + turn as u64 * LEASE_MS * 9 / 10;
            store.expire(now);
            let is_in_time = now < begun + LEASES_OF_COPY * LEASE_MS;
            assert!(is_there(&mut store, reference) || !is_in_time, "number {turn}");
            store.give_back_at(now, &reference.payload, Weight::WHOLE, Touched::default());
            assert!(!is_there(&mut store, reference), "all of it has come back");
        }
        assert!(!is_there(&mut store, &left), "nobody reads that");
        assert!(!is_there(&mut store, &alone), "that is a part of nothing");
        assert!(store.segments.values().all(|leased| leased.streams.len() <= 1));
    }

    #[test]
    fn a_stream_that_is_left_ends_a_lease_later() {
        let (mut store, mut writer) = store();
        let (first, second) = (put(&mut writer, 1), put(&mut writer, 1));
        let begun = now_ms();
        store.give_back_at(begun + LEASE_MS / 2, &first.payload, Weight::WHOLE, Touched::default());
        store.expire(begun + LEASE_MS * 14 / 10);
        assert!(is_there(&mut store, &second));
        store.expire(begun + LEASE_MS * 16 / 10);
        assert!(!is_there(&mut store, &second));
        assert!(store.segments.values().all(|leased| leased.streams.is_empty()));
    }
}
