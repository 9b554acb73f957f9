//! Claims and senders of a backend. A *claim* is a frontend's message that asks for a payload. A *sender* is a
//! backend's socket for a client of a frontend. The *digest* of a file is its SHA-256. A *payload* is the body of a
//! response. A *handoff* lets a backend send a payload on a client's connection.

use std::time::Duration;

use shunt_logic::backend::Start;
use shunt_logic::machine::{Known, Machine as _, Want};
use shunt_wire::local::Reason;
use shunt_wire::parts::Parts;
use shunt_wire::peer::{Claim, Claimant, Delivered, Spacing};

use crate::client::Response;
use crate::host::{Host, client_of};
use crate::sender::{Digest, Of, Sender};
use crate::world::{Event, World};

/// Time that a payload is under way before the backend tells its file's digest to the frontend.
const TELL_FILES: Duration = Duration::from_secs(1);
/// Time after which a client that has acknowledged nothing counts as not reached.
const FIRST_WORD: Duration = Duration::from_secs(3);
/// Time after which the backend repeats its message that a digest is withdrawn (no longer holds).
const TELL_AGAIN: Duration = Duration::from_secs(1);

impl World {
    /// Handles a peer's claim of a payload.
    pub(super) fn on_claim(&mut self, machine: usize, peer: usize, claim: &Claim, parts: Option<&Parts>) {
        let (now, base) = (self.now(), self.base);
        let start = self.machines[machine].event(now, base, |logic, call| logic.claim(peer, claim, parts, call));
        self.act(machine);
        if let Some(start) = start.flatten() {
            self.begin_sending(machine, Claimant::of(peer as u32, claim), claim, parts, start);
        }
    }

    pub(super) fn place_waiting(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        self.machines[machine].event(now, base, |logic, _| logic.begin_waiting_round());
        loop {
            let next = self.machines[machine].event(now, base, |logic, call| logic.next_waiting(call));
            self.act(machine);
            match next.flatten() {
                None => return,
                Some(None) => {}
                Some(Some((waits, start))) => {
                    self.cover("waiting claim is placed");
                    self.begin_sending(machine, waits.claimant, &waits.claim, Some(&waits.parts), start);
                }
            }
        }
    }

    /// Makes a sender for a claim, in place of an earlier sender for the same client. If the payload cannot be sent,
    /// tells the agent's logic.
    fn begin_sending(
        &mut self,
        machine: usize,
        claimant: Claimant,
        claim: &Claim,
        parts: Option<&Parts>,
        start: Start<Host>,
    ) {
        let (now, base) = (self.now(), self.base);
        let (of, content, from) = match self.payload(machine, claim, parts, start) {
            Ok(payload) => payload,
            Err(reason) => {
                self.cover("start fails");
                self.machines[machine]
                    .event(now, base, |logic, call| logic.start_failed(claimant, claim, parts, reason, call));
                return self.act(machine);
            }
        };
        let client = client_of(claim.flow.client());
        self.cover("sender");
        self.check_seal(client, claim, content);
        let fresh = self.random.word();
        let before = self.machines[machine].host.senders.remove(&client);
        let own = before.as_ref().filter(|_| claim.flow.first == 0).map_or(fresh, Sender::next_own);
        let mut sender = Sender::new(claim, claimant, content, from, own, now);
        (sender.of, sender.number) = (of, self.next_sender);
        sender.is_heard = before.is_some_and(|before| before.is_heard && claim.flow.first == 0);
        self.next_sender += 1;
        let number = sender.number;
        self.machines[machine].host.senders.insert(client, sender);
        self.schedule.after(Duration::ZERO, Event::SenderTurn { machine, client, number });
        if self.random.below(4) == 0 {
            self.advise(machine, client, &claimant);
        }
    }

    /// Returns the source of a claim's payload, the number of its contents, and the place in them of the payload's
    /// first byte. Returns a reason if the payload cannot be sent.
    fn payload(
        &mut self,
        machine: usize,
        claim: &Claim,
        parts: Option<&Parts>,
        start: Start<Host>,
    ) -> Result<(Of, u64, u64), Reason> {
        let generation = self.machines[machine].generation;
        if let Some(offered) = start.offered {
            let number = offered.offer.number;
            if !self.used.insert((machine, generation, number)) {
                self.violate(format!("offer {number} of machine {machine} is used twice"));
            }
            let host = &self.machines[machine].host;
            if !host.is_unchanged(&offered.file, &offered.offer, offered.proven) {
                return Err(Reason::FileChanged);
            }
            let now = host.file(offered.file);
            let from = match claim.suite.get() {
                0 => offered.offer.offset,
                _ => Response::record_begin(claim.record.get()) + u64::from(claim.skip.get()),
            };
            let (file, offer, proven) = (offered.file, offered.offer, offered.proven);
            return Ok((Of::File { offer, file, state: now.state, proven }, now.content, from));
        }
        let part = parts.and_then(|parts| parts.as_slice().first()).ok_or(Reason::UnknownOffer)?;
        let file = self.machines[machine].host.stored.get(&part.slot.get()).ok_or(Reason::UnknownOffer)?;
        Ok((Of::Store, *file, part.offset.get()))
    }

    /// Checks that a claim on a TLS connection is for the payload of the response that the client waits for. Other
    /// bytes would be encrypted under the record numbers of that response, and so with the same nonces.
    fn check_seal(&mut self, client: usize, claim: &Claim, content: u64) {
        let frontend = &self.machines[self.clients[client].frontend];
        // A client that has all bytes of a response may ask for the next response while its server still serves the
        // former one.
        let served = frontend.worker.serving.get(&client).map(|serving| serving.response);
        let expected = served.or(self.clients[client].waits_for.map(|(response, _)| response));
        let expected = expected.map(|response| response.file);
        let flow = frontend.host.flows.get(&client);
        let is_current = flow.is_some_and(|flow| flow.token() == claim.flow.token.get());
        if claim.suite.get() != 0 && is_current && expected.is_some_and(|expected| expected != content) {
            self.violate(format!("client {client} has {content} sealed in place of {expected:?}"));
        }
    }

    /// Has a backend's agent tell the frontend's agent that a sender needs an ACK only every 65,536 payload bytes.
    fn advise(&mut self, machine: usize, client: usize, claimant: &Claimant) {
        let (now, base) = (self.now(), self.base);
        let (at, server) = (self.clients[client].at, self.server_of(client));
        let spacing = Spacing {
            client_address: at.address,
            server_address: server.address,
            client_port: at.port_be,
            server_port: server.port_be,
            bytes: 65536.into(),
        };
        self.machines[machine]
            .event(now, base, |logic, call| logic.tell_frontends(&[(claimant.peer, spacing)], &[], call));
    }

    /// Has a backend's agent tell the frontend's agent that the client has acknowledged a whole payload.
    pub(super) fn give_word(&mut self, machine: usize, client: usize, claimant: &Claimant) {
        let (now, base) = (self.now(), self.base);
        let (at, server) = (self.clients[client].at, self.server_of(client));
        let word = Delivered {
            handoff: claimant.handoff.into(),
            client_address: at.address,
            server_address: server.address,
            client_port: at.port_be,
            server_port: server.port_be,
        };
        self.machines[machine]
            .event(now, base, |logic, call| logic.tell_frontends(&[], &[(claimant.peer, word)], call));
        self.end_turn(machine);
    }

    /// Tells the logic of a backend's agent that a sender has ended without success.
    pub(super) fn fail_sender(&mut self, machine: usize, claimant: &Claimant, reason: Reason) {
        let (now, base) = (self.now(), self.base);
        self.machines[machine].event(now, base, |logic, call| logic.sender_failed(claimant, reason, call));
        self.act(machine);
        self.end_turn(machine);
    }

    /// Tends a machine's senders. A sender of an offer whose client has acknowledged nothing for [`FIRST_WORD`] ends,
    /// and the offer is usable again. Handles changes of the files that are being sent. Also writes to some of these
    /// files, as a program would.
    pub(super) fn tend_senders(&mut self, machine: usize) {
        let now = self.now();
        let sending = |sender: &Sender| !sender.is_orphan() && !sender.is_done() && !sender.is_queued();
        let silent = |sender: &Sender| !sender.is_orphan() && !sender.is_heard && now >= sender.begun + FIRST_WORD;
        let host = &mut self.machines[machine].host;
        let mut changed = Vec::new();
        let mut unheard = Vec::new();
        let mut written = Vec::new();
        for (client, sender) in &mut host.senders {
            let Of::File { offer, file, state, .. } = sender.of else { continue };
            if sending(sender) {
                written.push(file);
            }
            let state_now = host.changed.get(&file).map_or(0, |now| now.state);
            if silent(sender) && sender.acked() == 0 {
                unheard.push((*client, sender.claimant, offer));
            } else if state != state_now && sending(sender) {
                changed.push(*client);
            }
        }
        for file in written {
            self.write_to_file(machine, file);
        }
        for (client, claimant, offer) in unheard {
            self.give_back(machine, client, &claimant, offer);
        }
        changed.into_iter().for_each(|client| self.on_file_changed(machine, client));
    }

    /// Ends a sender whose client has acknowledged nothing, and makes its offer (the payload that the backend's server
    /// holds ready) usable once more.
    fn give_back(&mut self, machine: usize, client: usize, claimant: &Claimant, offer: shunt_wire::local::Offer) {
        let (now, base) = (self.now(), self.base);
        self.cover("client not reached");
        let generation = self.machines[machine].generation;
        let sender = self.machines[machine].host.senders.remove(&client);
        if let Some(Of::File { file, proven, .. }) = sender.map(|sender| sender.of) {
            self.used.remove(&(machine, generation, offer.number));
            let mut offer = offer;
            offer.peer = claimant.peer;
            self.machines[machine]
                .event(now, base, |logic, call| logic.backend.offers.put_back(offer, file, proven, call.now));
        }
        self.fail_sender(machine, claimant, Reason::Unreachable);
    }

    /// Handles the change of a file whose payload is being sent. If the payload's bytes are still the same and the
    /// frontend was told the file's digest, withdraws the digest. The withdrawal is repeated until it is confirmed. In
    /// all other cases the sender fails.
    fn on_file_changed(&mut self, machine: usize, client: usize) {
        let (now, base) = (self.now(), self.base);
        let Some(sender) = self.machines[machine].host.senders.get(&client) else { return };
        let claimant = sender.claimant;
        let has_grown = self.machines[machine].host.is_of_same_content(client);
        let Some(sender) = self.machines[machine].host.senders.get_mut(&client) else { return };
        let is_due = match sender.digest {
            Digest::Told(_) if has_grown => true,
            Digest::Withdrawn(at) if has_grown => now >= at + TELL_AGAIN,
            _ => {
                self.machines[machine].host.senders.remove(&client);
                self.cover("file changed");
                return self.fail_sender(machine, &claimant, Reason::FileChanged);
            }
        };
        if is_due {
            sender.digest = Digest::Withdrawn(now);
            self.cover("digest withdrawn");
            self.machines[machine].event(now, base, |logic, call| logic.tell_file(&claimant, 0, None, call));
            self.act(machine);
        }
    }

    /// Continues the senders of those handoffs whose servers have confirmed that the digest is withdrawn.
    pub(super) fn go_on(&mut self, machine: usize, withdrawn: &shunt_logic::action::Given) {
        let host = &mut self.machines[machine].host;
        let mut clients = Vec::new();
        for (client, sender) in &mut host.senders {
            let of = &sender.claimant;
            if let (Digest::Withdrawn(_), Of::File { file, state, .. }) = (sender.digest, &mut sender.of)
                && withdrawn.contains(&(of.peer, of.worker, of.handoff))
            {
                *state = host.changed.get(file).map_or(0, |now| now.state);
                sender.digest = Digest::Never;
                clients.push(*client);
            }
        }
        for client in clients {
            self.cover("goes on without a digest");
            self.pump(machine, client);
        }
    }

    /// For each payload that has been under way for at least [`TELL_FILES`], and whose frontend has asked for the
    /// digest of its file: tells the frontend the digest, or that there is none.
    pub(super) fn tell_files(&mut self, machine: usize) {
        let (now, base) = (self.now(), self.base);
        let mut told = Vec::new();
        let host = &mut self.machines[machine].host;
        let due = |sender: &Sender| sender.digest == Digest::Untold && now >= sender.begun + TELL_FILES;
        let due = host.senders.iter().filter(|(_, sender)| due(sender) && !sender.is_done() && !sender.is_orphan());
        for client in due.map(|(client, _)| *client).collect::<Vec<_>>() {
            let Some(sender) = host.senders.get(&client) else { continue };
            let known = match sender.of {
                Of::File { file, state, .. } => host.digest(&file, state, Want::Ahead),
                Of::Store => Known::Never,
            };
            let Some(sender) = host.senders.get_mut(&client) else { continue };
            let Of::File { state, .. } = sender.of else { continue };
            match known {
                Known::NotYet => {}
                Known::Never => {
                    sender.digest = Digest::Never;
                    told.push((sender.claimant, None));
                }
                Known::Digest(sha256) => {
                    sender.digest = Digest::Told(state);
                    told.push((sender.claimant, Some(sha256)));
                }
            }
        }
        for (claimant, sha256) in told {
            self.cover("digest told");
            self.machines[machine].event(now, base, |logic, call| logic.tell_file(&claimant, 0, sha256, call));
            self.act(machine);
        }
    }
}
