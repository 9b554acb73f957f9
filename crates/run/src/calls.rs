//! glibc's calls that move bytes, make or end descriptors, give and take memory, or start programs: what the library of
//! `shunt run` does about each. tests/calls.rs holds this against the library and against glibc.

/// What is done about a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Replaced: reads or writes, and knows frames, references and absent memory.
    Moves,
    /// Replaced: writes elsewhere; absent memory is fetched before, at once.
    FetchesFirst,
    /// Replaced: copies memory; what is absent is fetched before, with what is behind it.
    Copies,
    /// Replaced: makes, copies or ends descriptors.
    Descriptors,
    /// Replaced: asks or says something about a connection.
    Asks,
    /// Replaced: waits, or ends the process. What a program has written until then and another machine is to send, the agent
    /// is told before.
    Turns,
    /// Replaced: gives and takes memory, which may be absent.
    Memory,
    /// Replaced: notes that others may write into memory from here on.
    Threads,
    /// Replaced: starts a program, which is under Shunt too, or a process, whose memory must be whole.
    Programs,
    /// Replaced: may make the process another user's, who gets memory of its own for what the library keeps.
    Users,
    /// Replaced: not glibc's; absent memory that goes to TLS clients.
    Openssl,
    /// Replaced: fails, as on a kernel without it.
    Refused,
    /// Not replaced: the kernel's own is right. Bytes, end and errors are in the real socket, and absent memory is
    /// fetched when the kernel touches it.
    Kernels,
    /// Not replaced: glibc's own is right, because it ends in calls that are replaced, or in handlers of ours.
    Glibcs,
}

impl Class {
    /// Whether the library has the symbol.
    #[must_use]
    pub fn is_replaced(self) -> bool {
        !matches!(self, Self::Kernels | Self::Glibcs)
    }
}

use Class::{
    Asks, Copies, Descriptors, FetchesFirst, Glibcs, Kernels, Memory, Moves, Openssl, Programs, Refused, Threads,
    Turns, Users,
};

/// Every name, with its twins: checked (`_chk`), 64-bit (`64`), internal (`__`), and its successors (`2`, `4`).
pub const CALLS: &[(Class, &[&str])] = &[
    // Reading.
    (Moves, &["read", "__read", "__read_chk", "readv", "preadv2", "preadv64v2"]),
    (Moves, &["recv", "__recv_chk", "recvfrom", "__recvfrom_chk", "recvmsg", "recvmmsg"]),
    // Sockets have no offset (ESPIPE).
    (Kernels, &["pread", "pread64", "__pread64", "__pread_chk", "__pread64_chk", "preadv", "preadv64"]),
    // Writing.
    (Moves, &["write", "__write", "writev", "pwritev2", "pwritev64v2"]),
    (Moves, &["send", "__send", "sendto", "sendmsg", "sendmmsg"]),
    (FetchesFirst, &["pwrite", "pwrite64", "__pwrite64", "pwritev", "pwritev64"]),
    (Moves, &["dprintf", "__dprintf_chk", "vdprintf", "__vdprintf_chk"]),
    // Between descriptors.
    (Moves, &["sendfile", "sendfile64", "splice"]),
    (Kernels, &["tee", "vmsplice", "copy_file_range"]),
    // By number.
    (Moves, &["syscall"]),
    // Descriptors.
    (Descriptors, &["socket", "socketpair", "connect", "__connect", "listen", "accept", "accept4"]),
    (Descriptors, &["close", "__close", "close_range", "closefrom"]),
    (Descriptors, &["dup", "dup2", "__dup2", "dup3", "fcntl", "fcntl64", "__fcntl", "daemon"]),
    (Descriptors, &["pidfd_getfd"]),
    (Descriptors, &["fdopen", "_IO_fdopen", "fclose", "_IO_fclose"]),
    (Kernels, &["bind", "shutdown", "getsockname", "getpeername", "sockatmark", "isfdtype"]),
    // Streams on what is not a connection.
    (Glibcs, &["_IO_popen", "freopen", "freopen64", "fcloseall", "popen", "pclose", "fopencookie"]),
    // Questions.
    (Asks, &["ioctl", "getsockopt", "setsockopt"]),
    // Readiness.
    (Turns, &["poll", "__poll", "__poll_chk", "ppoll", "__ppoll_chk", "select", "__select", "pselect"]),
    (Turns, &["epoll_wait", "epoll_pwait", "epoll_pwait2", "_exit", "_Exit"]),
    (Kernels, &["epoll_create", "epoll_create1", "epoll_ctl"]),
    // Memory.
    (Memory, &["malloc", "calloc", "realloc", "reallocarray", "free", "cfree", "malloc_usable_size"]),
    (Memory, &["memalign", "aligned_alloc", "posix_memalign", "valloc", "pvalloc", "madvise", "mremap"]),
    (Copies, &["memcpy", "__memcpy_chk", "memmove", "__memmove_chk"]),
    (Copies, &["mempcpy", "__mempcpy", "__mempcpy_chk", "memset", "__memset_chk"]),
    (Copies, &["bzero", "__bzero"]),
    // The kernel tells what is unmapped; it fetches what is read.
    (Kernels, &["munmap", "mmap", "mmap64", "brk", "sbrk", "__sbrk", "mlock", "mlock2", "mlockall"]),
    (Kernels, &["process_vm_readv", "process_vm_writev", "process_madvise", "posix_madvise"]),
    // Processes. What glibc's fork needs is done by pthread_atfork's handlers.
    (Glibcs, &["fork", "__fork", "forkpty", "login_tty", "system"]),
    (Threads, &["pthread_create", "thrd_create"]),
    (Programs, &["vfork", "__vfork", "clone", "__clone"]),
    (Programs, &["execve", "execv", "execvp", "execvpe", "execveat", "fexecve", "execl", "execlp", "execle"]),
    (Programs, &["posix_spawn", "posix_spawnp"]),
    (Users, &["setuid", "seteuid", "setreuid", "setresuid"]),
    (Kernels, &["setfsuid", "setgid", "setegid", "setregid", "setresgid", "setgroups", "initgroups"]),
    // Reads and writes at an offset, which sockets have not.
    (Kernels, &["aio_read", "aio_read64", "aio_write", "aio_write64", "lio_listio", "lio_listio64"]),
    // OpenSSL's, for those who have it.
    (Openssl, &["SSL_write", "SSL_write_ex", "SSL_get_error", "SSL_CTX_new", "SSL_CTX_new_ex"]),
    (Openssl, &["SSL_set_msg_callback", "SSL_callback_ctrl", "SSL_clear"]),
    // Rings would read and write connections where frames are bytes as any others.
    (Refused, &["io_uring_setup", "io_uring_queue_init", "io_uring_queue_init_params", "io_uring_queue_init_mem"]),
];

/// What is done about a call; `None`: it is about nothing of this.
#[must_use]
pub fn class(name: &str) -> Option<Class> {
    CALLS.iter().find(|(_, names)| names.contains(&name)).map(|(class, _)| *class)
}
