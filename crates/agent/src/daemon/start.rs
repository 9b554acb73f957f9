//! Start of the daemon: first the steps that need root's privileges, then the threads, then the event loop. The *store*
//! has the payloads of programs under `shunt run`. The *steering programs* are the BPF programs of handoffs. A *layout*
//! is a version of these programs' maps. A *digest* is the SHA-256 of a file.

use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use rustix::process::{Resource, Rlimit};
use shunt_handoff::Older;
use shunt_handoff::reading::Reads;
use shunt_handoff::sender::{SenderLimits, Senders};
use shunt_logic::logic::Store as StoreOfLogic;
use shunt_logic::{Actions, Logic};

use super::{Daemon, Listeners, SetLog, Signals};
use crate::backend::digests::Digests;
use crate::backend::paths::Paths;
use crate::backend::steering::BackendSteering;
use crate::detach::Beginning;
use crate::errors::StartError;
use crate::frontend::steering::FrontendSteering;
use crate::kernel::Kernel;
use crate::os::alone::Alone;
use crate::os::poll::{Interest, Poll, Source};
use crate::os::ports::{self, Role};
use crate::os::views::{Sight, Views};
use crate::servers::board::BoardMemory;
use crate::slots::Slots;
use crate::store::programs::{self, Store, StoreError};
use crate::telemetry::gone::Gone;
use crate::telemetry::metrics::Endpoint;
use shunt_config::{BackendConfig, Config};
use shunt_host::errors::chain;
use shunt_host::interfaces::Sysfs;
use shunt_host::packets;
use shunt_host::sockets;
use shunt_transport::credentials::Credentials;

impl Listeners {
    fn open(config: &Config) -> Result<Self, StartError> {
        let address = config.listen;
        let peers = TcpListener::bind(address).map_err(|error| StartError::Listen { address, error })?;
        peers.set_nonblocking(true)?;
        let (local, place) =
            packets::listen(&config.socket, config.socket_group, config.asks_callers()).map_err(StartError::Socket)?;
        Ok(Self { local, place, peers, are_deaf: false, failed: 0 })
    }
}

fn serve_counters(config: &Config) -> Result<Option<Endpoint>, StartError> {
    let listen =
        |address| Endpoint::listen(address, &config.socket).map_err(|error| StartError::Metrics { address, error });
    config.metrics.map(listen).transpose()
}

impl Signals {
    fn watch(poll: &Poll) -> io::Result<Self> {
        let signals = Self::handle()?;
        poll.set(&signals.stop, Source::Signal, Interest::Readable)?;
        poll.set(&signals.reload, Source::Reload, Interest::Readable)?;
        Ok(signals)
    }

    fn handle() -> io::Result<Self> {
        let (stop, handler) = UnixStream::pair()?;
        stop.set_nonblocking(true)?;
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
            signal_hook::low_level::pipe::register(signal, handler.try_clone()?)?;
        }
        let (reload, handler) = UnixStream::pair()?;
        reload.set_nonblocking(true)?;
        signal_hook::low_level::pipe::register(signal_hook::consts::SIGHUP, handler)?;
        Ok(Self { stop, reload })
    }
}

/// Checks that senders can have the addresses of the configuration, and that no program listens at one of their ports.
fn check_senders(backend: &BackendConfig) -> Result<(), StartError> {
    for &address in &backend.addresses {
        sockets::is_ours((address, 0).into()).map_err(|error| StartError::Address { address, error })?;
    }
    Ok(sockets::none_listens_in(&backend.ports.0)?)
}

fn load_senders(config: &Config, reads: &Reads) -> Result<Option<Senders<BackendSteering>>, StartError> {
    let Some(backend) = &config.backend else {
        return Ok(None);
    };
    let limits = SenderLimits {
        senders: backend.senders,
        send_buffer_bytes: backend.send_buffer_bytes,
        memory_bytes: backend.socket_memory_bytes.unwrap_or_else(sockets::tcp_memory_bytes),
        park: backend.park,
        progress: backend.progress,
    };
    let programs = BackendSteering::load(config, &backend.interfaces, backend.ports.0.clone())?;
    let mut senders = Senders::new(programs, limits);
    senders.read_by(reads.clone());
    Ok(Some(senders))
}

fn load_kernel(config: &Config, poll: &Poll, now: Instant) -> Result<Kernel, StartError> {
    let frontend = config.frontend.as_ref();
    let frontend = frontend.map(|frontend| FrontendSteering::load(config, frontend)).transpose()?;
    let reads = Reads::new()?;
    let senders = load_senders(config, &reads)?;
    let paths = config.backend.as_ref().map(|backend| Paths::open(&backend.interfaces)).transpose()?;
    let peers = config.peers.iter().map(|peer| peer.name.clone()).collect();
    let mut kernel = Kernel::new(frontend, senders, paths, Digests::new()?, reads, peers, now);
    kernel.descriptor_limit = raise_descriptor_limit(config);
    watch_kernel(&kernel, poll)?;
    Ok(kernel)
}

fn begin_logic(config: &Config, kernel: &Kernel, store: Option<StoreOfLogic>, now: Instant) -> Logic<Kernel> {
    let netns = sockets::netns_cookie().unwrap_or(0);
    let mut logic = Logic::new(config.settings(&config.sender_ports(&[])), netns, store, now);
    logic.shared.servers.give_last(kernel.frontend.as_ref().map_or(&[], |frontend| frontend.left_rings()));
    logic
}

fn watch_kernel(kernel: &Kernel, poll: &Poll) -> io::Result<()> {
    if let Some(senders) = &kernel.senders {
        poll.set(senders.table().reports(), Source::Reports, Interest::Readable)?;
    }
    poll.set(kernel.digests.wake(), Source::Digests, Interest::Readable)?;
    poll.set(&kernel.reads, Source::Reads, Interest::Readable)
}

/// Opens the store, if the configuration has one. If not, removes from the kernel what an earlier agent with a store
/// has left there.
fn open_store(config: &Config, poll: &Poll) -> Result<Option<(Store, StoreOfLogic)>, StartError> {
    match &config.store {
        Some(store) => Ok(Some(Store::open(config, store, poll)?)),
        None => Ok(programs::detach(config).map(|()| None)?),
    }
}

impl Daemon {
    /// Loads the steering programs, or takes over those that an earlier agent has left, and opens both listening
    /// sockets. After SIGHUP, the configuration is read from `path`, and `set_log` sets its log level.
    ///
    /// # Errors
    /// Returns a [`StartError`]: why the agent cannot start.
    pub fn start(config: Config, path: &Path, set_log: SetLog) -> Result<Self, StartError> {
        let credentials = Credentials::read(&config.tls, &config.name)?;
        let callers = config.callers().map_err(StartError::Account)?;
        config.backend.as_ref().map_or(Ok(()), check_senders)?;
        let (poll, now) = (Poll::new()?, Instant::now());
        let alone = Alone::with(&config.pins)?;
        let pins = config.clone();
        let beginning = Beginning::of(&pins);
        let mut kernel = load_kernel(&config, &poll, now)?;
        let listeners = Listeners::open(&config)?;
        let metrics = serve_counters(&config)?;
        let (store, of_store) = open_store(&config, &poll)?.unzip();
        kernel.store = store.as_ref().map(|store| (store.holder, store.shelf.clone()));
        let signals = Signals::watch(&poll)?;
        listeners.watch(&poll)?;
        let logic = begin_logic(&config, &kernel, of_store, now);
        let board = BoardMemory::new(&logic.shared.board)?;
        beginning.has_worked();
        let sight = Sight::of(&config);
        let mut daemon = Self {
            config,
            path: path.into(),
            set_log,
            logic,
            kernel,
            actions: Actions::default(),
            is_acting: false,
            poll,
            now,
            board,
            connections: Slots::default(),
            gone: Gone::default(),
            callers,
            links: Slots::default(),
            arrived: Slots::default(),
            credentials,
            fetches_out: Slots::default(),
            fetches_in: Slots::default(),
            serving: None,
            store,
            reaching: Slots::default(),
            uplinks: None,
            sysfs: Some(Sysfs::open()),
            ports: Arc::default(),
            sight,
            packet: None,
            listeners,
            metrics,
            signals,
            drain: None,
            next_warning: now,
            _alone: alone,
        };
        let own = daemon.store.as_ref().map(|store| store.own_addresses().to_vec()).unwrap_or_default();
        daemon.event(|logic, call| logic.set_own_addresses(&own, call));
        Ok(daemon)
    }

    /// Starts the thread that keeps the steering programs on their interfaces. To be called once the agent has given up
    /// the privileges that this thread does not need, and before system calls are restricted.
    ///
    /// # Errors
    /// Returns the error if a socket or the thread cannot be made.
    pub fn start_ports(&mut self) -> io::Result<()> {
        let Some(sysfs) = self.sysfs.take() else { return Ok(()) };
        let frontend = self.kernel.frontend.as_ref().zip(self.config.frontend.as_ref());
        let frontend = frontend.map(|(steering, config)| (steering.tc_programs(), &config.interfaces));
        let backend = self.kernel.senders.as_ref().zip(self.config.backend.as_ref());
        let backend = backend.map(|(senders, config)| (senders.table().tc_programs(), &config.interfaces));
        let role = |(programs, interfaces): (_, &Vec<String>)| Role { programs, interfaces: interfaces.clone() };
        let roles = frontend.into_iter().chain(backend).map(role).collect();
        let mut views = Views::open(&self.config, self.sight.clone())?;
        let older = self.kernel.frontend.as_mut().and_then(FrontendSteering::take_out_older);
        ports::keep(roles, sysfs, Arc::clone(&self.ports), move || {
            views.look();
            older.iter().flat_map(Receiver::try_iter).for_each(take_out);
        })
    }

    /// Starts the thread that serves counters (`metrics`), if that is configured. To be called after privileges are
    /// given up, and before system calls are restricted.
    ///
    /// # Errors
    /// Returns the error if the thread cannot be made.
    pub fn serve_metrics(&mut self) -> io::Result<()> {
        self.metrics.take().map_or(Ok(()), Endpoint::serve)
    }

    /// Starts the store's thread, if there is a store. To be called after privileges are given up, and before system
    /// calls are restricted.
    ///
    /// # Errors
    /// Returns the [`StoreError`] if the thread, or the watch of this machine's addresses, cannot be started.
    pub fn start_store(&mut self) -> Result<(), StoreError> {
        self.store.as_mut().map_or(Ok(()), |store| store.start(&self.poll))
    }

    /// Starts the threads that compute digests of files, if this machine is a backend. To be called after privileges
    /// are given up, and before system calls are restricted.
    ///
    /// # Errors
    /// Returns the error if a thread cannot be made.
    pub fn start_digests(&self) -> io::Result<()> {
        self.kernel.senders.as_ref().map_or(Ok(()), |_| self.kernel.digests.start())
    }

    /// Starts the thread that looks up which connections still exist, if this machine is a frontend. To be called after
    /// privileges are given up, and before system calls are restricted.
    ///
    /// # Errors
    /// Returns the error if the thread cannot be made.
    pub fn start_census(&mut self) -> io::Result<()> {
        self.kernel.frontend.as_mut().map_or(Ok(()), |frontend| frontend.start_census())
    }
}

/// Takes the programs of another layout out of the kernel. To be called when all their connections have ended.
fn take_out(older: Older) {
    let layout = older.layout;
    match older.take_out() {
        Ok(()) => tracing::info!(layout, "the programs and maps of another layout are gone"),
        Err(error) => tracing::warn!(error = chain(&error), layout, "programs of another layout stay"),
    }
}

/// Raises RLIMIT_NOFILE to its maximum, and returns the limit. Each offer takes one descriptor, each sender two, and
/// each fetch three at most.
fn raise_descriptor_limit(config: &Config) -> u64 {
    let Rlimit { current, maximum } = rustix::process::getrlimit(Resource::Nofile);
    let raised = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let limit = if raised.is_ok() { maximum } else { current }.unwrap_or(u64::MAX);
    let senders = config.backend.as_ref().map_or(0, |backend| 2 * backend.senders as u64);
    let wanted = senders + config.limits.offers * u64::from(senders > 0) + 3 * config.limits.fetches as u64;
    if limit < wanted {
        tracing::info!(limit, wanted, "RLIMIT_NOFILE is lower than [limits] need: raise LimitNOFILE= in the unit");
    }
    limit
}
