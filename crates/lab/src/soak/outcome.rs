//! Results of a soak: the table, and the file.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::health::Health;
use crate::report::{Align, Machine, Paint, Table, number};

/// A figure in the JSON file, in the form that all benchmarks use.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Case {
    name: &'static str,
    unit: &'static str,
    ours: f64,
    ratio: f64,
    runs: BTreeMap<&'static str, [f64; 1]>,
}

impl Case {
    pub(crate) fn of(name: &'static str, unit: &'static str, value: f64) -> Self {
        Self { name, unit, ours: value, ratio: value, runs: BTreeMap::from([("ours", [value])]) }
    }
}

/// Results of a soak.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    pub(super) bench: &'static str,
    pub(super) machine: Machine,
    pub(super) quick: bool,
    pub(super) seed: u64,
    pub(super) minutes: f64,
    pub(super) cases: Vec<Case>,
    /// Number of responses that were not whole, by kind of ending.
    pub(super) endings: BTreeMap<String, u64>,
    /// Number of times that each disturbance was made.
    pub(super) disturbances: BTreeMap<&'static str, u64>,
    /// Processes at each of [`super::TIMES`].
    pub(super) health: BTreeMap<&'static str, Health>,
    /// Everything that the service held at the end: the number of each kind of thing.
    pub(super) held: BTreeMap<String, u64>,
    pub(super) wrong: Vec<String>,
}

/// Largest number of faults that are printed, one a line.
const WORDS_SHOWN: usize = 20;

impl Outcome {
    pub(super) fn show(&self, paint: Paint) -> String {
        let mut table = Table::new(&[("what", Align::Left), ("value", Align::Right), ("unit", Align::Left)]);
        for case in &self.cases {
            table.row([case.name.to_owned(), number::plain(case.ours), case.unit.to_owned()]);
        }
        let mut text = table.show(paint);
        let list = |counts: &mut dyn Iterator<Item = (String, u64)>| {
            counts.map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
        };
        let disturbances = self.disturbances.iter().map(|(name, count)| ((*name).to_owned(), *count));
        let _ = writeln!(text, "\ndisturbances: {}", list(&mut { disturbances }));
        let endings = self.endings.iter().map(|(name, count)| (name.clone(), *count));
        let _ = writeln!(text, "responses that were not whole: {}\n", list(&mut { endings }));
        text.push_str(&self.processes().show(paint));
        if self.wrong.is_empty() {
            let _ = writeln!(text, "\n{}", paint.good("No faults found."));
        }
        for wrong in self.wrong.iter().take(WORDS_SHOWN) {
            let _ = writeln!(text, "{} {wrong}", paint.bad("WRONG"));
        }
        if self.wrong.len() > WORDS_SHOWN {
            let _ = writeln!(text, "and {} more", self.wrong.len() - WORDS_SHOWN);
        }
        text
    }

    /// Table of memory and descriptors of the processes that exist at the end.
    fn processes(&self) -> Table {
        let mut columns = vec![("host", Align::Left), ("process", Align::Left)];
        columns.extend(super::TIMES.map(|time| (time, Align::Right)));
        let mut table = Table::new(&columns);
        for process in self.health.get(super::TIMES[4]).map(|health| health.0.as_slice()).unwrap_or_default() {
            let at = |time: &str| {
                let then = self.health.get(time)?.0.iter().find(|then| then.pid == process.pid)?;
                Some(format!("{} KiB, {} fds", number::count(then.memory_kib), then.descriptors))
            };
            let cells = super::TIMES.iter().map(|time| at(time).unwrap_or_default());
            table.row([process.host.clone(), process.kind.to_owned()].into_iter().chain(cells));
        }
        table
    }
}
