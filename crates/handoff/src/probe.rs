//! Checks whether this kernel has the features that the steering programs need, by loading a small program for each, as
//! libbpf does. Also checks whether the kernel accepts the steering programs themselves.

use std::mem::MaybeUninit;
use std::ops::RangeInclusive;
use std::ptr;

use libbpf_rs::libbpf_sys::{
    BPF_FUNC_get_netns_cookie, BPF_FUNC_redirect_neigh, BPF_FUNC_ringbuf_output, BPF_FUNC_setsockopt,
    BPF_FUNC_skc_lookup_tcp, BPF_FUNC_tcp_sock, bpf_func_id,
};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{AsRawLibbpf, MapType, OpenObject, ProgramType, Result};

use crate::bpf::backend::BackendSkelBuilder;
use crate::bpf::frontend::FrontendSkelBuilder;
use crate::error::SteeringError;
use crate::{backend, frontend};

/// BPF helpers that older kernels lack, or that a kernel build may leave out, each with the type of a program for which
/// it is looked up.
const HELPERS: &[(ProgramType, bpf_func_id, &str)] = &[
    (ProgramType::SchedCls, BPF_FUNC_redirect_neigh, "bpf_redirect_neigh (tc)"),
    (ProgramType::SchedCls, BPF_FUNC_skc_lookup_tcp, "bpf_skc_lookup_tcp (tc)"),
    (ProgramType::SchedCls, BPF_FUNC_ringbuf_output, "bpf_ringbuf_output (tc)"),
    (ProgramType::CgroupSockopt, BPF_FUNC_tcp_sock, "bpf_tcp_sock (cgroup/setsockopt)"),
    (ProgramType::CgroupSockopt, BPF_FUNC_get_netns_cookie, "bpf_get_netns_cookie (cgroup/setsockopt)"),
    (ProgramType::SockOps, BPF_FUNC_get_netns_cookie, "bpf_get_netns_cookie (sockops)"),
    (ProgramType::SockOps, BPF_FUNC_setsockopt, "bpf_setsockopt (sockops)"),
];

/// Returns the names of missing kernel features.
///
/// # Errors
/// Returns the kernel's error of bpf(2) if this process may not load programs.
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

/// An arbitrary cookie of a network namespace. With cookie 0 the programs would not check the namespace, and the
/// verifier would skip that code.
const SOME_COOKIE: u64 = 1;

/// Lets the kernel check the frontend's programs, and unloads them. Nothing is attached or pinned.
///
/// # Errors
/// [`SteeringError::Load`] with the kernel's answer. Kernel releases differ in how they count a program's stack and
/// steps.
pub fn load_frontend() -> Result<(), SteeringError> {
    const OBJECT: &str = "frontend";
    crate::until_not_interrupted(|| {
        let mut storage = MaybeUninit::uninit();
        let mut open = FrontendSkelBuilder::default().open(&mut storage).map_err(refused(OBJECT))?;
        frontend::set_constants(&mut open, SOME_COOKIE, true);
        load_and_forget(open).map_err(refused(OBJECT))
    })
}

/// Lets the kernel check the backend's programs, for an agent whose sockets have these ports, and unloads them.
///
/// # Errors
/// [`SteeringError::Load`] with the kernel's answer.
pub fn load_backend(ports: &RangeInclusive<u16>) -> Result<(), SteeringError> {
    const OBJECT: &str = "backend";
    crate::until_not_interrupted(|| {
        let mut storage = MaybeUninit::uninit();
        let mut open = BackendSkelBuilder::default().open(&mut storage).map_err(refused(OBJECT))?;
        backend::set_constants(&mut open, SOME_COOKIE, ports);
        load_and_forget(open).map_err(refused(OBJECT))
    })
}

fn refused(object: &'static str) -> impl FnOnce(libbpf_rs::Error) -> SteeringError {
    move |source| SteeringError::Load { object, source }
}

fn load_and_forget<'a>(mut open: impl OpenSkel<'a>) -> Result<()> {
    crate::attach::log_libbpf();
    without_pins(open.open_object_mut())?;
    open.load().map(drop)
}

/// Removes the pin paths of all maps. The maps of an agent are found by their pins, and these maps must not become the
/// agent's.
fn without_pins(object: &mut OpenObject) -> Result<()> {
    for map in object.maps_mut() {
        // SAFETY: the map belongs to an open object, and libbpf takes NULL for no pin path.
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
        shunt_testbed::needs_root();
        assert_eq!(super::missing().unwrap(), Vec::<&str>::new());
    }

    #[test]
    fn programs_that_are_only_asked_about_leave_no_pins() {
        shunt_testbed::needs_root();
        // Paths under which libbpf pins the maps of an object by default (LIBBPF_PIN_BY_NAME).
        let pins = [
            "flows",
            "peers",
            "rings",
            "ring_owners",
            "handshakes",
            "watched_ports",
            "senders",
            "sender_slots",
            "counters",
        ]
        .map(|name| std::path::Path::new("/sys/fs/bpf").join(name));
        let there = || pins.each_ref().map(|pin| pin.exists());
        let before = there();
        super::load_frontend().unwrap();
        super::load_backend(&(61000..=61063)).unwrap();
        assert_eq!(there(), before);
    }
}
