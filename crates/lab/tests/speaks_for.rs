//! A wrong `speaks_for` (the server addresses in whose name a backend may send): responses do not take the shortcut
//! from the backend to the client, but none fails.

mod service;

use anyhow::{Result, ensure};
use service::{FILES, needs_root, start_on};
use shunt_lab::{Lab, Options, Settings, fetch};

/// The backend's agent may not send in the name of the address that clients connect to. In practice, this happens if
/// the service's public address is none of the frontend's own addresses.
#[test]
fn a_backend_that_does_not_speak_for_the_frontend_relays() -> Result<()> {
    needs_root();
    let settings = Settings { speaks_for: Some("\"192.0.2.77\""), ..Settings::default() };
    start_on(Lab::builder(), FILES, Options { settings, ..Options::shunt() }, |service| {
        let paths = ["/64k", "/7m", "/64k"];
        let fetched = fetch(service.lab.client(), service.service.chain().server(), &paths)?;
        service.whole(&fetched)?;
        let stats = service.frontend_stats()?;
        let (relayed, shortcuts) = (stats.count("servers.relayed_speaks_for"), stats.count("servers.shortcuts"));
        ensure!(
            (relayed, shortcuts) == (paths.len() as u64, 0),
            "{relayed} relayed, {shortcuts} shortcuts: {:#}",
            stats.0
        );
        Ok(())
    })
}
