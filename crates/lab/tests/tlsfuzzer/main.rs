//! Runs tlsfuzzer's scripts for TLS 1.3 against the frontend. Every conversation must end the same with Shunt as
//! without it. A response is *handed off* if the backend sends its body straight to the client.
//!
//! Not every conversation passes, because nginx and OpenSSL do not do all that the suite asks for. The test checks only
//! that Shunt changes no result. `make tlsfuzzer` fetches the suite and runs this test.

#[path = "../service/mod.rs"]
mod service;
mod suite;

use anyhow::{Context, Result, ensure};
use service::{Running, needs_root, start_on};
use shunt_lab::{Host, Lab, Options, Role, Settings};
use suite::{Credentials, Endings, Suite, make_rsa};

/// Scripts that need a server which asks for a client's certificate. All other scripts need a server that does not.
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

/// Script that is left out. It has 16,384 conversations, and needs a server that sends back what it gets.
const FOR_AN_ECHO: &str = "test-tls13-lengths.py";

/// A file whose response is one record without Shunt, and too short to be handed off.
const SHORT: &[(&str, u64)] = &[("index.html", 1 << 10)];
/// A file that every frontend with Shunt hands off.
const LONG: &[(&str, u64)] = &[("index.html", 256 << 10)];

/// Adds a certificate with an RSA key to the frontend's own one, because many scripts expect such a key.
fn rsa_too(_: &Lab, host: &Host) -> String {
    if host.role() != Role::Frontend {
        return String::new();
    }
    let made = make_rsa(host.dir(), "rsa").expect("openssl makes a certificate");
    let (key, certificate) = (made.key.display(), made.certificate.display());
    format!("        ssl_certificate {certificate};\n        ssl_certificate_key {key};\n")
}

/// Runs all scripts against a service. Returns the results of their conversations.
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

/// Asserts that the service still answers.
fn whole(service: &Running<'_>) -> Result<()> {
    let fetched = shunt_lab::fetch(service.lab.client(), service.service.chain().server(), &["/index.html"])?;
    service.whole(&fetched).context("the service does not answer as before")
}

/// Runs the scripts against a service without Shunt and one with it, at once. `same` decides whether two results count
/// as equal.
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
    needs_root();
    compare(SHORT, "", None, |script| !is_for_a_client(script), |plain, ours| plain == ours)
}

#[test]
#[ignore = "minutes long, and it needs the suite: make tlsfuzzer"]
fn clients_with_certificates() -> Result<()> {
    needs_root();
    let lines = "        ssl_verify_client optional_no_ca;\n";
    compare(SHORT, lines, None, is_for_a_client, |plain, ours| plain == ours)
}

/// The scripts expect short responses. Here the response is so long that a conversation may fail, with Shunt or
/// without, and the texts of the errors may differ. So the test compares only which conversations pass.
#[test]
#[ignore = "minutes long, and it needs the suite: make tlsfuzzer"]
fn responses_that_are_handed_off() -> Result<()> {
    needs_root();
    let passes = |endings: &Endings| -> Vec<(String, Vec<bool>)> {
        endings.iter().map(|(name, how)| (name.clone(), how.iter().map(|how| how == "OK").collect())).collect()
    };
    compare(LONG, "", Some(1), |script| !is_for_a_client(script), |plain, ours| passes(plain) == passes(ours))
}
