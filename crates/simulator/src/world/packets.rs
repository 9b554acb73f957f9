//! Packets between frontends, clients and backends. A *sender* is a backend's socket for a client of a frontend. A
//! *region* is a range of sequence numbers of a client's connection, which one payload takes. A *ring* is a BPF ring
//! buffer, by which the kernel tells a server that the client has acknowledged a payload. A *payload* is the body of a
//! response.

use std::time::Duration;

use shunt_wire::local::Reason;

use crate::content::Run;
use crate::flow::{Arrived, Connected, Copy};
use crate::sender::Look;
use crate::world::{Event, LOCAL, World};

/// Time between two checks of a frontend's own socket, which sends unacknowledged bytes again each time.
const AGAIN: Duration = Duration::from_millis(250);
/// Time between two checks of a backend's sender by the clock.
const TURN: Duration = Duration::from_millis(50);

impl World {
    /// Sends segments to a client, on the connection that it has.
    pub(super) fn send_segments(&mut self, client: usize, segments: Vec<(u32, Run)>) {
        let connection = self.clients[client].connection;
        for (seq, run) in segments {
            self.send_packet(client, || Event::Segment { client, connection, seq, run });
        }
    }

    pub(super) fn on_ack(&mut self, client: usize, connection: u32, ack: u32) {
        if self.clients[client].connection != connection {
            return;
        }
        let (now, machine) = (self.now(), self.clients[client].frontend);
        let Some(flow) = self.machines[machine].host.flows.get_mut(&client) else { return };
        let Arrived { copy, complete } = flow.arrive(ack, now);
        let segments = flow.send(false, now);
        self.send_segments(client, segments);
        if let Some(copy) = copy {
            let to = self.machines[machine].machine(copy.peer as usize);
            if self.reach(machine, to) {
                self.cover("copy");
                self.send_packet(client, || Event::Copied { machine: to, client, copy });
            }
        }
        self.complete(machine, complete);
    }

    /// Tells a server by its ring that a region is complete.
    pub(super) fn complete(&mut self, machine: usize, complete: Option<(u64, u32)>) {
        if let Some((handoff, ring)) = complete {
            self.cover("region complete");
            self.schedule.after(LOCAL, Event::Ring { machine, ring, handoff });
        }
    }

    pub(super) fn on_copy(&mut self, machine: usize, client: usize, copy: &Copy) {
        let now = self.now();
        let Some(sender) = self.machines[machine].host.senders.get_mut(&client) else { return };
        let claimant = sender.claimant;
        if sender.hear(copy, now) {
            self.cover("word");
            self.give_word(machine, client, &claimant);
        }
        self.pump(machine, client);
    }

    /// Has a sender send as much as it may. Its agent first gives the kernel more bytes, if the agent is awake and the
    /// payload's file has not changed. The segments do not arrive if the client has reset the connection, or if the
    /// path to the client is closed.
    pub(super) fn pump(&mut self, machine: usize, client: usize) {
        let now = self.now();
        let is_awake = self.machines[machine].is_awake(now);
        let is_as_begun = self.machines[machine].host.is_as_begun(client);
        let Some(sender) = self.machines[machine].host.senders.get_mut(&client) else { return };
        if is_awake && is_as_begun {
            sender.queue();
        }
        let segments = sender.send(now);
        let token = self.machines[self.clients[client].frontend].host.flows.get(&client).map(Connected::token);
        let is_current = token.is_some_and(|token| {
            self.machines[machine].host.senders.get(&client).is_some_and(|sender| sender.is_of(token))
        });
        let peer = self.clients[client].frontend;
        let is_reached = self.machines[machine].reaches(peer, now);
        if is_current && is_reached {
            self.send_segments(client, segments);
        }
    }

    pub(super) fn on_sender_turn(&mut self, machine: usize, client: usize, number: u64) {
        let now = self.now();
        let Some(sender) = self.machines[machine].host.senders.get(&client) else { return };
        if sender.is_done() || sender.number != number {
            return;
        }
        if sender.look(now) == Look::NoProgress {
            let (claimant, is_orphan) = (sender.claimant, sender.is_orphan());
            self.machines[machine].host.senders.remove(&client);
            if !is_orphan {
                self.fail_sender(machine, &claimant, Reason::NoProgress);
            }
            return;
        }
        self.pump(machine, client);
        self.schedule.after(TURN, Event::SenderTurn { machine, client, number });
    }

    /// Writes bytes to a frontend's own socket, which sends them.
    pub(super) fn write(&mut self, client: usize, run: Run) {
        let (now, machine) = (self.now(), self.clients[client].frontend);
        let Some(flow) = self.machines[machine].host.flows.get_mut(&client) else { return };
        let was_quiet = flow.is_quiet();
        flow.write(run);
        let segments = flow.send(false, now);
        self.send_segments(client, segments);
        if was_quiet {
            let connection = self.clients[client].connection;
            self.schedule.after(AGAIN, Event::SocketTurn { client, connection });
        }
    }

    pub(super) fn on_socket_turn(&mut self, client: usize, connection: u32) {
        let (now, machine) = (self.now(), self.clients[client].frontend);
        if self.clients[client].connection != connection {
            return;
        }
        let Some(flow) = self.machines[machine].host.flows.get_mut(&client) else { return };
        if flow.is_quiet() {
            return;
        }
        let segments = flow.send(true, now);
        if flow.is_reset() {
            self.cover("given up by the kernel");
            return self.reset_client(client);
        }
        self.send_segments(client, segments);
        self.schedule.after(AGAIN, Event::SocketTurn { client, connection });
    }
}
