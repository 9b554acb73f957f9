//! Programs under `shunt run`, and stores: handoffs of stored bytes, connections to stores, and the addresses and
//! sources that machines tell each other. A *store* has the payloads of a machine's programs under `shunt run`. A
//! *peer* is another machine's agent. A *claim* is the message that asks a peer to send bytes of its store on a
//! client's connection. A *reference* names bytes of a payload. Each payload has a numbered *slot* in its store. A
//! *region* is a range of sequence numbers of a client's connection, which one payload takes. A *payload* is the body
//! of a response. A *handoff* lets a backend send a payload on a client's connection.

use std::net::IpAddr;
use std::time::Duration;

use shunt_decisions::Counter;
use shunt_logic::store::reaching;
use shunt_wire::local::{self, Reason, Request};
use shunt_wire::parts::{Part, Parts};
use shunt_wire::peer::{Frame, Store, Stored};
use zerocopy::FromZeros;

use crate::client::Response;
use crate::machine::store_of;
use crate::worker::{Serving, Stage};
use crate::world::{Event, LOCAL, Purpose, World};

/// Time for which a program makes no claims to a peer, after the agent has said that a claim waits at this peer.
const PAUSE: Duration = Duration::from_secs(2);
/// Longest time that a program's handoff may make no progress; longer is a violation. It has to be more than 40 s. A
/// claim waits up to 30 s for a sender. If the program has ended, the agent cancels its handoff only after 10 s without
/// progress.
const BOUND: Duration = Duration::from_secs(45);

impl World {
    /// Handles a reference to a slot of a peer's store, which a program gets in place of a payload.
    pub(super) fn on_reference(&mut self, machine: usize, client: usize, response: &Response, peer: usize, slot: u32) {
        let now = self.now();
        let epoch = self.epoch(machine, peer);
        let worker = &self.machines[machine].worker;
        let Some(program) = worker.program else { return self.relay(machine, client, *response, 0) };
        let waits = worker.waits_until.get(&peer).is_some_and(|until| *until > now);
        if waits || !self.may_hand_off(machine, peer) {
            return self.relay(machine, client, *response, 0);
        }
        let asked = self.machines[machine].worker.would_send.get(&peer).filter(|(of, _)| *of == epoch);
        match asked {
            Some((_, true)) => {
                if !self.hand_off_parts(machine, client, response, peer, slot) {
                    self.relay(machine, client, *response, 0);
                }
            }
            Some((_, false)) => self.relay(machine, client, *response, 0),
            None => {
                let handoff = self.machines[machine].worker.name_handoff();
                self.set_stage(machine, client, Stage::Asking { handoff, peer });
                self.cover("ask");
                self.ask_store(machine, client, program.control, handoff, peer);
            }
        }
    }

    /// Has a program ask whether a peer would send bytes of its store.
    fn ask_store(&mut self, machine: usize, client: usize, server: usize, handoff: u64, peer: usize) {
        let (at, own, generation) =
            (self.clients[client].at, self.server_of(client), self.machines[machine].generation);
        let mut ask = local::Ask::new_zeroed();
        (ask.header, ask.handoff, ask.peer) = (local::Ask::HEADER, handoff, peer as u32);
        ask.epoch = self.epoch(machine, peer);
        (ask.client_address, ask.client_port) = (at.address, at.port_be);
        (ask.server_address, ask.server_port) = (own.address, own.port_be);
        let request = Box::new(Request::Ask(ask));
        self.schedule.after(LOCAL, Event::ToAgent { machine, generation, server, request });
    }

    /// Handles an agent's message to a program: an answer to its question, or the news that one of its claims waits.
    pub(super) fn on_answer(&mut self, machine: usize, answer: &local::Answer) {
        let (peer, would) = (answer.peer as usize, answer.reason == local::Answer::YES);
        let epoch = self.epoch(machine, peer);
        let is_its =
            |serving: &Serving| matches!(serving.stage, Stage::Asking { handoff, .. } if handoff == answer.handoff);
        let worker = &mut self.machines[machine].worker;
        let found = worker.serving.iter().find(|(_, serving)| is_its(serving));
        let Some((client, response)) = found.map(|(client, serving)| (*client, serving.response)) else {
            self.cover("claim waits");
            let until = self.now() + PAUSE;
            self.machines[machine].worker.waits_until.insert(peer, until);
            return;
        };
        let is_for_good = would || answer.reason != Reason::Limit as u32;
        if is_for_good {
            worker.would_send.insert(peer, (epoch, would));
        }
        let slot = response.number as u32;
        if !would || !self.hand_off_parts(machine, client, &response, peer, slot) {
            self.cover("program relays");
            self.relay(machine, client, response, 0);
        }
    }

    /// Has a program hand off bytes of a peer's store. In half of the cases, the program also writes the bytes after
    /// the payload at once. Returns false if the handoff could not begin.
    fn hand_off_parts(&mut self, machine: usize, client: usize, response: &Response, peer: usize, slot: u32) -> bool {
        let (now, generation) = (self.now(), self.machines[machine].generation);
        let Some(program) = self.machines[machine].worker.program else { return false };
        let (Some(ring), true) = (program.ring, self.may_hand_off(machine, peer)) else { return false };
        let handoff = self.machines[machine].worker.name_handoff();
        let Some(flow) = self.machines[machine].host.flows.get_mut(&client) else { return false };
        if !flow.has_sent_all() || flow.append(peer as u32, ring, handoff, response.length, now) != Counter::FE_BEGUN {
            self.cover("region refused");
            return false;
        }
        let state = flow.state();
        self.cover("region of stored bytes");
        self.set_stage(machine, client, Stage::Begun { handoff, peer, acked: 0 });
        if self.random.below(2) == 0 {
            self.write_trailer(client, response);
        }
        if self.random.in_a_million(self.variety.exits) {
            self.exit_program(machine);
            return true;
        }
        let mut message = self.handoff(machine, handoff, peer, state);
        message.length = response.length;
        let part = |offset: u64, length: u64| Part {
            segment: 1.into(),
            slot: slot.into(),
            secret: 7.into(),
            offset: offset.into(),
            length: length.into(),
        };
        let Some(parts) = Parts::new(&[part(0, response.length)]) else { return true };
        let request = Box::new(Request::HandoffParts(message, parts));
        self.schedule.after(LOCAL, Event::ToAgent { machine, generation, server: program.control, request });
        self.schedule.after(BOUND, Event::Bound { client, handoff, acked: 0 });
        true
    }

    /// Has a program end a handoff that failed. If the kernel removes the region, the program relays the payload.
    /// Otherwise the program or its agent resets the client's connection.
    pub(super) fn end_of_program(&mut self, machine: usize, client: usize, handoff: u64, serving: &Serving) {
        let generation = self.machines[machine].generation;
        let flow = self.machines[machine].host.flows.get_mut(&client);
        if flow.is_some_and(|flow| flow.undo(handoff)) {
            self.cover("region undone");
            return self.relay(machine, client, serving.response, 0);
        }
        let program = self.machines[machine].worker.program;
        match program.filter(|_| self.random.below(2) == 0) {
            None => self.reset_client(client),
            Some(program) => {
                self.cover("program cancels");
                let cancel = local::Cancel { header: local::Cancel::HEADER, handoff };
                let (server, request) = (program.control, Box::new(Request::Cancel(cancel)));
                self.schedule.after(LOCAL, Event::ToAgent { machine, generation, server, request });
            }
        }
    }

    /// Ends a machine's program. A client's connection stays if the kernel can complete its response, and is reset
    /// otherwise. Another program connects to the agent later.
    pub(super) fn exit_program(&mut self, machine: usize) {
        let Some(program) = self.machines[machine].worker.program.take() else { return };
        let generation = self.machines[machine].generation;
        self.cover("program ends");
        let (now, base) = (self.now(), self.base);
        // Messages of the program that have not reached the agent yet are lost with its connection.
        self.machines[machine].event(now, base, |logic, call| logic.remove_server(program.control, call));
        self.act(machine);
        self.end_turn(machine);
        self.leave_connections(machine);
        let delay = self.random.time(Duration::from_millis(1), Duration::from_millis(300));
        self.schedule.after(delay, Event::ProgramConnects { machine, generation });
    }

    /// Ends the responses of a program that has ended. Clients get the bytes that the kernel still has for them, or a
    /// reset.
    fn leave_connections(&mut self, machine: usize) {
        let worker = &self.machines[machine].worker;
        let its = worker.serving.iter().filter(|(_, serving)| serving.response.kind == crate::client::Kind::Stored);
        for (client, serving) in its.map(|(client, serving)| (*client, *serving)).collect::<Vec<_>>() {
            match serving.stage {
                // All bytes after the payload are written. The region completes without the program, or the agent
                // cancels it.
                Stage::Begun { .. } if serving.has_trailer => {
                    self.cover("left to the kernel");
                    self.end_response(machine, client);
                }
                _ => self.reset_client(client),
            }
        }
    }

    /// Has a program of a machine connect to the store of another one.
    pub(super) fn reach_store(&mut self, machine: usize, other: usize) {
        let (now, base) = (self.now(), self.base);
        let generation = self.machines[machine].generation;
        let peer = self.machines[machine].peer(other);
        if !self.machines[machine].knows(other) {
            return;
        }
        let program = self.machines[machine].worker.name_handoff();
        let added = self.machines[machine].event(now, base, |logic, call| {
            let reaching = &mut logic.store.as_mut()?.reaching;
            reaching.add(program, store_of(other), peer, call.now)
        });
        let Some(reach) = added.flatten() else { return };
        self.cover("store is reached for");
        self.wishes.insert((machine, generation, program));
        let link = self.connect(machine, other, Purpose::Store(reach));
        if let Some(agent) = &mut self.machines[machine].agent {
            agent.reaches.insert(reach, link);
        }
        self.send_frame(link, machine, |out| Store::REQUEST.emit(out));
    }

    pub(super) fn on_store_answer(&mut self, link: usize, machine: usize, reach: usize, frame: &Frame) {
        if let Err(reason) = reaching::answer(frame)
            && !matches!(reason, Reason::NotAllowed | Reason::Limit)
            && !self.links[link].is_rogue
        {
            self.violate(format!("machine {machine} gets {frame:?} of a store"));
        }
        self.cover("store answers");
        self.end_reach(machine, reach);
        self.close(link, machine);
    }

    pub(super) fn fail_reaching(&mut self, machine: usize, reach: usize) {
        self.end_reach(machine, reach);
    }

    fn end_reach(&mut self, machine: usize, reach: usize) {
        let generation = self.machines[machine].generation;
        let Some(agent) = &mut self.machines[machine].agent else { return };
        let link = agent.reaches.remove(&reach);
        let ended = agent.logic.store.as_mut().and_then(|store| store.reaching.remove(reach));
        if let Some(ended) = ended {
            self.wishes.remove(&(machine, generation, ended.program));
        }
        if let Some(link) = link {
            self.close(link, machine);
        }
    }

    /// Gives up each connection to another machine's store whose agent has not answered in time.
    pub(super) fn tend_reaching(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        loop {
            let late = self.machines[machine]
                .event(now, base, |logic, call| logic.store.as_ref().and_then(|store| store.reaching.late(call.now)));
            let Some(reach) = late.flatten() else { return };
            self.cover("store does not answer");
            self.fail_reaching(machine, reach);
        }
    }

    /// Answers the request of a program on machine `from` to read from this machine's store.
    pub(super) fn serve_reader(&mut self, link: usize, machine: usize, from: usize) {
        let peer = self.machines[machine].peer(from);
        let settings = self.machines[machine].settings.peers.get(peer);
        let may = self.machines[machine].settings.has_store && settings.is_some_and(|peer| peer.may_read_store);
        if !may || !self.machines[machine].knows(from) {
            return self.refuse(link, machine, from, Reason::NotAllowed);
        }
        if self.random.below(8) == 0 {
            return self.refuse(link, machine, from, Reason::Limit);
        }
        let is_rogue = self.variety.has_all_faults && self.random.below(20) == 0;
        self.links[link].is_rogue = is_rogue;
        self.send_frame(link, machine, |out| match is_rogue {
            true => shunt_wire::peer::Ping {}.emit(out),
            false => Stored {}.emit(out),
        });
    }

    /// Tells the kernel the key that proves TCP handshakes with programs at an address. `None`: the address has no key
    /// any more.
    pub(super) fn set_end(&mut self, machine: usize, address: IpAddr, key: Option<[u8; 16]>) {
        self.cover("end");
        let ends = &mut self.machines[machine].host.ends;
        match key {
            Some(key) => drop(ends.insert(address, key)),
            None => drop(ends.remove(&address)),
        }
    }

    /// Tells a machine's programs, for each known address, the stores that programs at this address can fetch from.
    pub(super) fn write_sources(&mut self, machine: usize) {
        self.cover("sources");
        let of = &mut self.machines[machine];
        let Some(store) = of.agent.as_ref().and_then(|agent| agent.logic.store.as_ref()) else { return };
        of.host.sources.clear();
        of.host.sources.extend(store.sources.pairs(&store.ends.owned()));
    }

    /// Returns pairs of an address and a store that programs at this address can fetch from, as the agent has them now.
    pub(crate) fn sources_of(&self, machine: usize) -> Option<Vec<(IpAddr, [u8; 16])>> {
        let store = self.machines[machine].agent.as_ref()?.logic.store.as_ref()?;
        let owned = store.ends.owned();
        Some(store.sources.pairs(&owned).collect())
    }

    /// Changes the addresses of a machine's interfaces: some are added, or all added ones are removed.
    pub(super) fn renumber(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        self.cover("addresses change");
        let last = self.random.below(4) as u8;
        let of = &mut self.machines[machine];
        if of.addresses.len() > 2 {
            of.addresses.truncate(2);
        } else {
            let link_local = IpAddr::from([0xfe80, 0, 0, 0, 0, 0, 0, u16::from(last)]);
            of.addresses.extend([IpAddr::from([10, 0, of.index as u8, last]), link_local]);
            if last == 0 {
                // More addresses than one message between agents has room for.
                of.addresses.extend((0..70).map(|host| IpAddr::from([10, 1, of.index as u8, host])));
            }
        }
        let addresses = of.addresses.clone();
        of.event(now, base, |logic, call| logic.set_own_addresses(&addresses, call));
        self.act(machine);
        self.end_turn(machine);
    }
}
