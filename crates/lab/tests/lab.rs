//! Tests of the lab itself: hosts as network namespaces, with links and servers. They need root: without it, each test
//! fails and says so.

use std::net::{SocketAddr, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use shunt_lab::{
    ByteMeter, Capture, Chain, Cores, CpuMeter, Expect, Families, Family, Fetch, HaproxyChain, Lab, LabBuilder, Link,
    NginxChain, Options, Placement, Rate, Service, Tcpdump, Wire, Wrk, fetch, file_sha256,
};
use shunt_testbed::{needs_root, of_process, wait_for};

const FILES: &[(&str, u64)] = &[("empty", 0), ("1k", 1 << 10), ("64k", 64 << 10), ("1m", 1 << 20), ("3m", 3 << 20)];

/// Fetches every file from `server` over one connection, and compares the bytes.
fn compare_files(lab: &Lab, server: SocketAddr, pipeline: bool) -> Result<()> {
    let paths: Vec<String> = FILES.iter().map(|(name, _)| format!("/{name}")).collect();
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let mut client = Fetch::new(server);
    client.pipeline = pipeline;
    let fetched = client.run(lab.client(), &paths)?;
    ensure!(fetched.len() == paths.len());
    for (one, (name, size)) in fetched.iter().zip(FILES) {
        ensure!(one.status == 200, "{name}: status {}", one.status);
        ensure!(one.length == *size, "{name}: {} bytes", one.length);
        ensure!(one.sha256 == file_sha256(lab.dir().join("files").join(name))?, "{name}: other bytes");
    }
    Ok(())
}

#[test]
fn chains_of_every_length_on_both_wires_carry_the_bytes() -> Result<()> {
    needs_root();
    for wire in [Wire::Tso, Wire::Mtu] {
        for intermediates in 0..=2 {
            let begin = Instant::now();
            let lab = Lab::builder().intermediates(intermediates).wire(wire).build()?;
            eprintln!("{wire}, {intermediates} intermediates: built in {:?}", begin.elapsed());
            let files = lab.files(FILES)?;
            for start in
                [&(|lab: &Lab| NginxChain::new(&files).start(lab)) as &dyn Fn(&Lab) -> Result<Chain>, &|lab: &Lab| {
                    HaproxyChain::new(&files).start(lab)
                }]
            {
                let mut chain = start(&lab)?;
                compare_files(&lab, chain.server(), false)?;
                compare_files(&lab, chain.server(), true)?;
                compare_files(&lab, chain.backend(), false).context("straight from the backend")?;
                chain.check_running()?;
                chain.stop()?;
            }
            let begin = Instant::now();
            drop(lab);
            eprintln!("{wire}, {intermediates} intermediates: removed in {:?}", begin.elapsed());
        }
    }
    Ok(())
}

#[test]
fn the_wires_differ_in_what_a_packet_is() -> Result<()> {
    needs_root();
    for (wire, most) in [(Wire::Tso, 1000), (Wire::Mtu, 100_000)] {
        let lab = Lab::builder().wire(wire).build()?;
        let files = lab.files(FILES)?;
        let chain = NginxChain::new(&files).start(&lab)?;
        let meter = ByteMeter::start(lab.client())?;
        fetch(lab.client(), chain.server(), &["/3m"])?;
        let bytes = meter.total()?;
        let packets = (3 << 20) / 1448;
        ensure!(bytes.rx_bytes > 3 << 20 && bytes.rx_bytes < 4 << 20, "{bytes:?}");
        ensure!((bytes.rx_packets >= packets) == (wire == Wire::Mtu), "{wire}: {bytes:?}");
        ensure!(bytes.rx_packets < most, "{wire}: {bytes:?}");
        let control = lab.backend().run(|| std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control"))??;
        ensure!(control.trim() == "cubic", "{control}");
    }
    Ok(())
}

#[test]
fn a_backend_reaches_the_client_with_the_frontends_address() -> Result<()> {
    needs_root();
    let lab = Lab::builder().build()?;
    let to = SocketAddr::from((lab.client().address(), 4000));
    let client = lab.client().run(|| UdpSocket::bind(to))??;
    client.set_read_timeout(Some(Duration::from_secs(20)))?;
    let mut borrow = Command::new("ip");
    borrow.args(["addr", "add", &format!("{}/32", lab.frontend().address()), "dev", "lo"]);
    lab.backend().check(borrow)?;
    lab.backend().run(|| UdpSocket::bind((lab.frontend().address(), 4001))?.send_to(b"straight", to))??;
    let mut buffer = [0; 16];
    let (length, from) = client.recv_from(&mut buffer)?;
    ensure!(&buffer[..length] == b"straight" && from.ip() == lab.frontend().address(), "{from}");
    Ok(())
}

#[test]
fn both_ip_versions_carry_the_bytes_with_routers_and_without() -> Result<()> {
    needs_root();
    for (routed, link) in [(false, None), (true, None), (true, Some(Link::wan(Duration::from_millis(2))))] {
        // On one core, as in `a_capture_of_plain_chains_has_no_violation`.
        let mut builder = Lab::builder().intermediates(1).ipv6().placement(Placement::WholeService).cores(Cores::ONE);
        builder = if routed { builder.routed() } else { builder };
        builder = link.into_iter().fold(builder, LabBuilder::client_link);
        let lab = builder.build()?;
        let files = lab.files(FILES)?;
        for family in [Family::V4, Family::V6] {
            let chain = NginxChain::new(&files).families(Families::all(family)).start(&lab)?;
            let capture = Tcpdump::start(lab.client(), "client0", "tcp")?;
            compare_files(&lab, chain.server(), false)?;
            let client = lab.client().address_of(family)?;
            Capture::read(capture.stop()?)?.check(&Expect::of(client).connections(1)).check()?;
            compare_files(&lab, chain.backend(), false).context("straight from the backend")?;
            chain.stop()?;
            for (from, to) in [("client", "frontend"), ("frontend", "intermediate1"), ("backend", "client")] {
                let mut route = Command::new("ip");
                route.args(["route", "get", &lab.host(to)?.address_of(family)?.to_string()]);
                let route = lab.host(from)?.check(route)?;
                ensure!(route.contains(" via ") == routed, "{route}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_link_has_its_delay_and_its_mtu() -> Result<()> {
    const DELAY: Duration = Duration::from_millis(30);
    needs_root();
    let builder = Lab::builder().client_link(Link::wan(DELAY).mtu(1400));
    // On one core, as in `a_capture_of_plain_chains_has_no_violation`.
    let lab = builder.placement(Placement::WholeService).cores(Cores::ONE).build()?;
    let to = SocketAddr::from((lab.client().address(), 4000));
    let client = lab.client().run(|| UdpSocket::bind(to))??;
    client.set_read_timeout(Some(Duration::from_secs(2)))?;
    let backend = lab.backend().run(|| UdpSocket::bind((lab.backend().address(), 4001)))??;
    // On a busy machine, a datagram may be lost. So each datagram has a number, by which the test knows when the one
    // that arrived was sent.
    let (mut buffer, mut sent) = ([0], Vec::new());
    wait_for("a datagram arrives", || {
        sent.push(Instant::now());
        backend.send_to(&[sent.len() as u8 - 1], to)?;
        Ok(client.recv_from(&mut buffer).is_ok())
    })?;
    let took = sent[usize::from(buffer[0])].elapsed();
    ensure!(took >= DELAY, "{took:?}");
    let files = lab.files(FILES)?;
    let chain = NginxChain::new(&files).start(&lab)?;
    let capture = Tcpdump::start(lab.client(), "client0", "tcp")?;
    compare_files(&lab, chain.server(), false)?;
    Capture::read(capture.stop()?)?.check(&Expect::of(lab.client().address()).connections(1)).check()?;
    let bytes = ByteMeter::start(lab.client())?;
    fetch(lab.client(), chain.server(), &["/3m"])?;
    let bytes = bytes.total()?;
    ensure!(bytes.rx_bytes / bytes.rx_packets <= 1414, "{bytes:?}");
    let (sent, received) = (lab.cables()[0].sent(), lab.cables()[0].received());
    ensure!(received.popped > 2000 && sent.popped > 100, "{sent:?} {received:?}");
    Ok(())
}

#[test]
fn a_link_loses_and_repeats_what_it_is_told_to() -> Result<()> {
    needs_root();
    let link = Link::wan(Duration::from_millis(2)).loss(0.02).duplicate(0.02).reorder(0.02, Duration::from_millis(1));
    let lab = Lab::builder().client_link(link).build()?;
    let files = lab.files(FILES)?;
    let chain = NginxChain::new(&files).start(&lab)?;
    compare_files(&lab, chain.server(), false)?;
    let received = lab.cables()[0].received();
    eprintln!("{received:?}");
    ensure!(received.lost > 0 && received.duplicated > 0 && received.late > 0, "{received:?}");
    Ok(())
}

#[test]
fn a_capture_of_plain_chains_has_no_violation() -> Result<()> {
    needs_root();
    for wire in [Wire::Tso, Wire::Mtu] {
        // With more than one core, a veth pair may deliver an ACK without data after data that was sent later. The
        // check of the capture would take this for a fault.
        let lab =
            Lab::builder().intermediates(1).wire(wire).placement(Placement::WholeService).cores(Cores::ONE).build()?;
        let files = lab.files(FILES)?;
        let chain = NginxChain::new(&files).start(&lab)?;
        let capture = Tcpdump::start(lab.client(), "client0", "tcp")?;
        compare_files(&lab, chain.server(), false)?;
        let capture = Capture::read(capture.stop()?)?;
        let verdict = capture.check(&Expect::of(lab.client().address()).connections(1));
        verdict.check()?;
        let whole: u64 = FILES.iter().map(|(_, size)| size).sum();
        let bytes = verdict.sum(|flow| flow.server_bytes);
        ensure!(bytes > whole && bytes < whole + 10_000, "{bytes} bytes of {whole}");
        eprintln!("{wire}: {:?}", verdict.flows[0]);
    }
    Ok(())
}

#[test]
fn loads_and_meters_agree_with_each_other() -> Result<()> {
    needs_root();
    let lab = Lab::builder().placement(Placement::WholeService).build()?;
    let files = lab.files(FILES)?;
    let chain = NginxChain::new(&files).start(&lab)?;
    let (cpu, bytes) = (CpuMeter::start(lab.cores().measured)?, ByteMeter::start(lab.client())?);
    let report = Wrk::new(chain.url("/64k")).duration(Duration::from_secs(2)).run(lab.client())?;
    let (cpu, bytes) = (cpu.read()?, bytes.total()?);
    eprintln!("{report:?}\n{cpu:?}: {:.1} us a response", cpu.microseconds_per(report.requests));
    ensure!(report.errors() == 0 && report.requests > 100, "{report:?}");
    ensure!(bytes.rx_bytes > report.requests * (64 << 10), "{bytes:?} {report:?}");
    ensure!(cpu.fraction() > 0.3 && cpu.fraction() < 1.05, "{cpu:?}");

    let rate = Rate::new(chain.server(), "/1k", 500.0).duration(Duration::from_secs(1)).run(lab.client())?;
    eprintln!(
        "{} of {} answered, p50 {:?}, p99 {:?}, p99.9 {:?}; client late by p99 {:?}",
        rate.answered,
        rate.due,
        rate.latency(0.5),
        rate.latency(0.99),
        rate.latency(0.999),
        rate.lateness(0.99)
    );
    ensure!(rate.due.abs_diff(500) <= 1 && rate.answered == rate.due, "{} of {}", rate.answered, rate.due);
    ensure!(rate.status_errors == 0 && rate.connection_errors == 0);
    Ok(())
}

#[test]
fn a_busy_core_is_told_from_an_idle_one() -> Result<()> {
    needs_root();
    let lab = Lab::builder().placement(Placement::Tier("backend".into())).build()?;
    let mut spin = Command::new("sh");
    spin.args(["-c", "while :; do :; done"]);
    let spin = lab.backend().spawn(spin)?;
    let meter = CpuMeter::start(lab.cores().measured)?;
    std::thread::sleep(Duration::from_millis(500)); // the time that is measured
    let busy = meter.read()?;
    ensure!(busy.fraction() > 0.9, "{busy:?}");
    lab.place(&Placement::Tier("client".into()))?;
    let status = std::fs::read_to_string(format!("/proc/{}/status", spin.pid()))?;
    let allowed = format!("Cpus_allowed_list:\t{}", lab.cores().rest);
    ensure!(status.contains(&allowed), "the running process did not move: {status}");
    let mask = lab.client().run(|| -> Result<String> {
        let sysfs = shunt_sys::netns::detached_sysfs()?;
        let path = "class/net/client0/queues/rx-0/rps_cpus";
        let file = rustix::fs::openat(sysfs, path, rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty())?;
        Ok(std::io::read_to_string(std::fs::File::from(file))?)
    })??;
    ensure!(u64::from_str_radix(mask.trim(), 16)? == 1 << lab.cores().measured, "{mask}");
    Ok(())
}

/// Returns the namespaces, files, control groups and pins that the process `owner` made and that are still there.
fn remains(owner: u32) -> Vec<String> {
    let mut left = Vec::new();
    let cgroups = shunt_sys::cgroup::root().unwrap_or_default();
    for dir in ["/run/netns".into(), std::env::temp_dir(), cgroups, "/sys/fs/bpf".into()] {
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let own = ["shunt-", "shunt-lab-"].iter().filter_map(|prefix| name.strip_prefix(prefix));
            if own.filter_map(|rest| rest.strip_prefix(&owner.to_string())).any(|rest| rest.starts_with(['.', '-'])) {
                left.push(entry.path().display().to_string());
            }
        }
    }
    left
}

/// Process that the tests below kill. It makes what tests make: a lab with agents, and a pin directory and a control
/// group outside the lab. Then it writes process IDs to a file, and waits to be killed. These are the ID of its
/// backend's server, and those of the children of its thread. The children include its watchdogs (processes that remove
/// what it leaves).
#[test]
#[ignore = "runs only as the victim of the tests that kill it"]
fn victim() -> Result<()> {
    let Some(told) = std::env::var_os("SHUNT_LAB_VICTIM") else { return Ok(()) };
    let lab = Lab::builder().client_link(Link::wan(Duration::from_millis(1))).build()?;
    let files = lab.files(&[("1k", 1 << 10)])?;
    let mut service = Service::start(&lab, &files, Options::shunt())?;
    let own = of_process();
    std::fs::create_dir(own.pins_prefix() + "own")?;
    std::fs::create_dir(own.cgroup(&shunt_sys::cgroup::root()?, "own"))?;
    let server = service.chain_mut().process("backend").context("no server")?.pid();
    let watchdogs = std::fs::read_to_string("/proc/thread-self/children")?;
    // The file appears whole or not at all.
    let partial = std::path::Path::new(&told).with_extension("partial");
    std::fs::write(&partial, format!("{server} {watchdogs}"))?;
    std::fs::rename(partial, told)?;
    std::thread::sleep(Duration::from_secs(600));
    Ok(())
}

fn start_victim(told: &std::path::Path) -> Result<std::process::Child> {
    // The test may run in the background of a shell. A shell makes background processes ignore SIGINT, and processes
    // that they start inherit this.
    let mut victim = Command::new("env");
    victim.arg("--default-signal=INT,TERM").arg(std::env::current_exe()?);
    victim.args(["--ignored", "--exact", "victim"]).env("SHUNT_LAB_VICTIM", told);
    Ok(victim.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn()?)
}

/// Waits for the process IDs that the victim writes, and returns them. The first is that of the victim's backend
/// server. The others are those of all children of the victim's thread, which include its watchdogs.
fn told_by(victim: &mut std::process::Child, told: &std::path::Path) -> Result<Vec<String>> {
    wait_for("the victim builds a lab", || std::fs::read_to_string(told).is_ok())?;
    let left = remains(victim.id());
    for place in ["/run/netns/", "/sys/fs/bpf/", "/shunt-lab-"] {
        ensure!(left.iter().any(|path| path.contains(place)), "the victim has nothing in {place}: {left:?}");
    }
    Ok(std::fs::read_to_string(told)?.split_whitespace().map(str::to_owned).collect())
}

fn until_gone(victim: u32) -> Result<()> {
    wait_for(&format!("nothing is left of process {victim}"), || {
        let left = remains(victim);
        ensure!(left.is_empty(), "it left {}", left.join(", "));
        Ok(())
    })
}

fn kill(signal: &str, process: &str) -> Result<()> {
    ensure!(Command::new("kill").args([signal, process]).status()?.success(), "kill {signal} {process} failed");
    Ok(())
}

#[test]
fn a_killed_process_leaves_nothing() -> Result<()> {
    needs_root();
    let dir = tempfile::tempdir()?;
    for signal in ["-KILL", "-INT", "-TERM"] {
        let told = dir.path().join(signal);
        let mut victim = start_victim(&told)?;
        let server = told_by(&mut victim, &told)?.remove(0);
        kill(signal, &victim.id().to_string())?;
        victim.wait()?;
        until_gone(victim.id()).with_context(|| format!("SIG{signal}"))?;
        wait_for(&format!("server {server} ends"), || !std::path::Path::new("/proc").join(&server).exists())?;
    }
    Ok(())
}

#[test]
fn a_process_that_is_killed_at_any_moment_leaves_nothing() -> Result<()> {
    needs_root();
    let dir = tempfile::tempdir()?;
    for moment in (0..12).map(|turn| Duration::from_millis(turn * 80)) {
        let mut victim = start_victim(&dir.path().join("told"))?;
        std::thread::sleep(moment); // how much the victim has made by then depends on the machine
        victim.kill()?;
        victim.wait()?;
        until_gone(victim.id()).with_context(|| format!("killed after {moment:?}"))?;
    }
    Ok(())
}

/// The victim's watchdogs are killed, too. A sweep, which each process makes before its first watchdog, removes what is
/// left.
#[test]
fn what_the_dead_left_is_swept() -> Result<()> {
    needs_root();
    let dir = tempfile::tempdir()?;
    let told = dir.path().join("told");
    let mut victim = start_victim(&told)?;
    // The watchdogs are killed first, because they would remove what the victim leaves.
    for process in &told_by(&mut victim, &told)?[1..] {
        kill("-KILL", process)?;
    }
    victim.kill()?;
    victim.wait()?;
    ensure!(!remains(victim.id()).is_empty(), "there is nothing to sweep");
    shunt_testbed::sweep()?;
    until_gone(victim.id())
}

#[test]
fn a_panic_leaves_nothing() -> Result<()> {
    needs_root();
    let mut names = (String::new(), std::path::PathBuf::new());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let lab = Lab::builder().build().unwrap();
        names = (lab.backend().namespace().to_owned(), lab.dir());
        panic!("on purpose");
    }));
    ensure!(panicked.is_err());
    ensure!(!shunt_sys::netns::Netns::path_of(&names.0).exists() && !names.1.exists(), "{names:?}");
    Ok(())
}
