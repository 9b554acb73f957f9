//! Whether a new socket's client acknowledges anything: what its agent learns from, and offers that are given back where it
//! does not.

use std::fs::File;
use std::time::Instant;

use shunt_wire::local::{Offer, Reason};
use shunt_wire::{Endpoint, Tag};

use super::connection::{FirstWord, State};
use super::{Failure, SenderTable, Senders};
use crate::body::Body;
use crate::identity::FileIdentity;

/// What a client has answered to the first payload that a socket was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstAnswer {
    /// Index of the session's peer.
    pub peer: u32,
    /// The client.
    pub client: Endpoint,
    /// As which server it was sent to.
    pub server: Endpoint,
    /// Whether it acknowledges anything.
    pub acknowledges: bool,
}

/// An offer that was claimed, and of which nothing has reached its client.
#[derive(Debug)]
pub struct Unsent {
    /// As it was made.
    pub offer: Offer,
    /// Its file.
    pub file: File,
    /// What the file must be, where others rely on its bytes.
    pub proven: Option<FileIdentity>,
}

impl<T: SenderTable> Senders<T> {
    /// Notes what a new socket's client answers. One that acknowledges nothing ends there, where its offer can be given back.
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
        let (State::Sending(Body::Plain(payload)) | State::Draining(Body::Plain(payload))) = self.withdraw(index)
        else {
            return;
        };
        if let Some((mut offer, file, proven)) = payload.into_offer(length) {
            (offer.peer, offer.number, offer.tag, offer.trace) = (claimant.peer, number, tag, claimant.trace);
            self.unsent.push(Unsent { offer, file, proven });
        }
    }

    /// What clients have answered to the first payloads of their sockets, since the last call.
    pub fn take_answers(&mut self) -> Vec<FirstAnswer> {
        std::mem::take(&mut self.answers)
    }

    /// Offers that [`Failure`]s with [`Reason::Unreachable`] are of: whoever claimed them may have them otherwise.
    pub fn take_unsent(&mut self) -> Vec<Unsent> {
        std::mem::take(&mut self.unsent)
    }
}
