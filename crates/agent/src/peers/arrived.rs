//! A connection that another agent has made, before its first frame has said its purpose.

use std::net::IpAddr;

use shunt_wire::local::Reason;
use shunt_wire::peer::Refused;

use shunt_transport::Transport;

/// An accepted connection.
pub(crate) struct Arrived {
    pub(crate) transport: Transport,
    pub(crate) from: IpAddr,
}

impl Arrived {
    /// Tells the other agent the reason, and closes the connection. The reason need not be the other agent's fault: for
    /// example, the offer that it wants to fetch has expired.
    pub(crate) fn refuse(mut self, reason: Reason) {
        Refused { reason: (reason as u32).into() }.emit(self.transport.output());
        let _ = self.transport.finish();
    }
}
