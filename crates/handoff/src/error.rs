//! Errors of loading or changing the steering programs.

use std::io;
use std::path::{Path, PathBuf};

/// Advice to an operator if the pins of a program are not found.
const WITHOUT_PINS: &str = "; if no other agent runs, in containers either, this agent's pins were removed: run \
                            `shuntd --detach --force` with this configuration";

/// Error of steering. A variant names what failed, and on what. If the kernel refused a call, the kernel's answer is
/// the variant's source.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SteeringError {
    #[error("{path} is in no BPF file system: run `mount -t bpf bpf /sys/fs/bpf`, and set `pins` to a path below that")]
    NotBpffs { path: PathBuf },
    #[error(
        "the maps in {path} are of another version of Shunt ({found}, this is {ours}), and handoffs in progress \
         cannot be continued: run `shuntd --detach`, which ends them, then start again"
    )]
    Layout { path: PathBuf, found: String, ours: String },
    #[error("the kernel refused the {object} programs (they need Linux 5.15 or newer, CAP_BPF and CAP_NET_ADMIN)")]
    Load { object: &'static str, source: libbpf_rs::Error },
    #[error("cannot attach {program} to {target}")]
    Attach { program: &'static str, target: String, source: libbpf_rs::Error },
    #[error(
        "interface \"{interface}\" has the program {program} of another agent{}: stop that agent and run `shuntd \
         --detach` with its configuration, or name another interface{}",
        .pins.as_ref().map(|pins| format!(", whose pins are in {}", pins.display())).unwrap_or_default(),
        if .pins.is_some() { "" } else { WITHOUT_PINS }
    )]
    Taken { interface: String, program: String, pins: Option<PathBuf> },
    #[error(
        "another frontend agent of this network namespace, with its pins in {}, has the servers below {} already. Use \
         one agent for all interfaces; or give each agent a `cgroup` of its own, neither below the other; or, if that \
         agent has ended, run `shuntd --detach` with its configuration",
        .pins.display(), .cgroup.display()
    )]
    Neighbour { cgroup: PathBuf, pins: PathBuf },
    #[error("cannot take {program} off interface \"{interface}\"")]
    Detach { program: &'static str, interface: String, source: libbpf_rs::Error },
    #[error("{call} of the {map} map")]
    Map { call: &'static str, map: &'static str, source: libbpf_rs::Error },
    #[error("{call} {path}")]
    Path { call: &'static str, path: PathBuf, source: io::Error },
    #[error("no {what} number {index}: there are {limit}")]
    Index { what: &'static str, index: u32, limit: u32 },
}

impl SteeringError {
    pub(crate) fn map(call: &'static str, map: &'static str) -> impl FnOnce(libbpf_rs::Error) -> Self {
        move |source| Self::Map { call, map, source }
    }

    pub(crate) fn path(call: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Path { call, path: path.into(), source }
    }
}
