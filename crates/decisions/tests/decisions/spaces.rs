//! Tests of the translation between two sequence spaces: the server's kernel counts only its own bytes, and the client
//! counts payloads, too. The model is the stream that the client gets, with 64-bit offsets. A *break* is the record of
//! one payload.

use proptest::prelude::*;
use shunt_decisions::*;

/// One response: a header from the frontend, then a payload.
#[derive(Clone, Copy, Debug)]
struct Response {
    header: u64,
    payload: u64,
}

#[derive(Debug)]
struct Stream {
    first: u32,
    responses: Vec<Response>,
    /// Number of bytes of the newest payload that the client has acknowledged. `None`: the payload is complete.
    reached: Option<u64>,
}

impl Stream {
    /// Stream offset of the n-th payload, and the number of the frontend's own bytes before it.
    fn payload_at(&self, n: usize) -> (u64, u64) {
        let before = &self.responses[..n];
        let header = self.responses[n].header;
        let own: u64 = before.iter().map(|response| response.header).sum();
        let all: u64 = before.iter().map(|response| response.header + response.payload).sum();
        (all + header, own + header)
    }

    /// Number of the frontend's own bytes among the first `offset` bytes of the stream.
    fn own(&self, offset: u64) -> u64 {
        let mut at = 0;
        let mut own = 0;
        for response in &self.responses {
            own += offset.saturating_sub(at).min(response.header);
            at += response.header + response.payload;
        }
        own + if self.reached.is_some() { 0 } else { offset.saturating_sub(at) }
    }

    fn number(&self, offset: u64) -> u32 {
        self.first.wrapping_add(offset as u32)
    }

    fn spaces(&self) -> Spaces {
        let mut spaces = Spaces { made: self.responses.len() as u32, ..Spaces::default() };
        for (n, response) in self.responses.iter().enumerate() {
            let (start, local) = self.payload_at(n);
            spaces.breaks[n % BREAKS as usize] = Break {
                local: self.number(local),
                start: self.number(start),
                length: response.payload,
                ..Break::default()
            };
        }
        spaces.status = if self.reached.is_some() { SHUNT_REGION_ACTIVE } else { SHUNT_REGION_COMPLETE };
        spaces.acked = self.reached.unwrap_or_default();
        spaces
    }

    /// Stream offset that the client has reached.
    fn newest(&self) -> u64 {
        let last = self.responses.len() - 1;
        self.payload_at(last).0 + self.reached.unwrap_or(self.responses[last].payload)
    }

    /// Stream offset of the first byte that is remembered: the start of the header before the oldest break.
    fn oldest(&self) -> u64 {
        let forgotten = self.responses.len().saturating_sub(BREAKS as usize);
        self.payload_at(forgotten).0 - self.responses[forgotten].header
    }
}

fn streams() -> impl Strategy<Value = Stream> {
    let payload = prop_oneof![1u64..100, 1000u64..200_000, 1u64 << 31..5u64 << 31];
    let response = (1u64..3000, payload).prop_map(|(header, payload)| Response { header, payload });
    (any::<u32>(), prop::collection::vec(response, 1..8), prop::option::of(0.0..1.0f64)).prop_map(
        |(first, responses, reached)| {
            let last = responses[responses.len() - 1].payload as f64;
            Stream { first, responses, reached: reached.map(|part| (part * last) as u64) }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    /// A client's number that is remembered, at most 1 GiB before or behind the newest one, becomes the number that
    /// counts only the server's own bytes before it.
    #[test]
    fn a_clients_number_is_the_count_of_the_servers_bytes(stream in streams(), back in -(1i64 << 30)..1i64 << 30) {
        let offset = stream.newest().saturating_add_signed(back).max(stream.oldest());
        let spaces = stream.spaces();
        prop_assert_eq!(to_local(&spaces, stream.number(offset)), stream.number(stream.own(offset)));
    }

    /// A server's segment is translated to the place of its bytes in the stream. A segment on both sides of a payload
    /// has no place.
    #[test]
    fn a_servers_segment_is_where_its_bytes_are(stream in streams(), which in any::<prop::sample::Index>(),
                                                from in 0u64..3000, bytes in 1u64..3000) {
        let forgotten = stream.responses.len().saturating_sub(BREAKS as usize);
        let n = forgotten + which.index(stream.responses.len() - forgotten);
        let (start, local) = stream.payload_at(n);
        let header = stream.responses[n].header;
        let from = from % header;
        let seq = local - header + from;
        let found = to_client(&stream.spaces(), stream.number(seq), stream.number(seq + bytes));
        let expected = (from + bytes <= header).then_some(stream.number(start - header + from));
        prop_assert_eq!(found, expected);
    }

    /// If a server's number behind all payloads is translated for the client, and back, the result is the same number.
    #[test]
    fn translation_to_the_client_and_back_is_the_identity(stream in streams(), from in 0u64..3000) {
        let stream = Stream { reached: None, ..stream };
        let last = stream.responses.len() - 1;
        let local = stream.payload_at(last).1 + from;
        let spaces = stream.spaces();
        let client = to_client(&spaces, stream.number(local), stream.number(local)).expect("behind all payloads");
        prop_assert_eq!(to_local(&spaces, client), stream.number(local));
    }
}

/// If a header is lost and its payload arrives, the backend gets an ACK of the payload's start, and the client's SACK
/// block begins there, too. RFC 2018 allows no block that begins at the ACK number, so the block loses its first byte.
#[test]
fn a_block_at_the_ack_number_begins_behind_it() {
    let payload = Break { start: 1000, length: 500, ..Break::default() };
    let region = Region { payload, reached: 0 };
    let sack = Sack { blocks: 1, left: [1000, 0, 0, 0], right: [1200, 0, 0, 0] };
    let sack = blocks_of_region(&region, 1000, sack);
    assert_eq!((sack.left[0], sack.right[0]), (1001, 1200));
}
