//! A sample of the fault table (crates/lab/src/faults/): each step of a response, and faults of each part of the
//! service. `make soak` runs all cells.

mod service;

use anyhow::{Result, ensure};
use service::needs_root;
use shunt_lab::faults::{Fault, Step, run_cells};
use shunt_lab::pace::Pace;
use shunt_lab::report::Progress;

const SAMPLE: &[(Step, Fault)] = &[
    (Step::Offered, Fault::IntermediateKilled),
    (Step::Begun, Fault::FrontendAgentRestarted),
    (Step::Offered, Fault::FrontendAgentKilled),
    (Step::Begun, Fault::FrontendAgentKilled),
    (Step::Claimed, Fault::FrontendAgentKilled),
    (Step::Sending, Fault::FrontendAgentKilled),
    (Step::Queued, Fault::FrontendAgentKilled),
    (Step::Parked, Fault::FrontendAgentKilled),
    (Step::Next, Fault::FrontendAgentKilled),
    (Step::Claimed, Fault::BackendAgentStopped),
    (Step::Offered, Fault::BackendAgentKilled),
    (Step::Sending, Fault::BackendAgentKilled),
    (Step::Offered, Fault::BackendAgentRestarted),
    (Step::Offered, Fault::FrontendAgentRestarted),
    (Step::Queued, Fault::BackendServerKilled),
    (Step::Sending, Fault::FrontendServerUpgraded),
    (Step::Sending, Fault::BackendCutBriefly),
    (Step::Asked, Fault::BackendServerReloaded),
    (Step::Parked, Fault::SessionLost),
    (Step::Next, Fault::FrontendWorkerKilled),
    (Step::Sending, Fault::DiskReadError),
];

#[test]
fn cells_of_the_fault_table() -> Result<()> {
    needs_root();
    let outcomes = run_cells(SAMPLE, Pace::BesideOthers, &Progress::to_stderr())?;
    let bad: Vec<_> = outcomes.iter().filter(|outcome| !outcome.is_good()).collect();
    ensure!(bad.is_empty(), "{bad:#?}");
    Ok(())
}
