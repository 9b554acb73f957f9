//! Connections whose bytes count differently for the client and for its server: only the steering programs translate
//! between the two, so that a connection hangs where these are taken off.

use std::path::Path;

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use zerocopy::FromBytes;

use crate::attach::{self, FE_SETSOCKOPT};
use crate::bpf::{Flow, FlowKey, MAX_FLOWS};
use crate::error::SteeringError;
use crate::pins;

/// Takes the socket option away by which handoffs begin, and returns the connections that have had one. Their sequence
/// numbers stay as they are from here on: close these connections, then call [`crate::detach_all`].
///
/// # Errors
/// Where a pinned file cannot be removed.
pub fn end_handoffs(pin_dir: &Path) -> Result<Vec<FlowKey>, SteeringError> {
    attach::log_libbpf();
    attach::detach_cgroup(&pin_dir.join(FE_SETSOCKOPT))?;
    let flows = MapHandle::from_pinned_path(pin_dir.join("flows"));
    Ok(flows.map(|flows| moved(&flows, pins::is_our_layout(pin_dir))).unwrap_or_default())
}

/// Those of a table. What is in one of another layout cannot be told: all of them.
pub(crate) fn moved(flows: &MapHandle, is_our_layout: bool) -> Vec<FlowKey> {
    let is_moved =
        |flow: &[u8]| !is_our_layout || Flow::read_from_bytes(flow).map_or(true, |flow| flow.spaces.made > 0);
    entries(flows)
        .filter(|(_, flow)| is_moved(flow))
        .filter_map(|(key, _)| FlowKey::read_from_bytes(&key).ok())
        .collect()
}

/// All of a table, as bytes. One that comes or goes meanwhile may be missed.
pub(crate) fn entries(flows: &MapHandle) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> {
    // With one call: one by one, a full table keeps an agent for so long that its peers take it for dead. And no
    // fewer than there may be: the kernel ends a batch where the next bucket of the table does not fit, and
    // libbpf-rs takes a batch that is not full for the last one.
    flows.lookup_batch(MAX_FLOWS, MapFlags::LOCK, MapFlags::ANY).into_iter().flatten()
}
