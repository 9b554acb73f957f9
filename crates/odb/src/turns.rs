//! Roles of a few threads. One of them leads, and may be held up by a peer that is silent. Then another thread leads.
//! The first thread goes on waiting for the silent peer, and all further work for that peer is kept for it. So each
//! silent peer holds up at most one thread.
//!
//! tests/turns.rs tests all orders of the threads' steps with loom (scripts/loom).

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use shunt_sys::lock::atomic::{AtomicBool, Ordering};
use shunt_sys::lock::{Condvar, Mutex};

/// Roles of the threads. `K`: name of a peer that a thread may wait for. `V`: work for a peer.
#[derive(Debug)]
pub struct Turns<K, V> {
    roles: Mutex<Roles<K, V>>,
    changed: Condvar,
    /// Whether a thread waits for a peer. As a rule none does.
    any_slow: AtomicBool,
}

#[derive(Debug)]
struct Roles<K, V> {
    is_led: bool,
    is_tended: bool,
    tended: Instant,
    /// Peers that a thread waits for, and the work that has arrived for each of them meanwhile.
    slow: HashMap<K, Vec<V>>,
}

impl<K, V> Default for Turns<K, V> {
    fn default() -> Self {
        let roles = Roles { is_led: false, is_tended: false, tended: Instant::now(), slow: HashMap::new() };
        Self { roles: Mutex::new(roles), changed: Condvar::new(), any_slow: AtomicBool::new(false) }
    }
}

impl<K: Copy + Eq + Hash, V> Turns<K, V> {
    /// Waits until no thread leads, and then makes this thread the leader. While threads wait here, one of them calls
    /// `tend` at the interval `every`. `tend` does what the caller has to do regularly.
    pub fn wait_to_lead(&self, every: Duration, mut tend: impl FnMut()) {
        let mut roles = self.roles.lock();
        while roles.is_led {
            if roles.is_tended {
                roles = self.changed.wait(roles);
                continue;
            }
            roles.is_tended = true;
            roles = self.changed.wait_timeout(roles, every).0;
            if roles.is_led && roles.tended.elapsed() >= every {
                roles.tended = Instant::now();
                drop(roles);
                tend();
                roles = self.roles.lock();
            }
            roles.is_tended = false;
        }
        roles.is_led = true;
        // Another waiting thread is to tend from now on.
        self.changed.notify_all();
    }

    /// Lets another thread lead. `slow` is the peer that this thread goes on waiting for, if any. Work that arrives for
    /// that peer is kept for this thread, which calls [`Self::kept`] until no work is left.
    pub fn hand_over(&self, slow: Option<K>) {
        let mut roles = self.roles.lock();
        roles.is_led = false;
        if let Some(slow) = slow {
            roles.slow.entry(slow).or_default();
            self.any_slow.store(true, Ordering::Release);
        }
        self.changed.notify_all();
    }

    /// Whether a thread waits for a peer.
    #[inline]
    pub fn any_slow(&self) -> bool {
        self.any_slow.load(Ordering::Acquire)
    }

    /// Keeps the work `what` for the thread that waits for `slow`. Returns false if no thread waits for it.
    pub fn keep(&self, slow: K, what: V) -> bool {
        let mut roles = self.roles.lock();
        let Some(kept) = roles.slow.get_mut(&slow) else { return false };
        kept.push(what);
        true
    }

    /// Takes the work that was kept for the thread that has waited for `slow`. If there is none, the thread no longer
    /// counts as waiting for `slow`.
    pub fn kept(&self, slow: K) -> Vec<V> {
        let mut roles = self.roles.lock();
        let kept = roles.slow.get_mut(&slow).map(std::mem::take).unwrap_or_default();
        if kept.is_empty() {
            roles.slow.remove(&slow);
            self.any_slow.store(!roles.slow.is_empty(), Ordering::Release);
        }
        kept
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;

    const EVERY: Duration = Duration::from_millis(1);

    #[test]
    fn one_leads_and_another_tends() {
        let turns = Arc::new(Turns::<u8, u8>::default());
        turns.wait_to_lead(EVERY, || panic!("nobody leads"));
        let (tended, heard) = channel();
        let other = Arc::clone(&turns);
        let follower = std::thread::spawn(move || other.wait_to_lead(EVERY, || _ = tended.send(())));
        heard.recv().unwrap();
        heard.recv().unwrap();
        turns.hand_over(None);
        follower.join().unwrap();
    }

    #[test]
    fn work_for_one_peer_waits_until_its_thread_is_done() {
        let turns = Turns::default();
        turns.wait_to_lead(EVERY, || ());
        assert!(!turns.keep('a', 1));
        turns.hand_over(Some('a'));
        assert!(turns.any_slow() && turns.keep('a', 2) && !turns.keep('b', 3));
        assert_eq!(turns.kept('a'), [2]);
        assert!(turns.keep('a', 4));
        assert_eq!((turns.kept('a'), turns.kept('a')), (vec![4], vec![]));
        assert!(!turns.any_slow() && !turns.keep('a', 5));
    }
}
