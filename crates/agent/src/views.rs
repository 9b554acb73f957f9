//! This machine's view of the ways to each peer and to clients, kept for their doctors (EXAMINE). The kernel may take its
//! time over each question, so a thread asks (ports.rs), and an answer may be a few seconds old.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::config::Config;
use crate::doctor::seen_from_here;
use crate::routes::Routes;

/// Bits of `Examined::faults`, for each peer by its index.
pub(crate) type Seen = Arc<Vec<AtomicU32>>;

/// Nothing seen yet.
pub(crate) fn unseen(peers: usize) -> Seen {
    Arc::new((0..peers).map(|_| AtomicU32::new(0)).collect())
}

/// The thread's end.
pub(crate) struct Views {
    routes: Routes,
    peers: Vec<IpAddr>,
    interfaces: Option<Vec<String>>,
    seen: Seen,
}

impl Views {
    /// Of the network namespace that this thread is in.
    ///
    /// # Errors
    /// The kernel's.
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
