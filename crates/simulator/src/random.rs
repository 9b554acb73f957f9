//! Random numbers from a seed.

use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Random generator of one history.
pub struct Random(ChaCha8Rng);

impl Random {
    /// Returns the generator for a seed.
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Returns a random number below `end`, which must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0.next_u64() % end
    }

    /// Returns a random number from `least` to `most`, both included.
    pub fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    /// Returns true with a probability of `often` in a million.
    pub fn in_a_million(&mut self, often: u64) -> bool {
        self.below(1_000_000) < often
    }

    /// Returns a random time from `least` to `most`.
    pub fn time(&mut self, least: Duration, most: Duration) -> Duration {
        Duration::from_nanos(self.between(least.as_nanos() as u64, most.as_nanos() as u64))
    }

    /// Returns 16 random bytes.
    pub fn key(&mut self) -> [u8; 16] {
        let mut key = [0; 16];
        self.0.fill_bytes(&mut key);
        key
    }

    /// Returns a random 32-bit number.
    pub fn word(&mut self) -> u32 {
        self.0.next_u32()
    }
}
