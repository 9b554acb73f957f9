//! Results as an HTML page: targets first, then the plots, then every figure.

use super::case::{CPU_SIZES, Case};
use super::outcome::{CaseOutcome, Outcome};
use super::show::noise;
use super::subject::Subject;
use super::target::Figure;
use crate::report::chart::{HAPROXY, LIMIT, PLAIN, Panel, Picture, Row, SHUNT, Scale};
use crate::report::html::{Look, Page};
use crate::report::number::{self, size_name};
use crate::wire::Wire;

/// Makes a page that shows the benchmarks one after another.
pub(super) fn page(outcomes: &[Outcome]) -> Page {
    let mut page = Page::new("Shunt, measured");
    for outcome in outcomes {
        benchmark(&mut page, outcome);
    }
    page
}

fn benchmark(page: &mut Page, outcome: &Outcome) {
    let machine = &outcome.machine;
    page.heading(match outcome.bench {
        "tls" => "The shortcut on TLS 1.3",
        "odb" => "On-demand buffers",
        _ => "The shortcut",
    });
    page.paragraph(&format!(
        "{}, {} cores, Linux {}. {} Baseline is nginx with sendfile, keepalive upstreams, large proxy buffers, no temp \
         files, cubic. Baseline and ours ran in turns in this run; figures are medians.",
        machine.processor,
        machine.cores,
        machine.kernel,
        if outcome.quick { "A quick run." } else { "A full run." },
    ));
    if let Some(noise) = noise(outcome) {
        page.paragraph(&noise);
    }
    targets(page, outcome);
    let pictures: Vec<Picture> = (0..=2).filter_map(|intermediates| cpu_picture(outcome, intermediates)).collect();
    if !pictures.is_empty() {
        page.heading("CPU of the whole service for one response");
        page.paragraph(
            "All tiers share one core; wrk with 10 connections has the other. The limit is the cost of a response \
             without a body through all tiers, plus the payload straight from the backend. Each row has its own \
             scale; the red line is the target.",
        );
        pictures.iter().for_each(|picture| page.picture(&picture.svg()));
    }
    for (heading, panels) in [("One tier alone", tier_panels(outcome)), ("Ratios", ratio_panels(outcome))] {
        if !panels.is_empty() {
            page.heading(heading);
            let (title, subtitle) = (heading.to_owned(), String::new());
            page.picture(&Picture { title, subtitle, panels, columns: 2 }.svg());
        }
    }
    figures(page, outcome);
}

fn targets(page: &mut Page, outcome: &Outcome) {
    let rows: Vec<Vec<(String, Look)>> = outcome
        .targets
        .iter()
        .map(|target| {
            vec![
                (target.name.clone(), Look::Text),
                (target.target.to_string(), Look::Text),
                (format!("{:.3}", target.measured), Look::Number),
                if target.met { ("✓ met".to_owned(), Look::Good) } else { ("✗ missed".to_owned(), Look::Bad) },
            ]
        })
        .collect();
    if !rows.is_empty() {
        page.heading("Targets");
        page.table(
            &[("case", Look::Text), ("target", Look::Text), ("measured", Look::Number), ("", Look::Text)],
            &rows,
        );
    }
}

fn find(outcome: &Outcome, case: Case) -> Option<&CaseOutcome> {
    let name = case.name();
    outcome.cases.iter().find(|one| one.name == name)
}

/// Picture of the cases about the whole service's CPU, with a panel per kind of links and a row per body size.
fn cpu_picture(outcome: &Outcome, intermediates: u8) -> Option<Picture> {
    let panel = |wire: Wire| {
        let rows = CPU_SIZES.iter().filter_map(|&size| {
            let case = find(outcome, Case::Cpu { intermediates, size, wire })?;
            let extra = |series, what| case.extra.get(what).map(|value| (series, *value));
            let bars = [case.baseline.map(|value| (PLAIN, value)), extra(HAPROXY, "haproxy"), Some((SHUNT, case.ours))];
            let bars = bars.into_iter().chain([extra(LIMIT, "limit")]).flatten().collect();
            let mark = case.target.zip(case.baseline).map(|(target, baseline)| target.bound() * baseline);
            Some(Row { label: size_name(size), bars, mark })
        });
        Panel { title: format!("{wire} wire"), rows: rows.collect(), scale: Scale::Row, show: number::microseconds }
    };
    let panels: Vec<Panel> = [Wire::Tso, Wire::Mtu].map(panel).into_iter().filter(|one| !one.rows.is_empty()).collect();
    let title = match intermediates {
        0 => "frontend, backend".to_owned(),
        1 => "frontend, intermediate, backend".to_owned(),
        more => format!("frontend, {more} intermediates, backend"),
    };
    (!panels.is_empty()).then(|| Picture { title, subtitle: String::new(), panels, columns: 2 })
}

fn tier_panels(outcome: &Outcome) -> Vec<Panel> {
    let of = |title: &str, wanted: fn(Case) -> bool, show| {
        let cases = outcome.cases.iter().filter(move |case| Case::parse(&case.name).is_some_and(wanted));
        let rows = cases.map(|case| Row {
            label: case.name.clone(),
            bars: case.baseline.map(|value| (PLAIN, value)).into_iter().chain([(SHUNT, case.ours)]).collect(),
            mark: None,
        });
        Panel { title: title.to_owned(), rows: rows.collect(), scale: Scale::Panel, show }
    };
    let panels = [
        of("CPU for one response", |case| matches!(case, Case::TierCpu { .. }), number::microseconds),
        of("Traffic of an intermediate for one response", |case| case == Case::IntermediateBytes, number::bytes),
        of(
            "Responses that one core of the frontend carries",
            |case| matches!(case, Case::Saturated { .. }),
            number::plain,
        ),
        of("Latency at a fixed rate", |case| matches!(case, Case::Latency { .. }), number::microseconds),
        of("KiB/s at an RTT of 50 ms", |case| matches!(case, Case::Wan { .. }), number::plain),
    ];
    panels.into_iter().filter(|panel| !panel.rows.is_empty()).collect()
}

/// Panels with the ratio to the baseline of each case that has a target for this ratio. A line marks the target.
fn ratio_panels(outcome: &Outcome) -> Vec<Panel> {
    let row = |case: &CaseOutcome| {
        let target = case.target.filter(|target| target.figure == Figure::Ratio)?;
        case.baseline?;
        Some(Row { label: case.name.clone(), bars: vec![(SHUNT, case.ratio)], mark: Some(target.bound()) })
    };
    let rows: Vec<Row> = outcome.cases.iter().filter_map(row).collect();
    let panel =
        |title: &str, rows: Vec<Row>| Panel { title: title.to_owned(), rows, scale: Scale::Panel, show: number::plain };
    let (more, less): (Vec<Row>, Vec<Row>) = rows.into_iter().partition(|row| row.mark.is_some_and(|mark| mark > 1.5));
    let panels = [panel("Ours to baseline", less), panel("More is better", more)];
    panels.into_iter().filter(|panel| !panel.rows.is_empty()).collect()
}

fn figures(page: &mut Page, outcome: &Outcome) {
    let row = |case: &CaseOutcome| {
        let extra: Vec<String> =
            case.extra.iter().map(|(what, value)| format!("{what} {}", number::plain(*value))).collect();
        vec![
            (case.name.clone(), Look::Text),
            (case.unit.name().to_owned(), Look::Text),
            (case.baseline.map(number::plain).unwrap_or_default(), Look::Number),
            (number::plain(case.ours), Look::Number),
            (case.baseline.map(|_| format!("{:.3}", case.ratio)).unwrap_or_default(), Look::Number),
            (format!("{:.0}%", case.spread() * 100.0), Look::Number),
            (extra.join(", "), Look::Text),
        ]
    };
    page.heading("Every figure");
    page.paragraph("Spread is the distance from the lowest to the highest run, as a part of the median.");
    let columns = [
        ("case", Look::Text),
        ("unit", Look::Text),
        ("baseline", Look::Number),
        ("ours", Look::Number),
        ("ratio", Look::Number),
        ("spread", Look::Number),
        ("beside it", Look::Text),
    ];
    page.table(&columns, &outcome.cases.iter().map(row).collect::<Vec<_>>());
}

#[cfg(test)]
mod tests {
    use super::super::outcome::tests::outcome;
    use super::*;

    #[test]
    fn the_page_has_marks_plots_and_every_case() {
        let html = page(&[outcome()]).html();
        for text in ["✓ met", "✗ missed", "<svg", "mtu wire", "cpu/0is/64k/mtu", "handoff/64k", "haproxy 90.0"] {
            assert!(html.contains(text), "{text}");
        }
    }

    #[test]
    fn a_target_line_stands_at_the_bound_times_the_baseline() {
        let picture = cpu_picture(&outcome(), 0).unwrap();
        assert_eq!(picture.panels.len(), 1);
        let mark = picture.panels[0].rows[0].mark.unwrap();
        assert!((mark - 80.0).abs() < 1e-9);
        assert!(cpu_picture(&outcome(), 1).is_none());
    }
}
