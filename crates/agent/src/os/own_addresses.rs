//! The addresses of this machine, as they come and go. A separate thread hears of changes (rtnetlink(7)) and then reads
//! the addresses. To answer, the kernel takes its lock on all network settings, which others may hold for long.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::os::poll::{Interest, Poll, Source};
use crate::os::threads;
use shunt_host::routes::Changes;

/// Time after which the thread reads the addresses even without a notification, because notifications may be lost.
const EVERY: Duration = Duration::from_secs(5);

/// Returns all addresses that interfaces have now, sorted.
///
/// # Errors
/// Returns the kernel's error of getifaddrs(3).
pub(crate) fn read() -> io::Result<Vec<IpAddr>> {
    let mut all: Vec<IpAddr> = if_addrs::get_if_addrs()?.iter().map(if_addrs::Interface::ip).collect();
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

/// The agent's side of the thread.
#[derive(Debug)]
pub(crate) struct OwnAddresses {
    news: Receiver<Vec<IpAddr>>,
    wake: Arc<OwnedFd>,
}

/// The thread's state.
struct Watcher {
    changes: Changes,
    known: Vec<IpAddr>,
    tell: Sender<Vec<IpAddr>>,
    wake: Arc<OwnedFd>,
}

impl OwnAddresses {
    /// Starts the thread, which has no capability. Call it once the agent has given up its own capabilities. `known`
    /// has the addresses that were read at the start.
    ///
    /// # Errors
    /// Returns the kernel's error of eventfd(2), epoll_ctl(2), socket(2) or bind(2), or why the thread cannot be
    /// started.
    pub(crate) fn watch(known: Vec<IpAddr>, agents_poll: &Poll) -> io::Result<Self> {
        let (tell, news) = channel();
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        agents_poll.set(&wake, Source::Addresses, Interest::Readable)?;
        let watcher = Watcher { changes: Changes::of_addresses()?, known, tell, wake: Arc::clone(&wake) };
        let without = "cannot watch this machine's addresses: programs at new addresses get bytes in place of \
                       references";
        threads::start("addresses", without, vec![move || watcher.run()])?;
        Ok(Self { news, wake })
    }

    /// Returns the newest addresses, if they have changed.
    pub(crate) fn take_news(&self) -> Option<Vec<IpAddr>> {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        self.news.try_iter().last()
    }
}

impl Watcher {
    /// Runs until the agent has ended.
    fn run(mut self) {
        let longest = Timespec::try_from(EVERY).expect("a few seconds");
        loop {
            // If a signal interrupts the call, the thread only looks once more than it needs to.
            let _ = poll(&mut [PollFd::new(&self.changes.descriptor(), PollFlags::IN)], Some(&longest));
            self.changes.take();
            // After an error, the next look reads the addresses again.
            let Ok(now) = read() else { continue };
            if now == self.known {
                continue;
            }
            self.known.clone_from(&now);
            if self.tell.send(now).is_err() {
                return;
            }
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_testbed::machine::on_a_machine;

    #[test]
    fn an_address_that_comes_or_goes_is_news() {
        on_a_machine("own_addresses", &[], |machine| {
            let agents_poll = Poll::new().unwrap();
            let own = OwnAddresses::watch(read().unwrap(), &agents_poll).unwrap();
            let news = || {
                let has = |addresses: Vec<IpAddr>| addresses.contains(&"192.0.2.77".parse().unwrap());
                shunt_testbed::wait_for("news of addresses", || own.take_news().map(has)).unwrap()
            };
            machine.ip("addr add 192.0.2.77/24 dev east");
            shunt_testbed::wait_for("the new address is known", &news).unwrap();
            machine.ip("addr del 192.0.2.77/24 dev east");
            shunt_testbed::wait_for("the address is forgotten", || !news()).unwrap();
        });
    }
}
