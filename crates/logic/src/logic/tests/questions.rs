//! Questions of servers to other agents: ASK (would you send?) and PROVE (which digest has your file?). Also the
//! withdrawal of a digest (SHA-256 of a file) that is no longer true, and claims that wait.

use shunt_wire::peer;

use super::*;

fn ask_with(service: &mut Service, handoff: u64, server: &str) {
    let end = |text: &str| shunt_wire::Endpoint::from(text.parse::<SocketAddr>().unwrap());
    let (client, server) = (end(CLIENT), end(server));
    let ask = local::Ask {
        header: local::Ask::HEADER,
        epoch: service.frontend.logic.shared.board.peers()[0].epoch,
        handoff,
        client_address: client.address,
        server_address: server.address,
        client_port: client.port_be,
        server_port: server.port_be,
        ..local::Ask::new_zeroed()
    };
    let worker = service.worker;
    service.frontend.request(worker, Request::Ask(ask)).unwrap();
    service.carry();
}

/// Takes all actions. Returns the answers among them that servers are told: handoff, and number of the reason.
fn answers(service: &mut Service) -> Vec<(u64, u32)> {
    let told = |action: Action<Model>| match action {
        Action::Tell(_, Told::Answer(answer)) => Some((answer.handoff, answer.reason)),
        _ => None,
    };
    service.frontend.take_actions().into_iter().filter_map(told).collect()
}

#[test]
fn a_machine_says_whether_it_would_send_before_anything_is_handed_off_to_it() {
    let mut service = Service::new();
    ask_with(&mut service, 7, SERVER);
    assert_eq!(answers(&mut service), [(7, local::Answer::YES)]);
    ask_with(&mut service, 8, "192.0.2.99:443");
    assert_eq!(answers(&mut service), [(8, Reason::NotAllowed as u32)]);
    service.backend.logic.shared.settings.peers[0].may_read_store = false;
    ask_with(&mut service, 9, SERVER);
    assert_eq!(answers(&mut service), [(9, Reason::NotAllowed as u32)]);
    service.backend.logic.shared.settings.peers[0].may_read_store = true;
    service.backend.machine.reaches = Err(Reason::Unreachable);
    ask_with(&mut service, 10, SERVER);
    assert_eq!(answers(&mut service), [(10, Reason::Unreachable as u32)]);
    assert_eq!(service.frontend.logic.shared.counts.declined, 3);
}

#[test]
fn a_machine_where_claims_wait_or_that_drains_takes_no_more() {
    let mut service = Service::new();
    service.backend.machine.places = vec![Err(Reason::Limit)];
    service.hand_off_parts(6);
    service.carry();
    answers(&mut service);
    ask_with(&mut service, 7, SERVER);
    assert_eq!(answers(&mut service), [(7, Reason::Limit as u32)]);
    let abort = local::Abort { header: local::Abort::HEADER, handoff: 6 };
    service.frontend.request(0, Request::Abort(abort)).unwrap();
    service.carry();
    ask_with(&mut service, 8, SERVER);
    assert_eq!(answers(&mut service), [(8, local::Answer::YES)]);
    service.backend.logic.shared.is_draining = true;
    ask_with(&mut service, 9, SERVER);
    assert_eq!(answers(&mut service), [(9, Reason::Limit as u32)]);
}

#[test]
fn a_question_of_an_earlier_session_is_not_passed_on() {
    let mut service = Service::new();
    let epoch = service.frontend.logic.shared.board.peers()[0].epoch;
    service.lose();
    service.connect();
    let ask = local::Ask { epoch, handoff: 7, ..local::Ask::new_zeroed() };
    let worker = service.worker;
    service.frontend.request(worker, Request::Ask(ask)).unwrap();
    assert!(service.frontend.output().is_empty());
    let prove = local::Prove { epoch, handoff: 8, ..local::Prove::new_zeroed() };
    service.frontend.request(worker, Request::Prove(prove)).unwrap();
    assert!(service.frontend.output().is_empty());
    let unknown = |action: &Action<Model>| matches!(action, Action::Tell(0, Told::Digest(digest)) if digest.known == 0);
    assert!(service.frontend.take_actions().iter().any(unknown), "who asks for a digest waits for an answer");
}

#[test]
fn answers_that_nobody_has_asked_for_are_dropped() {
    let mut service = Service::new();
    let (answer, digest) = (
        peer::Answer { worker: 1.into(), reason: 0.into(), handoff: 7.into() },
        crate::backend::questions::digest(1, 7, 0, Some([1; 32])),
    );
    for frame in [Frame::Answer(answer), Frame::Digest(digest)] {
        service.frontend.call(|logic, call| logic.frame(0, &frame, call)).unwrap();
    }
    assert!(service.frontend.take_actions().is_empty());
    assert_eq!(service.frontend.logic.shared.counts.unasked, 2);
}

#[test]
fn a_question_ends_with_its_session() {
    let mut service = Service::new();
    let offer = service.offer(1);
    let epoch = service.handoff(7, offer).epoch;
    let header = local::Prove::HEADER;
    let prove = local::Prove { header, peer: 0, epoch, handoff: 7, offer, length: 1000, tag: Tag([3; 16]) };
    service.frontend.request(0, Request::Prove(prove)).unwrap();
    service.carry();
    service.lose();
    service.backend.call(|logic, call| logic.with(call, |_, backend, turn| backend.answer_questions(turn)));
    assert_eq!(service.backend.logic.shared.counts.unproven, 1);
    service.connect();
    let digest = crate::backend::questions::digest(1, 7, 0, Some([1; 32]));
    service.frontend.call(|logic, call| logic.frame(0, &Frame::Digest(digest), call)).unwrap();
    assert_eq!(service.frontend.logic.shared.counts.unasked, 1);
}

#[test]
fn a_digest_is_of_an_offer_for_the_peer_that_asks() {
    let mut service = Service::new();
    let offer = service.offer(1);
    service.backend.machine.known = Known::Digest([8; 32]);
    let prove = |tag| peer::Prove {
        worker: 1.into(),
        zero: 0.into(),
        handoff: 7.into(),
        offer: offer.into(),
        length: 1000.into(),
        tag: Tag([tag; 16]),
    };
    for (tag, proven) in [(4, 0), (3, 1)] {
        service.backend.call(|logic, call| logic.frame(0, &Frame::Prove(prove(tag)), call)).unwrap();
        assert_eq!(service.backend.logic.shared.counts.proven, proven);
    }
}

#[test]
fn a_sender_goes_on_when_the_frontends_server_has_forgotten_the_digest() {
    let mut service = Service::new();
    let epoch = service.frontend.logic.shared.board.peers()[0].epoch;
    let withdrawn = local::Withdrawn { epoch, handoff: 7, ..local::Withdrawn::new_zeroed() };
    let worker = service.worker;
    service.frontend.request(worker, Request::Withdrawn(withdrawn)).unwrap();
    service.carry();
    let number = service.frontend.logic.shared.servers.find(worker).unwrap().worker;
    let goes_on = |action: &Action<Model>| matches!(action, Action::GoOn(of) if of.contains(&(0, number, 7)));
    assert!(service.backend.take_actions().iter().any(goes_on));
    service.backend.call(Logic::end_turn);
    assert!(service.backend.take_actions().is_empty(), "once");
}

#[test]
fn claims_that_wait_longer_than_half_a_minute_fail_and_all_fail_at_the_end() {
    let mut service = Service::new();
    service.backend.machine.places = vec![Err(Reason::Limit); 100];
    service.hand_off_parts(7);
    service.carry();
    let round = |service: &mut Service, time| {
        service.backend.now += Duration::from_millis(time);
        service.backend.logic.begin_waiting_round();
        while service.backend.call(Logic::next_waiting).is_some() {}
        service.backend.logic.backend.waiting.len()
    };
    assert_eq!([29_900, 100].map(|time| round(&mut service, time)), [1, 0]);
    service.carry();
    assert_eq!(service.frontend.ends(), [(0, 7, Reason::Limit)]);
    service.hand_off_parts(8);
    service.carry();
    service.frontend.take_actions();
    service.backend.call(Logic::give_up_waiting);
    service.carry();
    assert_eq!(service.frontend.ends(), [(0, 8, Reason::PeerLost)]);
}

#[test]
fn bytes_of_the_store_are_sent_only_for_peers_that_may_read_it() {
    let mut service = Service::new();
    service.backend.logic.shared.settings.peers[0].may_read_store = false;
    service.hand_off_parts(7);
    service.carry();
    assert_eq!((service.sent(), service.frontend.ends()), (vec![], vec![(0, 7, Reason::NotAllowed)]));
}

#[test]
fn a_server_that_asks_without_end_is_answered_by_its_own_agent() {
    let mut service = Service::new();
    let epoch = service.frontend.logic.shared.board.peers()[0].epoch;
    let worker = service.worker;
    for handoff in 0..2049 {
        let ask = local::Ask { epoch, handoff, ..local::Ask::new_zeroed() };
        service.frontend.request(worker, Request::Ask(ask)).unwrap();
    }
    assert_eq!(answers(&mut service), [(2048, Reason::Limit as u32)]);
}

#[test]
fn a_question_ends_with_its_server() {
    let mut service = Service::new();
    let worker = service.worker;
    let number = service.frontend.logic.shared.servers.find(worker).unwrap().worker;
    let epoch = service.frontend.logic.shared.board.peers()[0].epoch;
    let ask = local::Ask { epoch, handoff: 7, ..local::Ask::new_zeroed() };
    service.frontend.request(worker, Request::Ask(ask)).unwrap();
    service.frontend.call(|logic, call| logic.remove_server(worker, call));
    let answer = peer::Answer { worker: number.into(), reason: 0.into(), handoff: 7.into() };
    service.frontend.call(|logic, call| logic.frame(0, &Frame::Answer(answer), call)).unwrap();
    assert_eq!(service.frontend.logic.shared.counts.unasked, 1);
}
