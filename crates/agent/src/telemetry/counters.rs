//! Names of all counters, and what they count. The names of servers' and steering's counters come from the C headers
//! that define them. `docs/counters.md` is written from here (see the test).

use serde_json::Value;
use shunt_logic::counts::Counts;
use shunt_odb::store::usage::COUNTED;

/// (index, name, meaning) of the servers' counters, from `include/shunt.h` (build.rs).
pub(crate) const SERVERS: &[(usize, &str, &str)] = include!(concat!(env!("OUT_DIR"), "/counters.rs"));

/// Counters of the daemon, beside those of the logic ([`Counts`]). Each is declared once: field, name below `agent.`, and
/// meaning.
macro_rules! daemons {
    ($($name:ident: $type:ty = $meaning:literal,)*) => {
        /// What the daemon counts or finds beside the logic.
        #[derive(Debug, Default)]
        pub(crate) struct Daemons {
            $(#[doc = $meaning] pub(crate) $name: $type,)*
        }

        impl Daemons {
            const MEANINGS: &[(&str, &str)] = &[$((stringify!($name), $meaning),)*];

            /// Values by name.
            pub(crate) fn values(&self) -> impl Iterator<Item = (&'static str, Value)> {
                [$((stringify!($name), Value::from(self.$name)),)*].into_iter()
            }
        }
    };
}

daemons! {
    certificate_seconds_left: i64 = "until the first of this agent's certificates ends",
    accept_failed: u64 = "times that no connection could be accepted, for want of descriptors or memory",
    log_lines_lost: u64 = "lines of its log that nobody took: its disk is full, or its reader does not read",
    offers_open: u64 = "offers that wait for their claim now",
    regions_watched: u64 = "payloads of lost agents that are watched now",
    reads: u64 = "reads of files whose bytes were not in memory, by threads of their own",
    reads_pending: u64 = "of those, wait for a thread or for their disk now",
    digests: u64 = "files that were read for their digest: whether another backend has the same bytes",
    interfaces_attached: u64 = "times that an interface got its steering programs after the start: one that came, was made anew, or had lost them",
}

/// (path below `agent.`, meaning) of counters in groups. `ended`, `now`, `limit` and `limited` have an entry for each reason
/// or limit.
const GROUPS: &[(&str, &str)] = &[
    ("senders.now", "sockets of senders now, parked ones included"),
    ("senders.restored", "sockets made with TCP_REPAIR"),
    ("senders.reused", "payloads that found a parked socket"),
    ("senders.discarded", "parked sockets that could not be used: stale, or not acknowledged"),
    ("senders.evicted", "parked sockets closed to make room"),
    ("senders.queued_bytes", "payload bytes given to the kernel"),
    ("ended.REASON", "handoffs and fetches that ended without success, by reason, at each agent that hears of it"),
    ("limited.LIMIT", "times that a limit was reached, by its name in `[limits]`"),
    ("now.WHAT", "what there is now of each limited thing"),
    ("limit.WHAT", "what there may be of it"),
];

/// (path below `agent.`, meaning) of everything that the agent counts itself.
fn agent() -> impl Iterator<Item = &'static (&'static str, &'static str)> {
    Counts::MEANINGS.iter().chain(Daemons::MEANINGS).chain(GROUPS)
}

/// (name below `store.`, whether it is a gauge, meaning) of the store's counters.
pub(crate) const STORE: &[(&str, bool, &str)] = &[
    ("bytes", true, "memory that is leased to programs now"),
    ("bytes_limit", true, "what it may be: `memory_bytes`"),
    ("segments", true, "leases now"),
    ("payloads", true, "payloads now that somebody may still ask for"),
    ("files", true, "files that are open now because programs have sent them (sendfile): they are not copied"),
    ("programs", true, "connections of this machine's programs now; a program has up to two"),
    ("readers", true, "connections now over which programs fetch here, of this machine and of others"),
    ("fetches", false, "fetches; a program that may map a segment of this machine makes none"),
    ("fetched_bytes", false, "their bytes"),
    ("gone", false, "fetches of what was no longer there: its lease had ended, or it never was"),
    ("returned", false, "shares that came back: once all of a payload's have, its memory is free"),
    ("full", false, "segments that a program asked for in vain: it sends its bytes themselves"),
    (
        "refused",
        false,
        "connections that were turned away: of users or groups that are not in the configuration, or too many",
    ),
    (
        "peer_addresses",
        true,
        "addresses now that peers have named as those of their programs: only with these, and within this machine, do connections carry references",
    ),
    (
        "peer_sources",
        true,
        "stores now that peers have named as those that their programs can fetch from, counted for each peer: references to others are not passed on to them",
    ),
    ("unreached", false, "connections to other machines' stores that programs of this machine did not get"),
];

/// Returns whether a path below `agent.` is a gauge: it goes up and down.
pub(crate) fn is_gauge(path: &str) -> bool {
    matches!(path, "certificate_seconds_left" | "offers_open" | "reads_pending" | "regions_watched" | "senders.now")
}

/// Returns what one of the servers' counters counts, as a sentence.
pub(crate) fn server_help(name: &str) -> String {
    let found = SERVERS.iter().find(|(_, other, _)| *other == name);
    sentence(found.map_or("see docs/counters.md", |(_, _, help)| help))
}

/// Returns what one of the agent's counters counts, as a sentence.
pub(crate) fn agent_help(path: &str) -> String {
    let found = agent().find(|(other, _)| *other == path);
    sentence(found.map_or("see docs/counters.md", |(_, help)| help))
}

/// (name below `store.by_program.NAME.`, meaning) of the programs' gauges. The other counters are [`COUNTED`].
pub(crate) const PROGRAMS: [(&str, &str); 2] = [
    ("processes", "processes now"),
    (
        "bypassed_percent",
        "of the absent bytes that it has sent on or had to have, the part that it has sent on without having it",
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
             `shunt stats` prints those that are not zero, `--all` the others too, `--json` for scripts. With `metrics =\n\
             \"127.0.0.1:9440\"` in `shuntd.toml` (anywhere on one line of its own, before the first section) Prometheus finds\n\
             them at `http://127.0.0.1:9440/metrics`, with reasons as labels: `shunt_relayed_total{reason=\"type\"}`.\n\
             Every fallback, drop and abort is counted where it happens, so one that crosses machines is counted on each.\n",
        );
        let mut section = |title: &str, about: &str, rows: Vec<(String, &str)>| {
            let _ = write!(text, "\n## {title}\n{about}\n\n| counter | counts |\n| --- | --- |\n");
            rows.iter().for_each(|(name, help)| {
                let _ = writeln!(text, "| `{name}` | {help} |");
            });
        };
        let servers = SERVERS.iter().map(|(_, name, help)| (format!("servers.{name}"), *help)).collect();
        section("Servers", "By this machine's nginx workers, those that are gone included.", servers);
        let agent = agent().map(|(path, help)| (format!("agent.{path}"), *help)).collect();
        section("Agent", "By `shuntd`, since it started.", agent);
        let store = STORE.iter().map(|(name, _, help)| (format!("store.{name}"), *help)).collect();
        section(
            "Store",
            "By the store of programs under `shunt run`, since `shuntd` started; what there is now is as old as a quarter of a second.",
            store,
        );
        let programs = PROGRAMS.iter().chain(&COUNTED);
        let programs = programs.map(|(name, help)| (format!("store.by_program.NAME.{name}"), *help)).collect();
        section(
            "Programs",
            "By processes under `shunt run` themselves, summed by name; those that have ended included.",
            programs,
        );
        let reasons = shunt_wire::local::Reason::ALL;
        let texts: Vec<String> = reasons.iter().map(ToString::to_string).collect();
        let rows = reasons.iter().zip(&texts).map(|(reason, text)| (format!("{reason:?}"), text.as_str())).collect();
        section("Reasons", "Of `agent.ended`; nginx's error log has their numbers, 1 and up in this order.", rows);
        for (role, prefix) in [("frontend", "fe_"), ("backend", "be_")] {
            let own = STEERING.iter().filter(|(name, _)| name.starts_with(prefix));
            let rows = own.map(|(name, help)| (format!("{role}.{name}"), *help)).collect();
            section(&format!("Steering, {role}"), "By the programs in the kernel, since their maps were made.", rows);
        }
        text.push_str("\n`frontend.flows` is how many client connections the flow table holds now.\n");
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
