//! The agent: one thread, one event loop. What it decides is in the files beside this one:
//!
//! * `servers`: connections of this machine's servers; `peers`: sessions with other agents;
//! * `claims`: this machine as a backend; `handoffs`: as a frontend; `fetches`: payloads that are relayed after all;
//! * `store`: the store of programs under `shunt run`; `reaching`: their connections to others; `ends`: which of their
//!   connections may carry references;
//! * `limits`: how much of all that there may be.
//! * `losses`: what becomes of payloads whose backend's agent is gone; `proving`: whether another has the same bytes;
//! * `uplinks`: by which port clients' ACKs leave for each backend; `paths`: whether payload reaches a client;
//! * `ports`: the steering programs stay on the interfaces, also on those that come later;
//! * `reads`: bytes that are not in memory; `drain`: how an agent ends.
//!
//! Nothing on the way of a handoff waits: frames for a peer are collected and leave together at the end of a turn.

use std::collections::HashSet;
use std::io::{self, Read};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Resource, Rlimit};
use shunt_handoff::reading::Reads;
use shunt_handoff::sender::{SenderLimits, Senders};
use shunt_sys::erase::wipe_stack;
use shunt_wire::local::{MAX_PACKET_BYTES, Reason};
use slab::Slab;

use crate::alone::{Alone, Beginning};
use crate::board::Board;
use crate::callers::Callers;
use crate::config::Config;
use crate::credentials::{Credentials, CredentialsError};
use crate::digests::Digests;
use crate::drain::Drain;
use crate::fetches::FetchOut;
use crate::handoffs::Canceller;
use crate::host;
use crate::incoming::{OncePerSecond, PerSecond, Waiting};
use crate::interfaces::Sysfs;
use crate::limits::Pressure;
use crate::losses::Losses;
use crate::metrics::Endpoint;
use crate::offers::Offers;
use crate::packets::{self, Place};
use crate::paths::Paths;
use crate::peers::Peer;
use crate::poll::{EVENTS_AT_ONCE, Interest, Poll, Source};
use crate::ports::Ports;
use crate::proving::Questions;
use crate::reaching::Reaching;
use crate::servers::Server;
use crate::serving::FetchIn;
use crate::stats::Counts;
use crate::steer::{BackendSteering, FrontendSteering, SteerError};
use crate::store::{self, Store, StoreError};
use crate::uplinks::Uplinks;
use crate::views::{self, Seen};
use crate::waiting::WaitingClaims;

/// Between two looks at what no event tells: offers that nobody claims, deadlines, senders that are done.
const TICK: Duration = Duration::from_millis(100);
/// Between two looks at how long our certificate is good.
const WARN_EVERY: Duration = Duration::from_secs(3600);

/// Why the agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The Unix socket.
    #[error("{0} (`socket` in the configuration)")]
    Socket(packets::ListenError),
    /// The TCP port.
    #[error("cannot listen at {address}: {error}; is it an address of this machine, and free? (`listen`)")]
    Listen {
        /// Where.
        address: std::net::SocketAddr,
        /// The kernel's answer.
        error: io::Error,
    },
    /// The counters' endpoint.
    #[error("cannot serve counters at {address}: {error}; is it an address of this machine, and free? (`metrics`)")]
    Metrics {
        /// Where.
        address: std::net::SocketAddr,
        /// The kernel's answer.
        error: io::Error,
    },
    /// The steering programs.
    #[error(transparent)]
    Steer(#[from] SteerError),
    /// `users`, `groups`, `observers`.
    #[error("{0}; name one that is there, or create it")]
    Account(String),
    /// `[backend] addresses`.
    #[error("[backend] addresses: {address}: {error}; name addresses of this machine, or leave the key out")]
    Address {
        /// Which.
        address: std::net::IpAddr,
        /// The kernel's answer.
        error: io::Error,
    },
    /// Certificates.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// `[store]`.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Anything else that the kernel refuses.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// All that one agent has.
pub struct Agent {
    pub(crate) config: Config,
    pub(crate) poll: Poll,
    pub(crate) board: Board,
    pub(crate) counts: Counts,
    pub(crate) frontend: Option<FrontendSteering>,
    pub(crate) senders: Option<Senders<BackendSteering>>,
    pub(crate) offers: Offers,
    pub(crate) waiting: WaitingClaims,
    pub(crate) losses: Losses,
    pub(crate) digests: Digests,
    pub(crate) reads: Reads,
    /// Requests of peers that wait for a file's digest.
    pub(crate) questions: Questions,
    pub(crate) servers: Slab<Server>,
    pub(crate) next_worker: u32,
    pub(crate) pressure: Pressure,
    /// Handoffs to end at the end of this turn: peer, worker, handoff.
    pub(crate) given_up: HashSet<(u32, u32, u64)>,
    /// Claims in this turn whose frontends know that their digest is withdrawn, named alike.
    pub(crate) withdrawn: HashSet<(u32, u32, u64)>,
    /// Handoffs to cancel then.
    pub(crate) cancelled: HashSet<(Canceller, u64)>,
    pub(crate) peers: Vec<Peer>,
    pub(crate) credentials: Credentials,
    pub(crate) incoming: Waiting,
    pub(crate) callers: Callers,
    pub(crate) refusals: OncePerSecond,
    /// Handoffs and fetches that fail are told of, as far as there are not too many.
    pub(crate) failures: PerSecond<100>,
    pub(crate) fetches_out: Slab<FetchOut>,
    pub(crate) fetches_in: Slab<FetchIn>,
    pub(crate) store: Option<Store>,
    pub(crate) reaching: Slab<Reaching>,
    /// From where this machine is a frontend.
    pub(crate) uplinks: Option<Uplinks>,
    /// Until the programs are kept on their interfaces.
    pub(crate) sysfs: Option<Sysfs>,
    pub(crate) ports: Arc<Ports>,
    pub(crate) seen: Seen,
    /// From where it is a backend.
    pub(crate) paths: Option<Paths>,
    /// Peers with frames to send at the end of this turn.
    pub(crate) unsent: Vec<usize>,
    pub(crate) now: Instant,
    /// Keys of a TLS connection went through this turn.
    pub(crate) keys_passed: bool,
    /// Where a server's packet is read to; none while one is obeyed.
    pub(crate) packet: Option<Box<[u8; MAX_PACKET_BYTES]>>,
    local_listener: OwnedFd,
    local_place: Place,
    peer_listener: TcpListener,
    /// Nothing could be accepted: the listeners are not watched until the next tick, or the loop would spin.
    is_deaf: bool,
    /// Until it is served.
    metrics: Option<Endpoint>,
    /// Readable after a termination signal: the handler writes a byte.
    pub(crate) stop: UnixStream,
    pub(crate) drain: Option<Drain>,
    /// The same after SIGHUP.
    reload: UnixStream,
    next_warning: Instant,
    /// No other agent has the same pins.
    _alone: Alone,
}

impl Agent {
    /// Loads the steering programs, or takes over those that an earlier agent left, and opens both sockets.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub fn start(config: Config) -> Result<Self, AgentError> {
        let credentials = Credentials::read(&config.tls, &config.name)?;
        let callers = config.callers().map_err(AgentError::Account)?;
        for &address in config.backend.iter().flat_map(|backend| &backend.addresses) {
            host::is_ours((address, 0).into()).map_err(|error| AgentError::Address { address, error })?;
        }
        let poll = Poll::new()?;
        let lifetime = config.backend.as_ref().map_or(Duration::from_secs(30), |backend| backend.offer_lifetime);
        let names: Vec<&str> = config.peers.iter().map(|peer| peer.name.as_str()).collect();
        let (is_frontend, is_backend) = (config.frontend.is_some(), config.backend.is_some());
        let board = Board::new(&config.name, is_frontend, is_backend, lifetime.as_millis() as u32, &names)?;
        let alone = Alone::with(&config.pins)?;
        let pins = config.clone();
        let beginning = Beginning::of(&pins);
        let frontend = config.frontend.as_ref();
        let frontend = frontend.map(|frontend| FrontendSteering::load(&config, frontend)).transpose()?;
        let reads = Reads::new()?;
        let senders = Self::load_senders(&config, &reads)?;
        let paths = config.backend.as_ref().map(|backend| Paths::open(&backend.interfaces)).transpose()?;
        let peer_listener =
            TcpListener::bind(config.listen).map_err(|error| AgentError::Listen { address: config.listen, error })?;
        peer_listener.set_nonblocking(true)?;
        let (local_listener, local_place) =
            packets::listen(&config.socket, config.socket_group, config.asks_callers()).map_err(AgentError::Socket)?;
        let listen =
            |address| Endpoint::listen(address, &config.socket).map_err(|error| AgentError::Metrics { address, error });
        let metrics = config.metrics.map(listen).transpose()?;
        let store = config.store.as_ref().map(|store| Store::open(&config, store, &poll)).transpose()?;
        if store.is_none() {
            store::detach(&config)?; // of an earlier agent, which had one
        }
        let (stop, handler) = UnixStream::pair()?;
        stop.set_nonblocking(true)?;
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
            signal_hook::low_level::pipe::register(signal, handler.try_clone()?)?;
        }
        let (reload, handler) = UnixStream::pair()?;
        reload.set_nonblocking(true)?;
        signal_hook::low_level::pipe::register(signal_hook::consts::SIGHUP, handler)?;
        let digests = Digests::new()?;
        poll.set(digests.wake(), Source::Digests, Interest::Readable)?;
        if let Some(senders) = &senders {
            poll.set(senders.table().reports(), Source::Reports, Interest::Readable)?;
        }
        poll.set(&reads, Source::Reads, Interest::Readable)?;
        poll.set(&stop, Source::Signal, Interest::Readable)?;
        poll.set(&reload, Source::Reload, Interest::Readable)?;
        poll.set(&local_listener, Source::LocalListener, Interest::Readable)?;
        poll.set(&peer_listener, Source::PeerListener, Interest::Readable)?;
        let mut pressure = Pressure::new(config.peers.len());
        pressure.descriptor_limit = raise_descriptor_limit(&config);
        let (now, seen) = (Instant::now(), views::unseen(config.peers.len()));
        beginning.has_worked();
        Ok(Self {
            peers: config.peers.iter().map(|peer| Peer::new(peer, config.dials(peer), now)).collect(),
            config,
            poll,
            board,
            counts: Counts::default(),
            frontend,
            senders,
            offers: Offers::new(lifetime),
            waiting: WaitingClaims::default(),
            losses: Losses::default(),
            digests,
            reads,
            questions: Questions::default(),
            servers: Slab::new(),
            next_worker: 1,
            pressure,
            given_up: HashSet::new(),
            withdrawn: HashSet::new(),
            cancelled: HashSet::new(),
            credentials,
            incoming: Waiting::default(),
            callers,
            refusals: OncePerSecond::default(),
            failures: PerSecond::default(),
            fetches_out: Slab::new(),
            fetches_in: Slab::new(),
            store,
            reaching: Slab::new(),
            uplinks: None,
            sysfs: Some(Sysfs::open()),
            ports: Arc::default(),
            seen,
            paths,
            unsent: Vec::new(),
            now,
            keys_passed: false,
            packet: None,
            local_listener,
            local_place,
            peer_listener,
            is_deaf: false,
            metrics,
            stop,
            drain: None,
            reload,
            next_warning: now,
            _alone: alone,
        })
    }

    fn load_senders(config: &Config, reads: &Reads) -> Result<Option<Senders<BackendSteering>>, AgentError> {
        let Some(backend) = &config.backend else {
            return Ok(None);
        };
        let limits = SenderLimits {
            senders: backend.senders,
            send_buffer_bytes: backend.send_buffer_bytes,
            memory_bytes: backend.socket_memory_bytes.unwrap_or_else(host::tcp_memory_bytes),
            park: backend.park,
            progress: backend.progress,
        };
        let programs = BackendSteering::load(config, &backend.interfaces, backend.ports.0.clone())?;
        let mut senders = Senders::new(programs, limits);
        senders.read_by(reads.clone());
        Ok(Some(senders))
    }

    /// Has counters served, where that is configured: after privileges were given up, and before system calls are
    /// restricted.
    ///
    /// # Errors
    /// Where a thread cannot be made.
    pub fn serve_metrics(&mut self) -> Result<(), AgentError> {
        Ok(self.metrics.take().map_or(Ok(()), Endpoint::serve)?)
    }

    /// Has the store work, where there is one: after privileges were given up, and before system calls are restricted.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn start_store(&mut self) -> Result<(), AgentError> {
        Ok(self.store.as_mut().map_or(Ok(()), |store| store.start(&self.poll))?)
    }

    /// Has files digested, where this machine sends any: after privileges were given up, and before system calls are
    /// restricted.
    ///
    /// # Errors
    /// Where a thread cannot be made.
    pub fn start_digests(&self) -> Result<(), AgentError> {
        Ok(self.senders.as_ref().map_or(Ok(()), |_| self.digests.start())?)
    }

    /// Works until a termination signal, and then until what is under way has ended (`drain`).
    ///
    /// # Errors
    /// What stops the loop itself; a failing session or handoff does not.
    pub fn run(&mut self) -> Result<(), AgentError> {
        // Of an earlier agent: who sends them has lost its session with us.
        self.watch_regions(None);
        tracing::info!(name = self.config.name, socket = ?self.config.socket, listen = %self.config.listen, "ready");
        let mut ready = Vec::with_capacity(EVENTS_AT_ONCE);
        let mut next_tick = self.now;
        loop {
            self.now = Instant::now();
            if self.now >= next_tick {
                self.excuse_peers(self.now - next_tick);
                self.tick();
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
            self.abort_given_up();
            self.go_on_unproven();
            self.cancel_handoffs();
            if self.pressure.is_look_due() {
                self.look_at_limits();
            }
            if std::mem::take(&mut self.keys_passed) {
                wipe_stack();
            }
        }
    }

    fn handle(&mut self, source: Source) {
        match source {
            Source::Signal => {}
            Source::Reload => self.reload_credentials(),
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
                self.digests.quiet();
                self.answer_questions();
            }
            Source::Reaching(index) => self.on_reaching(index),
            Source::Routes => self.on_routes(),
            Source::Addresses => self.on_own_addresses(),
            Source::Reports => self.on_reports(),
        }
    }

    fn tick(&mut self) {
        if let Err(error) = self.board.beat() {
            tracing::error!(%error, "cannot write the board");
        }
        self.drain_all_offers();
        self.expire_offers();
        self.tend_peers();
        self.tend_incoming();
        self.tend_servers();
        self.tend_credentials();
        self.tend_senders();
        self.tend_waiting();
        self.tell_files();
        self.answer_questions();
        self.tend_fetches();
        self.tend_served();
        self.tend_reaching();
        self.tend_ends();
        self.tend_sources();
        self.tend_losses();
        if let Some(frontend) = &mut self.frontend {
            frontend.tend(self.now, self.counts.handoffs);
        }
        self.pressure.descriptor_limit = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        self.look_at_limits();
        if std::mem::take(&mut self.is_deaf) {
            let _ = self.poll.set(&self.local_listener, Source::LocalListener, Interest::Readable);
            let _ = self.poll.set(&self.peer_listener, Source::PeerListener, Interest::Readable);
        }
    }

    /// No descriptor or no memory: what wants to connect waits for the next tick.
    fn turn_deaf(&mut self, error: &io::Error) {
        self.counts.accept_failed += 1;
        tracing::error!(%error, "cannot accept a connection; trying again. RLIMIT_NOFILE may be too low");
        self.poll.remove(&self.local_listener);
        self.poll.remove(&self.peer_listener);
        self.is_deaf = true;
    }

    fn accept_server(&mut self) {
        match packets::accept(&self.local_listener) {
            Ok(Some(socket)) => self.add_server(socket),
            Ok(None) => {}
            Err(error) => self.turn_deaf(&error),
        }
    }

    fn accept_agent(&mut self) {
        match self.peer_listener.accept() {
            Ok((stream, from)) => self.add_incoming(stream, from),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if is_passing(error.kind()) => {}
            Err(error) => self.turn_deaf(&error),
        }
    }

    /// After SIGHUP: for connections that begin from here, and sessions of those that would no longer be let in end.
    fn reload_credentials(&mut self) {
        while (&self.reload).read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0) {}
        match self.credentials.renewed(&self.config.tls, &self.config.name, SystemTime::now()) {
            Ok(credentials) => {
                self.credentials = credentials;
                self.next_warning = self.now;
                tracing::info!("read the certificates again");
                self.recheck_sessions();
                if let Some(store) = &self.store {
                    store.orders.end_connections();
                }
            }
            Err(error) => tracing::error!(%error, "keeping the certificates as they were"),
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

    /// To be told at the end of the turn.
    pub(crate) fn mark_unsent(&mut self, peer: usize) {
        if !self.unsent.contains(&peer) {
            self.unsent.push(peer);
        }
    }

    pub(crate) fn count_refusal(&mut self, reason: Reason) {
        self.counts.ended[reason as usize] += 1;
    }
}

/// Of accept(2): of one connection that has ended already, or of nothing.
fn is_passing(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted)
}

/// Each offer is a descriptor, and each sender is two.
fn raise_descriptor_limit(config: &Config) -> u64 {
    let Rlimit { current, maximum } = rustix::process::getrlimit(Resource::Nofile);
    let raised = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let limit = if raised.is_ok() { maximum } else { current }.unwrap_or(u64::MAX);
    let senders = config.backend.as_ref().map_or(0, |backend| 2 * backend.senders as u64);
    let wanted = senders + config.limits.offers * u64::from(senders > 0) + 3 * config.limits.fetches as u64;
    if limit < wanted {
        tracing::info!(limit, wanted, "RLIMIT_NOFILE allows less than [limits]: LimitNOFILE= in the unit raises it");
    }
    limit
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Servers find nobody there rather than a socket that nobody reads.
        self.local_place.leave();
    }
}
