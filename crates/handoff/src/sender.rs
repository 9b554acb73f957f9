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

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size_force;
use shunt_sys::repair::{RepairError, Restored, clock_ms, close_silently, restore, set_window};
use shunt_sys::sockopt::{set_max_pacing_rate, unacknowledged};
use shunt_wire::Endpoint;
use shunt_wire::local::{Handoff, Reason};
use shunt_wire::peer::{Claim, Spacing};

use crate::payload::Payload;
use crate::spacing;

/// Bytes that a sender's socket says it could receive: it never does, and a window that a client has seen may not
/// become smaller than this.
const RCV_WND: u32 = 65535;
/// So many payloads of a connection, and its need of ACKs is looked at again.
const LOOK_EVERY: u32 = 16;

/// What identifies a sender's packets in its own machine: the client, and our port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SenderKey {
    /// The client's end.
    pub client: Endpoint,
    /// Our port, host order.
    pub port: u16,
}

/// What the steering programs need to know of one sender (`struct sender_slot`).
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Slot {
    pub server: Endpoint,
    pub live: bool,
    pub start: u32,
    pub seq_delta: u32,
    pub ts_delta: u32,
    pub rcv_nxt: u32,
    pub ack: u32,
    pub snd_cwnd: u32,
    pub ts_recent: u32,
}

/// Where the steering programs look senders up: BPF maps, or a table in a test.
pub trait SenderTable {
    /// Writes a slot. The programs may read it at once.
    fn write_slot(&mut self, index: u32, slot: &Slot);
    /// Window field of the newest ACK that a slot's sender got: its socket's idea of the client's window.
    fn window(&self, index: u32) -> u32;
    /// Lets packets of `key` find the slot.
    ///
    /// # Errors
    /// The kernel's, where the map is full.
    fn insert(&mut self, key: &SenderKey, index: u32) -> io::Result<()>;
    /// From here packets of `key` are dropped.
    fn remove(&mut self, key: &SenderKey);
}

/// Limits that an operator sets.
#[derive(Clone, Copy, Debug)]
pub struct SenderLimits {
    /// Sockets in all, parked ones included.
    pub senders: usize,
    /// Send buffer of each in bytes: what leaves without waking the agent again.
    pub send_buffer_bytes: usize,
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
}

/// A handoff that ended without success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Who asked.
    pub claimant: Claimant,
    /// Why.
    pub reason: Reason,
}

/// What a call left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All bytes are with the kernel.
    Queued,
    /// The socket takes no more now: call [`Senders::resume`] with this index when it is writable.
    Blocked(usize),
}

enum State {
    /// A payload's bytes are being queued.
    Sending(Payload),
    /// All queued, not known to be acknowledged. The payload stays for the last look at its file.
    Draining(Payload),
    /// Nothing outstanding.
    Parked,
}

struct Sender {
    key: SenderKey,
    server: Endpoint,
    socket: OwnedFd,
    claimant: Claimant,
    state: State,
    /// Bytes given to the socket, in its own sequence space: its `write_seq`.
    write_seq: u32,
    /// Constant: the socket never receives data.
    rcv_nxt: u32,
    /// Of the socket's timestamp clock from [`clock_ms`].
    ts_offset: u32,
    ts_delta: u32,
    mss: u16,
    paced: bool,
    /// Payloads so far.
    payloads: u32,
    /// What the frontend knows ([`Spacing::bytes`]).
    ack_spacing: u32,
    /// Of the last change of `unacknowledged`.
    progress: (u32, Instant),
}

/// All senders of one agent.
pub struct Senders<T> {
    table: T,
    limits: SenderLimits,
    slots: slab::Slab<Sender>,
    by_key: std::collections::HashMap<SenderKey, usize>,
    counts: SenderCounts,
    advice: Vec<(u32, Spacing)>,
}

/// What happened so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct SenderCounts {
    /// Sockets made with TCP_REPAIR.
    pub restored: u64,
    /// Payloads that found a parked socket.
    pub reused: u64,
    /// Parked sockets that could not be used: stale, or not yet fully acknowledged.
    pub discarded: u64,
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
        }
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
        let client = Endpoint { address: claim.client_address, port_be: claim.client_port };
        let key = SenderKey { client, port: local.port() };
        let index = match self.parked(&key, claim) {
            Some(index) => self.reuse(index, claim, claimant, now)?,
            None => self.restore(key, claim, claimant, local, now)?,
        };
        self.pace(index, claim.rate.get());
        let sender = &mut self.slots[index];
        sender.ack_spacing = claim.ack_spacing.get();
        sender.payloads = sender.payloads.wrapping_add(1);
        if sender.ack_spacing == 0 || sender.payloads.is_multiple_of(LOOK_EVERY) {
            self.advise(index);
        }
        self.slots[index].state = State::Sending(payload);
        self.resume(index, now).map_err(|failure| failure.reason)
    }

    /// Goes on with the sender at `index` after its socket became writable.
    ///
    /// # Errors
    /// How it ended: the sender is gone.
    pub fn resume(&mut self, index: usize, now: Instant) -> Result<Progress, Failure> {
        let sender = &mut self.slots[index];
        let State::Sending(payload) = &mut sender.state else {
            return Ok(Progress::Queued);
        };
        let before = payload.remaining();
        let outcome = payload.send_to(&sender.socket);
        let sent = before - payload.remaining();
        sender.write_seq = sender.write_seq.wrapping_add(sent as u32);
        sender.progress.1 = now;
        self.counts.queued_bytes += sent;
        match outcome {
            Ok(true) => {
                let State::Sending(payload) = std::mem::replace(&mut sender.state, State::Parked) else {
                    unreachable!("just matched")
                };
                sender.state = State::Draining(payload);
                Ok(Progress::Queued)
            }
            Ok(false) => {
                self.advise(index);
                Ok(Progress::Blocked(index))
            }
            Err(reason) => Err(self.fail(index, reason)),
        }
    }

    /// The frontend gave it up: nothing more reaches the client.
    pub fn abort(&mut self, claimant: Claimant) {
        let found = self.slots.iter().find(|(_, sender)| sender.claimant == claimant && !sender.is_parked());
        if let Some((index, _)) = found {
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

    /// Once a second or so: parks what is acknowledged, closes what waited too long.
    pub fn sweep(&mut self, now: Instant) -> Vec<Failure> {
        let mut failures = Vec::new();
        for index in self.slots.iter().map(|(index, _)| index).collect::<Vec<_>>() {
            match self.slots[index].look(now, &self.limits) {
                Verdict::Keep => {}
                Verdict::Close => self.discard(index),
                Verdict::Fail(reason) => failures.push(self.fail(index, reason)),
            }
        }
        failures
    }

    /// A sender for this flow that can send at once. One that cannot is discarded.
    fn parked(&mut self, key: &SenderKey, claim: &Claim) -> Option<usize> {
        let index = *self.by_key.get(key)?;
        let sender = &self.slots[index];
        let same_flow = claim.first == 0
            && sender.server.address == claim.server_address
            && sender.server.port_be == claim.server_port
            && sender.mss >= claim.mss.get();
        // Bytes that are not acknowledged here were acknowledged to the frontend, whose copy of that ACK was lost:
        // sent again, they would land in the next payload's sequence space.
        let settled =
            !matches!(sender.state, State::Sending(_)) && unacknowledged(&sender.socket).is_ok_and(|bytes| bytes == 0);
        if same_flow && settled {
            return Some(index);
        }
        self.counts.discarded += 1;
        self.discard(index);
        None
    }

    fn reuse(&mut self, index: usize, claim: &Claim, claimant: Claimant, now: Instant) -> Result<usize, Reason> {
        let window = self.table.window(index as u32);
        let sender = &mut self.slots[index];
        sender.claimant = claimant;
        sender.progress = (0, now);
        sender.ts_delta = sender.raised_ts_delta(claim);
        if let Err(error) = sender.correct_window(claim, window) {
            tracing::warn!(%error, "cannot correct a parked socket's window");
            self.discard(index);
            return Err(Reason::Socket);
        }
        let slot = sender.slot(claim);
        self.table.write_slot(index as u32, &slot);
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
        if self.slots.len() >= self.limits.senders && !self.evict_parked() {
            return Err(Reason::Limit);
        }
        let timestamps = claim.options & Handoff::TIMESTAMPS != 0;
        let entry = self.slots.vacant_entry();
        let index = entry.key();
        let slot = Slot {
            server: Endpoint { address: claim.server_address, port_be: claim.server_port },
            live: true,
            start: claim.start.get(),
            seq_delta: 0,
            // The socket takes only an even clock (Restored::tsval); the client sees the frontend's.
            ts_delta: claim.tsval.get() & 1,
            rcv_nxt: claim.rcv_nxt.get(),
            ack: claim.rcv_nxt.get(),
            snd_cwnd: claim.snd_cwnd.get(),
            ts_recent: claim.ts_recent.get(),
        };
        // The slot and the key first: the programs must know the socket before its first segment.
        self.table.write_slot(index as u32, &slot);
        self.table.insert(&key, index as u32).map_err(|_| Reason::Limit)?;
        let restored = restore(&Restored {
            local,
            remote: key.client.socket_addr(),
            snd_nxt: claim.start.get(),
            rcv_nxt: claim.rcv_nxt.get(),
            snd_wnd: claim.snd_wnd.get(),
            rcv_wnd: RCV_WND,
            mss: claim.mss.get(),
            window_scale: (claim.options & Handoff::WSCALE != 0).then_some((claim.snd_wscale, claim.rcv_wscale)),
            sack: claim.options & Handoff::SACK != 0,
            tsval: timestamps.then_some(claim.tsval.get() & !1),
        });
        let (socket, ts_offset) = match restored {
            Ok(made) => made,
            Err(error) => {
                tracing::warn!(client = ?key.client, %error, "cannot restore a connection");
                self.table.remove(&key);
                return Err(Reason::Socket);
            }
        };
        let _ = set_socket_send_buffer_size_force(&socket, self.limits.send_buffer_bytes);
        entry.insert(Sender {
            key,
            server: slot.server,
            socket,
            claimant,
            state: State::Parked,
            write_seq: claim.start.get(),
            rcv_nxt: claim.rcv_nxt.get(),
            ts_offset,
            ts_delta: slot.ts_delta,
            mss: claim.mss.get(),
            paced: false,
            payloads: 0,
            ack_spacing: 0,
            progress: (0, now),
        });
        self.by_key.insert(key, index);
        self.counts.restored += 1;
        Ok(index)
    }

    /// Where the frontend passes on many more ACKs than this sender needs, or too few.
    fn advise(&mut self, index: usize) {
        let sender = &mut self.slots[index];
        let wanted = spacing::wanted(&sender.socket);
        let known = sender.ack_spacing;
        if wanted == 0 || (wanted / 2 < known && wanted > known / 2) {
            return;
        }
        sender.ack_spacing = wanted;
        let bytes = wanted.into();
        let Endpoint { address: client_address, port_be: client_port } = sender.key.client;
        let Endpoint { address: server_address, port_be: server_port } = sender.server;
        let advice = Spacing { client_address, server_address, client_port, server_port, bytes };
        self.advice.push((sender.claimant.peer, advice));
    }

    /// What frontends should know, and whose they are: indices of peers.
    pub fn take_advice(&mut self) -> Vec<(u32, Spacing)> {
        std::mem::take(&mut self.advice)
    }

    fn pace(&mut self, index: usize, rate: u64) {
        let sender = &mut self.slots[index];
        if rate == 0 && !sender.paced {
            return;
        }
        sender.paced = rate != 0;
        let _ = set_max_pacing_rate(&sender.socket, (rate != 0).then_some(rate));
    }

    /// Makes room by closing the parked sender that has waited longest.
    fn evict_parked(&mut self) -> bool {
        let parked = self.slots.iter().filter(|(_, sender)| sender.is_parked());
        let Some((index, _)) = parked.min_by_key(|(_, sender)| sender.progress.1) else {
            return false;
        };
        self.discard(index);
        true
    }

    fn fail(&mut self, index: usize, reason: Reason) -> Failure {
        let claimant = self.slots[index].claimant;
        self.discard(index);
        Failure { claimant, reason }
    }

    /// Steering first, so that nothing of the socket's end reaches the client.
    fn discard(&mut self, index: usize) {
        let sender = self.slots.remove(index);
        self.table.remove(&sender.key);
        self.by_key.remove(&sender.key);
        close_silently(sender.socket);
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

enum Verdict {
    Keep,
    Close,
    Fail(Reason),
}

impl Sender {
    fn is_parked(&self) -> bool {
        matches!(self.state, State::Parked)
    }

    fn slot(&self, claim: &Claim) -> Slot {
        Slot {
            server: self.server,
            live: true,
            start: claim.start.get(),
            seq_delta: claim.start.get().wrapping_sub(self.write_seq),
            ts_delta: self.ts_delta,
            rcv_nxt: self.rcv_nxt,
            ack: claim.rcv_nxt.get(),
            snd_cwnd: 0,
            ts_recent: claim.ts_recent.get(),
        }
    }

    /// The client must never see our timestamps go back (RFC 7323, 5.3): follow the frontend's clock, forward only.
    fn raised_ts_delta(&self, claim: &Claim) -> u32 {
        let ours = clock_ms().wrapping_add(self.ts_offset).wrapping_add(self.ts_delta);
        let behind = claim.tsval.get().wrapping_sub(ours) as i32;
        self.ts_delta.wrapping_add(behind.max(0) as u32)
    }

    /// The socket knows the window as its last ACK had it; since then the frontend has sent into it, and the client
    /// may have opened it. Where that matters for this payload, the socket is told.
    fn correct_window(&self, claim: &Claim, field: u32) -> Result<(), RepairError> {
        let scale = if claim.options & Handoff::WSCALE != 0 { claim.snd_wscale } else { 0 };
        let (believed, really) = (u64::from(field) << scale, u64::from(claim.snd_wnd.get()));
        let length = claim.length.get();
        if believed.min(length) == really.min(length) {
            return Ok(());
        }
        set_window(&self.socket, self.rcv_nxt, claim.snd_wnd.get(), RCV_WND)
    }

    fn look(&mut self, now: Instant, limits: &SenderLimits) -> Verdict {
        let Ok(outstanding) = unacknowledged(&self.socket) else {
            return Verdict::Close;
        };
        if outstanding != self.progress.0 {
            self.progress = (outstanding, now);
        }
        let waited = now.duration_since(self.progress.1);
        match &self.state {
            State::Parked if waited > limits.park => Verdict::Close,
            State::Parked => Verdict::Keep,
            State::Draining(payload) if outstanding == 0 => {
                let unchanged = payload.is_unchanged();
                self.state = State::Parked;
                if unchanged { Verdict::Keep } else { Verdict::Fail(Reason::FileChanged) }
            }
            _ if waited > limits.progress => Verdict::Fail(Reason::NoProgress),
            _ => Verdict::Keep,
        }
    }
}

/// What the kernel's answer to a send means for a handoff.
pub(crate) fn reason_of(errno: Errno) -> Reason {
    match errno {
        Errno::PIPE | Errno::CONNRESET => Reason::ClientGone,
        Errno::TIMEDOUT => Reason::NoProgress,
        Errno::IO => Reason::FileChanged,
        _ => Reason::Socket,
    }
}
