//! Counts that each program keeps about itself, in memory that it shares with the store. So counting takes no messages
//! and no system calls.
//!
//! A process may have several pages of counts. It writes its totals to the page that it got last.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;

use shunt_sys::shared::SharedMemory;

/// Names of the counts, and their meanings.
pub const COUNTED: [(&str, &str); 12] = [
    ("sent_real", "bytes sent as they are, and not by reference, on connections between programs under Shunt"),
    ("sent_by_reference", "bytes left in the store and sent by reference"),
    ("passed_on", "absent bytes sent on as references; they bypassed the program"),
    ("handed_off", "absent bytes written to clients, and sent to the clients by the machine that holds them"),
    ("declined", "absent bytes written to clients that the machine that holds them did not agree to send"),
    (
        "taken_back",
        "part of `handed_off` that the machine with the bytes did not send after all; these bytes were fetched",
    ),
    ("received_absent", "bytes received as references, absent at first"),
    ("fetched", "bytes fetched because a call needed them, mostly to write them elsewhere"),
    ("fetched_by_fault", "bytes fetched because the program touched absent memory, read-ahead included"),
    ("faults", "touches of absent memory"),
    ("sent_real_touched", "part of `sent_real` sent as they are because receivers had read such bodies"),
    ("probes", "payloads sent by reference as a test whether their receivers still read them"),
];
/// Index of a count in [`COUNTED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Counted {
    SentReal,
    SentByReference,
    PassedOn,
    HandedOff,
    Declined,
    TakenBack,
    ReceivedAbsent,
    Fetched,
    FetchedByFault,
    Faults,
    SentRealTouched,
    Probes,
}

/// All counts of a program.
pub type Counts = [u64; COUNTED.len()];

/// Size of a page of counts, in bytes. The page has the program's name, NUL-padded, and then the counts.
pub const USAGE_BYTES: usize = 4096;
const NAME_BYTES: usize = 16;

/// Writes the program's name to its page.
pub fn write_name(page: &SharedMemory, name: &str) {
    let mut bytes = [0; NAME_BYTES];
    let name = &name.as_bytes()[..name.len().min(NAME_BYTES - 1)];
    bytes[..name.len()].copy_from_slice(name);
    page.write(0, &bytes);
}

/// Writes one count to the program's page.
pub fn write_count(page: &SharedMemory, counted: Counted, value: u64) {
    page.long(NAME_BYTES + 8 * counted as usize).store(value, Ordering::Relaxed);
}

fn name(page: &SharedMemory) -> String {
    let mut bytes = [0; NAME_BYTES];
    page.read(0, &mut bytes);
    let good = |byte: &&u8| byte.is_ascii_alphanumeric() || b"._-+".contains(byte);
    let name: String = bytes.iter().take_while(good).map(|byte| char::from(*byte)).collect();
    if name.is_empty() { "unnamed".into() } else { name }
}

/// Writes all counts to the program's page.
pub fn write_counts(page: &SharedMemory, counts: &Counts) {
    for (index, value) in counts.iter().enumerate() {
        page.long(NAME_BYTES + 8 * index).store(*value, Ordering::Relaxed);
    }
}

fn counts(page: &SharedMemory) -> Counts {
    std::array::from_fn(|index| page.long(NAME_BYTES + 8 * index).load(Ordering::Relaxed))
}

/// Most names that are counted separately. Further names are counted as one, so that a program which makes up names
/// fills no memory.
const NAMES_MAX: usize = 32;
const OTHERS: &str = "others";

/// Counts of all programs.
#[derive(Debug, Default)]
pub struct Usage {
    /// By process: its pages, each with the connection that asked for it.
    places: HashMap<i32, Vec<(u64, SharedMemory)>>,
    /// By name: sums for processes that have ended.
    ended: BTreeMap<String, Counts>,
}

/// Counts of all programs with one name.
#[derive(Clone, Debug, Default)]
pub struct ByName {
    /// Number of running processes.
    pub processes: u64,
    /// Sums for running processes and those that have ended.
    pub counts: Counts,
}

fn add(sum: &mut Counts, counts: &Counts) {
    sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum = sum.wrapping_add(*count));
}

impl Usage {
    pub(crate) fn begin(&mut self, process: i32, connection: u64, page: SharedMemory) {
        self.places.entry(process).or_default().push((connection, page));
    }

    pub(crate) fn end(&mut self, process: i32, connection: u64) {
        let Some(places) = self.places.get_mut(&process) else { return };
        let Some(at) = places.iter().position(|(other, _)| *other == connection) else { return };
        if places.len() > 1 {
            // The newest page has the totals. If its connection ends, the totals are copied to the page before it.
            let (_, page) = places.remove(at);
            if at == places.len()
                && let Some((_, before)) = places.last()
            {
                write_counts(before, &counts(&page));
            }
            return;
        }
        let (name, counts) = places.first().map(|(_, page)| (name(page), counts(page))).unwrap_or_default();
        self.places.remove(&process);
        let name = self.known(name);
        add(self.ended.entry(name).or_default(), &counts);
    }

    fn known(&self, name: String) -> String {
        let full = self.ended.len() >= NAMES_MAX && !self.ended.contains_key(&name);
        if full { OTHERS.into() } else { name }
    }

    /// Returns the counts by program name.
    #[must_use]
    pub fn by_name(&self) -> BTreeMap<String, ByName> {
        let ended = self.ended.iter().map(|(name, counts)| (name.clone(), ByName { processes: 0, counts: *counts }));
        let mut all: BTreeMap<String, ByName> = ended.collect();
        for (_, page) in self.places.values().filter_map(|places| places.last()) {
            let name = name(page);
            let name = if all.len() >= NAMES_MAX && !all.contains_key(&name) { OTHERS.into() } else { name };
            let of_name = all.entry(name).or_default();
            of_name.processes += 1;
            add(&mut of_name.counts, &counts(page));
        }
        all
    }
}
