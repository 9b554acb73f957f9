//! A program that sends blocks from one machine to itself on another.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::bed::{Bed, Program, free_address};

/// Starts it as `serve PORT MORE` and as `ask PORT MORE`, and waits until both have ended well: they know the bytes themselves. Some bytes
/// were absent where they came, or this would test something else.
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
