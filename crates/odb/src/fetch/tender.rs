//! The tender: a thread that orders attempts to connect to holders, so that no thread that needs bytes waits longer
//! than a second. Each holder has one attempt at a time, or two after it has come back. Each attempt runs in a separate
//! thread, which the tender starts. The tender itself waits only for tasks. A *holder* is the store that has a payload,
//! and the payload's *lease* the time for which the store keeps it. A *share* is a program's part of the right to fetch
//! the payload; its size is its *weight*. Unused shares go back to the holder. A *reference* names bytes of a payload.
//! The *agent* is Shunt's daemon on each machine.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shunt_sys::lock::MutexGuard;

use super::line::{Line, Sent};
use super::own::is_silence;
use super::way::{Attempt, Begins, Way};
use super::{Shared, Wanted};
use crate::hold::{Return, Returns};
use crate::reference::{Holder, Reference};
use crate::store::client::{Connection, QUICK};
use crate::store::messages::RETURN;
use crate::store::session::request;

/// Pause from the end of an attempt to the next one.
const RETRY: Duration = Duration::from_secs(1);
/// Time since the last request for a holder after which no more attempts are made for it: the default lease of a
/// payload.
const INTEREST: Duration = Duration::from_secs(120);
/// Most attempts under way. An attempt may take as long as this machine's agent waits for the other machine.
const ATTEMPTS_MAX: usize = 64;
/// Interval at which the tender tries again to send shares back.
const RETURNS_EVERY: Duration = Duration::from_millis(100);

/// A function that starts threads, and one that the tender calls.
#[derive(Clone, Copy, Debug)]
pub struct Threads {
    /// Starts a thread with this name. Returns false if no thread can be started.
    pub start: fn(&'static str, Box<dyn FnOnce() + Send>) -> bool,
    /// Called whenever the tender is woken. Returns true to be called again soon.
    pub tick: fn() -> bool,
}

impl Default for Threads {
    /// Starts threads of std. `tick` does nothing.
    fn default() -> Self {
        let start = |name: &'static str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.into()).spawn(work).is_ok()
        };
        Self { start, tick: || false }
    }
}

/// Connection to be made.
#[derive(Clone, Debug)]
pub(super) enum Task {
    /// To a holder, by this attempt and those that follow it.
    Reach(Holder, Arc<Way>, Attempt),
    /// To the store of this machine, which was silent.
    Own,
}

#[derive(Debug, Default)]
pub(super) struct Tasks {
    started: bool,
    ended: bool,
    woken: bool,
    attempts: usize,
    due: Vec<(Instant, Task)>,
}

impl Shared {
    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock()
    }

    /// Starts the tender, unless it runs. Returns false if no thread can be started.
    pub(super) fn start_tender(self: &Arc<Self>) -> bool {
        let mut tasks = self.tasks();
        if !tasks.started {
            let shared = Arc::clone(self);
            tasks.started = (self.threads.start)("shunt-tender", Box::new(move || shared.tend()));
        }
        tasks.started
    }

    /// Orders an attempt. If no thread can be started, the calling thread makes the attempt, and waits as long as the
    /// agent does.
    pub(super) fn begin(self: &Arc<Self>, task: Task) {
        if self.start_tender() { self.begin_at(Instant::now(), task) } else { self.attempt(task) }
    }

    /// Orders an attempt after a pause of [`RETRY`].
    pub(super) fn begin_later(self: &Arc<Self>, task: Task) {
        if self.start_tender() {
            return self.begin_at(Instant::now() + RETRY, task);
        }
        // If no thread can be started, the next caller that needs the connection makes the attempt.
        match task {
            Task::Reach(_, way, attempt) => way.is_not_made(attempt),
            Task::Own => self.own.speaks(None),
        }
    }

    fn begin_at(&self, then: Instant, task: Task) {
        self.tasks().due.push((then, task));
        self.changed.notify_all();
    }

    /// Wakes the tender.
    pub(super) fn wake(&self) {
        // A program that frees much memory calls this often. Only the first call before the tender wakes makes a system
        // call.
        if !std::mem::replace(&mut self.tasks().woken, true) {
            self.changed.notify_all();
        }
    }

    pub(super) fn end_tender(&self) {
        self.tasks().ended = true;
        self.changed.notify_all();
    }

    fn tend(self: &Arc<Self>) {
        let mut again = false;
        while let Some(due) = self.next_tasks(again) {
            for task in due {
                let shared = Arc::clone(self);
                let attempt = task.clone();
                let work = Box::new(move || {
                    shared.attempt(attempt);
                    shared.attempt_ends();
                });
                if !(self.threads.start)("shunt-reach", work) {
                    self.attempt(task);
                    self.attempt_ends();
                }
            }
            again = (self.threads.tick)();
        }
    }

    /// Waits for tasks. `None`: the tender is to end.
    fn next_tasks(&self, again: bool) -> Option<Vec<Task>> {
        let mut tasks = self.tasks();
        let begun = Instant::now();
        loop {
            let now = Instant::now();
            if tasks.ended {
                return None;
            }
            let mut ready = Vec::new();
            while tasks.attempts < ATTEMPTS_MAX
                && let Some(at) = tasks.due.iter().position(|(then, _)| *then <= now)
            {
                ready.push(tasks.due.swap_remove(at).1);
                tasks.attempts += 1;
            }
            if std::mem::take(&mut tasks.woken) || !ready.is_empty() || (again && now - begun >= RETURNS_EVERY) {
                return Some(ready);
            }
            let next = tasks.due.iter().map(|(then, _)| *then).filter(|then| *then > now).min();
            let next = [next, again.then(|| begun + RETURNS_EVERY)].into_iter().flatten().min();
            tasks = match next {
                None => self.changed.wait(tasks),
                Some(next) => self.changed.wait_timeout(tasks, next - now).0,
            };
        }
    }

    fn attempt_ends(&self) {
        self.tasks().attempts -= 1;
        self.changed.notify_all();
    }

    /// Makes an attempt. It waits for agents and stores, in its own thread if one could be started.
    fn attempt(self: &Arc<Self>, task: Task) {
        let is_over = match &task {
            Task::Reach(holder, way, attempt) => match way.begins(*attempt, INTEREST) {
                Begins::Never => true,
                Begins::Later => false,
                Begins::Now => way.ends(*attempt, self.reach(*holder, way).ok()),
            },
            Task::Own => match self.open() {
                Err(error) if is_silence(&error) => false,
                opened => {
                    self.own.speaks(opened.ok());
                    true
                }
            },
        };
        if !is_over {
            self.begin_later(task);
        }
    }

    /// Connects to the store of this machine.
    pub(super) fn open(&self) -> io::Result<Connection> {
        let connection = Connection::open_within(&self.path, QUICK)?;
        (self.connected)(&connection);
        Ok(connection)
    }

    /// Connects to a holder through this machine's agent, which may have been started again. If the holder was lost,
    /// this succeeds only after the holder has also answered a request.
    fn reach(self: &Arc<Self>, holder: Holder, way: &Way) -> io::Result<Line> {
        // The reference is read now, and asked for below even if the holder is no longer lost by then: this attempt may
        // be an old one.
        let to_ask = way.to_ask();
        // Connects to this machine's store, too. By that connection the store counts this process, even if the process
        // only passes references on and gives shares back.
        let _ = self.ask(|_| Ok(()));
        let open = || Connection::open_within(&self.path, QUICK);
        let introducer = self.introducers.take(open)?;
        let (reached, introducer) = match introducer.reach(holder) {
            Ok(reached) => (reached, introducer),
            Err(_) => {
                drop(introducer);
                let another = self.introducers.take(open)?;
                (another.reach(holder)?, another)
            }
        };
        introducer.keep();
        let why = "this machine's agent has no such peer, cannot reach it, or may not fetch from it";
        let channel = reached.ok_or_else(|| io::Error::new(io::ErrorKind::HostUnreachable, why))?;
        let mut line = Line::new(channel);
        if let Some(reference) = to_ask {
            line.fetch(&mut Vec::new(), &mut [&mut Wanted { reference, into: &mut [0] }], &|| ())?;
        }
        Ok(line)
    }

    /// Sends shares back, as far as that takes no waiting. Returns true if some could not go yet.
    pub(super) fn send_returns(self: &Arc<Self>, returns: &Returns) -> bool {
        self.sort_returns(returns);
        let ways: Vec<(Holder, Arc<Way>)> =
            self.ways.lock().iter().map(|(holder, way)| (*holder, Arc::clone(way))).collect();
        let mut owes = false;
        for (holder, way) in ways {
            let taken = way.take_returns(|attempt| self.begin(Task::Reach(holder, Arc::clone(&way), attempt)));
            if let Some((mut turn, shares)) = taken
                // If the connection has broken, the shares are dropped; their weight ends with the payload's lease.
                && let Ok(posted) = turn.line().and_then(|line| line.post(&shares))
            {
                turn.put_back();
                way.give_back(shares[posted..].to_vec());
            }
            owes |= way.owes();
        }
        self.own.lock().mapped.retain(|_, mapped| mapped.as_ref().is_none_or(|mapped| mapped.is_live()));
        owes
    }

    fn sort_returns(&self, returns: &Returns) {
        let mut by_holder: HashMap<Holder, Vec<Sent>> = HashMap::new();
        for Return { payload, weight, touched } in returns.take() {
            let about = Reference { payload, weight, offset: 0, length: 1 };
            by_holder.entry(payload.holder).or_default().push(request(RETURN, &about, touched));
        }
        for (holder, shares) in by_holder {
            self.way(holder).give_back(shares);
        }
    }
}
