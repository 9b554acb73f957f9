//! Attaches programs to their hooks. They stay when the agent ends, and a newer program replaces an older one without
//! missing a packet. A layout is a version of the pinned maps' contents.
//!
//! * tc: in the clsact qdisc of an interface, at a priority of ours. A program's handle is its layout's number, so
//!   there is room for programs of several layouts (older.rs). `TcHook` replaces atomically. Each program is pinned
//!   beside the maps, and its pin says whose it is (ownership.rs).
//! * cgroup: by a link that is pinned beside the maps. A link's program is replaced atomically, too. The programs
//!   fe_setsockopt of several layouts have an order (calls.rs).

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{Link, PrintLevel, Program, ProgramMut, TC_EGRESS, TC_INGRESS, TcAttachPoint, TcHook};
use libbpf_rs::{TcHookBuilder, set_print};
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};

use crate::bpf::STEERING_LAYOUT;
use crate::error::SteeringError;
use crate::ownership::{Owned, Tc, pinned_program};

const HANDLE: u32 = STEERING_LAYOUT;
/// Handle of the layouts before 13.
const FIRST_HANDLE: u32 = 1;
/// Handles of the layouts from 13 on, those of future versions included.
const HANDLES: std::ops::RangeInclusive<u32> = 13..=LAST_LAYOUT;
/// Greatest number that a layout may have.
const LAST_LAYOUT: u32 = 32;
const _: () = assert!(STEERING_LAYOUT <= LAST_LAYOUT);

/// Names of the cgroup programs, and of the pins of their links.
pub(crate) const FE_SETSOCKOPT: &str = "fe_setsockopt";
pub(crate) const BE_CONNECTED: &str = "be_connected";
/// Name of a program and of its pin. The program notes a backend's confirmation that all of a payload is acknowledged.
pub(crate) const FE_DELIVERED: &str = "fe_delivered";

/// Place of a tc program: hook and priority. Each program passes on packets that are not its own, so the order of
/// programs does not matter. Frontend and backend have different priorities. So their filters can be told apart from
/// each other, and from those of other software.
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

/// Sends libbpf's messages to the log. By default libbpf writes to stderr.
pub(crate) fn log_libbpf() {
    set_print(Some((PrintLevel::Info, |level, text| {
        let text = text.trim_end();
        match level {
            PrintLevel::Debug => tracing::trace!(target: "libbpf", "{text}"),
            PrintLevel::Info | PrintLevel::Warn => tracing::debug!(target: "libbpf", "{text}"),
        }
    })));
}

/// Calls `load` again if the verifier was interrupted, up to 20 times in all. The verifier gives up for any signal that
/// is pending for this thread (kernel/bpf/verifier.c, EAGAIN), and libbpf tries only five times.
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

fn hook(fd: impl AsFd, ifindex: u32, place: TcPlace, handle: u32) -> TcHook {
    TcHookBuilder::new(fd.as_fd())
        .ifindex(ifindex as i32)
        .handle(handle)
        .priority(place.priority)
        .replace(true)
        .hook(place.point)
}

/// A loaded tc program with an open descriptor, by which it can be attached to interfaces that come later.
#[derive(Debug)]
pub(crate) struct TcProgram {
    fd: OwnedFd,
    id: u32,
    place: TcPlace,
}

/// The tc programs of one role: of the frontend or of the backend.
#[derive(Debug)]
pub struct TcPrograms(pub(crate) Vec<TcProgram>);

impl TcPrograms {
    /// Opens the tc programs of the frontend whose agent's pins are in `pin_dir`.
    ///
    /// # Errors
    /// Returns an error if the pins are not there, or this process may not open them.
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

    /// Attaches the programs to an interface of this thread's network namespace, if they are missing there. Returns
    /// whether any was missing. Needs CAP_NET_ADMIN, and CAP_BPF if the kernel keeps bpf(2) for privileged processes.
    ///
    /// # Errors
    /// Returns the kernel's error, or that the program of another agent is there.
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
    let hook = hook(fd, ifindex, place, HANDLE).create();
    hook.and_then(|mut hook| hook.replace(in_place_of_another).attach()).map(drop).map_err(failed)
}

/// Attaches a tc program to exactly these interfaces of this network namespace. Its maps are pinned in `pin_dir`, and
/// so is the program itself from here on.
///
/// # Errors
/// Returns the kernel's error, or that the program of another agent is on one of the interfaces.
pub(crate) fn attach_tc(
    program: &mut ProgramMut<'_>,
    place: TcPlace,
    interfaces: &[u32],
    pin_dir: &Path,
) -> Result<TcProgram, SteeringError> {
    let ours = Owned::by_all(pin_dir);
    for &ifindex in interfaces {
        if let Some(other) = programs_at(ifindex, place).into_iter().map(Tc).find(|there| !ours.has(there)) {
            let (interface, pins) = (interface_name(ifindex), other.pins_beside(pin_dir));
            return Err(SteeringError::Taken { interface, program: other.name(), pins });
        }
    }
    // The old program keeps its pin until it is on no interface any more. So until then, both the old and the new
    // program count as ours.
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
    fs::rename(&next, &pin).map_err(SteeringError::path("rename", &next))?;
    let lost = |source: std::io::Error| SteeringError::Path { call: "dup", path: pin.clone(), source };
    let fd = program.as_fd().try_clone_to_owned().map_err(lost)?;
    let id = pinned_program(&pin).ok_or_else(|| lost(ErrorKind::NotFound.into()))?;
    Ok(TcProgram { fd, id, place })
}

/// Paths of the pins of a program or link: the final one, and the one that it has until it can take the place of its
/// predecessor. (A BPF file system allows no dot in names.)
pub(crate) fn pins_of(pin_dir: &Path, name: &str) -> [std::path::PathBuf; 2] {
    [pin_dir.join(name), pin_dir.join(format!("{name}_next"))]
}

/// Pins a program in place of the one that has the pin of that name.
pub(crate) fn pin_program(
    program: &mut ProgramMut<'_>,
    name: &'static str,
    pin_dir: &Path,
) -> Result<(), SteeringError> {
    let [pin, next] = pins_of(pin_dir, name);
    remove(&next)?;
    let failed = |source| SteeringError::Attach { program: name, target: next.display().to_string(), source };
    program.pin(&next).map_err(failed)?;
    fs::rename(&next, &pin).map_err(SteeringError::path("rename", &next))
}

/// Places of the tc programs of a role.
pub(crate) fn places(is_frontend: bool) -> [TcPlace; 2] {
    if is_frontend { [FE_IN, FE_OUT] } else { [BE_IN, BE_OUT] }
}

/// Id of the program at a place of an interface, at our layout's handle, if there is one. It may be another agent's.
pub(crate) fn filter_at(ifindex: u32, place: TcPlace) -> Option<u32> {
    filter_of(ifindex, place, HANDLE)
}

fn filter_of(ifindex: u32, place: TcPlace, handle: u32) -> Option<u32> {
    log_libbpf();
    // A look-up needs no program, but the hook cannot be made without some descriptor.
    let any = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
    hook(&any, ifindex, place, handle).query().ok()
}

/// Handles and BPF ids of the programs at one place of an interface, at the handles of all layouts (versions of the
/// maps' contents). They may be another agent's.
pub(crate) fn filters_at(ifindex: u32, place: TcPlace) -> Vec<(u32, u32)> {
    let handles = std::iter::once(FIRST_HANDLE).chain(HANDLES);
    handles.filter_map(|handle| Some((handle, filter_of(ifindex, place, handle)?))).collect()
}

/// BPF ids of the programs at one place of an interface, of all layouts (versions of the maps' contents). They may be
/// another agent's.
pub(crate) fn programs_at(ifindex: u32, place: TcPlace) -> Vec<u32> {
    filters_at(ifindex, place).into_iter().map(|(_, program)| program).collect()
}

/// Ids of the programs at a place, on all interfaces of this network namespace.
pub(crate) fn all_at(place: TcPlace) -> Result<Vec<u32>, SteeringError> {
    Ok(all_interfaces()?.into_iter().flat_map(|ifindex| programs_at(ifindex, place)).collect())
}

/// Takes the programs that `is_wanted` names off all interfaces of this network namespace.
///
/// # Errors
/// Returns an error if the interfaces cannot be listed.
pub(crate) fn take_all_off(places: &[TcPlace], is_wanted: impl Fn(&Tc) -> bool) -> Result<(), SteeringError> {
    for ifindex in all_interfaces()? {
        for &place in places {
            let filters = filters_at(ifindex, place).into_iter();
            for (handle, _) in filters.filter(|(_, program)| is_wanted(&Tc(*program))) {
                take_off_or_say(ifindex, place, handle);
            }
        }
    }
    Ok(())
}

/// Takes our filter off an interface, if it is there.
fn detach_tc(ifindex: u32, place: TcPlace, ours: &Owned) {
    let is_ours = filter_at(ifindex, place).map(Tc).is_some_and(|there| ours.has(&there));
    if is_ours {
        take_off_or_say(ifindex, place, HANDLE);
    }
}

fn take_off_or_say(ifindex: u32, place: TcPlace, handle: u32) {
    if let Err(error) = take_off(ifindex, place, handle) {
        let interface = interface_name(ifindex);
        tracing::warn!(%error, interface, program = place.program, "cannot take a program off an interface");
    }
}

/// Takes the program at a place off, even if it belongs to another agent.
pub(crate) fn take_off(ifindex: u32, place: TcPlace, handle: u32) -> Result<(), SteeringError> {
    let failed = |source| SteeringError::Detach { program: place.program, interface: interface_name(ifindex), source };
    let any = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(|errno| failed(std::io::Error::from(errno).into()))?;
    hook(&any, ifindex, place, handle).detach().map_err(failed)
}

/// State of the places of a role's programs on an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attached {
    /// All programs are there, and they are this agent's.
    Ours,
    /// The named programs are not there.
    Lacking(Vec<&'static str>),
    /// The named program is there, and belongs to another agent or other software.
    Others(String),
}

/// Examines the places of a role's programs on an interface of this thread's network namespace. The agent's pins are in
/// `pin_dir`.
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

/// Name of an interface for messages to an operator. An interface that no longer exists is named by its index.
fn interface_name(ifindex: u32) -> String {
    let any = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    let name = any.and_then(|any| netdevice::index_to_name(&any, ifindex));
    name.map_or_else(|_| format!("number {ifindex}"), |name| name.to_string())
}

/// Indices of the interfaces in this thread's network namespace.
fn all_interfaces() -> Result<Vec<u32>, SteeringError> {
    let path = Path::new("/proc/thread-self/net/dev");
    let failed = |call| SteeringError::path(call, path);
    let table = fs::read_to_string(path).map_err(failed("read"))?;
    let any = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(|e| failed("socket for")(e.into()))?;
    let names = table.lines().skip(2).filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim());
    Ok(names.filter_map(|name| netdevice::name_to_index(&any, name).ok()).collect())
}

/// Attaches a cgroup program by a link that is pinned under `pin_dir`. If a link to the same cgroup is pinned there
/// already, only its program is replaced. A link to another cgroup is removed.
///
/// # Errors
/// Returns the kernel's error, or that there is no such cgroup.
pub fn attach_cgroup(
    program: &ProgramMut<'_>,
    name: &'static str,
    cgroup: &Path,
    pin_dir: &Path,
) -> Result<(), SteeringError> {
    let pin = pin_dir.join(name);
    let open = |path: &Path| fs::File::open(path).map_err(SteeringError::path("open", path));
    let directory = open(cgroup)?;
    // The id of a cgroup (v2) is its inode number (kernfs).
    let id = directory.metadata().map(|found| found.ino()).unwrap_or(0);
    if take_over(program, &pin, id) {
        return Ok(());
    }
    let failed = |source| SteeringError::Attach { program: name, target: cgroup.display().to_string(), source };
    let mut link = program.attach_cgroup(directory.as_fd().as_raw_fd()).map_err(failed)?;
    // An older link, to another cgroup or to one that is gone, ends when its pin is removed.
    remove(&pin)?;
    link.pin(&pin).map_err(failed)
}

/// Puts the program into the link that is pinned at `pin`, if the link is attached to the cgroup with this id. Returns
/// `false` if it is not, or if there is no link.
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

/// Detaches the link of a cgroup program at once. If only the pin were removed, the link would end some time later.
pub(crate) fn detach_cgroup(pin: &Path) -> Result<(), SteeringError> {
    if pin.exists()
        && let Err(error) = Link::open(pin).and_then(|link| link.detach())
    {
        tracing::warn!(%error, pin = %pin.display(), "cannot take a program off a control group");
    }
    remove(pin)
}

/// Removes a pinned file, if it is there.
pub(crate) fn remove(path: &Path) -> Result<(), SteeringError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(SteeringError::Path { call: "unlink", path: path.into(), source: error })
        }
        _ => Ok(()),
    }
}
