//! This machine as a backend: its steering programs (BPF), the files that it sends, and the routes to clients.

pub(crate) mod digests;
pub(crate) mod paths;
pub(crate) mod serving;
pub(crate) mod steering;
pub(crate) mod stored;
