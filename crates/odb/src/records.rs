//! TLS 1.3 records (RFC 8446, 5.2) between readers and stores on different machines, under keys that two agents have
//! agreed on. The agents make the handshake; only application data follows here. A *store* has the payloads of its
//! machine's programs, and *readers* are the programs that fetch them.

use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use shunt_wire::tls::{Keys, MAX_CONTENT_BYTES, OVERHEAD_BYTES, Suite};
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of a record's header, in bytes.
pub const HEADER_BYTES: usize = 5;
const TAG_BYTES: usize = 16;
/// Longest record, in bytes.
pub const RECORD_BYTES: usize = MAX_CONTENT_BYTES as usize + OVERHEAD_BYTES as usize;
const APPLICATION_DATA: u8 = 23;

const _: () = assert!(HEADER_BYTES + 1 + TAG_BYTES == OVERHEAD_BYTES as usize);

/// State of one end of a connection after its handshake, as messages between an agent and its programs carry it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Sealing {
    /// Number of a [`Suite`]; 0: the connection is not encrypted, and all other fields are 0.
    pub suite: U16,
    pub zero: [u8; 6],
    /// Number of the next record that this end sends.
    pub send_next: U64,
    /// Number of the next record that this end receives.
    pub receive_next: U64,
    pub send: Keys,
    pub receive: Keys,
}

/// The connection cannot be used any more: something was received that is no valid record, or the connection's keys
/// have reached their limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the connection's records end here")]
pub struct Broken;

/// Key and record number of one direction.
struct Direction {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    next: u64,
    /// Limit of the key: no record has this number or a later one (RFC 8446, 5.5).
    end: u64,
}

impl Direction {
    fn new(suite: Suite, keys: &Keys, next: u64) -> Option<Self> {
        let algorithm = match suite {
            Suite::Aes128GcmSha256 => &AES_128_GCM,
            Suite::Aes256GcmSha384 => &AES_256_GCM,
            Suite::ChaCha20Poly1305Sha256 => &CHACHA20_POLY1305,
        };
        let key = UnboundKey::new(algorithm, &keys.key[..suite.key_bytes()]).ok()?;
        Some(Self { key: LessSafeKey::new(key), iv: keys.iv, next, end: suite.max_records() })
    }

    /// Returns the nonce of the next record, and counts that record as used.
    fn nonce(&mut self) -> Result<Nonce, Broken> {
        if self.next >= self.end {
            return Err(Broken);
        }
        let number = (u128::from(self.next)).to_be_bytes();
        self.next += 1;
        let mut nonce = self.iv;
        nonce.iter_mut().zip(&number[16 - NONCE_LEN..]).for_each(|(byte, number)| *byte ^= number);
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

/// Both directions of a connection.
pub struct Records {
    send: Direction,
    receive: Direction,
}

impl Records {
    /// Makes both directions; `None` if the suite or the keys are invalid.
    #[must_use]
    pub fn new(sealing: &Sealing) -> Option<Self> {
        let suite = Suite::from_number(sealing.suite.get())?;
        let send = Direction::new(suite, &sealing.send, sealing.send_next.get())?;
        Some(Self { send, receive: Direction::new(suite, &sealing.receive, sealing.receive_next.get())? })
    }

    /// Seals a record in place. `record` has space for the header, then the content, then space for the content type
    /// and the tag.
    ///
    /// # Errors
    /// The keys have reached their limit.
    ///
    /// # Panics
    /// Panics if the record is longer than [`RECORD_BYTES`].
    pub fn seal(&mut self, record: &mut [u8]) -> Result<(), Broken> {
        assert!(record.len() <= RECORD_BYTES);
        let nonce = self.send.nonce()?;
        let (header, body) = record.split_at_mut(HEADER_BYTES);
        let [high, low] = (body.len() as u16).to_be_bytes();
        header.copy_from_slice(&[APPLICATION_DATA, 3, 3, high, low]);
        let (inner, place) = body.split_at_mut(body.len() - TAG_BYTES);
        if let Some(last) = inner.last_mut() {
            *last = APPLICATION_DATA;
        }
        let tag = self.send.key.seal_in_place_separate_tag(nonce, Aad::from(&*header), inner).map_err(|_| Broken)?;
        place.copy_from_slice(tag.as_ref());
        Ok(())
    }

    /// Opens a whole record in place. Returns the number of content bytes after its header.
    ///
    /// # Errors
    /// The bytes are no valid record of this connection.
    pub fn open(&mut self, record: &mut [u8]) -> Result<usize, Broken> {
        let (header, body) = record.split_at_mut_checked(HEADER_BYTES).ok_or(Broken)?;
        let nonce = self.receive.nonce()?;
        let inner = self.receive.key.open_in_place(nonce, Aad::from(&*header), body).map_err(|_| Broken)?;
        // Alerts and handshake messages end the connection, too: the agents have made the handshake, and nothing can be
        // negotiated after it.
        let end = inner.iter().rposition(|byte| *byte != 0).ok_or(Broken)?;
        if inner[end] == APPLICATION_DATA { Ok(end) } else { Err(Broken) }
    }
}

/// Returns the length of the record that begins here. `None`: its header is not complete.
///
/// # Errors
/// The bytes are no record of application data.
pub fn record_bytes(bytes: &[u8]) -> Result<Option<usize>, Broken> {
    let Some([kind, _, _, high, low]) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let body = usize::from(u16::from_be_bytes([*high, *low]));
    // RFC 8446, 5.2 allows 256 bytes more, but only records made here are received.
    let good = *kind == APPLICATION_DATA && body > TAG_BYTES && body <= RECORD_BYTES - HEADER_BYTES;
    if good { Ok(Some(HEADER_BYTES + body)) } else { Err(Broken) }
}

/// Shows the numbers of the next records, and hides the keys.
impl std::fmt::Debug for Records {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "records {} and {}", self.send.next, self.receive.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Makes both ends of one connection.
    fn ends(suite: Suite, next: u64) -> (Records, Records) {
        let keys = |byte| Keys { iv: [byte; 12], key: [byte; 32] };
        let sealing = |send, receive| Sealing {
            suite: (suite as u16).into(),
            zero: [0; 6],
            send_next: next.into(),
            receive_next: next.into(),
            send: keys(send),
            receive: keys(receive),
        };
        (Records::new(&sealing(1, 2)).unwrap(), Records::new(&sealing(2, 1)).unwrap())
    }

    fn sealed(records: &mut Records, content: &[u8]) -> Vec<u8> {
        let mut record = vec![0; content.len() + OVERHEAD_BYTES as usize];
        record[HEADER_BYTES..HEADER_BYTES + content.len()].copy_from_slice(content);
        records.seal(&mut record).unwrap();
        record
    }

    proptest! {
        #[test]
        fn sealed_records_open_in_order(contents in proptest::collection::vec(
            proptest::collection::vec(any::<u8>(), 0..MAX_CONTENT_BYTES as usize), 1..4), suite in 0usize..3) {
            let (mut one, mut other) = ends(Suite::ALL[suite], 7);
            let all: Vec<Vec<u8>> = contents.iter().map(|content| sealed(&mut one, content)).collect();
            for (content, record) in contents.iter().zip(&all) {
                prop_assert_eq!(record_bytes(record), Ok(Some(record.len())));
                let mut record = record.clone();
                let bytes = other.open(&mut record).unwrap();
                prop_assert_eq!(&record[HEADER_BYTES..HEADER_BYTES + bytes], &content[..]);
            }
        }
    }

    #[test]
    fn a_record_that_is_changed_or_repeated_does_not_open() {
        for bit in 0..60 * 8 {
            let (mut one, mut other) = ends(Suite::Aes128GcmSha256, 0);
            let mut record = sealed(&mut one, &[9; 60 - OVERHEAD_BYTES as usize]);
            record[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(other.open(&mut record), Err(Broken), "bit {bit}");
        }
        let (mut one, mut other) = ends(Suite::Aes128GcmSha256, 0);
        let record = sealed(&mut one, b"once");
        assert_eq!(other.open(&mut record.clone()), Ok(4));
        assert_eq!(other.open(&mut record.clone()), Err(Broken), "not a second time");
    }

    #[test]
    fn keys_end_at_their_suites_limit() {
        let (mut one, _) = ends(Suite::Aes256GcmSha384, (1 << 24) - 1);
        let mut record = [0; 30];
        assert_eq!(one.seal(&mut record), Ok(()));
        assert_eq!(one.seal(&mut record), Err(Broken));
    }

    #[test]
    fn no_other_kind_of_record_is_taken() {
        assert_eq!(record_bytes(&[21, 3, 3, 0, 19]), Err(Broken), "an alert in the clear");
        assert_eq!(record_bytes(&[23, 3, 3, 0xff, 0xff]), Err(Broken));
        assert_eq!(record_bytes(&[23, 3, 3, 0, 16]), Err(Broken), "no content, not even its type");
        assert_eq!(record_bytes(&[23, 3, 3]), Ok(None));
    }

    #[test]
    fn debug_output_has_no_key() {
        assert_eq!(format!("{:?}", ends(Suite::Aes128GcmSha256, 3).0), "records 3 and 3");
    }
}
