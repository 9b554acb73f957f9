//! Downloads whose backend is lost before the body is complete.
//!
//! Several backends have the same file, and a client downloads the file at its own pace. Meanwhile the backend that
//! sends the file is lost: its server and its agent (Shunt's daemon) are killed, or its machine is taken off the
//! network. The bytes that the client gets are compared with the file. A *claim* is the message by which the frontend's
//! agent asks a backend's agent to send a body to a client.

mod command;
mod rounds;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use rustix::process::Signal;

use crate::fetch::{Fetch, Fetched, file_sha256};
use crate::host::{Host, Role};
use crate::lab::Lab;
use crate::service::{Options, Service, Settings};

pub use command::FailoverBench;
pub use rounds::{BOUND, Round, Rounds, Whole};

/// Length of the body in bytes: far more than a backend's kernel buffers for a client. So other backends have to send
/// most of the body after a backend is lost.
pub const BODY_BYTES: u64 = 48 << 20;
const BODY: &str = "body";

/// Size of the client's reads in bytes. With the pause after each, a whole body takes about a second.
const READ_BYTES: usize = 64 << 10;
const PAUSE: Duration = Duration::from_millis(1);

/// Longest wait until a download reaches the byte at which a backend is lost. No whole download takes as long.
const LIMIT: Duration = Duration::from_secs(60);

/// Network device of a backend on the network of the tiers.
const PORT: &str = "service0";

/// Directives by which tiers soon give up a server that does not answer. By default nginx waits for a minute.
const TIMEOUTS: &[&str] = &["proxy_connect_timeout 300ms", "proxy_read_timeout 1s"];

/// Kind of loss of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// The backend's server and agent are killed; its kernel continues to run.
    Kill,
    /// The backend's machine is taken off the network.
    CutOff,
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kill => "killed",
            Self::CutOff => "cut off",
        })
    }
}

/// Loss of a backend when the client has `at` bytes of the body. With 0, the backend is lost as soon as the download
/// begins.
#[derive(Debug, Clone, Copy)]
pub struct Loss {
    pub at: u64,
    pub how: How,
}

/// A download whose body is whole.
#[derive(Debug)]
pub struct Download {
    pub fetched: Fetched,
    /// Backends that were lost, in the order of their losses.
    pub lost: Vec<String>,
    /// Number of times that another backend continued.
    pub failovers: u64,
}

/// A service with several backends, and the file that they serve.
#[derive(Debug)]
pub struct Failover<'lab> {
    pub service: Service<'lab>,
    sha256: String,
    got: Arc<AtomicU64>,
}

impl<'lab> Failover<'lab> {
    /// Starts a service on a lab's tiers.
    ///
    /// # Errors
    /// When a part does not start.
    pub fn start(lab: &'lab Lab) -> Result<Self> {
        Self::start_with(lab, TIMEOUTS)
    }

    /// Starts a service with these directives for every tier's `http`.
    ///
    /// # Errors
    /// When a part does not start.
    pub fn start_with(lab: &'lab Lab, http: &'static [&'static str]) -> Result<Self> {
        let files = lab.files(&[(BODY, BODY_BYTES)])?;
        let settings = Settings { http, ..Settings::default() };
        let service = Service::start(lab, &files, Options { settings, ..Options::shunt() })?;
        Ok(Self { service, sha256: file_sha256(files.join(BODY))?, got: Arc::default() })
    }

    fn lab(&self) -> &'lab Lab {
        self.service.lab()
    }

    /// Downloads the file once, and meanwhile takes away one backend at each of `losses`.
    ///
    /// # Errors
    /// When the body is not whole, or a backend cannot be taken away.
    pub fn download(&mut self, losses: &[Loss]) -> Result<Download> {
        self.try_download(losses).0
    }

    /// Downloads like [`Self::download`]. Also returns the lost backends, which the caller must bring back even after
    /// an error.
    pub fn try_download(&mut self, losses: &[Loss]) -> (Result<Download>, Vec<String>) {
        let mut lost = Vec::new();
        let download = self.download_and_lose(losses, &mut lost);
        let download = download.with_context(|| format!("lost {lost:?}{}", self.service.explain()));
        (download, lost)
    }

    fn download_and_lose(&mut self, losses: &[Loss], lost: &mut Vec<String>) -> Result<Download> {
        let mut fetch = Fetch::new(self.service.chain().server());
        (fetch.read_bytes, fetch.pause, fetch.got) = (READ_BYTES, PAUSE, self.got());
        let (client, got, hold, before) = (self.lab().client(), self.got(), fetch.hold.clone(), self.failovers()?);
        got.store(0, Ordering::Relaxed);
        let mut claims = self.claims();
        // While a backend is taken away, the client reads no more. Otherwise, on a busy machine, it might have the
        // whole body before.
        let hold_at = |loss: Option<&Loss>| hold.store(loss.map_or(u64::MAX, |loss| loss.at), Ordering::Relaxed);
        hold_at(losses.first());
        let fetched = std::thread::scope(|scope| {
            let reader = scope.spawn(move || fetch.run(client, &[format!("/{BODY}")]));
            let losing = losses.iter().enumerate().try_for_each(|(number, loss)| {
                let deadline = Instant::now() + LIMIT;
                while got.load(Ordering::Relaxed) < loss.at && !reader.is_finished() && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let host = self.sender(&mut claims, lost)?;
                self.lose(host, loss.how)?;
                lost.push(host.name().to_owned());
                hold_at(losses.get(number + 1));
                anyhow::Ok(())
            });
            hold_at(None); // also after an error, so that the reader ends
            let fetched = reader.join().map_err(|_| anyhow!("the reader panicked"))?;
            losing.and(fetched)
        });
        let fetched = fetched?.remove(0);
        ensure!(fetched.status == 200 && fetched.length == BODY_BYTES, "{} bytes: {fetched:?}", fetched.length);
        ensure!(fetched.sha256 == self.sha256, "the bytes differ from the file's: {fetched:?}");
        Ok(Download { fetched, lost: lost.clone(), failovers: self.failovers()? - before })
    }

    /// Counter of the body bytes that the client has.
    #[must_use]
    pub fn got(&self) -> Arc<AtomicU64> {
        self.got.clone()
    }

    fn failovers(&self) -> Result<u64> {
        Ok(self.service.stats(self.lab().frontend())?.count("servers.failovers"))
    }

    /// Each backend whose agent runs, and the number of claims that the agent has received.
    fn claims(&self) -> Vec<(&'lab Host, u64)> {
        let backends = self.lab().hosts_of(Role::Backend);
        backends.filter_map(|host| Some((host, self.claims_of(host).ok()?))).collect()
    }

    fn claims_of(&self, host: &Host) -> Result<u64> {
        Ok(self.service.stats(host)?.count("agent.claims"))
    }

    /// Returns the backend whose agent has received a claim since the counts in `claims` were taken, and renews these
    /// counts. If there is none, returns the first backend that is not lost.
    fn sender(&self, claims: &mut [(&'lab Host, u64)], lost: &[String]) -> Result<&'lab Host> {
        let mut there = claims.iter_mut().filter(|(host, _)| lost.iter().all(|name| name != host.name()));
        let mut sender = None;
        for (host, before) in there.by_ref() {
            let now = self.claims_of(host)?;
            if std::mem::replace(before, now) < now || sender.is_none() {
                sender = Some(*host);
            }
        }
        sender.context("no backend is left to lose")
    }

    /// Takes away the backend to which the next request will go, and returns its name. The two backends get requests in
    /// turn, so a download shows which one is next.
    ///
    /// # Errors
    /// When there is no other backend, or it cannot be lost.
    pub fn lose_next(&mut self, how: How) -> Result<Vec<String>> {
        let mut claims = self.claims();
        self.download(&[])?;
        let asked = self.sender(&mut claims, &[])?.name().to_owned();
        let next = self.lab().hosts_of(Role::Backend).find(|host| host.name() != asked);
        let next = next.context("this benchmark needs two backends")?;
        self.lose(next, how)?;
        Ok(vec![next.name().to_owned()])
    }

    /// Takes a backend away, as `how` says.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn lose(&mut self, host: &Host, how: How) -> Result<()> {
        match how {
            How::Kill => {
                let server = self.service.chain_mut().process(host.name()).context("a backend has a server")?;
                server.signal(Signal::KILL)?;
                self.service.kill_agent(host)
            }
            How::CutOff => self.lab().cut(host, PORT),
        }
    }

    /// Brings back the backends that a download has lost.
    ///
    /// # Errors
    /// When one does not come back.
    pub fn bring_back(&mut self, lost: &[String], how: How) -> Result<()> {
        for name in lost {
            let host = self.lab().host(name)?;
            match how {
                How::Kill => {
                    // The agent starts first. A server that finds no agent sends its first bodies through all tiers.
                    self.service.restart_agent(host)?;
                    self.service.chain_mut().restart(host)?;
                }
                How::CutOff => self.lab().join(host, PORT)?,
            }
        }
        self.service.wait_for_agents()
    }

    /// Longest time that one of `downloads` downloads without a loss takes.
    ///
    /// # Errors
    /// When a download fails.
    pub fn undisturbed(&mut self, downloads: u32) -> Result<Duration> {
        let times = (0..downloads).map(|_| Ok(self.download(&[])?.fetched.elapsed));
        times.collect::<Result<Vec<_>>>()?.into_iter().max().context("no download")
    }
}
