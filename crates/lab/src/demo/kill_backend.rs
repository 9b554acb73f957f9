//! `shunt-lab demo --kill-backend`: a download continues after its backend has been lost (killed, or cut off from the
//! network).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use shunt_sys::say;

use crate::failover::{BODY_BYTES, Failover, How, Loss};
use crate::lab::Lab;
use crate::report::{Paint, Progress, number};
use crate::wire::Wire;

/// Byte of the body at which the backend is lost.
const AT: u64 = BODY_BYTES * 2 / 5;
const EVERY: Duration = Duration::from_millis(100);

/// Shows a download during which the backend is lost. Returns what was wrong, one sentence each.
///
/// # Errors
/// When something cannot be started.
pub(super) fn run(how: How) -> Result<Vec<String>> {
    let progress = Progress::to_stderr();
    progress.step("building four hosts: client, frontend, two backends");
    let lab = Lab::builder().backends(2).wire(Wire::Mtu).build()?;
    let mut failover = Failover::start(&lab)?;
    let undisturbed = failover.undisturbed(1)?;
    progress.clear();
    let paint = Paint::of(&std::io::stdout());
    say!("An undisturbed download of {}: {:.2} s.", number::bytes(BODY_BYTES as f64), seconds(undisturbed))?;
    say!("Another download, whose backend is {how} in mid-payload:\n")?;
    let got = failover.got();
    got.store(0, Ordering::Relaxed);
    let done = AtomicBool::new(false);
    let (download, lost) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(&got, &done));
        let outcome = failover.try_download(&[Loss { at: AT, how }]);
        done.store(true, Ordering::Relaxed);
        let _ = watcher.join();
        outcome
    });
    let lost = lost.join(", ");
    let download = match download {
        Ok(download) => download,
        Err(error) => return Ok(vec![format!("{lost} was {how}, and the download is not whole: {error:#}")]),
    };
    say!("\n{lost} was {how}; {} continued on the same connection.", others(&lab, &lost))?;
    let fetched = &download.fetched;
    say!(
        "Time       {:.2} s, {:.2} s more",
        seconds(fetched.elapsed),
        seconds(fetched.elapsed) - seconds(undisturbed)
    )?;
    say!("Pause      {:.2} s, the longest that the client waited for a byte", seconds(fetched.longest_pause))?;
    say!("SHA-256    {}", fetched.sha256)?;
    say!("{}", paint.good("The SHA-256 is the file's: no byte is missing or wrong."))?;
    Ok(Vec::new())
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

fn others(lab: &Lab, lost: &str) -> String {
    let backends = lab.hosts_of(crate::host::Role::Backend).map(|host| host.name());
    backends.filter(|name| *name != lost).collect::<Vec<_>>().join(", ")
}

/// Prints how many bytes have arrived, ten times a second, until `done`.
fn watch(got: &AtomicU64, done: &AtomicBool) {
    let begin = Instant::now();
    while !done.load(Ordering::Relaxed) {
        let bytes = got.load(Ordering::Relaxed);
        let bar = "#".repeat((bytes * 40 / BODY_BYTES) as usize);
        // If nothing can be written, the next output after this loop fails, and reports it.
        let _ = say!("  {:4.1} s  {bar:40}  {}", seconds(begin.elapsed()), number::bytes(bytes as f64));
        std::thread::sleep(EVERY);
    }
}
