//! Tests of the command line: a standard output that cannot be written, or that nobody reads, and wrong use.

use std::fs::File;
use std::process::{Command, Output, Stdio};

/// Commands that only print something.
const PRINTING: [&[&str]; 3] =
    [&["bench", "faults", "--list"], &["bench", "mistakes", "--expected"], &["bench", "disc", "--list"]];

fn shunt_lab(arguments: &[&str], output: Stdio) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shunt-lab"));
    command.args(arguments).stdout(output).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap()
}

#[test]
fn a_full_disk_is_said_in_a_sentence() {
    for arguments in PRINTING {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = shunt_lab(arguments, full.into());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("shunt-lab: cannot write to standard output: No space left"), "{arguments:?}: {said}");
        assert!(!said.contains("panicked") && output.status.code() == Some(1), "{arguments:?}: {said}");
    }
}

#[test]
fn a_reader_that_closes_early_causes_no_error() {
    for arguments in PRINTING {
        let (reads, writes) = std::io::pipe().unwrap();
        drop(reads);
        let output = shunt_lab(arguments, writes.into());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{arguments:?}: {said}");
    }
}

#[test]
fn arguments_that_make_no_sense_end_with_2() {
    let wrong: [&[&str]; 3] =
        [&["simulate", "--seconds", "0"], &["bench", "disc", "--list", "--case", "none/*"], &["none"]];
    for arguments in wrong {
        let output = shunt_lab(arguments, Stdio::null());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && !said.is_empty(), "{arguments:?}: {said}");
    }
}
