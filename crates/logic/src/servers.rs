//! Connections of this machine's servers: nginx workers, and programs under `shunt run` that hand off their own
//! connections. The *worker* number is the agent's number of one such connection. A *handoff* lets another machine send
//! a payload on the connection of a server's client. A *fetch* brings a payload through both agents instead. An *offer*
//! is a payload that a server holds ready for a *claim*, another agent's message that asks for the payload. A *ring* is
//! a BPF ring buffer by which the kernel tells one server what becomes of its handoffs.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use shunt_wire::local::Channel;
use slab::Slab;

/// Number of completion rings, at most one for each control connection (`MAX_RINGS` of the BPF programs).
pub const RINGS: u32 = 512;
/// Time that a new connection has to say its purpose.
const PATIENCE: Duration = Duration::from_secs(10);
/// Number of connections that each user may have even if fewer are left for others, unless the limit of all is reached.
const LEAST_OF_A_USER: usize = 4;

/// Permissions of a process, which follow from its user and groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum May {
    /// Everything that a server does.
    Serve,
    /// Asking for counters.
    Observe,
    /// Nothing.
    Nothing,
}

/// A process that has connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Process id.
    pub pid: i32,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Permissions of the process.
    pub may: May,
}

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Not known yet. The server must say its purpose by this time.
    Unknown(Instant),
    /// Handoffs, fetches and questions.
    Control {
        /// Completion ring of the connection. `None` if this machine is no frontend, all rings or the user's share of
        /// them were taken, or the kernel could not make the ring.
        ring: Option<u32>,
        /// Number of the newest handoff of stored bytes (payloads of programs under `shunt run`) that the server has
        /// told this agent of.
        newest: Option<u64>,
    },
    /// Offers.
    Offers,
}

/// One connection of a server.
#[derive(Clone, Copy, Debug)]
pub struct Server {
    /// Worker number: names the server in claims, and is the upper half of its offers' numbers.
    pub worker: u32,
    /// The process that has connected.
    pub caller: Caller,
    /// Purpose of the connection.
    pub role: Role,
}

impl Server {
    /// Returns the connection's completion ring, if it has one.
    pub fn ring(&self) -> Option<u32> {
        match self.role {
            Role::Control { ring, .. } => ring,
            Role::Unknown(_) | Role::Offers => None,
        }
    }

    /// Returns whether this is a connection for offers.
    pub fn takes_offers(&self) -> bool {
        self.role == Role::Offers
    }

    /// Returns whether this is a control connection, by which the server hands off.
    pub fn hands_off(&self) -> bool {
        matches!(self.role, Role::Control { .. })
    }
}

/// Reason why a process gets no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The limit of connections is reached.
    Full,
    /// The configuration names neither the process's user nor its groups, in `users`, `groups` or `observers`.
    NotAllowed,
    /// The process's user has as many connections as one user may have now.
    Share {
        /// Number of connections that the process's user has.
        own: usize,
    },
}

/// All connections of servers.
#[derive(Debug)]
pub struct Servers {
    all: Slab<Server>,
    next_worker: u32,
    /// Free rings in the order in which they are given. A freed ring goes to the end, because payloads that its process
    /// has handed off may still be under way. They would pass for payloads of the next process with that ring.
    free_rings: VecDeque<u32>,
    limit: usize,
}

/// Returns whether a user with `own` of `all` connections gets another one. No user gets more than are left for others,
/// but each may have [`LEAST_OF_A_USER`].
fn may_have_one_more(own: usize, all: usize, limit: usize) -> bool {
    own < limit.saturating_sub(all).max(LEAST_OF_A_USER)
}

impl Servers {
    /// Returns an empty table for at most `limit` connections. `has_rings` says that this machine is a frontend.
    pub fn new(limit: usize, has_rings: bool) -> Self {
        let free_rings = if has_rings { (0..RINGS).collect() } else { VecDeque::new() };
        Self { all: Slab::new(), next_worker: 1, free_rings, limit }
    }

    /// Gives these rings out after all other free ones, because servers of an earlier agent may still name these rings
    /// in calls to the kernel.
    pub fn give_last(&mut self, rings: &[u32]) {
        self.free_rings.retain(|ring| !rings.contains(ring));
        self.free_rings.extend(rings);
    }

    /// Changes the limit. Connections beyond it stay.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Number of connections.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns whether there is no connection.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Looks up a connection by its index.
    pub fn find(&self, server: usize) -> Option<&Server> {
        self.all.get(server)
    }

    /// Iterates over all connections, with their indices.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Server)> {
        self.all.iter()
    }

    /// Adds a connection, if that is allowed. Returns the connection's index.
    ///
    /// # Errors
    /// Returns why the connection is refused.
    pub fn add(&mut self, caller: Caller, now: Instant) -> Result<usize, Refusal> {
        if self.all.len() >= self.limit {
            return Err(Refusal::Full);
        }
        if caller.may == May::Nothing {
            return Err(Refusal::NotAllowed);
        }
        let own = self.all.iter().filter(|(_, server)| server.caller.uid == caller.uid).count();
        if !may_have_one_more(own, self.all.len(), self.limit) {
            return Err(Refusal::Share { own });
        }
        let worker = self.next_worker;
        self.next_worker = self.next_worker.wrapping_add(1).max(1);
        Ok(self.all.insert(Server { worker, caller, role: Role::Unknown(now + PATIENCE) }))
    }

    /// Sets a connection's purpose, which the server has said. Returns the connection's ring, if it gets one. No user
    /// gets more rings than are left for others.
    pub fn welcome(&mut self, server: usize, channel: Channel) -> Option<u32> {
        let user = self.all[server].caller.uid;
        let own = self.all.iter().filter(|(_, server)| server.caller.uid == user && server.ring().is_some()).count();
        self.all[server].role = match channel {
            Channel::Offers => Role::Offers,
            Channel::Control if own < self.free_rings.len() => {
                Role::Control { ring: self.free_rings.pop_front(), newest: None }
            }
            Channel::Control => Role::Control { ring: None, newest: None },
        };
        self.all[server].ring()
    }

    /// Takes a server's ring back, because the kernel could not make it.
    pub fn lose_ring(&mut self, server: usize) {
        if let Role::Control { ring, .. } = &mut self.all[server].role {
            self.free_rings.extend(ring.take());
        }
    }

    /// Frees a ring that has been removed from the kernel.
    pub fn free_ring(&mut self, ring: u32) {
        debug_assert!(self.has_ring(ring), "a ring that nobody has");
        self.free_rings.push_back(ring);
    }

    /// Returns whether a ring is given out, and not freed since.
    pub fn has_ring(&self, ring: u32) -> bool {
        ring < RINGS && !self.free_rings.contains(&ring)
    }

    /// Notes a server's newest handoff of stored bytes.
    pub fn note_newest(&mut self, server: usize, handoff: u64) {
        if let Some(Server { role: Role::Control { newest, .. }, .. }) = self.all.get_mut(server) {
            *newest = Some(handoff);
        }
    }

    /// Removes a connection.
    pub fn remove(&mut self, server: usize) -> Option<Server> {
        self.all.try_remove(server)
    }

    /// Returns the index of the connection with this worker number. Claims and offers name connections by it.
    pub fn with_worker(&self, worker: u32) -> Option<usize> {
        self.all.iter().find(|(_, server)| server.worker == worker).map(|(index, _)| index)
    }

    /// Returns the index of the control connection with a worker number. A peer may name a number of any connection, or
    /// of none.
    pub fn owner(&self, worker: u32) -> Option<usize> {
        self.with_worker(worker).filter(|server| self.all[*server].hands_off())
    }

    /// Returns one connection whose server has not said its purpose in time.
    pub fn silent(&self, now: Instant) -> Option<usize> {
        let is_late = |server: &Server| matches!(server.role, Role::Unknown(deadline) if deadline <= now);
        self.all.iter().find(|(_, server)| is_late(server)).map(|(index, _)| index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(uid: u32) -> Caller {
        Caller { pid: 1, uid, gid: 0, may: May::Serve }
    }

    /// Returns how many connections one user gets by asking again and again, if all other users together have `others`.
    fn taken(others: usize, limit: usize) -> usize {
        (0..).find(|own| !may_have_one_more(*own, others + own, limit)).expect("an end")
    }

    #[test]
    fn a_user_gets_as_many_connections_as_are_left_for_others() {
        assert_eq!((taken(0, 1024), taken(512, 1024)), (512, 256));
        assert_eq!((taken(1020, 1024), taken(1024, 1024)), (LEAST_OF_A_USER, LEAST_OF_A_USER));
        let (mut servers, now) = (Servers::new(16, true), Instant::now());
        let got = (0..100).filter(|_| servers.add(caller(1), now).is_ok()).count();
        assert_eq!((got, servers.add(caller(1), now)), (8, Err(Refusal::Share { own: 8 })));
        while servers.add(caller(servers.len() as u32 + 100), now).is_ok() {}
        assert_eq!((servers.len(), servers.add(caller(1000), now)), (16, Err(Refusal::Full)));
    }

    #[test]
    fn a_process_that_is_not_allowed_is_refused() {
        let (mut servers, now) = (Servers::new(16, true), Instant::now());
        let stranger = Caller { may: May::Nothing, ..caller(7) };
        assert_eq!(servers.add(stranger, now), Err(Refusal::NotAllowed));
    }

    #[test]
    fn a_user_gets_as_many_rings_as_are_left_for_others() {
        let (mut servers, now) = (Servers::new(4096, true), Instant::now());
        let mut ring_of = |uid| {
            let server = servers.add(caller(uid), now).unwrap();
            servers.welcome(server, Channel::Control)
        };
        let rings = (0..600).filter(|_| ring_of(1).is_some()).count();
        assert_eq!(rings, RINGS as usize / 2);
        assert_eq!((0..600).filter(|_| ring_of(2).is_some()).count(), RINGS as usize / 4);
        let server = servers.with_worker(1).unwrap();
        let ring = servers.find(server).unwrap().ring().unwrap();
        assert!(servers.has_ring(ring));
        servers.remove(server);
        servers.free_ring(ring);
        assert!(!servers.has_ring(ring));
    }

    #[test]
    fn a_freed_ring_is_given_again_last() {
        let (mut servers, now) = (Servers::new(4096, true), Instant::now());
        let mut given = Vec::new();
        for _ in 0..=RINGS {
            let server = servers.add(caller(1), now).unwrap();
            let ring = servers.welcome(server, Channel::Control).unwrap();
            servers.remove(server);
            servers.free_ring(ring);
            given.push(ring);
        }
        assert!(given.iter().copied().eq((0..RINGS).chain([0])), "{given:?}");
    }

    #[test]
    fn rings_that_an_earlier_agent_has_left_are_given_last() {
        let (mut servers, now) = (Servers::new(4096, true), Instant::now());
        servers.give_last(&[0, 2]);
        let mut given = || {
            let server = servers.add(caller(1), now).unwrap();
            servers.welcome(server, Channel::Control)
        };
        assert_eq!((given(), given()), (Some(1), Some(3)));
        let others: Vec<u32> = (0..600).filter_map(|_| given()).collect();
        assert!(!others.contains(&0) && !others.contains(&2), "one user got more than half of the rings");
        servers.give_last(&[]);
        let server = servers.add(caller(2), now).unwrap();
        assert!(servers.welcome(server, Channel::Control).is_some_and(|ring| ring > 3));
        assert_eq!(servers.free_rings.iter().rev().take(2).collect::<Vec<_>>(), [&2, &0]);
    }

    #[test]
    fn a_ring_that_the_kernel_could_not_make_is_free_for_others() {
        let (mut servers, now) = (Servers::new(16, true), Instant::now());
        let server = servers.add(caller(1), now).unwrap();
        let ring = servers.welcome(server, Channel::Control).unwrap();
        assert!(servers.has_ring(ring));
        servers.lose_ring(server);
        assert!(!servers.has_ring(ring) && servers.find(server).unwrap().ring().is_none());
    }

    #[test]
    fn a_connection_that_does_not_say_what_it_is_for_is_closed() {
        let (mut servers, now) = (Servers::new(16, true), Instant::now());
        let (silent, other) = (servers.add(caller(1), now).unwrap(), servers.add(caller(1), now).unwrap());
        servers.welcome(other, Channel::Offers);
        assert_eq!(servers.silent(now + PATIENCE - Duration::from_millis(1)), None);
        assert_eq!(servers.silent(now + PATIENCE), Some(silent));
        servers.remove(silent);
        assert_eq!(servers.silent(now + PATIENCE), None);
        assert!(servers.find(other).unwrap().takes_offers() && servers.owner(2).is_none());
    }
}
