//! Servers: they hand payloads off, make offers, and relay the rest of handoffs that fail.

use std::time::Duration;

use shunt_decisions::Counter;
use shunt_logic::Told;
use shunt_wire::local::{self, BoardPeer, Handoff, Request, closed};
use zerocopy::FromZeros;

use crate::client::Response;
use crate::content::{Run, Source};
use crate::flow::Connected;
use crate::worker::{Serving, Stage, tag};
use crate::world::{Event, LOCAL, World};

/// Time between two checks of the servers' handoffs under way.
const LOOK: Duration = Duration::from_secs(1);
/// Longest time of a handoff. A claim waits at most 30 s for a sender.
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
        worker.serving.insert(client, Serving { response, stage: Stage::Asked });
        if !self.machines[machine].host.flows.contains_key(&client) {
            let token = self.random.word();
            let flow =
                Connected::new(self.clients[client].at, self.server_of(client), self.clients[client].first, token);
            self.machines[machine].host.flows.insert(client, flow);
        }
        let others = self.service.machines - 1;
        let peer = self.random.below(others as u64) as usize;
        let to = self.machines[machine].machine(peer);
        let consents = self.may_hand_off(machine, peer);
        let delay = if self.reach(machine, to) { self.way() } else { Duration::from_secs(1) };
        let from = machine;
        self.schedule.after(delay, Event::Asked { machine: to, from, client, response, consents });
    }

    /// Returns whether a machine's board lets its servers hand off to a peer.
    fn may_hand_off(&self, machine: usize, peer: usize) -> bool {
        let Some(agent) = &self.machines[machine].agent else { return false };
        let board = &agent.logic.shared.board;
        let entry = &board.peers()[peer];
        let is_open = (board.head().closed | entry.closed) & closed::HANDOFFS == 0;
        is_open && entry.state == BoardPeer::UP && entry.families & 1 != 0
    }

    /// Returns whether a machine's board lets its servers make offers for a peer.
    fn may_offer(&self, machine: usize, peer: usize) -> bool {
        let Some(agent) = &self.machines[machine].agent else { return false };
        let board = &agent.logic.shared.board;
        let entry = &board.peers()[peer];
        let is_open = (board.head().closed | entry.closed) & closed::OFFERS == 0;
        is_open && entry.state == BoardPeer::UP
    }

    pub(super) fn on_asked(&mut self, machine: usize, from: usize, client: usize, response: Response, consents: bool) {
        let peer = self.machines[machine].peer(from);
        let offers = consents && self.may_offer(machine, peer);
        let offer = if offers { self.machines[machine].worker.offer(peer, &response) } else { None };
        if let Some(offer) = offer {
            self.cover("offer");
            self.machines[machine].offers_made += 1;
            self.machines[machine].unread.push_back((offer, response.file));
        }
        let offer = offer.map(|offer| offer.number);
        let delay = if self.reach(machine, from) { self.way() } else { Duration::from_secs(1) };
        self.schedule.after(delay, Event::Answered { client, response, from: machine, offer });
    }

    pub(super) fn on_answered(&mut self, client: usize, response: Response, from: usize, offer: Option<u64>) {
        let machine = self.clients[client].frontend;
        let serving = self.machines[machine].worker.serving.get(&client);
        let is_waited_for =
            serving.is_some_and(|serving| serving.response == response && serving.stage == Stage::Asked);
        if !is_waited_for {
            return;
        }
        self.write(client, Run { source: Source::Header(response.number), from: 0, length: response.header });
        let peer = self.machines[machine].peer(from);
        let began = offer.is_some_and(|offer| self.hand_off(machine, client, &response, peer, offer));
        if !began {
            self.cover("relayed");
            self.relay(machine, client, response, 0);
        }
    }

    /// Begins a region, and tells the agent of the handoff. Returns false if the board or the kernel does not allow it,
    /// or if no agent is connected.
    fn hand_off(&mut self, machine: usize, client: usize, response: &Response, peer: usize, offer: u64) -> bool {
        let now = self.now();
        let generation = self.machines[machine].generation;
        if !self.may_hand_off(machine, peer) {
            return false;
        }
        let epoch = self.machines[machine].agent.as_ref().map(|agent| agent.logic.shared.board.peers()[peer].epoch);
        let Some(connected) = self.machines[machine].worker.connected else { return false };
        let (Some(epoch), Some(ring)) = (epoch, connected.ring) else { return false };
        let handoff = self.machines[machine].worker.name_handoff();
        let Some(flow) = self.machines[machine].host.flows.get_mut(&client) else { return false };
        if !flow.has_sent_all() {
            return false;
        }
        let begun = flow.begin(peer as u32, ring, handoff, response.length, now);
        let state = flow.state();
        if begun != Counter::FE_BEGUN {
            self.cover("region refused");
            return false;
        }
        self.cover("region begun");
        let message = Handoff {
            header: Handoff::HEADER,
            peer: peer as u32,
            epoch,
            bytes: size_of::<Handoff>() as u32,
            handoff,
            offer,
            length: response.length,
            tag: tag(response),
            flow: state,
            ..Handoff::new_zeroed()
        };
        let request = Box::new(Request::Handoff(message));
        self.schedule.after(LOCAL, Event::ToAgent { machine, generation, server: connected.control, request });
        self.set_stage(machine, client, Stage::Begun { handoff, peer, acked: 0 });
        self.schedule.after(BOUND, Event::Bound { client, handoff });
        true
    }

    pub(super) fn set_stage(&mut self, machine: usize, client: usize, stage: Stage) {
        if let Some(serving) = self.machines[machine].worker.serving.get_mut(&client) {
            serving.stage = stage;
        }
    }

    /// Has the rest of a payload relayed.
    fn relay(&mut self, machine: usize, client: usize, response: Response, from: u64) {
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
        let Response { file, length, .. } = serving.response;
        self.write(client, Run { source: Source::File(file), from, length: length - from });
        self.end_response(machine, client);
    }

    /// Ends a response, because the kernel or the client has all of it. The client's next request is handled then.
    fn end_response(&mut self, machine: usize, client: usize) {
        let worker = &mut self.machines[machine].worker;
        worker.serving.remove(&client);
        if let Some(next) = worker.pending.remove(&client) {
            self.request(client, next);
        }
    }

    /// Returns the client whose handoff has this number.
    fn client_of_handoff(&self, machine: usize, handoff: u64) -> Option<usize> {
        let is_its = |serving: &Serving| matches!(serving.stage, Stage::Begun { handoff: one, .. } if one == handoff);
        let found = self.machines[machine].worker.serving.iter().find(|(_, serving)| is_its(serving));
        found.map(|(client, _)| *client)
    }

    pub(super) fn on_ring(&mut self, machine: usize, ring: u32, handoff: u64) {
        let is_its = self.machines[machine].worker.connected.is_some_and(|connected| connected.ring == Some(ring));
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
        let control = self.machines[machine].worker.connected.map(|connected| connected.control);
        let Told::Ended(local::Ended { handoff, .. }) = told else { return };
        if control == Some(server)
            && let Some(client) = self.client_of_handoff(machine, *handoff)
        {
            self.cover("told of an end");
            self.take_back(machine, client, *handoff);
        }
    }

    /// Has a server end a handoff whose region is still active, and relay the rest of the payload.
    fn take_back(&mut self, machine: usize, client: usize, handoff: u64) {
        let Some(serving) = self.machines[machine].worker.serving.get(&client).copied() else { return };
        let flow = self.machines[machine].host.flows.get_mut(&client);
        if let Some(acked) = flow.and_then(|flow| flow.take(handoff)) {
            self.cover("region taken");
            self.relay(machine, client, serving.response, acked);
        }
    }

    /// Checks the handoffs of a machine's servers. It finds handoffs that have ended without a message to their server,
    /// and handoffs without progress while no agent could tell the server.
    pub(super) fn tend_servers(&mut self, machine: usize) {
        let now = self.now();
        let worker = &self.machines[machine].worker;
        let begun = worker.serving.iter().filter_map(|(client, serving)| match serving.stage {
            Stage::Begun { handoff, peer, acked } => Some((*client, handoff, peer, acked)),
            _ => None,
        });
        let is_alone = worker.connected.is_none();
        for (client, handoff, peer, before) in begun.collect::<Vec<_>>() {
            let region = self.machines[machine].host.flows.get(&client).and_then(|flow| flow.region(now));
            match region.filter(|region| region.handoff == handoff) {
                None => self.end_response(machine, client),
                Some(region) if region.acked == before && is_alone => self.take_back(machine, client, handoff),
                Some(region) => {
                    self.set_stage(machine, client, Stage::Begun { handoff, peer, acked: region.acked });
                }
            }
        }
        self.schedule.after(LOOK, Event::ServersTick { machine });
    }

    pub(super) fn check_bound(&mut self, client: usize, handoff: u64) {
        let machine = self.clients[client].frontend;
        if self.client_of_handoff(machine, handoff) == Some(client) {
            self.violate(format!("handoff {handoff} of machine {machine} is not over after {BOUND:?}"));
        }
    }
}
