//! List of the open TCP connections. A separate thread reads the list, because the kernel takes long for it if there
//! are very many connections.

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Instant;

use crate::os::threads;
use shunt_host::sockets;

/// Both ends of each connection, this machine's first.
pub(crate) type Connections = HashSet<(SocketAddr, SocketAddr)>;

/// The agent's ends of the channels to the thread, and the thread's ends until it starts.
pub(crate) struct Census {
    wanted: SyncSender<()>,
    lists: Receiver<io::Result<Connections>>,
    work: Option<(Receiver<()>, SyncSender<io::Result<Connections>>)>,
    /// Time at which the list that is being made was asked for. `None` if no list is being made.
    asked: Option<Instant>,
}

impl Census {
    pub(crate) fn new() -> Self {
        let ((wanted, wants), (made, lists)) = (sync_channel(1), sync_channel(1));
        Self { wanted, lists, work: Some((wants, made)), asked: None }
    }

    /// Starts the thread. Before that, no list is made.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started.
    pub(crate) fn start(&mut self) -> io::Result<()> {
        let Some((wants, made)) = self.work.take() else { return Ok(()) };
        let work = move || {
            while wants.recv().is_ok() && made.send(sockets::connections()).is_ok() {}
        };
        threads::start(
            "census",
            "cannot start the thread that lists live connections: flows of dead connections stay in the flow table",
            vec![work],
        )
    }

    /// Asks for a list, unless one is being made.
    pub(crate) fn ask(&mut self, now: Instant) {
        if self.asked.is_none() && self.wanted.try_send(()).is_ok() {
            self.asked = Some(now);
        }
    }

    /// Returns a list that was asked for, once it is there, and the time at which it was asked for.
    pub(crate) fn take(&mut self) -> Option<(Connections, Instant)> {
        let list = match self.lists.try_recv() {
            Ok(list) => list,
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => return None,
        };
        let asked = self.asked.take()?;
        match list {
            Ok(list) => Some((list, asked)),
            Err(error) => {
                tracing::error!(
                    %error,
                    "cannot list live connections: flows of dead connections stay in the flow table"
                );
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_list_is_made_when_somebody_asks_and_nobody_waits_for_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ends = (client.local_addr().unwrap(), client.peer_addr().unwrap());
        let (mut census, asked) = (Census::new(), Instant::now());
        census.ask(asked);
        assert!(census.take().is_none(), "nobody makes it yet");
        census.start().unwrap();
        let (list, since) = shunt_testbed::wait_for("a list of connections", || census.take()).unwrap();
        assert_eq!((list.contains(&ends), since), (true, asked));
        assert!(census.take().is_none(), "nobody has asked again");
        census.ask(Instant::now());
        shunt_testbed::wait_for("another list", || census.take()).unwrap();
    }
}
