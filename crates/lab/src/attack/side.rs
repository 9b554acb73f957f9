//! One of the two services under attack (nginx with Shunt, and plain nginx), and one turn of the attack. A *shortcut*
//! is a response whose body bypasses tiers. An *agent* is Shunt's daemon on a machine.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::honest::{FILES, Seen, load};
use super::{Hostile, greedy, locals, outside, peer};
use crate::faults::ProcessUse;
use crate::host::{Host, Role};
use crate::lab::Lab;
use crate::link::Link;
use crate::random::Random;
use crate::service::{Options, Service, Settings};

/// Hosts of the clients: the honest ones, the stranger and the greedy one.
const HONEST: &str = "client1";
const STRANGER: &str = "client2";
const GREEDY: &str = "client3";
/// Link of the greedy client: rate in bits per second, and size of the queue in bytes.
const THIN: (u64, usize) = (20_000_000, 64 << 10);
const LONG_FILE: (&str, u64) = ("32m", 32 << 20);
/// Longest wait for the first shortcut.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Results of one turn.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) seen: Seen,
    pub(super) packets: u64,
    pub(super) messages: u64,
    pub(super) frames: u64,
    /// Bytes that the service sent towards the greedy client, lost ones included.
    pub(super) drawn: u64,
    /// Bytes that reached the greedy client.
    pub(super) received: u64,
}

impl Turn {
    /// Bytes that the greedy client made the service send, per byte that reached it.
    pub(super) fn drawn_per_received(&self) -> f64 {
        self.drawn as f64 / self.received.max(1) as f64
    }
}

/// A service, with Shunt or without, and its lab.
pub(super) struct Side<'lab> {
    lab: &'lab Lab,
    pub(super) service: Service<'lab>,
    shunt: bool,
    processes: BTreeSet<(String, &'static str, i32)>,
}

/// Builds the hosts of one service.
pub(super) fn build_lab(seed: u64) -> Result<Lab> {
    let thin = Link::wan(Duration::from_millis(5)).rate(THIN.0, THIN.1).seed(seed);
    Lab::builder().clients(3).intermediates(1).backends(1).host_link(GREEDY, thin).build()
}

impl<'lab> Side<'lab> {
    /// Starts a service, with Shunt or without.
    pub(super) fn start(lab: &'lab Lab, shunt: bool) -> Result<Self> {
        let files: Vec<(&str, u64)> = FILES.iter().map(|(name, size, _)| (*name, *size)).chain([LONG_FILE]).collect();
        let directory = lab.files(&files)?;
        // Lets other users reach the agents' sockets.
        for host in lab.tiers() {
            for directory in host.dir().ancestors().take_while(|directory| directory.starts_with(lab.dir())) {
                let mode = std::fs::metadata(directory)?.permissions().mode() | 0o011;
                std::fs::set_permissions(directory, PermissionsExt::from_mode(mode))?;
            }
        }
        let settings = Settings {
            agent: "users = [\"www-data\"]\n",
            agent_frontend: peer::CONFIGURED,
            agent_backend: peer::CONFIGURED,
            tls: Some(""),
            // With `apart` the service starts although the agents never find all of their peers (the agents of other
            // machines): the hostile peer is configured as a peer, but runs no agent.
            apart: true,
            ..Settings::default()
        };
        let options = if shunt { Options::shunt() } else { Options::plain() };
        let settings = if shunt { settings } else { Settings { tls: settings.tls, ..Settings::default() } };
        let service = Service::start(lab, &directory, Options { settings, ..options })?;
        let mut side = Self { lab, service, shunt, processes: BTreeSet::new() };
        side.wait_until_it_works()?;
        side.processes = processes(lab)?;
        Ok(side)
    }

    /// Loads the service until a body takes the shortcut. Loads a service without Shunt only once.
    fn wait_until_it_works(&self) -> Result<()> {
        let begin = Instant::now();
        loop {
            let seen =
                load(self.lab, self.host(HONEST)?, self.service.chain().server(), Duration::from_millis(300), 0)?;
            ensure!(seen.wrong.is_empty(), "before the attack: {:?}{}", seen.wrong, self.service.explain());
            if !self.shunt || self.shortcuts()? > 0 {
                return Ok(());
            }
            ensure!(begin.elapsed() < START_LIMIT, "no shortcut before the attack{}", self.service.explain());
        }
    }

    /// Number of shortcuts that the frontend's agent has counted.
    pub(super) fn shortcuts(&self) -> Result<u64> {
        Ok(self.service.stats(self.lab.frontend())?.count("servers.shortcuts"))
    }

    fn host(&self, name: &str) -> Result<&'lab Host> {
        self.lab.host(name)
    }

    /// Loads the service by honest clients for `time`, and attacks it meanwhile.
    pub(super) fn turn(&self, time: Duration, seed: u64) -> Result<Turn> {
        let (lab, server) = (self.lab, self.service.chain().server());
        let (honest, stranger, greedy) = (self.host(HONEST)?, self.host(STRANGER)?, self.host(GREEDY)?);
        let (hostile, path) = (Hostile::default(), format!("/{}", LONG_FILE.0));
        let (drawn, received) = self.greed()?;
        let random = |stream| Random::new(seed, stream);
        let (seen, attacks) = std::thread::scope(|scope| {
            let (hostile, path) = (&hostile, path.as_str());
            let mut attackers = vec![
                scope.spawn(move || outside::attack(lab, stranger, random(1), hostile)),
                scope.spawn(move || greedy::ack_ahead(greedy, server, path, random(2), hostile)),
                scope.spawn(move || greedy::read_nothing(greedy, server, path, hostile)),
            ];
            if self.shunt {
                let (frontend, backend) = (lab.frontend(), lab.backend());
                attackers.push(scope.spawn(move || locals::attack(frontend, random(3), hostile)));
                attackers.push(scope.spawn(move || locals::attack(backend, random(4), hostile)));
                let from = lab.intermediates()[0];
                attackers.push(scope.spawn(move || peer::attack(lab, from, &[frontend, backend], random(5), hostile)));
            }
            let seen = load(lab, honest, server, time, seed);
            hostile.over.store(true, Ordering::Relaxed);
            (seen, attackers.into_iter().map(|one| one.join()).collect::<Vec<_>>())
        });
        for attack in attacks {
            match attack {
                Ok(attack) => attack.context("attacking")?,
                Err(_) => bail!("an attacker panicked"),
            }
        }
        let after = self.greed()?;
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        Ok(Turn {
            seen: seen?,
            packets: count(&hostile.packets),
            messages: count(&hostile.messages),
            frames: count(&hostile.frames),
            drawn: after.0 - drawn,
            received: after.1 - received,
        })
    }

    /// Bytes that the switch has sent towards the greedy client, and bytes that have reached this client.
    fn greed(&self) -> Result<(u64, u64)> {
        let (host, switch) = (self.host(GREEDY)?, self.lab.switch());
        let port = &host.ports()[0].device;
        let device = self.lab.switch_device(host, port)?;
        let drawn = switch.sysfs_number(&format!("class/net/{device}/statistics/tx_bytes"))?;
        Ok((drawn, host.sysfs_number(&format!("class/net/{port}/statistics/rx_bytes"))?))
    }

    /// Processes of the service that have ended since it started.
    pub(super) fn ended(&self) -> Result<Vec<String>> {
        let now = processes(self.lab)?;
        let name = |(host, kind, pid): &(String, &str, i32)| format!("{kind} {pid} on {host}");
        Ok(self.processes.difference(&now).map(name).collect())
    }
}

fn processes(lab: &Lab) -> Result<BTreeSet<(String, &'static str, i32)>> {
    let of_hosts = lab.hosts().iter().filter(|host| host.role() != Role::Client).map(ProcessUse::of_host);
    let all = of_hosts.collect::<Result<Vec<_>>>()?;
    Ok(all.into_iter().flatten().map(|one| (one.host, one.kind, one.pid)).collect())
}
