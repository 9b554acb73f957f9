//! Names of all counters, and what they count. The names of the counters of servers and of the steering programs (BPF)
//! come from the C headers that define them. A test in this file compares `docs/counters.md` with these lists, and can
//! write that file. The *store* has the payloads of programs under `shunt run`.

use serde_json::Value;
use shunt_logic::counts::Counts;
use shunt_odb::store::usage::COUNTED;

/// Counters of the servers, as (index, name, meaning), from `include/shunt.h` (build.rs).
pub(crate) const SERVERS: &[(usize, &str, &str)] = include!(concat!(env!("OUT_DIR"), "/counters.rs"));

/// Counters of the daemon, beside those of the logic ([`Counts`]). Each counter is a `u64`, and is declared once: by
/// its name, which is also its name below `agent.`, and its meaning.
macro_rules! daemons {
    ($($name:ident = $meaning:literal,)*) => {
        /// Values that the daemon counts or finds, beside those of the logic.
        #[derive(Debug, Default)]
        pub(crate) struct Daemons {
            $(#[doc = $meaning] pub(crate) $name: u64,)*
        }

        impl Daemons {
            const MEANINGS: &[(&str, &str)] = &[$((stringify!($name), $meaning),)*];

            /// Returns the values by name.
            pub(crate) fn values(&self) -> impl Iterator<Item = (&'static str, Value)> {
                [$((stringify!($name), Value::from(self.$name)),)*].into_iter()
            }
        }
    };
}

daemons! {
    certificate_seconds_left = "seconds until the first of this agent's certificates expires; 0 once it has",
    accept_failed = "times that no connection could be accepted because descriptors or memory were short",
    log_lines_lost = "lost lines of the log: the disk is full, or the reader of the log does not read",
    offers_open = "offers that wait for their claim at present",
    regions_watched = "payloads that are watched at present: their agent is lost, or their server's process has ended",
    reads = "reads of files by threads, because the bytes were not in memory",
    reads_pending = "such reads that wait for a thread or a disk at present",
    digests = "files whose digest was computed, to prove that another backend has the same bytes",
    interfaces_attached = "times that an interface got its steering programs after the agent's start, because it \
                                was new or had lost them",
}

/// Counters in groups, as (path below `agent.`, meaning). `ended`, `now`, `limit` and `limited` have an entry for each
/// reason or limit.
const GROUPS: &[(&str, &str)] = &[
    ("senders.now", "sockets of senders at present, parked ones included"),
    ("senders.restored", "sockets made with TCP_REPAIR"),
    ("senders.reused", "payloads that were sent by a parked socket"),
    (
        "senders.discarded",
        "parked sockets that could not be used, because they were stale or the client did not acknowledge",
    ),
    ("senders.evicted", "parked sockets closed to make room"),
    ("senders.queued_bytes", "payload bytes given to the kernel"),
    (
        "ended.REASON",
        "handoffs and fetches that ended without success, by reason; each agent that hears of the end counts it",
    ),
    ("limited.LIMIT", "times that a limit was reached, by its name in `[limits]`"),
    ("now.WHAT", "present number of each limited thing"),
    ("limit.WHAT", "limit of each limited thing"),
];

/// Returns all that the agent counts itself, as (path below `agent.`, meaning).
fn agent() -> impl Iterator<Item = &'static (&'static str, &'static str)> {
    Counts::MEANINGS.iter().chain(Daemons::MEANINGS).chain(GROUPS)
}

/// Counters of the store, as (name below `store.`, whether it is a gauge, meaning).
pub(crate) const STORE: &[(&str, bool, &str)] = &[
    ("bytes", true, "bytes of memory that are leased to programs at present"),
    ("bytes_limit", true, "limit of `store.bytes`: `memory_bytes` of the configuration"),
    ("segments", true, "leased segments at present"),
    ("payloads", true, "payloads at present that a program may still fetch"),
    ("files", true, "files open at present because programs have sent them with sendfile, which copies nothing"),
    ("programs", true, "connections of this machine's programs at present; a program has up to two"),
    ("readers", true, "connections at present over which programs of this and other machines fetch from this store"),
    ("fetches", false, "fetches from this store; programs that map a segment of this machine need none"),
    ("fetched_bytes", false, "bytes of these fetches"),
    ("gone", false, "fetches of payloads that were not in the store: their lease had ended, or they never existed"),
    ("returned", false, "shares that came back; a payload's memory is free once all its shares are back"),
    ("full", false, "requests for a segment that found no free memory; the program sends the bytes instead"),
    (
        "refused",
        false,
        "refused connections: their users or groups are not in the configuration, or there were too many",
    ),
    (
        "peer_addresses",
        true,
        "addresses of peers' programs at present; only connections with these addresses and within this machine carry \
         references",
    ),
    (
        "peer_sources",
        true,
        "stores at present that peers' programs can fetch from, counted for each peer; a peer gets no references to \
         other stores",
    ),
    ("unreached", false, "failed connections of this machine's programs to stores of other machines"),
];

/// Returns whether a path below `agent.` is a gauge, whose value goes up and down.
pub(crate) fn is_gauge(path: &str) -> bool {
    matches!(path, "certificate_seconds_left" | "offers_open" | "reads_pending" | "regions_watched" | "senders.now")
}

/// Returns what one of the servers' counters counts, as a sentence.
pub(crate) fn server_help(name: &str) -> String {
    let found = SERVERS.iter().find(|(_, other, _)| *other == name);
    sentence(found.map_or("meaning: docs/counters.md", |(_, _, help)| help))
}

/// Returns what one of the agent's counters counts, as a sentence.
pub(crate) fn agent_help(path: &str) -> String {
    let found = agent().find(|(other, _)| *other == path);
    sentence(found.map_or("meaning: docs/counters.md", |(_, help)| help))
}

/// Gauges of programs under `shunt run`, as (name below `store.by_program.NAME.`, meaning). The other counters are
/// [`COUNTED`].
pub(crate) const PROGRAMS: [(&str, &str); 2] = [
    ("processes", "processes at present"),
    (
        "bypassed_percent",
        "percentage of absent bytes sent on without being fetched, among all absent bytes that were sent on or fetched",
    ),
];

/// Returns what one of a program's counters counts, and whether it is a gauge.
pub(crate) fn program_help(name: &str) -> (String, bool) {
    let find = |all: &[(&str, &str)]| all.iter().find(|(other, _)| *other == name).map(|(_, help)| sentence(help));
    match find(&PROGRAMS) {
        Some(help) => (help, true),
        None => (find(&COUNTED).unwrap_or_default(), false),
    }
}

/// Returns what one of the store's counters counts, and whether it is a gauge.
pub(crate) fn store_help(name: &str) -> (String, bool) {
    let found = STORE.iter().find(|(other, ..)| *other == name);
    found.map_or(("See docs/counters.md.".into(), false), |(_, is_gauge, help)| (sentence(help), *is_gauge))
}

fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| format!("{}{}.", first.to_uppercase(), letters.as_str())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use shunt_handoff::counters::COUNTERS as STEERING;

    use super::*;

    /// Returns the text of `docs/counters.md`.
    fn document() -> String {
        let mut text = String::from(
            "# Counters\n\n\
             <!-- Written from the source: SHUNT_WRITE_DOCS=1 cargo test -p shunt-agent counters -->\n\n\
             `shunt stats` prints the counters that are not zero, `--all` prints all, `--json` prints them for scripts. With\n\
             `metrics = \"127.0.0.1:9440\"` in `shuntd.toml`, on a separate line before the first section, Prometheus finds them\n\
             at `http://127.0.0.1:9440/metrics`, with reasons as labels: `shunt_relayed_total{reason=\"type\"}`. Every fallback,\n\
             drop and abort is counted where it happens, so an event that concerns two machines is counted on both.\n",
        );
        let mut section = |title: &str, about: &str, rows: Vec<(String, &str)>| {
            let _ = write!(text, "\n## {title}\n{about}\n\n| counter | counts |\n| --- | --- |\n");
            rows.iter().for_each(|(name, help)| {
                let _ = writeln!(text, "| `{name}` | {help} |");
            });
        };
        let servers = SERVERS.iter().map(|(_, name, help)| (format!("servers.{name}"), *help)).collect();
        section("Servers", "Counted by this machine's nginx workers. Workers that have ended are included.", servers);
        let agent = agent().map(|(path, help)| (format!("agent.{path}"), *help)).collect();
        section("Agent", "Counted by `shuntd` since its start.", agent);
        let store = STORE.iter().map(|(name, _, help)| (format!("store.{name}"), *help)).collect();
        section(
            "Store",
            "Counted by the store of programs under `shunt run` since `shuntd` started. Present numbers are up to 0.25 s old.",
            store,
        );
        let programs = PROGRAMS.iter().chain(&COUNTED);
        let programs = programs.map(|(name, help)| (format!("store.by_program.NAME.{name}"), *help)).collect();
        section(
            "Programs",
            "Counted by processes under `shunt run`, and summed by the program's name. Processes that have ended are included.",
            programs,
        );
        let reasons = shunt_wire::local::Reason::ALL;
        let texts: Vec<String> = reasons.iter().map(ToString::to_string).collect();
        let rows = reasons.iter().zip(&texts).map(|(reason, text)| (format!("{reason:?}"), text.as_str())).collect();
        section("Reasons", "Reasons of `agent.ended`. Their numbers are 1 and up, in this order.", rows);
        for (role, prefix) in [("frontend", "fe_"), ("backend", "be_")] {
            let own = STEERING.iter().filter(|(name, _)| name.starts_with(prefix));
            let rows = own.map(|(name, help)| (format!("{role}.{name}"), *help)).collect();
            section(
                &format!("Steering, {role}"),
                "Counted by the programs in the kernel since their maps were made.",
                rows,
            );
        }
        text.push_str("\n`frontend.flows` is the present number of client connections in the flow table.\n");
        text
    }

    #[test]
    fn the_document_has_every_counter() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/counters.md");
        if std::env::var_os("SHUNT_WRITE_DOCS").is_some() {
            std::fs::write(&path, document()).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap();
        assert!(
            written == document(),
            "docs/counters.md is old: SHUNT_WRITE_DOCS=1 cargo test -p shunt-agent counters"
        );
    }

    #[test]
    fn meanings_become_sentences() {
        assert_eq!(agent_help("sessions"), "Sessions with peers that began.");
        assert_eq!(server_help("relayed_type"), "Relayed by the backend: not one of shunt_offer_types.");
        assert!(is_gauge("senders.now") && !is_gauge("sessions"));
    }
}
