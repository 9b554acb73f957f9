//! Fuzzes the parser of frames (messages between agents): a stream that is cut at any place must yield the same frames
//! up to that place.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shunt_wire::local::Reason;
use shunt_wire::peer::Frame;

fn frames(stream: &[u8]) -> (Vec<String>, Option<Reason>) {
    let (mut at, mut all) = (0, Vec::new());
    loop {
        match Frame::parse(&stream[at..]) {
            Ok(Some((frame, length))) => {
                assert!(length > 0);
                at += length;
                all.push(format!("{frame:?}"));
            }
            Ok(None) => return (all, None),
            Err(reason) => return (all, Some(reason)),
        }
    }
}

fuzz_target!(|input: (Vec<u8>, usize)| {
    let (stream, cut) = input;
    let whole = frames(&stream);
    let (mut first, ended) = frames(&stream[..cut.min(stream.len())]);
    assert!(first.len() <= whole.0.len());
    first.truncate(whole.0.len());
    assert_eq!(first, whole.0[..first.len()]);
    if ended.is_some() {
        assert_eq!(ended, whole.1);
    }
});
