//! Counters, for `shunt stats` and for Prometheus, and the log.

pub(crate) mod counters;
pub(crate) mod exposition;
pub(crate) mod gone;
pub mod log;
pub(crate) mod metrics;
