//! `shunt bench attack`: honest clients load a service while everybody attacks it who can reach it.
//!
//! A stranger on the clients' network makes up packets ([`outside`]), a client behind a thin link acknowledges what it has
//! not got and opens connections that it does not read ([`greedy`]), other users talk to the agents' Unix sockets
//! ([`locals`]), and a peer with a certificate floods the agents ([`peer`]). The honest clients ([`honest`]) compare every
//! byte. Beside it stands plain nginx, attacked by the same packets: the two take turns, and are judged one beside the
//! other. Everything is bounded in rate, and in namespaces of two labs; one seed decides all that is left to chance.

mod command;
mod forge;
mod greedy;
mod honest;
mod locals;
mod outcome;
mod outside;
mod peer;
mod side;
mod stalled;
mod wiretap;

use std::sync::atomic::{AtomicBool, AtomicU64};

pub use command::Attack;

/// What attackers share.
#[derive(Debug, Default)]
struct Hostile {
    over: AtomicBool,
    /// Packets that were made up.
    packets: AtomicU64,
    /// Messages to agents' Unix sockets.
    messages: AtomicU64,
    /// Frames to agents.
    frames: AtomicU64,
}
