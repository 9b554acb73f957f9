//! Spacing of ACKs. A *sender* is a backend's socket that sends payloads to one client. The *spacing* is the number of
//! payload bytes that may lie between two of the client's ACKs that the frontend passes on to the sender.
//!
//! By itself a frontend passes on each ACK of a payload, and each costs the frontend and us more than the segment that
//! it acknowledges. A sender that may have far more bytes outstanding than lie between two ACKs never waits for the
//! next ACK. So it tells the frontend how far apart ACKs may be, and the frontend drops the others. `ack_may_wait` in
//! bpf/decisions/arrivals.h does that, and also decides when the frontend must pass on every ACK again.
//!
//! Congestion control counts bytes, not ACKs (RFC 3465), and the ACKs that are passed on acknowledge all bytes.

use shunt_sys::sockopt::CongestionWindow;

use crate::flow_sender::FlowSender;

/// Divisor: the spacing is a quarter of the bytes that may be outstanding.
const PARTS: u64 = 4;
/// Largest spacing, in bytes. Each ACK lets a sender send about as many bytes at once as the spacing has. Segmentation
/// offload makes bursts of this size anyway.
const MOST: u64 = 65536;
/// Smallest useful spacing, in segments. Clients acknowledge every second segment by themselves (RFC 9293, 3.8.6.3), so
/// a smaller spacing would save nothing.
const LEAST_SEGMENTS: u64 = 4;

/// Spacing by which a frontend is told to pass on every ACK.
const EACH: u32 = 1;

/// Spacing of ACKs at a sender's frontend, as far as the sender knows it.
#[derive(Debug, Default)]
pub(crate) struct Spacing {
    /// Number of payload bytes between two ACKs that the frontend passes on. 0 or [`EACH`]: the frontend passes on
    /// every ACK.
    known: u32,
    /// Number of segments that the sender had retransmitted when its congestion window was last examined.
    retransmitted: u32,
    /// Whether the sender's congestion control reduces its window only after a loss. Others, such as BBR, make their
    /// window small to probe the path, and no frontend can foresee that. `None` until this first matters.
    by_loss: Option<bool>,
}

impl Spacing {
    /// Notes the spacing that the frontend says it has.
    pub(crate) fn is(&mut self, known: u32) {
        self.known = known;
    }

    /// Returns the spacing to tell the frontend, if that spacing is at least twice the present one, or at most half of
    /// it.
    pub(crate) fn news(&mut self, flow: &dyn FlowSender) -> Option<u32> {
        if self.by_loss == Some(false) && self.known <= EACH {
            return None;
        }
        let window = flow.congestion_window().ok()?;
        if std::mem::replace(&mut self.retransmitted, window.retransmitted) != window.retransmitted {
            self.known = EACH; // the frontend passes on every ACK from the first duplicate on
        }
        let wanted = self.wanted(window, flow);
        if !differ(wanted, self.known.max(EACH)) {
            return None;
        }
        self.known = wanted;
        Some(wanted)
    }

    fn wanted(&mut self, window: CongestionWindow, flow: &dyn FlowSender) -> u32 {
        // The congestion window is checked first: if it is small, the algorithm and the buffer need not be asked for.
        if between(window, usize::MAX) == 0 || !*self.by_loss.get_or_insert_with(|| flow.shrinks_only_by_loss()) {
            return EACH;
        }
        flow.buffer_bytes().map_or(EACH, |buffer| between(window, buffer).max(EACH))
    }
}

fn differ(wanted: u32, known: u32) -> bool {
    wanted / 2 >= known || known / 2 >= wanted
}

fn between(window: CongestionWindow, buffer_bytes: usize) -> u32 {
    if !window.open {
        return 0;
    }
    let outstanding = (u64::from(window.segments) * u64::from(window.mss)).min(buffer_bytes as u64);
    let bytes = (outstanding / PARTS).min(MOST);
    if bytes < LEAST_SEGMENTS * u64::from(window.mss) { 0 } else { bytes as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(segments: u32) -> CongestionWindow {
        CongestionWindow { segments, mss: 1448, open: true, retransmitted: 0, in_flight: 0 }
    }

    #[test]
    fn a_quarter_of_what_may_be_outstanding_lies_between_two_acks() {
        assert_eq!(between(open(40), 1 << 20), 10 * 1448);
        assert_eq!(between(open(40), 30_000), 7500, "the send buffer is the smaller one");
    }

    #[test]
    fn a_spacing_is_sent_again_only_if_it_differs_by_half() {
        assert!(differ(20_000, EACH) && differ(EACH, 20_000) && differ(20_000, 10_000) && differ(10_000, 20_000));
        assert!(!differ(EACH, EACH) && !differ(20_000, 10_001) && !differ(10_001, 20_000));
    }

    #[test]
    fn a_small_window_needs_every_ack() {
        assert_eq!(between(open(10), 1 << 20), 0);
        assert_eq!(between(open(15), 1 << 20), 0);
        assert_ne!(between(open(16), 1 << 20), 0);
    }

    #[test]
    fn no_burst_is_longer_than_64_kib() {
        assert_eq!(between(open(10_000), 64 << 20), 65536);
    }

    #[test]
    fn a_sender_that_recovers_needs_every_ack() {
        assert_eq!(between(CongestionWindow { open: false, ..open(1000) }, 1 << 20), 0);
    }
}
