//! Servers: they hand payloads off, make offers, and fetch or relay what cannot be handed off. A *handoff* lets a
//! backend send a payload on a client's connection. A *region* is a range of sequence numbers of a client's connection,
//! which one payload takes. A *peer* is another machine's agent. An *offer* is a payload that a backend's server holds
//! ready. The *board* is the memory in which an agent tells its servers of its peers and limits. To *relay* is to send
//! bytes through the tiers, as without Shunt. A *payload* is the body of a response. A *session* is the use of a
//! connection between two agents.

use std::time::Duration;

use shunt_decisions::Counter;
use shunt_logic::Told;
use shunt_wire::flow::FlowState;
use shunt_wire::local::{self, BoardPeer, Handoff, Reason, Request, closed};
use zerocopy::FromZeros;

use crate::client::{Kind, RECORD, Response};
use crate::content::{Run, Source};
use crate::flow::Connected;
use crate::worker::{Serving, Stage, tag};
use crate::world::{Body, Event, LOCAL, World};

/// Time between two checks of the servers' handoffs under way.
const LOOK: Duration = Duration::from_secs(1);
/// Number of checks without progress after which a server acts by itself, because its agent has said nothing.
const PATIENCE: u32 = 6;
/// Number of checks after which a server gives up a fetch of which no byte has come.
const FETCH_PATIENCE: u32 = 10;
/// Longest time that a handoff may make no progress; longer is a violation. A claim waits at most 30 s for a sender.
const BOUND: Duration = Duration::from_secs(45);

impl World {
    /// Handles a client's request at its frontend.
    pub(super) fn request(&mut self, client: usize, response: Response) {
        let machine = self.clients[client].frontend;
        let worker = &mut self.machines[machine].worker;
        if worker.serving.contains_key(&client) {
            worker.pending.insert(client, response);
            return;
        }
        worker.serving.insert(client, Serving::new(response));
        if !self.machines[machine].host.flows.contains_key(&client) {
            let token = self.random.word();
            let flow =
                Connected::new(self.clients[client].at, self.server_of(client), self.clients[client].first, token);
            self.machines[machine].host.flows.insert(client, flow);
        }
        let others = self.service.machines - 1;
        let peer = self.random.below(others as u64) as usize;
        self.ask_backend(machine, client, response, peer, None);
    }

    /// Asks a backend for a response, or for the rest of its payload from byte `rest` of the region on.
    pub(super) fn ask_backend(
        &mut self,
        from: usize,
        client: usize,
        response: Response,
        peer: usize,
        rest: Option<u64>,
    ) {
        let machine = self.machines[from].machine(peer);
        let consents = self.may_hand_off(from, peer);
        let delay = if self.reach(from, machine) { self.way() } else { Duration::from_secs(1) };
        self.schedule.after(delay, Event::Asked { machine, from, client, response, consents, rest });
    }

    /// Returns whether a machine's board lets its servers hand off to a peer.
    pub(super) fn may_hand_off(&self, machine: usize, peer: usize) -> bool {
        let Some(agent) = &self.machines[machine].agent else { return false };
        let board = &agent.logic.shared.board;
        let Some(entry) = board.peers().get(peer) else { return false };
        let is_open = (board.head().closed | entry.closed) & closed::HANDOFFS == 0;
        is_open && entry.state == BoardPeer::UP && entry.families & 1 != 0
    }

    /// Returns whether a machine's board lets its servers make offers for a peer.
    fn may_offer(&self, machine: usize, peer: usize) -> bool {
        let Some(agent) = &self.machines[machine].agent else { return false };
        let board = &agent.logic.shared.board;
        let Some(entry) = board.peers().get(peer) else { return false };
        let is_open = (board.head().closed | entry.closed) & closed::OFFERS == 0;
        is_open && board.head().backend == 1 && entry.state == BoardPeer::UP
    }

    pub(super) fn on_asked(
        &mut self,
        machine: usize,
        from: usize,
        client: usize,
        response: Response,
        consents: bool,
        rest: Option<u64>,
    ) {
        let peer = self.machines[machine].peer(from);
        // The request for the rest of a plain payload names the ETag (If-Match), which a file that was written over has no
        // more. On TLS the digest has to prove the file's bytes.
        let file = self.machines[machine].host.file(response.file);
        let is_match = rest.is_none() || response.kind == Kind::Sealed || file.content == response.file;
        let body = if response.kind == Kind::Stored && self.machines[machine].worker.program.is_some() {
            self.store(machine, &response)
        } else if response.kind != Kind::Stored && consents && is_match && self.may_offer(machine, peer) {
            self.offer(machine, peer, &response, rest)
        } else {
            Body::Bytes
        };
        let delay = if self.reach(machine, from) { self.way() } else { Duration::from_secs(1) };
        let is_rest = rest.is_some();
        self.schedule.after(delay, Event::Answered { client, response, from: machine, body, is_rest });
    }

    /// Makes an offer of a response's payload, or of its bytes from byte `rest` of the region on.
    fn offer(&mut self, machine: usize, peer: usize, response: &Response, rest: Option<u64>) -> Body {
        let offset = rest.map_or(0, |from| match response.kind {
            Kind::Sealed => response.record_at(from).0 * RECORD,
            _ => from,
        });
        if rest.is_some() && response.kind == Kind::Sealed && self.random.below(8) == 0 {
            self.cover("another file of the same name");
            self.machines[machine].host.write_to(response.file, true);
        }
        let state = self.machines[machine].host.file(response.file).state;
        let Some(offer) = self.machines[machine].worker.offer(peer, response, offset, state) else {
            return Body::Bytes;
        };
        self.cover("offer");
        self.machines[machine].offers_made += 1;
        self.machines[machine].unread.push_back((offer, response.file));
        if rest.is_none() {
            self.write_to_file(machine, response.file);
        }
        Body::Offer(offer.number)
    }

    pub(super) fn on_answered(&mut self, client: usize, response: Response, from: usize, body: Body) {
        let machine = self.clients[client].frontend;
        let serving = self.machines[machine].worker.serving.get(&client);
        let is_waited_for =
            serving.is_some_and(|serving| serving.response == response && serving.stage == Stage::Asked);
        if !is_waited_for {
            return;
        }
        self.write(client, Run { source: Source::Header(response.number), from: 0, length: response.header });
        let peer = self.machines[machine].peer(from);
        match body {
            Body::Slot(slot) => return self.on_reference(machine, client, &response, peer, slot),
            Body::Offer(offer) => {
                let fetches = self.variety.fetches;
                let wants_bytes = fetches.is_some_and(|often| self.random.in_a_million(often));
                if !wants_bytes && self.hand_off(machine, client, &response, peer, offer) {
                    return;
                }
                if fetches.is_some() {
                    return self.fetch(machine, client, &response, peer, offer);
                }
            }
            Body::Bytes => {}
        }
        self.cover("relayed");
        self.relay(machine, client, response, 0);
    }

    /// Begins a region, and tells the agent of the handoff. Returns false if the board or the kernel does not allow
    /// that, or if the server has no ring. (By its ring, the kernel tells a server that a region is complete.)
    fn hand_off(&mut self, machine: usize, client: usize, response: &Response, peer: usize, offer: u64) -> bool {
        let now = self.now();
        if !self.may_hand_off(machine, peer) {
            return false;
        }
        let Some(ring) = self.machines[machine].worker.connected.and_then(|connected| connected.ring) else {
            return false;
        };
        let handoff = self.machines[machine].worker.name_handoff();
        let Some(flow) = self.machines[machine].host.flows.get_mut(&client) else { return false };
        if !flow.has_sent_all() {
            return false;
        }
        if flow.begin(peer as u32, ring, handoff, response.region(), now) != Counter::FE_BEGUN {
            self.cover("region refused");
            return false;
        }
        self.cover("region begun");
        self.set_stage(machine, client, Stage::Begun { handoff, peer, acked: 0 });
        self.claim(machine, client, response, offer, None);
        true
    }

    /// Tells the agent of the handoff for which a client's region has begun. The offer is of the whole payload, or of
    /// its bytes from byte `rest` of the region on. Returns whether the agent is told.
    pub(super) fn claim(
        &mut self,
        machine: usize,
        client: usize,
        response: &Response,
        offer: u64,
        rest: Option<u64>,
    ) -> bool {
        let generation = self.machines[machine].generation;
        let worker = &self.machines[machine].worker;
        let Some(Stage::Begun { handoff, peer, .. }) = worker.serving.get(&client).map(|serving| serving.stage) else {
            return false;
        };
        let Some(connected) = worker.connected else { return false };
        let Some(flow) = self.machines[machine].host.flows.get(&client) else { return false };
        let mut message = self.handoff(machine, handoff, peer, flow.state());
        (message.offer, message.length, message.tag) = (offer, response.length, tag(response));
        if response.kind == Kind::Sealed {
            let (record, skip) = response.record_at(rest.unwrap_or(0));
            (message.tls.suite, message.tls.content_bytes) = (0x1301, RECORD as u16);
            (message.tls.record, message.tls.skip) = (record, skip as u16);
            message.flow.options |= FlowState::DIGEST;
            message.length -= record * RECORD;
        } else if let Some(from) = rest {
            message.length -= from;
        }
        let request = Box::new(Request::Handoff(message));
        self.schedule.after(LOCAL, Event::ToAgent { machine, generation, server: connected.control, request });
        self.schedule.after(BOUND, Event::Bound { client, handoff, acked: 0 });
        true
    }

    /// Returns a message about a handoff to a peer in the present session.
    pub(super) fn handoff(&self, machine: usize, handoff: u64, peer: usize, flow: FlowState) -> Handoff {
        let epoch = self.epoch(machine, peer);
        let bytes = size_of::<Handoff>() as u32;
        Handoff { header: Handoff::HEADER, peer: peer as u32, epoch, bytes, handoff, flow, ..Handoff::new_zeroed() }
    }

    /// Returns the epoch (number) of the present session with a peer.
    pub(super) fn epoch(&self, machine: usize, peer: usize) -> u32 {
        let agent = self.machines[machine].agent.as_ref();
        let entry = agent.and_then(|agent| agent.logic.shared.board.peers().get(peer));
        entry.map_or(0, |entry| entry.epoch)
    }

    pub(super) fn set_stage(&mut self, machine: usize, client: usize, stage: Stage) {
        if let Some(serving) = self.machines[machine].worker.serving.get_mut(&client) {
            serving.stage = stage;
        }
    }

    /// Relays a payload from byte `from` on.
    pub(super) fn relay(&mut self, machine: usize, client: usize, response: Response, from: u64) {
        self.set_stage(machine, client, Stage::Rest { from });
        let delay = self.way() * 4;
        self.schedule.after(delay, Event::Relayed { client, response: response.number, from });
    }

    pub(super) fn on_relayed(&mut self, client: usize, response: u64, from: u64) {
        let machine = self.clients[client].frontend;
        let Some(serving) = self.machines[machine].worker.serving.get(&client).copied() else { return };
        if serving.response.number != response || serving.stage != (Stage::Rest { from }) {
            return;
        }
        let (source, length) = (Source::File(serving.response.file), serving.response.region() - from);
        self.write(client, Run { source, from, length });
        self.end_response(machine, client);
    }

    pub(super) fn write_trailer(&mut self, client: usize, response: &Response) {
        let machine = self.clients[client].frontend;
        if let Some(serving) = self.machines[machine].worker.serving.get_mut(&client) {
            serving.has_trailer = true;
        }
        let Response { number, header, trailer, .. } = *response;
        self.write(client, Run { source: Source::Header(number), from: header, length: trailer });
    }

    /// Ends a response for which the server need not send more of the payload. Writes the bytes after the payload,
    /// unless they are written already. Then handles the client's next request, if it has come already.
    pub(super) fn end_response(&mut self, machine: usize, client: usize) {
        let serving = self.machines[machine].worker.serving.get(&client).copied();
        if let Some(serving) = serving.filter(|serving| !serving.has_trailer) {
            self.write_trailer(client, &serving.response);
        }
        let worker = &mut self.machines[machine].worker;
        worker.serving.remove(&client);
        if let Some(next) = worker.pending.remove(&client) {
            self.request(client, next);
        }
    }

    /// Has a server give up what it does for a client whose connection is gone.
    pub(super) fn give_up(&mut self, machine: usize, client: usize) {
        let generation = self.machines[machine].generation;
        let worker = &mut self.machines[machine].worker;
        worker.pending.remove(&client);
        let Some(serving) = worker.serving.remove(&client) else { return };
        let server = worker.server(serving.response.kind);
        if let (Stage::Begun { handoff, .. }, Some(server)) = (serving.stage, server) {
            self.cover("abort of a server");
            let request = Box::new(Request::Abort(local::Abort { header: local::Abort::HEADER, handoff }));
            self.schedule.after(LOCAL, Event::ToAgent { machine, generation, server: server.control, request });
        }
    }

    /// Ends a machine's nginx worker: the connections of the clients that it serves are reset, and the agent sees the
    /// worker's own connections end. Another worker connects later.
    pub(super) fn end_worker(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        let generation = self.machines[machine].generation;
        let Some(connected) = self.machines[machine].worker.connected.take() else { return };
        self.cover("worker ends");
        let serving = &self.machines[machine].worker.serving;
        let its = serving.iter().filter(|(_, serving)| serving.response.kind != Kind::Stored);
        for client in its.map(|(client, _)| *client).collect::<Vec<_>>() {
            self.reset_client(client);
        }
        // Offers that the agent has not read are lost with the connection.
        self.machines[machine].unread.clear();
        for server in [connected.control, connected.offers] {
            self.machines[machine].event(now, base, |logic, call| logic.remove_server(server, call));
            self.act(machine);
        }
        self.end_turn(machine);
        let delay = self.random.time(Duration::from_millis(1), Duration::from_millis(300));
        self.schedule.after(delay, Event::ServersConnect { machine, generation });
    }

    /// Returns the client whose handoff has this number.
    pub(super) fn client_of_handoff(&self, machine: usize, handoff: u64) -> Option<usize> {
        let is_its = |serving: &Serving| matches!(serving.stage, Stage::Begun { handoff: one, .. } if one == handoff);
        let found = self.machines[machine].worker.serving.iter().find(|(_, serving)| is_its(serving));
        found.map(|(client, _)| *client)
    }

    pub(super) fn on_ring(&mut self, machine: usize, ring: u32, handoff: u64) {
        let worker = &self.machines[machine].worker;
        let is_its = [worker.connected, worker.program].into_iter().flatten().any(|server| server.ring == Some(ring));
        if !is_its {
            return self.cover("event lost");
        }
        if let Some(client) = self.client_of_handoff(machine, handoff) {
            self.end_response(machine, client);
        }
    }

    pub(super) fn on_told(&mut self, machine: usize, generation: u32, server: usize, told: &Told) {
        if self.machines[machine].generation != generation {
            return;
        }
        let worker = &self.machines[machine].worker;
        let is_there = [worker.connected, worker.program].into_iter().flatten().any(|one| one.control == server);
        match told {
            _ if !is_there => {}
            Told::Ended(local::Ended { handoff, reason, .. }) => {
                let reason = Reason::from_number(*reason).unwrap_or(Reason::Malformed);
                self.on_ended(machine, *handoff, reason);
            }
            Told::Answer(answer) => self.on_answer(machine, answer),
            Told::Digest(digest) => self.on_digest(machine, digest),
        }
    }

    fn on_ended(&mut self, machine: usize, name: u64, reason: Reason) {
        let serving = &self.machines[machine].worker.serving;
        let is_its = |serving: &Serving| matches!(serving.stage, Stage::Fetching { fetch, .. } if fetch == name);
        let fetching = serving.iter().find(|(_, serving)| is_its(serving)).map(|(client, one)| (*client, one.response));
        if let Some((client, response)) = fetching {
            self.cover("fetch refused");
            return self.relay(machine, client, response, 0);
        }
        let Some(client) = self.client_of_handoff(machine, name) else { return };
        self.cover("told of an end");
        self.on_handoff_ended(machine, client, name, reason);
    }

    /// Has a server end a handoff whose region is still active, and relay the rest of the payload.
    pub(super) fn take_back(&mut self, machine: usize, client: usize, handoff: u64) {
        let Some(serving) = self.machines[machine].worker.serving.get(&client).copied() else { return };
        let flow = self.machines[machine].host.flows.get_mut(&client);
        if let Some(acked) = flow.and_then(|flow| flow.take(handoff)) {
            self.cover("region taken");
            self.relay(machine, client, serving.response, acked);
        }
    }

    /// Checks the responses of a machine's servers. Finds handoffs that have ended without a message to their server.
    /// Also finds handoffs without progress whose server hears nothing from an agent, and fetches and questions without
    /// an answer.
    pub(super) fn tend_servers(&mut self, machine: usize) {
        let now = self.now();
        for client in self.machines[machine].worker.serving.keys().copied().collect::<Vec<_>>() {
            let Some(serving) = self.machines[machine].worker.serving.get_mut(&client) else { continue };
            serving.quiet += 1;
            let (serving, kind) = (*serving, serving.response.kind);
            match serving.stage {
                Stage::Fetching { got: 0, .. } if serving.quiet > FETCH_PATIENCE => {
                    self.cover("fetch is given up");
                    self.relay(machine, client, serving.response, 0);
                }
                Stage::Asking { .. } if serving.quiet > 2 => self.relay(machine, client, serving.response, 0),
                Stage::Begun { handoff, peer, acked } => {
                    let region = self.machines[machine].host.flows.get(&client).and_then(|flow| flow.region(now));
                    let is_alone = self.machines[machine].worker.server(kind).is_none();
                    match region.filter(|region| region.handoff == handoff) {
                        None => self.end_response(machine, client),
                        Some(region) if region.acked == acked => {
                            if is_alone || serving.quiet > PATIENCE {
                                self.on_silence(machine, client, handoff, is_alone);
                            }
                        }
                        Some(region) => self.note_progress(machine, client, handoff, peer, region.acked),
                    }
                }
                _ => {}
            }
        }
        self.schedule.after(LOOK, Event::ServersTick { machine });
    }

    fn note_progress(&mut self, machine: usize, client: usize, handoff: u64, peer: usize, acked: u64) {
        if let Some(serving) = self.machines[machine].worker.serving.get_mut(&client) {
            (serving.stage, serving.quiet) = (Stage::Begun { handoff, peer, acked }, 0);
        }
    }

    pub(super) fn check_bound(&mut self, client: usize, handoff: u64, acked: u64) {
        let machine = self.clients[client].frontend;
        if self.client_of_handoff(machine, handoff) != Some(client) {
            return;
        }
        let region = self.machines[machine].host.flows.get(&client).and_then(|flow| flow.region(self.now()));
        match region.map(|region| region.acked).filter(|now| *now > acked) {
            Some(acked) => self.schedule.after(BOUND, Event::Bound { client, handoff, acked }),
            None => self.violate(format!("handoff {handoff} of machine {machine} makes no progress for {BOUND:?}")),
        }
    }
}
