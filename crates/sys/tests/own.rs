//! Test of `is_own`. It is the only test in its process: another one could open a descriptor whose number this test has
//! just freed.

use std::os::fd::{AsFd, AsRawFd, RawFd};

use shunt_sys::own::{OwnFd, is_own};

#[test]
fn a_descriptor_is_own_as_long_as_it_lives() {
    let own = OwnFd::new(std::fs::File::open("/dev/null").unwrap().into());
    let number = own.as_fd().as_raw_fd();
    assert!(number >= 512, "{number} is in the way of programs that count on low numbers");
    assert!(is_own(number) && !is_own(number + 1));
    drop(own);
    assert!(!is_own(number));
    assert!(!is_own(-1) && !is_own(RawFd::MAX));
}
