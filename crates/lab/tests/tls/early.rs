//! 0-RTT (RFC 8446, 2.3). A request that comes before the client's Finished is answered at once, and the response's
//! body is relayed (sent through the tiers). nginx marks such a request with a header field (RFC 8470). The body of the
//! next response is handed off: the backend sends it.

use std::io::Write;

use anyhow::{Context, Result, ensure};
use shunt_lab::{Lab, Options, Settings};

use crate::bed::{Before, FILES, options};
use crate::client::{Client, Shared, Target, request};
use crate::service::{Running, needs_root, start_on};

const LINES: &str = "
        ssl_early_data on;
        ssl_session_cache shared:tls:1m;
        add_header X-Early $ssl_early_data;
";

/// Sends a request as early data, and another one after the handshake. nginx takes a request for early data if the
/// handshake is not complete when nginx makes the response's header. So the client sends its Finished only after it has
/// got this header.
fn ask_early(service: &Running<'_>) -> Result<()> {
    let target = Target::of(service);
    service.lab.client().run(|| -> Result<()> {
        let shared = Shared::new(&target)?.with_early_data();
        Client::connect_with(&target, &shared)?.get(&target, "1k")?; // gets a session ticket

        let mut client = Client::connect_with(&target, &shared)?;
        let mut early = client.tls.early_data().context("a ticket without early data")?;
        early.write_all(request("64k").as_bytes())?;
        client.flush()?;
        client.hold = true;
        let body = client.answer()?;
        ensure!(client.tls.is_early_data_accepted(), "early data was refused");
        ensure!(body.header.contains("\r\nx-early: 1\r\n"), "{}", body.header);
        client.finish(&target, body, "64k")?;

        client.hold = false;
        let body = client.ask("64k")?;
        ensure!(!body.header.contains("x-early"), "{}", body.header);
        client.finish(&target, body, "64k")
    })?
}

#[test]
fn a_request_before_the_clients_finished_is_marked_and_relayed() -> Result<()> {
    needs_root();
    let settings = Settings { tls: Some(LINES), ..Settings::default() };
    start_on(Lab::builder(), FILES, Options { settings, ..Options::plain() }, |service| ask_early(service))?;
    start_on(Lab::builder(), FILES, Options { settings, ..options() }, |service| {
        let before = Before::of(service)?;
        ask_early(service)?;
        let counted = before.counted(service)?;
        counted.ensure("relayed_tls_early", 1)?;
        counted.ensure("shortcuts", 2)
    })
}
