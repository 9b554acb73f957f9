//! The table of mistakes: wrong configurations and environments, each with the message that tells the operator. Every
//! response must be whole in spite of the mistake. A *shortcut* is a response whose body bypasses tiers. An *agent* is
//! Shunt's daemon on a machine.
//!
//! A mistake is data: what is changed before the service starts or while it runs, which part of the service tells the
//! operator, and what becomes of bodies. [`run`] makes the mistake in a separate lab, lets clients download, and
//! compares each byte. docs/mistakes.md is the operator's page.

mod certificates;
mod command;
mod configuration;
mod environment;
mod known;
mod limits;
mod network;
mod page;
mod run;
mod text;

use std::fmt;

use anyhow::Result;

use crate::builder::LabBuilder;
use crate::host::Role;
use crate::lab::Lab;
use crate::process::Process;
use crate::service::Settings;

pub use command::{Mistakes, run_all};
pub use known::{KNOWN, Known};
pub use page::page;
pub use run::{Outcome, Running, run};

/// Effect of a mistake on bodies that are long enough for a shortcut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bodies {
    /// None takes the shortcut: they go through the tiers, as without Shunt.
    Relayed,
    /// At least one takes the shortcut: the mistake does not prevent shortcuts.
    Shortcut,
    /// Some may take the shortcut.
    Either,
}

/// Part of the service whose log tells the operator of the mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Teller {
    /// The agent of the frontend or of the backend, on standard error, at the default level.
    Agent(Role),
    /// The agent of the frontend or that of the backend; the log is the same as for `Agent`.
    Agents,
    /// nginx of the frontend or of the backend, in its error log, at Debian's default level (`error`).
    Server(Role),
    /// Nobody, because this turned out to be no mistake, or because no part of the service can see the mistake.
    Nobody,
}

/// One row of the table.
#[derive(Clone, Copy)]
pub struct Mistake {
    /// Short name, for command lines.
    pub name: &'static str,
    /// Description of the mistake.
    pub what: &'static str,
    pub teller: Teller,
    /// Texts that the log line for the operator contains, in this order.
    pub says: &'static [&'static str],
    pub bodies: Bodies,
    settings: Settings,
    lab: fn(LabBuilder) -> LabBuilder,
    before: fn(&Lab) -> Result<()>,
    beside: fn(&Lab) -> Result<Vec<Process>>,
    after: fn(&mut Running<'_>) -> Result<()>,
    during: fn(&Running<'_>) -> Result<()>,
    asked: fn(&Lab) -> Option<std::net::Ipv4Addr>,
}

impl Mistake {
    fn new(name: &'static str, what: &'static str) -> Self {
        Self {
            name,
            what,
            teller: Teller::Nobody,
            says: &[],
            bodies: Bodies::Relayed,
            settings: Settings { apart: true, ..Settings::default() },
            lab: |lab| lab,
            before: |_| Ok(()),
            beside: |_| Ok(Vec::new()),
            after: |_| Ok(()),
            during: |_| Ok(()),
            asked: |_| None,
        }
    }

    fn told(self, teller: Teller, says: &'static [&'static str]) -> Self {
        Self { teller, says, ..self }
    }

    fn bodies(self, bodies: Bodies) -> Self {
        Self { bodies, ..self }
    }

    /// Changes the settings of the service.
    fn settings(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings);
        self
    }

    /// Sets what is changed in the lab before it is built, such as the number of hosts.
    fn lab(self, lab: fn(LabBuilder) -> LabBuilder) -> Self {
        Self { lab, ..self }
    }

    /// Sets what is done before anything starts.
    fn before(self, before: fn(&Lab) -> Result<()>) -> Self {
        Self { before, ..self }
    }

    /// Sets the processes that run beside the service. These processes start before the service.
    fn beside(self, beside: fn(&Lab) -> Result<Vec<Process>>) -> Self {
        Self { beside, ..self }
    }

    /// Sets what is done to the service after it has started and works.
    fn after(mut self, after: fn(&mut Running<'_>) -> Result<()>) -> Self {
        self.settings.apart = false;
        Self { after, ..self }
    }

    /// Sets what is done while clients download.
    fn during(self, during: fn(&Running<'_>) -> Result<()>) -> Self {
        Self { during, ..self }
    }

    /// Sets an address to which clients send their requests, other than the frontend's own.
    fn asked(self, asked: fn(&Lab) -> Option<std::net::Ipv4Addr>) -> Self {
        Self { asked, ..self }
    }
}

/// Every row, in the order of the page.
#[must_use]
pub fn all() -> Vec<Mistake> {
    [configuration::rows(), certificates::rows(), environment::rows(), network::rows(), limits::rows()].concat()
}

impl fmt::Display for Bodies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Relayed => "relayed",
            Self::Shortcut => "shortcut",
            Self::Either => "relayed or shortcut",
        })
    }
}

impl fmt::Display for Teller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role = |role: &Role| match role {
            Role::Frontend => "frontend",
            Role::Intermediate => "intermediate",
            _ => "backend",
        };
        match self {
            Self::Agent(of) => write!(f, "agent of the {}", role(of)),
            Self::Agents => write!(f, "agent"),
            Self::Server(of) => write!(f, "nginx of the {}", role(of)),
            Self::Nobody => write!(f, "nobody"),
        }
    }
}
