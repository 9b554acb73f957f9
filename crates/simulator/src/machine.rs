//! A machine: its agent (if one runs), its kernel, and its servers. A *peer* is another machine's agent. An *offer* is
//! a payload that a backend's server holds ready. A *fetch* brings a payload through both agents to the frontend's
//! server. A *generation* is one run of an agent. The *board* is memory in which an agent tells its servers of its
//! peers and limits. A *store* has the payloads of a machine's programs under `shunt run`. A *payload* is the body of a
//! response.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use shunt_logic::limits::{Descriptors, Limits, Load};
use shunt_logic::logic::{Call, Store, Usage};
use shunt_logic::servers::{Caller, May};
use shunt_logic::settings::{BackendSettings, PeerSettings, Settings};
use shunt_logic::{Actions, Logic};
use shunt_wire::local::{Channel, Offer, Request, VERSIONS};
use shunt_wire::prefixes::Prefix;

use crate::host::Host;
use crate::worker::{Connected, Worker};

/// Offer lifetime. It is shorter than the default, so that histories become quiet soon.
const OFFER_LIFETIME: Duration = Duration::from_secs(2);

/// Returns the address of machine `index`, both as a server and as a sender of payloads.
pub fn address(index: usize) -> IpAddr {
    IpAddr::from([192, 0, 2, index as u8 + 1])
}

/// Returns the name of machine `index`. Names sort in the order of the machines' numbers.
pub fn name(index: usize) -> String {
    format!("m{index:02}")
}

/// Returns the name of the store of machine `index`.
pub fn store_of(index: usize) -> [u8; 16] {
    [index as u8 + 1; 16]
}

/// Address that all machines have at once, as hosts of container networks do.
pub const SHARED: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(172, 17, 0, 1));
/// User IDs of the nginx worker, and of the programs under `shunt run`.
const USER: u32 = 33;
const USER_OF_PROGRAMS: u32 = 1000;

/// A fetch of a server of this machine.
#[derive(Clone, Copy, Debug)]
pub struct Fetching {
    /// Number of the fetch's connection in [`World::links`](crate::world::World).
    pub link: usize,
    /// The server's number of the fetch, and number of bytes that are still to come. `None` until the backend has
    /// answered.
    pub reader: Option<(u64, u64)>,
}

/// A running agent.
pub struct Agent {
    /// The agent's logic.
    pub logic: Logic<Host>,
    /// Actions that the logic asks for.
    pub actions: Actions<Host>,
    /// For each peer, number of the session's connection in [`World::links`](crate::world::World).
    pub links: Vec<Option<usize>>,
    /// Time of the last tick.
    pub ticked: Duration,
    /// Fetches of this machine's servers, by the numbers that the logic has given them.
    pub fetches: BTreeMap<usize, Fetching>,
    /// For each payload that a peer fetches from here, by the logic's number of the fetch: number of the connection in
    /// [`World::links`](crate::world::World).
    pub served: BTreeMap<usize, usize>,
    /// For each connection to another machine's store that is being made, by the logic's number of it: number of the
    /// connection in [`World::links`](crate::world::World).
    pub reaches: BTreeMap<usize, usize>,
    /// Present once the agent is told to end: the last time at which something was under way, and the latest time at
    /// which the agent ends.
    pub drain: Option<(Duration, Duration)>,
    /// Key that proves handshakes between two programs of this machine.
    pub own_key: [u8; 16],
}

/// A machine.
pub struct Machine {
    /// Number of the machine.
    pub index: usize,
    /// The machine's agent, while it runs.
    pub agent: Option<Agent>,
    /// Number of times that the agent has started. Messages for an agent of an earlier generation are dropped.
    pub generation: u32,
    /// Time until which the agent stands still.
    pub stopped_until: Duration,
    /// Kernel and files.
    pub host: Host,
    /// The machine's servers.
    pub worker: Worker,
    /// Numbers of offers: all that the servers have made, and those that the agent had read when its board last let
    /// servers make offers.
    pub offers_made: u64,
    pub offers_then: u64,
    /// Offers that the nginx worker has sent and the agent has not read, each with the number of its file.
    pub unread: VecDeque<(Offer, u64)>,
    /// Settings of the agent's configuration.
    pub settings: Settings,
    /// Peers that the configuration will name after a reload.
    pub unnamed: Vec<PeerSettings>,
    /// Number of the peer that a changed configuration does not name for a while.
    pub changed: Option<usize>,
    /// Addresses of the machine's interfaces.
    pub addresses: Vec<IpAddr>,
}

impl Machine {
    /// Returns machine `index` of `machines`, each of which is a frontend and a backend for all others.
    pub fn new(index: usize, machines: usize, limits: Limits, places: usize) -> Self {
        let own = name(index);
        let peer = |other: usize| PeerSettings {
            name: name(other),
            address: SocketAddr::new(address(other), 7440),
            is_dialled: own < name(other),
            port: 61000 + other as u16,
            speaks_for: vec![Prefix { address: address(other).into(), bits: 128, pad: 0, port: [0; 2] }],
            may_read_store: false,
            is_gone: false,
        };
        let backend = BackendSettings { senders: places, offer_lifetime: OFFER_LIFETIME };
        let settings = Settings {
            name: own.clone(),
            heartbeat: Duration::from_millis(250),
            limits,
            is_frontend: true,
            backend: Some(backend),
            has_store: false,
            peers: (0..machines).filter(|other| *other != index).map(peer).collect(),
        };
        Self {
            index,
            agent: None,
            generation: 0,
            stopped_until: Duration::ZERO,
            host: Host { places, ..Host::default() },
            worker: Worker::default(),
            offers_made: 0,
            offers_then: 0,
            unread: VecDeque::new(),
            settings,
            unnamed: Vec::new(),
            changed: None,
            addresses: vec![address(index), SHARED],
        }
    }

    /// Returns the settings with which the machine's agent starts, so that a test can change them.
    pub fn settings_mut(&mut self) -> &mut Settings {
        &mut self.settings
    }

    /// Starts the machine's agent.
    pub fn start(&mut self, now: Duration, base: Instant) {
        self.generation += 1;
        self.changed = None;
        let own_key = [self.generation as u8; 16];
        let stores = (0..self.settings.peers.len()).map(|peer| store_of(self.machine(peer))).collect();
        // On machines with an even number, the configuration names the addresses of the machine's programs.
        let configured = if self.index.is_multiple_of(2) { vec![address(self.index), SHARED] } else { Vec::new() };
        let store = self.settings.has_store.then(|| Store::new(own_key, &configured, store_of(self.index), stores));
        let logic = Logic::new(self.settings.clone(), 0, store, base + now);
        let links = vec![None; self.settings.peers.len() + self.unnamed.len()];
        self.host.ends.clear();
        self.host.sources.clear();
        self.agent = Some(Agent {
            logic,
            actions: Actions::default(),
            links,
            ticked: now,
            fetches: BTreeMap::new(),
            served: BTreeMap::new(),
            reaches: BTreeMap::new(),
            drain: None,
            own_key,
        });
        self.event(now, base, |logic, call| logic.watch_regions(call));
        let addresses = self.addresses.clone();
        self.event(now, base, |logic, call| logic.set_own_addresses(&addresses, call));
    }

    /// Returns whether an agent runs here and does not stand still.
    pub fn is_awake(&self, now: Duration) -> bool {
        self.agent.is_some() && now >= self.stopped_until
    }

    /// Passes an event to the logic. Returns `None` if no agent runs.
    pub fn event<R>(
        &mut self,
        now: Duration,
        base: Instant,
        event: impl FnOnce(&mut Logic<Host>, &mut Call<'_, Host>) -> R,
    ) -> Option<R> {
        self.host.now = now;
        let Agent { logic, actions, .. } = self.agent.as_mut()?;
        Some(event(logic, &mut Call { now: base + now, machine: &mut self.host, actions }))
    }

    /// Connects the nginx worker to the agent, once for control messages and once for offers. If one connection is
    /// refused, returns the index of the other one, which the caller has to close.
    pub fn connect_servers(&mut self, now: Duration, base: Instant) -> Option<usize> {
        let control = self.connect(Channel::Control, USER, now, base);
        let offers = self.connect(Channel::Offers, USER, now, base);
        match (control, offers) {
            (Some((control, worker, ring)), Some((offers, offerer, _))) => {
                self.worker.connect(control, worker, ring, offers, offerer);
                None
            }
            (one, other) => one.or(other).map(|(server, ..)| server),
        }
    }

    /// Connects the program under `shunt run` to the agent, with the permissions of a server. A program that is
    /// accepted forgets all that it has learned about peers.
    pub fn connect_program(&mut self, now: Duration, base: Instant) {
        if let Some((control, worker, ring)) = self.connect(Channel::Control, USER_OF_PROGRAMS, now, base) {
            let program = Connected { control, worker, ring, offers: usize::MAX, offerer: 0 };
            self.worker.program = Some(program);
            self.worker.would_send.clear();
            self.worker.waits_until.clear();
        }
    }

    fn connect(
        &mut self,
        channel: Channel,
        uid: u32,
        now: Duration,
        base: Instant,
    ) -> Option<(usize, u32, Option<u32>)> {
        let caller = Caller { pid: 1, uid, gid: uid, may: May::Serve };
        let hello = Request::Hello(channel, VERSIONS.newest);
        self.event(now, base, |logic, call| {
            let server = logic.add_server(caller, call).ok()?;
            logic.request(server, &hello, &mut None, false, call).ok()?;
            let made = logic.shared.servers.find(server)?;
            Some((server, made.worker, made.ring()))
        })?
    }

    /// Returns whether the configuration of this machine names another machine.
    pub fn knows(&self, other: usize) -> bool {
        let peer = self.peer(other);
        peer < self.settings.peers.len() && self.changed != Some(peer)
    }

    /// Returns whether payload of this machine reaches the clients of another machine.
    pub fn reaches(&self, other: usize, now: Duration) -> bool {
        self.host.unreached.get(&self.peer(other)).is_none_or(|until| *until <= now)
    }

    /// Returns the peer number that this machine has for another machine. It has no number for itself.
    pub fn peer(&self, other: usize) -> usize {
        if other < self.index { other } else { other - 1 }
    }

    /// Returns the number of the machine to which this machine has given a peer number.
    pub fn machine(&self, peer: usize) -> usize {
        if peer < self.index { peer } else { peer + 1 }
    }

    /// Returns the resources in use. In a real agent, the daemon knows them, not the logic.
    pub fn usage(&self) -> Usage {
        let peers = self.settings.peers.len();

        let mut handoffs = vec![0; peers];
        self.worker.handoffs().for_each(|peer| handoffs[peer] += 1);
        let mut sending = vec![Load::default(); peers];
        for sender in self.host.senders.values().filter(|sender| !sender.is_done()) {
            sending[sender.claimant.peer as usize] += Load::sending(sender.length());
        }
        let open = if self.host.has_free_descriptors() { 100 } else { 65536 };
        Usage { handoffs, sending, descriptors: Descriptors { open, limit: 65536 } }
    }
}
