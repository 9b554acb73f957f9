//! The service, and the network between its machines.

mod actions;
mod agents;
mod faults;
mod packets;
mod servers;

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

/// Time between two ticks of an agent.
const TICK: Duration = Duration::from_millis(100);
/// Time for a message between a server and its agent.
const LOCAL: Duration = Duration::from_micros(50);

/// An event of the simulation.
#[derive(Debug)]
pub(crate) enum Event {
    /// A tick of a machine's agent.
    Tick { machine: usize, generation: u32 },
    /// A machine's servers check their handoffs under way.
    ServersTick { machine: usize },
    /// A machine's agent starts again.
    Start { machine: usize },
    /// A machine's servers connect to its agent.
    ServersConnect { machine: usize, generation: u32 },
    /// Bytes reach the end of a connection between agents.
    Delivered { link: usize, to: usize },
    /// The other end of a connection has closed it.
    Closed { link: usize, to: usize },
    /// A server's message reaches its agent.
    ToAgent { machine: usize, generation: u32, server: usize, request: Box<Request> },
    /// An agent's message reaches a server.
    ToServer { machine: usize, generation: u32, server: usize, told: Told },
    /// A ring tells a server that a handoff is complete.
    Ring { machine: usize, ring: u32, handoff: u64 },
    /// A client asks for its next response.
    Ask { client: usize },
    /// A request reaches a backend.
    Asked { machine: usize, from: usize, client: usize, response: Response, consents: bool },
    /// A backend's answer reaches the frontend, with the number of an offer, or with the payload itself.
    Answered { client: usize, response: Response, from: usize, offer: Option<u64> },
    /// The rest of a payload has been relayed.
    Relayed { client: usize, response: u64, from: u64 },
    /// A segment reaches a client.
    Segment { client: usize, seq: u32, run: Run },
    /// A client's ACK reaches its frontend.
    Ack { client: usize, ack: u32 },
    /// A copy reaches a backend.
    Copied { machine: usize, client: usize, copy: Copy },
    /// A sender checks its clock, and sends.
    SenderTurn { machine: usize, client: usize },
    /// A frontend's own socket checks its clock, and sends.
    SocketTurn { client: usize },
    /// A handoff must have ended by now.
    Bound { client: usize, handoff: u64 },
}

/// A connection between two agents.
#[derive(Debug, Default)]
pub(crate) struct Link {
    /// Machines at the two ends: first the one that dialled, then the other.
    ends: [usize; 2],
    /// Generations of the agents at the two ends; `None` for an end that has not accepted yet.
    generations: [Option<u32>; 2],
    /// Bytes under way to each end.
    on_the_way: [VecDeque<Vec<u8>>; 2],
    is_closed: bool,
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
    /// Number of machines, each of which is a frontend and a backend.
    pub machines: usize,
    /// Number of clients.
    pub clients: usize,
    /// Most senders of a machine that may be busy at a time.
    pub places: usize,
    /// `[limits]` of all agents.
    pub limits: Limits,
    /// Faults of the network.
    pub weather: Weather,
    /// Longest pause of a client between two responses.
    pub think: Duration,
}

/// State of the whole simulation.
pub struct World {
    pub(crate) base: Instant,
    pub(crate) schedule: Schedule<Event>,
    pub(crate) random: Random,
    pub(crate) service: Service,
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
    /// Violations. The first one ends the history.
    pub(crate) violations: Vec<String>,
    /// Number of times that each named thing has happened.
    pub(crate) covered: BTreeMap<&'static str, u64>,
}

impl World {
    /// Returns a service whose agents are about to start.
    pub fn new(service: Service, seed: u64) -> Self {
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
        let mut world = Self {
            base: Instant::now(),
            schedule: Schedule::default(),
            random,
            service,
            machines,
            clients,
            links: Vec::new(),
            cuts: BTreeMap::new(),
            used: BTreeSet::new(),
            is_closing: false,
            next_response: 1,
            violations: Vec::new(),
            covered: BTreeMap::new(),
        };
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

    /// Returns the virtual time.
    pub fn now(&self) -> Duration {
        self.schedule.now()
    }

    /// Returns the violations so far.
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

    /// Processes the next event that comes before `end`. Returns false if there is none.
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
            Event::Delivered { link, to } => self.deliver(link, to),
            Event::Closed { link, to } => self.on_closed(link, to),
            Event::ToAgent { machine, generation, server, request } => {
                self.on_request(machine, generation, server, request);
            }
            Event::ToServer { machine, generation, server, told } => self.on_told(machine, generation, server, &told),
            Event::Ring { machine, ring, handoff } => self.on_ring(machine, ring, handoff),
            Event::Ask { client } => self.ask(client),
            Event::Asked { machine, from, client, response, consents } => {
                self.on_asked(machine, from, client, response, consents);
            }
            Event::Answered { client, response, from, offer } => self.on_answered(client, response, from, offer),
            Event::Relayed { client, response, from } => self.on_relayed(client, response, from),
            Event::Segment { client, seq, run } => self.on_segment(client, seq, run),
            Event::Ack { client, ack } => self.on_ack(client, ack),
            Event::Copied { machine, client, copy } => self.on_copy(machine, client, &copy),
            Event::SenderTurn { machine, client } => self.on_sender_turn(machine, client),
            Event::SocketTurn { client } => self.on_socket_turn(client),
            Event::Bound { client, handoff } => self.check_bound(client, handoff),
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

    /// Sends a packet, which the network may lose, duplicate or delay.
    pub(crate) fn send_packet(&mut self, event: impl Fn() -> Event) {
        let Weather { loss, copies, late } = self.service.weather;
        if !self.is_closing && self.random.in_a_million(loss) {
            return;
        }
        let times = if self.random.in_a_million(copies) { 2 } else { 1 };
        for _ in 0..times {
            let slow = if self.random.in_a_million(late) { 5 } else { 1 };
            let delay = self.way() * slow;
            self.schedule.after(delay, event());
        }
    }

    /// Returns the server's end of a client's connection.
    pub(crate) fn server_of(&self, client: usize) -> shunt_wire::Endpoint {
        std::net::SocketAddr::from((address(self.clients[client].frontend), 443)).into()
    }

    /// Has a client ask for its next response. It asks for nothing if the history is ending, or if it still waits for
    /// one.
    fn ask(&mut self, client: usize) {
        if self.is_closing || self.clients[client].waits_for.is_some() {
            return;
        }
        let number = self.next_response;
        self.next_response += 1;
        let length = match self.random.below(4) {
            0 => self.random.between(1, 20_000),
            1 => self.random.between(1_100_000, 2_000_000),
            _ => self.random.between(20_000, 300_000),
        };
        let header = self.random.between(100, 500);
        let response = Response { number, header, length, file: number };
        self.clients[client].ask(response);
        self.request(client, response);
    }
}
