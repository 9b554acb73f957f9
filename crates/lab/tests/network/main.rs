//! A service with Shunt over realistic networks and for realistic clients: every byte arrives, and long bodies take the
//! shortcut (straight from the backend to the client).

#[path = "../service/mod.rs"]
mod service;

mod acks;
mod bbr;
mod ecn;
mod links;
mod path_mtu;
mod tcp_options;
mod times;
mod way;
mod windows;
