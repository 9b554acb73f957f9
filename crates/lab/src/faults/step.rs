//! Steps of a handoff at which faults are injected. In a *handoff*, a backend sends the body (the *payload*) of a
//! response on the frontend's connection with the client. A response is held at a step from outside: the process that
//! would continue is stopped (SIGSTOP), or the client does not read. A *shortcut* is a response whose body bypasses
//! tiers in this way. An *agent* is Shunt's daemon on a machine.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use shunt_testbed::wait_for;

use super::bed::{Bed, LONG_FILE, QUEUED_FILE};
use super::client::Client;
use crate::answer::Ending;
use crate::host::Host;

/// Longest time to reach a step, on a machine that also does other work.
const LIMIT: Duration = Duration::from_secs(10);
/// Receive buffer of the client, in bytes: small, so that little of a body leaves before the client reads.
const RECEIVE_BUFFER: usize = 32 << 10;
/// Number of body bytes that the client has read at a step in mid-payload.
const READ_BYTES: u64 = 256 << 10;

/// State of a response when the fault comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    Asked,
    Offered,
    Begun,
    Claimed,
    Sending,
    Queued,
    Parked,
    Next,
}

/// A process of the service that gets signals: from a step, which stops it, or from a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    BackendServer,
    BackendAgent,
    FrontendServer,
    FrontendAgent,
    Intermediate,
}

/// A response that is held at a step.
pub(super) struct Held {
    pub(super) client: Client,
    pub(super) stopped: Stopped,
}

/// Part of the service that was stopped to hold the response, if any.
pub(super) struct Stopped(Option<Part>);

impl Step {
    pub const ALL: [Self; 8] =
        [Self::Asked, Self::Offered, Self::Begun, Self::Claimed, Self::Sending, Self::Queued, Self::Parked, Self::Next];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Asked => "asked",
            Self::Offered => "offered",
            Self::Begun => "begun",
            Self::Claimed => "claimed",
            Self::Sending => "sending",
            Self::Queued => "queued",
            Self::Parked => "parked",
            Self::Next => "next",
        }
    }

    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Asked => "the request waits at the backend",
            Self::Offered => "the offer is made; its header waits at the intermediate",
            Self::Begun => "the header is sent and the region has begun; the claim waits at the frontend's agent",
            Self::Claimed => "the claim waits at the backend's agent",
            Self::Sending => "in mid-payload; most of the payload is not queued yet",
            Self::Queued => "the whole payload is queued; most of it is not acknowledged",
            Self::Parked => "the payload is complete and its socket parked; the next request comes after the fault",
            Self::Next => "in mid-payload, on the socket of an earlier payload",
        }
    }

    /// File that the step asks for: name, and size in bytes.
    pub(super) fn file(self) -> (&'static str, u64) {
        if self == Self::Queued { QUEUED_FILE } else { LONG_FILE }
    }

    /// Whether the frontend's agent is stopped to hold a response at this step. Then other clients' shortcuts do not
    /// continue either.
    pub(super) fn stops_frontend_agent(self) -> bool {
        self == Self::Begun
    }

    /// Asks for the step's file, whose path begins with `prefix`, and takes the response to this step. For
    /// [`Self::Parked`] only an earlier response is fetched, and the caller asks for the step's file.
    pub(super) fn reach(self, bed: &mut Bed<'_>, prefix: &str) -> Result<Held> {
        let mut client = Client::connect(bed.lab.client(), bed.server(), Some(RECEIVE_BUFFER))?;
        let stopped =
            self.take(bed, &mut client, prefix).with_context(|| format!("on the way to step {}", self.name()))?;
        Ok(Held { client, stopped: Stopped(stopped) })
    }

    fn take(self, bed: &mut Bed<'_>, client: &mut Client, prefix: &str) -> Result<Option<Part>> {
        let (file, size) = self.file();
        let path = format!("{prefix}{file}");
        match self {
            Self::Asked | Self::Offered => {
                Part::BackendServer.signal(bed, Signal::STOP)?;
                client.ask(&path, file, size);
                wait_for("the request to arrive at the backend", || unread_requests(bed.backend()))?;
                if self == Self::Asked {
                    return Ok(Some(Part::BackendServer));
                }
                Part::Intermediate.signal(bed, Signal::STOP)?;
                Part::BackendServer.signal(bed, Signal::CONT)?;
                wait_for("the offer", || Ok(bed.service.stats(bed.backend())?.count("agent.offers_open") > 0))?;
                Ok(Some(Part::Intermediate))
            }
            Self::Begun | Self::Claimed => {
                let part = if self == Self::Begun { Part::FrontendAgent } else { Part::BackendAgent };
                part.signal(bed, Signal::STOP)?;
                client.ask(&path, file, size);
                client.read_until(0, LIMIT)?;
                Ok(Some(part))
            }
            Self::Sending | Self::Next => {
                if self == Self::Next {
                    one_before(client, prefix)?;
                }
                let before = bed.service.stats(bed.backend())?.count("agent.claims");
                client.ask(&path, file, size);
                client.read_until(READ_BYTES, LIMIT)?;
                let claims = bed.service.stats(bed.backend())?.count("agent.claims");
                ensure!(claims > before, "the response is no shortcut");
                Ok(None)
            }
            Self::Queued => {
                let queued = |bed: &Bed<'_>| {
                    Ok::<_, anyhow::Error>(bed.service.stats(bed.backend())?.count("agent.senders.queued_bytes"))
                };
                let before = queued(bed)?;
                client.ask(&path, file, size);
                client.read_until(1, LIMIT)?;
                wait_for("the payload to be queued", || Ok(queued(bed)? >= before + size))?;
                Ok(None)
            }
            Self::Parked => {
                one_before(client, prefix)?;
                wait_for("a parked socket", || Ok(bed.service.stats(bed.backend())?.count("agent.senders.now") > 0))?;
                Ok(None)
            }
        }
    }
}

/// Fetches a whole response on the client's connection, before the request whose response will be held.
fn one_before(client: &mut Client, prefix: &str) -> Result<()> {
    let (file, size) = QUEUED_FILE;
    client.ask(&format!("{prefix}{file}"), file, size);
    let ending = client.finish(LIMIT)?;
    ensure!(ending == Ending::Whole, "the response before: {ending}");
    Ok(())
}

/// Whether a connection to the host's server holds bytes that the server has not read.
fn unread_requests(host: &Host) -> Result<bool> {
    Ok(host.tcp_sockets()?.iter().any(|socket| socket.local.port() == 80 && socket.unread_bytes > 0))
}

impl Part {
    pub(super) fn host<'lab>(self, bed: &Bed<'lab>) -> &'lab Host {
        match self {
            Self::BackendServer | Self::BackendAgent => bed.backend(),
            Self::FrontendServer | Self::FrontendAgent => bed.frontend(),
            Self::Intermediate => bed.intermediate(),
        }
    }

    /// Sends a signal to the part's process. Does nothing if the part does not run.
    pub(super) fn signal(self, bed: &mut Bed<'_>, signal: Signal) -> Result<()> {
        let host = self.host(bed);
        let process = match self {
            Self::BackendServer | Self::FrontendServer | Self::Intermediate => {
                bed.service.chain_mut().process(host.name())
            }
            Self::BackendAgent | Self::FrontendAgent => bed.service.agent_process(host)?,
        };
        if let Some(process) = process {
            process.signal(signal)?;
        }
        Ok(())
    }
}

impl Stopped {
    /// Lets the stopped part continue.
    pub(super) fn release(self, bed: &mut Bed<'_>) -> Result<()> {
        self.0.map_or(Ok(()), |part| part.signal(bed, Signal::CONT))
    }
}
