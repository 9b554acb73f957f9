//! What is wrong with a machine's setup, before it costs anybody a shortcut: each thing that has to be so is looked at,
//! and each that is not is said with what to do.
//!
//! * `host`: this machine: certificates, interfaces, the BPF file system, the control group, ports, the kernel;
//! * `routes`: the ways to clients and peers, and the filters on them;
//! * `servers`: what nginx's configuration says, and where its workers are;
//! * `trial`: one real response, for a client of the doctor's own;
//! * `peers`: every other machine, over connections of the doctor's own, which its agent answers (`examined`).
//!
//! `shuntd --check` looks at what needs neither an agent nor a network; `shunt doctor` at everything.

pub(crate) mod examined;
mod host;
mod nginx;
mod peers;
mod routes;
mod servers;
mod start;
mod trial;

use std::path::PathBuf;
use std::time::SystemTime;

pub(crate) use self::routes::seen_from_here;
pub use self::trial::Trial;
use serde::Serialize;
use serde_json::Value;

use crate::config::Config;

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It is as it has to be.
    Ok,
    /// It is not, and this is what to do.
    Fault(String),
    /// It could not be looked at, and this is why.
    Skipped(String),
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// A word for the kind of thing: `certificate`, `interface`, `peer`.
    pub area: &'static str,
    /// The thing, and what is so of it.
    pub about: String,
    /// The result.
    pub verdict: Verdict,
}

impl Finding {
    fn ok(area: &'static str, about: impl Into<String>) -> Self {
        Self { area, about: about.into(), verdict: Verdict::Ok }
    }

    fn fault(area: &'static str, about: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { area, about: about.into(), verdict: Verdict::Fault(advice.into()) }
    }

    fn skipped(area: &'static str, about: impl Into<String>, why: impl Into<String>) -> Self {
        Self { area, about: about.into(), verdict: Verdict::Skipped(why.into()) }
    }

    /// Ok where there is no advice.
    fn of(area: &'static str, about: impl Into<String>, advice: Option<String>) -> Self {
        let verdict = advice.map_or(Verdict::Ok, Verdict::Fault);
        Self { area, about: about.into(), verdict }
    }

    /// Advice, where something has to be done: `area: about: advice`.
    pub fn fault_line(&self) -> Option<String> {
        match &self.verdict {
            Verdict::Fault(advice) => Some(format!("{}: {}: {advice}", self.area, self.about)),
            _ => None,
        }
    }

    /// Whether something has to be done.
    pub fn is_fault(&self) -> bool {
        matches!(self.verdict, Verdict::Fault(_))
    }
}

/// Where the servers' configuration comes from.
#[derive(Clone, Debug)]
pub enum Servers {
    /// From `nginx -T`, of a program by this name.
    Program(PathBuf),
    /// From a file with what `nginx -T` writes.
    File(PathBuf),
    /// Not at all.
    Nowhere,
}

impl Servers {
    /// The program that is looked for where nobody names another.
    pub const PROGRAM: &str = "nginx";
}

/// Checks that need the configuration and this machine alone.
pub fn check(config: &Config) -> Vec<Finding> {
    let certificate = host::certificate(config, SystemTime::now());
    [certificate, host::interfaces(config), vec![host::pins(config)], start::all(config)].concat()
}

/// Everything. `stats`: what the live agent answered, or why it did not.
pub fn examine(config: &Config, stats: &Result<Value, String>, servers: &Servers) -> Vec<Finding> {
    let served = servers::read(servers);
    let mut findings = check(config);
    findings.extend(host::machine(config));
    findings.extend(host::agent(config, stats));
    findings.extend(stats.is_ok().then(|| host::programs(config)).into_iter().flatten());
    findings.extend(routes::all(config));
    findings.extend(servers::all(config, &served));
    let listens = served.as_ref().map(|served| served.addresses.clone()).unwrap_or_default();
    findings.extend(config.peers.iter().flat_map(|peer| peers::all(config, peer, &listens)));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_without_advice_is_good() {
        assert!(!Finding::of("x", "y", None).is_fault());
        assert!(Finding::of("x", "y", Some("do z".into())).is_fault());
        let json = serde_json::to_value(Finding::fault("x", "y", "do z")).unwrap();
        assert_eq!(json["verdict"]["fault"], "do z");
    }
}
