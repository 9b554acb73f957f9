//! Addresses of programs under `shunt run`, and sources (stores that these programs can fetch from), which agents tell
//! each other.

use shunt_wire::addresses::Addresses;

use super::*;

const STORES: [Source; 2] = [[1; 16], [2; 16]];

fn ip(last: u8) -> IpAddr {
    IpAddr::from([10, 1, 0, last])
}

/// Returns a service without a session, whose machines have stores. Each machine has one address for its programs.
fn with_stores() -> Service {
    let mut service = Service::new();
    service.lose();
    for (side, own) in [(&mut service.frontend, 0), (&mut service.backend, 1)] {
        side.logic.store = Some(Store::new([own as u8; 16], &[], STORES[own], vec![STORES[1 - own]]));
        side.call(|logic, call| logic.set_own_addresses(&[ip(own as u8 + 1)], call));
    }
    service
}

fn own_sources(side: &Side) -> Vec<Source> {
    side.logic.store.as_ref().unwrap().sources.own().collect()
}

#[test]
fn a_peers_store_is_a_source_once_it_has_named_its_addresses_and_as_long_as_the_session() {
    let mut service = with_stores();
    assert_eq!(own_sources(&service.frontend), [STORES[0]]);
    service.connect();
    assert_eq!(own_sources(&service.frontend), STORES);
    assert_eq!(service.backend.logic.store.as_ref().unwrap().sources.of_peers(), 2, "it was told so");
    let ends = |side: &Side| side.logic.store.as_ref().unwrap().ends.of_peers();
    assert_eq!((ends(&service.frontend), ends(&service.backend)), (1, 1));
    service.lose();
    assert_eq!(own_sources(&service.frontend), [STORES[0]]);
    assert_eq!((ends(&service.frontend), ends(&service.backend)), (0, 0), "no key without a session");
}

#[test]
fn the_end_of_a_session_takes_the_kernels_key_for_its_addresses() {
    let mut service = with_stores();
    service.connect();
    service.frontend.call(|logic, call| logic.lose_peer(0, "reset", call));
    let removed = |action: &Action<Model>| matches!(action, Action::SetEnd(address, None) if *address == ip(2));
    assert!(service.frontend.take_actions().iter().any(removed));
}

#[test]
fn the_addresses_of_a_peer_that_may_not_read_this_store_are_ignored() {
    let mut service = with_stores();
    service.frontend.logic.shared.settings.peers[0].may_read_store = false;
    service.connect();
    let addresses = Frame::Addresses(Addresses::of(&[ip(9)]));
    service.frontend.call(|logic, call| logic.frame(0, &addresses, call)).unwrap();
    assert_eq!(service.frontend.logic.store.as_ref().unwrap().ends.of_peers(), 0);
    assert_eq!(service.backend.logic.store.as_ref().unwrap().ends.of_peers(), 0, "nor are its own named to the peer");
}

#[test]
fn changed_addresses_are_told_to_peers() {
    let mut service = with_stores();
    service.connect();
    service.backend.call(|logic, call| logic.set_own_addresses(&[ip(3)], call));
    service.carry();
    service.wait(Duration::from_millis(1_000));
    let owned = service.frontend.logic.store.as_ref().unwrap().ends.owned();
    assert!(owned.contains(&(ip(3), Some(0))) && !owned.contains(&(ip(2), Some(0))), "{owned:?}");
}

#[test]
fn changed_addresses_are_not_told_to_a_peer_that_may_not_read_this_store() {
    let mut service = with_stores();
    service.connect();
    service.backend.logic.shared.settings.peers[0].may_read_store = false;
    service.backend.call(|logic, call| logic.set_own_addresses(&[ip(3)], call));
    assert!(service.backend.output().is_empty());
}
