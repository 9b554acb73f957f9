//! A program's questions about its own connections (include/shunt.h, SHUNT_SPEAK), as the programs of
//! crates/negotiation answer them.

use std::io;
use std::os::fd::AsFd;

use zerocopy::{Immutable, IntoBytes};

use crate::sockopt;

const SHUNT_SOL: i32 = 0x5348_5554;
const SHUNT_SPEAK: i32 = 16;
const SHUNT_SPEAKS: i32 = 17;
const SHUNT_ENDED: i32 = 18;
const SHUNT_ADOPT: i32 = 19;
const SHUNT_ADOPT_TOO: u32 = 2;
const SHUNT_CARRY: i32 = 20;

/// Of an account of a connection's frames.
pub const CARRIED_BYTES: usize = 304;

const SHUNT_CANCEL: i32 = 2;
const SHUNT_APPEND: i32 = 5;
const SHUNT_UNDO: i32 = 6;
const SHUNT_WATCH: i32 = 7;

/// Has another machine send the next bytes of a connection: `begin` is a struct shunt_begin.
///
/// # Errors
/// Why not: `PermissionDenied`, where this one must.
pub fn append<T: IntoBytes + Immutable>(socket: impl AsFd, begin: &T) -> io::Result<()> {
    sockopt::set(socket, SHUNT_SOL, SHUNT_APPEND, begin)
}

/// Takes back what [`append`] has begun, where nobody has sent any of it.
///
/// # Errors
/// The client has some of it, or something was written behind it.
pub fn undo(socket: impl AsFd, handoff: u64) -> io::Result<()> {
    sockopt::set(socket, SHUNT_SOL, SHUNT_UNDO, &handoff)
}

/// Has the handshakes of clients of a socket that listens noted, so that their first responses may be handed off.
///
/// # Errors
/// Nobody hands off here, or the socket is none of TCP.
pub fn watch(socket: impl AsFd) -> io::Result<()> {
    sockopt::set(socket, SHUNT_SOL, SHUNT_WATCH, &1u32)
}

/// Ends what [`append`] has begun, in the middle: then only a reset may follow.
///
/// # Errors
/// The kernel's.
pub fn cancel(socket: impl AsFd) -> io::Result<()> {
    sockopt::set(socket, SHUNT_SOL, SHUNT_CANCEL, &1u32)
}

/// Ends a connection at once, and has whoever has it hear of that (connect(2) with AF_UNSPEC).
///
/// # Errors
/// The kernel's.
pub fn disconnect(socket: impl AsFd) -> io::Result<()> {
    Ok(rustix::net::connect_unspec(socket)?)
}

/// Has a TCP socket that is neither connected nor listening say in its handshakes that its program is under Shunt.
///
/// # Errors
/// Nobody negotiates here.
pub fn speak(socket: impl AsFd) -> io::Result<()> {
    sockopt::set(socket, SHUNT_SOL, SHUNT_SPEAK, &1u32)
}

/// Has a listener say no more that its program is under Shunt: connections that are made from now on are not framed.
pub fn speak_no_more(socket: impl AsFd) {
    let _ = sockopt::set(socket, SHUNT_SOL, SHUNT_SPEAK, &0u32);
}

/// Whether the programs at both ends of a connection are under Shunt. No, where nobody has said yes.
pub fn speaks(socket: impl AsFd) -> bool {
    sockopt::set(socket, SHUNT_SOL, SHUNT_SPEAKS, &1u32).is_ok()
}

/// Whether a connection on which both ends spoke has been closed by all processes that had it, asked through any TCP
/// socket. Yes, once for each [`adopt`] and [`take`] of the caller's user.
pub fn ended(asking: impl AsFd, cookie: u64) -> bool {
    sockopt::set(asking, SHUNT_SOL, SHUNT_ENDED, &cookie).is_ok()
}

/// Of a connection on which both ends spoke: whether the caller is the first who keeps account of its frames. Yes, too, where
/// nobody knows, which is under programs of an older agent.
pub fn adopt(socket: impl AsFd) -> bool {
    let asked = sockopt::set(socket, SHUNT_SOL, SHUNT_ADOPT, &1u32);
    asked.map_or_else(|error| error.kind() != io::ErrorKind::PermissionDenied, |()| true)
}

/// The caller keeps something of a connection that it did not adopt, nor take: it will be told of the end, too ([`ended`]).
pub fn adopt_too(socket: impl AsFd) {
    let _ = sockopt::set(socket, SHUNT_SOL, SHUNT_ADOPT, &SHUNT_ADOPT_TOO);
}

/// Leaves the account of a connection's frames with it, for whoever has it next: [`take`].
///
/// # Errors
/// Not a connection on which both ends spoke.
pub fn carry(socket: impl AsFd, account: &[u8; CARRIED_BYTES]) -> io::Result<()> {
    sockopt::set(socket, SHUNT_SOL, SHUNT_CARRY, account)
}

/// Takes what [`carry`] has left. One of those who ask at the same time gets it.
///
/// # Errors
/// Nothing is there.
pub fn take(socket: impl AsFd) -> io::Result<[u8; CARRIED_BYTES]> {
    sockopt::get(socket, SHUNT_SOL, SHUNT_CARRY)
}
