//! Reload of a changed configuration file (SIGHUP): which keys a running agent takes over, and which need a restart. A
//! *peer* is another machine's agent.

use shunt_wire::local::BOARD_PEERS;

use crate::{Config, ports};

impl Config {
    /// Returns this configuration with the peers, limits, log level and certificates of `newer`. Peers keep their
    /// numbers: a peer that `newer` does not have is marked as gone, and new peers come last.
    ///
    /// # Errors
    /// Returns a sentence if the agent has no room for all peers, including those that are gone.
    pub fn with(&self, newer: &Self) -> Result<Self, String> {
        let mut merged = self.clone();
        for peer in &mut merged.peers {
            match newer.peers.iter().find(|other| other.name == peer.name) {
                Some(other) => *peer = other.clone(),
                None => peer.is_gone = true,
            }
        }
        let is_new = |name: &str| !self.peers.iter().any(|peer| peer.name == name);
        merged.peers.extend(newer.peers.iter().filter(|peer| is_new(&peer.name)).cloned());
        let room = self.backend.as_ref().map_or(BOARD_PEERS, |backend| backend.ports.0.len().min(BOARD_PEERS));
        if merged.peers.len() > room {
            return Err(format!(
                "the agent has had {} peers since its start, and has room for {room}: restart it, or give it more \
                 `ports`",
                merged.peers.len()
            ));
        }
        merged.limits = newer.limits;
        merged.log.clone_from(&newer.log);
        merged.tls = newer.tls.clone();
        Ok(merged)
    }

    /// Returns the keys whose values differ in `newer`, and which take effect only at a restart.
    pub fn keys_for_a_restart(&self, newer: &Self) -> Vec<&'static str> {
        let differ =
            |one: &dyn std::fmt::Debug, other: &dyn std::fmt::Debug| format!("{one:?}") != format!("{other:?}");
        let keys: [(&str, bool); 17] = [
            ("name", differ(&self.name, &newer.name)),
            ("socket", differ(&self.socket, &newer.socket)),
            ("socket_group", differ(&self.socket_group, &newer.socket_group)),
            ("listen", differ(&self.listen, &newer.listen)),
            ("users", differ(&self.users, &newer.users)),
            ("groups", differ(&self.groups, &newer.groups)),
            ("observers", differ(&self.observers, &newer.observers)),
            ("user", differ(&self.user, &newer.user)),
            ("pins", differ(&self.pins, &newer.pins)),
            ("cgroup", differ(&self.cgroup, &newer.cgroup)),
            ("heartbeat", differ(&self.heartbeat, &newer.heartbeat)),
            ("drain", differ(&self.drain, &newer.drain)),
            ("[frontend]", differ(&self.frontend, &newer.frontend)),
            ("[backend]", differ(&self.backend, &newer.backend)),
            ("[store]", differ(&self.store, &newer.store)),
            ("metrics", differ(&self.metrics, &newer.metrics)),
            ("seccomp", differ(&self.seccomp, &newer.seccomp)),
        ];
        keys.into_iter().filter_map(|(key, is_other)| is_other.then_some(key)).collect()
    }

    /// Returns for each peer, in the peers' order, the port of the senders: this backend's sockets for the peer's
    /// clients. Returns no ports without `[backend]`. `before` has the present ports of the first peers, which keep
    /// them.
    pub fn sender_ports(&self, before: &[u16]) -> Vec<u16> {
        let Some(backend) = &self.backend else { return Vec::new() };
        ports::of_peers(&backend.ports.0, &self.peers, before)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(rest: &str) -> Config {
        let own = "name = \"be1\"\nlisten = \"10.0.0.4:7440\"\n[tls]\ncertificate = \"a\"\nkey = \"b\"\nca = \"c\"\n\
                   [backend]\ninterfaces = [\"eth0\"]\nports = \"61000-61002\"\n";
        Config::parse(&format!("{own}{rest}"), Path::new("shuntd.toml")).unwrap()
    }

    fn peers(names: &[&str]) -> String {
        names.iter().map(|name| format!("[[peer]]\nname = {name:?}\naddress = \"10.0.0.2:7440\"\n")).collect()
    }

    #[test]
    fn peers_keep_their_places() {
        let running = config(&peers(&["fe1", "fe2"]));
        let merged = running.with(&config(&peers(&["fe3", "fe2"]))).unwrap();
        let seen: Vec<_> = merged.peers.iter().map(|peer| (peer.name.as_str(), peer.is_gone)).collect();
        assert_eq!(seen, [("fe1", true), ("fe2", false), ("fe3", false)]);
        let back = merged.with(&running).unwrap();
        assert_eq!(back.peers.iter().map(|peer| peer.is_gone).collect::<Vec<_>>(), [false, false, true]);
        let ports = running.sender_ports(&[]);
        assert_eq!(merged.sender_ports(&ports)[..2], ports);
        assert!(merged.with(&config(&peers(&["fe4"]))).unwrap_err().contains("restart it"));
    }

    #[test]
    fn keys_that_need_a_restart_are_named() {
        let running = config("offer_lifetime = \"10s\"\n");
        let newer = config("offer_lifetime = \"20s\"\n[limits]\noffers = 7\n");
        assert_eq!(running.keys_for_a_restart(&newer), ["[backend]"]);
        assert_eq!(running.with(&newer).unwrap().limits.offers, 7);
        let metrics = Config { metrics: Some("127.0.0.1:9440".parse().unwrap()), ..running.clone() };
        assert_eq!(running.keys_for_a_restart(&metrics), ["metrics"]);
        let drain = Config { drain: std::time::Duration::ZERO, ..running.clone() };
        assert_eq!(running.keys_for_a_restart(&drain), ["drain"]);
    }
}
