//! Requests of a program about its own connections, made by setsockopt(2) and getsockopt(2) (include/shunt.h,
//! SHUNT_SOL). BPF programs answer them: those of crates/negotiation, and for handoffs those of crates/handoff.

use std::io;
use std::os::fd::AsFd;

use shunt_wire::options::{self, CARRIED_BYTES};
use zerocopy::{Immutable, IntoBytes};

use crate::sockopt;

/// Hands off the next bytes of a connection: another machine sends them. `begin` is a struct shunt_begin.
///
/// # Errors
/// Returns why the handoff is refused. On `PermissionDenied` this machine has to send the bytes itself.
pub fn append<T: IntoBytes + Immutable>(socket: impl AsFd, begin: &T) -> io::Result<()> {
    sockopt::set(socket, options::SOL, options::APPEND, begin)
}

/// Takes back a handoff begun by [`append`], of which nothing has been sent.
///
/// # Errors
/// Returns an error where the client has some of its bytes, or something was written behind it.
pub fn undo(socket: impl AsFd, handoff: u64) -> io::Result<()> {
    sockopt::set(socket, options::SOL, options::UNDO, &handoff)
}

/// Has the handshakes of a listening socket's clients noted, so that their first responses can be handed off.
///
/// # Errors
/// Returns an error where no handoffs are possible on this machine, or the socket is not a TCP socket.
pub fn watch(socket: impl AsFd) -> io::Result<()> {
    sockopt::set(socket, options::SOL, options::WATCH, &1u32)
}

/// Ends a handoff begun by [`append`] in the middle. After that only a reset may follow on the connection.
///
/// # Errors
/// Returns the kernel's error of setsockopt(2).
pub fn cancel(socket: impl AsFd) -> io::Result<()> {
    sockopt::set(socket, options::SOL, options::CANCEL, &1u32)
}

/// Ends a connection at once, in a manner that all processes with a descriptor of it notice (connect(2) with
/// AF_UNSPEC).
///
/// # Errors
/// Returns the kernel's error of connect(2).
pub fn disconnect(socket: impl AsFd) -> io::Result<()> {
    Ok(rustix::net::connect_unspec(socket)?)
}

/// Marks a TCP socket that is neither connected nor listening: its handshakes say that its program is under Shunt.
///
/// # Errors
/// Returns an error where no negotiation program is loaded.
pub fn speak(socket: impl AsFd) -> io::Result<()> {
    sockopt::set(socket, options::SOL, options::SPEAK, &1u32)
}

/// Takes back the mark of a listener: connections made from now on are not framed.
pub fn speak_no_more(socket: impl AsFd) {
    let _ = sockopt::set(socket, options::SOL, options::SPEAK, &0u32);
}

/// Whether the programs at both ends of a connection are under Shunt. False where no program has answered.
pub fn speaks(socket: impl AsFd) -> bool {
    sockopt::set(socket, options::SOL, options::SPEAKS, &1u32).is_ok()
}

/// Whether all processes have closed a connection on which both ends were under Shunt. `asking` is any TCP socket.
/// Returns true once for each [`adopt`] and [`take`] by the caller's user.
pub fn ended(asking: impl AsFd, cookie: u64) -> bool {
    sockopt::set(asking, options::SOL, options::ENDED, &cookie).is_ok()
}

/// Whether the caller is the first to keep account of the frames of a connection whose ends are both under Shunt. Also
/// true where the kernel cannot tell, because an older agent has loaded its programs.
pub fn adopt(socket: impl AsFd) -> bool {
    let asked = sockopt::set(socket, options::SOL, options::ADOPT, &1u32);
    asked.map_or_else(|error| error.kind() != io::ErrorKind::PermissionDenied, |()| true)
}

/// Registers the caller for the end of a connection ([`ended`]) that it has neither adopted nor taken, but of which it
/// has state.
pub fn adopt_too(socket: impl AsFd) {
    let _ = sockopt::set(socket, options::SOL, options::ADOPT, &options::ADOPT_TOO);
}

/// Leaves the account of a connection's frames with its socket. The next process that uses the connection gets it by
/// [`take`].
///
/// # Errors
/// Returns an error where not both ends of the connection are under Shunt.
pub fn carry(socket: impl AsFd, account: &[u8; CARRIED_BYTES]) -> io::Result<()> {
    sockopt::set(socket, options::SOL, options::CARRY, account)
}

/// Takes the account that [`carry`] has left. Of several callers at the same time only one gets it.
///
/// # Errors
/// Returns an error where no account is left there.
pub fn take(socket: impl AsFd) -> io::Result<[u8; CARRIED_BYTES]> {
    sockopt::get(socket, options::SOL, options::CARRY)
}
