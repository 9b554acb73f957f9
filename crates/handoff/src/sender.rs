//! The backend's side of a handoff: a kernel TCP socket that goes on where the frontend's stopped.
//!
//! One [`Sender`] per client connection. The first payload of a connection makes its socket with TCP_REPAIR; later
//! ones find it **parked**, with its congestion window and RTT, and cost no more than `sendfile`: the socket counts
//! in its own sequence space, and the steering programs add `seq_delta` (crates/handoff/bpf/steering.h).
//!
//! ```text
//!            start                      all queued              all acknowledged
//!   (none) ---------> Sending ------------------------> Draining ---------------> Parked --+
//!                       ^                                                                  |
//!                       +------------------------------- start ----------------------------+
//! ```
//!
//! Whoever owns the [`Senders`] owns their sockets; nothing here blocks and nothing here reads a clock.

mod answers;
mod connection;
mod load;
mod table;
mod words;

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use shunt_sys::repair::close_silently;
use shunt_wire::local::Reason;
use shunt_wire::peer::{Claim, Delivered, Spacing};
use shunt_wire::{Endpoint, TraceId};

use crate::body::Body;
use crate::identity::FileIdentity;
use crate::payload::Payload;
use crate::reading::{Done, Owner, Reads};
use crate::tls13::stream::Workbench;
use connection::{Sender, State, Verdict, first_slot};

pub use answers::{FirstAnswer, Unsent};
pub use load::Load;
pub use table::{SenderKey, SenderTable, Slot};

/// Limits that an operator sets.
#[derive(Clone, Copy, Debug)]
pub struct SenderLimits {
    /// Sockets in all, parked ones included.
    pub senders: usize,
    /// Send buffer in bytes that each begins with: twice that leaves without waking the agent again.
    pub send_buffer_bytes: usize,
    /// Kernel memory for what all of them have queued, in bytes: where many send at once, each begins with a smaller buffer.
    pub memory_bytes: u64,
    /// How long a parked socket waits for the next payload.
    pub park: Duration,
    /// How long a client may acknowledge nothing.
    pub progress: Duration,
}

/// Who asked, so that they can be told how it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimant {
    /// Index of the session's peer.
    pub peer: u32,
    /// From the claim.
    pub worker: u32,
    /// From the claim.
    pub handoff: u64,
    /// Of the client's request, for logs.
    pub trace: TraceId,
}

impl Claimant {
    /// Who made a claim in the session with `peer`.
    pub fn of(peer: u32, claim: &Claim) -> Self {
        Self { peer, worker: claim.worker.get(), handoff: claim.handoff.get(), trace: claim.trace }
    }
}

/// A handoff that ended without success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Who asked.
    pub claimant: Claimant,
    /// Why.
    pub reason: Reason,
}

/// News for a frontend of a payload that is under way.
#[derive(Debug)]
pub struct FileNews<'a> {
    /// Of the sender, for [`Senders::settle_news`].
    pub index: usize,
    /// Whom to tell.
    pub claimant: Claimant,
    /// Which file all of it is of, and in which state; `None`: of none, or that has changed.
    pub file: Option<(BorrowedFd<'a>, FileIdentity)>,
    /// Where in it the payload begins.
    pub offset: u64,
    /// Since when it has been sent.
    pub begun: Instant,
}

/// What a call left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All bytes are with the kernel.
    Queued,
    /// The socket takes no more now: call [`Senders::resume`] with this index when it is writable.
    Blocked(usize),
    /// The next bytes are not in memory, and are being read: [`Senders::take_read`] goes on. Or they are withheld until the
    /// frontend answers: [`Senders::go_on_unproven`].
    Waiting,
}

/// All senders of one agent.
pub struct Senders<T> {
    table: T,
    limits: SenderLimits,
    slots: slab::Slab<Sender>,
    by_key: HashMap<SenderKey, usize>,
    counts: SenderCounts,
    advice: Vec<(u32, Spacing)>,
    words: Vec<(u32, Delivered)>,
    /// Senders whose frontends should be told which file they send.
    news: Vec<usize>,
    answers: Vec<FirstAnswer>,
    unsent: Vec<Unsent>,
    /// Discarded for a newer payload of their client's address: the next sweep says so.
    replaced: Vec<Failure>,
    /// Where the next sweep begins.
    swept: usize,
    /// Senders that are not parked: each has its payload's file beside its socket.
    busy: usize,
    workbench: Workbench,
    /// Who reads what is not in memory; `None`: whoever calls, and waits.
    reads: Option<Reads>,
}

/// A sweep looks at so many slots at least, and at a tenth of all.
const SWEEP_AT_LEAST: usize = 256;
const SWEEPS_FOR_ALL: usize = 10;
/// Parked senders that are closed together where there is no room, for finding the oldest is a look at all.
pub const EVICTED_AT_ONCE: usize = 32;
/// No send buffer begins smaller, however many there are.
const LEAST_SEND_BUFFER_BYTES: usize = 64 << 10;

/// What happened so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct SenderCounts {
    /// Sockets made with TCP_REPAIR.
    pub restored: u64,
    /// Payloads that found a parked socket.
    pub reused: u64,
    /// Parked sockets that could not be used: stale, or not yet fully acknowledged.
    pub discarded: u64,
    /// Parked sockets that were closed to make room.
    pub evicted: u64,
    /// Payload bytes given to the kernel.
    pub queued_bytes: u64,
}

impl<T: SenderTable> Senders<T> {
    /// No senders yet.
    pub fn new(table: T, limits: SenderLimits) -> Self {
        Self {
            table,
            limits,
            slots: slab::Slab::new(),
            by_key: Default::default(),
            counts: Default::default(),
            advice: Vec::new(),
            words: Vec::new(),
            news: Vec::new(),
            answers: Vec::new(),
            unsent: Vec::new(),
            replaced: Vec::new(),
            swept: 0,
            busy: 0,
            workbench: Workbench::default(),
            reads: None,
        }
    }

    /// From here on nothing waits for a disk.
    pub fn read_by(&mut self, reads: Reads) {
        self.reads = Some(reads);
    }

    /// Every payload that is being sent, with the index of its peer.
    pub fn loads(&self) -> impl Iterator<Item = (u32, Load)> {
        let busy = self.slots.iter().filter(|(_, sender)| !sender.is_parked());
        busy.map(|(_, sender)| (sender.claimant.peer, Load::sending(sender.length)))
    }

    /// How many are not parked: their buffers share `memory_bytes`.
    pub fn busy(&self) -> usize {
        self.busy
    }

    /// That one more sender begins with. The kernel counts twice the bytes of a buffer, for what it keeps beside them,
    /// and lets none grow while TCP's memory is short.
    fn buffer_bytes(&self) -> usize {
        let share = usize::try_from(self.limits.memory_bytes / (self.busy as u64 + 1) / 2).unwrap_or(usize::MAX);
        share.max(LEAST_SEND_BUFFER_BYTES).min(self.limits.send_buffer_bytes)
    }

    /// What happened so far.
    pub fn counts(&self) -> SenderCounts {
        self.counts
    }

    /// The steering programs' tables.
    pub fn table(&self) -> &T {
        &self.table
    }

    /// Sockets in all, parked ones included.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The socket at `index`, to wait for.
    ///
    /// # Panics
    /// Where there is none: indices come from [`Progress::Blocked`].
    pub fn socket(&self, index: usize) -> BorrowedFd<'_> {
        self.slots[index].socket.as_fd()
    }

    /// Whether a sender is at `index` still.
    pub fn contains(&self, index: usize) -> bool {
        self.slots.contains(index)
    }

    /// Begins to send a payload as `claim` says, from `local`.
    ///
    /// # Errors
    /// Why it cannot: no byte has left then.
    pub fn start(
        &mut self,
        claim: &Claim,
        claimant: Claimant,
        local: SocketAddr,
        payload: Payload,
        now: Instant,
    ) -> Result<Progress, Reason> {
        if !payload.is_unchanged() {
            return Err(Reason::FileChanged);
        }
        let mut body = Body::of(payload, claim)?;
        let client = Endpoint { address: claim.flow.client_address, port_be: claim.flow.client_port };
        let key = SenderKey { client, port: local.port() };
        let index = match self.parked(&key, claim)? {
            Some(index) => self.reuse(index, claim, claimant, now)?,
            None => self.restore(key, claim, claimant, local, now)?,
        };
        let sender = &mut self.slots[index];
        sender.pace(claim.rate.get());
        if sender.note_spacing(claim) {
            self.advise(index);
        }
        self.busy += usize::from(self.slots[index].is_parked());
        if let Some(reads) = &self.reads {
            body.payload_mut().read_by(reads, Owner::Sender(index));
        }
        self.slots[index].begin(body, claim, now);
        self.resume(index, now).map_err(|failure| failure.reason)
    }

    /// Goes on with the sender at `index` after its socket became writable.
    ///
    /// # Errors
    /// How it ended: the sender is gone.
    pub fn resume(&mut self, index: usize, now: Instant) -> Result<Progress, Failure> {
        let (sent, outcome) = self.slots[index].send(&mut self.workbench, now);
        self.counts.queued_bytes += sent;
        match outcome {
            Ok(true) => {
                self.await_end(index);
                Ok(Progress::Queued)
            }
            Ok(false) => {
                self.advise(index);
                Ok(if self.slots[index].is_waiting() { Progress::Waiting } else { Progress::Blocked(index) })
            }
            Err(reason) => Err(self.fail(index, reason)),
        }
    }

    /// Goes on with the sender at `index` after a read has ended, where it is that sender's.
    ///
    /// # Errors
    /// As [`Self::resume`].
    pub fn take_read(&mut self, index: usize, done: Done, now: Instant) -> Result<Option<Progress>, Failure> {
        let taken = self.slots.get_mut(index).map_or(Ok(false), |sender| sender.take_read(done));
        match taken {
            Ok(true) => self.resume(index, now).map(Some),
            Ok(false) => Ok(None),
            Err(reason) => Err(self.fail(index, reason)),
        }
    }

    /// The frontend gave these up, by peer, worker and handoff: nothing more of them reaches a client. All at once,
    /// for many come together, and each would be a look at all senders.
    pub fn abort(&mut self, given_up: &HashSet<(u32, u32, u64)>) {
        let is_given_up = |of: &Claimant| given_up.contains(&(of.peer, of.worker, of.handoff));
        let found = self.slots.iter().filter(|(_, sender)| !sender.is_parked() && is_given_up(&sender.claimant));
        for index in found.map(|(index, _)| index).collect::<Vec<_>>() {
            self.discard(index);
        }
    }

    /// Ends every handoff of a session that is lost, parked sockets included: its frontend's flows are unknown now.
    ///
    /// Payloads that are wholly with the kernel go on: the frontend may well be there, and sees them complete.
    pub fn forget_peer(&mut self, peer: u32) {
        let gone: Vec<usize> = self
            .slots
            .iter()
            .filter(|(_, sender)| sender.claimant.peer == peer && !matches!(sender.state, State::Draining(_)))
            .map(|(index, _)| index)
            .collect();
        gone.into_iter().for_each(|index| self.discard(index));
    }

    /// Ends every payload that is not wholly with the kernel: whoever claimed it is to be told that its sender is gone.
    pub fn give_up(&mut self) -> Vec<Failure> {
        let is_left = |sender: &Sender| matches!(sender.state, State::Sending(_));
        let left = self.slots.iter().filter(|(_, sender)| is_left(sender)).map(|(index, _)| index).collect::<Vec<_>>();
        left.into_iter().map(|index| self.fail(index, Reason::PeerLost)).collect()
    }

    /// Ten times a second or so: parks what is acknowledged, closes what waited too long. Each call looks at a part,
    /// so that it takes about as long with very many senders, each of which then gets its look once a second.
    pub fn sweep(&mut self, now: Instant) -> Vec<Failure> {
        let slots = self.slots.capacity();
        self.look_at(slots.min(SWEEP_AT_LEAST.max(slots.div_ceil(SWEEPS_FOR_ALL))), now)
    }

    /// The same with all of them: for those that are acknowledged to be parked, and their files closed, at once.
    pub fn sweep_all(&mut self, now: Instant) -> Vec<Failure> {
        self.look_at(self.slots.capacity(), now)
    }

    fn look_at(&mut self, count: usize, now: Instant) -> Vec<Failure> {
        let mut failures = std::mem::take(&mut self.replaced);
        let slots = self.slots.capacity();
        for _ in 0..count {
            self.swept = if self.swept + 1 < slots { self.swept + 1 } else { 0 };
            let Some(sender) = self.slots.get_mut(self.swept) else {
                continue;
            };
            let was_parked = sender.is_parked();
            let verdict = sender.look(now, &self.limits);
            let is_parked_now = sender.is_parked() && !was_parked;
            self.busy -= usize::from(is_parked_now);
            if is_parked_now && matches!(verdict, Verdict::Keep) {
                self.give_word(self.swept);
            }
            let sender = &self.slots[self.swept];
            match verdict {
                Verdict::Keep => {
                    if sender.has_news(now) {
                        self.news.push(self.swept);
                    }
                    failures.extend(self.hear(self.swept, now));
                }
                Verdict::Close => self.discard(self.swept),
                Verdict::Fail(reason) => failures.push(self.fail(self.swept, reason)),
            }
        }
        failures
    }

    /// Whether a claim's connection has a sender already, at that port of ours.
    ///
    /// # Errors
    /// [`Reason::Busy`]: that sends on the client's connection with another server. A client may have both from one port of
    /// its own.
    pub fn has(&self, claim: &Claim, port: u16) -> Result<bool, Reason> {
        let client = Endpoint { address: claim.flow.client_address, port_be: claim.flow.client_port };
        match self.by_key.get(&SenderKey { client, port }) {
            Some(&index) if self.slots[index].sends_for_another(claim) => Err(Reason::Busy),
            found => Ok(claim.flow.first == 0 && found.is_some()),
        }
    }

    /// Whether there is room for one more; parked ones are closed for it.
    pub fn has_room(&mut self) -> bool {
        self.slots.len() < self.limits.senders || self.evict_parked(EVICTED_AT_ONCE) > 0
    }

    /// A sender for this flow that can send at once. One that cannot is discarded: its connection is over, or its
    /// frontend has given its payload up. Not so one that sends on the client's connection with another server.
    fn parked(&mut self, key: &SenderKey, claim: &Claim) -> Result<Option<usize>, Reason> {
        let Some(&index) = self.by_key.get(key) else {
            return Ok(None);
        };
        if self.slots[index].can_take(claim) {
            return Ok(Some(index));
        }
        if self.slots[index].sends_for_another(claim) {
            return Err(Reason::Busy);
        }
        self.counts.discarded += 1;
        if !self.slots[index].is_parked() {
            self.replaced.push(Failure { claimant: self.slots[index].claimant, reason: Reason::ClientGone });
        }
        self.discard(index);
        Ok(None)
    }

    fn reuse(&mut self, index: usize, claim: &Claim, claimant: Claimant, now: Instant) -> Result<usize, Reason> {
        let window = self.table.window(index as u32);
        match self.slots[index].reuse(claim, claimant, window, now) {
            Ok(slot) => self.table.write_slot(index as u32, &slot),
            Err(error) => {
                tracing::warn!(%error, "cannot correct a parked socket's window");
                self.discard(index);
                return Err(Reason::Socket);
            }
        }
        self.counts.reused += 1;
        Ok(index)
    }

    fn restore(
        &mut self,
        key: SenderKey,
        claim: &Claim,
        claimant: Claimant,
        local: SocketAddr,
        now: Instant,
    ) -> Result<usize, Reason> {
        if !self.has_room() {
            return Err(Reason::Limit);
        }
        let buffer_bytes = self.buffer_bytes();
        let entry = self.slots.vacant_entry();
        let index = entry.key();
        let slot = first_slot(claim);
        // The slot and the key first: the programs must know the socket before its first segment. But not open before
        // it is there: until then, what has these ports is the socket of an agent that has ended, which may still
        // repeat bytes that have their places in other sequence numbers.
        self.table.write_slot(index as u32, &Slot { live: false, ..slot });
        self.table.insert(&key, index as u32).map_err(|_| Reason::Socket)?;
        let sender = match Sender::restore(key, &slot, claim, claimant, local, now) {
            Ok(sender) => sender,
            Err(error) => {
                tracing::warn!(client = ?key.client, %error, "cannot restore a connection");
                self.table.remove(&key);
                return Err(Reason::Socket);
            }
        };
        self.table.write_slot(index as u32, &slot);
        sender.set_send_buffer(buffer_bytes);
        entry.insert(sender);
        self.by_key.insert(key, index);
        self.counts.restored += 1;
        Ok(index)
    }

    /// Has the sender say which ACKs it needs.
    fn advise(&mut self, index: usize) {
        let sender = &mut self.slots[index];
        if let Some(advice) = sender.advice() {
            self.advice.push((sender.claimant.peer, advice));
        }
    }

    /// What frontends should know, and whose they are: indices of peers.
    pub fn take_advice(&mut self) -> Vec<(u32, Spacing)> {
        std::mem::take(&mut self.advice)
    }

    /// Files that frontends want to know, of payloads that have been under way for a while, since the last call.
    pub fn take_news(&mut self) -> Vec<FileNews<'_>> {
        let news = std::mem::take(&mut self.news);
        let of = |index: usize| {
            let sender = self.slots.get(index)?;
            let payload = sender.payload()?;
            let offset = payload.end().saturating_sub(sender.length);
            Some(FileNews { index, claimant: sender.claimant, file: payload.file(), offset, begun: sender.begun })
        };
        news.into_iter().filter_map(of).collect()
    }

    /// The frontend of the sender at `index` has been told which file that sends; or it never will be.
    pub fn settle_news(&mut self, index: usize, is_known: bool, now: Instant) {
        if let Some(sender) = self.slots.get_mut(index) {
            sender.settle_news(is_known, now);
        }
    }

    /// Frontends know that the digests of these are withdrawn, by peer, worker and handoff: the senders that can go on, by
    /// index. All at once, as [`Self::abort`].
    pub fn go_on_unproven(&mut self, withdrawn: &HashSet<(u32, u32, u64)>) -> Vec<usize> {
        let is_meant = |of: &Claimant| withdrawn.contains(&(of.peer, of.worker, of.handoff));
        let senders = self.slots.iter_mut();
        senders
            .filter(|(_, sender)| is_meant(&sender.claimant))
            .filter_map(|(index, sender)| sender.go_on_unproven().then_some(index))
            .collect()
    }

    /// Makes room by closing parked senders, those that have waited longest: how many.
    pub fn evict_parked(&mut self, most: usize) -> usize {
        let parked = self.slots.iter().filter(|(_, sender)| sender.is_parked());
        let mut oldest: Vec<(Instant, usize)> = parked.map(|(index, sender)| (sender.idle_since(), index)).collect();
        if oldest.len() > most {
            oldest.select_nth_unstable(most);
            oldest.truncate(most);
        }
        oldest.iter().for_each(|(_, index)| self.discard(*index));
        self.counts.evicted += oldest.len() as u64;
        oldest.len()
    }

    fn fail(&mut self, index: usize, reason: Reason) -> Failure {
        let claimant = self.slots[index].claimant;
        self.discard(index);
        Failure { claimant, reason }
    }

    fn discard(&mut self, index: usize) {
        drop(self.withdraw(index));
    }

    /// Steering first, so that nothing of the socket's end reaches the client. What was being sent is given back.
    fn withdraw(&mut self, index: usize) -> State {
        let sender = self.slots.remove(index);
        self.busy -= usize::from(!sender.is_parked());
        self.table.remove(&sender.key);
        self.by_key.remove(&sender.key);
        close_silently(sender.socket);
        sender.state
    }
}

impl<T> Drop for Senders<T> {
    /// Payloads that are wholly with the kernel are still delivered: those sockets close as the kernel does it, and
    /// the egress program keeps their FIN. All others end silently.
    fn drop(&mut self) {
        for sender in self.slots.drain() {
            match sender.state {
                State::Draining(_) => drop(sender.socket),
                State::Sending(_) | State::Parked => close_silently(sender.socket),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    /// What the programs are told, in order.
    #[derive(Default)]
    struct Told(Vec<&'static str>);

    impl SenderTable for Told {
        fn write_slot(&mut self, _: u32, slot: &Slot) {
            self.0.push(if slot.live { "open" } else { "closed" });
        }

        fn window(&self, _: u32) -> u32 {
            0
        }

        fn insert(&mut self, _: &SenderKey, _: u32) -> std::io::Result<()> {
            self.0.push("insert");
            Ok(())
        }

        fn remove(&mut self, _: &SenderKey) {
            self.0.push("remove");
        }

        fn await_end(&mut self, _: u32, _: u32) {}

        fn acked(&self, _: u32) -> u32 {
            0
        }

        fn take_reports(&mut self) -> Vec<SenderKey> {
            Vec::new()
        }
    }

    #[test]
    fn no_slot_is_open_before_its_socket_is_there() {
        let second = Duration::from_secs(1);
        let limits = SenderLimits {
            senders: 1,
            send_buffer_bytes: 1 << 20,
            memory_bytes: 1 << 20,
            park: second,
            progress: second,
        };
        let mut senders = Senders::new(Told::default(), limits);
        let claim = Claim::new_zeroed();
        let client: SocketAddr = "192.0.2.1:9".parse().unwrap();
        let key = SenderKey { client: client.into(), port: 7 };
        let local = "127.0.0.1:7".parse().unwrap();
        // Without root there is no socket.
        let restored = senders.restore(key, &claim, Claimant::of(0, &claim), local, Instant::now());
        let then = if restored.is_ok() { "open" } else { "remove" };
        assert_eq!(senders.table().0, ["closed", "insert", then]);
    }
}
