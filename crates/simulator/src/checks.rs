//! Invariants: the limits hold each time that an agent has checked them, and nothing is left when all is quiet. An
//! *offer* is a payload that a backend's server holds ready. The *board* is memory in which an agent tells its servers
//! which limits are reached. A *fetch* brings a payload through both agents to the frontend's server. A *program* runs
//! under `shunt run`, and leaves payloads in its machine's *store*. A *payload* is the body of a response.

use shunt_wire::local::closed;

use crate::machine::{Agent, Machine, address, store_of};
use crate::world::World;

/// Most connections that a machine's servers have with their agent: two of the nginx worker, and one of the program.
const MOST_SERVERS: usize = 3;

impl World {
    /// Checks a machine's use of resources after its agent has checked the limits. The use may exceed a limit by the
    /// work under way when the limit was reached, and by the offers made before the board forbade offers.
    pub(crate) fn check_limits(&mut self, machine: usize) {
        let most = self.service.limits;
        let Machine { agent: Some(Agent { logic, .. }), unread, offers_made, offers_then, .. } =
            &self.machines[machine]
        else {
            return;
        };
        let (used, slack) = (logic.gates.total, self.service.clients as u64 + 1 + offers_made - offers_then);
        let is_open = logic.shared.board.head().closed & closed::OFFERS == 0;
        let then = offers_made - unread.len() as u64;
        let used_and_most = [
            ("handoffs", used.handoffs, most.handoffs),
            ("offers", used.sent.payloads, most.offers),
            ("senders", used.sent.senders, self.service.places as u64),
        ];
        if let Some((what, used, limit)) = used_and_most.into_iter().find(|(_, used, limit)| *used > limit + slack) {
            self.violate(format!("machine {machine} has {used} {what}, and may have {limit}"));
        }
        if is_open {
            self.machines[machine].offers_then = then;
        }
    }

    /// Returns descriptions of everything that is left and must not be. It is called again and again once clients ask
    /// for nothing more and no more faults happen. In the end, every client must have its response, and no machine may
    /// keep anything for a client.
    pub fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        for (index, client) in self.clients.iter().enumerate() {
            if let Some((response, end)) = client.waits_for {
                let stage = self.machines[client.frontend].worker.serving.get(&index).map(|serving| serving.stage);
                left.push(format!("client {index} has {} of {end} bytes of {response:?} ({stage:?})", client.taken()));
            }
        }
        for machine in &self.machines {
            let index = machine.index;
            let Some(Agent { logic, .. }) = &machine.agent else { continue };
            let kept = [
                ("offers", logic.backend.offers.len()),
                ("waiting claims", logic.backend.waiting.len()),
                ("fetches", logic.frontend.fetches.len() + logic.backend.served.len()),
                ("watched payloads", logic.frontend.losses.len()),
                ("senders that are not done", machine.host.busy()),
                ("responses", machine.worker.serving.len()),
                ("connections without a purpose", logic.incoming.len()),
                ("connections to stores", logic.store.as_ref().map_or(0, |store| store.reaching.len())),
                ("connections of servers", logic.shared.servers.len().saturating_sub(MOST_SERVERS)),
            ];
            let kept = kept.into_iter().filter(|(_, count)| *count > 0);
            left.extend(kept.map(|(what, count)| format!("machine {index} keeps {count} {what}")));
            self.check_addresses(index, &mut left);
            for peer in 0..logic.shared.peers.len() {
                if !logic.shared.peers.is_up(peer) {
                    left.push(format!("machine {index} has no session with {}", machine.machine(peer)));
                }
            }
        }
        if !self.wishes.is_empty() {
            left.push(format!("{} programs have no answer about a store", self.wishes.len()));
        }
        left
    }

    /// Checks that a machine's kernel has the same addresses of programs as the machine's agent. Checks that its
    /// programs have the agent's list of sources (stores, and the addresses where programs can fetch from them). Checks
    /// that the agent knows the addresses of all peers with stores, and that programs there can fetch from its store.
    fn check_addresses(&self, machine: usize, left: &mut Vec<String>) {
        let of = &self.machines[machine];
        let Some(store) = of.agent.as_ref().and_then(|agent| agent.logic.store.as_ref()) else { return };
        let owned = store.ends.owned();
        if !owned.iter().map(|(address, _)| address).eq(of.host.ends.keys()) {
            left.push(format!("machine {machine}: the kernel knows other addresses than the agent"));
        }
        if self.sources_of(machine).is_some_and(|sources| sources != of.host.sources) {
            left.push(format!("machine {machine}: programs know other sources than the agent"));
        }
        for other in self.machines.iter().filter(|other| other.index != machine && other.settings.has_store) {
            let (peer, theirs) = (of.peer(other.index), address(other.index));
            if !owned.contains(&(theirs, Some(peer))) {
                left.push(format!("machine {machine} does not know {theirs} of {}", other.index));
            }
            if !of.host.sources.contains(&(theirs, store_of(machine))) {
                left.push(format!("machine {machine} does not know that {} reads here", other.index));
            }
        }
    }
}
