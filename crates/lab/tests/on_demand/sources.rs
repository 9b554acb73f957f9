//! Bodies in a *store* (the part of an agent that has its machine's bodies) from which the next tier cannot fetch. This
//! tier is sent the bytes themselves, and no references to them.

use anyhow::{Result, ensure};
use shunt_lab::{Fetch, Host, Options, Role, Settings};
use shunt_testbed::{wait_for, wait_or_fail};

use crate::{intermediate, options, paths, run};

/// Removes the backend from the peers of the frontend's agent. The intermediate stays a peer.
fn without_the_backend(host: &Host, text: String) -> String {
    if host.role() != Role::Frontend {
        return text;
    }
    let of_backend = "\n[[peer]]\nname = \"backend\"\n";
    let (before, behind) = text.split_once(of_backend).expect("a peer");
    let next = behind.find("\n[").unwrap_or(behind.len());
    format!("{before}{}", &behind[next..])
}

#[test]
fn a_tier_that_does_not_know_the_holder_gets_bytes() -> Result<()> {
    let settings = Settings { agent_text: Some(without_the_backend), apart: true, ..Settings::default() };
    run(Options { settings, ..options() }, |service| {
        let server = service.service.chain().server();
        let between = intermediate(service)?;
        let counted = |name: &str| -> Result<u64> {
            Ok(service.service.stats(between)?.count(&format!("store.by_program.nginx.{name}")))
        };
        // The agents may still have to start, and to find each other.
        wait_for("each agent answers", || service.service.all_stats().map(drop))?;
        wait_or_fail("the backend refers to what the intermediate may fetch", || {
            service.whole(&Fetch::new(server).run(service.lab.client(), &paths(2))?)?;
            Ok(counted("received_absent")? > 0)
        })?;
        ensure!(counted("passed_on")? == 0, "{} bytes were passed on by reference", counted("passed_on")?);
        ensure!(service.counted("store.unreached")? == 0, "the frontend was told of what it cannot reach");
        Ok(())
    })
}
