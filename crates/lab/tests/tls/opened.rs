//! What a server sent on a captured connection: every record opened, every key and nonce noted.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hmac;

/// Bytes by their distance from the connection's first, as a server sent them. What is sent again must be the same:
/// other bytes in the same place would be another plaintext under the same nonce.
pub fn stream(capture: &Path, server_port: u16) -> Result<Vec<u8>> {
    let file = std::fs::read(capture)?;
    ensure!(file.starts_with(&[0xd4, 0xc3, 0xb2, 0xa1]), "no pcap file of this machine");
    let (mut pieces, mut first): (BTreeMap<u32, Vec<u8>>, _) = (BTreeMap::new(), None);
    let mut rest = &file[24..];
    while rest.len() >= 16 {
        let kept = u32::from_le_bytes(rest[8..12].try_into()?) as usize;
        ensure!(rest[8..12] == rest[12..16], "a packet was cut");
        let (packet, after) = rest[16..].split_at(kept);
        rest = after;
        let ip = &packet[14..];
        ensure!(packet[12..14] == [8, 0] && ip[9] == 6, "not TCP on IPv4");
        let total = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
        let tcp = &ip[usize::from(ip[0] & 15) * 4..if total == 0 { ip.len() } else { total }];
        if u16::from_be_bytes([tcp[0], tcp[1]]) != server_port {
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
            ensure!(known[..both] == bytes[..both], "other bytes were sent again at {at}");
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
        ensure!(all[at..at + both] == bytes[..both], "other bytes were sent again at {at}");
        all.extend_from_slice(&bytes[both..]);
    }
    Ok(all)
}

/// What one server's records say.
#[derive(Debug, Default)]
pub struct Opened {
    pub records: usize,
    pub generations: usize,
    /// Content of all application data.
    pub data: Vec<u8>,
    /// Every key that a record was sealed with.
    pub keys: Vec<Vec<u8>>,
}

/// Opens all of a server's records after its handshake.
///
/// # Errors
/// Where a record cannot be opened with the key and number that must be next, or a nonce was used before.
pub fn open(wire: &[u8], secret: &[u8]) -> Result<Opened> {
    let mut records = Vec::new();
    let mut rest = wire;
    while rest.len() >= 5 {
        let length = 5 + usize::from(u16::from_be_bytes([rest[3], rest[4]]));
        ensure!(rest.len() >= length, "the last record is cut");
        records.push(&rest[..length]);
        rest = &rest[length..];
    }
    let (mut opened, mut secret) = (Opened::default(), secret.to_vec());
    let (mut key, mut number) = (Generation::of(&secret)?, 0);
    let mut used: HashSet<(Vec<u8>, [u8; 12])> = HashSet::new();
    opened.keys.push(key.bytes.clone());
    // Those of the handshake are under other keys: the first that opens is the first of the application's.
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
            (23, data) => opened.data.extend_from_slice(data),
            (22, [24, 0, 0, 1, _]) => {
                secret = expand_label(&secret, "traffic upd", secret.len());
                (key, number) = (Generation::of(&secret)?, 0);
                opened.generations += 1;
                opened.keys.push(key.bytes.clone());
            }
            (22, [4, ..]) | (21, _) => {} // tickets, alerts
            (content_type, _) => bail!("a record of type {content_type}"),
        }
    }
    Ok(opened)
}

struct Generation {
    key: LessSafeKey,
    bytes: Vec<u8>,
    iv: [u8; 12],
}

impl Generation {
    fn of(secret: &[u8]) -> Result<Self> {
        let (algorithm, length) = if secret.len() == 48 { (&AES_256_GCM, 32) } else { (&AES_128_GCM, 16) };
        let bytes = expand_label(secret, "key", length);
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

    fn open(&self, record: &[u8], number: u64) -> Option<Vec<u8>> {
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
