//! Tests of the steering programs and of their loader. The steering programs (bpf/) translate and redirect the packets
//! of client connections. They are run packet by packet, and with real sockets. Almost all of these tests need root:
//! without root they fail and say so.

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
mod losses;
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
