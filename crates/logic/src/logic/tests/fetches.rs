//! Fetches (payloads that come through both agents) of a frontend's servers, and the same fetches at the backend.

use shunt_wire::peer::{self, Fetched, Protocol, Refused};

use super::*;

fn fetch(name: u64, peer: u32) -> local::Fetch {
    let header = local::Fetch::HEADER;
    local::Fetch { header, fetch: name, peer, length: 1000, tag: Tag([3; 16]), ..local::Fetch::new_zeroed() }
}

fn ask(service: &mut Service, name: u64) -> Option<usize> {
    let worker = service.worker;
    service.frontend.request(worker, Request::Fetch(fetch(name, 0))).unwrap();
    let begun = |action: &Action<Model>| match action {
        Action::BeginFetch { fetch, .. } => Some(*fetch),
        _ => None,
    };
    let found = service.frontend.take_actions();
    found.iter().find_map(begun)
}

fn answer(service: &mut Service, fetch: usize, frame: &Frame) {
    service.frontend.call(|logic, call| logic.fetch_answered(fetch, frame, call));
}

#[test]
fn a_fetch_ends_with_its_last_byte() {
    let mut service = Service::new();
    let fetch = ask(&mut service, 7).unwrap();
    answer(&mut service, fetch, &Frame::Fetched(Fetched { length: 1000.into() }));
    let delivers =
        |action: &Action<Model>| matches!(action, Action::DeliverFetch { message, .. } if message.fetch == 7);
    assert!(service.frontend.take_actions().iter().any(delivers));
    service.frontend.call(|logic, call| logic.fetch_moved(fetch, false, call));
    assert_eq!(service.frontend.logic.under_way(), 1);
    service.frontend.call(|logic, call| logic.fetch_moved(fetch, true, call));
    assert_eq!(service.frontend.logic.under_way(), 0);
}

#[test]
fn a_fetch_that_is_refused_or_of_another_length_fails_and_its_server_is_told() {
    let mut service = Service::new();
    let refused = Refused { reason: (Reason::FileChanged as u32).into() };
    let cases = [
        (Frame::Refused(refused), Reason::FileChanged),
        (Frame::Fetched(Fetched { length: 999.into() }), Reason::Malformed),
        (Frame::Ping(peer::Ping {}), Reason::Malformed),
    ];
    for (frame, reason) in cases {
        let fetch = ask(&mut service, 7).unwrap();
        answer(&mut service, fetch, &frame);
        assert_eq!(service.frontend.ends(), [(0, 7, reason)]);
        assert!(service.frontend.logic.frontend.fetches.is_empty());
    }
}

#[test]
fn a_fetch_that_is_answered_twice_breaks_off() {
    let mut service = Service::new();
    let fetch = ask(&mut service, 7).unwrap();
    let fetched = Frame::Fetched(Fetched { length: 1000.into() });
    answer(&mut service, fetch, &fetched);
    answer(&mut service, fetch, &fetched);
    let drops = |action: &Action<Model>| matches!(action, Action::DropFetch(dropped) if *dropped == fetch);
    let actions = service.frontend.take_actions();
    assert!(actions.iter().any(drops) && !actions.iter().any(|action| matches!(action, Action::Tell(..))));
}

#[test]
fn a_fetch_without_progress_fails_after_its_time() {
    let mut service = Service::new();
    let silent = ask(&mut service, 7).unwrap();
    let answered = ask(&mut service, 8).unwrap();
    answer(&mut service, answered, &Frame::Fetched(Fetched { length: 1000.into() }));
    service.frontend.call(|logic, call| logic.fetch_moved(answered, false, call));
    assert_ne!(silent, answered);
    service.wait(Duration::from_millis(4_900));
    assert_eq!(service.frontend.ends(), []);
    service.wait(Duration::from_millis(100));
    assert_eq!(service.frontend.ends(), [(0, 7, Reason::NoProgress)], "5 s for the answer");
    service.wait(Duration::from_millis(54_900));
    assert_eq!(service.frontend.logic.frontend.fetches.len(), 1);
    service.wait(Duration::from_millis(100));
    assert!(service.frontend.logic.frontend.fetches.is_empty(), "and a minute without a byte");
}

#[test]
fn a_fetch_whose_server_is_gone_is_dropped() {
    let mut service = Service::new();
    let other = service.frontend.server(Channel::Control);
    service.frontend.request(other, Request::Fetch(fetch(8, 0))).unwrap();
    service.frontend.take_actions();
    let fetch = ask(&mut service, 7).unwrap();
    let worker = service.worker;
    service.frontend.call(|logic, call| logic.remove_server(worker, call));
    let drops = |action: &Action<Model>| matches!(action, Action::DropFetch(dropped) if *dropped == fetch);
    assert!(service.frontend.take_actions().iter().any(drops));
    assert_eq!(service.frontend.logic.frontend.fetches.len(), 1, "another server's fetch goes on");
}

#[test]
fn a_fetch_that_cannot_be_given_to_its_server_is_answered() {
    let mut service = Service::new();
    let fetch = ask(&mut service, 7).unwrap();
    answer(&mut service, fetch, &Frame::Fetched(Fetched { length: 1000.into() }));
    service.frontend.take_actions();
    service.frontend.call(|logic, call| logic.fetch_undelivered(fetch, 0, 7, Reason::Socket, call));
    assert_eq!(service.frontend.ends(), [(0, 7, Reason::Socket)]);
}

#[test]
fn a_fetch_needs_a_descriptor_and_a_peer_but_no_session() {
    let mut service = Service::new();
    service.lose();
    assert!(ask(&mut service, 7).is_some());
    service.frontend.machine.has_descriptors = false;
    assert_eq!(ask(&mut service, 8), None);
    assert_eq!(service.frontend.logic.shared.counts.fetches_limited, 1);
    service.frontend.machine.has_descriptors = true;
    service.frontend.call(|logic, call| logic.distrust(0, "revoked", call));
    let worker = service.worker;
    service.frontend.request(worker, Request::Fetch(fetch(9, 0))).unwrap();
    assert_eq!(service.frontend.ends(), [(0, 9, Reason::PeerLost)]);
}

#[test]
fn the_last_fetch_that_limits_allow_has_them_checked_in_its_turn() {
    let mut service = Service::new();
    service.frontend.logic.shared.settings.limits.fetches_per_peer = 2;
    let usage = Usage { handoffs: vec![0], sending: vec![], descriptors: Descriptors { open: 1, limit: 1024 } };
    service.frontend.call(|logic, call| logic.look_at_limits(&usage, call));
    ask(&mut service, 7);
    assert!(!service.frontend.logic.is_look_due());
    ask(&mut service, 8);
    assert!(service.frontend.logic.is_look_due());
    service.frontend.call(|logic, call| logic.look_at_limits(&usage, call));
    service.carry();
    service.backend.call(|logic, call| logic.look_at_limits(&usage, call));
    assert_eq!(service.backend.logic.shared.board.peers()[0].closed, closed::OFFERS);
    assert!(ask(&mut service, 9).is_some(), "what was consented to is fetched all the same");
}

fn serve(service: &mut Service, offer: u64) -> Result<usize, Reason> {
    let fetch = peer::Fetch {
        protocol: Protocol::OURS,
        offer: offer.into(),
        length: 1000.into(),
        tag: Tag([3; 16]),
        trace: TraceId([0; 16]),
    };
    service.backend.call(|logic, call| logic.serve_fetch(Some(0), &fetch, call))
}

#[test]
fn a_file_that_has_changed_is_not_fetched() {
    let mut service = Service::new();
    let offer = service.offer(1);
    service.backend.machine.is_unchanged = false;
    assert_eq!(serve(&mut service, offer), Err(Reason::FileChanged));
    assert!(service.backend.logic.backend.served.is_empty());
}

#[test]
fn a_peers_fetch_has_a_minute_after_each_byte() {
    let mut service = Service::new();
    let offer = service.offer(1);
    let fetch = serve(&mut service, offer).unwrap();
    service.backend.call(|logic, call| logic.served_more(fetch, false, call));
    let is_served = |service: &mut Service, time| {
        service.backend.now += Duration::from_millis(time);
        service.backend.call(|logic, call| logic.with(call, |_, backend, turn| backend.tend_served(turn)));
        !service.backend.logic.backend.served.is_empty()
    };
    assert!(is_served(&mut service, 59_900) && !is_served(&mut service, 100));
    assert_eq!(service.backend.logic.shared.counts.ended[Reason::NoProgress as usize], 1);
}
