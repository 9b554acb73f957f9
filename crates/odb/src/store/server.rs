//! The store's event loop, in a thread of the agent (Shunt's daemon). The loop leases segments of memory to programs
//! that write payloads, and answers readers, the programs that fetch them. The store leaves three things to the agent
//! ([`Agent`]): which programs may connect, connections to other machines' stores, and connections by which programs
//! hand off. In a *handoff*, another machine sends a payload to a program's client. The agent gives the store orders by
//! [`Orders`]. An *entrance* is a program's connection that its child processes inherit, to reach the store by it.

mod answers;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustix::net::sockopt::set_socket_passcred;
use shunt_sys::erase::wipe_stack;
use shunt_sys::lock::Mutex;
use zerocopy::FromZeros;

use super::caller::Caller;
use super::pinned::Shelf;
use super::places::{OWN, Place, Places};
use super::programs::Program;
pub use super::session::Counters;
use super::session::{Session, Turn};
use super::usage::Usage;
use super::{Limits, Store};
use crate::channel::{Bench, Channel};
use crate::records::Sealing;
use crate::reference::Holder;
use crate::segment::now_ms;
use crate::sources::{self, Kept, Known};

/// Polling interval for conditions that no event reports.
const TICK: Duration = Duration::from_millis(250);
/// Time after which a reader that takes nothing of what it has asked for is dropped.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time after which a reader's connection without any traffic is closed.
const IDLE: Duration = Duration::from_secs(600);
/// Most questions of one program that are read before others have their turn.
const ASKS_AT_ONCE: usize = 16;

/// Services of the agent for the store.
pub trait Agent: Send {
    /// Says which program has connected; `None` if it is not admitted.
    fn admit(&mut self, program: &OwnedFd) -> Option<Caller>;
    /// Connects to another machine's store for a program. [`Orders::reached`] brings the result.
    fn reach(&mut self, program: u64, holder: Holder);
    /// Gives a program a connection by which it can hand off. [`Orders::lets_hand_off`] brings the result.
    fn hand_off(&mut self, program: u64, caller: Caller);
}

enum Order {
    Serve(OwnedFd, Box<Sealing>, Place),
    Reached(u64, Holder, Option<(OwnedFd, Box<Sealing>)>),
    LetsHandOff(u64, Option<OwnedFd>),
    EndConnections,
    Close,
    Stop,
}

/// The agent's handle to a running store.
#[derive(Clone, Debug)]
pub struct Orders {
    orders: Sender<Order>,
    wake: Arc<OwnedFd>,
    places: Places,
}

impl Orders {
    /// Places for readers. A reader takes one before it is told that it is admitted.
    #[must_use]
    pub fn places(&self) -> &Places {
        &self.places
    }

    /// Serves the reader at the other end of a connection. The agent has authenticated the reader's machine.
    pub fn serve(&self, socket: OwnedFd, sealing: Sealing, place: Place) {
        self.give(Order::Serve(socket, Box::new(sealing), place));
    }

    /// Brings the result of [`Agent::reach`].
    pub fn reached(&self, program: u64, holder: Holder, connection: Option<(OwnedFd, Sealing)>) {
        let connection = connection.map(|(socket, sealing)| (socket, Box::new(sealing)));
        self.give(Order::Reached(program, holder, connection));
    }

    /// Brings the result of [`Agent::hand_off`].
    pub fn lets_hand_off(&self, program: u64, connection: Option<OwnedFd>) {
        self.give(Order::LetsHandOff(program, connection));
    }

    /// Ends all connections between machines. Readers that are still allowed to can connect again.
    pub fn end_connections(&self) {
        self.give(Order::EndConnections);
    }

    /// Makes the store lease no more segments. Readers still get the payloads that it has.
    pub fn close(&self) {
        self.give(Order::Close);
    }

    /// Ends the store, and tells programs that it has ended.
    pub fn stop(&self) {
        self.give(Order::Stop);
    }

    fn give(&self, order: Order) {
        // If the store has ended, the order is lost. No program waits for it: the connections of all programs have
        // ended, too.
        let _ = self.orders.send(order);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// Other end of a connection: a program of this machine, or a reader of any machine.
enum Peer {
    Program(Program),
    Reader { session: Box<Session>, _place: Place },
}

/// A store, running or about to run.
pub struct Server<A> {
    pub(crate) agent: A,
    pub(crate) counters: Arc<Counters>,
    usage: Arc<Mutex<Usage>>,
    pub(crate) shelf: Shelf,
    pub(crate) limits: Limits,
    places: Places,
    pub(crate) holder: Holder,
    pub(crate) sources: Kept,
    epoll: OwnedFd,
    programs: OwnedFd,
    /// Whether accepting a connection has failed. Until the next tick the listener is not watched, because the loop
    /// would spin.
    is_deaf: bool,
    orders: Receiver<Order>,
    wake: Arc<OwnedFd>,
    peers: HashMap<u64, Peer>,
    next: u64,
    bench: Bench,
    swept: Instant,
}

const PROGRAMS: u64 = 0;
const ORDERS: u64 = 1;
const FIRST: u64 = 2;

impl<A: Agent> Server<A> {
    /// Makes the store `holder`, for programs that connect to the listener `programs` (SOCK_SEQPACKET, nonblocking).
    /// Also returns the agent's handle, and the table in which the agent writes which machines' programs can fetch from
    /// which stores.
    ///
    /// # Errors
    /// Returns the kernel's error of a system call.
    pub fn new(limits: Limits, programs: OwnedFd, holder: Holder, agent: A) -> io::Result<(Self, Orders, Known)> {
        // Accepted sockets inherit SO_PASSCRED, so that the kernel names the sender of each packet from the first on.
        set_socket_passcred(&programs, true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        epoll::add(&epoll, &programs, epoll::EventData::new_u64(PROGRAMS), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(ORDERS), epoll::EventFlags::IN)?;
        let (give, orders) = channel();
        let places = Places::new(limits.readers);
        let (known, kept) = sources::new(holder)?;
        let given = Orders { orders: give, wake: Arc::clone(&wake), places: places.clone() };
        let server = Self {
            agent,
            counters: Arc::default(),
            usage: Arc::default(),
            shelf: Shelf::new(Store::new(limits)),
            limits,
            places,
            holder,
            sources: kept,
            epoll,
            programs,
            is_deaf: false,
            orders,
            wake,
            peers: HashMap::new(),
            next: FIRST,
            bench: Bench::default(),
            swept: Instant::now(),
        };
        Ok((server, given, known))
    }

    /// Counters of the store.
    #[must_use]
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// Payloads of the store, for other threads that send them.
    #[must_use]
    pub fn shelf(&self) -> Shelf {
        self.shelf.clone()
    }

    /// Counts of the store's programs.
    #[must_use]
    pub fn usage(&self) -> Arc<Mutex<Usage>> {
        Arc::clone(&self.usage)
    }

    /// Serves until [`Orders::stop`].
    ///
    /// # Errors
    /// Returns the kernel's error of epoll_wait(2). Nothing that a program or a reader does is an error here.
    pub fn run(mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            let tick = Timespec::try_from(TICK).map_err(io::Error::other)?;
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&tick)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in &events {
                match event.data.u64() {
                    PROGRAMS => self.accept(),
                    ORDERS => {
                        if !self.obey() {
                            return Ok(());
                        }
                    }
                    number => self.serve(number),
                }
            }
            if self.swept.elapsed() >= TICK {
                self.tend();
            }
        }
    }

    fn tend(&mut self) {
        self.swept = Instant::now();
        self.shelf.lock().expire(now_ms());
        self.sources.seen(now_ms());
        let silent = |peer: &Peer| matches!(peer, Peer::Reader { session, .. } if session.is_silent(PATIENCE, IDLE));
        let silent: Vec<u64> = self.peers.iter().filter(|(_, peer)| silent(peer)).map(|(number, _)| *number).collect();
        silent.into_iter().for_each(|number| self.forget(number));
        if std::mem::take(&mut self.is_deaf) {
            let data = epoll::EventData::new_u64(PROGRAMS);
            let _ = epoll::add(&self.epoll, &self.programs, data, epoll::EventFlags::IN);
        }
        self.publish();
    }

    /// Publishes gauges for other threads.
    fn publish(&self) {
        let readers = self.peers.values().filter(|peer| matches!(peer, Peer::Reader { .. })).count();
        self.counters.publish(&self.shelf.lock(), readers, self.peers.len() - readers);
    }

    fn accept(&mut self) {
        loop {
            let program = match rustix::net::accept_with(&self.programs, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(program) => program,
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(Errno::AGAIN) => return,
                Err(_) => {
                    let _ = epoll::delete(&self.epoll, &self.programs);
                    self.is_deaf = true;
                    return;
                }
            };
            self.admit(program);
        }
    }

    /// Admits a program, if the agent allows it.
    pub(crate) fn admit(&mut self, program: OwnedFd) {
        // Accepted sockets have SO_PASSCRED already; sockets that came through an entrance do not.
        let asks = set_socket_passcred(&program, true).is_ok();
        match self.agent.admit(&program).filter(|caller| asks && self.has_room_for(caller.user)) {
            Some(caller) => self.add(Peer::Program(Program::new(program, caller))),
            None => self.counters.refuse(),
        }
    }

    fn has_room_for(&self, user: u32) -> bool {
        let of_user =
            self.peers.values().filter(|peer| matches!(peer, Peer::Program(program) if program.caller.user == user));
        of_user.count() < self.limits.programs_of_a_user
    }

    fn add(&mut self, peer: Peer) {
        let socket = match &peer {
            Peer::Program(program) => program.socket.as_fd(),
            Peer::Reader { session, .. } => session.channel.as_fd(),
        };
        let data = epoll::EventData::new_u64(self.next);
        if epoll::add(&self.epoll, socket, data, epoll::EventFlags::IN).is_ok() {
            self.peers.insert(self.next, peer);
            self.next += 1;
        }
    }

    /// Carries out the agent's orders. Returns false if the store is to end.
    fn obey(&mut self) -> bool {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        while let Ok(order) = self.orders.try_recv() {
            match order {
                Order::Serve(socket, sealing, place) => {
                    self.add_reader(socket, &sealing, place);
                    wipe_stack();
                }
                Order::Reached(program, holder, connection) => {
                    if let Some(Peer::Program(program)) = self.peers.get_mut(&program) {
                        program.reached(self.holder, holder, connection);
                    }
                    wipe_stack();
                }
                Order::LetsHandOff(program, connection) => {
                    if let Some(Peer::Program(program)) = self.peers.get_mut(&program) {
                        program.lets_hand_off(self.holder, connection);
                    }
                }
                Order::EndConnections => self.end_connections(),
                Order::Close => self.shelf.lock().close(),
                Order::Stop => return false,
            }
        }
        true
    }

    fn add_reader(&mut self, socket: OwnedFd, sealing: &Sealing, place: Place) {
        match Channel::of_store(socket, sealing) {
            Ok(channel) => self.add(Peer::Reader { session: Box::new(Session::new(channel)), _place: place }),
            Err(_) => self.counters.refuse(),
        }
    }

    /// Connects a program to this store: makes a pair of sockets, serves one end, and returns the other. `None`: there
    /// is no place for one more reader, or the kernel makes no pair.
    pub(crate) fn reach_own(&mut self) -> Option<(OwnedFd, Sealing)> {
        use rustix::net::{AddressFamily, SocketType, socketpair};
        let Some(place) = self.places.take(OWN) else {
            self.counters.refuse();
            return None;
        };
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.ok()?;
        let plain = Sealing::new_zeroed();
        self.add_reader(ours, &plain, place);
        Some((theirs, plain))
    }

    fn end_connections(&mut self) {
        for peer in self.peers.values_mut() {
            if let Peer::Program(program) = peer {
                program.end_connections();
            }
        }
        let between = |peer: &Peer| matches!(peer, Peer::Reader { session, .. } if session.channel.is_sealed());
        let ended: Vec<u64> = self.peers.iter().filter(|(_, peer)| between(peer)).map(|(number, _)| *number).collect();
        ended.into_iter().for_each(|number| self.forget(number));
    }

    /// Does what one peer asks for, as far as it accepts the answers now. A peer whose connection fails is forgotten.
    fn serve(&mut self, number: u64) {
        let done = match self.peers.get_mut(&number) {
            None => return,
            Some(Peer::Program(_)) => self.serve_program(number),
            Some(Peer::Reader { session, .. }) => {
                let turn = session.turn(&self.shelf, &self.counters, &mut self.bench);
                turn.and_then(|turn| {
                    let wanted = if turn == Turn::Later { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
                    Ok(epoll::modify(&self.epoll, &session.channel, epoll::EventData::new_u64(number), wanted)?)
                })
            }
        };
        if done.is_err() {
            self.forget(number);
        }
    }

    fn serve_program(&mut self, number: u64) -> io::Result<()> {
        for _ in 0..ASKS_AT_ONCE {
            let Some(Peer::Program(program)) = self.peers.get_mut(&number) else { break };
            let Some(question) = program.next_question()? else { break };
            // The program is taken out of the map, so that the rest of `self` can be borrowed. It is put back in any
            // case.
            let Some(Peer::Program(mut program)) = self.peers.remove(&number) else { break };
            let answered = self.answer(number, &mut program, question);
            self.peers.insert(number, Peer::Program(program));
            answered?;
        }
        Ok(())
    }

    fn forget(&mut self, number: u64) {
        match self.peers.remove(&number) {
            Some(Peer::Program(program)) => {
                self.usage.lock().end(program.caller.process, number);
                program.segments.into_iter().for_each(|id| self.shelf.lock().writer_gone(id));
            }
            Some(Peer::Reader { .. }) | None => {}
        }
    }
}
