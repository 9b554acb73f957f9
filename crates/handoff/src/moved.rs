//! Connections that have had a handoff: another machine has sent a payload on them, between bytes of the server. So the
//! sequence numbers differ between the client and its server, and the steering programs (BPF) translate them. Such a
//! connection hangs when these programs are detached. A *layout* is a version of the contents of these programs' maps.

use std::path::Path;

use libbpf_rs::{MapFlags, MapHandle};
use zerocopy::FromBytes;

use crate::bpf::{Flow, FlowKey};
use crate::error::SteeringError;
use crate::{attach, calls, older, pins};

/// Removes the socket option by which handoffs begin, and returns the connections that have had a handoff. From here on
/// no other connection can have one. The caller closes these connections and then calls [`crate::detach_all`].
///
/// # Errors
/// Returns an error if a pinned file cannot be removed.
pub fn end_handoffs(pin_dir: &Path) -> Result<Vec<FlowKey>, SteeringError> {
    attach::log_libbpf();
    let directories = [older::directories(pin_dir), vec![pin_dir.to_owned()]].concat();
    directories.iter().try_for_each(|directory| calls::detach(directory))?;
    Ok(directories.iter().flat_map(|directory| moved_below(directory)).collect())
}

fn moved_below(directory: &Path) -> Vec<FlowKey> {
    let flows = MapHandle::from_pinned_path(directory.join("flows"));
    flows.map(|flows| moved(&flows, pins::is_our_layout(directory))).unwrap_or_default()
}

/// Returns the connections of a flow table that have had a handoff. The records of another layout cannot be read: then
/// all connections of the table are returned.
pub(crate) fn moved(flows: &MapHandle, is_our_layout: bool) -> Vec<FlowKey> {
    let is_moved =
        |flow: &[u8]| !is_our_layout || Flow::read_from_bytes(flow).map_or(true, |flow| flow.spaces.made > 0);
    pins::entries(flows, MapFlags::LOCK)
        .filter(|(_, flow)| is_moved(flow))
        .filter_map(|(key, _)| FlowKey::read_from_bytes(&key).ok())
        .collect()
}
