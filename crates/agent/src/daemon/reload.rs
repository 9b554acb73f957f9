//! SIGHUP: takes over changed certificates, peers, limits and log level without a restart. A *session* is this agent's
//! use of a connection with a peer, another machine's agent.

use std::io::Read;
use std::time::SystemTime;

use shunt_odb::reference::Holder;

use super::Daemon;
use shunt_config::Config;

impl Daemon {
    /// Reads the configuration again. If it cannot be used, the old configuration stays in use. In both cases, also
    /// reads the certificates again.
    pub(super) fn reload(&mut self) {
        while (&self.signals.reload).read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0) {}
        match Config::read(&self.path).map_err(|error| error.to_string()).and_then(|newer| self.take(&newer)) {
            Ok(()) => tracing::info!("read the configuration again"),
            Err(error) => tracing::error!(error, "cannot use the new configuration; the old one stays in use"),
        }
        self.reload_credentials();
    }

    /// Takes over the keys of the configuration `newer` whose change needs no restart.
    ///
    /// # Errors
    /// Returns a sentence that says why the new configuration cannot be used. Then nothing has changed.
    fn take(&mut self, newer: &Config) -> Result<(), String> {
        let merged = self.config.with(newer)?;
        for key in self.config.keys_for_a_restart(newer) {
            tracing::warn!(key, "a change of this key of the configuration takes effect at the next restart");
        }
        if merged.log != self.config.log {
            (self.set_log)(&merged.log)?;
        }
        let is_removed = |name: &str| merged.peers.iter().all(|peer| peer.name != name);
        let has_removed_one = self.config.peers.iter().any(|peer| is_removed(&peer.name));
        let before: Vec<u16> = self.logic.shared.settings.peers.iter().map(|peer| peer.port).collect();
        let ports = merged.sender_ports(if merged.backend.is_some() { &before } else { &[] });
        self.config = merged;
        self.sight.follow(&self.config);
        self.kernel.peers = self.config.peers.iter().map(|peer| peer.name.clone()).collect();
        let stores: Vec<_> = self.config.peers.iter().map(|peer| Holder::named(&peer.name).into()).collect();
        let settings = self.config.settings(&ports);
        self.event(|logic, call| logic.reconfigure(settings, &stores, call));
        if has_removed_one {
            self.end_store_connections();
        }
        Ok(())
    }

    /// Ends the connections by which other machines' programs read this machine's store. Programs that are still
    /// allowed to read connect again.
    fn end_store_connections(&self) {
        if let Some(store) = &self.store {
            store.orders.end_connections();
        }
    }

    /// Reads the certificates again, for new connections. Ends the sessions with peers whose certificates are no longer
    /// good. Also ends all connections without a session, and all connections by which other machines read the store.
    /// The other agents' certificates were checked by the old list of revoked certificates.
    fn reload_credentials(&mut self) {
        match self.credentials.renewed(&self.config.tls, &self.config.name, SystemTime::now()) {
            Ok(credentials) => {
                self.credentials = credentials;
                self.next_warning = self.now;
                tracing::info!("read the certificates again");
                self.recheck_sessions();
                self.drop_beginnings();
                self.end_store_connections();
            }
            Err(error) => tracing::error!(%error, "cannot use the new certificates; the old ones stay in use"),
        }
    }
}
