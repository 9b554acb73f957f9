//! Sets up the process's state when the library is loaded, from the environment that `shunt run` has left. When the
//! process ends, sends its unused *shares* of payloads (parts of the right to fetch them) back to the *holders*, the
//! stores that have the payloads.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use shunt_odb::learnt::Table;
use shunt_odb::states;
use shunt_odb::store::client::enter_by;
use shunt_process::connections::runtime::{self, Runtime, runtime};
use shunt_process::connections::states::Connections;
use shunt_process::connections::{entries, users};
use shunt_process::memory::{Calls, Memory};
use shunt_process::store::Store;
use shunt_process::system::inside::Inside;
use shunt_process::system::{kernel, process, ranks, scarce};
use shunt_process::{bypass, descriptors};
use shunt_sys::own::OwnFd;
use shunt_sys::shared::SharedMemory;

use crate::forking;
use crate::hooks::exec::ENVIRONMENT;
use crate::hooks::{exec, heap, stream};

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    let environment = std::env::var(ENVIRONMENT).unwrap_or_default();
    if let Some(runtime) = runtime::begin(from_environment(&environment)) {
        // SAFETY: the handlers live as long as the process. In the child, between fork and return, they only store into
        // atomics and replace what the parent's threads may hold.
        unsafe {
            libc::pthread_atfork(Some(forking::before), Some(forking::after_in_parent), Some(forking::after_in_child))
        };
        if value(&environment, "locks") == Some("checked") {
            ranks::check();
        }
        process::begin();
        scarce::begin();
        heap::begin(value(&environment, "malloc") == Some("unaligned"));
        exec::remember(&environment);
        descriptors::adopt_inherited(runtime);
        stream::adopt_standard(runtime);
    }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

/// Sends unused shares of payloads back to their holders when the process ends.
extern "C" fn at_exit() {
    // Does nothing in a child that is unknown to the library (made by _Fork(3)), or if a signal handler ends the
    // process while this thread is inside the library.
    if process::is_own()
        && let Some(runtime) = runtime()
        && let Some(_inside) = Inside::enter()
    {
        runtime.memory.holders.send_returns(&runtime.memory.returns);
    }
}

/// Returns the value of a field of [`ENVIRONMENT`].
fn value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.split(';').find_map(|field| field.split_once('=').filter(|(key, _)| *key == name)).map(|(_, value)| value)
}

/// Sends unused shares of payloads back to their holders. Called in the thread that makes connections to the holders.
fn tick() -> bool {
    runtime().is_some_and(|runtime| runtime.memory.holders.send_returns(&runtime.memory.returns))
}

fn tend() {
    if let Some(runtime) = runtime() {
        bypass::tend(runtime);
    }
}

fn from_environment(text: &str) -> Option<Runtime> {
    let descriptor = |name: &str| value(text, name)?.parse::<i32>().ok().filter(|fd| *fd >= 0);
    let (number, faults_number) = (descriptor("table")?, descriptor("faults")?);
    // SAFETY: `shunt run` left the descriptor open for this library. It is only copied, which fails if the number is
    // not open.
    let table: OwnedFd = rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(number) }, 512).ok()?;
    let asking =
        rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).map(OwnFd::new);
    entries::keep(number);
    entries::keep(faults_number);
    // SAFETY: `shunt run` left the descriptor open for this library, and nothing else in this process owns it. It is
    // kept until the process ends, so that programs that this one executes inherit it.
    let faults = unsafe { OwnedFd::from_raw_fd(faults_number) };
    let cookie: Option<u64> = value(text, "cookie").and_then(|cookie| cookie.parse().ok());
    let is_entrance = |fd: &i32| rustix::net::sockopt::socket_cookie(kernel::borrow(*fd)).ok() == cookie;
    if cookie.is_some()
        && let Some(number) = descriptor("entrance").filter(is_entrance)
    {
        entries::keep(number);
        // SAFETY: `shunt run` left the descriptor open for this library; its cookie shows that it is still the same
        // file.
        enter_by(unsafe { OwnedFd::from_raw_fd(number) });
    }
    let store = PathBuf::from(value(text, "store")?);
    let table = Arc::new(own_table(table, number)?);
    Some(Runtime {
        inherited: number,
        learnt: Table::new(Arc::clone(&table)),
        connections: Connections::new(table, asking.ok()),
        memory: Memory::new(faults, store.clone(), Calls { tick, tend }),
        store: Store::new(store),
    })
}

/// Returns the inherited memory of the connections' states, or new memory in two cases. Either the inherited memory is
/// another user's, because the program that started this one has changed its user without the library's notice. Or
/// another version of this library has made it.
fn own_table(inherited: OwnedFd, number: RawFd) -> Option<SharedMemory> {
    let bytes = usize::try_from(rustix::fs::fstat(&inherited).ok()?.st_size).ok()?;
    if bytes == states::BYTES && !users::is_of_another(inherited.as_fd()) {
        return SharedMemory::open(inherited).ok();
    }
    let own = states::new().ok()?;
    users::leave_to_children(own.as_fd(), number, inherited.as_fd());
    Some(own)
}
