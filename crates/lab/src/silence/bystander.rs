//! A bystander: a client that does not need the part of the service that is silent. It sends requests again and again,
//! and notes its longest wait.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::answer::Ending;
use crate::faults::{Client, QUEUED_FILE};
use crate::host::Host;

/// Longest wait for more bytes of a response.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause after each response, so that bystanders are no load.
const PAUSE: Duration = Duration::from_millis(20);
/// Number of responses on one connection. Then the bystander makes another connection, as a new client does.
const RESPONSES_EACH: usize = 5;

/// Results of a bystander.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seen {
    pub(super) responses: u64,
    /// Longest time without a byte: while connecting, before the first byte, and between two bytes.
    pub(super) worst: Duration,
}

/// Downloads a file, whose path begins with `prefix`, again and again until `over` is set. Each response must be whole.
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
