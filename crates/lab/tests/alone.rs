//! Only one agent runs on a machine. While it runs, a second `shuntd` fails, and so does `shuntd --detach` without
//! `--force`. Both say which process runs.

mod service;

use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use service::{Running, needs_root, start_steady};
use shunt_lab::{Host, shuntd_program};
use shunt_testbed::wait_for;

fn shuntd(host: &Host, config: &std::path::Path, options: &[&str]) -> Result<Output> {
    let mut command = Command::new(shuntd_program()?);
    command.arg("--config").arg(config).args(options).env("NO_COLOR", "1");
    host.output(command)
}

/// Asserts that the program has failed, and that the last line on its standard error has all of these words.
fn refused(output: &Output, words: &[&str]) -> Result<()> {
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or_default();
    ensure!(!output.status.success(), "not refused: {said}");
    ensure!(words.iter().all(|word| last.contains(word)), "not {words:?}: {last}");
    Ok(())
}

fn agents_process(service: &Running<'_>, host: &Host) -> Result<String> {
    Ok(format!("process {}", service.service.agent(host)?.pid()))
}

#[test]
fn nothing_is_detached_while_the_agent_works() -> Result<()> {
    needs_root();
    start_steady(0, |service| {
        for host in [service.lab.frontend(), service.lab.backend()] {
            let config = host.dir().join("shuntd.toml");
            let process = agents_process(service, host)?;
            refused(&shuntd(host, &config, &["--detach"])?, &[&process, "stop it first", "--force"])?;
            service.still_good()?;
            let forced = shuntd(host, &config, &["--detach", "--force"])?;
            ensure!(forced.status.success(), "{}", String::from_utf8_lossy(&forced.stderr));
            let agent = service.service.agent_process(host)?.context("no agent")?;
            let ended = wait_for("the agent ends", || agent.try_wait())?;
            ensure!(ended.success(), "the agent has not ended well: {ended}");
            service.service.restart_agent(host)?;
            service.good_again()?;
        }
        Ok(())
    })
}

#[test]
fn a_second_agent_is_refused_and_told_of_the_first() -> Result<()> {
    needs_root();
    start_steady(0, |service| {
        for (host, interface) in [(service.lab.frontend(), "client0"), (service.lab.backend(), "service0")] {
            let process = agents_process(service, host)?;
            let first = host.dir().join("shuntd.toml");
            refused(&shuntd(host, &first, &[])?, &[&process, "stop it first"])?;
            let text = std::fs::read_to_string(&first)?;
            let pins = text.lines().find(|line| line.starts_with("pins = ")).context("no pins")?;
            let other = pins.trim_end_matches('"').to_owned() + "-second\"";
            let second = host.dir().join("second.toml");
            let text = text.replace(pins, &other).replace(":7440\"\npins", ":7441\"\npins");
            std::fs::write(&second, text.replace("agent.sock", "second.sock"))?;
            refused(&shuntd(host, &second, &[])?, &[interface, "of another agent", &process])?;
            let pinned = other.trim_start_matches("pins = ").trim_matches('"');
            ensure!(!std::path::Path::new(pinned).exists(), "what the second has pinned stays");
            service.still_good()?;
        }
        Ok(())
    })
}
