//! State that each machine has for the connection of a stalled response. The connection's *flow* is its entry in
//! Shunt's BPF map on the frontend.

use std::fmt::Write;
use std::net::SocketAddr;
use std::process::Command;

use crate::flow_table::FlowTable;
use crate::host::Host;
use crate::lab::Lab;

/// Describes a client's connection: the sockets that have the client's port, on the client and on all tiers, and the
/// connection's flow.
pub(super) fn look(lab: &Lab, client: &Host, local: SocketAddr, server: SocketAddr) -> String {
    let port = local.port();
    let filter = format!("( sport = :{port} or dport = :{port} )");
    let mut text = String::new();
    for host in std::iter::once(client).chain(lab.tiers()) {
        let mut ss = Command::new("ss");
        ss.args(["-tinmoOH", &filter]);
        let sockets = host.check(ss).unwrap_or_else(|error| format!("{error:#}"));
        for socket in sockets.lines() {
            let _ = write!(text, "\n  {}: {socket}", host.name());
        }
    }
    let flow = FlowTable::of(lab).ok().and_then(|flows| flows.flow(local, server));
    let _ = write!(text, "\n  flow: {flow:?}");
    text
}
