//! Tests that cannot run: for want of root they fail, and for want of a feature of the kernel they report it.

use std::io::Write as _;

/// Reports on standard error that `test` does not run here, and why. Only for what this machine's kernel cannot do: a
/// program that is missing is installed by the target that runs the test, and without it the test fails.
///
/// The report bypasses the test harness, which hides what a passing test prints by a macro.
pub fn skipped(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
}

/// Ends a test that is not run by root, with a sentence: it would be counted as good without having looked at anything.
///
/// # Panics
/// When this process is not root.
pub fn needs_root() {
    assert!(
        rustix::process::geteuid().is_root(),
        "network namespaces and BPF programs need root: run `make test`, which uses sudo"
    );
}
