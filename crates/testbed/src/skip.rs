//! Tests that cannot run here: without root they fail, and without a feature of the kernel they report that they are
//! skipped.

use std::io::Write as _;

/// Reports on standard error that `test` does not run here, and why. Only for features that this machine's kernel
/// lacks. Missing programs are no reason: the make target that runs a test installs them, and without them the test
/// fails.
///
/// The report is written directly, because the test harness hides the output of `println!` and the like in tests that
/// pass.
pub fn skipped(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
}

/// Fails a test that is not run by root, and says what to do. If this function returned instead, the test would count
/// as passed without having tested anything.
///
/// # Panics
/// When this process is not root.
pub fn needs_root() {
    assert!(
        rustix::process::geteuid().is_root(),
        "network namespaces and BPF programs need root: run `make test`, which uses sudo"
    );
}
