//! Fetches: payloads that come as a stream to the frontend's server, through both machines' agents. A *payload* is the
//! body of a response.

use std::time::Duration;

use shunt_wire::local::{self, Reason, Request};
use shunt_wire::peer::{self, Fetched, Frame};
use zerocopy::FromZeros;

use crate::client::{Kind, Response};
use crate::content::{Run, Source};
use crate::machine::Fetching;
use crate::worker::{Serving, Stage, tag};
use crate::world::{Event, Item, LOCAL, Purpose, Served, World};

/// Most bytes of a fetched payload that an agent sends at a time.
const CHUNK: u64 = 256 << 10;
/// Pauses of a server before it reads more of a fetch: the longest usual one, and one that fails the fetch.
const USUAL: Duration = Duration::from_millis(20);
const TOO_LONG: Duration = Duration::from_secs(65);

impl World {
    /// Has a server fetch an offer's payload, or relay it if the server is not connected to an agent.
    pub(super) fn fetch(&mut self, machine: usize, client: usize, response: &Response, peer: usize, offer: u64) {
        let generation = self.machines[machine].generation;
        let Some(connected) = self.machines[machine].worker.server(response.kind) else {
            return self.relay(machine, client, *response, 0);
        };
        let name = self.machines[machine].worker.name_handoff();
        let mut message = local::Fetch::new_zeroed();
        (message.header, message.peer, message.fetch) = (local::Fetch::HEADER, peer as u32, name);
        (message.offer, message.length, message.tag) = (offer, response.length, tag(response));
        self.cover("fetch");
        let request = Box::new(Request::Fetch(message));
        self.schedule.after(LOCAL, Event::ToAgent { machine, generation, server: connected.control, request });
        self.set_stage(machine, client, Stage::Fetching { fetch: name, got: 0 });
    }

    /// Connects to a backend for a fetch.
    pub(super) fn begin_fetch(&mut self, machine: usize, fetch: usize, peer: usize, request: &peer::Fetch) {
        let to = self.machines[machine].machine(peer);
        let link = self.connect(machine, to, Purpose::Fetch(fetch));
        self.send_frame(link, machine, |out| request.emit(out));
        if let Some(agent) = &mut self.machines[machine].agent {
            agent.fetches.insert(fetch, Fetching { link, reader: None });
        }
    }

    pub(super) fn on_fetch_answer(&mut self, machine: usize, fetch: usize, frame: &Frame) {
        let (now, base) = (self.now(), self.base);
        self.machines[machine].event(now, base, |logic, call| logic.fetch_answered(fetch, frame, call));
        self.act(machine);
    }

    /// Gives a server the stream from which it reads a fetched payload, or fails the fetch if that is impossible.
    pub(super) fn deliver_fetch(&mut self, machine: usize, fetch: usize, server: usize, message: &local::Fetched) {
        let (now, base) = (self.now(), self.base);
        let is_there = self.machines[machine].agent.as_ref().is_some_and(|agent| {
            agent.logic.shared.servers.find(server).is_some() && agent.fetches.contains_key(&fetch)
        });
        if !is_there || self.random.in_a_million(self.variety.unread) {
            self.cover("fetch is not delivered");
            let reason = if is_there { Reason::Limit } else { Reason::PeerLost };
            let name = message.fetch;
            self.machines[machine]
                .event(now, base, |logic, call| logic.fetch_undelivered(fetch, server, name, reason, call));
            return;
        }
        if let Some(fetching) = self.machines[machine].agent.as_mut().and_then(|agent| agent.fetches.get_mut(&fetch)) {
            fetching.reader = Some((message.fetch, message.length));
        }
    }

    /// Passes bytes of a fetch on to the server.
    pub(super) fn on_payload(&mut self, link: usize, machine: usize, bytes: u64) {
        let (now, base) = (self.now(), self.base);
        let Purpose::Fetch(fetch) = self.links[link].purpose else { return };
        let Some(agent) = &mut self.machines[machine].agent else { return };
        let Some(Fetching { reader: Some((name, left)), .. }) = agent.fetches.get_mut(&fetch) else { return };
        *left = left.saturating_sub(bytes);
        let (name, is_done) = (*name, *left == 0);
        if is_done {
            agent.fetches.remove(&fetch);
        }
        self.schedule.after(LOCAL, Event::Stream { machine, fetch: name, bytes: Some(bytes) });
        self.machines[machine].event(now, base, |logic, call| logic.fetch_moved(fetch, is_done, call));
        if is_done {
            return self.close(link, machine);
        }
        let is_stuck = self.variety.has_all_faults && self.random.below(400) == 0;
        let pause = if is_stuck { TOO_LONG } else { self.random.time(LOCAL, USUAL) };
        self.schedule.after(pause, Event::Credit { link });
    }

    /// Fails a fetch of this machine, because its connection has ended.
    pub(super) fn fail_fetch(&mut self, machine: usize, fetch: usize, reason: Reason) {
        let (now, base) = (self.now(), self.base);
        self.machines[machine].event(now, base, |logic, call| logic.fetch_failed(fetch, reason, call));
        self.act(machine);
    }

    /// Forgets a fetch. A server that already reads it sees the stream end before the payload does.
    pub(super) fn drop_fetch(&mut self, machine: usize, fetch: usize) {
        let Some(agent) = &mut self.machines[machine].agent else { return };
        let Some(Fetching { link, reader }) = agent.fetches.remove(&fetch) else { return };
        self.cover("fetch fails");
        if let Some((name, _)) = reader {
            self.schedule.after(LOCAL, Event::Stream { machine, fetch: name, bytes: None });
        }
        self.close(link, machine);
    }

    /// Handles bytes of a fetch at the server that reads it. `None`: the stream is broken off.
    pub(super) fn on_stream(&mut self, machine: usize, fetch: u64, bytes: Option<u64>) {
        let is_its = |serving: &Serving| matches!(serving.stage, Stage::Fetching { fetch: one, .. } if one == fetch);
        let found = self.machines[machine].worker.serving.iter().find(|(_, serving)| is_its(serving));
        let Some((client, serving)) = found.map(|(client, serving)| (*client, *serving)) else { return };
        let Stage::Fetching { got, .. } = serving.stage else { return };
        let (response, total) = (serving.response, serving.response.length);
        let Some(bytes) = bytes else {
            return if got == 0 { self.relay(machine, client, response, 0) } else { self.reset_client(client) };
        };
        let source = Source::File(response.file);
        match response.kind {
            // The server encrypts the payload itself, once it has all of it.
            Kind::Sealed if got + bytes == total => {
                self.write(client, Run { source, from: 0, length: response.region() });
            }
            Kind::Sealed => {}
            _ => self.write(client, Run { source, from: got, length: bytes }),
        }
        self.set_stage(machine, client, Stage::Fetching { fetch, got: got + bytes });
        if got + bytes >= total {
            self.cover("fetched");
            self.end_response(machine, client);
        }
    }

    /// Handles another agent's request to fetch a payload.
    pub(super) fn serve_fetch(&mut self, link: usize, machine: usize, from: usize, fetch: &peer::Fetch) {
        let (now, base) = (self.now(), self.base);
        let peer = self.machines[machine].knows(from).then(|| self.machines[machine].peer(from));
        self.asking_link = Some(link);
        let served = self.machines[machine].event(now, base, |logic, call| logic.serve_fetch(peer, fetch, call));
        self.act(machine);
        if let Some(Err(reason)) = served {
            self.refuse(link, machine, from, reason);
        }
        self.asking_link = None;
    }

    /// Begins to send the payload of a fetch, on the connection that has just asked for it.
    pub(super) fn begin_serving(&mut self, machine: usize, fetch: usize, offer: &local::Offer, file: u64) {
        let Some(link) = self.asking_link.take() else { return self.violate("a fetch that nobody asked for".into()) };
        let generation = self.machines[machine].generation;
        if !self.used.insert((machine, generation, offer.number)) {
            self.violate(format!("offer {} of machine {machine} is used twice", offer.number));
        }
        let state = self.machines[machine].host.file(file).state;
        self.links[link].serving = Some(Served { fetch, file, state, left: offer.length });
        if let Some(agent) = &mut self.machines[machine].agent {
            agent.served.insert(fetch, link);
        }
        let kind = if self.variety.has_all_faults { self.random.below(200) } else { 200 };
        let length = if kind == 0 { offer.length + 1 } else { offer.length };
        self.send_frame(link, machine, |out| match kind {
            1 => peer::Ping {}.emit(out), // no correct agent answers a fetch with PING
            _ => Fetched { length: length.into() }.emit(out),
        });
        self.serve_more(link);
    }

    /// Sends the first bytes of a fetched payload, or the next ones after its reader has taken those before. Fails the
    /// fetch if the file has changed.
    pub(super) fn serve_more(&mut self, link: usize) {
        let (now, base) = (self.now(), self.base);
        let machine = self.links[link].ends[1];
        let is_there = self.links[link].generations[1].is_some_and(|generation| self.is_running(machine, generation));
        let Some(Served { fetch, file, state, left }) = self.links[link].serving.filter(|_| is_there) else { return };
        if self.machines[machine].host.file(file).state != state {
            self.cover("file of a fetch changed");
            return self.fail_served(link, machine, Reason::FileChanged);
        }
        let bytes = left.min(CHUNK);
        let is_done = bytes == left;
        self.links[link].serving = if is_done { None } else { Some(Served { fetch, file, state, left: left - bytes }) };
        self.send(link, machine, Item::Payload(bytes));
        if let Some(agent) = self.machines[machine].agent.as_mut().filter(|_| is_done) {
            agent.served.remove(&fetch);
        }
        self.machines[machine].event(now, base, |logic, call| logic.served_more(fetch, is_done, call));
    }

    pub(super) fn fail_served(&mut self, link: usize, machine: usize, reason: Reason) {
        let (now, base) = (self.now(), self.base);
        if let Some(Served { fetch, .. }) = self.links[link].serving {
            self.machines[machine].event(now, base, |logic, call| logic.served_failed(fetch, reason, call));
            self.act(machine);
        }
    }

    /// Resets the connection of a fetch that has failed.
    pub(super) fn reset_fetch(&mut self, machine: usize, fetch: usize) {
        let Some(agent) = &mut self.machines[machine].agent else { return };
        if let Some(link) = agent.served.remove(&fetch) {
            self.cover("fetch is reset");
            self.links[link].serving = None;
            self.close(link, machine);
        }
    }
}
