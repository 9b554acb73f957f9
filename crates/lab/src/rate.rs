//! The open-loop load: requests at a constant rate, however long the answers take.
//!
//! A request that finds no idle connection waits for one. Its latency counts from the time when it was due. So a slow
//! server cannot improve its figures by delaying requests.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::thread::set_current_timer_slack;
use rustix::time::Timespec;

use crate::host::Host;
use crate::http::{ResponseReader, get_request};

/// A run at a constant rate.
#[derive(Debug, Clone)]
pub struct Rate {
    server: SocketAddr,
    path: String,
    per_second: f64,
    duration: Duration,
}

/// Result of a run at a constant rate.
#[derive(Debug, Clone)]
pub struct RateReport {
    /// Number of requests that were due in the measured time.
    pub due: u64,
    /// Number of these requests that were answered in full.
    pub answered: u64,
    /// Number of these answers whose status was not 2xx.
    pub status_errors: u64,
    /// Number of connections that failed during a request.
    pub connection_errors: u64,
    /// Time from when a request was due to its answer's last byte, in nanoseconds.
    pub latency_ns: Histogram<u64>,
    /// Delay of this client in writing requests that had an idle connection, in nanoseconds. The service does not cause
    /// this part of each latency.
    pub lateness_ns: Histogram<u64>,
}

impl RateReport {
    /// A quantile of the latency, such as 0.999.
    #[must_use]
    pub fn latency(&self, quantile: f64) -> Duration {
        Duration::from_nanos(self.latency_ns.value_at_quantile(quantile))
    }

    /// Fails unless every request was answered in full, with a 2xx status.
    ///
    /// # Errors
    /// When a request failed, was not answered in full, or was answered with another status.
    pub fn check(&self) -> Result<()> {
        let wrong = self.status_errors + self.connection_errors;
        ensure!(wrong == 0 && self.answered == self.due, "{} of {} requests failed", wrong.max(1), self.due);
        Ok(())
    }

    /// A quantile of the client's own lateness.
    #[must_use]
    pub fn lateness(&self, quantile: f64) -> Duration {
        Duration::from_nanos(self.lateness_ns.value_at_quantile(quantile))
    }
}

const CONNECTIONS: usize = 16;

/// Time at the beginning of a run in which requests are sent but not measured.
const WARM_UP: Duration = Duration::from_millis(500);

/// Longest wait for answers after the last request was due.
const GRACE: Duration = Duration::from_secs(5);

impl Rate {
    /// `per_second` GETs of `path`, over 16 connections, for 3 seconds after a warm-up of half a second.
    #[must_use]
    pub fn new(server: SocketAddr, path: impl Into<String>, per_second: f64) -> Self {
        Self { server, path: path.into(), per_second, duration: Duration::from_secs(3) }
    }

    /// Sets the measured time, which begins after the warm-up.
    #[must_use]
    pub fn duration(mut self, duration: Duration) -> Self {
        self.duration = duration;
        self
    }

    /// Number of requests in a run, including the warm-up.
    pub(crate) fn requests(&self) -> f64 {
        self.per_second * (WARM_UP + self.duration).as_secs_f64()
    }

    /// Runs the load on `host`, on one thread.
    ///
    /// # Errors
    /// When a connection cannot be made or a response cannot be understood.
    pub fn run(&self, host: &Host) -> Result<RateReport> {
        host.run(|| Run::new(self)?.run())?
    }
}

struct Connection {
    stream: TcpStream,
    /// Time when the request that this connection carries was due; `None` while it is idle.
    due: Option<Instant>,
    reader: ResponseReader,
}

struct Run<'a> {
    rate: &'a Rate,
    request: Vec<u8>,
    epoll: OwnedFd,
    connections: Vec<Connection>,
    idle: VecDeque<usize>,
    /// Due times of requests that have no connection yet.
    waiting: VecDeque<Instant>,
    measured_from: Instant,
    report: RateReport,
    buffer: Vec<u8>,
}

impl<'a> Run<'a> {
    fn new(rate: &'a Rate) -> Result<Self> {
        // Without this a wake-up may be 50 us late.
        set_current_timer_slack(NonZeroU64::new(1)).context("prctl(PR_SET_TIMERSLACK)")?;
        let histogram = || Histogram::new_with_bounds(1, 3_600_000_000_000, 3).context("making a histogram");
        let mut run = Self {
            rate,
            request: get_request(rate.server, &rate.path, &[]).into_bytes(),
            epoll: epoll::create(CreateFlags::CLOEXEC).context("epoll_create1")?,
            connections: Vec::new(),
            idle: (0..CONNECTIONS).collect(),
            waiting: VecDeque::new(),
            measured_from: Instant::now(),
            report: RateReport {
                due: 0,
                answered: 0,
                status_errors: 0,
                connection_errors: 0,
                latency_ns: histogram()?,
                lateness_ns: histogram()?,
            },
            buffer: vec![0; 256 << 10],
        };
        for number in 0..CONNECTIONS {
            let connection = run.connect(number)?;
            run.connections.push(connection);
        }
        Ok(run)
    }

    fn connect(&self, number: usize) -> Result<Connection> {
        let server = self.rate.server;
        let stream = TcpStream::connect(server).with_context(|| format!("connecting to {server}"))?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        epoll::add(&self.epoll, &stream, EventData::new_u64(number as u64), EventFlags::IN).context("epoll_ctl")?;
        Ok(Connection { stream, due: None, reader: ResponseReader::default() })
    }

    fn run(mut self) -> Result<RateReport> {
        let begin = Instant::now();
        self.measured_from = begin + WARM_UP;
        let total = WARM_UP + self.rate.duration;
        let count = (total.as_secs_f64() * self.rate.per_second) as u64;
        let due_at = |number: u64| begin + Duration::from_secs_f64(number as f64 / self.rate.per_second);
        let mut number = 0;
        let mut events = Vec::with_capacity(CONNECTIONS);
        loop {
            while number < count && due_at(number) <= Instant::now() {
                self.on_due(due_at(number))?;
                number += 1;
            }
            let now = Instant::now();
            let all_sent = number == count;
            if all_sent && (self.idle.len() == self.connections.len() || now > begin + total + GRACE) {
                return Ok(self.report);
            }
            let until = if all_sent { begin + total + GRACE } else { due_at(number) };
            let left = Timespec::try_from(until.saturating_duration_since(now)).unwrap_or_default();
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&left)) {
                Err(rustix::io::Errno::INTR) => {}
                waited => {
                    waited.context("epoll_pwait2")?;
                }
            }
            for event in &events {
                let Event { data, .. } = *event;
                self.on_readable(usize::try_from(data.u64())?)?;
            }
        }
    }

    fn on_due(&mut self, due: Instant) -> Result<()> {
        if due >= self.measured_from {
            self.report.due += 1;
        }
        let Some(number) = self.idle.pop_front() else {
            self.waiting.push_back(due);
            return Ok(());
        };
        if due >= self.measured_from {
            self.report.lateness_ns.saturating_record(nanoseconds(due.elapsed()));
        }
        self.send(number, due)
    }

    fn send(&mut self, number: usize, due: Instant) -> Result<()> {
        let connection = &mut self.connections[number];
        connection.due = Some(due);
        connection.reader = ResponseReader::default();
        match connection.stream.write(&self.request) {
            Ok(written) if written == self.request.len() => Ok(()),
            // A request is small and the connection is idle, so the socket's send buffer has room, unless the
            // connection is broken.
            Ok(_) => bail!("a connection accepted only a part of a request"),
            Err(_) => self.on_broken(number),
        }
    }

    fn on_readable(&mut self, number: usize) -> Result<()> {
        loop {
            let connection = &mut self.connections[number];
            let read = match connection.stream.read(&mut self.buffer) {
                Ok(0) => return self.on_broken(number),
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return self.on_broken(number),
            };
            let used = connection.reader.feed(&self.buffer[..read], &mut |_| {})?;
            if used < read {
                bail!("{} bytes after a response", read - used);
            }
            if connection.reader.is_done() {
                self.on_answer(number)?;
            }
            if read < self.buffer.len() {
                return Ok(());
            }
        }
    }

    fn on_answer(&mut self, number: usize) -> Result<()> {
        let connection = &mut self.connections[number];
        let due = connection.due.take().context("a response without a request")?;
        if due >= self.measured_from {
            self.report.answered += 1;
            self.report.status_errors += u64::from(!(200..300).contains(&connection.reader.status()));
            self.report.latency_ns.saturating_record(nanoseconds(due.elapsed()));
        }
        self.next(number)
    }

    /// Gives an idle connection to the request that has waited longest, if there is one.
    fn next(&mut self, number: usize) -> Result<()> {
        match self.waiting.pop_front() {
            Some(due) => self.send(number, due),
            None => {
                self.idle.push_back(number);
                Ok(())
            }
        }
    }

    fn on_broken(&mut self, number: usize) -> Result<()> {
        let was_asked = self.connections[number].due.take().is_some();
        self.report.connection_errors += u64::from(was_asked);
        // Closing the old socket removes it from the epoll set.
        self.connections[number] = self.connect(number)?;
        if was_asked { self.next(number) } else { Ok(()) }
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
