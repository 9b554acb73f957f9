//! A backend's socket for a client: a TCP sender with its own sequence space, and its slot in the steering programs.

use std::time::Duration;

use shunt_decisions::{self as decisions, Packet, SENDER_LIVE, SENDER_WORD, SenderSlot, TH_ACK};
use shunt_wire::flow::FlowState;
use shunt_wire::local::Offer;
use shunt_wire::peer::{Claim, Claimant};

use crate::content::{Run, Source};
use crate::flow::{Copy, SEGMENT};

/// Most bytes that the kernel takes from the agent before they are acknowledged.
const BUFFER: u64 = 256 << 10;
/// Time without progress after which all outstanding bytes are sent again.
const TIMEOUT: Duration = Duration::from_millis(300);
/// Longest time without progress (`progress` in the agent's configuration).
const PROGRESS: Duration = Duration::from_secs(60);

/// Result of a sender's check by the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The sender continues.
    Goes,
    /// The client has acknowledged nothing for too long.
    NoProgress,
}

/// What a payload is of.
#[derive(Clone, Copy, Debug)]
pub enum Of {
    /// An offer's file in a state.
    File {
        /// The offer.
        offer: Offer,
        /// The file.
        file: u64,
        /// State of the file when the payload began.
        state: u64,
        /// State whose digest a frontend was told.
        proven: Option<u64>,
    },
    /// The store.
    Store,
}

/// What a frontend knows of the digest of a payload's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Digest {
    /// It has not asked.
    Unasked,
    /// It has asked, and was not told yet.
    Untold,
    /// It was told the digest of this state.
    Told(u64),
    /// The digest was taken back at this time. Nothing is sealed until the server knows.
    Withdrawn(Duration),
    /// There is no digest.
    Never,
}

/// One sender, for one payload.
pub struct Sender {
    /// Peer, worker and handoff of the claim.
    pub claimant: Claimant,
    /// The payload: `length` bytes of `content`, from the place `from` on.
    content: u64,
    from: u64,
    length: u64,
    slot: SenderSlot,
    /// Sequence number of the payload's first byte, in the sender's own space (`first`) and in the client's (`start`).
    first: u32,
    start: u32,
    /// Number of the payload's bytes that are acknowledged, that are sent, and that the kernel has.
    acked: u64,
    sent: u64,
    queued: u64,
    window: u64,
    wants_word: bool,
    has_given_word: bool,
    /// The agent has ended. The kernel sends the bytes that it has, and then closes the socket.
    is_orphan: bool,
    /// What the payload is of.
    pub of: Of,
    /// Time at which the payload began.
    pub begun: Duration,
    /// The frontend has asked for the digest of the file. What it knows of it.
    pub digest: Digest,
    /// Number of the sender among all of its machine. Events of earlier ones are dropped.
    pub number: u64,
    /// The client has acknowledged something.
    pub is_heard: bool,
    /// Time since when nothing more was acknowledged.
    progress: Duration,
    /// Time since when nothing was sent again.
    timer: Duration,
}

impl Sender {
    /// Begins to send a payload: bytes of `content`, from the place `from` on. `own` is the socket's next sequence
    /// number.
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

    /// Gives the kernel as many bytes as it takes, for the agent.
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

    /// Sends as much as the client's window allows. After a time without progress, it sends all outstanding bytes
    /// again. Returns the segments as the client gets them.
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

    /// Handles a copy of the client's packet. Returns whether the frontend is now to be given the word that the whole
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

    /// Returns whether copies for it have this token.
    pub fn is_of(&self, token: u32) -> bool {
        self.slot.rcv_nxt == token
    }

    /// Returns the contents that it sends.
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
