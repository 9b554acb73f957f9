//! Carries out the actions that an agent's logic asks for, in place of the daemon (a real agent's I/O). A *region* is a
//! range of sequence numbers of a client's connection, which one payload takes. A *payload* is the body of a response.

use shunt_logic::action::Given;
use shunt_logic::counts::Counts;
use shunt_logic::machine::ActiveRegion;
use shunt_logic::{Action, Told};

use crate::host::{Host, client_of};
use crate::world::{Event, LOCAL, World};

impl World {
    /// Carries out all actions that a machine's agent has asked for, and those that they cause.
    pub(crate) fn act(&mut self, machine: usize) {
        while let Some(agent) = &mut self.machines[machine].agent {
            let Some(action) = agent.actions.pop() else { return };
            self.do_action(machine, action);
        }
    }

    fn do_action(&mut self, machine: usize, action: Action<Host>) {
        let generation = self.machines[machine].generation;
        match action {
            // Nothing to do. Servers here read the logic's own board (its peers and limits), and copies of packets need
            // no steering table.
            Action::WriteBoard(_) => self.cover("board"),
            Action::Steer(_) => self.cover("steer"),
            Action::Dial(peer) => {
                self.cover("dial");
                self.dial(machine, peer);
            }
            Action::HangUp(peer) => self.hang_up(machine, peer),
            Action::Tell(server, told) => self.tell(machine, server, told),
            Action::WatchRoutes(peer, _) => {
                let is_there = !self.variety.has_all_faults || self.random.below(20) > 0;
                self.set_route(machine, peer, generation, is_there);
            }
            Action::SetSpacing(peer, spacing) => {
                self.cover("spacing");
                let flow = self.machines[machine].host.flows.get_mut(&client_of(spacing.client()));
                flow.map(|flow| flow.space_acks(peer as u32, spacing.bytes.get()));
            }
            Action::SetDelivered(peer, word) => {
                let client = client_of(word.client());
                let flow = self.machines[machine].host.flows.get_mut(&client);
                let complete = flow.and_then(|flow| flow.deliver(peer as u32, word.handoff.get()));
                self.cover("delivered");
                self.complete(machine, complete);
            }
            Action::Abort(given_up) => self.abort(machine, &given_up),
            Action::GoOn(withdrawn) => self.go_on(machine, &withdrawn),
            Action::ForgetPeer(peer) => {
                self.cover("forget peer");
                let senders = &mut self.machines[machine].host.senders;
                senders.retain(|_, sender| sender.claimant.peer != peer || sender.is_queued() && !sender.is_done());
            }
            Action::CloseFiles(_) => self.cover("offers expire"),
            Action::Cancel(region) => self.cancel(machine, &region),
            action => self.do_other_action(machine, action),
        }
    }

    /// Carries out an action about servers, fetches or the store.
    fn do_other_action(&mut self, machine: usize, action: Action<Host>) {
        match action {
            Action::Welcome { server, ring, .. } => self.welcome(machine, server, ring),
            Action::CloseServer(_) | Action::CloseRing(_) => self.cover("server gone"),
            Action::SendStats(_) => {
                self.cover("stats");
                let agent = self.machines[machine].agent.as_ref();
                let counts = agent.map(|agent| agent.logic.shared.counts.values().count());
                if counts.is_some_and(|counts| counts != Counts::MEANINGS.len()) {
                    self.violate(format!("machine {machine} has {counts:?} counters"));
                }
            }
            Action::BeginFetch { fetch, peer, request } => self.begin_fetch(machine, fetch, peer, &request),
            Action::DeliverFetch { fetch, server, message } => self.deliver_fetch(machine, fetch, server, &message),
            Action::DropFetch(fetch) => self.drop_fetch(machine, fetch),
            Action::ServeFetch { fetch, offer, file, .. } => self.begin_serving(machine, fetch, &offer, file),
            Action::ResetFetch(fetch) => self.reset_fetch(machine, fetch),
            Action::SetEnd(address, key) => self.set_end(machine, address, key),
            Action::WriteSources => self.write_sources(machine),
            _ => self.violate("an action that is another function's".into()),
        }
    }

    /// Sends an agent's message to a server, unless the server's socket does not take it.
    fn tell(&mut self, machine: usize, server: usize, told: Told) {
        let generation = self.machines[machine].generation;
        let says = u32::from_ne_bytes(told.as_bytes()[4..8].try_into().unwrap_or_default());
        if says as usize != told.as_bytes().len() {
            self.violate(format!("a message of {says} bytes has another length"));
        }
        if self.random.in_a_million(self.variety.unread) {
            self.cover("message is not read");
            if let Some(agent) = &mut self.machines[machine].agent {
                agent.logic.unread();
            }
            return;
        }
        self.schedule.after(LOCAL, Event::ToServer { machine, generation, server, told });
    }

    fn welcome(&mut self, machine: usize, server: usize, ring: Option<u32>) {
        self.cover("welcome");
        if ring.is_some() && self.random.in_a_million(self.variety.ringless) {
            self.cover("no ring");
            let worker = &mut self.machines[machine].worker;
            let servers = [&mut worker.connected, &mut worker.program];
            servers.into_iter().flatten().filter(|one| one.control == server).for_each(|one| one.ring = None);
            if let Some(agent) = &mut self.machines[machine].agent {
                agent.logic.ring_failed(server);
            }
        }
    }

    /// Cancels a region whose payload nobody sends, and resets its client's connection.
    fn cancel(&mut self, machine: usize, region: &ActiveRegion) {
        self.cover("cancel");
        let client = client_of(region.client);
        let flow = self.machines[machine].host.flows.get_mut(&client);
        if flow.is_some_and(|flow| flow.cancel(region.handoff)) {
            self.reset_client(client);
        }
    }

    fn hang_up(&mut self, machine: usize, peer: usize) {
        self.cover("hang up");
        let Some(agent) = &mut self.machines[machine].agent else { return };
        if let Some(link) = agent.links[peer].take() {
            self.close(link, machine);
        }
    }

    fn abort(&mut self, machine: usize, given_up: &Given) {
        self.cover("abort");
        self.machines[machine].host.senders.retain(|_, sender| {
            let of = &sender.claimant;
            sender.is_done() || !given_up.contains(&(of.peer, of.worker, of.handoff))
        });
    }
}
