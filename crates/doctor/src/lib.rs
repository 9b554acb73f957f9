//! Finds faults in a machine's setup. With such a fault, responses are relayed (sent through all tiers). Checks each
//! requirement of Shunt, and says what to do about each one that is not met.
//!
//! * `host`: this machine: certificates, interfaces, the BPF file system, the control group, ports, the kernel;
//! * `start`: faults that would make an agent's start fail: accounts, addresses, sockets, access to the key;
//! * `routes`: the routes to clients and peers, and the filters on them;
//! * `servers`: nginx's configuration, and the control group of its workers;
//! * `trial`: one real response, for a client that the doctor makes;
//! * `peers`: every other machine, by a question to its agent (EXAMINE).
//!
//! `shuntd --check` runs the checks that need neither an agent nor a network. `shunt doctor` runs all of them, and the
//! trial if the operator asks for it.
#![forbid(unsafe_code)]

mod finding;
mod host;
mod nginx;
mod peers;
mod routes;
mod servers;
mod start;
mod trial;

use std::time::SystemTime;

pub use self::finding::{Finding, Verdict};
pub use self::nginx::Servers;
pub use self::routes::seen_from_here;
pub use self::trial::Trial;
use serde_json::Value;

use shunt_config::Config;

/// Runs the checks that need only the configuration and this machine, and no running agent.
pub fn check(config: &Config) -> Vec<Finding> {
    let certificate = host::certificate(config, SystemTime::now());
    [certificate, host::interfaces(config), vec![host::pins(config)], start::all(config)].concat()
}

/// Runs all checks except the trial ([`Trial`]). `stats` are the counters of the running agent, or the reason why it
/// did not answer. `servers` says where nginx's configuration is read from.
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
