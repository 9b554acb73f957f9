//! Routes to peers' senders (kernel sockets of backends for this machine's clients). A separate thread looks up the
//! routes.

use std::io;

use super::Daemon;
use crate::frontend::uplinks::{News, Uplinks};
use shunt_host::interfaces::interface_name;

impl Daemon {
    /// Starts the thread that looks routes up, if this machine is a frontend. To be called after privileges are given
    /// up, and before system calls are restricted.
    ///
    /// # Errors
    /// Returns the error if the socket or the thread cannot be made.
    pub fn start_routes(&mut self) -> io::Result<()> {
        if self.kernel.frontend.is_some() {
            self.uplinks = Some(Uplinks::start(&self.poll)?);
        }
        Ok(())
    }

    /// Takes news of routes to peers' senders: a route is found, has changed, or is lost.
    pub(crate) fn on_routes(&mut self) {
        let all = self.uplinks.as_ref().map(Uplinks::take_news).unwrap_or_default();
        for news in all {
            let (peer, interface) = (news.peer as usize, news.now.as_ref().copied().unwrap_or(0));
            // The event returns `false` if the peer has announced another address since the thread asked.
            if self.event(|logic, call| logic.set_interface(peer, news.address, interface, call)) {
                self.say_route(&news);
            }
        }
    }

    fn say_route(&mut self, news: &News) {
        let News { address, before, now, .. } = news;
        let peer = &self.config.peers[news.peer as usize].name;
        let counts = &mut self.logic.shared.counts;
        counts.routes_changed += u64::from(before.is_some());
        match now {
            Err(why) => {
                counts.routes_lost += 1;
                let version = if address.is_ipv4() { "IPv4" } else { "IPv6" };
                tracing::warn!(
                    peer, %address, %why,
                    "no route to a backend: responses to {version} clients are relayed"
                );
            }
            Ok(port) => {
                let interface = interface_name(*port);
                match before {
                    None => tracing::debug!(peer, %address, interface, "found a route to a backend"),
                    Some(_) => tracing::info!(peer, %address, interface, "the route to a backend has changed"),
                }
            }
        }
    }
}
