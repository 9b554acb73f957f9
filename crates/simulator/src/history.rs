//! Random histories. A *history* is one simulated run of a service. Its seed determines the service, the load and the
//! faults. It ends at the first violation of a rule that must hold. A *handoff* lets a backend send a payload on a
//! client's connection. A *claim* is the message that asks the backend for it. A *payload* is the body of a response.

use std::collections::BTreeMap;
use std::time::Duration;

use shunt_logic::limits::Limits;

use crate::random::Random;
use crate::world::{Service, Variety, Weather, World};

/// First period of a history, in which clients ask for responses and faults happen.
const BUSY: Duration = Duration::from_secs(2);
/// Time after [`BUSY`] by which no response or handoff may be left. A claim waits for up to 30 s, and a client that
/// acknowledges nothing is given up after 60 s.
const QUIET: Duration = Duration::from_secs(120);
/// First pause before a check that nothing is left. Each later pause is a quarter longer, up to [`LONGEST_PAUSE`].
const LOOK: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(4);
/// Most events of a history. A history with more events is taken for one that never ends.
const MOST_EVENTS: u64 = 3_000_000;

/// One history.
#[derive(Clone, Copy, Debug)]
pub struct History {
    /// Seed, which determines everything in the history.
    pub seed: u64,
}

/// Result of a history.
#[derive(Debug)]
pub struct Outcome {
    /// Seed of the history.
    pub seed: u64,
    /// Violations of rules that must hold, each with its time.
    pub violations: Vec<String>,
    /// Number of responses that clients have received.
    pub served: u64,
    /// Number of events.
    pub events: u64,
    /// Names of things that have happened, and how often each has.
    pub covered: BTreeMap<&'static str, u64>,
}

fn service(random: &mut Random) -> Service {
    let weathers = [
        Weather::default(),
        Weather { loss: 5_000, copies: 2_000, late: 20_000 },
        Weather { loss: 100_000, copies: 20_000, late: 100_000 },
    ];
    let few = Limits {
        handoffs: 3,
        handoffs_per_peer: 2,
        offers: 3,
        offers_per_peer: 2,
        fetches: 2,
        fetches_per_peer: 1,
        ..Limits::default()
    };
    let limits = if random.below(3) == 0 { few } else { Limits::default() };
    let most_machines = if random.below(50) == 0 { 20 } else { 4 };
    Service {
        machines: random.between(2, most_machines) as usize,
        clients: random.between(1, 6) as usize,
        places: if random.below(3) == 0 { random.between(1, 2) as usize } else { 1000 },
        limits,
        weather: weathers[random.below(3) as usize],
        think: Duration::from_millis(random.between(1, 800)),
    }
}

/// Returns the features that a service has besides handoffs of files. On average, at least one service in four has
/// none.
fn variety(random: &mut Random) -> Variety {
    if random.below(4) == 0 {
        return Variety::default();
    }
    let mut often = |one_in: u64, most: u64| if random.below(one_in) == 0 { random.below(most) } else { 0 };
    Variety {
        has_stores: often(1, 2) == 0,
        stored: often(1, 800_000),
        sealed: often(2, 800_000),
        recovers: often(1, 4) > 0,
        fetches: Some(often(2, 300_000)).filter(|_| often(1, 4) > 0),
        unread: often(3, 60_000),
        leaves: often(3, 100_000),
        has_slow_clients: often(1, 3) == 0,
        has_strange_files: often(1, 2) == 0,
        writes: often(3, 100_000),
        has_plain_frontend: often(1, 8) == 0,
        has_plain_backend: often(1, 8) == 0,
        has_slow_heartbeat: often(1, 8) == 0,
        has_unnamed_peer: often(1, 8) == 0,
        exits: often(2, 100_000),
        ringless: often(4, 400_000),
        has_all_faults: often(1, 4) > 0,
    }
}

/// Runs a history to its end.
pub fn run(history: History) -> Outcome {
    let mut random = Random::new(history.seed);
    let (service, variety) = (service(&mut random), variety(&mut random));
    let mut world = World::with(service, variety, random.below(u64::MAX));
    let faults = if random.below(4) == 0 { 0 } else { random.between(1, if variety.has_all_faults { 12 } else { 6 }) };
    let mut times: Vec<Duration> = (0..faults).map(|_| random.time(Duration::ZERO, BUSY)).collect();
    times.sort_unstable();
    let mut events = 0;
    for end in times.into_iter().chain([BUSY]) {
        events += go_on(&mut world, end, MOST_EVENTS - events);
        if end < BUSY {
            world.fail_somewhere();
        }
    }
    world.close_up();
    let mut left = Vec::new();
    let (mut end, mut pause) = (BUSY, LOOK);
    while end < BUSY + QUIET {
        end += pause;
        pause = (pause * 5 / 4).min(LONGEST_PAUSE);
        events += go_on(&mut world, end, MOST_EVENTS - events);
        left = world.left();
        if left.is_empty() {
            break;
        }
    }
    left.into_iter().for_each(|what| world.violate(what));
    if events >= MOST_EVENTS {
        world.violate(format!("{events} events: it goes in circles"));
    }
    Outcome {
        seed: history.seed,
        violations: world.violations().to_vec(),
        served: world.served(),
        events,
        covered: world.covered().clone(),
    }
}

/// Processes the events up to time `end`, but stops at the first violation or after `most` events. Returns the number
/// of events.
fn go_on(world: &mut World, end: Duration, most: u64) -> u64 {
    let mut events = 0;
    while events < most && world.violations().is_empty() && world.step(end) {
        events += 1;
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_is_the_same_each_time() {
        let of = |seed| {
            let Outcome { violations, served, events, covered, .. } = run(History { seed });
            (violations, served, events, covered)
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn histories_hold() {
        let first: u64 = std::env::var("SHUNT_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
        let mut covered = BTreeMap::<&str, u64>::new();
        for seed in first..first + 200 {
            let outcome = run(History { seed });
            assert!(outcome.violations.is_empty(), "seed {seed}: {:#?}", outcome.violations);
            outcome.covered.into_iter().for_each(|(what, times)| *covered.entry(what).or_default() += times);
        }
        // Each of these usually happens more than 20 times in 200 histories.
        for what in [
            "abort of a server",
            "claim waits",
            "client leaves",
            "drain",
            "fetched",
            "garble",
            "no route",
            "process refused",
            "region of stored bytes",
            "reload",
            "silent connection",
            "store answers",
            "told of an end",
            "worker ends",
        ] {
            assert!(covered.contains_key(what), "no \"{what}\" from seed {first} on");
        }
    }
}
