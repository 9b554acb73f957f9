//! Agreement of a pool's mounts on changes: no mount reads old bytes after a change was acknowledged.
//!
//! A mount keeps a file's attributes and pages for a *validity* of a little less than 1 s, then it compares them with
//! the source. This alone bounds the age of what it reads, whoever changes the file. It also means that all mounts see
//! a change 1 s after it reached the source. So a mount that changes a file may always acknowledge the change after
//! 1 s.
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
//! A mount that has lost its connection has no permissions. When its lease begins, or after it has connected again, the
//! home lists the files that are being written, and the mount has no validity until the list has ended. A home that
//! starts gives nothing for one lease, since there may be leases and permissions from before its start.
//!
//! This holds under the following conditions:
//!
//! - Messages of one connection arrive in order, and none of an earlier connection after it. An answer is sent on the
//!   connection of its question, or not at all.
//! - A mount calls [`Mount::lost`] before the home can see its next connection.
//! - All mounts have the same home for a file. So the list of members and their weights come from the configuration,
//!   and a home refuses a mount that has another one.
//! - A home has ended before it starts again.
//! - Times are of a clock that goes on while the machine sleeps (CLOCK_BOOTTIME). No clock can tell a virtual machine
//!   that it stood still, so a mount on one that was paused may read old bytes for the rest of a validity.
//!
//! tests/agreement.rs tries random histories with lost connections, silent machines, clocks of different rates, and
//! homes that start again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::name::FileId;

/// Time after which all mounts see a change that has reached the source.
pub const VISIBLE: Duration = Duration::from_secs(1);
/// Longest time for which a mount keeps attributes and pages without comparing them with the source. It is shorter than
/// `VISIBLE`, since clocks do not run equally fast, and the kernel ends a validity only with its next tick (10 ms).
pub const VALIDITY: Duration = Duration::from_millis(980);
/// Time for which a home knows a mount that says nothing.
pub const LEASE: Duration = Duration::from_secs(2);
/// A lease as the mount counts it: shorter by a hundredth, since clocks do not run equally fast.
const LEASE_OF_MOUNT: Duration = Duration::from_millis(1980);
/// Time after a file's last change in which its writer is not done. A comparison that began before the change is worth
/// nothing when it has passed.
const IDLE: Duration = Duration::from_secs(2);
const _: () = assert!(IDLE.as_millis() >= VISIBLE.as_millis());
/// Most files that a mount says it is writing, by a home. It is done with the oldest one when another comes.
const MOST_WRITES: usize = 1 << 12;
/// Most files that a home lets one mount write. Changes of further files are acknowledged after 1 s.
const MOST_WRITTEN: usize = 2 * MOST_WRITES;

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
    /// Answers `Ask` of a mount that is writing too many files.
    Refused(FileId, Round),
    /// Another mount changes the file, or is about to.
    Drop(FileId, Round),
    /// Nobody changes the file any more.
    Settled(FileId),
}

/// Number of a round. A home's round is a time in which mounts write a file, and a mount's round is one in which this
/// mount does. It tells an answer to an earlier question from one to the last.
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
    /// Number of files that the mount is writing.
    writes: usize,
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
    /// Makes the home of a member that starts. `first` is the number before its first round. It must differ from run to
    /// run (a random number does), so that no answer to an earlier run counts.
    pub fn new(now: Instant, first: Round) -> Self {
        Self { opens: now + LEASE, leases: BTreeMap::new(), written: BTreeMap::new(), rounds: first }
    }

    /// Notes that a mount has connected, for the first time or again. Appends messages to `out`, as all functions do.
    pub fn connected(&mut self, mount: MountId, out: &mut Vec<(MountId, ToMount)>) {
        if let Some(lease) = self.leases.get_mut(&mount) {
            (lease.listed, lease.writes) = (false, 0);
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
                if self.written.get_mut(&file).is_some_and(|written| written.writers.remove(&mount).is_some()) {
                    self.leases.entry(mount).and_modify(|lease| lease.writes -= 1);
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
            written.dropped.retain(|mount| self.leases.contains_key(mount));
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
        let lease = self.leases.entry(mount).or_insert(Lease { end: now, listed: false, writes: 0 });
        if !lease.listed {
            out.push((mount, ToMount::List));
            out.extend(self.written.iter().map(|(file, written)| (mount, ToMount::Drop(*file, written.round))));
        }
        (lease.end, lease.listed) = (now + LEASE, true);
        out.push((mount, ToMount::Leased { sent }));
    }

    /// Notes a writer. Without a lease it gets no answer, since nothing would say when its permission ends.
    fn asked(&mut self, mount: MountId, file: FileId, asked: Round, out: &mut Vec<(MountId, ToMount)>) {
        let Some(lease) = self.leases.get_mut(&mount) else { return };
        let before = self.written.get(&file).and_then(|written| written.writers.get(&mount));
        match before.map(|writer| writer.asked) {
            // It asks again because it has no answer yet. The messages that it waits for are under way.
            Some(before) if before == asked => return,
            Some(_) => {}
            None if lease.writes >= MOST_WRITTEN => return out.push((mount, ToMount::Refused(file, asked))),
            None => lease.writes += 1,
        }
        let written = self.written.entry(file).or_insert_with(|| {
            self.rounds = self.rounds.wrapping_add(1);
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
    /// Beginning of the last list.
    listed: Instant,
    /// Times of the last `Drop` of each file, as far back as a comparison can be worth something.
    dropped: BTreeMap<FileId, Instant>,
    /// Files that this mount changes.
    writes: BTreeMap<FileId, Write>,
    rounds: Round,
}

#[derive(Debug)]
struct Write {
    round: Round,
    permitted: bool,
    /// Whether the home has refused it, so that it is not asked again.
    refused: bool,
    last: Instant,
}

/// Work for a mount, towards its kernel and its programs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Order {
    /// Drop the file's pages and attributes, then send this answer on the same connection.
    Drop(FileId, ToHome),
    /// See which changes of the file [`Mount::may_acknowledge`] now.
    Permitted(FileId),
}

/// Beginning of a comparison with the source.
#[derive(Clone, Copy, Debug)]
pub struct Comparison {
    began: Instant,
    /// Whether others were changing the file.
    written: bool,
}

impl Mount {
    /// Makes the part of a mount that has not connected yet.
    pub fn new(now: Instant) -> Self {
        Self {
            start: now,
            lease_end: now,
            written: BTreeSet::new(),
            listing: false,
            listed: now,
            dropped: BTreeMap::new(),
            writes: BTreeMap::new(),
            rounds: 0,
        }
    }

    /// Notes that the home was connected, for the first time or again. Returns what to send.
    pub fn connected(&mut self, now: Instant) -> Vec<ToHome> {
        self.lost();
        self.asks(now)
    }

    /// Notes that the connection with the home is lost. To be called before another one is made. The lease stays until
    /// its end.
    pub fn lost(&mut self) {
        self.writes.values_mut().for_each(|write| (write.permitted, write.refused) = (false, false));
    }

    /// Takes a message of the home.
    pub fn received(&mut self, message: ToMount, now: Instant) -> Option<Order> {
        match message {
            ToMount::List => {
                // Nobody asked this mount to drop what has changed since its last lease, if that had ended. So what it
                // compared before the list is worth nothing.
                (self.listing, self.listed) = (true, now);
                self.written.clear();
                // The home may have let this mount's lease end, and its permissions.
                self.lost();
                None
            }
            ToMount::Leased { sent } => {
                self.listing = false;
                let sent = sent.min(now.saturating_duration_since(self.start));
                self.lease_end = self.start + sent + LEASE_OF_MOUNT;
                None
            }
            ToMount::MayWrite(file, round) => {
                self.writes.get_mut(&file).filter(|write| write.round == round)?.permitted = true;
                Some(Order::Permitted(file))
            }
            ToMount::Refused(file, round) => {
                self.writes.get_mut(&file).filter(|write| write.round == round)?.refused = true;
                None
            }
            ToMount::Drop(file, round) => {
                self.dropped.insert(file, now);
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
        Comparison { began: now, written: self.listing || self.written.contains(&file) }
    }

    /// Returns until when attributes and pages are valid that were compared with the source, or read from there, since
    /// `compare`. `None`: the file may have changed since then, and they are valid only for the read that they were
    /// needed for.
    pub fn valid_until(&self, file: FileId, compared: Comparison) -> Option<Instant> {
        let changed = self.writes.get(&file).map(|write| write.last);
        let dropped = self.dropped.get(&file).copied();
        let latest = changed.max(dropped).max(Some(self.listed));
        let worthless = compared.written || latest >= Some(compared.began);
        (!worthless).then(|| (compared.began + VALIDITY).min(self.lease_end))
    }

    /// Notes that this mount is about to change a file, or that a change has reached the source. Returns what to send.
    pub fn writes(&mut self, file: FileId, now: Instant) -> Vec<ToHome> {
        if let Some(write) = self.writes.get_mut(&file) {
            write.last = now.max(write.last);
            return Vec::new();
        }
        let oldest = || self.writes.iter().min_by_key(|(_, write)| write.last).map(|(file, _)| *file);
        let done = if self.writes.len() >= MOST_WRITES { oldest() } else { None };
        if let Some(file) = done {
            self.writes.remove(&file);
        }
        self.rounds += 1;
        self.writes.insert(file, Write { round: self.rounds, permitted: false, refused: false, last: now });
        done.map(ToHome::Done).into_iter().chain([ToHome::Ask(file, self.rounds)]).collect()
    }

    /// Returns whether a change that reached the source at `changed` can be acknowledged.
    pub fn may_acknowledge(&self, file: FileId, changed: Instant, now: Instant) -> bool {
        let permitted = self.writes.get(&file).is_some_and(|write| write.permitted);
        (permitted && now < self.lease_end) || now >= changed + VISIBLE
    }

    /// Asks for the lease and for permissions that are missing, and ends what has been idle for 2 s. To be called
    /// every half second. Returns what to send.
    pub fn tick(&mut self, now: Instant) -> Vec<ToHome> {
        let mut out = Vec::new();
        self.dropped.retain(|_, time| now < *time + VISIBLE);
        self.writes.retain(|file, write| {
            let idle = now >= write.last + IDLE;
            out.extend(idle.then_some(ToHome::Done(*file)));
            !idle
        });
        out.extend(self.asks(now));
        out
    }

    fn asks(&self, now: Instant) -> Vec<ToHome> {
        let missing = self.writes.iter().filter(|(_, write)| !write.permitted && !write.refused);
        let renew = ToHome::Renew { sent: now.saturating_duration_since(self.start) };
        std::iter::once(renew).chain(missing.map(|(file, write)| ToHome::Ask(*file, write.round))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId { filesystem: 1, inode: 2, generation: 3 };

    /// Returns the validity of what is compared now.
    fn validity(mount: &Mount, now: Instant) -> Duration {
        let end = mount.valid_until(FILE, mount.compare(FILE, now));
        end.map_or(Duration::ZERO, |end| end.saturating_duration_since(now))
    }

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
            let mut pool =
                Self { now: start, home: Home::new(start, 0), mounts, silent: None, acknowledged: Vec::new() };
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
            // A comparison in the moment of a message counts as older than the message.
            self.now += Duration::from_millis(1);
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
                match self.mounts[at].received(message, self.now) {
                    Some(Order::Drop(_, answer)) => self.send(at, vec![answer]),
                    Some(Order::Permitted(file)) if self.mounts[at].may_acknowledge(file, self.now, self.now) => {
                        self.acknowledged.push(at);
                    }
                    Some(Order::Permitted(_)) => {}
                    None => {}
                }
            }
        }

        fn write(&mut self, mount: usize) {
            let messages = self.mounts[mount].writes(FILE, self.now);
            self.send(mount, messages);
        }

        fn validity(&self, mount: usize) -> Duration {
            validity(&self.mounts[mount], self.now)
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
        assert!(pool.mounts[0].may_acknowledge(FILE, changed, pool.now + VISIBLE), "nobody keeps anything for longer");
        pool.pass(LEASE);
        assert_eq!(pool.acknowledged, [0]);
        assert_eq!(pool.validity(1), Duration::ZERO);
    }

    #[test]
    fn a_home_that_starts_gives_no_lease_for_the_time_of_one() {
        let mut pool = Pool::new(1);
        pool.home = Home::new(pool.now, 0);
        pool.pass(LEASE - Duration::from_millis(500));
        assert_eq!(pool.home.mounts(), 0);
        pool.pass(Duration::from_millis(500));
        assert_eq!((pool.home.mounts(), pool.validity(0)), (1, VALIDITY));
    }

    #[test]
    fn what_was_compared_without_a_lease_is_worth_nothing_with_one() {
        let start = Instant::now();
        let now = start + Duration::from_millis(10);
        let mut mount = Mount::new(start);
        let compared = mount.compare(FILE, start + Duration::from_millis(5));
        mount.received(ToMount::List, now);
        mount.received(ToMount::Leased { sent: Duration::ZERO }, now);
        assert_eq!(mount.valid_until(FILE, compared), None);
        assert_eq!(validity(&mount, now + Duration::from_millis(1)), VALIDITY);
    }

    #[test]
    fn nothing_is_kept_while_the_home_lists_what_is_written() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut mount = Mount::new(start);
        mount.received(ToMount::List, at(1));
        mount.received(ToMount::Leased { sent: Duration::ZERO }, at(1));
        // The mount connects again, and its lease goes on.
        mount.connected(at(2));
        mount.received(ToMount::List, at(3));
        let compared = mount.compare(FILE, at(4));
        mount.received(ToMount::Leased { sent: Duration::ZERO }, at(5));
        assert_eq!(mount.valid_until(FILE, compared), None);
        assert_eq!(validity(&mount, at(6)), VALIDITY);
    }

    #[test]
    fn a_home_that_lies_about_times_gives_no_longer_lease() {
        let start = Instant::now();
        let mut mount = Mount::new(start);
        mount.received(ToMount::List, start);
        mount.received(ToMount::Leased { sent: Duration::MAX }, start + LEASE);
        assert_eq!(mount.lease_end, start + LEASE + LEASE_OF_MOUNT);
    }

    #[test]
    fn a_change_of_one_file_spoils_no_comparison_of_another() {
        let mut pool = Pool::new(2);
        let other = FileId { inode: 7, ..FILE };
        let compared = pool.mounts[1].compare(other, pool.now);
        pool.now += Duration::from_millis(1);
        pool.write(0);
        assert_eq!(pool.mounts[1].valid_until(other, compared), Some(compared.began + VALIDITY));
    }

    #[test]
    fn an_answer_to_an_earlier_run_of_the_home_counts_for_nothing() {
        let now = Instant::now();
        let (mut home, mut out) = (Home::new(now - LEASE, 100), Vec::new());
        for mount in [1, 2] {
            home.received(mount, ToHome::Renew { sent: Duration::ZERO }, now, &mut out);
        }
        home.received(1, ToHome::Ask(FILE, 1), now, &mut out);
        out.clear();
        home.received(2, ToHome::Dropped(FILE, 1), now, &mut out);
        assert_eq!(out, []);
        home.received(2, ToHome::Dropped(FILE, 101), now, &mut out);
        assert_eq!(out, [(1, ToMount::MayWrite(FILE, 1))]);
    }

    #[test]
    fn a_mount_that_changes_many_files_is_done_with_the_oldest() {
        let start = Instant::now();
        let mut mount = Mount::new(start);
        let file = |inode| FileId { inode, ..FILE };
        for inode in 0..MOST_WRITES as u64 {
            let messages = mount.writes(file(inode), start + Duration::from_micros(inode));
            assert_eq!(messages, [ToHome::Ask(file(inode), inode + 1)]);
        }
        let last = MOST_WRITES as u64;
        assert_eq!(mount.writes(file(last), start + LEASE), [ToHome::Done(file(0)), ToHome::Ask(file(last), last + 1)]);
        assert_eq!(mount.writes.len(), MOST_WRITES);
    }

    #[test]
    fn a_mount_that_connects_again_is_told_what_is_written() {
        let now = Instant::now();
        let (mut home, mut out) = (Home::new(now - LEASE, 0), Vec::new());
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
        let (mut home, mut out) = (Home::new(now - LEASE, 0), Vec::new());
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
        assert_eq!(mount.writes(FILE, now), [ToHome::Ask(FILE, 1)]);
        let asks = [ToHome::Renew { sent: Duration::ZERO }, ToHome::Ask(FILE, 1)];
        assert_eq!(mount.connected(now), asks);
        assert_eq!(mount.tick(now), asks);
        mount.received(ToMount::MayWrite(FILE, 1), now);
        assert_eq!(mount.tick(now), asks[..1]);
    }

    #[test]
    fn a_mount_that_is_refused_asks_no_more() {
        let now = Instant::now();
        let mut mount = Mount::new(now);
        mount.writes(FILE, now);
        mount.received(ToMount::Refused(FILE, 1), now);
        assert_eq!(mount.tick(now), [ToHome::Renew { sent: Duration::ZERO }]);
        assert!(!mount.may_acknowledge(FILE, now, now));
        assert!(mount.may_acknowledge(FILE, now, now + VISIBLE));
    }

    #[test]
    fn a_greedy_mount_leaves_room_for_others() {
        let now = Instant::now();
        let (mut home, mut out) = (Home::new(now - LEASE, 0), Vec::new());
        for mount in [1, 2] {
            home.received(mount, ToHome::Renew { sent: Duration::ZERO }, now, &mut out);
        }
        let file = |inode| FileId { inode, ..FILE };
        for inode in 0..MOST_WRITTEN as u64 {
            home.received(1, ToHome::Ask(file(inode), inode), now, &mut out);
        }
        out.clear();
        home.received(1, ToHome::Ask(file(u64::MAX), 1), now, &mut out);
        assert_eq!(out, [(1, ToMount::Refused(file(u64::MAX), 1))]);
        out.clear();
        home.received(2, ToHome::Ask(file(u64::MAX), 1), now, &mut out);
        assert_eq!(out, [(1, ToMount::Drop(file(u64::MAX), MOST_WRITTEN as u64 + 1))]);
        out.clear();
        home.received(1, ToHome::Done(file(0)), now, &mut out);
        home.received(1, ToHome::Ask(file(u64::MAX - 1), 2), now, &mut out);
        assert!(!out.iter().any(|(_, message)| matches!(message, ToMount::Refused(..))), "there is room again");
    }

    #[test]
    fn an_answer_to_an_earlier_question_permits_nothing() {
        let start = Instant::now();
        let mut mount = Mount::new(start);
        mount.writes(FILE, start);
        let later = start + IDLE;
        assert_eq!(mount.tick(later)[0], ToHome::Done(FILE));
        assert_eq!(mount.writes(FILE, later), [ToHome::Ask(FILE, 2)]);
        assert_eq!(mount.received(ToMount::MayWrite(FILE, 1), later), None);
        assert_eq!(mount.received(ToMount::MayWrite(FILE, 2), later), Some(Order::Permitted(FILE)));
    }
}
