//! Clients: they ask for responses, receive segments, and reset their connections. A *payload* is the body of a
//! response. A *sender* is a backend's socket for a client. A *session* is the use of a connection between two agents.

use std::time::Duration;

use crate::client::{Kind, Response};
use crate::content::Run;
use crate::world::{Event, World};

impl World {
    /// Has a client ask for its next response, unless the history (simulated run) is ending or the client still waits
    /// for a response.
    pub(super) fn ask(&mut self, client: usize) {
        if self.is_closing || self.clients[client].waits_for.is_some() {
            return;
        }
        let response = self.next_response(self.clients[client].is_slow);
        self.clients[client].ask(response);
        if self.random.in_a_million(self.variety.leaves) {
            let connection = self.clients[client].connection;
            let delay = self.random.time(Duration::ZERO, Duration::from_millis(100));
            self.schedule.after(delay, Event::Leave { client, connection });
        }
        self.request(client, response);
    }

    /// Ends the busy part of a history (simulated run): clients ask for nothing more, and all agents read their
    /// original configurations.
    pub fn close_up(&mut self) {
        self.is_closing = true;
        for machine in 0..self.service.machines {
            self.restore_settings(machine);
        }
        // Frames that no correct agent sends may have told an agent something false. The agent forgets this when it
        // loses the session with the sender of the frames.
        let rogue = self.links.iter().filter(|link| link.is_rogue).map(|link| link.ends);
        for [machine, other] in rogue.collect::<Vec<_>>() {
            let peer = self.machines[machine].peer(other);
            self.lose_peer(machine, peer, "it sends what no agent sends");
            self.end_turn(machine);
        }
    }

    /// Has a client ask for a file with a header and a payload of these lengths. The client must not wait for another
    /// response.
    pub(crate) fn ask_for(&mut self, client: usize, header: u64, length: u64) {
        let number = self.next_response;
        self.next_response += 1;
        let response = Response { number, header, length, file: number, kind: Kind::File, trailer: 0 };
        self.clients[client].ask(response);
        self.request(client, response);
    }

    fn next_response(&mut self, is_slow: bool) -> Response {
        let number = self.next_response;
        self.next_response += 1;
        let length = match self.random.below(4) {
            0 => self.random.between(1, 20_000),
            1 => self.random.between(1_100_000, 2_000_000),
            _ => self.random.between(20_000, 300_000),
        };
        let header = self.random.between(100, 500);
        let kind = if self.random.in_a_million(self.variety.stored) {
            Kind::Stored
        } else if self.random.in_a_million(self.variety.sealed) {
            Kind::Sealed
        } else {
            Kind::File
        };
        // A backend tells a frontend the digest (SHA-256) of a file only if the payload takes more than a second. So
        // some payloads must be long.
        let is_long = is_slow && kind == Kind::Sealed;
        let length = if is_long { self.random.between(1_100_000, 2_000_000) } else { length };
        let trailer = if kind == Kind::Stored { self.random.below(300) } else { 0 };
        Response { number, header, length, file: number, kind, trailer }
    }

    pub(super) fn on_segment(&mut self, client: usize, connection: u32, seq: u32, run: Run) {
        if self.clients[client].connection != connection {
            return;
        }
        if let Err(wrong) = self.clients[client].take(seq, run) {
            return self.violate(format!("client {client} got {wrong}"));
        }
        let ack = self.clients[client].ack();
        self.send_packet(client, || Event::Ack { client, connection, ack });
        if self.clients[client].is_served() {
            self.cover("response");
            self.ask_later(client);
        }
    }

    fn ask_later(&mut self, client: usize) {
        let think = self.service.think;
        let delay = self.random.time(Duration::ZERO, think);
        self.schedule.after(delay, Event::Ask { client });
    }

    /// Has a client reset this connection, if the client still has it and waits for a response.
    pub(super) fn leave(&mut self, client: usize, connection: u32) {
        if self.clients[client].connection == connection && self.clients[client].waits_for.is_some() {
            self.cover("client leaves");
            self.reset_client(client);
        }
    }

    /// Resets a client's connection. The frontend's server gives up the response, and a backend that sends the payload
    /// hears of the reset. The client connects again, from the same port.
    pub(super) fn reset_client(&mut self, client: usize) {
        self.cover("reset");
        let machine = self.clients[client].frontend;
        let flow = self.machines[machine].host.flows.remove(&client);
        if let Some(flow) = flow {
            let token = flow.token();
            if let Some(region) = flow.region(self.now()) {
                let to = self.machines[machine].machine(region.peer as usize);
                let delay = self.way();
                self.schedule.after(delay, Event::Gone { machine: to, client, token });
            }
        }
        self.give_up(machine, client);
        let first = self.random.word();
        self.clients[client].reconnect(first);
        self.ask_later(client);
    }

    /// Ends the sender for a connection that the client has reset.
    pub(super) fn on_gone(&mut self, machine: usize, client: usize, token: u32) {
        let sender = self.machines[machine].host.senders.get(&client);
        let Some(sender) = sender.filter(|sender| sender.is_of(token)) else { return };
        let (claimant, is_left) = (sender.claimant, sender.is_orphan() || sender.is_done());
        self.machines[machine].host.senders.remove(&client);
        if !is_left {
            self.cover("client gone");
            self.fail_sender(machine, &claimant, shunt_wire::local::Reason::ClientGone);
        }
    }
}
