//! Tests that cannot run on a machine say so, and why, on standard error.

use std::io::Write as _;

/// Says that `test` does not run here, and why.
///
/// Written past the test harness, which shows nothing of what a passing test prints by a macro.
pub fn skipped(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
}

/// Whether this is root; says that `test` is skipped if not.
#[must_use]
pub fn may_run(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped(test, "network namespaces and BPF programs take root (make test)");
    }
    root
}

/// The same for the test whose thread asks: the harness names threads after their tests.
#[must_use]
pub fn root() -> bool {
    may_run(std::thread::current().name().unwrap_or("a test"))
}
