//! Handoffs of absent bytes that a program writes to a client. *Absent* bytes are those for which the program's memory
//! only stands; their *holder* has them, a store on another machine. The holder's *agent* (Shunt's daemon on the other
//! machine) sends the bytes on the client's own connection. So this machine never has the bytes, only references to
//! them (ARCHITECTURE.md, "On-demand buffers"). The range of sequence numbers that the agent sends is a *region*. A
//! *handoff* has one region. The kernel begins a region only with *proof* that the client's packets pass the steering
//! programs. These BPF programs send the client's ACKs on to the holder's machine.
//!
//! The program's socket stays what it was. Bytes that are written behind absent ones wait in it, by the kernel's doing
//! (SHUNT_APPEND). So nothing is queued here, and the kernel alone handles EAGAIN, poll, close and the end of the
//! process.
//!
//! ```text
//!   write ---> a region begins, or grows (setsockopt)         the program's turn ends: it waits for events
//!                   |                                                    |
//!                   +-- refused: fetched and written (outside.rs)        +--> one message to the agent for each region
//! ```
//!
//! [`handings`] keeps the handoffs under way. [`sealed`] begins those of TLS connections. [`rescue`] handles those that
//! fail: it fetches and writes their bytes, or resets the connection.

mod handing;
mod handings;
pub mod rescue;
mod sealed;

use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use libc::iovec;
use rustix::net::ipproto;
use shunt_odb::absent::Piece;
use shunt_odb::fetch::Call;
use shunt_odb::store::usage::Counted;
use shunt_sys::sockopt;
use smallvec::SmallVec;

use crate::connections::runtime::Runtime;
use crate::connections::waiting;
use crate::memory::outside;
use crate::system::counts::count;
use crate::system::inside::{Held, Inside, Lock};
use crate::system::kernel::{self, Errno, borrow};
use crate::system::parts::{Parts, addresses, length, of};
use crate::system::ranks::Rank;
use crate::system::real::{errno, set_errno};
use handing::bytes;
pub use handings::Handings;
pub use sealed::{Client, Turn, can_begin, seal};

/// Number of bytes that are fetched at a time for a client to which other machines send, too. While another machine
/// sends, the client's socket takes few bytes. Bytes that were fetched and not taken cannot be handed off any more.
const BESIDE_AT_ONCE: usize = 32 << 10;

/// By descriptor: one of the values below, which say whether it is a client's connection on which another machine could
/// send.
static CLIENTS: [AtomicU8; 1 << 20] = [const { AtomicU8::new(UNKNOWN) }; 1 << 20];
const UNKNOWN: u8 = 0;
/// Value for a TCP connection that was not prepared for handoffs yet.
const POSSIBLE: u8 = 1;
/// Value for a connection that was prepared for handoffs ([`prepare`]).
const PREPARED: u8 = 2;
/// Value for all else: no client's connection, or one on which no other machine can send.
const NEVER: u8 = 3;
/// Value after the first refusal of a handoff because there was no proof that the client's packets pass the steering
/// programs. Each further such refusal adds 1.
const UNPROVEN: u8 = 4;
/// Last of the values that count these refusals. After one more refusal, no handoff is asked for again: the client's
/// packets take a path past the steering programs.
const UNPROVEN_LAST: u8 = UNPROVEN + 15;

/// Number of regions that have begun and that no agent has been told of. It is nearly always 0.
static BEGUN: AtomicUsize = AtomicUsize::new(0);

/// The handoffs under way.
static HANDINGS: LazyLock<Lock<Handings>> = LazyLock::new(|| Lock::new(Rank::Handings, Handings::default()));

/// A write, cut into three parts: its first run of absent bytes that one machine has, and the parts before and behind
/// this run.
struct Cut {
    before: Parts,
    run: SmallVec<[Piece; 8]>,
    behind: Parts,
}

impl Cut {
    /// Returns `None` if nothing of the write is absent.
    fn of(runtime: &Runtime, iov: &[iovec]) -> Option<Self> {
        let mut cut = Self { before: Parts::new(), run: SmallVec::new(), behind: Parts::new() };
        for part in iov.iter().filter(|part| part.iov_len > 0) {
            let Range { start: mut at, end } = addresses(part);
            for piece in runtime.memory.absent_within(&(at..end)) {
                cut.add_present(at..piece.addresses.start);
                at = piece.addresses.end;
                cut.add_absent(piece);
            }
            cut.add_present(at..end);
        }
        (!cut.run.is_empty()).then_some(cut)
    }

    fn add_present(&mut self, addresses: Range<usize>) {
        if !addresses.is_empty() {
            let side = if self.run.is_empty() { &mut self.before } else { &mut self.behind };
            side.push(of(&addresses));
        }
    }

    fn add_absent(&mut self, piece: Piece) {
        let holder = |piece: &Piece| piece.hold.payload().holder;
        let fits = self.run.first().is_none_or(|first| holder(first) == holder(&piece));
        if fits && self.behind.is_empty() && self.run.len() < shunt_wire::parts::PARTS_MAX {
            self.run.push(piece);
        } else {
            self.add_present(piece.addresses);
        }
    }

    /// Memory of the run, and of everything behind it.
    fn rest(&self) -> Parts {
        self.run.iter().map(|piece| of(&piece.addresses)).chain(self.behind.iter().copied()).collect()
    }
}

fn lock() -> Held<'static, Handings> {
    HANDINGS.lock()
}

/// Returns `None` if another thread has the lock.
fn try_lock() -> Option<Held<'static, Handings>> {
    HANDINGS.try_lock()
}

/// Tells the agent of all handoffs that have begun, and holds the lock for a fork: nothing changes until the value is
/// dropped.
pub fn hold_still() -> Held<'static, Handings> {
    let mut handings = lock();
    handings.tell_all();
    handings
}

/// Writes memory that may be absent to a descriptor that may be a client's. `emit` makes the system call.
pub fn write(
    runtime: &'static Runtime,
    fd: RawFd,
    iov: &[iovec],
    flags: i32,
    emit: impl Fn(&[iovec]) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    let cut = if may_be_client(fd) { Cut::of(runtime, iov) } else { None };
    let at_once = if is_prepared(fd) { BESIDE_AT_ONCE } else { outside::AT_ONCE };
    let comes_again = || waiting::comes_again(fd, flags);
    let call = &Call::new(&comes_again);
    let Some(cut) = cut else { return outside::write(&runtime.memory, iov, at_once, call, emit) };
    let before = length(&cut.before);
    if before > 0 {
        let sent = outside::write(&runtime.memory, &cut.before, at_once, call, &emit)?;
        if sent < before {
            return Ok(sent);
        }
    }
    let handed = lock().hand_off(runtime, fd, &cut.run, flags);
    let (handed, rest) = if handed { (bytes(&cut.run) as usize, cut.behind) } else { (0, cut.rest()) };
    count(Counted::HandedOff, handed);
    runtime.memory.return_shares();
    let done = before + handed;
    if rest.is_empty() {
        return Ok(done);
    }
    match outside::write(&runtime.memory, &rest, at_once, call, emit) {
        Ok(sent) => Ok(done + sent),
        // If bytes cannot be fetched any more, the program is told at once. After a short write the program would wait
        // for room, and nothing would wake it.
        Err(errno) if done > 0 && errno != libc::ECONNRESET => Ok(done),
        Err(errno) => Err(errno),
    }
}

fn client(fd: RawFd) -> Option<&'static AtomicU8> {
    CLIENTS.get(usize::try_from(fd).ok()?)
}

fn is_prepared(fd: RawFd) -> bool {
    client(fd).is_some_and(|client| client.load(Ordering::Relaxed) == PREPARED)
}

fn may_be_client(fd: RawFd) -> bool {
    let Some(client) = client(fd) else { return false };
    if client.load(Ordering::Relaxed) == UNKNOWN {
        let is_tcp = rustix::net::sockopt::socket_protocol(borrow(fd)) == Ok(Some(ipproto::TCP));
        client.store(if is_tcp { POSSIBLE } else { NEVER }, Ordering::Relaxed);
    }
    client.load(Ordering::Relaxed) != NEVER
}

/// Forgets a descriptor: its number stands for another file from now on.
pub fn forget(fd: RawFd) {
    if let Some(client) = client(fd)
        && client.load(Ordering::Relaxed) != UNKNOWN
    {
        client.store(UNKNOWN, Ordering::Relaxed);
    }
}

/// Notes before connect(2) that the other end is a server, so that nothing is handed off on the connection. The
/// server's packets may come in by an interface where packets are not steered.
pub fn connecting(fd: RawFd) {
    if let Some(client) = client(fd) {
        client.store(NEVER, Ordering::Relaxed);
    }
}

/// Copies what is known of a descriptor, after dup(2) and similar calls.
pub fn duplicated(from: RawFd, to: RawFd) {
    if let (Some(from), Some(to)) = (client(from), client(to)) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Notes that no other machine can send on this connection. Does nothing as long as written bytes have not left: a
/// later handoff may succeed then.
fn refuse(fd: RawFd) {
    if let Some(client) = client(fd)
        && !unsent(fd)
    {
        client.store(NEVER, Ordering::Relaxed);
    }
}

/// Notes that the kernel has refused a handoff because there is no proof ([`UNPROVEN`]). The packets that pass until
/// the next write may be proof enough.
fn refuse_for_now(fd: RawFd) {
    if let Some(client) = client(fd) {
        let next = match client.load(Ordering::Relaxed) {
            UNPROVEN_LAST.. => NEVER,
            refused @ UNPROVEN.. => refused + 1,
            _ => UNPROVEN,
        };
        client.store(next, Ordering::Relaxed);
    }
}

/// Prepares a connection for its first handoff. TCP_NODELAY: bytes leave at once if the client has room, because a
/// header that waited for an ACK would keep a handoff from beginning. TCP_NOTSENT_LOWAT: there is room for more only
/// when all has left. So a program that is faster than its client comes back when the next handoff can begin, and not
/// earlier.
fn prepare(fd: RawFd) {
    let Some(client) = client(fd).filter(|client| client.load(Ordering::Relaxed) == POSSIBLE) else { return };
    let _ = rustix::net::sockopt::set_tcp_nodelay(borrow(fd), true);
    let _ = sockopt::set_i32(borrow(fd), libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, 1);
    client.store(PREPARED, Ordering::Relaxed);
}

/// Whether bytes were written that the kernel has not sent yet.
fn unsent(fd: RawFd) -> bool {
    /// Defined in <linux/sockios.h>.
    const SIOCOUTQNSD: usize = 0x894b;
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes one int, which lives in this frame.
    let asked = unsafe { kernel::call(libc::SYS_ioctl, [fd as usize, SIOCOUTQNSD, &raw mut bytes as usize, 0, 0, 0]) };
    asked.is_err() || bytes > 0
}

/// Tells the agent of the handoffs that have begun. Called when the program is about to wait, or to end.
#[inline]
pub fn turn_ends() {
    if BEGUN.load(Ordering::Relaxed) > 0 {
        tell();
    }
}

#[cold]
fn tell() {
    if let Some(_inside) = Inside::enter() {
        let before = errno();
        lock().tell_all();
        set_errno(before);
    }
}

/// Handles reports of agents, and handoffs that no call has looked at for a while. Called several times a second.
pub fn tend(runtime: &'static Runtime) {
    let Some(mut handings) = try_lock() else { return };
    let failed = handings.tend(runtime);
    drop(handings);
    failed.into_iter().for_each(|failed| rescue::start(runtime, failed));
    runtime.memory.return_shares();
}

/// Whether a write of the program has to be refused (EAGAIN), because a rescue is under way on the connection. Called
/// before each write to a descriptor, with the flags of the program's call. If that call may wait, this waits for the
/// rescue's end, and returns false. When the rescue is over, the program is told that there is room.
#[inline]
pub fn is_full_of_rescue(fd: RawFd, flags: i32) -> bool {
    rescue::any() && rescue::is_full(fd, flags)
}
