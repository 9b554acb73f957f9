//! Addresses of a machine's programs under `shunt run`. Each agent tells these addresses to its peers, which are other
//! machines' agents. On the peers' machines, connections with these addresses may then carry references, which stand
//! for bytes that the receiver fetches later (crates/negotiation).

use std::net::IpAddr;

use zerocopy::{FromBytes, IntoBytes};

use crate::address::Address;
use crate::frame::{FrameHeader, kind};
use crate::reason::Reason;

/// Largest number of addresses of one machine.
pub const ADDRESSES_MAX: usize = 64;

/// A list of addresses.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    list: [Address; ADDRESSES_MAX],
    count: usize,
}

impl Addresses {
    /// Makes a list of the first [`ADDRESSES_MAX`] of these addresses.
    #[must_use]
    pub fn of(addresses: &[IpAddr]) -> Self {
        let mut all = Self { list: [Address::NONE; ADDRESSES_MAX], count: addresses.len().min(ADDRESSES_MAX) };
        for (place, address) in all.list.iter_mut().zip(addresses) {
            *place = Address::from(*address);
        }
        all
    }

    /// Returns the addresses in order.
    pub fn iter(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.list[..self.count].iter().map(|address| address.ip())
    }

    /// Appends the list as one frame (ADDRESSES).
    pub fn emit(&self, out: &mut Vec<u8>) {
        FrameHeader::emit(kind::ADDRESSES, &[self.list[..self.count].as_bytes()], out);
    }

    /// Reads the body of a frame.
    ///
    /// # Errors
    /// [`Reason::Malformed`] where it is no list of addresses, or one longer than [`ADDRESSES_MAX`].
    pub(crate) fn parse(body: &[u8]) -> Result<Self, Reason> {
        let addresses = <[Address]>::ref_from_bytes(body).map_err(|_| Reason::Malformed)?;
        let mut all = Self { list: [Address::NONE; ADDRESSES_MAX], count: addresses.len() };
        all.list.get_mut(..addresses.len()).ok_or(Reason::Malformed)?.copy_from_slice(addresses);
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::Frame;

    fn sent(count: usize) -> Vec<u8> {
        let address = |number: usize| IpAddr::from([10, 0, 1, number as u8]);
        let mut bytes = Vec::new();
        Addresses::of(&(0..count).map(address).collect::<Vec<_>>()).emit(&mut bytes);
        bytes
    }

    #[test]
    fn emit_then_parse_is_the_identity() {
        for count in [0, 1, 3, ADDRESSES_MAX, ADDRESSES_MAX + 1] {
            let bytes = sent(count);
            let (frame, length) = Frame::parse(&bytes).unwrap().unwrap();
            assert_eq!(length, bytes.len());
            let Frame::Addresses(addresses) = frame else { panic!("{frame:?}") };
            let expected = (0..count.min(ADDRESSES_MAX)).map(|number| IpAddr::from([10, 0, 1, number as u8]));
            assert!(addresses.iter().eq(expected), "{count}");
        }
    }

    #[test]
    fn a_longer_list_and_half_an_address_are_refused() {
        let body = vec![1; (ADDRESSES_MAX + 1) * size_of::<Address>()];
        assert_eq!(Addresses::parse(&body).unwrap_err(), Reason::Malformed);
        assert_eq!(Addresses::parse(&body[..17]).unwrap_err(), Reason::Malformed);
    }
}
