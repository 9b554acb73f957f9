//! TLS connections of a program whose library is OpenSSL 3. *Absent* bytes are bytes for which the program's memory
//! only stands; a store on another machine has them, their *holder*. If the program writes absent bytes to a TLS 1.3
//! client, the *agent* (Shunt's daemon) of the holder's machine seals and sends them (ARCHITECTURE.md, "TLS 1.3",
//! "On-demand buffers"). In such a *handoff*, that agent sends the bytes on the client's own connection.
//!
//! The nginx module's C files about OpenSSL (openssl/shunt_tls*.c) are compiled for this library, too. They count what
//! OpenSSL writes, and give away the keys of one generation of a connection: the write keys between two KeyUpdates. The
//! order of events is simpler here than in the module. Bytes that OpenSSL writes behind a payload wait in the kernel
//! ([`crate::bypass`]), so OpenSSL goes on at once, in the next generation.
//!
//! ```text
//!   SSL_write:  | header, present       | body, absent                       | present again
//!               | OpenSSL, KeyUpdate    | region of sealed records, holder's | KeyUpdate, OpenSSL
//!    generation          g                        g + 1                               g + 2
//! ```

mod elf;
pub mod functions;
pub mod handles;
pub mod libraries;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::Range;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::sockopt::Timeout;
use shunt_odb::absent::Piece;
use shunt_odb::segment::now_ms;
use shunt_sys::erase::{Erased, wipe_stack};
use shunt_wire::local::Tls;
use smallvec::SmallVec;
use zerocopy::FromZeros;

pub use self::handles::{Context, Ssl};
use self::libraries::{Candidate, Of};
use crate::bypass::{self, Client, Turn};
use crate::connections::runtime::Runtime;
use crate::connections::waiting::{has_room, is_over, waits};
use crate::memory::any_absent;
use crate::system::inside::{Held, Inside, Lock};
use crate::system::kernel::borrow;
use crate::system::ranks::Rank;
use crate::system::real::{self, set_errno};

/// `SHUNT_TLS_READY` of openssl/shunt_tls.h.
const READY: c_int = 0;
/// Number of times that a write waits for room in the socket and asks again for a handoff, before its bytes are
/// fetched.
const PATIENCE: u32 = 8;
/// If no handoff is possible, a write's bytes are fetched together with absent memory for bytes behind them in the
/// payload. This is the distance up to which such memory may begin.
const AHEAD_BYTES: u64 = 256 << 10;
/// Most functions of OpenSSL that the C files may call: the length of the table of their addresses.
const FUNCTIONS_MAX: usize = 96;

unsafe extern "C" {
    fn shunt_openssl_find(
        find: unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void,
        library: *mut c_void,
        found: *mut *mut c_void,
        room: usize,
    ) -> c_int;
    fn shunt_openssl_use(found: *const *mut c_void) -> c_int;
    fn shunt_openssl_socket(ssl: *mut Ssl) -> c_int;
    fn shunt_openssl_unwatch(ssl: *mut Ssl);
    fn shunt_openssl_progress(ssl: *mut Ssl) -> u64;
    fn shunt_openssl_set_progress(ssl: *mut Ssl, progress: u64) -> c_int;
    fn shunt_openssl_let_memory_move(ssl: *mut Ssl);
    fn shunt_openssl_flush(ssl: *mut Ssl);
    fn shunt_tls_watch(context: *mut Context) -> c_int;
    fn shunt_tls_refused(ssl: *mut Ssl, now_ms: u64) -> c_int;
    fn shunt_tls_is_fresh(ssl: *mut Ssl) -> c_int;
    fn shunt_tls_hand_over(ssl: *mut Ssl, fresh: c_int, now_ms: u64, keys: *mut Tls) -> c_int;
    fn shunt_tls_go_on(ssl: *mut Ssl, keys: *const Tls, payload: u64, now_ms: u64) -> c_int;
}

/// Lock of the state that this library keeps in OpenSSL's objects, for the whole process.
static LOCK: Lock<()> = Lock::new(Rank::OpenSsl, ());
/// Whether the program has a context whose connections are watched.
static WATCHES: AtomicBool = AtomicBool::new(false);

fn lock() -> Held<'static, ()> {
    LOCK.lock()
}

/// Holds the lock for a fork: no other thread is in OpenSSL for this library until the value is dropped.
pub fn hold_still() -> Held<'static, ()> {
    lock()
}

unsafe extern "C" fn find(library: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: `library` is the candidate that [`adopt`] has passed to the C file. The names in that file's table end
    // with a zero byte.
    unsafe { (*library.cast::<Candidate>()).find(CStr::from_ptr(name)) }
}

/// Whether the program has TLS connections that are watched.
#[inline]
pub fn watches() -> bool {
    WATCHES.load(Ordering::Relaxed)
}

/// Whether a connection may be a watched one. Connections of another OpenSSL never are.
#[inline]
fn is_watched(ssl: *mut Ssl) -> bool {
    // SAFETY: `ssl` is the program's connection, or null.
    watches() && unsafe { Of::Connection(ssl).is_known() }
}

/// Begins to watch a new context: the library counts what its connections write, so that they can be handed off. Only
/// contexts of the adopted OpenSSL are watched. `method`: the SSL_METHOD that the program made the context with.
///
/// # Safety
/// `context` was made with `method`, and nobody else has it yet.
pub unsafe fn watch(context: *mut Context, method: *const c_void) {
    // SAFETY: the context was made with this method, so it is a valid one.
    if !unsafe { Of::Method(method).is_known() } && !adopt(method) {
        return;
    }
    let _locked = lock();
    // SAFETY: the caller promises a new context; it belongs to the OpenSSL that was adopted.
    if unsafe { shunt_tls_watch(context) == 0 } {
        WATCHES.store(true, Ordering::Relaxed);
    }
}

/// Adopts a method's OpenSSL as the one whose connections are handed off. Returns false if one was adopted before, or
/// if this one is to be left alone ([`Candidate::of`]). Also returns false if it lacks one of the functions, and so is
/// not version 3.
#[cold]
fn adopt(method: *const c_void) -> bool {
    if libraries::has_known() {
        return false;
    }
    let Some(mut candidate) = Candidate::of(method) else { return false };
    let mut found = [ptr::null_mut(); FUNCTIONS_MAX];
    // Called without the lock of this module, because the call takes the loader's lock. Another thread may have the
    // loader's lock, because it is loading a library. That library's initialization may come here, and wait for this
    // module's lock. SAFETY: `found` has room for `found.len()` addresses, and the candidate lives during the call.
    let is_complete =
        unsafe { shunt_openssl_find(find, (&raw mut candidate).cast(), found.as_mut_ptr(), found.len()) == 1 };
    let functions = candidate.functions();
    let _locked = lock();
    // SAFETY: if `is_complete`, `found` has the addresses of all functions. No connection of this OpenSSL is watched
    // yet.
    is_complete && candidate.adopt(&functions, || unsafe { shunt_openssl_use(found.as_ptr()) == 1 })
}

/// Gives up handoffs on a connection, because the program sets a message callback of its own. That callback takes the
/// place of the one that counts what the connection writes.
///
/// # Safety
/// `ssl` is the program's connection.
pub unsafe fn unwatch(ssl: *mut Ssl) {
    if is_watched(ssl) {
        // SAFETY: the caller promises that `ssl` is the program's connection.
        unsafe { shunt_openssl_unwatch(ssl) }
    }
}

/// Progress of a write that the program has to repeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Progress {
    /// Number of bytes that are written, by OpenSSL or by a handoff.
    done: usize,
    /// Number of bytes behind the `done` ones that OpenSSL has begun to write.
    begun: usize,
    /// Whether the program is to wait for room in the socket. This library, not OpenSSL, tells the program that.
    full: Full,
}

/// Whether the last write waits for room in the socket. OpenSSL does not know that, so this library tells the program
/// (SSL_ERROR_WANT_WRITE).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Full {
    #[default]
    No,
    Yes,
    /// The write waits, and the program has been told so.
    Told,
}

impl Progress {
    /// Bit of the number in which OpenSSL keeps the progress for this library: the write waits for room in the socket.
    /// OpenSSL has begun nothing of such a write, so the bits of `begun` are free for this bit and for [`Self::TOLD`].
    const FULL: u64 = 1 << 63;
    /// Bit that is only set with [`Self::FULL`]: the program has been told that the write waits.
    const TOLD: u64 = 1 << 62;

    fn from_long(all: u64) -> Self {
        let full = match (all & Self::FULL != 0, all & Self::TOLD != 0) {
            (false, _) => Full::No,
            (true, false) => Full::Yes,
            (true, true) => Full::Told,
        };
        let begun = if full == Full::No { (all >> 32) as usize } else { 0 };
        Self { done: all as u32 as usize, begun, full }
    }

    fn to_long(self) -> u64 {
        let above = match self.full {
            Full::No => (self.begun as u64) << 32,
            Full::Yes => Self::FULL,
            Full::Told => Self::FULL | Self::TOLD,
        };
        above | self.done as u64
    }

    /// Returns the progress of the connection's last write.
    ///
    /// # Safety
    /// `ssl` is the program's connection.
    unsafe fn of(ssl: *mut Ssl) -> Self {
        // SAFETY: the caller promises that `ssl` is the program's connection.
        Self::from_long(unsafe { shunt_openssl_progress(ssl) })
    }

    /// Stores this progress with the connection, for the program's next call.
    ///
    /// # Safety
    /// `ssl` is the program's connection.
    unsafe fn keep(self, ssl: *mut Ssl) {
        // SAFETY: the caller promises that `ssl` is the program's connection.
        unsafe { shunt_openssl_set_progress(ssl, self.to_long()) };
    }
}

/// Forgets the progress of a write, because the connection is to be used for another one (SSL_clear(3)).
///
/// # Safety
/// `ssl` is the program's connection.
pub unsafe fn begin_again(ssl: *mut Ssl) {
    if is_watched(ssl) {
        // SAFETY: the caller promises that `ssl` is the program's connection.
        unsafe { Progress::default().keep(ssl) };
    }
}

/// Whether the last write waits for room in the socket. Called when the program asks for an error (SSL_get_error(3)):
/// the answer tells the program. The first call returns `Yes`, later ones `Told`, because a program that asks again may
/// mean the same write, or another call.
///
/// # Safety
/// `ssl` is the program's connection.
pub unsafe fn is_full(ssl: *mut Ssl) -> Full {
    if !is_watched(ssl) {
        return Full::No;
    }
    // SAFETY: the caller promises that `ssl` is the program's connection.
    unsafe {
        let progress = Progress::of(ssl);
        if progress.full == Full::Yes {
            Progress { full: Full::Told, ..progress }.keep(ssl);
        }
        progress.full
    }
}

/// Whether the TCP connection below the TLS connection is not over yet.
///
/// # Safety
/// `ssl` is the program's connection.
pub unsafe fn goes_on(ssl: *mut Ssl) -> bool {
    // SAFETY: the caller promises that `ssl` is the program's connection.
    !is_over(unsafe { shunt_openssl_socket(ssl) })
}

/// Writes as SSL_write(3) does. Returns `None` if OpenSSL is to do all of it.
///
/// # Safety
/// As for SSL_write(3).
pub unsafe fn write(runtime: &'static Runtime, ssl: *mut Ssl, memory: &Range<usize>) -> Option<c_int> {
    if !is_watched(ssl) || memory.len() > c_int::MAX as usize {
        return None;
    }
    // SAFETY: `ssl` is the program's connection.
    let Progress { mut done, mut begun, full } = unsafe { Progress::of(ssl) };
    let is_new = done == 0 && begun == 0 && full == Full::No;
    if is_new && !(any_absent() && runtime.memory.meets(memory)) || done >= memory.len() {
        return None;
    }
    // SAFETY: `ssl` is the program's connection.
    let connection = Connection { runtime, ssl, client: Client::of(unsafe { shunt_openssl_socket(ssl) }) };
    let mut patience = PATIENCE;
    while done < memory.len() {
        let rest = memory.start + done..memory.end;
        if begun == 0 {
            let run = run(runtime, &rest);
            let absent = run.iter().map(|piece| piece.addresses.len()).sum::<usize>();
            let before = run.first().map_or(0, |first| first.addresses.start - rest.start);
            let turn = if absent > 0 && before == 0 { connection.hand_off(&run) } else { Turn::Never };
            match turn {
                Turn::Now | Turn::Grows => {
                    (done, patience) = (done + absent, PATIENCE);
                    continue;
                }
                Turn::Later if !connection.waits() => {
                    // SAFETY: `ssl` is the program's connection.
                    unsafe { Progress { done, begun: 0, full: Full::Yes }.keep(ssl) };
                    set_errno(libc::EAGAIN);
                    return Some(-1);
                }
                Turn::Later if patience > 0 => {
                    patience -= 1;
                    continue;
                }
                _ => {}
            }
            begun = if before > 0 && connection.turn(&run) != Turn::Never { before } else { rest.len() };
        }
        // SAFETY: the caller keeps the rules of SSL_write(3).
        let wrote = unsafe { connection.write(&(rest.start..rest.start + begun.min(rest.len()))) };
        if wrote <= 0 {
            // SAFETY: `ssl` is the program's connection.
            unsafe { Progress { done, begun, full: Full::No }.keep(ssl) };
            return Some(wrote);
        }
        done += wrote as usize;
        let is_part = (wrote as usize) < begun;
        begun = 0;
        if is_part {
            break; // a partial write, which the program has allowed OpenSSL (SSL_MODE_ENABLE_PARTIAL_WRITE)
        }
    }
    if !is_new {
        // SAFETY: `ssl` is the program's connection.
        unsafe { Progress::default().keep(ssl) };
    }
    Some(done as c_int)
}

/// The first absent bytes of a range, and the absent bytes that follow them without a gap and have the same holder.
fn run(runtime: &Runtime, range: &Range<usize>) -> SmallVec<[Piece; 8]> {
    let mut run: SmallVec<[Piece; 8]> = SmallVec::new();
    for piece in runtime.memory.absent_within(range) {
        let follows = run.last().is_none_or(|last: &Piece| {
            last.addresses.end == piece.addresses.start && last.hold.payload().holder == piece.hold.payload().holder
        });
        if !follows {
            break;
        }
        run.push(piece);
    }
    run
}

/// Waits until a few bytes can be sent ([`has_room`]), at most as long as a write of the program would wait. Returns
/// whether they can be sent.
fn waits_for_room(fd: RawFd) -> bool {
    if !waits(fd, 0) {
        return false;
    }
    let limit = rustix::net::sockopt::socket_timeout(borrow(fd), Timeout::Send).ok().flatten();
    let limit_ms = limit.map_or(-1, |limit| c_int::try_from(limit.as_millis()).unwrap_or(c_int::MAX));
    let mut wanted = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one element, which lives in this frame. This is glibc's poll(2), in which the thread can be cancelled, as
    // it can be in a write.
    unsafe { real::poll(&raw mut wanted, 1, limit_ms) == 1 }
}

/// A connection during a write.
struct Connection {
    runtime: &'static Runtime,
    ssl: *mut Ssl,
    /// `None` if the connection does not write to a socket on which another machine could send.
    client: Option<Client>,
}

impl Connection {
    /// Returns whether a run of absent bytes may be handed off: at once or later, in a new handoff or in one that has
    /// begun.
    fn turn(&self, run: &[Piece]) -> Turn {
        let (Some(_inside), Some(client)) = (Inside::enter(), self.client) else { return Turn::Never };
        // SAFETY: `ssl` is the program's connection.
        if unsafe { shunt_tls_refused(self.ssl, now_ms()) } != READY {
            return Turn::Never;
        }
        client.turn(self.runtime, run)
    }

    /// Waits as the program's own write would, until the socket has room. Then all that was written before has left,
    /// and a handoff may begin. The KeyUpdate of the last handoff goes into the socket first. As long as the KeyUpdate
    /// waits in the socket, the socket has no room. Returns false if the program has to call again, once the kernel
    /// tells it that there is room.
    fn waits(&self) -> bool {
        if let Some(_inside) = Inside::enter() {
            // SAFETY: `ssl` is the program's connection.
            unsafe { shunt_openssl_flush(self.ssl) };
        }
        self.client.is_none_or(|client| has_room(client.fd) || waits_for_room(client.fd))
    }

    /// Hands off a run of absent bytes. `Now`: it is done. `Later`: it may be possible later. `Never`: OpenSSL writes
    /// the bytes.
    fn hand_off(&self, run: &[Piece]) -> Turn {
        let turn = self.turn(run);
        let Some(client) = self.client.filter(|_| matches!(turn, Turn::Now | Turn::Grows)) else { return turn };
        let Some(_inside) = Inside::enter() else { return Turn::Never };
        let _locked = lock();
        // SAFETY: `ssl` is the program's connection; the keys live during the call.
        let go_on = |keys: &Tls, bytes| unsafe { shunt_tls_go_on(self.ssl, keys, bytes, now_ms()) == 0 };
        if turn == Turn::Grows {
            return bypass::seal(self.runtime, client, run, None, go_on);
        }
        // SAFETY: `ssl` is the program's connection.
        unsafe { shunt_openssl_flush(self.ssl) };
        if !has_room(client.fd) {
            return Turn::Later;
        }
        let mut keys = Erased::new(Tls::new_zeroed());
        // If anything has been written under the present keys, this sends a KeyUpdate first: the keys that are given
        // away are for the payload alone. Clients accept only a few KeyUpdates without data between them. So OpenSSL
        // writes the bytes if no handoff begins afterwards.
        // SAFETY: `ssl` is the program's connection; the keys live during the call.
        let given = unsafe {
            let fresh = shunt_tls_is_fresh(self.ssl);
            shunt_tls_hand_over(self.ssl, fresh, now_ms(), &raw mut *keys)
        };
        let turn = if given == 1 { bypass::seal(self.runtime, client, run, Some(keys), go_on) } else { Turn::Never };
        wipe_stack();
        turn
    }

    /// Lets OpenSSL write memory. Absent bytes in it are fetched first.
    ///
    /// # Safety
    /// As for SSL_write(3).
    unsafe fn write(&self, range: &Range<usize>) -> c_int {
        let memory = &self.runtime.memory;
        let mut beside = None;
        if let Some(_inside) = Inside::enter() {
            if !memory.absent_within(range).is_empty() {
                if memory.fetch_with_rest(range, AHEAD_BYTES).is_err() {
                    set_errno(libc::ECONNRESET);
                    return -1;
                }
            } else if memory.meets(range) {
                // SAFETY: the caller promises that the program may read this memory.
                beside = Some(unsafe { memory.read(range) });
            }
        }
        let (from, bytes) = match &beside {
            Some(bytes) => (bytes.as_ptr(), bytes.len()),
            None => (range.start as *const u8, range.len()),
        };
        // SAFETY: the caller keeps the rules of SSL_write(3). `from` is the program's memory, or a buffer that lives
        // during the call.
        unsafe {
            if beside.is_some() {
                shunt_openssl_let_memory_move(self.ssl);
            }
            functions::write(self.ssl, from.cast(), bytes as c_int, 0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_bytes_of_a_write_do_not_change() {
        for done in [0, 1, 70_000, c_int::MAX as usize] {
            for begun in [0, 1, 16_384, c_int::MAX as usize] {
                let kept = Progress { done, begun, full: Full::No };
                assert_eq!(Progress::from_long(kept.to_long()), kept);
            }
            for full in [Full::Yes, Full::Told] {
                let kept = Progress { done, begun: 0, full };
                assert_eq!(Progress::from_long(kept.to_long()), kept);
            }
        }
    }
}
