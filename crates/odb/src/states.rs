//! Memory for the states of a program's connections, with what it has learnt of its peers behind them ([`crate::learnt`]):
//! `shunt run` makes the first, and a process that becomes another user's the next (crates/process).

use std::io;

use shunt_sys::odb::CARRIED_BYTES;
use shunt_sys::shared::SharedMemory;

use crate::learnt::TABLE_BYTES;

/// Bytes of a state: a cookie, two locks, and what another user's process gets of it.
pub const STATE_BYTES: usize = 16 + CARRIED_BYTES;
/// Connections that a program and those that it starts may have with others under Shunt.
const STATES: usize = 65_536;
/// Bytes of the memory. A library that lays states out otherwise makes it of another size.
pub const BYTES: usize = STATES * STATE_BYTES + TABLE_BYTES;

/// New memory, of this process's user.
///
/// # Errors
/// The kernel's.
pub fn new() -> io::Result<SharedMemory> {
    SharedMemory::create("shunt-connections", BYTES)
}
