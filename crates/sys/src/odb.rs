//! A program's questions about its own connections (include/shunt.h, SHUNT_SPEAK), as the programs of
//! crates/negotiation answer them.

use std::io;
use std::os::fd::AsFd;

use crate::sockopt;

const SHUNT_SOL: i32 = 0x5348_5554;
const SHUNT_SPEAK: i32 = 16;
const SHUNT_SPEAKS: i32 = 17;
const SHUNT_ENDED: i32 = 18;

/// Has a TCP socket that is neither connected nor listening say in its handshakes that its program is under Shunt.
///
/// # Errors
/// Nobody negotiates here.
pub fn speak(socket: impl AsFd) -> io::Result<()> {
    sockopt::set(socket, SHUNT_SOL, SHUNT_SPEAK, &1u32)
}

/// Whether the programs at both ends of a connection are under Shunt. No, where nobody has said yes.
pub fn speaks(socket: impl AsFd) -> bool {
    sockopt::set(socket, SHUNT_SOL, SHUNT_SPEAKS, &1u32).is_ok()
}

/// Whether a connection on which both ends spoke has been closed by all processes that had it, asked through any TCP
/// socket. Yes, once, to whoever asks first.
pub fn ended(asking: impl AsFd, cookie: u64) -> bool {
    sockopt::set(asking, SHUNT_SOL, SHUNT_ENDED, &cookie).is_ok()
}
