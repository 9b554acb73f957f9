//! Requests of a program under `shunt run` about its own connections, made by setsockopt(2) and getsockopt(2)
//! (include/shunt.h, SHUNT_SOL). BPF programs answer them: those of crates/handoff for handoffs, and those of
//! crates/negotiation for everything else. Two such programs send *frames* on their connection: runs of bytes, or
//! references in place of bytes. The *account* of a connection is what a program has to know of its frames to go on. A
//! *handoff* lets another machine send the next bytes of a connection.

use std::io;
use std::os::fd::AsFd;

use shunt_wire::options::{self, CARRIED_BYTES};
use zerocopy::{Immutable, IntoBytes};

use crate::sockopt;

/// Hands off the next bytes of a connection: another machine sends them. `begin` is a struct shunt_begin.
///
/// # Errors
/// Returns an error where the handoff is refused. On `PermissionDenied` this machine has to send the bytes itself.
pub fn append<T: IntoBytes + Immutable>(socket: impl AsFd, begin: &T) -> io::Result<()> {
    sockopt::set(socket, options::SOL, options::APPEND, begin)
}

/// Takes back a handoff that [`append`] began. `handoff` is its name in struct shunt_begin.
///
/// # Errors
/// Returns an error where the client has some of the handoff's bytes, or the program has written more bytes after them.
pub fn undo(socket: impl AsFd, handoff: u64) -> io::Result<()> {
    sockopt::set(socket, options::SOL, options::UNDO, &handoff)
}

/// Makes the BPF programs of crates/handoff note the handshakes of a listening socket's clients. So even the first
/// response on a connection can be handed off.
///
/// # Errors
/// Returns an error where no handoffs are possible on this machine, or the socket is not a TCP socket.
pub fn watch(socket: impl AsFd) -> io::Result<()> {
    sockopt::set(socket, options::SOL, options::WATCH, &1u32)
}

/// Ends a handoff that [`append`] began, before the client has all of it. After that, only a reset may follow on the
/// connection.
///
/// # Errors
/// Returns the kernel's error of setsockopt(2).
pub fn cancel(socket: impl AsFd) -> io::Result<()> {
    sockopt::set(socket, options::SOL, options::CANCEL, &1u32)
}

/// Ends a connection at once, by connect(2) with AF_UNSPEC. All processes that have a descriptor of it notice that.
///
/// # Errors
/// Returns the kernel's error of connect(2).
pub fn disconnect(socket: impl AsFd) -> io::Result<()> {
    Ok(rustix::net::connect_unspec(socket)?)
}

/// Marks a TCP socket that is neither connected nor listening: its handshakes will say that its program runs under
/// `shunt run`.
///
/// # Errors
/// Returns an error where no BPF program negotiates on this machine, the socket is not a TCP socket, or the user may
/// not mark sockets.
pub fn speak(socket: impl AsFd) -> io::Result<()> {
    sockopt::set(socket, options::SOL, options::SPEAK, &1u32)
}

/// Takes back the mark of a listener: connections that clients make to it from now on carry plain bytes, no frames.
///
/// The BPF program refuses this for a moment if another listener at the same address and port is leaving on another
/// processor. So the call is repeated for up to 20 ms. Without a BPF program on this machine, nothing is done.
pub fn speak_no_more(socket: impl AsFd) {
    const TRIES: u32 = 20;
    for _ in 0..TRIES {
        let taken = sockopt::set(&socket, options::SOL, options::SPEAK, &0u32);
        if !taken.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied) {
            return;
        }
        let _ = rustix::thread::nanosleep(&rustix::thread::Timespec { tv_sec: 0, tv_nsec: 1_000_000 });
    }
}

/// Whether the programs at both ends of a connection run under `shunt run`. False where no BPF program answers.
pub fn speaks(socket: impl AsFd) -> bool {
    sockopt::set(socket, options::SOL, options::SPEAKS, &1u32).is_ok()
}

/// Whether all processes have closed a connection on which [`speaks`] was true. `asking` is any TCP socket, and
/// `cookie` the connection's SO_COOKIE. After the last close, returns true once for each successful [`adopt`],
/// [`adopt_too`] or [`take`] by the caller's user, and false in further calls.
pub fn ended(asking: impl AsFd, cookie: u64) -> bool {
    sockopt::set(asking, options::SOL, options::ENDED, &cookie).is_ok()
}

/// Whether the caller is the first program that keeps an account of a connection's frames. [`speaks`] must be true for
/// the connection. Also true where the kernel cannot tell, because the BPF programs in it are an older agent's.
pub fn adopt(socket: impl AsFd) -> bool {
    let asked = sockopt::set(socket, options::SOL, options::ADOPT, &1u32);
    asked.map_or_else(|error| error.kind() != io::ErrorKind::PermissionDenied, |()| true)
}

/// Makes [`ended`] tell this caller, too, of the connection's end. For a program that keeps state of the connection,
/// although [`adopt`] returned false and the program did not [`take`] the account.
pub fn adopt_too(socket: impl AsFd) {
    let _ = sockopt::set(socket, options::SOL, options::ADOPT, &options::ADOPT_TOO);
}

/// Stores the account of a connection's frames with its socket. The next program that uses the connection gets it by
/// [`take`].
///
/// # Errors
/// Returns an error where [`speaks`] is false for the connection.
pub fn carry(socket: impl AsFd, account: &[u8; CARRIED_BYTES]) -> io::Result<()> {
    sockopt::set(socket, options::SOL, options::CARRY, account)
}

/// Takes the account that [`carry`] has stored. Of several callers at the same time only one gets it.
///
/// # Errors
/// Returns an error where no account is stored with the connection.
pub fn take(socket: impl AsFd) -> io::Result<[u8; CARRIED_BYTES]> {
    sockopt::get(socket, options::SOL, options::CARRY)
}
