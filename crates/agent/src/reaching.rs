//! Connections between programs and other machines' stores. An agent makes them, with both ends' certificates; then the
//! program goes on with the connection and its keys by itself, and so does the store at the other end: each fetch costs what it
//! would without agents, and its encryption.
//!
//! Whoever has such a connection can ask that store for what it has references to, and nothing else.

use std::time::{Duration, Instant};

use shunt_odb::reference::Holder;
use shunt_odb::store::server::Caller;
use shunt_sys::sockopt::PeerCredentials;
use shunt_wire::local::Reason;
use shunt_wire::peer::{Frame, Store as Request, Stored};

use crate::agent::Agent;
use crate::incoming::Incoming;
use crate::poll::{Interest, Source};
use crate::store::Wish;
use crate::transport::{Transport, TransportError};

/// How long the other agent may take; a program's library waits twice as long for this one, in a thread of its own
/// (`shunt_odb::store::client::SILENCE`).
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections that are being made at a time.
const REACHING_MAX: usize = 256;

/// One of them.
pub(crate) struct Reaching {
    transport: Transport,
    program: u64,
    peer: usize,
    holder: Holder,
    deadline: Instant,
}

impl Agent {
    /// Programs want connections.
    pub(crate) fn on_wishes(&mut self) {
        let wishes = self.store.as_ref().map(|store| store.wishes()).unwrap_or_default();
        for wish in wishes {
            match wish {
                Wish::Reach { program, holder } => {
                    if let Err(why) = self.reach(program, holder) {
                        self.say_unreached(&why);
                        self.answer_program(program, holder, None);
                    }
                }
                Wish::HandOff { program, caller } => self.let_hand_off(program, caller),
            }
        }
    }

    /// A program of the store's may hand off its own connections, where this machine steers any.
    fn let_hand_off(&mut self, program: u64, caller: Caller) {
        let Caller { user: uid, group: gid, process: pid } = caller;
        let connected = self.frontend.is_some().then(|| self.connect_program(PeerCredentials { pid, uid, gid }));
        if let Some(store) = &self.store {
            store.orders.lets_hand_off(program, connected.and_then(Result::ok));
        }
    }

    fn reach(&mut self, program: u64, holder: Holder) -> Result<(), String> {
        let peer = self.config.peers.iter().position(|peer| Holder::named(&peer.name) == holder);
        let unknown =
            || format!("a reference is to {holder:?}, which no [[peer]] here has: name its agent (shuntd --check)");
        let peer = peer.ok_or_else(unknown)?;
        if self.reaching.len() >= REACHING_MAX || !self.has_descriptors() {
            return Err("too many connections are being made to other stores".into());
        }
        let tls = self.credentials.dial(&self.peers[peer].name).map_err(|error| error.to_string())?;
        let mut transport = Transport::connect(self.peers[peer].address, tls).map_err(|error| error.to_string())?;
        Request::REQUEST.emit(transport.output());
        let entry = self.reaching.vacant_entry();
        let watched = self.poll.set(transport.descriptor(), Source::Reaching(entry.key()), Interest::Both);
        watched.map_err(|error| error.to_string())?;
        entry.insert(Reaching { transport, program, peer, holder, deadline: self.now + PATIENCE });
        Ok(())
    }

    /// The other agent's connection is ready.
    pub(crate) fn on_reaching(&mut self, index: usize) {
        let Some(reaching) = self.reaching.get_mut(index) else { return };
        match reaching.read() {
            Ok(false) => {
                let interest = if reaching.is_flushed() { Interest::Readable } else { Interest::Both };
                let _ = self.poll.set(reaching.transport.descriptor(), Source::Reaching(index), interest);
            }
            Ok(true) => self.deliver_store(index),
            Err(error) => self.fail_reaching(index, &error.to_string()),
        }
    }

    /// Gives the program its connection.
    fn deliver_store(&mut self, index: usize) {
        let Reaching { transport, program, holder, peer, .. } = self.reaching.remove(index);
        self.poll.remove(transport.descriptor());
        self.keys_passed = true;
        match transport.into_channel() {
            Ok(connection) => self.answer_program(program, holder, Some(connection)),
            Err(error) => {
                self.say_unreached(&format!("{}: {error}", self.peers[peer].name));
                self.answer_program(program, holder, None);
            }
        }
    }

    fn fail_reaching(&mut self, index: usize, why: &str) {
        let Reaching { program, holder, peer, .. } = self.reaching.remove(index);
        self.say_unreached(&format!("{}: {why}", self.peers[peer].name));
        self.answer_program(program, holder, None);
    }

    fn answer_program(
        &self,
        program: u64,
        holder: Holder,
        connection: Option<(std::os::fd::OwnedFd, shunt_odb::records::Sealing)>,
    ) {
        if let Some(store) = &self.store {
            store.orders.reached(program, holder, connection);
        }
    }

    fn say_unreached(&mut self, why: &str) {
        self.counts.stores_unreached += 1;
        if self.refusals.may_speak(self.now) {
            tracing::warn!(why, "cannot connect a program to another machine's store");
        }
    }

    pub(crate) fn tend_reaching(&mut self) {
        let now = self.now;
        let late = self.reaching.iter().filter(|(_, reaching)| reaching.deadline <= now).map(|(index, _)| index);
        for index in late.collect::<Vec<_>>() {
            self.fail_reaching(index, "no answer");
        }
    }

    /// A program of another machine wants to read from the store here.
    pub(crate) fn serve_reader(&mut self, incoming: Incoming) {
        let mut peers = self.config.peers.iter().enumerate();
        let peer = peers.find(|(_, peer)| incoming.transport.is_of(&peer.name));
        let allowed = self.store.as_ref().zip(peer).filter(|(store, (_, peer))| store.config.lets_read(&peer.name));
        let Some((orders, index)) = allowed.map(|(store, (index, _))| (store.orders.clone(), index)) else {
            self.count_refusal(Reason::NotAllowed);
            return self.refuse_fetch(incoming, Reason::NotAllowed);
        };
        // Told before it gives up any memory for what it would fetch here.
        let Some(place) = orders.places().take(index as u32) else {
            self.count_refusal(Reason::Limit);
            if self.refusals.may_speak(self.now) {
                let peer = &self.config.peers[index].name;
                tracing::warn!(peer, "no more of its programs may read from the store: [store] reader_connections");
            }
            return self.refuse_fetch(incoming, Reason::Limit);
        };
        let Incoming { mut transport, from, .. } = incoming;
        Stored {}.emit(transport.output());
        self.poll.remove(transport.descriptor());
        self.keys_passed = true;
        let flushed = transport.flush().and_then(|all| if all { Ok(()) } else { Err(TransportError::Stuck) });
        match flushed.and_then(|()| transport.into_channel()) {
            Ok((socket, sealing)) => orders.serve(socket, sealing, place),
            Err(error) => tracing::warn!(%from, %error, "a reader's connection failed before it began"),
        }
    }
}

impl Reaching {
    /// Whether the other agent has said yes.
    fn read(&mut self) -> Result<bool, TransportError> {
        self.transport.connected()?;
        self.transport.fill()?;
        self.transport.flush()?;
        match self.transport.next_frame()? {
            None => Ok(false),
            Some(Frame::Stored(_)) => Ok(true),
            Some(Frame::Refused(refused)) => {
                Err(TransportError::Refused(Reason::from_number(refused.reason.get()).unwrap_or(Reason::Malformed)))
            }
            Some(_) => Err(TransportError::Refused(Reason::Malformed)),
        }
    }

    fn is_flushed(&mut self) -> bool {
        matches!(self.transport.flush(), Ok(true))
    }
}
