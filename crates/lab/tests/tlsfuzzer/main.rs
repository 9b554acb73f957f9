//! tlsfuzzer's scripts for TLS 1.3 against the frontend: every conversation ends the same with Shunt as without it.
//!
//! Not every conversation passes, for nginx and OpenSSL do not do all that the suite asks for; what counts is that Shunt
//! changes nothing. `make tlsfuzzer` fetches the suite and runs this.

#[path = "../service/mod.rs"]
mod service;
mod suite;

use std::path::Path;

use anyhow::{Result, ensure};
use service::{Running, may_run, start_on};
use shunt_lab::{Host, Lab, Options, Role, Settings};
use suite::{Credentials, Endings, Suite, make_rsa};

/// Scripts that need a server that asks for a client's certificate; all others one that does not.
const AS_CLIENT: &[&str] = &[
    "test-tls13-certificate-request.py",
    "test-tls13-certificate-verify.py",
    "test-tls13-client-certificate-compression.py",
    "test-tls13-ecdsa-brainpool-in-certificate-verify.py",
    "test-tls13-ecdsa-in-certificate-verify.py",
    "test-tls13-eddsa-in-certificate-verify.py",
    "test-tls13-mldsa-in-certificate-verify.py",
    "test-tls13-post-handshake-auth.py",
];

/// It asks for a server that sends back what it gets, and has 16,384 conversations.
const FOR_AN_ECHO: &str = "test-tls13-lengths.py";

/// A response that comes in one record without Shunt, and that no frontend has a reason to hand off.
const SHORT: &[(&str, u64)] = &[("index.html", 1 << 10)];
/// One that every frontend with Shunt hands off.
const LONG: &[(&str, u64)] = &[("index.html", 256 << 10)];

/// Beside the frontend's own certificate one with an RSA key, which many scripts expect.
fn rsa_too(_: &Lab, host: &Host) -> String {
    if host.role() != Role::Frontend {
        return String::new();
    }
    let made = make_rsa(host.dir(), "rsa").expect("openssl makes a certificate");
    let (key, certificate) = (made.key.display(), made.certificate.display());
    format!("        ssl_certificate {certificate};\n        ssl_certificate_key {key};\n")
}

/// How every script's conversations end with a service: on one connection after the other.
fn run_all(files: &[(&str, u64)], options: Options, scripts: &[String], suite: &Suite) -> Result<Vec<Endings>> {
    start_on(Lab::builder(), files, options, |service| {
        let client = service.lab.client();
        let credentials: Option<Credentials> =
            options.settings.tls.filter(|lines| !lines.is_empty()).map(|_| make_rsa(client.dir(), "me")).transpose()?;
        let run = |script: &String| {
            let endings = suite.run(script, client, service.lab.frontend().address(), credentials.as_ref());
            eprintln!("{script}, {}", if options.shunt { "with Shunt" } else { "plain" });
            endings
        };
        let endings = scripts.iter().map(run).collect();
        whole(service)?;
        endings
    })
}

/// The service still answers, and holds no handoff of a conversation that was left.
fn whole(service: &Running<'_>) -> Result<()> {
    let fetched = shunt_lab::fetch(service.lab.client(), service.service.chain().server(), &["/index.html"])?;
    let same = fetched[0].sha256 == shunt_lab::file_sha256(Path::new(&service.files).join("index.html"))?;
    ensure!(fetched[0].status == 200 && same, "the service does not answer as before");
    Ok(())
}

/// Runs them against both services at once; `same` says whether two endings count as one.
fn compare(
    files: &'static [(&'static str, u64)],
    tls: &'static str,
    offer_min: Option<u64>,
    wanted: impl Fn(&str) -> bool,
    same: impl Fn(&Endings, &Endings) -> bool,
) -> Result<()> {
    let suite = Suite::open()?;
    let mut scripts = suite.scripts()?;
    scripts.retain(|script| script != FOR_AN_ECHO && wanted(script));
    let settings = Settings { tls: Some(tls), locations: Some(rsa_too), ..Settings::default() };
    let options = |shunt| Options { shunt, offer_min, settings, ..Options::default() };
    let (plain, ours) = std::thread::scope(|scope| {
        let plain = scope.spawn(|| run_all(files, options(false), &scripts, &suite));
        let ours = run_all(files, options(true), &scripts, &suite);
        (plain.join().expect("the plain service's thread"), ours)
    });
    let (plain, ours) = (plain?, ours?);
    let mut report = String::new();
    for ((script, plain), ours) in scripts.iter().zip(&plain).zip(&ours) {
        if !same(plain, ours) {
            report.push_str(&format!("{script}:\n{}", differences(plain, ours)));
        }
    }
    let all: Vec<&String> = ours.iter().flat_map(|endings| endings.values().flatten()).collect();
    let passed = all.iter().filter(|how| **how == "OK").count();
    eprintln!("{} scripts, {} conversations, {passed} pass with Shunt", scripts.len(), all.len());
    ensure!(passed > scripts.len(), "too few conversations pass for this to say anything");
    ensure!(report.is_empty(), "conversations that end otherwise with Shunt:\n{report}");
    Ok(())
}

fn differences(plain: &Endings, ours: &Endings) -> String {
    let names: std::collections::BTreeSet<&String> = plain.keys().chain(ours.keys()).collect();
    let differ = names.into_iter().filter(|name| plain.get(*name) != ours.get(*name));
    differ.map(|name| format!("  {name}: {:?}, with Shunt {:?}\n", plain.get(name), ours.get(name))).collect()
}

fn is_for_a_client(script: &str) -> bool {
    AS_CLIENT.contains(&script)
}

#[test]
#[ignore = "minutes long, and it needs the suite: make tlsfuzzer"]
fn short_responses() -> Result<()> {
    if !may_run("short_responses") {
        return Ok(());
    }
    compare(SHORT, "", None, |script| !is_for_a_client(script), |plain, ours| plain == ours)
}

#[test]
#[ignore = "minutes long, and it needs the suite: make tlsfuzzer"]
fn clients_with_certificates() -> Result<()> {
    if !may_run("clients_with_certificates") {
        return Ok(());
    }
    let lines = "        ssl_verify_client optional_no_ca;\n";
    compare(SHORT, lines, None, is_for_a_client, |plain, ours| plain == ours)
}

/// A conversation that gets so far that it is answered does not expect that much, with Shunt or without. Then it
/// counts that it ended, and that the frontend went on.
#[test]
#[ignore = "minutes long, and it needs the suite: make tlsfuzzer"]
fn responses_that_are_handed_off() -> Result<()> {
    if !may_run("responses_that_are_handed_off") {
        return Ok(());
    }
    let passes = |endings: &Endings| -> Vec<(String, Vec<bool>)> {
        endings.iter().map(|(name, how)| (name.clone(), how.iter().map(|how| how == "OK").collect())).collect()
    };
    compare(LONG, "", Some(1), |script| !is_for_a_client(script), |plain, ours| passes(plain) == passes(ours))
}
