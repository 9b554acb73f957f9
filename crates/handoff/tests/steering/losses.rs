//! Payload segments that are lost at places where the backend learns of that only by what the frontend passes on. A
//! *flow* is the record of a client connection.

use super::nft::load;
use super::steered::{Steered, begin, expect, payload};
use shunt_wire::flow::FlowState;

/// A client without SACK repeats its ACK of the header if the payload's first segment is missing. The backend's socket
/// has no RTT yet, and would wait 3 s before it sent that segment again.
#[test]
fn the_first_segment_is_sent_again_at_once_to_a_client_without_sack() {
    for (steered, family) in [(Steered::new as fn() -> Steered, "ip"), (Steered::ipv6, "ip6")] {
        let mut steered = steered();
        steered.hosts.without_segmentation_offload();
        let off = || std::fs::write("/proc/sys/net/ipv4/tcp_sack", "0");
        steered.hosts.client.run(off).expect("setns").expect("sysctl");
        let (server, mut client) = steered.connect_and_send_header();
        let body = payload(1, 20_000);
        begin(&server, 1, body.len() as u64).expect("SHUNT_BEGIN");
        let state = steered.answer();
        assert_eq!(state.flow.options & FlowState::SACK, 0);
        // The quota has room for the first packet with this number.
        let rule = format!("tcp sequence {} quota until 2000 bytes drop", state.flow.start);
        let rules = format!("table {family} l {{ chain f {{ type filter hook forward priority 0; {rule}; }}; }}");
        if !load("the_first_segment_is_sent_again_at_once_to_a_client_without_sack", &rules) {
            return;
        }
        let sending = steered.send(&state, &body);
        expect(&mut client, &body);
        assert_eq!(steered.event(), (1, body.len() as u64, 1));
        assert_eq!(steered.hosts.losses_by_duplicate_acks(), 1, "{:?}", steered.counted());
        sending.finish();
    }
}
