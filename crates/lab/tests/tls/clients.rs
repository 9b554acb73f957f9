//! Common HTTPS clients. Each gets the same bytes as without Shunt, and bodies take the shortcut (straight from the
//! backend to the client) where TLS allows it.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use shunt_lab::Host;

use crate::bed::{Before, FILES, authority, compare, on_tls, urls};
use crate::client::{Client, Target};
use crate::service::needs_root;

const GET_PY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/get.py");

/// Runs the client program that `program` returns for a directory and the authority's certificate. The URLs are the
/// program's last arguments. It writes the body of URL number N into the file N of the directory. Asserts that the
/// program makes one connection, and that every body takes the shortcut.
fn over_one_connection(program: impl FnOnce(&str, &Path) -> Command) -> Result<()> {
    on_tls(0, |service| {
        let (urls, authority) = (urls(service, 14), authority(service));
        let counted = compare(service, &urls, |client, directory| {
            let mut command = program(directory, &authority);
            command.args(urls.iter().map(|(_, url)| url));
            client.check(command).context("a client that scripts/install-packages installs").map(drop)
        })?;
        counted.ensure_one_connection()?;
        counted.ensure("shortcuts", urls.len())
    })
}

/// Fetches all URLs over one connection with curl.
fn curl(client: &Host, authority: &Path, urls: &[(String, String)], directory: &str, more: &[&str]) -> Result<()> {
    let mut curl = Command::new("curl");
    curl.args(["--max-time", "60", "--silent", "--show-error", "--fail", "--http1.1", "--cacert"]).arg(authority);
    curl.args(more);
    for (index, (_, url)) in urls.iter().enumerate() {
        curl.args(["--output", &format!("{directory}/{index}"), url]);
    }
    client.check(curl).map(drop)
}

#[test]
fn curl_over_one_connection_with_each_suite() -> Result<()> {
    needs_root();
    on_tls(1, |service| {
        for suite in ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"] {
            let (urls, authority) = (urls(service, 14), authority(service));
            let more = ["--tlsv1.3", "--tls13-ciphers", suite];
            let counted = compare(service, &urls, |client, to| curl(client, &authority, &urls, to, &more))?;
            counted.ensure_one_connection()?;
            counted.ensure("shortcuts", urls.len())?;
        }
        service.no_fallback()
    })
}

#[test]
fn tls_1_2_is_relayed_and_counted() -> Result<()> {
    needs_root();
    on_tls(1, |service| {
        let (urls, authority) = (urls(service, 7), authority(service));
        let counted = compare(service, &urls, |client, to| curl(client, &authority, &urls, to, &["--tls-max", "1.2"]))?;
        counted.ensure("shortcuts", 0)?;
        counted.ensure("relayed_tls_version", urls.len())
    })
}

/// wget uses GnuTLS, which ends a connection after too many KeyUpdates.
#[test]
fn gnutls_is_sent_no_more_key_updates_than_it_takes() -> Result<()> {
    needs_root();
    on_tls(1, |service| {
        let urls: Vec<_> = urls(service, 70).into_iter().filter(|(name, _)| name != "64m").collect();
        let authority = authority(service);
        let counted = compare(service, &urls, |client, directory| {
            let list: String = urls.iter().map(|(_, url)| format!("{url}\n")).collect();
            let mut wget = Command::new("sh");
            // wget writes all bodies into one file, one after the other.
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
        counted.ensure_one_connection()?;
        let (shortcuts, relayed) = (counted.grown("shortcuts"), counted.grown("relayed_tls_budget"));
        ensure!(shortcuts + relayed == urls.len() as u64, "{shortcuts} shortcuts, {relayed} past the budget");
        ensure!(shortcuts > 0 && relayed > 0, "{shortcuts} shortcuts, {relayed} past the budget");
        Ok(())
    })
}

#[test]
fn python_requests_over_one_connection() -> Result<()> {
    needs_root();
    over_one_connection(|directory, authority| {
        let mut python = Command::new("/usr/bin/python3");
        python.env("SSL_CERT_FILE", authority).args([GET_PY, directory]);
        python
    })
}

const NODE: &str = r#"
const https = require("https"), fs = require("fs");
const [directory, authority, ...urls] = process.argv.slice(1);
const agent = new https.Agent({ keepAlive: true, maxSockets: 1, ca: fs.readFileSync(authority) });
function get(index) {
    if (index === urls.length) {
        return agent.destroy();
    }
    https.get(urls[index], { agent }, answer => {
        const file = fs.createWriteStream(`${directory}/${index}`);
        answer.pipe(file).on("finish", () => get(index + 1));
    });
}
get(0);
"#;

#[test]
fn node_over_one_connection() -> Result<()> {
    needs_root();
    over_one_connection(|directory, authority| {
        let mut node = Command::new("node");
        node.args(["-e", NODE, directory]).arg(authority);
        node
    })
}

#[test]
fn go_over_one_client() -> Result<()> {
    needs_root();
    let built = tempfile::tempdir()?;
    let program = built.path().join("get");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/go/get.go");
    let status = Command::new("go").args(["build", "-o"]).arg(&program).arg(source).status().context("running go")?;
    ensure!(status.success(), "go build failed");
    over_one_connection(|directory, authority| {
        let mut go = Command::new(&program);
        go.env("SSL_CERT_FILE", authority).arg(directory);
        go
    })
}

#[test]
fn rustls_over_one_connection() -> Result<()> {
    needs_root();
    on_tls(0, |service| {
        let (before, target) = (Before::of(service)?, Target::of(service));
        let names: Vec<String> = urls(service, 14).into_iter().map(|(name, _)| name).collect();
        service.lab.client().run(|| -> Result<()> {
            let mut client = Client::connect(&target)?;
            names.iter().try_for_each(|name| client.get(&target, name))
        })??;
        let counted = before.counted(service)?;
        counted.ensure_one_connection()?;
        counted.ensure("shortcuts", names.len())
    })
}

/// Client program that uses Python's binding of libcurl, which Debian builds with GnuTLS.
const PYCURL: &str = r#"
import pycurl, sys
assert "GnuTLS" in pycurl.version, pycurl.version
curl = pycurl.Curl()
curl.setopt(pycurl.CAINFO, sys.argv[2])
curl.setopt(pycurl.FAILONERROR, True)
curl.setopt(pycurl.TIMEOUT, 60)
curl.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
for index, url in enumerate(sys.argv[3:]):
    with open(f"{sys.argv[1]}/{index}", "wb") as file:
        curl.setopt(pycurl.URL, url)
        curl.setopt(pycurl.WRITEDATA, file)
        curl.perform()
"#;

#[test]
fn curl_with_gnutls_over_one_connection() -> Result<()> {
    needs_root();
    on_tls(1, |service| {
        let (urls, authority) = (urls(service, 28), authority(service));
        let counted = compare(service, &urls, |client, directory| {
            let mut python = Command::new("/usr/bin/python3");
            python.args(["-c", PYCURL, directory]).arg(&authority).args(urls.iter().map(|(_, url)| url));
            client.check(python).map(drop)
        })?;
        counted.ensure_one_connection()?;
        let (shortcuts, relayed) = (counted.grown("shortcuts"), counted.grown("relayed_tls_budget"));
        ensure!(shortcuts > 0 && shortcuts + relayed == urls.len() as u64, "{shortcuts} shortcuts, {relayed} relayed");
        Ok(())
    })
}

const JAVA: &str = r#"
import java.io.*;
import java.net.URI;
import java.net.http.*;
import java.nio.file.*;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import javax.net.ssl.*;

class Get {
    public static void main(String[] arguments) throws Exception {
        KeyStore trusted = KeyStore.getInstance(KeyStore.getDefaultType());
        trusted.load(null, null);
        try (InputStream pem = new FileInputStream(arguments[1])) {
            trusted.setCertificateEntry("ca", CertificateFactory.getInstance("X.509").generateCertificate(pem));
        }
        TrustManagerFactory trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        trust.init(trusted);
        SSLContext context = SSLContext.getInstance("TLSv1.3");
        context.init(null, trust.getTrustManagers(), null);
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).sslContext(context).build();
        for (int index = 2; index < arguments.length; index++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[index])).build();
            Path file = Path.of(arguments[0], Integer.toString(index - 2));
            HttpResponse<Path> answer = client.send(request, HttpResponse.BodyHandlers.ofFile(file));
            if (answer.statusCode() != 200) throw new IOException("status " + answer.statusCode());
        }
        System.exit(0); // not when the client's threads are tired of waiting
    }
}
"#;

#[test]
fn java_over_one_connection() -> Result<()> {
    needs_root();
    let directory = tempfile::tempdir()?;
    let source = directory.path().join("Get.java");
    std::fs::write(&source, JAVA)?;
    over_one_connection(|directory, authority| {
        let mut java = Command::new("java");
        java.arg(&source).arg(directory).arg(authority);
        java
    })
}
