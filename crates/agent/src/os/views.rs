//! This machine's view of the routes to each peer and to clients. `shunt doctor` on a peer's machine asks this agent
//! for it (EXAMINE). A *peer* is another machine's agent. The kernel may take long over each question, so a thread asks
//! (ports.rs), and an answer may be a few seconds old.

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use shunt_config::Config;
use shunt_doctor::seen_from_here;
use shunt_host::routes::Routes;

/// For each peer, its address and the faults that were last seen towards it: bits of `Examined::faults`.
type Seen = Vec<(IpAddr, u32)>;

/// Faults that were seen towards each peer, by the peer's index. The event loop and the thread share it.
#[derive(Clone, Default)]
pub(crate) struct Sight(Arc<Mutex<Seen>>);

impl Sight {
    /// Returns the state before the first look at a configuration's peers: no faults.
    pub(crate) fn of(config: &Config) -> Self {
        let sight = Self::default();
        sight.follow(config);
        sight
    }

    /// Takes over the peers of a configuration that was read again. The faults that were seen towards a peer stay if
    /// its address is the same.
    pub(crate) fn follow(&self, config: &Config) {
        self.with(|seen| {
            let before = std::mem::take(seen);
            let addresses = config.peers.iter().map(|peer| peer.address.ip());
            seen.extend(addresses.enumerate().map(|(peer, address)| {
                let same = before.get(peer).filter(|(then, _)| *then == address);
                (address, same.map_or(0, |(_, faults)| *faults))
            }));
        });
    }

    /// Returns the faults that were last seen towards a peer.
    pub(crate) fn faults_towards(&self, peer: usize) -> u32 {
        self.with(|seen| seen.get(peer).map_or(0, |(_, faults)| *faults))
    }

    fn note(&self, peer: usize, address: IpAddr, faults: u32) {
        self.with(|seen| match seen.get_mut(peer) {
            Some(seen) if seen.0 == address => seen.1 = faults,
            _ => {} // the configuration was read again meanwhile
        });
    }

    /// Calls `act` under the lock. The lock is held for a moment only: meanwhile, the kernel is asked nothing.
    fn with<T>(&self, act: impl FnOnce(&mut Seen) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The thread's state.
pub(crate) struct Views {
    routes: Routes,
    interfaces: Option<Vec<String>>,
    sight: Sight,
}

impl Views {
    /// Opens a socket for questions about the network namespace that this thread is in.
    ///
    /// # Errors
    /// Returns the kernel's error of socket(2) or bind(2).
    pub(crate) fn open(config: &Config, sight: Sight) -> io::Result<Self> {
        let interfaces = config.backend.as_ref().map(|backend| backend.interfaces.clone());
        Ok(Self { routes: Routes::open()?, interfaces, sight })
    }

    pub(crate) fn look(&mut self) {
        let peers: Vec<IpAddr> = self.sight.with(|seen| seen.iter().map(|(address, _)| *address).collect());
        for (peer, address) in peers.into_iter().enumerate() {
            let faults = seen_from_here(&mut self.routes, self.interfaces.as_deref(), address);
            self.sight.note(peer, address, faults);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn config(peers: &[&str]) -> Config {
        let peer = |(number, address): (usize, &&str)| {
            format!("[[peer]]\nname = \"be{number}\"\naddress = \"{address}:7440\"\n")
        };
        let peers: String = peers.iter().enumerate().map(peer).collect();
        let text = format!(
            "name = \"fe\"\nlisten = \"192.0.2.1:7440\"\n[tls]\nca = \"ca\"\ncertificate = \"c\"\nkey = \"k\"\n\
             [frontend]\ninterfaces = [\"eth0\"]\n{peers}"
        );
        Config::parse(&text, Path::new("shuntd.toml")).unwrap()
    }

    #[test]
    fn a_peer_that_comes_or_moves_by_a_reload_is_looked_at_anew() {
        let sight = Sight::of(&config(&["192.0.2.7", "192.0.2.8"]));
        let [first, second] = ["192.0.2.7", "192.0.2.8"].map(|address| address.parse().unwrap());
        sight.note(0, first, 1);
        sight.note(1, second, 2);
        sight.follow(&config(&["192.0.2.7", "192.0.2.9", "192.0.2.10"]));
        sight.note(1, second, 4);
        assert_eq!([0, 1, 2, 3].map(|peer| sight.faults_towards(peer)), [1, 0, 0, 0]);
    }
}
