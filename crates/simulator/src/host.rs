//! Model of a machine's kernel and files, which answers the questions of the agent's logic. A *sender* is a backend's
//! socket for a client of a frontend. The *digest* of a file is its SHA-256. A *peer* is another machine's agent. A
//! *store* has the payloads of a machine's programs under `shunt run`; each payload has a numbered *slot* in it. A
//! *payload* is the body of a response.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use shunt_logic::machine::{ActiveRegion, Known, Machine, Region, Want};
use shunt_wire::Endpoint;
use shunt_wire::local::{Handoff, Offer, Reason};
use shunt_wire::peer::Claim;

use crate::flow::Connected;
use crate::sender::{Of, Sender};

/// Port of the first client. Each client has a different port.
pub const FIRST_PORT: u16 = 1024;

/// Number that is added to the number of a file's contents when they are written over.
const CONTENTS: u64 = 1 << 40;
/// Time in which a file is read for its digest.
const DIGEST: Duration = Duration::from_millis(500);

/// Returns the number of the client at this end of a connection.
pub fn client_of(at: Endpoint) -> usize {
    usize::from(u16::from_be_bytes(at.port_be).saturating_sub(FIRST_PORT))
}

/// A file as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileNow {
    /// Number of the file's state, which grows by 1 with every write to the file.
    pub state: u64,
    /// Number of the file's contents, as in [`Source::File`](crate::content::Source::File). Bytes that are appended do
    /// not change it.
    pub content: u64,
}

/// Kernel and files of one machine.
#[derive(Default)]
pub struct Host {
    /// Time of the last event.
    pub now: Duration,
    /// Connections of clients, by the clients' numbers. They stay when the agent ends.
    pub flows: BTreeMap<usize, Connected>,
    /// Senders, by their clients' numbers.
    pub senders: BTreeMap<usize, Sender>,
    /// Most senders that may be busy (not done) at a time.
    pub places: usize,
    /// Files and states whose digest was asked for, and the time of the first question.
    pub digested: BTreeMap<(u64, u64), Duration>,
    /// Files that have changed. Any other file is in state 0, and its contents have the file's number.
    pub changed: BTreeMap<u64, FileNow>,
    /// Time of the last call of `has_new_digests`.
    pub looked: Duration,
    /// Some files have no digest, or are on file systems that do not tell when a file has changed.
    pub has_strange_files: bool,
    /// Payloads in the machine's store: by the number of the slot, the number of the file whose bytes are in it.
    pub stored: BTreeMap<u32, u64>,
    /// Time until which no descriptor is free.
    pub scarce_until: Duration,
    /// For a peer's number, the time until which payload of this machine does not reach that peer's clients.
    pub unreached: BTreeMap<usize, Duration>,
    /// By address: the key that proves TCP handshakes with programs there, as the agent has told the kernel.
    pub ends: BTreeMap<IpAddr, [u8; 16]>,
    /// Pairs of an address and a store that programs at this address can fetch from. The agent has told these pairs to
    /// this machine's programs.
    pub sources: Vec<(IpAddr, [u8; 16])>,
}

impl Host {
    /// Returns the number of senders that are not done.
    pub fn busy(&self) -> usize {
        self.senders.values().filter(|sender| !sender.is_done()).count()
    }

    /// Returns a file as it is now.
    pub fn file(&self, file: u64) -> FileNow {
        self.changed.get(&file).copied().unwrap_or(FileNow { state: 0, content: file })
    }

    /// Returns whether the file of a client's payload is still in the state that the client's sender has noted. True
    /// also if there is no sender, or the payload is not a file's.
    pub fn is_as_begun(&self, client: usize) -> bool {
        match self.senders.get(&client).map(|sender| sender.of) {
            Some(Of::File { file, state, .. }) => self.file(file).state == state,
            _ => true,
        }
    }

    /// Returns whether the file of a client's payload still has the payload's bytes.
    pub fn is_of_same_content(&self, client: usize) -> bool {
        let Some(sender) = self.senders.get(&client) else { return false };
        matches!(sender.of, Of::File { file, .. } if self.file(file).content == sender.content())
    }

    /// Writes to a file: over its contents (`is_new`), or at its end.
    pub fn write_to(&mut self, file: u64, is_new: bool) {
        let FileNow { state, content } = self.file(file);
        let content = if is_new { content + CONTENTS } else { content };
        self.changed.insert(file, FileNow { state: state + 1, content });
    }

    /// Returns whether a file's digest has become known since the last call, so that questions can be answered.
    pub fn has_new_digests(&mut self) -> bool {
        let (now, before) = (self.now, std::mem::replace(&mut self.looked, self.now));
        self.digested.values().any(|asked| (before..now).contains(&(*asked + DIGEST)))
    }

    /// Returns whether descriptors are free.
    pub fn has_free_descriptors(&self) -> bool {
        self.now >= self.scarce_until
    }
}

impl Machine for Host {
    type File = u64;
    type State = u64;

    fn region(&mut self, handoff: &Handoff, ring: u32) -> Region {
        let flow = self.flows.get(&client_of(handoff.flow.client()));
        if flow.is_some_and(|flow| flow.is_active(handoff.handoff, handoff.peer, ring)) {
            return Region::Active;
        }
        let is_over = flow.is_some_and(|flow| flow.is_over(handoff.handoff, ring));
        if is_over { Region::Over(Reason::Aborted) } else { Region::Unknown }
    }

    fn active_regions(&mut self, peer: Option<u32>) -> Vec<ActiveRegion> {
        let all = self.flows.values().filter_map(|flow| flow.region(self.now));
        all.filter(|region| peer.is_none_or(|peer| region.peer == peer)).collect()
    }

    fn region_now(&mut self, region: &ActiveRegion) -> Option<ActiveRegion> {
        let now = self.flows.get(&client_of(region.client))?.region(self.now)?;
        (now.handoff == region.handoff && now.peer == region.peer).then_some(now)
    }

    fn find_place(&mut self, peer: usize, claim: &Claim, local: SocketAddr) -> Result<(), Reason> {
        let client = client_of(claim.flow.client());
        if claim.flow.first == 0 && self.senders.contains_key(&client) {
            return Ok(());
        }
        let is_known = self.senders.get(&client).is_some_and(|sender| !sender.is_done());
        if !is_known && self.busy() >= self.places {
            return Err(Reason::Limit);
        }
        self.reaches(peer, local.ip(), claim.flow.client_address.ip())
    }

    fn reaches(&mut self, peer: usize, _: IpAddr, _: IpAddr) -> Result<(), Reason> {
        let is_closed = self.unreached.get(&peer).is_some_and(|until| *until > self.now);
        if is_closed { Err(Reason::Unreachable) } else { Ok(()) }
    }

    fn has_descriptors(&mut self) -> bool {
        self.has_free_descriptors()
    }

    fn state(&self, file: &u64) -> Option<u64> {
        let is_told = !self.has_strange_files || !file.is_multiple_of(13);
        is_told.then(|| self.file(*file).state)
    }

    fn is_unchanged(&self, file: &u64, offer: &Offer, proven: Option<u64>) -> bool {
        let FileNow { state, .. } = self.file(*file);
        state as i64 == offer.mtime_ns && proven.is_none_or(|proven| proven == state)
    }

    /// Returns a file's digest half a second after the first question, because reading the file takes this time.
    fn digest(&mut self, file: &u64, state: u64, _: Want) -> Known {
        let FileNow { state: now, content } = self.file(*file);
        if now != state || self.has_strange_files && file.is_multiple_of(11) {
            return Known::Never;
        }
        let asked = *self.digested.entry((*file, state)).or_insert(self.now);
        let mut digest = [0; 32];
        digest[..8].copy_from_slice(&content.to_le_bytes());
        digest[8] = 1;
        if self.now >= asked + DIGEST { Known::Digest(digest) } else { Known::NotYet }
    }
}
