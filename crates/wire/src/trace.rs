//! The trace-id of a request (W3C Trace Context, 3.2.2.3). It is in the logs of every tier (server on the request's
//! path) that handled the request.

use std::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length in bytes of a trace-id.
pub const TRACE_BYTES: usize = 16;

/// Identifier of a request, chosen by the client or the first tier; all zeros: none. It is a label, and proves nothing,
/// because the sender of a request can choose any value.
#[derive(Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(transparent)]
pub struct TraceId(pub [u8; TRACE_BYTES]);

impl TraceId {
    /// Returns the trace-id, or `None` where the request had none, so that a log line can leave it out.
    pub fn known(self) -> Option<Self> {
        (self != Self::default()).then_some(self)
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_id_is_written_as_in_traceparent() {
        let mut bytes = [0; 16];
        (bytes[0], bytes[15]) = (0x4b, 0x36);
        assert_eq!(TraceId(bytes).to_string(), "4b000000000000000000000000000036");
        assert_eq!((TraceId(bytes).known(), TraceId::default().known()), (Some(TraceId(bytes)), None));
    }
}
