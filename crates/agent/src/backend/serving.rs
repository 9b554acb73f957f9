//! Fetches that other agents ask for. An *offer* is a payload that a server of this machine holds ready. The payload is
//! sent, encrypted, on the connection by which the other agent asked for it. Such a transfer is a *fetch*. A *turn* is
//! one pass of the daemon's event loop.

use shunt_handoff::payload::Payload;
use shunt_wire::local::Reason;

use shunt_transport::{Transport, TransportError};

/// Most bytes that are read from the file and encrypted at a time.
const CHUNK_BYTES: usize = 32 << 10;
/// Most chunks of [`CHUNK_BYTES`] in one turn, so that a fast reader leaves time for everybody else.
const CHUNKS: usize = 8;

/// A fetch that another agent has asked for.
pub(crate) struct Serving {
    pub(crate) transport: Transport,
    pub(crate) payload: Payload,
}

/// Result of one turn.
pub(crate) enum Turn {
    Done,
    /// The reader takes no more now, or [`CHUNKS`] chunks were sent and other connections are next.
    Later,
    /// The next bytes are not in memory, and a thread reads them.
    Reading,
}

impl Serving {
    /// Sends as much as may be sent in one turn.
    ///
    /// # Errors
    /// Returns why the fetch fails.
    pub(crate) fn turn(&mut self) -> Result<Turn, Reason> {
        for _ in 0..CHUNKS {
            if !self.transport.flush().map_err(reason_of)? {
                return Ok(Turn::Later);
            }
            if self.payload.remaining() == 0 {
                return self.finish();
            }
            let output = self.transport.output();
            let start = output.len();
            output.resize(start + CHUNK_BYTES, 0);
            let bytes = self.payload.read(&mut output[start..])?;
            output.truncate(start + bytes.unwrap_or(0));
            if bytes.is_none() {
                return Ok(Turn::Reading);
            }
        }
        Ok(Turn::Later)
    }

    fn finish(&mut self) -> Result<Turn, Reason> {
        Ok(if self.transport.finish().map_err(reason_of)? { Turn::Done } else { Turn::Later })
    }
}

fn reason_of(error: TransportError) -> Reason {
    match error {
        TransportError::Refused(reason) => reason,
        _ => Reason::ClientGone,
    }
}
