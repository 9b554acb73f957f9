//! `shuntd --detach` removes the steering programs (BPF). It resets all client connections whose sequence numbers these
//! programs have translated, and no others.

mod service;

use std::process::Command;

use anyhow::{Context, Result, ensure};
use service::held::Held;
use service::{ALONE, FILES, Running, needs_root, start_on};
use shunt_lab::{Host, Lab, Options, Settings, shuntd_program};

/// Runs `shuntd` with the host's configuration. Returns what it prints.
fn shuntd(host: &Host, options: &[&str]) -> Result<String> {
    let mut command = Command::new(shuntd_program()?);
    command.arg("--config").arg(host.dir().join("shuntd.toml")).args(options).env("NO_COLOR", "1");
    let output = host.output(command)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{options:?}: {said}");
    Ok(said)
}

fn options() -> Options {
    Options { settings: Settings { http: ALONE, ..Settings::default() }, ..Options::shunt() }
}

/// Returns a persistent connection that has had one whole response.
fn kept(service: &Running<'_>, name: &str) -> Result<Held> {
    let mut held = Held::ask(service, name, "")?;
    held.read_rest(service)?;
    Ok(held)
}

#[test]
fn connections_that_had_a_shortcut_are_reset_and_others_go_on() -> Result<()> {
    needs_root();
    start_on(Lab::builder(), FILES, options(), |service| {
        let (client, frontend) = (service.lab.client(), service.lab.frontend());
        let short = client.run(|| kept(service, "1k"))??;
        let before = service.counted("servers.shortcuts")?;
        let long = client.run(|| kept(service, "64k"))??;
        service.until_counted("servers.shortcuts", before + 1)?;
        let under_way = client.run(|| Held::ask(service, "7m", ""))??;
        service.until_counted("frontend.fe_begun", before + 2)?;

        let said = shuntd(frontend, &["--detach", "--force"])?;
        ensure!(client.run(|| long.ends_in_a_reset())??, "something came behind a body");
        ensure!(client.run(|| under_way.ends_early())??, "a body came whole without steering");
        ensure!(said.contains("reset the connections") && said.contains("connections=2"), "{said}");
        client.run(|| short.ask_again("64k"))??;
        service.service.restart_agent(frontend)?;
        service.good_again()
    })
}

/// Removes the files by which the BPF objects are pinned, as happens when the BPF file system is emptied or mounted
/// anew.
fn remove_pins(host: &Host) -> Result<()> {
    let config = std::fs::read_to_string(host.dir().join("shuntd.toml"))?;
    let pins = config.lines().find_map(|line| line.strip_prefix("pins = ")).context("no pins")?;
    Ok(std::fs::remove_dir_all(pins.trim_matches('"'))?)
}

fn refused(host: &Host, options: &[&str], words: &[&str]) -> Result<()> {
    let said = shuntd(host, options).err().context("not refused")?.to_string();
    ensure!(words.iter().all(|word| said.contains(word)), "not {words:?}: {said}");
    Ok(())
}

#[test]
fn programs_without_pins_are_taken_off_by_force_unless_an_agent_works_with_them() -> Result<()> {
    needs_root();
    start_on(Lab::builder(), FILES, options(), |service| {
        let (client, frontend, backend) = (service.lab.client(), service.lab.frontend(), service.lab.backend());
        let held = client.run(|| kept(service, "64k"))??;
        for (host, interface, program) in [(frontend, "client0", "fe_in"), (backend, "service0", "be_in")] {
            let process = format!("process {}", service.service.agent(host)?.pid());
            remove_pins(host)?;
            refused(host, &["--detach", "--force"], &[&process, interface, program, "stop it first"])?;
            service.service.kill_agent(host)?;
            refused(host, &[], &[interface, "of another agent", "`shuntd --detach --force`"])?;
            let said = shuntd(host, &["--detach"])?;
            ensure!(said.contains(interface) && said.contains(program) && said.contains("--force"), "{said}");
            refused(host, &[], &[interface])?;
            shuntd(host, &["--detach", "--force"])?;
            let said = shuntd(host, &["--detach"])?;
            ensure!(said.is_empty(), "something is there still: {said}");
            service.service.restart_agent(host)?;
        }
        ensure!(client.run(|| held.ends_in_a_reset())??, "something came behind a body");
        service.good_again()
    })
}
