//! A client that has nothing to do with what is silent: it asks again and again, and notes how long it waits.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::answer::Ending;
use crate::faults::{Client, QUEUED_FILE};
use crate::host::Host;

/// A wait of which nothing more is to be learnt.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two responses: it is no load.
const PAUSE: Duration = Duration::from_millis(20);
/// On one connection; the next are asked for on another, as by new clients.
const RESPONSES_EACH: usize = 5;

/// What a bystander saw.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seen {
    pub(super) responses: u64,
    /// Longest time without a byte: to connect, to the first one, and between two.
    pub(super) worst: Duration,
}

/// Downloads below `prefix` until it is over; each response is to be whole.
pub(super) fn stand_by(client: &Host, server: SocketAddr, prefix: &str, over: &AtomicBool) -> Result<Seen> {
    let mut seen = Seen::default();
    let (file, size) = QUEUED_FILE;
    while !over.load(Ordering::Relaxed) {
        let mut last = Instant::now();
        let mut connection = Client::connect(client, server, None)?;
        seen.worst = seen.worst.max(last.elapsed());
        for _ in 0..RESPONSES_EACH {
            last = Instant::now();
            connection.ask(&format!("{prefix}{file}"), file, size);
            let ending = loop {
                let more = connection.read_more(PATIENCE)?;
                seen.worst = seen.worst.max(last.elapsed());
                last = Instant::now();
                if let Some(ending) = more {
                    break ending;
                }
            };
            ensure!(ending == Ending::Whole, "a bystander's {prefix}{file}: {ending}, waited {:.2?}", seen.worst);
            seen.responses += 1;
            std::thread::sleep(PAUSE);
        }
    }
    Ok(seen)
}
