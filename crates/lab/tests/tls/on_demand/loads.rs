//! Tests under load: many connections at the same time, and a body that is longer than what a store (the part of an
//! agent that has its machine's bodies) keeps for one program. Every download must end.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{handed_off, run};
use crate::bed::{FILES, authority};
use crate::service::Running;

/// Longest time of one download, in seconds (curl's `--max-time`). It is long enough for a machine that also does other
/// work.
const LIMIT_SECONDS: &str = "300";

/// Sends `requests` requests for each file, over at most `connections` connections of curl at a time. Asserts that each
/// response has the status 200 and the length of its file.
fn load(service: &Running<'_>, connections: u32, files: &[&str], requests: u32) -> Result<()> {
    let mut curl = Command::new("curl");
    curl.args(["--parallel", "--parallel-max", &connections.to_string(), "--max-time", LIMIT_SECONDS, "--http1.1"]);
    curl.args(["--silent", "--show-error", "--tlsv1.3", "--cacert"]).arg(authority(service));
    curl.args(["--write-out", "%{http_code} %{size_download}\n"]);
    let address = service.lab.frontend().address();
    for file in files {
        curl.args(["--output", "/dev/null", &format!("https://{address}/{file}?[1-{requests}]")]);
    }
    let said = service.lab.client().check(curl).with_context(|| format!("{connections} connections for {files:?}"))?;
    let mut got: BTreeMap<&str, u32> = BTreeMap::new();
    said.lines().for_each(|line| *got.entry(line).or_default() += 1);
    let length = |file: &str| FILES.iter().find(|(name, _)| *name == file).map_or(0, |(_, length)| *length);
    let expected: Vec<String> = files.iter().map(|file| format!("200 {}", length(file))).collect();
    let expected: BTreeMap<&str, u32> = expected.iter().map(|line| (line.as_str(), requests)).collect();
    ensure!(got == expected, "{got:?} instead of {expected:?}");
    Ok(())
}

fn loads(service: &Running<'_>, requests: u32) -> Result<()> {
    let before = handed_off(service)?;
    load(service, 8, &["1m"], requests)?;
    load(service, 16, &["1k", "16k-1", "16k+1", "64k", "1m"], requests / 5)?;
    // The file is longer than what a store keeps for one program.
    load(service, 1, &["64m"], 1)?;
    ensure!(handed_off(service)? > before, "nothing was handed off");
    Ok(())
}

#[test]
fn many_connections_at_once_hang_nobody() -> Result<()> {
    run(|service| loads(service, 100))
}

/// Takes minutes, so it runs only with `--ignored`.
#[test]
#[ignore = "many_connections_at_once_hang_nobody is a sample"]
fn twenty_loads_hang_nobody() -> Result<()> {
    run(|service| (0..20).try_for_each(|turn| loads(service, 2000).with_context(|| format!("load {turn}"))))
}
