//! Reasons why a handoff (a peer sends a body on a client's connection), a fetch (a body comes through both agents), or
//! a session between two agents has ended. The protocol between server and agent and the protocol between agents use
//! the same numbers.

/// Why a handoff or fetch ended, or a session was closed (`SHUNT_REASON_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum Reason {
    #[error("no such offer (never made, or already used)")]
    UnknownOffer = 1,
    #[error("the offer expired")]
    Expired = 2,
    #[error("wrong tag")]
    Tag = 3,
    #[error("another length than the offer's")]
    Length = 4,
    #[error("the file changed after its header was made")]
    FileChanged = 5,
    #[error("a system call of the sender failed")]
    Socket = 6,
    #[error("the peer's agent is not connected")]
    PeerLost = 7,
    #[error("the client acknowledged nothing for too long")]
    NoProgress = 8,
    #[error("a limit of the agent is reached")]
    Limit = 9,
    #[error("malformed message")]
    Malformed = 10,
    #[error("another protocol version")]
    Version = 11,
    #[error("given up by the frontend")]
    Aborted = 12,
    #[error("the backend already sends on that flow")]
    Busy = 13,
    #[error("the client reset the connection")]
    ClientGone = 14,
    #[error("not allowed by the agent's configuration")]
    NotAllowed = 15,
    #[error("the backend's payload does not reach that client (its agent's log says why)")]
    Unreachable = 16,
}

impl Reason {
    /// Every reason, in the order of its number.
    pub const ALL: [Reason; 16] = [
        Reason::UnknownOffer,
        Reason::Expired,
        Reason::Tag,
        Reason::Length,
        Reason::FileChanged,
        Reason::Socket,
        Reason::PeerLost,
        Reason::NoProgress,
        Reason::Limit,
        Reason::Malformed,
        Reason::Version,
        Reason::Aborted,
        Reason::Busy,
        Reason::ClientGone,
        Reason::NotAllowed,
        Reason::Unreachable,
    ];

    /// Returns the reason with this number on the wire.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| *reason as u32 == number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_survive_the_wire() {
        for reason in Reason::ALL {
            assert_eq!(Reason::from_number(reason as u32), Some(reason));
        }
        assert_eq!(Reason::from_number(0), None);
    }
}
