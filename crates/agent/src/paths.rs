//! Whether payload of this machine reaches a client, and the client's ACKs come back: asked when a connection gets its
//! first sender here, before its first byte. What is refused then is fetched by the frontend, and whole.
//!
//! Routes, `interfaces` and rp_filter are this machine's to know. That a router further on drops packets with a frontend's
//! address as their source shows only in clients that acknowledge nothing (`silences`).
//!
//! The kernel answers RTM_GETROUTE without its lock on network settings (RTNL_FLAG_DOIT_UNLOCKED, net/ipv4/route.c and
//! net/ipv6/route.c), so that the agent's one thread may ask. An answer holds for a short time, and until a route changes.

mod silences;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use netlink_packet_route::route::RouteType;
use shunt_handoff::sender::FirstAnswer;
use shunt_wire::local::Reason;

use crate::agent::Agent;
use crate::host::{interface_index, interface_name};
use crate::incoming::{SELDOM, Seldom};
use crate::interfaces;
use crate::routes::{Changes, Hop, NoRoute, Routes};
use silences::{Path, Silences, Turn};

/// Lines about clients that acknowledge nothing.
const PATH_SILENT: &str = "clients acknowledge nothing of what has this server's address as its source: does a router or \
                           firewall drop such packets (rp_filter, BCP 38), or does one drop what comes back, to `ports` \
                           of [backend]? bodies are relayed";
const NETWORK_SILENT: &str = "this client and those of its network (/24, /64) acknowledge nothing of what has this server's \
                              address as its source: is it gone, does a router or firewall drop such packets \
                              (rp_filter, BCP 38), or does one drop what comes back, to `ports` of [backend]? their \
                              bodies are relayed";
/// How long an answer holds: settings of rp_filter tell of no change.
const HOLDS: Duration = Duration::from_secs(5);
/// Answers that are kept, and refusals that the log has. With more of them all are forgotten.
const MOST_KEPT: usize = 8192;
const MOST_SAID: usize = 64;
/// A first hop that could not be asked for.
const UNKNOWN: Hop = Hop { port: 0, router: None };

/// Why payload does not reach a client, as far as this machine knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Obstacle {
    #[error("it is on this machine, where its packets pass no steering programs")]
    Here,
    #[error("there is no route to it from {from}: {why}")]
    NoRoute { from: IpAddr, why: NoRoute },
    #[error(
        "the route to it leaves by \"{port}\", which `interfaces` in [backend] does not name, nor one that it lies on"
    )]
    NotNamed { port: String },
    #[error(
        "its ACKs come in by \"{inward}\", where rp_filter = 1 drops them, for the route to it leaves by \"{outward}\": \
         set net.ipv4.conf.all.rp_filter and net.ipv4.conf.{inward}.rp_filter to 2, or route both ways alike"
    )]
    Checked { inward: String, outward: String },
    #[error("connections there acknowledged nothing of what had this server's address as its source")]
    Silent,
}

/// Knows by which ways payload leaves this machine for clients.
pub(crate) struct Paths {
    routes: Routes,
    changes: Changes,
    /// Interfaces that were there at the start, by index: whether the programs see what leaves by them.
    covered: BTreeMap<u32, bool>,
    /// The interfaces that this machine's addresses are on.
    addresses: HashMap<IpAddr, u32>,
    known: HashMap<(IpAddr, IpAddr), (Instant, Result<Hop, Obstacle>)>,
    silences: Silences,
    /// A client may bring its own network's silence about: the log has one in a while.
    said_of_network: Seldom,
    said: Vec<(usize, Obstacle, Instant)>,
}

impl Paths {
    /// `named`: the interfaces of the configuration, which the programs are on.
    ///
    /// # Errors
    /// The kernel's.
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

    /// Looks where this machine's addresses are: when a session begins.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn note_addresses(&mut self) -> io::Result<()> {
        let all = if_addrs::get_if_addrs()?.into_iter().filter(|interface| !interface.is_loopback());
        self.addresses = all.filter_map(|one| Some((one.ip(), interface_index(&one.name).ok()?))).collect();
        Ok(())
    }

    /// The first hop from an address of ours to a client, or what is in the way.
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
            // Not asked, or not understood: that says nothing about the route.
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

    /// Whether payload for a client is sent.
    fn may_reach(&mut self, peer: usize, local: IpAddr, client: IpAddr, now: Instant) -> Result<(), Obstacle> {
        let hop = self.hop(local, client, now)?;
        if self.silences.refuses(&Path { peer, hop }, client, now) { Err(Obstacle::Silent) } else { Ok(()) }
    }

    /// Whether the log does not have that yet, or not lately.
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

/// Whether packets of IPv4 that come in there must come by the route to their source: the greater one of two settings
/// counts (Documentation/networking/ip-sysctl.rst).
fn is_strict(interface: &str) -> bool {
    let setting = |of: &str| -> Option<u8> {
        fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{of}/rp_filter")).ok()?.trim().parse().ok()
    };
    setting("all").max(setting(interface)) == Some(1)
}

impl Agent {
    /// Whether payload is sent from an address of this machine to a client.
    ///
    /// # Errors
    /// [`Reason::Unreachable`].
    pub(crate) fn may_reach(&mut self, peer: usize, local: IpAddr, client: IpAddr) -> Result<(), Reason> {
        let Some(paths) = &mut self.paths else { return Ok(()) };
        let Err(why) = paths.may_reach(peer, local, client, self.now) else { return Ok(()) };
        // The log has another line for clients that are silent.
        if why != Obstacle::Silent && paths.is_news(peer, &why, self.now) {
            let peer = &self.peers[peer].name;
            tracing::warn!(peer, %client, %why, "payload does not reach a client: bodies are relayed");
        }
        Err(Reason::Unreachable)
    }

    /// The same from the address that payload for such a client has.
    ///
    /// # Errors
    /// [`Reason::Unreachable`].
    pub(crate) fn may_reach_from_here(&mut self, peer: usize, client: IpAddr) -> Result<(), Reason> {
        let local = self.peers[peer].senders.towards(client.into()).ok_or(Reason::Unreachable)?;
        self.may_reach(peer, local, client)
    }

    /// Learns from what clients have answered, or not.
    pub(crate) fn hear_clients(&mut self) {
        let answers = self.senders.as_mut().map(|senders| senders.take_answers()).unwrap_or_default();
        for answer in answers {
            self.hear_client(&answer);
        }
    }

    fn hear_client(&mut self, answer: &FirstAnswer) {
        let Some(paths) = &mut self.paths else { return };
        if answer.acknowledges && paths.silences.is_empty() {
            return;
        }
        let (peer, client) = (answer.peer as usize, answer.client.address.ip());
        let Some(local) = self.peers[peer].senders.towards(answer.client.address) else { return };
        let Ok(hop) = paths.hop(local, client, self.now) else { return };
        let name = &self.peers[peer].name;
        let (port, router) = (interface_name(hop.port), hop.router.map(tracing::field::display));
        let silent = |pause: Duration, why: &str| {
            let server = answer.server.socket_addr();
            tracing::warn!(peer = name, %client, %server, port, router, ?pause, "{why}");
        };
        match paths.silences.hear(Path { peer, hop }, client, answer.acknowledges, self.now) {
            Some(Turn::Silent(pause)) => silent(pause, PATH_SILENT),
            Some(Turn::NetworkSilent(pause)) if paths.said_of_network.may_speak(self.now) => {
                silent(pause, NETWORK_SILENT);
            }
            Some(Turn::NetworkSilent(_)) => {}
            Some(Turn::Heard) => tracing::info!(peer = name, port, router, "clients acknowledge payload again"),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests;
