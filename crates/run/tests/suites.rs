//! Runs a few files of other projects' test suites, which must give the same results under `shunt run` as without.
//! suites/run.py runs all of them.

use std::process::Command;

#[test]
fn a_few_files_of_nginx_and_haproxy_say_the_same() {
    shunt_testbed::needs_root();
    let runner = concat!(env!("CARGO_MANIFEST_DIR"), "/suites/run.py");
    let run = Command::new(runner).args(["--quick", "--fetched", "nginx", "haproxy"]).status().unwrap();
    assert!(run.success(), "{runner} --quick: {run}");
}
