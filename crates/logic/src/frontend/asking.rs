//! Questions of this machine's servers to other agents, and the agents' answers. A *peer* is another machine's agent,
//! and a *session* the use of the connection with it. A *store* has the payloads of a machine's programs under `shunt
//! run`. An *offer* is a payload that a backend holds ready. The *digest* of a file is its SHA-256. A *handoff* lets a
//! backend send a payload on the connection of a server's client, and a *claim* asks the backend's agent for this
//! payload.
//!
//! ASK: would another machine send bytes of its store to a client of this machine? A program asks before its first
//! handoff of such bytes. A refusal of the handoff itself would come too late, because the program may already have
//! written more bytes after the payload.
//!
//! ```text
//!   program --ASK--> frontend's agent ==ASK==> the store's agent, which checks its settings
//!           <-ANSWER-                 <=ANSWER=  (speaks_for, [store] readers, [backend])
//! ```
//!
//! PROVE: what is the digest of the file behind an offer? A server asks before another backend continues the payload of
//! a lost backend. The module `backend::questions` says why.

use shunt_wire::local;
use shunt_wire::local::Reason;
use shunt_wire::peer;

use super::Frontend;
use crate::action::{Action, Told};
use crate::backend::questions::digest;
use crate::machine::Machine;
use crate::peers::hearing::{News, Question};
use crate::turn::Turn;

impl<M: Machine> Turn<'_, M> {
    /// Returns whether a peer's message answers a server's question, or is one that the peer may send unasked. Any
    /// other message is counted here, and the caller drops it.
    pub(crate) fn hear(&mut self, peer: usize, answer: Option<(Question, u32, u64)>, news: News) -> bool {
        let is_heard = self.shared.peers.peer(peer).hearing.hear(answer, news);
        self.shared.counts.unasked += u64::from(!is_heard);
        is_heard
    }

    /// Returns a server's worker number (the agent's number of the server's connection), if `epoch` names the present
    /// session with the peer.
    fn asker(&self, server: usize, peer: usize, epoch: u32) -> Option<u32> {
        let is_current = self.shared.board.epoch(peer) == Some(epoch) && self.shared.peers.is_up(peer);
        self.shared.servers.find(server).filter(|_| is_current).map(|server| server.worker)
    }
}

impl Frontend {
    /// Passes a program's ASK on to a peer. If the session that ASK names (by its epoch) is over, there is no answer,
    /// and the program asks again in the next session. If too many questions are unanswered, this agent answers that a
    /// limit is reached.
    pub fn ask<M: Machine>(&mut self, server: usize, ask: &local::Ask, turn: &mut Turn<'_, M>) {
        let peer = ask.peer as usize;
        let Some(worker) = turn.asker(server, peer, ask.epoch) else { return };
        if !turn.shared.peers.peer(peer).hearing.ask(Question::Ask, worker, ask.handoff) {
            return tell_answer(server, peer, ask.handoff, Reason::Limit as u32, turn);
        }
        let question = peer::Ask {
            worker: worker.into(),
            zero: 0.into(),
            handoff: ask.handoff.into(),
            client_address: ask.client_address,
            server_address: ask.server_address,
            client_port: ask.client_port,
            server_port: ask.server_port,
        };
        turn.tell_peer(peer, |out| question.emit(out));
    }

    /// Passes a peer's ANSWER on to the program, if the program is still connected. An ANSWER without a question says
    /// that a claim waits.
    pub fn answered<M: Machine>(&mut self, peer: usize, answer: &peer::Answer, turn: &mut Turn<'_, M>) {
        let (worker, handoff, reason) = (answer.worker.get(), answer.handoff.get(), answer.reason.get());
        if !turn.hear(peer, Some((Question::Ask, worker, handoff)), News::Waits) {
            return;
        }
        turn.shared.counts.declined += u64::from(reason != local::Answer::YES);
        if let Some(server) = turn.shared.servers.owner(worker) {
            tell_answer(server, peer, handoff, reason, turn);
        }
    }

    /// Passes on a server's question (PROVE) for the digest of the file behind an offer. The server asks before it
    /// claims the offer. If the session is over or too many questions are unanswered, this agent answers that the
    /// digest is unknown.
    pub fn prove<M: Machine>(&mut self, server: usize, prove: &local::Prove, turn: &mut Turn<'_, M>) {
        let peer = prove.peer as usize;
        let asker = turn.asker(server, peer, prove.epoch);
        let may =
            asker.filter(|worker| turn.shared.peers.peer(peer).hearing.ask(Question::Prove, *worker, prove.handoff));
        let Some(worker) = may else {
            let Some(asks) = turn.shared.servers.find(server) else { return };
            let unknown = digest(asks.worker, prove.handoff, 0, None);
            return self.pass_on_digest(peer, &unknown, turn);
        };
        let question = peer::Prove {
            worker: worker.into(),
            zero: 0.into(),
            handoff: prove.handoff.into(),
            offer: prove.offer.into(),
            length: prove.length.into(),
            tag: prove.tag,
        };
        turn.tell_peer(peer, |out| question.emit(out));
    }

    /// Tells a peer that a server has forgotten a digest, because the peer had taken this digest back.
    pub fn withdrawn<M: Machine>(&mut self, server: usize, withdrawn: &local::Withdrawn, turn: &mut Turn<'_, M>) {
        let peer = withdrawn.peer as usize;
        let Some(worker) = turn.asker(server, peer, withdrawn.epoch) else { return };
        let known = peer::Withdrawn { worker: worker.into(), zero: 0.into(), handoff: withdrawn.handoff.into() };
        turn.tell_peer(peer, |out| known.emit(out));
    }

    /// Passes a peer's DIGEST on to the server that has asked, or to the server whose handoff the digest is about.
    pub fn told_digest<M: Machine>(&mut self, peer: usize, digest: &peer::Digest, turn: &mut Turn<'_, M>) {
        let question = (Question::Prove, digest.worker.get(), digest.handoff.get());
        if turn.hear(peer, Some(question), News::Digest) {
            self.pass_on_digest(peer, digest, turn);
        }
    }

    fn pass_on_digest<M: Machine>(&mut self, peer: usize, digest: &peer::Digest, turn: &mut Turn<'_, M>) {
        let Some(server) = turn.shared.servers.owner(digest.worker.get()) else { return };
        let told = local::Digest {
            header: local::Digest::HEADER,
            handoff: digest.handoff.get(),
            offset: digest.offset.get(),
            peer: peer as u32,
            known: digest.known.get(),
            sha256: digest.sha256,
        };
        turn.act(Action::Tell(server, Told::Digest(told)));
    }
}

fn tell_answer<M: Machine>(server: usize, peer: usize, handoff: u64, reason: u32, turn: &mut Turn<'_, M>) {
    let told = local::Answer { header: local::Answer::HEADER, handoff, reason, peer: peer as u32 };
    turn.act(Action::Tell(server, Told::Answer(told)));
}
