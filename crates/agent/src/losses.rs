//! What becomes of payloads whose backend's agent is gone.
//!
//! Its kernel may have all of a payload, or some, and deliver that: the sockets of an agent that has ended go on until
//! their buffers are empty. Or the machine is gone, and nothing comes. From here the two differ only in whether the
//! client acknowledges more. So each payload that was on its way from a lost peer is watched, and left alone while it
//! gets on. When it has not for a while, its server is told, again and again until the region has ended or another
//! backend sends it: the server may have been busy with something else, or not have been connected to us.
//!
//! The flow table knows all that is needed. In the normal way of a handoff nothing is noted for this.

use std::time::{Duration, Instant};

use shunt_handoff::frontend::ActiveRegion;
use shunt_wire::local::Reason;

use crate::agent::Agent;
use crate::steer::ends;

/// How long a payload may make no progress, and round trips on top of that: loss is repaired in fewer.
const GRACE: Duration = Duration::from_millis(300);
const GRACE_ROUND_TRIPS: u32 = 4;
/// Between two times that a server is told of the same payload.
const AGAIN: Duration = Duration::from_secs(1);

/// How long nothing may come of a payload whose server is gone: it may never have been claimed.
const LEFT: Duration = Duration::from_secs(10);
/// How often a server is told in vain before it is taken for gone: after an agent has begun anew, servers find it by and by.
const TOLD_IN_VAIN: u32 = 10;

struct Watched {
    region: ActiveRegion,
    /// When it is to be called stalled, if nothing happens.
    due: Instant,
    /// How often its server is still told before it is taken for gone.
    tells: u32,
}

impl Watched {
    /// From the connection's last packet on: a machine that is cut off has been silent on it for as long as it took to
    /// find that out. The silence of a client that takes nothing does not count.
    fn new(region: ActiveRegion, now: Instant) -> Self {
        let silence = if region.is_shut { Duration::ZERO } else { region.quiet };
        let silent_since = now.checked_sub(silence).unwrap_or(now);
        Self { region, due: silent_since + GRACE + region.round_trip * GRACE_ROUND_TRIPS, tells: TOLD_IN_VAIN }
    }

    /// What it is `now`; `true` where its server has to be told.
    fn look(&mut self, region: ActiveRegion, now: Instant) -> bool {
        if region.acked != self.region.acked || region.is_shut {
            *self = Self::new(region, now);
            return false;
        }
        let is_due = self.due <= now;
        if is_due {
            self.due = now + AGAIN;
            self.tells = self.tells.saturating_sub(1);
        }
        is_due
    }
}

/// Whether the first of two handoffs of one connection with a program was begun after the other: the lower halves of their
/// names count up, and around.
fn is_later(one: u64, other: u64) -> bool {
    (one as u32).wrapping_sub(other as u32).cast_signed() > 0
}

/// Payloads that are watched.
#[derive(Default)]
pub(crate) struct Losses(Vec<Watched>);

impl Losses {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

impl Agent {
    /// Watches what is on its way from the peer at `index`, or from anybody. New handoffs to it are refused already.
    pub(crate) fn watch_regions(&mut self, index: Option<u32>) {
        let Some(frontend) = &self.frontend else {
            return;
        };
        let regions = frontend.active_regions(index);
        if regions.is_empty() {
            return;
        }
        tracing::info!(payloads = regions.len(), "watching what comes from an agent that is gone");
        let known = |region: &ActiveRegion| self.losses.0.iter().any(|one| one.region.handoff == region.handoff);
        let new: Vec<_> = regions.into_iter().filter(|region| !known(region)).collect();
        self.losses.0.extend(new.into_iter().map(|region| Watched::new(region, self.now)));
    }

    /// A process that could hand off and is gone: its connections may have outlived it. `newest`: the last handoff that it has
    /// told of. What it has begun since, nobody sends.
    pub(crate) fn end_left_regions(&mut self, ring: u32, newest: Option<u64>) {
        let Some(frontend) = &self.frontend else { return };
        let left = |region: &ActiveRegion| region.queues && region.ring == ring && region.acked == 0;
        for region in frontend.active_regions(None).into_iter().filter(left) {
            if newest.is_none_or(|newest| is_later(region.handoff, newest)) {
                tracing::info!(handoff = region.handoff, client = %ends(&region.key).1, "a process has ended with a handoff that it has not told of");
                frontend.cancel(&region);
            } else {
                self.losses.0.push(Watched { region, due: self.now + LEFT, tells: 1 });
            }
        }
    }

    fn cancel_if_left(&self, region: &ActiveRegion) {
        if let Some(frontend) = &self.frontend
            && region.queues
            && !frontend.has_ring(region.ring)
        {
            frontend.cancel(region);
        }
    }

    pub(crate) fn tend_losses(&mut self) {
        let (Some(frontend), now) = (&self.frontend, self.now) else {
            return;
        };
        let mut stalled = Vec::new();
        self.losses.0.retain_mut(|watched| {
            let Some(region) = frontend.region_now(&watched.region) else {
                return false;
            };
            if watched.look(region, now) {
                stalled.push((region, watched.tells == 0));
            }
            true
        });
        for (region, is_given_up) in stalled {
            self.counts.stalled += 1;
            let client = ends(&region.key).1;
            tracing::warn!(handoff = region.handoff, %client, acked = region.acked, "a lost agent's payload comes no further");
            self.tell_all_servers(region.handoff, Reason::PeerLost);
            if is_given_up {
                self.cancel_if_left(&region);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(acked: u64, is_shut: bool) -> ActiveRegion {
        let round_trip = Duration::from_millis(50);
        let quiet = Duration::ZERO;
        let (queues, ring) = (false, 0);
        ActiveRegion { key: Default::default(), handoff: 1, peer: 0, acked, is_shut, round_trip, quiet, queues, ring }
    }

    #[test]
    fn later_handoffs_are_told_from_earlier_ones() {
        let name = |made: u32| 7 << 32 | u64::from(made);
        assert!(is_later(name(6), name(5)) && !is_later(name(5), name(5)) && !is_later(name(5), name(6)));
        assert!(is_later(name(2), name(u32::MAX - 3)) && !is_later(name(u32::MAX - 3), name(2)));
    }

    #[test]
    fn one_that_gets_on_is_left_alone() {
        let start = Instant::now();
        let mut watched = Watched::new(region(0, false), start);
        for step in 1..20 {
            let now = start + step * (GRACE + 4 * Duration::from_millis(50));
            assert!(!watched.look(region(u64::from(step), false), now), "step {step}");
        }
    }

    #[test]
    fn one_that_does_not_is_told_again_and_again() {
        let start = Instant::now();
        let due = start + GRACE + 4 * Duration::from_millis(50);
        let mut watched = Watched::new(region(7, false), start);
        let tells = |watched: &mut Watched, at| watched.look(region(7, false), at);
        assert!(!tells(&mut watched, due - Duration::from_millis(1)));
        assert!(tells(&mut watched, due));
        assert!(!tells(&mut watched, due + AGAIN - Duration::from_millis(1)));
        assert!(tells(&mut watched, due + AGAIN));
    }

    #[test]
    fn one_that_was_silent_before_has_less_time_left() {
        let start = Instant::now();
        let quiet = Duration::from_millis(400);
        let mut watched = Watched::new(ActiveRegion { quiet, ..region(7, false) }, start);
        let due = start + GRACE + 4 * Duration::from_millis(50) - quiet;
        assert!(!watched.look(region(7, false), due - Duration::from_millis(1)));
        assert!(watched.look(region(7, false), due));
        let long = Duration::from_secs(5);
        assert!(Watched::new(ActiveRegion { quiet: long, ..region(7, false) }, start).look(region(7, false), start));
    }

    #[test]
    fn a_client_that_takes_nothing_is_no_sign_of_a_loss() {
        let start = Instant::now();
        let mut watched = Watched::new(region(7, false), start);
        let later = start + Duration::from_secs(60);
        assert!(!watched.look(ActiveRegion { quiet: later - start, ..region(7, true) }, later));
        assert!(!watched.look(region(7, false), later + GRACE), "from when it takes bytes again");
        assert!(watched.look(region(7, false), later + GRACE + 4 * Duration::from_millis(50)));
    }
}
