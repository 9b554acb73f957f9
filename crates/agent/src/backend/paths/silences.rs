//! Finds paths on which clients acknowledge no payload. Payload may vanish behind a first hop, or the clients of one
//! network may be the cause themselves. *Payload* is the data that this machine sends to the clients of a *peer* (a
//! frontend's agent), in the frontend's name.
//!
//! ```text
//!   (none) --silent--> Counting --silent, ROW in a row--> Refusing --pause is over--> Trying
//!      ^                  |                                  ^                           |  |
//!      +----- heard ------+                                  +--silent: pause is doubled-+  |
//!      +------------------------------------ heard -----------------------------------------+
//! ```
//!
//! One silent client may be gone, or hostile: to send no ACKs costs it nothing. So after ROW silent connections of one
//! network in a row, payload for that network alone stops. Clients of other networks behind the same hop still get
//! payload. The hop itself is refused when ROW different networks in a row are silent and no client is heard in
//! between. After the pause of a hop, one connection of each of ROW networks is tried. If a connection from before the
//! pause is heard, the pause ends at once.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use shunt_host::routes::Hop;

/// Number of silent connections in a row after which payload for their network stops. Also the number of silent
/// networks in a row after which payload by their path stops.
const ROW: usize = 3;
/// Length of the first pause, and longest pause. The pause doubles after each silent trial.
const PAUSE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));
/// Duration of a trial. After it, other connections are tried.
const TRIAL: Duration = Duration::from_secs(5);
/// Most paths, and most networks, that are remembered. With one more, all paths, or all networks, are forgotten.
const MOST: usize = 1024;

/// A path: the first hop of payload for a peer's clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Path {
    pub(super) peer: usize,
    pub(super) hop: Hop,
}

/// Network of a client, named by the first address of its /24 (IPv4) or /64 (IPv6). One client may have all addresses
/// of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Network(IpAddr);

impl From<IpAddr> for Network {
    fn from(client: IpAddr) -> Self {
        Self(match client.to_canonical() {
            IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() & (u32::MAX << 8)).into(),
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).into(),
        })
    }
}

/// Kind of thing whose silence is counted: connections, or networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Row {
    /// Connections of one network. One connection is tried after a pause.
    Connections,
    /// Networks behind one hop. One connection of each of ROW networks is tried after a pause.
    Networks,
}

#[derive(Clone, Debug)]
enum State {
    /// The networks that were silent in a row. In the state of a single network, that network is listed once for each
    /// silent connection.
    Counting(Vec<Network>),
    /// End of the pause, and length of the next pause.
    Refusing(Instant, Duration),
    Trying(Trial),
}

#[derive(Clone, Debug)]
struct Trial {
    until: Instant,
    /// Length of the next pause.
    pause: Duration,
    /// Networks of which a connection has been tried in this trial.
    tried: Vec<Network>,
    /// Networks that were silent in this trial and in those before it, since the pause.
    silent: Vec<Network>,
}

impl Row {
    /// Returns the number of tried connections whose silence leads to the next pause.
    fn trials(self) -> usize {
        match self {
            Self::Connections => 1,
            Self::Networks => ROW,
        }
    }

    /// Returns whether payload may be sent on a connection of this network.
    fn is_open(self, state: &State, network: Network, now: Instant) -> bool {
        match state {
            State::Counting(_) => true,
            State::Refusing(until, _) => now >= *until,
            State::Trying(trial) => {
                now >= trial.until || trial.tried.len() < self.trials() && !trial.tried.contains(&network)
            }
        }
    }

    /// Notes that a connection of `network` acknowledges nothing. Returns the length of the pause, if one begins now.
    fn hear_silence(self, state: &mut State, network: Network, now: Instant) -> Option<Duration> {
        let pause = match state {
            State::Counting(row) => {
                if self == Self::Connections || !row.contains(&network) {
                    row.push(network);
                }
                (row.len() >= ROW).then_some(PAUSE.0)
            }
            // This connection was under way when the pause began.
            State::Refusing(..) => None,
            State::Trying(trial) if !trial.tried.contains(&network) => None,
            State::Trying(trial) => {
                if !trial.silent.contains(&network) {
                    trial.silent.push(network);
                }
                (trial.silent.len() >= self.trials()).then_some(trial.pause)
            }
        }?;
        *state = State::Refusing(now + pause, (2 * pause).min(PAUSE.1));
        Some(pause)
    }
}

impl State {
    fn is_counting(&self) -> bool {
        matches!(self, Self::Counting(_))
    }

    /// Notes that payload is sent on a connection of this network.
    fn begin(&mut self, network: Network, now: Instant) {
        match self {
            Self::Counting(_) => {}
            Self::Refusing(_, pause) => {
                let (pause, tried, silent) = (*pause, vec![network], Vec::new());
                *self = Self::Trying(Trial { until: now + TRIAL, pause, tried, silent });
            }
            Self::Trying(trial) if now >= trial.until => {
                (trial.until, trial.tried) = (now + TRIAL, vec![network]);
            }
            Self::Trying(trial) => trial.tried.push(network),
        }
    }
}

/// A change to report to the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing is sent by this path for this time.
    Silent(Duration),
    /// Nothing is sent to this client's network for this time.
    NetworkSilent(Duration),
    /// Clients acknowledge payload again.
    Heard,
}

/// States of the paths and networks that had silent connections, and of which no client was heard since then.
#[derive(Default)]
pub(super) struct Silences {
    paths: HashMap<Path, State>,
    networks: HashMap<(Path, Network), State>,
}

impl Silences {
    pub(super) fn is_empty(&self) -> bool {
        self.paths.is_empty() && self.networks.is_empty()
    }

    /// Returns whether payload to this client by this path is refused now. After a pause, the next connections are let
    /// through as a trial.
    pub(super) fn refuses(&mut self, path: &Path, client: IpAddr, now: Instant) -> bool {
        let network = Network::from(client);
        let mut of_path = self.paths.get_mut(path);
        let mut of_network = self.networks.get_mut(&(*path, network));
        let is_open =
            |row: Row, state: &Option<&mut State>| state.as_ref().is_none_or(|state| row.is_open(state, network, now));
        // Both states are asked before the path's trial begins: a network in a pause takes no place in that trial.
        if !is_open(Row::Networks, &of_path) || !is_open(Row::Connections, &of_network) {
            return true;
        }
        for state in [&mut of_path, &mut of_network].into_iter().flatten() {
            state.begin(network, now);
        }
        false
    }

    /// Notes whether a new connection of this client acknowledges something. Returns a change to report, if there is
    /// one.
    pub(super) fn hear(&mut self, path: Path, client: IpAddr, acknowledges: bool, now: Instant) -> Option<Turn> {
        let network = Network::from(client);
        if acknowledges {
            self.networks.remove(&(path, network));
            let was_refused = self.paths.remove(&path).is_some_and(|state| !state.is_counting());
            if was_refused {
                self.networks.retain(|(of, _), _| *of != path);
            }
            return was_refused.then_some(Turn::Heard);
        }
        let of_network = Row::Connections.hear_silence(entry(&mut self.networks, (path, network)), network, now);
        let of_path = Row::Networks.hear_silence(entry(&mut self.paths, path), network, now);
        of_path.map(Turn::Silent).or(of_network.map(Turn::NetworkSilent))
    }
}

/// Returns the state of a path or a network. If there are [`MOST`] of them and this one is new, all others are
/// forgotten.
fn entry<K: Eq + Hash>(states: &mut HashMap<K, State>, key: K) -> &mut State {
    if states.len() >= MOST && !states.contains_key(&key) {
        states.clear();
    }
    states.entry(key).or_insert(State::Counting(Vec::new()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(port: u32) -> Path {
        Path { peer: 0, hop: Hop { port, router: None } }
    }

    /// Returns a client of the network with that number.
    fn client(network: u8) -> IpAddr {
        [198, 51, network, 7].into()
    }

    /// Notes one silent connection of each of ROW networks.
    fn silent(silences: &mut Silences, now: Instant) -> Vec<Option<Turn>> {
        (0..ROW as u8).map(|network| silences.hear(path(1), client(network), false, now)).collect()
    }

    #[test]
    fn several_in_a_row_are_a_sign_and_an_answer_in_between_ends_the_row() {
        let (mut silences, now) = (Silences::default(), Instant::now());
        assert_eq!(silences.hear(path(1), client(0), false, now), None);
        assert_eq!(silences.hear(path(1), client(1), false, now), None);
        assert_eq!(silences.hear(path(1), client(9), true, now), None);
        assert!(silences.paths.is_empty());
        assert_eq!(silent(&mut silences, now), [None, None, Some(Turn::Silent(PAUSE.0))]);
        assert!(silences.refuses(&path(1), client(9), now) && !silences.refuses(&path(2), client(9), now));
        assert_eq!(silences.hear(path(1), client(8), false, now), None, "of those that were under way");
    }

    #[test]
    fn a_silent_network_stops_itself_alone() {
        for [one, neighbour, other] in
            [["192.0.2.1", "192.0.2.77", "192.0.3.1"], ["2001:db8::1", "2001:db8::2:0:0:1", "2001:db8:0:1::1"]]
        {
            let [one, neighbour, other] = [one, neighbour, other].map(|address| address.parse().unwrap());
            let (mut silences, mut now) = (Silences::default(), Instant::now());
            let heard: Vec<_> = [one, neighbour, one].map(|client| silences.hear(path(1), client, false, now)).into();
            assert_eq!(heard, [None, None, Some(Turn::NetworkSilent(PAUSE.0))]);
            assert!(silences.refuses(&path(1), one, now) && silences.refuses(&path(1), neighbour, now));
            assert!((0..100).all(|_| !silences.refuses(&path(1), other, now)), "others are not its victims");
            now += PAUSE.0;
            assert!(!silences.refuses(&path(1), one, now) && silences.refuses(&path(1), neighbour, now));
            assert_eq!(silences.hear(path(1), one, false, now), Some(Turn::NetworkSilent(2 * PAUSE.0)));
            assert!(silences.refuses(&path(1), one, now) && !silences.refuses(&path(1), other, now));
            assert_eq!(silences.hear(path(1), one, true, now), None);
            assert!(silences.is_empty());
        }
    }

    #[test]
    fn one_of_each_of_several_networks_is_tried_after_each_pause_and_the_pause_grows() {
        let (mut silences, mut now) = (Silences::default(), Instant::now());
        silent(&mut silences, now);
        let mut pause = PAUSE.0;
        for round in 0..10u8 {
            now += pause;
            let clients: [IpAddr; ROW] = std::array::from_fn(|index| client(10 * round + 10 + index as u8));
            for client in clients {
                assert!(!silences.refuses(&path(1), client, now), "each is tried");
                assert!(silences.refuses(&path(1), client, now), "once");
            }
            assert!(silences.refuses(&path(1), client(0), now), "and no more");
            pause = (2 * pause).min(PAUSE.1);
            let heard = clients.map(|client| silences.hear(path(1), client, false, now));
            assert_eq!(heard, [None, None, Some(Turn::Silent(pause))]);
        }
        now += PAUSE.1;
        assert!(!silences.refuses(&path(1), client(9), now));
        assert_eq!(silences.hear(path(1), client(9), true, now), Some(Turn::Heard));
        assert!(!silences.refuses(&path(1), client(9), now) && silences.is_empty());
    }

    #[test]
    fn one_silent_network_does_not_fail_a_trial() {
        let (mut silences, mut now) = (Silences::default(), Instant::now());
        silent(&mut silences, now);
        now += PAUSE.0;
        assert!(!silences.refuses(&path(1), client(0), now));
        assert_eq!(silences.hear(path(1), client(0), false, now), None);
        assert_eq!(silences.hear(path(1), client(0), false, now), Some(Turn::NetworkSilent(PAUSE.0)), "itself alone");
        assert!(!silences.refuses(&path(1), client(9), now), "there is place for another");
        assert_eq!(silences.hear(path(1), client(9), true, now), Some(Turn::Heard));
        assert!(!silences.refuses(&path(1), client(8), now));
    }

    #[test]
    fn a_trial_without_an_end_makes_room_for_another() {
        let (mut silences, now) = (Silences::default(), Instant::now());
        silent(&mut silences, now);
        assert!((10..10 + ROW as u8).all(|network| !silences.refuses(&path(1), client(network), now + PAUSE.0)));
        assert!(silences.refuses(&path(1), client(9), now + PAUSE.0 + TRIAL / 2));
        assert!(!silences.refuses(&path(1), client(9), now + PAUSE.0 + TRIAL));
    }

    #[test]
    fn the_number_of_remembered_networks_is_bounded() {
        let (mut silences, now) = (Silences::default(), Instant::now());
        for number in 0..3 * MOST as u32 {
            silences.hear(path(number), Ipv4Addr::from_bits(number << 8).into(), false, now);
            assert!(silences.paths.len() <= MOST && silences.networks.len() <= MOST);
        }
    }
}
