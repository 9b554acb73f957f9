//! This machine's servers: what nginx's configuration says, and where its workers are.

use std::ffi::CString;
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;

use nix::unistd::{Gid, User, getgrouplist};
use shunt_sys::cgroup;

use super::nginx::Served;
use super::{Finding, Servers};
use crate::callers::Account;
use crate::config::Config;

/// Reads nginx's configuration; the error is why not.
pub(super) fn read(servers: &Servers) -> Result<Served, String> {
    match servers {
        Servers::Nowhere => Err("--no-nginx".into()),
        Servers::File(path) => {
            let text = fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
            Ok(Served::parse(&text))
        }
        Servers::Program(program) => {
            let output = Command::new(program).arg("-T").output();
            let output = output.map_err(|error| {
                format!("cannot run {} -T: {error}; --nginx-conf FILE names its output", program.display())
            })?;
            if output.status.success() {
                return Ok(Served::parse(&String::from_utf8_lossy(&output.stdout)));
            }
            let said = String::from_utf8_lossy(&output.stderr);
            Err(format!("{} -T failed: {}", program.display(), said.lines().last().unwrap_or_default()))
        }
    }
}

/// What is known of them.
pub(super) fn all(config: &Config, served: &Result<Served, String>) -> Vec<Finding> {
    let served = match served {
        Ok(served) => served,
        Err(why) => return vec![Finding::skipped("nginx", "its configuration", why.as_str())],
    };
    let mut findings = vec![agent(config, served)];
    findings.extend(served.user.as_ref().and_then(|(user, group)| may_use(config, user, group.as_deref())));
    if config.frontend.is_some() {
        findings.push(role("shunt on", served.hands_off));
    }
    if config.backend.is_some() {
        findings.push(role("shunt_offer on", served.offers));
    }
    let advice = "no `shunt_trust` names the tiers next to this one, so nothing is handed off: docs/nginx.md";
    findings.push(Finding::of("nginx", "shunt_trust", (!served.trusts).then(|| advice.into())));
    findings.extend(config.frontend.iter().flat_map(|frontend| entered(&frontend.interfaces, served)));
    findings.push(workers(config));
    findings
}

fn agent(config: &Config, served: &Served) -> Finding {
    let path = served.agent.as_deref().unwrap_or("/run/shunt/shuntd.sock");
    let advice = (Path::new(path) != config.socket).then(|| {
        format!(
            "nginx looks for its agent at {path}, and that is not `socket`: `shunt_agent {}`",
            config.socket.display()
        )
    });
    Finding::of("nginx", "shunt_agent", advice)
}

/// Checks that workers may use the agent's socket: by the user whom they become, and its groups (initgroups(3)).
fn may_use(config: &Config, user: &str, group: Option<&str>) -> Option<Finding> {
    let known = User::from_name(user).ok()??;
    let own = group.and_then(|group| Account::Name(group.into()).group().ok()).map_or(known.gid, Gid::from_raw);
    let groups = getgrouplist(&CString::new(user).ok()?, own).ok()?;
    let groups: Vec<u32> = groups.into_iter().chain([own]).map(Gid::as_raw).collect();
    let may = config.callers().ok()?.may_serve(known.uid.as_raw(), &groups);
    let advice =
        format!("it may not, so nothing is handed off: `users = [\"{user}\"]` in shuntd.toml, and restart the agent");
    Some(Finding::of("nginx", format!("{} for its user \"{user}\"", config.socket.display()), (!may).then_some(advice)))
}

fn role(directive: &str, is_there: bool) -> Finding {
    let advice =
        format!("it stands nowhere in nginx's configuration, so nothing is handed off: `{directive};` where it should");
    Finding::of("nginx", directive, (!is_there).then_some(advice))
}

/// Checks that clients' packets for each address come in where the programs are.
fn entered(interfaces: &[String], served: &Served) -> Vec<Finding> {
    let there = if_addrs::get_if_addrs().unwrap_or_default();
    let named =
        served.addresses.iter().map(|at| at.ip().to_canonical()).filter(|ip| !ip.is_unspecified() && !ip.is_loopback());
    let mut named: Vec<IpAddr> = named.collect();
    named.dedup();
    let of = |address: IpAddr| {
        let about = format!("{address}, at which nginx listens");
        let at = there.iter().find(|interface| interface.ip() == address);
        let advice = match at {
            Some(at) if !interfaces.contains(&at.name) && at.name != "lo" => Some(format!(
                "it is an address of {}, which [frontend] interfaces does not name: add it, if clients come in there",
                at.name
            )),
            _ => None,
        };
        Finding::of("interface", about, advice)
    };
    named.into_iter().map(of).collect()
}

/// That SHUNT_BEGIN reaches the program: of processes below the control group, and of no others.
fn workers(config: &Config) -> Finding {
    let about = "nginx's processes are below `cgroup`";
    let group = config.cgroup.clone().map_or_else(cgroup::root, Ok).and_then(|group| Ok((group, cgroup::root()?)));
    let Ok((group, root)) = group else {
        return Finding::skipped("cgroup", about, "there is no cgroup v2 hierarchy");
    };
    let below = group.strip_prefix(&root).map_or_else(|_| "/".into(), |below| Path::new("/").join(below));
    let processes = nginx_groups();
    if processes.is_empty() {
        return Finding::skipped("cgroup", about, "no process here is called nginx");
    }
    let outside = processes.iter().find(|(_, group)| !Path::new(group).starts_with(&below));
    let advice = outside.map(|(pid, group)| {
        format!(
            "process {pid} is in {group}, not below {}: name a `cgroup` that all servers are below",
            below.display()
        )
    });
    Finding::of("cgroup", about, advice)
}

/// Number and control group of each process called nginx in this network namespace.
fn nginx_groups() -> Vec<(u32, String)> {
    let ours = fs::read_link("/proc/thread-self/ns/net").ok();
    let of = |entry: fs::DirEntry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).ok();
        (read("comm")?.trim() == "nginx" && fs::read_link(entry.path().join("ns/net")).ok() == ours).then_some(())?;
        let group = read("cgroup")?.lines().find_map(|line| line.strip_prefix("0::").map(str::to_owned))?;
        Some((pid, group))
    };
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_let_in(more: &str, user: &str, group: Option<&str>) -> bool {
        let text = format!(
            "name = \"be\"\nlisten = \"127.0.0.1:7440\"\n{more}\n[backend]\ninterfaces = [\"lo\"]\n[tls]\ncertificate = \"c\"\nkey = \"k\"\nca = \"a\"\n"
        );
        let config = Config::parse(&text, Path::new("x")).unwrap();
        !may_use(&config, user, group).unwrap().is_fault()
    }

    #[test]
    fn workers_are_let_in_by_their_user_or_one_of_its_groups() {
        assert!(is_let_in("user = \"root\"", "root", None));
        assert!(!is_let_in("user = \"root\"", "nobody", None));
        assert!(is_let_in("users = [\"nobody\"]", "nobody", None));
        assert!(is_let_in("groups = [\"daemon\"]", "nobody", Some("daemon")));
        assert!(!is_let_in("groups = [\"daemon\"]", "nobody", None));
        assert!(!is_let_in("observers = [\"nobody\"]", "nobody", None), "they only ask for counters");
    }
}
