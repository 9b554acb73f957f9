//! Thread that carries frames over a link, between the host's TAP device and the switch's. A *line* is one direction of
//! a link.

use std::io::PipeWriter;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use shunt_sys::tap::Tap;

use super::Link;
use super::line::{Counts, Line};
use crate::host::pin;

/// Longest frame that is read, in bytes. TAP devices of the lab have no larger MTU, and no segmentation offload.
const FRAME_BYTES: usize = 64 << 10;

/// Number of frames taken from one end before the other end has its turn.
const TURN: usize = 64;

/// Lines of a link: frames from the host, and frames to it.
type Lines = Arc<Mutex<[Line; 2]>>;

/// A link of a running lab. Dropping it ends its thread and deletes its two devices.
#[derive(Debug)]
pub struct Cable {
    host: String,
    link: Link,
    seed: u64,
    /// Number of this link in the lab, from 0.
    number: u64,
    lines: Lines,
    /// Write end of a pipe; closing it tells the thread to end.
    running: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Cable {
    /// Starts to carry frames between the two `ends`, the host's first.
    ///
    /// The thread stays on `core`. A thread that moves would spread frames over several cores' backlogs, which reorders
    /// them.
    pub(crate) fn start(host: &str, link: Link, seed: u64, number: u64, ends: [Tap; 2], core: usize) -> Result<Self> {
        let line = |direction| Line::new(link, seed, 2 * number + direction);
        let lines = Arc::new(Mutex::new([line(0), line(1)]));
        let (stop, running) = std::io::pipe().context("making a pipe")?;
        let shared = Arc::clone(&lines);
        let thread = std::thread::Builder::new().name(format!("link-{host}")).spawn(move || {
            // If pinning fails, the thread is slower or reorders frames. Tests that look at the frames notice this.
            let _ = pin(None, Some(core));
            carry(&ends, &shared, stop);
        });
        let thread = Some(thread.context("starting a link's thread")?);
        Ok(Self { host: host.to_owned(), link, seed, number, lines, running: Some(running), thread })
    }

    /// The host that the link belongs to.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    #[must_use]
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Seed that decides what becomes of each frame. With the same seed in `SHUNT_SEED`, another run loses and delays
    /// the same frames, by their number.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Restarts the random numbers: later frames are lost and delayed like those of a new link with this seed.
    pub fn reseed(&self, seed: u64) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        for (line, direction) in lines.iter_mut().zip(0..) {
            line.reseed(seed, 2 * self.number + direction);
        }
    }

    /// Counts of the frames from the host.
    #[must_use]
    pub fn sent(&self) -> Counts {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)[0].counts()
    }

    /// Counts of the frames to the host.
    #[must_use]
    pub fn received(&self) -> Counts {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)[1].counts()
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        drop(self.running.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Carries frames until the other end of `stop` is closed or a device is deleted.
fn carry(ends: &[Tap; 2], lines: &Lines, stop: impl AsFd) {
    let mut buffer = vec![0; FRAME_BYTES];
    loop {
        let next_due = deliver(ends, lines);
        let now = Instant::now();
        let wait = next_due.map(|due| Timespec::try_from(due.saturating_duration_since(now)).unwrap_or_default());
        let mut events = [
            PollFd::new(&ends[0], PollFlags::IN),
            PollFd::new(&ends[1], PollFlags::IN),
            PollFd::new(&stop, PollFlags::IN),
        ];
        match poll(&mut events, wait.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        let [.., stopped] = &events;
        if !stopped.revents().is_empty() || events.iter().any(|event| event.revents().contains(PollFlags::ERR)) {
            return;
        }
        for (direction, end) in ends.iter().enumerate() {
            if collect(end, lines, direction, &mut buffer).is_err() {
                return;
            }
        }
    }
}

/// Takes from the lines all frames that are due, and writes them to the devices at the lines' ends. Returns the time at
/// which the next frame is due.
fn deliver(ends: &[Tap; 2], lines: &Lines) -> Option<Instant> {
    let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    for (line, to) in lines.iter_mut().zip([&ends[1], &ends[0]]) {
        while let Some(frame) = line.pop(now) {
            // A device that is down receives nothing, and the sender is not told, as on a network.
            let _ = to.send(&frame);
        }
    }
    lines.iter().filter_map(Line::next_due).min()
}

/// Reads frames that a device has sent, [`TURN`] at most, and pushes them into the line of their direction.
fn collect(from: &Tap, lines: &Lines, direction: usize, buffer: &mut [u8]) -> std::io::Result<()> {
    for _ in 0..TURN {
        let Some(length) = from.receive(buffer)? else { break };
        let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines[direction].push(Instant::now(), buffer[..length].to_vec());
    }
    Ok(())
}
