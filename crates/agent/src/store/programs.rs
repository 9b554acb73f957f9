//! The service for programs under `shunt run` on this machine (docs/odb.md; `[store]` in the configuration). The store
//! runs in a separate thread (shunt_odb::store), so that copying and encrypting bodies delays no handoff. The *store*
//! has the bodies (payloads) that this machine's programs have written, and a *holder* is a store by its name. The
//! daemon's thread does the handshakes with other agents (daemon/reaching.rs). The store's thread passes programs'
//! requests (wishes) to the daemon's thread by a queue and an eventfd(2).

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::Resource;
use shunt_logic::servers::{Caller, May};
use shunt_negotiation::{Ends, NegotiationError, Speakers};
use shunt_odb::reference::Holder;
use shunt_odb::store::Limits;
use shunt_odb::store::caller::Caller as Program;
use shunt_odb::store::pinned::Shelf;
use shunt_odb::store::server::{self, Counters, Orders, Server};
use shunt_odb::store::usage::Usage;
use shunt_sys::cgroup;
use shunt_sys::lock::Mutex;

use super::ends::{self, SourcesMemory};
use crate::os::own_addresses::{self, OwnAddresses};
use crate::os::poll::{Interest, Poll, Source};
use crate::os::privileges;
use shunt_config::callers::Callers;
use shunt_config::{Config, StoreConfig};
use shunt_host::packets::{self, Place};

/// Error of the store's start.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The Unix socket cannot be made.
    #[error("{0} ([store] `socket` in the configuration)")]
    Socket(packets::ListenError),
    /// A user or group that `users` or `groups` of [store] names does not exist on this machine.
    #[error("{0} ([store] `users` and `groups` in the configuration)")]
    Account(String),
    /// `cgroup` of the configuration cannot be used.
    #[error("`cgroup`: {0}")]
    Group(String),
    /// The negotiation cannot be loaded. These are the BPF programs that find out, in the TCP handshake, whether both
    /// ends run under `shunt run`.
    #[error(transparent)]
    Negotiation(#[from] NegotiationError),
    /// Another system call has failed.
    #[error("cannot start the store: {0}")]
    Io(#[from] io::Error),
}

/// The store's access to the agent: asks who a program is, and passes on programs' wishes.
struct Link {
    callers: Callers,
    wishes: Sender<Wish>,
    wake: Arc<OwnedFd>,
}

/// A program's request to the agent.
pub(crate) enum Wish {
    /// Connect the program to another store.
    Reach { program: u64, holder: Holder },
    /// Let the program hand off its connections.
    HandOff { program: u64, caller: Program },
}

impl Link {
    fn wish(&self, wish: Wish) {
        let _ = self.wishes.send(wish);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl server::Agent for Link {
    fn admit(&mut self, program: &OwnedFd) -> Option<Program> {
        let Caller { pid: process, uid: user, gid: group, may } = self.callers.ask(program).ok()?;
        (may == May::Serve).then_some(Program { user, group, process })
    }

    fn reach(&mut self, program: u64, holder: Holder) {
        self.wish(Wish::Reach { program, holder });
    }

    fn hand_off(&mut self, program: u64, caller: Program) {
        self.wish(Wish::HandOff { program, caller });
    }
}

/// The agent's side of the store.
pub(crate) struct Store {
    pub(crate) orders: Orders,
    pub(crate) counters: Arc<Counters>,
    pub(crate) usage: Arc<Mutex<Usage>>,
    pub(crate) shelf: Shelf,
    pub(crate) holder: Holder,
    pub(crate) config: StoreConfig,
    /// BPF map from machines' addresses to keys. The keys prove the TCP handshakes of connections between programs
    /// under `shunt run`.
    pub(crate) kernel: Ends,
    pub(crate) sources: SourcesMemory,
    /// This machine's addresses as they were read at the start; empty once `changes` watches them.
    own_addresses: Vec<IpAddr>,
    changes: Option<OwnAddresses>,
    wishes: Receiver<Wish>,
    wake: Arc<OwnedFd>,
    place: Place,
    /// The store itself, until its thread starts.
    server: Option<Server<Link>>,
    thread: Option<JoinHandle<()>>,
}

/// Returns the directory in which the negotiation's programs and maps are pinned.
fn pins(config: &Config) -> PathBuf {
    config.pins.join("odb")
}

/// Removes the negotiation from the kernel. New connections then carry the same bytes as without Shunt.
///
/// # Errors
/// Returns the kernel's error of removing the pins.
pub fn detach(config: &Config) -> io::Result<()> {
    shunt_negotiation::detach(&pins(config))
}

/// Returns the store's limits. Files of programs may take at most an eighth of the descriptors that this process may
/// have.
fn limits(store: &StoreConfig) -> Limits {
    let most = rustix::process::getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX) / 8;
    let limits = store.limits();
    let files = limits.files.min(usize::try_from(most).unwrap_or(usize::MAX));
    Limits { files, files_of_a_user: limits.files_of_a_user.min(files), ..limits }
}

impl Store {
    /// Does the steps of the start that need root's privileges. Returns the store, and the logic's part of it.
    ///
    /// # Errors
    /// Returns a [`StoreError`]: why the store cannot start.
    pub(crate) fn open(
        config: &Config,
        store: &StoreConfig,
        poll: &Poll,
    ) -> Result<(Self, shunt_logic::logic::Store), StoreError> {
        let callers = config.programs(store).map_err(StoreError::Account)?;
        let group = cgroup::chosen(config.cgroup.as_deref()).map_err(|error| StoreError::Group(error.to_string()))?;
        let own_addresses = own_addresses::read()?;
        let (users, groups) = callers.numbers();
        let kernel = shunt_negotiation::keep(&group, &pins(config), &Speakers { users, groups })?;
        let own_key = ends::begin(&kernel, &own_addresses)?;
        let anybody = config.asks_callers() || !store.users.is_empty() || !store.groups.is_empty();
        let (programs, place) =
            packets::listen(&store.socket, config.socket_group, anybody).map_err(StoreError::Socket)?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?);
        poll.set(&wake, Source::Store, Interest::Readable)?;
        let (give, wishes) = channel();
        let link = Link { callers, wishes: give, wake: Arc::clone(&wake) };
        let holder = Holder::named(&config.name);
        let (server, orders, known) = Server::new(limits(store), programs, holder, link)?;
        let (counters, usage, shelf) = (server.counters(), server.usage(), server.shelf());
        let server = Some(server);
        let stores = config.peers.iter().map(|peer| Holder::named(&peer.name).into()).collect();
        let logic = shunt_logic::logic::Store::new(own_key, &store.addresses, holder.into(), stores);
        let opened = Self {
            orders,
            counters,
            usage,
            shelf,
            holder,
            config: store.clone(),
            kernel,
            sources: SourcesMemory::new(known),
            own_addresses,
            changes: None,
            wishes,
            wake,
            place,
            server,
            thread: None,
        };
        Ok((opened, logic))
    }

    /// Returns this machine's addresses as they were read at the start.
    pub(crate) fn own_addresses(&self) -> &[IpAddr] {
        &self.own_addresses
    }

    /// Starts the store in a thread without any capability. To be called after the agent has given up its own
    /// capabilities, and before it restricts its system calls.
    ///
    /// # Errors
    /// Returns the kernel's error if the thread or the watch of addresses cannot be made.
    pub(crate) fn start(&mut self, agents_poll: &Poll) -> Result<(), StoreError> {
        self.changes = Some(OwnAddresses::watch(std::mem::take(&mut self.own_addresses), agents_poll)?);
        let Some(server) = self.server.take() else { return Ok(()) };
        let begun = Arc::new(Barrier::new(2));
        let begins = Arc::clone(&begun);
        let thread = std::thread::Builder::new().name("store".into()).spawn(move || {
            let harmless = privileges::give_up_all();
            begins.wait();
            let ended = harmless.map_err(io::Error::other).and_then(|()| server.run());
            if let Err(error) = ended {
                tracing::error!(%error, "the store has ended");
            }
        })?;
        begun.wait();
        self.thread = Some(thread);
        Ok(())
    }

    /// Returns this machine's addresses, if they have changed.
    pub(crate) fn new_addresses(&self) -> Option<Vec<IpAddr>> {
        self.changes.as_ref()?.take_news()
    }

    /// Takes the wishes of programs that have arrived since the last call.
    pub(crate) fn wishes(&self) -> Vec<Wish> {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        self.wishes.try_iter().collect()
    }
}

impl Drop for Store {
    /// Stops the store's thread. Programs see from their closed connections that nothing is kept for them any more.
    fn drop(&mut self) {
        self.place.leave(); // removes the socket's name, and must come before the socket is closed
        self.orders.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
