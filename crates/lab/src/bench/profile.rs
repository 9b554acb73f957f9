//! `--profile CASE`: shows in which functions the service with Shunt spends the measured core's time.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use shunt_sys::say;

use super::bed::{Bed, Plan, Side, with_bed};
use super::subject::Subject;
use crate::load::Cost;
use crate::report::Progress;

const LOAD_TIME: Duration = Duration::from_secs(5);

/// Event that perf samples. Virtual machines often have no hardware counters; the clock works everywhere.
const EVENT: &str = "cpu-clock";

/// Profiles a case. `load` puts the hosts on the cores that the case needs, and loads one side. `load` is called twice:
/// first for a second, so that the hosts are on their cores before perf starts, then under perf.
pub(super) fn run(
    case: impl Subject,
    plan: Plan,
    load: impl Fn(&Bed<'_>, Side, Duration) -> Result<Cost>,
) -> Result<()> {
    let progress = Progress::to_stderr();
    progress.step("building labs");
    with_bed(plan, |bed| {
        load(bed, Side::Ours, Duration::from_secs(1))?;
        let (lab, _) = bed.target(Side::Ours)?;
        let data = lab.dir().join("perf.data");
        let mut record = Command::new("perf");
        record.args(["record", "-e", EVENT, "-F", "4999", "-a", "-g", "-C", &lab.cores().measured.to_string(), "-o"]);
        record.arg(&data);
        progress.step(&format!("{}: loading ours under perf", case.name()));
        let mut perf = lab.switch().spawn(record).context("perf is not installed (Debian: linux-perf)")?;
        // perf needs this time to attach its counters.
        std::thread::sleep(Duration::from_millis(500));
        perf.check_running()?;
        let cost = load(bed, Side::Ours, LOAD_TIME)?;
        perf.stop_with(Signal::INT)?;
        progress.clear();
        say!(
            "{}: {:.1} us of core {} per response, {:.0} responses/s\n",
            case.name(),
            cost.microseconds(&bed.background()),
            lab.cores().measured,
            cost.report.requests_per_second
        )?;
        for (heading, sort, children) in [
            ("Itself", "comm,symbol", "--no-children"),
            ("Including the functions that it called", "symbol", "--children"),
        ] {
            say!("{heading}:")?;
            report(&data, sort, children)?;
        }
        Ok(())
    })
}

fn report(data: &Path, sort: &str, children: &str) -> Result<()> {
    let mut report = Command::new("perf");
    report
        .args(["report", "--stdio", children, "-g", "none", "--percent-limit", "0.6", "--sort", sort, "-i"])
        .arg(data);
    let output = report.output().context("running perf report")?;
    ensure!(output.status.success(), "perf report: {}", String::from_utf8_lossy(&output.stderr).trim());
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    // perf ends a line with two empty columns.
    for line in lines.take(50) {
        say!("{}", line.trim_end_matches([' ', '-']))?;
    }
    say!()?;
    Ok(())
}
