//! Keeps the agent informed by which interfaces ("ports") clients' ACKs leave this machine towards each backend. The
//! kernel is asked for the routes when a session with the backend's agent begins, and whenever routes, rules, links or
//! addresses have changed. A *sender* is a backend's kernel socket for a client, and a *peer* the backend's agent.
//!
//! ```text
//!   agent --watch--> thread "routes": RTM_GETROUTE, at each change, at most every SETTLE; or after EVERY
//!         <--news---                  only answers that are new
//! ```
//!
//! A separate thread asks, so that no question to the kernel delays the agent. Until the thread has an answer for one
//! IP version, responses to clients of this version are relayed, not handed off.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::os::poll::{Interest, Poll, Source};
use crate::os::threads;
use shunt_host::routes::{Changes, NoRoute, Routes};

/// Time between a change and the next question to the kernel. Some changes are announced before they take effect, and
/// many come together.
const SETTLE: Duration = Duration::from_millis(100);
/// Time after which the thread asks without a change, because notifications may be lost.
const EVERY: Duration = Duration::from_secs(5);

/// Addresses of one peer's senders, one of each IP version at most.
pub(crate) type Addresses = [Option<IpAddr>; 2];

/// Index of the interface towards an address, or why there is none.
pub(crate) type Answer = Result<u32, NoRoute>;

/// Request to watch the routes to a peer's senders.
struct Watch {
    peer: u32,
    addresses: Addresses,
}

/// An answer that differs from the one before, or is the first one for its address.
pub(crate) struct News {
    pub(crate) peer: u32,
    pub(crate) address: IpAddr,
    pub(crate) before: Option<Answer>,
    pub(crate) now: Answer,
}

/// The agent's side of the thread.
pub(crate) struct Uplinks {
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
    /// Starts the thread, which has no capability. Call it once the agent has given up its own capabilities.
    ///
    /// # Errors
    /// Returns the kernel's error of eventfd(2), epoll_ctl(2), socket(2) or bind(2), or why the thread cannot be
    /// started.
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
        threads::start("routes", "cannot start the thread that looks up routes: all responses are relayed", work)?;
        Ok(Self { watches, news, wake_thread, wake_agent })
    }

    /// Asks for the interfaces towards a peer's senders from now on, in place of the peer's earlier addresses. The
    /// first answer for each address counts as news.
    pub(crate) fn watch(&self, peer: u32, addresses: Addresses) {
        let _ = self.watches.send(Watch { peer, addresses });
        wake(&self.wake_thread);
    }

    /// Returns the news since the last call.
    pub(crate) fn take_news(&self) -> Vec<News> {
        let _ = rustix::io::read(&self.wake_agent, &mut [0; 8]);
        self.news.try_iter().collect()
    }
}

/// An address of a peer's senders, and the last answer about it.
struct Watched {
    peer: u32,
    address: IpAddr,
    answer: Option<Answer>,
}

/// The thread's state.
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
    /// Runs until the agent has ended.
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

    /// Waits for a request of the agent or a change, for EVERY at most. `is_settling` says that a change was just seen.
    /// The wait then takes SETTLE, and only a request of the agent ends it earlier.
    fn wait(&self, is_settling: bool) {
        let (changes, flags) = (self.changes.descriptor(), PollFlags::IN);
        let mut all = [PollFd::new(&self.wake, flags), PollFd::new(&changes, flags)];
        let (descriptors, timeout) = if is_settling { (&mut all[..1], SETTLE) } else { (&mut all[..], EVERY) };
        let timeout = Timespec::try_from(timeout).expect("both are short");
        // If a signal interrupts the call, the thread only asks once more than it needs to.
        let _ = poll(descriptors, Some(&timeout));
    }

    /// Takes the agent's requests. Returns `false` if the agent is gone.
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
                    tracing::error!(%error, address = %one.address, "cannot look up a route; trying again");
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

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_host::interfaces::interface_name;
    use shunt_testbed::machine::on_a_machine;
    use std::time::Instant;

    /// Waits for news. Returns the newest answer, as the interface's name or the error, and whether there was an
    /// earlier one.
    fn next(uplinks: &Uplinks) -> (String, bool) {
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
            let uplinks = Uplinks::start(&agents_poll).unwrap();
            uplinks.watch(3, [Some("198.51.100.7".parse().unwrap()), None]);
            assert_eq!(next(&uplinks), ("east".into(), false));
            machine.ip("route add 203.0.113.0/24 via 10.0.2.2");
            machine.ip("link set east down");
            assert_eq!(next(&uplinks), ("west".into(), true));
            machine.ip("route del 198.51.100.0/24 via 10.0.2.2 metric 2");
            assert!(next(&uplinks).0.starts_with("Network is unreachable"));
            machine.ip("rule add to 198.51.100.7 lookup 77");
            machine.ip("route add default via 10.0.2.2 table 77");
            assert_eq!(next(&uplinks), ("west".into(), true));
            uplinks.watch(3, [Some("203.0.113.9".parse().unwrap()), None]);
            assert_eq!(next(&uplinks), ("west".into(), false), "an address that was not watched before");
        });
    }
}
