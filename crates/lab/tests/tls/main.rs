//! Shortcuts on TLS connections, with real clients.

mod bed;
mod client;
mod clients;
mod failover;
mod midway;
mod nonces;
mod opened;
#[path = "../service/mod.rs"]
mod service;
