//! Table of glibc's calls that move bytes, make or close descriptors, allocate or free memory, or start programs. It
//! says what the library of `shunt run` does about each. tests/calls.rs compares this table with the library and with
//! glibc. The bytes of a program's bodies are in the *store* of its machine's agent. Memory may be *absent*: it then
//! stands for bytes in a store, and gets them when somebody touches it. On a connection between two programs under
//! `shunt run`, bytes travel in *frames*, which have either the bytes themselves or references to bytes of a store.

/// Treatment of a call by the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Replaced: the call reads or writes, and the replacement handles frames, references and absent memory.
    Moves,
    /// Replaced: the call writes to a file or another place that is no connection. Absent bytes that it is to write are
    /// fetched first.
    FetchesFirst,
    /// Replaced: the call copies or fills memory. Absent bytes that it reads are fetched first, together with those
    /// behind them, or are absent in the copy, too.
    Copies,
    /// Replaced: the call makes, copies or closes descriptors.
    Descriptors,
    /// Replaced: the call reads or sets a property of a connection.
    Asks,
    /// Replaced: the call waits, or ends the process. Before that, the library tells the agent which of the written
    /// bodies another machine is to send.
    Turns,
    /// Replaced: the call allocates or frees memory, which may be absent.
    Memory,
    /// Replaced: the call starts a thread. The library notes that other threads may write into memory from now on.
    Threads,
    /// Replaced: the call starts a program, which then also runs under `shunt run`. Or it starts a process, whose
    /// memory must have all of its bytes.
    Programs,
    /// Replaced: the call may change the process's user. The library then moves the states of the process's connections
    /// to memory of the new user.
    Users,
    /// Replaced: a call of OpenSSL's, not glibc's. The library needs it to hand off TLS connections.
    Openssl,
    /// Replaced: the call fails, as on a kernel that lacks it.
    Refused,
    /// Not replaced: the kernel's own call is right. Bytes, end of file and errors are in the real socket, and absent
    /// memory is fetched when the kernel touches it.
    Kernels,
    /// Not replaced: glibc's own call is right. It ends in calls that are replaced, or runs handlers of the library
    /// (pthread_atfork(3)).
    Glibcs,
}

impl Class {
    /// Returns whether the library replaces calls of this class.
    #[must_use]
    pub fn is_replaced(self) -> bool {
        !matches!(self, Self::Kernels | Self::Glibcs)
    }
}

use Class::{
    Asks, Copies, Descriptors, FetchesFirst, Glibcs, Kernels, Memory, Moves, Openssl, Programs, Refused, Threads,
    Turns, Users,
};

/// All names of the calls, with their twins: checked (`_chk`), 64-bit (`64`), internal (`__`), and successors (`2`,
/// `4`).
pub const CALLS: &[(Class, &[&str])] = &[
    // Reading.
    (Moves, &["read", "__read", "__read_chk", "readv", "preadv2", "preadv64v2"]),
    (Moves, &["recv", "__recv_chk", "recvfrom", "__recvfrom_chk", "recvmsg", "recvmmsg"]),
    // Sockets have no offset, so these calls fail on them with ESPIPE.
    (Kernels, &["pread", "pread64", "__pread64", "__pread_chk", "__pread64_chk", "preadv", "preadv64"]),
    // Writing.
    (Moves, &["write", "__write", "writev", "pwritev2", "pwritev64v2"]),
    (Moves, &["send", "__send", "sendto", "sendmsg", "sendmmsg"]),
    (FetchesFirst, &["pwrite", "pwrite64", "__pwrite64", "pwritev", "pwritev64"]),
    (Moves, &["dprintf", "__dprintf_chk", "vdprintf", "__vdprintf_chk"]),
    // Moving bytes between descriptors.
    (Moves, &["sendfile", "sendfile64", "splice"]),
    (Kernels, &["tee", "vmsplice", "copy_file_range"]),
    // System calls by number.
    (Moves, &["syscall"]),
    // Descriptors.
    (Descriptors, &["socket", "socketpair", "connect", "__connect", "listen", "accept", "accept4"]),
    (Descriptors, &["close", "__close", "close_range", "closefrom"]),
    (Descriptors, &["dup", "dup2", "__dup2", "dup3", "fcntl", "fcntl64", "__fcntl", "daemon"]),
    (Descriptors, &["pidfd_getfd"]),
    (Descriptors, &["fdopen", "_IO_fdopen", "fclose", "_IO_fclose"]),
    (Kernels, &["bind", "shutdown", "getsockname", "getpeername", "sockatmark", "isfdtype"]),
    // Streams on descriptors that are no connections.
    (Glibcs, &["_IO_popen", "freopen", "freopen64", "fcloseall", "popen", "pclose", "fopencookie"]),
    // Properties of connections.
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
    // If one of these calls unmaps or moves memory, the kernel tells the library (userfaultfd(2)). If the kernel reads
    // absent memory for one of them, the library fetches the bytes.
    (Kernels, &["munmap", "mmap", "mmap64", "brk", "sbrk", "__sbrk", "mlock", "mlock2", "mlockall"]),
    (Kernels, &["process_vm_readv", "process_vm_writev", "process_madvise", "posix_madvise"]),
    // Processes. The library's handlers (pthread_atfork(3)) do what has to be done at a fork.
    (Glibcs, &["fork", "__fork", "forkpty", "login_tty", "system"]),
    (Threads, &["pthread_create", "thrd_create"]),
    (Programs, &["vfork", "__vfork", "clone", "__clone"]),
    (Programs, &["execve", "execv", "execvp", "execvpe", "execveat", "fexecve", "execl", "execlp", "execle"]),
    (Programs, &["posix_spawn", "posix_spawnp"]),
    (Users, &["setuid", "seteuid", "setreuid", "setresuid"]),
    (Kernels, &["setfsuid", "setgid", "setegid", "setregid", "setresgid", "setgroups", "initgroups"]),
    // Reads and writes at an offset, which sockets do not have.
    (Kernels, &["aio_read", "aio_read64", "aio_write", "aio_write64", "lio_listio", "lio_listio64"]),
    // Calls of OpenSSL's, for programs that use it.
    (Openssl, &["SSL_write", "SSL_write_ex", "SSL_get_error", "SSL_CTX_new", "SSL_CTX_new_ex"]),
    (Openssl, &["SSL_set_msg_callback", "SSL_callback_ctrl", "SSL_clear"]),
    // io_uring would read and write connections without the library, and take frames for ordinary bytes.
    (Refused, &["io_uring_setup", "io_uring_queue_init", "io_uring_queue_init_params", "io_uring_queue_init_mem"]),
];

/// Returns how the library treats a call, or `None` for a call that the library has nothing to do with.
#[must_use]
pub fn class(name: &str) -> Option<Class> {
    CALLS.iter().find(|(_, names)| names.contains(&name)).map(|(class, _)| *class)
}
