//! The order of the library's locks, checked: a thread that breaks it ends the process, with a message.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use shunt_process::system::inside::{Lock, outside};
use shunt_process::system::ranks::{self, Rank};

static SEGMENT: Lock<u32> = Lock::new(Rank::Segment, 0);
static ABSENT: Lock<u32> = Lock::new(Rank::Absent, 0);

/// Environment variable of a process that runs one test. If it is set, the process breaks the order of locks, as the
/// test describes.
const WRONG: &str = "SHUNT_WRONG_STEP";

/// Runs a test in another process, which is to end by SIGBUS. Returns what it wrote to stderr.
fn ends_with(test: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", test, "--nocapture"]).env(WRONG, "1").output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn is_started_for_it() -> bool {
    let is_so = std::env::var_os(WRONG).is_some();
    if is_so {
        ranks::check();
    }
    is_so
}

#[test]
fn locks_are_taken_from_the_outermost_in() {
    ranks::check();
    for _ in 0..2 {
        let segment = SEGMENT.lock();
        let mut absent = ABSENT.lock();
        *absent += *segment;
    }
    drop(ABSENT.lock());
    drop(SEGMENT.lock());
    outside(|| ());
}

#[test]
fn a_lock_that_is_only_tried_has_no_order() {
    ranks::check();
    let absent = ABSENT.try_lock();
    let segment = SEGMENT.try_lock();
    drop((absent, segment));
    outside(|| ());
}

#[test]
fn a_lock_out_of_order_ends_the_process() {
    if is_started_for_it() {
        let _absent = ABSENT.lock();
        drop(SEGMENT.lock());
        return;
    }
    assert!(ends_with("a_lock_out_of_order_ends_the_process").contains("lock Segment is taken out of order"));
}

#[test]
fn a_lock_twice_ends_the_process() {
    if is_started_for_it() {
        let _one = SEGMENT.lock();
        drop(SEGMENT.lock());
        return;
    }
    assert!(ends_with("a_lock_twice_ends_the_process").contains("lock Segment is taken out of order"));
}

#[test]
fn a_thread_that_waits_with_a_lock_ends_the_process() {
    if is_started_for_it() {
        let _absent = ABSENT.lock();
        outside(|| ());
        return;
    }
    assert!(ends_with("a_thread_that_waits_with_a_lock_ends_the_process").contains("waits while it holds a lock"));
}
