//! Every counter by name, and what it counts. Servers' and steering's come from the C headers that define them;
//! `docs/counters.md` is written from here (see the test).

use shunt_odb::store::usage::COUNTED;

/// (index, name, meaning) of what servers count, from `include/shunt.h` (build.rs).
pub(crate) const SERVERS: &[(usize, &str, &str)] = include!(concat!(env!("OUT_DIR"), "/counters.rs"));

/// (path below `agent.`, meaning) of what the agent counts itself. `ended`, `now`, `limit` and `limited` have an entry
/// for each reason or limit.
pub(crate) const AGENT: &[(&str, &str)] = &[
    ("sessions", "sessions with peers that began"),
    ("certificate_seconds_left", "until the first of this agent's certificates ends"),
    ("sessions_lost", "of those, lost"),
    ("strangers", "connections, made or taken, whose other end had no certificate that fits"),
    ("incoming_limit", "connections of agents that found no place: too many had not said what they are"),
    ("malformed_local", "server connections that were closed for a message that makes no sense"),
    ("malformed_peer", "agent connections that were refused before their session"),
    ("refused_callers", "server connections of users or groups that are not in the configuration, or too many of one"),
    ("servers_refused", "server connections beyond the limit, or beyond what their user may have of it"),
    ("servers_silent", "server connections that never said what they are for"),
    (
        "rings_exhausted",
        "workers without a completion ring, all 512 being taken, or half of them by their user: they fetch what is offered",
    ),
    ("accept_failed", "times that no connection could be accepted, for want of descriptors or memory"),
    ("log_lines_lost", "lines of its log that nobody took: its disk is full, or its reader does not read"),
    ("unread", "messages that a server did not take, its socket being full"),
    (
        "unasked",
        "messages of other agents that were dropped: answers to no question, or more than their handoffs can have",
    ),
    ("offers", "offers taken from servers"),
    ("offers_to_strangers", "of those, dropped: made to a peer that is not trusted any more"),
    ("offers_without_descriptor", "offers dropped for want of descriptors"),
    ("offers_open", "offers that wait for their claim now"),
    ("offers_expired", "offers that nobody claimed in time"),
    ("handoffs", "handoffs of this machine's servers"),
    ("handoffs_unknown", "of those, refused: not as the kernel knows them, or over already"),
    ("claims", "payloads that frontends claimed here"),
    ("claims_waited", "of those, of bytes of the store: had to wait until more could be sent"),
    ("declined", "times that another machine's agent said that it does not send to a client of this one's, or not now"),
    ("stalled", "times that a server was told of a lost agent's payload that comes no further"),
    ("regions_watched", "payloads of lost agents that are watched now"),
    ("reads", "reads of files whose bytes were not in memory, by threads of their own"),
    ("reads_pending", "of those, wait for a thread or for their disk now"),
    ("digests", "files that were read for their digest: whether another backend has the same bytes"),
    ("proven", "times that a file's digest was told to a frontend"),
    ("unproven", "times that a file's digest could not be told: growing, larger than 1 GiB, replaced, or not in time"),
    ("aborts", "payloads that frontends gave up"),
    ("fetches_out", "fetches that this machine's servers asked for"),
    ("fetches_in", "fetches that frontends asked for here"),
    ("fetches_limited", "fetches refused for want of a descriptor, in either direction"),
    ("routes_changed", "times that a route to a backend became another one, or none"),
    ("routes_lost", "times that there was no route to an address of a backend: clients of that IP version are relayed"),
    (
        "interfaces_attached",
        "times that an interface got its steering programs after the start: one that came, was made anew, or had lost them",
    ),
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

/// (name below `store.`, whether it goes up and down, meaning) of what the store counts.
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

/// Whether a path below `agent.` goes up and down.
pub(crate) fn is_gauge(path: &str) -> bool {
    matches!(path, "certificate_seconds_left" | "offers_open" | "reads_pending" | "regions_watched" | "senders.now")
}

/// What one of the servers' counters counts.
pub(crate) fn server_help(name: &str) -> String {
    let found = SERVERS.iter().find(|(_, other, _)| *other == name);
    sentence(found.map_or("see docs/counters.md", |(_, _, help)| help))
}

/// What one of the agent's counts.
pub(crate) fn agent_help(path: &str) -> String {
    let found = AGENT.iter().find(|(other, _)| *other == path);
    sentence(found.map_or("see docs/counters.md", |(_, help)| help))
}

/// (name below `store.by_program.NAME.`, meaning) of what goes up and down; the rest is [`COUNTED`].
pub(crate) const PROGRAMS: [(&str, &str); 2] = [
    ("processes", "processes now"),
    (
        "bypassed_percent",
        "of the absent bytes that it has sent on or had to have, the part that it has sent on without having it",
    ),
];

/// What one of a program's counts, and whether it goes up and down.
pub(crate) fn program_help(name: &str) -> (String, bool) {
    let find = |all: &[(&str, &str)]| all.iter().find(|(other, _)| *other == name).map(|(_, help)| sentence(help));
    match find(&PROGRAMS) {
        Some(help) => (help, true),
        None => (find(&COUNTED).unwrap_or_default(), false),
    }
}

/// What one of the store's counts, and whether it goes up and down.
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

    /// All of `docs/counters.md`.
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
        let agent = AGENT.iter().map(|(path, help)| (format!("agent.{path}"), *help)).collect();
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
