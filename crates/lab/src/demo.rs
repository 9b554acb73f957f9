//! `shunt-lab demo`: loads real servers by real clients, first without Shunt and then with it, and shows what Shunt
//! saves. A *shortcut* is a response whose body bypasses tiers.

mod bodies;
mod kill_backend;
mod phase;
mod show;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

use crate::failover::How;
use crate::lab::Lab;
use crate::report::{Paint, Progress};
use crate::service::{Options, module_file, shuntd_program};
use crate::wire::Wire;

use phase::{Phase, run_phase};
use shunt_sys::{output, say};

/// `shunt-lab demo`
#[derive(Debug, Args)]
pub struct Demo {
    /// File for the chart of the results
    #[arg(long, value_name = "FILE", default_value = "target/shunt-demo.svg")]
    svg: PathBuf,
    /// Kind of the links: `tso` carries segments of 64 KiB whole, `mtu` one packet of 1,500 bytes at a time
    #[arg(long, value_enum, default_value_t = Wire::Mtu)]
    wire: Wire,
    /// Show instead how a download continues after its backend is killed
    #[arg(long, conflicts_with = "plain_only")]
    kill_backend: bool,
    /// With --kill-backend: disconnect the backend's machine instead of killing its processes
    #[arg(long, requires = "kill_backend")]
    cut_off: bool,
    /// Show plain nginx only, without Shunt
    #[arg(long, hide = true)]
    plain_only: bool,
}

/// Faults that the demo found, one sentence each. Empty after a success.
#[derive(Debug, Default)]
pub struct Faults(pub Vec<String>);

impl Demo {
    /// Runs the demo and prints its table.
    ///
    /// # Errors
    /// When something cannot be started, or a file cannot be written. Bodies that arrived wrong, or did not take the
    /// shortcut, are no errors: they are returned as [`Faults`].
    pub fn run(&self) -> Result<Faults> {
        if !self.plain_only {
            shuntd_program()?;
            module_file()?;
        }
        if self.kill_backend {
            return self.run_kill_backend();
        }
        let progress = Progress::to_stderr();
        progress.step("building four hosts: client, frontend, intermediate, backend");
        let lab = Lab::builder().intermediates(1).wire(self.wire).build()?;
        let (files, expected) = bodies::make(&lab)?;
        let mut phases = Vec::new();
        let kinds = [("plain nginx", Options::plain()), ("Shunt", Options::shunt())];
        for (name, options) in kinds.into_iter().take(if self.plain_only { 1 } else { 2 }) {
            phases.push(run_phase(&lab, &files, &expected, name, options, &progress)?);
        }
        progress.clear();
        let paint = Paint::of(&std::io::stdout());
        output::write(&show::table(&phases, paint))?;
        if let [plain, ours] = phases.as_slice() {
            say!("\n{}", paint.bold(&show::savings(plain, ours)))?;
        }
        if let Some(parent) = self.svg.parent() {
            std::fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
        }
        std::fs::write(&self.svg, show::picture(&phases, self.wire).svg())
            .with_context(|| format!("writing {}", self.svg.display()))?;
        say!("Picture: {}", self.svg.display())?;
        let faults: Vec<String> = phases.into_iter().flat_map(|phase: Phase| phase.faults).collect();
        say!("{}", verdict(&faults, expected.len(), paint, progress.seconds()))?;
        Ok(Faults(faults))
    }
}

impl Demo {
    fn run_kill_backend(&self) -> Result<Faults> {
        let faults = kill_backend::run(if self.cut_off { How::CutOff } else { How::Kill })?;
        let paint = Paint::of(&std::io::stdout());
        for fault in &faults {
            say!("{}", paint.bad(&format!("WRONG: {fault}")))?;
        }
        Ok(Faults(faults))
    }
}

fn verdict(faults: &[String], bodies: usize, paint: Paint, seconds: f64) -> String {
    if faults.is_empty() {
        let good = format!("All {bodies} bodies came byte for byte, each on the path that it should take.");
        return format!("{} ({seconds:.0} s)", paint.good(&good));
    }
    let lines: Vec<String> = faults.iter().map(|fault| paint.bad(&format!("WRONG: {fault}"))).collect();
    lines.join("\n")
}
