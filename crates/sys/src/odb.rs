//! A program's questions about its own connections (include/shunt.h, SHUNT_SPEAK), as the programs of
//! crates/negotiation answer them.

use std::io;
use std::os::fd::AsFd;

use crate::sockopt;

const SHUNT_SOL: i32 = 0x5348_5554;
const SHUNT_SPEAK: i32 = 16;
const SHUNT_SPEAKS: i32 = 17;

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
