//! Tests with a rustls client on a connection whose server hands over its write keys, again and again. A *generation*
//! is the write keys between two KeyUpdates.

use std::io::Read;
use std::process::Command;
use std::sync::{Arc, Mutex};

use ring::hmac;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{CipherSuite, ClientConfig, ClientConnection, KeyLog, RootCertStore, ServerConfig, ServerConnection};
use shunt_handoff::body::Body;
use shunt_handoff::tls13::keys::{ContentType, Sealer};
use shunt_testbed::assert_same_bytes;
use shunt_wire::tls::Suite;

use crate::sources::{Keys, bytes, file_of, payload, rest, sent};

/// Makes a self-signed certificate for localhost with openssl(1).
fn certificate() -> (CertificateDer<'static>, PrivateKeyDer<'static>) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name| dir.path().join(name);
    let conf = "[req]\ndistinguished_name=dn\nx509_extensions=v3\n[dn]\n[v3]\nsubjectAltName=DNS:localhost\n";
    std::fs::write(at("conf"), conf).unwrap();
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=x"]);
    openssl.arg("-config").arg(at("conf")).arg("-out").arg(at("cert")).arg("-keyout").arg(at("key"));
    let output = openssl.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let key = PrivateKeyDer::from_pem_file(at("key")).unwrap();
    (CertificateDer::from_pem_file(at("cert")).unwrap(), key)
}

#[derive(Debug, Default)]
struct ServerSecret(Mutex<Vec<u8>>);

impl KeyLog for ServerSecret {
    fn log(&self, label: &str, _: &[u8], secret: &[u8]) {
        if label == "SERVER_TRAFFIC_SECRET_0" {
            *self.0.lock().unwrap() = secret.to_vec();
        }
    }
}

fn number(suite: Suite) -> CipherSuite {
    match suite {
        Suite::Aes128GcmSha256 => CipherSuite::TLS13_AES_128_GCM_SHA256,
        Suite::Aes256GcmSha384 => CipherSuite::TLS13_AES_256_GCM_SHA384,
        Suite::ChaCha20Poly1305Sha256 => CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
    }
}

/// Connects a client, and completes the handshake. Returns the client, and the server's first application traffic
/// secret.
fn connected(suite: Suite) -> (ClientConnection, Vec<u8>) {
    let (certificate, key) = certificate();
    let mut provider = rustls::crypto::ring::default_provider();
    provider.cipher_suites.retain(|known| known.suite() == number(suite));
    let provider = Arc::new(provider);
    let secret = Arc::new(ServerSecret::default());
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone()).unwrap();
    let server = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions().unwrap();
    let mut server = server.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap();
    server.key_log = secret.clone();
    server.send_tls13_tickets = 0;
    let client = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let client = client.with_root_certificates(roots).with_no_client_auth();
    let mut client = ClientConnection::new(Arc::new(client), "localhost".try_into().unwrap()).unwrap();
    let mut server = ServerConnection::new(Arc::new(server)).unwrap();
    while client.is_handshaking() || server.is_handshaking() {
        let mut wire = Vec::new();
        client.write_tls(&mut wire).unwrap();
        server.read_tls(&mut wire.as_slice()).unwrap();
        server.process_new_packets().unwrap();
        wire.clear();
        server.write_tls(&mut wire).unwrap();
        client.read_tls(&mut wire.as_slice()).unwrap();
        client.process_new_packets().unwrap();
    }
    let secret = secret.0.lock().unwrap().clone();
    (client, secret)
}

/// HKDF-Expand-Label with an empty context, for at most one hash of output (RFC 8446, 7.1; RFC 5869, 2.3).
fn expand_label(suite: Suite, secret: &[u8], label: &str, length: usize) -> Vec<u8> {
    let hash = if suite == Suite::Aes256GcmSha384 { hmac::HMAC_SHA384 } else { hmac::HMAC_SHA256 };
    let label = format!("tls13 {label}");
    let info = [&(length as u16).to_be_bytes(), &[label.len() as u8][..], label.as_bytes(), &[0, 1]].concat();
    hmac::sign(&hmac::Key::new(hash, secret), &info).as_ref()[..length].to_vec()
}

/// Returns the keys of the generation that begins with `secret`, and the secret of the next one (RFC 8446, 7.2 and
/// 7.3).
fn generation(suite: Suite, secret: &[u8]) -> (Keys, Vec<u8>) {
    let key = expand_label(suite, secret, "key", suite.key_bytes());
    let iv = expand_label(suite, secret, "iv", 12).try_into().unwrap();
    let next = expand_label(suite, secret, "traffic upd", secret.len());
    (Keys { suite, key, iv, first_record: 0, content_bytes: 1 << 14, skip: 0 }, next)
}

/// Gives the client the bytes `wire`, `step` bytes at a time. Returns the data that the client decrypts.
fn read(client: &mut ClientConnection, wire: &[u8], step: usize) -> Result<Vec<u8>, rustls::Error> {
    let mut data = Vec::new();
    for mut piece in wire.chunks(step) {
        while !piece.is_empty() {
            client.read_tls(&mut piece).unwrap();
            let plain = client.process_new_packets()?.plaintext_bytes_to_read();
            let begin = data.len();
            data.resize(begin + plain, 0);
            client.reader().read_exact(&mut data[begin..]).unwrap();
        }
    }
    Ok(data)
}

/// Seals a record as the frontend does.
fn record(keys: &Keys, number: u64, content_type: ContentType, content: &[u8]) -> Vec<u8> {
    let mut record = [&[0; 5], content, &[0; 17]].concat();
    let mut sealer = Sealer::new(keys.suite, &keys.key, &keys.iv, number, 1).unwrap();
    sealer.seal(&mut record, content_type);
    record
}

/// Seals a response's header, the first record of its generation.
fn header(keys: &Keys, content: &[u8]) -> Vec<u8> {
    record(keys, 0, ContentType::ApplicationData, content)
}

/// Seals the KeyUpdate that ends a generation.
fn key_update(keys: &Keys, number: u64) -> Vec<u8> {
    record(keys, number, ContentType::Handshake, &[24, 0, 0, 1, 0])
}

#[test]
fn a_client_reads_header_and_payload_of_one_response_after_the_other() {
    for suite in Suite::ALL {
        let (mut client, mut secret) = connected(suite);
        for length in [1, 1000, 16_383, 16_384, 16_385, 65_536, 100_000, 3 << 20] {
            let all = bytes(length);
            let (mut keys, next) = generation(suite, &secret);
            assert_eq!(read(&mut client, &header(&keys, b"HTTP/1.1 200 OK"), 7).unwrap(), b"HTTP/1.1 200 OK");
            keys.first_record = 1;
            let stream = Body::sealed(payload(&file_of(&all), 0), keys.generation()).unwrap();
            let got = read(&mut client, &sent(stream, 1 << 16), 1448).unwrap();
            assert_same_bytes(&got, &all, format_args!("{suite:?}, {length} bytes"));
            assert_eq!(read(&mut client, &key_update(&keys, 1 + length.div_ceil(1 << 14) as u64), 7).unwrap(), b"");
            secret = next;
        }
    }
}

#[test]
fn the_handed_over_keys_say_nothing_to_the_client_after_the_key_update() {
    for suite in Suite::ALL {
        let (mut client, secret) = connected(suite);
        let (keys, _) = generation(suite, &secret);
        let stream = Body::sealed(payload(&file_of(b"payload"), 0), keys.generation()).unwrap();
        assert_eq!(read(&mut client, &sent(stream, 100), 1448).unwrap(), b"payload");
        assert_eq!(read(&mut client, &key_update(&keys, 1), 1448).unwrap(), b"");
        assert_eq!(read(&mut client, &header(&keys, b"forged"), 1448).unwrap_err(), rustls::Error::DecryptError);
    }
}

#[test]
fn a_payload_that_two_senders_share_in_mid_record_is_whole() {
    let suite = Suite::Aes128GcmSha256;
    let (mut client, secret) = connected(suite);
    let (keys, _) = generation(suite, &secret);
    let all = bytes(100_000);
    let file = file_of(&all);
    let first = sent(Body::sealed(payload(&file, 0), keys.generation()).unwrap(), 1 << 16);
    let (from, keys) = rest(&keys, 40_000);
    let second = sent(Body::sealed(payload(&file, from), keys.generation()).unwrap(), 1 << 16);
    let wire = [&first[..40_000], &second].concat();
    assert_same_bytes(&read(&mut client, &wire, 1448).unwrap(), &all, "the payload");
}
