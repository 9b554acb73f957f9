//! The daemon: one thread with one event loop. It passes events to the logic (crates/logic), and carries out the
//! actions that the logic asks for.
//!
//! A *handoff* lets a peer's machine send one payload on a client's connection. No step of a handoff blocks the loop.
//! Frames for a peer are collected, and leave together at the end of a turn. A *server* is a program of this machine
//! that is connected to the agent, and a *peer* another machine's agent. An *offer* is a payload that a server holds
//! ready. A *sender* is this machine's kernel socket for a client of a peer. A *store* has the payloads of programs
//! under `shunt run`. A *fetch* brings a payload through both agents to the frontend's server. A *turn* is one pass of
//! the event loop.

mod act;
mod connections;
mod drain;
mod examined;
mod fetching;
mod incoming;
mod links;
mod reaching;
mod reading;
mod reload;
mod routes;
mod sending;
mod serving;
mod start;
mod stats;
mod store;

use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::Resource;
use shunt_logic::limits::Descriptors;
use shunt_logic::logic::{Call, Usage};
use shunt_logic::{Actions, Logic};
use shunt_sys::erase::wipe_stack;
use shunt_wire::local::MAX_PACKET_BYTES;

use crate::backend::serving::Serving;
use crate::frontend::fetching::Fetching;
use crate::frontend::uplinks::Uplinks;
use crate::kernel::Kernel;
use crate::os::alone::Alone;
use crate::os::poll::{EVENTS_AT_ONCE, Interest, Poll, Source};
use crate::os::ports::Ports;
use crate::os::views::Sight;
use crate::peers::arrived::Arrived;
use crate::peers::link::Link;
use crate::servers::board::BoardMemory;
use crate::servers::connection::Connection;
use crate::slots::Slots;
use crate::store::programs::Store;
use crate::telemetry::gone::Gone;
use crate::telemetry::metrics::Endpoint;
use shunt_config::Config;
use shunt_config::callers::Callers;
use shunt_host::interfaces::Sysfs;
use shunt_host::packets::{self, Place};
use shunt_transport::Transport;
use shunt_transport::credentials::Credentials;

/// Polling interval for conditions that no event reports: offers that nobody claims, deadlines, senders that are done.
const TICK: Duration = Duration::from_millis(100);
/// Interval between two checks of how long this agent's certificate is still valid.
const WARN_EVERY: Duration = Duration::from_secs(3600);

/// State of a drain. It begins with the first termination signal. From then on nothing new begins, and work under way
/// may end.
struct Drain {
    /// Time at which the drain ends, whatever is left.
    until: Instant,
    /// Last time at which a handoff, an offer or another piece of work was under way.
    busy: Instant,
}

/// Function that sets another log level. Its error is a sentence.
pub type SetLog = Box<dyn Fn(&str) -> Result<(), String>>;

/// Sockets that servers (`local`) and other agents (`peers`) connect to.
struct Listeners {
    local: OwnedFd,
    place: Place,
    peers: TcpListener,
    /// accept(2) has failed. The sockets are not watched until the next tick, because the loop would spin otherwise.
    are_deaf: bool,
    /// Number of times that no connection could be accepted, because descriptors or memory were short.
    failed: u64,
}

/// Sockets that become readable after a signal, because the signal's handler writes a byte.
struct Signals {
    /// SIGTERM, SIGINT.
    stop: UnixStream,
    /// SIGHUP.
    reload: UnixStream,
}

/// State of one agent.
pub struct Daemon {
    pub(crate) config: Config,
    /// Path of the configuration file.
    path: PathBuf,
    set_log: SetLog,
    pub(crate) logic: Logic<Kernel>,
    pub(crate) kernel: Kernel,
    pub(crate) actions: Actions<Kernel>,
    /// Actions are being carried out. Actions that they cause are queued, and carried out after them.
    is_acting: bool,
    pub(crate) poll: Poll,
    pub(crate) now: Instant,
    pub(crate) board: BoardMemory,
    /// Connections of servers.
    pub(crate) connections: Slots<Connection>,
    /// Sums of the counters of servers that are gone.
    pub(crate) gone: Gone,
    pub(crate) callers: Callers,
    /// Connections with peers.
    pub(crate) links: Slots<Link>,
    /// Connections that other agents have made, before the first frame has arrived. This frame says what a connection
    /// is for.
    pub(crate) arrived: Slots<Arrived>,
    pub(crate) credentials: Credentials,
    pub(crate) fetches_out: Slots<Fetching>,
    pub(crate) fetches_in: Slots<Serving>,
    /// The connection on which a peer has just asked for a fetch, until the fetch is served or refused.
    pub(crate) serving: Option<Arrived>,
    pub(crate) store: Option<Store>,
    /// Connections to other stores that are being made.
    pub(crate) reaching: Slots<Transport>,
    /// The thread that looks up routes. `None` until it starts, and on a machine that is no frontend.
    pub(crate) uplinks: Option<Uplinks>,
    /// View of the interfaces, for the thread (`ports`) that keeps the steering programs (BPF) on them. `None` once
    /// that thread has started.
    pub(crate) sysfs: Option<Sysfs>,
    pub(crate) ports: Arc<Ports>,
    /// Faults of the routes to each peer, as the thread of `ports` last saw them.
    pub(crate) sight: Sight,
    /// Buffer for a server's packet; `None` while a packet is being processed.
    pub(crate) packet: Option<Box<[u8; MAX_PACKET_BYTES]>>,
    listeners: Listeners,
    /// Listening socket for the threads that serve the counters. `None` without `metrics` in the configuration, and
    /// once these threads have started.
    metrics: Option<Endpoint>,
    signals: Signals,
    drain: Option<Drain>,
    next_warning: Instant,
    /// Lock that ensures that no other agent uses the same pins (BPF programs and maps, as files in bpffs).
    _alone: Alone,
}

impl Listeners {
    fn watch(&self, poll: &Poll) -> io::Result<()> {
        poll.set(&self.local, Source::LocalListener, Interest::Readable)?;
        poll.set(&self.peers, Source::PeerListener, Interest::Readable)
    }
}

/// Error that has stopped the event loop.
#[derive(Debug, thiserror::Error)]
#[error("cannot wait for events: {0}")]
pub struct LoopError(#[from] io::Error);

impl Daemon {
    /// Passes an event to the logic, and carries out the actions that result.
    pub(crate) fn event<R>(&mut self, event: impl FnOnce(&mut Logic<Kernel>, &mut Call<'_, Kernel>) -> R) -> R {
        let Self { logic, kernel, actions, now, .. } = self;
        let answer = event(logic, &mut Call { now: *now, machine: kernel, actions });
        self.act();
        answer
    }

    /// Runs the event loop until a termination signal, and then until the drain ends (`drain`).
    ///
    /// # Errors
    /// Returns the kernel's error of epoll_wait(2). A session or handoff that fails does not stop the loop.
    pub fn run(&mut self) -> Result<(), LoopError> {
        // Backends may still send payloads for handoffs from before this start. Their agents have lost the session with
        // the earlier agent of this machine.
        self.event(|logic, call| logic.watch_regions(call));
        tracing::info!(name = self.config.name, socket = ?self.config.socket, listen = %self.config.listen, "ready");
        let mut ready = Vec::with_capacity(EVENTS_AT_ONCE);
        let mut next_tick = self.now;
        loop {
            self.now = Instant::now();
            self.kernel.now = self.now;
            if self.now >= next_tick {
                self.tick(self.now - next_tick);
                if self.is_drained() {
                    return Ok(());
                }
                next_tick = self.now + TICK;
            }
            self.flush_peers();
            self.poll.wait(&mut ready, next_tick.saturating_duration_since(self.now))?;
            for source in &ready {
                if *source == Source::Signal && self.on_stop() {
                    tracing::info!("stopping");
                    return Ok(());
                }
                self.handle(*source);
            }
            self.event(Logic::end_turn);
            if self.logic.is_look_due() {
                self.look_at_limits();
            }
            if std::mem::take(&mut self.logic.shared.keys_passed) {
                wipe_stack();
            }
        }
    }

    fn handle(&mut self, source: Source) {
        match source {
            Source::Signal => {}
            Source::Reload => self.reload(),
            Source::LocalListener => self.accept_server(),
            Source::PeerListener => self.accept_agent(),
            Source::Local(index) => self.on_server(index),
            Source::Peer(index) => self.on_peer(index),
            Source::Incoming(index) => self.on_incoming(index),
            Source::FetchOut(index) => self.on_fetch_out(index),
            Source::FetchReader(index) => self.on_fetch_reader(index),
            Source::FetchIn(index) => self.on_fetch_in(index),
            Source::Sender(index) => self.on_sender(index),
            Source::Store => self.on_wishes(),
            Source::Reads => self.on_reads(),
            Source::Digests => {
                self.kernel.digests.quiet();
                self.event(Logic::answer_questions);
            }
            Source::Reaching(index) => self.on_reaching(index),
            Source::Routes => self.on_routes(),
            Source::Addresses => self.on_own_addresses(),
            Source::Reports => self.on_reports(),
        }
    }

    fn tick(&mut self, late: Duration) {
        if let Err(error) = self.board.beat() {
            tracing::error!(%error, "cannot write the board");
        }
        self.logic.excuse_peers(late, self.now);
        self.read_all_offers();
        self.listen_again();
        self.event(Logic::tick);
        self.tend_incoming();
        self.tend_credentials();
        self.tend_senders();
        self.tend_waiting();
        self.tell_files();
        self.tend_reaching();
        let handoffs = self.logic.shared.counts.handoffs;
        if let Some(frontend) = &mut self.kernel.frontend {
            frontend.tend(self.now, handoffs);
        }
        self.kernel.descriptor_limit = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        self.look_at_limits();
        if std::mem::take(&mut self.listeners.are_deaf) {
            let _ = self.listeners.watch(&self.poll);
        }
    }

    /// Compares everything that has a limit with its limit.
    fn look_at_limits(&mut self) {
        self.note_descriptors();
        self.kernel.keep_room();
        self.fail_ended();
        let descriptors = Descriptors { open: self.kernel.descriptors(), limit: self.kernel.descriptor_limit };
        let usage = Usage { handoffs: self.handoffs_by_peer(), sending: self.sending_by_peer(), descriptors };
        self.event(|logic, call| logic.look_at_limits(&usage, call));
    }

    /// Updates the number of descriptors that do not belong to senders (`Kernel::other_descriptors`).
    pub(crate) fn note_descriptors(&mut self) {
        let logic = &self.logic;
        let few = 32 + self.config.peers.len() + logic.incoming.len();
        let store = self.store.as_ref().map_or(0, |store| store.counters.descriptors());
        let reaching = logic.store.as_ref().map_or(0, |store| store.reaching.len());
        let fetches = 3 * logic.frontend.fetches.len() + 2 * logic.backend.served.len();
        let all = few + store + reaching + 2 * logic.shared.servers.len() + logic.backend.offers.len() + fetches;
        self.kernel.other_descriptors = all as u64;
    }

    /// Returns whether one more descriptor may be opened. If descriptors are short, first closes parked senders, which
    /// wait for their next payload.
    pub(crate) fn has_descriptors(&mut self) -> bool {
        self.note_descriptors();
        let has = shunt_logic::machine::Machine::has_descriptors(&mut self.kernel);
        self.fail_ended();
        has
    }

    /// Stops accepting until the next tick, because there is no descriptor or no memory for a new connection.
    fn turn_deaf(&mut self, error: &io::Error) {
        self.listeners.failed += 1;
        tracing::error!(%error, "cannot accept a connection; trying again. RLIMIT_NOFILE may be too low");
        self.poll.remove(&self.listeners.local);
        self.poll.remove(&self.listeners.peers);
        self.listeners.are_deaf = true;
    }

    fn accept_server(&mut self) {
        match packets::accept(&self.listeners.local) {
            Ok(Some(socket)) => self.add_server(socket),
            Ok(None) => {}
            Err(error) => self.turn_deaf(&error),
        }
    }

    fn accept_agent(&mut self) {
        match self.listeners.peers.accept() {
            Ok((stream, from)) => self.add_incoming(stream, from),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if is_passing(error.kind()) => {}
            Err(error) => self.turn_deaf(&error),
        }
    }

    fn tend_credentials(&mut self) {
        if self.now < self.next_warning {
            return;
        }
        self.next_warning = self.now + WARN_EVERY;
        if let Some(warning) = self.credentials.warning(SystemTime::now()) {
            tracing::warn!("{warning}");
        }
    }
}

/// Returns whether accept(2) failed only because a connection had ended already, or a signal interrupted the call.
fn is_passing(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted)
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Without the socket's name, servers fail to connect at once. Otherwise they would wait at a socket that nobody
        // reads.
        self.listeners.place.leave();
    }
}
