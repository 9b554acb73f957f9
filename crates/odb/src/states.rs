//! Memory for the states of a program's connections, and behind these for what the program has learnt about its
//! receivers ([`crate::learnt`]). `shunt run` makes the first such memory. A process that becomes another user makes a
//! new one (crates/process).

use std::io;

use shunt_sys::shared::SharedMemory;
use shunt_wire::options::CARRIED_BYTES;

use crate::learnt::TABLE_BYTES;

/// Size of a connection's state in bytes: its socket's cookie (8), two locks (4 each), and all the rest, which a
/// process of another user gets when it takes over the connection ([`CARRIED_BYTES`]).
pub const STATE_BYTES: usize = 16 + CARRIED_BYTES;
/// Most connections that a program and its child processes may have with other programs under Shunt (`shunt run`).
const STATES: usize = 65_536;
/// Size of the memory in bytes. A library that lays out states differently uses another size.
pub const BYTES: usize = STATES * STATE_BYTES + TABLE_BYTES;

/// Makes new memory, owned by this process's user.
///
/// # Errors
/// Returns the kernel's error of memfd_create(2), ftruncate(2), fcntl(2) or mmap(2).
pub fn new() -> io::Result<SharedMemory> {
    SharedMemory::create("shunt-connections", BYTES)
}
