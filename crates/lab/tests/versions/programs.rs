//! Programs under one version of `shunt run`, with agents of another version. A *store* is the part of an agent that
//! keeps the bodies of its machine's programs.

use anyhow::{Context, Result, ensure};
use shunt_lab::{Fetch, Lab, OnDemand, Options, Release, Releases, ReleasesOf, Role};
use shunt_testbed::wait_or_fail;

use crate::no_errors;
use crate::service::{FILES, Running, needs_root, start_on};

const ROUNDS: usize = 3;

/// Returns how many bytes the frontend's nginx has handed off: it has written them to clients, and another machine
/// sends them.
fn handed_off(service: &Running<'_>) -> Result<u64> {
    Ok(service.frontend_stats()?.count("store.by_program.nginx.handed_off"))
}

fn download(service: &Running<'_>) -> Result<()> {
    let paths: Vec<String> = FILES.iter().map(|(name, _)| format!("/{name}")).collect();
    service.whole(&Fetch::new(service.service.chain().server()).run(service.lab.client(), &paths)?)
}

fn works(releases: ReleasesOf) -> Result<()> {
    needs_root();
    let options = Options { on_demand: Some(OnDemand::CHECKED), releases: Some(releases), ..Options::default() };
    start_on(Lab::builder().intermediates(1), FILES, options, |service| {
        bodies_pass_by(service).with_context(|| service.service.explain())
    })
}

/// Asserts that bodies bypass the tiers between the client and the machine that has the bodies in its agent's store.
fn bodies_pass_by(service: &mut Running<'_>) -> Result<()> {
    wait_or_fail("bodies are handed off", || {
        download(service)?;
        Ok(handed_off(service)? > 0)
    })?;
    let before = handed_off(service)?;
    for _ in 0..ROUNDS {
        download(service)?;
    }
    let long: u64 = FILES.iter().map(|(_, length)| length).filter(|length| **length >= 64 << 10).sum();
    let (handed, long) = (handed_off(service)? - before, long * ROUNDS as u64);
    ensure!(handed * 10 > long * 9, "{handed} of {long} bytes were handed off");
    no_errors(service)
}

#[test]
fn a_library_of_this_version_with_agents_of_the_older() -> Result<()> {
    works(|_| Releases { agent: Release::Older, server: Release::This })
}

#[test]
fn a_library_of_the_older_version_with_agents_of_this() -> Result<()> {
    works(|_| Releases { agent: Release::This, server: Release::Older })
}

#[test]
fn a_frontend_of_this_version_reads_from_stores_of_the_older() -> Result<()> {
    works(|host| Releases::all(if host.role() == Role::Frontend { Release::This } else { Release::Older }))
}

#[test]
fn a_frontend_of_the_older_version_reads_from_stores_of_this() -> Result<()> {
    works(|host| Releases::all(if host.role() == Role::Frontend { Release::Older } else { Release::This }))
}
