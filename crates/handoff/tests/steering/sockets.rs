//! The whole steering with real sockets: three hosts, each with its own kernel TCP, and one client connection.
//!
//! The frontend's server writes headers and footers. The payloads come from the backend's *sender*, a socket that is
//! restored from the connection's state (`struct shunt_state`) without any code of the agent. The client reads one
//! stream and compares every byte. A *region* is the range of sequence numbers that one payload takes. The backend's
//! *word* confirms that the client has acknowledged a whole payload.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddrV6, TcpListener, TcpStream};
use std::time::Duration;

use shunt_handoff::Frontend;
use shunt_handoff::bpf::{MAX_PEERS, MAX_RINGS};
use shunt_sys::sockopt;
use shunt_testbed::wait_for;
use shunt_wire::flow::FlowState;
use zerocopy::IntoBytes;

use super::host::{ifindex, ip};
use super::steered::*;

/// Serves `lengths.len()` responses on one connection, each made of header, payload and footer.
pub fn serve(steered: &mut Steered, lengths: &[usize]) {
    let (mut server, mut client) = steered.connect();
    let expected: Vec<Vec<u8>> = lengths
        .iter()
        .enumerate()
        .map(|(n, &length)| {
            let header = format!("header {n}\n").into_bytes();
            [header, payload(n as u64 + 1, length), format!("footer {n}\n").into_bytes()].concat()
        })
        .collect();
    let reader = std::thread::spawn(move || {
        for (n, expected) in expected.iter().enumerate() {
            client.write_all(format!("request {n}").as_bytes()).expect("the request goes out");
            expect(&mut client, expected);
        }
        assert_eq!(ending(&mut client).expect("a clean end"), 0);
    });
    for (n, &length) in lengths.iter().enumerate() {
        let handoff = n as u64 + 1;
        let request = format!("request {n}");
        let mut read = vec![0; request.len()];
        server.read_exact(&mut read).expect("the request comes in");
        assert_eq!(read, request.as_bytes());
        server.write_all(format!("header {n}\n").as_bytes()).expect("header");
        let sending = steered.hand_off(&server, handoff, &payload(handoff, length));
        assert_eq!(steered.event(), (handoff, length as u64, 1));
        sending.finish();
        assert_eq!(steered.state(&server).status, 2);
        server.write_all(format!("footer {n}\n").as_bytes()).expect("footer");
    }
    drop(server);
    reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[test]
fn responses_of_all_sizes_arrive_whole_on_one_connection() {
    let mut steered = Steered::new();
    serve(&mut steered, &[1, 100, 1460, 65_536, 1_000_000, 1, 8_000_000, 4096]);
    // If a fault made regions stall, there would be a timeout in each response. A busy machine causes one now and then.
    let timeouts = steered.hosts.timeouts();
    assert!(timeouts < 8, "{timeouts} retransmission timeouts");
    assert_eq!(steered.count("fe_completed"), 8);
    for nothing in ["fe_drop_early_write", "fe_drop_bad_ack", "fe_drop_rewrite", "fe_event_lost", "be_drop_rewrite"] {
        assert_eq!(steered.count(nothing), 0, "{nothing}");
    }
}

#[test]
fn they_arrive_whole_over_ipv6_whoever_finishes_checksums() {
    for in_software in [false, true] {
        let mut steered = Steered::ipv6();
        steered.spacing = Some(8 * 1448);
        if in_software {
            steered.hosts.checksums_in_software();
        }
        serve(&mut steered, &[1, 100, 65_536, 3_000_000, 1, 4096]);
        upload_during_a_handoff(&mut steered, 10_000_000, 20_000_000);
        assert_eq!(steered.count("fe_completed"), 7);
        assert_eq!(steered.hosts.checksum_errors(), 0);
        let stripped = steered.count("fe_in_stripped");
        assert!(stripped > 0, "{stripped} copies cut: real checksums of IPv6 were made anew");
    }
}

/// Makes a connection: the server listens at `listening`, and the client connects to `address`. Returns whether
/// SHUNT_BEGIN accepts the connection.
fn takes(steered: &Steered, listening: &str, address: &str) -> bool {
    let (mut server, mut client) =
        steered.connect_to(listening.parse().expect("an address"), address.parse().expect("an address"));
    server.write_all(b"header").expect("header");
    expect(&mut client, b"header");
    let begun = begin(&server, 1, 100).is_ok();
    // Expected status: SHUNT_REGION_ACTIVE or SHUNT_REGION_FAMILY.
    assert_eq!(steered.answer().status, if begun { 1 } else { 7 });
    begun
}

#[test]
fn a_client_of_another_ip_version_than_the_senders_is_refused() {
    let steered = Steered::new();
    assert!(takes(&steered, "10.0.0.1", "10.0.0.1"));
    assert!(takes(&steered, "::", "10.0.0.1"), "IPv4 on a socket of both versions is IPv4");
    assert!(!takes(&steered, "fd00::1", "fd00::1"));
    assert!(!takes(&steered, "::", "fd00::1"));
    assert_eq!(steered.count("fe_refused_family"), 2);
    drop(steered);
    let steered = Steered::ipv6();
    assert!(takes(&steered, "::", "fd00::1"));
    assert!(!takes(&steered, "::", "10.0.0.1"));
    assert_eq!(steered.count("fe_refused_family"), 1);
}

#[test]
fn a_client_that_no_backend_can_send_to_is_refused() {
    for steered in [Steered::new, Steered::ipv6] {
        let steered = steered();
        let refused = |address: IpAddr| {
            let listener = TcpListener::bind((address, 0)).expect("listen");
            let mut client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connect");
            let (mut server, _) = listener.accept().expect("accept");
            server.write_all(b"header").expect("header");
            expect(&mut client, b"header");
            begin(&server, 1, 100).is_err()
        };
        let loopback = if steered.hosts.frontend_address.is_ipv4() { "127.0.0.2" } else { "::1" };
        assert!(refused(loopback.parse().expect("an address")));
        assert!(refused(steered.hosts.frontend_address), "it asks itself");
        assert_eq!(steered.count("fe_refused_client"), 2);
    }
    let steered = Steered::ipv6();
    ip(&["addr", "add", "fe80::1/64", "dev", "clients", "nodad"]);
    let listener = TcpListener::bind("[::]:0").expect("listen");
    let port = listener.local_addr().expect("bound").port();
    let mut client = (steered.hosts.client)
        .run(|| TcpStream::connect(SocketAddrV6::new([0xfe80, 0, 0, 0, 0, 0, 0, 1].into(), port, 0, ifindex("uplink"))))
        .expect("netns")
        .expect("connect");
    let (mut server, _) = listener.accept().expect("accept");
    server.write_all(b"header").expect("header");
    expect(&mut client, b"header");
    assert!(begin(&server, 1, 100).is_err());
    assert_eq!(steered.count("fe_refused_client"), 1);
}

#[test]
fn they_arrive_whole_over_a_link_that_loses_packets() {
    let mut steered = Steered::new();
    steered.hosts.congest();
    serve(&mut steered, &[3000, 300_000, 1_000_000, 50_000]);
    assert_eq!(steered.count("fe_completed"), 4);
    assert!(steered.hosts.lost() > 0, "nothing was lost");
}

fn serve_with_few_acks(steered: &mut Steered) {
    steered.hosts.without_segmentation_offload();
    steered.spacing = Some(8 * 1448);
    serve(steered, &[300_000, 3_000_000, 1, 50_000]);
}

#[test]
fn they_arrive_whole_where_the_backend_gets_few_acks() {
    let mut steered = Steered::new();
    serve_with_few_acks(&mut steered);
    let (held, passed) = (steered.count("fe_in_held"), steered.count("fe_in_backend"));
    assert!(held > 0, "none held, {passed} passed on");
}

#[test]
fn they_arrive_whole_where_it_gets_few_acks_over_a_link_that_loses_packets() {
    let mut steered = Steered::new();
    steered.hosts.congest();
    serve_with_few_acks(&mut steered);
    assert!(steered.hosts.lost() > 0, "nothing was lost");
    let (held, passed) = (steered.count("fe_in_held"), steered.count("fe_in_backend"));
    assert!(held > 0, "none held, {passed} passed on");
}

#[test]
fn they_arrive_whole_without_segmentation_offload() {
    let mut steered = Steered::new();
    steered.hosts.without_segmentation_offload();
    serve(&mut steered, &[1, 100_000, 700_000]);
}

#[test]
fn bytes_that_the_client_sends_meanwhile_reach_the_frontend() {
    let mut steered = Steered::new();
    upload_during_a_handoff(&mut steered, 300_000, 400_000);
}

#[test]
fn checksums_are_good_whoever_finishes_them() {
    let mut steered = Steered::new();
    steered.hosts.checksums_in_software();
    upload_during_a_handoff(&mut steered, 10_000_000, 20_000_000);
    serve(&mut steered, &[1, 100_000]);
    assert!(steered.count("fe_in_stripped") > 0, "nothing was uploaded during the payload");
    assert_eq!(steered.hosts.checksum_errors(), 0);
}

/// Sends `upload` bytes from the client to the server while the client gets `download` bytes from the backend.
pub fn upload_during_a_handoff(steered: &mut Steered, upload: usize, download: usize) {
    let (mut server, mut client) = steered.connect_and_send_header();
    let body = payload(9, download);
    let upload = payload(8, upload);
    let (sent, read) = (upload.clone(), body.clone());
    let client_end = std::thread::spawn(move || {
        let mut writing = client.try_clone().expect("dup");
        let writer = std::thread::spawn(move || writing.write_all(&sent).expect("the upload goes out"));
        expect(&mut client, &read);
        expect(&mut client, b"footer");
        writer.join().expect("all written");
    });
    let server_reads = server.try_clone().expect("dup");
    let reader = std::thread::spawn(move || expect(&mut { server_reads }, &upload));
    let sending = steered.hand_off(&server, 1, &body);
    assert_eq!(steered.event(), (1, body.len() as u64, 1));
    reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    server.write_all(b"footer").expect("footer");
    client_end.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    sending.finish();
}

#[test]
fn a_new_agent_takes_over_in_the_middle_of_a_handoff() {
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect_and_send_header();
    let body = payload(1, 30_000_000);
    let read = body.clone();
    let client_end = std::thread::spawn(move || {
        expect(&mut client, &read);
        expect(&mut client, b"footer");
    });
    let sending = steered.hand_off(&server, 1, &body);
    steered.frontend = Frontend::load(&steered.frontend_config).expect("the frontend loads again");
    assert_eq!(steered.event(), (1, body.len() as u64, 1));
    server.write_all(b"footer").expect("footer");
    client_end.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    sending.finish();
    assert_eq!(steered.count("fe_begun"), 1, "the counters go on");
}

#[test]
fn a_server_that_leaves_in_the_middle_resets_its_client() {
    let mut steered = Steered::new();
    let (server, mut client) = steered.connect_and_send_header();
    let sending = steered.hand_off(&server, 1, &payload(1, 100));
    assert_eq!(steered.event().2, 1);
    sending.finish();
    begin(&server, 2, 200).expect("SHUNT_BEGIN");
    drop(server);
    let mut read = vec![0; 300];
    let error = loop {
        match client.read(&mut read) {
            Ok(0) => panic!("a clean end of half a response"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert!(steered.count("fe_cancelled") == 1 && steered.count("fe_out_fin_to_rst") >= 1);
}

/// Checks that a client is reset when its server ends the connection by `end`. The client has more bytes than the
/// frontend knows: all its ACKs of the payload were lost, and nobody sends anything that draws another ACK.
fn reset_after_lost_acks(end: impl FnOnce(TcpStream)) {
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect_and_send_header();
    client.write_all(b"next").expect("a request, and with it the ACK of the header");
    server.read_exact(&mut [0; 4]).expect("the request");
    steered.hosts.client_is_heard(false);
    begin(&server, 1, 1 << 20).expect("SHUNT_BEGIN");
    let begun = steered.answer();
    let part = payload(1, 10_000);
    let sending = steered.send(&begun, &part);
    expect(&mut client, &part);
    sending.finish();
    steered.hosts.client_is_heard(true);
    assert_eq!(steered.state(&server).acked, 0, "the frontend has heard nothing");
    end(server);
    let error = ending(&mut client).expect_err("a part of a response");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

#[test]
fn a_client_whose_last_acks_were_lost_is_reset_by_a_close() {
    reset_after_lost_acks(drop);
}

#[test]
fn a_client_whose_last_acks_were_lost_is_reset_by_a_reset() {
    reset_after_lost_acks(|server| {
        rustix::net::sockopt::set_socket_linger(&server, Some(Duration::ZERO)).expect("SO_LINGER");
    });
}

/// After the close, the frontend's kernel repeats the header, which is unacknowledged, and not the FIN.
#[test]
fn a_client_whose_ack_of_the_header_was_lost_is_reset() {
    let steered = Steered::new();
    let (mut server, mut client) = steered.connect();
    steered.hosts.client_is_heard(false);
    server.write_all(b"header").expect("header");
    expect(&mut client, b"header");
    begin(&server, 1, 1000).expect("SHUNT_BEGIN");
    drop(server);
    wait_for("the first FIN has left", || steered.count("fe_cancelled") > 0).unwrap();
    steered.hosts.client_is_heard(true);
    let error = ending(&mut client).expect_err("a part of a response");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

#[test]
fn a_client_that_resets_is_reported() {
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect_and_send_header();
    client.write_all(b"never read").expect("a request");
    server.read_exact(&mut [0; 10]).expect("the request");
    let sending = steered.hand_off(&server, 1, &payload(1, 3_000_000));
    client.read_exact(&mut [0; 1000]).expect("some of it");
    drop(client); // the client resets, because it has unread data
    let (handoff, acked, kind) = steered.event();
    assert_eq!((handoff, kind), (1, 2));
    assert!(acked < 3_000_000);
    assert_eq!(steered.count("fe_client_reset"), 1);
    sending.finish();
}

#[test]
fn a_client_that_has_no_room_is_told_from_one_that_waits() {
    let mut steered = Steered::new();
    let (server, mut client) = steered.connect_and_send_header();
    let body = payload(1, 3_000_000);
    begin(&server, 1, body.len() as u64).expect("SHUNT_BEGIN");
    let begun = steered.answer();
    assert_eq!(begun.shut, 0);
    let sending = steered.send(&begun, &body);
    wait_for("its window is full", || steered.state(&server).shut == 1).unwrap();
    expect(&mut client, &body);
    assert_eq!((steered.event(), steered.state(&server).shut), ((1, body.len() as u64, 1), 0));
    sending.finish();
}

/// Loses the first sender after `first` bytes, and has another continue from `from`. Bytes that both senders send are
/// already acknowledged by the client when the second one sends them.
fn move_in_the_middle(first: usize, from: usize) {
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect_and_send_header();
    let body = payload(1, 3_000_000);
    let read = body.clone();
    let client_end = std::thread::spawn(move || {
        expect(&mut client, &read);
        expect(&mut client, b"footer");
    });
    begin(&server, 1, body.len() as u64).expect("SHUNT_BEGIN");
    let begun = steered.answer();
    let lost = steered.send(&begun, &body[..first]);
    wait_for("the client has acknowledged the first bytes", || steered.state(&server).acked >= first as u64).unwrap();
    lost.finish();
    let goes_on = Move { peer: PEER, ring: RING, handoff: 2, from: from as u64 };
    sockopt::set(&server, SHUNT_SOL, SHUNT_MOVE, &goes_on).expect("SHUNT_MOVE");
    let moved = steered.answer();
    assert_eq!((moved.handoff, moved.acked, moved.status, moved.regions), (2, first as u64, 1, 1));
    assert_eq!(moved.flow.start, begun.flow.start.wrapping_add(from as u32));
    let sending = steered.send(&moved, &body[from..]);
    assert_eq!(steered.event(), (2, body.len() as u64, 1));
    sending.finish();
    server.write_all(b"footer").expect("footer");
    client_end.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    assert_eq!((steered.count("fe_moved"), steered.count("fe_completed")), (1, 1));
    assert_eq!(steered.count("be_in_ahead") > 0, from < first);
    assert_eq!(steered.count("fe_drop_early_write"), 0);
}

#[test]
fn another_sender_continues_from_the_last_acknowledged_byte() {
    move_in_the_middle(1_000_000, 1_000_000);
}

#[test]
fn another_sender_continues_though_the_client_has_more_than_it_knows() {
    move_in_the_middle(1_000_000, 1_000);
}

#[test]
fn another_sender_continues_from_the_very_first_byte() {
    move_in_the_middle(0, 0);
}

/// The sender is lost when the client has a part of the sender's bytes behind a hole. Once the server has filled the
/// hole, the client acknowledges bytes that the server's kernel has not sent.
#[test]
fn a_server_continues_though_the_client_has_bytes_behind_a_hole() {
    const HOLE: usize = 3_000;
    const ISLAND: usize = 50_000;
    let mut steered = Steered::new();
    let (mut server, mut client) = steered.connect_and_send_header();
    let body = payload(1, 3_000_000);
    begin(&server, 1, body.len() as u64).expect("SHUNT_BEGIN");
    let begun = steered.answer();
    let mut behind = begun;
    behind.flow.start = begun.flow.start.wrapping_add(HOLE as u32);
    let lost = steered.send(&behind, &body[HOLE..HOLE + ISLAND]);
    wait_for("the client has reported the hole", || steered.count("be_in_steered") >= 10).unwrap();
    lost.finish();
    sockopt::set(&server, SHUNT_SOL, SHUNT_TAKE, &Take { ring: RING, when: 0, handoff: 1 }).expect("SHUNT_TAKE");
    let taken = steered.answer();
    assert_eq!((taken.handoff, taken.acked, taken.status), (1, 0, 2));
    let whole = body.clone();
    let client_end = std::thread::spawn(move || expect(&mut client, &whole));
    server.write_all(&body).expect("the rest, which is all");
    client_end.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// A server may end a region and send the rest itself (SHUNT_TAKE). It may require that the client has the whole
/// region, or nothing of the region.
#[test]
fn a_region_is_taken_only_when_the_client_has_as_much_as_was_said() {
    const WHOLE: u32 = 1;
    const NONE: u32 = 2;
    let mut steered = Steered::new();
    let (server, mut client) = steered.connect_and_send_header();
    let take = |when, handoff| sockopt::set(&server, SHUNT_SOL, SHUNT_TAKE, &Take { ring: RING, when, handoff });
    begin(&server, 1, 100_000).expect("SHUNT_BEGIN");
    steered.answer();
    assert_eq!(take(WHOLE, 1).expect_err("it has nothing").raw_os_error(), Some(libc::EPERM));
    take(NONE, 1).expect("it has nothing");
    assert_eq!(steered.answer().acked, 0);
    begin(&server, 2, 100_000).expect("SHUNT_BEGIN");
    let begun = steered.answer();
    let lost = steered.send(&begun, &payload(1, 1000));
    expect(&mut client, &payload(1, 1000));
    wait_for("they are acknowledged", || steered.state(&server).acked == 1000).unwrap();
    for when in [WHOLE, NONE] {
        assert_eq!(take(when, 2).expect_err("it has a part").raw_os_error(), Some(libc::EPERM));
    }
    lost.finish();
    take(0, 2).expect("whatever it has");
    assert_eq!(steered.answer().acked, 1000);
}

#[test]
fn move_is_refused_where_it_must_be() {
    let mut steered = Steered::new();
    let (server, mut client) = steered.connect_and_send_header();
    let refused = |steered: &Steered, move_to: Move, counter: &str| {
        let before = steered.count(counter);
        let error = sockopt::set(&server, SHUNT_SOL, SHUNT_MOVE, &move_to).expect_err(counter);
        assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{counter}");
        assert_eq!(steered.count(counter), before + 1, "{counter}");
    };
    let good = || Move { peer: PEER, ring: RING, handoff: 2, from: 0 };
    refused(&steered, good(), "fe_refused_argument");
    let sending = steered.hand_off(&server, 1, &payload(1, 1000));
    expect(&mut client, &payload(1, 1000));
    assert_eq!(steered.event(), (1, 1000, 1));
    sending.finish();
    refused(&steered, good(), "fe_refused_ended");

    begin(&server, 2, 10).expect("SHUNT_BEGIN");
    steered.answer();
    refused(&steered, Move { from: 10, ..good() }, "fe_refused_argument");
    refused(&steered, Move { ring: 1, ..good() }, "fe_refused_argument");
    refused(&steered, Move { ring: MAX_RINGS, ..good() }, "fe_refused_argument");
    refused(&steered, Move { peer: 1, ..good() }, "fe_refused_peer");
    refused(&steered, Move { peer: MAX_PEERS, ..good() }, "fe_refused_peer");
    let short = sockopt::set(&server, SHUNT_SOL, SHUNT_MOVE, &0u32).expect_err("too short");
    assert_eq!(short.raw_os_error(), Some(libc::EPERM));
    assert_eq!(steered.state(&server).handoff, 2, "the region is as it was");
    sockopt::set(&server, SHUNT_SOL, SHUNT_CANCEL, &0u32).expect("SHUNT_CANCEL");
    refused(&steered, good(), "fe_refused_ended");
}

#[test]
fn begin_is_refused_where_it_must_be() {
    let steered = Steered::new();
    let (server, _client) = steered.connect_and_send_header();
    let refused = |begin: Begin, counter: &str| {
        let before = steered.count(counter);
        let error = sockopt::set(&server, SHUNT_SOL, SHUNT_BEGIN, &begin).expect_err(counter);
        assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{counter}");
        assert_eq!(steered.count(counter), before + 1, "{counter}");
    };
    let good = || Begin { peer: PEER, ring: RING, handoff: 1, length: 1 };
    refused(Begin { length: 0, ..good() }, "fe_refused_argument");
    refused(Begin { length: 1 << 48, ..good() }, "fe_refused_argument");
    refused(Begin { ring: 1, ..good() }, "fe_refused_argument");
    refused(Begin { ring: MAX_RINGS, ..good() }, "fe_refused_argument");
    for peer in [1, MAX_PEERS] {
        refused(Begin { peer, ..good() }, "fe_refused_peer");
        let answer = steered.answer();
        assert_eq!((answer.handoff, answer.status), (1, 6), "SHUNT_REGION_NO_PEER");
    }
    assert_eq!(steered.state(&server).status, 0, "nothing has begun");
    let nowhere = sockopt::set(&server, SHUNT_SOL, SHUNT_STATE, &1u32).expect_err("no such ring");
    assert_eq!(nowhere.raw_os_error(), Some(libc::EPERM));

    let short = sockopt::set(&server, SHUNT_SOL, SHUNT_BEGIN, &0u32).expect_err("too short");
    assert_eq!(short.raw_os_error(), Some(libc::EPERM));
    let unknown = sockopt::set(&server, SHUNT_SOL, 77, &0u32).expect_err("no such option");
    assert_eq!(unknown.raw_os_error(), Some(libc::ENOPROTOOPT));

    begin(&server, 1, 10).expect("SHUNT_BEGIN");
    assert_eq!(steered.answer().status, 1);
    refused(good(), "fe_refused_active");
    sockopt::set(&server, SHUNT_SOL, SHUNT_CANCEL, &0u32).expect("SHUNT_CANCEL");
    assert_eq!(steered.state(&server).status, 3);
    assert_eq!(steered.count("fe_cancelled"), 1);
    refused(good(), "fe_refused_ended");
}

#[test]
fn unsent_bytes_refuse_a_handoff() {
    let steered = Steered::new();
    let (mut server, _client) = steered.connect();
    server.set_nonblocking(true).expect("nonblocking");
    while server.write(&[0; 65536]).is_ok() {}
    let error = begin(&server, 1, 1).expect_err("a full send buffer");
    assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    assert_eq!(steered.count("fe_refused_unsent"), 1);
    assert_eq!(steered.answer().status, 5, "SHUNT_REGION_UNSENT");
}

#[test]
fn the_state_is_what_the_kernel_says_of_the_connection() {
    let steered = Steered::new();
    let (server, client) = steered.connect_and_send_header();
    // The kernel's answer has its lowest bit cleared (since Linux 6.7).
    let clock = || get::<u32>(&server, libc::IPPROTO_TCP, libc::TCP_TIMESTAMP).expect("TCP_TIMESTAMP") | 1;
    let before = clock();
    begin(&server, 5, 10).expect("SHUNT_BEGIN");
    let (state, after) = (steered.answer(), clock());
    assert_eq!((state.handoff, state.acked, state.status, state.regions), (5, 0, 1, 1));
    assert_eq!(state.flow.client().socket_addr(), client.local_addr().unwrap());
    assert_eq!(state.flow.server().socket_addr(), client.peer_addr().unwrap());
    let since = (state.flow.tsval | 1).wrapping_sub(before);
    assert!(since <= after.wrapping_sub(before), "{before}, {}, {after}", state.flow.tsval);
    assert_ne!(state.flow.ts_recent, 0);
    assert_eq!(state.flow.options, 7, "timestamps, SACK and window scaling");
    assert_eq!(state.flow.mss, 1448);
    assert!(state.flow.snd_wscale > 0 && state.flow.rcv_wscale > 0);
    assert!(state.flow.snd_wnd > 10_000, "{}", state.flow.snd_wnd);
    assert!(state.flow.snd_cwnd >= 10 && state.flow.srtt_us > 0);
    assert_eq!(state.as_bytes(), steered.state(&server).as_bytes(), "SHUNT_STATE says the same");
}

#[test]
fn a_restored_socket_has_the_frontends_congestion_window() {
    let mut steered = Steered::new();
    let (server, _client) = steered.connect_and_send_header();
    begin(&server, 1, 10).expect("SHUNT_BEGIN");
    let mut state = steered.answer();
    state.flow.snd_cwnd = 77;
    let socket = steered.restore(&state);
    assert_eq!(sockopt::congestion_window(&socket).expect("TCP_INFO").segments, 77);
}

#[test]
fn another_namespaces_servers_are_not_answered() {
    let steered = Steered::new();
    let error = steered.hosts.client.run(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let client = TcpStream::connect(listener.local_addr().unwrap()).expect("connect");
        begin(&client, 1, 1).expect_err("no Shunt there")
    });
    assert_eq!(error.expect("netns").raw_os_error(), Some(libc::ENOPROTOOPT));
    assert_eq!(steered.count("fe_refused_argument"), 0);
}

/// Returns whether a payload of `length` bytes needs a word, and how many bytes its client has room for. The client
/// first reads `read_before` bytes, which may make its window larger.
fn needs_a_word(steered: &Steered, read_before: usize, length: u64) -> (bool, u64) {
    let (mut server, mut client) = steered.connect_and_send_header();
    let before = payload(1, read_before);
    std::thread::scope(|scope| {
        scope.spawn(|| server.write_all(&before).expect("what opens its window"));
        expect(&mut client, &before);
    });
    begin(&server, length, length).expect("SHUNT_BEGIN");
    let state = steered.answer();
    (state.flow.options & FlowState::WORD != 0, state.flow.snd_wnd.into())
}

#[test]
fn a_payload_that_its_client_has_no_room_for_needs_a_word_and_so_does_a_long_one() {
    let steered = Steered::new();
    let opened = 32 << 20;
    assert!(!needs_a_word(&steered, 1, 1000).0);
    let (word, room) = needs_a_word(&steered, 1, 900 << 10);
    assert!(word && room < 900 << 10, "{room} bytes of room");
    let (word, room) = needs_a_word(&steered, opened, 1 << 20);
    assert_eq!(word, room < 1 << 20, "{room} bytes of room");
    assert!(needs_a_word(&steered, opened, (1 << 20) + 1).0);
}
