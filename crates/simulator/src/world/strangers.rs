//! Strangers: machines and processes that do not belong to the service, and agents and servers that send what no
//! correct agent or server sends. An *offer* is a payload that a backend's server holds ready. A *handoff* lets a
//! backend send a payload on a client's connection. A *claim* is the message that asks the backend for it. A *fetch*
//! brings a payload through both agents to the frontend's server. A *frame* is a message between agents. A *payload* is
//! the body of a response. A *session* is the use of a connection between two agents.

use std::net::IpAddr;
use std::time::Duration;

use shunt_logic::servers::{Caller, May};
use shunt_wire::local::{self, Channel, Reason, Request, VERSIONS};
use shunt_wire::parts::{Part, Parts};
use shunt_wire::peer::{self, Claim, Hello, Protocol, padded_name};
use zerocopy::FromZeros;

use crate::machine::{Agent, address, name};
use crate::world::{Item, Purpose, World};

/// Number of a handoff that no server has, like the numbers above it.
const NOBODYS: u64 = 1 << 62;

impl World {
    /// Has strangers connect to a machine's agent. Some say nothing, and others use a false name or ask for a fetch. A
    /// machine of the service asks what `shunt doctor` would ask.
    pub(super) fn strangers(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        self.cover("strangers");
        let from = IpAddr::from([203, 0, 113, self.random.below(3) as u8]);
        for _ in 0..self.random.between(1, 12) {
            let place = self.machines[machine].event(now, base, |logic, call| logic.incoming.add(from, true, call.now));
            if let Some(Some(place)) = place
                && self.random.below(3) > 0
            {
                self.machines[machine].event(now, base, |logic, call| {
                    logic.incoming.remove(place);
                    logic.incoming.log_refusal(from, "garbage", call.now);
                });
            }
        }
        let other = self.random.below(self.service.machines as u64) as usize;
        for (called, proven, at) in [
            (name(other), false, from),      // the certificate has another name
            ("nobody".into(), true, from),   // no configuration has this name
            (name(other), true, from),       // a clone, from another address
            (name(machine + 1), true, from), // this agent is the one that dials that machine
        ] {
            self.hello_of_stranger(machine, &called, proven, at);
        }
        self.fetch_of_stranger(machine);
        self.answer_of_impostor(machine);
        let examine = peer::Examine::of(&[(address(other), 443).into()]);
        if other != machine {
            let link = self.connect(other, machine, Purpose::Examine);
            self.send_frame(link, other, |out| examine.emit(out));
        }
    }

    fn hello_of_stranger(&mut self, machine: usize, called: &str, proven: bool, from: IpAddr) {
        let (now, base) = (self.now(), self.base);
        let mut hello = Hello::new_zeroed();
        (hello.protocol, hello.name) = (Protocol::OURS, padded_name(called));
        let index = |peer| address(self.machines[machine].machine(peer));
        let current: Vec<IpAddr> = (0..self.service.machines - 1).map(index).collect();
        let is_up = |agent: &Agent| {
            let peers = &agent.logic.shared.peers;
            (0..peers.len()).any(|peer| peers.find(peer).is_some_and(|one| one.name() == called && one.is_up()))
        };
        // Without a session with that machine, the agent cannot tell a clone from the machine itself.
        if proven && self.machines[machine].agent.as_ref().is_some_and(|agent| !is_up(agent) && called != "nobody") {
            return;
        }
        let admitted = self.machines[machine].event(now, base, |logic, call| {
            logic.admit(&hello, |claimed| proven && claimed == called, from, |peer| current.get(peer).copied(), call)
        });
        if matches!(admitted, Some(Ok(_))) {
            self.violate(format!("machine {machine} admits a stranger as {called}"));
        }
    }

    /// Has an agent whose certificate is no peer's ask for a fetch.
    fn fetch_of_stranger(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        let mut fetch = peer::Fetch::new_zeroed();
        (fetch.offer, fetch.length) = (self.machines[machine].worker.some_offer(0).into(), 5.into());
        let served = self.machines[machine].event(now, base, |logic, call| logic.serve_fetch(None, &fetch, call));
        if matches!(served, Some(Ok(_))) {
            self.violate(format!("machine {machine} lets a stranger fetch"));
        }
    }

    /// Has a peer that this agent has dialled answer with a HELLO whose name is not the peer's.
    fn answer_of_impostor(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        let Some(Agent { logic, .. }) = &self.machines[machine].agent else { return };
        let peers = &logic.shared.peers;
        let Some(peer) = (0..peers.len()).find(|peer| peers.is_greeted(*peer) && !peers.is_up(*peer)) else { return };
        let mut hello = Hello::new_zeroed();
        (hello.protocol, hello.name) = (Protocol::OURS, padded_name("impostor"));
        self.cover("impostor");
        let begun = self.machines[machine].event(now, base, |logic, call| logic.hello(peer, &hello, [0; 16], call));
        match begun {
            Some(Err(reason)) => self.lose_peer(machine, peer, &reason.to_string()),
            _ => self.violate(format!("machine {machine} takes an impostor for its peer {peer}")),
        }
    }

    /// Has many processes connect to an agent. Some run as users that may not connect, and some may only ask for
    /// counters. Others have a server's permissions, but say nothing or send what no correct server sends.
    pub(super) fn crowd(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        self.cover("crowd");
        let user = 2000 + self.random.below(3) as u32;
        let mut kinds = [(May::Nothing, 2), (May::Observe, 2), (May::Serve, self.random.between(2, 12))];
        kinds.rotate_left(self.random.below(3) as usize);
        for (may, number) in kinds {
            for _ in 0..number {
                let caller = Caller { pid: 2, uid: user, gid: user, may };
                let added = self.machines[machine].event(now, base, |logic, call| logic.add_server(caller, call));
                let Some(Ok(server)) = added else {
                    self.cover("process refused");
                    continue;
                };
                self.visit(machine, server, may);
            }
        }
        self.end_turn(machine);
    }

    fn visit(&mut self, machine: usize, server: usize, may: May) {
        let (now, base) = (self.now(), self.base);
        let requests = if may == May::Observe {
            vec![Request::Stats, self.some_request(machine)]
        } else {
            match self.random.below(4) {
                0 => return, // it says nothing, and is closed after a while
                1 => {
                    let offer = self.some_offer(machine, server);
                    vec![Request::Hello(Channel::Offers, VERSIONS.newest), offer, offer]
                }
                2 if self.random.below(60) == 0 => {
                    // More questions than may wait for an answer.
                    let peer = self.random.below(self.service.machines as u64 - 1) as u32;
                    let epoch = self.epoch(machine, peer as usize);
                    let asks = (0..2_200).map(|name| self.some_ask(machine, peer, epoch, NOBODYS + name));
                    let hello = Request::Hello(Channel::Control, VERSIONS.newest);
                    [hello].into_iter().chain(asks).collect()
                }
                _ => vec![Request::Hello(Channel::Control, VERSIONS.newest), self.some_request(machine)],
            }
        };
        let was_cut = self.random.below(2) == 0;
        for request in requests {
            self.machines[machine].offers_made += u64::from(matches!(request, Request::Offer(_)));
            // Half of the messages come without an open file, which an offer needs.
            let file = (self.random.below(2) == 0).then_some(0);
            let taken = self.machines[machine]
                .event(now, base, |logic, call| logic.request(server, &request, &mut file.clone(), was_cut, call));
            self.act(machine);
            if let Some(Err(reason)) = taken {
                self.cover("server's fault");
                self.machines[machine].event(now, base, |logic, call| logic.malformed(server, reason, call));
                return self.act(machine);
            }
        }
        self.machines[machine].event(now, base, |logic, call| logic.remove_server(server, call));
        self.act(machine);
    }

    /// Returns an offer. Its number may belong to another connection, and its peer may not exist.
    fn some_offer(&mut self, machine: usize, server: usize) -> Request {
        let mut offer = local::Offer::new_zeroed();
        let agent = self.machines[machine].agent.as_ref();
        let worker = agent.and_then(|agent| agent.logic.shared.servers.find(server)).map_or(0, |one| one.worker);
        offer.number = u64::from(worker + self.random.below(2) as u32) << 32;
        (offer.length, offer.size, offer.peer) = (5, 5, self.random.below(self.service.machines as u64) as u32);
        if offer.peer as usize >= self.service.machines - 1 {
            offer.peer = 200;
        }
        Request::Offer(offer)
    }

    fn some_ask(&self, machine: usize, peer: u32, epoch: u32, handoff: u64) -> Request {
        let mut message = local::Ask::new_zeroed();
        (message.peer, message.epoch, message.handoff) = (peer, epoch, handoff);
        let ends = [address(machine), IpAddr::from([198, 51, 100, 9])].map(|ip| (ip, 9).into());
        let [server, client] = ends.map(|end: std::net::SocketAddr| shunt_wire::Endpoint::from(end));
        (message.client_address, message.client_port) = (client.address, client.port_be);
        (message.server_address, message.server_port) = (server.address, server.port_be);
        Request::Ask(message)
    }

    /// Returns a random request: about a handoff or a fetch that does not exist, or a HELLO.
    fn some_request(&mut self, machine: usize) -> Request {
        let peer = self.random.below(self.service.machines as u64 - 1) as u32;
        let epoch = if self.random.below(2) == 0 { self.epoch(machine, peer as usize) } else { 77 };
        let handoff = NOBODYS + self.random.below(3);
        match self.random.below(9) {
            0 => Request::Hello(Channel::Control, VERSIONS.newest),
            1 => {
                let mut message = local::Handoff::new_zeroed();
                (message.peer, message.epoch, message.handoff, message.length) = (peer, epoch, handoff, 5);
                Request::Handoff(message)
            }
            2 => self.some_ask(machine, peer, epoch, handoff),
            3 | 4 => {
                let mut message = local::Prove::new_zeroed();
                (message.peer, message.epoch, message.handoff, message.length) = (peer, epoch, handoff, 5);
                message.offer = NOBODYS;
                Request::Prove(message)
            }
            5 => {
                let header = local::Withdrawn::HEADER;
                Request::Withdrawn(local::Withdrawn { header, peer, epoch, handoff })
            }
            6 => {
                let mut message = local::Fetch::new_zeroed();
                (message.peer, message.fetch, message.length) = (200, handoff, 5);
                Request::Fetch(message)
            }
            7 => Request::Cancel(local::Cancel { header: local::Cancel::HEADER, handoff }),
            _ => Request::Abort(local::Abort { header: local::Abort::HEADER, handoff }),
        }
    }

    /// Has a machine's agent send a frame that no correct agent sends, in its session with machine `other`.
    pub(super) fn garble(&mut self, machine: usize, other: usize) {
        let peer = self.machines[machine].peer(other);
        let Some(Agent { logic, links, .. }) = &self.machines[machine].agent else { return };
        let Some(link) = links[peer].filter(|_| logic.shared.peers.is_up(peer)) else { return };
        self.cover("garble");
        let kind = self.random.below(18);
        let bytes = self.some_frame(machine, other, kind);
        // The other agent may take such a frame or refuse it. So a refusal on this connection is no violation.
        self.links[link].is_rogue = true;
        self.send(link, machine, Item::Frames(bytes));
    }

    fn some_frame(&mut self, machine: usize, other: usize, kind: u64) -> Vec<u8> {
        let (handoff, mut out) = (NOBODYS + self.random.below(3), Vec::new());
        let worker = (self.random.below(4) as u32).into();
        let made = self.machines[other].worker.last.filter(|_| self.random.below(2) == 0);
        let offer = self.machines[other].worker.some_offer(self.random.below(3) as u32);
        let offer = made.map_or(offer, |made| made.number);
        let (tag, length) = made.map_or((shunt_wire::Tag([0; 16]), 5), |made| (made.tag, made.length));
        let reason: u32 = if self.random.below(4) == 0 { 999 } else { Reason::ClientGone as u32 };
        match kind {
            0 => {
                let mut hello = Hello::new_zeroed();
                (hello.protocol, hello.name) = (Protocol::OURS, padded_name(&name(machine)));
                hello.emit(&mut out);
            }
            1 => shunt_wire::prefixes::Prefixes::new(&[]).unwrap_or_default().emit(&mut out),
            2 => peer::Fetched { length: 5.into() }.emit(&mut out),
            3 | 4 => {
                peer::Ended { worker, reason: reason.into(), handoff: handoff.into(), trace: Default::default() }
                    .emit(&mut out);
            }
            5 => peer::Answer { worker, reason: 0.into(), handoff: handoff.into() }.emit(&mut out),
            6 => shunt_logic::backend::questions::digest(worker.get(), handoff, 0, None).emit(&mut out),
            7 => peer::Abort { worker, handoff: handoff.into() }.emit(&mut out),
            8 => peer::Withdrawn { worker, zero: 0.into(), handoff: handoff.into() }.emit(&mut out),
            9 | 10 => {
                let mut prove = peer::Prove::new_zeroed();
                (prove.offer, prove.length, prove.handoff) = (offer.into(), length.into(), handoff.into());
                (prove.worker, prove.tag) = (worker, tag);
                prove.emit(&mut out);
            }
            14 => {
                // If `made` names an offer: a claim with the offer's tag, but with another length.
                let mut claim = self.some_claim(machine, offer, handoff);
                (claim.tag, claim.length) = (tag, (length + 1).into());
                claim.emit(&mut out);
            }
            11 => (0..3).for_each(|_| {
                shunt_wire::sources::Sources::of([[1; 16], [9; 16]]).emit(&mut out);
            }),
            12 => (0..3).for_each(|_| {
                let ipv6 = IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 9]);
                let addresses = [IpAddr::from([10, 9, 9, 9]), ipv6, address(other), IpAddr::from([127, 0, 0, 1])];
                shunt_wire::addresses::Addresses::of(&addresses).emit(&mut out);
            }),
            13 => {
                let part = Part { length: 5.into(), ..Part::default() };
                if let Some(parts) = Parts::new(&[part]) {
                    self.some_claim(machine, 0, handoff).emit_with(&parts, &mut out);
                }
            }
            _ => self.some_claim(machine, offer, handoff).emit(&mut out),
        }
        out
    }

    /// Returns a claim of an offer, with a tag of zeros, which no nginx worker's offer has. The claim's server address
    /// is the machine's own or a foreign one. The client's address may be a loopback address.
    fn some_claim(&mut self, machine: usize, offer: u64, handoff: u64) -> Claim {
        let mut claim = Claim::new_zeroed();
        let server = if self.random.below(3) == 0 { IpAddr::from([203, 0, 113, 9]) } else { address(machine) };
        let client = if self.random.below(4) == 0 { IpAddr::from([127, 0, 0, 1]) } else { [198, 51, 100, 9].into() };
        (claim.offer, claim.length, claim.handoff) = (offer.into(), 5.into(), handoff.into());
        claim.bytes = (size_of::<Claim>() as u16).into();
        let (client, server) = (std::net::SocketAddr::from((client, 9)), std::net::SocketAddr::from((server, 443)));
        let ends: [shunt_wire::Endpoint; 2] = [client.into(), server.into()];
        (claim.flow.client_address, claim.flow.client_port) = (ends[0].address, ends[0].port_be);
        (claim.flow.server_address, claim.flow.server_port) = (ends[1].address, ends[1].port_be);
        claim.flow.mss = 1448.into();
        claim.flow.snd_cwnd = 10.into();
        claim
    }

    /// Leaves a machine's agent without a free descriptor for a while.
    pub(super) fn make_scarce(&mut self, machine: usize, pause: Duration) {
        self.cover("descriptors are scarce");
        self.machines[machine].host.scarce_until = self.now() + pause;
    }

    /// Closes the path from a machine to the clients of another one for a while.
    pub(super) fn close_path(&mut self, machine: usize, other: usize, pause: Duration) {
        self.cover("path is closed");
        let (until, peer) = (self.now() + pause, self.machines[machine].peer(other));
        self.machines[machine].host.unreached.insert(peer, until);
    }
}
