//! This machine as a frontend: its steering programs (BPF), the routes to backends, and fetches from them.

pub(crate) mod census;
pub(crate) mod fetching;
pub(crate) mod steering;
pub(crate) mod uplinks;
