//! Questions that the logic asks its machine. They are answered at once, without blocking: by the daemon from the
//! kernel's tables, by the simulator from its models. A *handoff* lets another machine (a *peer*) send a payload on the
//! connection of a server's client. A *region* is the range of sequence numbers that the payload takes on this
//! connection. A *ring* is a BPF ring buffer by which the kernel tells one server what becomes of its handoffs. The
//! *flow table* is the BPF programs' table of client connections. An *offer* is a payload (a range of a file) that a
//! server holds ready. A *claim* is a peer's message that asks for a payload. A *sender* is this machine's kernel
//! socket for a client of a peer; it is *parked* while it waits for the next payload. The *digest* of a file is its
//! SHA-256.

use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use shunt_wire::Endpoint;
use shunt_wire::local::{Handoff, Offer, Reason};
use shunt_wire::peer::Claim;

/// SHA-256 of a whole file.
pub type Sha256 = [u8; 32];

/// Knowledge of a file's digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// The digest of the file in the state that was asked about.
    Digest(Sha256),
    /// The digest is not known yet. The file is being read, waits to be read, has yet to find room among the files
    /// that wait, or has changed in the last 3 s.
    NotYet,
    /// The file has no digest: it has changed, is too large, or cannot be read.
    Never,
}

/// Urgency of a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Nobody waits: the digest is needed only if this backend is lost later.
    Ahead,
    /// A client waits.
    Now,
}

/// State of a handoff's region, as the kernel's flow table has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// The region is active, and the table has the same connection, peer and ring for it as the handoff.
    Active,
    /// The region is over already, for this reason.
    Over(Reason),
    /// There is no such region.
    Unknown,
}

/// A payload on its way to a client of this machine, as the kernel's flow table has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActiveRegion {
    /// The client's end of the connection.
    pub client: Endpoint,
    /// This machine's end of the connection, as the client knows it.
    pub server: Endpoint,
    /// Number of the handoff, given by its server.
    pub handoff: u64,
    /// Number of the peer that sends the payload.
    pub peer: u32,
    /// Payload bytes that the client has acknowledged.
    pub acked: u64,
    /// The client's window has no room for another segment. So the client, and not the sender, is the reason for a
    /// pause.
    pub is_shut: bool,
    /// Round-trip time of the connection when the region began.
    pub round_trip: Duration,
    /// Time since the steering programs (BPF) last saw a packet of the connection, or since the region began.
    pub quiet: Duration,
    /// The server may write bytes after the payload while the region is active (SHUNT_APPEND).
    pub queues: bool,
    /// Number of the ring by which the server learns that the region is complete.
    pub ring: u32,
}

/// This machine, which answers the logic's questions.
pub trait Machine {
    /// An open file of a payload.
    type File;
    /// State of a file. A file with the same state has the same bytes.
    type State: Copy + Eq + Debug;

    /// Looks up the region of a handoff of the server that has `ring`.
    fn region(&mut self, handoff: &Handoff, ring: u32) -> Region;

    /// Returns the active regions whose payload `peer` sends, or with `None` all active regions.
    fn active_regions(&mut self, peer: Option<u32>) -> Vec<ActiveRegion>;

    /// Returns the present state of a region, or `None` if the region has ended or another peer sends its payload.
    fn region_now(&mut self, region: &ActiveRegion) -> Option<ActiveRegion>;

    /// Checks that there is a sender for a claim, or room for another sender. `local` is the sender's address and port.
    /// Parked senders may be closed to make room.
    ///
    /// # Errors
    /// Returns [`Reason::Busy`] if the only sender that the client can have is busy on another connection of the
    /// client. Returns [`Reason::Limit`] if there is no room. Returns [`Reason::Unreachable`] if payload from `local`
    /// does not reach the client.
    fn find_place(&mut self, peer: usize, claim: &Claim, local: SocketAddr) -> Result<(), Reason>;

    /// Checks that payload from `local` reaches a client.
    ///
    /// # Errors
    /// Returns [`Reason::Unreachable`] if the payload does not arrive.
    fn reaches(&mut self, peer: usize, local: IpAddr, client: IpAddr) -> Result<(), Reason>;

    /// Returns whether one more descriptor may be opened. Parked senders may be closed to make room.
    fn has_descriptors(&mut self) -> bool;

    /// Returns the state of a file, as far as the kernel knows it without asking a program or another machine. `None`:
    /// the kernel's call has failed.
    fn state(&self, file: &Self::File) -> Option<Self::State>;

    /// Returns whether the file is still the one of its offer. It must have the offer's size and, unless the offer has
    /// the flag [`Offer::BODY`], the offer's modification time. Without that flag it may also have grown. If `proven`
    /// is given, the file must also be in this state.
    fn is_unchanged(&self, file: &Self::File, offer: &Offer, proven: Option<Self::State>) -> bool;

    /// Looks up the digest of a file in a state. A file that has not been read in this state is queued for reading, if
    /// it may be read and there is room.
    fn digest(&mut self, file: &Self::File, state: Self::State, want: Want) -> Known;
}

/// Model of a machine. Tests set its answers.
#[cfg(test)]
pub(crate) mod model {
    use super::*;

    /// The model's answers. A file is only a number, and its state is the same number.
    pub(crate) struct Model {
        pub(crate) region: Region,
        pub(crate) regions: Vec<ActiveRegion>,
        /// Answers of `find_place`, taken from the last to the first. When none is left, `find_place` finds a place.
        pub(crate) places: Vec<Result<(), Reason>>,
        pub(crate) reaches: Result<(), Reason>,
        pub(crate) has_descriptors: bool,
        pub(crate) is_unchanged: bool,
        pub(crate) known: Known,
        /// Number of scans of the flow table.
        pub(crate) scans: usize,
    }

    impl Default for Model {
        fn default() -> Self {
            Self {
                region: Region::Active,
                regions: Vec::new(),
                places: Vec::new(),
                reaches: Ok(()),
                has_descriptors: true,
                is_unchanged: true,
                known: Known::NotYet,
                scans: 0,
            }
        }
    }

    impl Machine for Model {
        type File = u64;
        type State = u64;

        fn region(&mut self, _: &Handoff, _: u32) -> Region {
            self.region
        }

        fn active_regions(&mut self, peer: Option<u32>) -> Vec<ActiveRegion> {
            self.scans += 1;
            let of = |region: &&ActiveRegion| peer.is_none_or(|peer| region.peer == peer);
            self.regions.iter().filter(of).copied().collect()
        }

        fn region_now(&mut self, region: &ActiveRegion) -> Option<ActiveRegion> {
            let same = |now: &&ActiveRegion| now.handoff == region.handoff && now.peer == region.peer;
            self.regions.iter().find(same).copied()
        }

        fn find_place(&mut self, _: usize, _: &Claim, _: SocketAddr) -> Result<(), Reason> {
            self.places.pop().unwrap_or(Ok(()))
        }

        fn reaches(&mut self, _: usize, _: IpAddr, _: IpAddr) -> Result<(), Reason> {
            self.reaches
        }

        fn has_descriptors(&mut self) -> bool {
            self.has_descriptors
        }

        fn state(&self, file: &u64) -> Option<u64> {
            Some(*file)
        }

        fn is_unchanged(&self, _: &u64, _: &Offer, _: Option<u64>) -> bool {
            self.is_unchanged
        }

        fn digest(&mut self, _: &u64, _: u64, _: Want) -> Known {
            self.known
        }
    }
}
