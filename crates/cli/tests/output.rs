//! Tests of `shunt` with a standard output that cannot be written to, or that nobody reads.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn shunt(arguments: &[&str], output: Stdio) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shunt"));
    command.args(arguments).stdout(output).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap()
}

/// Returns arguments of commands that succeed and print something. The first one makes the directory `authority`.
fn all(authority: &str) -> [Vec<&str>; 2] {
    [vec!["ca", "init", authority], vec!["run", "--explain", "true"]]
}

fn authority(name: &str) -> String {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_full_disk_is_said_in_a_sentence() {
    let authority = authority("full");
    for arguments in all(&authority) {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = shunt(&arguments, full.into());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("shunt: cannot write to standard output: No space left"), "{arguments:?}: {said}");
        assert!(!said.contains("panicked") && output.status.code() == Some(1), "{arguments:?}: {said}");
    }
    std::fs::remove_dir_all(authority).unwrap();
}

#[test]
fn a_reader_that_closes_early_causes_no_error() {
    let authority = authority("enough");
    for arguments in all(&authority) {
        let (reads, writes) = std::io::pipe().unwrap();
        drop(reads);
        let output = shunt(&arguments, writes.into());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{arguments:?}: {said}");
    }
    std::fs::remove_dir_all(authority).unwrap();
}
