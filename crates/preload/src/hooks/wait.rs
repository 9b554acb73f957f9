//! Calls that wait for events, or end the process. Each first ends the program's *turn*, the time between two waits: it
//! tells the agent of handoffs that have begun (shunt_process::bypass::turn_ends). In a *handoff*, another machine
//! sends bytes on the connection of one of the program's clients.

use libc::{c_int, c_ulong, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use shunt_process::bypass::turn_ends;
use shunt_process::system::kernel;

use super::real;

macro_rules! waits {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($argument: $kind),*) -> c_int {
            turn_ends();
            // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
            unsafe { real::$name($($argument),*) }
        }
    )*};
}

waits! {
    epoll_wait(fd: c_int, events: *mut epoll_event, count: c_int, timeout: c_int);
    epoll_pwait(fd: c_int, events: *mut epoll_event, count: c_int, timeout: c_int, mask: *const sigset_t);
    epoll_pwait2(fd: c_int, events: *mut epoll_event, count: c_int, timeout: *const timespec, mask: *const sigset_t);
    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int);
    ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t);
    select(count: c_int, read: *mut fd_set, write: *mut fd_set, other: *mut fd_set, timeout: *mut timeval);
    pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, other: *mut fd_set, timeout: *const timespec, mask: *const sigset_t);
    __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t);
    __ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, room: size_t);
}

same! {
    __poll is poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    __select is select(count: c_int, read: *mut fd_set, write: *mut fd_set, other: *mut fd_set, timeout: *mut timeval) -> c_int;
}

/// Ends the process without exit(3)'s handlers.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn _exit(status: c_int) -> ! {
    turn_ends();
    loop {
        // SAFETY: ends the process.
        let _ = unsafe { kernel::call(libc::SYS_exit_group as c_ulong as i64, [status as usize, 0, 0, 0, 0, 0]) };
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn _Exit(status: c_int) -> ! {
    // SAFETY: another name of the same function.
    unsafe { _exit(status) }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_END: extern "C" fn() = at_end;

/// Ends the program's turn at exit(3), after the program's own handlers.
extern "C" fn at_end() {
    turn_ends();
}
