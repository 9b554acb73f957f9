//! Machines for the tests. Each has an agent with a *store* (which keeps its programs' bodies), and a control group
//! with programs. BPF programs of this group *negotiate* connections: they find out whether both ends run under
//! `shunt run`. A *reference* goes over a connection in place of bytes. The receiver fetches these bytes from the
//! sender's machine if it needs them.

use std::fmt::Write as _;
use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use shunt_ca::{Authority, Request};
use shunt_host::packets;
use shunt_negotiation::{Ends, LOOPBACK};
use shunt_odb::place::Version;
use shunt_odb::store::Limits;
use shunt_run::launch::{LIBRARY, Launch};
use shunt_testbed::{LabId, Watchdog, wait_at_most, wait_for};
use shunt_wire::local::{Header, kind};
use zerocopy::IntoBytes;

/// Key from which the machines of a bed make the tokens in their handshakes. A token proves that the other end runs
/// under `shunt run`.
pub const SHARED_KEY: &[u8; 16] = b"one key for all.";

/// One or more machines, each with its own agent. They share one network and one file system.
pub struct Bed {
    machines: Vec<Machine>,
    pub authority: Authority,
    id: LabId,
    /// This is the last field, so it is dropped last, and removes what the machines leave.
    _watchdog: Watchdog,
}

/// An agent, and what its programs need.
pub struct Machine {
    launch: Launch,
    pub config: PathBuf,
    pub socket: PathBuf,
    group: PathBuf,
    /// Control group of the agent.
    agents: PathBuf,
    agent: Option<Program>,
    pins: PathBuf,
}

/// A running program, which is ended with the test.
pub struct Program(pub Child);

impl Program {
    /// Calls `meanwhile` repeatedly until the program has ended. Asserts that it ends in time, and with success.
    pub fn ends_well(&mut self, deadline: Instant, what: &str, mut meanwhile: impl FnMut()) {
        let ended = wait_at_most(deadline.saturating_duration_since(Instant::now()), what, || {
            meanwhile();
            self.0.try_wait().unwrap()
        });
        let status = ended.unwrap_or_else(|hangs| panic!("a program hangs: {hangs:#}"));
        assert!(status.success(), "{what} ended with {status}");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(rustix::process::Pid::from_child(&self.0), rustix::process::Signal::TERM);
        let has_ended = || matches!(self.0.try_wait(), Ok(Some(_)));
        if wait_at_most(Duration::from_secs(5), "the program ends", has_ended).is_err() {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Returns the path of a file that was built with this test.
fn built(name: &str, package: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let path = own.ancestors().nth(2).unwrap().join(name);
    assert!(path.exists(), "{} is missing: cargo build --release -p {package}", path.display());
    path
}

impl Bed {
    /// Makes one machine. This takes root.
    pub fn new(limits: Limits) -> Self {
        Self::of(1, limits)
    }

    /// Makes a number of machines.
    pub fn of(machines: usize, limits: Limits) -> Self {
        Self::with(machines, limits, "")
    }

    /// Like `of`, with more lines in each `[store]`.
    pub fn with(machines: usize, limits: Limits, more: &str) -> Self {
        Self::made(machines, limits, "", more)
    }

    /// Like `of`, with agents that become `user` once they have started.
    pub fn of_user(machines: usize, limits: Limits, user: &str) -> Self {
        Self::made(machines, limits, &format!("user = {user:?}\n"), "")
    }

    /// Like `of`, with agents that end only when their work under way is done (for up to an hour).
    pub fn draining(machines: usize, limits: Limits) -> Self {
        Self::made(machines, limits, "drain = \"1h\"\n", "")
    }

    /// Makes machines, with more lines in each configuration (`agent`) and in each `[store]` (`more`).
    fn made(machines: usize, limits: Limits, agent: &str, more: &str) -> Self {
        shunt_testbed::needs_root();
        shunt_testbed::mount_bpffs().unwrap();
        let id = LabId::fresh();
        let watchdog = Watchdog::start(&id, false).unwrap();
        fs::set_permissions(id.dir(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let authority = Authority::create(&id.dir().join("ca")).unwrap();
        let addresses: Vec<SocketAddr> = (0..machines).map(|_| own_address()).collect();
        let machine = |index| Machine::start(&id, &authority, index, &addresses, [agent, &section(limits, more)]);
        let bed = Self { machines: (0..machines).map(machine).collect(), authority, id, _watchdog: watchdog };
        bed.machines.iter().for_each(Machine::share_loopback);
        // Waits until the agents know each other. Before that, programs would send bytes in place of references.
        let all = if more.contains("readers") { 0 } else { machines * (machines - 1) };
        bed.machines.iter().for_each(|machine| machine.waits_for_sources(all as u64));
        bed
    }

    /// Returns a machine by its index, or the last one where there are fewer.
    pub fn machine(&self, index: usize) -> &Machine {
        &self.machines[index.min(self.machines.len() - 1)]
    }

    /// Returns the machine that a tier of a chain runs on.
    pub fn machine_of(&self, tier: &str) -> &Machine {
        self.machine(["frontend", "intermediate"].iter().position(|name| *name == tier).unwrap_or(2))
    }

    pub fn machine_mut(&mut self, index: usize) -> &mut Machine {
        &mut self.machines[index]
    }

    /// Returns a command that runs a program under `shunt run`, on the first machine.
    pub fn under_shunt(&self, program: &str) -> Command {
        self.machine(0).under_shunt(program)
    }

    /// Returns a command that runs a program without Shunt on the first machine. The program is in the same control
    /// group as those under `shunt run`, so that nothing else differs.
    pub fn plain(&self, program: &str) -> Command {
        self.machine(0).plain(program)
    }

    /// Returns the sum of a counter over all stores.
    pub fn counted(&self, name: &str) -> u64 {
        self.machines.iter().map(|machine| machine.counted(name)).sum()
    }

    pub fn path(&self) -> PathBuf {
        self.id.dir()
    }
}

/// Returns the text of a `[store]` section.
fn section(limits: Limits, more: &str) -> String {
    let Limits { bytes, segment_bytes, lease_ms, .. } = limits;
    format!(
        "users = [\"www-data\", \"nobody\"]\nmemory_bytes = {bytes}\nsegment_bytes = {segment_bytes}\n\
         lease = \"{lease_ms}ms\"\n{more}"
    )
}

impl Machine {
    fn start(id: &LabId, authority: &Authority, index: usize, all: &[SocketAddr], [more, section]: [&str; 2]) -> Self {
        let name = format!("m{index}");
        let (dir, root) = (id.dir(), shunt_sys::cgroup::root().unwrap());
        // The agent is not in the control group that it negotiates for.
        let [group, agents] = [name.clone(), format!("{name}-agent")].map(|name| id.cgroup(&root, &name));
        fs::create_dir(&group).unwrap();
        fs::create_dir(&agents).unwrap();
        let files = authority.issue(&Request { name: name.clone(), addresses: Vec::new(), days: 1 }).unwrap();
        let socket = dir.join(format!("{name}.sock"));
        let store = dir.join(format!("{name}.store"));
        let drain = if more.contains("drain") { "" } else { "drain = \"0s\"\n" };
        let mut text =
            format!("{drain}name = {name:?}\nlisten = \"{}\"\nsocket = {socket:?}\ncgroup = {group:?}\n", all[index]);
        let pins = id.pins_prefix() + &name;
        writeln!(text, "pins = {pins:?}\n{more}").unwrap();
        writeln!(text, "[tls]\ncertificate = {:?}\nkey = {:?}", files.certificate, files.key).unwrap();
        writeln!(text, "ca = {:?}\ncrl = {:?}", authority.certificate(), authority.list()).unwrap();
        writeln!(text, "[store]\nsocket = {store:?}\n{section}").unwrap();
        for (peer, address) in all.iter().enumerate().filter(|(peer, _)| *peer != index) {
            writeln!(text, "[[peer]]\nname = \"m{peer}\"\naddress = \"{address}\"").unwrap();
        }
        let config = dir.join(format!("{name}.toml"));
        fs::write(&config, text).unwrap();
        let mut launch = Launch::new(&store, &built(LIBRARY, "shunt-preload")).unwrap();
        launch.check_locks();
        let mut machine = Self { launch, config, socket, group, agents, agent: None, pins: pins.into() };
        machine.start_agent();
        machine.launch.enter().unwrap();
        machine
    }

    /// Tells the machine's BPF programs that its peers have loopback addresses, too, because all machines share one
    /// network here. crates/lab/tests/on_demand tests machines in separate networks.
    fn share_loopback(&self) {
        let ends = Ends::open(&self.pins.join("odb")).unwrap();
        ends.set(LOOPBACK, SHARED_KEY).unwrap();
    }

    /// Waits until the agent has heard of `all` sources of its peers: stores that the peers' programs can fetch from.
    fn waits_for_sources(&self, all: u64) {
        wait_for(&format!("the agent knows {all} stores"), || self.counted("peer_sources") >= all).unwrap();
    }

    /// Starts the agent of this machine. It must not be running.
    pub fn start_agent(&mut self) {
        let mut command = Command::new(built("shuntd", "shunt-agent"));
        command.arg("--config").arg(&self.config).env("RUST_LOG", "warn").stdin(Stdio::null());
        shunt_sys::cgroup::start_in(&mut command, &self.agents).unwrap();
        let mut agent = Program(command.spawn().unwrap());
        wait_for("the agent answers", || {
            assert_eq!(agent.0.try_wait().unwrap(), None, "the agent has ended");
            self.ask().is_some()
        })
        .unwrap();
        self.agent = Some(agent);
    }

    /// Returns what `shuntd --check` prints about the configuration.
    pub fn checked(&self) -> String {
        let mut command = Command::new(built("shuntd", "shunt-agent"));
        let output = command.arg("--check").arg("--config").arg(&self.config).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the path for another control group, which the bed removes.
    pub fn group_beside(&self, name: &str) -> PathBuf {
        let mut path = self.group.clone().into_os_string();
        path.push(format!("-{name}"));
        path.into()
    }

    pub fn signal_agent(&self, signal: Signal) {
        let agent = &self.agent.as_ref().unwrap().0;
        rustix::process::kill_process(rustix::process::Pid::from_child(agent), signal).unwrap();
        if signal == Signal::STOP {
            shunt_testbed::until_stopped(agent.id()).unwrap();
        }
    }

    /// Returns whether the agent runs.
    pub fn has_agent(&mut self) -> bool {
        self.agent.as_mut().is_some_and(|agent| agent.0.try_wait().unwrap().is_none())
    }

    /// Ends the agent by a signal.
    pub fn end_agent(&mut self, signal: Signal) {
        self.signal_agent(signal);
        self.agent.take().unwrap().0.wait().unwrap();
    }

    /// Returns all that the agent has counted, or `None` where it does not answer.
    fn ask(&self) -> Option<Value> {
        let agent = packets::connect(&self.socket).ok()?;
        let request = Header { kind: kind::STATS, size: size_of::<Header>() as u32 };
        packets::send(&agent, request.as_bytes(), &[]).ok()?;
        let mut answer = vec![0; 64 << 10];
        let (length, _) = rustix::net::recv(&agent, &mut answer[..], rustix::net::RecvFlags::empty()).ok()?;
        serde_json::from_slice(answer.get(size_of::<Header>()..length)?).ok()
    }

    /// Returns a counter of the processes with this name.
    pub fn program_counted(&self, program: &str, name: &str) -> u64 {
        self.ask().unwrap()["store"]["by_program"][program][name].as_u64().unwrap_or(0)
    }

    /// Returns one of the store's counters.
    pub fn counted(&self, name: &str) -> u64 {
        self.ask().unwrap()["store"][name].as_u64().unwrap_or_else(|| panic!("no counter {name}"))
    }

    pub fn under_shunt(&self, program: &str) -> Command {
        self.in_group(self.launch.command(program))
    }

    pub fn plain(&self, program: &str) -> Command {
        self.in_group(Command::new(program))
    }

    fn in_group(&self, mut command: Command) -> Command {
        shunt_sys::cgroup::start_in(&mut command, &self.group).unwrap();
        command
    }
}

/// Beginning of a Python program that connects to the port in its first argument, once there is a listener.
pub const CONNECTS: &str = "
import os, signal, socket, sys, time
signal.alarm(100)
for turn in range(1000):
    try:
        sock = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
";

/// Returns an address that no other test uses, in this process or another.
fn own_address() -> SocketAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let (next, pid) = (NEXT.fetch_add(1, Ordering::Relaxed), std::process::id());
    SocketAddr::from(([127, next, (pid >> 8) as u8, pid as u8], 7440 + (pid >> 16) as u16))
}

/// Returns an address at which nobody listens. Its port is below ip_local_port_range, so the kernel gives it to no
/// connection before the test listens there.
pub fn free_address() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let turn = std::process::id().wrapping_mul(61).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let address = SocketAddr::from(([127, 0, 0, 1], 10_000 + (turn % 22_000) as u16));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}

/// Waits until a file's last change is long enough ago for the file to be sent by reference, and not copied.
pub fn wait_until_settled(path: &Path) {
    wait_for(&format!("{} has settled", path.display()), || {
        let version = Version::of(fs::File::open(path).unwrap()).unwrap();
        version.is_some_and(|version| version.is_settled())
    })
    .unwrap();
}

pub fn wait_until_listening(address: SocketAddr) {
    wait_for(&format!("somebody listens at {address}"), || TcpStream::connect(address).is_ok()).unwrap();
}

/// Returns pseudo-random bytes from a seed.
pub fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state ^ state >> 31).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
