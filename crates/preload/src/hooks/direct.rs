//! System calls that programs make by number (syscall(2)), processes made by clone(2), and io_uring.

use libc::{c_int, c_long, c_uint, c_void, sockaddr, socklen_t};
use shunt_process::bypass::turn_ends;
use shunt_process::connections::runtime::runtime;
use shunt_process::system::kernel;

use super::{descriptor, exec, file, heap, returned, set_errno, socket};
use crate::forking;

/// Turns an argument of a system call into a pointer.
fn at<T>(argument: usize) -> *mut T {
    argument as *mut T
}

/// syscall(2). Calls the interposed function for the system call that the number stands for. If there is none, makes
/// the system call.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let fd = a as c_int;
    if !wakes(number, b) {
        turn_ends();
    }
    if runtime().is_some() {
        // SAFETY: the program passed these arguments to the same system call, so they are valid for the function.
        let known = unsafe {
            match number {
                libc::SYS_read => socket::read(fd, at(b), c),
                libc::SYS_write => socket::write(fd, at(b), c),
                libc::SYS_readv => socket::readv(fd, at(b), c as c_int),
                libc::SYS_writev => socket::writev(fd, at(b), c as c_int),
                libc::SYS_recvfrom => socket::recvfrom(fd, at(b), c, d as c_int, at(e), at(f)),
                libc::SYS_sendto => socket::sendto(fd, at(b), c, d as c_int, at(e), f as socklen_t),
                libc::SYS_recvmsg => socket::recvmsg(fd, at(b), c as c_int),
                libc::SYS_sendmsg => socket::sendmsg(fd, at(b), c as c_int),
                libc::SYS_recvmmsg => socket::recvmmsg(fd, at(b), c as u32, d as c_int, at(e)) as isize,
                libc::SYS_sendmmsg => socket::sendmmsg(fd, at(b), c as u32, d as c_int) as isize,
                libc::SYS_sendfile => file::sendfile64(fd, b as c_int, at(c), d),
                libc::SYS_splice => file::splice(fd, at(b), c as c_int, at(d), e, f as u32),
                libc::SYS_connect => descriptor::connect(fd, at::<sockaddr>(b), c as socklen_t) as isize,
                libc::SYS_listen => descriptor::listen(fd, b as c_int) as isize,
                libc::SYS_accept => descriptor::accept4(fd, at(b), at(c), 0) as isize,
                libc::SYS_accept4 => descriptor::accept4(fd, at(b), at(c), d as c_int) as isize,
                libc::SYS_close => descriptor::close(fd) as isize,
                libc::SYS_close_range => descriptor::close_range(a as c_uint, b as c_uint, c as c_int) as isize,
                libc::SYS_dup => descriptor::dup(fd) as isize,
                libc::SYS_dup2 => descriptor::dup2(fd, b as c_int) as isize,
                libc::SYS_dup3 => descriptor::dup3(fd, b as c_int, c as c_int) as isize,
                libc::SYS_pidfd_getfd => descriptor::pidfd_getfd(fd, b as c_int, c as c_uint) as isize,
                libc::SYS_fcntl => descriptor::fcntl(fd, b as c_int, c) as isize,
                libc::SYS_ioctl => descriptor::ioctl(fd, b as libc::c_ulong, c) as isize,
                libc::SYS_setsockopt => descriptor::setsockopt(fd, b as c_int, c as c_int, at(d), e as u32) as isize,
                libc::SYS_getsockopt => descriptor::getsockopt(fd, b as c_int, c as c_int, at(d), at(e)) as isize,
                libc::SYS_mremap => heap::mremap(at(a), b, c, d as c_int, at(e)) as isize,
                libc::SYS_madvise => heap::madvise(at(a), b, c as c_int) as isize,
                libc::SYS_execve => exec::execve(at(a), at(b), at(c)) as isize,
                libc::SYS_fork | libc::SYS_vfork => forked(libc::SYS_fork, [0; 6]),
                libc::SYS_clone if a & libc::CLONE_VM as usize == 0 => forked(number, [a, b, c, d, e, f]),
                libc::SYS_clone3 if clone3_copies(a, b) => forked(number, [a, b, c, d, e, f]),
                libc::SYS_clone | libc::SYS_clone3 => {
                    shunt_process::memory::has_threads();
                    return plain(number, [a, b, c, d, e, f]);
                }
                libc::SYS_io_uring_setup => returned(Err(libc::ENOSYS)),
                _ => return plain(number, [a, b, c, d, e, f]),
            }
        };
        return known as c_long;
    }
    plain(number, [a, b, c, d, e, f])
}

/// Whether a system call only wakes other threads. All other calls by number end the program's turn, the time between
/// two waits for events (shunt_process::bypass::turn_ends), because they may wait. A call that wakes does not wait.
/// std's locks make such a call when they are released while a thread waits for them.
fn wakes(number: c_long, operation: usize) -> bool {
    let flags = libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME;
    number == libc::SYS_futex && [libc::FUTEX_WAKE, libc::FUTEX_WAKE_BITSET].contains(&(operation as c_int & !flags))
}

fn plain(number: c_long, arguments: [usize; 6]) -> c_long {
    // SAFETY: the program passed these arguments to this system call.
    returned(unsafe { kernel::call(number, arguments) }) as c_long
}

/// Whether a clone3(2) with these arguments makes a process with its own copy of this process's memory.
///
/// # Safety
/// As for clone3(2).
unsafe fn clone3_copies(arguments: usize, bytes: usize) -> bool {
    // SAFETY: the caller keeps the rules of clone3(2). The flags come first (linux/sched.h, struct clone_args).
    let flags = (bytes >= size_of::<u64>() && arguments != 0).then(|| unsafe { *(arguments as *const u64) });
    flags.is_some_and(|flags| flags & libc::CLONE_VM as u64 == 0)
}

/// Makes a process that glibc's fork(3) does not know of.
///
/// # Safety
/// The call makes a process with its own copy of this process's memory.
unsafe fn forked(number: c_long, arguments: [usize; 6]) -> isize {
    forking::before();
    // SAFETY: the caller promises that the call makes a process with its own copy of this process's memory.
    let outcome = unsafe { kernel::call(number, arguments) };
    match outcome {
        Ok(0) => forking::after_in_child(),
        _ => forking::after_in_parent(),
    }
    returned(outcome)
}

type Start = extern "C-unwind" fn(*mut c_void) -> c_int;

struct Begin {
    start: Start,
    argument: *mut c_void,
}

extern "C-unwind" fn begin(begin: *mut c_void) -> c_int {
    forking::after_in_child();
    // SAFETY: the argument is the child's copy of the `Begin` that [`clone`] passed.
    let Begin { start, argument } = unsafe { begin.cast::<Begin>().read() };
    start(argument)
}

/// clone(2), by glibc's function. The arguments behind `argument` (addresses for the ids of parent and child, and the
/// thread area) are passed on as they are.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn clone(
    start: Start,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: usize,
    area: usize,
    child: usize,
) -> c_int {
    if flags & libc::CLONE_VM != 0 || runtime().is_none() {
        shunt_process::memory::has_threads();
        // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
        return unsafe { super::real::clone(start, stack, flags, argument, parent, area, child) };
    }
    forking::before();
    let mut what = Begin { start, argument };
    // SAFETY: the program's arguments, except for `begin`, which takes the child's own copy of `what`.
    let process = unsafe { super::real::clone(begin, stack, flags, (&raw mut what).cast(), parent, area, child) };
    forking::after_in_parent();
    process
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __clone(
    start: Start,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: usize,
    area: usize,
    child: usize,
) -> c_int {
    // SAFETY: the program passed these arguments to the same function, so they are valid for this call.
    unsafe { clone(start, stack, flags, argument, parent, area, child) }
}

/// Refuses a ring of io_uring. By a ring, the kernel would read and write connections, and would take the library's
/// frames on them for the program's bytes. So programs get no rings, as on a kernel without io_uring, for which they
/// are prepared.
fn no_ring() -> c_int {
    -libc::ENOSYS
}

/// Function of liburing. It has to be interposed, too, because liburing makes its system calls itself.
#[unsafe(no_mangle)]
extern "C-unwind" fn io_uring_queue_init(_entries: c_uint, _ring: *mut c_void, _flags: c_uint) -> c_int {
    no_ring()
}

#[unsafe(no_mangle)]
extern "C-unwind" fn io_uring_queue_init_params(_entries: c_uint, _ring: *mut c_void, _with: *mut c_void) -> c_int {
    no_ring()
}

#[unsafe(no_mangle)]
extern "C-unwind" fn io_uring_queue_init_mem(
    _entries: c_uint,
    _ring: *mut c_void,
    _with: *mut c_void,
    _memory: *mut c_void,
    _bytes: usize,
) -> c_int {
    no_ring()
}

#[unsafe(no_mangle)]
extern "C-unwind" fn io_uring_setup(_entries: c_uint, _with: *mut c_void) -> c_int {
    set_errno(libc::ENOSYS);
    no_ring()
}
