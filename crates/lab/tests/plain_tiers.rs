//! Intermediates that do not know Shunt: nginx with filters and a cache, and HAProxy. By default no body bypasses them,
//! and they work as without Shunt. If the backend's configuration trusts them as `plain`, a body bypasses those that
//! would not change or store it.

mod service;

use std::net::SocketAddr;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use service::{Running, needs_root, start_on};
use shunt_lab::{Host, Lab, Options, Process, Role, Settings, haproxy};
use shunt_testbed::same_bytes;

const FILES: &[(&str, u64)] = &[("1m", 1 << 20)];
/// Number of lines of the page that filters change.
const LINES: usize = 9000;
/// HAProxy's ports on the intermediate: one leaves bodies alone, and one compresses them.
const LEAVING: u16 = 81;
const COMPRESSING: u16 = 82;

/// URL paths. Bodies of `TOUCHED` are changed or stored by a tier: by nginx's filters or its cache, or by the HAProxy
/// that compresses. No tier changes or stores the bodies of `PASSED`.
const TOUCHED: &[&str] =
    &["/sub/page", "/ssi/page", "/gzip/page", "/gzip/1m", "/cache/1m", "/cache/1m", "/compressing/page"];
const PASSED: &[&str] = &["/1m", "/page", "/haproxy/1m", "/haproxy/page"];

fn page() -> String {
    (0..LINES).map(|line| format!("<p>needle {line} <!--#echo var=\"uri\" --></p>\n")).collect()
}

fn locations(lab: &Lab, host: &Host) -> String {
    let next = |name: &str, address: SocketAddr, filters: &str| {
        let set = "proxy_http_version 1.1; proxy_set_header Connection \"\";";
        format!("        location /{name}/ {{ {filters} {set} proxy_pass http://{address}/; }}\n")
    };
    let backend = SocketAddr::from((lab.backend().address(), 80));
    match host.role() {
        Role::Frontend => {
            let between = lab.intermediates()[0].address();
            next("haproxy", SocketAddr::from((between, LEAVING)), "")
                + &next("compressing", SocketAddr::from((between, COMPRESSING)), "")
        }
        Role::Intermediate => {
            next("sub", backend, "sub_filter_types *; sub_filter_once off; sub_filter needle thread;")
                + &next("ssi", backend, "ssi on; ssi_types *;")
                + &next("gzip", backend, "gzip on; gzip_proxied any; gzip_types *;")
                + &next("cache", backend, "proxy_cache kept; proxy_cache_valid 200 1h;")
        }
        _ => String::new(),
    }
}

/// Makes the intermediate, which is another operator's, cache responses although their header forbids it
/// (X-Accel-Expires).
fn caching(host: &Host, text: String) -> String {
    let cache = "    proxy_cache_path temp/kept keys_zone=kept:1m;\n    proxy_ignore_headers X-Accel-Expires;\n";
    match host.role() {
        Role::Intermediate => text.replace("    access_log off;\n", &format!("    access_log off;\n{cache}")),
        _ => text,
    }
}

fn without_a_word(host: &Host, text: String) -> String {
    caching(host, text).replace(" plain;", ";")
}

fn start_haproxies(lab: &Lab) -> Result<Vec<Process>> {
    let (between, backend) = (lab.intermediates()[0], lab.backend().address());
    let tier = |port, compression: &str| {
        let text = format!(
            "defaults\n    mode http\n    timeout connect 5s\n    timeout client 1m\n    timeout server 1m\n{compression}\
             frontend tier\n    bind {address}:{port}\n    default_backend next\n\
             backend next\n    server next {backend}:80\n",
            address = between.address()
        );
        haproxy(between, &text, SocketAddr::from((between.address(), port)))
    };
    let compression = "    compression algo gzip\n    compression type application/octet-stream\n";
    Ok(vec![tier(LEAVING, "")?, tier(COMPRESSING, compression)?])
}

/// Returns the decoded body of each path, fetched over one connection.
fn bodies(running: &Running<'_>, paths: &[&str]) -> Result<Vec<Vec<u8>>> {
    let directory = tempfile::tempdir()?;
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--fail", "--compressed"]);
    for (number, path) in paths.iter().enumerate() {
        let file = directory.path().join(number.to_string());
        curl.arg("--output").arg(file).arg(running.service.chain().url(path));
    }
    running.lab.client().check(curl).with_context(|| running.service.explain())?;
    (0..paths.len()).map(|number| Ok(std::fs::read(directory.path().join(number.to_string()))?)).collect()
}

/// Runs a test on a service with nginx and both HAProxies as intermediates.
fn with_tiers<T>(mut options: Options, test: impl FnOnce(&mut Running<'_>) -> Result<T>) -> Result<T> {
    options.settings.locations = Some(locations);
    start_on(Lab::builder().intermediates(1), FILES, options, |running| {
        std::fs::write(running.files.join("page"), page())?;
        let _haproxies = start_haproxies(running.lab)?;
        test(running)
    })
}

fn as_without_shunt() -> Result<Vec<Vec<u8>>> {
    let settings = Settings { nginx_text: Some(caching), ..Settings::default() };
    with_tiers(Options { settings, ..Options::plain() }, |running| bodies(running, &[TOUCHED, PASSED].concat()))
}

#[test]
fn without_the_operators_word_no_body_goes_past_a_plain_tier() -> Result<()> {
    needs_root();
    let expected = as_without_shunt()?;
    same_bytes(&expected[0], page().replace("needle", "thread").as_bytes())
        .context("the plain service's own filter")?;
    let settings = Settings { nginx_text: Some(without_a_word), ..Settings::default() };
    with_tiers(Options { settings, ..Options::shunt() }, |running| {
        let paths = [TOUCHED, PASSED].concat();
        for ((path, body), expected) in paths.iter().zip(bodies(running, &paths)?).zip(&expected) {
            same_bytes(&body, expected).context(*path)?;
        }
        let stats = running.service.all_stats()?;
        let count = |name: &str| stats.count(&format!("servers.{name}"));
        ensure!(count("offers") == 0 && count("shortcuts") == 0, "{}", stats.under("servers"));
        ensure!(count("relayed_plain") > 0, "{}", stats.under("servers"));
        let between = running.lab.intermediates()[0].address();
        let backend = running.lab.backend().name();
        let log = running.service.chain_mut().process(backend).context("the backend's nginx")?.log();
        let told: Vec<_> = log.lines().filter(|line| line.contains("shunt_trust")).collect();
        ensure!(told.len() == 1 && told[0].contains(&format!("\"shunt_trust {between} plain;\"")), "told: {told:#?}");
        Ok(())
    })
}

#[test]
fn with_the_operators_word_bodies_go_past_a_plain_tier() -> Result<()> {
    needs_root();
    let settings = Settings { nginx_text: Some(caching), ..Settings::default() };
    with_tiers(Options { settings, ..Options::shunt() }, |running| {
        for round in 1..3 {
            for (path, body) in PASSED.iter().zip(bodies(running, PASSED)?) {
                let file = path.rsplit('/').next().unwrap_or_default();
                same_bytes(&body, &std::fs::read(running.files.join(file))?).context(*path)?;
            }
            let shortcuts = running.frontend_stats()?.count("servers.shortcuts");
            ensure!(shortcuts == round * PASSED.len() as u64, "{shortcuts} shortcuts: {}", running.service.explain());
        }
        Ok(())
    })
}
