//! Compares all of `include/shunt.h` with this crate: every number of the header is also a constant here, with the same
//! value. Every struct of the header has a type here with the same size, fields and offsets.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use bindgen::callbacks::{IntKind, ParseCallbacks};
use shunt_wire::flow::FlowState;
use shunt_wire::local::*;
use shunt_wire::options::{self, Begin, Move, Take};
use shunt_wire::parts::{PARTS_MAX, Part};
use shunt_wire::prefixes::{PREFIXES_MAX, Prefix};
use shunt_wire::reason::Reason;
use shunt_wire::tag;
use shunt_wire::tls::Keys;
use shunt_wire::trace::TRACE_BYTES;

fn header() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../include/shunt.h")
}

/// Contents of the header: its numbers by name, and for each struct the names of its fields.
struct Contents {
    numbers: BTreeMap<String, i64>,
    structs: BTreeMap<String, Vec<String>>,
}

/// Collects the names and values of the header's integer macros.
#[derive(Debug, Default)]
struct Macros(Arc<Mutex<BTreeMap<String, i64>>>);

impl ParseCallbacks for Macros {
    fn int_macro(&self, name: &str, value: i64) -> Option<IntKind> {
        if name.starts_with("SHUNT_") {
            self.0.lock().unwrap().insert(name.into(), value);
        }
        None
    }
}

impl Contents {
    fn read() -> Self {
        let numbers = Arc::default();
        let header = header();
        let bindings = bindgen::Builder::default()
            .header(header.to_str().unwrap())
            .parse_callbacks(Box::new(Macros(Arc::clone(&numbers))))
            .allowlist_type("shunt_.*")
            .formatter(bindgen::Formatter::None)
            .generate()
            .unwrap();
        let file = syn::parse_file(&bindings.to_string()).unwrap();
        let structs = file.items.iter().filter_map(|item| match item {
            syn::Item::Struct(found) => {
                let field = |field: &syn::Field| field.ident.as_ref().unwrap().to_string();
                Some((found.ident.to_string(), found.fields.iter().map(field).collect()))
            }
            _ => None,
        });
        let structs = structs.collect();
        Self { numbers: std::mem::take(&mut *numbers.lock().unwrap()), structs }
    }
}

/// Names and values of the numbers that this crate shares with the header.
fn numbers() -> BTreeMap<String, i64> {
    let of = |prefix: &'static str, all: &[(&str, i64)]| -> Vec<(String, i64)> {
        all.iter().map(|(name, value)| (format!("SHUNT_{prefix}{name}"), *value)).collect()
    };
    let reasons: Vec<(String, i64)> =
        Reason::ALL.iter().map(|reason| (format!("SHUNT_REASON_{}", in_capitals(*reason)), *reason as i64)).collect();
    let all = [
        of("", &singles()),
        of("", &socket_options()),
        of("MSG_", &messages()),
        of("REGION_", &regions()),
        of("TAKE_", &[("ALWAYS", Take::ALWAYS.into()), ("WHOLE", Take::WHOLE.into()), ("NONE", Take::NONE.into())]),
        of(
            "OPTION_",
            &[
                ("TIMESTAMPS", FlowState::TIMESTAMPS.into()),
                ("SACK", FlowState::SACK.into()),
                ("WSCALE", FlowState::WSCALE.into()),
                ("DIGEST", FlowState::DIGEST.into()),
                ("WORD", FlowState::WORD.into()),
            ],
        ),
        of(
            "EVENT_",
            &[("COMPLETE", Event::COMPLETE.into()), ("RESET", Event::RESET.into()), ("STATE", Event::STATE.into())],
        ),
        of("FAMILY_", &[("IPV4", BoardHead::IPV4.into()), ("IPV6", BoardHead::IPV6.into())]),
        of(
            "PEER_",
            &[("DOWN", BoardPeer::DOWN.into()), ("UP", BoardPeer::UP.into()), ("LOST", BoardPeer::LOST.into())],
        ),
        of("CLOSED_", &[("OFFERS", closed::OFFERS.into()), ("HANDOFFS", closed::HANDOFFS.into())]),
        of("CHANNEL_", &[("CONTROL", Channel::Control.number().into()), ("OFFERS", Channel::Offers.number().into())]),
        reasons,
    ];
    all.concat().into_iter().collect()
}

fn singles() -> Vec<(&'static str, i64)> {
    vec![
        ("VERSION", VERSIONS.newest.into()),
        ("VERSION_OLDEST", VERSIONS.oldest.into()),
        ("BOARD_MAGIC", BOARD_MAGIC.into()),
        ("BOARD_PEERS", BOARD_PEERS as i64),
        ("NAME_BYTES", NAME_BYTES as i64),
        ("PREFIXES_MAX", PREFIXES_MAX as i64),
        ("COUNTERS", COUNTERS as i64),
        ("TRACE_BYTES", TRACE_BYTES as i64),
        ("PACKET_BYTES", MAX_PACKET_BYTES as i64),
        ("OFFER_BODY", Offer::BODY.into()),
        ("PARTS_MAX", PARTS_MAX as i64),
        ("NO_PEER", NO_PEER.into()),
        ("TAG_INPUT_BYTES", tag::INPUT_BYTES as i64),
    ]
}

fn socket_options() -> Vec<(&'static str, i64)> {
    vec![
        ("SOL", options::SOL.into()),
        ("BEGIN", options::BEGIN.into()),
        ("CANCEL", options::CANCEL.into()),
        ("STATE", options::STATE.into()),
        ("MOVE", options::MOVE.into()),
        ("APPEND", options::APPEND.into()),
        ("UNDO", options::UNDO.into()),
        ("WATCH", options::WATCH.into()),
        ("TAKE", options::TAKE.into()),
        ("SPEAK", options::SPEAK.into()),
        ("SPEAKS", options::SPEAKS.into()),
        ("ENDED", options::ENDED.into()),
        ("ADOPT", options::ADOPT.into()),
        ("ADOPT_TOO", options::ADOPT_TOO.into()),
        ("CARRY", options::CARRY.into()),
        ("CARRIED_BYTES", options::CARRIED_BYTES as i64),
    ]
}

fn messages() -> Vec<(&'static str, i64)> {
    vec![
        ("HELLO", kind::HELLO.into()),
        ("WELCOME", kind::WELCOME.into()),
        ("OFFER", kind::OFFER.into()),
        ("HANDOFF", kind::HANDOFF.into()),
        ("ABORT", kind::ABORT.into()),
        ("ENDED", kind::ENDED.into()),
        ("FETCH", kind::FETCH.into()),
        ("FETCHED", kind::FETCHED.into()),
        ("STATS", kind::STATS.into()),
        ("STATS_TEXT", kind::STATS_TEXT.into()),
        ("HANDOFF_PARTS", kind::HANDOFF_PARTS.into()),
        ("CANCEL", kind::CANCEL.into()),
        ("ASK", kind::ASK.into()),
        ("ANSWER", kind::ANSWER.into()),
        ("PROVE", kind::PROVE.into()),
        ("DIGEST", kind::DIGEST.into()),
        ("WITHDRAWN", kind::WITHDRAWN.into()),
    ]
}

fn regions() -> Vec<(&'static str, i64)> {
    vec![
        ("NONE", State::NONE.into()),
        ("ACTIVE", State::ACTIVE.into()),
        ("COMPLETE", State::COMPLETE.into()),
        ("CANCELLED", State::CANCELLED.into()),
        ("UNPROVEN", State::UNPROVEN.into()),
        ("UNSENT", State::UNSENT.into()),
        ("NO_PEER", State::NO_PEER.into()),
        ("FAMILY", State::FAMILY.into()),
    ]
}

/// Returns a reason's name as the header writes it: `UNKNOWN_OFFER` for `UnknownOffer`.
fn in_capitals(reason: Reason) -> String {
    let name = format!("{reason:?}");
    let word = |(at, letter): (usize, char)| {
        let gap = if at > 0 && letter.is_uppercase() { "_" } else { "" };
        format!("{gap}{}", letter.to_ascii_uppercase())
    };
    name.char_indices().map(word).collect()
}

/// Layouts of this crate: for each struct of the header the names of its fields, and assertions about sizes and offsets
/// for the C compiler.
#[derive(Default)]
struct Layouts {
    structs: BTreeMap<String, Vec<String>>,
    assertions: String,
}

impl Layouts {
    fn sized(&mut self, name: &str, bytes: usize) {
        self.structs.insert(name.into(), Vec::new());
        writeln!(self.assertions, "_Static_assert(sizeof(struct {name}) == {bytes}, \"{name}\");").unwrap();
    }

    fn field(&mut self, name: &str, field: &str, offset: usize) {
        self.structs.get_mut(name).unwrap().push(field.into());
        let place = format!("offsetof(struct {name}, {field})");
        writeln!(self.assertions, "_Static_assert({place} == {offset}, \"{name}.{field}\");").unwrap();
    }
}

/// Adds fields to a struct of the header, at the offsets that they have in the type `$rust`.
macro_rules! same_fields {
    ($layouts:expr, $name:literal, $rust:ty, [$($field:ident),* $(,)?]) => {
        $($layouts.field($name, stringify!($field), offset_of!($rust, $field));)*
    };
}

/// Adds a struct of the header, with the size of the type `$rust` and the offsets of its fields.
macro_rules! same_layout {
    ($layouts:expr, $name:literal, $rust:ty, $fields:tt) => {
        $layouts.sized($name, size_of::<$rust>());
        same_fields!($layouts, $name, $rust, $fields);
    };
}

fn shared_memory(all: &mut Layouts) {
    same_layout!(all, "shunt_begin", Begin, [peer, ring, handoff, length]);
    same_layout!(all, "shunt_move", Move, [peer, ring, handoff, from]);
    same_layout!(all, "shunt_take", Take, [ring, when, handoff]);
    same_layout!(all, "shunt_event", Event, [handoff, acked, kind, pad]);
    same_layout!(all, "shunt_state", State, [handoff, acked, kind, status, regions, flow, answered, shut, pad]);
    same_layout!(all, "shunt_prefix", Prefix, [address, bits, pad, port]);
    same_layout!(
        all,
        "shunt_board_peer",
        BoardPeer,
        [epoch, state, closed, families, name, our_key, their_key, prefixes, prefix]
    );
    same_layout!(all, "shunt_counters", Counters, [value, handoffs]);
    all.sized("shunt_board", BOARD_BYTES);
    same_fields!(
        all,
        "shunt_board",
        BoardHead,
        [
            magic,
            oldest,
            newest,
            peers_at,
            peer_bytes,
            alive,
            frontend,
            backend,
            offer_lifetime_ms,
            closed,
            families,
            beat,
            peers,
            netns,
            name,
        ]
    );
    all.field("shunt_board", "peer", size_of::<BoardHead>());
}

fn of_handoffs(all: &mut Layouts) {
    same_layout!(
        all,
        "shunt_flow",
        FlowState,
        [
            client_address,
            server_address,
            client_port,
            server_port,
            start,
            rcv_nxt,
            tsval,
            ts_recent,
            snd_wnd,
            snd_cwnd,
            snd_ssthresh,
            srtt_us,
            ack_spacing,
            ahead,
            token,
            mss,
            snd_wscale,
            rcv_wscale,
            options,
            first,
            pad,
        ]
    );
    same_layout!(all, "shunt_tls", Tls, [suite, content_bytes, skip, pad, record]);
    all.field("shunt_tls", "iv", offset_of!(Tls, keys) + offset_of!(Keys, iv));
    all.field("shunt_tls", "key", offset_of!(Tls, keys) + offset_of!(Keys, key));
    all.field("shunt_tls", "pad2", offset_of!(Tls, pad2));
    same_layout!(
        all,
        "shunt_handoff",
        Handoff,
        [header, peer, epoch, bytes, pad, handoff, offer, length, rate, tag, trace, flow, tls]
    );
    same_layout!(all, "shunt_part", Part, [segment, slot, secret, offset, length]);
    same_layout!(all, "shunt_abort", Abort, [header, handoff]);
    same_layout!(all, "shunt_cancel", Cancel, [header, handoff]);
    same_layout!(all, "shunt_ended", Ended, [header, handoff, reason, peer]);
}

fn other_messages(all: &mut Layouts) {
    same_layout!(all, "shunt_header", Header, [kind, size]);
    same_layout!(all, "shunt_hello", Hello, [header, oldest, newest, channel, features]);
    same_layout!(all, "shunt_welcome", Welcome, [header, worker, ring, version, pad, features]);
    same_layout!(all, "shunt_offer", Offer, [header, peer, flags, number, offset, length, tag, trace, mtime_ns, size]);
    same_layout!(
        all,
        "shunt_ask",
        Ask,
        [header, handoff, peer, epoch, client_address, server_address, client_port, server_port, pad]
    );
    same_layout!(all, "shunt_answer", Answer, [header, handoff, reason, peer]);
    same_layout!(all, "shunt_prove", Prove, [header, peer, epoch, handoff, offer, length, tag]);
    same_layout!(all, "shunt_digest", Digest, [header, handoff, offset, peer, known, sha256]);
    same_layout!(all, "shunt_withdrawn", Withdrawn, [header, peer, epoch, handoff]);
    same_layout!(all, "shunt_fetch", Fetch, [header, peer, pad, fetch, offer, length, tag, trace]);
    same_layout!(all, "shunt_fetched", Fetched, [header, fetch, length]);
}

#[test]
fn every_number_of_the_header_is_the_same_here() {
    assert_eq!(Contents::read().numbers, numbers());
}

#[test]
fn every_struct_of_the_header_has_the_same_fields_here() {
    let mut ours = Layouts::default();
    shared_memory(&mut ours);
    of_handoffs(&mut ours);
    other_messages(&mut ours);

    let names = |all: &BTreeMap<String, Vec<String>>| -> BTreeMap<String, BTreeSet<String>> {
        all.iter().map(|(name, fields)| (name.clone(), fields.iter().cloned().collect())).collect()
    };
    assert_eq!(names(&Contents::read().structs), names(&ours.structs));

    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("layout.c");
    let text = format!("#include <stddef.h>\n#include \"{}\"\n{}", header().display(), ours.assertions);
    std::fs::write(&source, text).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let output = Command::new(compiler).args(["-std=c11", "-fsyntax-only"]).arg(&source).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
