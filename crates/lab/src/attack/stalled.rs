//! State of a stalled response's connection on each of its machines. The frontend's *flow* is the entry for the
//! connection in Shunt's BPF maps.

use std::fmt::Write;
use std::net::SocketAddr;
use std::process::Command;

use crate::flow_table::FlowTable;
use crate::host::Host;
use crate::lab::Lab;

/// Describes a client's connection: the sockets of its ports in the kernels of the client and of the tiers, and its
/// flow.
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
