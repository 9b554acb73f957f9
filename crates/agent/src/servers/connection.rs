//! The agent's side of one connection with a server (a program of this machine that hands off or offers bodies).

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use shunt_host::packets;
use shunt_logic::action::Told;

use super::board::WorkerCounters;

/// Most messages that are kept for a server whose socket is full. The socket itself holds some 280 more.
const KEPT: usize = 4096;

/// One connection with a server.
pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    /// Counters that the server writes; present once the server has sent HELLO.
    pub(crate) counters: Option<WorkerCounters>,
    /// Messages that wait for room in the socket, the oldest first. Many come at once when a backend is lost, and a
    /// server that misses one learns much later that its handoff has ended.
    unsent: VecDeque<Told>,
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, counters: None, unsent: VecDeque::new() }
    }

    /// Sends a message, or keeps it until the socket has room. Returns false if too many messages are kept, because the
    /// server does not read, or if the server is gone.
    pub(crate) fn tell(&mut self, told: &Told) -> bool {
        match self.unsent.is_empty().then(|| packets::send(&self.socket, told.as_bytes(), &[])) {
            Some(Ok(true)) => return true,
            Some(Err(_)) => return false,
            Some(Ok(false)) | None => {}
        }
        let has_room = self.unsent.len() < KEPT;
        if has_room {
            self.unsent.push_back(*told);
        }
        has_room
    }

    /// Returns whether messages wait for room.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends kept messages for which there is room now.
    pub(crate) fn send_unsent(&mut self) {
        while let Some(told) = self.unsent.front() {
            match packets::send(&self.socket, told.as_bytes(), &[]) {
                Ok(true) => drop(self.unsent.pop_front()),
                Ok(false) => return,
                Err(_) => self.unsent.clear(), // the server is gone
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};
    use shunt_wire::local::{Ended, NO_PEER};
    use zerocopy::FromBytes;

    #[test]
    fn a_server_that_reads_late_misses_nothing_up_to_a_bound() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).unwrap();
        let mut connection = Connection::new(ours);
        let ended = |handoff| Told::Ended(Ended { header: Ended::HEADER, handoff, reason: 1, peer: NO_PEER });
        let told = (0..3 * KEPT as u64).take_while(|handoff| connection.tell(&ended(*handoff))).count();
        assert!(told > KEPT && told < 2 * KEPT && connection.has_unsent(), "{told}");
        let mut buffer = [0; 64];
        for expected in 0..told as u64 {
            if matches!(recv(&theirs, &mut buffer[..], RecvFlags::PEEK), Err(rustix::io::Errno::AGAIN)) {
                connection.send_unsent();
            }
            recv(&theirs, &mut buffer[..], RecvFlags::empty()).unwrap();
            assert_eq!(Ended::read_from_prefix(&buffer).unwrap().0.handoff, expected);
        }
        assert!(!connection.has_unsent() && connection.tell(&ended(7)));
    }
}
