//! The flow table of a frontend: a BPF map with an entry, the *flow*, for each client connection. Tests read the table,
//! or fill it with flows of connections that do not exist. A *handoff* lets a backend send a response's body on a
//! client's connection.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::{MapCore, MapFlags, MapHandle};
use rustix::time::{ClockId, clock_gettime};
use shunt_handoff::bpf::{FLOW_CLIENT_FIN, FLOW_SERVER_FIN, Flow, FlowKey};
use shunt_handoff::frontend::ACTIVE;
use zerocopy::{FromBytes, IntoBytes};

use crate::lab::Lab;

/// A frontend's flow table.
#[derive(Debug)]
pub struct FlowTable(MapHandle);

impl FlowTable {
    /// Opens the table of the lab's frontend, where Shunt's daemon (the agent) must run.
    ///
    /// # Errors
    /// When there is no table.
    pub fn of(lab: &Lab) -> Result<Self> {
        let path = format!("{}{}/flows", lab.id().pins_prefix(), lab.frontend().name());
        Ok(Self(MapHandle::from_pinned_path(&path).with_context(|| format!("opening {path}"))?))
    }

    /// Fills the table with flows that are never removed for their age.
    ///
    /// # Errors
    /// When the table does not get full.
    pub fn fill(&self) -> Result<()> {
        let flow = Flow { last_seen_ns: u64::MAX, ..Default::default() };
        match (0..=self.0.max_entries()).find(|number| self.add(*number, &flow).is_err()) {
            Some(_) => Ok(()),
            None => bail!("the flow table takes more than {} flows", self.0.max_entries()),
        }
    }

    /// Adds `count` flows of connections that both ends closed some time (`ago`) before now.
    ///
    /// # Errors
    /// When the table has no room for them.
    pub fn add_ended(&self, count: u32, ago: Duration) -> Result<()> {
        let now = clock_gettime(ClockId::Monotonic);
        let last_seen_ns = (now.tv_sec as u64).saturating_sub(ago.as_secs()) * 1_000_000_000;
        let flow = Flow { flags: (FLOW_CLIENT_FIN | FLOW_SERVER_FIN) as u8, last_seen_ns, ..Default::default() };
        ensure!((0..count).all(|number| self.add(number, &flow).is_ok()), "no room for {count} flows");
        Ok(())
    }

    /// Removes the flows that [`Self::fill`] or [`Self::add_ended`] has added.
    pub fn empty(&self) {
        for number in 0..=self.0.max_entries() {
            // Flows that did not fit are not in the table.
            let _ = self.0.delete(nobody(number).as_bytes());
        }
    }

    /// Number of handoffs under way, according to the kernel.
    pub fn active(&self) -> usize {
        let flows = self.0.keys().filter_map(|key| self.0.lookup(&key, MapFlags::LOCK).ok().flatten());
        let flows = flows.filter_map(|flow| Flow::read_from_bytes(&flow).ok());
        flows.filter(|flow| flow.spaces.made > 0 && flow.spaces.status == ACTIVE).count()
    }

    /// Flow of a client's connection, given both ends.
    #[must_use]
    pub fn flow(&self, client: SocketAddr, server: SocketAddr) -> Option<Flow> {
        let key = FlowKey::of(client.into(), server.into());
        let flow = self.0.lookup(key.as_bytes(), MapFlags::LOCK).ok().flatten()?;
        Flow::read_from_bytes(&flow).ok()
    }

    fn add(&self, number: u32, flow: &Flow) -> libbpf_rs::Result<()> {
        self.0.update(nobody(number).as_bytes(), flow.as_bytes(), MapFlags::NO_EXIST)
    }
}

/// Key of a flow without a connection. Its addresses are reserved, so they belong to nobody (class E; RFC 1112, 4).
fn nobody(number: u32) -> FlowKey {
    let mut client_address = [0; 16];
    client_address[10..12].fill(0xff);
    client_address[12..].copy_from_slice(&Ipv4Addr::from(0xf000_0000 | number >> 16).octets());
    let client_port = (number as u16).to_be();
    FlowKey { client_address, server_address: client_address, client_port, server_port: 0 }
}
