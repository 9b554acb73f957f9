//! glibc's own functions, which the interposed symbols replace (dlsym(3), RTLD_NEXT), and its errno.

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{
    FILE, c_char, c_int, c_void, epoll_event, fd_set, iovec, mmsghdr, msghdr, nfds_t, off64_t, pollfd, pthread_attr_t,
    pthread_t, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval, uid_t,
};

use super::kernel::Errno;

/// The calling thread's errno.
pub fn errno() -> Errno {
    // SAFETY: the function always returns a pointer to the calling thread's errno.
    unsafe { *libc::__errno_location() }
}

pub fn set_errno(errno: Errno) {
    // SAFETY: the function always returns a pointer to the calling thread's errno.
    unsafe { *libc::__errno_location() = errno };
}

#[cold]
fn find(name: &CStr, found: &AtomicPtr<c_void>) -> *mut c_void {
    // SAFETY: `name` ends with a zero byte.
    let symbol = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if symbol.is_null() {
        // Only glibc before 2.34, or another C library, lacks one of the functions.
        super::ending::end_process(
            "the C library lacks a function that this library needs: install the release that was built for this \
             distribution",
        );
    }
    found.store(symbol, Ordering::Relaxed);
    symbol
}

macro_rules! real {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $result:ty;)*) => {$(
        /// # Safety
        /// As for the function of that name in libc.
        #[inline]
        pub unsafe fn $name($($argument: $kind),*) -> $result {
            static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
            // SAFETY: the string ends with a zero byte, which `concat!` adds.
            let name = unsafe { CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()) };
            let known = FOUND.load(Ordering::Relaxed);
            let found = if known.is_null() { find(name, &FOUND) } else { known };
            // SAFETY: glibc's function of this name has this type.
            let function: unsafe extern "C-unwind" fn($($kind),*) -> $result = unsafe { std::mem::transmute(found) };
            // SAFETY: the caller keeps the rules of the function of that name in libc.
            unsafe { function($($argument),*) }
        }
    )*};
}

real! {
    read(fd: c_int, to: *mut c_void, bytes: size_t) -> ssize_t;
    readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t;
    recv(fd: c_int, to: *mut c_void, bytes: size_t, flags: c_int) -> ssize_t;
    recvfrom(fd: c_int, to: *mut c_void, bytes: size_t, flags: c_int, from: *mut sockaddr, length: *mut socklen_t) -> ssize_t;
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    recvmmsg(fd: c_int, messages: *mut mmsghdr, count: u32, flags: c_int, timeout: *mut timespec) -> c_int;
    write(fd: c_int, from: *const c_void, bytes: size_t) -> ssize_t;
    writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t;
    send(fd: c_int, from: *const c_void, bytes: size_t, flags: c_int) -> ssize_t;
    sendto(fd: c_int, from: *const c_void, bytes: size_t, flags: c_int, to: *const sockaddr, length: socklen_t) -> ssize_t;
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    sendmmsg(fd: c_int, messages: *mut mmsghdr, count: u32, flags: c_int) -> c_int;
    sendfile64(to: c_int, from: c_int, offset: *mut off64_t, bytes: size_t) -> ssize_t;
    splice(from: c_int, from_offset: *mut off64_t, to: c_int, to_offset: *mut off64_t, bytes: size_t, flags: u32) -> ssize_t;
    accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int;
    accept4(fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int;
    connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int;
    listen(fd: c_int, backlog: c_int) -> c_int;
    getsockopt(fd: c_int, level: c_int, option: c_int, value: *mut c_void, length: *mut socklen_t) -> c_int;
    setsockopt(fd: c_int, level: c_int, option: c_int, value: *const c_void, length: socklen_t) -> c_int;
    close(fd: c_int) -> c_int;
    close_range(first: u32, last: u32, flags: c_int) -> c_int;
    dup(fd: c_int) -> c_int;
    dup2(from: c_int, to: c_int) -> c_int;
    dup3(from: c_int, to: c_int, flags: c_int) -> c_int;
    fcntl(fd: c_int, command: c_int, argument: usize) -> c_int;
    ioctl(fd: c_int, request: libc::c_ulong, argument: usize) -> c_int;
    fork() -> libc::pid_t;
    setuid(user: uid_t) -> c_int;
    seteuid(effective: uid_t) -> c_int;
    setreuid(user: uid_t, effective: uid_t) -> c_int;
    setresuid(user: uid_t, effective: uid_t, saved: uid_t) -> c_int;
    clone(start: extern "C-unwind" fn(*mut c_void) -> c_int, stack: *mut c_void, flags: c_int, argument: *mut c_void, parent: usize, area: usize, child: usize) -> c_int;
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    socketpair(domain: c_int, kind: c_int, protocol: c_int, pair: *mut c_int) -> c_int;
    daemon(stays: c_int, keeps: c_int) -> c_int;
    preadv2(fd: c_int, iov: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t;
    pwritev2(fd: c_int, iov: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t;
    pwrite64(fd: c_int, from: *const c_void, bytes: size_t, offset: off64_t) -> ssize_t;
    pwritev64(fd: c_int, iov: *const iovec, count: c_int, offset: off64_t) -> ssize_t;
    fdopen(fd: c_int, mode: *const c_char) -> *mut FILE;
    fclose(stream: *mut FILE) -> c_int;
    vdprintf(fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int;
    execve(path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    execvpe(file: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    execveat(directory: c_int, path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char, flags: c_int) -> c_int;
    fexecve(fd: c_int, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    posix_spawn(child: *mut libc::pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    posix_spawnp(child: *mut libc::pid_t, file: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *const c_char, environment: *const *const c_char) -> c_int;
    memmove(to: *mut c_void, from: *const c_void, bytes: size_t) -> *mut c_void;
    memset(to: *mut c_void, value: c_int, bytes: size_t) -> *mut c_void;
    madvise(at: *mut c_void, bytes: size_t, advice: c_int) -> c_int;
    epoll_wait(fd: c_int, events: *mut epoll_event, count: c_int, timeout: c_int) -> c_int;
    epoll_pwait(fd: c_int, events: *mut epoll_event, count: c_int, timeout: c_int, mask: *const sigset_t) -> c_int;
    epoll_pwait2(fd: c_int, events: *mut epoll_event, count: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t) -> c_int;
    __ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, room: size_t) -> c_int;
    select(count: c_int, read: *mut fd_set, write: *mut fd_set, other: *mut fd_set, timeout: *mut timeval) -> c_int;
    pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, other: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    pthread_create(thread: *mut pthread_t, attributes: *const pthread_attr_t, start: extern "C-unwind" fn(*mut c_void) -> *mut c_void, argument: *mut c_void) -> c_int;
    thrd_create(thread: *mut c_void, start: extern "C-unwind" fn(*mut c_void) -> c_int, argument: *mut c_void) -> c_int;
}

unsafe extern "C" {
    fn __libc_malloc(bytes: size_t) -> *mut c_void;
}

/// Calls malloc_usable_size(3) of the heap that `__libc_malloc` belongs to. That is glibc's heap, even if the program
/// brings another one (jemalloc). But some heaps (tcmalloc, mimalloc) define `__libc_malloc`, too: then it is that
/// heap.
///
/// # Safety
/// `at` is a block of that heap.
pub unsafe fn malloc_usable_size(at: *mut c_void) -> size_t {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let mut found = FOUND.load(Ordering::Relaxed);
    if found.is_null() {
        // SAFETY: names that end with a zero byte; the library that the heap is in is loaded, and stays.
        found = unsafe {
            let mut heap = std::mem::zeroed::<libc::Dl_info>();
            libc::dladdr(__libc_malloc as *const c_void, &raw mut heap);
            let library = libc::dlopen(heap.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            libc::dlsym(library, c"malloc_usable_size".as_ptr())
        };
        if found.is_null() {
            super::ending::end_process("the heap does not say how large its blocks are (malloc_usable_size)");
        }
        FOUND.store(found, Ordering::Relaxed);
    }
    // SAFETY: the function of this name has this type in every heap.
    let function: unsafe extern "C" fn(*mut c_void) -> size_t = unsafe { std::mem::transmute(found) };
    // SAFETY: the caller promises that `at` is a block of that heap.
    unsafe { function(at) }
}
