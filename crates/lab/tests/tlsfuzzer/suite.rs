//! The tlsfuzzer suite: finding its copy, running its scripts, and reading their results.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use shunt_lab::Host;

/// Time limit of a script, in seconds. A script that takes longer has a conversation that hangs.
const LIMIT: &str = "900";

/// Python code that runs a script with a fixed seed. Many scripts choose conversations at random, and two runs are to
/// choose the same ones.
const SAME_CHOICE: &str = "import random, runpy, sys
sys.argv = sys.argv[1:]
random.seed(1)
runpy.run_path(sys.argv[0], run_name='__main__')";

/// Key and certificate by which a client authenticates itself.
pub struct Credentials {
    pub key: PathBuf,
    pub certificate: PathBuf,
}

/// A copy of the suite.
#[derive(Clone, Debug)]
pub struct Suite {
    directory: PathBuf,
}

/// Results of a script's conversations, by the conversations' names, because the suite shuffles the conversations. Some
/// conversations run more than once, so a name may have several results.
pub type Endings = BTreeMap<String, Vec<String>>;

impl Suite {
    /// Opens the copy that `scripts/fetch-tlsfuzzer` has made, or that `TLSFUZZER` names.
    pub fn open() -> Result<Self> {
        let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tlsfuzzer");
        let directory = std::env::var_os("TLSFUZZER").map_or(fetched, PathBuf::from);
        for part in ["tlsfuzzer/tlsfuzzer/runner.py", "tlslite-ng/tlslite/api.py"] {
            let path = directory.join(part);
            ensure!(path.exists(), "{} is missing: `make tlsfuzzer` fetches the suite and runs it", path.display());
        }
        Ok(Self { directory: directory.canonicalize()? })
    }

    /// Returns the names of the suite's scripts for TLS 1.3.
    pub fn scripts(&self) -> Result<Vec<String>> {
        let entries = self.directory.join("tlsfuzzer/scripts").read_dir()?;
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let mut names = names.collect::<Result<Vec<_>>>()?;
        names.retain(|name| name.starts_with("test-tls13-"));
        ensure!(!names.is_empty(), "{}: no scripts for TLS 1.3", self.directory.display());
        names.sort();
        Ok(names)
    }

    /// Runs a script against a server's port 443. Without a client's certificate, it runs all of the script's
    /// conversations. With one, it runs those that the script chooses by default.
    pub fn run(
        &self,
        script: &str,
        client: &Host,
        server: Ipv4Addr,
        as_client: Option<&Credentials>,
    ) -> Result<Endings> {
        let mut python = Command::new("timeout");
        python.args([LIMIT, "/usr/bin/python3", "-B", "-c", SAME_CHOICE]);
        python.arg(self.directory.join("tlsfuzzer/scripts").join(script));
        python.args(["-h", &server.to_string(), "-p", "443"]);
        match as_client {
            Some(Credentials { key, certificate }) => python.arg("-k").arg(key).arg("-c").arg(certificate),
            None => python.args(["-n", "0"]), // 0: all conversations of the script
        };
        python.env("PYTHONPATH", self.directory.join("tlslite-ng")).env("PYTHONHASHSEED", "0");
        let output = client.output(python)?;
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() != Some(124), "{script}: not at its end after {LIMIT} s:\n{text}");
        let endings = endings(&text);
        // A script that does not start has no conversations. The last line that it prints says why.
        let said = || text.lines().last().unwrap_or_default().to_owned();
        Ok(if endings.is_empty() { [("start".to_owned(), vec![said()])].into() } else { endings })
    }
}

/// Parses a script's output. For each conversation, the output has a line `NAME ...`, the conversation's own lines, and
/// `OK` or the error that ended the conversation.
fn endings(text: &str) -> Endings {
    let (mut endings, mut name) = (Endings::new(), None);
    let mut last = String::new();
    for line in text.lines() {
        if let Some(begun) = line.strip_suffix(" ...") {
            end(&mut endings, name.replace(begun.to_owned()), &last);
            last.clear();
        } else if line == "OK" || line.contains("Error: ") || line.contains("Exception: ") {
            last = line.to_owned();
        }
    }
    end(&mut endings, name, &last);
    endings
}

fn end(endings: &mut Endings, name: Option<String>, how: &str) {
    if let Some(name) = name {
        let of_name = endings.entry(name).or_default();
        of_name.push(how.to_owned());
        of_name.sort();
    }
}

/// Makes a key and a self-signed certificate with openssl, in files that begin with `name`.
pub fn make_rsa(directory: &Path, name: &str) -> Result<Credentials> {
    let (key, certificate) = (directory.join(format!("{name}.key")), directory.join(format!("{name}.pem")));
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout"]);
    let output = openssl.arg(&key).arg("-out").arg(&certificate).output().context("running openssl")?;
    ensure!(output.status.success(), "openssl req: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(Credentials { key, certificate })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ending_is_ok_or_the_last_error() {
        let text = "sanity ...\nOK\n\nbad id ...\nError encountered while processing node X\nTraceback\n  File\n\
                    AssertionError: Unexpected message from peer: Alert(fatal, decode_error)\n\nsanity ...\nOK\n\nTest end\n";
        let endings = endings(text);
        assert_eq!(endings["sanity"], ["OK", "OK"]);
        assert_eq!(endings["bad id"], ["AssertionError: Unexpected message from peer: Alert(fatal, decode_error)"]);
    }
}
