//! The values that `shunt stats` shows, in Prometheus' text format (version 0.0.4). Reasons become labels, so that one
//! expression sums over all reasons.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Map, Value};

use crate::telemetry::counters;

/// Content type of a response in this format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
}

struct Family {
    help: String,
    kind: Kind,
    /// Samples, each as its labels in braces and its value.
    samples: Vec<(String, u64)>,
}

/// Families by name, because the format wants a family's samples together.
#[derive(Default)]
struct Page(BTreeMap<String, Family>);

impl Page {
    fn add(&mut self, name: &str, kind: Kind, help: &str, labels: &[(&str, &str)], value: &Value) {
        let Some(value) = value.as_u64().or_else(|| value.as_bool().map(u64::from)) else {
            return;
        };
        let name = if kind == Kind::Counter { format!("shunt_{name}_total") } else { format!("shunt_{name}") };
        let family = self.0.entry(name).or_insert_with(|| Family { help: help.to_owned(), kind, samples: Vec::new() });
        family.samples.push((braced(labels), value));
    }

    /// Adds one sample for each field of the object `values`. The field's name becomes the value of the label `label`.
    fn add_all(&mut self, name: &str, kind: Kind, help: &str, label: &str, values: &Value) {
        for (key, value) in values.as_object().into_iter().flatten() {
            self.add(name, kind, help, &[(label, key)], value);
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (name, Family { help, kind, samples }) in &self.0 {
            let kind = if *kind == Kind::Counter { "counter" } else { "gauge" };
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
            for (labels, value) in samples {
                let _ = writeln!(text, "{name}{labels} {value}");
            }
        }
        text
    }
}

fn braced(labels: &[(&str, &str)]) -> String {
    let escaped = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let pairs: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
    if pairs.is_empty() { String::new() } else { format!("{{{}}}", pairs.join(",")) }
}

/// Returns the page for a result of [`crate::Daemon::stats`].
pub fn exposition(stats: &Value) -> String {
    let mut page = Page::default();
    for peer in stats["peers"].as_array().into_iter().flatten() {
        let name = peer["name"].as_str().unwrap_or_default();
        page.add("peer_up", Kind::Gauge, "Whether the session with a peer is up.", &[("peer", name)], &peer["up"]);
    }
    add_servers(&mut page, &stats["servers"]);
    let help = "What the steering programs did with packets and handoffs; docs/counters.md has each event.";
    for role in ["frontend", "backend"] {
        for (event, value) in stats[role].as_object().into_iter().flatten().filter(|(name, _)| *name != "flows") {
            let event = event.split_once('_').map_or(event.as_str(), |(_, event)| event);
            page.add("steering", Kind::Counter, help, &[("role", role), ("event", event)], value);
        }
    }
    page.add("flows", Kind::Gauge, "Client connections in the flow table.", &[], &stats["frontend"]["flows"]);
    for (name, value) in stats["store"].as_object().into_iter().flatten() {
        let (help, is_gauge) = counters::store_help(name);
        let kind = if is_gauge { Kind::Gauge } else { Kind::Counter };
        page.add(&format!("store_{name}"), kind, &help, &[], value);
    }
    for (program, counts) in stats["store"]["by_program"].as_object().into_iter().flatten() {
        for (name, value) in counts.as_object().into_iter().flatten() {
            let (help, is_gauge) = counters::program_help(name);
            let kind = if is_gauge { Kind::Gauge } else { Kind::Counter };
            page.add(&format!("program_{name}"), kind, &help, &[("program", program)], value);
        }
    }
    add_agent(&mut page, stats["agent"].as_object().unwrap_or(&Map::new()));
    page.text()
}

/// Adds the servers' counters: `relayed_no_peer` becomes `shunt_relayed_total{reason="no_peer"}`.
fn add_servers(page: &mut Page, servers: &Value) {
    const BY_REASON: [(&str, &str); 3] = [
        ("relayed", "Responses that were relayed, by reason; docs/counters.md has each reason."),
        ("fetched_by", "Offers whose payload was fetched, by reason; docs/counters.md has each reason."),
        ("refused", "Offers that could not be used, by reason; docs/counters.md has each reason."),
    ];
    for (name, value) in servers.as_object().into_iter().flatten() {
        let of_reason = BY_REASON.iter().find_map(|(family, help)| {
            let prefix = family.trim_end_matches("_by");
            Some((family, help, name.strip_prefix(prefix)?.strip_prefix('_')?))
        });
        match of_reason {
            Some((family, help, reason)) => page.add(family, Kind::Counter, help, &[("reason", reason)], value),
            None => page.add(name, Kind::Counter, &counters::server_help(name), &[], value),
        }
    }
}

fn add_agent(page: &mut Page, agent: &Map<String, Value>) {
    for (name, value) in agent {
        match name.as_str() {
            "ended" => {
                let help = "Handoffs and fetches that ended without success, by reason.";
                page.add_all("ended", Kind::Counter, help, "reason", value);
            }
            "limited" => page.add_all("limited", Kind::Counter, "Times that a limit was reached.", "limit", value),
            "now" => page.add_all("in_use", Kind::Gauge, "Present number of each limited thing.", "of", value),
            "limit" => page.add_all("limit", Kind::Gauge, "Limit of each limited thing.", "of", value),
            "senders" => {
                for (name, value) in value.as_object().into_iter().flatten() {
                    add_scalar(page, &format!("senders_{name}"), &format!("senders.{name}"), value);
                }
            }
            _ => add_scalar(page, name, name, value),
        }
    }
}

fn add_scalar(page: &mut Page, name: &str, path: &str, value: &Value) {
    let kind = if counters::is_gauge(path) { Kind::Gauge } else { Kind::Counter };
    page.add(&format!("agent_{name}"), kind, &counters::agent_help(path), &[], value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn reasons_are_labels_and_families_stand_together() {
        let text = exposition(&json!({
            "name": "fe",
            "peers": [{"name": "be1", "up": true}, {"name": "be2", "up": false}],
            "servers": {"shortcuts": 7, "relayed_no_peer": 1, "relayed_type": 2, "fetched": 5, "fetched_filter": 4},
            "frontend": {"fe_begun": 7, "flows": 3},
            "backend": null,
            "store": {"bytes": 9, "fetches": 8, "by_program": {"nginx": {"processes": 2, "passed_on": 5}}},
            "agent": {"handoffs": 7, "offers_open": 2, "senders": {"now": 1, "reused": 6}, "ended": {"Limit": 1},
                "now": {"handoffs": 1}, "limit": {"handoffs": 9}, "limited": {"handoffs": 0}},
        }));
        for line in [
            "shunt_peer_up{peer=\"be2\"} 0",
            "shunt_shortcuts_total 7",
            "shunt_relayed_total{reason=\"no_peer\"} 1\nshunt_relayed_total{reason=\"type\"} 2",
            "shunt_fetched_total 5",
            "shunt_fetched_by_total{reason=\"filter\"} 4",
            "shunt_steering_total{role=\"frontend\",event=\"begun\"} 7",
            "# TYPE shunt_flows gauge\nshunt_flows 3",
            "# TYPE shunt_agent_senders_now gauge\nshunt_agent_senders_now 1",
            "# TYPE shunt_agent_offers_open gauge",
            "shunt_ended_total{reason=\"Limit\"} 1",
            "# TYPE shunt_store_bytes gauge\nshunt_store_bytes 9",
            "shunt_store_fetches_total 8",
            "shunt_program_passed_on_total{program=\"nginx\"} 5",
            "# TYPE shunt_program_processes gauge\nshunt_program_processes{program=\"nginx\"} 2",
            "shunt_in_use{of=\"handoffs\"} 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("backend"));
    }

    #[test]
    fn no_label_breaks_its_line() {
        assert_eq!(braced(&[("a", "x\"y\\z\n")]), "{a=\"x\\\"y\\\\z\\n\"}");
    }
}
