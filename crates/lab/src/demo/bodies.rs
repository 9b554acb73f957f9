//! Fetches every body by curl over one connection, and compares each with its file. A backend *offers* a long body, so
//! that it may go straight to the client, past the other tiers.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::chain::Chain;
use crate::fetch::file_sha256;
use crate::lab::Lab;
use crate::report::number::size_name;
use crate::service::OFFER_MIN_LENGTH;

/// Exponents of the bodies' sizes: each size is a power of four, from 1 KiB to 64 MiB.
const SIZES: std::ops::RangeInclusive<u32> = 5..=13;

/// A file, and the hash of its contents.
#[derive(Debug, Clone)]
pub(super) struct Body {
    pub(super) name: String,
    pub(super) bytes: u64,
    sha256: String,
}

impl Body {
    /// Whether the backend should offer this body.
    pub(super) fn is_long(&self) -> bool {
        self.bytes >= OFFER_MIN_LENGTH
    }
}

/// Makes the files, whose sizes are powers of four.
pub(super) fn make(lab: &Lab) -> Result<(PathBuf, Vec<Body>)> {
    let sizes: Vec<(String, u64)> =
        SIZES.map(|power| 4_u64.pow(power)).map(|bytes| (size_name(bytes), bytes)).collect();
    let files = lab.files(&sizes)?;
    let body = |(name, bytes): (String, u64)| Ok(Body { sha256: file_sha256(files.join(&name))?, name, bytes });
    let bodies = sizes.into_iter().map(body).collect::<Result<Vec<_>>>()?;
    Ok((files, bodies))
}

/// Fetches all bodies over one keepalive connection, from the shortest to the longest and back to the shortest. Returns
/// what was wrong.
pub(super) fn fetch_and_compare(lab: &Lab, chain: &Chain, bodies: &[Body]) -> Result<Vec<String>> {
    let got = tempfile::tempdir_in(lab.dir())?;
    let order = || bodies.iter().chain(bodies.iter().rev().skip(1));
    let mut curl = Command::new("curl");
    curl.args(["-sS", "--fail", "--max-time", "10", "-w", "%{http_code} %{num_connects}\n"]);
    for (number, body) in order().enumerate() {
        curl.arg("-o").arg(file(got.path(), number, body)).arg(chain.url(&format!("/{}", body.name)));
    }
    let log = lab.client().output(curl).context("running curl")?;
    let mut faults = Vec::new();
    if !log.status.success() {
        faults.push(format!("curl: {}", String::from_utf8_lossy(&log.stderr).trim()));
    }
    let connections = connections(&String::from_utf8_lossy(&log.stdout))?;
    if connections != 1 {
        faults.push(format!("curl needed {connections} connections where one should do"));
    }
    for (number, body) in order().enumerate() {
        match file_sha256(file(got.path(), number, body)) {
            Ok(sha256) if sha256 == body.sha256 => {}
            Ok(_) => faults.push(format!("the {} body of fetch {} differs from its file", body.name, number + 1)),
            Err(_) => faults.push(format!("the {} body of fetch {} did not come", body.name, number + 1)),
        }
    }
    Ok(faults)
}

/// Number of fetches of [`fetch_and_compare`] whose body the backend should offer.
pub(super) fn long_fetches(bodies: &[Body]) -> u64 {
    bodies.iter().chain(bodies.iter().rev().skip(1)).filter(|body| body.is_long()).count() as u64
}

fn file(dir: &Path, number: usize, body: &Body) -> PathBuf {
    dir.join(format!("{number}-{}", body.name))
}

/// Number of connections that curl made, according to its `-w` lines.
fn connections(log: &str) -> Result<u64> {
    let made = log.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    let made: Vec<u64> = made.collect();
    ensure!(!made.is_empty(), "curl wrote {log:?}");
    Ok(made.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_summed() {
        assert_eq!(connections("200 1\n200 0\n200 0\n").unwrap(), 1);
        assert_eq!(connections("200 1\n200 1\n").unwrap(), 2);
        assert!(connections("").is_err());
    }

    #[test]
    fn long_bodies_are_counted_both_ways() {
        let body = |bytes| Body { name: size_name(bytes), bytes, sha256: String::new() };
        assert_eq!(long_fetches(&[body(1024), body(OFFER_MIN_LENGTH), body(1 << 20)]), 3);
    }
}
