//! Connections with other agents, whichever side has made them.

pub(crate) mod arrived;
pub(crate) mod link;
