//! A program that sends blocks from one machine to itself on another.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::bed::{Bed, Program, free_address};

/// Starts it as `serve PORT MORE` and as `ask PORT MORE`, and waits until both have ended well: they know the bytes themselves. Most bytes
/// of them were absent where they came, or the test is one of something else.
pub fn transfer(bed: &Bed, program: &Path, more: &[String], what: &str) {
    let name = program.file_name().unwrap().to_str().unwrap();
    let port = free_address().port().to_string();
    let mut ends = [("serve", 1), ("ask", 0)].map(|(role, machine)| {
        let mut command = bed.machine(machine).under_shunt(program.to_str().unwrap());
        command.args([role, &port]).args(more).stdin(Stdio::null());
        (role, Program(command.spawn().unwrap()))
    });
    let until = Instant::now() + Duration::from_secs(110);
    let mut absent = 0;
    for (role, program) in &mut ends {
        let status = loop {
            if let Some(status) = program.0.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < until, "{what}: {role} hangs");
            absent = absent.max(bed.machine(0).program_counted(name, "received_absent"));
            std::thread::sleep(Duration::from_millis(2));
        };
        assert!(status.success(), "{what}: {role} ended with {status}");
    }
    assert!(absent > 0, "{what}: nothing was absent");
}
