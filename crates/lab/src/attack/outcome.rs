//! Results of an attack: the table, the file, and the list of what is wrong. In a *turn*, one service (nginx with
//! Shunt, or plain nginx) is under attack for some seconds.

use std::fmt::Write as _;

use serde::Serialize;

use super::side::Turn;
use crate::report::{Align, Machine, Paint, Sample, Table, number};
use crate::soak::Case;

/// Largest allowed ratio of the honest clients' p99 latency with Shunt to that with plain nginx.
const P99_RATIO: f64 = 1.5;
/// Largest allowed ratio, with Shunt to without, of the bytes that the service sends towards the greedy client per byte
/// that reaches this client. The median of the turns counts, because the losses on the greedy client's link are random.
const DRAWN_RATIO: f64 = 1.1;
/// Largest number of faults that are printed, one a line.
const WORDS_SHOWN: usize = 12;

/// Results of an attack.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    bench: &'static str,
    machine: Machine,
    seed: u64,
    minutes: f64,
    cases: Vec<Case>,
    pub(super) wrong: Vec<String>,
    /// Last lines of the logs, and the counters of Shunt's daemons (agents). Empty if nothing is wrong.
    pub(super) explained: String,
    #[serde(skip)]
    rows: Vec<[String; 4]>,
}

/// The turns of one service, added up.
struct Sum {
    responses: u64,
    wrong: Vec<String>,
    p99_ms: Sample,
    drawn_per_received: Sample,
}

impl Sum {
    fn of<'a>(turns: impl Iterator<Item = &'a Turn> + Clone) -> Self {
        let total = |count: fn(&Turn) -> u64| turns.clone().map(count).sum::<u64>();
        Self {
            responses: total(|turn| turn.seen.responses),
            wrong: turns.clone().flat_map(|turn| turn.seen.wrong.clone()).collect(),
            p99_ms: turns.clone().map(|turn| turn.seen.latency_ns.value_at_quantile(0.99) as f64 / 1e6).collect(),
            drawn_per_received: turns.map(Turn::drawn_per_received).collect(),
        }
    }
}

impl Outcome {
    pub(super) fn of(
        seed: u64,
        minutes: f64,
        turns: &[(Turn, Turn)],
        ended: &[Vec<String>; 2],
        shortcuts: u64,
    ) -> Self {
        let (ours, plain) = (Sum::of(turns.iter().map(|turn| &turn.0)), Sum::of(turns.iter().map(|turn| &turn.1)));
        let p99_ratio = ours.p99_ms.ratios_to(&plain.p99_ms).median();
        let drawn_ratio = ours.drawn_per_received.ratios_to(&plain.drawn_per_received).median();
        let total = |count: fn(&Turn) -> u64| turns.iter().map(|turn| count(&turn.0)).sum::<u64>() as f64;
        let mut wrong: Vec<String> = ended[0].iter().map(|one| format!("ended: {one}")).collect();
        wrong.extend(ours.wrong.iter().map(|one| format!("not whole: {one}")));
        if p99_ratio.is_nan() || p99_ratio > P99_RATIO {
            wrong.push(format!("others' p99 latency is {p99_ratio:.2} times plain nginx's, more than {P99_RATIO}"));
        }
        if drawn_ratio.is_nan() || drawn_ratio > DRAWN_RATIO {
            wrong
                .push(format!("{drawn_ratio:.2} times as many bytes drawn per byte received, more than {DRAWN_RATIO}"));
        }
        if shortcuts == 0 {
            wrong.push("no response took the shortcut during the attack".to_owned());
        }
        let cases = vec![
            Case::of("ended", "processes", ended[0].len() as f64),
            Case::of("not-whole", "responses", ours.wrong.len() as f64),
            Case::of("responses", "responses", ours.responses as f64),
            Case::of("shortcuts", "responses", shortcuts as f64),
            Case::of("p99-ratio", "times plain nginx", p99_ratio),
            Case::of("drawn-per-received", "bytes", ours.drawn_per_received.median()),
            Case::of("drawn-ratio", "times plain nginx", drawn_ratio),
            Case::of("packets", "packets", total(|turn| turn.packets)),
            Case::of("messages", "messages", total(|turn| turn.messages)),
            Case::of("frames", "frames", total(|turn| turn.frames)),
        ];
        let row = |what: &str, ours: String, plain: String, bound: String| [what.to_owned(), ours, plain, bound];
        let count = |count: usize| number::count(count as u64);
        let rows = vec![
            row("ended processes", count(ended[0].len()), count(ended[1].len()), "0".into()),
            row("responses not whole", count(ours.wrong.len()), count(plain.wrong.len()), "0".into()),
            row("of responses", number::count(ours.responses), number::count(plain.responses), String::new()),
            row("of them shortcuts", number::count(shortcuts), String::new(), "some".into()),
            row(
                "p99 latency, median of turns",
                format!("{:.1} ms", ours.p99_ms.median()),
                format!("{:.1} ms", plain.p99_ms.median()),
                format!("{p99_ratio:.2} of {P99_RATIO}"),
            ),
            row(
                "bytes drawn per byte received, median of turns",
                format!("{:.3}", ours.drawn_per_received.median()),
                format!("{:.3}", plain.drawn_per_received.median()),
                format!("{drawn_ratio:.2} of {DRAWN_RATIO}"),
            ),
        ];
        let (machine, explained) = (Machine::this(), String::new());
        Self { bench: "attack", machine, seed, minutes, cases, wrong, explained, rows }
    }

    pub(super) fn show(&self, paint: Paint) -> String {
        let heads =
            [("what", Align::Left), ("Shunt", Align::Right), ("plain nginx", Align::Right), ("bound", Align::Right)];
        let mut table = Table::new(&heads);
        for row in &self.rows {
            table.row(row.clone());
        }
        let mut text = table.show(paint);
        for wrong in self.wrong.iter().take(WORDS_SHOWN) {
            let _ = writeln!(text, "{} {wrong}", paint.bad("WRONG"));
        }
        if self.wrong.len() > WORDS_SHOWN {
            let _ = writeln!(text, "and {} more", self.wrong.len() - WORDS_SHOWN);
        }
        if self.wrong.is_empty() {
            let _ = writeln!(text, "{}", paint.good("No faults found."));
        }
        text + &self.explained
    }
}
