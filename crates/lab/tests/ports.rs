//! Network interfaces that appear, disappear and appear again while the agents run. The agents attach the steering
//! programs (BPF) to them at once, and downloads under way continue.

mod service;

use std::process::Command;

use anyhow::{Context, Result, ensure};
use service::held::{HEARD, Held};
use service::{ALONE, FILES, Running, needs_root, start_on};
use shunt_handoff::bpf::STEERING_LAYOUT;
use shunt_lab::{Host, Lab, Options, Settings};
use shunt_testbed::wait_for;

fn with(agent_text: Option<fn(&Host, String) -> String>) -> Options {
    Options { settings: Settings { http: ALONE, agent_text, ..Settings::default() }, ..Options::shunt() }
}

/// Waits until an agent has attached its programs to interfaces at least `times` times since its start.
fn attached(service: &Running<'_>, host: &Host, times: u64) -> Result<()> {
    wait_for("the programs are attached", || {
        let now = service.service.stats(host)?.count("agent.interfaces_attached");
        ensure!(now >= times, "{now} interfaces in place of {times}: {}", service.service.explain());
        Ok(())
    })
}

/// Waits until an agent's log has a line with all these words. Asserts that there is only one.
fn says(service: &Running<'_>, host: &Host, words: &[&str]) -> Result<()> {
    let lines = || -> Result<usize> {
        let log = service.service.agent(host)?.log();
        Ok(log.lines().filter(|line| words.iter().all(|word| line.contains(word))).count())
    };
    wait_for(&format!("a log line with {words:?}"), || {
        ensure!(lines()? > 0, "no line with {words:?}: {}", service.service.explain());
        Ok(())
    })?;
    ensure!(lines()? == 1, "more than one line with {words:?}");
    Ok(())
}

#[test]
fn a_download_goes_on_when_the_port_towards_clients_is_made_anew() -> Result<()> {
    needs_root();
    start_on(Lab::builder(), FILES, with(None), |service| {
        let (lab, frontend) = (service.lab, service.lab.frontend());
        let mut held = lab.client().run(|| Held::ask(service, "7m", ""))??;
        held.read_some(HEARD)?;
        let begun = service.counted("frontend.fe_begun")?;
        ensure!(begun == 1, "{begun} handoffs have begun");
        lab.delete_port(frontend, "client0")?;
        says(service, frontend, &["client0", "does not exist"])?;
        lab.make_port(frontend, "client0")?;
        says(service, frontend, &["client0", "has appeared"])?;
        attached(service, frontend, 1)?;
        lab.client().run(|| held.finish(service))??;
        let stats = service.frontend_stats()?;
        ensure!(stats.count("servers.shortcuts") == 1, "not by the shortcut: {:#}", stats.0);
        service.good_again()
    })
}

#[test]
fn shortcuts_are_taken_again_when_a_backends_port_is_made_anew() -> Result<()> {
    needs_root();
    start_on(Lab::builder(), FILES, with(None), |service| {
        let (lab, backend) = (service.lab, service.lab.backend());
        service.still_good()?;
        lab.delete_port(backend, "service0")?;
        lab.make_port(backend, "service0")?;
        attached(service, backend, 1)?;
        service.service.wait_for_agents()?;
        service.good_again()
    })
}

#[test]
fn an_interface_that_comes_after_the_start_gets_its_programs() -> Result<()> {
    needs_root();
    start_on(Lab::builder(), FILES, with(None), |service| {
        let (lab, frontend) = (service.lab, service.lab.frontend());
        service.service.kill_agent(frontend)?;
        lab.delete_port(frontend, "client0")?;
        service.service.restart_agent(frontend)?;
        says(service, frontend, &["client0", "does not exist"])?;
        lab.make_port(frontend, "client0")?;
        attached(service, frontend, 1)?;
        service.good_again()
    })
}

fn shell(host: &Host, line: &str) -> Result<()> {
    let mut shell = Command::new("sh");
    shell.args(["-ec", line]);
    host.check(shell).map(drop)
}

#[test]
fn programs_that_other_software_takes_off_are_put_back() -> Result<()> {
    needs_root();
    start_on(Lab::builder(), FILES, with(None), |service| {
        for (host, device) in [(service.lab.frontend(), "client0"), (service.lab.backend(), "service0")] {
            shell(host, &format!("tc qdisc del dev {device} clsact"))?;
            attached(service, host, 1)?;
            says(service, host, &[device, "attached the steering programs again"])?;
        }
        service.good_again()
    })
}

fn with_late(_: &Host, text: String) -> String {
    text.replace("[\"client0\"]", "[\"client0\", \"late0\"]")
}

/// An agent never replaces another agent's programs, not even on an interface that comes after its start.
#[test]
fn a_new_interface_with_the_programs_of_another_agent_is_left_to_that() -> Result<()> {
    needs_root();
    start_on(Lab::builder(), FILES, with(Some(with_late)), |service| {
        let frontend = service.lab.frontend();
        says(service, frontend, &["late0", "does not exist"])?;
        let config = std::fs::read_to_string(frontend.dir().join("shuntd.toml"))?;
        let pins = config.lines().find_map(|line| line.strip_prefix("pins = ")).context("no pins")?;
        // Another program is in fe_in's place. This agent cannot tell whose it is.
        let filter = format!("prio 21318 handle {STEERING_LAYOUT} protocol all bpf da");
        let program = pins.trim_matches('"').to_owned() + "/fe_out";
        shell(
            frontend,
            &format!(
                "ip link add early0 type veth peer name early1\ntc qdisc add dev early0 clsact\n\
                 tc filter add dev early0 ingress {filter} object-pinned {program}\nip link set early0 name late0"
            ),
        )?;
        says(service, frontend, &["late0", "of another agent"])?;
        let mut show = Command::new("tc");
        show.args(["filter", "show", "dev", "late0", "ingress"]);
        let filters = frontend.check(show)?;
        ensure!(filters.contains("fe_out"), "it was replaced: {filters:?}");
        service.still_good()
    })
}
