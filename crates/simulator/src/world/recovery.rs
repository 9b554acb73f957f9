//! Steps of the frontend's servers after a handoff has ended without success. The rest of the payload comes from
//! another backend, or is relayed (sent through the tiers). Otherwise the client's connection is reset. A *handoff*
//! lets a backend send a payload on a client's connection. An *offer* is a payload that a backend's server holds ready.
//! The *digest* of a file is its SHA-256. A *region* is a range of sequence numbers of a client's connection, which one
//! payload takes. A *payload* is the body of a response.

use std::time::Duration;

use shunt_decisions::Move;
use shunt_wire::local::{self, Reason, Request};

use crate::client::{Kind, Response};
use crate::worker::{Rest, Serving, Stage, tag};
use crate::world::{Body, Event, LOCAL, World};

/// Time in which another backend must have offered the rest of a payload. For a TLS connection, it must also have told
/// the digest of its file in this time. The digest proves that the file is the same.
const PATIENCE: Duration = Duration::from_secs(4);

/// Returns whether an agent ends a handoff for this reason only if the client has acknowledged none of the bytes that
/// this agent sends.
fn is_refusal(reason: Reason) -> bool {
    use Reason::{Busy, Length, Limit, Malformed, NotAllowed, Tag, UnknownOffer, Unreachable, Version};
    matches!(reason, UnknownOffer | Tag | Length | Limit | Malformed | Version | Busy | NotAllowed | Unreachable)
}

impl World {
    /// Handles the message that a handoff has ended without success.
    pub(super) fn on_handoff_ended(&mut self, machine: usize, client: usize, handoff: u64, reason: Reason) {
        let Some(serving) = self.machines[machine].worker.serving.get(&client).copied() else { return };
        match serving.response.kind {
            Kind::Stored => self.end_of_program(machine, client, handoff, &serving),
            Kind::Sealed if is_refusal(reason) && !serving.has_moved => {
                self.take_none(machine, client, handoff, &serving.response);
            }
            _ if reason == Reason::PeerLost && self.seek_rest(machine, client) => {}
            Kind::Sealed => self.reset_client(client),
            Kind::File => self.take_back(machine, client, handoff),
        }
    }

    /// Handles a handoff without progress. Its server has lost its agent (`is_alone`), or the agent has said nothing of
    /// the handoff for some seconds.
    pub(super) fn on_silence(&mut self, machine: usize, client: usize, handoff: u64, is_alone: bool) {
        let Some(serving) = self.machines[machine].worker.serving.get(&client).copied() else { return };
        let is_sought = serving.rest.is_some_and(|rest| self.now() < rest.asked + PATIENCE);
        match serving.response.kind {
            // The program waits: its agent tells it that the handoff has ended, or cancels the region after a while.
            Kind::Stored if !is_alone && serving.quiet < 40 => {}
            Kind::Stored => self.end_of_program(machine, client, handoff, &serving),
            _ if is_sought => {}
            Kind::Sealed if !is_alone && serving.quiet < 40 => {}
            Kind::Sealed => self.reset_client(client),
            Kind::File => self.take_back(machine, client, handoff),
        }
    }

    /// Takes a TLS payload back and relays it, if the client has nothing of it. Otherwise resets the client's
    /// connection.
    fn take_none(&mut self, machine: usize, client: usize, handoff: u64, response: &Response) {
        let flow = self.machines[machine].host.flows.get_mut(&client);
        if flow.is_some_and(|flow| flow.take_none(handoff)) {
            self.cover("region taken");
            self.relay(machine, client, *response, 0);
        } else {
            self.reset_client(client);
        }
    }

    /// Asks another backend for the rest of a payload. Returns whether the server now waits for another backend. It
    /// does not, for example, if there is none to ask, or if one was asked and [`PATIENCE`] is over.
    fn seek_rest(&mut self, machine: usize, client: usize) -> bool {
        let now = self.now();
        let Some(serving) = self.machines[machine].worker.serving.get(&client).copied() else { return false };
        let Stage::Begun { peer: lost, .. } = serving.stage else { return false };
        if let Some(rest) = serving.rest {
            return now < rest.asked + PATIENCE;
        }
        let others: Vec<usize> = (0..self.service.machines - 1).filter(|peer| *peer != lost).collect();
        let region = self.machines[machine].host.flows.get(&client).and_then(|flow| flow.region(now));
        let Some(region) = region.filter(|_| self.variety.recovers && !others.is_empty()) else { return false };
        let peer = others[self.random.below(others.len() as u64) as usize];
        if !self.may_hand_off(machine, peer) || region.acked >= serving.response.region() {
            return false;
        }
        self.cover("rest is sought");
        if let Some(serving) = self.machines[machine].worker.serving.get_mut(&client) {
            serving.rest = Some(Rest { from: region.acked, asked: now, offered: None, handoff: 0 });
        }
        self.ask_backend(machine, client, serving.response, peer, Some(region.acked));
        true
    }

    /// Handles another backend's answer to the request for the rest of a payload.
    pub(super) fn on_rest(&mut self, client: usize, response: Response, from: usize, body: Body) {
        let machine = self.clients[client].frontend;
        let Some(serving) = self.machines[machine].worker.serving.get(&client).copied() else { return };
        let Stage::Begun { handoff, .. } = serving.stage else { return };
        let Some(rest) = serving.rest.filter(|rest| serving.response == response && rest.offered.is_none()) else {
            return;
        };
        let peer = self.machines[machine].peer(from);
        let Body::Offer(offer) = body else { return self.give_rest_up(machine, client, handoff) };
        let name = self.machines[machine].worker.name_handoff();
        self.set_rest(machine, client, Some(Rest { offered: Some((peer, offer)), handoff: name, ..rest }));
        match response.kind {
            Kind::Sealed if serving.digest.is_some() => self.prove(machine, client, &response, rest.from),
            Kind::Sealed => self.give_rest_up(machine, client, handoff),
            _ => self.move_on(machine, client),
        }
    }

    fn set_rest(&mut self, machine: usize, client: usize, rest: Option<Rest>) {
        if let Some(serving) = self.machines[machine].worker.serving.get_mut(&client) {
            serving.rest = rest;
        }
    }

    fn give_rest_up(&mut self, machine: usize, client: usize, handoff: u64) {
        self.cover("no rest");
        let serving = self.machines[machine].worker.serving.get(&client);
        match serving.map(|serving| serving.response.kind) {
            Some(Kind::Sealed) => self.reset_client(client),
            _ => self.take_back(machine, client, handoff),
        }
    }

    /// Asks another backend for the digest of the file that its offer of the rest is read from.
    fn prove(&mut self, machine: usize, client: usize, response: &Response, from: u64) {
        let serving = self.machines[machine].worker.serving.get(&client).copied();
        let rest = serving.and_then(|serving| serving.rest);
        let Some(Rest { offered: Some((peer, offer)), handoff, .. }) = rest else { return };
        let Some(server) = self.machines[machine].worker.connected else { return };
        let generation = self.machines[machine].generation;
        self.cover("prove");
        let prove = local::Prove {
            header: local::Prove::HEADER,
            peer: peer as u32,
            epoch: self.epoch(machine, peer),
            handoff,
            offer,
            length: response.length - response.record_at(from).0 * crate::client::RECORD,
            tag: tag(response),
        };
        let request = Box::new(Request::Prove(prove));
        self.schedule.after(LOCAL, Event::ToAgent { machine, generation, server: server.control, request });
    }

    /// Handles a digest: of the file of a handoff under way, or in answer to a question.
    pub(super) fn on_digest(&mut self, machine: usize, digest: &local::Digest) {
        let sha256 = (digest.known == 1).then_some(digest.sha256);
        if let Some(client) = self.client_of_handoff(machine, digest.handoff) {
            self.cover("digest");
            if let Some(serving) = self.machines[machine].worker.serving.get_mut(&client) {
                serving.digest = sha256;
            }
            if sha256.is_none() {
                self.say_withdrawn(machine, digest);
            } else if self.variety.has_all_faults && self.random.below(2) == 0 {
                // Loses the backend just after the server has learned the digest. Random faults seldom hit this moment.
                let backend = self.machines[machine].machine(digest.peer as usize);
                self.kill(backend, Duration::from_secs(1));
                self.machines[backend].host.senders.clear();
            }
            return;
        }
        let is_its = |serving: &Serving| serving.rest.is_some_and(|rest| rest.handoff == digest.handoff);
        let found = self.machines[machine].worker.serving.iter().find(|(_, serving)| is_its(serving));
        let Some((client, serving)) = found.map(|(client, serving)| (*client, *serving)) else { return };
        let Stage::Begun { handoff, .. } = serving.stage else { return };
        if sha256.is_some() && sha256 == serving.digest {
            self.move_on(machine, client);
        } else {
            self.give_rest_up(machine, client, handoff);
        }
    }

    /// Has a server tell its agent that the server has forgotten a digest, as the backend asked.
    fn say_withdrawn(&mut self, machine: usize, digest: &local::Digest) {
        let Some(server) = self.machines[machine].worker.connected else { return };
        let generation = self.machines[machine].generation;
        let withdrawn = local::Withdrawn {
            header: local::Withdrawn::HEADER,
            peer: digest.peer,
            epoch: self.epoch(machine, digest.peer as usize),
            handoff: digest.handoff,
        };
        let request = Box::new(Request::Withdrawn(withdrawn));
        self.schedule.after(LOCAL, Event::ToAgent { machine, generation, server: server.control, request });
    }

    /// Has the other backend send the rest of a client's payload (SHUNT_MOVE).
    fn move_on(&mut self, machine: usize, client: usize) {
        let Some(serving) = self.machines[machine].worker.serving.get(&client).copied() else { return };
        let Some(Rest { from, offered: Some((peer, offer)), handoff, .. }) = serving.rest else { return };
        let ring = self.machines[machine].worker.connected.and_then(|connected| connected.ring);
        let (Some(ring), Stage::Begun { handoff: before, .. }) = (ring, serving.stage) else { return };
        if !self.may_hand_off(machine, peer) {
            return self.give_rest_up(machine, client, before);
        }
        let to = Move { peer: peer as u32, ring, handoff, from };
        let flow = self.machines[machine].host.flows.get_mut(&client);
        if !flow.is_some_and(|flow| flow.move_on(&to)) {
            return;
        }
        self.cover("moved");
        if let Some(serving) = self.machines[machine].worker.serving.get_mut(&client) {
            serving.stage = Stage::Begun { handoff, peer, acked: from };
            (serving.rest, serving.has_moved, serving.quiet) = (None, true, 0);
        }
        self.claim(machine, client, &serving.response, offer, Some(from));
    }
}
