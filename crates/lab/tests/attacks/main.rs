//! Attacks on a running service, one kind a file. SECURITY.md lists them by their tests' names.

mod agents;
mod exhaustion;
mod local;
mod offers;
mod privileges;
mod segments;
#[path = "../service/mod.rs"]
mod service;

use anyhow::{Result, ensure};
use service::Running;
use shunt_lab::{Fetched, fetch, file_sha256};

/// Whole bodies, and the shortcut is still taken.
fn still_good(service: &Running<'_>) -> Result<()> {
    let before = service.frontend_stats()?.count("servers.shortcuts");
    let fetched = fetch(service.lab.client(), service.service.chain().server(), &["/64k", "/1m"])?;
    whole(service, &fetched)?;
    let shortcuts = service.frontend_stats()?.count("servers.shortcuts") - before;
    ensure!(shortcuts == 2, "{shortcuts} shortcuts instead of 2");
    Ok(())
}

fn whole(service: &Running<'_>, fetched: &[Fetched]) -> Result<()> {
    for one in fetched {
        ensure!(one.status == 200, "{}: status {}", one.path, one.status);
        ensure!(one.sha256 == file_sha256(service.files.join(&one.path[1..]))?, "{}: other bytes", one.path);
    }
    Ok(())
}
