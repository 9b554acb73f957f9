//! One sender: its socket, how that counts, and what has become of its payload.
//!
//! The socket counts on in its own sequence space from payload to payload; a [`Slot`] says where that is in the
//! client's. Its timestamps and its idea of the client's window are brought up to date when the next payload begins.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use shunt_sys::repair::{RepairError, Restored, clock_ms, restore, set_window};
use shunt_sys::sockopt::{begin_with_send_buffer, congestion_window, set_max_pacing_rate, unacknowledged};
use shunt_wire::flow::FlowState;
use shunt_wire::local::Reason;
use shunt_wire::peer::{Claim, Spacing};
use shunt_wire::{Endpoint, Tag};

use super::words::Word;
use super::{Claimant, SenderKey, SenderLimits, Slot};
use crate::body::Body;
use crate::payload::Payload;
use crate::reading::Done;
use crate::spacing;
use crate::tls13::stream::Workbench;

/// Bytes that a sender's socket says it could receive: it never does, and a window that a client has seen may not
/// become smaller than this.
const RCV_WND: u32 = 65535;
/// So many payloads of a connection, and its need of ACKs is looked at again.
const LOOK_EVERY: u32 = 16;
/// A payload that is shorter under way is not worth a digest.
const DIGEST_AFTER: Duration = Duration::from_secs(1);
/// A frontend that has not answered is told again that a digest is withdrawn, for its server may not have taken that: after
/// so long, and then each time after twice as long.
const WITHDRAW_AGAIN: Duration = Duration::from_secs(1);
/// How long a client may acknowledge nothing of what a new socket sends, and four round trips more. A tail probe goes
/// out after a second, and the first retransmission after three.
const ANSWER_WITHIN: Duration = Duration::from_millis(1500);

pub(super) enum State {
    /// A payload's bytes are being queued.
    Sending(Body),
    /// All queued, not known to be acknowledged. The body stays for the last look at its file.
    Draining(Body),
    /// Nothing outstanding.
    Parked,
}

/// Whether its frontend knows which file a payload is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Digest {
    /// It does not want to, or never will.
    Unwanted,
    /// It is to be told, once the payload has been under way for a while.
    Wanted,
    /// It has been told.
    Told,
    /// It was told then that this is not known any more, and will be again. Nothing is sealed until it answers.
    Withdrawn { told: Instant, again: Duration },
}

/// What a look at a sender says.
pub(super) enum Verdict {
    Keep,
    Close,
    Fail(Reason),
}

pub(super) struct Sender {
    pub(super) key: SenderKey,
    pub(super) socket: OwnedFd,
    pub(super) claimant: Claimant,
    pub(super) state: State,
    pub(super) server: Endpoint,
    /// Bytes given to the socket, in its own sequence space: its `write_seq`.
    pub(super) write_seq: u32,
    /// Constant: the socket never receives data. The token of its client's connection, which steered packets have.
    rcv_nxt: u32,
    /// Of the socket's timestamp clock from [`clock_ms`].
    ts_offset: u32,
    ts_delta: u32,
    mss: u16,
    paced: bool,
    /// Of its payload in bytes.
    pub(super) length: u64,
    pub(super) digest: Digest,
    /// Beginning of its payload.
    pub(super) begun: Instant,
    pub(super) word: Word,
    /// Payloads so far.
    payloads: u32,
    /// Which ACKs of its client it gets.
    spacing: spacing::Spacing,
    /// Of the last change of `unacknowledged`.
    progress: (u32, Instant),
    /// Until its client is known to acknowledge something, or not to.
    unheard: Option<Unheard>,
}

/// A socket whose client has acknowledged nothing yet.
struct Unheard {
    /// Its first sequence number.
    first: u32,
    /// When something has to have been acknowledged.
    due: Instant,
    /// Number and tag of the offer that it began with, where that can be given back: its bytes are sent as they are.
    offer: Option<(u64, Tag)>,
}

/// What the first payload of a socket has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstWord {
    /// Its client acknowledges.
    Answered,
    /// It acknowledges nothing, though it was sent something; the offer's number and tag, where it can be given back.
    Silent(Option<(u64, Tag)>),
}

/// Of a sender whose socket begins with `claim`, so that both count alike.
pub(super) fn first_slot(claim: &Claim) -> Slot {
    Slot {
        server: Endpoint { address: claim.flow.server_address, port_be: claim.flow.server_port },
        live: true,
        start: claim.flow.start.get(),
        seq_delta: 0,
        // The socket takes only an even clock (Restored::tsval); the client sees the frontend's.
        ts_delta: claim.flow.tsval.get() & 1,
        rcv_nxt: claim.flow.token.get(),
        ack: claim.flow.rcv_nxt.get(),
        snd_cwnd: claim.flow.snd_cwnd.get(),
        ts_recent: claim.flow.ts_recent.get(),
        ahead: claim.flow.ahead.get(),
    }
}

impl Sender {
    /// Makes the socket, as `slot` from [`first_slot`] has it.
    pub(super) fn restore(
        key: SenderKey,
        slot: &Slot,
        claim: &Claim,
        claimant: Claimant,
        local: SocketAddr,
        now: Instant,
    ) -> Result<Self, RepairError> {
        let timestamps = claim.flow.options & FlowState::TIMESTAMPS != 0;
        let (socket, ts_offset) = restore(&Restored {
            local,
            remote: key.client.socket_addr(),
            snd_nxt: claim.flow.start.get(),
            rcv_nxt: claim.flow.token.get(),
            snd_wnd: claim.flow.snd_wnd.get(),
            rcv_wnd: RCV_WND,
            mss: claim.flow.mss.get(),
            window_scale: (claim.flow.options & FlowState::WSCALE != 0)
                .then_some((claim.flow.snd_wscale, claim.flow.rcv_wscale)),
            sack: claim.flow.options & FlowState::SACK != 0,
            tsval: timestamps.then_some(claim.flow.tsval.get() & !1),
        })?;
        Ok(Self {
            key,
            socket,
            claimant,
            state: State::Parked,
            server: slot.server,
            write_seq: claim.flow.start.get(),
            rcv_nxt: claim.flow.token.get(),
            ts_offset,
            ts_delta: slot.ts_delta,
            mss: claim.flow.mss.get(),
            paced: false,
            length: claim.length.get(),
            digest: Digest::Unwanted,
            begun: now,
            word: Word::Unwanted,
            payloads: 0,
            spacing: Default::default(),
            progress: (0, now),
            unheard: Some(Unheard {
                first: claim.flow.start.get(),
                due: now + ANSWER_WITHIN + 4 * Duration::from_micros(claim.flow.srtt_us.get().into()),
                offer: (claim.offer.get() != 0 && claim.suite.get() == 0).then_some((claim.offer.get(), claim.tag)),
            }),
        })
    }

    pub(super) fn set_send_buffer(&self, bytes: usize) {
        let _ = begin_with_send_buffer(&self.socket, bytes);
    }

    pub(super) fn is_parked(&self) -> bool {
        matches!(self.state, State::Parked)
    }

    /// Since when nothing has changed.
    pub(super) fn idle_since(&self) -> Instant {
        self.progress.1
    }

    /// Whether its socket is of the claim's flow, and can send at once.
    pub(super) fn can_take(&self, claim: &Claim) -> bool {
        let same_flow = claim.flow.first == 0
            && claim.flow.token.get() == self.rcv_nxt
            && self.is_with_server_of(claim)
            && self.mss >= claim.flow.mss.get();
        // Bytes that are not acknowledged here were acknowledged to the frontend, whose copy of that ACK was lost:
        // sent again, they would land in the next payload's sequence space.
        let settled =
            !matches!(self.state, State::Sending(_)) && unacknowledged(&self.socket).is_ok_and(|bytes| bytes == 0);
        same_flow && settled
    }

    /// Whether its client's connection with another server than the claim's still waits for bytes. Both connections'
    /// packets would have the same addresses here.
    pub(super) fn sends_for_another(&self, claim: &Claim) -> bool {
        let is_unfinished = || match self.state {
            State::Sending(_) => true,
            State::Draining(_) => unacknowledged(&self.socket).is_ok_and(|bytes| bytes > 0),
            State::Parked => false,
        };
        // A client's reset has closed the socket.
        !self.is_with_server_of(claim) && is_unfinished() && rustix::net::getpeername(&self.socket).is_ok()
    }

    fn is_with_server_of(&self, claim: &Claim) -> bool {
        self.server.address == claim.flow.server_address && self.server.port_be == claim.flow.server_port
    }

    /// Brings a parked socket up to date for a claim. `window`: the field of the newest ACK that it got.
    pub(super) fn reuse(
        &mut self,
        claim: &Claim,
        claimant: Claimant,
        window: u32,
        now: Instant,
    ) -> Result<Slot, RepairError> {
        self.claimant = claimant;
        self.length = claim.length.get();
        self.progress = (0, now);
        self.ts_delta = self.raised_ts_delta(claim);
        self.correct_window(claim, window)?;
        Ok(self.slot(claim))
    }

    fn slot(&self, claim: &Claim) -> Slot {
        Slot {
            server: self.server,
            live: true,
            start: claim.flow.start.get(),
            seq_delta: claim.flow.start.get().wrapping_sub(self.write_seq),
            ts_delta: self.ts_delta,
            rcv_nxt: self.rcv_nxt,
            ack: claim.flow.rcv_nxt.get(),
            snd_cwnd: 0,
            ts_recent: claim.flow.ts_recent.get(),
            ahead: claim.flow.ahead.get(),
        }
    }

    /// The client must never see our timestamps go back (RFC 7323, 5.3): follow the frontend's clock, forward only.
    fn raised_ts_delta(&self, claim: &Claim) -> u32 {
        let ours = clock_ms().wrapping_add(self.ts_offset).wrapping_add(self.ts_delta);
        let behind = claim.flow.tsval.get().wrapping_sub(ours) as i32;
        self.ts_delta.wrapping_add(behind.max(0) as u32)
    }

    /// The socket knows the window as its last ACK had it; since then the frontend has sent into it, and the client
    /// may have opened it. Where that matters for this payload, the socket is told.
    fn correct_window(&self, claim: &Claim, field: u32) -> Result<(), RepairError> {
        let scale = if claim.flow.options & FlowState::WSCALE != 0 { claim.flow.snd_wscale } else { 0 };
        let (believed, really) = (u64::from(field) << scale, u64::from(claim.flow.snd_wnd.get()));
        let length = claim.region_bytes().unwrap_or(u64::MAX);
        if believed.min(length) == really.min(length) {
            return Ok(());
        }
        set_window(&self.socket, self.rcv_nxt, claim.flow.snd_wnd.get(), RCV_WND)
    }

    /// Begins with a body.
    pub(super) fn begin(&mut self, body: Body, claim: &Claim, now: Instant) {
        let is_wanted = claim.flow.options & FlowState::DIGEST != 0;
        self.begun = now;
        self.digest = if is_wanted { Digest::Wanted } else { Digest::Unwanted };
        self.word = if claim.flow.options & FlowState::WORD != 0 { Word::Owed } else { Word::Unwanted };
        self.state = State::Sending(body);
    }

    /// What it sends, if anything.
    pub(super) fn payload(&self) -> Option<&Payload> {
        match &self.state {
            State::Sending(body) | State::Draining(body) => Some(body.payload()),
            State::Parked => None,
        }
    }

    /// Whether it comes no further until a read has ended, or its frontend answers, though its socket may take more.
    pub(super) fn is_waiting(&self) -> bool {
        let waits = |payload: &Payload| payload.is_reading() || payload.is_withheld();
        matches!(&self.state, State::Sending(body) if waits(body.payload()))
    }

    /// Its frontend has been told which file it sends, or that this is not known any more.
    pub(super) fn settle_news(&mut self, is_known: bool, now: Instant) {
        let State::Sending(body) = &self.state else {
            self.digest = if is_known { Digest::Told } else { Digest::Unwanted };
            return;
        };
        if is_known {
            body.set_told(true);
        }
        self.digest = match self.digest {
            _ if is_known => Digest::Told,
            Digest::Withdrawn { again, .. } => Digest::Withdrawn { told: now, again: again * 2 },
            _ if body.payload().is_withheld() => Digest::Withdrawn { told: now, again: WITHDRAW_AGAIN },
            _ => Digest::Unwanted,
        };
    }

    /// Its frontend knows that the digest is withdrawn: whether that was so.
    pub(super) fn go_on_unproven(&mut self) -> bool {
        let State::Sending(body) = &self.state else { return false };
        let was_withdrawn = matches!(self.digest, Digest::Withdrawn { .. });
        if was_withdrawn {
            body.set_told(false);
            self.digest = Digest::Unwanted;
        }
        was_withdrawn
    }

    /// A read has ended: whether it was this sender's.
    pub(super) fn take_read(&mut self, done: Done) -> Result<bool, Reason> {
        match &mut self.state {
            State::Sending(body) => body.payload_mut().take_read(done),
            State::Draining(_) | State::Parked => Ok(false),
        }
    }

    /// Whether its frontend should be told about its file now: which one it is, or that this is not known any more.
    pub(super) fn has_news(&self, now: Instant) -> bool {
        match self.digest {
            Digest::Unwanted => false,
            Digest::Wanted => now.duration_since(self.begun) >= DIGEST_AFTER,
            Digest::Told => self.payload().is_some_and(|payload| payload.file().is_none()),
            Digest::Withdrawn { told, again } => now.duration_since(told) >= again,
        }
    }

    /// `rate` in bytes a second, 0: no limit.
    pub(super) fn pace(&mut self, rate: u64) {
        if rate == 0 && !self.paced {
            return;
        }
        self.paced = rate != 0;
        let _ = set_max_pacing_rate(&self.socket, (rate != 0).then_some(rate));
    }

    /// Notes which ACKs the claim's flow passes on; `true` where it is time to see whether those are the right ones.
    pub(super) fn note_spacing(&mut self, claim: &Claim) -> bool {
        let known = claim.flow.ack_spacing.get();
        self.spacing.is(known);
        self.payloads = self.payloads.wrapping_add(1);
        known == 0 || self.payloads.is_multiple_of(LOOK_EVERY)
    }

    /// What the frontend should know, where it passes on many more ACKs than this sender needs, or too few.
    pub(super) fn advice(&mut self) -> Option<Spacing> {
        let bytes = self.spacing.news(&self.socket)?.into();
        let Endpoint { address: client_address, port_be: client_port } = self.key.client;
        let Endpoint { address: server_address, port_be: server_port } = self.server;
        Some(Spacing { client_address, server_address, client_port, server_port, bytes })
    }

    /// Gives the socket what it takes: how many bytes that were, and whether the payload is queued as a whole.
    pub(super) fn send(&mut self, workbench: &mut Workbench, now: Instant) -> (u64, Result<bool, Reason>) {
        let State::Sending(body) = &mut self.state else {
            return (0, Ok(true));
        };
        let before = body.remaining();
        let outcome = body.send_to(&self.socket, workbench);
        let sent = before - body.remaining();
        self.write_seq = self.write_seq.wrapping_add(sent as u32);
        self.progress.1 = now;
        if outcome == Ok(true) {
            let State::Sending(body) = std::mem::replace(&mut self.state, State::Parked) else {
                unreachable!("just matched")
            };
            self.state = State::Draining(body);
        }
        (sent, outcome)
    }

    /// After a look: what its first payload has come to, once. A client that has no room is sent nothing, and is not silent.
    pub(super) fn first_word(&mut self, now: Instant) -> Option<FirstWord> {
        let unheard = self.unheard.as_ref()?;
        let word = if self.progress.0 < self.write_seq.wrapping_sub(unheard.first) {
            FirstWord::Answered
        } else if now >= unheard.due && congestion_window(&self.socket).is_ok_and(|window| window.in_flight > 0) {
            FirstWord::Silent(unheard.offer)
        } else {
            return None;
        };
        self.unheard = None;
        Some(word)
    }

    /// As which server it sends.
    pub(super) fn server(&self) -> Endpoint {
        self.server
    }

    /// Parks it where all is acknowledged, and says what is to become of it.
    pub(super) fn look(&mut self, now: Instant, limits: &SenderLimits) -> Verdict {
        // Nothing changes there, and there may be very many: not worth a system call.
        if self.is_parked() {
            let waited = now.duration_since(self.progress.1);
            return if waited > limits.park { Verdict::Close } else { Verdict::Keep };
        }
        let Ok(outstanding) = unacknowledged(&self.socket) else {
            return Verdict::Close;
        };
        if outstanding != self.progress.0 {
            self.progress = (outstanding, now);
        }
        let waited = now.duration_since(self.progress.1);
        match &self.state {
            State::Draining(body) if outstanding == 0 => {
                let unchanged = body.is_unchanged();
                self.state = State::Parked;
                if unchanged { Verdict::Keep } else { Verdict::Fail(Reason::FileChanged) }
            }
            // Not the client's fault: another backend may have the rest.
            _ if waited > limits.progress && self.is_waiting() => Verdict::Fail(Reason::Socket),
            _ if waited > limits.progress => Verdict::Fail(Reason::NoProgress),
            _ => Verdict::Keep,
        }
    }
}
