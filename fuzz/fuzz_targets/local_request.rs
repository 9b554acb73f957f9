//! What a server may send to its agent.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shunt_wire::local::Request;

fuzz_target!(|packet: &[u8]| {
    if let Ok(Request::Offer(offer)) = Request::parse(packet) {
        // What the agent relies on: the range lies in the file, and its end can be computed.
        assert!(offer.length > 0 && offer.offset + offer.length <= offer.size);
    }
});
