//! A frontend with Shunt must show a client the same TLS properties as one without: protocols, suites, groups,
//! certificates, resumption, stapling, 0-RTT. `openssl s_client` prints them.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use shunt_ca::{Authority, Request};
use shunt_lab::{Host, Lab, Options, Role, Settings};

use crate::bed::FILES;
use crate::service::{Running, needs_root, start_on};

const OTHER: &str = "other.test";

/// Returns configuration for the frontend's nginx: stapling and 0-RTT for the first server, and a second server. A
/// client chooses the second server by SNI, and is asked for a certificate there.
fn servers(_: &Lab, host: &Host) -> String {
    if host.role() != Role::Frontend {
        return String::new();
    }
    let directory = host.dir().join("tls");
    let authority = Authority::open(&directory);
    let request = |name: &str| Request { name: name.into(), addresses: Vec::new(), days: 1 };
    let other = authority.issue(&request(OTHER)).expect("a certificate");
    authority.issue(&request("someone")).expect("a client's certificate");
    staple(host).expect("openssl ocsp");
    let (address, directory) = (host.address(), directory.display());
    let location = "proxy_pass http://next; proxy_http_version 1.1; proxy_set_header Connection \"\";
            add_header X-Client $ssl_client_verify;";
    format!(
        "        ssl_early_data on;
        ssl_session_cache shared:tls:1m;
        ssl_stapling on;
        ssl_stapling_file {directory}/staple.der;
        location /early/ {{
            rewrite ^/early(/.*)$ $1 break;
            {location}
        }}
    }}
    server {{
        listen {address}:443 ssl;
        server_name {OTHER};
        ssl_certificate {};
        ssl_certificate_key {};
        ssl_client_certificate {directory}/ca.pem;
        ssl_verify_client optional;
        location / {{
            {location}
        }}
",
        other.certificate.display(),
        other.key.display()
    )
}

/// Makes the authority's OCSP response for the frontend's certificate, in `staple.der`.
fn staple(frontend: &Host) -> Result<()> {
    let script = "serial=$(openssl x509 -in frontend.pem -noout -serial | cut -d= -f2) &&
        printf 'V\\t491231235959Z\\t\\t%s\\tunknown\\t/CN=frontend\\n' \"$serial\" > index.txt &&
        openssl ocsp -index index.txt -rsigner ca.pem -rkey ca.key -CA ca.pem -issuer ca.pem -cert frontend.pem \
            -ndays 1 -respout staple.der";
    let output = Command::new("sh").args(["-c", script]).current_dir(frontend.dir().join("tls")).output()?;
    ensure!(output.status.success(), "openssl ocsp: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// Beginnings of the output lines that are compared: s_client's lines on what was agreed on, and lines of the
/// response's header.
const TELLING: &[&str] = &[
    "New, ",
    "Reused, ",
    "Server Temp Key",
    "Peer signature type",
    "Peer signing digest",
    "Verification",
    "ALPN protocol",
    "No ALPN",
    "Early data was",
    "OCSP ",
    "    Cert Status",
    "subject=",
    "Server public key is",
    "Secure Renegotiation",
    "HTTP/1.1 ",
    "Content-Length",
    "X-",
];

/// Beginnings of s_client's lines about tickets. nginx sends tickets after the client's Finished. With early data, the
/// tickets may come before the response or never, so these lines are then not compared.
const OF_TICKETS: &[&str] =
    &["    Max Early Data", "    TLS session ticket lifetime hint", "    Extended master secret"];

/// Makes one connection with one request. Returns the lines of s_client's output to compare.
fn connect(service: &Running<'_>, path: &str, arguments: &str) -> Result<String> {
    let (frontend, client) = (service.lab.frontend(), service.lab.client());
    // nginx chooses the server by the request's Host field, too.
    let name = if arguments.contains(OTHER) { OTHER } else { "frontend" };
    let request = format!("GET {path} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n");
    std::fs::write(client.dir().join("request"), &request)?;
    let mut shell = Command::new("sh");
    shell.current_dir(client.dir()).stdin(Stdio::null()).args([
        "-c",
        &format!(
            "timeout 20 openssl s_client -connect {}:443 -CAfile {}/tls/ca.pem -ign_eof {arguments} < request 2>&1",
            frontend.address(),
            frontend.dir().display()
        ),
    ]);
    let output = client.output(shell)?;
    ensure!(output.status.code() != Some(124), "s_client {arguments}: nothing came, and no end");
    let text = String::from_utf8_lossy(&output.stdout);
    // s_client prints an error as fields with colons between them: thread, `error`, code, library, function, and then
    // the text of the server's alert.
    let alert = |line: &str| line.contains(" alert ").then(|| line.split(':').nth(5).unwrap_or(line).to_owned());
    let tickets = if arguments.contains("-early_data") { &[] } else { OF_TICKETS };
    let telling = text.lines().filter_map(|line| {
        // s_client writes the server's response directly behind a line of its own, without a line break.
        let line = line.find("HTTP/1.1 ").map_or(line, |at| &line[at..]);
        alert(line)
            .or_else(|| TELLING.iter().chain(tickets).any(|begin| line.starts_with(begin)).then(|| line.to_owned()))
    });
    Ok(telling.collect::<Vec<_>>().join("\n"))
}

/// Returns all attempts: a path to request, and s_client's arguments.
fn attempts(frontend: &Host) -> Vec<(String, String)> {
    let tls = frontend.dir().join("tls");
    let tls = tls.display();
    let mut all: Vec<(String, String)> = Vec::new();
    let mut add = |path: &str, arguments: String| all.push((path.to_owned(), arguments));
    for version in ["-tls1", "-tls1_1", "-tls1_2", "-tls1_3"] {
        add("/1k", format!("{version} -cipher ALL:@SECLEVEL=0"));
    }
    for suite in ["AES_128_GCM_SHA256", "AES_256_GCM_SHA384", "CHACHA20_POLY1305_SHA256", "AES_128_CCM_SHA256"] {
        add("/64k", format!("-tls1_3 -ciphersuites TLS_{suite}"));
    }
    for suite in
        ["ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-CHACHA20-POLY1305", "AES128-SHA", "ECDHE-ECDSA-AES256-SHA"]
    {
        add("/1k", format!("-tls1_2 -cipher {suite}"));
    }
    for group in ["X25519", "P-256", "P-384", "P-521", "X448", "ffdhe2048"] {
        add("/1k", format!("-tls1_3 -groups {group}"));
    }
    for scheme in ["ecdsa_secp256r1_sha256", "rsa_pss_rsae_sha256"] {
        add("/1k", format!("-tls1_3 -sigalgs {scheme}"));
    }
    for alpn in ["http/1.1", "h2,http/1.1", "h2"] {
        add("/64k", format!("-alpn {alpn}"));
    }
    add("/1k", "-tls1_3 -status".to_owned());
    add("/1k", "-tls1_2 -status".to_owned());
    for version in ["-tls1_2", "-tls1_3"] {
        add("/64k", format!("{version} -sess_out session{version}"));
        add("/64k", format!("{version} -sess_in session{version}"));
        add("/64k", format!("{version} -no_ticket"));
    }
    add("/early/64k", "-tls1_3 -sess_out early".to_owned());
    add("/early/64k", "-tls1_3 -sess_in early -early_data request".to_owned());
    for name in ["", "-noservername", "-servername other.test", "-servername unknown.test"] {
        add("/64k", format!("-tls1_3 {name}"));
    }
    add("/64k", format!("-servername {OTHER} -cert {tls}/someone.pem -key {tls}/someone.key"));
    add("/64k", format!("-tls1_2 -servername {OTHER} -cert {tls}/someone.pem -key {tls}/someone.key"));
    all
}

fn transcript(shunt: bool) -> Result<Vec<(String, String)>> {
    let settings = Settings { tls: Some(""), locations: Some(servers), ..Settings::default() };
    let options = Options { shunt, offer_min: Some(1 << 10), settings, ..Options::default() };
    start_on(Lab::builder(), FILES, options, |service| {
        let attempts = attempts(service.lab.frontend());
        let results = attempts.into_iter().map(|(path, arguments)| {
            let telling = connect(service, &path, &arguments)?;
            let directory = service.lab.frontend().dir().display().to_string();
            Ok((format!("{path} {}", arguments.replace(&directory, "DIR")), telling))
        });
        let results = results.collect::<Result<Vec<_>>>()?;
        if shunt {
            let taken = service.counted("servers.shortcuts")?;
            ensure!(taken > 10, "only {taken} responses were handed off");
        }
        Ok(results)
    })
}

#[test]
fn look_the_same_with_shunt() -> Result<()> {
    needs_root();
    let (plain, ours) = (transcript(false)?, transcript(true)?);
    for ((attempt, plain), (_, ours)) in plain.iter().zip(&ours) {
        ensure!(plain == ours, "s_client {attempt}\nplain:\n{plain}\nwith Shunt:\n{ours}");
    }
    // Asserts that there was something to compare.
    for (attempt, line) in [
        ("-tls1_1", " alert protocol version"),
        ("-groups P-521", "Server Temp Key: ECDH, secp521r1"),
        ("TLS_CHACHA20", "New, TLSv1.3, Cipher is TLS_CHACHA20_POLY1305_SHA256"),
        ("-tls1_3 -status", "Cert Status: good"),
        ("-tls1_3 -sess_in session", "Reused, TLSv1.3"),
        ("-tls1_2 -sess_in session", "Reused, TLSv1.2"),
        ("-early_data", "Early data was accepted"),
        ("-tls1_3 -servername other.test", "HTTP/1.1 200 OK"),
        ("-servername other.test -cert", "X-Client: SUCCESS"),
    ] {
        let (_, telling) = ours.iter().find(|(name, _)| name.contains(attempt)).context("an attempt of that kind")?;
        ensure!(telling.contains(line), "s_client {attempt} does not show {line:?}:\n{telling}");
    }
    Ok(())
}
