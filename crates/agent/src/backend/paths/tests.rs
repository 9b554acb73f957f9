//! Paths to clients, on machines (network namespaces) that the tests make.

use super::*;
use shunt_testbed::machine::{Machine, on_a_machine};

/// Returns the obstacle, if there is one, between a machine and the client at the address `client`. The configuration
/// names only the machine's interface `east`. `then` changes the machine after a first check. The returned obstacle is
/// that of a second check.
fn obstacle(more: &[&str], client: &str, test: &str, then: impl FnOnce(&Machine) + Send) -> Option<String> {
    on_a_machine(test, more, |machine| {
        let mut paths = Paths::open(&["east".into()]).unwrap();
        paths.note_addresses().unwrap();
        let now = Instant::now();
        let local = "10.0.1.1".parse().unwrap();
        let first = paths.may_reach(0, local, client.parse().unwrap(), now);
        then(machine);
        let _ = first;
        paths.may_reach(0, local, client.parse().unwrap(), now).err().map(|why| why.to_string())
    })
}

#[test]
fn a_route_by_a_named_port_is_good_and_a_change_is_seen_at_once() {
    let more = ["route add 198.51.100.0/24 via 10.0.1.2"];
    let found = obstacle(&more, "198.51.100.7", "path-good", |_| {});
    assert_eq!(found, None);
    let found = obstacle(&more, "198.51.100.7", "path-gone", |machine| machine.ip("route del 198.51.100.0/24"));
    assert!(found.as_ref().is_some_and(|why| why.contains("no route to the client from 10.0.1.1")), "{found:?}");
}

#[test]
fn a_refusal_names_the_interface_that_is_not_configured() {
    let more = ["route add 198.51.100.0/24 via 10.0.2.2"];
    let found = obstacle(&more, "198.51.100.7", "path-west", |_| {});
    assert!(found.as_ref().is_some_and(|why| why.contains("\"west\"; add it")), "{found:?}");
}

#[test]
fn a_client_on_this_machine_is_sent_nothing() {
    let found = on_a_machine("path-here", &[], |_| {
        let mut paths = Paths::open(&["east".into(), "west".into()]).unwrap();
        paths.note_addresses().unwrap();
        let ways = [("10.0.1.1", "10.0.1.1"), ("10.0.1.1", "192.0.2.1"), ("fd00:1::1", "fd00:2::1")];
        ways.map(|(local, client)| paths.may_reach(0, local.parse().unwrap(), client.parse().unwrap(), Instant::now()))
    });
    assert!(found.iter().all(|way| *way == Err(Obstacle::Here)), "{found:?}");
}

#[test]
fn nothing_is_sent_from_an_address_that_is_gone() {
    let (before, after) = on_a_machine("path-from", &[], |machine| {
        let mut paths = Paths::open(&["east".into()]).unwrap();
        let [local, client] = ["10.0.1.1", "10.0.1.2"].map(|address| address.parse().unwrap());
        let before = paths.may_reach(0, local, client, Instant::now());
        machine.ip("addr del 10.0.1.1/24 dev east");
        machine.ip("addr add 10.0.1.7/24 dev east");
        (before, paths.may_reach(0, local, client, Instant::now()))
    });
    assert_eq!(before, Ok(()));
    assert!(matches!(after, Err(Obstacle::NoRoute { .. })), "{after:?}");
}

#[test]
fn interfaces_on_a_configured_one_are_covered_too() {
    let more = [
        "link add upper link east type macvlan",
        "addr add 10.0.7.1/24 dev upper",
        "link set upper up",
        "route add 198.51.100.0/24 via 10.0.7.2",
    ];
    let found = obstacle(&more, "198.51.100.7", "path-upper", |_| {});
    assert_eq!(found, None);
}

#[test]
fn strict_rp_filter_is_in_the_way_where_routes_are_not_alike() {
    let [strict, loose, none] = on_a_machine("path-strict", &["route add 198.51.100.0/24 via 10.0.2.2"], |_| {
        let mut paths = Paths::open(&["east".into(), "west".into()]).unwrap();
        paths.note_addresses().unwrap();
        let [local, client] = ["10.0.1.1", "198.51.100.7"].map(|address| address.parse().unwrap());
        let mut at = Instant::now();
        ["1", "2", "0"].map(|setting| {
            fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", setting).unwrap();
            fs::write("/proc/sys/net/ipv4/conf/east/rp_filter", "0").unwrap();
            at += HOLDS;
            paths.may_reach(0, local, client, at).err().map(|why| why.to_string())
        })
    });
    assert!(strict.as_ref().is_some_and(|why| why.contains("\"east\", because the route")), "{strict:?}");
    assert_eq!((loose, none), (None, None));
}

#[test]
fn the_log_has_each_obstacle_once_in_a_while() {
    let (news, said) = on_a_machine("path-said", &[], |_| {
        let mut paths = Paths::open(&[]).unwrap();
        let (one, other) = (Obstacle::NotNamed { port: "a".into() }, Obstacle::NotNamed { port: "b".into() });
        let now = Instant::now();
        let news = [(0, &one, 0), (0, &one, 1), (0, &other, 1), (1, &one, 1), (0, &one, 60)]
            .map(|(peer, what, seconds)| paths.is_news(peer, what, now + Duration::from_secs(seconds)));
        (0..1000).for_each(|port| {
            let _ = paths.is_news(0, &Obstacle::NotNamed { port: port.to_string() }, now);
        });
        (news, paths.said.len())
    });
    assert_eq!((news, said), ([true, false, true, true, true], MOST_SAID));
}
