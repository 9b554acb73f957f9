//! A backend's socket for a client: a TCP sender with its own sequence space, and the steering programs' state of it. A
//! *claim* is a frontend's message that asks for a payload. An *offer* is a payload that a backend's server holds
//! ready. The *digest* of a file is its SHA-256. A *copy* is a client's packet that the frontend has rewritten for this
//! socket. A *payload* is the body of a response. The *steering programs* are Shunt's BPF programs, here those of the
//! backend.

use std::time::Duration;

use shunt_decisions::{self as decisions, Packet, SENDER_LIVE, SENDER_WORD, SenderSlot, TH_ACK};
use shunt_wire::flow::FlowState;
use shunt_wire::local::Offer;
use shunt_wire::peer::{Claim, Claimant};

use crate::client::WSCALE;
use crate::content::{Run, Source};
use crate::flow::{Copy, SEGMENT};

/// Most unacknowledged bytes that the kernel takes from the agent.
const BUFFER: u64 = 256 << 10;
/// Time without progress after which all bytes that are sent and not acknowledged are sent again.
const TIMEOUT: Duration = Duration::from_millis(300);
/// Longest time without progress (`progress` in the agent's configuration).
const PROGRESS: Duration = Duration::from_secs(60);

/// Result of a sender's check by the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The sender goes on.
    Goes,
    /// The client has acknowledged nothing for too long.
    NoProgress,
}

/// Source of a payload's bytes.
#[derive(Clone, Copy, Debug)]
pub enum Of {
    /// The file of an offer.
    File {
        /// The offer.
        offer: Offer,
        /// Number of the file.
        file: u64,
        /// State of the file when the payload began. After a withdrawn digest: its state when the withdrawal was
        /// confirmed.
        state: u64,
        /// State of the file for which the backend has told a frontend the digest. `None`: it has told none.
        proven: Option<u64>,
    },
    /// The store of the backend's machine.
    Store,
}

/// A frontend's knowledge of the digest of a payload's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Digest {
    /// The frontend has not asked.
    Unasked,
    /// The frontend has asked, and was not told yet.
    Untold,
    /// The frontend was told the digest of the file in this state.
    Told(u64),
    /// The backend last said at this time that the digest no longer holds. The backend encrypts nothing more until the
    /// frontend's server has confirmed this.
    Withdrawn(Duration),
    /// There is no digest, or it no longer counts.
    Never,
}

/// One sender, for one payload.
pub struct Sender {
    /// Numbers of the peer that made the claim, of the server connection there (worker number), and of the handoff.
    pub claimant: Claimant,
    /// The payload: `length` bytes of the contents with the number `content`, from place `from` on.
    content: u64,
    from: u64,
    length: u64,
    slot: SenderSlot,
    /// Sequence number of the payload's first byte, in the sender's own space (`first`) and in the client's (`start`).
    first: u32,
    start: u32,
    /// Number of payload bytes that are acknowledged, number that are sent, and number that the kernel has taken from
    /// the agent.
    acked: u64,
    sent: u64,
    queued: u64,
    window: u64,
    wants_word: bool,
    has_given_word: bool,
    /// The agent has ended. The kernel sends the bytes that it has, and then closes the socket.
    is_orphan: bool,
    /// Source of the payload's bytes.
    pub of: Of,
    /// Time at which the payload began.
    pub begun: Duration,
    /// The frontend's knowledge of the digest of the payload's file.
    pub digest: Digest,
    /// Number of the sender, different for each sender of a history (simulated run). Events for an earlier sender are
    /// dropped.
    pub number: u64,
    /// The client has acknowledged something of this payload, or of an earlier one of the same connection.
    pub is_heard: bool,
    /// Time at which the client last acknowledged more, or, before that, at which the payload began.
    progress: Duration,
    /// Time at which the client last acknowledged more, or bytes were last sent again, or, before both, at which the
    /// payload began.
    timer: Duration,
}

impl Sender {
    /// Returns a sender for a claim's payload: bytes of the contents with the number `content`, from place `from` on.
    /// `own` is the socket's next sequence number.
    pub fn new(claim: &Claim, claimant: Claimant, content: u64, from: u64, own: u32, now: Duration) -> Self {
        let (start, length) = (claim.flow.start.get(), claim.region_bytes().unwrap_or(0));
        let wants_word = claim.flow.options & FlowState::WORD != 0;
        let word = if wants_word { SENDER_WORD } else { 0 };
        let slot = SenderSlot {
            live: (SENDER_LIVE | word) as u16,
            start,
            seq_delta: start.wrapping_sub(own),
            rcv_nxt: claim.flow.token.get(),
            ack: claim.flow.rcv_nxt.get(),
            end: own.wrapping_add(length as u32),
            sent: own,
            edge: own.wrapping_add(claim.flow.ahead.get()),
            acked: own,
            ..SenderSlot::default()
        };
        Self {
            claimant,
            content,
            from,
            length,
            slot,
            first: own,
            start,
            acked: 0,
            sent: 0,
            queued: 0,
            window: claim.flow.snd_wnd.get().into(),
            wants_word,
            has_given_word: false,
            is_orphan: false,
            of: Of::Store,
            begun: now,
            digest: if claim.flow.options & FlowState::DIGEST != 0 { Digest::Untold } else { Digest::Unasked },
            number: 0,
            is_heard: false,
            progress: now,
            timer: now,
        }
    }

    /// Has the agent give the kernel as many bytes as the kernel takes. An agent that has ended, or that waits for the
    /// confirmation of a withdrawal, gives none.
    pub fn queue(&mut self) {
        if !self.is_orphan && !matches!(self.digest, Digest::Withdrawn(_)) {
            self.queued = self.length.min(self.acked + BUFFER);
        }
    }

    /// Notes that the agent has ended.
    pub fn orphan(&mut self) {
        self.is_orphan = true;
    }

    /// Returns whether the agent that the sender belonged to has ended.
    pub fn is_orphan(&self) -> bool {
        self.is_orphan
    }

    /// Returns whether the kernel has the whole payload.
    pub fn is_queued(&self) -> bool {
        self.queued == self.length
    }

    /// Returns whether the client has acknowledged all bytes that the sender will ever send.
    pub fn is_done(&self) -> bool {
        self.acked == if self.is_orphan { self.queued } else { self.length }
    }

    /// Sends as much as the client's window allows. After a time without progress, sends all unacknowledged bytes
    /// again. Returns the segments as the client gets them: sequence number and contents.
    pub fn send(&mut self, now: Duration) -> Vec<(u32, Run)> {
        if self.sent > self.acked && now >= self.timer + TIMEOUT {
            self.sent = self.acked;
            self.timer = now;
        }
        let mut segments = Vec::new();
        let end = self.queued.min(self.acked + self.window);
        while self.sent < end {
            let length = SEGMENT.min(end - self.sent);
            let packet = Packet {
                seq: self.first.wrapping_add(self.sent as u32),
                payload_bytes: length as u32,
                flags: TH_ACK as u8,
                ..Packet::default()
            };
            decisions::note_sent(&mut self.slot, &packet);
            let run = Run { source: Source::File(self.content), from: self.from + self.sent, length };
            segments.push((self.start.wrapping_add(self.sent as u32), run));
            self.sent += length;
        }
        segments
    }

    /// Handles a copy of the client's packet. Returns whether the agent must now tell the frontend that the whole
    /// payload is acknowledged.
    pub fn hear(&mut self, copy: &Copy, now: Duration) -> bool {
        let packet = &copy.packet;
        if decisions::is_made_up(&self.slot, packet, copy.token) || decisions::acknowledges_unsent(&self.slot, packet) {
            return false;
        }
        let (own, _) = decisions::take_ack(&mut self.slot, packet.ack);
        let acked = u64::from(own.wrapping_sub(self.first));
        if acked > self.acked && acked <= self.length.min(self.queued) {
            self.acked = acked;
            self.window = u64::from(packet.window) << WSCALE;
            self.is_heard = true;
            self.sent = self.sent.max(acked);
            self.progress = now;
            self.timer = now;
        }
        let gives_word = self.wants_word && self.acked == self.length && !self.has_given_word && !self.is_orphan;
        self.has_given_word |= gives_word;
        gives_word
    }

    /// Checks the sender by the clock.
    pub fn look(&self, now: Duration) -> Look {
        if !self.is_done() && now >= self.progress + PROGRESS { Look::NoProgress } else { Look::Goes }
    }

    /// Returns the length of the payload as the client gets it, in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns the number of bytes that the client has acknowledged.
    pub fn acked(&self) -> u64 {
        self.acked
    }

    /// Returns whether the sender belongs to the connection with this token (random bits that the frontend has given to
    /// the connection).
    pub fn is_of(&self, token: u32) -> bool {
        self.slot.rcv_nxt == token
    }

    /// Returns the number of the contents that the sender sends.
    pub fn content(&self) -> u64 {
        self.content
    }

    /// Returns the sequence number of the payload's first byte in the client's space.
    pub fn start(&self) -> u32 {
        self.start
    }

    /// Returns the sender's own sequence number after this payload, at which the next payload begins.
    pub fn next_own(&self) -> u32 {
        self.first.wrapping_add(self.length as u32)
    }
}
