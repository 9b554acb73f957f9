//! The bytes that a sender has left to send: a file's bytes as they are, or their records on an encrypted connection.

use std::os::fd::AsFd;

use shunt_wire::local::Reason;
use shunt_wire::peer::Claim;

use crate::payload::Payload;
use crate::tls13::stream::{Generation, SealedPayload, Workbench};

/// The bytes of one region.
#[derive(Debug)]
pub(crate) enum Body {
    Plain(Payload),
    Sealed(Box<SealedPayload>),
}

impl Body {
    /// Makes the body that a claim describes.
    ///
    /// # Errors
    /// [`Reason::Malformed`] for impossible keys.
    pub(crate) fn of(payload: Payload, claim: &Claim) -> Result<Self, Reason> {
        let generation = claim.generation();
        let Some((suite, _)) = generation.records(payload.remaining()) else {
            return if generation.suite == 0 { Ok(Self::Plain(payload)) } else { Err(Reason::Malformed) };
        };
        let generation = Generation {
            suite,
            key: &claim.keys.key[..suite.key_bytes()],
            iv: &claim.keys.iv,
            first_record: generation.record,
            content_bytes: generation.content_bytes,
            skip: generation.skip,
        };
        SealedPayload::new(payload, generation).map(|sealed| Self::Sealed(Box::new(sealed)))
    }

    /// Number of bytes of the region that the kernel does not have yet.
    pub(crate) fn remaining(&self) -> u64 {
        match self {
            Self::Plain(payload) => payload.remaining(),
            Self::Sealed(sealed) => sealed.remaining(),
        }
    }

    /// The payload that the body is made of.
    pub(crate) fn payload(&self) -> &Payload {
        match self {
            Self::Plain(payload) => payload,
            Self::Sealed(sealed) => sealed.payload(),
        }
    }

    /// The payload, to set its reader or give it what was read.
    pub(crate) fn payload_mut(&mut self) -> &mut Payload {
        match self {
            Self::Plain(payload) => payload,
            Self::Sealed(sealed) => sealed.payload_mut(),
        }
    }

    /// See [`Payload::set_told`]. Only for sealed bytes: others may differ from those of another backend.
    pub(crate) fn set_told(&self, told: bool) {
        if let Self::Sealed(sealed) = self {
            sealed.payload().set_told(told);
        }
    }

    /// See [`Payload::is_unchanged`].
    pub(crate) fn is_unchanged(&self) -> bool {
        match self {
            Self::Plain(payload) => payload.is_unchanged(),
            Self::Sealed(sealed) => sealed.is_unchanged(),
        }
    }

    /// Gives the socket as many bytes as it takes. Returns `true` if it has all of them.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] if the file is shorter or newer than its header said, else the reason that the socket's
    /// error stands for.
    pub(crate) fn send_to(&mut self, socket: impl AsFd, workbench: &mut Workbench) -> Result<bool, Reason> {
        match self {
            Self::Plain(payload) => payload.send_to(socket),
            Self::Sealed(sealed) => sealed.send_to(socket, workbench),
        }
    }
}
