//! The table of operators' mistakes (crates/lab/src/mistakes/). Each mistake is reported to the operator, and no
//! response fails because of it. Rows of the list `KNOWN` are excepted.

mod service;

use anyhow::{Result, ensure};
use service::needs_root;
use shunt_lab::mistakes::{KNOWN, all, run_all};
use shunt_lab::report::Progress;

#[test]
fn a_mistake_is_told_and_costs_no_response() -> Result<()> {
    needs_root();
    let outcomes = run_all(&all(), &Progress::to_stderr());
    let known = |name: &str| KNOWN.iter().any(|known| known.name == name);
    let bad: Vec<_> = outcomes.iter().filter(|outcome| !outcome.is_good() && !known(outcome.name)).collect();
    ensure!(bad.is_empty(), "{bad:#?}");
    let always = |name: &str| KNOWN.iter().any(|known| known.name == name && known.always);
    let mended: Vec<_> = outcomes.iter().filter(|outcome| outcome.is_good() && always(outcome.name)).collect();
    ensure!(
        mended.is_empty(),
        "these rows are good now: take them out of KNOWN (crates/lab/src/mistakes/known.rs) {mended:#?}"
    );
    Ok(())
}
