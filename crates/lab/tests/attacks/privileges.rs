//! Privileges that an agent keeps after its start, and that an attacker who takes it over would have. All of the
//! agent's work must be possible with them. A body is *handed off* if the backend sends it straight to the client, and
//! *relayed* if it comes through all tiers. A *consent* is the request's header field that allows a handoff.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result, bail, ensure};
use shunt_lab::{Host, Lab, Options, Role, fetch};

use crate::service::{ALONE, FILES, Running, needs_root, same_file, start_on};

/// Capabilities that an agent keeps, as bits of capabilities(7): CAP_NET_ADMIN is 12, CAP_BPF 39.
const NEEDED: &str = "0000008000001000";

/// Returns a location of the frontend with a filter, which reads bodies and changes nothing. A body that a filter reads
/// is *fetched*: it comes through both agents to the frontend's nginx.
fn filtered(lab: &Lab, host: &Host) -> String {
    let Some(address) = lab.backend().service_address().filter(|_| host.role() == Role::Frontend) else {
        return String::new();
    };
    format!(
        "        location /filtered/ {{\n            proxy_pass http://{address}:80/;\n            \
         sub_filter no-such-text other-text;\n            sub_filter_types *;\n        }}\n"
    )
}

type Status = HashMap<String, String>;

/// Returns the fields of a `/proc/.../status`.
fn status(path: &str) -> Status {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let fields = text.lines().filter_map(|line| line.split_once(":\t"));
    fields.map(|(key, value)| (key.into(), value.into())).collect()
}

fn is_named(status: &Status, name: &str) -> bool {
    status.get("Name").is_some_and(|its| its == name)
}

/// Returns the status of all threads of a host's agent, that of the event loop first.
fn status_of_agent(host: &Host) -> Result<Vec<Status>> {
    let pids = host.pids()?;
    let pid = pids.iter().find(|pid| is_named(&status(&format!("/proc/{pid}/status")), "shuntd"));
    let tasks = format!("/proc/{}/task", pid.with_context(|| format!("no shuntd on {}", host.name()))?);
    let mut threads = Vec::new();
    for task in std::fs::read_dir(&tasks)? {
        threads.push(status(&format!("{tasks}/{}/status", task?.file_name().display())));
    }
    threads.sort_by_key(|thread| !is_named(thread, "shuntd"));
    Ok(threads)
}

fn check_privileges(service: &Running<'_>) -> Result<()> {
    for host in [service.lab.frontend(), service.lab.backend()] {
        let threads = status_of_agent(host)?;
        // At least the event loop's thread, four for metrics, and one for routes on a frontend. There are further
        // threads for other work that may have to wait.
        let expected = 5 + usize::from(host.role() == Role::Frontend);
        ensure!(threads.len() >= expected, "{}: {} threads, less than {expected}", host.name(), threads.len());
        for thread in &threads[1..] {
            for set in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
                let given = thread.get(set).with_context(|| format!("no {set}"))?;
                // The thread `ports` attaches BPF programs to interfaces that appear later.
                let is_needed = is_named(thread, "ports") && given == NEEDED && matches!(set, "CapEff" | "CapPrm");
                let is_none = given.trim_matches('0').is_empty();
                ensure!(is_none || is_needed, "{}: a thread beside it has {set} {given}: {thread:?}", host.name());
            }
            for field in ["CapBnd", "NoNewPrivs", "Seccomp", "Uid", "Gid", "Groups"] {
                ensure!(thread.get(field) == threads[0].get(field), "{}: {field} of {thread:?}", host.name());
            }
        }
        let field = |name: &str| threads[0].get(name).map(String::as_str).with_context(|| format!("no {name}"));
        for set in ["CapEff", "CapPrm", "CapBnd"] {
            ensure!(field(set)? == NEEDED, "{}: {set} {}", host.name(), field(set)?);
        }
        for set in ["CapInh", "CapAmb"] {
            ensure!(field(set)?.trim_matches('0').is_empty(), "{}: {set} {}", host.name(), field(set)?);
        }
        ensure!(field("NoNewPrivs")? == "1", "{}: new privileges can be had", host.name());
        ensure!(field("Seccomp")? == "2", "{}: no filter for system calls", host.name());
        for ids in ["Uid", "Gid"] {
            ensure!(field(ids)?.split('\t').all(|id| id == "65534"), "{}: {ids} {}", host.name(), field(ids)?);
        }
        // If a process's files in /proc belong to root, and not to the process's user, the kernel does not dump its
        // memory (proc(5)).
        let owner = std::fs::metadata(format!("/proc/{}/environ", field("Pid")?))?.uid();
        ensure!(owner == 0, "{}: its memory may be dumped", host.name());
        ensure!(field("Groups")?.trim() == "65534", "{}: groups {}", host.name(), field("Groups")?);
    }
    Ok(())
}

/// Downloads bodies until one has come by a fetch (as a stream through both agents). In this location no body can be
/// handed off, so nginx sends a consent only with some requests, and relays the answers to the others.
fn fetches_work(service: &Running<'_>) -> Result<()> {
    let fetched = || service.counted("servers.fetched_filter");
    let (before, server) = (fetched()?, service.service.chain().server());
    for _ in 0..16 {
        for (name, _) in FILES.iter().filter(|(_, size)| *size >= 32 << 10) {
            let one = fetch(service.lab.client(), server, &[format!("/filtered/{name}")])?.remove(0);
            same_file(&service.files, name, &one.sha256)?;
        }
        if fetched()? > before {
            return Ok(());
        }
    }
    bail!("no body was fetched: {}", service.frontend_stats()?.under("servers"))
}

#[test]
fn the_agent_works_with_two_capabilities_and_its_own_system_calls() -> Result<()> {
    needs_root();
    let mut options = Options::shunt();
    options.settings.agent = "user = \"nobody\"\ngroups = [\"root\"]\nmetrics = \"127.0.0.1:9440\"\n";
    options.settings.agent_frontend = "flow_quiet = \"1s\"\n";
    options.settings.locations = Some(filtered);
    options.settings.http = ALONE; // because the test makes a connection for each body
    start_on(Lab::builder(), FILES, options, |service| {
        check_privileges(service)?;
        service.still_good()?;
        fetches_work(service)?;
        // A new agent takes over the BPF programs and maps, and forgets flows (entries for connections) whose
        // connections have ended.
        for host in [service.lab.frontend(), service.lab.backend()] {
            service.service.kill_agent(host)?;
            service.service.restart_agent(host)?;
        }
        service.good_again()?;
        check_privileges(service)?;
        fetches_work(service)
    })
}
