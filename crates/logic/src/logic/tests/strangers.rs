//! Messages that peers (other agents) and servers may not send, above all about handoffs that are not theirs. Also
//! handoffs and rings whose server is gone. A *ring* is a BPF ring buffer by which the kernel tells one server what
//! becomes of its handoffs. A *handoff* lets a backend send a payload on the connection of a frontend's client.

use shunt_wire::peer::Ended;

use super::*;
use crate::machine::ActiveRegion;

fn region(handoff: u64, peer: u32, ring: u32) -> ActiveRegion {
    let end = |text: &str| text.parse::<SocketAddr>().unwrap().into();
    ActiveRegion {
        client: end(CLIENT),
        server: end(SERVER),
        handoff,
        peer,
        acked: 0,
        is_shut: false,
        round_trip: Duration::ZERO,
        quiet: Duration::ZERO,
        queues: true,
        ring,
    }
}

/// Ends the frontend's turn. Returns the handoffs that its daemon is asked to cancel.
fn cancelled(service: &mut Service) -> Vec<u64> {
    service.frontend.call(Logic::end_turn);
    let handoff = |action: Action<Model>| match action {
        Action::Cancel(region) => Some(region.handoff),
        _ => None,
    };
    service.frontend.take_actions().into_iter().filter_map(handoff).collect()
}

/// Has the backend's agent say that it has ended a handoff of worker 99, which does not exist.
fn end(service: &mut Service, handoff: u64) {
    let ended = Ended { worker: 99.into(), reason: 9.into(), handoff: handoff.into(), trace: TraceId([0; 16]) };
    service.frontend.call(|logic, call| logic.frame(0, &Frame::Ended(ended), call)).unwrap();
}

/// Lets time pass, and has the frontend look at the payloads that it watches.
fn tend_after(service: &mut Service, time: Duration) {
    service.frontend.now += time;
    service.frontend.call(|logic, call| logic.with(call, |frontend, _, turn| frontend.tend_losses(turn)));
}

/// Has the frontend look at the payloads that it watches once a second.
fn tend_for(service: &mut Service, seconds: u32) {
    (0..seconds).for_each(|_| tend_after(service, Duration::from_secs(1)));
}

/// Returns a service whose server has told its agent of handoff 7, and was then killed. The kernel still has `regions`:
/// a region is the range of a connection's sequence numbers that a payload takes.
fn killed_after_telling(regions: Vec<ActiveRegion>) -> Service {
    let mut service = Service::new();
    service.hand_off_parts(7);
    service.carry();
    let worker = service.worker;
    service.frontend.machine.regions = regions;
    service.frontend.call(|logic, call| logic.remove_server(worker, call));
    service
}

#[test]
fn a_peer_cancels_only_handoffs_that_it_sends() {
    let mut service = Service::new();
    let offers = [1, 2].map(|number| service.offer(number));
    [(5, offers[0]), (6, offers[1])].iter().for_each(|(name, offer)| service.hand_off(*name, *offer));
    service.frontend.machine.regions = vec![region(7, 1, 0), region(8, 0, 0)];
    end(&mut service, 7);
    assert_eq!(cancelled(&mut service), [], "another peer sends this one");
    end(&mut service, 8);
    assert_eq!(cancelled(&mut service), [8]);
    end(&mut service, 8);
    assert_eq!(cancelled(&mut service), [], "it was given two handoffs, and has ended two");
}

#[test]
fn cancels_of_a_turn_cost_one_scan_of_the_flows() {
    let mut service = Service::new();
    for number in 1..=3 {
        let offer = service.offer(number);
        service.hand_off(number.into(), offer);
    }
    let before = service.frontend.machine.scans;
    (1..=3).for_each(|handoff| end(&mut service, handoff));
    cancelled(&mut service);
    assert_eq!(service.frontend.machine.scans - before, 1);
}

#[test]
fn a_server_cancels_only_handoffs_of_its_ring_and_of_nobodys() {
    let mut service = Service::new();
    let (other, worker) = (service.frontend.server(Channel::Control), service.worker);
    let ring_of = |service: &Service, server| service.frontend.logic.shared.servers.find(server).unwrap().ring();
    let (own, others) = (ring_of(&service, worker).unwrap(), ring_of(&service, other).unwrap());
    service.frontend.machine.regions = vec![region(7, 0, own), region(8, 0, others), region(9, 0, 300)];
    for handoff in [7, 8, 9] {
        let cancel = local::Cancel { header: local::Cancel::HEADER, handoff };
        service.frontend.request(worker, Request::Cancel(cancel)).unwrap();
    }
    assert_eq!(cancelled(&mut service), [7, 9]);
}

#[test]
fn a_handoff_that_a_killed_process_has_told_of_is_watched_and_others_end_at_once() {
    let mut service = killed_after_telling(vec![region(7, 0, 0), region(8, 0, 0), region(9, 0, 1)]);
    assert_eq!(cancelled(&mut service), [8], "nobody was told of it, so nobody sends it");
    assert_eq!(service.frontend.logic.frontend.losses.len(), 1);
    // The client acknowledges nothing of handoff 7 for 10 s.
    tend_after(&mut service, Duration::from_millis(9_900));
    assert_eq!(cancelled(&mut service), []);
    tend_after(&mut service, Duration::from_millis(100));
    assert_eq!(cancelled(&mut service), [7]);
}

#[test]
fn a_handoff_of_a_killed_process_goes_on_once_its_first_bytes_have_arrived() {
    let mut service = killed_after_telling(vec![region(7, 0, 0)]);
    service.frontend.machine.regions = vec![ActiveRegion { acked: 1, ..region(7, 0, 0) }];
    // Then the client acknowledges nothing more for 20 s.
    tend_for(&mut service, 20);
    assert_eq!((cancelled(&mut service), service.frontend.logic.shared.counts.stalled), (vec![], 0));
}

#[test]
fn a_handoff_of_a_killed_process_whose_peer_is_lost_too_is_watched_to_its_end() {
    let mut service = killed_after_telling(vec![region(7, 0, 0)]);
    service.lose();
    // The lost machine's kernel still sends what it has.
    service.frontend.machine.regions = vec![ActiveRegion { acked: 1, ..region(7, 0, 0) }];
    tend_for(&mut service, 20);
    assert!(cancelled(&mut service).starts_with(&[7]), "nobody sends the rest");
}

#[test]
fn a_handoff_of_a_killed_process_that_never_begins_ends_though_another_has_its_ring() {
    let ring = 0;
    let mut service = killed_after_telling(vec![region(7, 0, ring)]);
    let ring_of = |service: &Service, server| service.frontend.logic.shared.servers.find(server).unwrap().ring();
    // Freed rings are given again last.
    loop {
        let next = service.frontend.server(Channel::Control);
        if ring_of(&service, next) == Some(ring) {
            break;
        }
        service.frontend.call(|logic, call| logic.remove_server(next, call));
    }
    tend_after(&mut service, Duration::from_secs(10));
    assert_eq!(cancelled(&mut service), [7]);
}

#[test]
fn a_shut_window_before_the_first_byte_does_not_end_a_handoff_of_a_killed_process() {
    let mut service = killed_after_telling(vec![region(7, 0, 0)]);
    service.frontend.machine.regions = vec![ActiveRegion { is_shut: true, ..region(7, 0, 0) }];
    tend_for(&mut service, 60);
    assert_eq!(cancelled(&mut service), [], "the client takes nothing");
    service.frontend.machine.regions = vec![region(7, 0, 0)];
    tend_for(&mut service, 9);
    assert_eq!(cancelled(&mut service), [], "the client has time again");
    tend_for(&mut service, 1);
    assert_eq!(cancelled(&mut service), [7]);
}

#[test]
fn a_region_that_an_earlier_agent_left_is_cancelled_only_after_servers_had_time_to_find_this_one() {
    let mut service = Service::new();
    service.frontend.machine.regions = vec![region(7, 0, 300)];
    service.frontend.call(Logic::watch_regions);
    let mut told = Vec::new();
    for second in 0..20 {
        tend_after(&mut service, Duration::from_secs(1));
        if !cancelled(&mut service).is_empty() {
            told.push(second);
            break;
        }
    }
    assert_eq!(told, [9], "servers look for an agent for seconds");
}

#[test]
fn only_servers_that_hand_off_are_told_of_a_peers_end() {
    let mut service = Service::new();
    let offers = service.frontend.server(Channel::Offers);
    let number = service.frontend.logic.shared.servers.find(offers).unwrap().worker;
    let offer = service.offer(1);
    service.hand_off(7, offer);
    let ended = Ended { worker: number.into(), reason: 9.into(), handoff: 7.into(), trace: TraceId([0; 16]) };
    service.frontend.call(|logic, call| logic.frame(0, &Frame::Ended(ended), call)).unwrap();
    assert_eq!(service.frontend.ends(), []);
}

#[test]
fn an_offers_number_names_its_server() {
    let mut service = Service::new();
    let offers = service.offers;
    let offer = Offer { number: 99 << 32 | 1, ..Offer::new_zeroed() };
    assert_eq!(service.backend.request(offers, Request::Offer(offer)), Err(Reason::Malformed));
}

#[test]
fn a_process_that_may_only_observe_does_nothing_else() {
    let mut service = Service::new();
    let caller = Caller { pid: 1, uid: 34, gid: 34, may: May::Observe };
    let server = service.frontend.call(|logic, call| logic.add_server(caller, call)).unwrap();
    assert_eq!(service.frontend.request(server, Request::Stats), Ok(()));
    let hello = Request::Hello(Channel::Control, 7);
    assert_eq!(service.frontend.request(server, hello), Err(Reason::NotAllowed));
    assert_eq!(service.frontend.logic.shared.counts.refused_callers, 1);
}

#[test]
fn offers_come_by_the_connection_for_offers_and_handoffs_by_the_other() {
    let mut service = Service::new();
    let (worker, offers) = (service.worker, service.offers);
    let handoff = service.handoff(7, 1);
    assert_eq!(service.backend.request(offers, Request::Handoff(handoff)), Err(Reason::Malformed));
    assert_eq!(service.frontend.request(worker, Request::Offer(Offer::new_zeroed())), Err(Reason::Malformed));
    let again = Request::Hello(Channel::Control, 7);
    assert_eq!(service.frontend.request(worker, again), Err(Reason::Malformed), "it has said what it is");
}

#[test]
fn a_region_whose_server_writes_nothing_behind_it_is_its_servers_to_end() {
    let mut service = Service::new();
    let offer = service.offer(1);
    service.hand_off(7, offer);
    service.frontend.machine.regions = vec![ActiveRegion { queues: false, ..region(7, 0, 300) }];
    end(&mut service, 7);
    assert_eq!(cancelled(&mut service), [], "nginx notices by itself that nothing comes");
    let worker = service.worker;
    service.frontend.call(|logic, call| logic.remove_server(worker, call));
    assert_eq!(cancelled(&mut service), []);
}

#[test]
fn a_payload_is_watched_once_however_often_its_peer_is_lost() {
    let mut service = Service::new();
    service.frontend.machine.regions = vec![region(7, 0, 0)];
    for _ in 0..3 {
        service.lose();
        service.connect();
    }
    assert_eq!(service.frontend.logic.frontend.losses.len(), 1);
}

#[test]
fn a_stalled_region_of_a_connected_server_is_left_to_it() {
    let mut service = Service::new();
    let ring = service.frontend.logic.shared.servers.find(service.worker).unwrap().ring().unwrap();
    service.frontend.machine.regions = vec![region(7, 0, ring)];
    service.frontend.call(Logic::watch_regions);
    tend_for(&mut service, 20);
    assert_eq!(service.frontend.logic.shared.counts.stalled, 20);
    assert_eq!(cancelled(&mut service), []);
}

#[test]
fn nothing_is_sent_to_a_client_that_is_no_other_machine() {
    let mut service = Service::new();
    let offer = service.offer(1);
    let mut handoff = service.handoff(7, offer);
    handoff.flow.client_address = IpAddr::from([127, 0, 0, 1]).into();
    service.frontend.request(0, Request::Handoff(handoff)).unwrap();
    service.carry();
    assert_eq!((service.sent(), service.frontend.ends()), (vec![], vec![(0, 7, Reason::NotAllowed)]));
}

#[test]
fn a_machine_that_is_no_backend_sends_nothing() {
    let mut service = Service::new();
    service.frontend.logic.backend = Backend::new(None, true); // `true`: the machine has a store
    service.frontend.logic.shared.peers.peer(0).senders.ipv4 = Some(IpAddr::from([10, 0, 0, 1]));
    let claim = Claim::of(1, &service.handoff(7, 1));
    let parts = Parts::new(&[Part { length: 1000.into(), ..Part::default() }]).unwrap();
    for parts in [None, Some(&parts)] {
        assert!(service.frontend.call(|logic, call| logic.claim(0, &claim, parts, call)).is_none());
    }
    assert_eq!(service.frontend.logic.shared.counts.ended[Reason::UnknownOffer as usize], 2);
}

#[test]
fn a_ring_ends_with_its_server_and_the_next_one_gets_another() {
    let mut service = Service::new();
    let ring_of = |side: &Side, server| side.logic.shared.servers.find(server).unwrap().ring();
    let (worker, side) = (service.worker, &mut service.frontend);
    let ring = ring_of(side, worker).unwrap();
    side.call(|logic, call| logic.remove_server(worker, call));
    assert!(side.take_actions().iter().any(|action| matches!(action, Action::CloseRing(closed) if *closed == ring)));
    let next = side.server(Channel::Control);
    assert_eq!(ring_of(side, next), Some(ring + 1));
    // The kernel cannot make the ring of the server `next`.
    side.logic.ring_failed(next);
    assert_eq!((ring_of(side, next), side.logic.shared.counts.rings_exhausted), (None, 1));
    let last = side.server(Channel::Control);
    assert_eq!(ring_of(side, last), Some(ring + 2));
}

#[test]
fn connections_of_servers_that_say_nothing_or_nonsense_are_closed() {
    let mut service = Service::new();
    let caller = Caller { pid: 1, uid: 34, gid: 34, may: May::Serve };
    let (worker, side) = (service.worker, &mut service.frontend);
    let silent = side.call(|logic, call| logic.add_server(caller, call)).unwrap();
    side.now += Duration::from_secs(10);
    side.call(Logic::tick);
    side.call(|logic, call| logic.malformed(worker, Reason::Malformed, call));
    let mut closed = Vec::new();
    for action in side.take_actions() {
        match action {
            Action::CloseServer(server) => closed.push(server),
            Action::Tell(server, Told::Ended(ended)) => {
                assert_eq!((server, ended.reason), (worker, Reason::Malformed as u32))
            }
            _ => {}
        }
    }
    assert_eq!(closed, [silent, worker]);
    assert!(side.logic.shared.servers.is_empty());
}
