//! The service, and the network between its machines. A *handoff* lets a backend send a payload on a client's
//! connection. An *offer* is a payload that a backend's server holds ready, and a *claim* is the message that asks for
//! it. A *region* is a range of sequence numbers of a client's connection, which one payload takes. A *sender* is a
//! backend's socket for a client of a frontend. A *fetch* brings a payload through both agents to the frontend's
//! server. A *ring* is a BPF ring buffer by which the kernel tells a server that a region is complete. A *generation*
//! is one run of an agent. A *frame* is a message between agents. A *store* has the payloads of a machine's programs
//! under `shunt run`. A *history* is one simulated run of the service. A *payload* is the body of a response.

mod actions;
mod agents;
mod clients;
mod connections;
mod faults;
mod fetches;
mod files;
mod packets;
mod recovery;
mod running;
mod sending;
mod servers;
mod stores;
mod strangers;

pub use faults::Fault;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use shunt_logic::Told;
use shunt_logic::limits::Limits;
use shunt_wire::local::Request;

use crate::client::{Client, Response};
use crate::content::Run;
use crate::flow::Copy;
use crate::host::FIRST_PORT;
use crate::machine::{Machine, address};
use crate::random::Random;
use crate::schedule::Schedule;

/// Time between two ticks of an agent, which are its periodic work.
const TICK: Duration = Duration::from_millis(100);
/// Time for a message between a server and its agent.
const LOCAL: Duration = Duration::from_micros(50);

/// An event of the simulation.
#[derive(Debug)]
pub(crate) enum Event {
    /// A machine's agent does its periodic work.
    Tick { machine: usize, generation: u32 },
    /// A machine's servers check their handoffs under way.
    ServersTick { machine: usize },
    /// A machine's agent starts again.
    Start { machine: usize },
    /// A machine's nginx worker connects to its agent.
    ServersConnect { machine: usize, generation: u32 },
    /// A machine's program connects to its agent.
    ProgramConnects { machine: usize, generation: u32 },
    /// A new connection between agents reaches the agent that was dialled.
    Connected { link: usize },
    /// The next item on a connection between agents reaches machine `to`.
    Delivered { link: usize, to: usize },
    /// The server that reads a fetch has taken all bytes so far, so the backend's agent sends more.
    Credit { link: usize },
    /// A server's message reaches its agent.
    ToAgent { machine: usize, generation: u32, server: usize, request: Box<Request> },
    /// An agent's message reaches a server.
    ToServer { machine: usize, generation: u32, server: usize, told: Told },
    /// This number of bytes of a fetch's payload reach the server that reads it. `None`: the stream is broken off.
    Stream { machine: usize, fetch: u64, bytes: Option<u64> },
    /// A ring tells a server that a handoff is complete.
    Ring { machine: usize, ring: u32, handoff: u64 },
    /// A client asks for its next response.
    Ask { client: usize },
    /// A client resets this connection, if the client still has it.
    Leave { client: usize, connection: u32 },
    /// A client's reset reaches the backend that sends to the client.
    Gone { machine: usize, client: usize, token: u32 },
    /// A request reaches a backend. With `rest`, it asks only for the payload's bytes from this byte of the region on.
    Asked { machine: usize, from: usize, client: usize, response: Response, consents: bool, rest: Option<u64> },
    /// A backend's answer reaches the client's frontend.
    Answered { client: usize, response: Response, from: usize, body: Body, is_rest: bool },
    /// A payload's bytes from `from` on have been relayed to the frontend.
    Relayed { client: usize, response: u64, from: u64 },
    /// A segment reaches a client.
    Segment { client: usize, connection: u32, seq: u32, run: Run },
    /// A client's ACK reaches its frontend.
    Ack { client: usize, connection: u32, ack: u32 },
    /// A copy of a client's packet reaches a backend.
    Copied { machine: usize, client: usize, copy: Copy },
    /// A backend's sender checks its clock, and sends.
    SenderTurn { machine: usize, client: usize, number: u64 },
    /// A frontend's own socket checks its clock, and sends.
    SocketTurn { client: usize, connection: u32 },
    /// A handoff must have ended by now, or its client must have acknowledged more than `acked` payload bytes.
    Bound { client: usize, handoff: u64, acked: u64 },
    /// A route that was lost is there again.
    RouteBack { machine: usize, peer: usize, generation: u32 },
    /// An agent reads its original configuration again, after it had a changed one for a while.
    Restored { machine: usize },
}

/// Form in which a backend's answer has the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// An offer's number.
    Offer(u64),
    /// Number of the slot that the payload has in the backend's store.
    Slot(u32),
    /// The payload itself.
    Bytes,
}

/// Purpose of a connection between agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A session, in which two agents exchange claims and heartbeats.
    Session,
    /// A fetch, by its number at the agent that asks.
    Fetch(usize),
    /// A program's connection to a store, by its number at the agent that asks.
    Store(usize),
    /// A question of `shunt doctor`.
    Examine,
}

/// One item that is under way on a connection between agents.
#[derive(Debug)]
pub(crate) enum Item {
    /// Bytes of encoded frames.
    Frames(Vec<u8>),
    /// This number of bytes of a payload that is fetched.
    Payload(u64),
    /// The end of the connection.
    End,
}

/// A connection between two agents.
#[derive(Debug)]
pub(crate) struct Link {
    purpose: Purpose,
    /// Machines at the two ends: first the one that dialled, then the other.
    ends: [usize; 2],
    /// Generations of the agents at the two ends; `None` for an end that has not accepted yet.
    generations: [Option<u32>; 2],
    /// Items that are under way to each end.
    on_the_way: [VecDeque<Item>; 2],
    /// Whether each end has closed the connection.
    is_closed: [bool; 2],
    /// Whether each end has got the other end's HELLO.
    is_up: [bool; 2],
    /// Place in the list of accepted connections of the agent that was dialled. `None` before that agent accepts, and
    /// once the first frame has come.
    place: Option<usize>,
    /// The first frame has come to the end that was dialled.
    has_spoken: bool,
    /// A frame was sent here that no correct agent sends. From then on, a refusal is no violation.
    is_rogue: bool,
    /// The payload that is being sent on the connection, if any.
    serving: Option<Served>,
}

/// A payload that is sent to an agent that fetches it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Served {
    /// Number of the fetch at the agent that sends the payload.
    fetch: usize,
    /// File of the payload, and its state when the fetch began.
    file: u64,
    state: u64,
    /// Number of bytes that are still to be sent.
    left: u64,
}

/// Faults of the network, as numbers of packets in a million.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weather {
    /// Packets that are lost.
    pub loss: u64,
    /// Packets that are delivered twice.
    pub copies: u64,
    /// Packets that take five times as long, so that others overtake them.
    pub late: u64,
}

/// Size and load of a service.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    /// Number of machines. Each is a frontend and a backend, unless [`Variety`] says otherwise.
    pub machines: usize,
    /// Number of clients.
    pub clients: usize,
    /// Most senders of a machine that may be busy at a time.
    pub places: usize,
    /// Settings of the section `[limits]` in all agents' configurations.
    pub limits: Limits,
    /// Faults of the network.
    pub weather: Weather,
    /// Longest pause of a client between two responses.
    pub think: Duration,
}

/// Features of a service besides handoffs of files: none by default. Frequencies are numbers of cases in a million.
#[derive(Clone, Copy, Debug, Default)]
pub struct Variety {
    /// Programs run under `shunt run` on all machines, and hand off bytes of stores.
    pub has_stores: bool,
    /// Frequency of responses whose payload a program under `shunt run` hands off.
    pub stored: u64,
    /// Frequency of TLS responses among the responses that an nginx worker serves.
    pub sealed: u64,
    /// If a backend is lost, servers ask another backend for the rest of its payloads.
    pub recovers: bool,
    /// Frequency of payloads that a server fetches although it could hand them off. With `Some`, a server also fetches
    /// offers that it cannot hand off. With `None`, nobody fetches.
    pub fetches: Option<u64>,
    /// Frequency of messages that a server's socket does not take from the agent.
    pub unread: u64,
    /// Frequency of responses during which the client resets its connection.
    pub leaves: u64,
    /// Some clients have slow connections.
    pub has_slow_clients: bool,
    /// Some files have no digest, or are on file systems that do not tell when a file has changed.
    pub has_strange_files: bool,
    /// Frequency of writes to a file: one chance after each offer of the whole file, and one at each tick while it is
    /// being sent.
    pub writes: u64,
    /// The last machine is no backend.
    pub has_plain_frontend: bool,
    /// The first machine without clients, if there is one, is no frontend.
    pub has_plain_backend: bool,
    /// The first machine's heartbeat interval is twice as long as that of the others.
    pub has_slow_heartbeat: bool,
    /// The first machine's configuration names its last peer only after a reload.
    pub has_unnamed_peer: bool,
    /// Frequency of programs' handoffs in which the program ends after the region has begun, before it tells its agent.
    pub exits: u64,
    /// Frequency of rings that the kernel cannot make.
    pub ringless: u64,
    /// Faults of configuration, of other programs and of other agents happen, too.
    pub has_all_faults: bool,
}

/// State of the whole simulation.
pub struct World {
    pub(crate) base: Instant,
    pub(crate) schedule: Schedule<Event>,
    pub(crate) random: Random,
    pub(crate) service: Service,
    pub(crate) variety: Variety,
    pub(crate) machines: Vec<Machine>,
    pub(crate) clients: Vec<Client>,
    pub(crate) links: Vec<Link>,
    /// Pairs of machines that are cut off from each other, and the time at which that ends.
    pub(crate) cuts: BTreeMap<(usize, usize), Duration>,
    /// Offers that were claimed or fetched: machine, generation of its agent, and number.
    pub(crate) used: BTreeSet<(usize, u32, u64)>,
    /// The history is ending: clients ask for nothing more.
    pub(crate) is_closing: bool,
    next_response: u64,
    next_sender: u64,
    /// Connection on which a peer asks for a fetch, while the agent handles that request.
    pub(crate) asking_link: Option<usize>,
    /// Programs that wait for a connection to another machine's store: machine, generation of its agent, and program.
    pub(crate) wishes: BTreeSet<(usize, u32, u64)>,
    /// Violations of rules that must hold, each with its time. The first one ends the history.
    pub(crate) violations: Vec<String>,
    /// Number of times that each thing has happened, by the name that `cover` was given.
    pub(crate) covered: BTreeMap<&'static str, u64>,
}

impl World {
    /// Returns a service whose agents are about to start, with handoffs of files and nothing else.
    pub fn new(service: Service, seed: u64) -> Self {
        Self::with(service, Variety::default(), seed)
    }

    /// Returns a service whose agents are about to start.
    pub fn with(service: Service, variety: Variety, seed: u64) -> Self {
        let mut world = Self::empty(service, variety, seed);
        world.vary();
        for machine in 0..service.machines {
            let delay = world.random.time(Duration::ZERO, Duration::from_millis(200));
            world.schedule.after(delay, Event::Start { machine });
            world.schedule.after(delay, Event::ServersTick { machine });
        }
        for client in 0..service.clients {
            let delay = world.random.time(Duration::from_millis(200), Duration::from_secs(1));
            world.schedule.after(delay, Event::Ask { client });
        }
        world
    }

    fn empty(service: Service, variety: Variety, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let of = |index| Machine::new(index, service.machines, service.limits, service.places);
        let machines: Vec<Machine> = (0..service.machines).map(of).collect();
        let clients = (0..service.clients).map(|index| {
            let at = (std::net::IpAddr::from([198, 51, 100, 7]), FIRST_PORT + index as u16);
            Client::new(
                std::net::SocketAddr::from(at).into(),
                random.below(service.machines as u64) as usize,
                random.word(),
            )
        });
        let clients: Vec<Client> = clients.collect();
        Self {
            base: Instant::now(),
            schedule: Schedule::default(),
            random,
            service,
            variety,
            machines,
            clients,
            links: Vec::new(),
            cuts: BTreeMap::new(),
            used: BTreeSet::new(),
            is_closing: false,
            next_response: 1,
            next_sender: 1,
            asking_link: None,
            wishes: BTreeSet::new(),
            violations: Vec::new(),
            covered: BTreeMap::new(),
        }
    }

    /// Gives machines and clients the roles and settings that `self.variety` asks for.
    fn vary(&mut self) {
        let Variety { has_stores, has_strange_files, has_slow_clients, .. } = self.variety;
        for machine in &mut self.machines {
            machine.host.has_strange_files = has_strange_files;
            machine.settings.has_store = has_stores;
            machine.settings.peers.iter_mut().for_each(|peer| peer.may_read_store = has_stores);
        }
        if self.variety.has_plain_frontend
            && let Some(last) = self.machines.last_mut()
        {
            last.settings.backend = None;
        }
        if self.variety.has_unnamed_peer {
            let unnamed = self.machines[0].settings.peers.pop();
            self.machines[0].unnamed.extend(unnamed);
        }
        if self.variety.has_plain_backend {
            let frontends: BTreeSet<usize> = self.clients.iter().map(|client| client.frontend).collect();
            let plain = self.machines.iter_mut().find(|machine| !frontends.contains(&machine.index));
            plain.into_iter().for_each(|machine| machine.settings.is_frontend = false);
        }
        if self.variety.has_slow_heartbeat {
            self.machines[0].settings.heartbeat *= 2;
        }
        for client in &mut self.clients {
            client.is_slow = has_slow_clients && self.random.below(2) == 0;
        }
    }

    /// Returns the virtual time.
    pub fn now(&self) -> Duration {
        self.schedule.now()
    }

    /// Returns the violations of rules that must hold, each with its time.
    pub fn violations(&self) -> &[String] {
        &self.violations
    }

    /// Returns the names of things that have happened, and how often each has.
    pub fn covered(&self) -> &BTreeMap<&'static str, u64> {
        &self.covered
    }

    /// Returns the number of responses that clients have received.
    pub fn served(&self) -> u64 {
        self.clients.iter().map(|client| client.done).sum()
    }

    pub(crate) fn cover(&mut self, what: &'static str) {
        *self.covered.entry(what).or_default() += 1;
    }

    pub(crate) fn violate(&mut self, what: String) {
        self.violations.push(format!("{:?}: {what}", self.now()));
    }

    /// Processes the next event that comes at `end` or earlier. Returns false if there is none.
    pub fn step(&mut self, end: Duration) -> bool {
        let Some(event) = self.schedule.next(end) else { return false };
        self.happen(event);
        true
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Tick { machine, generation } => self.tick(machine, generation),
            Event::ServersTick { machine } => self.tend_servers(machine),
            Event::Start { machine } => self.start(machine),
            Event::ServersConnect { machine, generation } => self.connect_servers(machine, generation),
            Event::ProgramConnects { machine, generation } => self.connect_program(machine, generation),
            Event::Connected { link } => self.accept(link),
            Event::Delivered { link, to } => self.deliver(link, to),
            Event::Credit { link } => self.serve_more(link),
            Event::ToAgent { machine, generation, server, request } => {
                self.on_request(machine, generation, server, request);
            }
            Event::ToServer { machine, generation, server, told } => self.on_told(machine, generation, server, &told),
            Event::Stream { machine, fetch, bytes } => self.on_stream(machine, fetch, bytes),
            Event::RouteBack { machine, peer, generation } => self.restore_route(machine, peer, generation),
            Event::Restored { machine } => self.restore_settings(machine),
            event => self.happen_outside(event),
        }
    }

    /// Processes an event of clients, packets, rings, senders, or requests between tiers.
    fn happen_outside(&mut self, event: Event) {
        match event {
            Event::Ring { machine, ring, handoff } => self.on_ring(machine, ring, handoff),
            Event::Ask { client } => self.ask(client),
            Event::Leave { client, connection } => self.leave(client, connection),
            Event::Gone { machine, client, token } => self.on_gone(machine, client, token),
            Event::Asked { machine, from, client, response, consents, rest } => {
                self.on_asked(machine, from, client, response, consents, rest);
            }
            Event::Answered { client, response, from, body, is_rest: false } => {
                self.on_answered(client, response, from, body);
            }
            Event::Answered { client, response, from, body, .. } => self.on_rest(client, response, from, body),
            Event::Relayed { client, response, from } => self.on_relayed(client, response, from),
            Event::Segment { client, connection, seq, run } => self.on_segment(client, connection, seq, run),
            Event::Ack { client, connection, ack } => self.on_ack(client, connection, ack),
            Event::Copied { machine, client, copy } => self.on_copy(machine, client, &copy),
            Event::SenderTurn { machine, client, number } => self.on_sender_turn(machine, client, number),
            Event::SocketTurn { client, connection } => self.on_socket_turn(client, connection),
            Event::Bound { client, handoff, acked } => self.check_bound(client, handoff, acked),
            other => unreachable!("{other:?} is another function's"),
        }
    }

    /// Returns a random one-way delay from one machine to another, or to a client.
    pub(crate) fn way(&mut self) -> Duration {
        self.random.time(Duration::from_micros(100), Duration::from_millis(2))
    }

    /// Returns whether two machines can reach each other now.
    pub(crate) fn reach(&self, one: usize, other: usize) -> bool {
        let pair = (one.min(other), one.max(other));
        self.cuts.get(&pair).is_none_or(|until| *until <= self.now())
    }

    /// Sends a packet from or to a client, or a copy of one to a backend. The network may duplicate or delay the packet
    /// or, until the history is ending, lose it.
    pub(crate) fn send_packet(&mut self, client: usize, event: impl Fn() -> Event) {
        let distance = if self.clients[client].is_slow { 100 } else { 1 };
        let Weather { loss, copies, late } = self.service.weather;
        if !self.is_closing && self.random.in_a_million(loss) {
            return;
        }
        let times = if self.random.in_a_million(copies) { 2 } else { 1 };
        for _ in 0..times {
            let slow = if self.random.in_a_million(late) { 5 } else { 1 };
            let delay = self.way() * slow * distance;
            self.schedule.after(delay, event());
        }
    }

    /// Returns the server's end of a client's connection.
    pub(crate) fn server_of(&self, client: usize) -> shunt_wire::Endpoint {
        std::net::SocketAddr::from((address(self.clients[client].frontend), 443)).into()
    }
}
