//! The frontend's steering programs, configured for the agent. A *flow* is these programs' record of a client
//! connection. A *region* is a range of the connection's sequence numbers that a *peer*, a backend's agent, sends: one
//! payload, for one *handoff* of a server. A *ring* is a BPF ring buffer by which the kernel tells one server (a
//! *worker*) what becomes of its handoffs. A *sender* is a backend's kernel socket for a client. A *layout* is a
//! version of the contents of the programs' maps.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use serde_json::Value;
use shunt_handoff::bpf::{FLOW_RESET, MAX_FLOWS, MAX_RINGS};
use shunt_handoff::frontend::{ACTIVE, ActiveRegion, Collected, Delivery, FlowKey, Spacing, SteerPeer};
use shunt_handoff::{Frontend, FrontendConfig, Older, TcPrograms};
use shunt_logic::frontend::steered::{Senders, Steered};
use shunt_logic::machine::ActiveRegion as Region;
use shunt_logic::rate::Seldom;
use shunt_logic::servers::RINGS;
use shunt_wire::local::{Handoff, Reason};
use shunt_wire::{Address, peer};

use crate::frontend::census::{Census, Connections};
use crate::steering::{Place, SteerError, ends, named};
use shunt_config::accounts::Account;
use shunt_config::{Config, FrontendConfig as FrontendSettings};
use shunt_host::errors::chain;

/// The logic (crates/logic) gives out ring numbers below RINGS, and the kernel's programs have MAX_RINGS rings.
const _: () = assert!(RINGS == MAX_RINGS);
/// Longest time between two searches for flows that have ended.
const GARBAGE_EVERY: Duration = Duration::from_secs(10);
/// Number of flows above which the table counts as crowded. In a crowded table, flows that have ended are looked for
/// every CROWDED_EVERY, and may stay only CROWDED_QUIET after their last packet. Each short connection leaves a flow.
/// If the table is full, no handoff begins on a connection that has no flow.
const CROWDED: u64 = MAX_FLOWS as u64 / 2;
const CROWDED_QUIET: Duration = Duration::from_secs(2);
const CROWDED_EVERY: Duration = Duration::from_secs(1);
/// Time after the agent's start in which servers of an earlier agent get new rings. Servers without an agent try to
/// connect at least once every 5 s (NGX_HTTP_SHUNT_BACKOFF_MAX).
const LEFT_RINGS_STAY: Duration = Duration::from_secs(15);
/// Time between two checks whether the kernel has refused handoffs because the table is full.
const FULL_EVERY: Duration = Duration::from_secs(1);

/// The loaded programs of the frontend, and the agent's upkeep of the flow table.
pub struct FrontendSteering {
    programs: Frontend,
    /// The last search for flows that have ended: its time, the number of flows left, and the number of handoffs begun
    /// by then.
    looked: Option<(Instant, u64, u64)>,
    /// The list of the open connections.
    census: Census,
    /// Time from which on the next list may be asked for.
    next_census: Instant,
    /// Time that a flow stays after its last packet, because both ends may still retransmit (RFC 9293, 3.6.1).
    quiet: Duration,
    full: Full,
    /// Rings of an earlier agent: the numbers of those that no server of this agent has got, and the time to remove
    /// them.
    left_rings: (Vec<u32>, Instant),
    /// Channel to the thread that takes programs off the interfaces. The thread gets the layouts that have no
    /// connection left.
    done: Sender<Older>,
    /// Receiving end of `done`, until that thread takes it.
    taken_out: Option<Receiver<Older>>,
}

/// Handoffs that the kernel has refused because the flow table is full.
#[derive(Default)]
struct Full {
    /// Time of the last check, and the number of refusals then.
    looked: Option<(Instant, u64)>,
    said: Seldom,
}

impl FrontendSteering {
    /// Loads the programs, or takes over those that an earlier agent has left pinned.
    ///
    /// # Errors
    /// Returns a [`SteerError`]: why the programs cannot be loaded or attached.
    pub fn load(config: &Config, frontend: &FrontendSettings) -> Result<Self, SteerError> {
        let Place { cgroup, netns_cookie, interfaces } = Place::of(config, &frontend.interfaces)?;
        let pin_dir = config.pins.clone();
        let programs = Frontend::load(&FrontendConfig { pin_dir, netns_cookie, cgroup, interfaces })?;
        let (census, next_census, quiet) = (Census::new(), Instant::now(), frontend.flow_quiet);
        let (full, (done, taken_out)) = (Full::default(), channel());
        let left_rings = (programs.left_rings(), next_census + LEFT_RINGS_STAY);
        let taken_out = Some(taken_out);
        let steering = Self { programs, looked: None, census, next_census, quiet, full, left_rings, done, taken_out };
        steering.give_older_to(config);
        Ok(steering)
    }

    /// Makes the pins (files in bpffs) of other layouts the agent's own. So the agent can remove them when it is not
    /// root any more.
    fn give_older_to(&self, config: &Config) {
        let Some(Ok(user)) = config.user.as_ref().map(Account::user) else { return };
        for older in self.programs.older() {
            if let Err(error) = older.give_to(user) {
                tracing::warn!(%error, layout = older.layout, "the pins of another layout stay until `shuntd --detach`");
            }
        }
    }

    /// Returns the receiving end of the channel for layouts without connections. Returns `None` from the second call
    /// on.
    pub fn take_out_older(&mut self) -> Option<Receiver<Older>> {
        self.taken_out.take()
    }

    /// Starts the thread that lists the open connections.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started.
    pub fn start_census(&mut self) -> io::Result<()> {
        self.census.start()
    }

    /// Returns the programs for the interfaces that clients' packets come in by.
    pub fn tc_programs(&self) -> Arc<TcPrograms> {
        self.programs.tc_programs()
    }

    /// Returns the numbers of the rings that an earlier agent has left and no server of this agent has got.
    pub fn left_rings(&self) -> &[u32] {
        &self.left_rings.0
    }

    /// Makes a ring for a worker of the user `owner`. Returns `None` after an error, which is in the log.
    pub fn make_ring(&mut self, number: u32, owner: u32) -> Option<OwnedFd> {
        self.left_rings.0.retain(|left| *left != number);
        let made = self.programs.create_ring(number, owner);
        made.map_err(|error| tracing::error!(error = chain(&error), "cannot make a completion ring")).ok()
    }

    /// Removes a ring whose worker is gone.
    pub fn remove_ring(&mut self, number: u32) {
        if let Err(error) = self.programs.remove_ring(number) {
            tracing::error!(error = chain(&error), "cannot remove a completion ring");
        }
    }

    /// Steers clients' ACKs to a peer's senders as `entry` says. The change also applies to handoffs under way.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2).
    pub fn steer(&mut self, peer: u32, entry: &Steered) -> io::Result<()> {
        let address = |senders: Option<Senders>| senders.map_or(Address::NONE, |senders| senders.address.into()).0;
        let interface = |senders: Option<Senders>| senders.map_or(0, |senders| senders.interface);
        let entry = SteerPeer {
            port: entry.port.to_be(),
            up: entry.is_up.into(),
            ipv4: address(entry.ipv4),
            ipv4_ifindex: interface(entry.ipv4),
            ipv6: address(entry.ipv6),
            ipv6_ifindex: interface(entry.ipv6),
        };
        self.programs.set_peer(peer, &entry).map_err(io::Error::other)
    }

    /// Sets which ACKs of a flow the peer at `index` gets: one ACK per so many payload bytes (the *spacing*). Has no
    /// effect if that peer sends nothing on the flow now.
    pub fn set_spacing(&self, index: u32, wanted: &peer::Spacing) {
        let spacing =
            Spacing { flow: FlowKey::of(wanted.client(), wanted.server()), peer: index, bytes: wanted.bytes.get() };
        match self.programs.set_spacing(&spacing) {
            Ok(true) => {}
            Ok(false) => {
                tracing::debug!(peer = index, "dropped a spacing from a peer that is not the backend of this flow")
            }
            Err(error) => tracing::error!(%error, "cannot set a flow's spacing"),
        }
    }

    /// Notes the statement (word) of the peer at `index` that a client has acknowledged all of the peer's payload.
    pub fn set_delivered(&self, index: u32, word: &peer::Delivered) {
        let flow = FlowKey::of(word.client(), word.server());
        match self.programs.set_delivered(&Delivery { flow, peer: index, handoff: word.handoff.get() }) {
            Ok(true) => {}
            Ok(false) => {
                tracing::debug!(peer = index, "dropped a word about a payload that is over, or has another backend")
            }
            Err(error) => tracing::error!(%error, "cannot record in the flow table that a payload is delivered"),
        }
    }

    /// Returns whether the kernel knows a handoff as its server describes it: by number, connection, peer and the
    /// server's own ring. A handoff that differs in one of these may be another server's, and its payload part of
    /// another response.
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

    /// Returns why a handoff of the server that has `ring` is over already. Returns `None` if the kernel does not know
    /// the handoff, or if the handoff is not over.
    pub fn end_of(&self, handoff: &Handoff, ring: u32) -> Option<Reason> {
        let flow = self.programs.flow(&FlowKey::of(handoff.flow.client(), handoff.flow.server())).ok()??;
        let is_it = flow.handoff == handoff.handoff && flow.ring == ring && flow.spaces.status != ACTIVE;
        let is_reset = u32::from(flow.flags) & FLOW_RESET != 0;
        is_it.then_some(if is_reset { Reason::ClientGone } else { Reason::Aborted })
    }

    /// Returns the regions of payloads on their way from the peer at `index`. `None` stands for all peers.
    pub fn active_regions(&self, index: Option<u32>) -> Vec<ActiveRegion> {
        self.programs.active_regions().filter(|region| index.is_none_or(|index| region.peer == index)).collect()
    }

    /// Marks a region. The next packet that this machine sends on the region's connection then resets the client.
    pub fn cancel(&self, region: &Region) {
        let Some(region) = self.region_now(region) else { return };
        if let Err(error) = self.programs.cancel(&region) {
            tracing::error!(%error, "cannot cancel a handoff");
        }
    }

    /// Returns the present state of the handoff that `region` describes. Returns `None` if the handoff has ended, or if
    /// another peer sends its payload now.
    pub fn region_now(&self, region: &Region) -> Option<ActiveRegion> {
        let now = self.programs.active_region(&FlowKey::of(region.client, region.server)).ok()?;
        now.filter(|now| now.handoff == region.handoff && now.peer == region.peer)
    }

    /// Forgets flows whose connections are gone. Looks for them at least every GARBAGE_EVERY, and more often if there
    /// are many flows. `handoffs` is the number of handoffs that have begun. Each of them may have made a flow. Removes
    /// the rings of an earlier agent, once its servers have had time to get others.
    pub fn tend(&mut self, now: Instant, handoffs: u64) {
        self.tell_full(now);
        if now >= self.left_rings.1 {
            std::mem::take(&mut self.left_rings.0).into_iter().for_each(|left| self.remove_ring(left));
        }
        let is_crowded = self.looked.is_some_and(|(_, flows, then)| flows + handoffs.saturating_sub(then) > CROWDED);
        let every = if is_crowded { CROWDED_EVERY } else { GARBAGE_EVERY.min(self.quiet) };
        let list = self.census.take();
        if list.is_none() && self.looked.is_some_and(|(then, ..)| now < then + every) {
            return;
        }
        let quiet = if is_crowded { CROWDED_QUIET.min(self.quiet) } else { self.quiet };
        let has_flows = self.looked.is_none_or(|(_, flows, _)| flows > 0) || !self.programs.older().is_empty();
        if now >= self.next_census && has_flows {
            self.next_census = now + GARBAGE_EVERY.min(self.quiet);
            self.census.ask(now);
        }
        // A list does not have the connections that began after it was asked for. Their flows are kept: only flows
        // whose last packet came before the list was asked for are forgotten.
        let quiet = list.as_ref().map_or(quiet, |(_, asked)| quiet.max(now.duration_since(*asked)));
        if let Some((living, _)) = &list {
            self.tend_older(now, quiet, living);
        }
        let is_alive = |key: &FlowKey| list.as_ref().is_none_or(|(living, _)| living.contains(&ends(key)));
        let collected = self.programs.collect_garbage(quiet, is_alive);
        match collected {
            Ok(Collected { forgotten, left }) => {
                self.looked = Some((now, left as u64, handoffs));
                if forgotten > 0 {
                    tracing::debug!(forgotten, left, "removed the flows of connections that are gone");
                }
            }
            Err(error) => {
                self.looked = Some((now, 0, handoffs));
                tracing::error!(error = chain(&error), "cannot look through the flows");
            }
        }
    }

    /// Forgets ended connections of other layouts. When a layout has no connection left, its programs are removed.
    fn tend_older(&mut self, now: Instant, quiet: Duration, living: &Connections) {
        match self.programs.collect_older(now, quiet, |key| living.contains(&ends(key))) {
            Ok(done) => done.into_iter().for_each(|older| {
                tracing::info!(
                    layout = older.layout,
                    "the last connection of another layout has ended: its programs go"
                );
                // The receiver lives as long as the agent does.
                let _ = self.done.send(older);
            }),
            Err(error) => tracing::error!(error = chain(&error), "cannot look through the flows of another layout"),
        }
    }

    /// Logs that the table is full, if the kernel has refused handoffs for that reason since the last check. The kernel
    /// refuses handoffs on connections without a flow, and servers cannot tell why.
    fn tell_full(&mut self, now: Instant) {
        if self.full.looked.is_some_and(|(then, _)| now < then + FULL_EVERY) {
            return;
        }
        let Ok(refused) = self.programs.refused_full() else { return };
        let before = self.full.looked.replace((now, refused)).map_or(refused, |(_, before)| before);
        if refused > before && self.full.said.allows(now) {
            tracing::warn!(
                flows = MAX_FLOWS,
                refused = refused - before,
                "the flow table is full: responses on new connections are relayed until other connections end"
            );
        }
    }

    /// Returns the programs' counters, and the number of flows.
    pub fn counters(&self) -> Value {
        let mut counters = named(self.programs.counters());
        counters.insert("flows".into(), Value::from(self.programs.flows().count()));
        Value::Object(counters)
    }
}
