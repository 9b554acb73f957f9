//! Tests with a frontend's agent and a backend's agent. The tests carry the frames from one agent to the other. A
//! *handoff* lets the backend send a payload on the connection of the frontend's client. An *offer* is a payload that a
//! backend's server (here a *worker*) holds ready.

mod fetches;
mod questions;
mod sessions;
mod stores;
mod strangers;

use std::net::SocketAddr;

use shunt_wire::flow::FlowState;
use shunt_wire::local::{self, Channel, Handoff, Offer, closed};
use shunt_wire::parts::{Part, Parts};
use shunt_wire::{Tag, TraceId, local::Header};
use zerocopy::FromZeros;

use super::*;
use crate::action::Told;
use crate::limits::{Descriptors, Limits, Load};
use crate::machine::model::Model;
use crate::machine::{Known, Region};
use crate::peers::{Opened, SenderAddresses};
use crate::servers::{Caller, May};
use crate::settings::{BackendSettings, PeerSettings};

const HEARTBEAT: Duration = Duration::from_millis(250);
const SERVER: &str = "192.0.2.1:443";
const CLIENT: &str = "198.51.100.7:4000";

/// One agent and its machine.
struct Side {
    logic: Logic<Model>,
    machine: Model,
    actions: Actions<Model>,
    now: Instant,
    /// Handoffs whose payloads this agent has begun to send.
    sent: Vec<u64>,
}

impl Side {
    fn new(name: &str, peer: PeerSettings, is_frontend: bool, now: Instant) -> Self {
        let backend = BackendSettings { senders: 10, offer_lifetime: Duration::from_secs(30) };
        let settings = Settings {
            name: name.into(),
            heartbeat: HEARTBEAT,
            limits: Limits { offers: 4, ..Limits::default() },
            is_frontend,
            backend: (!is_frontend).then_some(backend),
            has_store: !is_frontend,
            peers: vec![peer],
        };
        let logic = Logic::new(settings, 0, None, now);
        Self { logic, machine: Model::default(), actions: Actions::default(), now, sent: Vec::new() }
    }

    fn call<R>(&mut self, event: impl FnOnce(&mut Logic<Model>, &mut Call<'_, Model>) -> R) -> R {
        let Self { logic, machine, actions, now, .. } = self;
        event(logic, &mut Call { now: *now, machine, actions })
    }

    /// Ends the turn, and takes the bytes for the peer.
    fn output(&mut self) -> Vec<u8> {
        self.call(Logic::end_turn);
        let mut bytes = Vec::new();
        while let Some((_, outbox)) = self.logic.shared.peers.next_unsent(self.now) {
            bytes.append(outbox);
        }
        bytes
    }

    fn input(&mut self, mut bytes: &[u8]) {
        while let Some((frame, length)) = Frame::parse(bytes).unwrap() {
            bytes = &bytes[length..];
            match &frame {
                Frame::Hello(hello) => self.call(|logic, call| logic.hello(0, hello, [5; 16], call)).unwrap(),
                Frame::Claim(claim) => self.claim(claim, None),
                Frame::ClaimParts(claim, parts) => self.claim(claim, Some(parts)),
                frame => self.call(|logic, call| logic.frame(0, frame, call)).unwrap(),
            }
        }
    }

    fn claim(&mut self, claim: &Claim, parts: Option<&Parts>) {
        if let Some(start) = self.call(|logic, call| logic.claim(0, claim, parts, call)) {
            self.start(claim.handoff.get(), &start);
        }
    }

    fn start(&mut self, handoff: u64, start: &Start<Model>) {
        assert_eq!(start.local, SocketAddr::from(([10, 0, 0, 2], 61000)));
        self.sent.push(handoff);
    }

    fn take_actions(&mut self) -> Vec<Action<Model>> {
        std::iter::from_fn(|| self.actions.pop()).collect()
    }

    /// Takes all actions. Returns the messages among them that tell servers of the end of a handoff or fetch: server,
    /// number and reason.
    fn ends(&mut self) -> Vec<(usize, u64, Reason)> {
        let ended = |action: Action<Model>| match action {
            Action::Tell(server, Told::Ended(local::Ended { handoff, reason, .. })) => {
                Some((server, handoff, Reason::from_number(reason).unwrap()))
            }
            _ => None,
        };
        self.take_actions().into_iter().filter_map(ended).collect()
    }

    fn server(&mut self, channel: Channel) -> usize {
        let caller = Caller { pid: 1, uid: 33, gid: 33, may: May::Serve };
        self.call(|logic, call| {
            let server = logic.add_server(caller, call).unwrap();
            logic.request(server, &Request::Hello(channel, 7), &mut None, false, call).unwrap();
            server
        })
    }

    fn request(&mut self, server: usize, request: Request) -> Result<(), Reason> {
        self.call(|logic, call| logic.request(server, &request, &mut Some(1), false, call))
    }
}

/// Both agents, and a connection of one worker on each machine: for control at the frontend, for offers at the backend.
struct Service {
    frontend: Side,
    backend: Side,
    /// Control connection of the frontend's worker.
    worker: usize,
    /// Offers connection of the backend's worker.
    offers: usize,
}

impl Service {
    fn new() -> Self {
        let now = Instant::now();
        let of = |name: &str, is_dialled| PeerSettings {
            name: name.into(),
            address: ([10, 77, 1, 1], 7440).into(),
            is_dialled,
            port: 61000,
            speaks_for: vec![prefix()],
            may_read_store: true,
            is_gone: false,
        };
        let mut frontend = Side::new("fe", of("be", false), true, now);
        let mut backend = Side::new("be", of("fe", true), false, now);
        let worker = frontend.server(Channel::Control);
        let offers = backend.server(Channel::Offers);
        let mut service = Self { frontend, backend, worker, offers };
        service.connect();
        service
    }

    fn connect(&mut self) {
        let opened = |last| Opened {
            senders: SenderAddresses { ipv4: Some(IpAddr::from([10, 0, 0, last])), ipv6: None },
            key: [last; 16],
        };
        self.frontend.call(|logic, call| logic.opened(0, &opened(1), call));
        self.backend.call(|logic, call| logic.opened(0, &opened(2), call));
        self.carry();
        self.frontend.call(|logic, call| logic.set_interface(0, IpAddr::from([10, 0, 0, 2]), 3, call));
        self.frontend.take_actions();
        self.backend.take_actions();
    }

    /// Carries frames between the agents until neither sends any more.
    fn carry(&mut self) {
        loop {
            let (out, back) = (self.frontend.output(), self.backend.output());
            if out.is_empty() && back.is_empty() {
                return;
            }
            self.backend.input(&out);
            self.frontend.input(&back);
        }
    }

    fn lose(&mut self) {
        self.frontend.call(|logic, call| logic.lose_peer(0, "reset", call));
        self.backend.call(|logic, call| logic.lose_peer(0, "reset", call));
    }

    fn offer(&mut self, number: u32) -> u64 {
        let worker = self.backend.logic.shared.servers.find(self.offers).unwrap().worker;
        let mut offer = Offer::new_zeroed();
        offer.number = u64::from(worker) << 32 | u64::from(number);
        (offer.length, offer.size, offer.tag) = (1000, 1000, Tag([3; 16]));
        assert_eq!(self.backend.request(self.offers, Request::Offer(offer)), Ok(()));
        offer.number
    }

    fn handoff(&mut self, name: u64, offer: u64) -> Handoff {
        let epoch = self.frontend.logic.shared.board.peers()[0].epoch;
        let end = |text: &str| shunt_wire::Endpoint::from(text.parse::<SocketAddr>().unwrap());
        let (client, server) = (end(CLIENT), end(SERVER));
        let flow = FlowState {
            client_address: client.address,
            server_address: server.address,
            client_port: client.port_be,
            server_port: server.port_be,
            mss: 1448,
            ..FlowState::new_zeroed()
        };
        Handoff { epoch, handoff: name, offer, length: 1000, tag: Tag([3; 16]), flow, ..Handoff::new_zeroed() }
    }

    fn hand_off(&mut self, name: u64, offer: u64) {
        let handoff = self.handoff(name, offer);
        let worker = self.worker;
        assert_eq!(self.frontend.request(worker, Request::Handoff(handoff)), Ok(()));
    }

    fn hand_off_parts(&mut self, name: u64) {
        let parts = Parts::new(&[Part { length: 1000.into(), ..Part::default() }]).unwrap();
        let handoff = self.handoff(name, 0);
        let worker = self.worker;
        assert_eq!(self.frontend.request(worker, Request::HandoffParts(handoff, parts)), Ok(()));
    }

    /// Takes the handoffs whose payloads the backend has begun to send.
    fn sent(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.backend.sent)
    }

    fn wait(&mut self, time: Duration) {
        for side in [&mut self.frontend, &mut self.backend] {
            side.now += time;
            side.call(Logic::tick);
        }
        self.carry();
    }
}

fn prefix() -> shunt_wire::prefixes::Prefix {
    let address = SERVER.parse::<SocketAddr>().unwrap().ip().into();
    shunt_wire::prefixes::Prefix { address, bits: 128, pad: 0, port: [0; 2] }
}

#[test]
fn a_handoff_is_sent_and_its_offer_is_used_up() {
    let mut service = Service::new();
    let offer = service.offer(1);
    service.hand_off(7, offer);
    service.carry();
    assert_eq!(service.sent(), [7]);
    service.hand_off(8, offer);
    service.carry();
    assert_eq!((service.sent(), service.frontend.ends()), (vec![], vec![(0, 8, Reason::UnknownOffer)]));
}

#[test]
fn a_handoff_of_an_earlier_session_is_refused() {
    let mut service = Service::new();
    let offer = service.offer(1);
    let handoff = service.handoff(7, offer);
    service.lose();
    service.connect();
    service.frontend.request(0, Request::Handoff(handoff)).unwrap();
    service.carry();
    assert_eq!((service.sent(), service.frontend.ends()), (vec![], vec![(0, 7, Reason::UnknownOffer)]));
    service.hand_off(8, offer);
    service.carry();
    assert_eq!(service.sent(), [8], "an offer outlives its session");
}

#[test]
fn the_kernel_has_to_know_a_handoff_as_its_server_describes_it() {
    let mut service = Service::new();
    let offer = service.offer(1);
    for region in [Region::Unknown, Region::Over(Reason::ClientGone)] {
        service.frontend.machine.region = region;
        service.hand_off(7, offer);
        service.carry();
        assert_eq!((service.sent(), service.frontend.ends()), (vec![], vec![(0, 7, Reason::NotAllowed)]));
    }
    assert_eq!(service.frontend.logic.shared.counts.handoffs_unknown, 2);
}

#[test]
fn a_claim_that_is_refused_leaves_its_offer() {
    let mut service = Service::new();
    let offer = service.offer(1);
    service.backend.machine.places = vec![Err(Reason::Unreachable)];
    service.hand_off(7, offer);
    service.carry();
    assert_eq!((service.sent(), service.frontend.ends()), (vec![], vec![(0, 7, Reason::Unreachable)]));
    service.hand_off(8, offer);
    service.carry();
    assert_eq!(service.sent(), [8]);
}

#[test]
fn a_peer_has_nothing_sent_in_anothers_name() {
    let mut service = Service::new();
    let offer = service.offer(1);
    let mut handoff = service.handoff(7, offer);
    handoff.flow.server_address = IpAddr::from([192, 0, 2, 99]).into();
    service.frontend.request(0, Request::Handoff(handoff)).unwrap();
    service.carry();
    assert_eq!((service.sent(), service.frontend.ends()), (vec![], vec![(0, 7, Reason::NotAllowed)]));
}

#[test]
fn stored_bytes_wait_for_a_place_and_their_program_hears_of_it() {
    let mut service = Service::new();
    service.backend.machine.places = vec![Err(Reason::Limit), Err(Reason::Limit)];
    service.hand_off_parts(7);
    service.carry();
    assert_eq!(service.sent(), []);
    let told = |action: &Action<Model>| match action {
        Action::Tell(0, Told::Answer(answer)) => Some((answer.handoff, answer.reason)),
        _ => None,
    };
    let answers: Vec<_> = service.frontend.take_actions().iter().filter_map(told).collect();
    assert_eq!(answers, [(7, Reason::Limit as u32)]);
    let round = |service: &mut Service| {
        let side = &mut service.backend;
        side.logic.begin_waiting_round();
        while let Some(next) = side.call(Logic::next_waiting) {
            if let Some((waits, start)) = next {
                side.start(waits.claimant.handoff, &start);
            }
        }
        service.sent()
    };
    assert_eq!(round(&mut service), []);
    assert_eq!(round(&mut service), [7]);
    assert_eq!(service.frontend.ends(), []);
}

#[test]
fn a_claim_that_waits_is_given_up_with_its_handoff_and_with_its_session() {
    let mut service = Service::new();
    service.backend.machine.places = vec![Err(Reason::Busy); 2];
    service.hand_off_parts(7);
    service.carry();
    let abort = local::Abort { header: local::Abort::HEADER, handoff: 7 };
    service.frontend.request(0, Request::Abort(abort)).unwrap();
    service.carry();
    assert_eq!(service.backend.logic.backend.waiting.len(), 0);
    let aborted = service.backend.take_actions().iter().any(|action| matches!(action, Action::Abort(_)));
    assert!(aborted);
    service.hand_off_parts(8);
    service.carry();
    assert_eq!(service.backend.logic.backend.waiting.len(), 1);
    service.lose();
    assert_eq!(service.backend.logic.backend.waiting.len(), 0);
}

#[test]
fn a_cancelled_handoff_ends_before_another_begins() {
    let mut service = Service::new();
    let offer = service.offer(1);
    let abort = local::Abort { header: local::Abort::HEADER, handoff: 6 };
    service.frontend.request(0, Request::Abort(abort)).unwrap();
    service.hand_off(7, offer);
    let bytes = service.frontend.output();
    service.backend.input(&bytes);
    // The daemon aborts the old handoff before it begins to send the new one's payload, not only when the turn ends.
    assert!(service.backend.take_actions().iter().any(|action| matches!(action, Action::Abort(_))));
    assert_eq!(service.sent(), [7]);
    service.backend.call(Logic::end_turn);
    assert!(service.backend.take_actions().is_empty(), "once");
}

#[test]
fn an_end_that_nobody_may_have_told_is_dropped() {
    let mut service = Service::new();
    let mut bytes = Vec::new();
    let trace = TraceId([0; 16]);
    let ended = shunt_wire::peer::Ended { worker: 1.into(), reason: 9.into(), handoff: 3.into(), trace };
    (0..10).for_each(|_| ended.emit(&mut bytes));
    service.frontend.input(&bytes);
    assert_eq!(service.frontend.ends(), []);
    assert_eq!(service.frontend.logic.shared.counts.unasked, 10);
    let offer = service.offer(1);
    service.hand_off(7, offer);
    service.carry();
    service.frontend.input(&bytes);
    assert_eq!(service.frontend.ends(), [(0, 3, Reason::Limit)], "one for each handoff");
}

#[test]
fn a_question_about_a_file_is_answered_when_it_has_been_read() {
    let mut service = Service::new();
    let offer = service.offer(1);
    let epoch = service.handoff(7, offer).epoch;
    let header = Header { kind: local::kind::PROVE, size: size_of::<local::Prove>() as u32 };
    let prove = local::Prove { header, peer: 0, epoch, handoff: 7, offer, length: 1000, tag: Tag([3; 16]) };
    service.frontend.request(0, Request::Prove(prove)).unwrap();
    service.carry();
    let digests = |service: &mut Service| {
        let told = |action: Action<Model>| match action {
            Action::Tell(0, Told::Digest(digest)) => Some((digest.handoff, digest.known, digest.sha256[0])),
            _ => None,
        };
        service.frontend.take_actions().into_iter().filter_map(told).collect::<Vec<_>>()
    };
    assert_eq!(digests(&mut service), []);
    service.backend.machine.known = Known::Digest([8; 32]);
    service.wait(Duration::from_millis(100));
    assert_eq!(digests(&mut service), [(7, 1, 8)]);
    assert_eq!(service.backend.logic.backend.offers.find(0, offer, 1000, Tag([3; 16])).unwrap().proven, Some(1));
    // A question that has waited for 10 s is answered, too: the answer says that the digest is not known.
    service.backend.machine.known = Known::NotYet;
    service.frontend.request(0, Request::Prove(local::Prove { handoff: 8, ..prove })).unwrap();
    service.carry();
    for _ in 0..100 {
        service.wait(Duration::from_millis(100));
    }
    assert_eq!(digests(&mut service), [(8, 0, 0)]);
}

#[test]
fn a_silent_peer_is_lost_and_its_payloads_are_watched() {
    let mut service = Service::new();
    let end = |text: &str| text.parse::<SocketAddr>().unwrap().into();
    service.frontend.machine.regions = vec![crate::machine::ActiveRegion {
        client: end(CLIENT),
        server: end(SERVER),
        handoff: 7,
        peer: 0,
        acked: 0,
        is_shut: false,
        round_trip: Duration::ZERO,
        quiet: Duration::ZERO,
        queues: false,
        ring: 0,
    }];
    // From here on, no frame reaches the frontend.
    let mut ends = Vec::new();
    for _ in 0..20 {
        service.frontend.now += Duration::from_millis(100);
        service.frontend.call(Logic::tick);
        ends.extend(service.frontend.ends());
    }
    assert_eq!(service.frontend.logic.shared.counts.sessions_lost, 1);
    assert_eq!(ends, [(0, 7, Reason::PeerLost)]);
    assert_eq!(service.frontend.logic.frontend.steered.families(0), 0);
    service.frontend.machine.regions.clear();
    service.wait(Duration::from_secs(1));
    assert_eq!(service.frontend.logic.frontend.losses.len(), 0);
}

#[test]
fn limits_close_the_board_and_a_peer_is_told() {
    let mut service = Service::new();
    let descriptors = Descriptors { open: 10, limit: 1024 };
    let idle = || Usage { handoffs: vec![0], sending: vec![Load::default()], descriptors };
    for number in 1..=4 {
        service.offer(number);
    }
    assert!(service.backend.logic.is_look_due());
    service.backend.call(|logic, call| logic.look_at_limits(&idle(), call));
    assert_eq!(service.backend.logic.shared.board.head().closed, closed::OFFERS);
    let busy = Usage { handoffs: vec![16384], ..idle() };
    service.frontend.call(|logic, call| logic.look_at_limits(&busy, call));
    service.carry();
    service.backend.call(|logic, call| logic.look_at_limits(&idle(), call));
    assert_eq!(service.backend.logic.shared.board.peers()[0].closed, closed::OFFERS);
    service.frontend.call(|logic, call| logic.look_at_limits(&idle(), call));
    service.carry();
    service.backend.call(|logic, call| logic.look_at_limits(&idle(), call));
    assert_eq!(service.backend.logic.shared.board.peers()[0].closed, 0);
}

#[test]
fn a_fetch_is_of_one_offer_for_one_peer() {
    let mut service = Service::new();
    let offer = service.offer(1);
    let fetch = shunt_wire::peer::Fetch {
        protocol: shunt_wire::peer::Protocol::OURS,
        offer: offer.into(),
        length: 1000.into(),
        tag: Tag([3; 16]),
        trace: TraceId([0; 16]),
    };
    let serve = |service: &mut Service, peer| service.backend.call(|logic, call| logic.serve_fetch(peer, &fetch, call));
    assert_eq!(serve(&mut service, None), Err(Reason::UnknownOffer));
    service.backend.machine.has_descriptors = false;
    assert_eq!(serve(&mut service, Some(0)), Err(Reason::Limit));
    service.backend.machine.has_descriptors = true;
    let served = serve(&mut service, Some(0)).unwrap();
    assert_eq!(serve(&mut service, Some(0)), Err(Reason::UnknownOffer), "it is used up");
    service.backend.take_actions();
    service.wait(Duration::from_secs(5));
    let reset = service
        .backend
        .take_actions()
        .iter()
        .any(|action| matches!(action, Action::ResetFetch(fetch) if *fetch == served));
    assert!(reset && service.backend.logic.backend.served.is_empty());
}

#[test]
fn handoffs_of_a_lost_server_are_cancelled() {
    let mut service = Service::new();
    let end = |text: &str| text.parse::<SocketAddr>().unwrap().into();
    let region = crate::machine::ActiveRegion {
        client: end(CLIENT),
        server: end(SERVER),
        handoff: 7,
        peer: 0,
        acked: 0,
        is_shut: false,
        round_trip: Duration::ZERO,
        quiet: Duration::ZERO,
        queues: true,
        ring: 0,
    };
    service.frontend.machine.regions = vec![region];
    let cancels = |service: &mut Service| {
        let all = service.frontend.take_actions().into_iter();
        all.filter(|action| matches!(action, Action::Cancel(cancelled) if *cancelled == region)).count()
    };
    // The handoff belongs to `service.worker`, so the server `other` may not cancel it.
    let other = service.frontend.server(Channel::Control);
    let cancel = local::Cancel { header: local::Cancel::HEADER, handoff: 7 };
    service.frontend.request(other, Request::Cancel(cancel)).unwrap();
    service.carry();
    assert_eq!(cancels(&mut service), 0);
    let worker = service.worker;
    service.frontend.call(|logic, call| logic.remove_server(worker, call));
    assert_eq!(cancels(&mut service), 1, "it has told of no handoff");
    service.frontend.request(other, Request::Cancel(cancel)).unwrap();
    service.carry();
    assert_eq!(cancels(&mut service), 1, "nobody has its ring any more");
}

#[test]
fn a_peer_comes_and_goes_with_the_configuration() {
    let mut service = Service::new();
    let offer = service.offer(1);
    let mut settings = service.frontend.logic.shared.settings.clone();
    settings.peers.push(PeerSettings { name: "is".into(), ..settings.peers[0].clone() });
    service.frontend.call(|logic, call| logic.reconfigure(settings.clone(), &[], call));
    assert!(service.frontend.logic.shared.peers.is_up(0), "a session that is not concerned goes on");
    let board = &service.frontend.logic.shared.board;
    assert_eq!((board.head().peers, board.peers().len(), board.epoch(1)), (2, 2, None));
    settings.peers[0].is_gone = true;
    service.frontend.call(|logic, call| logic.reconfigure(settings.clone(), &[], call));
    assert!(!service.frontend.logic.shared.peers.is_up(0) && !service.frontend.logic.shared.board.knows(0));
    service.backend.call(|logic, call| logic.lose_peer(0, "reset", call));
    settings.peers[0].is_gone = false;
    service.frontend.call(|logic, call| logic.reconfigure(settings, &[], call));
    service.connect();
    service.hand_off(7, offer);
    service.carry();
    assert_eq!(service.sent(), [7]);
}

#[test]
fn a_session_ends_whose_peer_has_other_settings() {
    let mut service = Service::new();
    let mut settings = service.backend.logic.shared.settings.clone();
    settings.limits.offers = 1;
    service.backend.call(|logic, call| logic.reconfigure(settings.clone(), &[], call));
    assert!(service.backend.logic.shared.peers.is_up(0), "limits end no session");
    settings.peers[0].speaks_for.clear();
    service.backend.call(|logic, call| logic.reconfigure(settings, &[], call));
    assert!(!service.backend.logic.shared.peers.is_up(0));
}

#[test]
fn a_session_that_is_being_opened_ends_with_the_settings_that_its_hello_had() {
    let mut service = Service::new();
    service.lose();
    let opened = Opened { senders: SenderAddresses::default(), key: [1; 16] };
    service.backend.call(|logic, call| logic.opened(0, &opened, call));
    let mut settings = service.backend.logic.shared.settings.clone();
    settings.limits.offers = 1;
    service.backend.take_actions();
    service.backend.call(|logic, call| logic.reconfigure(settings.clone(), &[], call));
    let hangs_up = |action: &Action<Model>| matches!(action, Action::HangUp(0));
    assert!(!service.backend.take_actions().iter().any(hangs_up), "limits end nothing");
    settings.peers[0].may_read_store ^= true;
    service.backend.call(|logic, call| logic.reconfigure(settings, &[], call));
    assert!(service.backend.take_actions().iter().any(hangs_up));
    assert!(!service.backend.logic.shared.peers.is_greeted(0));
}
