//! Packets between frontends, clients and backends.

use std::time::Duration;

use crate::content::Run;
use crate::flow::{Arrived, Copy};
use crate::sender::Look;
use crate::world::{Event, LOCAL, World};

/// Time after which a socket sends unacknowledged bytes again.
const AGAIN: Duration = Duration::from_millis(250);
/// Time between two checks of a sender by the clock.
const TURN: Duration = Duration::from_millis(50);

impl World {
    /// Sends segments to a client.
    pub(super) fn send_segments(&mut self, client: usize, segments: Vec<(u32, Run)>) {
        for (seq, run) in segments {
            self.send_packet(|| Event::Segment { client, seq, run });
        }
    }

    pub(super) fn on_segment(&mut self, client: usize, seq: u32, run: Run) {
        if let Err(wrong) = self.clients[client].take(seq, run) {
            return self.violate(format!("client {client} got {wrong}"));
        }
        let ack = self.clients[client].ack();
        self.send_packet(|| Event::Ack { client, ack });
        if self.clients[client].is_served() {
            self.cover("response");
            let think = self.service.think;
            let delay = self.random.time(Duration::ZERO, think);
            self.schedule.after(delay, Event::Ask { client });
        }
    }

    pub(super) fn on_ack(&mut self, client: usize, ack: u32) {
        let (now, machine) = (self.now(), self.clients[client].frontend);
        let Some(flow) = self.machines[machine].host.flows.get_mut(&client) else { return };
        let Arrived { copy, complete } = flow.arrive(ack, now);
        let segments = flow.send(false, now);
        self.send_segments(client, segments);
        if let Some(copy) = copy {
            let to = self.machines[machine].machine(copy.peer as usize);
            if self.reach(machine, to) {
                self.cover("copy");
                self.send_packet(|| Event::Copied { machine: to, client, copy });
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

    /// Has a sender send as much as it may. Its agent, if it is awake, gives the kernel more bytes first.
    pub(super) fn pump(&mut self, machine: usize, client: usize) {
        let now = self.now();
        let is_awake = self.machines[machine].is_awake(now);
        let Some(sender) = self.machines[machine].host.senders.get_mut(&client) else { return };
        if is_awake {
            sender.queue();
        }
        let segments = sender.send(now);
        self.send_segments(client, segments);
    }

    pub(super) fn on_sender_turn(&mut self, machine: usize, client: usize) {
        let now = self.now();
        let Some(sender) = self.machines[machine].host.senders.get(&client) else { return };
        if sender.is_done() {
            return;
        }
        if sender.look(now) == Look::NoProgress {
            let (claimant, is_orphan) = (sender.claimant, sender.is_orphan());
            self.machines[machine].host.senders.remove(&client);
            if !is_orphan {
                self.fail_sender(machine, &claimant);
            }
            return;
        }
        self.pump(machine, client);
        self.schedule.after(TURN, Event::SenderTurn { machine, client });
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
            self.schedule.after(AGAIN, Event::SocketTurn { client });
        }
    }

    pub(super) fn on_socket_turn(&mut self, client: usize) {
        let (now, machine) = (self.now(), self.clients[client].frontend);
        let Some(flow) = self.machines[machine].host.flows.get_mut(&client) else { return };
        if flow.is_quiet() {
            return;
        }
        let segments = flow.send(true, now);
        self.send_segments(client, segments);
        self.schedule.after(AGAIN, Event::SocketTurn { client });
    }
}
