//! Runs a test program as two processes on two machines. One process sends blocks to the other. A *reference* goes over
//! a connection in place of bytes. The receiver fetches these bytes from the sender's machine if it needs them.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::bed::{Bed, Program, free_address};

/// Starts the program as `serve PORT MORE` and as `ask PORT MORE`, and waits until both have ended with success. They
/// check the bytes themselves. Asserts that some bytes came as references: otherwise the test would test nothing.
pub fn transfer(bed: &Bed, program: &Path, more: &[String], what: &str) {
    let name = program.file_name().unwrap().to_str().unwrap();
    let port = free_address().port().to_string();
    let mut ends = [("serve", 1), ("ask", 0)].map(|(role, machine)| {
        let mut command = bed.machine(machine).under_shunt(program.to_str().unwrap());
        command.args([role, &port]).args(more).stdin(Stdio::null());
        (role, Program(command.spawn().unwrap()))
    });
    let deadline = Instant::now() + Duration::from_secs(110);
    let mut absent = 0;
    for (role, program) in &mut ends {
        program.ends_well(deadline, &format!("{what}: {role}"), || {
            absent = absent.max(bed.machine(0).program_counted(name, "received_absent"));
        });
    }
    assert!(absent > 0, "{what}: nothing was absent");
}
