//! Tests of shortcuts (bodies that the backend sends straight to the client) on TLS connections, with real client
//! programs.

mod bed;
mod browser;
mod client;
mod clients;
mod early;
mod failover;
mod handshakes;
mod http2;
mod midway;
mod nonces;
mod on_demand;
mod opened;
mod proof;
mod secrets;
#[path = "../service/mod.rs"]
mod service;
