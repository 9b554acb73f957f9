//! Mistakes with certificates, keys and clocks.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use shunt_ca::{Authority, Request};

use super::text::{at, set, value};
use super::{Mistake, Teller};
use crate::host::Host;
use crate::host::Role::{Backend, Frontend};

const DAY: Duration = Duration::from_secs(24 * 3600);

pub(super) fn rows() -> Vec<Mistake> {
    [dates(), names(), keys()].concat()
}

/// Mistakes with the dates of certificates.
fn dates() -> Vec<Mistake> {
    vec![
        Mistake::new("certificate-expired", "the frontend's certificate has expired")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| at(Frontend, host, text, |text| dated(text, host, -3, -2)));
            })
            .told(Teller::Agent(Backend), &["frontend", "expired"]),
        Mistake::new("certificate-expired-at-dialler", "the backend's certificate has expired")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| at(Backend, host, text, |text| dated(text, host, -3, -2)));
            })
            .told(Teller::Agent(Backend), &["certificate", "expired"]),
        Mistake::new(
            "certificate-of-tomorrow",
            "the frontend's certificate is not valid yet: its authority's clock is ahead, or this machine's behind",
        )
        .settings(|settings| {
            settings.agent_text = Some(|host, text| at(Frontend, host, text, |text| dated(text, host, 2, 3)));
        })
        .told(Teller::Agent(Backend), &["frontend", "not valid yet"]),
    ]
}

/// Mistakes with the authority and the name of a certificate.
fn names() -> Vec<Mistake> {
    vec![
        Mistake::new("other-authority", "the frontend's certificate is of another authority")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Frontend, host, text, |text| {
                        let authority = Authority::create(&host.dir().join("ca")).expect("an authority of its own");
                        let files = authority.issue(&request(host.name())).expect("a certificate of it");
                        with_files(text, &files.certificate, &files.key)
                    })
                });
            })
            .told(Teller::Agent(Backend), &["frontend", "authority"]),
        Mistake::new("other-name", "the frontend has the certificate of another machine")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Frontend, host, text, |text| {
                        let files = authority(text).issue(&request("another")).expect("another's certificate");
                        with_files(text, &files.certificate, &files.key)
                    })
                });
            })
            .told(Teller::Agents, &["frontend", "name"]),
    ]
}

/// Mistakes with keys.
fn keys() -> Vec<Mistake> {
    vec![
        Mistake::new("key-of-another", "`key` is that of another certificate")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Frontend, host, text, |text| {
                        let files = authority(text).issue(&request("another")).expect("another's key");
                        set(text, "key", &format!("\"{}\"", files.key.display()))
                    })
                });
            })
            .told(Teller::Agent(Frontend), &["another.key"]),
        Mistake::new("key-readable", "others can read the key")
            .settings(|settings| {
                settings.agent_text = Some(|host, text| {
                    at(Frontend, host, text, |text| {
                        let key = value(text, "key");
                        std::fs::set_permissions(key, PermissionsExt::from_mode(0o644)).expect("the key's mode");
                        text.to_owned()
                    })
                });
            })
            .told(Teller::Agent(Frontend), &["frontend.key"]),
        Mistake::new("key-missing", "`key` names no file")
            .settings(|settings| {
                settings.agent_text =
                    Some(|host, text| at(Backend, host, text, |text| set(text, "key", "\"/etc/shunt/none.key\"")));
            })
            .told(Teller::Agent(Backend), &["/etc/shunt/none.key"]),
    ]
}

/// Certificate authority of the lab. The configuration's `ca` is a file in the authority's directory.
fn authority(text: &str) -> Authority {
    Authority::open(Path::new(value(text, "ca")).parent().expect("a directory"))
}

fn request(name: &str) -> Request {
    Request { name: name.to_owned(), addresses: Vec::new(), days: 1 }
}

fn with_files(text: &str, certificate: &Path, key: &Path) -> String {
    let quoted = |path: &Path| format!("\"{}\"", path.display());
    set(&set(text, "certificate", &quoted(certificate)), "key", &quoted(key))
}

/// Replaces the host's certificate by another one, valid from the day `from` until the day `until`, counted from now.
/// The lab's authority issues it. Returns the text unchanged.
fn dated(text: &str, host: &Host, from: i64, until: i64) -> String {
    let now = SystemTime::now();
    let day = |days: i64| {
        let away = DAY * u32::try_from(days.unsigned_abs()).unwrap_or(0);
        if days < 0 { now - away } else { now + away }
    };
    let own: Vec<PathBuf> = ["certificate", "key"].map(|key| PathBuf::from(value(text, key))).into();
    // The authority overwrites no file, so the old files are removed first.
    own.iter().for_each(|path| std::fs::remove_file(path).expect("the lab's own"));
    let issued = authority(text).issue_between(&request(host.name()), day(from), day(until));
    issued.expect("a certificate of the lab's authority");
    text.to_owned()
}
