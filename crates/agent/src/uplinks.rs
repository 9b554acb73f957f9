//! Keeps the ports that clients' ACKs leave by, towards each backend, as this machine's routes have them: at the
//! beginning of a session, and whenever something about routes, rules, links or addresses has changed.
//!
//! ```text
//!   agent --watch--> thread "routes": RTM_GETROUTE, at each change, at most every SETTLE; or after EVERY
//!         <--news---                  only answers that are new
//! ```
//!
//! The kernel answers under its lock on all network settings, which may be held for long. So a thread asks, and until
//! it has an answer clients of that IP version are relayed.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::agent::Agent;
use crate::host::interface_name;
use crate::poll::{Interest, Poll, Source};
use crate::routes::{Changes, NoRoute, Routes};
use crate::threads;

/// After a change, until the next look: some are told of before they hold, and many come together.
const SETTLE: Duration = Duration::from_millis(100);
/// A look without a change, for notifications that were lost.
const EVERY: Duration = Duration::from_secs(5);

/// The addresses of one peer's senders, one of each IP version at most.
pub(crate) type Addresses = [Option<IpAddr>; 2];

/// The port towards an address, or why there is none.
pub(crate) type Answer = Result<u32, NoRoute>;

/// A peer's senders are there from now on.
struct Watch {
    peer: u32,
    addresses: Addresses,
}

/// An answer that differs from the one before.
pub(crate) struct News {
    peer: u32,
    address: IpAddr,
    before: Option<Answer>,
    now: Answer,
}

/// The agent's end.
pub(crate) struct Uplinks {
    /// Peers that are asked for: whether there is an answer.
    asked: BTreeMap<u32, bool>,
    watches: Sender<Watch>,
    news: Receiver<News>,
    wake_thread: Arc<OwnedFd>,
    wake_agent: Arc<OwnedFd>,
}

fn wake(descriptor: &OwnedFd) {
    let _ = rustix::io::write(descriptor, &1u64.to_ne_bytes());
}

fn waker() -> io::Result<Arc<OwnedFd>> {
    Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}

impl Uplinks {
    /// Has a thread ask, which has no capability at all: once the agent has given up its own.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn start(agents_poll: &Poll) -> io::Result<Self> {
        let (watches, asked) = channel();
        let (tell, news) = channel();
        let (wake_thread, wake_agent) = (waker()?, waker()?);
        agents_poll.set(&wake_agent, Source::Routes, Interest::Readable)?;
        let watcher = Watcher {
            routes: Routes::open()?,
            changes: Changes::open()?,
            asked,
            tell,
            wake: Arc::clone(&wake_thread),
            wake_agent: Arc::clone(&wake_agent),
            watched: Vec::new(),
        };
        let work = vec![move || watcher.run()];
        threads::start("routes", "routes are not asked for: all clients are relayed", work)?;
        Ok(Self { asked: BTreeMap::new(), watches, news, wake_thread, wake_agent })
    }

    /// Asks for the ports towards a peer's senders from now on. The first answers are news.
    pub(crate) fn watch(&mut self, peer: u32, addresses: Addresses) {
        self.asked.insert(peer, false);
        let _ = self.watches.send(Watch { peer, addresses });
        wake(&self.wake_thread);
    }

    /// Whether it is not known yet how a peer is reached.
    pub(crate) fn is_asking(&self, peer: u32) -> bool {
        self.asked.get(&peer) == Some(&false)
    }

    /// Whether it is known how a peer is reached, or that it is not.
    pub(crate) fn is_answered(&self, peer: u32) -> bool {
        self.asked.get(&peer) == Some(&true)
    }

    fn take_news(&mut self) -> Vec<News> {
        let _ = rustix::io::read(&self.wake_agent, &mut [0; 8]);
        let news: Vec<News> = self.news.try_iter().collect();
        self.asked.extend(news.iter().map(|one| (one.peer, true)));
        news
    }
}

/// What is asked for: an address of a peer, and the last answer.
struct Watched {
    peer: u32,
    address: IpAddr,
    answer: Option<Answer>,
}

/// The thread's end.
struct Watcher {
    routes: Routes,
    changes: Changes,
    asked: Receiver<Watch>,
    tell: Sender<News>,
    wake: Arc<OwnedFd>,
    wake_agent: Arc<OwnedFd>,
    watched: Vec<Watched>,
}

impl Watcher {
    /// Until the agent has ended.
    fn run(mut self) {
        let mut is_settling = false;
        loop {
            self.wait(is_settling);
            if !self.take_watches() {
                return;
            }
            is_settling = self.changes.take();
            self.look();
        }
    }

    /// For the agent, and for changes: `is_settling`, for those in a moment.
    fn wait(&self, is_settling: bool) {
        let (changes, flags) = (self.changes.descriptor(), PollFlags::IN);
        let mut all = [PollFd::new(&self.wake, flags), PollFd::new(&changes, flags)];
        let (descriptors, timeout) = if is_settling { (&mut all[..1], SETTLE) } else { (&mut all[..], EVERY) };
        let timeout = Timespec::try_from(timeout).expect("both are short");
        // Interrupted: a look too many.
        let _ = poll(descriptors, Some(&timeout));
    }

    /// `false`: there is nobody to tell.
    fn take_watches(&mut self) -> bool {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        loop {
            match self.asked.try_recv() {
                Ok(Watch { peer, addresses }) => {
                    self.watched.retain(|one| one.peer != peer);
                    let new = addresses.into_iter().flatten().map(|address| Watched { peer, address, answer: None });
                    self.watched.extend(new);
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn look(&mut self) {
        let mut is_new = false;
        for one in &mut self.watched {
            let now = match self.routes.port_towards(one.address) {
                Ok(now) => now,
                Err(error) => {
                    tracing::error!(%error, address = %one.address, "cannot ask for a route; asking again");
                    continue;
                }
            };
            if one.answer.as_ref() != Some(&now) {
                let before = one.answer.replace(now.clone());
                let _ = self.tell.send(News { peer: one.peer, address: one.address, before, now });
                is_new = true;
            }
        }
        if is_new {
            wake(&self.wake_agent);
        }
    }
}

impl Agent {
    /// Has routes asked for, where this machine is a frontend: after privileges were given up, and before system calls
    /// are restricted.
    ///
    /// # Errors
    /// Where there is no socket or no thread for it.
    pub fn start_routes(&mut self) -> io::Result<()> {
        if self.frontend.is_some() {
            self.uplinks = Some(Uplinks::start(&self.poll)?);
        }
        Ok(())
    }

    /// A route to a peer's senders is known, or another one, or there is none.
    pub(crate) fn on_routes(&mut self) {
        let all = self.uplinks.as_mut().map(Uplinks::take_news).unwrap_or_default();
        for news in all {
            let port = news.now.as_ref().copied().unwrap_or(0);
            let Some(frontend) = &mut self.frontend else { return };
            match frontend.set_port(news.peer, news.address, port) {
                Ok(true) => self.say_route(&news),
                Ok(false) => {} // it has said another address since
                Err(error) => {
                    tracing::error!(%error, peer = self.peers[news.peer as usize].name, "cannot steer to a peer");
                }
            }
        }
        self.look_at_limits(); // a peer without a route is told to offer nothing
        if let Some(frontend) = &self.frontend
            && let Err(error) = self.board.set_families(|index| frontend.families(index as u32))
        {
            tracing::error!(%error, "cannot write the board");
        }
    }

    fn say_route(&mut self, news: &News) {
        let News { address, before, now, .. } = news;
        let peer = &self.peers[news.peer as usize].name;
        self.counts.routes_changed += u64::from(before.is_some());
        match now {
            Err(why) => {
                self.counts.routes_lost += 1;
                let version = if address.is_ipv4() { "IPv4" } else { "IPv6" };
                tracing::warn!(peer, %address, %why, "no route to a backend: clients of {version} are relayed");
            }
            Ok(port) => {
                let interface = interface_name(*port);
                match before {
                    None => tracing::debug!(peer, %address, interface, "a route to a backend"),
                    Some(_) => tracing::info!(peer, %address, interface, "the route to a backend has changed"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_machine::on_a_machine;
    use std::time::Instant;

    /// The next answer, by the interface's name, and whether there was one before.
    fn next(uplinks: &mut Uplinks) -> (String, bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            if let Some(news) = uplinks.take_news().pop() {
                return (news.now.map_or_else(|error| error.to_string(), interface_name), news.before.is_some());
            }
            assert!(Instant::now() < deadline, "no news");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn each_change_of_a_route_is_news_and_nothing_else_is() {
        let two =
            ["route add 198.51.100.0/24 via 10.0.1.2 metric 1", "route add 198.51.100.0/24 via 10.0.2.2 metric 2"];
        on_a_machine("uplinks", &two, |machine| {
            let agents_poll = Poll::new().unwrap();
            let mut uplinks = Uplinks::start(&agents_poll).unwrap();
            uplinks.watch(3, [Some("198.51.100.7".parse().unwrap()), None]);
            assert!(uplinks.is_asking(3));
            assert_eq!(next(&mut uplinks), ("east".into(), false));
            assert!(!uplinks.is_asking(3));
            machine.ip("route add 203.0.113.0/24 via 10.0.2.2");
            machine.ip("link set east down");
            assert_eq!(next(&mut uplinks), ("west".into(), true));
            machine.ip("route del 198.51.100.0/24 via 10.0.2.2 metric 2");
            assert!(next(&mut uplinks).0.starts_with("Network is unreachable"));
            machine.ip("rule add to 198.51.100.7 lookup 77");
            machine.ip("route add default via 10.0.2.2 table 77");
            assert_eq!(next(&mut uplinks), ("west".into(), true));
            uplinks.watch(3, [Some("203.0.113.9".parse().unwrap()), None]);
            assert_eq!(next(&mut uplinks), ("west".into(), false), "an address that was not watched before");
        });
    }
}
