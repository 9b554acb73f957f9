//! A program at the store: what it asks ([`Ask`]), and the descriptors that it gets. It keeps the connection: its end is the
//! program's.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketType};
use shunt_sys::packet::Packet;
use shunt_sys::shared::SharedMemory;
use shunt_sys::sockopt::{PeerCredentials, peer_credentials};
use zerocopy::{FromZeros, IntoBytes};

use super::messages::{Ask, Told, ask, outcome};
use super::packets::{receive, send};
use super::server::{Agent, Caller, Server};
use super::usage::USAGE_BYTES;
use crate::place::SentFile;
use crate::records::Sealing;
use crate::reference::Holder;

/// Segments that one program has.
const SEGMENTS_MAX: usize = 4;
/// Stores that one program is connected to.
const REACHED_MAX: usize = 128;

/// Whether the kernel says who sent a packet: it does not of processes of another PID namespace.
fn is_known(sender: &PeerCredentials) -> bool {
    sender.pid != 0
}

/// Whether a pair of sockets at an entrance is the sender's own, and not one that it was given by somebody who may more:
/// who has made it is whom the store would take its user for (SO_PEERCRED). Another packet there is of no use.
fn is_by_its_maker(packet: &Packet) -> bool {
    let Packet { bytes, descriptor: Some(socket), sender: Some(sender), .. } = packet else { return false };
    *bytes == size_of::<Ask>()
        && socket_domain(socket) == Ok(AddressFamily::UNIX)
        && socket_type(socket) == Ok(SocketType::SEQPACKET)
        && is_known(sender)
        && peer_credentials(socket).is_ok_and(|maker| maker == *sender)
}

/// A question of a program's.
pub(crate) struct Question {
    ask: Ask,
    descriptor: Option<OwnedFd>,
    sender: Option<PeerCredentials>,
}

/// One connection of a program.
pub(crate) struct Program {
    pub(crate) socket: OwnedFd,
    pub(crate) caller: Caller,
    counts: bool,
    pub(crate) segments: Vec<u32>,
    /// Its connections to other machines' stores, to end them when their agents are no longer trusted.
    reached: HashMap<Holder, OwnedFd>,
    /// REACH or HAND_OFF is under way: the next question is read when it is answered.
    waits: bool,
    /// Programs of any user may have it, so that it only lets them in, each as the user that it is.
    is_entrance: bool,
}

impl Program {
    pub(crate) fn new(socket: OwnedFd, caller: Caller) -> Self {
        Self {
            socket,
            caller,
            counts: false,
            segments: Vec::new(),
            reached: HashMap::new(),
            waits: false,
            is_entrance: false,
        }
    }

    /// Takes its next question.
    ///
    /// # Errors
    /// It has ended, or said what makes no sense.
    pub(crate) fn next_question(&mut self) -> io::Result<Option<Question>> {
        // One byte more, so that a longer packet is seen.
        let mut packet = [0; size_of::<Ask>() + 1];
        let Some(got) = receive(&self.socket, &mut packet, RecvFlags::DONTWAIT)? else { return Ok(None) };
        // Its end comes from nobody; all else that is of no use there is no question.
        if self.is_entrance && got.sender.is_some() && !is_by_its_maker(&got) {
            return Ok(Some(Question { ask: Ask::new_zeroed(), descriptor: None, sender: None }));
        }
        let ask = packet.first_chunk::<{ size_of::<Ask>() }>().filter(|_| got.bytes == size_of::<Ask>());
        match ask {
            Some(bytes) if !self.waits => {
                let Packet { descriptor, sender, .. } = got;
                Ok(Some(Question { ask: zerocopy::transmute!(*bytes), descriptor, sender }))
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// The user as whom the program was let in, where who asks still is that user: one that has given up a user's power, or has
    /// got the connection from somebody else, looks at nothing more of that user's.
    fn still(&self, sender: Option<&PeerCredentials>) -> Option<u32> {
        let connected = peer_credentials(&self.socket).ok()?;
        let is_the_same = sender.is_some_and(|sender| is_known(sender) && sender.uid == connected.uid);
        is_the_same.then_some(self.caller.user)
    }

    /// # Errors
    /// It does not take its answer, or has asked what makes no sense.
    pub(crate) fn answer<A: Agent>(
        &mut self,
        number: u64,
        question: Question,
        server: &mut Server<A>,
    ) -> io::Result<()> {
        let Question { ask, descriptor, sender } = question;
        let mut told = Told::new_zeroed();
        (told.kind, told.holder) = (ask.kind, server.holder);
        match ask.kind.get() {
            // A question that makes no sense there does not end it for others.
            ask::ENTER if self.is_entrance => {
                descriptor.into_iter().for_each(|program| server.admit(program));
                Ok(())
            }
            _ if self.is_entrance => Ok(()),
            ask::ENTRANCE if self.segments.is_empty() && self.reached.is_empty() && !self.counts => {
                self.is_entrance = true;
                self.tell(&told, None)
            }
            ask::HELLO => self.tell(&told, None),
            ask::LEASE => {
                let full = self.segments.len() >= SEGMENTS_MAX;
                let mut store = server.shelf.lock();
                let id = if full { None } else { store.lease(self.caller.user)? };
                match id.and_then(|id| Some((id, store.memory(id)?))) {
                    Some((id, memory)) => {
                        self.segments.push(id);
                        told.segment = id.into();
                        self.tell(&told, Some(memory.as_fd()))
                    }
                    None => {
                        server.counters.full();
                        told.outcome = outcome::FULL.into();
                        self.tell(&told, None)
                    }
                }
            }
            ask::MAP => match self
                .still(sender.as_ref())
                .and_then(|user| server.shelf.lock().memory_for(ask.segment.get(), user))
            {
                Some(memory) => self.tell(&told, Some(memory.read_only()?.as_fd())),
                None => {
                    told.outcome = outcome::NOT_ALLOWED.into();
                    self.tell(&told, None)
                }
            },
            ask::KEEP_FILE if self.segments.contains(&ask.segment.get()) => {
                let file = descriptor.ok_or(io::ErrorKind::InvalidData)?;
                match SentFile::new(file)
                    .map(|file| server.shelf.lock().open_file(ask.segment.get(), ask.file.get(), file))
                {
                    Ok(Some(file)) => told.version = *file.version(),
                    Ok(None) => told.outcome = outcome::FULL.into(),
                    Err(_) => told.outcome = outcome::NOT_ALLOWED.into(),
                }
                self.tell(&told, None)
            }
            ask::OPEN_FILE => match self
                .still(sender.as_ref())
                .and_then(|user| server.shelf.lock().file_for(ask.segment.get(), ask.file.get(), user))
            {
                Some(file) => {
                    told.version = *file.version();
                    self.tell(&told, Some(file.as_fd()))
                }
                None => {
                    told.outcome = outcome::NOT_ALLOWED.into();
                    self.tell(&told, None)
                }
            },
            ask::SOURCES => self.tell(&told, Some(server.sources.memory())),
            ask::COUNT if !self.counts => {
                let page = SharedMemory::create("shunt-counts", USAGE_BYTES)?;
                self.tell(&told, Some(page.as_fd()))?;
                self.counts = true;
                server.usage().lock().begin(self.caller.process, number, page);
                Ok(())
            }
            ask::REACH if ask.holder == server.holder => match server.reach_own() {
                Some((socket, sealing)) => {
                    told.sealing = sealing;
                    self.tell(&told, Some(socket.as_fd()))
                }
                None => {
                    told.outcome = outcome::FULL.into();
                    self.tell(&told, None)
                }
            },
            ask::REACH => {
                self.waits = true;
                server.agent.reach(number, ask.holder);
                Ok(())
            }
            ask::HAND_OFF => {
                self.waits = true;
                server.agent.hand_off(number, self.caller);
                Ok(())
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// The agent has given the program a connection of its own, or has no use for one.
    pub(crate) fn lets_hand_off(&mut self, own: Holder, connection: Option<OwnedFd>) {
        self.waits = false;
        let mut told = Told::new_zeroed();
        (told.kind, told.holder) = (ask::HAND_OFF.into(), own);
        if connection.is_none() {
            told.outcome = outcome::NOT_THERE.into();
        }
        let _ = self.tell(&told, connection.as_ref().map(AsFd::as_fd));
    }

    /// The agent has connected to another store, or could not.
    pub(crate) fn reached(&mut self, own: Holder, holder: Holder, connection: Option<(OwnedFd, Box<Sealing>)>) {
        self.waits = false;
        let mut told = Told::new_zeroed();
        (told.kind, told.holder) = (ask::REACH.into(), own);
        let Some((socket, sealing)) = connection else {
            told.outcome = outcome::NOT_THERE.into();
            let _ = self.tell(&told, None);
            return;
        };
        told.sealing = *sealing;
        // Where the program does not take it, it ends with our copy.
        if self.tell(&told, Some(socket.as_fd())).is_ok() && self.reached.len() < REACHED_MAX {
            self.reached.insert(holder, socket);
        }
    }

    /// Whatever it still says there, nobody hears, and it hears nobody.
    pub(crate) fn end_connections(&mut self) {
        for (_, socket) in self.reached.drain() {
            let _ = rustix::net::shutdown(socket, Shutdown::Both);
        }
    }

    fn tell(&self, told: &Told, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        send(&self.socket, told.as_bytes(), descriptor, SendFlags::DONTWAIT)
    }
}
