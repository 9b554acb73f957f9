//! Losses: payloads whose backend's agent, or whose server's process, is gone.
//!
//! The backend's kernel may still deliver a payload, or a part of it: the sockets of an agent that has ended send until
//! their buffers are empty. Or the whole machine is gone, and nothing more arrives. The frontend can tell these cases
//! apart only by the client's ACKs. So each payload that was under way from a lost peer is watched, and left alone
//! while the client acknowledges more. A *region* is a range of sequence numbers of a client's connection, which one
//! payload takes. A *handoff* is the server's grant of the connection's send side for this payload. A *ring* is a BPF
//! ring buffer by which the kernel tells the server what becomes of its handoffs.
//!
//! When a payload has made no progress for a while, its server is told. This is repeated until the region has ended or
//! another backend sends the payload. The server may have been busy, or not connected to this agent.
//!
//! The kernel's table of client connections has all data that this needs. So nothing is recorded for it when a handoff
//! begins.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use shunt_wire::local::{self, NO_PEER, Reason};

use super::Frontend;
use crate::action::{Action, Told};
use crate::machine::{ActiveRegion, Machine};
use crate::turn::Turn;

/// Time that a payload may make no progress, and number of round trips that are added to this time. TCP repairs packet
/// loss in fewer round trips.
const GRACE: Duration = Duration::from_millis(300);
const GRACE_ROUND_TRIPS: u32 = 4;
/// Time between two messages to a server about the same payload.
const AGAIN: Duration = Duration::from_secs(1);

/// Longest wait for the client's first ACK of a payload whose server process is gone. After this time the payload is
/// cancelled: perhaps the message that asks the backend for it (CLAIM) never arrived, and nobody sends it.
const LEFT: Duration = Duration::from_secs(10);
/// Number of messages about one payload, all without effect, after which its server counts as gone. After a restart of
/// the agent, servers take some time to connect to it again.
const TOLD_IN_VAIN: u32 = 10;

struct Watched {
    region: ActiveRegion,
    /// Time at which the payload counts as stalled, unless the client acknowledges more.
    due: Instant,
    /// Number of messages that are left before the payload's server counts as gone.
    tells: u32,
    /// Whether the payload is watched only because its server's process is gone: its peer has not been lost since. If
    /// so, the watch ends as soon as the client has acknowledged the first bytes.
    is_left: bool,
}

impl Watched {
    /// Begins to watch a region. The time without progress counts from the connection's last packet. A backend that is
    /// cut off was already silent before this agent noticed the loss. If the client's window is full, the time counts
    /// from now, because the client is then the reason for the silence.
    fn new(region: ActiveRegion, now: Instant) -> Self {
        let silence = if region.is_shut { Duration::ZERO } else { region.quiet };
        let silent_since = now.checked_sub(silence).unwrap_or(now);
        Self {
            region,
            due: silent_since + GRACE + region.round_trip * GRACE_ROUND_TRIPS,
            tells: TOLD_IN_VAIN,
            is_left: false,
        }
    }

    /// Begins to watch a region of which the client has acknowledged nothing, and whose server's process is gone.
    fn left(region: ActiveRegion, now: Instant) -> Self {
        Self { region, due: now + LEFT, tells: 1, is_left: true }
    }

    /// Compares the region with its earlier state. Returns whether its server has to be told that the payload has
    /// stalled.
    fn look(&mut self, region: ActiveRegion, now: Instant) -> bool {
        if region.acked != self.region.acked || region.is_shut {
            *self = if self.is_left { Self::left(region, now) } else { Self::new(region, now) };
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

/// Returns whether handoff `one` was begun after handoff `other`, both of one control connection. The lower halves of
/// their numbers count up, and wrap around.
fn is_later(one: u64, other: u64) -> bool {
    (one as u32).wrapping_sub(other as u32).cast_signed() > 0
}

/// Payloads that are watched.
#[derive(Default)]
pub struct Losses(Vec<Watched>);

impl Losses {
    /// Number of payloads.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether no payload is watched.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Frontend {
    /// Watches the payloads under way from a lost peer, or with `None` from all peers. New handoffs to a lost peer are
    /// already refused.
    pub fn watch_regions<M: Machine>(&mut self, peer: Option<u32>, turn: &mut Turn<'_, M>) {
        let regions = turn.machine.active_regions(peer);
        if regions.is_empty() {
            return;
        }
        tracing::info!(payloads = regions.len(), "an agent is lost: watching whether its payloads still arrive");
        let name = |region: &ActiveRegion| (region.client, region.server, region.handoff);
        // A payload whose server's process has ended is watched to its end from now on, because its peer is lost, too.
        let lost: HashSet<_> = regions.iter().map(name).collect();
        self.losses.0.retain(|one| !(one.is_left && lost.contains(&name(&one.region))));
        let known: HashSet<_> = self.losses.0.iter().map(|one| name(&one.region)).collect();
        let new = regions.into_iter().filter(|region| !known.contains(&name(region)));
        self.losses.0.extend(new.map(|region| Watched::new(region, turn.now)));
    }

    /// Cancels or watches the regions, made by SHUNT_APPEND, of a process that is gone, because the process's
    /// connections may outlive it. Regions of which the client has acknowledged bytes are left alone. `newest` is the
    /// last handoff that the process told this agent of. Handoffs that it began later are cancelled, because nobody
    /// sends their payloads.
    pub fn end_left_regions<M: Machine>(&mut self, ring: u32, newest: Option<u64>, turn: &mut Turn<'_, M>) {
        let left = |region: &ActiveRegion| region.queues && region.ring == ring && region.acked == 0;
        for region in turn.machine.active_regions(None).into_iter().filter(left) {
            if newest.is_none_or(|newest| is_later(region.handoff, newest)) {
                let client = region.client.socket_addr();
                tracing::info!(
                    handoff = region.handoff, %client,
                    "a process ended with a handoff that it had not reported"
                );
                turn.act(Action::Cancel(region));
            } else {
                self.losses.0.push(Watched::left(region, turn.now));
            }
        }
    }

    /// Examines all watched payloads. Tells servers of each stalled payload, and cancels a region made by SHUNT_APPEND
    /// whose server counts as gone.
    pub fn tend_losses<M: Machine>(&mut self, turn: &mut Turn<'_, M>) {
        let mut stalled = Vec::new();
        let (machine, now) = (&mut *turn.machine, turn.now);
        self.losses.0.retain_mut(|watched| {
            let Some(region) = machine.region_now(&watched.region) else { return false };
            if watched.is_left && region.acked != 0 {
                return false; // the backend was asked for the payload, and sends it
            }
            if watched.look(region, now) {
                stalled.push((region, watched.tells == 0, watched.is_left));
            }
            true
        });
        for (region, is_given_up, is_left) in stalled {
            let (handoff, client) = (region.handoff, region.client.socket_addr());
            if is_left {
                tracing::warn!(handoff, %client, "the payload of a process that has ended has not begun");
            } else {
                turn.shared.counts.stalled += 1;
                tracing::warn!(handoff, %client, acked = region.acked, "the payload of a lost agent has stopped");
            }
            tell_all_servers(handoff, Reason::PeerLost, turn);
            // The ring of a process that has ended may be another server's by now.
            if is_given_up && region.queues && (is_left || !turn.shared.servers.has_ring(region.ring)) {
                turn.act(Action::Cancel(region));
            }
        }
    }
}

/// Tells all servers with a control connection that a handoff has ended. Only the server that began the handoff knows
/// it, and the others ignore the message.
fn tell_all_servers<M: Machine>(handoff: u64, reason: Reason, turn: &mut Turn<'_, M>) {
    turn.shared.counts.end(reason);
    let ended = local::Ended { header: local::Ended::HEADER, handoff, reason: reason as u32, peer: NO_PEER };
    let all = turn.shared.servers.iter().filter(|(_, server)| server.hands_off());
    turn.actions.extend(all.map(|(server, _)| Action::Tell(server, Told::Ended(ended))));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    fn region(acked: u64, is_shut: bool) -> ActiveRegion {
        let end = |text: &str| text.parse::<SocketAddr>().unwrap().into();
        ActiveRegion {
            client: end("198.51.100.7:4000"),
            server: end("192.0.2.1:443"),
            handoff: 1,
            peer: 0,
            acked,
            is_shut,
            round_trip: Duration::from_millis(50),
            quiet: Duration::ZERO,
            queues: false,
            ring: 0,
        }
    }

    #[test]
    fn later_handoffs_are_told_from_earlier_ones() {
        let name = |made: u32| 7 << 32 | u64::from(made);
        assert!(is_later(name(6), name(5)) && !is_later(name(5), name(5)) && !is_later(name(5), name(6)));
        assert!(is_later(name(2), name(u32::MAX - 3)) && !is_later(name(u32::MAX - 3), name(2)));
    }

    #[test]
    fn a_payload_that_makes_progress_is_not_reported() {
        let start = Instant::now();
        let mut watched = Watched::new(region(0, false), start);
        for step in 1..20 {
            let now = start + step * (GRACE + 4 * Duration::from_millis(50));
            assert!(!watched.look(region(u64::from(step), false), now), "step {step}");
        }
    }

    #[test]
    fn a_payload_without_progress_is_reported_again_and_again() {
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
    fn silence_before_the_loss_counts() {
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
