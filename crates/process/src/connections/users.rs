//! A process that becomes another user's has nothing of the old one's any more: neither the states of that user's
//! connections, nor what was learnt of their peers. What its own descriptors lead to goes along ([`Connections::move_to`]).
//!
//! Its new memory is its own, and that of the processes that it starts. It comes from no agent, which a program that changes
//! its user would have to wait for; and all that it could share with others of that user are guesses
//! ([`shunt_odb::learnt`]).
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

/// The user whose the process is for good. `None`: it may still become one of several, and has the rights of all.
fn own() -> Option<u32> {
    let (mut real, mut effective, mut saved) = (0, 0, 0);
    // SAFETY: the kernel writes the three.
    let known = unsafe { libc::getresuid(&raw mut real, &raw mut effective, &raw mut saved) };
    (known == 0 && real == effective && effective == saved).then_some(effective)
}

/// Whether memory for states is another user's than the process.
pub fn is_of_another(memory: BorrowedFd<'_>) -> bool {
    own().is_some_and(|own| rustix::fs::fstat(memory).is_ok_and(|found| found.st_uid != own))
}

fn is_same_file(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    let file = |fd| rustix::fs::fstat(fd).map(|found| (found.st_dev, found.st_ino)).ok();
    file(one).is_some() && file(one) == file(other)
}

/// Puts a descriptor where programs that this process executes look for one, in place of `old`, if that is there still.
pub fn leave_to_children(new: BorrowedFd<'_>, number: RawFd, old: BorrowedFd<'_>) {
    if is_same_file(kernel::borrow(number), old) {
        // SAFETY: open, as has just been seen; it gets another file, and is not closed here.
        let mut number = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
        let _ = dup3(new, &mut number, DupFlags::empty());
    }
}

/// Around a call by which the process may become another user.
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
        // It may have no more descriptors (RLIMIT_NOFILE). Programs that it executes find no memory, and are not under Shunt.
        Err(_) => {
            if is_same_file(kernel::borrow(runtime.inherited), connections.memory()) {
                // SAFETY: the library's number, which nobody uses again but by its name in the environment.
                unsafe { rustix::io::close(runtime.inherited) };
                entries::forget(runtime.inherited);
            }
            connections.move_alone(entries::used())
        }
    }
}
