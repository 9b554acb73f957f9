//! State that outlives a session (the use of a connection between two agents), and state that ends with it.

use shunt_wire::local::BoardPeer;
use shunt_wire::peer::{Closed, Hello, padded_name};
use shunt_wire::prefixes::Prefixes;

use super::*;

#[test]
fn an_offer_that_is_made_while_there_is_no_session_can_be_claimed_in_the_next_one() {
    let mut service = Service::new();
    service.lose();
    let offer = service.offer(1);
    assert_eq!(service.backend.logic.shared.counts.offers_to_strangers, 0);
    service.connect();
    service.hand_off(7, offer);
    service.carry();
    assert_eq!(service.sent(), [7]);
}

#[test]
fn the_key_of_offers_outlives_a_session_and_ends_with_trust() {
    let mut service = Service::new();
    let key = |service: &Service| service.backend.logic.shared.board.peers()[0].our_key;
    let first = key(&service);
    let opened = Opened { senders: SenderAddresses::default(), key: [9; 16] };
    service.lose();
    service.backend.call(|logic, call| logic.opened(0, &opened, call));
    service.lose();
    service.connect();
    assert_eq!(key(&service), first, "servers have offers with tags of this key");
    service.backend.call(|logic, call| logic.distrust(0, "revoked", call));
    assert_eq!((key(&service), service.backend.logic.shared.board.peers()[0].state), ([0; 16], BoardPeer::DOWN));
    service.backend.call(|logic, call| logic.opened(0, &opened, call));
    service.frontend.call(|logic, call| logic.lose_peer(0, "reset", call));
    service.connect();
    assert_eq!(key(&service), [9; 16], "a peer that is trusted again begins anew");
}

#[test]
fn an_offer_to_a_peer_that_is_not_trusted_is_dropped() {
    let mut service = Service::new();
    service.backend.call(|logic, call| logic.distrust(0, "revoked", call));
    service.offer(1);
    let Logic { shared, backend, .. } = &service.backend.logic;
    assert_eq!((shared.counts.offers_to_strangers, backend.offers.len()), (1, 0));
}

#[test]
fn a_peer_says_once_in_a_session_as_which_addresses_it_sends() {
    let mut service = Service::new();
    let again = Frame::SpeaksFor(Prefixes::default());
    let said = service.frontend.call(|logic, call| logic.frame(0, &again, call));
    assert_eq!(said, Err(Reason::Malformed), "each one makes handoffs that just begin fail");
    service.lose();
    service.connect();
    assert!(service.frontend.logic.shared.board.peers()[0].prefixes > 0, "and once more in the next session");
}

#[test]
fn a_limit_of_a_peer_is_forgotten_with_its_session() {
    let mut service = Service::new();
    let usage = Usage { handoffs: vec![0], sending: vec![], descriptors: Descriptors { open: 1, limit: 1024 } };
    let closed_offers = |service: &mut Service| {
        service.backend.call(|logic, call| logic.look_at_limits(&usage, call));
        service.backend.logic.shared.board.peers()[0].closed
    };
    let closed = Frame::Closed(Closed { offers: 1.into() });
    service.backend.call(|logic, call| logic.frame(0, &closed, call)).unwrap();
    assert_eq!(closed_offers(&mut service), closed::OFFERS);
    // A frontend's agent that has started anew would not know that it had told the backend to make no offers.
    service.lose();
    service.connect();
    assert_eq!(closed_offers(&mut service), 0);
}

#[test]
fn a_limit_that_lasts_is_told_again_in_the_next_session() {
    let mut service = Service::new();
    let usage = Usage { handoffs: vec![16384], sending: vec![], descriptors: Descriptors { open: 1, limit: 1024 } };
    service.frontend.call(|logic, call| logic.look_at_limits(&usage, call));
    service.lose();
    service.connect();
    let idle = Usage { handoffs: vec![0], ..usage };
    service.backend.call(|logic, call| logic.look_at_limits(&idle, call));
    assert_eq!(service.backend.logic.shared.board.peers()[0].closed, closed::OFFERS);
}

#[test]
fn a_peer_to_whose_senders_no_route_leads_is_told_to_offer_nothing() {
    let mut service = Service::new();
    let usage = Usage { handoffs: vec![0], sending: vec![], descriptors: Descriptors { open: 1, limit: 1024 } };
    let mut closed_offers = |interface| {
        service.frontend.call(|logic, call| logic.set_interface(0, IpAddr::from([10, 0, 0, 2]), interface, call));
        assert!(service.frontend.logic.is_look_due());
        service.frontend.call(|logic, call| logic.look_at_limits(&usage, call));
        service.carry();
        service.backend.call(|logic, call| logic.look_at_limits(&usage, call));
        service.backend.logic.shared.board.peers()[0].closed
    };
    assert_eq!([0, 3, 0].map(&mut closed_offers), [closed::OFFERS, 0, closed::OFFERS]);
}

#[test]
fn an_interface_towards_a_peer_that_changes_is_steered_to_at_once() {
    let mut service = Service::new();
    service.frontend.call(|logic, call| logic.set_interface(0, IpAddr::from([10, 0, 0, 2]), 4, call));
    let actions = service.frontend.take_actions();
    assert!(actions.iter().any(|action| matches!(action, Action::Steer(0))));
    // A route to an address that the peer does not have changes nothing for the BPF programs.
    let is_its = service.frontend.call(|logic, call| logic.set_interface(0, IpAddr::from([10, 0, 0, 9]), 4, call));
    assert!(!is_its && !service.frontend.take_actions().iter().any(|action| matches!(action, Action::Steer(_))));
}

#[test]
fn an_agent_that_drains_takes_on_nothing_new() {
    let mut service = Service::new();
    let usage = Usage { handoffs: vec![0], sending: vec![], descriptors: Descriptors { open: 1, limit: 1024 } };
    service.frontend.logic.shared.is_draining = true;
    service.frontend.call(|logic, call| logic.look_at_limits(&usage, call));
    assert_eq!(service.frontend.logic.shared.board.head().closed, closed::HANDOFFS | closed::OFFERS);
    service.carry();
    service.backend.call(|logic, call| logic.look_at_limits(&usage, call));
    assert_eq!(service.backend.logic.shared.board.peers()[0].closed, closed::OFFERS, "its peer offers it nothing");
}

#[test]
fn a_lost_peer_gets_no_handoffs_and_its_keys_stay_for_fetches() {
    let mut service = Service::new();
    assert!(service.frontend.logic.shared.board.peers()[0].families > 0);
    service.lose();
    let board = &service.frontend.logic.shared.board;
    assert_eq!((board.peers()[0].state, board.peers()[0].families, board.epoch(0)), (BoardPeer::LOST, 0, None));
    assert_eq!(board.peers()[0].their_key, [2; 16]);
}

#[test]
fn the_connection_and_the_senders_of_a_lost_peer_end() {
    let mut service = Service::new();
    service.backend.call(|logic, call| logic.lose_peer(0, "reset", call));
    let actions = service.backend.take_actions();
    assert!(actions.iter().any(|action| matches!(action, Action::HangUp(0))));
    assert!(actions.iter().any(|action| matches!(action, Action::ForgetPeer(0))));
}

#[test]
fn a_claim_is_heard_like_every_other_frame() {
    let mut service = Service::new();
    let offer = service.offer(1);
    service.backend.now += HEARTBEAT * 4;
    service.hand_off(7, offer);
    service.carry();
    service.backend.now += Duration::from_millis(1);
    assert_eq!(service.backend.logic.silent_peers(service.backend.now).count(), 0);
}

fn admit(side: &mut Side, name: &str) -> Result<usize, Refused> {
    let hello = Hello { name: padded_name(name), ..Hello::new_zeroed() };
    side.call(|logic, call| logic.admit(&hello, |of| of == name, IpAddr::from([10, 0, 0, 2]), |_| None, call))
}

#[test]
fn only_peers_that_dial_are_admitted() {
    let mut service = Service::new();
    assert_eq!(admit(&mut service.frontend, "be"), Ok(0));
    assert!(!service.frontend.logic.shared.peers.is_up(0), "its earlier session has ended");
    assert!(admit(&mut service.backend, "fe").is_err_and(|refused| refused.why.contains("must not dial")));
    assert!(admit(&mut service.frontend, "is").is_err_and(|refused| refused.why.contains("is no [[peer]] here")));
}

#[test]
fn a_peer_that_left_the_configuration_is_neither_admitted_nor_dialled() {
    let mut service = Service::new();
    for side in [&mut service.frontend, &mut service.backend] {
        let mut settings = side.logic.shared.settings.clone();
        settings.peers[0].is_gone = true;
        side.call(|logic, call| logic.reconfigure(settings, &[], call));
        side.take_actions();
    }
    assert!(admit(&mut service.frontend, "be").is_err());
    service.wait(Duration::from_secs(60));
    let dials = |action: &Action<Model>| matches!(action, Action::Dial(_));
    assert!(!service.backend.take_actions().iter().any(dials));
}

#[test]
fn a_peer_is_told_once_that_it_is_to_offer_nothing() {
    let mut service = Service::new();
    let usage = Usage { handoffs: vec![16384], sending: vec![], descriptors: Descriptors { open: 1, limit: 1024 } };
    let mut tells = || {
        service.frontend.call(|logic, call| logic.look_at_limits(&usage, call));
        !service.frontend.output().is_empty()
    };
    assert!(tells() && !tells());
}

#[test]
fn limits_are_checked_before_new_work_passes_them() {
    let usage = Usage { handoffs: vec![0], sending: vec![], descriptors: Descriptors { open: 1, limit: 1024 } };
    let unlimited = Limits::default();
    for of_backend in [Limits { offers: 2, ..unlimited }, Limits { bytes: 1500, ..unlimited }] {
        let mut service = Service::new();
        service.frontend.logic.shared.settings.limits.handoffs = 2;
        service.backend.logic.shared.settings.limits = of_backend;
        for side in [&mut service.frontend, &mut service.backend] {
            side.call(|logic, call| logic.look_at_limits(&usage, call));
        }
        let is_due = |service: &Service| [service.frontend.logic.is_look_due(), service.backend.logic.is_look_due()];
        let offer = service.offer(1);
        service.hand_off(7, offer);
        assert_eq!(is_due(&service), [false, false]);
        service.offer(2);
        service.hand_off_parts(8);
        assert_eq!(is_due(&service), [true, true]);
    }
}

#[test]
fn an_offer_takes_none_of_the_last_descriptors() {
    let mut service = Service::new();
    service.backend.machine.has_descriptors = false;
    service.offer(1);
    let Logic { shared, backend, .. } = &service.backend.logic;
    assert_eq!((shared.counts.offers_without_descriptor, backend.offers.len()), (1, 0));
}
