//! Processes that change their user. Such a process gives up the memory that the old user's processes share: the states
//! of their connections, and what they have learnt of receivers. It keeps only the states of its own descriptors
//! ([`Connections::move_to`]).
//!
//! Its new memory is shared only with the processes that it starts. This memory does not come from an agent (Shunt's
//! daemon), because a program that changes its user would have to wait for the agent. With the new user's other
//! processes, this one could share nothing but guesses ([`shunt_odb::learnt`]).
//!
//! [`Connections::move_to`]: crate::connections::states::Connections::move_to

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::{DupFlags, dup3};
use shunt_odb::states;

use super::entries;
use crate::connections::runtime::{Runtime, runtime};
use crate::system::ending::end_process;
use crate::system::inside::Inside;
use crate::system::kernel;
use crate::system::real::{errno, set_errno};

/// The user of the process, if its real, effective and saved user are the same. `None` if they differ: then the process
/// can still become any of them.
fn own() -> Option<u32> {
    let (mut real, mut effective, mut saved) = (0, 0, 0);
    // SAFETY: the kernel writes the three variables.
    let known = unsafe { libc::getresuid(&raw mut real, &raw mut effective, &raw mut saved) };
    (known == 0 && real == effective && effective == saved).then_some(effective)
}

/// Whether memory for states belongs to another user than the process.
pub fn is_of_another(memory: BorrowedFd<'_>) -> bool {
    own().is_some_and(|own| rustix::fs::fstat(memory).is_ok_and(|found| found.st_uid != own))
}

fn is_same_file(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    let file = |fd| rustix::fs::fstat(fd).map(|found| (found.st_dev, found.st_ino)).ok();
    file(one).is_some() && file(one) == file(other)
}

/// Puts a copy of `new` at `number`, where programs that this process executes look for the memory of states. Does
/// nothing if that number no longer has `old`'s file.
pub fn leave_to_children(new: BorrowedFd<'_>, number: RawFd, old: BorrowedFd<'_>) {
    if is_same_file(kernel::borrow(number), old) {
        // SAFETY: the number is open, because it has a file. dup3(2) puts another file there, and `ManuallyDrop` does
        // not close it.
        let mut number = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
        let _ = dup3(new, &mut number, DupFlags::empty());
    }
}

/// Makes a call by which the process may become another user's. If it does, gives up the old user's memory.
pub fn change(call: impl FnOnce() -> i32) -> i32 {
    let Some(runtime) = runtime() else { return call() };
    let Some(_inside) = Inside::enter() else { return call() };
    let outcome = call();
    if outcome == 0 && is_of_another(runtime.connections.memory()) {
        let before = errno();
        if let_go(runtime).is_err() {
            end_process("the memory of another user's connections cannot be given up");
        }
        set_errno(before);
    }
    outcome
}

fn let_go(runtime: &Runtime) -> io::Result<()> {
    let connections = &runtime.connections;
    match states::new() {
        Ok(memory) => {
            leave_to_children(memory.as_fd(), runtime.inherited, connections.memory());
            connections.move_to(&memory, entries::used())
        }
        // The process may have no more descriptors (RLIMIT_NOFILE). Programs that it executes find no memory, and are
        // not under Shunt.
        Err(_) => {
            if is_same_file(kernel::borrow(runtime.inherited), connections.memory()) {
                // SAFETY: the library's own descriptor. From now on it is used only by programs that this one executes,
                // which find the number in their environment and no file there.
                unsafe { rustix::io::close(runtime.inherited) };
                entries::forget(runtime.inherited);
            }
            connections.move_alone(entries::used())
        }
    }
}
