//! Framing of a payload's bytes on the wire. A *flow* is the client connection that the bytes are sent on. A *region*
//! is the range of the connection's sequence numbers that the framed bytes take.

use std::fmt::Debug;

use shunt_wire::local::Reason;

use crate::flow_sender::FlowSender;
use crate::payload::Payload;
use crate::tls13::workbench::Workbench;

/// Framing of a payload's bytes on the wire: nothing, or TLS records. Frames of other protocols (chunks of HTTP/1.1,
/// DATA of HTTP/2, literals of IMAP) would be further implementations.
pub trait Framing: Debug + Send {
    /// Number of bytes of the region that the flow does not have yet.
    fn remaining(&self, payload: &Payload) -> u64;

    /// Gives a flow as many bytes as it takes. Returns `true` if it has all of them. Returns `false` if it takes no
    /// more now, or if the payload waits for a read. TLS records also return `false` after a limited number of bytes,
    /// so that other payloads have their turn.
    ///
    /// # Errors
    /// [`Reason::FileChanged`] if the file has changed ([`Payload::is_unchanged`]), else why no more can be sent.
    fn send_to(
        &mut self,
        payload: &mut Payload,
        flow: &dyn FlowSender,
        workbench: &mut Workbench,
    ) -> Result<bool, Reason>;

    /// Whether another backend that continues the region has to send exactly the same payload bytes, because it
    /// encrypts them under the same record numbers.
    fn binds_content(&self) -> bool;
}

/// No framing: the payload's bytes as they are.
#[derive(Debug)]
pub(crate) struct Plain;

impl Framing for Plain {
    fn remaining(&self, payload: &Payload) -> u64 {
        payload.remaining()
    }

    fn send_to(&mut self, payload: &mut Payload, flow: &dyn FlowSender, _: &mut Workbench) -> Result<bool, Reason> {
        payload.send_to(flow)
    }

    fn binds_content(&self) -> bool {
        false
    }
}
