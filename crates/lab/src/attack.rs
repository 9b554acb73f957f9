//! `shunt-lab bench attack`: honest clients load a service. Meanwhile attackers of every kind that can reach the
//! service attack it.
//!
//! A stranger on the clients' network forges packets ([`outside`]). A client behind a slow link acknowledges what it
//! has not received, and opens connections that it does not read ([`greedy`]). Other users of the service's machines
//! write to the Unix sockets of the agents ([`locals`]). An *agent* is shuntd, Shunt's daemon on each machine. A
//! hostile *peer* floods the agents: it plays another machine's agent, and has a valid certificate ([`peer`]). The
//! honest clients ([`honest`]) compare every byte.
//!
//! A second lab has plain nginx, and the stranger and the greedy client attack it in the same way. The two services
//! take turns, and their results are compared. All attacks have a limited rate, and stay in the network namespaces of
//! the two labs. One seed decides all random choices.

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

/// State that the attackers share.
#[derive(Debug, Default)]
struct Hostile {
    over: AtomicBool,
    /// Number of forged packets that were sent.
    packets: AtomicU64,
    /// Number of messages that were sent to agents' Unix sockets.
    messages: AtomicU64,
    /// Number of frames, valid or not, in the floods that the hostile peer has written as a whole. HELLO is not
    /// counted. Not all frames reach an agent.
    frames: AtomicU64,
}
