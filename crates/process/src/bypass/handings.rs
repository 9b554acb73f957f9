//! Handoffs of this process: those that have begun in the kernel, and those that agents know of. In a handoff, another
//! machine sends bytes on the connection of one of this program's clients. The bytes are *absent* here: the program's
//! memory only stands for them, and their *holder* has them, the other machine's store. A *run* is absent bytes in a
//! row that one machine has. The *link* is this process's connection with its own agent. The agent is Shunt's daemon on
//! each machine.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use shunt_odb::absent::Piece;
use shunt_odb::link::{Link, Outcome, Sender, Standing};
use shunt_odb::segment::now_ms;
use shunt_odb::store::client::{Connection, QUICK};
use shunt_odb::store::usage::Counted;
use shunt_sys::erase::Erased;
use shunt_wire::local::{Reason, Tls};

use super::handing::{Failed, Handing, bytes, is_long, region_bytes};
use super::{BEGUN, prepare, refuse, refuse_for_now, unsent};
use crate::connections::runtime::Runtime;
use crate::connections::waiting::waits;
use crate::system::counts::count;
use crate::system::kernel::borrow;

/// Pause in milliseconds after an attempt to connect to the agent, before the next one.
const RETRY_MS: u64 = 1000;
/// Time in milliseconds to wait for the end of a handoff whose agent is gone. The agent that is started in its place
/// reports if nobody sends the bytes.
const ORPHAN_MS: u64 = 60_000;

#[derive(Default)]
pub struct Handings {
    link: Option<Link>,
    /// Time of the last attempt to connect to the agent, in milliseconds of [`now_ms`]; 0: there was none.
    asked_ms: u64,
    /// Handoffs that began since the program last waited for events, and that the agent has not been told of.
    begun: Vec<Handing>,
    /// Handoffs under way that the agent knows of, by the handoff's name.
    told: HashMap<u64, Handing>,
    /// Name of the newest handoff under way on a connection, by the connection's cookie (SO_COOKIE). A descriptor
    /// cannot be the key: a program may close it and get its number again before it next waits for events.
    on: HashMap<u64, u64>,
    failed: Vec<Failed>,
    /// Handoffs that a previous agent knew of, by name, each with the time when that agent's loss was noticed.
    orphans: HashMap<u64, (Handing, u64)>,
}

impl Handings {
    /// Orders the holder of a run of absent bytes to send these, behind all bytes that were written to the descriptor.
    /// Returns false if the run has to be fetched.
    pub fn hand_off(&mut self, runtime: &Runtime, fd: RawFd, run: &[Piece], flags: i32) -> bool {
        self.settle();
        let is_long = is_long(run);
        if !is_long && self.begun.is_empty() {
            return false;
        }
        let Ok(cookie) = rustix::net::sockopt::socket_cookie(borrow(fd)) else { return false };
        if let Some(at) = self.begun_on(cookie) {
            return !self.begun[at].is_sealed && self.grow(at, fd, run);
        }
        if !is_long || self.begin(runtime, fd, cookie, run, None).is_none() {
            return false;
        }
        self.tell_if_waits(fd, flags);
        true
    }

    /// Whether a handoff that the agent knows of is under way on a connection. If so, no other handoff can begin on
    /// that connection.
    pub fn is_under_way(&self, cookie: u64) -> bool {
        self.on.contains_key(&cookie)
    }

    /// Index in `begun` of the handoff on a connection that the agent has not been told of.
    pub fn begun_on(&self, cookie: u64) -> Option<usize> {
        self.begun.iter().rposition(|handing| handing.cookie == cookie)
    }

    pub fn begun(&self, at: usize) -> &Handing {
        &self.begun[at]
    }

    /// Gives up a handoff that has begun and cannot continue.
    pub fn give_up(&mut self, at: usize) {
        BEGUN.fetch_sub(1, Ordering::Relaxed);
        let handing = self.begun.remove(at);
        self.link.iter().for_each(|link| link.over(&handing.message));
        self.failed.push(Failed { handing, reason: Reason::Aborted });
    }

    /// Tells the agent of all handoffs that have begun, if the program's call waits. Such a program perhaps makes no
    /// other call for a long time.
    pub fn tell_if_waits(&mut self, fd: RawFd, flags: i32) {
        if waits(fd, flags) {
            self.tell_all();
        }
    }

    /// The machine that sends a run of absent bytes, if it has said that it sends in the name of this connection's
    /// server (with its address as source).
    fn sender(&mut self, fd: RawFd, run: &[Piece]) -> Option<Sender> {
        let link = self.link.as_mut()?;
        let sender = link.sender(run.first()?.hold.payload().holder)?;
        let standing = link.standing(borrow(fd), sender).ok()?;
        match standing {
            Standing::No => count(Counted::Declined, bytes(run) as usize),
            // The machine has not answered yet, and later payloads may be handed off. So the writers of these payloads
            // are not told that bytes were fetched.
            Standing::Unknown(_) => run.iter().for_each(|piece| piece.hold.excuse()),
            Standing::Yes => {}
        }
        (standing == Standing::Yes).then_some(sender)
    }

    /// Begins a handoff, and returns its index in `begun`.
    pub fn begin(
        &mut self,
        runtime: &Runtime,
        fd: RawFd,
        cookie: u64,
        run: &[Piece],
        keys: Option<Erased<Tls>>,
    ) -> Option<usize> {
        if self.is_under_way(cookie) || !self.connect(runtime) {
            return None;
        }
        let sender = self.sender(fd, run)?;
        let (link, holder) = (self.link.as_mut()?, run.first()?.hold.payload().holder);
        let region = region_bytes(keys.as_ref(), bytes(run))?;
        prepare(fd);
        let mut begun = link.begin(borrow(fd), sender, region);
        let is_refused = begun.as_ref().is_err_and(|error| error.raw_os_error().is_some());
        if is_refused && !unsent(fd) {
            // The kernel may have refused because bytes had not left yet. They have left now, so a second refusal has
            // another reason.
            begun = link.begin(borrow(fd), sender, region);
        }
        let message = match begun {
            Ok(message) => message,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                refuse_for_now(fd);
                return None;
            }
            Err(_) => {
                // If that machine does not send any more, another one may send on this connection later.
                if link.sender(holder) == Some(sender) {
                    refuse(fd);
                }
                return None;
            }
        };
        let mut handing = Handing::new(fd, cookie, message, keys);
        handing.take(run);
        self.begun.push(handing);
        BEGUN.fetch_add(1, Ordering::Relaxed);
        Some(self.begun.len() - 1)
    }

    pub fn grow(&mut self, at: usize, fd: RawFd, run: &[Piece]) -> bool {
        let (Some(link), handing) = (&self.link, &mut self.begun[at]) else { return false };
        let Some(growth) = handing.growth(run).filter(|_| handing.can_take(run)) else { return false };
        if link.grow(borrow(fd), &handing.message, growth).is_err() {
            return false;
        }
        handing.fd = fd;
        handing.take(run);
        true
    }

    /// Whether the holder of a run sends to a connection's client now.
    pub fn sends(&mut self, runtime: &Runtime, fd: RawFd, run: &[Piece]) -> bool {
        self.connect(runtime) && self.sender(fd, run).is_some()
    }

    /// Connects to the agent, unless there is a connection. Returns whether there is one now.
    pub fn connect(&mut self, runtime: &Runtime) -> bool {
        if self.link.as_ref().is_some_and(|link| !link.is_alive()) {
            self.lose();
        }
        let now = now_ms();
        if self.link.is_none() && (self.asked_ms == 0 || now >= self.asked_ms + RETRY_MS) {
            let asked = Connection::open_within(runtime.store.path(), QUICK).and_then(|store| store.agent());
            self.asked_ms = now_ms();
            self.link = asked.ok().flatten().and_then(|socket| Link::open(socket).ok());
        }
        self.link.is_some()
    }

    /// Notes that the agent is gone. Handoffs that it knew of continue without it: the kernel goes on steering packets,
    /// and the sending machines have pinned the bytes. The agent that is started in its place looks whether somebody
    /// sends them.
    fn lose(&mut self) {
        self.tell_all();
        self.link = None;
        let now = now_ms();
        self.orphans.extend(self.told.drain().map(|(handoff, handing)| (handoff, (handing, now))));
        self.on.clear();
    }

    /// Tells the agent of all handoffs that have begun, in the order in which they began. Their names count up. So the
    /// agent knows which ones it was not told of: all after the last one that it was told of.
    pub fn tell_all(&mut self) {
        let mut begun = std::mem::take(&mut self.begun).into_iter();
        while let Some(mut handing) = begun.next() {
            let told =
                self.link.as_ref().map_or_else(|| Err(ErrorKind::NotConnected.into()), |link| handing.tell(link));
            match told {
                // The agent has not read yet what it was told before.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.begun.push(handing);
                    self.begun.extend(begun);
                    return;
                }
                told => self.note_told(handing, told.is_ok()),
            }
        }
    }

    fn note_told(&mut self, handing: Handing, is_told: bool) {
        BEGUN.fetch_sub(1, Ordering::Relaxed);
        if is_told {
            self.on.insert(handing.cookie, handing.message.handoff);
            self.told.insert(handing.message.handoff, handing);
        } else {
            // The link has counted the handoff as under way since it began. Now it no longer does.
            self.link.iter().for_each(|link| link.over(&handing.message));
            self.failed.push(Failed { handing, reason: Reason::Limit });
        }
    }

    /// Takes note of handoffs that are over.
    pub fn settle(&mut self) {
        let outcomes = self.link.as_mut().map(Link::outcomes).unwrap_or_default();
        outcomes.into_iter().for_each(|(handoff, outcome)| self.take_note(handoff, outcome));
    }

    fn take_note(&mut self, handoff: u64, outcome: Outcome) {
        let known = self.told.get(&handoff).or_else(|| self.orphans.get(&handoff).map(|(handing, _)| handing));
        let Some(handing) = known.filter(|handing| outcome.concerns(handing.message.peer)) else { return };
        if let Outcome::Waits { .. } = outcome {
            if let Some(link) = &mut self.link {
                link.hold_back(&handing.message);
            }
            return;
        }
        let handing = match self.told.remove(&handoff) {
            Some(handing) => {
                if let Some(link) = &self.link {
                    link.over(&handing.message);
                    if outcome == Outcome::Reset {
                        // The sending machine may begin only after the client's reset has passed, and then wait for
                        // ACKs until its patience ends. So the handoff is aborted.
                        let _ = link.abort(handoff);
                    }
                }
                if self.on.get(&handing.cookie) == Some(&handoff) {
                    self.on.remove(&handing.cookie);
                }
                handing
            }
            // An orphan: only the link to the previous agent has counted it.
            None => match self.orphans.remove(&handoff) {
                Some((handing, _)) => handing,
                None => return,
            },
        };
        if let Outcome::Ended { reason, .. } = outcome {
            self.failed.push(Failed { handing, reason });
        }
    }

    /// Tells the agent of handoffs that have begun, and takes in what the kernel and the agents have reported. Returns
    /// the handoffs that have failed since the last call.
    pub fn tend(&mut self, runtime: &Runtime) -> Vec<Failed> {
        self.tell_all();
        if self.link.as_mut().is_some_and(|link| link.hear().is_err()) {
            self.settle();
            self.lose();
        }
        if !self.orphans.is_empty() {
            let now = now_ms();
            self.orphans.retain(|_, (_, since)| now.saturating_sub(*since) < ORPHAN_MS);
            self.connect(runtime);
        }
        self.settle();
        std::mem::take(&mut self.failed)
    }

    /// Cancels a handoff that nobody sends, and whose connection this program does not have any more.
    pub fn cancel(&self, handoff: u64) {
        if let Some(link) = &self.link {
            let _ = link.cancel(handoff);
        }
    }

    /// Forgets everything in the child of a fork: it is the parent's.
    pub fn forget(&mut self) {
        // The child closes its copy of the connection, by which the agent knows the parent.
        drop(self.link.take());
        std::mem::forget(std::mem::take(self));
        BEGUN.store(0, Ordering::Relaxed);
    }
}
