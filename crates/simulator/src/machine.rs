//! A machine: its agent (if one runs), its kernel, and its servers.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use shunt_logic::limits::{Descriptors, Limits, Load};
use shunt_logic::logic::{Call, Usage};
use shunt_logic::servers::{Caller, May};
use shunt_logic::settings::{BackendSettings, PeerSettings, Settings};
use shunt_logic::{Actions, Logic};
use shunt_wire::local::{Channel, Offer, Request, VERSIONS};
use shunt_wire::prefixes::Prefix;

use crate::host::Host;
use crate::worker::Worker;

/// Offer lifetime. It is shorter than the default, so that histories become quiet soon.
const OFFER_LIFETIME: Duration = Duration::from_secs(2);

/// Returns the address of machine `index`, both as a server and as a sender of payloads.
pub fn address(index: usize) -> IpAddr {
    IpAddr::from([192, 0, 2, index as u8 + 1])
}

/// Returns the name of machine `index`. Names sort like the numbers.
pub fn name(index: usize) -> String {
    format!("m{index:02}")
}

/// A running agent.
pub struct Agent {
    /// The agent's logic.
    pub logic: Logic<Host>,
    /// Actions that the logic asks for.
    pub actions: Actions<Host>,
    /// For each peer, number of the connection in [`World::links`](crate::world::World).
    pub links: Vec<Option<usize>>,
    /// Time of the last tick.
    pub ticked: Duration,
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
    /// Number of offers that the servers have made, and of those that the agent had read when it last let them make more.
    pub offers_made: u64,
    pub offers_then: u64,
    /// Offers in the offers connection that the agent has not read.
    pub unread: VecDeque<(Offer, u64)>,
    settings: Settings,
}

impl Machine {
    /// Returns machine `index` of `machines`, each of which is a frontend and a backend for all others.
    pub fn new(index: usize, machines: usize, limits: Limits, places: usize) -> Self {
        let own = name(index);
        let peer = |other: usize| PeerSettings {
            name: name(other),
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
        }
    }

    /// Starts the machine's agent.
    pub fn start(&mut self, now: Duration, base: Instant) {
        self.generation += 1;
        let logic = Logic::new(self.settings.clone(), 0, None, base + now);
        let links = vec![None; self.settings.peers.len()];
        self.agent = Some(Agent { logic, actions: Actions::default(), links, ticked: now });
        self.event(now, base, |logic, call| logic.watch_regions(call));
    }

    /// Returns whether the agent runs, and does not stand still.
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

    /// Connects the machine's servers to the agent, by both channels.
    pub fn connect_servers(&mut self, now: Duration, base: Instant) {
        let caller = Caller { pid: 1, uid: 33, gid: 33, may: May::Serve };
        let hello = |channel| Request::Hello(channel, VERSIONS.newest);
        let connected = self.event(now, base, |logic, call| {
            let mut connect = |channel| {
                let server = logic.add_server(caller, call).ok()?;
                logic.request(server, &hello(channel), None, false, call).ok()?;
                let made = logic.shared.servers.find(server)?;
                Some((server, made.worker, made.ring()))
            };
            (connect(Channel::Control), connect(Channel::Offers))
        });
        if let Some((Some((control, worker, ring)), Some((offers, offerer, _)))) = connected {
            self.worker.connect(control, worker, ring, offers, offerer);
        }
    }

    /// Returns the peer number that this machine has for another machine. It has no number for itself.
    pub fn peer(&self, other: usize) -> usize {
        if other < self.index { other } else { other - 1 }
    }

    /// Returns the machine that has a peer number here.
    pub fn machine(&self, peer: usize) -> usize {
        if peer < self.index { peer } else { peer + 1 }
    }

    /// Returns the resources in use that only the daemon would know.
    pub fn usage(&self) -> Usage {
        let peers = self.settings.peers.len();
        let mut handoffs = vec![0; peers];
        self.worker.handoffs().for_each(|peer| handoffs[peer] += 1);
        let mut sending = vec![Load::default(); peers];
        for sender in self.host.senders.values().filter(|sender| !sender.is_done()) {
            sending[sender.claimant.peer as usize] += Load::sending(1);
        }
        Usage { handoffs, sending, descriptors: Descriptors { open: 100, limit: 65536 } }
    }
}
