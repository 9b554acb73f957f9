//! Changes to a running agent: its end (SIGTERM), and its configuration (SIGHUP). Also the routes to peers (other
//! machines' agents). A *sender* is a backend's socket for a client of a frontend. A *payload* is the body of a
//! response.

use std::time::Duration;

use shunt_logic::settings::Settings;
use shunt_wire::local::Reason;

use crate::machine::{Agent, address, store_of};
use crate::sender::Sender;
use crate::world::{Event, World};

/// Time without anything under way after which a drain (the orderly end of an agent) is over.
const QUIET: Duration = Duration::from_secs(1);
/// Longest drain (`drain` in the agent's configuration).
const DRAIN: Duration = Duration::from_secs(3);

impl World {
    /// Tells a machine's agent to end (SIGTERM).
    pub(super) fn drain(&mut self, machine: usize) {
        let now = self.now();
        let is_second = self.machines[machine].agent.as_ref().is_some_and(|agent| agent.drain.is_some());
        let limit = self.random.time(Duration::from_millis(200), DRAIN);
        let Some(agent) = &mut self.machines[machine].agent else { return };
        if is_second {
            return self.end_agent(machine); // a second signal
        }
        agent.drain = Some((now, now + limit));
        agent.logic.shared.is_draining = true;
        self.cover("drain");
        self.look_at_limits(machine);
        self.end_turn(machine);
    }

    /// Returns whether a drain (orderly end) is over. If the drain's time is up, first tells frontends that the
    /// unfinished payloads have failed.
    pub(super) fn is_drained(&mut self, machine: usize) -> bool {
        let (now, base) = (self.now(), self.base);
        let busy_here = self.machines[machine].host.busy() as u64;
        let Some(agent) = &mut self.machines[machine].agent else { return false };
        let Some((busy, until)) = agent.drain else { return false };
        let is_busy = agent.logic.under_way() + busy_here > 0;
        let is_alone = agent.logic.shared.servers.is_empty() && agent.logic.store.is_none();
        if !is_busy && (is_alone || now >= busy + QUIET) {
            return true;
        }
        if now < until {
            agent.drain = Some((if is_busy { now } else { busy }, until));
            return false;
        }
        self.cover("drain takes too long");
        let is_left = |sender: &&Sender| !sender.is_orphan() && !sender.is_done() && !sender.is_queued();
        let left: Vec<_> =
            self.machines[machine].host.senders.values().filter(is_left).map(|one| one.claimant).collect();
        for claimant in left {
            self.machines[machine].host.senders.retain(|_, sender| sender.claimant != claimant);
            self.fail_sender(machine, &claimant, Reason::PeerLost);
        }
        self.machines[machine].event(now, base, |logic, call| logic.give_up_waiting(call));
        self.act(machine);
        self.end_turn(machine);
        true
    }

    /// Ends an agent that was told to end. Another agent starts after a while.
    pub(super) fn end_agent(&mut self, machine: usize) {
        let pause = self.random.time(Duration::from_millis(1), Duration::from_millis(500));
        self.kill(machine, pause);
    }

    /// Ends an agent at once, and starts it again after a pause.
    pub(super) fn kill(&mut self, machine: usize, pause: Duration) {
        let Some(agent) = self.machines[machine].agent.take() else { return };
        self.cover("kill");
        let generation = self.machines[machine].generation;
        self.machines[machine].worker.connected = None;
        self.machines[machine].worker.program = None;
        self.machines[machine].unread.clear();
        self.machines[machine].stopped_until = Duration::ZERO;
        self.machines[machine].host.senders.values_mut().for_each(Sender::orphan);
        self.wishes.retain(|(of, when, _)| *of != machine || *when != generation);
        // The agent's connections with other agents are closed. The sockets of its senders still send the bytes that
        // they have.
        let Agent { links, fetches, served, reaches, .. } = agent;
        let fetching = fetches.values().map(|fetching| fetching.link);
        let all = links.into_iter().flatten().chain(fetching).chain(served.into_values()).chain(reaches.into_values());
        let all: Vec<usize> = all.collect();
        all.into_iter().for_each(|link| self.close(link, machine));
        self.lose_agent(machine);
        self.schedule.after(pause, Event::Start { machine });
    }

    /// Has the servers of a machine notice that their agent is gone: fetches and questions fail.
    fn lose_agent(&mut self, machine: usize) {
        use crate::worker::Stage::{Asking, Fetching};
        let serving = &self.machines[machine].worker.serving;
        for (client, serving) in serving.iter().map(|(client, one)| (*client, *one)).collect::<Vec<_>>() {
            match serving.stage {
                Asking { .. } | Fetching { got: 0, .. } => self.relay(machine, client, serving.response, 0),
                Fetching { .. } => self.reset_client(client),
                _ => {}
            }
        }
    }

    /// Has a machine's agent read its configuration, in which something is different for a while.
    pub(super) fn reload(&mut self, machine: usize, pause: Duration) {
        self.cover("reload");
        let mut settings = self.machines[machine].settings.clone();
        if settings.peers.is_empty() {
            return;
        }
        let peer = self.random.below(settings.peers.len() as u64) as usize;
        match self.random.below(5) {
            0 => settings.peers[peer].is_gone = true,
            1 => settings.limits.handoffs = 2,
            2 => settings.peers[peer].may_read_store ^= true,
            3 => settings.peers[peer].speaks_for.clear(),
            _ => settings.limits.servers = 4,
        }
        self.machines[machine].changed = settings.peers[peer].is_gone.then_some(peer);
        self.reconfigure(machine, settings);
        self.schedule.after(pause, Event::Restored { machine });
    }

    /// Has a machine's agent read its original configuration again. The configuration now also names the peers that
    /// were left out at the start.
    pub(super) fn restore_settings(&mut self, machine: usize) {
        self.cover("reload");
        let unnamed = std::mem::take(&mut self.machines[machine].unnamed);
        self.machines[machine].settings.peers.extend(unnamed);
        self.machines[machine].changed = None;
        let settings = self.machines[machine].settings.clone();
        self.reconfigure(machine, settings);
    }

    fn reconfigure(&mut self, machine: usize, settings: Settings) {
        let (now, base) = (self.now(), self.base);
        let stores: Vec<_> =
            (0..settings.peers.len()).map(|peer| store_of(self.machines[machine].machine(peer))).collect();
        self.machines[machine].event(now, base, |logic, call| logic.reconfigure(settings, &stores, call));
        self.act(machine);
        self.end_turn(machine);
    }

    /// Tells a machine's agent that it has a route to a peer again.
    pub(super) fn restore_route(&mut self, machine: usize, peer: usize, generation: u32) {
        self.set_route(machine, peer, generation, true);
        self.act(machine);
        self.end_turn(machine);
    }

    /// Tells a machine's agent the network interface towards a peer's senders, or that there is no route for a while.
    pub(super) fn set_route(&mut self, machine: usize, peer: usize, generation: u32, is_there: bool) {
        let (now, base) = (self.now(), self.base);
        let address = address(self.machines[machine].machine(peer));
        let interface = if is_there { 2 } else { 0 };
        if !self.is_running(machine, generation) {
            return;
        }
        self.machines[machine].event(now, base, |logic, call| logic.set_interface(peer, address, interface, call));
        if !is_there {
            self.cover("no route");
            let pause = self.random.time(Duration::from_millis(50), Duration::from_secs(1));
            self.schedule.after(pause, Event::RouteBack { machine, peer, generation });
        }
    }
}
