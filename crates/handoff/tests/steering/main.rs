//! Tests of the steering programs (bpf/), packet by packet, and of their loader. They need root: without it, every test
//! fails and says so.

mod backend;
mod begun;
mod behind;
mod claims;
mod cost;
mod egress;
mod foreign;
mod host;
mod icmp;
mod ingress;
mod layouts;
mod loader;
mod model;
mod native;
mod nft;
mod plain;
mod predicted;
mod programs;
mod proof;
mod seeded;
mod segment;
mod sockets;
mod spacing;
mod steered;
mod sweep;
mod vlan;
