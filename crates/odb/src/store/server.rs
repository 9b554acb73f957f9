//! The store's process: leases segments over a Unix socket, and answers fetches over TCP. One thread, epoll.
//!
//! Leasing (SOCK_SEQPACKET): any packet asks; the answer is [`Lease`], with the segment's memfd where there is room. The
//! program keeps the connection: its end is the program's.
//!
//! Fetching (TCP): [`Request`]s, and for each FETCH in turn an [`Answer`] and the bytes.

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg};
use shunt_wire::address::{Address, Endpoint};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Limits, Store};
use crate::reference::{PayloadId, REFERENCE_BYTES, Reference};
use crate::segment::now_ms;

/// The answer to a program that asks for a segment.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Lease {
    /// 1: a memfd comes with this; 0: the store is full.
    pub leased: U32,
    pub segment: U32,
    pub holder: Address,
    pub port_be: [u8; 2],
    pub zero: [u8; 6],
}

/// Asks for the bytes of a reference. Its weight stays where it is.
pub const FETCH: u32 = 1;
/// Gives a reference's weight back. No answer.
pub const RETURN: u32 = 2;

/// What a reader says.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Request {
    pub kind: U32,
    pub zero: U32,
    pub reference: [u8; REFERENCE_BYTES],
}

/// What goes before the bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Answer {
    /// 1: all the bytes follow; 0: there is no such payload any more, and none follow.
    pub found: U32,
    pub zero: U32,
    pub length: U64,
}

const REQUEST_BYTES: usize = size_of::<Request>();
/// Answers that wait for a slow reader; while there are as many, its requests wait in its socket.
const ANSWERS_MAX: usize = 32;

const LEASES: u64 = 0;
const FETCHES: u64 = 1;
const FIRST: u64 = 2;

struct Outgoing {
    answer: [u8; size_of::<Answer>()],
    answered: usize,
    /// Whose bytes, from where in its segment, and how many are left.
    bytes: Option<(PayloadId, usize, usize)>,
}

struct Session {
    stream: TcpStream,
    incoming: Vec<u8>,
    outgoing: VecDeque<Outgoing>,
}

enum Peer {
    Program(OwnedFd, Vec<u32>),
    Reader(Session),
}

/// What a store has done, to be looked at from other threads.
#[derive(Debug, Default)]
pub struct Counters {
    /// Payload bytes that readers were promised.
    pub fetched_bytes: AtomicU64,
    /// Fetches of what was not there any more.
    pub gone: AtomicU64,
}

/// A running store.
pub struct Server {
    counters: Arc<Counters>,
    store: Store,
    holder: SocketAddr,
    epoll: OwnedFd,
    leases: UnixListener,
    fetches: TcpListener,
    peers: HashMap<u64, Peer>,
    next: u64,
    swept: Instant,
}

impl Server {
    /// Serves programs that connect to `leases` (SOCK_SEQPACKET) and readers that connect to `fetches`, which they reach
    /// as `holder`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(limits: Limits, leases: UnixListener, fetches: TcpListener, holder: SocketAddr) -> io::Result<Self> {
        leases.set_nonblocking(true)?;
        fetches.set_nonblocking(true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &leases, epoll::EventData::new_u64(LEASES), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &fetches, epoll::EventData::new_u64(FETCHES), epoll::EventFlags::IN)?;
        let store = Store::new(limits);
        let counters = Arc::default();
        Ok(Self {
            counters,
            store,
            holder,
            epoll,
            leases,
            fetches,
            peers: HashMap::new(),
            next: FIRST,
            swept: Instant::now(),
        })
    }

    /// Its counters.
    #[must_use]
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// A listener for programs at `path`, in place of one that an earlier store left.
    ///
    /// # Errors
    /// The kernel's.
    pub fn listen_for_programs(path: &std::path::Path) -> io::Result<UnixListener> {
        use rustix::net::{AddressFamily, SocketAddrUnix, bind, listen, socket_with};
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let _ = std::fs::remove_file(path);
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        listen(&socket, 128)?;
        Ok(socket.into())
    }

    /// Serves for ever.
    ///
    /// # Errors
    /// The kernel's: nothing that a program or a reader does.
    pub fn run(mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(64);
        let tick = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
        loop {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&tick)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in &events {
                match event.data.u64() {
                    LEASES => self.accept_program(),
                    FETCHES => self.accept_reader(),
                    peer => self.serve(peer),
                }
            }
            if self.swept.elapsed() > Duration::from_secs(1) {
                self.swept = Instant::now();
                self.store.expire(now_ms());
            }
        }
    }

    fn accept_program(&mut self) {
        while let Ok(program) = rustix::net::accept_with(&self.leases, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            self.add(Peer::Program(program, Vec::new()));
        }
    }

    fn accept_reader(&mut self) {
        while let Ok((stream, _)) = self.fetches.accept() {
            let ready = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
            if ready.is_ok() {
                self.add(Peer::Reader(Session { stream, incoming: Vec::new(), outgoing: VecDeque::new() }));
            }
        }
    }

    fn add(&mut self, peer: Peer) {
        let fd = match &peer {
            Peer::Program(program, _) => program.as_fd(),
            Peer::Reader(session) => session.stream.as_fd(),
        };
        let wanted = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        if epoll::add(&self.epoll, fd, epoll::EventData::new_u64(self.next), wanted).is_ok() {
            self.peers.insert(self.next, peer);
            self.next += 1;
        }
    }

    /// Does all that one peer asks for and takes now. A peer whose connection fails is forgotten.
    fn serve(&mut self, number: u64) {
        let Some(peer) = self.peers.get_mut(&number) else { return };
        let alive = match peer {
            Peer::Program(program, segments) => lease(&mut self.store, self.holder, program, segments),
            Peer::Reader(session) => session.serve(&mut self.store, &self.counters).map(|blocked| {
                let wanted = if blocked { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
                epoll::modify(&self.epoll, &session.stream, epoll::EventData::new_u64(number), wanted).is_ok()
            }),
        };
        if !alive.unwrap_or(false) {
            self.forget(number);
        }
    }

    fn forget(&mut self, number: u64) {
        match self.peers.remove(&number) {
            Some(Peer::Program(_, segments)) => segments.into_iter().for_each(|id| self.store.writer_gone(id)),
            Some(Peer::Reader(session)) => {
                for (payload, ..) in session.outgoing.into_iter().filter_map(|outgoing| outgoing.bytes) {
                    self.store.unpin(&payload);
                }
            }
            None => {}
        }
    }
}

/// Answers a program's packets. False: it has ended.
fn lease(store: &mut Store, holder: SocketAddr, program: &OwnedFd, segments: &mut Vec<u32>) -> io::Result<bool> {
    let mut packet = [0; 16];
    loop {
        match rustix::net::recv(program, &mut packet, rustix::net::RecvFlags::empty()) {
            Ok((0, _)) => return Ok(false),
            Ok(_) => {}
            Err(rustix::io::Errno::AGAIN) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
        let id = store.lease()?;
        let to = Endpoint::from(holder);
        let answer = Lease {
            leased: u32::from(id.is_some()).into(),
            segment: id.unwrap_or(0).into(),
            holder: to.address,
            port_be: to.port_be,
            zero: [0; 6],
        };
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let memory = id.and_then(|id| store.memory(id)).map(|memory| [memory.as_fd()]);
        if let Some(memory) = &memory {
            ancillary.push(SendAncillaryMessage::ScmRights(memory));
        }
        sendmsg(program, &[IoSlice::new(answer.as_bytes())], &mut ancillary, SendFlags::NOSIGNAL)?;
        segments.extend(id);
    }
}

impl Session {
    /// True: the reader does not take more now.
    fn serve(&mut self, store: &mut Store, counters: &Counters) -> io::Result<bool> {
        loop {
            if self.send(store, counters)? {
                return Ok(true);
            }
            let mut some = [0; 32 * REQUEST_BYTES];
            match io::Read::read(&mut &self.stream, &mut some) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.incoming.extend_from_slice(&some[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
            self.answer(store, counters)?;
        }
    }

    /// Takes requests, as many as may be under way.
    fn answer(&mut self, store: &mut Store, counters: &Counters) -> io::Result<()> {
        let mut used = 0;
        while self.outgoing.len() < ANSWERS_MAX
            && let Some(bytes) = self.incoming[used..].first_chunk::<REQUEST_BYTES>()
        {
            used += REQUEST_BYTES;
            let request: Request = zerocopy::transmute!(*bytes);
            let reference = Reference::parse(&request.reference).ok_or(io::ErrorKind::InvalidData)?;
            match request.kind.get() {
                RETURN => store.give_back(&reference.payload, reference.weight),
                FETCH => {
                    let place = store.pin(&reference);
                    let length = place.as_ref().map_or(0, |place| place.len());
                    counters.fetched_bytes.fetch_add(length as u64, Ordering::Relaxed);
                    counters.gone.fetch_add(u64::from(place.is_none()), Ordering::Relaxed);
                    let answer = Answer {
                        found: u32::from(place.is_some()).into(),
                        zero: 0.into(),
                        length: (length as u64).into(),
                    };
                    self.outgoing.push_back(Outgoing {
                        answer: zerocopy::transmute!(answer),
                        answered: 0,
                        bytes: place.map(|place| (reference.payload, place.start, length)),
                    });
                }
                _ => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
        self.incoming.drain(..used);
        Ok(())
    }

    /// Sends what waits. True: some still does.
    fn send(&mut self, store: &mut Store, counters: &Counters) -> io::Result<bool> {
        loop {
            let Some(outgoing) = self.outgoing.front_mut() else {
                if self.incoming.len() < REQUEST_BYTES {
                    return Ok(false);
                }
                self.answer(store, counters)?;
                if self.outgoing.is_empty() {
                    return Ok(false);
                }
                continue;
            };
            match outgoing.send(&self.stream, store) {
                Ok(()) => {
                    let done = self.outgoing.pop_front();
                    if let Some((payload, ..)) = done.and_then(|done| done.bytes) {
                        store.unpin(&payload);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
    }
}

impl Outgoing {
    /// All of it, or an error, which may be that the reader takes no more now.
    fn send(&mut self, stream: &TcpStream, store: &Store) -> io::Result<()> {
        while self.answered < self.answer.len() {
            let flags = if self.bytes.is_some() { SendFlags::MORE } else { SendFlags::empty() };
            self.answered += rustix::net::send(stream, &self.answer[self.answered..], flags | SendFlags::NOSIGNAL)?;
        }
        let Some((payload, at, left)) = &mut self.bytes else { return Ok(()) };
        let memory = store.memory(payload.segment).ok_or(io::ErrorKind::NotFound)?;
        while *left > 0 {
            let sent = memory.send(*at, *left, stream.as_fd())?;
            *at += sent;
            *left -= sent;
        }
        Ok(())
    }
}
