//! `shunt doctor`: says what is wrong with a setup, and what to do. A *shortcut* is a response whose body goes straight
//! from the backend to the client. Other bodies are *relayed* (sent through all tiers) or *fetched* (through the
//! agents).

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use shunt_config::Config;
use shunt_doctor::{Finding, Servers, Trial, Verdict, examine};
use shunt_report::Paint;
use shunt_stats::{Stats, agent_stats};
use shunt_sys::output;

/// `shunt doctor`
#[derive(Debug, Args)]
pub struct DoctorCommand {
    /// Configuration of this machine's agent
    #[arg(long, value_name = "FILE", default_value = "/etc/shunt/shuntd.toml")]
    config: PathBuf,
    /// Path of nginx, which prints its configuration (-T)
    #[arg(long, value_name = "PROGRAM", default_value = Servers::PROGRAM)]
    nginx: PathBuf,
    /// A file with the output of `nginx -T`, for an nginx that runs elsewhere, as in a container
    #[arg(long, value_name = "FILE", conflicts_with = "nginx")]
    nginx_conf: Option<PathBuf>,
    /// Leave out the checks of nginx
    #[arg(long, conflicts_with_all = ["nginx", "nginx_conf"])]
    no_nginx: bool,
    /// Seconds to wait until a client on another machine fetches a large body through this frontend.
    /// Says whether the body took the shortcut, or why not
    #[arg(long, value_name = "SECONDS")]
    handoff: Option<u64>,
    /// URL of a file of 256 KiB or more to fetch through this frontend: http://ADDRESS[:PORT]/PATH.
    /// Says whether the file took the shortcut, or why not. Needs --client
    #[arg(long, value_name = "URL", requires = "client", conflicts_with = "handoff")]
    fetch: Option<String>,
    /// Address of the client that --fetch makes in a new network namespace: an unused address of a
    /// network between this machine and the backend
    #[arg(long, value_name = "ADDRESS", requires = "fetch")]
    client: Option<IpAddr>,
    /// Write the findings as JSON
    #[arg(long)]
    json: bool,
}

impl DoctorCommand {
    /// Examines the setup and prints the findings. Returns whether there is no fault.
    pub fn run(self) -> Result<bool> {
        let config = Config::read(&self.config)?;
        let trial = self.fetch.zip(self.client).map(|(url, client)| Trial::of(&url, client));
        let trial = trial.transpose().map_err(anyhow::Error::msg)?;
        let stats = agent_stats(&config.socket).map(|stats| stats.0).map_err(|error| format!("{error:#}"));
        let servers = match (self.no_nginx, self.nginx_conf) {
            (true, _) => Servers::Nowhere,
            (false, Some(file)) => Servers::File(file),
            (false, None) => Servers::Program(self.nginx),
        };
        let mut findings = examine(&config, &stats, &servers);
        findings.extend(self.handoff.map(|seconds| handoff(&config, Duration::from_secs(seconds))));
        findings.extend(trial.map(|trial| fetched(&config, &trial)));
        if !findings.iter().any(|finding| finding.area == "handoff") && config.frontend.is_some() {
            findings.push(not_tried());
        }
        let text = match self.json {
            true => format!("{}\n", serde_json::to_string_pretty(&findings)?),
            false => show(&findings, Paint::of(&std::io::stdout())),
        };
        output::write(&text)?;
        Ok(!findings.iter().any(Finding::is_fault))
    }
}

/// Interval at which the doctor reads the agent's counters while it waits.
const LOOK: Duration = Duration::from_millis(100);

/// Waits until a client, which the operator runs on another machine, fetches a body. Reports whether the body took the
/// shortcut.
fn handoff(config: &Config, patience: Duration) -> Finding {
    let finding = |verdict| Finding { area: "handoff", about: "a large body for a client elsewhere".into(), verdict };
    if let Some(verdict) = elsewhere(config) {
        return finding(verdict);
    }
    let socket: &Path = &config.socket;
    let before = match agent_stats(socket) {
        Ok(before) => before,
        Err(error) => return finding(Verdict::Fault(format!("{error:#}"))),
    };
    let advice = "fetch a static file of 256 KiB or more through this frontend, from a client machine";
    eprintln!("waiting {} s: {advice}", patience.as_secs());
    let deadline = Instant::now() + patience;
    let mut now = before.clone();
    while Instant::now() < deadline {
        if took_it(&before, &now) {
            return finding(Verdict::Ok);
        }
        std::thread::sleep(LOOK);
        now = agent_stats(socket).unwrap_or(now);
    }
    let why = other_ways(&before, &now);
    finding(Verdict::Fault(match why.is_empty() {
        true => format!("no client fetched a large body: {advice}"),
        false => format!(
            "no response took the shortcut; docs/counters.md and docs/nginx.md say what to do about: {}{}",
            why.join(", "),
            unheard(&why)
        ),
    }))
}

/// Number of times that the doctor's client fetches its file over one connection. The first response may be relayed,
/// because nothing proves yet that the client's packets pass the steering programs (BPF).
const FETCHES: usize = 2;
/// Length in bytes from which a body should take a shortcut. Shorter ones may be relayed.
const LONG: u64 = 256 << 10;
/// Longest wait until nginx's workers have counted a response that has ended.
const COUNTED: Duration = Duration::from_secs(5);

/// Returns the fault of a machine that hands nothing off, because it is no frontend; `None` for a frontend.
fn elsewhere(config: &Config) -> Option<Verdict> {
    let advice = "this machine is no frontend (its shuntd.toml has no [frontend]): run this command at the frontend, \
                  where clients connect";
    config.frontend.is_none().then(|| Verdict::Fault(advice.into()))
}

fn not_tried() -> Finding {
    let why = "not tested: `--fetch URL --client ADDRESS` fetches a file from an unused address, `--handoff SECONDS` \
               waits for a client elsewhere";
    Finding { area: "handoff", about: "one real shortcut".into(), verdict: Verdict::Skipped(why.into()) }
}

/// Has a client, which the doctor makes itself, fetch a file. Reports whether the file took the shortcut.
fn fetched(config: &Config, trial: &Trial) -> Finding {
    let about = format!("{} of {} for a client at {}", trial.path, trial.server, trial.client);
    let finding = |verdict| Finding { area: "handoff", about, verdict };
    if let Some(verdict) = elsewhere(config) {
        return finding(verdict);
    }
    let before = match agent_stats(&config.socket) {
        Ok(before) => before,
        Err(error) => return finding(Verdict::Fault(format!("{error:#}"))),
    };
    let fetched = trial.run(config, FETCHES);
    let mut now = before.clone();
    let deadline = Instant::now() + if fetched.is_ok() { COUNTED } else { Duration::ZERO };
    loop {
        now = agent_stats(&config.socket).unwrap_or(now);
        if took_it(&before, &now) && fetched.is_ok() {
            return finding(Verdict::Ok);
        }
        if Instant::now() >= deadline {
            break;
        }
        std::thread::sleep(LOOK);
    }
    let ways = match other_ways(&before, &now) {
        none if none.is_empty() => "; `shunt stats` at the backend says why (servers.relayed_*)".into(),
        some => {
            let to_read = "docs/counters.md and docs/nginx.md say what to do about";
            format!("; {to_read}: {}{}", some.join(", "), unheard(&some))
        }
    };
    finding(Verdict::Fault(match fetched {
        Err(why) => format!("{why}{ways}"),
        Ok(short @ ..LONG) => {
            format!("the file has {short} bytes, which may be too few for a shortcut: name a longer file{ways}")
        }
        Ok(_) => format!("the file came whole, but not by the shortcut{ways}"),
    }))
}

/// Whether both the number of shortcuts and the number of their body bytes have grown between two readings of the
/// counters. The bytes alone do not show that a whole body took the shortcut: they also grow where the rest of a body
/// is fetched.
fn took_it(before: &Stats, now: &Stats) -> bool {
    ["servers.shortcut_bytes", "servers.shortcuts"].iter().all(|name| now.count(name) > before.count(name))
}

/// Name of the counter of shortcuts that the backend refused, or for which it heard nothing from the client.
const REFUSED: &str = "servers.fetched_refused";

/// Returns further advice if [`REFUSED`] is among these counters. The names of other counters need no explanation.
fn unheard(why: &[String]) -> &'static str {
    if why.iter().any(|counter| counter == REFUSED) {
        ". See the log of the backend's agent. Check that no firewall there drops packets to [backend] `ports`, and \
         that no router drops packets from the backend with this server's address"
    } else {
        ""
    }
}

/// Returns the names of the counters that have grown between two readings and say why responses took no shortcut.
fn other_ways(before: &Stats, now: &Stats) -> Vec<String> {
    let grown = now.flat().into_iter().filter(|(name, value)| *value > before.count(name));
    let is_why = |name: &str| {
        ["servers.relayed_", "servers.fetched_", "servers.refused_", "servers.aborted", "frontend.fe_refused_"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
    };
    grown.map(|(name, _)| name).filter(|name| is_why(name)).collect()
}

fn show(findings: &[Finding], paint: Paint) -> String {
    let line = |finding: &Finding| {
        let Finding { area, about, verdict } = finding;
        match verdict {
            Verdict::Ok => format!("{}    {area}: {about}\n", paint.good("ok")),
            Verdict::Fault(advice) => format!("{} {area}: {about}\n      {advice}\n", paint.bad("fault")),
            Verdict::Skipped(why) => format!("{}  {area}: {about} ({why})\n", paint.dim("skip")),
        }
    };
    let faults = findings.iter().filter(|finding| finding.is_fault()).count();
    let end = match faults {
        0 => paint.good("all is well\n"),
        1 => "1 fault\n".to_owned(),
        _ => format!("{faults} faults\n"),
    };
    findings.iter().map(line).collect::<String>() + &end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_why_a_body_took_no_shortcut_is_named() {
        let stats =
            |relayed: u64| Stats(serde_json::json!({"servers": {"relayed_no_peer": relayed, "offers": relayed}}));
        assert_eq!(other_ways(&stats(1), &stats(2)), ["servers.relayed_no_peer"]);
        assert_eq!(other_ways(&stats(2), &stats(2)), Vec::<String>::new());
    }

    #[test]
    fn a_shortcut_that_was_fetched_after_a_part_is_none() {
        let stats = |shortcuts: u64, bytes: u64| {
            Stats(serde_json::json!({"servers": {"shortcuts": shortcuts, "shortcut_bytes": bytes}}))
        };
        assert!(took_it(&stats(4, 9), &stats(5, 10)));
        assert!(!took_it(&stats(4, 9), &stats(5, 9)), "it has only begun");
        assert!(!took_it(&stats(4, 9), &stats(4, 10)), "fetched after a part");
        assert!(unheard(&[REFUSED.into()]).contains("ports") && unheard(&["x".into()]).is_empty());
    }

    #[test]
    fn a_backend_is_told_where_to_try_a_handoff() {
        let of = |role: &str| {
            let text = format!(
                "name = \"x\"\nlisten = \"127.0.0.1:7440\"\nsocket = \"/none\"\n[{role}]\ninterfaces = [\"lo\"]\n\
                 [tls]\ncertificate = \"c\"\nkey = \"k\"\nca = \"a\"\n"
            );
            let config = Config::parse(&text, Path::new("x")).unwrap();
            let trial = Trial::of("http://10.0.0.1/file", "10.0.0.9".parse().unwrap()).unwrap();
            [fetched(&config, &trial), handoff(&config, Duration::ZERO)].map(|found| found.fault_line().unwrap())
        };
        assert!(
            of("backend").iter().all(|line| line.contains("run this command at the frontend")),
            "{:?}",
            of("backend")
        );
        assert!(of("frontend").iter().all(|line| !line.contains("run this command at the frontend")));
    }

    #[test]
    fn a_fault_is_followed_by_what_to_do() {
        let finding = |verdict| Finding { area: "port", about: "\"be1\"".into(), verdict };
        let text = show(&[finding(Verdict::Ok), finding(Verdict::Fault("start it".into()))], Paint::never());
        assert_eq!(text, "ok    port: \"be1\"\nfault port: \"be1\"\n      start it\n1 fault\n");
        assert!(show(&[finding(Verdict::Ok)], Paint::never()).ends_with("all is well\n"));
    }
}
