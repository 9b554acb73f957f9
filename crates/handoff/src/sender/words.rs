//! The *word*: the message to a frontend that the end of a payload is acknowledged. A payload that was handed off by
//! SHUNT_BEGIN (include/shunt.h) needs the word if it is longer than 1 MiB, or than its client had room for.
//!
//! A frontend sees what the client acknowledges, but not what has been sent. So it waits for this word, and a client
//! that waits for its next response waits too. be_in, the steering program on ingress, reports the ACK of the end as it
//! passes. If that report is lost, the next [`Senders::sweep`] finds the ACK.

use shunt_wire::Endpoint;
use shunt_wire::peer::Delivered;

use super::connection::{Sender, State, Word};
use super::{SenderKey, SenderTable, Senders};

impl Sender {
    fn delivered(&self) -> Delivered {
        let Endpoint { address: client_address, port_be: client_port } = self.key.client;
        let Endpoint { address: server_address, port_be: server_port } = self.server;
        let handoff = self.claimant.handoff.into();
        Delivered { handoff, client_address, server_address, client_port, server_port }
    }
}

impl<T: SenderTable> Senders<T> {
    /// If the frontend waits for a word, asks the programs to report the ACK of the payload's end. To be called once
    /// the whole payload is queued.
    pub(super) fn await_end(&mut self, index: usize) {
        let sender = &self.slots[index];
        if sender.word == Word::Owed {
            self.table.await_end(index as u32, sender.write_seq);
            self.give_word_if_due(index);
        }
    }

    /// Handles the programs' reports: the payloads of these senders may have been acknowledged up to their ends.
    pub fn on_reports(&mut self, reports: &[SenderKey]) {
        for key in reports {
            if let Some(&index) = self.by_key.get(key) {
                self.give_word_if_due(index);
            }
        }
    }

    /// Gives the word if the end is acknowledged. For a file that has changed no word is given, because the word
    /// confirms the promised bytes. The next sweep reports the change.
    fn give_word_if_due(&mut self, index: usize) {
        let sender = &self.slots[index];
        let State::Draining(body) = &sender.state else { return };
        if sender.word == Word::Owed
            && self.table.acked(index as u32) == sender.write_seq
            && body.payload().is_unchanged()
        {
            self.give_word(index);
        }
    }

    /// Queues the word that all of a payload is acknowledged, if it is owed.
    pub(super) fn give_word(&mut self, index: usize) {
        let sender = &mut self.slots[index];
        if std::mem::replace(&mut sender.word, Word::Given) == Word::Owed {
            self.words.push((sender.claimant.peer, sender.delivered()));
        }
    }

    /// Takes the words for frontends, each with the number of its peer.
    pub fn take_words(&mut self) -> Vec<(u32, Delivered)> {
        std::mem::take(&mut self.words)
    }

    /// Takes the reports that the programs have made since the last call.
    pub fn take_reports(&mut self) -> Vec<SenderKey> {
        self.table.take_reports()
    }
}
