//! Whether the client of a new socket acknowledges anything. The agent learns from this which clients it can reach. A
//! *payload* is the body that a socket sends to its client, as a peer (a frontend's agent, the *claimant*) has claimed
//! it. An *offer* is a range of a file that a server holds ready as a payload. If the client acknowledges nothing, the
//! offer is given back.

use std::fs::File;
use std::time::Instant;

use shunt_wire::local::{Offer, Reason};
use shunt_wire::{Endpoint, Tag};

use super::connection::{FirstWord, State};
use super::{Failure, SenderTable, Senders};
use crate::identity::FileIdentity;

/// Answer of a client to the first payload of a new socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstAnswer {
    /// Number of the peer that claimed the payload.
    pub peer: u32,
    /// The client.
    pub client: Endpoint,
    /// Server in whose name the payload was sent.
    pub server: Endpoint,
    /// Whether the client acknowledges anything.
    pub acknowledges: bool,
}

/// An offer that was claimed, but of which the client has acknowledged nothing.
#[derive(Debug)]
pub struct Unsent {
    /// The offer as it was made.
    pub offer: Offer,
    /// The offer's file.
    pub file: File,
    /// Identity that the file must have, if the claimant relies on the file's digest (SHA-256).
    pub proven: Option<FileIdentity>,
}

impl<T: SenderTable> Senders<T> {
    /// Notes whether a new socket's client acknowledges anything. If it does not, and the offer can be given back, the
    /// sender is ended.
    pub(super) fn hear(&mut self, index: usize, now: Instant) -> Option<Failure> {
        let sender = &mut self.slots[index];
        let word = sender.first_word(now)?;
        let (claimant, client, server) = (sender.claimant, sender.key.client, sender.server());
        let acknowledges = word == FirstWord::Answered;
        self.answers.push(FirstAnswer { peer: claimant.peer, client, server, acknowledges });
        let FirstWord::Silent(Some(offer)) = word else { return None };
        self.give_back(index, offer);
        Some(Failure { claimant, reason: Reason::Unreachable })
    }

    fn give_back(&mut self, index: usize, (number, tag): (u64, Tag)) {
        let (claimant, length) = (self.slots[index].claimant, self.slots[index].length);
        let (State::Sending(body) | State::Draining(body)) = self.withdraw(index) else { return };
        if let Some((mut offer, file, proven)) = body.into_payload().into_offer(length) {
            (offer.peer, offer.number, offer.tag, offer.trace) = (claimant.peer, number, tag, claimant.trace);
            self.unsent.push(Unsent { offer, file, proven });
        }
    }

    /// Takes the clients' answers that were noted since the last call.
    pub fn take_answers(&mut self) -> Vec<FirstAnswer> {
        std::mem::take(&mut self.answers)
    }

    /// Takes the offers that were given back since the last call. Their handoffs have failed with
    /// [`Reason::Unreachable`]. The claimants may get these payloads by other means.
    pub fn take_unsent(&mut self) -> Vec<Unsent> {
        std::mem::take(&mut self.unsent)
    }
}
