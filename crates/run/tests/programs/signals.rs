//! Signals whose handlers write, at any moment: a handler's calls wait for nothing that its own thread holds.

use std::process::Stdio;
use std::time::{Duration, Instant};

use shunt_odb::store::Limits;

use crate::actors::built;
use crate::bed::{Bed, Program, free_address};

/// Blocks of 64 KiB.
const BLOCKS: u32 = 50_000;

fn storm(hertz: u32) {
    let Some(bed) = Bed::of(2, Limits::default()) else { return };
    let program = built(&bed.path(), "storm.c", "storm", "gcc", &["-O2", "-Wall"]);
    let port = free_address().port().to_string();
    let mut ends = [("serve", 1), ("ask", 0)].map(|(role, machine)| {
        let mut command = bed.machine(machine).under_shunt(program.to_str().unwrap());
        command.args([role, &port, &BLOCKS.to_string(), &hertz.to_string()]).stdin(Stdio::null());
        (role, Program(command.spawn().unwrap()))
    });
    let until = Instant::now() + Duration::from_secs(110);
    let mut absent = 0;
    for (role, program) in &mut ends {
        let status = loop {
            if let Some(status) = program.0.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < until, "{hertz} signals a second: {role} hangs");
            absent = absent.max(bed.machine(0).program_counted("storm", "received_absent"));
            std::thread::sleep(Duration::from_millis(2));
        };
        assert!(status.success(), "{hertz} signals a second: {role} ended with {status}");
    }
    assert!(absent > 0, "nothing was absent while signals came");
}

#[test]
fn handlers_that_write_hang_nobody() {
    storm(1000);
    storm(100);
}
