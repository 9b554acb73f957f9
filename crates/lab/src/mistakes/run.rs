//! Makes one mistake, in a separate lab with a service. Clients download, and the logs are searched for the message
//! that tells the operator of the mistake. A *shortcut* is a response whose body bypasses tiers. An *agent* is Shunt's
//! daemon on a machine.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::{Bodies, Mistake, Teller};
use crate::answer::Ending;
use crate::faults::Client;
use crate::host::Host;
use crate::lab::Lab;
use crate::process::Process;
use crate::service::{Options, Service, Stats};

/// Files that each client asks for on its connection: name and size. Some are too short for a shortcut, others long
/// enough.
const FILES: &[(&str, u64)] =
    &[("1k", 1 << 10), ("64k", 64 << 10), ("1m", 1 << 20), ("3m", 3 << 20), ("80k", 80 << 10)];
/// Number of clients at the same time.
const CLIENTS: usize = 4;
/// Longest wait for a response, whatever the mistake is. Agents that say nothing delay a download by 5 s at most, and
/// the machine may also do other work.
const PATIENCE: Duration = Duration::from_secs(12);
/// Longest wait for the message after the last response.
const MESSAGE_LIMIT: Duration = Duration::from_secs(20);
/// Longest time for which clients download further, to wait for a shortcut or for the report of the mistake.
const SHORTCUT_LIMIT: Duration = Duration::from_secs(60);
/// Levels of nginx's error log that Debian's default (`error`) shows, as they stand in a line.
const SHOWN_LEVELS: [&str; 4] = ["[error]", "[crit]", "[alert]", "[emerg]"];

/// A service with a mistake.
pub struct Running<'lab> {
    pub lab: &'lab Lab,
    pub service: Service<'lab>,
    /// Processes that the mistake has started beside the service.
    pub others: Vec<Process>,
}

/// Result of a mistake.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    pub name: &'static str,
    /// Number of responses that were asked for.
    pub responses: u64,
    /// Number of responses that were whole.
    pub whole: u64,
    pub shortcuts: u64,
    /// Time of the slowest response, in seconds.
    pub seconds: f64,
    /// The log line that tells the operator of the mistake. `None`: no such line was found.
    pub message: Option<String>,
    /// Everything that is not as expected, in words.
    pub found: Vec<String>,
}

impl Outcome {
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.found.is_empty()
    }

    fn broken(name: &'static str, error: &anyhow::Error) -> Self {
        let found = vec![format!("{error:#}")];
        Self { name, responses: 0, whole: 0, shortcuts: 0, seconds: 0.0, message: None, found }
    }
}

/// Makes the mistake. Returns its effects.
#[must_use]
pub fn run(mistake: &Mistake) -> Outcome {
    in_a_lab(mistake).unwrap_or_else(|error| Outcome::broken(mistake.name, &error))
}

fn in_a_lab(mistake: &Mistake) -> Result<Outcome> {
    let lab = (mistake.lab)(Lab::builder()).build()?;
    (mistake.before)(&lab).context("preparing the hosts")?;
    let others = (mistake.beside)(&lab).context("starting what runs beside the service")?;
    let files = lab.files(FILES)?;
    let options = Options { settings: mistake.settings, ..Options::shunt() };
    let service = Service::start(&lab, &files, options).context("starting the service")?;
    let mut running = Running { lab: &lab, service, others };
    (mistake.after)(&mut running).context("making the mistake")?;
    let server = running.service.chain().server();
    let server = SocketAddr::new((mistake.asked)(&lab).map_or(server.ip(), Into::into), server.port());
    let mut responses = running.load(server, mistake)?;
    running.ask_on(server, mistake, &mut responses)?;
    let mut found = Vec::new();
    let mut worst = Duration::ZERO;
    for (file, ending, took) in &responses {
        worst = worst.max(*took);
        if *ending != Ending::Whole {
            found.push(format!("{file}: {ending} after {:.1} s", took.as_secs_f64()));
        }
    }
    let whole = responses.iter().filter(|(_, ending, _)| *ending == Ending::Whole).count() as u64;
    let shortcuts = running.shortcuts();
    match mistake.bodies {
        Bodies::Relayed if shortcuts > 0 => found.push(format!("{shortcuts} shortcuts in place of none")),
        Bodies::Shortcut if shortcuts == 0 => found.push(format!("no shortcut: {}", running.counted())),
        _ => {}
    }
    let message = running.message(mistake);
    if message.is_none() && mistake.teller != Teller::Nobody {
        found.push(format!("no line of the {} says {:?}", mistake.teller, mistake.says));
    }
    let (responses, seconds) = (responses.len() as u64, worst.as_secs_f64());
    Ok(Outcome { name: mistake.name, responses, whole, shortcuts, seconds, message, found })
}

type Response = (&'static str, Ending, Duration);

impl Running<'_> {
    /// Lets clients download, several at the same time and, if all responses were whole, one more. Returns how each
    /// response ended.
    fn load(&self, server: SocketAddr, mistake: &Mistake) -> Result<Vec<Response>> {
        let client = self.lab.client();
        let mut all = Vec::new();
        std::thread::scope(|scope| -> Result<()> {
            let loads: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(|| download(client, server))).collect();
            let meanwhile = (mistake.during)(self);
            for load in loads {
                match load.join() {
                    Ok(responses) => all.extend(responses?),
                    Err(_) => bail!("a client panicked"),
                }
            }
            meanwhile.context("making the mistake while clients download")
        })?;
        if all.iter().all(|(_, ending, _)| *ending == Ending::Whole) {
            all.extend(download(client, server)?);
        }
        Ok(all)
    }

    /// Makes further downloads, because servers and agents that have just started may not have found each other. If
    /// bodies should take the shortcut, the downloads end with the first shortcut. Otherwise they end when the mistake
    /// is reported, or at once if nobody reports it. A response that is not whole, or [`SHORTCUT_LIMIT`], also ends
    /// them.
    fn ask_on(&self, server: SocketAddr, mistake: &Mistake, responses: &mut Vec<Response>) -> Result<()> {
        let deadline = Instant::now() + SHORTCUT_LIMIT;
        let is_over = || match mistake.bodies {
            Bodies::Shortcut => self.shortcuts() > 0,
            Bodies::Either | Bodies::Relayed => mistake.teller == Teller::Nobody || self.line(mistake).is_some(),
        };
        let whole = |responses: &[Response]| responses.iter().all(|(_, ending, _)| *ending == Ending::Whole);
        while !is_over() && whole(responses) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(100));
            let more = match mistake.bodies {
                Bodies::Shortcut => download(self.lab.client(), server),
                Bodies::Either | Bodies::Relayed => self.load(server, mistake),
            };
            responses.extend(more?);
        }
        // A part of the service that has reported the mistake may behave otherwise from then on, so one more download
        // follows.
        if mistake.bodies == Bodies::Relayed && whole(responses) {
            responses.extend(download(self.lab.client(), server)?);
        }
        Ok(())
    }

    /// Number of shortcuts that the frontend's agent has counted; 0 if the agent does not run.
    fn shortcuts(&self) -> u64 {
        let stats = self.service.stats(self.lab.frontend());
        stats.map(|stats| stats.count("servers.shortcuts")).unwrap_or(0)
    }

    /// Counters of the servers: they say why bodies took no shortcut.
    fn counted(&self) -> String {
        let counts =
            self.service.all_stats().map(|stats| stats.grown(&Stats::default(), "servers.")).unwrap_or_default();
        counts.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
    }

    /// Waits for the line that tells the operator.
    fn message(&self, mistake: &Mistake) -> Option<String> {
        let deadline = Instant::now() + MESSAGE_LIMIT;
        loop {
            let line = self.line(mistake);
            if line.is_some() || mistake.teller == Teller::Nobody || Instant::now() > deadline {
                return line;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The line that tells the operator, if it has been written.
    fn line(&self, mistake: &Mistake) -> Option<String> {
        let hosts = self.lab.tiers().filter(|host| match mistake.teller {
            Teller::Agent(role) | Teller::Server(role) => host.role() == role,
            Teller::Agents => true,
            Teller::Nobody => false,
        });
        let server = matches!(mistake.teller, Teller::Server(_));
        hosts.flat_map(|host| lines(host, server)).find(|line| says(line, mistake.says))
    }

    /// Runs `shuntd` once more on a host, with a changed copy of its agent's configuration.
    pub(super) fn shuntd(
        &mut self,
        host: &Host,
        change: impl FnOnce(&str) -> String,
        arguments: &[&str],
    ) -> Result<()> {
        let text =
            std::fs::read_to_string(host.dir().join("shuntd.toml")).context("reading the agent's configuration")?;
        let file = host.dir().join(format!("shuntd-{}.toml", self.others.len()));
        std::fs::write(&file, change(&text)).with_context(|| format!("writing {}", file.display()))?;
        let mut command = Command::new(crate::service::shuntd_program()?);
        command.arg("--config").arg(file).args(arguments).env("NO_COLOR", "1");
        self.others.push(host.spawn(command)?);
        Ok(())
    }
}

/// Asks for each file on one connection, until a response is not whole.
fn download(client: &Host, server: SocketAddr) -> Result<Vec<Response>> {
    let mut connection = Client::connect(client, server, None)?;
    let mut responses = Vec::new();
    for (file, size) in FILES {
        let begin = Instant::now();
        connection.ask(&format!("/{file}"), file, *size);
        let ending = connection.finish(PATIENCE)?;
        responses.push((*file, ending, begin.elapsed()));
        if ending != Ending::Whole {
            break;
        }
    }
    Ok(responses)
}

/// Log lines of a host's agents or servers, as far as the default levels show them.
fn lines(host: &Host, server: bool) -> Vec<String> {
    let program = if server { "nginx-" } else { "shuntd-" };
    let logs = std::fs::read_dir(host.dir()).into_iter().flatten().flatten().filter(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.starts_with(program) && name.ends_with(".log")
    });
    let text = logs.filter_map(|entry| Some(String::from_utf8_lossy(&std::fs::read(entry.path()).ok()?).into_owned()));
    // nginx reports problems of its configuration on standard error, whatever the log's level is.
    let of_configuration = |line: &str| line.starts_with("nginx: [");
    let shown =
        |line: &&str| !server || of_configuration(line) || SHOWN_LEVELS.iter().any(|level| line.contains(level));
    text.flat_map(|text| text.lines().filter(shown).map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// Whether a line contains these parts in this order.
fn says(line: &str, parts: &[&str]) -> bool {
    let mut rest = line;
    parts.iter().all(|part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + part.len()..];
            true
        }
        None => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_looked_for_in_their_order() {
        assert!(says("no interface eth7; name another", &["interface eth7", "name"]));
        assert!(!says("no interface eth7; name another", &["name", "interface"]));
        assert!(says("anything", &[]));
    }
}
