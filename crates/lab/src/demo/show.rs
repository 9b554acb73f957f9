//! The demo's table, its summary in one line, and its picture. A *phase* is one half of the demo: plain nginx, or
//! Shunt.

use super::phase::{LOADS, LoadUse, Phase};
use crate::report::chart::{self, Panel, Picture, Row, Scale, Series};
use crate::report::{Align, Paint, Table, number};
use crate::wire::Wire;

/// Function that returns one of the two values that are shown for a tier.
type Of = fn(&super::phase::TierUse) -> f64;

const BYTES: Of = |tier| tier.bytes;
const CPU: Of = |tier| tier.microseconds;

/// Table of the bytes and the CPU of every tier, with the phases side by side.
pub(super) fn table(phases: &[Phase], paint: Paint) -> String {
    let names: Vec<String> = ["bytes", "CPU"]
        .iter()
        .flat_map(|what| phases.iter().map(move |phase| format!("{what}, {}", phase.name)).chain([String::new()]))
        .collect();
    let mut columns = vec![("body", Align::Left), ("tier", Align::Left)];
    columns.extend(names.iter().map(|name| (name.as_str(), Align::Right)));
    let mut table = Table::new(&columns);
    for (at, (body, _)) in LOADS.iter().enumerate() {
        let loads: Vec<&LoadUse> = phases.iter().map(|phase| &phase.loads[at]).collect();
        for tier in 0..loads[0].tiers.len() {
            let of = |what: Of| loads.iter().map(move |load| what(&load.tiers[tier])).collect::<Vec<f64>>();
            let mut row = vec![(*body).to_owned(), loads[0].tiers[tier].tier.clone()];
            row.extend(cells(&of(BYTES), number::bytes, paint));
            row.extend(cells(&of(CPU), number::microseconds, paint));
            table.row(row);
        }
        let of = |what: Of| loads.iter().map(|load| total(load, what)).collect::<Vec<f64>>();
        let mut row = vec![(*body).to_owned(), paint.bold("all tiers")];
        row.extend(cells(&of(BYTES), number::bytes, paint));
        row.extend(cells(&of(CPU), number::microseconds, paint));
        table.row(row);
    }
    format!("For one response; bytes in and out of a tier's ports; CPU of a core.\n\n{}", table.show(paint))
}

/// Cells with the phases' values, and with the change from the first phase to the second.
fn cells(values: &[f64], show: fn(f64) -> String, paint: Paint) -> Vec<String> {
    let mut cells: Vec<String> = values.iter().map(|value| show(*value)).collect();
    cells.push(match values {
        [plain, ours] => change(*plain, *ours, paint),
        _ => String::new(),
    });
    cells
}

fn change(plain: f64, ours: f64, paint: Paint) -> String {
    let percent = (ours / plain - 1.0) * 100.0;
    let text = format!("{percent:+.0}%");
    if percent < -3.0 {
        paint.good(&text)
    } else if percent > 3.0 {
        paint.bad(&text)
    } else {
        text
    }
}

fn total(load: &LoadUse, of: Of) -> f64 {
    load.tiers.iter().map(of).sum()
}

/// Summary in one line: what a response of the larger body saved.
pub(super) fn savings(plain: &Phase, ours: &Phase) -> String {
    let last = LOADS.len() - 1;
    let saved = |what: Of| {
        let (before, after) = (total(&plain.loads[last], what), total(&ours.loads[last], what));
        (before - after, (1.0 - after / before) * 100.0)
    };
    let ((bytes, bytes_percent), (cpu, cpu_percent)) = (saved(BYTES), saved(CPU));
    format!(
        "Each {} response saved {} on the tiers' ports ({bytes_percent:.0}%) and {} of their CPU ({cpu_percent:.0}%).",
        LOADS[last].0,
        number::bytes(bytes),
        number::microseconds(cpu)
    )
}

pub(super) fn picture(phases: &[Phase], wire: Wire) -> Picture {
    let series = [chart::PLAIN, chart::SHUNT];
    let mut panels = Vec::new();
    for (at, (body, _)) in LOADS.iter().enumerate() {
        panels.push(panel(format!("{body}: bytes in and out"), phases, at, &series, BYTES, number::bytes));
        panels.push(panel(format!("{body}: CPU"), phases, at, &series, CPU, number::microseconds));
    }
    Picture {
        title: "What each tier spends on one response".to_owned(),
        subtitle: format!("client - frontend - intermediate - backend, real nginx, 10 connections, {wire} wire"),
        panels,
        columns: 2,
    }
}

fn panel(title: String, phases: &[Phase], load: usize, series: &[Series], of: Of, show: fn(f64) -> String) -> Panel {
    let tiers = phases[0].loads[load].tiers.iter().enumerate();
    let rows = tiers.map(|(tier, first)| Row {
        label: first.tier.clone(),
        bars: phases
            .iter()
            .zip(series)
            .map(|(phase, of_phase)| (*of_phase, of(&phase.loads[load].tiers[tier])))
            .collect(),
        mark: None,
    });
    Panel { title, rows: rows.collect(), scale: Scale::Panel, show }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::phase::TierUse;

    fn phase(name: &'static str, factor: f64) -> Phase {
        let tier = |tier: &str, size: f64| TierUse {
            tier: tier.to_owned(),
            bytes: size * factor,
            microseconds: size / 1000.0 * factor,
        };
        let load = |(_, bytes): (&str, u64)| LoadUse {
            tiers: vec![tier("frontend", 2.0 * bytes as f64), tier("backend", bytes as f64)],
        };
        Phase { name, loads: LOADS.into_iter().map(load).collect(), faults: Vec::new() }
    }

    #[test]
    fn the_line_says_what_the_largest_body_saved() {
        let line = savings(&phase("plain nginx", 1.0), &phase("Shunt", 0.25));
        assert_eq!(line, "Each 1m response saved 2.25 MiB on the tiers' ports (75%) and 2,359 us of their CPU (75%).");
    }

    #[test]
    fn the_table_has_a_row_for_each_tier_and_their_sum() {
        let phases = [phase("plain nginx", 1.0), phase("Shunt", 0.5)];
        let text = table(&phases, Paint::never());
        assert_eq!(text.lines().count(), 2 + 1 + LOADS.len() * 3, "{text}");
        assert!(text.contains("-50%") && text.contains("all tiers"), "{text}");
        assert_eq!(table(&phases[..1], Paint::never()).lines().count(), text.lines().count());
    }

    #[test]
    fn the_picture_has_a_bar_for_each_tier_and_phase() {
        let picture = picture(&[phase("plain nginx", 1.0), phase("Shunt", 0.5)], Wire::Mtu);
        assert_eq!(picture.panels.len(), 2 * LOADS.len());
        assert!(picture.panels.iter().all(|panel| panel.rows.len() == 2 && panel.rows[0].bars.len() == 2));
    }
}
