//! The steering programs, as the agent's configuration wants them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use shunt_handoff::bpf::{FLOW_RESET, MAX_FLOWS, MAX_RINGS};
use shunt_handoff::frontend::{ACTIVE, ActiveRegion, Collected, Delivery, FlowKey, Spacing, SteerPeer};
use shunt_handoff::sender::{SenderKey, SenderTable, Slot};
use shunt_handoff::{Backend, BackendConfig, Counter, Frontend, FrontendConfig, SteeringError, TcPrograms};
use shunt_sys::cgroup;
use shunt_wire::local::{BoardHead, Handoff, Reason};
use shunt_wire::peer::Hello;
use shunt_wire::{Address, Endpoint, peer};

use crate::alone;
use crate::census::Census;
use crate::config::{Config, FrontendConfig as FrontendSettings};
use crate::host;
use crate::incoming::Seldom;
use crate::interfaces::{self, InterfaceError};

/// Completion rings: one per control connection.
const RINGS: u32 = MAX_RINGS;
/// Most time between two looks at flows that have ended.
const GARBAGE_EVERY: Duration = Duration::from_secs(10);
/// With so many flows, those that have ended stay no longer than that, and are looked for as often: each short
/// connection leaves one, and a full table has new payloads fetched.
const CROWDED: u64 = MAX_FLOWS as u64 / 2;
const CROWDED_QUIET: Duration = Duration::from_secs(2);
const CROWDED_EVERY: Duration = Duration::from_secs(1);
/// Between two looks at whether the kernel has refused handoffs for a full table.
const FULL_EVERY: Duration = Duration::from_secs(1);

/// Why steering could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum SteerError {
    /// An interface of the configuration.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// The machine is not as it has to be.
    #[error("{what}: {error}")]
    Host {
        /// What was asked.
        what: &'static str,
        /// The kernel's answer.
        error: io::Error,
    },
    /// Another agent has the pins.
    #[error("an agent{} works with the programs pinned in {}: stop it first (systemctl stop shuntd)", alone::by(*.by), .pins.display())]
    Running {
        /// Where.
        pins: PathBuf,
        /// Its process.
        by: Option<i32>,
    },
    /// Another agent has an interface.
    #[error("{error}{}", alone::running(.pins.as_ref()))]
    Taken {
        /// Which, and what to do.
        error: SteeringError,
        /// The other's.
        pins: Option<PathBuf>,
    },
    /// An agent works with programs whose pins are gone.
    #[error(
        "process {process} works with the program {program} on interface \"{interface}\", whose pins are gone: stop it first (systemctl stop shuntd)"
    )]
    InUse {
        /// Which.
        program: &'static str,
        /// Where.
        interface: String,
        /// Whose.
        process: i32,
    },
    /// The programs and maps.
    #[error(transparent)]
    Steering(SteeringError),
}

impl From<SteeringError> for SteerError {
    fn from(error: SteeringError) -> Self {
        match &error {
            SteeringError::Taken { pins, .. } => Self::Taken { pins: pins.clone(), error },
            _ => Self::Steering(error),
        }
    }
}

/// Where programs are attached.
struct Place {
    cgroup: PathBuf,
    netns_cookie: u64,
    interfaces: Vec<u32>,
}

impl Place {
    fn of(config: &Config, names: &[String]) -> Result<Self, SteerError> {
        let host = |what| move |error| SteerError::Host { what, error };
        let cgroup = match &config.cgroup {
            Some(path) => path.clone(),
            None => {
                let found = cgroup::root().map_err(host("finding the cgroup v2 hierarchy (`cgroup` names it)"))?;
                tracing::info!(cgroup = %found.display(), "found cgroup v2: servers are to be below it (`cgroup` names another)");
                found
            }
        };
        Ok(Self {
            cgroup,
            netns_cookie: host::netns_cookie().map_err(host("asking for the network namespace's cookie"))?,
            interfaces: interfaces::present(names)?,
        })
    }
}

/// The rings that nobody has. The one that was freed last is given again last: regions of its process may outlive the
/// process, and would pass for regions of the next one.
struct FreeRings {
    all: BTreeSet<u32>,
    /// The next to give is the first free one from here on.
    next: u32,
}

impl FreeRings {
    fn new(count: u32) -> Self {
        Self { all: (0..count).collect(), next: 0 }
    }

    fn take(&mut self) -> Option<u32> {
        let later = self.all.range(self.next..).next();
        let number = later.or(self.all.first()).copied()?;
        self.all.remove(&number);
        self.next = number + 1;
        Some(number)
    }

    fn insert(&mut self, number: u32) {
        self.all.insert(number);
    }

    fn contains(&self, number: u32) -> bool {
        self.all.contains(&number)
    }

    fn len(&self) -> usize {
        self.all.len()
    }
}

/// The frontend's programs, and which rings are in use.
pub struct FrontendSteering {
    programs: Frontend,
    free_rings: FreeRings,
    /// As the programs have them.
    peers: BTreeMap<u32, SteerPeer>,
    /// The last look at all flows, how many there were after it, and how many handoffs had begun.
    looked: Option<(Instant, u64, u64)>,
    /// Which connections live, and when to ask for that again.
    census: Census,
    next_census: Instant,
    /// How long a flow stays after its last packet: both ends may still retransmit (RFC 9293, 3.6.1).
    quiet: Duration,
    full: Full,
}

/// The refusals for want of room among the flows, as far as they are known.
#[derive(Default)]
struct Full {
    /// The last look, and how many there were.
    looked: Option<(Instant, u64)>,
    said: Seldom,
}

impl FrontendSteering {
    /// Loads them, or takes them over.
    ///
    /// # Errors
    /// See [`SteerError`].
    pub fn load(config: &Config, frontend: &FrontendSettings) -> Result<Self, SteerError> {
        let Place { cgroup, netns_cookie, interfaces } = Place::of(config, &frontend.interfaces)?;
        let pin_dir = config.pins.clone();
        let programs = Frontend::load(&FrontendConfig { pin_dir, netns_cookie, cgroup, interfaces })?;
        let (free_rings, peers) = (FreeRings::new(RINGS), BTreeMap::new());
        let (census, next_census, quiet) = (Census::new(), Instant::now(), frontend.flow_quiet);
        let full = Full::default();
        Ok(Self { programs, free_rings, peers, looked: None, census, next_census, quiet, full })
    }

    /// Has a thread find out which connections live.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub fn start_census(&mut self) -> io::Result<()> {
        self.census.start()
    }

    /// The programs for the interfaces that clients come in on.
    pub fn tc_programs(&self) -> Arc<TcPrograms> {
        self.programs.tc_programs()
    }

    /// A ring for a worker of that user, and its number; `None` where all are taken.
    pub fn open_ring(&mut self, owner: u32) -> Option<(u32, OwnedFd)> {
        let number = self.free_rings.take()?;
        match self.programs.create_ring(number, owner) {
            Ok(ring) => Some((number, ring)),
            Err(error) => {
                tracing::error!(error = chain(&error), "cannot make a completion ring");
                self.free_rings.insert(number);
                None
            }
        }
    }

    /// How many rings nobody has.
    pub fn free_rings(&self) -> usize {
        self.free_rings.len()
    }

    /// Its worker is gone.
    pub fn close_ring(&mut self, number: u32) {
        if number < RINGS && self.programs.remove_ring(number).is_ok() {
            self.free_rings.insert(number);
        }
    }

    /// Handoffs to this peer may begin, for clients of those IP versions that it has senders for, as soon as the port
    /// towards these is known ([`Self::set_port`]). One that is known already still holds.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_peer(&mut self, index: u32, hello: &Hello) -> io::Result<()> {
        let before = self.peers.get(&index).copied().unwrap_or_default();
        let mut peer = SteerPeer { port: hello.sender_port.get().to_be(), up: 1, ..Default::default() };
        let kept = |is_same: bool, port| if is_same { port } else { 0 };
        if let Some(address) = hello.ipv4() {
            peer.ipv4 = Address::from(address).0;
            peer.ipv4_ifindex = kept(peer.ipv4 == before.ipv4, before.ipv4_ifindex);
        }
        if let Some(address) = hello.ipv6() {
            peer.ipv6 = Address::from(address).0;
            peer.ipv6_ifindex = kept(peer.ipv6 == before.ipv6, before.ipv6_ifindex);
        }
        self.peers.insert(index, peer);
        if peer.ipv4_ifindex == 0 && peer.ipv6_ifindex == 0 {
            return Ok(()); // handoffs that an earlier agent's servers began go on as they are
        }
        self.programs.set_peer(index, &peer).map_err(io::Error::other)
    }

    /// Packets for this address of a peer leave by that port from now on, also those of handoffs under way; 0: there is
    /// no route. `false` where it is not an address of the peer's.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_port(&mut self, index: u32, address: IpAddr, port: u32) -> io::Result<bool> {
        let Some(peer) = self.peers.get_mut(&index) else { return Ok(false) };
        let bytes = Address::from(address).0;
        if address.is_ipv4() && peer.ipv4 == bytes {
            peer.ipv4_ifindex = port;
        } else if address.is_ipv6() && peer.ipv6 == bytes {
            peer.ipv6_ifindex = port;
        } else {
            return Ok(false);
        }
        self.programs.set_peer(index, peer).map(|()| true).map_err(io::Error::other)
    }

    /// No new handoff to this peer. Those in progress are still steered: its kernel may have all it needs.
    pub fn drop_peer(&mut self, index: u32) {
        let Some(peer) = self.peers.get_mut(&index) else {
            return;
        };
        peer.up = 0;
        if let Err(error) = self.programs.set_peer(index, peer) {
            tracing::error!(error = chain(&error), "cannot close a peer to handoffs");
        }
    }

    /// Which clients a peer can send to, for the board.
    pub fn families(&self, index: u32) -> u32 {
        let Some(peer) = self.peers.get(&index).filter(|peer| peer.up != 0) else { return 0 };
        let ipv4 = if peer.ipv4_ifindex != 0 { BoardHead::IPV4 } else { 0 };
        ipv4 | if peer.ipv6_ifindex != 0 { BoardHead::IPV6 } else { 0 }
    }

    /// Which ACKs the peer at `index` needs of a flow. Where it sends nothing on that flow now, it has no say.
    pub fn set_spacing(&self, index: u32, wanted: &peer::Spacing) {
        let spacing =
            Spacing { flow: FlowKey::of(wanted.client(), wanted.server()), peer: index, bytes: wanted.bytes.get() };
        match self.programs.set_spacing(&spacing) {
            Ok(true) => {}
            Ok(false) => tracing::debug!(peer = index, "a spacing for a flow that is not the peer's"),
            Err(error) => tracing::error!(%error, "cannot set a flow's spacing"),
        }
    }

    /// The peer at `index` says that a client has acknowledged all of its payload.
    pub fn set_delivered(&self, index: u32, word: &peer::Delivered) {
        let flow = FlowKey::of(word.client(), word.server());
        match self.programs.set_delivered(&Delivery { flow, peer: index, handoff: word.handoff.get() }) {
            Ok(true) => {}
            Ok(false) => tracing::debug!(peer = index, "a word about a payload that is not the peer's, or is over"),
            Err(error) => tracing::error!(%error, "cannot note that a payload is delivered"),
        }
    }

    /// Whether the kernel knows a handoff as its server describes it: on that connection, to that peer, and complete by the
    /// server's own ring. Another server's connection would be another's response.
    pub fn knows(&mut self, handoff: &Handoff, ring: u32) -> bool {
        let key = FlowKey::of(handoff.flow.client(), handoff.flow.server());
        if self.programs.take_begun(ring, handoff.handoff, handoff.peer, &key) {
            return true;
        }
        let known = self.programs.active_region(&key);
        let is_it = |region: ActiveRegion| {
            region.handoff == handoff.handoff && region.peer == handoff.peer && region.ring == ring
        };
        known
            .unwrap_or_else(|error| {
                tracing::error!(error = chain(&error), "cannot look for a handoff among the flows");
                None
            })
            .is_some_and(is_it)
    }

    /// Why a handoff of that ring is over already; `None` where the kernel knows of none.
    pub fn end_of(&self, handoff: &Handoff, ring: u32) -> Option<Reason> {
        let flow = self.programs.flow(&FlowKey::of(handoff.flow.client(), handoff.flow.server())).ok()??;
        let is_it = flow.handoff == handoff.handoff && flow.ring == ring && flow.spaces.status != ACTIVE;
        let is_reset = u32::from(flow.flags) & FLOW_RESET != 0;
        is_it.then_some(if is_reset { Reason::ClientGone } else { Reason::Aborted })
    }

    /// Payloads on their way from the peer at `index`, or from any.
    pub fn active_regions(&self, index: Option<u32>) -> Vec<ActiveRegion> {
        self.programs.active_regions().filter(|region| index.is_none_or(|index| region.peer == index)).collect()
    }

    /// Its client is reset by whoever sends on that connection next.
    pub fn cancel(&self, region: &ActiveRegion) {
        if let Err(error) = self.programs.cancel(region) {
            tracing::error!(%error, "cannot cancel a handoff");
        }
    }

    /// Whether somebody waits for what becomes of a handoff there.
    pub fn has_ring(&self, number: u32) -> bool {
        number < RINGS && !self.free_rings.contains(number)
    }

    /// The same handoff as it is now; `None` where it has ended, or somebody else goes on with it.
    pub fn region_now(&self, region: &ActiveRegion) -> Option<ActiveRegion> {
        let now = self.programs.active_region(&region.key).ok()?;
        now.filter(|now| now.handoff == region.handoff && now.peer == region.peer)
    }

    /// Now and then, and more often where there are many: forgets flows whose connections are gone. `handoffs`: so many
    /// have begun, each of which may have made a flow.
    pub fn tend(&mut self, now: Instant, handoffs: u64) {
        self.tell_full(now);
        let is_crowded = self.looked.is_some_and(|(_, flows, then)| flows + handoffs.saturating_sub(then) > CROWDED);
        let every = if is_crowded { CROWDED_EVERY } else { GARBAGE_EVERY.min(self.quiet) };
        let list = self.census.take();
        if list.is_none() && self.looked.is_some_and(|(then, ..)| now < then + every) {
            return;
        }
        let quiet = if is_crowded { CROWDED_QUIET.min(self.quiet) } else { self.quiet };
        if now >= self.next_census && self.looked.is_none_or(|(_, flows, _)| flows > 0) {
            self.next_census = now + GARBAGE_EVERY.min(self.quiet);
            self.census.ask(now);
        }
        // A list does not know what began after it; but that is not quiet for so long.
        let living = list.filter(|(_, asked)| now.duration_since(*asked) < quiet);
        let is_alive = |key: &FlowKey| living.as_ref().is_none_or(|(all, _)| all.contains(&ends(key)));
        let collected = self.programs.collect_garbage(quiet, is_alive);
        match collected {
            Ok(Collected { forgotten, left }) => {
                self.looked = Some((now, left as u64, handoffs));
                if forgotten > 0 {
                    tracing::debug!(forgotten, left, "forgot flows whose connections are gone");
                }
            }
            Err(error) => {
                self.looked = Some((now, 0, handoffs));
                tracing::error!(error = chain(&error), "cannot look through the flows");
            }
        }
    }

    /// Connections without a flow are relayed to: only their servers notice, and they cannot tell why.
    fn tell_full(&mut self, now: Instant) {
        if self.full.looked.is_some_and(|(then, _)| now < then + FULL_EVERY) {
            return;
        }
        let Ok(refused) = self.programs.refused_full() else { return };
        let before = self.full.looked.replace((now, refused)).map_or(refused, |(_, before)| before);
        if refused > before && self.full.said.may_speak(now) {
            tracing::warn!(
                flows = MAX_FLOWS,
                refused = refused - before,
                "the flow table is full: connections that have no flow yet are relayed to, until others end"
            );
        }
    }

    /// What the programs counted.
    pub fn counters(&self) -> Value {
        let mut counters = named(self.programs.counters());
        counters.insert("flows".into(), Value::from(self.programs.flows().count()));
        Value::Object(counters)
    }
}

/// Ours first, as /proc/net/tcp has them.
pub(crate) fn ends(key: &FlowKey) -> (SocketAddr, SocketAddr) {
    let end = |address, port: u16| Endpoint { address: Address(address), port_be: port.to_ne_bytes() }.socket_addr();
    (end(key.server_address, key.server_port), end(key.client_address, key.client_port))
}

/// The backend's programs.
pub struct BackendSteering(Backend);

impl BackendSteering {
    /// Loads them, or takes them over.
    ///
    /// # Errors
    /// See [`SteerError`].
    pub fn load(
        config: &Config,
        interfaces: &[String],
        ports: std::ops::RangeInclusive<u16>,
    ) -> Result<Self, SteerError> {
        let Place { cgroup, netns_cookie, interfaces } = Place::of(config, interfaces)?;
        let pin_dir = config.pins.clone();
        Ok(Self(Backend::load(&BackendConfig { pin_dir, netns_cookie, cgroup, interfaces, ports })?))
    }

    /// The programs for the interfaces that payloads leave by.
    pub fn tc_programs(&self) -> Arc<TcPrograms> {
        self.0.tc_programs()
    }

    /// Readable where an end that a frontend waits for has been acknowledged.
    pub fn reports(&self) -> BorrowedFd<'_> {
        self.0.reports()
    }

    /// What the programs counted.
    pub fn counters(&self) -> Value {
        let mut counters = named(self.0.counters());
        counters.insert("senders".into(), Value::from(self.0.senders()));
        Value::Object(counters)
    }
}

impl SenderTable for BackendSteering {
    fn write_slot(&mut self, index: u32, slot: &Slot) {
        self.0.write_slot(index, slot);
    }

    fn window(&self, index: u32) -> u32 {
        self.0.window(index)
    }

    fn insert(&mut self, key: &SenderKey, index: u32) -> io::Result<()> {
        self.0.insert(key, index)
    }

    fn remove(&mut self, key: &SenderKey) {
        self.0.remove(key);
    }

    fn await_end(&mut self, index: u32, end: u32) {
        self.0.await_end(index, end);
    }

    fn acked(&self, index: u32) -> u32 {
        self.0.acked(index)
    }

    fn take_reports(&mut self) -> Vec<SenderKey> {
        self.0.take_reports()
    }
}

fn named(counters: Result<Vec<Counter>, SteeringError>) -> Map<String, Value> {
    let counters = counters.unwrap_or_else(|error| {
        tracing::error!(error = chain(&error), "cannot read the steering programs' counters");
        Vec::new()
    });
    counters.into_iter().map(|counter| (counter.name.to_owned(), Value::from(counter.value))).collect()
}

/// An error with everything behind it, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_ring_is_given_again_last() {
        let mut rings = FreeRings::new(3);
        assert_eq!((rings.take(), rings.take()), (Some(0), Some(1)));
        rings.insert(0);
        assert!(rings.contains(0) && !rings.contains(1));
        assert_eq!((rings.take(), rings.take(), rings.take()), (Some(2), Some(0), None));
        rings.insert(1);
        assert_eq!((rings.len(), rings.take()), (1, Some(1)));
    }
}
