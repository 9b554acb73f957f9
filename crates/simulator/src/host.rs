//! Model of a machine's kernel and files, which answers the questions of the agent's logic.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use shunt_logic::machine::{ActiveRegion, Known, Machine, Region, Want};
use shunt_wire::Endpoint;
use shunt_wire::local::{Handoff, Offer, Reason};
use shunt_wire::peer::Claim;

use crate::flow::Connected;
use crate::sender::Sender;

/// Port of the first client. Each client has a different port.
pub const FIRST_PORT: u16 = 1024;

/// Returns the number of the client at this end of a connection.
pub fn client_of(at: Endpoint) -> usize {
    usize::from(u16::from_be_bytes(at.port_be).saturating_sub(FIRST_PORT))
}

/// Kernel and files of one machine.
#[derive(Default)]
pub struct Host {
    /// Time of the last event.
    pub now: Duration,
    /// Connections of clients, by the clients' numbers. They outlive the agent.
    pub flows: BTreeMap<usize, Connected>,
    /// Senders, by their clients' numbers.
    pub senders: BTreeMap<usize, Sender>,
    /// Most senders that are not done.
    pub places: usize,
    /// Files whose digest was asked for, and the time of the first question.
    pub digested: BTreeMap<u64, Duration>,
}

impl Host {
    /// Returns the number of senders that are not done.
    pub fn busy(&self) -> usize {
        self.senders.values().filter(|sender| !sender.is_done()).count()
    }
}

impl Machine for Host {
    type File = u64;
    type State = u64;

    fn region(&mut self, handoff: &Handoff, ring: u32) -> Region {
        let flow = self.flows.get(&client_of(handoff.flow.client()));
        let is_active = flow.is_some_and(|flow| flow.is_active(handoff.handoff, handoff.peer, ring));
        if is_active { Region::Active } else { Region::Unknown }
    }

    fn active_regions(&mut self, peer: Option<u32>) -> Vec<ActiveRegion> {
        let all = self.flows.values().filter_map(|flow| flow.region(self.now));
        all.filter(|region| peer.is_none_or(|peer| region.peer == peer)).collect()
    }

    fn region_now(&mut self, region: &ActiveRegion) -> Option<ActiveRegion> {
        let now = self.flows.get(&client_of(region.client))?.region(self.now)?;
        (now.handoff == region.handoff && now.peer == region.peer).then_some(now)
    }

    fn find_place(&mut self, _: usize, claim: &Claim, _: SocketAddr) -> Result<(), Reason> {
        let is_known = self.senders.contains_key(&client_of(claim.flow.client()));
        if is_known || self.busy() < self.places { Ok(()) } else { Err(Reason::Limit) }
    }

    fn reaches(&mut self, _: usize, _: IpAddr, _: IpAddr) -> Result<(), Reason> {
        Ok(())
    }

    fn has_descriptors(&mut self) -> bool {
        true
    }

    fn state(&self, file: &u64) -> Option<u64> {
        Some(*file)
    }

    fn is_unchanged(&self, _: &u64, _: &Offer, _: Option<u64>) -> bool {
        true
    }

    /// Returns a file's digest half a second after the first question, the time that reading the file takes.
    fn digest(&mut self, file: &u64, _: u64, _: Want) -> Known {
        let now = self.now;
        let asked = *self.digested.entry(*file).or_insert(now);
        if now >= asked + Duration::from_millis(500) { Known::Digest([*file as u8; 32]) } else { Known::NotYet }
    }
}
