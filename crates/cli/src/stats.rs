//! `shunt stats`: shows the counters of a running agent.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use shunt_report::{Align, Paint, Table, number};
use shunt_stats::{Stats, agent_stats};
use shunt_sys::output;

/// `shunt stats`
#[derive(Debug, Args)]
pub struct StatsCommand {
    /// The agent's socket: `socket` in its shuntd.toml
    #[arg(long, value_name = "PATH", default_value = "/run/shunt/shuntd.sock")]
    socket: PathBuf,
    /// Write the agent's whole answer as JSON
    #[arg(long)]
    json: bool,
    /// Also show counters that are zero
    #[arg(long, conflicts_with = "json")]
    all: bool,
}

impl StatsCommand {
    pub fn run(&self) -> Result<()> {
        let stats = agent_stats(&self.socket)?;
        let text = if self.json {
            format!("{}\n", serde_json::to_string_pretty(&stats.0)?)
        } else {
            show(&stats, self.all, Paint::of(&std::io::stdout()))
        };
        Ok(output::write(&text)?)
    }
}

fn show(stats: &Stats, all: bool, paint: Paint) -> String {
    let mut text = format!("{}\n", paint.bold(stats.0["name"].as_str().unwrap_or("agent without a name")));
    for peer in stats.0["peers"].as_array().into_iter().flatten() {
        let state = if peer["up"] == true { paint.good("up") } else { paint.bad("down") };
        let word = |key: &str| peer[key].as_str().unwrap_or("?").to_owned();
        text.push_str(&format!("  peer {} at {}: {state}\n", word("name"), word("address")));
    }
    let mut table = Table::new(&[("counter", Align::Left), ("value", Align::Right)]);
    for (path, value) in stats.flat() {
        if all || value > 0 {
            table.row([path, number::count(value)]);
        }
    }
    text + &table.show(paint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn zeros_are_left_out_unless_asked_for() {
        let stats = Stats(json!({
            "name": "fe", "peers": [{"name": "be", "address": "10.0.0.2:7440", "up": false}],
            "servers": {"shortcuts": 12, "aborted": 0}
        }));
        let short = show(&stats, false, Paint::never());
        assert!(short.contains("servers.shortcuts     12") && !short.contains("aborted"), "{short}");
        assert!(short.contains("peer be at 10.0.0.2:7440: down"), "{short}");
        assert!(show(&stats, true, Paint::never()).contains("servers.aborted"));
    }
}
