//! A machine for the tests: a store, a control group in which connections are negotiated, and programs in it.

use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shunt_negotiation::Negotiation;
use shunt_odb::store::Limits;
use shunt_odb::store::server::{Counters, Server};
use shunt_run::launch::{LIBRARY, Launch};

pub struct Bed {
    pub dir: tempfile::TempDir,
    pub counters: Arc<Counters>,
    group: PathBuf,
    launch: Launch,
    _negotiation: Negotiation,
}

/// A program, ended with the test.
pub struct Program(pub Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(rustix::process::Pid::from_child(&self.0), rustix::process::Signal::TERM);
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(5) {
            if let Ok(Some(_)) = self.0.try_wait() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The library that was built with this test.
fn library() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let path = own.ancestors().nth(2).unwrap().join(LIBRARY);
    assert!(path.exists(), "{} is missing: cargo build --release -p shunt-preload", path.display());
    path
}

impl Bed {
    /// `None`, and it says so: it takes root.
    pub fn new(limits: Limits) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: it takes root to load BPF programs");
            return None;
        }
        let dir = tempfile::Builder::new().prefix("shunt-odb-").tempdir().unwrap();
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let group = shunt_sys::cgroup::root().unwrap().join(dir.path().file_name().unwrap());
        fs::create_dir(&group).unwrap();
        let negotiation = Negotiation::attach(&group).unwrap();
        let socket = dir.path().join("store");
        let programs = Server::listen_for_programs(&socket).unwrap();
        fs::set_permissions(&socket, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
        let fetches = TcpListener::bind("127.0.0.1:0").unwrap();
        let holder = fetches.local_addr().unwrap();
        let server = Server::new(limits, programs, fetches, holder).unwrap();
        let counters = server.counters();
        std::thread::spawn(move || server.run().unwrap());
        let launch = Launch::new(&socket, &library()).unwrap();
        Some(Self { dir, counters, group, launch, _negotiation: negotiation })
    }

    /// A program under Shunt.
    pub fn under_shunt(&self, program: &str) -> Command {
        self.in_group(self.launch.command(program))
    }

    /// The same without: in the group, too, so that nothing else differs.
    pub fn plain(&self, program: &str) -> Command {
        self.in_group(Command::new(program))
    }

    fn in_group(&self, mut command: Command) -> Command {
        shunt_sys::cgroup::start_in(&mut command, &self.group).unwrap();
        command
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let began = Instant::now();
        while fs::remove_dir(&self.group).is_err() && began.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// An address that nothing listens at.
pub fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

pub fn wait_until_listening(address: SocketAddr) {
    let began = Instant::now();
    while TcpStream::connect(address).is_err() {
        assert!(began.elapsed() < Duration::from_secs(20), "nobody listens at {address}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Bytes that are different everywhere, from a seed.
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
