//! Whether a machine sends bytes of its store to clients of another, asked before a program there has it do so for the first
//! time. A handoff that is refused would be too late: the program may have written on behind it.
//!
//! ```text
//!   program --ASK--> frontend's agent ==ASK==> the store's agent: speaks_for, [store] readers, [backend]
//!           <-ANSWER-                 <=ANSWER=
//! ```

use std::net::{IpAddr, SocketAddr};

use shunt_wire::local::{self, Reason};
use shunt_wire::peer;
use zerocopy::IntoBytes;

use crate::agent::Agent;
use crate::hearing::{News, Question};
use crate::packets;

impl Agent {
    /// A program asks. Of a session that is gone there is no answer: with the next one it asks again.
    pub(crate) fn ask(&mut self, server: usize, ask: &local::Ask) {
        let index = ask.peer as usize;
        let worker = self.servers[server].worker;
        let current = self.board.epoch(index) == Some(ask.epoch);
        if !current || index >= self.peers.len() || !self.peers[index].is_up() {
            return;
        }
        if !self.may_ask(index, Question::Ask, worker, ask.handoff) {
            return self.tell_answer(server, index, ask.handoff, Reason::Limit as u32);
        }
        let Some(session) = self.peers[index].session() else { return };
        let question = peer::Ask {
            worker: worker.into(),
            zero: 0.into(),
            handoff: ask.handoff.into(),
            client_address: ask.client_address,
            server_address: ask.server_address,
            client_port: ask.client_port,
            server_port: ask.server_port,
        };
        question.emit(session.transport.output());
        self.mark_unsent(index);
    }

    /// Another agent asks.
    pub(crate) fn on_ask(&mut self, peer: usize, ask: &peer::Ask) {
        let client = ask.client_address.ip();
        let would = self.would_send(peer, ask.server().socket_addr(), client).and_then(|()| self.has_place());
        let would = would.and_then(|()| self.may_reach_from_here(peer, client));
        let reason = would.err().map_or(local::Answer::YES, |reason| reason as u32);
        self.answer(peer, ask.worker.get(), ask.handoff.get(), reason);
    }

    pub(crate) fn answer(&mut self, peer: usize, worker: u32, handoff: u64, reason: u32) {
        if let Some(session) = self.peers[peer].session() {
            let answer = peer::Answer { worker: worker.into(), reason: reason.into(), handoff: handoff.into() };
            answer.emit(session.transport.output());
            self.mark_unsent(peer);
        }
    }

    /// Whether this machine sends bytes of its store to a client, as that server, because the peer says so.
    pub(crate) fn would_send(&mut self, peer: usize, server: SocketAddr, client: IpAddr) -> Result<(), Reason> {
        self.may_speak_for(peer, server, client)?;
        let store = self.store.as_ref().ok_or(Reason::UnknownOffer)?;
        if store.config.lets_read(&self.peers[peer].name) { Ok(()) } else { Err(Reason::NotAllowed) }
    }

    /// Whether this machine sends anything so.
    pub(crate) fn may_speak_for(&mut self, peer: usize, server: SocketAddr, client: IpAddr) -> Result<(), Reason> {
        if self.config.backend.is_none() || self.senders.is_none() {
            return Err(Reason::UnknownOffer);
        }
        if self.config.peers[peer].may_have_sent(server, client) {
            return Ok(());
        }
        if self.failures.may_speak(self.now) {
            tracing::warn!(peer = self.peers[peer].name, %server, %client, "refused to send as that server (speaks_for)");
        }
        Err(Reason::NotAllowed)
    }

    /// The answer, for the program that asked, if it is there still.
    pub(crate) fn on_answer(&mut self, peer: usize, answer: &peer::Answer) {
        let (worker, handoff, reason) = (answer.worker.get(), answer.handoff.get(), answer.reason.get());
        if !self.is_heard(peer, Some((Question::Ask, worker, handoff)), News::Waits) {
            return;
        }
        self.counts.declined += u64::from(reason != local::Answer::YES);
        if let Some(server) = self.owner_of(worker) {
            self.tell_answer(server, peer, handoff, reason);
        }
    }

    fn tell_answer(&mut self, server: usize, peer: usize, handoff: u64, reason: u32) {
        let told = local::Answer { header: local::Answer::HEADER, handoff, reason, peer: peer as u32 };
        if !matches!(packets::send(&self.servers[server].socket, told.as_bytes(), &[]), Ok(true)) {
            self.counts.unread += 1;
        }
    }
}
