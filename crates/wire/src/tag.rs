//! Tag of an offer: proof that the backend made the offer for this request. An *offer* is a response's body (payload)
//! that a backend holds ready for a frontend, which has the client's connection. A *consent* is the request's header
//! field by which the frontend permits an offer.
//!
//! A tag is SipHash-2-4 with 128-bit output (Aumasson and Bernstein 2012), keyed with the backend's key for one
//! frontend. Its input is the request's nonce (16 random bytes), the offer's number and the payload's length. A
//! frontend checks the tag before it sends the header. So an offer that is forged, replayed, or made for another
//! frontend or length costs the client nothing: the request runs once more, without a consent.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length in bytes of a tag's input: nonce, offer's number and payload's length.
pub const INPUT_BYTES: usize = 32;

/// A tag: 128 bits that only the two agents of a session, and their servers, can compute.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct Tag(pub [u8; 16]);

impl Tag {
    /// Computes the tag for one payload.
    pub fn compute(key: &[u8; 16], nonce: &[u8; 16], offer: u64, length: u64) -> Self {
        let mut hasher = SipHasher24::new_with_key(key);
        let mut input = [0u8; INPUT_BYTES];
        input[..16].copy_from_slice(nonce);
        input[16..24].copy_from_slice(&offer.to_le_bytes());
        input[24..].copy_from_slice(&length.to_le_bytes());
        hasher.write(&input);
        Self(hasher.finish128().as_bytes())
    }
}

/// Compares in constant time, so that the duration of a comparison tells a peer nothing about the tag.
impl PartialEq for Tag {
    fn eq(&self, other: &Self) -> bool {
        let differing = self.0.iter().zip(&other.0).fold(0, |all, (a, b)| all | (a ^ b));
        std::hint::black_box(differing) == 0
    }
}

impl Eq for Tag {}

/// Hides the bits: a tag is a secret until it is used.
impl std::fmt::Debug for Tag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tag(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with `openssl mac -macopt hexkey:000102..0f -macopt size:16 -in (bytes 00..1f) SIPHASH`.
    #[test]
    fn agrees_with_openssl() {
        let key: [u8; 16] = std::array::from_fn(|i| i as u8);
        let nonce: [u8; 16] = std::array::from_fn(|i| i as u8);
        let offer = u64::from_le_bytes(std::array::from_fn(|i| 16 + i as u8));
        let length = u64::from_le_bytes(std::array::from_fn(|i| 24 + i as u8));
        let expected = 0x7c39_56ca_5eea_fc3e_363e_9d55_6546_eb68_u128.to_be_bytes();
        assert_eq!(Tag::compute(&key, &nonce, offer, length).0, expected);
    }

    #[test]
    fn every_input_matters() {
        let base = Tag::compute(&[1; 16], &[2; 16], 3, 4);
        assert_ne!(base, Tag::compute(&[9; 16], &[2; 16], 3, 4));
        assert_ne!(base, Tag::compute(&[1; 16], &[9; 16], 3, 4));
        assert_ne!(base, Tag::compute(&[1; 16], &[2; 16], 9, 4));
        assert_ne!(base, Tag::compute(&[1; 16], &[2; 16], 3, 9));
        assert_eq!(base, Tag::compute(&[1; 16], &[2; 16], 3, 4));
    }
}
