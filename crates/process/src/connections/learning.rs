//! Decides which bytes of a write are sent inline, as real bytes, because the receiver would look at them. The decision
//! is based on what has become of payloads of the same kind (shunt_odb::learnt). Processes of one user share that
//! knowledge with those that they start. A payload's other bytes stay in the *store*, and a *reference* to them goes
//! into the connection.
//!
//! A kind is: the receiver, the content type, whether the payload begins a message, and whether it is long. A message
//! is what one end sends until the other end sends something.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};

use libc::iovec;
use rustix::net::{getpeername, getsockname};
use shunt_odb::content::{LOOK_BYTES, content_type};
use shunt_odb::learnt::{Note, Plan};
use shunt_odb::reference::{Holder, Reference};
use shunt_odb::sources::End;
use shunt_odb::store::usage::Counted;

use crate::connections::runtime::Runtime;
use crate::connections::states::{Connection, Said};
use crate::system::counts::count;
use crate::system::kernel::borrow;
use crate::system::parts::slices;

/// Length in bytes from which a payload is long, and so of another kind: what receivers do with it may depend on that.
const LONG: usize = 32 << 10;

/// One write of a message.
pub struct Message<'a> {
    runtime: &'a Runtime,
    connection: Connection<'a>,
    fd: RawFd,
    said: Said,
    looked: bool,
    /// Number of bytes of this write that are sent inline only because their receiver would look at them.
    real: usize,
    /// Number of payloads of this write that go by reference only to see whether their receiver still looks at them.
    probes: usize,
}

/// How a payload is sent by reference: how many bytes at its head and at its tail are nevertheless sent inline, and a
/// note of this. The note is kept until the store reports what the receiver did with the payload.
#[derive(Clone, Copy, Default)]
pub struct Telling {
    pub head: usize,
    pub tail: usize,
    /// Whether the payload is sent by reference only as a test. A short payload is enough for that.
    pub probe: bool,
    note: Note,
}

impl<'a> Message<'a> {
    /// Begins a write to a connection. The caller holds the lock of the sending direction.
    pub fn new(runtime: &'a Runtime, connection: Connection<'a>, fd: RawFd) -> Self {
        Self { runtime, connection, fd, said: connection.said(), looked: false, real: 0, probes: 0 }
    }

    /// Cookie of the connection, by which the store knows which payloads belong together.
    pub fn stream(&self) -> u64 {
        self.connection.cookie()
    }

    /// Whether nothing of the message was sent before this write.
    pub fn begins(&self) -> bool {
        self.said.bytes == 0
    }

    /// Looks for the content type in bytes of the message. The memory can be read: the kernel reads it for this write,
    /// too, or has read it.
    pub fn look(&mut self, memory: &[iovec]) {
        if self.looked || self.said.content != 0 || self.said.bytes as usize >= LOOK_BYTES {
            return;
        }
        self.looked = true;
        let mut beginning = [0; LOOK_BYTES];
        let mut there = 0;
        for slice in slices(memory) {
            let now = slice.len().min(LOOK_BYTES - there);
            beginning[there..there + now].copy_from_slice(&slice[..now]);
            there += now;
        }
        if let Some(found) = content_type(&beginning[..there]) {
            self.said.content = hash(found.to_ascii_lowercase());
        }
    }

    /// Decides how bytes are sent that could be left in the store. Returns `None` if they are to be sent inline.
    pub fn plan(&mut self, bytes: usize, begins: bool) -> Option<Telling> {
        let own = self.runtime.store.holder()?;
        if !self.is_source(&own) {
            return None;
        }
        let learnt = self.runtime.learnt.as_ref();
        let Some(learnt) = learnt else { return Some(Telling::default()) };
        self.runtime.store.reports(|report| learnt.learn(&report));
        let kind = hash_long((self.upstream(), self.said.content, begins, bytes >= LONG));
        match learnt.plan(kind, begins, bytes, random()) {
            Plan::Real => {
                self.real += bytes;
                None
            }
            Plan::Reference { head, tail, sent, probe } => {
                Some(Telling { head, tail, probe, note: Note { kind, sent } })
            }
        }
    }

    /// Notes that a payload is in the store, as planned by `telling`.
    pub fn stored(&mut self, reference: &Reference, telling: &Telling) {
        self.real += telling.head + telling.tail;
        self.probes += usize::from(telling.probe);
        self.runtime.store.note(reference, telling.note);
    }

    /// Ends the write, of which `sent` bytes were sent.
    pub fn end(mut self, sent: usize) {
        if sent == 0 {
            return;
        }
        self.said.bytes = self.said.bytes.saturating_add(u32::try_from(sent).unwrap_or(u32::MAX));
        self.connection.set_said(&self.said);
        if self.real > 0 {
            count(Counted::SentRealTouched, self.real);
        }
        if self.probes > 0 {
            count(Counted::Probes, self.probes);
        }
    }

    /// Whether the other end can fetch from a store. Returns false if the other end's address cannot be found out.
    pub fn is_source(&mut self, store: &Holder) -> bool {
        let known = u64::from(self.said.end[0]) | u64::from(self.said.end[1]) << 32;
        let end = match known {
            0 => {
                let Some(end) = self.peer().map(|peer| End::of(peer.ip())) else { return false };
                self.said.end = [end.to_long() as u32, (end.to_long() >> 32) as u32];
                end
            }
            known => End::from_long(known),
        };
        self.runtime.memory.holders.is_source(end, store)
    }

    fn peer(&self) -> Option<SocketAddr> {
        getpeername(borrow(self.fd)).ok().flatten().and_then(|peer| SocketAddr::try_from(peer).ok())
    }

    /// Hash of the receiver. If this end has made the connection: of the peer's address and port. Else: of the peer's
    /// address, and of the local port that accepted the connection.
    fn upstream(&mut self) -> u32 {
        if self.said.upstream == Said::ACCEPTED || self.said.upstream == Said::CONNECTED {
            let peer = self.peer();
            let own = getsockname(borrow(self.fd)).ok().and_then(|own| SocketAddr::try_from(own).ok());
            self.said.upstream = if self.said.upstream == Said::CONNECTED {
                hash(peer)
            } else {
                hash((peer.map(|peer| peer.ip()), own.map(|own| own.port())))
            };
        }
        self.said.upstream
    }
}

fn hash_long(what: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

/// Hash that is never one of the small numbers with another meaning ([`Said::upstream`], [`Said::content`]).
fn hash(what: impl Hash) -> u32 {
    hash_long(what) as u32 | 1 << 31
}

/// A number that is random enough to choose the payloads that go by reference as a test: the choice must not follow a
/// rhythm of the program's own.
fn random() -> u8 {
    static STATE: AtomicU32 = AtomicU32::new(0);
    (STATE.fetch_add(0x9e37_79b9, Ordering::Relaxed) >> 24) as u8
}
