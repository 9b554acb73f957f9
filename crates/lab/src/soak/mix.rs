//! Behaviour of clients, drawn from a seed: heavy-tailed sizes and lifetimes, slow readers, long pauses, aborts.

use std::time::Duration;

use crate::random::Random;

/// Number of files. There is one for each power of two from 1 KiB to 16 MiB. All but the first are a little longer than
/// their power of two.
const POWERS: u32 = 15;
/// Factor by which bodies become rarer when their length doubles. P(size > x) falls as 1 / sqrt(x), so a few bodies
/// have most of the bytes.
const RARER: f64 = std::f64::consts::FRAC_1_SQRT_2;
/// Largest number of responses on one connection.
const LONGEST_LIFE: u64 = 300;

/// A file of the service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    pub name: String,
    pub size: u64,
}

/// All files, the shortest first.
#[must_use]
pub fn files() -> Vec<File> {
    let size = |power: u32| (1024 << power) + 37 * u64::from(power);
    (0..POWERS).map(|power| File { name: format!("soak-{power}"), size: size(power) }).collect()
}

/// Speed at which a client reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reader {
    /// Reads as fast as data arrives.
    Fast,
    /// Reads about this many bytes per second.
    Slow(u64),
    /// Pauses for this long after the first bytes of each response, so that the window closes.
    Pausing(Duration),
}

/// Manner in which a client leaves before the end of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Abort {
    /// The client closes the connection: its kernel answers later data with resets.
    Close,
    /// The client resets the connection (SO_LINGER with 0 s).
    Reset,
}

/// Behaviour of one connection.
#[derive(Debug, Clone)]
pub struct Life {
    /// The requests in their order. Each has a flag (ask the second backend, not the first), and an index of [`files`].
    pub requests: Vec<(bool, usize)>,
    pub reader: Reader,
    /// Size of the receive buffer in bytes, if it is to be small. `None`: the kernel's default.
    pub receive_buffer: Option<usize>,
    /// How the client leaves early, if it does: the index of the request whose body it does not read to the end, the
    /// fraction of this body that it reads, and the manner.
    pub abort: Option<(usize, f64, Abort)>,
    /// Pause between an answer and the next request.
    pub think: Duration,
}

impl Life {
    /// Draws a random behaviour.
    pub fn draw(random: &mut Random) -> Self {
        // P(at least n) = 1 / n: half of all connections have one request, some have hundreds.
        let count = (1.0 / (1.0 - random.part())).min(LONGEST_LIFE as f64) as usize;
        let reader = match random.part() {
            part if part < 0.80 => Reader::Fast,
            part if part < 0.95 => Reader::Slow((65_536.0 * 32f64.powf(random.part())) as u64),
            _ => Reader::Pausing(Duration::from_secs_f64(1.0 + 5.0 * random.part())),
        };
        let receive_buffer = (random.part() < 0.2).then(|| (16 << 10) << (random.next() % 3));
        // Slow readers get no long bodies. Otherwise, after some time nearly all connections would be slow readers of
        // long bodies.
        let largest = match (reader, receive_buffer) {
            (Reader::Slow(rate), _) => largest_below(rate * 10),
            (_, Some(_)) => largest_below(4 << 20),
            _ => POWERS as usize - 1,
        };
        let requests = (0..count).map(|_| (random.part() < 0.5, draw_file(random).min(largest))).collect();
        let kind = if random.part() < 0.5 { Abort::Close } else { Abort::Reset };
        let abort = (random.part() < 0.06).then(|| ((random.next() % count as u64) as usize, random.part(), kind));
        let think = Duration::from_secs_f64(-(1.0 - random.part()).ln() * 0.05);
        Self { requests, reader, receive_buffer, abort, think }
    }
}

fn draw_file(random: &mut Random) -> usize {
    let power = (1.0 - random.part()).ln() / RARER.ln();
    (power as usize).min(POWERS as usize - 1)
}

fn largest_below(bytes: u64) -> usize {
    files().iter().rposition(|file| file.size <= bytes).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lives(seed: u64) -> Vec<Life> {
        let mut random = Random::new(seed, 0);
        (0..20_000).map(|_| Life::draw(&mut random)).collect()
    }

    #[test]
    fn one_seed_has_one_mix() {
        let shown = |seed| format!("{:?}", &lives(seed)[..50]);
        assert_eq!(shown(7), shown(7));
        assert_ne!(shown(7), shown(8));
    }

    #[test]
    fn tails_are_heavy_and_nothing_is_missing() {
        let (lives, files) = (lives(1), files());
        let mut requests = vec![0u64; files.len()];
        lives.iter().flat_map(|life| &life.requests).for_each(|(_, file)| requests[*file] += 1);
        assert!(requests.iter().all(|count| *count > 0), "{requests:?}");
        let bytes: Vec<u64> = requests.iter().zip(&files).map(|(count, file)| count * file.size).collect();
        let (count, long): (u64, u64) = (requests.iter().sum(), requests[10..].iter().sum());
        let (all_bytes, long_bytes): (u64, u64) = (bytes.iter().sum(), bytes[10..].iter().sum());
        assert!(long * 20 < count && long_bytes * 2 > all_bytes, "few long bodies are most of the bytes");
        assert!(
            lives.iter().any(|life| life.requests.len() > 100) && lives.iter().any(|life| life.requests.len() == 1)
        );
        assert!(lives.iter().any(|life| life.abort.is_some_and(|abort| abort.2 == Abort::Reset)));
        assert!(lives.iter().any(|life| matches!(life.reader, Reader::Pausing(_))));
    }
}
