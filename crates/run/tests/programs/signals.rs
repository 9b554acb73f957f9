//! Signals that come at any moment, and whose handlers write. A handler may interrupt the library, so the handler's
//! calls of the library must not wait for a lock that the interrupted thread holds.

use shunt_odb::store::Limits;

use crate::actors::built;
use crate::bed::Bed;
use crate::transfer::transfer;

/// Number of blocks of 64 KiB that are sent.
const BLOCKS: u32 = 50_000;

#[test]
fn handlers_that_write_hang_nobody() {
    for hertz in [1000, 100] {
        let bed = Bed::of(2, Limits::default());
        let program = built(&bed.path(), "storm.c", "storm", "gcc", &["-O2", "-Wall"]);
        transfer(&bed, &program, &[BLOCKS.to_string(), hertz.to_string()], &format!("{hertz} signals a second"));
    }
}
