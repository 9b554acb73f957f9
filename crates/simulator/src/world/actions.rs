//! Carries out the actions that an agent's logic asks for, in place of the daemon.

use shunt_logic::Action;
use shunt_logic::action::Given;

use crate::host::{Host, client_of};
use crate::world::{Event, LOCAL, World};

impl World {
    /// Carries out all actions of a machine's agent, and those that they cause.
    pub(super) fn act(&mut self, machine: usize) {
        while let Some(agent) = &mut self.machines[machine].agent {
            let Some(action) = agent.actions.pop() else { return };
            self.do_action(machine, action);
        }
    }

    fn do_action(&mut self, machine: usize, action: Action<Host>) {
        let generation = self.machines[machine].generation;
        match action {
            // Servers read the logic's own board here, and the logic's steering table is used as the kernel's.
            Action::WriteBoard(_) => self.cover("board"),
            Action::Steer(_) => self.cover("steer"),
            Action::Dial(peer) => {
                self.cover("dial");
                self.dial(machine, peer);
            }
            Action::HangUp(peer) => self.hang_up(machine, peer),
            Action::Tell(server, told) => {
                self.schedule.after(LOCAL, Event::ToServer { machine, generation, server, told });
            }
            Action::WatchRoutes(peer, hello) => self.find_route(machine, peer, hello.ipv4()),
            Action::SetDelivered(peer, word) => {
                let client = client_of(word.client());
                let flow = self.machines[machine].host.flows.get_mut(&client);
                let complete = flow.and_then(|flow| flow.deliver(peer as u32, word.handoff.get()));
                self.cover("delivered");
                self.complete(machine, complete);
            }
            Action::Abort(given_up) => self.abort(machine, &given_up),
            Action::ForgetPeer(peer) => {
                self.cover("forget peer");
                let senders = &mut self.machines[machine].host.senders;
                senders.retain(|_, sender| sender.claimant.peer != peer || sender.is_queued() && !sender.is_done());
            }
            Action::CloseFiles(_) => self.cover("offers expire"),
            Action::SetSpacing(..) => self.cover("spacing"),
            Action::Welcome { .. } => self.cover("welcome"),
            Action::Cancel(_) => self.cover("cancel"),
            Action::CloseServer(_) | Action::CloseRing(_) => self.cover("server gone"),
            Action::GoOn(_) | Action::SendStats(_) | Action::SetEnd(..) | Action::WriteSources => {}
            Action::BeginFetch { .. }
            | Action::DeliverFetch { .. }
            | Action::DropFetch(_)
            | Action::ServeFetch { .. }
            | Action::ResetFetch(_) => self.violate("a fetch that no server asked for".into()),
        }
    }

    fn hang_up(&mut self, machine: usize, peer: usize) {
        self.cover("hang up");
        let Some(agent) = &mut self.machines[machine].agent else { return };
        if let Some(link) = agent.links[peer].take() {
            self.close(link, machine);
        }
    }

    /// Tells the logic the network interface towards a peer's senders, as the kernel would.
    fn find_route(&mut self, machine: usize, peer: usize, address: Option<std::net::IpAddr>) {
        let (now, base) = (self.now(), self.base);
        let Some(address) = address else { return };
        self.machines[machine].event(now, base, |logic, call| logic.set_interface(peer, address, 2, call));
    }

    fn abort(&mut self, machine: usize, given_up: &Given) {
        self.cover("abort");
        self.machines[machine].host.senders.retain(|_, sender| {
            let of = &sender.claimant;
            sender.is_done() || !given_up.contains(&(of.peer, of.worker, of.handoff))
        });
    }
}
