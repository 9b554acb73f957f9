//! Common HTTP clients of a service with Shunt. Each must get the files' bytes, and long bodies must take the shortcut:
//! straight from the backend to the client.

mod service;

use std::process::Command;

use anyhow::{Context, Result, ensure};
use service::{ALONE, FILES, Running, needs_root, same_file, start_on, start_steady};
use shunt_lab::{Host, Lab, Options, Settings, Wrk, file_sha256};

const URLS_OVER_ONE_CONNECTION: usize = 12;
const GET_PY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/get.py");

/// Returns names and URLs of [`URLS_OVER_ONE_CONNECTION`] files: from the smallest to the largest, and back again.
fn urls(service: &Running<'_>) -> Vec<(String, String)> {
    let names = FILES.iter().map(|(name, _)| *name).chain(FILES.iter().rev().map(|(name, _)| *name));
    let chain = service.service.chain();
    names.take(URLS_OVER_ONE_CONNECTION).map(|name| (name.to_owned(), chain.url(&format!("/{name}")))).collect()
}

/// Runs a client that writes one file for each URL into a directory, and compares these files with the originals.
/// Asserts that each long body took the shortcut.
fn compare(service: &Running<'_>, client: impl FnOnce(&Host, &[(String, String)], &str) -> Result<()>) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().to_str().context("a temporary path in UTF-8")?;
    let urls = urls(service);
    let before = service.frontend_stats()?;
    client(service.lab.client(), &urls, path)?;
    for (index, (name, _)) in urls.iter().enumerate() {
        let got = file_sha256(directory.path().join(index.to_string()))?;
        same_file(&service.files, name, &got).with_context(|| format!("number {index}"))?;
    }
    let long =
        urls.iter().filter(|(name, _)| FILES.iter().any(|(file, size)| file == name && *size >= 32 << 10)).count();
    let after = service.frontend_stats()?;
    let shortcuts = after.count("servers.shortcuts") - before.count("servers.shortcuts");
    ensure!(shortcuts == long as u64, "{shortcuts} shortcuts for {long} long bodies: {:?}", after.grown(&before, ""));
    Ok(())
}

#[test]
fn curl_over_one_connection() -> Result<()> {
    needs_root();
    start_steady(1, |service| {
        compare(service, |client, urls, directory| {
            let mut curl = Command::new("curl");
            curl.args(["--max-time", "30", "--silent", "--show-error", "--fail", "--write-out", "%{num_connects}\n"]);
            for (index, (_, url)) in urls.iter().enumerate() {
                curl.args(["--output", &format!("{directory}/{index}"), url]);
            }
            let connects: u32 = client.check(curl)?.lines().filter_map(|line| line.trim().parse::<u32>().ok()).sum();
            ensure!(connects == 1, "curl made {connects} connections");
            Ok(())
        })
    })
}

#[test]
fn wget() -> Result<()> {
    needs_root();
    // wget makes a new connection for each body.
    let settings = Settings { http: ALONE, ..Settings::default() };
    let options = Options { settings, ..Options::steady() };
    start_on(Lab::builder(), FILES, options, |service| {
        compare(service, |client, urls, directory| {
            for (index, (_, url)) in urls.iter().enumerate() {
                let mut wget = Command::new("wget");
                wget.args(["--quiet", "--tries=1", "--output-document", &format!("{directory}/{index}"), url]);
                client.check(wget)?;
            }
            Ok(())
        })
    })
}

#[test]
fn python_requests_over_one_session() -> Result<()> {
    needs_root();
    start_steady(1, |service| {
        compare(service, |client, urls, directory| {
            let mut python = Command::new("/usr/bin/python3");
            python.args([GET_PY, directory]).args(urls.iter().map(|(_, url)| url));
            client.check(python).map(drop)
        })
    })
}

#[test]
fn go_over_one_client() -> Result<()> {
    needs_root();
    let built = tempfile::tempdir()?;
    let program = built.path().join("get");
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/go/get.go");
    let status = Command::new("go").args(["build", "-o"]).arg(&program).arg(source).status().context("running go")?;
    ensure!(status.success(), "go build failed");
    start_steady(1, |service| {
        compare(service, |client, urls, directory| {
            let mut go = Command::new(&program);
            go.arg(directory).args(urls.iter().map(|(_, url)| url));
            client.check(go).map(drop)
        })
    })
}

#[test]
fn wrk_and_h2load_see_no_error() -> Result<()> {
    needs_root();
    start_steady(1, |service| {
        let url = service.service.chain().url("/64k");
        let report =
            Wrk::new(&url).connections(10).duration(std::time::Duration::from_secs(2)).run(service.lab.client())?;
        ensure!(report.errors() == 0 && report.requests > 100, "{report:?}");
        let mut h2load = Command::new("h2load");
        h2load.args(["--h1", "--requests=500", "--clients=10", &url]);
        let text = service.lab.client().check(h2load)?;
        ensure!(text.contains("500 succeeded, 0 failed, 0 errored"), "{text}");
        ensure!(text.contains(&(500u64 * (64 << 10)).to_string()) || text.contains("31.2"), "{text}");
        service.no_fallback()
    })
}
