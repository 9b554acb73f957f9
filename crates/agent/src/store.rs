//! `[store]`: what programs under `shunt run` need of their machine (docs/odb.md). The store works in a thread of its own
//! (shunt_odb::store): copying and encrypting bodies holds up no handoff. Handshakes with other agents are this one's
//! (reaching.rs); the two tell each other by a queue and a descriptor.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::Resource;
use shunt_negotiation::{NegotiationError, Speakers};
use shunt_odb::reference::Holder;
use shunt_odb::store::Limits;
use shunt_odb::store::pinned::Shelf;
use shunt_odb::store::server::{self, Counters, Orders, Server};
use shunt_odb::store::usage::Usage;
use shunt_sys::cgroup;
use shunt_sys::lock::Mutex;

use crate::callers::{Callers, May};
use crate::config::{Config, StoreConfig};
use crate::ends::EndsOfPeers;
use crate::own_addresses::{self, OwnAddresses};
use crate::packets::{self, Place};
use crate::poll::{Interest, Poll, Source};
use crate::privileges;
use crate::sources::SourcesOfPeers;

/// Why there is no store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The Unix socket.
    #[error("{0} ([store] `socket` in the configuration)")]
    Socket(packets::ListenError),
    /// `users`, `groups`.
    #[error("{0} ([store] `users` and `groups` in the configuration)")]
    Account(String),
    /// Which connections lie between programs under Shunt.
    #[error(transparent)]
    Negotiation(#[from] NegotiationError),
    /// Anything else that the kernel refuses.
    #[error("cannot start the store: {0}")]
    Io(#[from] io::Error),
}

/// What programs want of the agent.
struct Link {
    callers: Callers,
    wishes: Sender<Wish>,
    wake: Arc<OwnedFd>,
}

/// What a program wants.
pub(crate) enum Wish {
    /// To be connected to another store.
    Reach { program: u64, holder: Holder },
    /// To hand off its connections.
    HandOff { program: u64, caller: server::Caller },
}

impl Link {
    fn wish(&self, wish: Wish) {
        let _ = self.wishes.send(wish);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl server::Agent for Link {
    fn admit(&mut self, program: &OwnedFd) -> Option<server::Caller> {
        let caller = self.callers.ask(program).ok()?;
        let credentials = caller.credentials;
        let (user, group, process) = (credentials.uid, credentials.gid, credentials.pid);
        (caller.may == May::Serve).then_some(server::Caller { user, group, process })
    }

    fn reach(&mut self, program: u64, holder: Holder) {
        self.wish(Wish::Reach { program, holder });
    }

    fn hand_off(&mut self, program: u64, caller: server::Caller) {
        self.wish(Wish::HandOff { program, caller });
    }
}

/// The store, as the agent has it.
pub(crate) struct Store {
    pub(crate) orders: Orders,
    pub(crate) counters: Arc<Counters>,
    pub(crate) usage: Arc<Mutex<Usage>>,
    pub(crate) shelf: Shelf,
    pub(crate) holder: Holder,
    pub(crate) config: StoreConfig,
    pub(crate) ends: EndsOfPeers,
    pub(crate) sources: SourcesOfPeers,
    /// This machine's addresses as they were read at the start, until changes are heard of.
    own_addresses: Vec<IpAddr>,
    changes: Option<OwnAddresses>,
    wishes: Receiver<Wish>,
    wake: Arc<OwnedFd>,
    place: Place,
    /// Until it works.
    server: Option<Server<Link>>,
    thread: Option<JoinHandle<()>>,
}

/// Where the negotiation is pinned.
fn pins(config: &Config) -> PathBuf {
    config.pins.join("odb")
}

/// Takes the negotiation out of the kernel: new connections carry what they would without Shunt.
///
/// # Errors
/// The kernel's.
pub fn detach(config: &Config) -> io::Result<()> {
    shunt_negotiation::detach(&pins(config))
}

/// What the store may take; of the descriptors that this process may have, an eighth for programs' files.
fn limits(store: &StoreConfig) -> Limits {
    let most = rustix::process::getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX) / 8;
    let limits = store.limits();
    let files = limits.files.min(usize::try_from(most).unwrap_or(usize::MAX));
    Limits { files, files_of_a_user: limits.files_of_a_user.min(files), ..limits }
}

impl Store {
    /// All that takes root's power.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub(crate) fn open(config: &Config, store: &StoreConfig, poll: &Poll) -> Result<Self, StoreError> {
        let callers = config.programs(store).map_err(StoreError::Account)?;
        let group = match &config.cgroup {
            Some(path) => path.clone(),
            None => cgroup::root()?,
        };
        let own_addresses = own_addresses::read()?;
        let (users, groups) = callers.numbers();
        let kept = shunt_negotiation::keep(&group, &pins(config), &Speakers { users, groups })?;
        let ends = EndsOfPeers::new(kept, &own_addresses, &store.addresses)?;
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
        let stores = config.peers.iter().map(|peer| Holder::named(&peer.name)).collect();
        let mut sources = SourcesOfPeers::new(known, holder, stores);
        sources.settle(&ends.owned());
        Ok(Self {
            orders,
            counters,
            usage,
            shelf,
            holder,
            config: store.clone(),
            ends,
            sources,
            own_addresses,
            changes: None,
            wishes,
            wake,
            place,
            server,
            thread: None,
        })
    }

    /// Has it work, in a thread that has no capability at all. Once the agent has given up its own, and before it restricts
    /// its system calls.
    ///
    /// # Errors
    /// The kernel's.
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

    /// This machine's addresses, if they have changed.
    pub(crate) fn new_addresses(&self) -> Option<Vec<IpAddr>> {
        self.changes.as_ref()?.take_news()
    }

    /// What programs want now.
    pub(crate) fn wishes(&self) -> Vec<Wish> {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        self.wishes.try_iter().collect()
    }
}

impl Drop for Store {
    /// Programs learn that nothing is kept for them any more.
    fn drop(&mut self) {
        self.place.leave(); // before its socket is closed
        self.orders.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
