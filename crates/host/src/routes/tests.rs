//! Tests of routes. Each test makes a network namespace that stands for a machine.

use super::*;
use crate::interfaces::{interface_index, interface_name};
use shunt_testbed::machine::on_a_machine;

/// Returns for each address the name of the interface towards it, or the text of the error.
fn ports(addresses: &[&str]) -> Vec<String> {
    let mut routes = Routes::open().unwrap();
    let port = |address: &&str| match routes.port_towards(address.parse().unwrap()).unwrap() {
        Ok(port) => interface_name(port),
        Err(error) => error.to_string(),
    };
    addresses.iter().map(port).collect()
}

#[test]
fn the_port_is_the_routes_and_not_that_of_the_source_address() {
    let more = [
        "route add 198.51.100.0/24 via 10.0.2.2 src 192.0.2.1",
        "route replace 10.0.1.0/24 dev east src 192.0.2.1",
        "route add 2001:db8:9::/48 via fd00:2::2 src 2001:db8::1",
    ];
    let asked = ["198.51.100.7", "10.0.1.9", "2001:db8:9::7", "fd00:1::9"];
    let found = on_a_machine("src", &more, |_| ports(&asked));
    assert_eq!(found, ["west", "east", "west", "east"]);
}

#[test]
fn rules_are_followed_as_for_redirected_packets() {
    let more = [
        "route add 198.51.100.0/24 via 10.0.1.2",
        "rule add to 198.51.100.7 lookup 77",
        "rule add to 198.51.100.8 ipproto tcp lookup 77",
        "rule add to 198.51.100.9 ipproto udp lookup 77",
        "rule add to 198.51.100.10 uidrange 1000-1000 lookup 77",
        "route add default via 10.0.2.2 table 77",
    ];
    let asked = ["198.51.100.6", "198.51.100.7", "198.51.100.8", "198.51.100.9", "198.51.100.10"];
    let found = on_a_machine("rules", &more, |_| ports(&asked));
    assert_eq!(found, ["east", "west", "west", "east", "east"]);
}

#[test]
fn an_address_keeps_one_of_several_paths() {
    let more = [
        "route add 203.0.113.0/24 nexthop via 10.0.1.2 nexthop via 10.0.2.2",
        "route add 2001:db8:9::/64 nexthop via fd00:1::2 nexthop via fd00:2::2",
    ];
    let ipv4: Vec<String> = (1..=64).map(|host| format!("203.0.113.{host}")).collect();
    let ipv6: Vec<String> = (1..=64).map(|host| format!("2001:db8:9::{host}")).collect();
    for (test, all) in [("ecmp4", ipv4), ("ecmp6", ipv6)] {
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let (found, again, after) = on_a_machine(test, &more, |machine| {
            let (before, again) = (ports(&all), ports(&all));
            machine.ip("link set east down");
            (before, again, ports(&all))
        });
        let on = |port: &str| found.iter().filter(|found| *found == port).count();
        assert!(on("east") > 0 && on("west") > 0 && on("east") + on("west") == all.len(), "{found:?}");
        assert_eq!(found, again, "an address keeps its path");
        assert!(after.iter().all(|port| port == "west"), "{after:?}");
    }
}

#[test]
fn routes_that_lead_to_no_other_machine_are_refused() {
    let more =
        ["route add blackhole 198.51.100.1", "route add unreachable 198.51.100.2", "route add prohibit 2001:db8:9::3"];
    let asked = ["198.51.100.1", "198.51.100.2", "2001:db8:9::3", "203.0.113.1", "192.0.2.1", "2001:db8::1"];
    let found = on_a_machine("none", &more, |_| ports(&asked));
    let expected = ["Invalid argument", "No route to host", "its route is of type Prohibit", "Network is unreachable"];
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(expected) || found.starts_with("Permission denied"), "{found} instead of {expected}");
    }
    let own = NoRoute::Kind(RouteType::Local).to_string();
    assert_eq!(found[4..], [own.clone(), own]);
}

#[test]
fn a_route_that_encapsulates_is_none() {
    let found = on_a_machine("encap", &[], |machine| {
        let made = machine.try_ip("route add 198.51.100.5 encap ip id 7 dst 10.0.1.2 via 10.0.1.2 dev east");
        made.status.success().then(|| ports(&["198.51.100.5"]))
    });
    match found {
        Some(found) => assert_eq!(found, [NoRoute::Encapsulated.to_string()]),
        None => shunt_testbed::skipped("a_route_that_encapsulates_is_none", "this kernel has no such routes"),
    }
}

#[test]
fn a_vrf_has_its_own_routes() {
    let found = on_a_machine("vrf", &[], |machine| {
        if !machine.try_ip("link add blue type vrf table 10").status.success() {
            return None;
        }
        let more = ["link set blue up", "link set west master blue", "route add 198.51.100.0/24 via 10.0.2.2 vrf blue"];
        more.iter().for_each(|command| machine.ip(command));
        let mut routes = Routes::open().unwrap();
        routes.domain = interface_index("blue").unwrap();
        let inside = routes.port_towards("198.51.100.7".parse().unwrap()).unwrap();
        Some((inside, interface_index("west").unwrap(), ports(&["198.51.100.7"])))
    });
    match found {
        Some((inside, west, outside)) => {
            assert_eq!(inside, Ok(west));
            assert!(outside[0].starts_with("Network is unreachable"), "{outside:?}");
        }
        None => shunt_testbed::skipped("a_vrf_has_its_own_routes", "this kernel has no VRF"),
    }
}

#[test]
fn changes_are_heard_and_then_over() {
    on_a_machine("changes", &[], |machine| {
        let changes = Changes::open().unwrap();
        let all = [
            "route add 198.51.100.0/24 via 10.0.1.2",
            "rule add to 198.51.100.7 lookup 77",
            "addr add 192.0.2.2/32 dev lo",
            "link set west down",
        ];
        while changes.take() {}
        for change in all {
            machine.ip(change);
            assert!(changes.take(), "{change}");
        }
    });
}

#[test]
fn more_changes_than_there_is_room_for_are_a_change() {
    on_a_machine("many", &[], |machine| {
        let changes = Changes::open().unwrap();
        let all: String =
            (0..4000).map(|n| format!("route add 198.18.{}.{}/32 dev east\n", n / 250, n % 250)).collect();
        let batch = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(batch.path(), all).unwrap();
        machine.ip(&format!("-b {}", batch.path().display()));
        assert!(changes.take());
        while changes.take() {}
        machine.ip("link set west down");
        assert!(changes.take());
    });
}
