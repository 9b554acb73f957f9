//! Agents: their clocks, and the messages that they get from their servers. An *offer* is a payload that a backend's
//! server holds ready. A *turn* is one pass of an agent's event loop. A *payload* is the body of a response.

use std::time::Duration;

use shunt_wire::local::{Offer, Request};
use shunt_wire::peer::Frame;

use crate::machine::{Agent, address};
use crate::world::{Event, Item, TICK, World};

/// Most offers that an agent reads in one tick (its work every 100 ms).
const OFFERS_IN_A_TURN: usize = 256;

impl World {
    /// Returns whether a machine's agent of this generation runs.
    pub(super) fn is_running(&self, machine: usize, generation: u32) -> bool {
        let of = &self.machines[machine];
        of.agent.is_some() && of.generation == generation
    }

    pub(super) fn start(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        if self.machines[machine].agent.is_some() {
            return;
        }
        self.machines[machine].start(now, base);
        self.cover("agent starts");
        self.act(machine);
        let generation = self.machines[machine].generation;
        self.schedule.after(Duration::ZERO, Event::Tick { machine, generation });
        let delay = self.random.time(Duration::from_millis(10), Duration::from_millis(500));
        self.schedule.after(delay, Event::ServersConnect { machine, generation });
        if self.variety.has_stores {
            self.schedule.after(delay, Event::ProgramConnects { machine, generation });
        }
    }

    pub(super) fn connect_servers(&mut self, machine: usize, generation: u32) {
        let (now, base) = (self.now(), self.base);
        if self.is_running(machine, generation) && self.machines[machine].worker.connected.is_none() {
            let closed = self.machines[machine].connect_servers(now, base);
            self.act(machine);
            if let Some(server) = closed {
                self.machines[machine].event(now, base, |logic, call| logic.remove_server(server, call));
                self.act(machine);
            }
            self.end_turn(machine);
            if self.machines[machine].worker.connected.is_none() {
                self.schedule.after(Duration::from_secs(1), Event::ServersConnect { machine, generation });
            }
        }
    }

    pub(super) fn connect_program(&mut self, machine: usize, generation: u32) {
        let (now, base) = (self.now(), self.base);
        if self.is_running(machine, generation) && self.machines[machine].worker.program.is_none() {
            if self.random.below(2) == 0 {
                self.crowd(machine); // other programs connect first, and take completion rings
            }
            self.machines[machine].connect_program(now, base);
            self.act(machine);
            self.end_turn(machine);
        }
    }

    /// Returns the rest of the time for which a machine's agent stands still, or `None` if the agent is not stopped. A
    /// stopped agent handles events only after this time.
    pub(super) fn delay_of(&self, machine: usize) -> Option<Duration> {
        let until = self.machines[machine].stopped_until;
        until.checked_sub(self.now()).filter(|delay| !delay.is_zero())
    }

    pub(super) fn tick(&mut self, machine: usize, generation: u32) {
        let (now, base) = (self.now(), self.base);
        if !self.is_running(machine, generation) {
            return;
        }
        if let Some(delay) = self.delay_of(machine) {
            return self.schedule.after(delay, Event::Tick { machine, generation });
        }
        let late = self.machines[machine].agent.as_mut().map_or(Duration::ZERO, |agent| {
            let late = now.saturating_sub(agent.ticked + TICK);
            agent.ticked = now;
            late
        });
        self.machines[machine].event(now, base, |logic, call| logic.excuse_peers(late, call.now));
        self.read_all_offers(machine);
        self.listen_again(machine);
        self.machines[machine].event(now, base, |logic, call| logic.tick(call));
        self.act(machine);
        if self.machines[machine].host.has_new_digests() {
            self.machines[machine].event(now, base, |logic, call| logic.answer_questions(call));
            self.act(machine);
        }
        self.tend_incoming(machine);
        self.tend_senders(machine);
        self.place_waiting(machine);
        self.tell_files(machine);
        self.tend_reaching(machine);
        self.look_at_limits(machine);
        self.end_turn(machine);
        if self.is_drained(machine) {
            return self.end_agent(machine);
        }
        self.schedule.after(TICK, Event::Tick { machine, generation });
    }

    fn read_all_offers(&mut self, machine: usize) {
        for _ in 0..OFFERS_IN_A_TURN {
            let Some((offer, file)) = self.machines[machine].unread.pop_front() else { return };
            self.read_offer(machine, &offer, file);
        }
    }

    /// Reads once more the connections of peers that seem silent. Their messages may have come while the agent had no
    /// time to read.
    fn listen_again(&mut self, machine: usize) {
        let Some(Agent { logic, links, .. }) = &self.machines[machine].agent else { return };
        let silent = logic.silent_peers(self.base + self.now());
        for link in silent.filter_map(|peer| links[peer]).collect::<Vec<_>>() {
            self.cover("silent peer");
            self.deliver(link, machine);
        }
    }

    /// Closes accepted connections on which the first message has not come in time.
    fn tend_incoming(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        let take = |logic: &mut shunt_logic::Logic<_>, call: &mut shunt_logic::logic::Call<'_, _>| {
            logic.incoming.remove_silent(call.now)
        };
        while let Some(place) = self.machines[machine].event(now, base, take).flatten() {
            self.cover("silent connection");
            let is_it = |link: &crate::world::Link| link.place == Some(place) && link.ends[1] == machine;
            if let Some(link) = self.links.iter().position(is_it) {
                self.links[link].place = None;
                self.close(link, machine);
            }
        }
    }

    pub(super) fn look_at_limits(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        let usage = self.machines[machine].usage();
        self.machines[machine].event(now, base, |logic, call| logic.look_at_limits(&usage, call));
        self.act(machine);
        self.check_limits(machine);
    }

    fn read_offer(&mut self, machine: usize, offer: &Offer, file: u64) {
        let (now, base) = (self.now(), self.base);
        let Some(connected) = self.machines[machine].worker.connected else { return };
        let request = Request::Offer(*offer);
        let taken = self.machines[machine]
            .event(now, base, |logic, call| logic.request(connected.offers, &request, &mut Some(file), false, call));
        if let Some(Err(reason)) = taken {
            self.violate(format!("machine {machine} refuses an offer: {reason}"));
        }
    }

    /// If a peer's frame (message) names an offer that the agent has not read yet, reads offers up to that one.
    pub(super) fn read_missing_offer(&mut self, machine: usize, frame: &Frame) {
        let Some(agent) = &self.machines[machine].agent else { return };
        let Some((_, number)) = agent.logic.missing_offer(frame) else { return };
        while let Some((offer, file)) = self.machines[machine].unread.pop_front() {
            self.read_offer(machine, &offer, file);
            if offer.number == number {
                return;
            }
        }
    }

    pub(super) fn on_request(&mut self, machine: usize, generation: u32, server: usize, request: Box<Request>) {
        let (now, base) = (self.now(), self.base);
        if !self.is_running(machine, generation) {
            return;
        }
        if let Some(delay) = self.delay_of(machine) {
            return self.schedule.after(delay, Event::ToAgent { machine, generation, server, request });
        }
        // The server may have ended meanwhile, and the number of its connection may now be another process's.
        let worker = &self.machines[machine].worker;
        if ![worker.connected, worker.program].into_iter().flatten().any(|one| one.control == server) {
            return;
        }
        let taken = self.machines[machine]
            .event(now, base, |logic, call| logic.request(server, &request, &mut None, false, call));
        if let Some(Err(reason)) = taken {
            self.violate(format!("machine {machine} refuses {request:?}: {reason}"));
        }
        self.act(machine);
        self.end_turn(machine);
    }

    /// Ends a turn of an agent: carries out the aborts and cancellations that its logic has collected, and sends its
    /// frames to peers. Checks the limits if that is due.
    pub(crate) fn end_turn(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        self.machines[machine].event(now, base, |logic, call| logic.end_turn(call));
        self.act(machine);
        if self.machines[machine].agent.as_ref().is_some_and(|agent| agent.logic.is_look_due()) {
            self.look_at_limits(machine);
        }
        loop {
            let Some(Agent { logic, links, .. }) = &mut self.machines[machine].agent else { return };
            let Some((peer, frames)) = logic.shared.peers.next_unsent(base + now) else { return };
            let bytes = std::mem::take(frames);
            if let (Some(link), false) = (links[peer], bytes.is_empty()) {
                self.send(link, machine, Item::Frames(bytes));
            }
        }
    }

    /// Handles a question of `shunt doctor` on machine `from`: whether this machine's agent would send with the source
    /// addresses that the question names.
    pub(super) fn examine(&mut self, link: usize, machine: usize, from: usize, examine: &shunt_wire::peer::Examine) {
        let peer = self.machines[machine].peer(from);
        let client = std::net::IpAddr::from([198, 51, 100, 7]);
        let settings = self.machines[machine].settings.peers.get(peer);
        let may = examine.servers().all(|server| settings.is_some_and(|peer| peer.may_have_sent(server, client)));
        if !may && self.machines[machine].knows(from) {
            self.violate(format!("machine {machine} would not send as {}", address(from)));
        }
        self.cover("examined");
        self.close(link, machine);
    }
}
