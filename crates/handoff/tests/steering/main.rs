//! The steering programs, packet by packet (bpf/), and their loader. All of it takes root; without, every test says
//! so and ends.

mod backend;
mod begun;
mod behind;
mod claims;
mod cost;
mod egress;
mod host;
mod icmp;
mod ingress;
mod loader;
mod model;
mod native;
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
