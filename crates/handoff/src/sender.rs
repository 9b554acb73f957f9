//! The backend's side of a handoff: kernel TCP sockets that continue a connection where the frontend's socket stopped.
//!
//! There is one [`Sender`] per client connection. The first payload of a connection makes its socket with TCP_REPAIR.
//! Later payloads find the socket **parked** (idle, with all bytes acknowledged), with its congestion window and RTT,
//! and cost no more than `sendfile`. The socket counts in its own sequence space, and the steering programs add
//! `seq_delta` (crates/handoff/bpf/steering.h). A *peer* is a frontend's agent. A *handoff* lets a backend send one
//! payload on a client's connection, and a *claim* is the peer's message that asks for the payload. A handoff is named
//! by its *claimant*: the peer, the worker number of the frontend's server, and the handoff's number. A *slot* is a
//! sender's place in the table of [`Senders`], and in that of the steering programs. By the *digest* (SHA-256) of a
//! payload's file, the frontend can check that another backend's file is the same. A digest is *withdrawn* when the
//! file changes.
//!
//! ```text
//!            start                      all queued              all acknowledged
//!   (none) ---------> Sending ------------------------> Draining ---------------> Parked --+
//!                       ^                                                                  |
//!                       +------------------------------- start ----------------------------+
//! ```
//!
//! The owner of the [`Senders`] owns their sockets. No call waits for a socket. With [`Senders::read_by`], none waits
//! for a disk either. Callers say what time it is.

mod answers;
mod connection;
mod table;
mod words;

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use shunt_wire::Endpoint;
use shunt_wire::local::Reason;
use shunt_wire::peer::{Claim, Delivered, Spacing};

use crate::body::Body;
use crate::identity::FileIdentity;
use crate::payload::Payload;
use crate::reading::{Done, Owner, Reads};
use crate::tls13::workbench::Workbench;
use connection::{Sender, State, Verdict, first_slot};

pub use answers::{FirstAnswer, Unsent};
pub use shunt_wire::peer::Claimant;
pub use table::{SenderKey, SenderTable, Slot};

/// Limits that an operator sets.
#[derive(Clone, Copy, Debug)]
pub struct SenderLimits {
    /// Largest number of sockets, parked ones included.
    pub senders: usize,
    /// Initial send buffer of each socket, in bytes. The kernel doubles it, so up to twice as many bytes are queued
    /// before the agent must be woken again.
    pub send_buffer_bytes: usize,
    /// Kernel memory for the bytes that all sockets have queued, in bytes. If many sockets send at once, each begins
    /// with a smaller buffer.
    pub memory_bytes: u64,
    /// Time that a parked socket waits for the next payload.
    pub park: Duration,
    /// Longest time that a client may acknowledge nothing.
    pub progress: Duration,
}

/// A handoff that ended without success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The claimant, who is to be told.
    pub claimant: Claimant,
    /// Why the handoff ended.
    pub reason: Reason,
}

/// News about the file of a payload that is being sent, for the payload's frontend.
#[derive(Debug)]
pub struct FileNews<'a> {
    /// Index of the sender, for [`Senders::settle_news`].
    pub index: usize,
    /// The claimant, who is to be told.
    pub claimant: Claimant,
    /// File that the whole payload is part of, and its state. `None`: there is no such file, or it has changed.
    pub file: Option<(BorrowedFd<'a>, FileIdentity)>,
    /// Offset of the payload in the file, in bytes.
    pub offset: u64,
    /// Time when sending began.
    pub begun: Instant,
}

/// Outcome of a call that sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The kernel has all bytes.
    Queued,
    /// The socket takes no more at present, or other payloads have their turn. Call [`Senders::resume`] with this index
    /// when the socket is writable.
    Blocked(usize),
    /// The next bytes are being read because they are not in memory: [`Senders::take_read`] continues. Or they must not
    /// be sent before the frontend knows that a digest is withdrawn: [`Senders::go_on_unproven`] continues.
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
    /// Indices of senders with news for their frontends about the file that they send.
    news: Vec<usize>,
    answers: Vec<FirstAnswer>,
    unsent: Vec<Unsent>,
    /// Handoffs whose senders were discarded for a newer payload to the same client. The next sweep reports them.
    replaced: Vec<Failure>,
    /// Index of the slot that was swept last.
    swept: usize,
    /// Number of senders that are not parked. Each of them may hold its payload's file open, besides its socket.
    busy: usize,
    workbench: Workbench,
    /// Reads file bytes that are not in memory. `None`: the calling thread reads them, and waits.
    reads: Option<Reads>,
}

/// Fewest slots that one sweep examines. A sweep examines a tenth of all slots if that is more.
const SWEEP_AT_LEAST: usize = 256;
/// Number of sweeps that together examine all slots, if there are many slots.
const SWEEPS_FOR_ALL: usize = 10;
/// Number of parked senders that are closed together to make room. To find the oldest ones, all senders are examined.
/// Such a search costs too much to close a single sender.
pub const EVICTED_AT_ONCE: usize = 32;
/// Smallest initial send buffer, however many senders there are, unless the limit `send_buffer_bytes` is smaller.
const LEAST_SEND_BUFFER_BYTES: usize = 64 << 10;

/// Counts of what the senders have done since the agent started.
#[derive(Clone, Copy, Debug, Default)]
pub struct SenderCounts {
    /// Sockets made with TCP_REPAIR.
    pub restored: u64,
    /// Payloads sent by a socket that was parked.
    pub reused: u64,
    /// Sockets that could not be used for their client's next payload: they were of another connection, were closed,
    /// had too small segments, or had unsent or unacknowledged bytes.
    pub discarded: u64,
    /// Parked sockets that were closed to make room.
    pub evicted: u64,
    /// Payload bytes given to the kernel.
    pub queued_bytes: u64,
}

impl<T: SenderTable> Senders<T> {
    /// Makes an empty set of senders.
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

    /// From here on no call waits for a disk: `reads` reads the bytes that are not in memory.
    pub fn read_by(&mut self, reads: Reads) {
        self.reads = Some(reads);
    }

    /// Returns, for each payload that is being sent, the number of its peer and its length in bytes.
    pub fn loads(&self) -> impl Iterator<Item = (u32, u64)> {
        let busy = self.slots.iter().filter(|(_, sender)| !sender.is_parked());
        busy.map(|(_, sender)| (sender.claimant.peer, sender.length))
    }

    /// Number of senders that are not parked. Their buffers share `memory_bytes`.
    pub fn busy(&self) -> usize {
        self.busy
    }

    /// Initial send buffer of the next sender, in bytes. Each buffer counts as twice its size in `memory_bytes`,
    /// because the kernel doubles the size for its own overhead. The kernel lets no buffer grow while TCP's memory is
    /// short.
    fn buffer_bytes(&self) -> usize {
        let share = usize::try_from(self.limits.memory_bytes / (self.busy as u64 + 1) / 2).unwrap_or(usize::MAX);
        share.max(LEAST_SEND_BUFFER_BYTES).min(self.limits.send_buffer_bytes)
    }

    /// Returns the counts since the agent started.
    pub fn counts(&self) -> SenderCounts {
        self.counts
    }

    /// The steering programs' tables.
    pub fn table(&self) -> &T {
        &self.table
    }

    /// Number of sockets, parked ones included.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there are no sockets.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Socket of the sender at `index`, for polling.
    ///
    /// # Panics
    /// If there is no sender at `index`. Indices come from [`Progress::Blocked`].
    pub fn socket(&self, index: usize) -> BorrowedFd<'_> {
        self.slots[index].flow.writable()
    }

    /// Whether there still is a sender at `index`.
    pub fn contains(&self, index: usize) -> bool {
        self.slots.contains(index)
    }

    /// Begins to send a payload from the address `local`, as `claim` describes it.
    ///
    /// # Errors
    /// Returns the reason why the payload cannot be sent, or why sending has already failed. Only in the second case
    /// may bytes have left.
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

    /// Continues the sender at `index` after its socket has become writable.
    ///
    /// # Errors
    /// Returns how the handoff ended. The sender is gone then.
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

    /// Continues the sender at `index` after a read has ended. Returns `None` if the read was not this sender's.
    ///
    /// # Errors
    /// Returns how the handoff ended. The sender is gone then.
    pub fn take_read(&mut self, index: usize, done: Done, now: Instant) -> Result<Option<Progress>, Failure> {
        let taken = self.slots.get_mut(index).map_or(Ok(false), |sender| sender.take_read(done));
        match taken {
            Ok(true) => self.resume(index, now).map(Some),
            Ok(false) => Ok(None),
            Err(reason) => Err(self.fail(index, reason)),
        }
    }

    /// Ends handoffs that the frontend has given up, named by peer, worker and handoff. From here on none of their
    /// bytes reaches a client. The call takes a whole set because many come together, and each call examines all
    /// senders.
    pub fn abort(&mut self, given_up: &HashSet<(u32, u32, u64)>) {
        let is_given_up = |of: &Claimant| given_up.contains(&(of.peer, of.worker, of.handoff));
        let found = self.slots.iter().filter(|(_, sender)| !sender.is_parked() && is_given_up(&sender.claimant));
        for index in found.map(|(index, _)| index).collect::<Vec<_>>() {
            self.discard(index);
        }
    }

    /// Discards the senders of a peer whose session is lost, parked ones included, because this agent hears no more of
    /// the peer's client connections.
    ///
    /// Exception: a sender stays if the kernel has all bytes of its payload. The frontend may still be there, and see
    /// the client acknowledge them.
    pub fn forget_peer(&mut self, peer: u32) {
        let gone: Vec<usize> = self
            .slots
            .iter()
            .filter(|(_, sender)| sender.claimant.peer == peer && !matches!(sender.state, State::Draining(_)))
            .map(|(index, _)| index)
            .collect();
        gone.into_iter().for_each(|index| self.discard(index));
    }

    /// Ends every payload of which the kernel does not have all bytes. Returns the failures, so that each claimant can
    /// be told that its sender is gone.
    pub fn give_up(&mut self) -> Vec<Failure> {
        let is_left = |sender: &Sender| matches!(sender.state, State::Sending(_));
        let left = self.slots.iter().filter(|(_, sender)| is_left(sender)).map(|(index, _)| index).collect::<Vec<_>>();
        left.into_iter().map(|index| self.fail(index, Reason::PeerLost)).collect()
    }

    /// Parks senders whose payload is acknowledged, and closes parked ones that have waited too long. Returns the
    /// handoffs that have failed. To be called about ten times a second. With very many senders each call examines only
    /// a part of them, so that it stays short. Each sender is examined at least about once a second.
    pub fn sweep(&mut self, now: Instant) -> Vec<Failure> {
        let slots = self.slots.capacity();
        self.look_at(slots.min(SWEEP_AT_LEAST.max(slots.div_ceil(SWEEPS_FOR_ALL))), now)
    }

    /// Does the same as [`Self::sweep`] for all senders. So those whose payload is acknowledged are parked, and their
    /// files are closed, at once.
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

    /// Whether the claim's connection already has a sender at our port `port`. If the claim is for the first payload of
    /// a connection, it has none: a sender that is there belongs to an older connection.
    ///
    /// # Errors
    /// [`Reason::Busy`] if the sender found there is sending on the client's connection with another server. A client
    /// may use one port for connections with two servers.
    pub fn has(&self, claim: &Claim, port: u16) -> Result<bool, Reason> {
        let client = Endpoint { address: claim.flow.client_address, port_be: claim.flow.client_port };
        match self.by_key.get(&SenderKey { client, port }) {
            Some(&index) if self.slots[index].sends_for_another(claim) => Err(Reason::Busy),
            found => Ok(claim.flow.first == 0 && found.is_some()),
        }
    }

    /// Whether there is room for one more sender. Parked senders are closed to make room.
    pub fn has_room(&mut self) -> bool {
        self.slots.len() < self.limits.senders || self.evict_parked(EVICTED_AT_ONCE) > 0
    }

    /// Returns the sender for this client and port, if it can send for this claim at once. If it cannot, it is
    /// discarded, and the caller makes a new one. Exception: [`Reason::Busy`] if it is still sending on the client's
    /// connection with another server.
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
        // The slot and the key come first: the programs must know the socket before its first segment. But the slot
        // stays closed until the socket is there. Until then, a socket of an agent that has ended may have these
        // addresses and ports. It may still repeat bytes, and the slot would give them wrong sequence numbers.
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
        sender.flow.set_buffer_bytes(buffer_bytes);
        entry.insert(sender);
        self.by_key.insert(key, index);
        self.counts.restored += 1;
        Ok(index)
    }

    /// Queues the sender's advice for its frontend, if it has any: how far apart ACKs may be.
    fn advise(&mut self, index: usize) {
        let sender = &mut self.slots[index];
        if let Some(advice) = sender.advice() {
            self.advice.push((sender.claimant.peer, advice));
        }
    }

    /// Takes the advice for frontends on how far apart ACKs may be, each with the number of its peer.
    pub fn take_advice(&mut self) -> Vec<(u32, Spacing)> {
        std::mem::take(&mut self.advice)
    }

    /// Returns the payloads about whose files frontends are to be told now, and forgets this list. Some of them have
    /// been sent for a while, and their file's digest is wanted. The files of the others have changed since their
    /// digest was told.
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

    /// Notes that the frontend of the sender at `index` has been told the digest of the file that is sent. With
    /// `is_known` false, the frontend was told instead that there is no digest, or none any more.
    pub fn settle_news(&mut self, index: usize, is_known: bool, now: Instant) {
        if let Some(sender) = self.slots.get_mut(index) {
            sender.settle_news(is_known, now);
        }
    }

    /// Notes that frontends know that the digests of these handoffs are withdrawn. Handoffs are named by peer, worker
    /// and handoff. Returns the indices of the senders that can continue. Takes a whole set, because each call examines
    /// all senders.
    pub fn go_on_unproven(&mut self, withdrawn: &HashSet<(u32, u32, u64)>) -> Vec<usize> {
        let is_meant = |of: &Claimant| withdrawn.contains(&(of.peer, of.worker, of.handoff));
        let senders = self.slots.iter_mut();
        senders
            .filter(|(_, sender)| is_meant(&sender.claimant))
            .filter_map(|(index, sender)| sender.go_on_unproven().then_some(index))
            .collect()
    }

    /// Closes up to `most` parked senders, those that have waited longest. Returns how many were closed.
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

    /// Removes a sender and returns what it was sending. Steering ends first, so that no segment that the socket sends
    /// when it is closed reaches the client.
    fn withdraw(&mut self, index: usize) -> State {
        let sender = self.slots.remove(index);
        self.busy -= usize::from(!sender.is_parked());
        self.table.remove(&sender.key);
        self.by_key.remove(&sender.key);
        sender.flow.close_silently();
        sender.state
    }
}

impl<T> Drop for Senders<T> {
    /// Closes all sockets. Payloads of which the kernel has all bytes are still delivered: their sockets are closed in
    /// the normal manner, and be_out, the program on egress, drops their FIN. All other sockets are closed silently.
    fn drop(&mut self) {
        for sender in self.slots.drain() {
            match sender.state {
                State::Draining(_) => drop(sender.flow),
                State::Sending(_) | State::Parked => sender.flow.close_silently(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    /// A stand-in for the programs' tables. It notes the calls that change them, in order.
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
        // Without root no socket can be made.
        let restored = senders.restore(key, &claim, Claimant::of(0, &claim), local, Instant::now());
        let then = if restored.is_ok() { "open" } else { "remove" };
        assert_eq!(senders.table().0, ["closed", "insert", then]);
    }
}
