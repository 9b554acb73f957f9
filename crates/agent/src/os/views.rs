//! This machine's view of the routes to each peer and to clients, kept for `shunt doctor` on peers' machines, which
//! asks for it (EXAMINE). The kernel may take long over each question, so a thread asks (ports.rs), and an answer may
//! be a few seconds old.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use shunt_config::Config;
use shunt_doctor::seen_from_here;
use shunt_host::routes::Routes;

/// Bits of `Examined::faults`, for each peer by its index.
pub(crate) type Seen = Arc<Vec<AtomicU32>>;

/// Returns the state before the first look: no faults.
pub(crate) fn unseen(peers: usize) -> Seen {
    Arc::new((0..peers).map(|_| AtomicU32::new(0)).collect())
}

/// The thread's state.
pub(crate) struct Views {
    routes: Routes,
    peers: Vec<IpAddr>,
    interfaces: Option<Vec<String>>,
    seen: Seen,
}

impl Views {
    /// Opens a socket for questions about the network namespace that this thread is in.
    ///
    /// # Errors
    /// Returns the kernel's error of socket(2) or bind(2).
    pub(crate) fn open(config: &Config, seen: Seen) -> io::Result<Self> {
        let peers = config.peers.iter().map(|peer| peer.address.ip()).collect();
        let interfaces = config.backend.as_ref().map(|backend| backend.interfaces.clone());
        Ok(Self { routes: Routes::open()?, peers, interfaces, seen })
    }

    pub(crate) fn look(&mut self) {
        for (peer, seen) in self.peers.iter().zip(self.seen.iter()) {
            let faults = seen_from_here(&mut self.routes, self.interfaces.as_deref(), *peer);
            seen.store(faults, Ordering::Relaxed);
        }
    }
}
