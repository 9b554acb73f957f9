//! Runs tests with random cases. The seed of the random numbers is printed. It is read from the environment variable
//! SHUNT_SEED if that is set to a number.

use std::cell::RefCell;
use std::fmt::Debug;
use std::time::{SystemTime, UNIX_EPOCH};

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Runs `try_one` with `cases` random cases.
///
/// # Panics
/// If a case fails. The message has the smallest failing case that proptest has found.
pub fn many<T: Debug>(cases: u32, of: impl Strategy<Value = T>, try_one: impl FnMut(&T) -> Result<(), TestCaseError>) {
    let seed = std::env::var("SHUNT_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(new_seed);
    println!("SHUNT_SEED={seed}");
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 300, ..Config::default() };
    let try_one = RefCell::new(try_one);
    TestRunner::new_with_rng(config, rng)
        .run(&of, |case| (try_one.borrow_mut())(&case))
        .unwrap_or_else(|failure| panic!("SHUNT_SEED={seed}: {failure}"));
}

fn new_seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_nanos() as u64
}
