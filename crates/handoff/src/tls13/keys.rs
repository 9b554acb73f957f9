//! Write keys of one generation, and the sealing of records with them. A *generation* is the keys between two
//! KeyUpdates.

use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use shunt_sys::erase::Erased;
use shunt_wire::tls::{OVERHEAD_BYTES, Suite};

/// Length of a record's header: type 23, version 3.3, length (RFC 8446, 5.2).
pub(crate) const HEADER_BYTES: usize = 5;
const TAG_BYTES: usize = 16;

/// Type of a record's content, which is encrypted together with the content (RFC 8446, 5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ContentType {
    /// A KeyUpdate message.
    Handshake = 22,
    /// Bytes of the payload.
    ApplicationData = 23,
}

/// Seals records. Uses each record number once, in order. Its memory is overwritten when it is dropped.
#[derive(Debug)]
pub struct Sealer {
    keys: Erased<Keys>,
    /// Number of the next record.
    next: u64,
    /// Record number behind the last one that may be sealed.
    end: u64,
}

struct Keys {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
}

impl Sealer {
    /// Makes a sealer for the records `first..first + count`. The number after them belongs to the KeyUpdate of the
    /// frontend that handed over the keys. Returns `None` if the key's length is not the suite's, or if the numbers
    /// exceed the limit that the suite sets for one key.
    ///
    /// The caller has to wipe what this call leaves on the stack (`shunt_sys::erase::wipe_stack`).
    pub fn new(suite: Suite, key: &[u8], iv: &[u8; NONCE_LEN], first: u64, count: u64) -> Option<Self> {
        let algorithm = match suite {
            Suite::Aes128GcmSha256 => &AES_128_GCM,
            Suite::Aes256GcmSha384 => &AES_256_GCM,
            Suite::ChaCha20Poly1305Sha256 => &CHACHA20_POLY1305,
        };
        let end = first.checked_add(count).filter(|end| *end < suite.max_records())?;
        let key = LessSafeKey::new(UnboundKey::new(algorithm, key).ok()?);
        Some(Self { keys: Erased::new(Keys { key, iv: *iv }), next: first, end })
    }

    /// Seals `record` in place. The record has room for the header, then the content, then room for the type and the
    /// tag.
    ///
    /// # Panics
    /// If no record number is left, or if the record has no room for header, type and tag, or more than 65,535 bytes
    /// behind the header.
    pub fn seal(&mut self, record: &mut [u8], content_type: ContentType) {
        assert!(self.next < self.end, "record {} of {}", self.next, self.end);
        let length = u16::try_from(record.len() - HEADER_BYTES).expect("a record has at most 2^14 + 256 bytes");
        let (header, body) = record.split_at_mut(HEADER_BYTES);
        let (inner, tag_place) = body.split_at_mut(body.len() - TAG_BYTES);
        header.copy_from_slice(&[23, 3, 3, (length >> 8) as u8, length as u8]);
        *inner.last_mut().expect("a record has room for its type") = content_type as u8;
        let nonce = self.nonce();
        self.next += 1;
        let tag = self.keys.key.seal_in_place_separate_tag(nonce, Aad::from(&*header), inner);
        tag_place.copy_from_slice(tag.expect("shorter than 2^36 bytes").as_ref());
    }

    /// Nonce of the next record: the IV, XORed with the record's number in its last 8 bytes (RFC 8446, 5.3).
    fn nonce(&self) -> Nonce {
        let mut nonce = self.keys.iv;
        for (byte, number) in nonce[NONCE_LEN - 8..].iter_mut().zip(self.next.to_be_bytes()) {
            *byte ^= number;
        }
        Nonce::assume_unique_for_key(nonce)
    }
}

const _: () = assert!(HEADER_BYTES + 1 + TAG_BYTES == OVERHEAD_BYTES as usize);

#[cfg(test)]
mod tests {
    use super::*;

    fn sealer(first: u64, count: u64) -> Option<Sealer> {
        Sealer::new(Suite::Aes128GcmSha256, &[1; 16], &[2; 12], first, count)
    }

    #[test]
    fn a_key_of_another_length_is_refused() {
        for (suite, good) in [(Suite::Aes128GcmSha256, 16), (Suite::Aes256GcmSha384, 32)] {
            for length in [0, 15, 16, 17, 31, 32, 33] {
                assert_eq!(Sealer::new(suite, &vec![1; length], &[2; 12], 0, 1).is_some(), length == good);
            }
        }
    }

    #[test]
    fn a_generation_ends_at_its_suites_limit() {
        assert!(sealer((1 << 24) - 2, 1).is_some());
        assert!(sealer((1 << 24) - 2, 2).is_none());
        assert!(sealer(u64::MAX, 2).is_none());
    }

    #[test]
    #[should_panic(expected = "record 1 of 1")]
    fn a_number_past_the_last_is_never_used() {
        let mut sealer = sealer(0, 1).unwrap();
        let mut record = [0; 30];
        sealer.seal(&mut record, ContentType::ApplicationData);
        sealer.seal(&mut record, ContentType::ApplicationData);
    }

    #[test]
    fn the_same_content_is_another_record_under_another_number() {
        let mut sealer = sealer(0, 2).unwrap();
        let (mut first, mut second) = ([7; 40], [7; 40]);
        sealer.seal(&mut first, ContentType::ApplicationData);
        sealer.seal(&mut second, ContentType::ApplicationData);
        assert_eq!(first[..5], [23, 3, 3, 0, 35]);
        assert_ne!(first[5..], second[5..]);
    }

    #[test]
    fn debug_output_has_no_key() {
        assert!(!format!("{:?}", sealer(0, 1)).contains("iv"));
    }
}
