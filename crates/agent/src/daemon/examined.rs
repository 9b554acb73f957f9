//! Answers for `shunt doctor` on the machine of a peer (another agent). An answer has this machine's time and roles,
//! and says in the name of which addresses this agent would send payloads for the peer. It also has the faults that
//! this machine sees on the paths to the peer and to clients.

use std::sync::atomic::Ordering;
use std::time::SystemTime;

use shunt_wire::local::Reason;
use shunt_wire::peer::{Examine, Examined};

use crate::daemon::Daemon;
use crate::peers::arrived::Arrived;

impl Daemon {
    /// Answers one EXAMINE, and ends the connection.
    pub(crate) fn examine(&mut self, arrived: Arrived, examine: &Examine) {
        let index = self.config.peer_of(|name| arrived.transport.is_of(name));
        let Some(index) = index else {
            return self.refuse(arrived, Reason::NotAllowed);
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
        let mut transport = arrived.transport;
        examined.emit(transport.output());
        let _ = transport.finish();
    }

    /// Returns the faults towards a peer as they were last seen, at most a few seconds ago.
    fn faults_towards(&self, peer: usize) -> u32 {
        let are_whole = self.ports.are_whole.load(Ordering::Relaxed);
        self.sight.faults_towards(peer) | if are_whole { 0 } else { Examined::WITHOUT_PROGRAMS }
    }

    fn roles(&self) -> u32 {
        let frontend = if self.kernel.frontend.is_some() { Examined::FRONTEND } else { 0 };
        frontend | if self.kernel.senders.is_some() { Examined::BACKEND } else { 0 }
    }
}
