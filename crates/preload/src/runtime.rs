//! What the process has of Shunt: made once, when the library is loaded, from what `shunt run` left in the environment.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::{Arc, MutexGuard, OnceLock};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use shunt_odb::learnt::Table;
use shunt_odb::states;
use shunt_odb::store::client::enter_by;
use shunt_sys::own::OwnFd;
use shunt_sys::shared::SharedMemory;

use crate::allocator;
use crate::bypass::{Bypass, Handings};
use crate::connections::Connections;
use crate::descriptors;
use crate::inside::Inside;
use crate::memory::{self, Memory};
use crate::store::{self, Store};
use crate::{process, tls, users};

/// `store=PATH;table=DESCRIPTOR;faults=DESCRIPTOR`: the store's socket, the memory of connections' states, and the open
/// /dev/userfaultfd. Then `;entrance=DESCRIPTOR;cookie=NUMBER`, a connection to the store that lets processes in which do not
/// find its socket, and what tells it from what a program may have there instead (SO_COOKIE); and `;malloc=unaligned`, where
/// large blocks shall begin elsewhere than at a page.
pub const ENVIRONMENT: &str = "SHUNT_ODB";

/// All of it.
pub struct Runtime {
    pub connections: Connections,
    pub memory: Memory,
    pub store: Store,
    pub bypass: Bypass,
    pub learnt: Option<Table>,
    /// The number by which programs that this one executes inherit the memory of the connections' states.
    pub inherited: RawFd,
}

static RUNTIME: OnceLock<Option<Runtime>> = OnceLock::new();

/// The runtime; `None` where the program is not under `shunt run`, and all calls are glibc's.
#[inline]
pub fn runtime() -> Option<&'static Runtime> {
    RUNTIME.get()?.as_ref()
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    let environment = std::env::var(ENVIRONMENT).unwrap_or_default();
    let runtime = RUNTIME.get_or_init(|| Runtime::from_environment(&environment));
    if let Some(runtime) = runtime {
        // The allocator's first: the others, which allocate, run before it is held and after it is given up.
        // SAFETY: handlers that live as long as the process; they touch nothing but a lock of ours.
        unsafe {
            let after: Option<unsafe extern "C" fn()> = Some(allocator::after_fork);
            libc::pthread_atfork(Some(allocator::before_fork), after, after)
        };
        // SAFETY: handlers that live as long as the process; what runs in the child between fork and return only
        // stores into atomics and replaces what the parent's threads may hold.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child)) };
        process::begin();
        crate::scarce::begin();
        crate::hooks::heap::begin(value(&environment, "malloc") == Some("unaligned"));
        crate::hooks::exec::remember(&environment);
        descriptors::adopt_inherited(runtime);
        crate::hooks::stream::adopt_standard(runtime);
    }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

/// A process that ends gives back what it has let go of.
extern "C" fn at_exit() {
    // Not where a signal's handler ends the process in the middle of the library.
    if process::is_own()
        && let Some(Some(runtime)) = RUNTIME.get()
        && let Some(_inside) = Inside::enter()
    {
        runtime.memory.holders.send_returns(&runtime.memory.returns);
    }
}

/// A field of [`ENVIRONMENT`].
fn value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.split(';').find_map(|field| field.split_once('=').filter(|(key, _)| *key == name)).map(|(_, value)| value)
}

/// What a fork finds in order, and holds so: no thread of the parent is in the middle of anything that the child uses.
struct Still {
    memory: memory::Still,
    store: store::Still<'static>,
    bypass: MutexGuard<'static, Handings>,
    _tls: MutexGuard<'static, ()>,
    _connections: MutexGuard<'static, ()>,
    _inside: Option<Inside>,
}

thread_local! {
    static STILL: RefCell<Option<Still>> = const { RefCell::new(None) };
}

pub extern "C" fn before_fork() {
    if let Some(runtime) = runtime() {
        let _inside = Inside::enter();
        // Others may need the locks while this waits for a holder.
        runtime.memory.fetch_for_fork();
        let _connections = runtime.connections.hold_still();
        let (_tls, bypass, store) = (tls::hold_still(), runtime.bypass.hold_still(), runtime.store.hold_still());
        STILL.set(Some(Still { _inside, _tls, _connections, bypass, store, memory: runtime.memory.hold_still() }));
    }
}

pub extern "C" fn after_fork_in_parent() {
    STILL.set(None);
}

pub extern "C" fn after_fork_in_child() {
    if let Some(mut still) = STILL.take() {
        process::begin();
        crate::counts::after_fork();
        still.memory.forget();
        still.store.forget();
        still.bypass.forget();
    }
}

impl Runtime {
    fn from_environment(text: &str) -> Option<Self> {
        let descriptor = |name: &str| value(text, name)?.parse::<i32>().ok().filter(|fd| *fd >= 0);
        let (number, faults_number) = (descriptor("table")?, descriptor("faults")?);
        // SAFETY: `shunt run` left it open for us; a copy is taken, and a number that is not open makes that fail.
        let table: OwnedFd = rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(number) }, 512).ok()?;
        let asking = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map(OwnFd::new);
        descriptors::keep(number);
        descriptors::keep(faults_number);
        // SAFETY: as above; it stays open, because programs that this one executes inherit it.
        let faults = unsafe { OwnedFd::from_raw_fd(faults_number) };
        let cookie: Option<u64> = value(text, "cookie").and_then(|cookie| cookie.parse().ok());
        let is_entrance = |fd: &i32| rustix::net::sockopt::socket_cookie(descriptors::borrow(*fd)).ok() == cookie;
        if cookie.is_some()
            && let Some(number) = descriptor("entrance").filter(is_entrance)
        {
            descriptors::keep(number);
            // SAFETY: as above.
            enter_by(unsafe { OwnedFd::from_raw_fd(number) });
        }
        let store = PathBuf::from(value(text, "store")?);
        let table = Arc::new(Self::own_table(table, number)?);
        Some(Self {
            inherited: number,
            learnt: Table::new(Arc::clone(&table)),
            connections: Connections::new(table, asking.ok()),
            memory: Memory::new(faults, store.clone()),
            bypass: Bypass::new(store.clone()),
            store: Store::new(store),
        })
    }

    /// The memory that was inherited, or new memory where that is another user's, for who has started this program did not
    /// say that it became one; or where another version of this library has made it.
    fn own_table(inherited: OwnedFd, number: RawFd) -> Option<SharedMemory> {
        let bytes = usize::try_from(rustix::fs::fstat(&inherited).ok()?.st_size).ok()?;
        if bytes == states::BYTES && !users::is_of_another(inherited.as_fd()) {
            return SharedMemory::open(inherited).ok();
        }
        let own = states::new().ok()?;
        users::leave_to_children(own.as_fd(), number, inherited.as_fd());
        Some(own)
    }
}
