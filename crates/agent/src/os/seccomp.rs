//! The system calls that the agent may make once it has started (seccomp(2)). Any other call fails with EPERM: the
//! agent logs that an operation failed, and continues without it. So an attacker who controls the agent gains nothing
//! by such a call.
//!
//! Among the calls that are not allowed: execve, ptrace, process_vm_readv and process_vm_writev (another process's
//! memory), loading BPF programs, packet sockets, new executable memory. Raw sockets need CAP_NET_RAW, which the agent
//! has given up.

use std::collections::BTreeMap;

use libc::{c_int, c_long};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// Calls that are allowed with any arguments.
const CALLS: &[c_long] = &[
    // sockets
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socketpair,
    // payloads, and waiting for them
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_sendfile,
    libc::SYS_write,
    libc::SYS_writev,
    // files: certificates, the list of TCP connections, the board and the counters
    libc::SYS_close,
    libc::SYS_fchmod,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_ftruncate,
    libc::SYS_getdents64,
    libc::SYS_lseek,
    libc::SYS_memfd_create,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_readlinkat,
    libc::SYS_statx,
    libc::SYS_unlinkat,
    // memory, time, random bytes
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_getrandom,
    libc::SYS_gettimeofday,
    libc::SYS_madvise,
    libc::SYS_mlock,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    // signals, locks, and the end of a process
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
];

/// Calls of older interfaces that x86-64 has and aarch64 lacks.
#[cfg(target_arch = "x86_64")]
const OLD_CALLS: &[c_long] = &[
    libc::SYS_epoll_wait,
    libc::SYS_open,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_stat,
    libc::SYS_time,
    libc::SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD_CALLS: &[c_long] = &[];

/// socket(2): the address families that are allowed.
const FAMILIES: &[c_int] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
/// bpf(2): calls on maps, and running the loaded programs. The numbers are those of `enum bpf_cmd`: MAP_CREATE,
/// MAP_LOOKUP_ELEM, MAP_UPDATE_ELEM, MAP_DELETE_ELEM, MAP_GET_NEXT_KEY, PROG_TEST_RUN, OBJ_GET_INFO_BY_FD,
/// MAP_LOOKUP_BATCH.
const BPF_COMMANDS: &[c_int] = &[0, 1, 2, 3, 4, 10, 15, 24];
/// Option of prctl(2), from linux/prctl.h since Linux 6.4.
const PR_GET_AUXV: u64 = 0x4155_5856;
/// ioctl(2): numbers of unsent and of unread bytes in a socket, non-blocking mode, names and indices of interfaces, and
/// whether a log is a terminal.
const IOCTLS: &[u64] =
    &[libc::TIOCOUTQ, libc::FIONREAD, libc::FIONBIO, libc::SIOCGIFINDEX, libc::SIOCGIFNAME, libc::TCGETS];

/// Reason why the filter cannot be set. The agent does not start then.
#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    /// The kernel refuses the filter.
    #[error("cannot restrict system calls: {0}; `seccomp = false` in the configuration turns the restriction off")]
    Apply(#[from] seccompiler::Error),
    /// The filter cannot be built from the lists of this file.
    #[error("the list of allowed system calls cannot be compiled: {0}")]
    Build(#[from] BackendError),
}

/// Restricts all threads of this process to the listed system calls, until the process ends.
///
/// # Errors
/// Returns a [`SeccompError`]: the filter cannot be built, or the kernel refuses it.
pub fn restrict() -> Result<(), SeccompError> {
    let filter = SeccompFilter::new(
        rules()?,
        SeccompAction::Errno(libc::EPERM as u32),
        SeccompAction::Allow,
        TargetArch::try_from(std::env::consts::ARCH)?,
    )?;
    let program: BpfProgram = filter.try_into()?;
    Ok(seccompiler::apply_filter_all_threads(&program)?)
}

fn rules() -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        CALLS.iter().chain(OLD_CALLS).map(|call| (*call, Vec::new())).collect();
    let families = FAMILIES.iter().map(|family| only(0, *family as u64));
    rules.insert(libc::SYS_socket, families.collect::<Result<_, _>>()?);
    let commands = BPF_COMMANDS.iter().map(|command| only(0, *command as u64));
    rules.insert(libc::SYS_bpf, commands.collect::<Result<_, _>>()?);
    let requests = IOCTLS.iter().map(|request| only(1, *request));
    rules.insert(libc::SYS_ioctl, requests.collect::<Result<_, _>>()?);
    // The process may read its own limits, such as that of descriptors, and set none.
    let own = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, 0)?;
    let nothing_new = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    rules.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![own, nothing_new])?]);
    // PR_GET_AUXV, by which a library finds the vDSO.
    rules.insert(libc::SYS_prctl, vec![only(0, PR_GET_AUXV)?]);
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        let not_executable = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
        let condition = SeccompCondition::new(2, SeccompCmpArgLen::Dword, not_executable, 0)?;
        rules.insert(call, vec![SeccompRule::new(vec![condition])?]);
    }
    Ok(rules)
}

fn only(argument: u8, value: u64) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)?])
}
