//! Reports, on standard error, of tests that cannot run on a machine, and why.

use std::io::Write as _;

/// Reports that `test` does not run here, and why.
///
/// The report bypasses the test harness, which hides what a passing test prints by a macro.
pub fn skipped(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
}

/// Whether this process is root. If not, reports that `test` is skipped.
#[must_use]
pub fn may_run(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped(test, "network namespaces and BPF programs take root (make test)");
    }
    root
}

/// Whether the test of the calling thread may run, as [`may_run`]: the harness names threads after their tests.
#[must_use]
pub fn root() -> bool {
    may_run(std::thread::current().name().unwrap_or("a test"))
}
