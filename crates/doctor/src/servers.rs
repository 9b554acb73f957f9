//! Checks of this machine's servers: nginx's configuration, and the control group of its workers. A *handoff* lets a
//! backend send a response's body on the client's connection.

use std::ffi::CString;
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;

use nix::unistd::{Gid, User, getgrouplist};
use shunt_sys::cgroup;

use super::finding::Finding;
use super::nginx::{self, Served, Servers, Version};
use shunt_config::Config;
use shunt_config::accounts::Account;

/// First version of nginx that speaks TLS 1.3 even if no `ssl_protocols` names it (nginx's CHANGES).
const TLS13_BY_ITSELF: Version = [1, 23, 4];

/// Reads nginx's configuration. The error is a finding that says why it cannot be read.
pub(crate) fn read(servers: &Servers) -> Result<Served, Finding> {
    let unknown = |why: String| Finding::skipped("nginx", "its configuration", why);
    // The operator has named the source, so it is a fault if it cannot be read.
    let named = |why: String| Finding::fault("nginx", "its configuration", format!("{why}; name an existing file"));
    match servers {
        Servers::Nowhere => Err(unknown("--no-nginx".into())),
        Servers::File(path) => {
            let text = fs::read_to_string(path);
            let text = text.map_err(|error| named(format!("cannot read {}: {error}", path.display())))?;
            match nginx::refusal(&text) {
                _ if text.trim().is_empty() => Err(unusable(&format!(
                    "{path} is empty: write the output of `nginx -T 2>&1` to it",
                    path = path.display()
                ))),
                None if !nginx::is_empty(&text) => Ok(Served::parse(&text)),
                why => Err(refused(&why.unwrap_or_else(|| format!("{} has no directive", path.display())))),
            }
        }
        Servers::Program(program) => {
            let run = |option| Command::new(program).arg(option).output();
            let output = run("-T").map_err(|error| {
                let why = format!("cannot run {} -T: {error}", program.display());
                match program.as_path() == Path::new(Servers::PROGRAM) {
                    true => unknown(format!("{why}; or name a file with its output by --nginx-conf FILE")),
                    false => named(why),
                }
            })?;
            let text = String::from_utf8_lossy(&output.stdout);
            if output.status.success() && nginx::is_empty(&text) {
                let why = format!("{} -T prints no configuration: name nginx by --nginx PROGRAM", program.display());
                return Err(unusable(&why));
            }
            if output.status.success() {
                let said = run("-v").map(|output| output.stderr).unwrap_or_default();
                let version = nginx::version(&String::from_utf8_lossy(&said));
                return Ok(Served { version, ..Served::parse(&text) });
            }
            let said = String::from_utf8_lossy(&output.stderr);
            let last = || {
                let why = said.lines().last().map_or_else(|| output.status.to_string(), str::to_owned);
                format!("{} -T failed: {why}", program.display())
            };
            Err(refused(&nginx::refusal(&said).unwrap_or_else(last)))
        }
    }
}

/// Returns the fault of a file that has no configuration of nginx, or of a program that prints none. `why` also says
/// what to do.
fn unusable(why: &str) -> Finding {
    Finding::fault("nginx", "its configuration", why)
}

fn refused(why: &str) -> Finding {
    let advice = format!(
        "nginx refuses its configuration: {why}; correct it until `nginx -t` succeeds, then run this command again"
    );
    Finding::fault("nginx", "its configuration", advice)
}

/// Runs all checks of the servers.
pub(crate) fn all(config: &Config, served: &Result<Served, Finding>) -> Vec<Finding> {
    let served = match served {
        Ok(served) => served,
        Err(why) => return vec![why.clone()],
    };
    let mut findings = vec![agent(config, served)];
    findings.extend(served.user.as_ref().and_then(|(user, group)| may_use(config, user, group.as_deref())));
    if config.frontend.is_some() {
        findings.push(role("shunt on", served.hands_off));
        findings.extend(tls(served));
        findings.extend(served.trusts_clients.then(clients_are_trusted));
    }
    if config.backend.is_some() {
        findings.push(role("shunt_offer on", served.offers));
        findings.extend(served.offers_without_sendfile.then(without_sendfile));
    }
    let advice = "no `shunt_trust` names the tiers next to this one, and nothing is handed off: see docs/nginx.md";
    findings.push(Finding::of("nginx", "shunt_trust", (!served.trusts).then(|| advice.into())));
    findings.extend(config.frontend.iter().flat_map(|frontend| entered(&frontend.interfaces, served)));
    findings.push(workers(config));
    findings
}

fn agent(config: &Config, served: &Served) -> Finding {
    let path = served.agent.as_deref().unwrap_or("/run/shunt/shuntd.sock");
    let advice = (Path::new(path) != config.socket).then(|| {
        format!(
            "nginx looks for its agent at {path}, which is not `socket` of shuntd.toml: write `shunt_agent {};`",
            config.socket.display()
        )
    });
    Finding::of("nginx", "shunt_agent", advice)
}

/// Checks that the user of nginx's workers, with the groups that nginx gives the workers (initgroups(3)), may use the
/// agent's socket.
fn may_use(config: &Config, user: &str, group: Option<&str>) -> Option<Finding> {
    let known = User::from_name(user).ok()??;
    let own = group.and_then(|group| Account::Name(group.into()).group().ok()).map_or(known.gid, Gid::from_raw);
    let groups = getgrouplist(&CString::new(user).ok()?, own).ok()?;
    let groups: Vec<u32> = groups.into_iter().chain([own]).map(Gid::as_raw).collect();
    let may = config.callers().ok()?.may_serve(known.uid.as_raw(), &groups);
    let advice = format!(
        "this user may not connect, and nothing is handed off: write `users = [\"{user}\"]` in shuntd.toml, and \
         restart the agent"
    );
    Some(Finding::of("nginx", format!("{} for its user \"{user}\"", config.socket.display()), (!may).then_some(advice)))
}

fn role(directive: &str, is_there: bool) -> Finding {
    let advice = format!("nginx's configuration does not have it, and nothing is handed off: write `{directive};`");
    Finding::of("nginx", directive, (!is_there).then_some(advice))
}

fn clients_are_trusted() -> Finding {
    let advice = "it trusts every address where `shunt on` stands, and a client that consents like a tier gets offers \
                  in place of bodies: name only the next tier's addresses";
    Finding::fault("nginx", "shunt_trust", advice)
}

fn without_sendfile() -> Finding {
    let advice = "`sendfile` is off, nginx's default, where `shunt_offer on` stands, and files there are read into \
                  memory and relayed (`relayed:not_file`): write `sendfile on;`";
    Finding::fault("nginx", "shunt_offer", advice)
}

/// Checks that nginx speaks TLS 1.3, if it listens with TLS and hands off: older versions of TLS have no KeyUpdate,
/// which a handoff needs.
fn tls(served: &Served) -> Option<Finding> {
    const ABOUT: &str = "TLS 1.3 where it listens with `ssl`";
    let by_itself = served.version.map(|version| version >= TLS13_BY_ITSELF);
    let advice = "all responses over TLS are relayed (`relayed:tls_version`), because nginx does not speak TLS 1.3: \
                  write `ssl_protocols TLSv1.2 TLSv1.3;` in `http`, then `systemctl reload nginx`";
    (served.hands_off && served.listens_with_tls).then(|| match served.names_tls13.or(by_itself) {
        Some(speaks) => Finding::of("nginx", ABOUT, (!speaks).then(|| advice.into())),
        None => Finding::skipped(
            "nginx",
            ABOUT,
            "no `ssl_protocols` enables TLS 1.3, and nginx before 1.23.4 does not by default: write `ssl_protocols \
             TLSv1.2 TLSv1.3;`",
        ),
    })
}

/// Checks that no address at which nginx listens is on an interface other than `interfaces` and `lo`: only `interfaces`
/// have the steering programs.
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
                "the address is on {}, which [frontend] interfaces does not name: add the interface if clients' \
                 packets come in there",
                at.name
            )),
            _ => None,
        };
        Finding::of("interface", about, advice)
    };
    named.into_iter().map(of).collect()
}

/// Checks that nginx's processes are in the agent's control group or below it. The BPF program that answers
/// setsockopt(SHUNT_BEGIN), which begins a handoff, sees only calls of processes there.
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
            "process {pid} is in {group}, not below {}: set `cgroup` to a control group that all servers are below",
            below.display()
        )
    });
    Finding::of("cgroup", about, advice)
}

/// Returns process ID and control group of each process called nginx in this network namespace.
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
    use crate::Verdict;
    use std::os::unix::fs::PermissionsExt;

    fn is_let_in(more: &str, user: &str, group: Option<&str>) -> bool {
        let text = format!(
            "name = \"be\"\nlisten = \"127.0.0.1:7440\"\n{more}\n[backend]\ninterfaces = [\"lo\"]\n[tls]\ncertificate = \"c\"\nkey = \"k\"\nca = \"a\"\n"
        );
        let config = Config::parse(&text, Path::new("x")).unwrap();
        !may_use(&config, user, group).unwrap().is_fault()
    }

    #[test]
    fn a_file_that_an_option_names_must_exist() {
        let nowhere = || "/nonexistent/nginx".into();
        for servers in [Servers::File(nowhere()), Servers::Program(nowhere())] {
            assert!(read(&servers).is_err_and(|finding| finding.is_fault()), "{servers:?}");
        }
        assert!(read(&Servers::Nowhere).is_err_and(|finding| !finding.is_fault()));
    }

    #[test]
    fn tls_1_3_is_named_or_spoken_by_a_newer_nginx() {
        let of = |more: &str, version| {
            let text = format!("http {{ shunt on; {more} server {{ listen 443 ssl; }} }}");
            tls(&Served { version, ..Served::parse(&text) }).unwrap().verdict
        };
        let is_fault = |verdict| matches!(verdict, Verdict::Fault(advice) if advice.contains("TLSv1.2 TLSv1.3;"));
        assert!(is_fault(of("", Some([1, 22, 1]))));
        assert!(
            is_fault(of("ssl_protocols TLSv1.2;", Some([1, 26, 0]))) && is_fault(of("ssl_protocols TLSv1.2;", None))
        );
        assert_eq!(of("", Some([1, 23, 4])), Verdict::Ok);
        assert_eq!(of("ssl_protocols TLSv1.2 TLSv1.3;", Some([1, 22, 1])), Verdict::Ok);
        assert!(matches!(of("", None), Verdict::Skipped(_)), "nobody knows its version");
        for text in ["shunt on; server { listen 80; }", "shunt off; server { listen 443 ssl; }"] {
            assert_eq!(tls(&Served::parse(text)), None, "{text}");
        }
    }

    #[test]
    fn a_configuration_that_nginx_refuses_is_said_in_its_own_words() {
        let directory = tempfile::tempdir().unwrap();
        let said = |name: &str, text: &str| {
            let path = directory.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let empty = read(&Servers::File(said("empty", ""))).unwrap_err().fault_line().unwrap();
        assert!(empty.contains("empty is empty: write the output of `nginx -T"), "{empty}");
        let comment = read(&Servers::File(said("comment", "# no\n"))).unwrap_err().fault_line().unwrap();
        assert!(comment.contains("has no directive") && comment.contains("nginx -t"), "{comment}");
        let file = said("both", "[emerg] 7#7: unknown directive \"shnut\" in /etc/n:2\nnginx: ... test failed\n");
        let line = read(&Servers::File(file)).unwrap_err().fault_line().unwrap();
        assert!(line.contains("[emerg] unknown directive \"shnut\" in /etc/n:2"), "{line}");
        let program = said("nginx", "#!/bin/sh\necho 'nginx: [emerg] no \"events\" section' >&2\nexit 1\n");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        let line = read(&Servers::Program(program)).unwrap_err().fault_line().unwrap();
        assert!(line.contains("[emerg] no \"events\" section"), "{line}");
        for (program, why) in
            [("true", "true -T prints no configuration"), ("false", "false -T failed: exit status: 1")]
        {
            let line = read(&Servers::Program(program.into())).unwrap_err().fault_line().unwrap();
            assert!(line.contains(why), "{line}");
        }
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
