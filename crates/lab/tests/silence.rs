//! A sample of the table of silence (crates/lab/src/silence/): parts of the service that are stopped, cut off or slow.
//! `make soak` runs every row.

mod service;

use anyhow::{Result, ensure};
use service::needs_root;
use shunt_lab::pace::Pace;
use shunt_lab::report::Progress;
use shunt_lab::silence::{Manner, Part, run_rows};

const SAMPLE: &[(Part, Manner)] = &[
    (Part::BackendAgent, Manner::Stopped),
    (Part::FrontendAgent, Manner::Blackholed),
    (Part::Disk, Manner::Stopped),
    (Part::Disk, Manner::Slow),
    (Part::Link, Manner::Blackholed),
    (Part::Intermediate, Manner::Slow),
    (Part::HolderStore, Manner::Stopped),
];

#[test]
fn who_has_nothing_to_do_with_a_silence_waits_for_nobody() -> Result<()> {
    needs_root();
    let outcomes = run_rows(SAMPLE, Pace::BesideOthers, &Progress::to_stderr())?;
    let bad: Vec<_> = outcomes.iter().filter(|outcome| !outcome.is_good()).collect();
    ensure!(bad.is_empty(), "{bad:#?}");
    Ok(())
}
