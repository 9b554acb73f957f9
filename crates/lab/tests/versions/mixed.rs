//! Services whose machines, or whose agents and servers, are of different versions. A body takes the *shortcut* if the
//! backend sends it straight to the client.

use anyhow::{Result, ensure};
use shunt_lab::{Fetch, Host, Lab, Options, Release, Releases, ReleasesOf, Role, Settings};

use crate::service::{ALONE, FILES, Running, needs_root, start_on};
use crate::{Target, curl, no_errors};

/// Paths of the bodies of one round that are long enough for a shortcut.
const LONG: [&str; 4] = ["/32k", "/64k", "/1m", "/7m"];
const ROUNDS: usize = 3;

fn works(releases: ReleasesOf) -> Result<()> {
    needs_root();
    let settings = Settings { tls: Some(""), http: ALONE, ..Settings::default() };
    let options = Options { releases: Some(releases), settings, ..Options::steady() };
    start_on(Lab::builder().backends(2), FILES, options, |service| {
        all_by_shortcuts(service, |service, paths| {
            service.whole(&Fetch::new(service.service.chain().server()).run(service.lab.client(), paths)?)
        })?;
        all_by_shortcuts(service, |service, paths| curl(&Target::of(service), paths))?;
        no_errors(service)
    })
}

/// Downloads all files several times, and asserts that each body which is long enough took the shortcut.
fn all_by_shortcuts(service: &Running<'_>, download: fn(&Running<'_>, &[&str]) -> Result<()>) -> Result<()> {
    let count = || Ok::<_, anyhow::Error>(service.frontend_stats()?.count("servers.shortcuts"));
    let before = count()?;
    for _ in 0..ROUNDS {
        download(service, &LONG)?;
        download(service, &["/1k", "/32k-1"])?;
    }
    // The client may have the last byte of a body before the frontend knows that, and counts the body.
    service.until_counted("servers.shortcuts", before + (ROUNDS * LONG.len()) as u64)?;
    let shortcuts = count()? - before;
    ensure!(shortcuts == (ROUNDS * LONG.len()) as u64, "{shortcuts} shortcuts");
    service.no_fallback()
}

fn older_where(is_older: bool) -> Release {
    if is_older { Release::Older } else { Release::This }
}

#[test]
fn a_frontend_of_this_version_with_backends_of_the_older() -> Result<()> {
    works(|host| Releases::all(older_where(host.role() == Role::Backend)))
}

#[test]
fn a_frontend_of_the_older_version_with_backends_of_this() -> Result<()> {
    works(|host| Releases::all(older_where(host.role() == Role::Frontend)))
}

#[test]
fn agents_of_this_version_with_modules_of_the_older() -> Result<()> {
    works(|_| Releases { agent: Release::This, server: Release::Older })
}

#[test]
fn agents_of_the_older_version_with_modules_of_this() -> Result<()> {
    works(|_| Releases { agent: Release::Older, server: Release::This })
}

fn second_backend_is_older(host: &Host) -> Releases {
    Releases::all(older_where(host.name() == "backend2"))
}

#[test]
fn backends_of_both_versions_behind_one_frontend() -> Result<()> {
    works(second_backend_is_older)
}
