//! Tests of `shunt doctor` and `shuntd --check`: a working setup has no fault, and each mistake is found and named. A
//! *handoff* lets a backend send a body straight to the client.

mod service;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use service::impostor::Listening;
use service::{FILES, Running, needs_root, start_on};
use shunt_ca::{Authority, Request};
use shunt_handoff::bpf::STEERING_LAYOUT;
use shunt_lab::{Host, Lab, Options, Role, fetch, shunt_program, shuntd_program};
use shunt_testbed::wait_for;
use shunt_wire::local::Reason;
use shunt_wire::peer::{Examined, Refused};

/// A host, with the texts of its agent's and its nginx's configuration.
struct Setup<'a> {
    host: &'a Host,
    config: String,
    nginx: String,
}

/// For each fault: its area, and a text with its subject and the advice.
type Faults = Vec<(String, String)>;

impl<'a> Setup<'a> {
    fn of(host: &'a Host) -> Result<Self> {
        let nginx = nginx_conf(host)?;
        Ok(Self {
            host,
            config: std::fs::read_to_string(host.dir().join("shuntd.toml"))?,
            nginx: std::fs::read_to_string(nginx)?,
        })
    }

    fn with_config(mut self, from: &str, to: &str) -> Result<Self> {
        ensure!(self.config.contains(from), "no {from:?} in {}", self.config);
        self.config = self.config.replace(from, to);
        Ok(self)
    }

    fn with_nginx(mut self, from: &str, to: &str) -> Result<Self> {
        ensure!(self.nginx.contains(from), "no {from:?} in {}", self.nginx);
        self.nginx = self.nginx.replace(from, to);
        Ok(self)
    }

    fn write(&self) -> Result<(PathBuf, PathBuf)> {
        let (config, nginx) = (self.host.dir().join("doctor.toml"), self.host.dir().join("doctor.conf"));
        std::fs::write(&config, &self.config)?;
        std::fs::write(&nginx, &self.nginx)?;
        Ok((config, nginx))
    }

    /// Runs the doctor, and returns the faults that it finds. Asserts that its exit status agrees with them.
    fn faults(&self) -> Result<Faults> {
        self.faults_by(&[])
    }

    /// Like `faults`, with the doctor started by another program: `starter` is that program's name and arguments.
    fn faults_by(&self, starter: &[&str]) -> Result<Faults> {
        let (code, findings) = self.findings(starter)?;
        let fault = |finding: &Value| {
            let advice = finding["verdict"]["fault"].as_str()?;
            Some((finding["area"].as_str()?.to_owned(), format!("{}: {advice}", finding["about"].as_str()?)))
        };
        let faults: Faults = findings.iter().filter_map(fault).collect();
        let expected = if faults.is_empty() { 0 } else { 1 };
        ensure!(code == Some(expected), "exit {code:?} with {faults:?}");
        ensure!(findings.len() > 10, "only {findings:?}");
        Ok(faults)
    }

    /// Runs the doctor. Returns its exit status, and all of its findings.
    fn findings(&self, starter: &[&str]) -> Result<(Option<i32>, Vec<Value>)> {
        let (config, nginx) = self.write()?;
        let words: Vec<OsString> = starter.iter().map(OsString::from).chain([shunt_program()?.into()]).collect();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.args(["doctor", "--json"]).arg("--config").arg(config).arg("--nginx-conf").arg(nginx);
        let output = self.host.output(command)?;
        let findings: Vec<Value> = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("not JSON; stderr: {}", String::from_utf8_lossy(&output.stderr)))?;
        Ok((output.status.code(), findings))
    }

    /// Runs `shuntd --check`. Returns what it prints if it finds a fault, else `None`.
    fn checked(&self) -> Result<Option<String>> {
        let (config, _) = self.write()?;
        let mut command = Command::new(shuntd_program()?);
        command.arg("--check").arg("--config").arg(config);
        let output = self.host.output(command)?;
        Ok((!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).into_owned()))
    }
}

fn nginx_conf(host: &Host) -> Result<PathBuf> {
    let entries = std::fs::read_dir(host.dir())?.flatten().map(|entry| entry.path().join("nginx.conf"));
    entries.into_iter().find(|path| path.exists()).with_context(|| format!("{} has no nginx", host.name()))
}

fn run(host: &Host, commands: &str) -> Result<()> {
    for line in commands.lines() {
        let mut command = Command::new("sh");
        command.args(["-c", line]);
        let output = host.output(command)?;
        ensure!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Asserts that the doctor finds a fault of this area with this text.
fn found(what: &str, setup: &Setup<'_>, area: &str, says: &str) -> Result<()> {
    let faults = setup.faults().context(what.to_owned())?;
    let is_there = faults.iter().any(|(found, advice)| found == area && advice.contains(says));
    ensure!(is_there, "{what}: no {area} with {says:?} in {faults:#?}");
    Ok(())
}

fn with_service(test: impl FnOnce(&mut Running<'_>) -> Result<()>) -> Result<()> {
    start_on(Lab::builder(), FILES, Options::shunt(), test)
}

fn backend<'lab>(service: &Running<'lab>) -> Result<&'lab Host> {
    service.lab.hosts_of(Role::Backend).next().context("no backend")
}

#[test]
fn a_setup_that_works_has_no_fault() -> Result<()> {
    needs_root();
    with_service(|service| {
        for host in [service.lab.frontend(), backend(service)?] {
            let setup = Setup::of(host)?;
            let faults = setup.faults()?;
            ensure!(faults.is_empty(), "{}: {faults:#?}", host.name());
            ensure!(setup.checked()?.is_none(), "{}: {:?}", host.name(), setup.checked()?);
        }
        Ok(())
    })
}

#[test]
fn the_kernel_is_asked_for_the_programs_of_this_machine_alone() -> Result<()> {
    needs_root();
    with_service(|service| {
        for (host, role) in [(service.lab.frontend(), "[frontend]"), (backend(service)?, "[backend]")] {
            let (_, findings) = Setup::of(host)?.findings(&[])?;
            let of_programs = findings.iter().filter(|finding| finding["about"].as_str().is_some_and(is_of_programs));
            let found: Vec<_> = of_programs.map(|finding| (&finding["about"], &finding["verdict"])).collect();
            let expected = (&Value::from(format!("the BPF programs of {role}")), &Value::from("ok"));
            ensure!(found == [expected], "{}: {found:?}", host.name());
        }
        Ok(())
    })
}

fn is_of_programs(about: &str) -> bool {
    about.starts_with("the BPF programs of ")
}

/// Runs the doctor while a client downloads. Returns the doctor's finding about handoffs.
fn handoff(service: &Running<'_>, path: &str) -> Result<Value> {
    let (frontend, client) = (service.lab.frontend(), service.lab.client());
    let (config, nginx) = Setup::of(frontend)?.write()?;
    let mut command = Command::new(shunt_program()?);
    command.args(["doctor", "--json", "--handoff", "5"]).arg("--config").arg(config).arg("--nginx-conf").arg(nginx);
    std::thread::scope(|scope| {
        let doctor = scope.spawn(|| frontend.output(command));
        while !doctor.is_finished() {
            fetch(client, service.service.chain().server(), &[path])?;
            std::thread::sleep(std::time::Duration::from_millis(50)); // the pace of the downloads
        }
        let output = doctor.join().map_err(|_| anyhow::anyhow!("the doctor's thread panicked"))??;
        let findings: Vec<Value> = serde_json::from_slice(&output.stdout)?;
        findings.into_iter().find(|finding| finding["area"] == "handoff").context("no handoff")
    })
}

#[test]
fn a_real_handoff_is_seen_and_a_short_body_is_none() -> Result<()> {
    needs_root();
    with_service(|service| {
        let good = handoff(service, "/7m")?;
        ensure!(good["verdict"] == "ok", "{good}{}", service.service.explain());
        let short = handoff(service, "/1k")?;
        let advice = short["verdict"]["fault"].as_str().unwrap_or_default();
        ensure!(advice.starts_with("no client fetched"), "{short}");
        Ok(())
    })
}

#[test]
fn mistakes_in_the_agents_configuration() -> Result<()> {
    needs_root();
    with_service(|service| {
        let (frontend, backend) = (service.lab.frontend(), backend(service)?);
        let cases: &[(&str, &str, &str, &str, &str)] = &[
            ("missing interface", "\"client0\"", "\"client9\"", "interface", "client9"),
            ("no Ethernet", "\"client0\"", "\"lo\"", "interface", "not Ethernet"),
            ("pins elsewhere", "pins = \"/sys/fs/bpf/", "pins = \"/tmp/", "bpffs", "mount -t bpf"),
            ("no control group", "cgroup = \"", "cgroup = \"/tmp\" #", "cgroup", "cgroup v2"),
            ("no agent", "agent.sock", "nobody.sock", "agent", "nobody.sock"),
            ("port", ":7440\"\nspeaks_for", ":7441\"\nspeaks_for", "port", "cannot connect"),
            (
                "another's certificate",
                "name = \"frontend\"",
                "name = \"other\"",
                "certificate",
                "not the certificate of",
            ),
            ("no certificate", "frontend.pem", "nobody.pem", "certificate", "cannot read"),
            ("peer's name", "name = \"backend\"", "name = \"backend9\"", "peer", "another name than its [[peer]]"),
        ];
        for (what, from, to, area, says) in cases {
            found(what, &Setup::of(frontend)?.with_config(from, to)?, area, says)?;
        }
        for (what, from, to, _, says) in &cases[..3] {
            let said = Setup::of(frontend)?.with_config(from, to)?.checked()?;
            ensure!(said.as_ref().is_some_and(|said| said.contains(says)), "--check, {what}: {said:?}");
        }
        // The range of these ports begins below the kernel's range of ephemeral ports, and ends in it.
        let ports = Setup::of(backend)?.with_config("[backend]", "[backend]\nports = \"32760-32823\"")?;
        found("ports of others", &ports, "ports", "32760-32823`")?;
        Ok(())
    })
}

#[test]
fn mistakes_in_nginxs_configuration() -> Result<()> {
    needs_root();
    with_service(|service| {
        let (frontend, backend) = (service.lab.frontend(), backend(service)?);
        for (what, from, to, area, says) in [
            ("nobody hands off", "shunt on;", "", "nginx", "`shunt on;`"),
            ("nobody is trusted", "shunt_trust", "#", "nginx", "shunt_trust"),
            ("clients are trusted", "shunt_trust ", "shunt_trust ::/0 ", "nginx", "every address"),
            ("another agent's socket", "agent.sock", "other.sock", "nginx", "other.sock"),
            (
                "TLS without 1.3",
                "    server {",
                "    ssl_protocols TLSv1.2;\n    server { listen 443 ssl; }\n    server {",
                "nginx",
                "`ssl_protocols TLSv1.2 TLSv1.3;`",
            ),
            (
                "an address nobody speaks for",
                "    server {",
                "    server { listen 203.0.113.9:80; }\n    server {",
                "speaks_for",
                "203.0.113.9",
            ),
        ] {
            found(what, &Setup::of(frontend)?.with_nginx(from, to)?, area, says)?;
        }
        found("nobody offers", &Setup::of(backend)?.with_nginx("shunt_offer on;", "")?, "nginx", "`shunt_offer on;`")?;
        let without = Setup::of(backend)?.with_nginx("sendfile on;", "sendfile off;")?;
        found("no sendfile", &without, "nginx", "`sendfile on;`")
    })
}

/// Runs the commands `done`, asserts that the fault is found, and runs the commands `undone`.
fn while_so(what: &str, host: &Host, done: &str, undone: &str, area: &str, says: &str) -> Result<()> {
    run(host, done)?;
    let outcome = Setup::of(host).and_then(|setup| found(what, &setup, area, says));
    run(host, undone)?;
    outcome
}

#[test]
fn mistakes_of_the_machine() -> Result<()> {
    needs_root();
    with_service(|service| {
        let (frontend, backend) = (service.lab.frontend(), backend(service)?);
        let ranges =
            ["1024 65000", "32768 60999"].map(|range| format!("echo {range} > /proc/sys/net/ipv4/ip_local_port_range"));
        while_so("local ports", backend, &ranges[0], &ranges[1], "ports", "ip_local_reserved_ports")?;
        let elsewhere = "ip link add spare0 type veth peer name spare1\nip addr add 198.51.100.1/24 dev spare0\nip link set spare0 up\n\
                         ip route replace default via 198.51.100.2 dev spare0";
        while_so("default route", backend, elsewhere, "true", "route", "spare0")?;
        let strict = |value: u8| format!("echo {value} > /proc/sys/net/ipv4/conf/service0/rp_filter");
        while_so("rp_filter", backend, &strict(1), &strict(0), "rp_filter", "rp_filter=2")?;
        run(backend, "ip link del spare0")?;
        let mtu = |bytes: u16| format!("ip link set service0 mtu {bytes}");
        while_so("the other's MTU", frontend, "true", "true", "mtu", "")
            .err()
            .context("an MTU fault without a cause")?;
        run(backend, &mtu(1400))?;
        let outcome = Setup::of(frontend).and_then(|setup| found("the other's MTU", &setup, "mtu", "MTU is 1500"));
        run(backend, &mtu(1500))?;
        outcome?;
        let down = Setup::of(frontend)?.with_config("\"client0\"", "\"client0\", \"spare0\"")?;
        run(frontend, "ip link add spare0 type veth peer name spare1")?;
        found("an interface that is down", &down, "interface", "ip link set spare0 up")?;
        run(frontend, "ip link del spare0")?;
        let away = Setup::of(frontend)?.with_config("address = \"", "address = \"203.0.113.1:7440\" # ")?;
        run(frontend, "ip route add unreachable 203.0.113.0/24")?;
        found("no route", &away, "route", "ip route get 203.0.113.1")?;
        let group = frontend.cgroup().join("empty");
        std::fs::create_dir(&group)?;
        let below = Setup::of(frontend)?.with_config("cgroup = \"", &format!("cgroup = \"{}\" # ", group.display()))?;
        let outcome = found("workers elsewhere", &below, "cgroup", "not below");
        std::fs::remove_dir(&group)?;
        outcome
    })
}

/// Gives the agent a certificate of the same authority, under a name that no peer has.
fn as_stranger(setup: Setup<'_>) -> Result<Setup<'_>> {
    let key = setup.config.lines().find(|line| line.starts_with("key = ")).context("no key")?;
    let directory = Path::new(key.trim_start_matches("key = ").trim_matches('"')).parent().context("no directory")?;
    let request = Request { name: "stranger".into(), addresses: Vec::new(), days: 1 };
    Authority::open(directory).issue(&request)?;
    setup.with_config("name = \"frontend\"", "name = \"stranger\"")?.with_config("/frontend.", "/stranger.")
}

#[test]
fn mistakes_of_the_other_machine() -> Result<()> {
    needs_root();
    with_service(|service| {
        let (frontend, backend) = (service.lab.frontend(), backend(service)?);
        let stranger = as_stranger(Setup::of(frontend)?)?;
        found("a name that it does not know", &stranger, "peer", "[[peer]]` \"stranger\"")?;
        service.service.kill_agent(backend)?;
        let faults = Setup::of(frontend)?.faults()?;
        let areas: Vec<&str> = faults.iter().map(|(area, _)| area.as_str()).collect();
        if areas != ["session", "port"] {
            bail!("its agent is gone: {faults:#?}");
        }
        service.service.restart_agent(backend)
    })
}

/// Returns the finding about a file that the doctor's own client fetches.
fn own_client(frontend: &Host, path: &str) -> Result<Value> {
    let (config, nginx) = Setup::of(frontend)?.write()?;
    let mut command = Command::new(shunt_program()?);
    command.args(["doctor", "--json", "--client", "10.77.1.250", "--fetch", &format!("http://10.77.0.1{path}")]);
    command.arg("--config").arg(config).arg("--nginx-conf").arg(nginx);
    let output = frontend.output(command)?;
    let findings: Vec<Value> =
        serde_json::from_slice(&output.stdout).with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    findings.into_iter().find(|finding| finding["area"] == "handoff").context("no handoff")
}

#[test]
fn the_doctors_own_client_takes_the_shortcut_and_leaves_nothing() -> Result<()> {
    needs_root();
    with_service(|service| {
        let (frontend, backend) = (service.lab.frontend(), backend(service)?);
        let links = || {
            let mut ip = Command::new("ip");
            ip.args(["-o", "link"]);
            frontend.check(ip).map(|text| text.lines().count())
        };
        let before = links()?;
        let good = own_client(frontend, "/7m")?;
        ensure!(good["verdict"] == "ok", "{good}{}", service.service.explain());
        let short = own_client(frontend, "/1k")?;
        ensure!(short["verdict"]["fault"].as_str().is_some_and(|advice| advice.contains("1024 bytes")), "{short}");
        let nobody = own_client(frontend, "/nobody")?;
        ensure!(nobody["verdict"]["fault"].as_str().is_some_and(|advice| advice.contains("404")), "{nobody}");
        run(
            backend,
            "nft add table ip lab\nnft 'add chain ip lab in { type filter hook prerouting priority -300 ; }'\n\
                      nft add rule ip lab in tcp dport 61000-61063 drop",
        )?;
        let unheard = own_client(frontend, "/7m")?;
        run(backend, "nft delete table ip lab")?;
        ensure!(unheard["verdict"]["fault"].as_str().is_some_and(|advice| advice.contains("`ports`")), "{unheard}");
        service.service.kill_agent(backend)?;
        let relayed = own_client(frontend, "/7m")?;
        let advice = relayed["verdict"]["fault"].as_str().unwrap_or_default();
        ensure!(advice.contains("not by the shortcut"), "{relayed}");
        service.service.restart_agent(backend)?;
        ensure!(links()? == before, "it leaves an interface");
        Ok(())
    })
}

#[test]
fn programs_that_are_not_the_agents_are_found_from_either_machine() -> Result<()> {
    needs_root();
    with_service(|service| {
        let (frontend, backend) = (service.lab.frontend(), backend(service)?);
        let all_is_well = |host: &Host| {
            wait_for("the doctor finds no fault", || {
                let faults = Setup::of(host)?.faults()?;
                ensure!(faults.is_empty(), "{}: {faults:?}", host.name());
                Ok(())
            })
        };
        let filter = format!("dev service0 egress prio 21314 handle {STEERING_LAYOUT} protocol all bpf");
        // The agent puts the program back. So the command is repeated until the doctor looks before the agent does.
        wait_for("the doctor finds the missing program", || {
            run(backend, &format!("tc filter del {filter}"))?;
            found("programs taken off", &Setup::of(backend)?, "programs", "be_out not there")
        })?;
        all_is_well(backend)?;
        // Another BPF program takes the place of be_out. The agent leaves it alone, and the doctor names it.
        let config = Setup::of(backend)?.config;
        let pins = config.lines().find_map(|line| line.strip_prefix("pins = ")).context("no pins")?;
        run(backend, &format!("tc filter replace {filter} da object-pinned {pins}/be_in").replace('"', ""))?;
        found("another's program", &Setup::of(backend)?, "programs", "the program be_in of another")?;
        wait_for("the doctor finds the other machine's fault", || {
            found("the other machine's", &Setup::of(frontend)?, "programs", "one of its `interfaces`")
        })?;
        run(backend, &format!("tc filter del {filter}"))?;
        all_is_well(backend)?;
        all_is_well(frontend)
    })
}

#[test]
fn a_backend_that_sends_elsewhere_or_filters_is_found_from_the_frontend() -> Result<()> {
    needs_root();
    with_service(|service| {
        let (frontend, backend) = (service.lab.frontend(), backend(service)?);
        run(
            backend,
            "ip link add spare0 type veth peer name spare1
ip addr add 198.51.100.1/24 dev spare0
ip link set spare0 up
             ip link set spare1 up
ip route replace default via 198.51.100.2 dev spare0
             echo 1 > /proc/sys/net/ipv4/conf/service0/rp_filter",
        )?;
        wait_for("the doctor finds the default route", || {
            found("default route", &Setup::of(frontend)?, "route", "[backend] interfaces does not name")
        })?;
        wait_for("the doctor finds the filter", || {
            found("rp_filter", &Setup::of(frontend)?, "rp_filter", "drops clients' ACKs")
        })
    })
}

/// Asserts that the doctor finds this fault when the test answers in place of the backend's agent.
fn answered(service: &mut Running<'_>, answer: impl FnOnce() -> Vec<u8> + Send, area: &str, says: &str) -> Result<()> {
    let (frontend, backend) = (service.lab.frontend(), backend(service)?);
    service.service.kill_agent(backend)?;
    let listening = Listening::at(service.lab, backend)?;
    let outcome = std::thread::scope(|scope| {
        let answering = scope.spawn(move || {
            let mut connection = listening.accept()?;
            connection.frame()?.context("no question")?;
            connection.send(&answer())?;
            Ok::<_, anyhow::Error>(connection.rest())
        });
        let outcome = Setup::of(frontend).and_then(|setup| found("another's answer", &setup, area, says));
        answering.join().map_err(|_| anyhow::anyhow!("the answering thread panicked"))??;
        outcome
    });
    service.service.restart_agent(backend)?;
    outcome
}

#[test]
fn a_clock_that_differs_and_another_version_are_found() -> Result<()> {
    needs_root();
    with_service(|service| {
        let an_hour_ahead = || {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let time_ns = (now + Duration::from_secs(3600)).as_nanos() as u64;
            let roles = Examined::BACKEND.into();
            let (mut bytes, none) = (Vec::new(), 0.into());
            Examined { time_ns: time_ns.into(), roles, may: u32::MAX.into(), faults: none }.emit(&mut bytes);
            bytes
        };
        answered(service, an_hour_ahead, "clock", "synchronise both by NTP")?;
        let another_version = || {
            let mut bytes = Vec::new();
            Refused { reason: (Reason::Version as u32).into() }.emit(&mut bytes);
            bytes
        };
        answered(service, another_version, "peer", "another version")
    })
}

/// Asserts that the doctor finds this fault when another program starts it.
fn started_by(host: &Host, starter: &[&str], area: &str, says: &str) -> Result<()> {
    let faults = Setup::of(host)?.faults_by(starter)?;
    let is_there = faults.iter().any(|(found, advice)| found == area && advice.contains(says));
    ensure!(is_there, "{starter:?}: no {area} with {says:?} in {faults:#?}");
    Ok(())
}

#[test]
fn an_old_kernel_and_missing_capabilities_are_found() -> Result<()> {
    needs_root();
    with_service(|service| {
        let frontend = service.lab.frontend();
        // The doctor sees the kernel as Linux 2.6 (personality(2), UNAME26).
        started_by(frontend, &["setarch", "--uname-2.6"], "kernel", "Linux 5.15 or newer")?;
        started_by(frontend, &["setpriv", "--bounding-set", "-bpf"], "capabilities", "CAP_BPF")
    })
}

#[test]
fn a_certificate_out_of_its_time_fails_the_check() -> Result<()> {
    needs_root();
    const DAY: Duration = Duration::from_secs(24 * 3600);
    with_service(|service| {
        let frontend = service.lab.frontend();
        let now = SystemTime::now();
        for (what, begin, end, says) in [
            ("expired", now - 3 * DAY, now - 2 * DAY, "has expired"),
            ("early", now + DAY, now + 2 * DAY, "becomes valid in"),
        ] {
            let setup = Setup::of(frontend)?;
            let key = setup.config.lines().find(|line| line.starts_with("key = ")).context("no key")?;
            let directory =
                Path::new(key.trim_start_matches("key = ").trim_matches('"')).parent().context("its directory")?;
            let authority = Authority::open(directory);
            let request = Request { name: "frontend".into(), addresses: Vec::new(), days: 1 };
            let files = authority.files_of("frontend");
            // The authority overwrites no file, so the old certificate and key are removed. The running agent has read
            // them already.
            std::fs::remove_file(&files.certificate)?;
            std::fs::remove_file(&files.key)?;
            authority.issue_between(&request, begin, end)?;
            found(what, &setup, "certificate", says)?;
            let said = setup.checked()?;
            ensure!(said.as_ref().is_some_and(|said| said.contains(says)), "--check, {what}: {said:?}");
        }
        Ok(())
    })
}
