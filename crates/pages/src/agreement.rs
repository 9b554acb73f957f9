//! Agreement of a pool's mounts on changes: no mount reads old bytes after a change was acknowledged.
//!
//! A mount keeps a file's attributes and pages for a *validity* of at most 1 s, then it compares them with the source.
//! This alone bounds the age of what it reads, whoever changes the file. It also means that a change is seen by all
//! mounts 1 s after it reached the source. So a mount that changes a file may always acknowledge the change after 1 s.
//!
//! To acknowledge at once, the mount asks the file's *home*, the member that the file's first group belongs to. The
//! home has all other mounts drop the file, and then permits the change. Until the writer is done, the others compare
//! the file with the source at each read, and the writer needs no further permission.
//!
//! The home can only ask mounts that it knows. So only a mount with a *lease* from a home has a validity for its files;
//! all others compare at each read. A lease lasts 2 s. The mount counts it from the moment in which it asked, and the
//! home from the moment in which it answered, so the mount's ends first. The home waits for a silent mount until this
//! mount's lease has ended.
//!
//! ```text
//! writer                    home                    other mount
//!   | Ask file               |                          |
//!   |----------------------->| Drop file                |
//!   |                        |------------------------->| drops pages and attributes,
//!   |                        |                  Dropped | keeps none until Settled
//!   |               MayWrite |<-------------------------|
//!   |<-----------------------|                          |
//!   | writes, acknowledges,  |                          | reads, comparing
//!   | writes, acknowledges   |                          | each time
//!   | Done file              |                          |
//!   |----------------------->| Settled file             |
//!   |                        |------------------------->| keeps it again
//! ```
//!
//! Messages of one connection arrive in order, and none of an earlier connection after it. A mount that has lost its
//! connection has no permissions. When its lease begins, or after it has connected again, the home lists the files that
//! are being written, and the mount has no validity until the list has ended. A home that starts gives nothing for one
//! lease, since there may be leases and permissions from before its start.
//!
//! tests/agreement.rs tries random histories with lost connections, silent machines and homes that start again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::name::FileId;

/// Longest time for which a mount keeps attributes and pages without comparing them with the source.
pub const VALIDITY: Duration = Duration::from_secs(1);
/// Time for which a home knows a mount that says nothing.
pub const LEASE: Duration = Duration::from_secs(2);
/// A lease as the mount counts it: shorter by a hundredth, since clocks do not run equally fast.
const LEASE_OF_MOUNT: Duration = Duration::from_millis(1980);
/// Time after a file's last change in which its writer is not done.
const IDLE: Duration = Duration::from_secs(2);

/// Most files of a home that are being written. Changes of further files are acknowledged after 1 s.
const MOST_WRITTEN: usize = 1 << 16;

/// Number of a mount. A mount that starts again has another one.
pub type MountId = u64;

/// Message of a mount to a home.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ToHome {
    /// Asks for a lease. `sent` is the time of the mount's clock.
    Renew { sent: Duration },
    /// Asks for permission to change a file. The number is given back in the answer.
    Ask(FileId, Round),
    /// Answers `Drop`.
    Dropped(FileId, Round),
    /// Says that the mount changes the file no more.
    Done(FileId),
}

/// Message of a home to a mount.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ToMount {
    /// Begins the list of files that others change. It consists of `Drop`, and ends with `Leased`.
    List,
    /// Answers `Renew`, with the time from there.
    Leased { sent: Duration },
    /// Answers `Ask`: all other mounts compare the file with the source at each read.
    MayWrite(FileId, Round),
    /// Another mount changes the file, or is about to.
    Drop(FileId, Round),
    /// Nobody changes the file any more.
    Settled(FileId),
}

/// Number of a time in which a file is written, by the home or by a mount. It tells an answer to an earlier question
/// from one to the last.
pub type Round = u64;

/// A member's part, for the files whose home it is.
#[derive(Debug)]
pub struct Home {
    /// End of all leases and permissions of an earlier run.
    opens: Instant,
    leases: BTreeMap<MountId, Lease>,
    written: BTreeMap<FileId, Written>,
    rounds: Round,
}

#[derive(Debug)]
struct Lease {
    end: Instant,
    /// Whether the mount knows which files are being written.
    listed: bool,
}

/// A file that mounts change or want to change.
#[derive(Debug)]
struct Written {
    round: Round,
    /// Mounts that have asked.
    writers: BTreeMap<MountId, Writer>,
    /// Mounts that have dropped the file in this round.
    dropped: BTreeSet<MountId>,
}

#[derive(Debug)]
struct Writer {
    asked: Round,
    permitted: bool,
}

impl Home {
    /// Makes the home of a member that starts.
    pub fn new(now: Instant) -> Self {
        Self { opens: now + LEASE, leases: BTreeMap::new(), written: BTreeMap::new(), rounds: 0 }
    }

    /// Notes that a mount has connected, for the first time or again. Appends messages to `out`, as all functions do.
    pub fn connected(&mut self, mount: MountId, out: &mut Vec<(MountId, ToMount)>) {
        if let Some(lease) = self.leases.get_mut(&mount) {
            lease.listed = false;
        }
        for written in self.written.values_mut() {
            written.writers.remove(&mount);
        }
        self.settle_all(out);
    }

    /// Takes a mount's message.
    pub fn received(&mut self, mount: MountId, message: ToHome, now: Instant, out: &mut Vec<(MountId, ToMount)>) {
        self.tick(now, out);
        match message {
            ToHome::Renew { sent } => self.renew(mount, sent, now, out),
            ToHome::Ask(file, asked) => self.asked(mount, file, asked, out),
            ToHome::Dropped(file, round) => {
                if let Some(written) = self.written.get_mut(&file).filter(|written| written.round == round) {
                    written.dropped.insert(mount);
                    written.permit(file, &self.leases, out);
                }
            }
            ToHome::Done(file) => {
                if let Some(written) = self.written.get_mut(&file) {
                    written.writers.remove(&mount);
                    self.settle(file, out);
                }
            }
        }
    }

    /// Lets go of the mounts whose leases have ended, and permits what waited for them. To be called every half second.
    pub fn tick(&mut self, now: Instant, out: &mut Vec<(MountId, ToMount)>) {
        if self.leases.values().all(|lease| now < lease.end) {
            return;
        }
        self.leases.retain(|_, lease| now < lease.end);
        for (file, written) in &mut self.written {
            written.writers.retain(|mount, _| self.leases.contains_key(mount));
            written.permit(*file, &self.leases, out);
        }
        self.settle_all(out);
    }

    /// Returns the number of mounts with a lease.
    pub fn mounts(&self) -> usize {
        self.leases.len()
    }

    fn renew(&mut self, mount: MountId, sent: Duration, now: Instant, out: &mut Vec<(MountId, ToMount)>) {
        if now < self.opens {
            return;
        }
        let listed = self.leases.get(&mount).is_some_and(|lease| lease.listed);
        if !listed {
            out.push((mount, ToMount::List));
            out.extend(self.written.iter().map(|(file, written)| (mount, ToMount::Drop(*file, written.round))));
        }
        self.leases.insert(mount, Lease { end: now + LEASE, listed: true });
        out.push((mount, ToMount::Leased { sent }));
    }

    /// Notes a writer. It gets no answer without a lease, since nothing would say when its permission ends, and none if
    /// too many files are being written.
    fn asked(&mut self, mount: MountId, file: FileId, asked: Round, out: &mut Vec<(MountId, ToMount)>) {
        let full = self.written.len() >= MOST_WRITTEN && !self.written.contains_key(&file);
        if full || !self.leases.contains_key(&mount) {
            return;
        }
        let written = self.written.entry(file).or_insert_with(|| {
            self.rounds += 1;
            Written { round: self.rounds, writers: BTreeMap::new(), dropped: BTreeSet::new() }
        });
        written.writers.insert(mount, Writer { asked, permitted: false });
        // A second writer was asked to drop the file when the first one came, or with the list at its lease's begin.
        let others = self.leases.keys().filter(|other| **other != mount && !written.dropped.contains(other));
        out.extend(others.map(|other| (*other, ToMount::Drop(file, written.round))));
        written.permit(file, &self.leases, out);
    }

    /// Ends the rounds of all files that have no writer any more.
    fn settle_all(&mut self, out: &mut Vec<(MountId, ToMount)>) {
        let done = self.written.iter().filter(|(_, written)| written.writers.is_empty());
        for file in done.map(|(file, _)| *file).collect::<Vec<_>>() {
            self.settle(file, out);
        }
    }

    /// Ends the file's round if it has no writer any more.
    fn settle(&mut self, file: FileId, out: &mut Vec<(MountId, ToMount)>) {
        if self.written.get(&file).is_some_and(|written| written.writers.is_empty()) {
            self.written.remove(&file);
            out.extend(self.leases.keys().map(|mount| (*mount, ToMount::Settled(file))));
        }
    }
}

impl Written {
    /// Permits changes if all other mounts with a lease have dropped the file.
    fn permit(&mut self, file: FileId, leases: &BTreeMap<MountId, Lease>, out: &mut Vec<(MountId, ToMount)>) {
        for (mount, writer) in &mut self.writers {
            let all = leases.keys().all(|other| other == mount || self.dropped.contains(other));
            if all && !writer.permitted {
                writer.permitted = true;
                out.push((*mount, ToMount::MayWrite(file, writer.asked)));
            }
        }
    }
}

/// A mount's part, for the files of one home.
#[derive(Debug)]
pub struct Mount {
    start: Instant,
    lease_end: Instant,
    /// Files that others change.
    written: BTreeSet<FileId>,
    /// Whether the home is listing these files.
    listing: bool,
    /// Number of times that files had to be dropped.
    drops: u64,
    /// Files that this mount changes.
    writes: BTreeMap<FileId, Write>,
    rounds: Round,
}

#[derive(Debug)]
struct Write {
    round: Round,
    permitted: bool,
    last: Instant,
}

/// What a mount has to do with its kernel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Order {
    /// Drop the file's pages and attributes, then send this answer.
    Drop(FileId, ToHome),
    /// Acknowledge changes of the file that have reached the source.
    Acknowledge(FileId),
}

/// Beginning of a comparison with the source.
#[derive(Clone, Copy, Debug)]
pub struct Comparison {
    began: Instant,
    drops: u64,
    /// Whether others were changing the file.
    written: bool,
}

impl Mount {
    /// Makes the part of a mount that has not connected yet.
    pub fn new(now: Instant) -> Self {
        let (written, writes) = (BTreeSet::new(), BTreeMap::new());
        Self { start: now, lease_end: now, written, listing: false, drops: 0, writes, rounds: 0 }
    }

    /// Notes that the home was connected, for the first time or again. Returns what to send.
    pub fn connected(&mut self, now: Instant) -> Vec<ToHome> {
        self.lost();
        self.asks(now)
    }

    /// Notes that the connection with the home is lost. The lease stays until its end.
    pub fn lost(&mut self) {
        self.writes.values_mut().for_each(|write| write.permitted = false);
    }

    /// Takes a message of the home.
    pub fn received(&mut self, message: ToMount) -> Option<Order> {
        match message {
            ToMount::List => {
                self.listing = true;
                // Nobody asked this mount to drop what has changed since its last lease, if that had ended.
                self.drops += 1;
                self.written.clear();
                // The home may have let this mount's lease end, and its permissions.
                self.lost();
                None
            }
            ToMount::Leased { sent } => {
                self.listing = false;
                self.lease_end = self.start + sent + LEASE_OF_MOUNT;
                None
            }
            ToMount::MayWrite(file, round) => {
                self.writes.get_mut(&file).filter(|write| write.round == round)?.permitted = true;
                Some(Order::Acknowledge(file))
            }
            ToMount::Drop(file, round) => {
                self.drops += 1;
                self.written.insert(file);
                Some(Order::Drop(file, ToHome::Dropped(file, round)))
            }
            ToMount::Settled(file) => {
                self.written.remove(&file);
                None
            }
        }
    }

    /// Begins to compare a file with the source.
    pub fn compare(&self, file: FileId, now: Instant) -> Comparison {
        Comparison { began: now, drops: self.drops, written: self.listing || self.written.contains(&file) }
    }

    /// Returns how long attributes and pages are valid that were compared with the source, or read from there, since
    /// `compare`. If the file may have changed since then, they are valid for the read that they were needed for, and
    /// no longer.
    pub fn validity(&self, file: FileId, compared: Comparison, now: Instant) -> Duration {
        let changed = self.writes.get(&file).is_some_and(|write| write.last >= compared.began);
        if changed || compared.written || self.drops != compared.drops {
            return Duration::ZERO;
        }
        (compared.began + VALIDITY).min(self.lease_end).saturating_duration_since(now)
    }

    /// Notes that this mount is about to change a file, or that a change has reached the source. Returns what to send.
    pub fn writes(&mut self, file: FileId, now: Instant) -> Option<ToHome> {
        if let Some(write) = self.writes.get_mut(&file) {
            write.last = now;
            return None;
        }
        self.rounds += 1;
        self.writes.insert(file, Write { round: self.rounds, permitted: false, last: now });
        Some(ToHome::Ask(file, self.rounds))
    }

    /// Returns whether a change that reached the source at `changed` can be acknowledged.
    pub fn may_acknowledge(&self, file: FileId, changed: Instant, now: Instant) -> bool {
        let permitted = self.writes.get(&file).is_some_and(|write| write.permitted);
        (permitted && now < self.lease_end) || now >= changed + VALIDITY
    }

    /// Asks for the lease and for permissions that are missing, and ends what has been idle for 2 s. To be called
    /// every half second. Returns what to send.
    pub fn tick(&mut self, now: Instant) -> Vec<ToHome> {
        let mut out = Vec::new();
        self.writes.retain(|file, write| {
            let idle = now >= write.last + IDLE;
            out.extend(idle.then_some(ToHome::Done(*file)));
            !idle
        });
        out.extend(self.asks(now));
        out
    }

    fn asks(&self, now: Instant) -> Vec<ToHome> {
        let missing = self.writes.iter().filter(|(_, write)| !write.permitted);
        let renew = ToHome::Renew { sent: now - self.start };
        std::iter::once(renew).chain(missing.map(|(file, write)| ToHome::Ask(*file, write.round))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId { filesystem: 1, inode: 2, generation: 3 };

    /// A home and mounts whose messages arrive at once. Mounts answer `Drop` at once, but for silent ones.
    struct Pool {
        now: Instant,
        home: Home,
        mounts: Vec<Mount>,
        silent: Option<usize>,
        acknowledged: Vec<usize>,
    }

    impl Pool {
        fn new(mounts: usize) -> Self {
            let start = Instant::now();
            let mounts = (0..mounts).map(|_| Mount::new(start)).collect();
            let mut pool = Self { now: start, home: Home::new(start), mounts, silent: None, acknowledged: Vec::new() };
            pool.pass(LEASE);
            pool
        }

        fn pass(&mut self, time: Duration) {
            let end = self.now + time;
            while self.now < end {
                self.now += Duration::from_millis(500);
                let mut out = Vec::new();
                self.home.tick(self.now, &mut out);
                self.deliver(out);
                for at in 0..self.mounts.len() {
                    let messages = self.mounts[at].tick(self.now);
                    self.send(at, messages);
                }
            }
        }

        fn send(&mut self, mount: usize, messages: Vec<ToHome>) {
            let mut out = Vec::new();
            if self.silent != Some(mount) {
                messages.into_iter().for_each(|sent| self.home.received(mount as u64, sent, self.now, &mut out));
            }
            self.deliver(out);
        }

        fn deliver(&mut self, messages: Vec<(MountId, ToMount)>) {
            for (mount, message) in messages {
                let at = mount as usize;
                match self.mounts[at].received(message) {
                    Some(Order::Drop(_, answer)) => self.send(at, vec![answer]),
                    Some(Order::Acknowledge(_)) => self.acknowledged.push(at),
                    None => {}
                }
            }
        }

        fn write(&mut self, mount: usize) {
            let messages = self.mounts[mount].writes(FILE, self.now).into_iter().collect();
            self.send(mount, messages);
        }

        fn validity(&self, mount: usize) -> Duration {
            let mount = &self.mounts[mount];
            mount.validity(FILE, mount.compare(FILE, self.now), self.now)
        }
    }

    #[test]
    fn the_only_mount_writes_and_keeps_what_it_wrote() {
        let mut pool = Pool::new(1);
        pool.write(0);
        assert_eq!(pool.acknowledged, [0]);
        pool.now += Duration::from_millis(1);
        assert_eq!(pool.validity(0), VALIDITY);
    }

    #[test]
    fn others_keep_nothing_until_the_writer_is_done() {
        let mut pool = Pool::new(3);
        assert_eq!(pool.validity(1), VALIDITY);
        pool.write(0);
        assert_eq!(pool.acknowledged, [0]);
        pool.now += Duration::from_millis(1);
        assert_eq!([0, 1, 2].map(|at| pool.validity(at)), [VALIDITY, Duration::ZERO, Duration::ZERO]);
        pool.pass(IDLE);
        assert_eq!([0, 1, 2].map(|at| pool.validity(at)), [VALIDITY; 3]);
    }

    #[test]
    fn of_two_writers_none_keeps_the_file() {
        let mut pool = Pool::new(2);
        pool.write(0);
        pool.write(1);
        assert_eq!(pool.acknowledged, [0, 1]);
        pool.now += Duration::from_millis(1);
        assert_eq!([0, 1].map(|at| pool.validity(at)), [Duration::ZERO; 2]);
        pool.pass(IDLE);
        assert_eq!([0, 1].map(|at| pool.validity(at)), [VALIDITY; 2]);
    }

    #[test]
    fn a_silent_mount_delays_a_change_by_its_lease_at_most() {
        let mut pool = Pool::new(2);
        pool.silent = Some(1);
        pool.write(0);
        assert!(pool.acknowledged.is_empty());
        let changed = pool.now;
        assert!(!pool.mounts[0].may_acknowledge(FILE, changed, pool.now));
        assert!(pool.mounts[0].may_acknowledge(FILE, changed, pool.now + VALIDITY), "nobody keeps anything for longer");
        pool.pass(LEASE);
        assert_eq!(pool.acknowledged, [0]);
        assert_eq!(pool.validity(1), Duration::ZERO);
    }

    #[test]
    fn a_home_that_starts_gives_no_lease_for_the_time_of_one() {
        let mut pool = Pool::new(1);
        pool.home = Home::new(pool.now);
        pool.pass(LEASE - Duration::from_millis(500));
        assert_eq!(pool.home.mounts(), 0);
        pool.pass(Duration::from_millis(500));
        assert_eq!((pool.home.mounts(), pool.validity(0)), (1, VALIDITY));
    }

    #[test]
    fn what_was_compared_without_a_lease_is_worth_nothing_with_one() {
        let now = Instant::now();
        let mut mount = Mount::new(now);
        let compared = mount.compare(FILE, now);
        mount.received(ToMount::List);
        mount.received(ToMount::Leased { sent: Duration::ZERO });
        assert_eq!(mount.validity(FILE, compared, now), Duration::ZERO);
        assert_eq!(mount.validity(FILE, mount.compare(FILE, now), now), VALIDITY);
    }

    #[test]
    fn nothing_is_kept_while_the_home_lists_what_is_written() {
        let now = Instant::now();
        let mut mount = Mount::new(now);
        mount.received(ToMount::List);
        mount.received(ToMount::Leased { sent: Duration::ZERO });
        // The mount connects again, and its lease goes on.
        mount.connected(now);
        mount.received(ToMount::List);
        assert_eq!(mount.validity(FILE, mount.compare(FILE, now), now), Duration::ZERO);
        mount.received(ToMount::Leased { sent: Duration::ZERO });
        assert_eq!(mount.validity(FILE, mount.compare(FILE, now), now), VALIDITY);
    }

    #[test]
    fn a_mount_that_connects_again_is_told_what_is_written() {
        let now = Instant::now();
        let (mut home, mut out) = (Home::new(now - LEASE), Vec::new());
        let renew = ToHome::Renew { sent: Duration::ZERO };
        home.received(1, renew, now, &mut out);
        home.received(2, renew, now, &mut out);
        home.received(1, ToHome::Ask(FILE, 1), now, &mut out);
        out.clear();
        home.connected(2, &mut out);
        home.received(2, renew, now, &mut out);
        let leased = ToMount::Leased { sent: Duration::ZERO };
        assert_eq!(out, [(2, ToMount::List), (2, ToMount::Drop(FILE, 1)), (2, leased)]);
    }

    #[test]
    fn a_writer_that_connects_again_writes_nothing_until_it_asks() {
        let now = Instant::now();
        let (mut home, mut out) = (Home::new(now - LEASE), Vec::new());
        home.received(1, ToHome::Renew { sent: Duration::ZERO }, now, &mut out);
        home.received(1, ToHome::Ask(FILE, 1), now, &mut out);
        out.clear();
        // Its `Done` may have been lost.
        home.connected(1, &mut out);
        assert_eq!(out, [(1, ToMount::Settled(FILE))]);
    }

    #[test]
    fn a_permission_that_is_missing_is_asked_for_again() {
        let now = Instant::now();
        let mut mount = Mount::new(now);
        // This was sent on a connection that is lost.
        assert_eq!(mount.writes(FILE, now), Some(ToHome::Ask(FILE, 1)));
        let asks = [ToHome::Renew { sent: Duration::ZERO }, ToHome::Ask(FILE, 1)];
        assert_eq!(mount.connected(now), asks);
        assert_eq!(mount.tick(now), asks);
        mount.received(ToMount::MayWrite(FILE, 1));
        assert_eq!(mount.tick(now), asks[..1]);
    }

    #[test]
    fn a_greedy_mount_fills_the_home_only_up_to_its_limit() {
        let now = Instant::now();
        let (mut home, mut out) = (Home::new(now - LEASE), Vec::new());
        home.received(1, ToHome::Renew { sent: Duration::ZERO }, now, &mut out);
        out.clear();
        for inode in 0..MOST_WRITTEN as u64 + 10 {
            home.received(1, ToHome::Ask(FileId { inode, ..FILE }, inode), now, &mut out);
        }
        assert_eq!((out.len(), home.written.len()), (MOST_WRITTEN, MOST_WRITTEN));
    }
}
