//! Connections between agents: sessions, fetches, connections of programs to other machines' stores, and questions of
//! `shunt doctor`. A *generation* is one run of an agent. A *frame* is a message between agents. A *session* is the use
//! of a connection between two agents. A *store* has the payloads of a machine's programs under `shunt run`.

use std::collections::VecDeque;
use std::time::Duration;

use shunt_logic::logic::Refused;
use shunt_logic::peers::{Opened, SenderAddresses};
use shunt_wire::local::Reason;
use shunt_wire::peer::{self, Frame, Hello};

use crate::machine::{address, name};
use crate::world::{Event, Item, Link, Purpose, World};

/// Time after which something that could not reach the other machine is tried again: a new connection, or an item
/// (frames, payload bytes, or the end of a connection).
const AGAIN: Duration = Duration::from_millis(200);

impl World {
    /// Makes a connection, which is accepted later. Returns its number.
    pub(super) fn connect(&mut self, machine: usize, to: usize, purpose: Purpose) -> usize {
        let generations = [Some(self.machines[machine].generation), None];
        self.links.push(Link {
            purpose,
            ends: [machine, to],
            generations,
            on_the_way: [VecDeque::new(), VecDeque::new()],
            is_closed: [false; 2],
            is_up: [false; 2],
            place: None,
            has_spoken: false,
            is_rogue: false,
            serving: None,
        });
        let link = self.links.len() - 1;
        let delay = self.way();
        self.schedule.after(delay, Event::Connected { link });
        link
    }

    /// Accepts a connection. The connection takes a place in the agent's list of accepted connections until its first
    /// frame, which says the connection's purpose.
    pub(super) fn accept(&mut self, link: usize) {
        let [from, to] = self.links[link].ends;
        if self.links[link].generations[1].is_some() || self.links[link].is_closed[1] {
            return;
        }
        if let Some(delay) = self.delay_of(to) {
            return self.schedule.after(delay, Event::Connected { link });
        }
        if !self.reach(from, to) {
            return self.schedule.after(AGAIN, Event::Connected { link });
        }
        if self.machines[to].agent.is_none() {
            return self.close(link, to);
        }
        let (now, base) = (self.now(), self.base);
        self.links[link].generations[1] = Some(self.machines[to].generation);
        let is_stranger = !self.machines[to].knows(from);
        let place = self.machines[to].event(now, base, |logic, call| {
            let place = logic.incoming.add(address(from), is_stranger, call.now);
            logic.shared.counts.incoming_limit += u64::from(place.is_none());
            place
        });
        self.links[link].place = place.flatten();
        if self.links[link].place.is_none() {
            self.cover("no place for a connection");
            if !is_stranger {
                self.violate(format!("machine {to} has no place for {from}"));
            }
            self.close(link, to);
        }
    }

    pub(super) fn dial(&mut self, machine: usize, peer: usize) {
        let (now, base) = (self.now(), self.base);
        let to = self.machines[machine].machine(peer);
        let link = self.connect(machine, to, Purpose::Session);
        let opened = self.opened(machine);
        if let Some(agent) = &mut self.machines[machine].agent {
            agent.links[peer] = Some(link);
        }
        self.machines[machine].event(now, base, |logic, call| logic.opened(peer, &opened, call));
    }

    fn opened(&mut self, machine: usize) -> Opened {
        let has_address = !self.variety.has_all_faults || self.random.below(40) > 0;
        let senders = SenderAddresses { ipv4: has_address.then(|| address(machine)), ipv6: None };
        Opened { senders, key: self.random.key() }
    }

    /// Sends an item on a connection between agents.
    pub(super) fn send(&mut self, link: usize, from: usize, item: Item) {
        let side = self.links[link].other_side(from);
        let to = self.links[link].ends[side];
        self.links[link].on_the_way[side].push_back(item);
        let delay = self.way();
        self.schedule.after(delay, Event::Delivered { link, to });
    }

    /// Sends one frame on a connection between agents.
    pub(super) fn send_frame(&mut self, link: usize, from: usize, emit: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = Vec::new();
        emit(&mut bytes);
        self.send(link, from, Item::Frames(bytes));
    }

    /// Delivers the next item if the machines reach each other. Otherwise tries again later, as TCP would.
    pub(super) fn deliver(&mut self, link: usize, to: usize) {
        let (side, from) = (self.links[link].side(to), self.links[link].from(to));
        if self.links[link].is_closed[side] {
            return;
        }
        if !self.reach(from, to) {
            // TCP does not send a reset again. Machine `to` learns of the session's end by missing heartbeats.
            let front = self.links[link].on_the_way[side].front();
            if matches!(front, Some(Item::End)) && self.links[link].purpose == Purpose::Session {
                self.links[link].on_the_way[side].clear();
                return;
            }
            return self.schedule.after(AGAIN, Event::Delivered { link, to });
        }
        if let Some(delay) = self.delay_of(to) {
            return self.schedule.after(delay, Event::Delivered { link, to });
        }
        if side == 1 {
            self.accept(link);
        }
        let is_there = self.links[link].generations[side].is_some_and(|generation| self.is_running(to, generation));
        if !is_there {
            // No agent runs, or the agent that runs is of a later generation: the connection is reset.
            return self.close(link, to);
        }
        if self.links[link].is_closed[side] {
            return;
        }
        match self.links[link].on_the_way[side].pop_front() {
            None => return,
            Some(Item::Frames(bytes)) => self.on_frames(link, to, from, &bytes),
            Some(Item::Payload(bytes)) => self.on_payload(link, to, bytes),
            Some(Item::End) => self.on_end(link, to, from),
        }
        self.end_turn(to);
    }

    fn on_frames(&mut self, link: usize, to: usize, from: usize, bytes: &[u8]) {
        let (side, mut rest) = (self.links[link].side(to), bytes);
        while !rest.is_empty() && !self.links[link].is_closed[side] {
            match Frame::parse(rest) {
                Ok(Some((frame, length))) => {
                    rest = &rest[length..];
                    self.on_any_frame(link, to, from, &frame);
                }
                other if self.links[link].is_rogue => {
                    self.cover("no frame");
                    let (peer, why) = (self.machines[to].peer(from), format!("{other:?}"));
                    return self.lose_peer(to, peer, &why);
                }
                other => return self.violate(format!("machine {from} sent no frame: {other:?} {rest:?}")),
            }
        }
    }

    fn on_any_frame(&mut self, link: usize, to: usize, from: usize, frame: &Frame) {
        let side = self.links[link].side(to);
        if side == 1 && !std::mem::replace(&mut self.links[link].has_spoken, true) {
            return self.on_first_frame(link, to, from, frame);
        }
        match self.links[link].purpose {
            Purpose::Session => self.on_frame(link, to, from, frame),
            Purpose::Fetch(fetch) => self.on_fetch_answer(to, fetch, frame),
            Purpose::Store(reach) => self.on_store_answer(link, to, reach, frame),
            Purpose::Examine => self.close(link, to),
        }
    }

    fn on_first_frame(&mut self, link: usize, to: usize, from: usize, frame: &Frame) {
        let (now, base) = (self.now(), self.base);
        if let Some(place) = self.links[link].place.take() {
            self.machines[to].event(now, base, |logic, _| logic.incoming.remove(place));
        }
        self.read_missing_offer(to, frame);
        match frame {
            Frame::Hello(hello) => self.admit(link, to, from, hello),
            Frame::Fetch(fetch) => self.serve_fetch(link, to, from, fetch),
            Frame::Store(_) => self.serve_reader(link, to, from),
            Frame::Examine(examine) => self.examine(link, to, from, examine),
            _ => self.refuse(link, to, from, Reason::Malformed),
        }
    }

    /// Refuses a connection, and tells the other agent the reason.
    pub(super) fn refuse(&mut self, link: usize, machine: usize, from: usize, reason: Reason) {
        let (now, base) = (self.now(), self.base);
        self.cover("refused");
        self.machines[machine].event(now, base, |logic, call| {
            logic.shared.counts.malformed_peer += 1;
            logic.incoming.log_refusal(address(from), &reason.to_string(), call.now);
        });
        let refused = peer::Refused { reason: (reason as u32).into() };
        self.send_frame(link, machine, |out| refused.emit(out));
        self.close(link, machine);
    }

    fn on_frame(&mut self, link: usize, machine: usize, from: usize, frame: &Frame) {
        let peer = self.machines[machine].peer(from);
        let (has_link, side) = (self.has_link(machine, peer, link), self.links[link].side(machine));
        if !has_link {
            return;
        }
        let taken = match frame {
            Frame::Hello(hello) if !self.links[link].is_up[side] => self.begin_session(link, machine, peer, hello),
            Frame::Refused(refused) if !self.links[link].is_up[side] => {
                let reason = Reason::from_number(refused.reason.get()).unwrap_or(Reason::Malformed);
                return self.lose_peer(machine, peer, &reason.to_string());
            }
            _ if !self.links[link].is_up[side] => Err(Reason::Malformed),
            frame => self.on_frame_of_session(machine, peer, frame),
        };
        if let Err(reason) = taken {
            if !self.links[link].is_rogue {
                self.violate(format!("machine {machine} refuses {frame:?}: {reason}"));
            }
            self.cover("peer's fault");
            self.lose_peer(machine, peer, &reason.to_string());
        }
    }

    fn on_frame_of_session(&mut self, machine: usize, peer: usize, frame: &Frame) -> Result<(), Reason> {
        let (now, base) = (self.now(), self.base);
        self.read_missing_offer(machine, frame);
        match frame {
            Frame::Claim(claim) => self.on_claim(machine, peer, claim, None),
            Frame::ClaimParts(claim, parts) => self.on_claim(machine, peer, claim, Some(parts)),
            frame => {
                let taken = self.machines[machine].event(now, base, |logic, call| logic.frame(peer, frame, call));
                self.act(machine);
                return taken.unwrap_or(Ok(()));
            }
        }
        Ok(())
    }

    /// Returns whether a machine's session with a peer uses this connection.
    pub(super) fn has_link(&self, machine: usize, peer: usize, link: usize) -> bool {
        self.machines[machine].agent.as_ref().is_some_and(|agent| agent.links[peer] == Some(link))
    }

    pub(super) fn lose_peer(&mut self, machine: usize, peer: usize, why: &str) {
        let (now, base) = (self.now(), self.base);
        self.machines[machine].event(now, base, |logic, call| logic.lose_peer(peer, why, call));
        self.act(machine);
    }

    fn begin_session(&mut self, link: usize, machine: usize, peer: usize, hello: &Hello) -> Result<(), Reason> {
        let (now, base, side) = (self.now(), self.base, self.links[link].side(machine));
        let key = [link as u8 | 1; 16];
        let begun = self.machines[machine].event(now, base, |logic, call| logic.hello(peer, hello, key, call));
        self.act(machine);
        self.links[link].is_up[side] = true;
        begun.unwrap_or(Ok(()))
    }

    /// Handles the HELLO of an agent that has dialled this one.
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
                if let Err(reason) = self.begin_session(link, machine, peer, hello) {
                    self.violate(format!("machine {machine} admits {from} and then refuses: {reason}"));
                }
                self.cover("session");
            }
            Some(Err(Refused { why, reason })) => {
                if self.machines[machine].knows(from) {
                    self.violate(format!("machine {machine} refuses {from}: {why}"));
                }
                self.refuse(link, machine, from, reason);
            }
            None => {}
        }
    }

    /// Closes a connection at one end. The other end learns of it after a delay.
    pub(super) fn close(&mut self, link: usize, by: usize) {
        let side = self.links[link].side(by);
        if !std::mem::replace(&mut self.links[link].is_closed[side], true) {
            self.links[link].on_the_way[side].clear();
            self.send(link, by, Item::End);
        }
    }

    /// Handles the other end's close.
    fn on_end(&mut self, link: usize, to: usize, from: usize) {
        let (now, base) = (self.now(), self.base);
        let side = self.links[link].side(to);
        if let Some(place) = self.links[link].place.take() {
            self.machines[to].event(now, base, |logic, _| logic.incoming.remove(place));
        }
        match self.links[link].purpose {
            Purpose::Session => {
                let peer = self.machines[to].peer(from);
                if self.has_link(to, peer, link) {
                    self.lose_peer(to, peer, "closed");
                }
            }
            Purpose::Fetch(fetch) if side == 0 => self.fail_fetch(to, fetch, Reason::PeerLost),
            Purpose::Fetch(_) => self.fail_served(link, to, Reason::PeerLost),
            Purpose::Store(reach) if side == 0 => self.fail_reaching(to, reach),
            Purpose::Store(_) | Purpose::Examine => {}
        }
        self.close(link, to);
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
