//! One response can be followed through all logs by the trace-id of its request.

mod service;

use std::fs::OpenOptions;

use anyhow::{Context, Result, ensure};
use service::held::Held;
use service::{Running, needs_root, start_on};
use shunt_lab::{Host, Lab, Options, Settings};
use shunt_testbed::wait_for;

const GOOD: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const FAILING: &str = "0af7651916cd43dd8448eb211c80319c";

fn traceparent(id: &str) -> String {
    format!("traceparent: 00-{id}-b7ad6b7169203331-01\r\n")
}

/// Waits until a log has a line with this trace-id and this text.
fn has_line(mut log: impl FnMut() -> Result<String>, id: &str, text: &str) -> Result<()> {
    wait_for(&format!("a log line with {id} and {text:?}"), || {
        let all = log()?;
        let has = all.lines().any(|line| line.contains(&format!("trace={id}")) && line.contains(text));
        ensure!(has, "no line with trace={id} and {text:?} in\n{all}");
        Ok(())
    })
}

fn agent_log(service: &Running<'_>, host: &Host) -> Result<String> {
    Ok(service.service.agent(host)?.log())
}

#[test]
fn a_trace_id_is_in_the_logs_of_agents_and_nginx() -> Result<()> {
    needs_root();
    let settings = Settings { agent_debug: true, ..Settings::default() };
    let files = [("good", 256 << 10), ("failing", 64 << 20)];
    start_on(Lab::builder(), &files, Options { settings, ..Options::shunt() }, |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        service.lab.client().run(|| -> Result<()> {
            Held::ask(service, "good", &traceparent(GOOD))?.finish(service)?;
            let failing = Held::ask(service, "failing", &traceparent(FAILING))?;
            OpenOptions::new().write(true).open(service.files.join("failing"))?.set_len(1 << 20)?;
            ensure!(failing.ends_early()?, "a truncated file was taken for the whole");
            Ok(())
        })??;
        has_line(|| agent_log(service, frontend), GOOD, "claiming")?;
        has_line(|| agent_log(service, backend), GOOD, "being sent")?;
        has_line(|| agent_log(service, backend), FAILING, "a handoff failed")?;
        has_line(|| agent_log(service, frontend), FAILING, "ended a handoff")?;
        let nginx = service.service.chain_mut().process(frontend.name()).context("nginx at the frontend")?;
        has_line(|| Ok(nginx.log()), FAILING, "shunt: ")
    })
}
