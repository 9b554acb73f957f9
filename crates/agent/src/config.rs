//! What an operator says about one machine: a TOML file. `docs/shuntd.md` describes every key.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use shunt_odb::segment::DATA_BYTES_FROM;
use shunt_odb::store::{Limits as StoreLimits, STORE_SOCKET};
use shunt_wire::addresses::ADDRESSES_MAX;
use shunt_wire::local::BOARD_PEERS;
use shunt_wire::peer::is_name;
use shunt_wire::prefixes::PREFIXES_MAX;

use crate::addresses::is_usable;
use crate::callers::{Account, Callers};
use crate::credentials::server_name;
use crate::limits::Limits;
use crate::speaks_for::{SpeaksFor, can_be_client};

/// So many heartbeats without a word, and the peer is lost.
pub const SILENT_HEARTBEATS: u32 = 4;

/// Less, and machines that are only busy would be taken for lost.
pub const HEARTBEAT_MIN: Duration = Duration::from_millis(50);
/// More of them, and what waits for a machine that is lost waits for minutes.
const HEARTBEAT_MAX: Duration = Duration::from_secs(10);
/// Most time for what is under way when the agent is told to end.
const DRAIN_MAX: Duration = Duration::from_secs(3600);

/// A configuration that makes sense.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// What other agents and header fields call this machine.
    pub name: String,
    /// Unix socket for the servers of this machine.
    #[serde(default = "default_socket")]
    pub socket: PathBuf,
    /// Group that may connect to it, by number; without it only root and the agent's own user.
    #[serde(default)]
    pub socket_group: Option<u32>,
    /// Where other agents connect.
    pub listen: SocketAddr,
    /// Users whose processes may be servers, beside root and the agent's own. With `users`, `groups` or `observers`
    /// anybody may connect to the socket, and the agent decides.
    #[serde(default)]
    pub users: Vec<Account>,
    /// Groups whose processes may be servers; that of `socket_group` may.
    #[serde(default)]
    pub groups: Vec<Account>,
    /// Users whose processes may ask for the counters, and nothing else.
    #[serde(default)]
    pub observers: Vec<Account>,
    /// Whom the agent becomes once it has started as root; without it it stays root with few capabilities.
    #[serde(default)]
    pub user: Option<Account>,
    /// Whether the agent restricts its own system calls.
    #[serde(default = "default_true")]
    pub seccomp: bool,
    /// Who this machine is to other agents.
    pub tls: TlsConfig,
    /// Directory in a BPF file system: maps that outlive the agent.
    #[serde(default = "default_pins")]
    pub pins: PathBuf,
    /// cgroup v2 directory that holds the servers of this machine; found in /proc/mounts where it is not given.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
    /// An agent that has nothing else to say says so this often; one that says nothing for [`SILENT_HEARTBEATS`] of
    /// these is taken for lost. The same on all machines.
    #[serde(default = "default_heartbeat", with = "humantime_serde")]
    pub heartbeat: Duration,
    /// How long what is under way may take to end once the agent is told to; 0: it ends at once.
    #[serde(default = "default_drain", with = "humantime_serde")]
    pub drain: Duration,
    /// Present where clients connect to this machine.
    #[serde(default)]
    pub frontend: Option<FrontendConfig>,
    /// Present where this machine has payloads to offer.
    #[serde(default)]
    pub backend: Option<BackendConfig>,
    /// Present where programs run under `shunt run`.
    #[serde(default)]
    pub store: Option<StoreConfig>,
    /// How much this agent takes on.
    #[serde(default)]
    pub limits: Limits,
    /// Where counters may be asked for in Prometheus' way; nowhere where it is not given.
    #[serde(default)]
    pub metrics: Option<SocketAddr>,
    /// The other machines.
    #[serde(default, rename = "peer")]
    pub peers: Vec<PeerConfig>,
}

/// `[tls]`: files in PEM.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// This agent's certificate, whose DNS name is `name`; then those between it and the authority, if any.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority that signs the certificates of all agents.
    pub ca: PathBuf,
    /// Its list of certificates that are good no longer, if it makes one; of each authority one, where there are more.
    #[serde(default)]
    pub crl: Option<PathBuf>,
}

/// `[frontend]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontendConfig {
    /// Network ports that clients' packets come in on.
    pub interfaces: Vec<String>,
    /// How long a flow is remembered after its connection's last packet.
    #[serde(default = "default_flow_quiet", with = "humantime_serde")]
    pub flow_quiet: Duration,
}

/// `[backend]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendConfig {
    /// Network ports that payloads leave by.
    pub interfaces: Vec<String>,
    /// Addresses of the sockets that send them, one of each IP version; found where none is named.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// TCP ports of the sockets that send them, one per peer: nothing else may use them.
    #[serde(default = "default_ports")]
    pub ports: PortRange,
    /// How long an offer waits for its claim.
    #[serde(default = "default_offer_lifetime", with = "humantime_serde")]
    pub offer_lifetime: Duration,
    /// Sockets in all, parked ones included.
    #[serde(default = "default_senders")]
    pub senders: usize,
    /// Send buffer in bytes that each begins with; the kernel makes it larger where the way is long.
    #[serde(default = "default_send_buffer")]
    pub send_buffer_bytes: usize,
    /// Kernel memory for what all of them have queued, in bytes; a quarter of tcp_mem's first number where it is not
    /// given.
    #[serde(default)]
    pub socket_memory_bytes: Option<u64>,
    /// How long a socket waits for the next payload on its connection.
    #[serde(default = "default_park", with = "humantime_serde")]
    pub park: Duration,
    /// How long a client may acknowledge nothing.
    #[serde(default = "default_progress", with = "humantime_serde")]
    pub progress: Duration,
}

/// `[store]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreConfig {
    /// Unix socket for programs under `shunt run`.
    #[serde(default = "default_store_socket")]
    pub socket: PathBuf,
    /// Users whose programs may use it, beside those that may be servers.
    #[serde(default)]
    pub users: Vec<Account>,
    /// The same for groups.
    #[serde(default)]
    pub groups: Vec<Account>,
    /// Most memory in bytes for what programs have sent and nobody has had yet.
    #[serde(default = "default_store_memory")]
    pub memory_bytes: usize,
    /// Of that, what one program gets at a time.
    #[serde(default = "default_segment")]
    pub segment_bytes: usize,
    /// How long a payload waits for whoever has a reference to it.
    #[serde(default = "default_lease", with = "humantime_serde")]
    pub lease: Duration,
    /// Peers whose programs may fetch; all where it is not given.
    #[serde(default)]
    pub readers: Option<Vec<String>>,
    /// The addresses by which peers know this machine's programs; those of its interfaces where none is given.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// Connections of readers, on this machine and others.
    #[serde(default = "default_reader_connections")]
    pub reader_connections: usize,
}

impl StoreConfig {
    /// What the store may take.
    pub fn limits(&self) -> StoreLimits {
        StoreLimits {
            bytes: self.memory_bytes,
            segment_bytes: self.segment_bytes,
            lease_ms: u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX),
            readers: self.reader_connections,
            ..StoreLimits::default()
        }
    }

    /// Whether programs of that peer's machine may fetch.
    pub fn lets_read(&self, peer: &str) -> bool {
        self.readers.as_ref().is_none_or(|readers| readers.iter().any(|reader| reader == peer))
    }

    fn problem(&self, config: &Config) -> Option<String> {
        const PAGE_BYTES: usize = 4096;
        let stranger = self.readers.iter().flatten().find(|name| !config.peers.iter().any(|peer| peer.name == **name));
        if let Some(name) = stranger {
            return Some(format!("[store] readers: \"{name}\" is no [[peer]]"));
        }
        if self.segment_bytes < 16 * PAGE_BYTES || !self.segment_bytes.is_multiple_of(PAGE_BYTES) {
            return Some("[store] segment_bytes: at least 65536, and a multiple of 4096".into());
        }
        if self.memory_bytes < self.segment_bytes + DATA_BYTES_FROM {
            return Some("[store] memory_bytes has no room for one segment: make it at least 256 KiB more".into());
        }
        if !(Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&self.lease) {
            return Some("[store] lease: 100ms to 1h".into());
        }
        if let Some(address) = self.addresses.iter().find(|address| !is_usable(**address)) {
            return Some(format!("[store] addresses: no other machine can know programs by {address}"));
        }
        if self.addresses.len() > ADDRESSES_MAX {
            return Some(format!("[store] addresses: {ADDRESSES_MAX} at most"));
        }
        if self.reader_connections == 0 {
            return Some("[store] reader_connections = 0: nobody could have what is kept; leave out [store]".into());
        }
        (self.socket == config.socket).then(|| "[store] socket is that of servers: give it a path of its own".into())
    }
}

/// `[[peer]]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerConfig {
    /// Its `name`.
    pub name: String,
    /// Its `listen`: where to dial. Who it is, its certificate says.
    pub address: SocketAddr,
    /// Backend: addresses that this peer's clients know it by; without it that of `address` alone.
    #[serde(default)]
    pub speaks_for: Option<Vec<SpeaksFor>>,
}

impl PeerConfig {
    /// Whether a payload may go out as `server` to `client` because this peer says so.
    pub fn may_have_sent(&self, server: SocketAddr, client: IpAddr) -> bool {
        self.speaks_for(server) && can_be_client(client)
    }

    /// Whether that is a server of this peer's.
    pub fn speaks_for(&self, server: SocketAddr) -> bool {
        self.spoken_for().iter().any(|one| one.covers(server))
    }

    /// Addresses that this machine sends as for the peer.
    pub fn spoken_for(&self) -> Cow<'_, [SpeaksFor]> {
        match &self.speaks_for {
            Some(all) => Cow::Borrowed(all),
            None => Cow::Owned(vec![SpeaksFor::address(self.address.ip())]),
        }
    }
}

/// `"61000-61063"`
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

/// A configuration that does not make sense. Each text says where and what to write instead.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file.
    #[error("cannot read {path}: {error}; {}", match error.kind() {
        std::io::ErrorKind::PermissionDenied => "start it as root, or name another file with --config",
        _ => "name another file with --config",
    })]
    Read {
        /// Which.
        path: PathBuf,
        /// The kernel's answer.
        error: std::io::Error,
    },
    /// Its syntax, its keys or their types.
    #[error("{path}: {}{}", error.to_string().trim_end(), advice.as_ref().map(|text| format!(": {text}")).unwrap_or_default())]
    Parse {
        /// Which.
        path: PathBuf,
        /// With line and column.
        error: Box<toml::de::Error>,
        /// Says what to write instead, where that is known.
        advice: Option<String>,
    },
    /// What it says.
    #[error("{path}: {problem}")]
    Invalid {
        /// Which.
        path: PathBuf,
        /// One sentence.
        problem: String,
    },
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::Read { path: path.into(), error })?;
        Self::parse(&text, path)
    }

    /// Checks a text; `path` is for messages.
    ///
    /// # Errors
    /// See [`ConfigError`].
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
        let names = std::iter::once(&self.name).chain(self.peers.iter().map(|peer| &peer.name));
        if let Some(bad) = names.clone().find(|name| !is_name(name)) {
            return Some(format!("name \"{bad}\": 1 to 63 of a-z 0-9 . _ -"));
        }
        if let Some(bad) = names.clone().find(|name| server_name(name).is_none()) {
            return Some(format!("name \"{bad}\" is not one that a certificate can have: no number, no - at an end"));
        }
        let mut seen = std::collections::HashSet::new();
        if let Some(twice) = names.clone().find(|name| !seen.insert(name.as_str())) {
            return Some(format!("name \"{twice}\" stands twice: every machine has a name of its own"));
        }
        let long = self.peers.iter().find(|peer| peer.spoken_for().len() > PREFIXES_MAX);
        if let Some(PeerConfig { name, .. }) = long {
            return Some(format!(
                "speaks_for of peer \"{name}\": at most {PREFIXES_MAX}; write prefixes, such as 192.0.2.0/24"
            ));
        }
        if self.peers.len() > BOARD_PEERS {
            return Some(format!("{} peers: at most {BOARD_PEERS}", self.peers.len()));
        }
        if self.frontend.is_none() && self.backend.is_none() && self.store.is_none() {
            let advice = "an intermediate needs no agent, unless its programs run under `shunt run`";
            return Some(format!("neither [frontend] nor [backend] nor [store]: {advice}"));
        }
        if self.heartbeat < HEARTBEAT_MIN {
            return Some("heartbeat is shorter than 50ms: machines that are only busy would be taken for lost".into());
        }
        if self.heartbeat > HEARTBEAT_MAX {
            return Some("heartbeat is longer than 10s: clients would give up before a lost machine is noticed".into());
        }
        if self.drain > DRAIN_MAX {
            return Some("drain is longer than 1h: whatever stops the agent would kill it long before".into());
        }
        if self.frontend.as_ref().is_some_and(|frontend| frontend.interfaces.is_empty()) {
            return Some("[frontend] interfaces is empty: name the ports that clients come in on".into());
        }
        if let Some(problem) = self.limits.problem() {
            return Some(problem);
        }
        if let Some(problem) = self.store.as_ref().and_then(|store| store.problem(self)) {
            return Some(problem);
        }
        self.backend.as_ref().and_then(|backend| self.backend_problem(backend))
    }

    fn backend_problem(&self, backend: &BackendConfig) -> Option<String> {
        let ports = backend.ports.0.clone();
        if backend.interfaces.is_empty() {
            return Some("[backend] interfaces is empty: name the ports that payloads leave by".into());
        }
        if let Some(bad) = backend.addresses.iter().find(|address| !is_usable(**address)) {
            return Some(format!("[backend] addresses: {bad} is not one that other machines reach across routers"));
        }
        let ipv6 = backend.addresses.iter().filter(|address| address.is_ipv6()).count();
        if ipv6 > 1 || backend.addresses.len() - ipv6 > 1 {
            return Some("[backend] addresses has two of one IP version: name one of each at most".into());
        }
        if ports.len() < self.peers.len() {
            return Some(format!("[backend] ports has {} ports for {} peers", ports.len(), self.peers.len()));
        }
        if ports.contains(&self.listen.port()) {
            return Some(format!("listen port {} lies in [backend] ports: choose another", self.listen.port()));
        }
        if backend.offer_lifetime < Duration::from_secs(1) {
            return Some("[backend] offer_lifetime is shorter than 1s".into());
        }
        (!(1..=65536).contains(&backend.senders)).then(|| "[backend] senders: 1 to 65536".into())
    }

    /// Whether anybody may connect to the Unix socket, to be asked who they are.
    pub fn asks_callers(&self) -> bool {
        [&self.users, &self.groups, &self.observers].iter().any(|accounts| !accounts.is_empty())
    }

    /// Who may use the Unix socket.
    ///
    /// # Errors
    /// A sentence: a name that this machine does not know.
    pub fn callers(&self) -> Result<Callers, String> {
        self.callers_with(&[], &[])
    }

    /// Who may use the socket of the store.
    ///
    /// # Errors
    /// As [`Self::callers`].
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

    /// Whether a peer is dialled at this address. Connections from there come first; others are good too.
    pub fn is_peers_address(&self, address: IpAddr) -> bool {
        self.peers.iter().any(|peer| peer.address.ip() == address.to_canonical())
    }

    /// Of each pair of agents, the one whose name sorts first connects.
    pub fn dials(&self, peer: &PeerConfig) -> bool {
        self.name < peer.name
    }
}

/// Says what to write in place of a text that TOML's parser refuses, by the parser's message.
fn instead(said: &str, text: &str) -> Option<String> {
    if text.lines().any(|line| line.split('#').next().is_some_and(|line| line.trim() == "[peer]")) {
        return Some("write `[[peer]]`, with two brackets on each side: there may be several".into());
    }
    if said.contains("socket address") {
        return Some(
            "write ADDRESS:PORT, such as \"10.0.0.4:7440\" or \"[2001:db8::4]:7440\"; names are not looked up".into(),
        );
    }
    let key = said.strip_prefix("unknown field `")?.split('`').next()?;
    is_of_no_section(key).then(|| format!("`{key}` belongs to no section: write it before the first line in brackets"))
}

/// Whether that is a key of [`Config`] itself.
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
            (GOOD.replace("[backend]", "[backend]\naddresses = [\"10.0.0.4\", \"10.0.0.5\"]"), "two of one"),
            (GOOD.replace("listen", "listten"), "listten"),
            (GOOD.replace("10s", "soon"), "offer_lifetime"),
            (GOOD.replace("[backend]", "[store]\nreaders = [\"be7\"]\n[backend]"), "no [[peer]]"),
            (GOOD.replace("[backend]", "[store]\nmemory_bytes = 9999\n[backend]"), "no room for one segment"),
            (GOOD.replace("[backend]", "[store]\nsegment_bytes = 70000\n[backend]"), "a multiple of 4096"),
            (GOOD.replace("[backend]", "[store]\nlease = \"2h\"\n[backend]"), "100ms to 1h"),
            (GOOD.replace("[backend]", "[store]\nsocket = \"/run/shunt/shuntd.sock\"\n[backend]"), "of its own"),
            (GOOD.replace("[backend]", "[limits]\nhandoffs = 0\n[backend]"), "handoffs = 0"),
            (GOOD.replace("[backend]", "[limits]\noffer = 1\n[backend]"), "offer"),
            (GOOD.replace("listen", "heartbeat = \"1ms\"\nlisten"), "shorter than 50ms"),
            (GOOD.replace("listen", "drain = \"2h\"\nlisten"), "longer than 1h"),
            (GOOD.replace("listen", "heartbeat = \"11s\"\nlisten"), "longer than 10s"),
            (GOOD.replace("listen", "heartbeat = \"500000000000years\"\nlisten"), "heartbeat"),
            (GOOD.replace("\"fe1\"", "\"10.0\""), "certificate"),
            (GOOD.replace("ca =", "# ca ="), "missing field `ca`"),
            (GOOD.split("[backend]").next().unwrap().into(), "neither"),
            (GOOD.replace("[[peer]]", "[peer]"), "write `[[peer]]`"),
            (GOOD.replace("[[peer]]", "[peer] # fe1"), "write `[[peer]]`"),
            (GOOD.replace("10.0.0.4:7440", "10.0.0.4"), "ADDRESS:PORT"),
            (GOOD.replace("10.0.0.2:7440", "fe1.example.org:7440"), "ADDRESS:PORT"),
            (format!("{GOOD}\nmetrics = \"127.0.0.1:9440\""), "`metrics` belongs to no section"),
            (GOOD.replace("[backend]", "[backend]\nusers = [\"www-data\"]"), "`users` belongs to no section"),
        ];
        for (text, expected) in cases {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(expected), "{error:?} should say {expected:?}");
        }
        let typo = parse(&GOOD.replace("interfaces", "interface")).unwrap_err();
        assert!(!typo.contains("no section"), "{typo}");
    }
}
