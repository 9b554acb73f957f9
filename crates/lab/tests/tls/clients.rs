//! Programs that people use: every one gets the same bytes, and the bodies took the shortcut where TLS allows it.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use shunt_lab::Host;

use crate::bed::{FILES, authority, compare, on_tls, urls};
use crate::service::may_run;

/// curl fetches all URLs over one connection.
fn curl(client: &Host, authority: &Path, urls: &[(String, String)], directory: &str, more: &[&str]) -> Result<()> {
    let mut curl = Command::new("curl");
    curl.args(["--max-time", "60", "--silent", "--show-error", "--fail", "--http1.1", "--cacert"]).arg(authority);
    curl.args(["--write-out", "%{num_connects}\n"]).args(more);
    for (index, (_, url)) in urls.iter().enumerate() {
        curl.args(["--output", &format!("{directory}/{index}"), url]);
    }
    let connects: u32 = client.check(curl)?.lines().filter_map(|line| line.trim().parse::<u32>().ok()).sum();
    ensure!(connects == 1, "curl made {connects} connections");
    Ok(())
}

#[test]
fn curl_over_one_connection_with_each_suite() -> Result<()> {
    if !may_run("curl_over_one_connection_with_each_suite") {
        return Ok(());
    }
    on_tls(1, |service| {
        for suite in ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"] {
            let (urls, authority) = (urls(service, 14), authority(service));
            let more = ["--tlsv1.3", "--tls13-ciphers", suite];
            let counted = compare(service, &urls, |client, to| curl(client, &authority, &urls, to, &more))?;
            counted.ensure("shortcuts", urls.len())?;
        }
        service.no_fallback()
    })
}

#[test]
fn tls_1_2_is_relayed_and_counted() -> Result<()> {
    if !may_run("tls_1_2_is_relayed_and_counted") {
        return Ok(());
    }
    on_tls(1, |service| {
        let (urls, authority) = (urls(service, 7), authority(service));
        let counted = compare(service, &urls, |client, to| curl(client, &authority, &urls, to, &["--tls-max", "1.2"]))?;
        counted.ensure("shortcuts", 0)?;
        counted.ensure("relayed_tls_version", urls.len())
    })
}

/// wget speaks by GnuTLS, which ends a connection that brings it too many KeyUpdates.
#[test]
fn gnutls_is_sent_no_more_key_updates_than_it_takes() -> Result<()> {
    if !may_run("gnutls_is_sent_no_more_key_updates_than_it_takes") {
        return Ok(());
    }
    on_tls(1, |service| {
        let urls: Vec<_> = urls(service, 70).into_iter().filter(|(name, _)| name != "64m").collect();
        let authority = authority(service);
        let counted = compare(service, &urls, |client, directory| {
            let list: String = urls.iter().map(|(_, url)| format!("{url}\n")).collect();
            let mut wget = Command::new("sh");
            // One file holds all answers, one after the other.
            let script = "printf %s \"$1\" | wget --quiet --tries=1 --ca-certificate \"$2\" -O \"$3/all\" -i -";
            wget.args(["-c", script, "wget", &list]).arg(&authority).arg(directory);
            client.check(wget)?;
            let (all, mut at) = (std::fs::read(format!("{directory}/all"))?, 0);
            for (index, (name, _)) in urls.iter().enumerate() {
                let length = FILES.iter().find(|(file, _)| file == name).context("a known file")?.1 as usize;
                let answer = all.get(at..at + length).context("an answer is too short")?;
                std::fs::write(format!("{directory}/{index}"), answer)?;
                at += length;
            }
            ensure!(at == all.len(), "{} bytes too many", all.len() - at);
            Ok(())
        })?;
        let (shortcuts, relayed) = (counted.grown("shortcuts"), counted.grown("relayed_tls_budget"));
        ensure!(shortcuts + relayed == urls.len() as u64, "{shortcuts} shortcuts, {relayed} past the budget");
        ensure!(shortcuts > 0 && relayed > 0, "{shortcuts} shortcuts, {relayed} past the budget");
        Ok(())
    })
}

/// Of one session, whose pool tells how many connections it made: a connection that looks closed is not used again.
const REQUESTS: &str = r#"
import requests, sys
session = requests.Session()
session.trust_env = False  # REQUESTS_CA_BUNDLE would win
session.verify = sys.argv[2]
for index, url in enumerate(sys.argv[3:]):
    answer = session.get(url, timeout=30)
    answer.raise_for_status()
    assert int(answer.headers["Content-Length"]) == len(answer.content)
    open(f"{sys.argv[1]}/{index}", "wb").write(answer.content)
pools = session.get_adapter("https://").poolmanager.pools
print(sum(pools[key].num_connections for key in pools.keys()))
"#;

#[test]
fn python_requests_over_one_connection() -> Result<()> {
    if !may_run("python_requests_over_one_connection") {
        return Ok(());
    }
    on_tls(0, |service| {
        let (urls, authority) = (urls(service, 14), authority(service));
        let counted = compare(service, &urls, |client, directory| {
            let mut python = Command::new("/usr/bin/python3");
            python.args(["-c", REQUESTS, directory]).arg(&authority).args(urls.iter().map(|(_, url)| url));
            let connections = client.check(python)?;
            ensure!(connections.trim() == "1", "{connections} connections");
            Ok(())
        })?;
        counted.ensure("shortcuts", urls.len())
    })
}

const NODE: &str = r#"
const https = require("https"), fs = require("fs");
const [directory, authority, ...urls] = process.argv.slice(1);
const agent = new https.Agent({ keepAlive: true, maxSockets: 1, ca: fs.readFileSync(authority) });
const sockets = new Set();
function get(index) {
    if (index === urls.length) {
        console.log(sockets.size);
        return agent.destroy();
    }
    https.get(urls[index], { agent }, answer => {
        sockets.add(answer.socket);
        const file = fs.createWriteStream(`${directory}/${index}`);
        answer.pipe(file).on("finish", () => get(index + 1));
    });
}
get(0);
"#;

#[test]
fn node_over_one_connection() -> Result<()> {
    if !may_run("node_over_one_connection") {
        return Ok(());
    }
    on_tls(0, |service| {
        let (urls, authority) = (urls(service, 14), authority(service));
        let counted = compare(service, &urls, |client, directory| {
            let mut node = Command::new("node");
            node.args(["-e", NODE, directory]).arg(&authority).args(urls.iter().map(|(_, url)| url));
            let connections = client.check(node)?;
            ensure!(connections.trim() == "1", "{connections} connections");
            Ok(())
        })?;
        counted.ensure("shortcuts", urls.len())
    })
}

#[test]
fn go_over_one_client() -> Result<()> {
    if !may_run("go_over_one_client") {
        return Ok(());
    }
    let built = tempfile::tempdir()?;
    let program = built.path().join("get");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/go/get.go");
    let status = Command::new("go").args(["build", "-o"]).arg(&program).arg(source).status().context("running go")?;
    ensure!(status.success(), "go build failed");
    on_tls(0, |service| {
        let (urls, authority) = (urls(service, 14), authority(service));
        let counted = compare(service, &urls, |client, directory| {
            let mut go = Command::new(&program);
            go.env("SSL_CERT_FILE", &authority).arg(directory).args(urls.iter().map(|(_, url)| url));
            client.check(go).map(drop)
        })?;
        counted.ensure("shortcuts", urls.len())
    })
}
