//! Parameters of TLS 1.3 that two tiers have to agree on: the cipher suites, and the number of bytes that a payload
//! takes on the wire (RFC 8446, 5.2). The frontend needs this number before the first record exists, because it is the
//! length of the region (range of the connection's sequence numbers) that the frontend hands off to a backend. A
//! *generation* is the write keys of a connection between two KeyUpdates.

use std::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a record beside its content: header 5, inner content type 1, tag 16 (the same in all three suites).
pub const OVERHEAD_BYTES: u64 = 22;
/// Largest content of a record, in bytes (RFC 8446, 5.1).
pub const MAX_CONTENT_BYTES: u16 = 1 << 14;
/// Smallest limit on a record's content that a client may set, in bytes. RFC 8449, 4 says 64, which includes the inner
/// content type.
pub const MIN_CONTENT_BYTES: u16 = 63;

/// A cipher suite. The value is its number in IANA's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Suite {
    Aes128GcmSha256 = 0x1301,
    Aes256GcmSha384 = 0x1302,
    ChaCha20Poly1305Sha256 = 0x1303,
}

impl Suite {
    /// All suites that can be handed over.
    pub const ALL: [Suite; 3] = [Suite::Aes128GcmSha256, Suite::Aes256GcmSha384, Suite::ChaCha20Poly1305Sha256];

    /// Returns the suite with this number.
    pub fn from_number(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|suite| *suite as u16 == number)
    }

    /// Length of the suite's key in bytes.
    pub fn key_bytes(self) -> usize {
        match self {
            Suite::Aes128GcmSha256 => 16,
            Suite::Aes256GcmSha384 | Suite::ChaCha20Poly1305Sha256 => 32,
        }
    }

    /// Largest number of records that one key may protect (RFC 8446, 5.5). For AES-GCM the RFC says 2^24.5; this is
    /// 2^24. For ChaCha20-Poly1305 the RFC's limit is above the largest record number; no connection reaches 2^48.
    pub fn max_records(self) -> u64 {
        match self {
            Suite::Aes128GcmSha256 | Suite::Aes256GcmSha384 => 1 << 24,
            Suite::ChaCha20Poly1305Sha256 => 1 << 48,
        }
    }
}

/// Key and IV of one generation of write keys (RFC 8446, 7.3). Code that has them uses them or passes them on at once,
/// and then overwrites them.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Keys {
    /// IV of the write direction (RFC 8446, 5.3).
    pub iv: [u8; 12],
    /// Key, in the first [`Suite::key_bytes`] bytes.
    pub key: [u8; 32],
}

/// Hides the keys.
impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// Parameters of one generation of write keys, as messages have them.
#[derive(Clone, Copy, Debug)]
pub struct Generation {
    /// Number of the cipher suite ([`Suite`]); 0: the connection is not encrypted.
    pub suite: u16,
    /// Largest content of a record, in bytes: the client's limit (RFC 6066, RFC 8449), or [`MAX_CONTENT_BYTES`].
    pub content_bytes: u16,
    /// Number of leading bytes of the first encrypted record that the client already has from another backend.
    pub skip: u16,
    /// Number of the payload's first record.
    pub record: u64,
}

impl Generation {
    /// Returns the number of bytes that a payload takes on the wire, without [`Self::skip`]. `None` where the
    /// parameters are invalid, or the payload would exceed the suite's limit of records.
    pub fn region_bytes(self, payload_bytes: u64) -> Option<u64> {
        let Self { suite: 0, content_bytes: 0, skip: 0, record: 0 } = self else {
            let (suite, records) = self.records(payload_bytes)?;
            // The frontend's KeyUpdate takes one more record number.
            let end = self.record.checked_add(records.count())?.checked_add(1)?;
            let in_first = u64::from(self.skip) < records.content_bytes(0) as u64 + OVERHEAD_BYTES;
            return (end <= suite.max_records() && in_first).then(|| records.wire_bytes() - u64::from(self.skip));
        };
        Some(payload_bytes)
    }

    /// Returns the suite, and the payload divided into records. `None` where the connection is not encrypted, or the
    /// parameters are invalid.
    pub fn records(self, payload_bytes: u64) -> Option<(Suite, Records)> {
        Some((Suite::from_number(self.suite)?, Records::of(payload_bytes, self.content_bytes)?))
    }
}

/// A payload, divided into records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Records {
    /// Bytes of the payload, at least 1.
    payload_bytes: u64,
    /// Content bytes of each record but the last.
    content_bytes: u64,
}

impl Records {
    /// Divides a payload into records with `content_bytes` bytes of content each; the last one may have less. `None`
    /// where a record cannot have that size, or the payload is empty or has 2^62 bytes or more.
    pub fn of(payload_bytes: u64, content_bytes: u16) -> Option<Self> {
        let good = (MIN_CONTENT_BYTES..=MAX_CONTENT_BYTES).contains(&content_bytes)
            && (1..=i64::MAX as u64 / 2).contains(&payload_bytes);
        good.then_some(Self { payload_bytes, content_bytes: content_bytes.into() })
    }

    /// Number of records.
    pub fn count(&self) -> u64 {
        self.payload_bytes.div_ceil(self.content_bytes)
    }

    /// Payload bytes in the record at `index`.
    pub fn content_bytes(&self, index: u64) -> usize {
        self.payload_bytes.saturating_sub(index * self.content_bytes).min(self.content_bytes) as usize
    }

    /// Offset in the payload at which the record at `index` begins.
    pub fn payload_offset(&self, index: u64) -> u64 {
        (index * self.content_bytes).min(self.payload_bytes)
    }

    /// Number of bytes that all records together take on the wire.
    pub fn wire_bytes(&self) -> u64 {
        self.payload_bytes + self.count() * OVERHEAD_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_wire_has_22_bytes_for_each_record() {
        assert_eq!(Records::of(1, 1 << 14).unwrap().wire_bytes(), 23);
        assert_eq!(Records::of(1 << 14, 1 << 14).unwrap().wire_bytes(), (1 << 14) + 22);
        assert_eq!(Records::of((1 << 14) + 1, 1 << 14).unwrap().wire_bytes(), (1 << 14) + 1 + 44);
    }

    #[test]
    fn sizes_that_no_record_has_are_refused() {
        for content_bytes in [0, 62, (1 << 14) + 1, u16::MAX] {
            assert_eq!(Records::of(1, content_bytes), None, "{content_bytes}");
        }
        assert_eq!(Records::of(0, 1 << 14), None);
        assert_eq!(Records::of(u64::MAX, 1 << 14), None);
    }

    #[test]
    fn a_generation_that_makes_no_sense_has_no_region() {
        let region =
            |suite, content_bytes, skip, record| Generation { suite, content_bytes, skip, record }.region_bytes(1000);
        assert_eq!(region(0, 0, 0, 0), Some(1000), "not encrypted");
        assert_eq!(region(0x1301, 1 << 14, 0, 0), Some(1022));
        assert_eq!(region(0x1301, 1 << 14, 1021, 0), Some(1), "all but the last byte of the tag is there");
        assert_eq!(region(0x1301, 1 << 14, 0, (1 << 24) - 2), Some(1022));
        for (suite, content_bytes, skip, record) in [
            (0, 1, 0, 0),
            (0, 0, 1, 0),
            (0, 0, 0, 1),
            (0x1300, 1 << 14, 0, 0),
            (0x1301, 0, 0, 0),
            (0x1301, 1 << 14, 1022, 0),
            (0x1301, 1 << 14, 0, (1 << 24) - 1),
            (0x1301, 1 << 14, 0, u64::MAX),
        ] {
            assert_eq!(region(suite, content_bytes, skip, record), None, "{suite:#x} {content_bytes} {skip} {record}");
        }
    }

    #[test]
    fn debug_output_has_no_key() {
        assert_eq!(format!("{:?}", Keys { iv: [7; 12], key: [7; 32] }), "(secret)");
    }

    #[test]
    fn suites_are_known_by_their_numbers() {
        for suite in Suite::ALL {
            assert_eq!(Suite::from_number(suite as u16), Some(suite));
        }
        assert_eq!(Suite::from_number(0x1304), None, "AES-CCM is not handed over");
        assert_eq!(Suite::from_number(0), None);
    }

    proptest! {
        #[test]
        fn the_records_hold_the_payload(
            payload in 1u64..200_000, content in MIN_CONTENT_BYTES..=MAX_CONTENT_BYTES,
        ) {
            let records = Records::of(payload, content).unwrap();
            let sizes: Vec<u64> = (0..records.count()).map(|index| records.content_bytes(index) as u64).collect();
            prop_assert!(sizes.iter().all(|bytes| (1..=u64::from(content)).contains(bytes)));
            prop_assert_eq!(sizes.iter().sum::<u64>(), payload);
            prop_assert_eq!(sizes.iter().map(|bytes| bytes + OVERHEAD_BYTES).sum::<u64>(), records.wire_bytes());
            let begins = sizes.iter().scan(0, |at, bytes| { *at += bytes; Some(*at - bytes) });
            for (index, begin) in begins.enumerate() {
                prop_assert_eq!(records.payload_offset(index as u64), begin);
            }
        }
    }
}
