//! Connections of this machine's fetches. For each *fetch*, the agent connects to the backend's agent, and passes the
//! payload on to the server that asked for it.
//!
//! The server reads one end of a pair of sockets, and the agent decrypts into the other end. While the server takes
//! nothing, the agent reads nothing from the backend. So at most the bytes of one read wait in the agent.

use std::io::Write;
use std::os::unix::net::UnixStream;

use shunt_wire::local::Reason;

use shunt_transport::{Transport, TransportError};

/// A fetch of a server of this machine.
pub(crate) struct Fetching {
    pub(crate) transport: Transport,
    /// This agent's end of the pair of sockets, and number of bytes still to come. `None` until the backend has
    /// answered.
    pub(crate) reader: Option<(UnixStream, u64)>,
}

/// The event that a fetch waits for.
pub(crate) enum Wait {
    Backend,
    Reader,
    Nothing,
}

impl Fetching {
    /// Passes on the bytes that have come. Returns what to wait for, and whether bytes were moved.
    ///
    /// # Errors
    /// Returns why the fetch fails.
    pub(crate) fn relay(&mut self) -> Result<(Wait, bool), Reason> {
        let Some((reader, left)) = &mut self.reader else { return Ok((Wait::Backend, false)) };
        let before = *left;
        while *left > 0 {
            let bytes = self.transport.payload().map_err(|error| reason_of(&error))?;
            let most = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
            if most == 0 {
                return Ok((Wait::Backend, *left < before));
            }
            match reader.write(&bytes[..most]) {
                Ok(written) => {
                    self.transport.consume(written);
                    *left -= written as u64;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    return Ok((Wait::Reader, *left < before));
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Reason::ClientGone),
            }
        }
        Ok((Wait::Nothing, true))
    }
}

/// Returns the reason for which a fetch fails, from the error of its connection.
pub(crate) fn reason_of(error: &TransportError) -> Reason {
    match error {
        TransportError::Refused(reason) => *reason,
        _ => Reason::PeerLost,
    }
}
