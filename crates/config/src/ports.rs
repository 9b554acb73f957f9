//! Ports of senders (a backend's sockets for clients of a peer): one port for each peer, chosen by a hash of the peer's
//! name. The order of `[[peer]]` in the file therefore does not matter. When a peer is added or taken out, the others
//! keep their ports, unless two names hash to one port.

use std::ops::RangeInclusive;

use shunt_odb::reference::Holder;

use crate::PeerConfig;

/// Returns the peers' ports, in the order of `peers`. `ports` is the range to choose from, and must have at least as
/// many ports as there are peers. `before` has the present ports of the first peers, which keep them.
pub(super) fn of_peers(ports: &RangeInclusive<u16>, peers: &[PeerConfig], before: &[u16]) -> Vec<u16> {
    let names: Vec<&str> = peers.iter().map(|peer| peer.name.as_str()).collect();
    of_names(ports, &names, before)
}

fn of_names(ports: &RangeInclusive<u16>, names: &[&str], before: &[u16]) -> Vec<u16> {
    let number = |name: &str| u128::from_le_bytes(<[u8; 16]>::from(Holder::named(name)));
    let mut order: Vec<usize> = (before.len()..names.len()).collect();
    order.sort_by_key(|index| number(names[*index]));
    let mut taken = vec![false; ports.len()];
    let mut found = vec![0; names.len()];
    for (place, port) in found.iter_mut().zip(before) {
        *place = *port;
        taken[usize::from(port - ports.start())] = true;
    }
    for index in order {
        let first = (number(names[index]) % ports.len() as u128) as usize;
        let place = (0..ports.len()).map(|step| (first + step) % ports.len()).find(|place| !taken[*place]);
        let Some(place) = place else { break };
        taken[place] = true;
        found[index] = ports.start() + place as u16;
    }
    found
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const PORTS: RangeInclusive<u16> = 61000..=61063;

    #[test]
    fn each_peer_has_a_different_port() {
        let names: Vec<String> = (0..64).map(|number| format!("fe{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let ports: HashSet<u16> = of_names(&PORTS, &names, &[]).into_iter().collect();
        assert_eq!((ports.len(), ports.iter().all(|port| PORTS.contains(port))), (64, true));
    }

    #[test]
    fn the_order_of_peers_does_not_matter() {
        let (one, other) =
            (of_names(&PORTS, &["fe1", "fe2", "is1"], &[]), of_names(&PORTS, &["is1", "fe1", "fe2"], &[]));
        assert_eq!([one[0], one[1], one[2]], [other[1], other[2], other[0]]);
    }

    #[test]
    fn a_peer_that_comes_leaves_others_their_ports() {
        let before = of_names(&PORTS, &["fe1", "fe2", "fe3"], &[]);
        let kept = (4..100)
            .filter(|number| of_names(&PORTS, &["fe1", "fe2", "fe3", &format!("fe{number}")], &[])[..3] == before);
        assert!(kept.count() > 85, "but where two names fall on one port");
    }
}
