//! Tests of how far a sender, a backend's socket for a client, believes the copies that it gets. A *copy* is a client's
//! packet as the frontend has rewritten it. It has half of the connection's *token*, a random number. The sender's
//! *slot* (its record) has the whole token.

use proptest::prelude::*;
use shunt_decisions::*;

const TOKEN: u32 = 0xabcd_1234;

/// Slot of a socket whose next byte has the number `sent`, for a payload that begins at `start` in the client's
/// numbers.
fn slot(start: u32, sent: u32) -> SenderSlot {
    SenderSlot {
        live: SENDER_LIVE as u16,
        start,
        seq_delta: start.wrapping_sub(sent),
        rcv_nxt: TOKEN,
        ack: 500,
        sent,
        edge: sent,
        acked: sent,
        ..SenderSlot::default()
    }
}

fn segment(seq: u32, payload_bytes: u32) -> Packet {
    Packet { seq, payload_bytes, flags: TH_ACK as u8, ..Packet::default() }
}

fn copy(ack: u32) -> Packet {
    Packet { seq: 500, ack, flags: TH_ACK as u8, ..Packet::default() }
}

#[test]
fn a_forger_of_a_copy_has_to_guess_token_and_number() {
    let slot = slot(1000, 0);
    let token = TOKEN as u16;
    let at = |seq: u32, flags: u32| Packet { seq, flags: flags as u8, ..copy(1000) };
    assert!(!is_made_up(&slot, &at(500, TH_ACK), token));
    assert!(is_made_up(&slot, &at(500, TH_ACK), token ^ 1));
    assert!(!is_made_up(&slot, &at(500 + STEP_MAX, TH_ACK), token), "its client has uploaded");
    assert!(!is_made_up(&slot, &at(500u32.wrapping_sub(STEP_MAX), TH_ACK), token), "it comes late");
    assert!(is_made_up(&slot, &at(501 + STEP_MAX, TH_ACK), token));
    assert!(!is_made_up(&slot, &at(500 + STEP_MAX_RESET, TH_RST), token));
    assert!(is_made_up(&slot, &at(501 + STEP_MAX_RESET, TH_RST), token));
    assert!(is_made_up(&slot, &at(499, TH_RST), token), "a reset that comes late is none");
}

#[test]
fn an_ack_before_the_region_says_no_more_than_its_start() {
    let mut slot = slot(1000, 7);
    note_sent(&mut slot, &segment(7, 100));
    assert_eq!(take_ack(&mut slot, 900), (7, false));
    assert_eq!(take_ack(&mut slot, 1050), (57, false));
}

/// If a backend continues for another, the client may have more than this backend has sent.
#[test]
fn an_ack_of_what_another_has_sent_is_one_of_all_that_this_one_has() {
    let mut slot = slot(1000, 7);
    slot.edge = 7 + 5000;
    note_sent(&mut slot, &segment(7, 100));
    assert!(!acknowledges_unsent(&slot, &copy(1000 + 5000)));
    assert!(acknowledges_unsent(&slot, &copy(1000 + 5001)));
    assert_eq!(take_ack(&mut slot, 1000 + 5000), (107, true));
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Send(u32),
    /// An ACK whose number is higher than the end of the acknowledged bytes by this much, or lower, if negative.
    Ack(i64),
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Over gigabytes, no ACK of bytes that have not been sent is accepted. No ACK of sent bytes is refused if its
    /// number is at least the highest so far. Each accepted ACK gets its number in the socket's own sequence space.
    #[test]
    fn only_sent_bytes_are_acknowledged(
        start in any::<u32>(), first in any::<u32>(),
        steps in prop::collection::vec(prop_oneof![
            (1u32..100_000_000).prop_map(Step::Send),
            (-(1i64 << 26)..1i64 << 30).prop_map(Step::Ack),
        ], 1..300),
    ) {
        let mut slot = slot(start, first);
        let (mut sent, mut acked) = (0u64, 0u64);
        for step in steps {
            match step {
                // No more bytes are outstanding than the largest window (RFC 7323, 2.3).
                Step::Send(bytes) if sent + u64::from(bytes) - acked <= 1 << 30 => {
                    note_sent(&mut slot, &segment(first.wrapping_add(sent as u32), bytes));
                    sent += u64::from(bytes);
                }
                Step::Send(_) => {}
                Step::Ack(by) => {
                    let at = acked.saturating_add_signed(by);
                    let packet = copy(start.wrapping_add(at as u32));
                    let refused = acknowledges_unsent(&slot, &packet);
                    if at > sent {
                        prop_assert!(refused, "{at} of {sent}");
                    } else if at >= acked {
                        prop_assert!(!refused, "{at} of {sent}, {acked} before");
                    }
                    if !refused {
                        let (own, ahead) = take_ack(&mut slot, packet.ack);
                        prop_assert!(!ahead);
                        prop_assert_eq!(own, first.wrapping_add(at as u32));
                        acked = acked.max(at);
                    }
                }
            }
        }
    }
}
