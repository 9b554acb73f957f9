//! Fuzzes the messages that a server may send to its agent.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shunt_wire::local::Request;

fuzz_target!(|packet: &[u8]| {
    let mut rest = packet;
    while let Ok((request, after)) = Request::parse(rest) {
        assert!(after.len() < rest.len());
        rest = after;
        if let Request::Offer(offer) = request {
            // The agent relies on this: the offered range lies inside the file, and its end does not overflow.
            assert!(offer.length > 0 && offer.offset + offer.length <= offer.size);
        }
    }
});
