//! Waits for conditions: each has a deadline for machines that are busy with other things, and none a fixed length.

use std::time::{Duration, Instant};

/// Deadline for conditions that hold within a second or so on an idle machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(20);

/// Looks until `look` succeeds, and returns what it found.
///
/// # Errors
/// That of the last look, once [`PATIENCE`] has passed.
pub fn eventually<T, E>(mut look: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = look();
        if found.is_ok() || Instant::now() > deadline {
            return found;
        }
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_again_until_it_succeeds() {
        let mut looks = 0;
        let found = eventually(|| {
            looks += 1;
            if looks > 2 { Ok(looks) } else { Err(()) }
        });
        assert_eq!(found, Ok(3));
    }
}
