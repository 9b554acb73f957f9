//! Checks of this machine: certificate, interfaces, BPF file system, control group, ports, kernel, and its agent. The
//! *steering programs* are the agent's BPF programs on network interfaces. A *session* is the agent's connection with
//! another agent.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use caps::{CapSet, Capability};
use rustix::fs::statfs;
use serde_json::Value;
use shunt_handoff::{Attached, attached, probe};
use shunt_sys::cgroup;

use super::finding::Finding;
use shunt_config::Config;
use shunt_host::errors::chain;
use shunt_host::interfaces;
use shunt_host::sockets;
use shunt_transport::credentials::Credentials;

/// Type of the BPF file system, from linux/magic.h.
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;
/// Time before a certificate's end from which on the doctor reports a fault. Certificates that are valid for at most
/// twice this time are exempt.
const SOON: Duration = Duration::from_secs(3 * 24 * 3600);
/// Oldest version of Linux on which Shunt works: major and minor number.
const OLDEST_KERNEL: (u32, u32) = (5, 15);

/// Checks that the files of `[tls]` can be used, and that the certificate has this agent's name, is valid now and does
/// not expire soon.
pub(crate) fn certificate(config: &Config, now: SystemTime) -> Vec<Finding> {
    let path = config.tls.certificate.display();
    let credentials = match Credentials::read(&config.tls, &config.name) {
        Ok(credentials) => credentials,
        Err(error) => return vec![Finding::fault("certificate", format!("{path}"), error.to_string())],
    };
    let about = format!("{path} is the certificate of \"{}\"", config.name);
    let advice = match (credentials.seconds_until_good(now), credentials.seconds_left(now)) {
        (wait @ 1.., _) => {
            let wait = in_words(wait);
            Some(format!(
                "the certificate becomes valid in {wait}: set this machine's clock, or issue another certificate"
            ))
        }
        (_, ..=0) => Some(
            "the certificate has expired and no agent accepts it: issue another, then `systemctl reload shuntd`".into(),
        ),
        (_, left) if left < SOON.as_secs() as i64 && credentials.lifetime() > 2 * SOON => Some(format!(
            "the certificate expires in {} hours: issue another, then `systemctl reload shuntd`",
            left / 3600
        )),
        _ => None,
    };
    vec![Finding::of("certificate", about, advice)]
}

/// Returns a time as text: in the largest of days, hours and minutes of which the time has at least two, else in
/// seconds.
fn in_words(seconds: u64) -> String {
    let units = [(24 * 3600, "days"), (3600, "hours"), (60, "minutes")];
    let unit = units.iter().find(|(length, _)| seconds >= 2 * length);
    unit.map_or_else(|| format!("{seconds} s"), |(length, name)| format!("{} {name}", seconds / length))
}

/// Checks that each configured interface exists, that steering programs can be attached to it, and that it is up.
pub(crate) fn interfaces(config: &Config) -> Vec<Finding> {
    let frontend = config.frontend.iter().map(|frontend| ("[frontend]", &frontend.interfaces));
    let backend = config.backend.iter().map(|backend| ("[backend]", &backend.interfaces));
    let of = |(role, names): (&str, &Vec<String>)| {
        if let Err(error) = interfaces::indices(names) {
            return vec![Finding::fault("interface", format!("{role} interfaces"), error.to_string())];
        }
        names.iter().map(|name| is_up(role, name)).collect()
    };
    frontend.chain(backend).flat_map(of).collect()
}

fn is_up(role: &str, name: &str) -> Finding {
    let about = format!("{role} {name} is an Ethernet interface");
    let advice = match interfaces::is_up(name) {
        Some(false) => Some(format!("the interface is down: `ip link set {name} up`")),
        _ => None,
    };
    Finding::of("interface", about, advice)
}

/// Checks that the running agent's steering programs are attached to each configured interface.
pub(crate) fn programs(config: &Config) -> Vec<Finding> {
    let frontend = config.frontend.iter().flat_map(|frontend| frontend.interfaces.iter().map(|name| (true, name)));
    let backend = config.backend.iter().flat_map(|backend| backend.interfaces.iter().map(|name| (false, name)));
    let of = |(is_frontend, name): (bool, &String)| {
        let role = if is_frontend { "frontend" } else { "backend" };
        let about = format!("the {role}'s steering programs on {name}");
        let index = shunt_host::interfaces::interface_index(name).ok()?;
        if let Err(error) = fs::read_dir(&config.pins) {
            return Some(Finding::skipped("programs", about, format!("{}: {error}", config.pins.display())));
        }
        let advice = match attached(index, is_frontend, &config.pins) {
            Attached::Ours => None,
            Attached::Lacking(names) => Some(format!(
                "{} not there: other software has removed them. The agent attaches them again within 5 s; if it does \
                 not, its log says why",
                names.join(" and ")
            )),
            Attached::Others(program) => Some(format!(
                "the program {program} of another agent or of other software is attached (see `tc filter show dev \
                 {name} ingress`, and `egress`): remove it, or name another interface"
            )),
        };
        Some(Finding::of("programs", about, advice))
    };
    frontend.chain(backend).filter_map(of).collect()
}

/// Checks that the directory `pins` is, or would be, in a BPF file system.
pub(crate) fn pins(config: &Config) -> Finding {
    let there = config.pins.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let is_bpf = statfs(there).is_ok_and(|found| found.f_type == BPF_FS_MAGIC);
    let about = format!("pins = \"{}\"", config.pins.display());
    let advice = "it is in no BPF file system: run `mount -t bpf bpf /sys/fs/bpf`, and set `pins` to a path below that";
    Finding::of("bpffs", about, (!is_bpf).then(|| advice.into()))
}

/// Checks the kernel, and that an agent that is started here could have the capabilities that it needs.
pub(crate) fn machine(config: &Config) -> Vec<Finding> {
    let mut findings = vec![kernel(), capabilities()];
    match probe::missing() {
        Err(error) => {
            let why = format!("cannot test the kernel: {error}; run this command as root");
            findings.push(Finding::skipped("kernel", "BPF", why));
        }
        Ok(missing) => {
            findings.push(features(&missing));
            findings.extend(missing.is_empty().then(|| verified(config)).into_iter().flatten());
        }
    }
    findings
}

/// Checks that this kernel's verifier accepts the BPF programs that an agent with this configuration would load.
fn verified(config: &Config) -> Vec<Finding> {
    let frontend = config.frontend.as_ref().map(|_| probe::load_frontend().map_err(|error| chain(&error)));
    let ports = config.backend.as_ref().map(|backend| &backend.ports.0);
    let backend = ports.map(|ports| probe::load_backend(ports).map_err(|error| chain(&error)));
    let store = config.store.as_ref().map(|_| shunt_negotiation::load_and_forget().map_err(|error| chain(&error)));
    let of = |(whose, taken): (&str, Option<Result<(), String>>)| {
        let advice = |refusal: String| {
            format!(
                "{refusal}. If this command finds no other fault, and memory is not short, this is a defect of Shunt: \
                 please report it with an agent's log under RUST_LOG=libbpf=debug, and use another kernel of the \
                 distribution"
            )
        };
        Some(Finding::of("kernel", format!("the BPF programs of {whose}"), taken?.err().map(advice)))
    };
    [("[frontend]", frontend), ("[backend]", backend), ("[store]", store)].into_iter().filter_map(of).collect()
}

fn kernel() -> Finding {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    let about = format!("Linux {release}");
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|word| word.parse().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let advice = "the steering programs need Linux 5.15 or newer: install a newer kernel";
    Finding::of("kernel", about, (version < OLDEST_KERNEL).then(|| advice.into()))
}

fn features(missing: &[&'static str]) -> Finding {
    let advice =
        || format!("this kernel was built without {}: install a kernel of the distribution", missing.join(", "));
    Finding::of("kernel", "BPF functions that the steering programs call", (!missing.is_empty()).then(advice))
}

fn capabilities() -> Finding {
    let needed = [Capability::CAP_NET_ADMIN, Capability::CAP_BPF, Capability::CAP_PERFMON, Capability::CAP_SETPCAP];
    let have = caps::read(None, CapSet::Bounding).unwrap_or_default();
    let missing: Vec<String> = needed.iter().filter(|one| !have.contains(one)).map(ToString::to_string).collect();
    let advice = || {
        format!(
            "an agent that is started here cannot have {}: let its container or unit keep these capabilities",
            missing.join(", ")
        )
    };
    Finding::of("capabilities", "an agent's capabilities", (!missing.is_empty()).then(advice))
}

/// Checks that `cgroup` is a directory of a cgroup v2 hierarchy. Without this key, checks the directory that the agent
/// would find by itself.
pub(crate) fn group(config: &Config) -> Finding {
    let found = cgroup::chosen(config.cgroup.as_deref());
    let about = match (&config.cgroup, &found) {
        (Some(path), _) => format!("cgroup = \"{}\"", path.display()),
        (None, Ok(path)) => format!("cgroup v2, found at {}", path.display()),
        (None, Err(_)) => "cgroup v2".into(),
    };
    Finding::of("cgroup", about, found.err().map(|error| error.to_string()))
}

/// Checks that no program listens at a port of `[backend] ports`, and that the kernel gives none to other connections.
/// All of them are checked, because any may be used: a hash of a peer's name decides which port it gets
/// (crates/config/src/ports.rs).
pub(crate) fn ports(config: &Config) -> Option<Finding> {
    let ports = &config.backend.as_ref()?.ports.0;
    let local = numbers("/proc/sys/net/ipv4/ip_local_port_range");
    let reserved = fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports").unwrap_or_default();
    let about = format!("[backend] ports {}-{}", ports.start(), ports.end());
    if let Err(taken) = sockets::none_listens_in(ports) {
        return Some(Finding::of("ports", about, Some(taken.to_string())));
    }
    let [low, high] = local[..] else {
        return Some(Finding::skipped("ports", about, "/proc/sys/net/ipv4/ip_local_port_range cannot be read"));
    };
    let is_free = |port: u16| !(low..=high).contains(&port) || is_reserved(&reserved, port);
    let advice = (!ports.clone().all(is_free)).then(|| {
        // sysctl(8) replaces the whole list, and other programs may need its present entries.
        let others = if reserved.trim().is_empty() { String::new() } else { format!("{},", reserved.trim()) };
        format!(
            "the kernel gives them to other connections: \
             `sysctl -w net.ipv4.ip_local_reserved_ports={others}{}-{}`",
            ports.start(),
            ports.end()
        )
    });
    Some(Finding::of("ports", about, advice))
}

fn numbers(path: &str) -> Vec<u16> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// Returns whether a port is in a list such as `61000-61063,62000`.
fn is_reserved(list: &str, port: u16) -> bool {
    let covers = |part: &str| {
        let (low, high) = part.split_once('-').unwrap_or((part, part));
        let number = |word: &str| word.trim().parse::<u16>().ok();
        number(low).zip(number(high)).is_some_and(|(low, high)| (low..=high).contains(&port))
    };
    list.trim().split(',').any(covers)
}

/// Checks that the agent runs, has the name in the configuration, and has sessions with its peers.
pub(crate) fn agent(config: &Config, stats: &Result<Value, String>) -> Vec<Finding> {
    let about = format!("the agent at {}", config.socket.display());
    let stats = match stats {
        Ok(stats) => stats,
        // This error already says which systemd unit to look at.
        Err(error) if error.contains("systemctl") => return vec![Finding::fault("agent", about, error.as_str())],
        Err(error) => return vec![Finding::fault("agent", about, format!("{error}: `systemctl status shuntd`"))],
    };
    let name = stats["name"].as_str().unwrap_or_default();
    if name != config.name {
        let advice = format!(
            "it calls itself \"{name}\", not \"{}\": it runs with another configuration; restart it",
            config.name
        );
        return vec![Finding::fault("agent", about, advice)];
    }
    let is_up = |peer: &str| {
        stats["peers"].as_array().into_iter().flatten().any(|one| one["name"] == peer && one["up"] == true)
    };
    let session = |peer: &shunt_config::PeerConfig| {
        let advice = || "there is no session; see the lines about this peer, and the agent's log".to_owned();
        Finding::of("session", format!("with \"{}\"", peer.name), (!is_up(&peer.name)).then(advice))
    };
    let mut findings = vec![Finding::ok("agent", about)];
    findings.extend(config.peers.iter().map(session));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Verdict;
    use shunt_ca::{Authority, Request};

    #[test]
    fn a_certificate_is_good_for_its_time_and_spoken_of_before_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::create(&directory.path().join("ca")).unwrap();
        let files = authority.issue(&Request { name: "fe".into(), addresses: Vec::new(), days: 30 }).unwrap();
        let text = format!(
            "name = \"fe\"\nlisten = \"127.0.0.1:7440\"\n[frontend]\ninterfaces = [\"lo\"]\n[tls]\ncertificate = {:?}\nkey = {:?}\nca = {:?}\n",
            files.certificate,
            files.key,
            authority.certificate()
        );
        let config = Config::parse(&text, Path::new("x")).unwrap();
        let day = Duration::from_secs(24 * 3600);
        let at = |now: SystemTime| certificate(&config, now).remove(0).verdict;
        let now = SystemTime::now();
        assert_eq!(at(now), Verdict::Ok);
        for (when, said) in
            [(now - 3 * day, "becomes valid in"), (now + 29 * day, "expires in"), (now + 31 * day, "has expired")]
        {
            let verdict = at(when);
            assert!(matches!(&verdict, Verdict::Fault(advice) if advice.contains(said)), "{said}: {verdict:?}");
        }
        let other = Config { name: "be".into(), ..config.clone() };
        assert!(certificate(&other, now)[0].is_fault(), "another's");
    }

    #[test]
    fn a_long_time_is_said_in_days() {
        for (seconds, words) in [(640_571, "7 days"), (100_000, "27 hours"), (600, "10 minutes"), (119, "119 s")] {
            assert_eq!(in_words(seconds), words);
        }
    }

    #[test]
    fn reserved_ports_are_a_list_of_ranges() {
        assert!(is_reserved("61000-61063,62000\n", 61007) && is_reserved("61000-61063,62000", 62000));
        assert!(!is_reserved("61000-61063", 61064) && !is_reserved("", 61000));
    }
}
