//! Whether this kernel has what the steering programs need, asked as libbpf asks: by loading a program for each; and
//! whether it takes the programs themselves.

use std::mem::MaybeUninit;
use std::ptr;

use libbpf_rs::libbpf_sys::{
    BPF_FUNC_fib_lookup, BPF_FUNC_get_netns_cookie, BPF_FUNC_redirect_neigh, BPF_FUNC_ringbuf_output,
    BPF_FUNC_setsockopt, BPF_FUNC_skc_lookup_tcp, BPF_FUNC_tcp_sock, bpf_func_id,
};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{AsRawLibbpf, MapType, OpenObject, ProgramType, Result};

use crate::bpf::backend::BackendSkelBuilder;
use crate::bpf::frontend::FrontendSkelBuilder;
use crate::error::SteeringError;

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

/// Has the kernel check the frontend's programs, and forgets them: nothing is attached or pinned.
///
/// # Errors
/// [`SteeringError::Load`], with the kernel's answer: each release counts a program's stack and steps its own way.
pub fn load_frontend() -> Result<(), SteeringError> {
    load_and_forget::<FrontendSkelBuilder>("frontend")
}

/// The same of the backend's programs.
///
/// # Errors
/// As of [`load_frontend`].
pub fn load_backend() -> Result<(), SteeringError> {
    load_and_forget::<BackendSkelBuilder>("backend")
}

fn load_and_forget<B: for<'a> SkelBuilder<'a> + Default>(object: &'static str) -> Result<(), SteeringError> {
    crate::attach::log_libbpf();
    crate::until_not_interrupted(|| {
        let load = |source| SteeringError::Load { object, source };
        let mut storage = MaybeUninit::uninit();
        let mut open = B::default().open(&mut storage).map_err(load)?;
        without_pins(open.open_object_mut()).map_err(load)?;
        open.load().map_err(load)?;
        Ok(())
    })
}

/// An agent's maps are found by their pins, and these are not to be the agent's.
fn without_pins(object: &mut OpenObject) -> Result<()> {
    for map in object.maps_mut() {
        // SAFETY: the map is an open object's, and libbpf takes NULL for no pin at all.
        let done =
            unsafe { libbpf_rs::libbpf_sys::bpf_map__set_pin_path(map.as_libbpf_object().as_ptr(), ptr::null()) };
        if done < 0 {
            return Err(libbpf_rs::Error::from_raw_os_error(-done));
        }
    }
    Ok(())
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

    #[test]
    fn programs_that_are_only_asked_about_leave_no_pins() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: loading the programs takes root");
        }
        // Where libbpf pins the maps of an object that says nothing else (LIBBPF_PIN_BY_NAME).
        let pins = ["flows", "peers", "senders", "counters"].map(|name| std::path::Path::new("/sys/fs/bpf").join(name));
        let there = || pins.each_ref().map(|pin| pin.exists());
        let before = there();
        super::load_frontend().unwrap();
        super::load_backend().unwrap();
        assert_eq!(there(), before);
    }
}
