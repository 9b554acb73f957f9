//! Results as text in a terminal. "Ours" is nginx with Shunt.

use super::outcome::{CaseOutcome, Outcome, TargetOutcome};
use super::subject::Subject;
use super::target::Figure;
use crate::load::Background;
use crate::report::{Align, Paint, Table, number};

/// Line that is printed about a case as soon as it is measured.
pub(super) fn line(outcome: &CaseOutcome) -> String {
    let (name, unit) = (&outcome.name, outcome.unit);
    match outcome.baseline {
        Some(baseline) => format!(
            "{name}: {} against {} {unit}, ratio {:.3}",
            number::plain(outcome.ours),
            number::plain(baseline),
            outcome.ratio
        ),
        None => format!("{name}: {} {unit}", number::plain(outcome.ours)),
    }
}

pub(super) fn table(outcome: &Outcome, paint: Paint) -> String {
    let mut table = Table::new(&[
        ("case", Align::Left),
        ("unit", Align::Left),
        ("baseline", Align::Right),
        ("ours", Align::Right),
        ("ratio", Align::Right),
        ("spread", Align::Right),
        ("kept heap", Align::Right),
        ("HAProxy", Align::Right),
        ("limit", Align::Right),
        ("target", Align::Left),
    ]);
    for case in &outcome.cases {
        let extra = |what| case.extra.get(what).map(|value| number::plain(*value)).unwrap_or_default();
        table.row([
            case.name.clone(),
            case.unit.name().to_owned(),
            case.baseline.map(number::plain).unwrap_or_default(),
            number::plain(case.ours),
            case.baseline.map(|_| format!("{:.3}", case.ratio)).unwrap_or_default(),
            format!("{:.0}%", case.spread() * 100.0),
            extra("kept_heap"),
            extra("haproxy"),
            extra("limit"),
            outcome.targets.iter().find(|one| one.name == case.name).map(|one| judged(one, paint)).unwrap_or_default(),
        ]);
    }
    let met = outcome.targets.iter().filter(|target| target.met).count();
    let mut text = table.show(paint);
    text.push_str(&format!("\n{met} of {} targets met.\n", outcome.targets.len()));
    if let Some(noise) = noise(outcome) {
        text.push_str(&format!("{}\n", paint.bad(&noise)));
    }
    text
}

/// Warning if the figures cannot be trusted, because the measured core was busy before any load.
pub(super) fn noise(outcome: &Outcome) -> Option<String> {
    let worst = outcome.background.values().copied().fold(0.0, f64::max);
    (!Background(worst).is_quiet()).then(|| {
        format!("The measured core was {:.0}% busy before any load: end what else runs on this machine.", worst * 100.0)
    })
}

fn judged(target: &TargetOutcome, paint: Paint) -> String {
    let text = format!("{} {}", target.target, if target.met { "met" } else { "missed" });
    let measured = match target.target.figure {
        Figure::Ratio => String::new(),
        Figure::Growth => format!(" ({:.2})", target.measured),
    };
    if target.met { paint.good(&text) + &measured } else { paint.bad(&text) + &measured }
}

/// Table of the cases and their targets.
pub(super) fn list(cases: &[impl Subject], paint: Paint) -> String {
    let mut table =
        Table::new(&[("case", Align::Left), ("unit", Align::Left), ("target, ours to baseline", Align::Left)]);
    for case in cases {
        let target = case.target().map(|target| target.to_string()).unwrap_or_default();
        table.row([case.name(), case.unit().name().to_owned(), target]);
    }
    table.show(paint)
}

#[cfg(test)]
mod tests {
    use super::super::outcome::tests::outcome;
    use super::*;

    #[test]
    fn the_table_marks_what_is_met_and_missed() {
        let text = table(&outcome(), Paint::never());
        assert!(text.contains("<= 0.8 met"), "{text}");
        assert!(text.contains("growth <= 1.2 missed (1.25)"), "{text}");
        assert!(text.contains("2 of 3 targets met"), "{text}");
    }

    #[test]
    fn a_busy_machine_is_called_one() {
        let mut outcome = outcome();
        assert_eq!(noise(&outcome), None);
        outcome.background.insert("0 intermediates, mtu wire".to_owned(), 0.2);
        assert!(noise(&outcome).unwrap().contains("20% busy"));
    }
}
