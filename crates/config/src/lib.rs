//! An agent's configuration: the TOML file in which an operator describes one machine. `docs/shuntd.md` describes every
//! key. A *peer* is another machine's agent, and a *server* a program that connects to this machine's agent. A *sender*
//! is this machine's kernel socket for a client of a peer. A *parked* sender waits for its next payload. A *payload* is
//! the body of a response. An *offer* is a payload that a backend holds ready, and a *claim* is a frontend's message
//! that asks for it. A *flow* is the steering programs' (BPF) entry for a client's connection. A *store* has the
//! payloads of programs under `shunt run`; a *reference* names bytes of a payload.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustls::pki_types::ServerName;
use serde::Deserialize;
use shunt_logic::limits::Limits;
use shunt_logic::peers::HEARTBEAT_MIN;
use shunt_logic::settings::{BackendSettings, PeerSettings, Settings, can_be_client};
use shunt_logic::store::ends::is_usable;
use shunt_odb::segment::DATA_BYTES_FROM;
use shunt_odb::store::{Limits as StoreLimits, STORE_SOCKET};
use shunt_wire::addresses::ADDRESSES_MAX;
use shunt_wire::local::BOARD_PEERS;
use shunt_wire::peer::is_name;
use shunt_wire::prefixes::PREFIXES_MAX;

use accounts::Account;
use callers::Callers;
use speaks_for::SpeaksFor;

pub mod accounts;
pub mod callers;
mod defaults;
pub mod log;
mod ports;
mod reload;
pub mod speaks_for;

/// Longest heartbeat that may be configured. A peer counts as lost after four heartbeats of silence, which is 40 s with
/// this heartbeat. Clients of a lost peer wait until then.
const HEARTBEAT_MAX: Duration = Duration::from_secs(10);
/// Longest `drain` that may be configured: the time that payloads under way have to end once the agent is told to end.
const DRAIN_MAX: Duration = Duration::from_secs(3600);
/// Bounds of `flow_quiet`, `offer_lifetime`, `progress` and `park`; `park` may also be shorter than TIME_MIN, down to
/// 0. With shorter times, busy machines would be taken for dead ones. With longer times, the state of lost machines and
/// clients would stay for hours.
const TIME_MIN: Duration = Duration::from_secs(1);
const TIME_MAX: Duration = Duration::from_secs(3600);
/// Bounds of a sender's initial send buffer, in bytes. The smallest buffer holds a few segments. The largest buffer
/// holds more bytes than any path has in flight.
const SEND_BUFFER_MIN: usize = 16 << 10;
const SEND_BUFFER_MAX: usize = 64 << 20;
/// Least memory for the bytes that all senders together have queued, in bytes.
const SOCKET_MEMORY_MIN: u64 = 1 << 20;
/// Largest value of `reader_connections`.
const CONNECTIONS_MAX: usize = 65536;

/// Returns the error text for a time outside its bounds, or `None` if the time is within them.
fn time_problem(key: &str, time: Duration, least: Duration) -> Option<String> {
    let shown = |time| humantime(time);
    let is_good = (least..=TIME_MAX).contains(&time);
    (!is_good).then(|| format!("{key} = \"{}\": must be {} to {}", shown(time), shown(least), shown(TIME_MAX)))
}

/// Formats a time as configuration files write it, such as `1h30m`.
fn humantime(time: Duration) -> String {
    humantime_serde::re::humantime::format_duration(time).to_string().replace(' ', "")
}

/// An agent's configuration, checked.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of this machine among agents, and in header fields.
    pub name: String,
    /// Unix socket for the servers of this machine.
    #[serde(default = "default_socket")]
    pub socket: PathBuf,
    /// Id of the group that may connect to `socket`. Without it, only root and the agent's own user may, unless
    /// `users`, `groups` or `observers` is set.
    #[serde(default)]
    pub socket_group: Option<u32>,
    /// Address that other agents connect to.
    pub listen: SocketAddr,
    /// Users whose processes may be servers, besides root and the agent's own user. If `users`, `groups` or `observers`
    /// is set, anybody may connect to `socket`, and the agent decides by the caller's user and groups whom to serve.
    #[serde(default)]
    pub users: Vec<Account>,
    /// Groups whose processes may be servers, besides the group of `socket_group`.
    #[serde(default)]
    pub groups: Vec<Account>,
    /// Users whose processes may ask for the counters, and nothing else.
    #[serde(default)]
    pub observers: Vec<Account>,
    /// User that the agent becomes after it has started as root. Without it, the agent stays root with few
    /// capabilities.
    #[serde(default)]
    pub user: Option<Account>,
    /// Whether the agent restricts its own system calls by seccomp(2).
    #[serde(default = "default_true")]
    pub seccomp: bool,
    /// Certificate by which other agents know this machine, the certificate's key, and the authority that signs all
    /// agents' certificates.
    pub tls: TlsConfig,
    /// Directory in a BPF file system, for the BPF programs and maps that outlive the agent.
    #[serde(default = "default_pins")]
    pub pins: PathBuf,
    /// cgroup v2 directory that holds the servers of this machine. Without this key, the agent looks for the directory
    /// in /proc/mounts.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
    /// Interval at which an agent with nothing else to send sends a heartbeat. An agent that is silent for
    /// [`SILENT_HEARTBEATS`](shunt_logic::peers::SILENT_HEARTBEATS) intervals counts as lost. All machines should have
    /// the same interval.
    #[serde(default = "default_heartbeat", with = "humantime_serde")]
    pub heartbeat: Duration,
    /// Time that payloads under way have to end once the agent is told to end. With 0, the agent ends at once.
    #[serde(default = "default_drain", with = "humantime_serde")]
    pub drain: Duration,
    /// Settings of a frontend. Present if clients connect to this machine.
    #[serde(default)]
    pub frontend: Option<FrontendConfig>,
    /// Settings of a backend. Present if this machine has payloads to offer.
    #[serde(default)]
    pub backend: Option<BackendConfig>,
    /// Settings of the store. Present if programs of this machine run under `shunt run`.
    #[serde(default)]
    pub store: Option<StoreConfig>,
    /// Limits on handoffs, offers, bytes, fetches and servers.
    #[serde(default)]
    pub limits: Limits,
    /// Address at which Prometheus may read the counters by HTTP. Without it, the agent does not serve them by HTTP.
    #[serde(default)]
    pub metrics: Option<SocketAddr>,
    /// Log level, in the syntax of the environment variable RUST_LOG, which takes precedence if it is set.
    #[serde(default = "default_log")]
    pub log: String,
    /// The other machines.
    #[serde(default, rename = "peer")]
    pub peers: Vec<PeerConfig>,
}

/// `[tls]`: files in PEM.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// This agent's certificate, whose DNS name is `name`; then the intermediate certificates up to the authority, if
    /// any.
    pub certificate: PathBuf,
    /// Private key of `certificate`.
    pub key: PathBuf,
    /// Certificate of the authority that signs the certificates of all agents.
    pub ca: PathBuf,
    /// Certificate revocation list of the authority, if it makes one. If `ca` has several authorities, the file has one
    /// list of each.
    #[serde(default)]
    pub crl: Option<PathBuf>,
}

/// Section `[frontend]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontendConfig {
    /// Network interfaces on which clients' packets arrive.
    pub interfaces: Vec<String>,
    /// Time that a flow is remembered after its connection's last packet.
    #[serde(default = "default_flow_quiet", with = "humantime_serde")]
    pub flow_quiet: Duration,
}

/// Section `[backend]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendConfig {
    /// Network interfaces through which payloads leave.
    pub interfaces: Vec<String>,
    /// Source addresses of the senders, at most one of each IP version. If none is named, the agent chooses them.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// TCP ports of the senders: one per peer, chosen by the peer's name. Nothing else may use these ports.
    #[serde(default = "default_ports")]
    pub ports: PortRange,
    /// Time that an offer waits for its claim.
    #[serde(default = "default_offer_lifetime", with = "humantime_serde")]
    pub offer_lifetime: Duration,
    /// Largest number of senders, parked ones included.
    #[serde(default = "default_senders")]
    pub senders: usize,
    /// Initial send buffer of each sender, in bytes. The kernel enlarges it where the round-trip time is long.
    #[serde(default = "default_send_buffer")]
    pub send_buffer_bytes: usize,
    /// Kernel memory for the bytes that all senders together have queued, in bytes. Without this key, a quarter of the
    /// memory that the first number of tcp_mem allows TCP.
    #[serde(default)]
    pub socket_memory_bytes: Option<u64>,
    /// Time that a parked sender waits for the next payload of its connection.
    #[serde(default = "default_park", with = "humantime_serde")]
    pub park: Duration,
    /// Time after which the agent ends a sender whose client acknowledges nothing more.
    #[serde(default = "default_progress", with = "humantime_serde")]
    pub progress: Duration,
}

/// Section `[store]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreConfig {
    /// Unix socket for programs under `shunt run`.
    #[serde(default = "default_store_socket")]
    pub socket: PathBuf,
    /// Users whose programs may use the store, besides those that may be servers.
    #[serde(default)]
    pub users: Vec<Account>,
    /// Groups whose programs may use the store, besides those that may be servers.
    #[serde(default)]
    pub groups: Vec<Account>,
    /// Most memory, in bytes, for payloads that programs have sent and that wait for their readers.
    #[serde(default = "default_store_memory")]
    pub memory_bytes: usize,
    /// Size of the segment of memory that one program gets at a time, in bytes.
    #[serde(default = "default_segment")]
    pub segment_bytes: usize,
    /// Time that a payload waits for its readers: the programs that have references to it.
    #[serde(default = "default_lease", with = "humantime_serde")]
    pub lease: Duration,
    /// Names of the peers whose programs may fetch from this store. Without this key, the programs of all peers may.
    #[serde(default)]
    pub readers: Option<Vec<String>>,
    /// Addresses by which peers know this machine's programs. If none is given, the addresses of the machine's
    /// interfaces are used.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// Largest number of connections of readers, from this machine and others together.
    #[serde(default = "default_reader_connections")]
    pub reader_connections: usize,
}

impl StoreConfig {
    /// Returns the store's limits.
    pub fn limits(&self) -> StoreLimits {
        StoreLimits {
            bytes: self.memory_bytes,
            segment_bytes: self.segment_bytes,
            lease_ms: u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX),
            readers: self.reader_connections,
            ..StoreLimits::default()
        }
    }

    /// Returns whether programs of this peer's machine may fetch from the store.
    pub fn lets_read(&self, peer: &str) -> bool {
        self.readers.as_ref().is_none_or(|readers| readers.iter().any(|reader| reader == peer))
    }

    fn problem(&self, config: &Config) -> Option<String> {
        const PAGE_BYTES: usize = 4096;
        let stranger = self.readers.iter().flatten().find(|name| !config.peers.iter().any(|peer| peer.name == **name));
        if let Some(name) = stranger {
            return Some(format!(
                "[store] readers: \"{name}\" is not the name of a [[peer]]: add one, or remove it from readers"
            ));
        }
        if self.segment_bytes < 16 * PAGE_BYTES || !self.segment_bytes.is_multiple_of(PAGE_BYTES) {
            return Some("[store] segment_bytes: must be at least 65536, and a multiple of 4096".into());
        }
        if self.memory_bytes < self.segment_bytes + DATA_BYTES_FROM {
            return Some(
                "[store] memory_bytes has no room for one segment: make it at least 256 KiB larger than segment_bytes"
                    .into(),
            );
        }
        if !(Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&self.lease) {
            return Some("[store] lease: must be 100ms to 1h".into());
        }
        if let Some(address) = self.addresses.iter().find(|address| !is_usable(**address)) {
            return Some(format!("[store] addresses: other machines cannot reach programs at {address}; remove it"));
        }
        if self.addresses.len() > ADDRESSES_MAX {
            return Some(format!("[store] addresses: at most {ADDRESSES_MAX} addresses; remove some"));
        }
        if self.reader_connections == 0 {
            return Some(
                "[store] reader_connections = 0 lets nobody fetch: write a number above 0, or leave out [store]".into(),
            );
        }
        if self.reader_connections > CONNECTIONS_MAX {
            return Some(format!("[store] reader_connections: must be {CONNECTIONS_MAX} or less"));
        }
        (self.socket == config.socket)
            .then(|| "[store] socket is the same path as `socket`: give the store another one".into())
    }
}

/// Section `[[peer]]`: another machine.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerConfig {
    /// `name` in the peer's own configuration.
    pub name: String,
    /// `listen` in the peer's own configuration: the address to dial. The address does not identify the peer: the
    /// peer's certificate does.
    pub address: SocketAddr,
    /// Addresses by which this peer's clients know the peer. If this machine is a backend, it may send payloads for the
    /// peer with these source addresses. Without this key, this machine may use only the IP address of `address`.
    #[serde(default)]
    pub speaks_for: Option<Vec<SpeaksFor>>,
    /// Whether the peer was taken out of the file while the agent ran. Its number is not given to another peer.
    #[serde(skip)]
    pub is_gone: bool,
}

impl PeerConfig {
    /// Returns whether this peer may have payloads sent to `client` with the source address `server`.
    pub fn may_have_sent(&self, server: SocketAddr, client: IpAddr) -> bool {
        self.speaks_for(server) && can_be_client(client)
    }

    /// Returns whether `server` is an address that this peer may speak for.
    pub fn speaks_for(&self, server: SocketAddr) -> bool {
        self.spoken_for().iter().any(|one| one.covers(server))
    }

    /// Returns the source addresses that this machine may use when it sends payloads for the peer.
    pub fn spoken_for(&self) -> Cow<'_, [SpeaksFor]> {
        match &self.speaks_for {
            Some(all) => Cow::Borrowed(all),
            None => Cow::Owned(vec![SpeaksFor::address(self.address.ip())]),
        }
    }
}

/// A range of TCP ports, such as `"61000-61063"`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(try_from = "String")]
pub struct PortRange(pub RangeInclusive<u16>);

impl TryFrom<String> for PortRange {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let parse = |part: &str| part.trim().parse::<u16>().ok().filter(|port| *port > 0);
        let range = text.split_once('-').and_then(|(low, high)| Some(parse(low)?..=parse(high)?));
        match range {
            Some(range) if !range.is_empty() => Ok(Self(range)),
            _ => Err(format!("\"{text}\" is not a range of ports such as \"61000-61063\"")),
        }
    }
}

fn default_log() -> String {
    "info".into()
}

fn default_true() -> bool {
    true
}

fn default_socket() -> PathBuf {
    "/run/shunt/shuntd.sock".into()
}

fn default_store_socket() -> PathBuf {
    STORE_SOCKET.into()
}

fn default_store_memory() -> usize {
    StoreLimits::default().bytes
}

fn default_segment() -> usize {
    StoreLimits::default().segment_bytes
}

fn default_lease() -> Duration {
    Duration::from_millis(StoreLimits::default().lease_ms)
}

fn default_reader_connections() -> usize {
    StoreLimits::default().readers
}

fn default_pins() -> PathBuf {
    "/sys/fs/bpf/shunt".into()
}

fn default_flow_quiet() -> Duration {
    Duration::from_secs(60)
}

fn default_ports() -> PortRange {
    PortRange(61000..=61063)
}

fn default_heartbeat() -> Duration {
    Duration::from_millis(250)
}

fn default_drain() -> Duration {
    Duration::from_secs(30)
}

fn default_offer_lifetime() -> Duration {
    Duration::from_secs(30)
}

fn default_senders() -> usize {
    16384
}

fn default_send_buffer() -> usize {
    256 << 10
}

fn default_park() -> Duration {
    Duration::from_secs(60)
}

fn default_progress() -> Duration {
    Duration::from_secs(60)
}

/// Errors of a configuration file. Each text says where the error is and, where that is known, what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}: {error}; {}", match error.kind() {
        std::io::ErrorKind::PermissionDenied => "start it as root, or name another file with --config",
        _ => "name another file with --config",
    })]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The kernel's answer.
        error: std::io::Error,
    },
    /// The file's syntax, its keys or their types are wrong.
    #[error(
        "{path}: {}{}",
        error.to_string().trim_end(), advice.as_ref().map(|text| format!(": {text}")).unwrap_or_default()
    )]
    Parse {
        /// Path of the file.
        path: PathBuf,
        /// Error of the TOML parser, with line and column.
        error: Box<toml::de::Error>,
        /// Advice on what to write instead, where it is known.
        advice: Option<String>,
    },
    /// A value is not allowed.
    #[error("{path}: {problem}")]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem, one sentence.
        problem: String,
    },
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// Returns a [`ConfigError`]: the file cannot be read, or cannot be used.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::Read { path: path.into(), error })?;
        Self::parse(&text, path)
    }

    /// Parses and checks a configuration's text. `path` appears in messages only.
    ///
    /// # Errors
    /// Returns [`ConfigError::Parse`] or [`ConfigError::Invalid`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let failed = |error: toml::de::Error| {
            let advice = instead(error.message(), text);
            ConfigError::Parse { path: path.into(), error: Box::new(error), advice }
        };
        let config: Self = toml::from_str(text).map_err(failed)?;
        match config.problem() {
            None => Ok(config),
            Some(problem) => Err(ConfigError::Invalid { path: path.into(), problem }),
        }
    }

    fn problem(&self) -> Option<String> {
        let problem = self.name_problem().or_else(|| self.interval_problem()).or_else(|| self.port_problem());
        if problem.is_some() {
            return problem;
        }
        let long = self.peers.iter().find(|peer| peer.spoken_for().len() > PREFIXES_MAX);
        if let Some(PeerConfig { name, .. }) = long {
            return Some(format!(
                "speaks_for of peer \"{name}\": at most {PREFIXES_MAX} entries; write prefixes, such as 192.0.2.0/24"
            ));
        }
        if self.peers.len() > BOARD_PEERS {
            return Some(format!(
                "{} peers: at most {BOARD_PEERS} are possible; remove some [[peer]] entries",
                self.peers.len()
            ));
        }
        if self.frontend.is_none() && self.backend.is_none() && self.store.is_none() {
            let advice = "an intermediate needs no agent, unless its programs run under `shunt run`";
            return Some(format!("the configuration has no [frontend], [backend] or [store]: {advice}"));
        }
        if let Some(problem) = log::log_problem(&self.log) {
            return Some(format!("log = {:?}: {problem}", self.log));
        }
        if self.frontend.as_ref().is_some_and(|frontend| frontend.interfaces.is_empty()) {
            return Some(
                "[frontend] interfaces is empty: name the interfaces on which clients' packets come in".into(),
            );
        }
        let quiet = self.frontend.as_ref().map(|frontend| frontend.flow_quiet);
        if let Some(problem) = quiet.and_then(|quiet| time_problem("[frontend] flow_quiet", quiet, TIME_MIN)) {
            return Some(problem);
        }
        if let Some(problem) = self.limits.problem() {
            return Some(problem);
        }
        if let Some(problem) = self.store.as_ref().and_then(|store| store.problem(self)) {
            return Some(problem);
        }
        self.backend.as_ref().and_then(|backend| self.backend_problem(backend))
    }

    /// Returns what is wrong with the names of this agent and its peers.
    fn name_problem(&self) -> Option<String> {
        let names = std::iter::once(&self.name).chain(self.peers.iter().map(|peer| &peer.name));
        if let Some(bad) = names.clone().find(|name| !is_name(name)) {
            return Some(format!("name \"{bad}\": must be 1 to 63 characters of a-z 0-9 . _ -"));
        }
        if let Some(bad) = names.clone().find(|name| server_name(name).is_none()) {
            return Some(format!(
                "name \"{bad}\" cannot stand in a certificate: no part may be a number alone, or begin or end with -"
            ));
        }
        let mut seen = std::collections::HashSet::new();
        if let Some(twice) = names.clone().find(|name| !seen.insert(name.as_str())) {
            return Some(format!("name \"{twice}\" stands twice: give each machine a different name"));
        }
        None
    }

    /// Returns what is wrong with the ports that agents listen at and connect to. With port 0, the kernel would choose
    /// a port at each start, and peers could not know the port.
    fn port_problem(&self) -> Option<String> {
        if self.listen.port() == 0 {
            return Some(format!("listen = \"{}\": port 0 is no port; write 7440, as in the examples", self.listen));
        }
        let peer = self.peers.iter().find(|peer| peer.address.port() == 0)?;
        Some(format!("address of peer \"{}\": port 0 is no port; write the port of `listen` there", peer.name))
    }

    /// Returns what is wrong with `heartbeat` and `drain`.
    fn interval_problem(&self) -> Option<String> {
        if self.heartbeat < HEARTBEAT_MIN {
            return Some(
                "heartbeat is shorter than 50ms, and busy machines would be taken for lost: write 50ms or more".into(),
            );
        }
        if self.heartbeat > HEARTBEAT_MAX {
            return Some(
                "heartbeat is longer than 10s, and clients would give up before a lost machine is noticed: write 10s \
                 or less"
                    .into(),
            );
        }
        if self.drain > DRAIN_MAX {
            return Some(
                "drain is longer than 1h, and the service manager would kill the agent long before: write 1h or less"
                    .into(),
            );
        }
        None
    }

    fn backend_problem(&self, backend: &BackendConfig) -> Option<String> {
        let ports = backend.ports.0.clone();
        if backend.interfaces.is_empty() {
            return Some("[backend] interfaces is empty: name the interfaces by which payloads leave".into());
        }
        if let Some(bad) = backend.addresses.iter().find(|address| !is_usable(**address)) {
            return Some(format!("[backend] addresses: {bad} cannot be reached across routers; name another address"));
        }
        let ipv6 = backend.addresses.iter().filter(|address| address.is_ipv6()).count();
        if ipv6 > 1 || backend.addresses.len() - ipv6 > 1 {
            return Some(
                "[backend] addresses has two addresses of one IP version: name at most one IPv4 and one IPv6 address"
                    .into(),
            );
        }
        if ports.len() < self.peers.len() {
            return Some(format!(
                "[backend] ports has {} ports for {} peers: name at least one port for each peer",
                ports.len(),
                self.peers.len()
            ));
        }
        if ports.contains(&self.listen.port()) {
            return Some(format!(
                "the port of `listen`, {}, lies in [backend] ports: choose another port",
                self.listen.port()
            ));
        }
        let times = [
            ("[backend] offer_lifetime", backend.offer_lifetime, TIME_MIN),
            ("[backend] park", backend.park, Duration::ZERO),
            ("[backend] progress", backend.progress, TIME_MIN),
        ];
        if let Some(problem) = times.into_iter().find_map(|(key, time, least)| time_problem(key, time, least)) {
            return Some(problem);
        }
        if !(SEND_BUFFER_MIN..=SEND_BUFFER_MAX).contains(&backend.send_buffer_bytes) {
            return Some(format!("[backend] send_buffer_bytes: must be {SEND_BUFFER_MIN} to {SEND_BUFFER_MAX}"));
        }
        if backend.socket_memory_bytes.is_some_and(|bytes| bytes < SOCKET_MEMORY_MIN) {
            return Some(format!("[backend] socket_memory_bytes: must be at least {SOCKET_MEMORY_MIN}"));
        }
        (!(1..=65536).contains(&backend.senders)).then(|| "[backend] senders: must be 1 to 65536".into())
    }

    /// Returns the logic's settings. `ports` are the senders' ports for each peer ([`Config::sender_ports`]).
    pub fn settings(&self, ports: &[u16]) -> Settings {
        let peer = |(index, peer): (usize, &PeerConfig)| PeerSettings {
            name: peer.name.clone(),
            address: peer.address,
            is_dialled: self.dials(peer),
            port: ports.get(index).copied().unwrap_or(0),
            speaks_for: peer.spoken_for().iter().map(SpeaksFor::prefix).collect(),
            may_read_store: self.store.as_ref().is_some_and(|store| store.lets_read(&peer.name)),
            is_gone: peer.is_gone,
        };
        let backend = |backend: &BackendConfig| BackendSettings {
            senders: backend.senders,
            offer_lifetime: backend.offer_lifetime,
        };
        Settings {
            name: self.name.clone(),
            heartbeat: self.heartbeat,
            limits: self.limits,
            is_frontend: self.frontend.is_some(),
            backend: self.backend.as_ref().map(backend),
            has_store: self.store.is_some(),
            peers: self.peers.iter().enumerate().map(peer).collect(),
        }
    }

    /// Returns whether anybody may connect to the Unix socket, because the agent checks each caller's user and groups.
    pub fn asks_callers(&self) -> bool {
        [&self.users, &self.groups, &self.observers].iter().any(|accounts| !accounts.is_empty())
    }

    /// Returns who may use the Unix socket.
    ///
    /// # Errors
    /// Returns a sentence if this machine does not know one of the names.
    pub fn callers(&self) -> Result<Callers, String> {
        self.callers_with(&[], &[])
    }

    /// Returns who may use the socket of the store.
    ///
    /// # Errors
    /// Returns the errors of [`Self::callers`].
    pub fn programs(&self, store: &StoreConfig) -> Result<Callers, String> {
        self.callers_with(&store.users, &store.groups)
    }

    fn callers_with(&self, users: &[Account], groups: &[Account]) -> Result<Callers, String> {
        let own = self.user.as_ref().map_or(Ok(rustix::process::geteuid().as_raw()), Account::user);
        let own = own.map_err(|error| format!("user: {error}"))?;
        let of_socket = self.socket_group.map(Account::Number);
        let groups: Vec<Account> = self.groups.iter().chain(groups).cloned().chain(of_socket).collect();
        Callers::new(own, &[&self.users, users].concat(), &groups, &self.observers)
    }

    /// Returns the number of the peer that a certificate belongs to. `is_of` takes a name, and says whether the
    /// certificate carries that name.
    pub fn peer_of(&self, is_of: impl Fn(&str) -> bool) -> Option<usize> {
        self.peers.iter().position(|peer| !peer.is_gone && is_of(&peer.name))
    }

    /// Returns whether `address` is that of a configured peer. Connections from peers' addresses have precedence, but
    /// connections from other addresses are accepted, too.
    pub fn is_peers_address(&self, address: IpAddr) -> bool {
        self.peers.iter().any(|peer| !peer.is_gone && peer.address.ip() == address.to_canonical())
    }

    /// Returns whether this agent connects to the peer: in each pair of agents, the one whose name sorts first
    /// connects.
    pub fn dials(&self, peer: &PeerConfig) -> bool {
        self.name < peer.name
    }
}

/// Returns a name as the DNS name that certificates carry, or `None` if it cannot be a DNS name.
pub fn server_name(name: &str) -> Option<ServerName<'_>> {
    ServerName::try_from(name).ok().filter(|name| matches!(name, ServerName::DnsName(_)))
}

/// Returns what to write in place of a text that the TOML parser refuses, or `None` if no advice is known. `said` is
/// the parser's message.
fn instead(said: &str, text: &str) -> Option<String> {
    if text.lines().any(|line| line.split('#').next().is_some_and(|line| line.trim() == "[peer]")) {
        return Some("write `[[peer]]` with two brackets on each side, because there can be several".into());
    }
    if said.contains("socket address") {
        return Some(
            "write ADDRESS:PORT, such as \"10.0.0.4:7440\" or \"[2001:db8::4]:7440\"; host names are not looked up"
                .into(),
        );
    }
    if said.contains("expected a duration") {
        return Some("write a number with a unit, in quotes, such as \"250ms\", \"30s\" or \"1h\"".into());
    }
    if let Some(value) = said.strip_suffix(", expected a sequence") {
        // The parser shows a text in quotes, and a number in `...`.
        let value = value.split_once(['"', '`']).and_then(|(_, rest)| rest.rsplit_once(['"', '`']));
        let quote = if said.contains('"') { "\"" } else { "" };
        return Some(format!("write a list: [{quote}{}{quote}]", value.map_or("...", |(value, _)| value)));
    }
    if said.contains("enum Account") {
        return Some("write a name in quotes, such as \"www-data\", or a number without quotes, such as 33".into());
    }
    let key = said.strip_prefix("unknown field `")?.split('`').next()?;
    is_of_no_section(key).then(|| format!("`{key}` belongs to no section: write it before the first line in brackets"))
}

/// Returns whether `key` is a key of [`Config`] itself, outside all sections.
fn is_of_no_section(key: &str) -> bool {
    let alone = toml::from_str::<Config>(&format!("{key} = []"));
    alone.is_err_and(|error| !error.message().starts_with("unknown field"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        name = "be1"
        listen = "10.0.0.4:7440"
        [tls]
        certificate = "be1.pem"
        key = "be1.key"
        ca = "ca.pem"
        [backend]
        interfaces = ["eth0"]
        offer_lifetime = "10s"
        [[peer]]
        name = "fe1"
        address = "10.0.0.2:7440"
    "#;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("shuntd.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_sensible() {
        let config = parse(GOOD).unwrap();
        let backend = config.backend.as_ref().unwrap();
        assert_eq!(backend.ports.0, 61000..=61063);
        assert_eq!(backend.offer_lifetime, Duration::from_secs(10));
        assert_eq!(config.heartbeat, Duration::from_millis(250));
        assert_eq!(config.drain, Duration::from_secs(30));
        assert!(config.dials(&config.peers[0]));
        assert!(config.is_peers_address("10.0.0.2".parse().unwrap()));
        let client = "198.51.100.7".parse().unwrap();
        assert!(config.peers[0].may_have_sent("10.0.0.2:80".parse().unwrap(), client), "its own address");
        assert!(!config.peers[0].may_have_sent("192.0.2.1:80".parse().unwrap(), client), "and no other");
        assert!(!config.is_peers_address("10.0.0.3".parse().unwrap()));
    }

    #[test]
    fn every_example_of_the_documents_is_a_configuration() {
        let docs = include_str!("../../../docs/shuntd.md");
        let examples: Vec<_> = docs.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
        assert_eq!(examples.len(), 3);
        for example in examples {
            parse(example).unwrap();
        }
    }

    #[test]
    fn each_mistake_is_named() {
        let cases = [
            (GOOD.replace("\"be1\"", "\"be 1\""), "a-z"),
            (GOOD.replace("\"fe1\"", "\"be1\""), "twice"),
            (GOOD.replace("[backend]", "[backend]\nports = \"9-3\""), "range of ports"),
            (GOOD.replace("[backend]", "[backend]\nports = \"7000-8000\""), "choose another"),
            (GOOD.replace("[[peer]]", "[[peer]]\nspeaks_for = [\"fe1\"]"), "not an address"),
            (GOOD.replace("\"eth0\"", ""), "interfaces is empty"),
            (GOOD.replace("[backend]", "[backend]\naddresses = [\"fe80::1\"]"), "across routers"),
            (GOOD.replace("[backend]", "[backend]\naddresses = [\"10.0.0.4\", \"10.0.0.5\"]"), "two addresses of one"),
            (GOOD.replace("listen", "listten"), "listten"),
            (GOOD.replace("10s", "soon"), "offer_lifetime"),
            (GOOD.replace("10s", "500ms"), "[backend] offer_lifetime = \"500ms\": must be 1s to 1h"),
            (GOOD.replace("10s", "2h"), "offer_lifetime = \"2h\""),
            (GOOD.replace("[backend]", "[backend]\npark = \"90m\""), "park = \"1h30m\": must be 0s to 1h"),
            (GOOD.replace("[backend]", "[backend]\nprogress = \"0s\""), "progress = \"0s\""),
            (GOOD.replace("[backend]", "[backend]\nsend_buffer_bytes = 0"), "send_buffer_bytes: must be 16384"),
            (GOOD.replace("[backend]", "[backend]\nsocket_memory_bytes = 0"), "socket_memory_bytes: must be at least"),
            (
                GOOD.replace("[backend]", "[frontend]\ninterfaces = [\"eth0\"]\nflow_quiet = \"0s\"\n[backend]"),
                "flow_quiet",
            ),
            (
                GOOD.replace("[backend]", "[store]\nreader_connections = 100000\n[backend]"),
                "reader_connections: must be 65536",
            ),
            (GOOD.replace("[backend]", "[limits]\nfetches_per_peer = 0\n[backend]"), "fetches_per_peer = 0"),
            (GOOD.replace("[backend]", "[store]\nreaders = [\"be7\"]\n[backend]"), "the name of a [[peer]]"),
            (GOOD.replace("[backend]", "[store]\nmemory_bytes = 9999\n[backend]"), "no room for one segment"),
            (GOOD.replace("[backend]", "[store]\nsegment_bytes = 70000\n[backend]"), "a multiple of 4096"),
            (GOOD.replace("[backend]", "[store]\nlease = \"2h\"\n[backend]"), "100ms to 1h"),
            (GOOD.replace("[backend]", "[store]\nsocket = \"/run/shunt/shuntd.sock\"\n[backend]"), "the same path"),
            (GOOD.replace("[backend]", "[limits]\nhandoffs = 0\n[backend]"), "handoffs = 0"),
            (GOOD.replace("[backend]", "[limits]\noffer = 1\n[backend]"), "offer"),
            (GOOD.replace("10.0.0.4:7440", "10.0.0.4:0"), "listen = \"10.0.0.4:0\": port 0 is no port"),
            (GOOD.replace("10.0.0.2:7440", "10.0.0.2:0"), "address of peer \"fe1\": port 0"),
            (GOOD.replace("listen", "log = \"verbose\"\nlisten"), "log = \"verbose\": \"verbose\" is no level: write"),
            (GOOD.replace("listen", "heartbeat = \"1ms\"\nlisten"), "shorter than 50ms"),
            (GOOD.replace("listen", "drain = \"2h\"\nlisten"), "longer than 1h"),
            (GOOD.replace("listen", "heartbeat = \"11s\"\nlisten"), "longer than 10s"),
            (GOOD.replace("listen", "heartbeat = \"500000000000years\"\nlisten"), "heartbeat"),
            (GOOD.replace("\"fe1\"", "\"10.0\""), "certificate"),
            (GOOD.replace("ca =", "# ca ="), "missing field `ca`"),
            (GOOD.split("[backend]").next().unwrap().into(), "no [frontend], [backend] or [store]"),
        ];
        are_named(&cases);
    }

    /// Asserts that each text is refused, with an error that contains the words beside it.
    fn are_named(cases: &[(String, &str)]) {
        for (text, expected) in cases {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{error:?} should say {expected:?}");
        }
    }

    #[test]
    fn what_the_parser_refuses_comes_with_advice() {
        are_named(&[
            (GOOD.replace("[\"eth0\"]", "\"eth0\""), "write a list: [\"eth0\"]"),
            (GOOD.replace("[\"eth0\"]", "7"), "write a list: [7]"),
            (GOOD.replace("listen", "heartbeat = 250\nlisten"), "in quotes, such as \"250ms\""),
            (GOOD.replace("listen", "users = [true]\nlisten"), "a number without quotes"),
            (GOOD.replace("[[peer]]", "[peer]"), "write `[[peer]]`"),
            (GOOD.replace("[[peer]]", "[peer] # fe1"), "write `[[peer]]`"),
            (GOOD.replace("10.0.0.4:7440", "10.0.0.4"), "ADDRESS:PORT"),
            (GOOD.replace("10.0.0.2:7440", "fe1.example.org:7440"), "ADDRESS:PORT"),
            (format!("{GOOD}\nmetrics = \"127.0.0.1:9440\""), "`metrics` belongs to no section"),
            (GOOD.replace("[backend]", "[backend]\nusers = [\"www-data\"]"), "`users` belongs to no section"),
        ]);
        let typo = parse(&GOOD.replace("interfaces", "interface")).unwrap_err();
        assert!(!typo.contains("no section"), "{typo}");
    }
}
