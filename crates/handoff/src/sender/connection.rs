//! One sender: its socket, the socket's sequence numbers, and the state of its payload. A *claim* is the message by
//! which a frontend's agent asks for a payload; an *offer* is the file range that the claim names, if it names one. The
//! *digest* of the payload's file lets another backend prove that its file is the same. The *word* tells the frontend
//! that the end of the payload is acknowledged. A socket is *parked* while it waits for its connection's next payload.
//!
//! The socket counts on in its own sequence space from payload to payload. A [`Slot`] says where a payload lies in the
//! client's sequence space. When the next payload begins, the socket is told the client's window if that matters, and
//! its timestamps are moved forward to the frontend's.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use shunt_sys::repair::{RepairError, Restored, clock_ms};
use shunt_wire::flow::FlowState;
use shunt_wire::local::Reason;
use shunt_wire::peer::{Claim, Spacing};
use shunt_wire::{Endpoint, Tag};

use super::{Claimant, SenderKey, SenderLimits, Slot};
use crate::body::Body;
use crate::flow_sender::{FlowSender, KernelSocket};
use crate::payload::Payload;
use crate::reading::Done;
use crate::spacing;
use crate::tls13::workbench::Workbench;

/// State of the word by which a frontend learns that the end of a payload is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// The frontend needs no word: the client's ACK is enough.
    Unwanted,
    /// The frontend waits for the word.
    Owed,
    /// The frontend has been told.
    Given,
}

/// Receive window of a sender's socket, in bytes. The socket never receives data. But its segments offer this window to
/// the client, and a window that was offered may not become smaller.
const RCV_WND: u32 = 65535;
/// Number of payloads of a connection after which it is examined again how many ACKs the sender needs.
const LOOK_EVERY: u32 = 16;
/// Time after which a payload's frontend is told the digest of the payload's file. For a shorter payload a digest is
/// not worth computing.
const DIGEST_AFTER: Duration = Duration::from_secs(1);
/// Pause after which a frontend that has not answered is told again that a digest is withdrawn. The frontend's server
/// may not have taken the first message. The pause doubles each time.
const WITHDRAW_AGAIN: Duration = Duration::from_secs(1);
/// Time, in addition to four round trips, that a client may take to acknowledge anything from a new socket. A tail
/// probe is sent after one second, and the first retransmission after three.
const ANSWER_WITHIN: Duration = Duration::from_millis(1500);

pub(super) enum State {
    /// The payload's bytes are being queued.
    Sending(Body),
    /// All bytes are queued, and not known to be acknowledged. The body stays until its file is examined a last time.
    Draining(Body),
    /// Nothing is outstanding.
    Parked,
}

/// Whether a payload's frontend knows which file the payload is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Digest {
    /// The frontend does not want to know, or will never be told.
    Unwanted,
    /// The frontend is to be told once the payload has been under way for a while.
    Wanted,
    /// The frontend has been told.
    Told,
    /// The frontend was told, at the time `told`, that the digest does not hold any more. It is told again after
    /// `again`. No TLS record is sealed until it answers.
    Withdrawn { told: Instant, again: Duration },
}

/// Action for a sender that has been examined.
pub(super) enum Verdict {
    Keep,
    Close,
    Fail(Reason),
}

pub(super) struct Sender {
    pub(super) key: SenderKey,
    pub(super) flow: Box<dyn FlowSender>,
    pub(super) claimant: Claimant,
    pub(super) state: State,
    pub(super) server: Endpoint,
    /// Next sequence number of the socket, in its own sequence space (the kernel's `write_seq`).
    pub(super) write_seq: u32,
    /// Next sequence number that the socket expects. It is constant, because the socket never receives data. Its value
    /// is the token of the client's connection: a random number, of which each packet from the frontend carries half.
    rcv_nxt: u32,
    /// Offset of the socket's timestamp clock from [`clock_ms`].
    ts_offset: u32,
    /// Number that the steering programs add to the socket's timestamps.
    ts_delta: u32,
    /// Largest segment of the socket, in bytes without options.
    mss: u16,
    /// Whether the socket's rate is limited now.
    paced: bool,
    /// Length of the payload, in bytes.
    pub(super) length: u64,
    pub(super) digest: Digest,
    /// Time when sending of the payload began.
    pub(super) begun: Instant,
    pub(super) word: Word,
    /// Number of payloads so far.
    payloads: u32,
    /// Spacing: number of payload bytes between two of the client's ACKs that the frontend passes on to this sender.
    spacing: spacing::Spacing,
    /// Number of unacknowledged bytes, and the time when that number last changed or bytes were queued.
    progress: (u32, Instant),
    /// `Some` until the client is known to acknowledge something, or known not to.
    unheard: Option<Unheard>,
}

/// A socket whose client has acknowledged nothing yet.
struct Unheard {
    /// First sequence number of the socket.
    first: u32,
    /// Time by which something must have been acknowledged.
    due: Instant,
    /// Number and tag of the offer that the socket began with. `None` if there is none, or if it cannot be given back
    /// because the connection is one of TLS.
    offer: Option<(u64, Tag)>,
}

/// Outcome of the first payload of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstWord {
    /// The client acknowledges.
    Answered,
    /// The client acknowledges nothing, though bytes were sent. Holds the offer's number and tag, if the offer can be
    /// given back.
    Silent(Option<(u64, Tag)>),
}

/// Slot of a sender whose socket begins with `claim`: the socket counts as the client does.
pub(super) fn first_slot(claim: &Claim) -> Slot {
    Slot {
        server: Endpoint { address: claim.flow.server_address, port_be: claim.flow.server_port },
        live: true,
        start: claim.flow.start.get(),
        seq_delta: 0,
        // The socket takes only an even timestamp (Restored::tsval). The client is to see the frontend's timestamp, so
        // its lowest bit is added.
        ts_delta: claim.flow.tsval.get() & 1,
        rcv_nxt: claim.flow.token.get(),
        ack: claim.flow.rcv_nxt.get(),
        snd_cwnd: claim.flow.snd_cwnd.get(),
        ts_recent: claim.flow.ts_recent.get(),
        ahead: claim.flow.ahead.get(),
    }
}

impl Sender {
    /// Makes the socket that `slot` describes. `slot` comes from [`first_slot`].
    pub(super) fn restore(
        key: SenderKey,
        slot: &Slot,
        claim: &Claim,
        claimant: Claimant,
        local: SocketAddr,
        now: Instant,
    ) -> Result<Self, RepairError> {
        let timestamps = claim.flow.options & FlowState::TIMESTAMPS != 0;
        let (socket, ts_offset) = KernelSocket::restore(&Restored {
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
            flow: Box::new(socket),
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

    pub(super) fn is_parked(&self) -> bool {
        matches!(self.state, State::Parked)
    }

    /// Time since which nothing has been queued or acknowledged.
    pub(super) fn idle_since(&self) -> Instant {
        self.progress.1
    }

    /// Whether the socket belongs to the claim's connection, has segments that are large enough, and can send at once.
    pub(super) fn can_take(&self, claim: &Claim) -> bool {
        let same_flow = claim.flow.first == 0
            && claim.flow.token.get() == self.rcv_nxt
            && self.is_with_server_of(claim)
            && self.mss >= claim.flow.mss.get();
        // The claim means that the client has acknowledged the last payload. If the socket still has outstanding bytes,
        // the frontend's copy of that ACK was lost. If the socket repeated those bytes, they would leave with numbers
        // that are right for the next payload only.
        let settled =
            !matches!(self.state, State::Sending(_)) && self.flow.unacknowledged().is_ok_and(|bytes| bytes == 0);
        same_flow && settled
    }

    /// Whether this sender is still busy on the client's connection with another server than the claim's. Packets of
    /// both connections would have the same addresses here.
    pub(super) fn sends_for_another(&self, claim: &Claim) -> bool {
        let is_unfinished = || match self.state {
            State::Sending(_) => true,
            State::Draining(_) => self.flow.unacknowledged().is_ok_and(|bytes| bytes > 0),
            State::Parked => false,
        };
        !self.is_with_server_of(claim) && is_unfinished() && self.flow.is_open()
    }

    fn is_with_server_of(&self, claim: &Claim) -> bool {
        self.server.address == claim.flow.server_address && self.server.port_be == claim.flow.server_port
    }

    /// Prepares a socket, which has nothing outstanding, for the payload of a claim. `window` is the window field of
    /// the newest ACK that the socket got.
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

    /// Returns the number to add to the socket's timestamps from this claim on. The client must never see our
    /// timestamps go back (RFC 7323, 5.3). So they follow the frontend's clock, but only forward.
    fn raised_ts_delta(&self, claim: &Claim) -> u32 {
        let ours = clock_ms().wrapping_add(self.ts_offset).wrapping_add(self.ts_delta);
        let behind = claim.flow.tsval.get().wrapping_sub(ours) as i32;
        self.ts_delta.wrapping_add(behind.max(0) as u32)
    }

    /// Tells the socket the client's window if that matters for this payload. The socket knows the window from its last
    /// ACK, with the window field `field`. Since then the frontend has sent into the window, and the client may have
    /// opened it.
    fn correct_window(&self, claim: &Claim, field: u32) -> Result<(), RepairError> {
        let scale = if claim.flow.options & FlowState::WSCALE != 0 { claim.flow.snd_wscale } else { 0 };
        let (believed, really) = (u64::from(field) << scale, u64::from(claim.flow.snd_wnd.get()));
        let length = claim.region_bytes().unwrap_or(u64::MAX);
        if believed.min(length) == really.min(length) {
            return Ok(());
        }
        self.flow.set_window(claim.flow.snd_wnd.get())
    }

    /// Begins to send a body.
    pub(super) fn begin(&mut self, body: Body, claim: &Claim, now: Instant) {
        let is_wanted = claim.flow.options & FlowState::DIGEST != 0;
        self.begun = now;
        self.digest = if is_wanted { Digest::Wanted } else { Digest::Unwanted };
        self.word = if claim.flow.options & FlowState::WORD != 0 { Word::Owed } else { Word::Unwanted };
        self.state = State::Sending(body);
    }

    /// Payload that is being sent, if any.
    pub(super) fn payload(&self) -> Option<&Payload> {
        match &self.state {
            State::Sending(body) | State::Draining(body) => Some(body.payload()),
            State::Parked => None,
        }
    }

    /// Whether sending waits for a read to end or for the frontend to answer, though the socket may take more.
    pub(super) fn is_waiting(&self) -> bool {
        let waits = |payload: &Payload| payload.is_reading() || payload.is_withheld();
        matches!(&self.state, State::Sending(body) if waits(body.payload()))
    }

    /// Notes that the frontend has been told the digest of the file that is sent. With `is_known` false, the frontend
    /// was told instead that there is no digest, or none any more.
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

    /// Notes that the frontend knows that the digest is withdrawn. Returns whether it was withdrawn.
    pub(super) fn go_on_unproven(&mut self) -> bool {
        let State::Sending(body) = &self.state else { return false };
        let was_withdrawn = matches!(self.digest, Digest::Withdrawn { .. });
        if was_withdrawn {
            body.set_told(false);
            self.digest = Digest::Unwanted;
        }
        was_withdrawn
    }

    /// Takes the result of a read. Returns whether the read was this sender's.
    pub(super) fn take_read(&mut self, done: Done) -> Result<bool, Reason> {
        match &mut self.state {
            State::Sending(body) => body.payload_mut().take_read(done),
            State::Draining(_) | State::Parked => Ok(false),
        }
    }

    /// Whether the frontend should be told about the file now: its digest, or that the digest does not hold any more.
    pub(super) fn has_news(&self, now: Instant) -> bool {
        match self.digest {
            Digest::Unwanted => false,
            Digest::Wanted => now.duration_since(self.begun) >= DIGEST_AFTER,
            Digest::Told => self.payload().is_some_and(|payload| payload.file().is_none()),
            Digest::Withdrawn { told, again } => now.duration_since(told) >= again,
        }
    }

    /// Limits the rate at which the socket sends, in bytes per second. 0: no limit.
    pub(super) fn pace(&mut self, rate: u64) {
        if rate == 0 && !self.paced {
            return;
        }
        self.paced = rate != 0;
        self.flow.pace((rate != 0).then_some(rate));
    }

    /// Notes the spacing of ACKs that the frontend uses, as the claim says. Returns `true` if it is time to examine
    /// whether that spacing is right.
    pub(super) fn note_spacing(&mut self, claim: &Claim) -> bool {
        let known = claim.flow.ack_spacing.get();
        self.spacing.is(known);
        self.payloads = self.payloads.wrapping_add(1);
        known == 0 || self.payloads.is_multiple_of(LOOK_EVERY)
    }

    /// Spacing to tell the frontend, if it passes on many more ACKs than this sender needs, or too few.
    pub(super) fn advice(&mut self) -> Option<Spacing> {
        let bytes = self.spacing.news(&*self.flow)?.into();
        let Endpoint { address: client_address, port_be: client_port } = self.key.client;
        let Endpoint { address: server_address, port_be: server_port } = self.server;
        Some(Spacing { client_address, server_address, client_port, server_port, bytes })
    }

    /// Gives the socket as many bytes as it takes. Returns their number, and whether the whole payload is queued.
    pub(super) fn send(&mut self, workbench: &mut Workbench, now: Instant) -> (u64, Result<bool, Reason>) {
        let State::Sending(body) = &mut self.state else {
            return (0, Ok(true));
        };
        let before = body.remaining();
        let outcome = body.send_to(&*self.flow, workbench);
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

    /// Returns, once, the outcome of the socket's first payload. To be called after [`Self::look`]. A client without
    /// room is sent nothing, and so does not count as silent.
    pub(super) fn first_word(&mut self, now: Instant) -> Option<FirstWord> {
        let unheard = self.unheard.as_ref()?;
        let word = if self.progress.0 < self.write_seq.wrapping_sub(unheard.first) {
            FirstWord::Answered
        } else if now >= unheard.due && self.flow.congestion_window().is_ok_and(|window| window.in_flight > 0) {
            FirstWord::Silent(unheard.offer)
        } else {
            return None;
        };
        self.unheard = None;
        Some(word)
    }

    /// Endpoint of the server in whose name the sender sends.
    pub(super) fn server(&self) -> Endpoint {
        self.server
    }

    /// Examines the sender: parks it if all is acknowledged, and returns what is to be done with it.
    pub(super) fn look(&mut self, now: Instant, limits: &SenderLimits) -> Verdict {
        // A parked sender is not worth a system call: nothing changes in it, and there may be very many.
        if self.is_parked() {
            let waited = now.duration_since(self.progress.1);
            return if waited > limits.park { Verdict::Close } else { Verdict::Keep };
        }
        let Ok(outstanding) = self.flow.unacknowledged() else {
            return Verdict::Close;
        };
        if outstanding != self.progress.0 {
            self.progress = (outstanding, now);
        }
        let waited = now.duration_since(self.progress.1);
        match &self.state {
            State::Draining(body) if outstanding == 0 => {
                let unchanged = body.payload().is_unchanged();
                self.state = State::Parked;
                if unchanged { Verdict::Keep } else { Verdict::Fail(Reason::FileChanged) }
            }
            // The wait is not the client's fault: another backend may have the rest.
            _ if waited > limits.progress && self.is_waiting() => Verdict::Fail(Reason::Socket),
            _ if waited > limits.progress => Verdict::Fail(Reason::NoProgress),
            _ => Verdict::Keep,
        }
    }
}
