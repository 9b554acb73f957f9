//! Checks with the C compiler that `include/shunt.h` and `shunt_wire::local` have the same layouts.

use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

use shunt_wire::flow::FlowState;
use shunt_wire::local::*;
use shunt_wire::parts::{PARTS_MAX, Part};
use shunt_wire::prefixes::{PREFIXES_MAX, Prefix};
use shunt_wire::tls::Keys;

/// Appends assertions that a C struct has this type's size and fields at this type's offsets.
macro_rules! same_layout {
    ($out:expr, $c:literal, $rust:ty, [$($field:ident),* $(,)?]) => {
        writeln!($out, "_Static_assert(sizeof(struct {}) == {}, \"{}\");", $c, size_of::<$rust>(), $c).unwrap();
        $(writeln!(
            $out, "_Static_assert(offsetof(struct {}, {}) == {}, \"{}.{}\");",
            $c, stringify!($field), offset_of!($rust, $field), $c, stringify!($field),
        ).unwrap();)*
    };
}

fn constants(out: &mut String) {
    let pairs = [
        ("SHUNT_VERSION", VERSIONS.newest as u64),
        ("SHUNT_VERSION_OLDEST", VERSIONS.oldest as u64),
        ("SHUNT_BOARD_MAGIC", BOARD_MAGIC as u64),
        ("SHUNT_BOARD_PEERS", BOARD_PEERS as u64),
        ("SHUNT_NAME_BYTES", NAME_BYTES as u64),
        ("SHUNT_PACKET_BYTES", MAX_PACKET_BYTES as u64),
        ("SHUNT_COUNTERS", COUNTERS as u64),
        ("SHUNT_CLOSED_OFFERS", closed::OFFERS as u64),
        ("SHUNT_CLOSED_HANDOFFS", closed::HANDOFFS as u64),
        ("SHUNT_PEER_DOWN", BoardPeer::DOWN as u64),
        ("SHUNT_PEER_UP", BoardPeer::UP as u64),
        ("SHUNT_PEER_LOST", BoardPeer::LOST as u64),
        ("SHUNT_CHANNEL_CONTROL", Channel::Control.number() as u64),
        ("SHUNT_CHANNEL_OFFERS", Channel::Offers.number() as u64),
        ("SHUNT_MSG_HELLO", kind::HELLO as u64),
        ("SHUNT_MSG_HANDOFF", kind::HANDOFF as u64),
        ("SHUNT_MSG_FETCHED", kind::FETCHED as u64),
        ("SHUNT_MSG_STATS_TEXT", kind::STATS_TEXT as u64),
        ("SHUNT_MSG_HANDOFF_PARTS", kind::HANDOFF_PARTS as u64),
        ("SHUNT_MSG_CANCEL", kind::CANCEL as u64),
        ("SHUNT_MSG_ASK", kind::ASK as u64),
        ("SHUNT_MSG_ANSWER", kind::ANSWER as u64),
        ("SHUNT_MSG_PROVE", kind::PROVE as u64),
        ("SHUNT_MSG_DIGEST", kind::DIGEST as u64),
        ("SHUNT_EVENT_COMPLETE", Event::COMPLETE.into()),
        ("SHUNT_EVENT_RESET", Event::RESET.into()),
        ("SHUNT_EVENT_STATE", Event::STATE.into()),
        ("SHUNT_OFFER_BODY", Offer::BODY as u64),
        ("SHUNT_PARTS_MAX", PARTS_MAX as u64),
        ("SHUNT_PREFIXES_MAX", PREFIXES_MAX as u64),
        ("SHUNT_REASON_UNKNOWN_OFFER", Reason::UnknownOffer as u64),
        ("SHUNT_REASON_CLIENT_GONE", Reason::ClientGone as u64),
        ("SHUNT_REASON_BUSY", Reason::Busy as u64),
        ("SHUNT_OPTION_TIMESTAMPS", FlowState::TIMESTAMPS as u64),
        ("SHUNT_OPTION_SACK", FlowState::SACK as u64),
        ("SHUNT_OPTION_WSCALE", FlowState::WSCALE as u64),
        ("SHUNT_OPTION_DIGEST", FlowState::DIGEST as u64),
        ("SHUNT_OPTION_WORD", FlowState::WORD as u64),
        ("SHUNT_FAMILY_IPV4", BoardHead::IPV4 as u64),
        ("SHUNT_FAMILY_IPV6", BoardHead::IPV6 as u64),
        ("sizeof(struct shunt_board)", BOARD_BYTES as u64),
    ];
    for (name, value) in pairs {
        writeln!(out, "_Static_assert({name} == {value}, \"{name}\");").unwrap();
    }
}

#[test]
fn the_c_header_has_the_same_layout() {
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../include/shunt.h");
    let mut c = format!("#include <stddef.h>\n#include \"{}\"\n", header.display());
    constants(&mut c);
    same_layout!(c, "shunt_header", Header, [kind, size]);
    same_layout!(c, "shunt_hello", Hello, [header, oldest, newest, channel, features]);
    same_layout!(c, "shunt_welcome", Welcome, [header, worker, ring, version, pad, features]);
    same_layout!(c, "shunt_offer", Offer, [header, peer, flags, number, offset, length, tag, trace, mtime_ns, size]);
    same_layout!(
        c,
        "shunt_handoff",
        Handoff,
        [header, peer, epoch, bytes, pad, handoff, offer, length, rate, tag, trace, flow, tls,]
    );
    same_layout!(
        c,
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
    same_layout!(c, "shunt_tls", Tls, [suite, content_bytes, skip, record]);
    for (field, offset) in [("iv", offset_of!(Keys, iv)), ("key", offset_of!(Keys, key))] {
        let offset = offset_of!(Tls, keys) + offset;
        writeln!(c, "_Static_assert(offsetof(struct shunt_tls, {field}) == {offset}, \"{field}\");").unwrap();
    }
    same_layout!(c, "shunt_event", Event, [handoff, acked, kind, pad]);
    same_layout!(c, "shunt_begin", Begin, [peer, ring, handoff, length]);
    same_layout!(c, "shunt_state", State, [handoff, acked, kind, status, regions, flow, answered, shut, pad,]);
    same_layout!(c, "shunt_part", Part, [segment, slot, secret, offset, length]);
    same_layout!(c, "shunt_abort", Abort, [header, handoff]);
    same_layout!(c, "shunt_cancel", Cancel, [header, handoff]);
    same_layout!(
        c,
        "shunt_ask",
        Ask,
        [header, handoff, peer, epoch, client_address, server_address, client_port, server_port, pad]
    );
    same_layout!(c, "shunt_answer", Answer, [header, handoff, reason, peer]);
    same_layout!(c, "shunt_prove", Prove, [header, peer, epoch, handoff, offer, length, tag]);
    same_layout!(c, "shunt_digest", Digest, [header, handoff, offset, peer, known, sha256]);
    same_layout!(c, "shunt_ended", Ended, [header, handoff, reason, peer]);
    same_layout!(c, "shunt_fetch", Fetch, [header, peer, pad, fetch, offer, length, tag, trace]);
    same_layout!(c, "shunt_fetched", Fetched, [header, fetch, length]);
    same_layout!(
        c,
        "shunt_board_peer",
        BoardPeer,
        [epoch, state, closed, families, name, our_key, their_key, prefixes, prefix]
    );
    same_layout!(c, "shunt_prefix", Prefix, [address, bits, pad, port]);
    same_layout!(c, "shunt_counters", Counters, [value, handoffs]);
    for (field, offset) in [
        ("frontend", offset_of!(BoardHead, frontend)),
        ("offer_lifetime_ms", offset_of!(BoardHead, offer_lifetime_ms)),
        ("closed", offset_of!(BoardHead, closed)),
        ("families", offset_of!(BoardHead, families)),
        ("beat", offset_of!(BoardHead, beat)),
        ("peers", offset_of!(BoardHead, peers)),
        ("name", offset_of!(BoardHead, name)),
        ("peer", size_of::<BoardHead>()),
    ] {
        writeln!(c, "_Static_assert(offsetof(struct shunt_board, {field}) == {offset}, \"{field}\");").unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("layout.c");
    std::fs::write(&source, c).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let output = Command::new(compiler).args(["-std=c11", "-fsyntax-only"]).arg(&source).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
