//! Answers for a peer's doctor: the time here, the addresses that this agent would send as, and how this machine sees the
//! ways to that peer and to clients.

use std::sync::atomic::Ordering;
use std::time::SystemTime;

use shunt_wire::local::Reason;
use shunt_wire::peer::{Examine, Examined};

use crate::agent::Agent;
use crate::incoming::Incoming;

impl Agent {
    /// One question and one answer; then the connection ends.
    pub(crate) fn examine(&mut self, incoming: Incoming, examine: &Examine) {
        let index = self.config.peers.iter().position(|peer| incoming.transport.is_of(&peer.name));
        let Some(index) = index else {
            return self.refuse(incoming, Reason::NotAllowed);
        };
        let peer = &self.config.peers[index];
        let may = |(index, server)| u32::from(peer.speaks_for(server)) << index;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let examined = Examined {
            time_ns: (now.as_nanos() as u64).into(),
            roles: self.roles().into(),
            may: examine.servers().enumerate().map(may).sum::<u32>().into(),
            faults: self.faults_towards(index).into(),
        };
        let mut transport = incoming.transport;
        examined.emit(transport.output());
        let _ = transport.finish();
    }

    /// As they were seen last, a few seconds ago at most.
    fn faults_towards(&self, peer: usize) -> u32 {
        let are_whole = self.ports.are_whole.load(Ordering::Relaxed);
        self.seen[peer].load(Ordering::Relaxed) | if are_whole { 0 } else { Examined::WITHOUT_PROGRAMS }
    }

    fn roles(&self) -> u32 {
        let frontend = if self.frontend.is_some() { Examined::FRONTEND } else { 0 };
        frontend | if self.senders.is_some() { Examined::BACKEND } else { 0 }
    }
}
