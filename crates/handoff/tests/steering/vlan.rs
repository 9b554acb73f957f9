//! Tests with VLAN tags (IEEE 802.1Q) on packets, as seen by a port that carries several VLANs.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;

use libbpf_rs::{MapCore, MapFlags, MapHandle, ObjectBuilder, TC_EGRESS, TC_INGRESS, TcAttachPoint, TcHookBuilder};
use shunt_handoff::bpf::*;
use shunt_sys::netns::Netns;
use shunt_sys::tap::Tap;
use shunt_testbed::wait_for;

use super::host::{ifindex, ip};
use super::icmp::Report;
use super::programs::*;
use super::segment::Segment;
use super::sockets::{serve, upload_during_a_handoff};
use super::steered::Steered;

/// Priorities before and after those of the steering programs (crates/handoff/src/attach.rs).
const EARLY: u32 = 1;
const LATE: u32 = 0xfff0;

/// The programs of vlan.bpf.c, and the map in which they count frames.
struct Tagging {
    programs: BTreeMap<String, OwnedFd>,
    frames: MapHandle,
}

impl Tagging {
    fn load() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let object = directory.path().join("vlan.o");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/steering/vlan.bpf.c");
        let include = format!("-I/usr/include/{}-linux-gnu", std::env::consts::ARCH);
        let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang-14".into());
        let flags = ["-target", "bpf", "-O2", "-g", "-Wall", "-Werror", &include, "-c", source, "-o"];
        let compiled = Command::new(clang).args(flags).arg(&object).status().expect("clang is there");
        assert!(compiled.success(), "vlan.bpf.c compiles");
        let loaded = ObjectBuilder::default().open_file(&object).and_then(|open| open.load()).expect("it loads");
        let programs = loaded.progs().map(|program| {
            let descriptor = program.as_fd().try_clone_to_owned().expect("dup");
            (program.name().to_string_lossy().into_owned(), descriptor)
        });
        let programs = programs.collect();
        let frames = loaded.maps().find(|map| map.name() == "frames").expect("the map");
        Self { programs, frames: MapHandle::try_from(&frames).expect("dup") }
    }

    /// Attaches a program to a device of the calling thread's namespace.
    fn attach(&self, program: &str, device: &str, point: TcAttachPoint, priority: u32) {
        attach(self.programs[program].as_fd(), device, point, priority);
    }

    fn attach_in(&self, host: &Netns, program: &str, device: &str, point: TcAttachPoint, priority: u32) {
        host.run(|| attach(self.programs[program].as_fd(), device, point, priority)).expect("setns");
    }

    /// Number of frames that the program `look` has seen without a tag, with one, and with two.
    fn seen(&self) -> [u64; 3] {
        [0u32, 1, 2].map(|tags| {
            let bytes = self.frames.lookup(&tags.to_ne_bytes(), MapFlags::ANY).expect("lookup").expect("an array");
            u64::from_ne_bytes(bytes.try_into().expect("8 bytes"))
        })
    }

    /// Waits until `enough` accepts the numbers that [`Tagging::seen`] returns, and returns these numbers.
    fn wait_for_frames(&self, enough: impl Fn([u64; 3]) -> bool) -> [u64; 3] {
        wait_for("enough frames", || Some(self.seen()).filter(|seen| enough(*seen))).unwrap()
    }
}

fn attach(program: std::os::fd::BorrowedFd<'_>, device: &str, point: TcAttachPoint, priority: u32) {
    let mut hook = TcHookBuilder::new(program);
    hook.ifindex(ifindex(device) as i32).handle(1).priority(priority).replace(true);
    hook.hook(point).create().and_then(|mut hook| hook.attach()).expect("the program is attached");
}

/// Tags all frames between client and frontend with VLAN 42, and all frames between frontend and backend with VLAN 7.
/// The steering programs are on ports where frames carry their tags. Frames from the frontend to the backend are
/// counted before they get a tag.
fn tag_both_links(steered: &Steered) -> Tagging {
    let tagging = Tagging::load();
    let hosts = &steered.hosts;
    tagging.attach_in(&hosts.client, "tag_42", "uplink", TC_EGRESS, LATE);
    tagging.attach_in(&hosts.client, "untag", "uplink", TC_INGRESS, EARLY);
    tagging.attach("untag", "clients", TC_INGRESS, LATE);
    tagging.attach("tag_42", "clients", TC_EGRESS, EARLY);
    tagging.attach("untag", "backends", TC_INGRESS, LATE);
    tagging.attach("look", "backends", TC_EGRESS, EARLY);
    tagging.attach("tag_7", "backends", TC_EGRESS, LATE);
    tagging.attach_in(&hosts.backend, "untag", "uplink", TC_INGRESS, LATE);
    tagging.attach_in(&hosts.backend, "tag_7", "uplink", TC_EGRESS, EARLY);
    tagging
}

fn downloads_and_an_upload_arrive_whole(mut steered: Steered) {
    let tagging = tag_both_links(&steered);
    serve(&mut steered, &[1, 100, 65_536, 3_000_000, 1, 4096]);
    upload_during_a_handoff(&mut steered, 3_000_000, 6_000_000);
    assert_eq!(steered.count("fe_completed"), 7);
    for nothing in ["fe_drop_early_write", "fe_drop_bad_ack", "fe_drop_rewrite", "be_drop_rewrite"] {
        assert_eq!(steered.count(nothing), 0, "{nothing}");
    }
    assert!(steered.count("fe_in_both") > 0 && steered.count("fe_in_backend") > 0, "{:?}", steered.counted());
    let [untagged, tagged @ ..] = tagging.seen();
    assert!(untagged > steered.count("fe_in_backend"), "{untagged} frames towards the backend");
    assert_eq!(tagged, [0, 0], "frames towards the backend that still had a tag");
    assert_eq!(steered.hosts.checksum_errors(), 0);
}

#[test]
fn responses_arrive_whole_on_tagged_links_and_acks_leave_the_clients_vlan() {
    let steered = Steered::new();
    downloads_and_an_upload_arrive_whole(steered);
}

#[test]
fn they_do_over_ipv6_with_the_tags_in_the_frames_and_checksums_finished() {
    let steered = Steered::ipv6();
    steered.hosts.tags_in_frames();
    steered.hosts.checksums_in_software();
    downloads_and_an_upload_arrive_whole(steered);
}

const LOCAL: u32 = 1_000;
const START: u32 = 5_000;
const LENGTH: u64 = 1_000_000;

fn flow() -> Flow {
    let mut flow = Flow { client_window: 60_000, server_ack: 7_000, client_ack: START, ..Default::default() };
    begin(&mut flow, LOCAL, START, LENGTH, PEER);
    flow
}

/// Inserts tags, each a type and a VLAN, into a frame between the addresses and the type. The first tag is the
/// outermost.
fn tagged(frame: &[u8], tags: &[(u16, u16)]) -> Vec<u8> {
    let tags = tags.iter().flat_map(|(kind, vlan)| [kind.to_be_bytes(), vlan.to_be_bytes()].concat());
    [frame[..12].to_vec(), tags.collect(), frame[12..].to_vec()].concat()
}

#[test]
fn steered_packets_leave_their_vlan_and_others_do_not() {
    let mut fe = Frontend::with_flow(&flow());
    let trunk = Tap::make("trunk0").expect("a TAP device");
    ip(&["link", "set", "trunk0", "up"]);
    attach(fe.skel.progs.fe_in.as_fd(), "trunk0", TC_INGRESS, EARLY);
    let (stays, leaves) = (Tagging::load(), Tagging::load());
    stays.attach("look", "trunk0", TC_INGRESS, LATE);
    leaves.attach("look", "backend1", TC_INGRESS, EARLY);

    let ack = |bytes: u32| Segment::ack(client(), server(), 7_000, START + bytes);
    let report = Report::new(server(), client(), START + 2_100);
    let untagged = leaves.seen()[0];
    for (frame, counters) in [
        (ack(1_000).to_frame(), ["fe_in_both", "fe_in_clamped"].as_slice()),
        (ack(2_000).to_frame(), &["fe_in_backend"]),
        (report.to_frame(), &["fe_in_too_big"]),
    ] {
        let seen = leaves.seen()[0];
        trunk.send(&tagged(&frame, &[(0x8100, 42)])).expect("the frame is received");
        leaves.wait_for_frames(|now| now.iter().sum::<u64>() > seen);
        assert_eq!(fe.counted(), once(counters));
    }
    let copies = fe.copies(2);
    assert_eq!(copies.iter().map(|copy| copy.ack).collect::<Vec<_>>(), [START + 1_000, START + 2_000]);
    let [now, tagged_ones @ ..] = leaves.seen();
    assert!(now >= untagged + 3 && tagged_ones == [0, 0], "{untagged}, then {:?}", leaves.seen());
    assert_eq!(stays.seen()[1..], [1, 0], "the one that went to both");

    let twice = tagged(&ack(3_000).to_frame(), &[(0x88a8, 42), (0x8100, 7)]);
    trunk.send(&twice).expect("the frame is received");
    assert_eq!(stays.wait_for_frames(|now| now[2] > 0)[1..], [1, 1]);
    assert!(fe.counted().is_empty(), "of a packet with two tags");
    assert_eq!(leaves.seen()[1..], [0, 0]);
}

#[test]
fn packets_with_a_tag_in_front_of_the_ip_header_pass_untouched() {
    let mut fe = Frontend::with_flow(&flow());
    let mut be = Backend::new();
    be.set_sender(client(), peer().port(), 3, &SenderSlot { live: 1, ..Default::default() });
    let acks = [(client(), server()), (server(), client()), (client(), peer()), (peer(), client())];
    let acks = acks.map(|(from, to)| Segment::ack(from, to, 7_000, START + 1_000).to_frame());
    let reports = [server(), peer()].map(|to| Report::new(to, client(), START + 3_000).to_frame());
    for frame in acks.iter().chain(&reports) {
        for tags in [[(0x8100, 42)].as_slice(), &[(0x88a8, 42)], &[(0x88a8, 42), (0x8100, 0x0800)], &[(0x8100, 0x86dd)]]
        {
            let frame = tagged(frame, tags);
            let frontend = [&fe.skel.progs.fe_in, &fe.skel.progs.fe_out].map(|program| (program, fe.host.client_port));
            let backend = [&be.skel.progs.be_in, &be.skel.progs.be_out].map(|program| (program, be.host.backend_port));
            for (program, port) in frontend.into_iter().chain(backend) {
                let out = run(program, port, &frame, 0);
                assert_eq!((out.verdict, out.frame), (PASS, frame.clone()), "{tags:04x?}");
            }
        }
    }
    assert!(fe.counted().is_empty() && be.counted().is_empty());
}
