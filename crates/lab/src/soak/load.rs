//! The load: many connections on one thread, up to a given number at the same time. When one ends, a new one is opened.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::time::Timespec;

use super::connection::{Connection, Step, Wants};
use super::mix::{File, Life};
use super::tally::Tally;
use crate::random::Random;

/// Time without a byte after which a connection counts as hanging. It is longer than every timeout of the service.
pub(super) const HANG: Duration = Duration::from_secs(45);
/// Interval at which silent connections are looked for, and at which the load reports.
const LOOK: Duration = Duration::from_secs(1);
const BUFFER_BYTES: usize = 128 << 10;

pub(super) struct Load<'a> {
    server: SocketAddr,
    files: &'a [File],
    random: Random,
    epoll: OwnedFd,
    connections: HashMap<u64, Connection>,
    next: u64,
    /// Whether the load ends: connections that pause before their next request are then closed.
    ending: bool,
    sleepers: BinaryHeap<Reverse<(Instant, u64)>>,
    buffer: Vec<u8>,
}

impl<'a> Load<'a> {
    pub(super) fn new(server: SocketAddr, files: &'a [File], random: Random) -> Result<Self> {
        Ok(Self {
            server,
            files,
            random,
            epoll: epoll::create(CreateFlags::CLOEXEC).context("epoll_create1")?,
            connections: HashMap::new(),
            next: 0,
            ending: false,
            sleepers: BinaryHeap::new(),
            buffer: vec![0; BUFFER_BYTES],
        })
    }

    /// Keeps `at_once` connections busy until `until`, then lets the present responses end. About once a second, calls
    /// `report` with the number of open connections.
    ///
    /// Must be called on a thread in the client host's namespace.
    pub(super) fn run(
        &mut self,
        at_once: usize,
        until: Instant,
        tally: &Tally,
        mut report: impl FnMut(usize),
    ) -> Result<()> {
        let mut next_look = Instant::now();
        loop {
            let now = Instant::now();
            self.ending = now >= until;
            let mut opened = 0;
            // Opens only a few in each pass of the loop: connections that all begin at the same time would be no mix.
            while now < until && self.connections.len() < at_once && opened < 8 {
                self.open(tally)?;
                opened += 1;
            }
            if now >= until && self.connections.is_empty() {
                return Ok(());
            }
            if now >= next_look {
                next_look = now + LOOK;
                self.give_up_silent(now, tally);
                report(self.connections.len());
            }
            while self.sleepers.peek().is_some_and(|Reverse((due, _))| *due <= now) {
                if let Some(Reverse((_, number))) = self.sleepers.pop() {
                    self.step(number, tally)?;
                }
            }
            let mut due = self.sleepers.peek().map_or(next_look, |Reverse((due, _))| (*due).min(next_look));
            if now < until && self.connections.len() < at_once {
                due = now; // more connections are to be opened
            }
            self.wait(due, tally)?;
        }
    }

    fn wait(&mut self, until: Instant, tally: &Tally) -> Result<()> {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).unwrap_or_default();
        let mut events = Vec::with_capacity(256);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            waited => {
                waited.context("epoll_pwait2")?;
            }
        }
        for event in &events {
            let epoll::Event { data, .. } = *event;
            self.step(data.u64(), tally)?;
        }
        Ok(())
    }

    fn open(&mut self, tally: &Tally) -> Result<()> {
        let connection = Connection::open(self.server, Life::draw(&mut self.random))?;
        let number = self.next;
        self.next += 1;
        epoll::add(&self.epoll, &connection.stream, EventData::new_u64(number), EventFlags::OUT | EventFlags::ONESHOT)
            .context("epoll_ctl")?;
        self.connections.insert(number, connection);
        tally.opened();
        Ok(())
    }

    fn step(&mut self, number: u64, tally: &Tally) -> Result<()> {
        let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
        let mut step = Step::default();
        let wants = connection.step(self.files, &mut self.buffer, &mut step)?;
        let watch = |flags| {
            epoll::modify(&self.epoll, &connection.stream, EventData::new_u64(number), flags | EventFlags::ONESHOT)
                .context("epoll_ctl")
        };
        match wants {
            Wants::Read => watch(EventFlags::IN)?,
            Wants::Sleep(_) if self.ending && connection.is_thinking() => drop(self.connections.remove(&number)),
            Wants::Sleep(until) => self.sleepers.push(Reverse((until, number))),
            Wants::End => drop(self.connections.remove(&number)),
        }
        tally.note(&step);
        Ok(())
    }

    fn give_up_silent(&mut self, now: Instant, tally: &Tally) {
        let silent = |(number, connection): (&u64, &Connection)| {
            (now.saturating_duration_since(connection.heard) > HANG).then_some(*number)
        };
        for number in self.connections.iter().filter_map(silent).collect::<Vec<_>>() {
            if let Some(mut connection) = self.connections.remove(&number) {
                let mut step = Step::default();
                connection.give_up(self.files, &mut step);
                tally.note(&step);
            }
        }
    }
}
