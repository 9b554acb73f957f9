//! Whether this kernel has what the steering programs need, asked as libbpf asks: by loading a program for each.

use libbpf_rs::libbpf_sys::{
    BPF_FUNC_fib_lookup, BPF_FUNC_get_netns_cookie, BPF_FUNC_redirect_neigh, BPF_FUNC_ringbuf_output,
    BPF_FUNC_setsockopt, BPF_FUNC_skc_lookup_tcp, BPF_FUNC_tcp_sock, bpf_func_id,
};
use libbpf_rs::{MapType, ProgramType, Result};

/// Helpers that came late, or that a build may leave out, by the type of the program that calls them.
const HELPERS: &[(ProgramType, bpf_func_id, &str)] = &[
    (ProgramType::SchedCls, BPF_FUNC_redirect_neigh, "bpf_redirect_neigh (tc)"),
    (ProgramType::SchedCls, BPF_FUNC_fib_lookup, "bpf_fib_lookup (tc)"),
    (ProgramType::SchedCls, BPF_FUNC_skc_lookup_tcp, "bpf_skc_lookup_tcp (tc)"),
    (ProgramType::SchedCls, BPF_FUNC_tcp_sock, "bpf_tcp_sock (tc)"),
    (ProgramType::SchedCls, BPF_FUNC_ringbuf_output, "bpf_ringbuf_output (tc)"),
    (ProgramType::CgroupSockopt, BPF_FUNC_get_netns_cookie, "bpf_get_netns_cookie (cgroup/setsockopt)"),
    (ProgramType::SockOps, BPF_FUNC_setsockopt, "bpf_setsockopt (sockops)"),
];

/// Missing kernel features, by name.
///
/// # Errors
/// The kernel's, where this process may not load programs.
pub fn missing() -> Result<Vec<&'static str>> {
    crate::attach::log_libbpf();
    let mut missing = Vec::new();
    let types = [
        (ProgramType::SchedCls, "tc programs (CONFIG_NET_CLS_BPF)"),
        (ProgramType::CgroupSockopt, "cgroup/setsockopt programs (CONFIG_CGROUP_BPF)"),
        (ProgramType::SockOps, "sockops programs (CONFIG_CGROUP_BPF)"),
    ];
    for (kind, name) in types {
        missing.extend((!kind.is_supported()?).then_some(name));
    }
    missing.extend((!MapType::RingBuf.is_supported()?).then_some("ring buffers"));
    for (kind, helper, name) in HELPERS {
        if !kind.is_helper_supported(*helper)? {
            missing.push(name);
        }
    }
    Ok(missing)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_kernel_that_runs_the_other_tests_misses_nothing() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: asking the kernel takes root");
        }
        assert_eq!(super::missing().unwrap(), Vec::<&str>::new());
    }
}
