//! Any sequence of writes arrives as the same bytes, wherever the sending and the receiving kernel cut it. A
//! *reference* is sent in place of bytes of a payload, and has a *share* of the payload. The share's size is its
//! *weight*, a power of two.

use std::collections::VecDeque;

use proptest::prelude::*;
use shunt_odb::frame::{Beginning, HEADER_BYTES, NotAFrame, PREAMBLE, Receiving, Sending, Took, Want};
use shunt_odb::reference::{Holder, PayloadId, Reference, Weight};
use zerocopy::IntoBytes;

/// A program's write: this many real bytes, or a reference that stands for this many bytes.
#[derive(Clone, Debug)]
enum Write {
    Real(usize),
    Reference(u64),
}

fn writes() -> impl Strategy<Value = Vec<Write>> {
    let write = prop_oneof![(1usize..3000).prop_map(Write::Real), (1u64..200_000).prop_map(Write::Reference)];
    proptest::collection::vec(write, 1..20)
}

/// Kernel and network: a socket that takes and delivers any number of bytes at a time, as `cuts` says.
struct Socket {
    bytes: VecDeque<u8>,
    cuts: VecDeque<usize>,
}

impl Socket {
    fn cut(&mut self, at_most: usize) -> usize {
        let cut = self.cuts.pop_front().unwrap_or(1000);
        self.cuts.push_back(cut);
        cut.min(at_most)
    }

    fn send(&mut self, bytes: &[u8]) -> usize {
        let took = self.cut(bytes.len());
        self.bytes.extend(&bytes[..took]);
        took
    }

    fn peek(&mut self, at_most: usize) -> Vec<u8> {
        self.bytes.iter().take(at_most).copied().collect()
    }

    fn take(&mut self, at_most: usize) -> Vec<u8> {
        let count = at_most.min(self.bytes.len());
        self.bytes.drain(..count).collect()
    }
}

/// Byte of the stream at `position`. Both ends can compute it, so that every byte is compared.
fn byte(position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Weight with which each reference is sent. It is so small that the sum of many fits into a u64.
const SHARE: Weight = match Weight::from_log2(40) {
    Some(weight) => weight,
    None => panic!(),
};

fn reference(offset: u64, length: u64) -> Reference {
    let payload = PayloadId { holder: Holder::named("be1"), segment: 3, slot: 4, secret: 5 };
    Reference { payload, weight: SHARE, offset, length }
}

/// Sends the first of the writes, or as much of it as the socket takes at once. A reference's offset is its position in
/// the stream. If the socket takes only a part of a reference, the receiver is told that it does not count, and the
/// write is sent again later. Returns the number of references that were sent whole: 0 or 1.
fn send(socket: &mut Socket, sending: &mut Sending, writes: &mut VecDeque<Write>, position: &mut u64) -> u64 {
    let Some(write) = writes.front_mut() else {
        let owed = sending.owed().to_vec();
        let sent = socket.send(&owed);
        assert_eq!(sending.sent(sent), 0);
        return 0;
    };
    match write {
        Write::Reference(length) if sending.takes_reference() => {
            let before = *sending;
            sending.reference(&reference(*position, *length));
            let whole = sending.owed().to_vec();
            let sent = socket.send(&whole);
            sending.sent(sent);
            if sent < whole.len() {
                // The program is told that nothing was written.
                if sent == 0 {
                    *sending = before;
                } else {
                    sending.void_reference();
                }
                return 0;
            }
            *position += *length;
            writes.pop_front();
            1
        }
        // Inside an open REAL frame the reference's bytes are sent as real bytes.
        Write::Reference(length) => {
            *write = Write::Real(usize::try_from(*length).unwrap());
            0
        }
        Write::Real(bytes) => {
            // At most 4096 bytes at once. A socket that takes one byte at a time would otherwise have all bytes of a
            // long write generated again for each byte that it takes.
            let is_short = *bytes % 2 == 1;
            let now = if is_short { sending.short(*bytes) } else { sending.real(*bytes) }.min(4096);
            let mut all = sending.owed().to_vec();
            all.extend((0..now as u64).map(|at| byte(*position + at)));
            let sent = socket.send(&all);
            let real = sending.sent(sent);
            // Counts each byte as a hundred, so that even a short stream has enough short writes for frames to promise
            // bytes ahead. Only some of the long writes count as long.
            sending.wrote(real * 100, is_short || !position.is_multiple_of(7));
            *position += real as u64;
            *bytes -= real;
            if *bytes == 0 {
                writes.pop_front();
            }
            0
        }
    }
}

/// Receives at most `room` bytes and checks them. Returns how many, and the units of weight that came with them.
fn receive(socket: &mut Socket, receiving: &mut Receiving, room: u64, position: &mut u64) -> (u64, u64) {
    match receiving.want() {
        Want::Preamble(bytes) => {
            let seen = socket.peek(bytes);
            if receiving.saw_preamble(&seen) == Beginning::Framed {
                assert_eq!(socket.take(PREAMBLE.len()), PREAMBLE);
            }
            (0, 0)
        }
        Want::Header(bytes) => {
            let count = socket.cut(bytes);
            let got = socket.take(count);
            receiving.took_header(&got).unwrap();
            (0, 0)
        }
        Want::Real(left) => {
            let at_most = usize::try_from(left.min(room)).unwrap();
            let count = socket.cut(at_most);
            let got = socket.take(count);
            for (at, got) in got.iter().enumerate() {
                assert_eq!(*got, byte(*position + at as u64), "byte {}", *position + at as u64);
            }
            receiving.took_real(got.len() as u64);
            *position += got.len() as u64;
            (got.len() as u64, 0)
        }
        Want::ReferencePart(bytes) => {
            let count = socket.cut(bytes);
            let got = socket.take(count);
            receiving.took_reference_part(&got).unwrap();
            (0, 0)
        }
        Want::Reference => {
            let Some(last) = socket.peek(1).first().copied() else { return (0, 0) };
            let Some(left) = receiving.saw_reference(last).unwrap() else {
                socket.take(1);
                receiving.took_void();
                return (0, 0);
            };
            assert_eq!(left.offset, *position);
            let now = left.length.min(room);
            // Some readers already have a share of the payload, and take no more of the weight.
            let Took { share, over, used_up } = if left.offset.is_multiple_of(3) {
                receiving.took_more(&left, now)
            } else {
                receiving.took_reference(&left, now)
            };
            assert_eq!(used_up, now == left.length);
            if used_up {
                socket.take(1);
            }
            *position += now;
            (now, share.map_or(0, Weight::units) + over)
        }
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]
    #[test]
    fn every_byte_arrives_however_the_kernels_cut(
        writes in writes(), cuts in proptest::collection::vec(1usize..2000, 1..30), rooms in proptest::collection::vec(4000u64..70_000, 1..10),
    ) {
        let total: u64 = writes.iter().map(|write| match write { Write::Real(n) => *n as u64, Write::Reference(n) => *n }).sum();
        let mut socket = Socket { bytes: VecDeque::new(), cuts: cuts.into() };
        let (mut sending, mut receiving) = (Sending::default(), Receiving::default());
        let (mut writes, mut sent, mut received, mut weight) = (VecDeque::from(writes), 0, 0, 0);
        let mut references = 0;
        for turn in 0.. {
            prop_assert!(turn < 20_000_000, "no end: {received} of {total}, {receiving:?} {sending:?}");
            references += send(&mut socket, &mut sending, &mut writes, &mut sent);
            let (now, units) = receive(&mut socket, &mut receiving, rooms[turn % rooms.len()], &mut received);
            prop_assert!(now <= total);
            weight += units;
            if received == total && writes.is_empty() && sending.owed().is_empty() {
                break;
            }
        }
        prop_assert_eq!(weight, references * SHARE.units(), "every share came out whole");
        let promised = sending.promised();
        let expected = if promised > 0 { Want::Real(promised) } else { Want::Header(HEADER_BYTES) };
        prop_assert_eq!(receiving.want(), expected);
    }

    #[test]
    fn no_bytes_and_no_state_make_a_receiver_panic(
        state in proptest::collection::vec(any::<u8>(), size_of::<Receiving>()), bytes in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut receiving: Receiving = zerocopy::FromBytes::read_from_bytes(&state).unwrap();
        let mut bytes = bytes.as_slice();
        while !bytes.is_empty() {
            match receiving.want() {
                Want::Preamble(_) => { receiving.saw_preamble(bytes); break }
                Want::Header(count) => {
                    let (now, rest) = bytes.split_at(count.min(bytes.len()));
                    bytes = rest;
                    if receiving.took_header(now).is_err() { break }
                }
                Want::Real(left) => {
                    let now = (left as usize).min(bytes.len());
                    if now == 0 { break }
                    receiving.took_real(now as u64);
                    bytes = &bytes[now..];
                }
                Want::ReferencePart(count) => {
                    let (now, rest) = bytes.split_at(count.min(bytes.len()));
                    bytes = rest;
                    if receiving.took_reference_part(now).is_err() { break }
                }
                Want::Reference => {
                    match receiving.saw_reference(bytes[0]) {
                        Err(NotAFrame) => break,
                        Ok(None) => receiving.took_void(),
                        Ok(Some(left)) => { receiving.took_reference(&left, left.length); }
                    }
                    bytes = &bytes[1..];
                }
                Want::Plain | Want::Broken => break,
            }
        }
        prop_assert_eq!(receiving.as_bytes().len(), size_of::<Receiving>());
    }
}

/// A file of 1 GiB is one reference, which is read in small pieces. A page with the smallest share is passed on, and is
/// read byte by byte.
#[test]
fn every_read_of_a_long_reference_gets_a_share_that_can_be_divided_as_often_again() {
    const GIB: u64 = 1 << 30;
    let mut smallest = Weight::WHOLE;
    let whole = Reference { weight: Weight::WHOLE, ..reference(0, GIB) };
    in_pieces(
        whole,
        |turn| 1 + turn * 7919 % 8192,
        |left, share| {
            smallest = smallest.min(share);
            assert!(share.units() / left.length.max(1) > 1 << 10, "{share:?} of {left:?}");
        },
    );
    let next = Reference { weight: smallest, ..reference(0, 4096) };
    in_pieces(next, |_| 1, |_, _| {});
}

/// Reads a reference in pieces. `each` gets each piece and its share.
fn in_pieces(whole: Reference, piece: impl Fn(u64) -> u64, mut each: impl FnMut(&Reference, Weight)) {
    let (mut sending, mut receiving) = (Sending::default(), Receiving::default());
    sending.reference(&whole);
    let frame = &sending.owed()[PREAMBLE.len()..];
    receiving.saw_preamble(&PREAMBLE);
    receiving.took_header(&frame[..HEADER_BYTES]).unwrap();
    receiving.took_reference_part(&frame[HEADER_BYTES..frame.len() - 1]).unwrap();
    let (mut at, mut units) = (0, 0);
    for turn in 0.. {
        let left = receiving.saw_reference(frame[frame.len() - 1]).unwrap().unwrap();
        assert_eq!((left.offset, left.length), (whole.offset + at, whole.length - at));
        let now = piece(turn).min(left.length);
        let Took { share, over, used_up } = receiving.took_reference(&left, now);
        let share = share.unwrap_or_else(|| panic!("no share in turn {turn}"));
        each(&Reference { length: now, ..left }, share);
        (at, units) = (at + now, units + share.units() + over);
        assert_eq!(used_up, at == whole.length);
        if used_up {
            break;
        }
    }
    assert_eq!(units, whole.weight.units(), "all of the weight came out");
}

#[test]
fn bytes_without_the_preamble_are_the_programs() {
    for cut in 0..PREAMBLE.len() {
        let mut receiving = Receiving::default();
        assert_eq!(receiving.saw_preamble(&PREAMBLE[..cut]), Beginning::Undecided);
        let mut other = PREAMBLE;
        other[cut] ^= 1;
        assert_eq!(receiving.saw_preamble(&other), Beginning::Plain);
        assert_eq!(receiving.want(), Want::Plain);
    }
}

#[test]
fn every_header_that_is_none_breaks_the_direction() {
    let bad: [[u8; 8]; 5] = [
        [0, 0, 0, 0, 1, 0, 0, 0],
        [3, 0, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 1, 0, 0, 0],
        [2, 0, 0, 0, 52, 0, 0, 0],
    ];
    for header in bad {
        let mut receiving = Receiving::default();
        receiving.saw_preamble(&PREAMBLE);
        assert_eq!(receiving.took_header(&header), Err(NotAFrame));
        assert_eq!(receiving.want(), Want::Broken);
    }
}

/// Makes one short write of `bytes` bytes, all of which the socket takes. Returns the number of headers that it needs.
fn short(sending: &mut Sending, mut bytes: usize) -> usize {
    let (all, mut headers) = (bytes, 0);
    while bytes > 0 {
        headers += usize::from(sending.promised() == 0);
        let now = sending.short(bytes);
        sending.sent(sending.owed().len() + now);
        bytes -= now;
    }
    sending.wrote(all, true);
    headers
}

#[test]
fn many_short_writes_need_few_headers_until_a_long_one_comes() {
    let mut sending = Sending::default();
    let first: usize = (0..100).map(|_| short(&mut sending, 300)).sum();
    assert_eq!(first, 100, "nothing is known yet");
    let later: usize = (0..1000).map(|_| short(&mut sending, 300)).sum();
    assert!((300_000 / 65_836..60).contains(&later), "{later} headers");
    // After all the short writes, at most this many bytes of a long write have to be real.
    assert!(sending.promised() <= 1100 * 300 / 8);
    let owed = sending.promised() as usize;
    assert_eq!(sending.real(1 << 20), owed, "what is promised, and then a reference may come");
    sending.sent(owed);
    sending.wrote(1 << 20, false);
    assert!(sending.takes_reference());
    assert_eq!(short(&mut sending, 300), 1);
    assert!(sending.takes_reference(), "nothing is promised ahead");
}
