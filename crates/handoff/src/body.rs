//! The bytes of a region that a sender has left to send: a payload in the framing of its connection. A *region* is the
//! range of a client connection's sequence numbers that the framed payload takes, and a *flow* is that connection. A
//! *claim* is a frontend's message that asks for the payload.

use shunt_wire::local::Reason;
use shunt_wire::peer::Claim;

use crate::flow_sender::FlowSender;
use crate::framing::{Framing, Plain};
use crate::payload::Payload;
use crate::tls13::stream::{Generation, Sealed};
use crate::tls13::workbench::Workbench;

/// The bytes of one region.
#[derive(Debug)]
pub struct Body {
    payload: Payload,
    framing: Box<dyn Framing>,
}

impl Body {
    /// Makes the body that a claim describes.
    ///
    /// # Errors
    /// [`Reason::Malformed`] if the claim has keys, record numbers or sizes that TLS 1.3 does not allow.
    pub(crate) fn of(payload: Payload, claim: &Claim) -> Result<Self, Reason> {
        let generation = claim.generation();
        let Some((suite, _)) = generation.records(payload.remaining()) else {
            return if generation.suite == 0 { Ok(Self::plain(payload)) } else { Err(Reason::Malformed) };
        };
        let generation = Generation {
            suite,
            key: &claim.keys.key[..suite.key_bytes()],
            iv: &claim.keys.iv,
            first_record: generation.record,
            content_bytes: generation.content_bytes,
            skip: generation.skip,
        };
        Self::sealed(payload, generation)
    }

    /// Makes a body that is the payload as it is.
    pub fn plain(payload: Payload) -> Self {
        Self { payload, framing: Box::new(Plain) }
    }

    /// Makes a body that is the payload as records of TLS 1.3.
    ///
    /// # Errors
    /// [`Reason::Malformed`] for keys, record numbers or sizes that TLS 1.3 does not allow.
    pub fn sealed(payload: Payload, generation: Generation<'_>) -> Result<Self, Reason> {
        let framing = Box::new(Sealed::new(payload.remaining(), generation)?);
        Ok(Self { payload, framing })
    }

    /// Number of bytes of the region that the flow does not have yet.
    pub fn remaining(&self) -> u64 {
        self.framing.remaining(&self.payload)
    }

    /// The payload that the body is made of.
    pub fn payload(&self) -> &Payload {
        &self.payload
    }

    /// The payload, to set its reader or give it what was read.
    pub fn payload_mut(&mut self) -> &mut Payload {
        &mut self.payload
    }

    /// The payload, without its framing.
    pub(crate) fn into_payload(self) -> Payload {
        self.payload
    }

    /// Notes whether the frontend has been told the digest (SHA-256) of the payload's file. Does nothing if the framing
    /// does not bind the content ([`Framing::binds_content`]). Then another backend may continue with different bytes,
    /// so nothing has to be withheld.
    pub(crate) fn set_told(&self, told: bool) {
        if self.framing.binds_content() {
            self.payload.set_told(told);
        }
    }

    /// Gives a flow as many bytes as it takes. Returns whether the flow has all of them.
    ///
    /// # Errors
    /// Returns the errors of [`Framing::send_to`].
    pub fn send_to(&mut self, flow: &dyn FlowSender, workbench: &mut Workbench) -> Result<bool, Reason> {
        self.framing.send_to(&mut self.payload, flow, workbench)
    }
}
