//! Decrypts (opens) all TLS records that a server sent on a captured connection, and notes each key and nonce. A
//! *generation* is the time between two KeyUpdates, in which one key is used.

use std::collections::{BTreeMap, HashSet};

use anyhow::{Context, Result, bail, ensure};
use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, Algorithm, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::hmac;
use rustls::CipherSuite;
use shunt_testbed::same_bytes;

use crate::client::Told;

/// Returns the bytes that port `from` sent to port `to`. Retransmitted bytes must be the same as those sent first:
/// different bytes would come from a second plaintext that was encrypted with the same nonce.
pub fn stream(capture: &[u8], from: u16, to: u16) -> Result<Vec<u8>> {
    ensure!(capture.starts_with(&[0xd4, 0xc3, 0xb2, 0xa1]), "no pcap file of this machine");
    let (mut pieces, mut first): (BTreeMap<u32, Vec<u8>>, _) = (BTreeMap::new(), None);
    let mut rest = &capture[24..];
    while rest.len() >= 16 {
        let kept = u32::from_le_bytes(rest[8..12].try_into()?) as usize;
        ensure!(rest[8..12] == rest[12..16], "a packet was cut");
        let (packet, after) = rest[16..].split_at(kept);
        rest = after;
        let ip = &packet[14..];
        ensure!(packet[12..14] == [8, 0] && ip[9] == 6, "not TCP on IPv4");
        let total = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
        let tcp = &ip[usize::from(ip[0] & 15) * 4..if total == 0 { ip.len() } else { total }];
        if tcp[..4] != [from.to_be_bytes(), to.to_be_bytes()].concat()[..] {
            continue;
        }
        let sequence = u32::from_be_bytes(tcp[4..8].try_into()?);
        if tcp[13] & 2 != 0 {
            first = Some(sequence.wrapping_add(1));
            continue;
        }
        let bytes = &tcp[usize::from(tcp[12] >> 4) * 4..];
        if !bytes.is_empty() {
            let at = sequence.wrapping_sub(first.context("no SYN before data")?);
            let known = pieces.entry(at).or_default();
            let both = known.len().min(bytes.len());
            same_bytes(&bytes[..both], &known[..both]).with_context(|| format!("what was sent again at {at}"))?;
            if bytes.len() > known.len() {
                *known = bytes.to_vec();
            }
        }
    }
    let mut all: Vec<u8> = Vec::new();
    for (at, bytes) in pieces {
        let at = at as usize;
        ensure!(at <= all.len(), "bytes {} to {at} are not in the capture", all.len());
        let both = (all.len() - at).min(bytes.len());
        same_bytes(&bytes[..both], &all[at..at + both]).with_context(|| format!("what was sent again at {at}"))?;
        all.extend_from_slice(&bytes[both..]);
    }
    Ok(all)
}

/// Splits a stream into records. With `cut` the last one may be incomplete.
pub fn records(wire: &[u8], cut: bool) -> Result<Vec<&[u8]>> {
    let (mut records, mut rest) = (Vec::new(), wire);
    while !rest.is_empty() {
        let length = rest.get(3..5).map(|bytes| 5 + usize::from(u16::from_be_bytes([bytes[0], bytes[1]])));
        let Some((record, after)) = length.and_then(|length| rest.split_at_checked(length)) else {
            ensure!(cut, "the last record is cut");
            break;
        };
        records.push(record);
        rest = after;
    }
    Ok(records)
}

/// All pairs of key and nonce with which records were sealed.
pub type Used = HashSet<(Vec<u8>, [u8; 12])>;

/// Number of records on one connection, and number of its generations that a KeyUpdate has ended.
#[derive(Debug, Default)]
pub struct Opened {
    pub records: usize,
    pub generations: usize,
}

/// Decrypts all records that a server sent after its handshake.
///
/// # Errors
/// Returns an error if a record cannot be decrypted with the expected key and number, or if a nonce was used before.
pub fn open(records: &[&[u8]], told: &Told, used: &mut Used) -> Result<Opened> {
    let (mut opened, mut secret) = (Opened::default(), told.secret.clone());
    let of = |secret: &[u8]| match told.suite {
        Some(CipherSuite::TLS13_CHACHA20_POLY1305_SHA256) => Generation::with(&CHACHA20_POLY1305, secret),
        _ => Generation::of(secret),
    };
    let (mut key, mut number) = (of(&secret)?, 0);
    // Handshake records are encrypted with other keys. The first record that this key decrypts is the first one after
    // the server's handshake: a ticket or application data.
    let first = records.iter().position(|record| record[0] == 23 && key.open(record, 0).is_some());
    for record in &records[first.context("no record opens with the secret")?..] {
        let content = key
            .open(record, number)
            .with_context(|| format!("record {number} of generation {} does not open", opened.generations))?;
        ensure!(used.insert((key.bytes.clone(), key.nonce(number))), "a nonce was used again");
        opened.records += 1;
        number += 1;
        let (content_type, content) = content.split_last().context("an empty record")?;
        match (content_type, content) {
            (23, _) | (22, [4, ..]) | (21, _) => {} // data, tickets, alerts
            (22, [24, 0, 0, 1, _]) => {
                secret = expand_label(&secret, "traffic upd", secret.len());
                (key, number) = (of(&secret)?, 0);
                opened.generations += 1;
            }
            (content_type, _) => bail!("a record of type {content_type}"),
        }
    }
    Ok(opened)
}

/// Returns the secrets of `count` generations, beginning with `first` (RFC 8446, 7.2).
pub fn secrets(first: &[u8], count: usize) -> Vec<Vec<u8>> {
    let next = |secret: &Vec<u8>| Some(expand_label(secret, "traffic upd", secret.len()));
    std::iter::successors(Some(first.to_vec()), next).take(count).collect()
}

/// Key and IV of one generation (RFC 8446, 7.3).
pub struct Generation {
    key: LessSafeKey,
    pub bytes: Vec<u8>,
    iv: [u8; 12],
}

impl Generation {
    /// Derives the key for AES-GCM.
    pub fn of(secret: &[u8]) -> Result<Self> {
        Self::with(if secret.len() == 48 { &AES_256_GCM } else { &AES_128_GCM }, secret)
    }

    fn with(algorithm: &'static Algorithm, secret: &[u8]) -> Result<Self> {
        let bytes = expand_label(secret, "key", algorithm.key_len());
        let iv = expand_label(secret, "iv", 12).try_into().ok().context("12 bytes")?;
        let key = LessSafeKey::new(UnboundKey::new(algorithm, &bytes).ok().context("a key")?);
        Ok(Self { key, bytes, iv })
    }

    fn nonce(&self, number: u64) -> [u8; 12] {
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(number.to_be_bytes()) {
            *byte ^= number;
        }
        nonce
    }

    /// Opens a record. Returns its content, followed by the byte of its type, or `None` if it has another number or was
    /// sealed with another key.
    pub fn open(&self, record: &[u8], number: u64) -> Option<Vec<u8>> {
        let mut body = record[5..].to_vec();
        let nonce = Nonce::assume_unique_for_key(self.nonce(number));
        let length = self.key.open_in_place(nonce, Aad::from(&record[..5]), &mut body).ok()?.len();
        body.truncate(length);
        Some(body)
    }
}

/// HKDF-Expand-Label with an empty context, for at most one hash of output (RFC 8446, 7.1; RFC 5869, 2.3).
fn expand_label(secret: &[u8], label: &str, length: usize) -> Vec<u8> {
    let hash = if secret.len() == 48 { hmac::HMAC_SHA384 } else { hmac::HMAC_SHA256 };
    let label = format!("tls13 {label}");
    let info = [&(length as u16).to_be_bytes(), &[label.len() as u8][..], label.as_bytes(), &[0, 1]].concat();
    hmac::sign(&hmac::Key::new(hash, secret), &info).as_ref()[..length].to_vec()
}
