//! Checks whether payload of this machine reaches a client, and the client's ACKs come back. The check is made before a
//! connection gets its first sender here, and when a frontend asks (ASK). If the check refuses a payload that a server
//! here has offered, the frontend fetches that payload through both agents. A *peer* is a frontend's agent, for whose
//! clients this machine sends. A *sender* is this machine's kernel socket for one client.
//!
//! This machine knows its routes, `interfaces` and rp_filter. It does not know whether a router further on drops
//! packets with a frontend's address as their source. Such a loss shows only in clients that acknowledge nothing
//! (`silences`).
//!
//! The kernel answers RTM_GETROUTE without its lock on network settings (RTNL_FLAG_DOIT_UNLOCKED, net/ipv4/route.c and
//! net/ipv6/route.c), so the agent's one thread may ask. An answer holds for HOLDS, but no longer than until a route
//! changes.

mod silences;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use netlink_packet_route::route::RouteType;
use shunt_handoff::sender::FirstAnswer;
use shunt_logic::rate::{SELDOM, Seldom};
use shunt_wire::local::Reason;

use shunt_host::interfaces;
use shunt_host::interfaces::{interface_index, interface_name};
use shunt_host::routes::{Changes, Hop, NoRoute, Routes};
use silences::{Path, Silences, Turn};

/// Log lines about clients that acknowledge nothing.
const PATH_SILENT: &str = "clients acknowledge no packets that carry this server's address as their source; bodies \
                           are relayed. Check whether a router or firewall drops such packets (rp_filter, BCP 38), or \
                           drops the answers to `ports` of [backend]";
const NETWORK_SILENT: &str = "clients of this network (/24, /64) acknowledge no packets that carry this server's \
                              address as their source; their bodies are relayed. Check whether the client is gone, \
                              whether a router or firewall drops such packets (rp_filter, BCP 38), or drops the \
                              answers to `ports` of [backend]";
/// Time that an answer holds. It is short because no notification reports changes of rp_filter.
const HOLDS: Duration = Duration::from_secs(5);
/// Most answers about routes that are kept. Once there are so many, the next question forgets all of them.
const MOST_KEPT: usize = 8192;
/// Most obstacles that are remembered as logged. One more replaces the newest of them.
const MOST_SAID: usize = 64;
/// Stands for a first hop about which the kernel could not be asked, or gave no answer that is understood.
const UNKNOWN: Hop = Hop { port: 0, router: None };

/// Reason why payload does not reach a client, as far as this machine knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Obstacle {
    #[error("the client is on this machine, where its packets do not pass the steering programs")]
    Here,
    #[error("there is no route to the client from {from}: {why}")]
    NoRoute { from: IpAddr, why: NoRoute },
    #[error(
        "the route to the client leaves by \"{port}\"; add it, or the interface that it lies on, to `interfaces` in \
         [backend]"
    )]
    NotNamed { port: String },
    #[error(
        "rp_filter = 1 drops the client's ACKs, which come in by \"{inward}\", because the route to the client leaves \
         by \"{outward}\": set net.ipv4.conf.all.rp_filter and net.ipv4.conf.{inward}.rp_filter to 2, or use one \
         interface for both directions"
    )]
    Checked { inward: String, outward: String },
    #[error("other clients of that network acknowledged no packets that carry this server's address as their source")]
    Silent,
}

/// State of the checks: the sockets for questions about routes, answers that are kept, and clients that are silent.
pub(crate) struct Paths {
    routes: Routes,
    changes: Changes,
    /// Whether the steering programs (BPF) see the packets that leave by an interface. The key is the interface's
    /// index. The map has only interfaces that existed when this `Paths` was made.
    covered: BTreeMap<u32, bool>,
    /// Index of the interface that has each address of this machine.
    addresses: HashMap<IpAddr, u32>,
    /// Answers about routes, by this machine's address and the client's: the time of the question, and the answer.
    known: HashMap<(IpAddr, IpAddr), (Instant, Result<Hop, Obstacle>)>,
    silences: Silences,
    /// Limits the log lines about silent networks, because a client can make its own network silent.
    said_of_network: Seldom,
    /// Obstacles that were logged: number of the peer, the obstacle, and the time.
    said: Vec<(usize, Obstacle, Instant)>,
}

impl Paths {
    /// Opens the sockets that ask the kernel about routes and hear of their changes. `named` has the interfaces of the
    /// configuration: the steering programs (BPF) are attached to them.
    ///
    /// # Errors
    /// Returns the kernel's error of socket(2) or bind(2).
    pub(crate) fn open(named: &[String]) -> io::Result<Self> {
        let mut covered = interfaces::covered(named);
        covered.extend(named.iter().filter_map(|name| Some((interface_index(name).ok()?, true))));
        Ok(Self {
            routes: Routes::open()?,
            changes: Changes::open()?,
            covered,
            addresses: HashMap::new(),
            known: HashMap::new(),
            silences: Silences::default(),
            said_of_network: Seldom::default(),
            said: Vec::new(),
        })
    }

    /// Notes which interface has each of this machine's addresses. Called for each new connection with a peer.
    ///
    /// # Errors
    /// Returns the kernel's error of getifaddrs(3).
    pub(crate) fn note_addresses(&mut self) -> io::Result<()> {
        let all = if_addrs::get_if_addrs()?.into_iter().filter(|interface| !interface.is_loopback());
        self.addresses = all.filter_map(|one| Some((one.ip(), interface_index(&one.name).ok()?))).collect();
        Ok(())
    }

    /// Returns the first hop from an address of this machine to a client, or the obstacle.
    fn hop(&mut self, local: IpAddr, client: IpAddr, now: Instant) -> Result<Hop, Obstacle> {
        if self.changes.take() || self.known.len() >= MOST_KEPT {
            self.known.clear();
        }
        if let Some((asked, answer)) = self.known.get(&(local, client))
            && now.duration_since(*asked) < HOLDS
        {
            return answer.clone();
        }
        let answer = self.look(local, client);
        self.known.insert((local, client), (now, answer.clone()));
        answer
    }

    fn look(&mut self, local: IpAddr, client: IpAddr) -> Result<Hop, Obstacle> {
        let no_route = |why| Obstacle::NoRoute { from: local, why };
        let hop = match self.routes.hop_from(local, client) {
            Ok(Ok(hop)) => hop,
            // The kernel could not be asked, or its answer was not understood. That says nothing about the route.
            Err(_) | Ok(Err(NoRoute::Answer(_))) => return Ok(UNKNOWN),
            Ok(Err(NoRoute::Kind(RouteType::Local))) => return Err(Obstacle::Here),
            Ok(Err(why)) => return Err(no_route(why)),
        };
        if self.covered.get(&hop.port) == Some(&false) {
            return Err(Obstacle::NotNamed { port: interface_name(hop.port) });
        }
        match self.addresses.get(&local) {
            Some(inward) if *inward != hop.port && local.is_ipv4() => {
                let (inward, outward) = (interface_name(*inward), interface_name(hop.port));
                if is_strict(&inward) { Err(Obstacle::Checked { inward, outward }) } else { Ok(hop) }
            }
            _ => Ok(hop),
        }
    }

    /// Checks whether payload may be sent to a client.
    fn may_reach(&mut self, peer: usize, local: IpAddr, client: IpAddr, now: Instant) -> Result<(), Obstacle> {
        let hop = self.hop(local, client, now)?;
        if self.silences.refuses(&Path { peer, hop }, client, now) { Err(Obstacle::Silent) } else { Ok(()) }
    }

    /// Returns whether this obstacle is to be logged: it was not logged for this peer within [`SELDOM`].
    fn is_news(&mut self, peer: usize, obstacle: &Obstacle, now: Instant) -> bool {
        self.said.retain(|(.., at)| now.duration_since(*at) < SELDOM);
        if self.said.iter().any(|(of, what, _)| *of == peer && what == obstacle) {
            return false;
        }
        self.said.truncate(MOST_SAID - 1);
        self.said.push((peer, obstacle.clone(), now));
        true
    }
}

/// Returns whether IPv4 packets that come in by `interface` are dropped unless the route to their source leaves by the
/// same interface (a strict rp_filter). The greater of two settings counts, `all` and the interface's own
/// (Documentation/networking/ip-sysctl.rst).
fn is_strict(interface: &str) -> bool {
    let setting = |of: &str| -> Option<u8> {
        fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{of}/rp_filter")).ok()?.trim().parse().ok()
    };
    setting("all").max(setting(interface)) == Some(1)
}

impl Paths {
    /// Checks whether payload may be sent from an address of this machine to a client. `name` is the peer's name, for
    /// the log.
    ///
    /// # Errors
    /// Returns [`Reason::Unreachable`].
    pub(crate) fn ask(
        &mut self,
        peer: usize,
        name: &str,
        local: IpAddr,
        client: IpAddr,
        now: Instant,
    ) -> Result<(), Reason> {
        let Err(why) = self.may_reach(peer, local, client, now) else { return Ok(()) };
        // Clients that acknowledge nothing are logged in [`Paths::hear`].
        if why != Obstacle::Silent && self.is_news(peer, &why, now) {
            tracing::warn!(peer = name, %client, %why, "payload does not reach a client: bodies are relayed");
        }
        Err(Reason::Unreachable)
    }

    /// Learns from a client's first answer to payload from `local`, or from the lack of an answer.
    pub(crate) fn hear(&mut self, answer: &FirstAnswer, name: &str, local: IpAddr, now: Instant) {
        if answer.acknowledges && self.silences.is_empty() {
            return;
        }
        let (peer, client) = (answer.peer as usize, answer.client.address.ip());
        let Ok(hop) = self.hop(local, client, now) else { return };
        let (port, router) = (interface_name(hop.port), hop.router.map(tracing::field::display));
        let silent = |pause: Duration, why: &str| {
            let server = answer.server.socket_addr();
            tracing::warn!(peer = name, %client, %server, port, router, ?pause, "{why}");
        };
        match self.silences.hear(Path { peer, hop }, client, answer.acknowledges, now) {
            Some(Turn::Silent(pause)) => silent(pause, PATH_SILENT),
            Some(Turn::NetworkSilent(pause)) if self.said_of_network.allows(now) => silent(pause, NETWORK_SILENT),
            Some(Turn::NetworkSilent(_)) => {}
            Some(Turn::Heard) => tracing::info!(peer = name, port, router, "clients acknowledge payload again"),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests;
