//! Random histories of mounts, a home and writers beside the mounts, on a virtual clock. Messages are late, connections
//! are lost, mounts and the home stand still or start again. Each read is compared with what had been acknowledged when
//! it began.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use shunt_pages::agreement::{Comparison, Home, Mount, MountId, Order, ToHome, ToMount, VALIDITY, VISIBLE};
use shunt_pages::name::FileId;
use shunt_testbed::random::Random;

const FILES: u64 = 2;
/// Number of a connection that is lost, before the mount has noticed it.
const CUT: u64 = u64::MAX;
/// Time in which there are changes and faults.
const END: Duration = Duration::from_secs(20);
/// Time after that in which everything comes to rest. No machine stands still longer than 5 s, and a connection that is
/// lost comes back within 9 s.
const REST: Duration = Duration::from_secs(20);

/// Draws a time of which most are short, and few as long as `longest`.
fn draw_time(random: &mut Random, longest: Duration) -> Duration {
    longest.mul_f64(random.part().powi(6))
}

fn file(number: u64) -> FileId {
    FileId { filesystem: 1, inode: number, generation: 0 }
}

#[derive(Debug)]
enum Event {
    ToHome(usize, ToHome, u64),
    ToMount(usize, ToMount, u64),
    /// A mount has dropped a file, and answers.
    Dropped(usize, ToHome, u64),
    /// A mount notices that its connection is lost.
    Lost(usize),
    Connect(usize),
    HomeTick,
    MountTick(usize),
    Read(usize),
    /// A mount reads this file again.
    ReadAgain(usize, u64),
    /// A mount's read has the source's answer.
    Compared(usize, Reading),
    Write(usize),
    /// A mount's change has reached the source.
    Changed(usize, u64),
    /// A mount looks whether it may acknowledge changes.
    Acknowledge(usize),
    WriteBeside,
    /// The mount, or the home (`None`), does nothing for this time.
    Stop(Option<usize>, Duration),
    Restart(Option<usize>),
}

#[derive(Debug)]
struct Reading {
    mount: MountId,
    file: u64,
    began: Instant,
    /// Version that the source answers with.
    version: u64,
    comparison: Comparison,
    /// Greatest version that had been acknowledged when the read began, or had to be visible by then.
    least: u64,
}

/// Version of a file that a mount keeps. The time is of the mount's clock, as are those of its changes.
struct Cached {
    version: u64,
    until: Instant,
}

struct OneMount {
    id: MountId,
    logic: Mount,
    /// Rate of the mount's clock.
    rate: f64,
    /// Number of the connection; `None` while there is none. Messages of other connections are lost.
    connection: Option<u64>,
    cached: HashMap<u64, Cached>,
    /// Changes that reached the source and wait to be acknowledged: file, version, time.
    waiting: Vec<(u64, u64, Instant)>,
    stopped_until: Instant,
}

struct World {
    start: Instant,
    now: Instant,
    random: Random,
    events: BinaryHeap<Reverse<(Instant, u64)>>,
    what: HashMap<u64, Event>,
    count: u64,
    home: Home,
    home_stopped_until: Instant,
    mounts: Vec<OneMount>,
    /// Versions of each file in the source, with the time of each.
    source: Vec<Vec<Instant>>,
    acknowledged: Vec<u64>,
    connections: u64,
    /// Time of the last message in each direction of a connection, which later ones must not overtake.
    order: HashMap<(u64, bool), Instant>,
    longest_delay: Duration,
    /// Whether nothing changes any more.
    resting: bool,
    with_permission: u64,
    from_cache: u64,
}

impl World {
    fn new(seed: u64, mounts: usize, longest_delay: Duration) -> Self {
        let now = Instant::now();
        let one = |id| OneMount {
            id,
            logic: Mount::new(now),
            rate: [1.0, 1.004, 0.996, 1.0][id as usize % 4],
            connection: None,
            cached: HashMap::new(),
            waiting: Vec::new(),
            stopped_until: now,
        };
        let mut world = Self {
            start: now,
            now,
            random: Random::new(seed, 0),
            events: BinaryHeap::new(),
            what: HashMap::new(),
            count: 0,
            home: Home::new(now, 0),
            home_stopped_until: now,
            mounts: (0..mounts as u64).map(one).collect(),
            source: vec![vec![now]; FILES as usize],
            acknowledged: vec![0; FILES as usize],
            connections: 0,
            order: HashMap::new(),
            longest_delay,
            resting: false,
            with_permission: 0,
            from_cache: 0,
        };
        for at in 0..mounts {
            world.after(Duration::ZERO, Event::Connect(at));
            world.after(Duration::ZERO, Event::MountTick(at));
            world.after(Duration::ZERO, Event::Read(at));
            world.after(Duration::from_millis(3000), Event::Write(at));
        }
        world.after(Duration::ZERO, Event::HomeTick);
        world.after(Duration::from_secs(5), Event::WriteBeside);
        world
    }

    /// Returns the time of a mount's clock.
    fn clock(&self, at: usize) -> Instant {
        self.start + (self.now - self.start).mul_f64(self.mounts[at].rate)
    }

    fn at(&mut self, time: Instant, event: Event) {
        self.count += 1;
        self.events.push(Reverse((time, self.count)));
        self.what.insert(self.count, event);
    }

    fn after(&mut self, time: Duration, event: Event) {
        self.at(self.now + time, event);
    }

    fn send(&mut self, connection: u64, to_home: bool, event: Event) {
        if connection == CUT {
            return;
        }
        let time = self.now + draw_time(&mut self.random, self.longest_delay);
        let last = self.order.entry((connection, to_home)).or_insert(time);
        *last = time.max(*last);
        let time = *last;
        self.at(time, event);
    }

    fn send_home(&mut self, mount: usize, messages: Vec<ToHome>) {
        let Some(connection) = self.mounts[mount].connection else { return };
        messages.into_iter().for_each(|message| self.send(connection, true, Event::ToHome(mount, message, connection)));
    }

    fn send_mounts(&mut self, messages: Vec<(MountId, ToMount)>) {
        for (id, message) in messages {
            let Some(at) = self.mounts.iter().position(|mount| mount.id == id) else { continue };
            let Some(connection) = self.mounts[at].connection else { continue };
            self.send(connection, false, Event::ToMount(at, message, connection));
        }
    }

    /// Runs that long. Returns an error for a read of old bytes.
    fn run(&mut self, time: Duration) -> Result<(), String> {
        let end = self.now + time;
        while let Some(Reverse((time, number))) = self.events.pop() {
            if time > end {
                self.events.push(Reverse((time, number)));
                break;
            }
            self.now = self.now.max(time);
            let event = self.what.remove(&number).expect("each event is there once");
            match self.stopped(&event) {
                // A stopped machine handles its events later, in the order of their numbers.
                Some(until) => {
                    self.events.push(Reverse((until, number)));
                    self.what.insert(number, event);
                }
                None => self.handle(event)?,
            }
        }
        Ok(())
    }

    fn stopped(&self, event: &Event) -> Option<Instant> {
        let until = match event {
            Event::ToHome(..) | Event::HomeTick => self.home_stopped_until,
            Event::ToMount(at, ..)
            | Event::Dropped(at, ..)
            | Event::Lost(at)
            | Event::Connect(at)
            | Event::MountTick(at)
            | Event::Read(at)
            | Event::ReadAgain(at, _)
            | Event::Compared(at, _)
            | Event::Write(at)
            | Event::Changed(at, _)
            | Event::Acknowledge(at) => self.mounts[*at].stopped_until,
            Event::WriteBeside | Event::Stop(..) | Event::Restart(_) => return None,
        };
        (until > self.now).then_some(until)
    }

    fn handle(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::ToHome(at, message, connection) => {
                if self.mounts[at].connection == Some(connection) {
                    let mut out = Vec::new();
                    self.home.received(self.mounts[at].id, message, self.now, &mut out);
                    self.send_mounts(out);
                }
            }
            Event::ToMount(at, message, connection) => {
                if self.mounts[at].connection == Some(connection) {
                    self.mount_received(at, message, connection);
                }
            }
            Event::Dropped(at, answer, connection) => {
                if self.mounts[at].connection == Some(connection) {
                    self.send_home(at, vec![answer]);
                }
            }
            Event::Connect(at) => self.connect(at),
            Event::HomeTick => {
                let mut out = Vec::new();
                self.home.tick(self.now, &mut out);
                self.send_mounts(out);
                self.after(Duration::from_millis(500), Event::HomeTick);
            }
            Event::MountTick(at) => {
                let now = self.clock(at);
                let messages = self.mounts[at].logic.tick(now);
                self.send_home(at, messages);
                self.acknowledge(at);
                self.after(Duration::from_millis(500), Event::MountTick(at));
            }
            Event::Read(at) => {
                let number = self.random.below(FILES as usize) as u64;
                self.read(at, number)?;
                let time = draw_time(&mut self.random, Duration::from_millis(300));
                self.after(time, Event::Read(at));
            }
            Event::ReadAgain(at, number) => self.read(at, number)?,
            Event::Compared(at, reading) => self.compared(at, reading)?,
            Event::WriteBeside | Event::Write(_) if self.resting => {}
            Event::Write(at) => self.write(at),
            Event::Changed(at, file) => self.changed(at, file),
            Event::Acknowledge(at) => self.acknowledge(at),
            Event::WriteBeside | Event::Lost(_) | Event::Stop(..) | Event::Restart(_) => self.disturb(event),
        }
        Ok(())
    }

    /// Does what mounts and home do not do themselves.
    fn disturb(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::WriteBeside => {
                let number = self.random.below(FILES as usize) as u64;
                self.source[number as usize].push(now);
                let time = draw_time(&mut self.random, Duration::from_secs(8));
                self.after(time, Event::WriteBeside);
            }
            Event::Lost(at) => {
                self.mounts[at].connection = None;
                self.mounts[at].logic.lost();
                let time = draw_time(&mut self.random, Duration::from_secs(4));
                self.after(time, Event::Connect(at));
            }
            Event::Stop(None, time) => self.home_stopped_until = self.home_stopped_until.max(now + time),
            Event::Stop(Some(at), time) => {
                self.mounts[at].stopped_until = self.mounts[at].stopped_until.max(now + time);
            }
            Event::Restart(None) => {
                self.home = Home::new(now, self.random.next());
                (0..self.mounts.len()).for_each(|at| self.cut(at));
            }
            Event::Restart(Some(at)) => self.restart(at),
            _ => unreachable!("{event:?} is handled above"),
        }
    }

    /// Loses a mount's connection. The mount notices it now or later, and the messages on the way are lost.
    fn cut(&mut self, at: usize) {
        if self.mounts[at].connection.is_some() {
            self.mounts[at].connection = Some(CUT);
            let time = draw_time(&mut self.random, Duration::from_secs(5));
            self.after(time, Event::Lost(at));
        }
    }

    fn connect(&mut self, at: usize) {
        if self.mounts[at].connection.is_some() {
            return;
        }
        self.connections += 1;
        let (now, connection, id) = (self.clock(at), self.connections, self.mounts[at].id);
        self.mounts[at].connection = Some(connection);
        let mut out = Vec::new();
        self.home.connected(id, &mut out);
        self.send_mounts(out);
        let messages = self.mounts[at].logic.connected(now);
        self.send_home(at, messages);
    }

    fn restart(&mut self, at: usize) {
        let (now, id) = (self.clock(at), self.mounts.iter().map(|mount| mount.id).max().unwrap_or(0) + 1);
        self.cut(at);
        let mount = &mut self.mounts[at];
        mount.id = id;
        mount.logic = Mount::new(now);
        mount.cached.clear();
        // Their writers get no answer any more.
        mount.waiting.clear();
    }

    fn mount_received(&mut self, at: usize, message: ToMount, connection: u64) {
        let now = self.clock(at);
        match self.mounts[at].logic.received(message, now) {
            Some(Order::Drop(file, answer)) => {
                self.mounts[at].cached.remove(&file.inode);
                let time = draw_time(&mut self.random, Duration::from_millis(50));
                self.after(time, Event::Dropped(at, answer, connection));
            }
            Some(Order::Permitted(_)) => self.acknowledge(at),
            None => {}
        }
    }

    /// Returns the version that a read which begins now must see at least.
    fn least(&self, number: u64) -> u64 {
        let old = self.now - VISIBLE;
        let visible = self.source[number as usize].partition_point(|time| *time < old);
        self.acknowledged[number as usize].max((visible as u64).saturating_sub(1))
    }

    fn read(&mut self, at: usize, number: u64) -> Result<(), String> {
        let now = self.clock(at);
        let least = self.least(number);
        let cached = self.mounts[at].cached.get(&number).filter(|cached| now < cached.until);
        if let Some(Cached { version, .. }) = cached {
            self.from_cache += 1;
            if *version < least {
                return Err(format!("mount {at} reads version {version} of file {number}, and {least} is current"));
            }
        } else {
            let comparison = self.mounts[at].logic.compare(file(number), now);
            let version = self.source[number as usize].len() as u64 - 1;
            let mount = self.mounts[at].id;
            let reading = Reading { mount, file: number, began: now, version, comparison, least };
            let time = draw_time(&mut self.random, Duration::from_millis(3000));
            self.after(time, Event::Compared(at, reading));
        }
        Ok(())
    }

    fn compared(&mut self, at: usize, reading: Reading) -> Result<(), String> {
        let Reading { mount, file: number, began, version, comparison, least } = reading;
        if mount != self.mounts[at].id {
            return Ok(());
        }
        if version < least {
            return Err(format!("mount {at} reads version {version} of file {number}, and {least} was current"));
        }
        self.mounts[at].cached.remove(&number);
        if let Some(until) = self.mounts[at].logic.valid_until(file(number), comparison) {
            assert!(until <= began + VALIDITY);
            self.mounts[at].cached.insert(number, Cached { version, until });
            // The last moment is the most dangerous one.
            let left = until.saturating_duration_since(self.clock(at)).div_f64(self.mounts[at].rate);
            self.after(left.saturating_sub(Duration::from_nanos(100)), Event::ReadAgain(at, number));
        }
        Ok(())
    }

    fn write(&mut self, at: usize) {
        let (now, number) = (self.clock(at), self.random.below(FILES as usize) as u64);
        let messages = self.mounts[at].logic.writes(file(number), now);
        self.send_home(at, messages);
        let time = draw_time(&mut self.random, Duration::from_secs(3));
        self.after(time, Event::Changed(at, number));
        let pause = draw_time(&mut self.random, Duration::from_secs(6));
        self.after(pause, Event::Write(at));
    }

    fn changed(&mut self, at: usize, number: u64) {
        let now = self.clock(at);
        let versions = &mut self.source[number as usize];
        versions.push(self.now);
        let version = versions.len() as u64 - 1;
        // The mount's own cache has its own changes.
        self.mounts[at].cached.remove(&number);
        self.mounts[at].waiting.push((number, version, now));
        let messages = self.mounts[at].logic.writes(file(number), now);
        self.send_home(at, messages);
        self.acknowledge(at);
        let soon = VISIBLE.mul_f64(self.random.part());
        self.after(soon, Event::Acknowledge(at));
        self.after(VISIBLE.div_f64(self.mounts[at].rate), Event::Acknowledge(at));
    }

    fn acknowledge(&mut self, at: usize) {
        let now = self.clock(at);
        let mount = &mut self.mounts[at];
        for (number, version, changed) in std::mem::take(&mut mount.waiting) {
            if mount.logic.may_acknowledge(file(number), changed, now) {
                self.with_permission += u64::from(now < changed + VISIBLE);
                let acknowledged = &mut self.acknowledged[number as usize];
                *acknowledged = version.max(*acknowledged);
            } else {
                mount.waiting.push((number, version, changed));
            }
        }
    }

    /// Waits until everything has come to rest. Then all mounts keep the files again, and a change is acknowledged at
    /// once.
    fn rest(&mut self) -> Result<(), String> {
        self.resting = true;
        self.run(REST)?;
        for number in 0..FILES {
            for (at, mount) in self.mounts.iter().enumerate() {
                let now = self.clock(at);
                let end = mount.logic.valid_until(file(number), mount.logic.compare(file(number), now));
                if end.is_none_or(|end| end <= now) {
                    return Err(format!("mount {at} never keeps file {number} again"));
                }
            }
        }
        let now = self.clock(0);
        let messages = self.mounts[0].logic.writes(file(0), now);
        self.send_home(0, messages);
        self.run(VISIBLE)?;
        let permitted = self.mounts[0].logic.may_acknowledge(file(0), self.clock(0), self.clock(0));
        permitted.then_some(()).ok_or_else(|| "mount 0 never may change a file again".to_owned())
    }

    /// Plans faults: each is a kind, a machine, a time in milliseconds and a length in milliseconds.
    fn plan(&mut self, faults: &[(u8, usize, u64, u64)]) {
        for (kind, machine, time, length) in faults {
            let at = machine % (self.mounts.len() + 1);
            let one = (at < self.mounts.len()).then_some(at);
            let event = match kind % 3 {
                0 => Event::Stop(one, Duration::from_millis(*length)),
                1 => Event::Restart(one),
                _ => Event::Lost(at.min(self.mounts.len() - 1)),
            };
            self.after(Duration::from_millis(*time), event);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_read_is_older_than_what_was_acknowledged(
        seed in any::<u64>(),
        mounts in 1usize..5,
        delay in prop::sample::select(vec![1u64, 20, 3000]),
        faults in prop::collection::vec((any::<u8>(), any::<usize>(), 0u64..20_000, 0u64..5_000), 0..12),
    ) {
        let mut world = World::new(seed, mounts, Duration::from_millis(delay));
        world.plan(&faults);
        world.run(END).map_err(TestCaseError::fail)?;
        // With messages that take seconds, leases end before they arrive.
        if delay < 3000 {
            world.rest().map_err(TestCaseError::fail)?;
        }
    }
}

#[test]
fn without_faults_changes_are_acknowledged_at_once_and_reads_come_from_the_cache() {
    let mut world = World::new(1, 3, Duration::from_millis(1));
    world.run(END).unwrap();
    world.rest().unwrap();
    assert!(world.with_permission > 20, "{} changes", world.with_permission);
    assert!(world.from_cache > 20, "{} reads", world.from_cache);
}
