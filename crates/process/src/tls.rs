//! TLS connections of a program whose library is OpenSSL 3: absent bytes that it writes to a TLS 1.3 client are sealed and
//! sent by their holder's agent (ARCHITECTURE.md, "TLS 1.3", "On-demand buffers").
//!
//! What is known of OpenSSL is the nginx module's (openssl/shunt_tls*.c), compiled for this library, too: it counts
//! what OpenSSL writes, and gives away the keys of one generation of a connection. Here only the order of things is
//! simpler: what OpenSSL writes behind a payload waits in the kernel ([`crate::bypass`]), so that it goes on at once, in the next
//! generation.
//!
//! ```text
//!   SSL_write:  | header, present       | body, absent                       | present again
//!               | OpenSSL, KeyUpdate    | region of sealed records, holder's | KeyUpdate, OpenSSL
//!    generation          g                        g + 1                               g + 2
//! ```

mod elf;
pub mod functions;
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

use self::libraries::{Candidate, Of};
use crate::bypass::{self, Client, Turn};
use crate::connections::runtime::Runtime;
use crate::connections::waiting::{has_room, is_over, waits};
use crate::memory::any_absent;
use crate::system::inside::{Held, Inside, Lock};
use crate::system::kernel::borrow;
use crate::system::ranks::Rank;
use crate::system::real::{self, set_errno};

/// OpenSSL's `SSL`.
pub type Ssl = c_void;
/// OpenSSL's `SSL_CTX`.
pub type Context = c_void;

/// `SHUNT_TLS_READY`.
const READY: c_int = 0;
/// How often a write looks again whether its turn has come, once the socket has room, before its bytes are fetched.
const PATIENCE: u32 = 8;
/// Of a body that cannot be handed off so much is fetched ahead.
const AHEAD_BYTES: u64 = 256 << 10;
/// Room for those that the C files call.
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

/// What is in OpenSSL of ours for the whole process is used by one thread at a time.
static LOCK: Lock<()> = Lock::new(Rank::OpenSsl, ());
/// Whether the program has a context whose connections are watched.
static WATCHES: AtomicBool = AtomicBool::new(false);

fn lock() -> Held<'static, ()> {
    LOCK.lock()
}

/// Until the value is dropped nobody else is in OpenSSL for us: before a fork.
pub fn hold_still() -> Held<'static, ()> {
    lock()
}

unsafe extern "C" fn find(library: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: what `adopt` gives for both; the table's own names end with a zero byte.
    unsafe { (*library.cast::<Candidate>()).find(CStr::from_ptr(name)) }
}

/// Whether the program has TLS connections that are watched.
#[inline]
pub fn watches() -> bool {
    WATCHES.load(Ordering::Relaxed)
}

/// Whether a connection may be a watched one. Those of another OpenSSL never are.
#[inline]
fn is_watched(ssl: *mut Ssl) -> bool {
    // SAFETY: the program's connection, or null.
    watches() && unsafe { Of::Connection(ssl).is_known() }
}

/// A context that the program has made with a method.
///
/// # Safety
/// `context` is one that nobody else has yet, made with `method`.
pub unsafe fn watch(context: *mut Context, method: *const c_void) {
    // SAFETY: the program's method.
    if !unsafe { Of::Method(method).is_known() } && !adopt(method) {
        return;
    }
    let _locked = lock();
    // SAFETY: the caller's promise; it is of the OpenSSL that was adopted.
    if unsafe { shunt_tls_watch(context) == 0 } {
        WATCHES.store(true, Ordering::Relaxed);
    }
}

/// Takes a method's OpenSSL for the one whose connections are handed off. False: there is one already, or it is to be left
/// alone, or it lacks one of the functions and so is another than version 3.
#[cold]
fn adopt(method: *const c_void) -> bool {
    if libraries::has_known() {
        return false;
    }
    let Some(mut candidate) = Candidate::of(method) else { return false };
    let mut found = [ptr::null_mut(); FUNCTIONS_MAX];
    // Before the lock: the loader's own lock is held by whoever loads a library, whose initialization may come here.
    // SAFETY: room for so many; the candidate lives meanwhile.
    let is_complete =
        unsafe { shunt_openssl_find(find, (&raw mut candidate).cast(), found.as_mut_ptr(), found.len()) == 1 };
    let functions = candidate.functions();
    let _locked = lock();
    // SAFETY: all that was found. Nobody has connections of it yet.
    is_complete && candidate.adopt(&functions, || unsafe { shunt_openssl_use(found.as_ptr()) == 1 })
}

/// The program looks at what a connection writes itself: nobody counts it any more.
///
/// # Safety
/// `ssl` is the program's connection.
pub unsafe fn unwatch(ssl: *mut Ssl) {
    if is_watched(ssl) {
        // SAFETY: the caller's promise.
        unsafe { shunt_openssl_unwatch(ssl) }
    }
}

/// How far a write is that the program has to call again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Progress {
    /// Bytes that are written, by whomever.
    done: usize,
    /// Bytes behind those that OpenSSL has begun to write.
    begun: usize,
    /// The program is to wait for room in the socket: what it is told of the write is not OpenSSL's word.
    full: Full,
}

/// Whether the last write waits for room, which OpenSSL does not know (SSL_ERROR_WANT_WRITE).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Full {
    #[default]
    No,
    Yes,
    /// And the program has been told.
    Told,
}

impl Progress {
    const FULL: u64 = 1 << 63;
    /// With the former. No such write has begun.
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

    /// # Safety
    /// `ssl` is the program's connection, here and in all that follows.
    unsafe fn of(ssl: *mut Ssl) -> Self {
        // SAFETY: the caller's promise.
        Self::from_long(unsafe { shunt_openssl_progress(ssl) })
    }

    /// # Safety
    /// As above.
    unsafe fn keep(self, ssl: *mut Ssl) {
        // SAFETY: as above.
        unsafe { shunt_openssl_set_progress(ssl, self.to_long()) };
    }
}

/// The connection is to be used for another (SSL_clear(3)): what was begun on the last is of no meaning there.
///
/// # Safety
/// `ssl` is the program's connection.
pub unsafe fn begin_again(ssl: *mut Ssl) {
    if is_watched(ssl) {
        // SAFETY: the caller's promise.
        unsafe { Progress::default().keep(ssl) };
    }
}

/// Whether the last write waits for room in the socket. Who asks is told that, and asks again only to hear it once more, or of another
/// call.
///
/// # Safety
/// `ssl` is the program's connection.
pub unsafe fn is_full(ssl: *mut Ssl) -> Full {
    if !is_watched(ssl) {
        return Full::No;
    }
    // SAFETY: the caller's promise.
    unsafe {
        let progress = Progress::of(ssl);
        if progress.full == Full::Yes {
            Progress { full: Full::Told, ..progress }.keep(ssl);
        }
        progress.full
    }
}

/// Whether the connection below goes on.
///
/// # Safety
/// `ssl` is the program's connection.
pub unsafe fn goes_on(ssl: *mut Ssl) -> bool {
    // SAFETY: the caller's promise.
    !is_over(unsafe { shunt_openssl_socket(ssl) })
}

/// Writes as SSL_write(3) does. `None`: all of it is OpenSSL's.
///
/// # Safety
/// As SSL_write.
pub unsafe fn write(runtime: &'static Runtime, ssl: *mut Ssl, memory: &Range<usize>) -> Option<c_int> {
    if !is_watched(ssl) || memory.len() > c_int::MAX as usize {
        return None;
    }
    // SAFETY: the program's connection.
    let Progress { mut done, mut begun, full } = unsafe { Progress::of(ssl) };
    let is_new = done == 0 && begun == 0 && full == Full::No;
    if is_new && !(any_absent() && runtime.memory.meets(memory)) || done >= memory.len() {
        return None;
    }
    // SAFETY: as above.
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
                    // SAFETY: as above.
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
        // SAFETY: the caller's promise.
        let wrote = unsafe { connection.write(&(rest.start..rest.start + begun.min(rest.len()))) };
        if wrote <= 0 {
            // SAFETY: as above.
            unsafe { Progress { done, begun, full: Full::No }.keep(ssl) };
            return Some(wrote);
        }
        done += wrote as usize;
        let is_part = (wrote as usize) < begun;
        begun = 0;
        if is_part {
            break; // as the program lets OpenSSL do
        }
    }
    if !is_new {
        // SAFETY: as above.
        unsafe { Progress::default().keep(ssl) };
    }
    Some(done as c_int)
}

/// The first absent bytes of a range, and what is absent behind them without a gap, all of one holder.
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

/// Whether a few bytes go out ([`has_room`]) after as much time as a write of the program's would wait.
fn waits_for_room(fd: RawFd) -> bool {
    if !waits(fd, 0) {
        return false;
    }
    let limit = rustix::net::sockopt::socket_timeout(borrow(fd), Timeout::Send).ok().flatten();
    let limit_ms = limit.map_or(-1, |limit| c_int::try_from(limit.as_millis()).unwrap_or(c_int::MAX));
    let mut wanted = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one, which lives in this frame. glibc's, because the thread may be cancelled in a write.
    unsafe { real::poll(&raw mut wanted, 1, limit_ms) == 1 }
}

/// A connection in a write.
struct Connection {
    runtime: &'static Runtime,
    ssl: *mut Ssl,
    /// `None`: it goes to no socket that others could send on.
    client: Option<Client>,
}

impl Connection {
    /// Whether a handoff may begin here, or go on.
    fn turn(&self, run: &[Piece]) -> Turn {
        let (Some(_inside), Some(client)) = (Inside::enter(), self.client) else { return Turn::Never };
        // SAFETY: the program's connection.
        if unsafe { shunt_tls_refused(self.ssl, now_ms()) } != READY {
            return Turn::Never;
        }
        client.turn(self.runtime, run)
    }

    /// Waits as the program's own write would, until the socket has room: all that was written before has left then, and a
    /// handoff may begin. So the KeyUpdate goes into the socket, which has no room as long as that waits there. False: the
    /// program is to come again, when the kernel tells it that there is room.
    fn waits(&self) -> bool {
        if let Some(_inside) = Inside::enter() {
            // SAFETY: as above.
            unsafe { shunt_openssl_flush(self.ssl) };
        }
        self.client.is_none_or(|client| has_room(client.fd) || waits_for_room(client.fd))
    }

    /// Now: it is done. Never: OpenSSL writes it.
    fn hand_off(&self, run: &[Piece]) -> Turn {
        let turn = self.turn(run);
        let Some(client) = self.client.filter(|_| matches!(turn, Turn::Now | Turn::Grows)) else { return turn };
        let Some(_inside) = Inside::enter() else { return Turn::Never };
        let _locked = lock();
        // SAFETY: the program's connection; keys that live meanwhile.
        let go_on = |keys: &Tls, bytes| unsafe { shunt_tls_go_on(self.ssl, keys, bytes, now_ms()) == 0 };
        if turn == Turn::Grows {
            return bypass::seal(self.runtime, client, run, None, go_on);
        }
        // SAFETY: as above.
        unsafe { shunt_openssl_flush(self.ssl) };
        if !has_room(client.fd) {
            return Turn::Later;
        }
        let mut keys = Erased::new(Tls::new_zeroed());
        // SAFETY: as above. Where anything has been written under the present keys, a KeyUpdate goes out: those that are given
        // away are for the payload alone. Clients take only so many without data between them, so that if nothing comes of
        // this, OpenSSL writes.
        let given = unsafe {
            let fresh = shunt_tls_is_fresh(self.ssl);
            shunt_tls_hand_over(self.ssl, fresh, now_ms(), &raw mut *keys)
        };
        let turn = if given == 1 { bypass::seal(self.runtime, client, run, Some(keys), go_on) } else { Turn::Never };
        wipe_stack();
        turn
    }

    /// OpenSSL's own write, of memory that is there or is fetched.
    ///
    /// # Safety
    /// As SSL_write.
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
                // SAFETY: the caller's promise.
                beside = Some(unsafe { memory.read(range) });
            }
        }
        let (from, bytes) = match &beside {
            Some(bytes) => (bytes.as_ptr(), bytes.len()),
            None => (range.start as *const u8, range.len()),
        };
        // SAFETY: as above.
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
    fn what_is_kept_of_a_write_is_what_it_was() {
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
