//! Programs to their hooks, so that they stay when the agent ends, and a newer program takes an older one's place
//! without a packet in between.
//!
//! * tc: the clsact qdisc of an interface, at a priority of ours. `TcHook` replaces atomically. Each program is pinned beside
//!   the maps, which says whose it is (ownership.rs).
//! * cgroup: a link, pinned beside the maps. A link's program is replaced atomically too.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{Link, PrintLevel, Program, ProgramMut, TC_EGRESS, TC_INGRESS, TcAttachPoint, TcHook};
use libbpf_rs::{TcHookBuilder, set_print};
use rustix::net::{AddressFamily, SocketType, netdevice, socket};

use crate::error::SteeringError;
use crate::ownership::{Owned, Tc, pinned_program};
use crate::pins::MAPS;

const HANDLE: u32 = 1;
const LINKS: [&str; 2] = [FE_SETSOCKOPT, BE_CONNECTED];

/// Names of the cgroup programs, and of the files that their links are pinned as.
pub(crate) const FE_SETSOCKOPT: &str = "fe_setsockopt";
pub(crate) const BE_CONNECTED: &str = "be_connected";

/// Where a tc program goes. Each program passes on what is not its own, so their order does not matter; the priority
/// says whose filter it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TcPlace {
    pub program: &'static str,
    point: TcAttachPoint,
    priority: u32,
}

const FE_PRIORITY: u32 = 0x5346;
const BE_PRIORITY: u32 = 0x5342;
pub(crate) const FE_IN: TcPlace = TcPlace { program: "fe_in", point: TC_INGRESS, priority: FE_PRIORITY };
pub(crate) const FE_OUT: TcPlace = TcPlace { program: "fe_out", point: TC_EGRESS, priority: FE_PRIORITY };
pub(crate) const BE_IN: TcPlace = TcPlace { program: "be_in", point: TC_INGRESS, priority: BE_PRIORITY };
pub(crate) const BE_OUT: TcPlace = TcPlace { program: "be_out", point: TC_EGRESS, priority: BE_PRIORITY };

/// libbpf writes to stderr where nobody tells it otherwise.
pub(crate) fn log_libbpf() {
    set_print(Some((PrintLevel::Info, |level, text| {
        let text = text.trim_end();
        match level {
            PrintLevel::Debug => tracing::trace!(target: "libbpf", "{text}"),
            PrintLevel::Info | PrintLevel::Warn => tracing::debug!(target: "libbpf", "{text}"),
        }
    })));
}

/// Loads programs again where the verifier was interrupted: it gives up for any signal that waits for this thread
/// (kernel/bpf/verifier.c, EAGAIN), and libbpf tries five times only.
#[doc(hidden)]
pub fn until_not_interrupted<T>(mut load: impl FnMut() -> Result<T, SteeringError>) -> Result<T, SteeringError> {
    const TRIES: usize = 20;
    for _ in 1..TRIES {
        match load() {
            Err(SteeringError::Load { source, .. }) if source.kind() == libbpf_rs::ErrorKind::WouldBlock => {}
            done => return done,
        }
    }
    load()
}

fn hook(fd: impl AsFd, ifindex: u32, place: TcPlace) -> TcHook {
    TcHookBuilder::new(fd.as_fd())
        .ifindex(ifindex as i32)
        .handle(HANDLE)
        .priority(place.priority)
        .replace(true)
        .hook(place.point)
}

/// A tc program as a descriptor, to be put on an interface that comes later.
#[derive(Debug)]
pub(crate) struct TcProgram {
    fd: OwnedFd,
    id: u32,
    place: TcPlace,
}

/// The tc programs of one role.
#[derive(Debug)]
pub struct TcPrograms(pub(crate) Vec<TcProgram>);

impl TcPrograms {
    /// Those of the frontend whose agent's pins are in `pin_dir`.
    ///
    /// # Errors
    /// They are not there, or not for this process.
    pub fn of_frontend(pin_dir: &Path) -> Result<Self, SteeringError> {
        log_libbpf();
        let pinned = |place: TcPlace| {
            let [pin, _] = pins_of(pin_dir, place.program);
            let failed =
                |source| SteeringError::Attach { program: place.program, target: pin.display().to_string(), source };
            let fd = Program::fd_from_pinned_path(&pin).map_err(failed)?;
            let id = Program::id_from_fd(fd.as_fd()).map_err(failed)?;
            Ok(TcProgram { fd, id, place })
        };
        Ok(Self(vec![pinned(FE_IN)?, pinned(FE_OUT)?]))
    }

    /// Puts on an interface of this thread's network namespace whichever of them are not there: whether any was not. It
    /// takes CAP_NET_ADMIN, and CAP_BPF where bpf(2) is for the privileged.
    ///
    /// # Errors
    /// The kernel's, or that another's program is there.
    pub fn keep_on(&self, ifindex: u32) -> Result<bool, SteeringError> {
        let mut is_new = false;
        for TcProgram { fd, id, place } in &self.0 {
            match filter_at(ifindex, *place) {
                Some(there) if there == *id => continue,
                Some(other) => {
                    let (interface, program) = (interface_name(ifindex), Tc(other).name());
                    return Err(SteeringError::Taken { interface, program, pins: None });
                }
                None => put(fd, ifindex, *place, false)?,
            }
            is_new = true;
        }
        Ok(is_new)
    }
}

fn put(fd: impl AsFd, ifindex: u32, place: TcPlace, in_place_of_another: bool) -> Result<(), SteeringError> {
    let target = || format!("interface \"{}\" (tc)", interface_name(ifindex));
    let failed = |source| SteeringError::Attach { program: place.program, target: target(), source };
    let hook = hook(fd, ifindex, place).create();
    hook.and_then(|mut hook| hook.replace(in_place_of_another).attach()).map(drop).map_err(failed)
}

/// Attaches a tc program to exactly these interfaces of this network namespace. Its maps are pinned in `pin_dir`, and so is
/// the program itself from here on.
///
/// # Errors
/// The kernel's, or that another's program is at one of them.
pub(crate) fn attach_tc(
    program: &mut ProgramMut<'_>,
    place: TcPlace,
    interfaces: &[u32],
    pin_dir: &Path,
) -> Result<TcProgram, SteeringError> {
    let ours = Owned::by(pin_dir);
    for &ifindex in interfaces {
        if let Some(other) = filter_at(ifindex, place).map(Tc).filter(|there| !ours.has(there)) {
            let (interface, pins) = (interface_name(ifindex), other.pins_beside(pin_dir));
            return Err(SteeringError::Taken { interface, program: other.name(), pins });
        }
    }
    // The old one and the new one are ours by their pins until the old one is nowhere any more.
    let [pin, next] = pins_of(pin_dir, place.program);
    remove(&next)?;
    let failed = |source| SteeringError::Attach { program: place.program, target: next.display().to_string(), source };
    program.pin(&next).map_err(failed)?;
    for &ifindex in interfaces {
        put(program.as_fd(), ifindex, place, true)?;
    }
    for ifindex in all_interfaces()? {
        if !interfaces.contains(&ifindex) {
            detach_tc(ifindex, place, &ours);
        }
    }
    fs::rename(&next, &pin).map_err(|source| SteeringError::Path { call: "rename", path: next, source })?;
    let lost = |source: std::io::Error| SteeringError::Path { call: "dup", path: pin.clone(), source };
    let fd = program.as_fd().try_clone_to_owned().map_err(lost)?;
    let id = pinned_program(&pin).ok_or_else(|| lost(ErrorKind::NotFound.into()))?;
    Ok(TcProgram { fd, id, place })
}

/// Files of a program: as it is, and before it is at all interfaces. (In names of a BPF file system there is no dot.)
fn pins_of(pin_dir: &Path, program: &str) -> [std::path::PathBuf; 2] {
    [pin_dir.join(program), pin_dir.join(format!("{program}_next"))]
}

/// Places of a role's programs.
pub(crate) fn places(is_frontend: bool) -> [TcPlace; 2] {
    if is_frontend { [FE_IN, FE_OUT] } else { [BE_IN, BE_OUT] }
}

/// Number of the program at that place.
pub(crate) fn filter_at(ifindex: u32, place: TcPlace) -> Option<u32> {
    log_libbpf();
    // Looking a filter up takes no program; the hook wants some descriptor.
    let any = socket(AddressFamily::UNIX, SocketType::DGRAM, None).ok()?;
    hook(&any, ifindex, place).query().ok()
}

/// Numbers of the programs at that place of this network namespace's interfaces.
pub(crate) fn all_at(place: TcPlace) -> Result<Vec<u32>, SteeringError> {
    Ok(all_interfaces()?.into_iter().filter_map(|ifindex| filter_at(ifindex, place)).collect())
}

/// Takes our filter off an interface, if it is there.
fn detach_tc(ifindex: u32, place: TcPlace, ours: &Owned) {
    let is_ours = filter_at(ifindex, place).map(Tc).is_some_and(|there| ours.has(&there));
    if is_ours && let Err(error) = take_off(ifindex, place) {
        let interface = interface_name(ifindex);
        tracing::warn!(%error, interface, program = place.program, "cannot take a program off an interface");
    }
}

/// Takes whatever is at that place off.
pub(crate) fn take_off(ifindex: u32, place: TcPlace) -> Result<(), SteeringError> {
    let failed = |source| SteeringError::Detach { program: place.program, interface: interface_name(ifindex), source };
    let any = socket(AddressFamily::UNIX, SocketType::DGRAM, None)
        .map_err(|errno| failed(std::io::Error::from(errno).into()))?;
    hook(&any, ifindex, place).detach().map_err(failed)
}

/// What is at the places of a role's programs on an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attached {
    /// All of them, and they are those of this agent.
    Ours,
    /// These are not there.
    Lacking(Vec<&'static str>),
    /// This one is another's.
    Others(String),
}

/// What is at the places of a role's programs on an interface of this thread's network namespace, where the agent's pins
/// are in `pin_dir`.
pub fn attached(ifindex: u32, is_frontend: bool, pin_dir: &Path) -> Attached {
    let mut lacking = Vec::new();
    for place in places(is_frontend) {
        let pinned = pins_of(pin_dir, place.program).map(|pin| pinned_program(&pin));
        match filter_at(ifindex, place) {
            there @ Some(_) if pinned.contains(&there) => {}
            Some(other) => return Attached::Others(Tc(other).name()),
            None => lacking.push(place.program),
        }
    }
    if lacking.is_empty() { Attached::Ours } else { Attached::Lacking(lacking) }
}

/// For an operator: its number where it has no name any more.
fn interface_name(ifindex: u32) -> String {
    let any = socket(AddressFamily::INET, SocketType::DGRAM, None);
    let name = any.and_then(|any| netdevice::index_to_name(&any, ifindex));
    name.map_or_else(|_| format!("number {ifindex}"), |name| name.to_string())
}

/// Indices of the interfaces in this thread's network namespace.
fn all_interfaces() -> Result<Vec<u32>, SteeringError> {
    let path = Path::new("/proc/thread-self/net/dev");
    let failed = |call| move |source| SteeringError::Path { call, path: path.into(), source };
    let table = fs::read_to_string(path).map_err(failed("read"))?;
    let any = socket(AddressFamily::INET, SocketType::DGRAM, None).map_err(|e| failed("socket for")(e.into()))?;
    let names = table.lines().skip(2).filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim());
    Ok(names.filter_map(|name| netdevice::name_to_index(&any, name).ok()).collect())
}

/// Attaches a cgroup program by a link that is pinned under `pin_dir`, or puts it into the link that is there.
///
/// # Errors
/// The kernel's, or that there is no such cgroup.
pub fn attach_cgroup(
    program: &ProgramMut<'_>,
    name: &'static str,
    cgroup: &Path,
    pin_dir: &Path,
) -> Result<(), SteeringError> {
    let pin = pin_dir.join(name);
    let open = |path: &Path| {
        fs::File::open(path).map_err(|source| SteeringError::Path { call: "open", path: path.into(), source })
    };
    let directory = open(cgroup)?;
    // cgroup v2 numbers its cgroups by inode (kernfs).
    let id = directory.metadata().map(|found| found.ino()).unwrap_or(0);
    if take_over(program, &pin, id) {
        return Ok(());
    }
    let failed = |source| SteeringError::Attach { program: name, target: cgroup.display().to_string(), source };
    let mut link = program.attach_cgroup(directory.as_fd().as_raw_fd()).map_err(failed)?;
    // An older link, of another cgroup or of one that is gone, ends with its last name.
    remove(&pin)?;
    link.pin(&pin).map_err(failed)
}

/// Puts the program into the link pinned at `pin` if that is attached to the cgroup numbered `id`.
fn take_over(program: &ProgramMut<'_>, pin: &Path, id: u64) -> bool {
    if !pin.exists() {
        return false;
    }
    let Ok(mut link) = Link::open(pin) else {
        return false;
    };
    let is_same = matches!(link.info().map(|info| info.info), Ok(LinkTypeInfo::Cgroup(at)) if at.cgroup_id == id);
    is_same && link.update_prog(program).is_ok()
}

/// Ends a cgroup program's link at once: without its pin it would end some time later.
pub(crate) fn detach_cgroup(pin: &Path) -> Result<(), SteeringError> {
    if pin.exists()
        && let Err(error) = Link::open(pin).and_then(|link| link.detach())
    {
        tracing::warn!(%error, pin = %pin.display(), "cannot take a program off a control group");
    }
    remove(pin)
}

fn remove(path: &Path) -> Result<(), SteeringError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(SteeringError::Path { call: "unlink", path: path.into(), source: error })
        }
        _ => Ok(()),
    }
}

/// Takes the programs that use the maps under `pin_dir` off this network namespace's interfaces, and these maps out of
/// the kernel, both sides'. The connections of [`crate::end_handoffs`] hang from then on, unless they were closed. The
/// clsact qdiscs and others' programs stay.
///
/// # Errors
/// Where a pinned file cannot be removed.
pub fn detach_all(pin_dir: &Path) -> Result<(), SteeringError> {
    log_libbpf();
    let ours = Owned::by(pin_dir);
    for ifindex in all_interfaces()? {
        for place in [FE_IN, FE_OUT, BE_IN, BE_OUT] {
            detach_tc(ifindex, place, &ours);
        }
    }
    LINKS.iter().try_for_each(|link| detach_cgroup(&pin_dir.join(link)))?;
    MAPS.iter().try_for_each(|map| remove(&pin_dir.join(map)))?;
    for place in [FE_IN, FE_OUT, BE_IN, BE_OUT] {
        pins_of(pin_dir, place.program).iter().try_for_each(|pin| remove(pin))?;
    }
    match fs::remove_dir(pin_dir) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(SteeringError::Path { call: "rmdir", path: pin_dir.into(), source: error })
        }
        _ => Ok(()),
    }
}
