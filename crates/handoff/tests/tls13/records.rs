//! Tests of the bytes that a sender puts on a TLS 1.3 connection. The bytes are a stream of records, which may begin or
//! end in the middle of a record. The tests open (decrypt) the records again. A file's *digest* is its SHA-256, by
//! which other backends are known to have the same file.

use std::io::{Read, Seek, Write};
use std::os::unix::net::UnixStream;

use proptest::prelude::*;
use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use shunt_handoff::body::Body;
use shunt_handoff::flow_sender::KernelSocket;
use shunt_handoff::identity::FileIdentity;
use shunt_handoff::tls13::workbench::Workbench;
use shunt_testbed::{assert_same_bytes, wait_for};
use shunt_wire::local::Reason;
use shunt_wire::tls::Suite;

use crate::sources::{Keys, bytes, file_of, pair, payload, proven_payload, rest, sent};

/// Opens the records of a stream, and returns their contents.
fn opened(keys: &Keys, mut wire: &[u8]) -> Vec<u8> {
    let algorithm = match keys.suite {
        Suite::Aes128GcmSha256 => &AES_128_GCM,
        Suite::Aes256GcmSha384 => &AES_256_GCM,
        Suite::ChaCha20Poly1305Sha256 => &CHACHA20_POLY1305,
    };
    let key = LessSafeKey::new(UnboundKey::new(algorithm, &keys.key).unwrap());
    let (mut data, mut number) = (Vec::new(), keys.first_record);
    while !wire.is_empty() {
        assert_eq!(wire[..3], [23, 3, 3]);
        let (record, rest) = wire.split_at(5 + usize::from(u16::from_be_bytes([wire[3], wire[4]])));
        let mut body = record[5..].to_vec();
        let mut nonce = keys.iv;
        let wide = u64::from_be_bytes(nonce[4..].try_into().unwrap()) ^ number;
        nonce[4..].copy_from_slice(&wide.to_be_bytes());
        let aad = Aad::from(&record[..5]);
        let content = key.open_in_place(Nonce::assume_unique_for_key(nonce), aad, &mut body).expect("authentic");
        let (content_type, content) = content.split_last().unwrap();
        assert!(content.len() <= usize::from(keys.content_bytes));
        assert_eq!(*content_type, 23);
        data.extend_from_slice(content);
        (wire, number) = (rest, number + 1);
    }
    data
}

fn suites() -> impl Strategy<Value = Suite> {
    prop::sample::select(Suite::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_byte_of_the_file_is_in_the_records(
        suite in suites(), length in 1usize..300_000, offset in 0.0..1.0f64, content_bytes in 63u16..=1 << 14,
        first_record in 0u64..1 << 20, step in 1usize..70_000,
    ) {
        let content_bytes = content_bytes.max((length / 2000) as u16).max(63);
        let keys = Keys { first_record, content_bytes, ..Keys::of(suite) };
        let (all, offset) = (bytes(length), (length as f64 * offset) as usize);
        let stream = Body::sealed(payload(&file_of(&all), offset as u64), keys.generation()).unwrap();
        assert_same_bytes(&opened(&keys, &sent(stream, step)), &all[offset..], "what the records hold");
    }

    #[test]
    fn a_second_sender_continues_at_any_byte_with_the_same_bytes(
        suite in suites(), length in 1usize..200_000, content_bytes in 63u16..=1 << 14, cut in 0.0..1.0f64,
    ) {
        let content_bytes = content_bytes.max((length / 2000) as u16).max(63);
        let keys = Keys { first_record: 7, content_bytes, ..Keys::of(suite) };
        let file = file_of(&bytes(length));
        let whole = sent(Body::sealed(payload(&file, 0), keys.generation()).unwrap(), 1 << 16);
        let cut = (whole.len() as f64 * cut) as usize;
        let (from, keys) = rest(&keys, cut);
        let stream = Body::sealed(payload(&file, from), keys.generation()).unwrap();
        prop_assert_eq!(stream.remaining(), (whole.len() - cut) as u64);
        assert_same_bytes(&sent(stream, 1 << 16), &whole[cut..], "what the second sender sends");
    }
}

#[test]
fn a_claim_with_impossible_values_is_malformed() {
    let good = Keys::of(Suite::Aes128GcmSha256);
    let file = file_of(&bytes(100_000));
    let stream = |keys: &Keys| Body::sealed(payload(&file, 0), keys.generation()).map(drop);
    for good in
        [good.clone(), Keys { first_record: (1 << 24) - 8, ..good.clone() }, Keys { skip: 16405, ..good.clone() }]
    {
        assert_eq!(stream(&good), Ok(()), "7 records, and one more for the KeyUpdate");
    }
    for bad in [
        Keys { skip: 16406, ..good.clone() },
        Keys { content_bytes: 0, ..good.clone() },
        Keys { content_bytes: (1 << 14) + 1, ..good.clone() },
        Keys { first_record: (1 << 24) - 7, ..good.clone() },
        Keys { first_record: u64::MAX, ..good.clone() },
        Keys { key: bytes(32), ..good.clone() },
    ] {
        assert_eq!(stream(&bad), Err(Reason::Malformed), "{} {} {}", bad.first_record, bad.content_bytes, bad.skip);
    }
}

/// If a file changes while it is sent, its new bytes must not be sealed. Another backend that sends the same payload
/// may have sealed the old bytes under the same record numbers, and two plaintexts would then have one nonce. Bytes
/// that were already sealed are sent as they are, or not at all.
#[test]
fn a_file_that_changes_ends_the_stream_before_a_changed_byte_is_sealed() {
    let before = bytes(1 << 20);
    for mtime_is_kept in [false, true] {
        let mut file = file_of(&before);
        let modified = file.metadata().unwrap().modified().unwrap();
        let proven = mtime_is_kept.then(|| FileIdentity::of(&file.metadata().unwrap()));
        let keys = Keys::of(Suite::Aes128GcmSha256);
        let mut stream = Body::sealed(proven_payload(&file, proven), keys.generation()).unwrap();
        let (ours, mut theirs) = pair();
        let mut workbench = Workbench::default();
        assert_eq!(stream.send_to(&ours, &mut workbench), Ok(false));
        let then = FileIdentity::of(&file.metadata().unwrap());
        wait_for("the clock of the file system has gone on", || {
            file.rewind().unwrap();
            file.write_all(&[0; 1 << 20]).unwrap();
            FileIdentity::of(&file.metadata().unwrap()).ctime_ns != then.ctime_ns
        })
        .unwrap();
        if mtime_is_kept {
            file.set_modified(modified).unwrap();
        }
        let mut early = vec![0; 1 << 20];
        let early = theirs.read(&mut early).map(|taken| early[..taken].to_vec()).unwrap();
        assert_eq!(stream.send_to(&ours, &mut workbench), Err(Reason::FileChanged));
        drop((ours, stream));
        let mut late = Vec::new();
        theirs.read_to_end(&mut late).unwrap();
        let all = [early, late].concat();
        let whole = all.len() / ((1 << 14) + 22) * ((1 << 14) + 22);
        let data = opened(&keys, &all[..whole]);
        assert!(data.len() >= 1 << 14, "{} bytes were sealed", data.len());
        assert_same_bytes(&data, &before[..data.len()], "what was sealed");
    }
}

/// Reads all that a stream sends, until it waits for something other than its socket.
fn sent_until_it_waits(stream: &mut Body, ours: &KernelSocket, theirs: &mut UnixStream, all: &mut Vec<u8>) {
    let (mut workbench, mut step) = (Workbench::default(), vec![0; 1 << 20]);
    loop {
        let (left, had) = (stream.remaining(), all.len());
        let _ = stream.send_to(ours, &mut workbench).unwrap();
        while let Ok(taken @ 1..) = theirs.read(&mut step) {
            all.extend_from_slice(&step[..taken]);
        }
        if (stream.remaining(), all.len()) == (left, had) {
            return;
        }
    }
}

/// Another backend may continue with the old file, under the same record numbers, until the frontend knows that the
/// digest is withdrawn because the file has changed.
#[test]
fn a_file_that_grows_after_its_digest_is_told_is_sealed_once_that_is_withdrawn() {
    let before = bytes(4 << 20);
    let mut file = file_of(&before);
    let keys = Keys::of(Suite::Aes128GcmSha256);
    let mut stream = Body::sealed(payload(&file, 0), keys.generation()).unwrap();
    let (ours, mut theirs) = pair();
    theirs.set_nonblocking(true).unwrap();
    assert_eq!(stream.send_to(&ours, &mut Workbench::default()), Ok(false));
    stream.payload().set_told(true);
    file.write_all(b"more").unwrap();
    let mut all = Vec::new();
    sent_until_it_waits(&mut stream, &ours, &mut theirs, &mut all);
    assert!(stream.payload().is_withheld() && stream.remaining() > 1 << 20, "{} bytes left", stream.remaining());
    stream.payload().set_told(false);
    sent_until_it_waits(&mut stream, &ours, &mut theirs, &mut all);
    assert_eq!(stream.remaining(), 0);
    assert_same_bytes(&opened(&keys, &all), &before, "what the records hold");
}

#[test]
fn a_file_that_ends_early_ends_the_stream() {
    let file = file_of(&bytes(1 << 20));
    let stream = payload(&file, 0);
    file.set_len(1000).unwrap();
    let mut stream = Body::sealed(stream, Keys::of(Suite::Aes256GcmSha384).generation()).unwrap();
    let (ours, _theirs) = pair();
    assert_eq!(stream.send_to(&ours, &mut Workbench::default()), Err(Reason::FileChanged));
}
