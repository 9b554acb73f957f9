//! Agents: their clocks, their connections with each other, and messages between them and their servers.

use std::time::Duration;

use shunt_logic::logic::Refused;
use shunt_logic::peers::{Opened, SenderAddresses};
use shunt_wire::local::Request;
use shunt_wire::peer::{Claimant, Delivered, Frame, Hello};

use crate::host::client_of;
use crate::machine::{Agent, address, name};
use crate::sender::Sender;
use crate::world::{Event, Link, TICK, World};

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
    }

    pub(super) fn connect_servers(&mut self, machine: usize, generation: u32) {
        let (now, base) = (self.now(), self.base);
        if self.is_running(machine, generation) {
            self.machines[machine].connect_servers(now, base);
            self.act(machine);
        }
    }

    /// Returns the time for which a machine's agent still stands still. It handles events after that.
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
        while let Some((offer, file)) = self.machines[machine].unread.pop_front() {
            self.read_offer(machine, &offer, file);
        }
        self.machines[machine].event(now, base, |logic, call| logic.tick(call));
        self.act(machine);
        self.place_waiting(machine);
        self.look_at_limits(machine);
        self.end_turn(machine);
        self.schedule.after(TICK, Event::Tick { machine, generation });
    }

    fn place_waiting(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        self.machines[machine].event(now, base, |logic, _| logic.begin_waiting_round());
        loop {
            let next = self.machines[machine].event(now, base, |logic, call| logic.next_waiting(call));
            self.act(machine);
            match next.flatten() {
                None => return,
                Some(None) => {}
                Some(Some((waits, start))) => self.begin_sending(machine, waits.claimant, &waits.claim, start),
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

    fn read_offer(&mut self, machine: usize, offer: &shunt_wire::local::Offer, file: u64) {
        let (now, base) = (self.now(), self.base);
        let Some(connected) = self.machines[machine].worker.connected else { return };
        let request = Request::Offer(*offer);
        let taken = self.machines[machine]
            .event(now, base, |logic, call| logic.request(connected.offers, &request, Some(file), false, call));
        if let Some(Err(reason)) = taken {
            self.violate(format!("machine {machine} refuses an offer: {reason}"));
        }
    }

    /// Reads offers until the one that a frame names has been read.
    fn read_missing_offer(&mut self, machine: usize, frame: &Frame) {
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
        let taken =
            self.machines[machine].event(now, base, |logic, call| logic.request(server, &request, None, false, call));
        if let Some(Err(reason)) = taken {
            self.violate(format!("machine {machine} refuses {request:?}: {reason}"));
        }
        self.act(machine);
        self.end_turn(machine);
    }

    /// Ends a turn: carries out the collected requests, and sends the frames.
    pub(super) fn end_turn(&mut self, machine: usize) {
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
                self.send(link, machine, bytes);
            }
        }
    }

    /// Sends bytes on a connection between agents.
    fn send(&mut self, link: usize, from: usize, bytes: Vec<u8>) {
        let side = self.links[link].other_side(from);
        let to = self.links[link].ends[side];
        self.links[link].on_the_way[side].push_back(bytes);
        let delay = self.way();
        self.schedule.after(delay, Event::Delivered { link, to });
    }

    pub(super) fn dial(&mut self, machine: usize, peer: usize) {
        let (now, base) = (self.now(), self.base);
        let to = self.machines[machine].machine(peer);
        let mut link = Link { ends: [machine, to], ..Link::default() };
        link.generations[0] = Some(self.machines[machine].generation);
        self.links.push(link);
        let link = self.links.len() - 1;
        let opened = self.opened(machine);
        if let Some(agent) = &mut self.machines[machine].agent {
            agent.links[peer] = Some(link);
        }
        self.machines[machine].event(now, base, |logic, call| logic.opened(peer, &opened, call));
    }

    fn opened(&mut self, machine: usize) -> Opened {
        let senders = SenderAddresses { ipv4: Some(address(machine)), ipv6: None };
        Opened { senders, key: self.random.key() }
    }

    /// Delivers bytes if the machines reach each other. Otherwise it delivers them later, as TCP would.
    pub(super) fn deliver(&mut self, link: usize, to: usize) {
        let (side, from) = (self.links[link].side(to), self.links[link].from(to));
        if self.links[link].is_closed {
            return;
        }
        if !self.reach(from, to) {
            return self.schedule.after(Duration::from_millis(200), Event::Delivered { link, to });
        }
        if let Some(delay) = self.delay_of(to) {
            return self.schedule.after(delay, Event::Delivered { link, to });
        }
        let Some(bytes) = self.links[link].on_the_way[side].pop_front() else { return };
        match self.links[link].generations[side] {
            None if self.machines[to].agent.is_some() => {
                self.links[link].generations[side] = Some(self.machines[to].generation);
            }
            Some(generation) if self.is_running(to, generation) => {}
            // No agent runs, or it is an agent of a later generation: the connection is reset.
            _ => return self.close(link, to),
        }
        let mut rest = &bytes[..];
        while !rest.is_empty() && !self.links[link].is_closed {
            match Frame::parse(rest) {
                Ok(Some((frame, length))) => {
                    rest = &rest[length..];
                    self.on_frame(link, to, from, &frame);
                }
                other => return self.violate(format!("machine {from} sent no frame: {other:?}")),
            }
        }
        self.end_turn(to);
    }

    fn on_frame(&mut self, link: usize, machine: usize, from: usize, frame: &Frame) {
        let (now, base) = (self.now(), self.base);
        let peer = self.machines[machine].peer(from);
        let has_link = self.machines[machine].agent.as_ref().is_some_and(|agent| agent.links[peer] == Some(link));
        if !has_link {
            return match frame {
                Frame::Hello(hello) => self.admit(link, machine, from, hello),
                _ => self.close(link, machine),
            };
        }
        self.read_missing_offer(machine, frame);
        let taken = match frame {
            Frame::Hello(hello) => {
                self.machines[machine].event(now, base, |logic, call| logic.hello(peer, hello, [1; 16], call))
            }
            Frame::Claim(claim) => {
                let start = self.machines[machine].event(now, base, |logic, call| logic.claim(peer, claim, None, call));
                self.act(machine);
                if let Some(start) = start.flatten() {
                    self.begin_sending(machine, Claimant::of(peer as u32, claim), claim, start);
                }
                Some(Ok(()))
            }
            frame => self.machines[machine].event(now, base, |logic, call| logic.frame(peer, frame, call)),
        };
        self.act(machine);
        if let Some(Err(reason)) = taken {
            self.violate(format!("machine {machine} refuses {frame:?}: {reason}"));
        }
    }

    /// Handles HELLO of an agent that has connected.
    fn admit(&mut self, link: usize, machine: usize, from: usize, hello: &Hello) {
        let (now, base) = (self.now(), self.base);
        let is_of = |claimed: &str| claimed == name(from);
        let admitted = self.machines[machine]
            .event(now, base, |logic, call| logic.admit(hello, is_of, address(from), |_| Some(address(from)), call));
        self.act(machine);
        match admitted {
            Some(Ok(peer)) => {
                if let Some(agent) = &mut self.machines[machine].agent {
                    agent.links[peer] = Some(link);
                }
                let opened = self.opened(machine);
                self.machines[machine].event(now, base, |logic, call| logic.opened(peer, &opened, call));
                let begun =
                    self.machines[machine].event(now, base, |logic, call| logic.hello(peer, hello, [1; 16], call));
                self.act(machine);
                if let Some(Err(reason)) = begun {
                    self.violate(format!("machine {machine} admits {from} and then refuses: {reason}"));
                }
                self.cover("session");
            }
            Some(Err(Refused { why, .. })) => self.violate(format!("machine {machine} refuses {from}: {why}")),
            None => {}
        }
    }

    /// Closes a connection at one end. The other end is told, if the machines reach each other.
    pub(super) fn close(&mut self, link: usize, by: usize) {
        let to = self.links[link].from(by);
        if std::mem::replace(&mut self.links[link].is_closed, true) {
            return;
        }
        let delay = self.way();
        self.schedule.after(delay, Event::Closed { link, to });
    }

    pub(super) fn on_closed(&mut self, link: usize, to: usize) {
        let (now, base) = (self.now(), self.base);
        let from = self.links[link].from(to);
        if !self.reach(from, to) {
            return; // its heartbeat tells
        }
        if let Some(delay) = self.delay_of(to) {
            return self.schedule.after(delay, Event::Closed { link, to });
        }
        let peer = self.machines[to].peer(from);
        if self.machines[to].agent.as_ref().is_some_and(|agent| agent.links[peer] == Some(link)) {
            self.machines[to].event(now, base, |logic, call| logic.lose_peer(peer, "closed", call));
            self.act(to);
            self.end_turn(to);
        }
    }

    /// Begins a sender, in place of an earlier one for the same client.
    fn begin_sending(
        &mut self,
        machine: usize,
        claimant: Claimant,
        claim: &shunt_wire::peer::Claim,
        start: shunt_logic::backend::Start<crate::host::Host>,
    ) {
        let now = self.now();
        let client = client_of(claim.flow.client());
        let Some(offered) = start.offered else { return self.violate("a claim of no offer".into()) };
        let generation = self.machines[machine].generation;
        if !self.used.insert((machine, generation, offered.offer.number)) {
            self.violate(format!("offer {} of machine {machine} is used twice", offered.offer.number));
        }
        self.cover("sender");
        let fresh = self.random.word();
        let before = self.machines[machine].host.senders.get(&client);
        let own = before.filter(|_| claim.flow.first == 0).map_or(fresh, Sender::next_own);
        let sender = Sender::new(claim, claimant, offered.file, offered.offer.offset, own, now);
        self.machines[machine].host.senders.insert(client, sender);
        self.schedule.after(Duration::ZERO, Event::SenderTurn { machine, client });
    }

    /// Reports a sender that has ended without success.
    pub(super) fn fail_sender(&mut self, machine: usize, claimant: &Claimant) {
        let (now, base) = (self.now(), self.base);
        let reason = shunt_wire::local::Reason::NoProgress;
        self.machines[machine].event(now, base, |logic, call| logic.sender_failed(claimant, reason, call));
        self.act(machine);
        self.end_turn(machine);
    }

    /// Has a backend's agent tell the frontend's agent that a payload has been acknowledged.
    pub(super) fn give_word(&mut self, machine: usize, client: usize, claimant: &Claimant) {
        let (now, base) = (self.now(), self.base);
        let (at, server) = (self.clients[client].at, self.server_of(client));
        let word = Delivered {
            handoff: claimant.handoff.into(),
            client_address: at.address,
            server_address: server.address,
            client_port: at.port_be,
            server_port: server.port_be,
        };
        let words = [(claimant.peer, word)];
        self.machines[machine].event(now, base, |logic, call| logic.tell_frontends(&[], &words, call));
        self.end_turn(machine);
    }
}

impl Link {
    /// Returns the index of a machine's end of the connection.
    pub(super) fn side(&self, machine: usize) -> usize {
        usize::from(self.ends[1] == machine)
    }

    fn other_side(&self, machine: usize) -> usize {
        1 - self.side(machine)
    }

    /// Returns the machine at the other end.
    pub(super) fn from(&self, machine: usize) -> usize {
        self.ends[self.other_side(machine)]
    }
}
