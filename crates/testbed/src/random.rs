//! Random numbers that follow from a seed.

/// SplitMix64 generator (Steele, Lea and Flood, OOPSLA 2014): small, and the same on every machine.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Generator for one of the streams of random numbers that follow from a seed. Each stream has other numbers.
    #[must_use]
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut seeded = Self(seed);
        let mixed = seeded.next();
        Self(mixed ^ Self(stream).next())
    }

    #[expect(clippy::should_implement_trait, reason = "it never ends")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Random number from 0 to below `bound`.
    ///
    /// # Panics
    /// When `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Random number from 0 to below 1.
    pub fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Returns the named seed, or else the environment's `SHUNT_SEED`, or else a random one.
#[must_use]
pub fn seed_or_random(named: Option<u64>) -> u64 {
    let from_environment = || std::env::var("SHUNT_SEED").ok()?.parse().ok();
    named.or_else(from_environment).unwrap_or_else(|| {
        let mut bytes = [0; 8];
        // The kernel always fills a buffer as short as this one (getrandom(2)), so the result is not checked.
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        u64::from_ne_bytes(bytes)
    })
}
