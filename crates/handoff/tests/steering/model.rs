//! Tests of the steering programs against an independent model: one stream to a client, whose bytes come from several
//! senders. Places in the stream are 64-bit offsets. So the model has no arithmetic of sequence numbers, except for a
//! cast at the end.
//!
//! The model knows which sender each byte comes from: the frontend, or the backend of a payload. From that alone it
//! derives what each sender's kernel should see of a client's packet: which of that kernel's bytes the packet
//! acknowledges, and which of them it reports in SACK blocks. The backend gets a *copy* of the packet, rewritten for
//! the backend's socket. The backend's *word* confirms that this socket has got the ACK of the payload's end.

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use shunt_handoff::bpf::*;
use shunt_wire::flow::FlowState;

use super::programs::*;
use super::seeded::many;
use super::segment::*;

const RCV_NXT: u32 = 4_000_000_000;
const WSCALE: u8 = 14;
/// Packet of a client with much room.
const WIDE: Report = Report { progress: 0, window: u16::MAX, blocks: Vec::new(), data: false };

/// One response: a header from the frontend, then the payload.
#[derive(Clone, Copy, Debug)]
struct Response {
    header: u64,
    payload: u64,
}

/// A client's packet: an ACK somewhere in the outstanding bytes, and SACK blocks beyond it.
#[derive(Clone, Debug)]
struct Report {
    /// Position of the ACK, in 1/1000 of the bytes that may be acknowledged now. A negative one goes back. One above
    /// 1000 may claim too much.
    progress: i32,
    /// Window field of the packet.
    window: u16,
    /// SACK blocks, each as its distance from the end of the block before, and its length. The first distance is from
    /// the ACK.
    blocks: Vec<(u16, u16)>,
    data: bool,
}

/// The stream as a client sees it. `first` is the stream's first sequence number.
struct Model {
    first: u32,
    responses: Vec<Response>,
    /// Stream offset of the newest ACK that was believed.
    acked: u64,
    /// Number of bytes of the newest payload that are acknowledged, by the newest ACK that was believed or by the ACK
    /// of the payload's end.
    position: u64,
    /// Window field of the newest ACK that was believed.
    window: u16,
    /// Highest stream offset up to which the client has ever had room.
    edge: u64,
    /// Whether the frontend's kernel has got an ACK of the newest header.
    told: bool,
    /// Number of bytes between the ACKs that the backend needs. 0: it needs each ACK.
    spacing: u64,
    /// Lowest stream offset whose ACK must go to the backend.
    due: u64,
}

impl Model {
    fn client(&self, offset: u64) -> u32 {
        self.first.wrapping_add(offset as u32)
    }

    /// Stream offset at which the n-th payload starts.
    fn start(&self, n: usize) -> u64 {
        let before: u64 = self.responses[..n].iter().map(|response| response.header + response.payload).sum();
        before + self.responses[n].header
    }

    /// Number of the frontend's own bytes among the first `offset` bytes of the stream.
    fn own(&self, offset: u64) -> u64 {
        let mut own = 0;
        let mut at = 0;
        for response in &self.responses {
            own += offset.saturating_sub(at).min(response.header);
            at += response.header + response.payload;
        }
        own + offset.saturating_sub(at)
    }

    fn local(&self, offset: u64) -> u32 {
        self.first.wrapping_add(self.own(offset) as u32)
    }

    /// Oldest stream offset that the programs remember. Older bytes have long been acknowledged.
    fn remembered(&self) -> u64 {
        let forgotten = self.responses.len().saturating_sub(BREAKS as usize);
        self.responses[..forgotten].iter().map(|response| response.header + response.payload).sum()
    }

    fn in_newest(&self, offset: u64) -> u64 {
        let newest = self.responses.len() - 1;
        offset.clamp(self.start(newest), self.start(newest) + self.responses[newest].payload)
    }
}

fn non_empty(blocks: impl Iterator<Item = (u32, u32)>) -> Vec<(u32, u32)> {
    blocks.filter(|(left, right)| left != right).collect()
}

fn report() -> impl Strategy<Value = Report> {
    let blocks = prop::collection::vec((1u16..4000, 1u16..4000), 0..4);
    let progress = prop_oneof![9 => -200..1000i32, 1 => 1001..2000];
    (progress, any::<u16>(), blocks, prop::bool::weighted(0.2)).prop_map(|(progress, window, blocks, data)| Report {
        progress,
        window,
        blocks,
        data,
    })
}

fn response() -> impl Strategy<Value = Response> {
    (1u64..3000, prop_oneof![1u64..100, 1000u64..200_000, 1u64 << 31..5u64 << 31])
        .prop_map(|(header, payload)| Response { header, payload })
}

/// Whether the payload needs the backend's word, and whether the word comes before or after the client's ACK of the
/// payload's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Unneeded,
    Before,
    After,
}

#[derive(Debug)]
struct Case {
    first: u32,
    spacing: u32,
    responses: Vec<(Response, Vec<Report>, Word)>,
}

fn case() -> impl Strategy<Value = Case> {
    let word = prop_oneof![Just(Word::Unneeded), Just(Word::Before), Just(Word::After)];
    let responses = prop::collection::vec((response(), prop::collection::vec(report(), 1..6), word), 1..7);
    let spacing = prop_oneof![Just(0), 1u32..200_000];
    (any::<u32>(), spacing, responses).prop_map(|(first, spacing, responses)| Case { first, spacing, responses })
}

/// Runs one packet and compares both kernels' views with those of the model.
fn check(fe: &Frontend, model: &mut Model, report: &Report, complete: bool) -> Result<(), TestCaseError> {
    let newest = model.responses.len() - 1;
    let (start, length) = (model.start(newest), model.responses[newest].payload);
    let end = start + length;
    // Sequence numbers compare only over a limited distance, so an ACK goes forward by less than 2^30.
    let room = (end.min(model.edge).saturating_sub(model.acked)).min(1 << 29) as i64;
    let offset = model.acked as i64 + room * i64::from(report.progress) / 1000;
    let lowest = model.acked.saturating_sub(5000).max(model.remembered());
    let offset = if complete { end } else { offset.clamp(lowest as i64, end as i64 - 1) as u64 };
    let believed = model.acked <= offset + (model.edge - model.acked);

    let mut blocks = Vec::new();
    let mut at = offset;
    for (gap, length) in &report.blocks {
        let left = at + u64::from(*gap);
        let right = (left + u64::from(*length)).min(end);
        if left < right {
            blocks.push((left, right));
        }
        at = right;
    }
    let in_client: Vec<_> = blocks.iter().map(|&(left, right)| (model.client(left), model.client(right))).collect();
    let mut packet = Segment::ack(client(), server(), RCV_NXT, model.client(offset));
    packet.window = report.window;
    if !in_client.is_empty() {
        packet = packet.sack(&in_client);
    }
    if report.data {
        packet = packet.payload(b"upload");
    }

    let inside = offset > start;
    let holds_payload = blocks.iter().any(|&(_, right)| right > start);
    let to_backend = inside || holds_payload;
    let to_server = !inside || complete || report.data || !model.told;
    let sack_to_server = non_empty(blocks.iter().map(|&(left, right)| (model.local(left), model.local(right))));
    let sack_to_backend = non_empty(blocks.iter().map(|&(left, right)| {
        let (left, right) = (model.in_newest(left), model.in_newest(right));
        let first_is_given_up = left == model.in_newest(offset) && right > left;
        (model.client(left + u64::from(first_is_given_up)), model.client(right))
    }));

    if offset > model.edge || blocks.iter().any(|&(_, right)| right > model.edge) {
        let before = fe.flow();
        prop_assert_eq!(fe.fe_in(&packet).verdict, SHOT, "{} of {}, edge {}", offset, end, model.edge);
        prop_assert_eq!(fe.flow().client_ack, before.client_ack);
        return Ok(());
    }
    // A duplicate, or an ACK with blocks, is passed on, and ends the spacing.
    let news = offset != start + model.position || packet.window != model.window;
    if holds_payload || inside && (!blocks.is_empty() || !news) {
        model.spacing = 0;
    }
    let out = fe.fe_in(&packet);
    let may_wait = !to_server && model.spacing > 0 && offset > start + model.position && offset < model.due;
    let window = u64::from(packet.window) << WSCALE;
    if believed {
        model.edge = model.edge.max(offset + window);
        (model.acked, model.window) = (offset, packet.window);
    }
    if believed || complete {
        model.position = offset.saturating_sub(start);
    }
    prop_assert_eq!(fe.flow().spaces.acked, model.position);
    prop_assert_eq!(fe.flow().edge, model.client(model.edge));
    if out.verdict == SHOT && may_wait {
        return Ok(());
    }
    if inside {
        model.due = offset + model.spacing.min(window / 4);
    }
    let verdict = if to_server { PASS } else { REDIRECT };
    prop_assert_eq!(out.verdict, verdict, "{:?} at {} of {}..{}", &packet, offset, start, end);
    if to_server {
        let expected = Segment { ack: model.local(offset), options: Vec::new(), ..packet.clone() };
        let seen = out.segment();
        prop_assert_eq!(seen.sack_blocks(), sack_to_server);
        prop_assert_eq!(Segment { options: Vec::new(), ..seen }, expected);
    }
    let copy = match (to_server, to_backend) {
        (false, _) => Some(out.segment()),
        (true, true) => Some(fe.copies(1).pop().ok_or_else(|| TestCaseError::fail("no copy has arrived"))?),
        (true, false) => None,
    };
    if let Some(seen) = copy {
        let ack = model.client(model.in_newest(offset));
        // The client's room ends at the same byte, even if the copy's ACK number is raised to the region's start.
        let raised = ack.wrapping_sub(packet.ack) as i32;
        let room = (i64::from(packet.window) << WSCALE) - i64::from(raised.max(0));
        let window = (room.max(0) >> WSCALE) as u16;
        let expected = Segment { to: peer(), ack, window, options: Vec::new(), payload: Vec::new(), ..packet };
        prop_assert_eq!(seen.sack_blocks(), sack_to_backend);
        prop_assert_eq!(Segment { options: Vec::new(), ..seen }, expected);
    }
    model.told |= inside;
    Ok(())
}

fn run_case(fe: &Frontend, case: &Case) -> Result<(), TestCaseError> {
    // Removes what a failed case has left, when proptest looks for a smaller one.
    fe.copies(0);
    fe.events();
    let mut model = Model {
        first: case.first,
        responses: Vec::new(),
        acked: 0,
        position: 0,
        window: 0,
        edge: 0,
        told: false,
        spacing: 0,
        due: 0,
    };
    let mut flow = Flow { server_ack: RCV_NXT, server_edge: RCV_NXT, client_ack: case.first, ..Default::default() };
    (flow.snd_wscale, flow.options) = (WSCALE, FlowState::SACK);
    flow.spaces.status = COMPLETE;
    for (response, reports, word) in &case.responses {
        // The header leaves with the number that the client sees: the lengths of all payloads before it are added.
        let before: u64 = model.responses.iter().map(|response| response.header + response.payload).sum();
        fe.set_flow(&flow);
        let header = Segment::ack(server(), client(), model.local(before), 1).payload(b"header");
        prop_assert_eq!(fe.fe_out(&header).segment().seq, model.client(before));

        model.responses.push(*response);
        model.told = false;
        let start = before + response.header;
        let mut flow_now = fe.flow();
        flow_now.server_ack = RCV_NXT;
        begin(&mut flow_now, model.local(start), model.client(start), response.payload, PEER);
        flow_now.ack_spacing = case.spacing;
        (model.spacing, model.due, model.position) = (case.spacing.into(), 0, 0);
        // The client had room for the header when it was sent.
        model.edge = model.edge.max(start);
        flow_now.edge = model.client(model.edge);
        if *word != Word::Unneeded {
            flow_now.spaces.breaks[((flow_now.spaces.made - 1) % BREAKS) as usize].end = END_WORD;
        }
        fe.set_flow(&flow_now);
        let say = || fe.deliver(client(), PEER, flow_now.handoff);

        for report in reports {
            check(fe, &mut model, report, false)?;
        }
        // The client acknowledges more, until one ACK of the rest may complete the payload.
        let end = start + response.payload;
        while end - model.acked > 1 << 29 {
            check(fe, &mut model, &Report { progress: 999, ..WIDE }, false)?;
        }
        while model.edge < end {
            check(fe, &mut model, &Report { progress: 0, ..WIDE }, false)?;
            check(fe, &mut model, &Report { progress: 500, ..WIDE }, false)?;
        }
        if *word == Word::Before {
            prop_assert_eq!((say(), fe.events()), (PASS, vec![]));
        }
        check(fe, &mut model, &WIDE, true)?;
        if *word == Word::After {
            prop_assert_eq!(fe.events(), vec![]);
            check(fe, &mut model, &Report { progress: -1, ..WIDE }, false)?;
            prop_assert_eq!(say(), PASS);
        }
        prop_assert_eq!(fe.events().pop().map(|(_, acked, kind)| (acked, kind)), Some((response.payload, 1)));
        flow = fe.flow();
        prop_assert_eq!(flow.spaces.status, COMPLETE);
    }
    Ok(())
}

#[test]
fn any_sequence_of_acks_is_split_as_the_model_splits_it() {
    let fe = Frontend::new();
    many(150, case(), |case| run_case(&fe, case));
}
