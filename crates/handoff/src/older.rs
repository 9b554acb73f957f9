//! Programs and maps of another layout than ours. A *layout* is a version of the pinned maps' contents. An agent of
//! another version has left these programs. They stay until the connections in their table of flows (records of client
//! connections) have ended: only these programs can read the table, and translate the connections' numbers.
//!
//! ```text
//!   pins/            maps, programs and links of this layout
//!   pins/older_13/   maps, fe_in and fe_out of layout 13, and a link for its fe_setsockopt
//! ```
//!
//! The two layouts share the work ("theirs" is what belongs to the other layout):
//!
//! * Packets: both layouts' fe_in and fe_out are on each interface, at handles that are their layouts' numbers. Each
//!   passes on packets of connections that are not in its own table.
//! * Calls: our fe_setsockopt runs first. It begins nothing on a connection of theirs (`older_flows`), and leaves it to
//!   their fe_setsockopt to tell how far a payload is, and to end it.
//! * Rings (BPF ring buffers for the answers): servers name them by their numbers, in calls that either fe_setsockopt
//!   may answer. So our rings are entered in their maps, too, at the same numbers.
//! * Words: a backend's word on a payload of theirs, that it is acknowledged, goes to their fe_delivered.
//!
//! All this rests on what no version may change: `struct flow_key`, `struct delivery`, the keys of the map `flows`, and
//! the maps `layout`, `rings` and `ring_owners` of bpf/. A backend's programs of another layout do not stay: its
//! senders (sockets that send payloads to clients) ended with the agent that had them.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libbpf_rs::{Link, MapHandle, Program, libbpf_sys};

use crate::attach::{self, BE_IN, BE_OUT, FE_DELIVERED, FE_IN, FE_OUT, FE_SETSOCKOPT};
use crate::bpf::STEERING_LAYOUT;
use crate::error::SteeringError;
use crate::ownership::{Owned, pinned_program};
use crate::pins;

/// First layout whose programs leave room for the programs of another layout.
pub(crate) const FIRST: u32 = 13;

const PREFIX: &str = "older_";
/// Name of the pin that keeps the fe_setsockopt of an older layout loaded, until a new link has that program.
const CALLS: &str = "fe_setsockopt_program";
/// Name of the pin of a former link of our own fe_setsockopt: the one that it had while our layout was put aside. That
/// link stays until our new link has the program.
const LEFT_LINK: &str = "fe_setsockopt_older";
/// Names of the pins of a layout's programs.
const PROGRAMS: [&str; 9] =
    ["fe_in", "fe_in_next", "fe_out", "fe_out_next", FE_DELIVERED, "be_in", "be_in_next", "be_out", "be_out_next"];
/// Names of the pins that only a backend has.
const SENDERS: [&str; 6] = ["be_in", "be_in_next", "be_out", "be_out_next", "senders", "sender_slots"];

fn at<'path>(call: &'static str, path: &'path Path) -> impl FnOnce(io::Error) -> SteeringError + 'path {
    move |source| SteeringError::Path { call, path: path.into(), source }
}

fn directory_of(pin_dir: &Path, layout: u32) -> PathBuf {
    pin_dir.join(format!("{PREFIX}{layout}"))
}

/// Directories of other layouts below a directory of pins.
pub(crate) fn directories(pin_dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(pin_dir).into_iter().flatten().flatten();
    let is_older = |entry: &fs::DirEntry| {
        entry.file_type().is_ok_and(|kind| kind.is_dir()) && entry.file_name().to_string_lossy().starts_with(PREFIX)
    };
    entries.filter(is_older).map(|entry| entry.path()).collect()
}

/// Puts pins of another layout aside, so that pins of our layout can be made. If pins of our layout were put aside
/// before, they are taken back.
///
/// # Errors
/// Returns the kernel's error, or that the layout is one whose programs leave no room for others.
pub(crate) fn set_aside(pin_dir: &Path) -> Result<(), SteeringError> {
    let found = pins::layout_of(pin_dir)?.filter(|found| *found != 0 && *found != STEERING_LAYOUT);
    if let Some(found) = found {
        if found < FIRST {
            return Err(pins::other_layout(pin_dir, found));
        }
        let aside = directory_of(pin_dir, found);
        match fs::create_dir(&aside) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(at("mkdir", &aside)(error)),
            _ => {}
        }
        keep_calls(pin_dir, &aside)?;
        move_pins(pin_dir, &aside)?;
        tracing::info!(layout = found, "connections with shortcuts of another layout keep its programs until they end");
    }
    take_back(pin_dir)
}

/// Pins the fe_setsockopt of the layout that is put aside, so that it stays loaded without its link.
fn keep_calls(pin_dir: &Path, aside: &Path) -> Result<(), SteeringError> {
    let (link, pin) = (pin_dir.join(FE_SETSOCKOPT), aside.join(CALLS));
    if !link.exists() || pin.exists() {
        return Ok(());
    }
    let failed = |source| SteeringError::Attach { program: FE_SETSOCKOPT, target: pin.display().to_string(), source };
    let program = Link::open(&link).and_then(|link| link.info()).map_err(failed)?.prog_id;
    let program = Program::fd_from_id(program).map_err(failed)?;
    pin_at(&program, &pin)
}

/// Moves a layout's pins from one directory to another. `layout` is moved last: if the agent ends in between, its next
/// start finds `layout` in the old directory, and moves the rest.
fn move_pins(from: &Path, to: &Path) -> Result<(), SteeringError> {
    let layout = "layout";
    let maps = pins::MAPS.iter().filter(|name| **name != layout);
    for name in maps.chain(&PROGRAMS).chain(&[layout]) {
        let (from, to) = (from.join(name), to.join(name));
        match fs::rename(&from, &to) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(at("rename", &from)(error)),
            _ => {}
        }
    }
    Ok(())
}

fn take_back(pin_dir: &Path) -> Result<(), SteeringError> {
    let aside = directory_of(pin_dir, STEERING_LAYOUT);
    if !aside.join("layout").exists() {
        return Ok(());
    }
    // The link that our layout had while it was put aside stays until our new link has the program.
    let link = aside.join(FE_SETSOCKOPT);
    if link.exists() {
        fs::rename(&link, pin_dir.join(LEFT_LINK)).map_err(at("rename", &link))?;
    }
    attach::remove(&aside.join(CALLS))?;
    move_pins(&aside, pin_dir)?;
    fs::remove_dir(&aside).map_err(at("rmdir", &aside))
}

/// Attaches the fe_setsockopt of each older layout by a new link. So that program still answers calls on its layout's
/// connections when ours takes over the old link. The program of the old link runs before that of the new one.
///
/// # Errors
/// Returns the kernel's error.
pub(crate) fn answer_calls(pin_dir: &Path, cgroup: &Path) -> Result<(), SteeringError> {
    for aside in directories(pin_dir) {
        let (pin, link) = (aside.join(CALLS), aside.join(FE_SETSOCKOPT));
        if link.exists() || !pin.exists() {
            continue;
        }
        let failed =
            |source| SteeringError::Attach { program: FE_SETSOCKOPT, target: cgroup.display().to_string(), source };
        let program = Program::fd_from_pinned_path(&pin).map_err(failed)?;
        let group = File::open(cgroup).map_err(at("open", cgroup))?;
        pin_at(&link_to(&program, &group).map_err(|error| failed(error.into()))?, &link)?;
    }
    Ok(())
}

/// Detaches the link that our layout had while it was put aside. By now our new link has the program.
///
/// # Errors
/// Returns an error if the pin cannot be removed.
pub(crate) fn leave_place(pin_dir: &Path) -> Result<(), SteeringError> {
    attach::detach_cgroup(&pin_dir.join(LEFT_LINK))
}

fn link_to(program: &OwnedFd, group: &File) -> io::Result<OwnedFd> {
    let kind = libbpf_sys::BPF_CGROUP_SETSOCKOPT;
    // SAFETY: both descriptors are open, and libbpf takes NULL for no options.
    let fd = unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), group.as_raw_fd(), kind, std::ptr::null()) };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the kernel has just made this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn pin_at(object: &OwnedFd, pin: &Path) -> Result<(), SteeringError> {
    let path = CString::new(pin.as_os_str().as_bytes()).map_err(|error| at("pin", pin)(error.into()))?;
    // SAFETY: the descriptor is open, and the path is a string that ends with 0.
    let status = unsafe { libbpf_sys::bpf_obj_pin(object.as_raw_fd(), path.as_ptr()) };
    if status == 0 { Ok(()) } else { Err(at("pin", pin)(io::Error::from_raw_os_error(-status))) }
}

/// Removes the backend's programs of older layouts. The sockets that they steered ended with their agent.
///
/// # Errors
/// Returns an error if a pinned file cannot be removed.
pub(crate) fn end_senders(pin_dir: &Path) -> Result<(), SteeringError> {
    for aside in directories(pin_dir) {
        let programs = ["be_in", "be_in_next", "be_out", "be_out_next"];
        let programs: Vec<u32> = programs.iter().filter_map(|name| pinned_program(&aside.join(name))).collect();
        attach::take_all_off(&[BE_IN, BE_OUT], |program| programs.contains(&program.0))?;
        SENDERS.iter().try_for_each(|name| attach::remove(&aside.join(name)))?;
        if !aside.join("flows").exists() {
            remove(&aside)?;
        }
    }
    Ok(())
}

/// Removes all pins of another layout.
pub(crate) fn remove(aside: &Path) -> Result<(), SteeringError> {
    attach::detach_cgroup(&aside.join(FE_SETSOCKOPT))?;
    let entries = fs::read_dir(aside).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).try_for_each(|pin| attach::remove(&pin))?;
    fs::remove_dir(aside).map_err(at("rmdir", aside))
}

/// A frontend's programs and maps of another layout.
#[derive(Debug)]
pub struct Older {
    /// Number of the layout.
    pub layout: u32,
    pub(crate) flows: MapHandle,
    pub(crate) rings: MapHandle,
    pub(crate) ring_owners: MapHandle,
    pub(crate) fe_delivered: OwnedFd,
    /// Its directory. An agent that is not root any more can still remove what is in it.
    directory: OwnedFd,
    path: PathBuf,
    owned: Owned,
}

impl Older {
    /// Opens all layouts of a frontend that were put aside below a directory of pins.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(crate) fn open_all(pin_dir: &Path) -> Result<Vec<Self>, SteeringError> {
        directories(pin_dir).into_iter().filter(|path| path.join("flows").exists()).map(Self::open).collect()
    }

    fn open(path: PathBuf) -> Result<Self, SteeringError> {
        let map =
            |name: &'static str| MapHandle::from_pinned_path(path.join(name)).map_err(SteeringError::map("open", name));
        let layout = pins::layout_of(&path)?.unwrap_or(0);
        let directory = File::open(&path).map_err(at("open", &path))?.into();
        let owned = Owned::by(&path);
        let (flows, rings, ring_owners) = (map("flows")?, map("rings")?, map("ring_owners")?);
        let fe_delivered = Program::fd_from_pinned_path(path.join(FE_DELIVERED));
        let fe_delivered = fe_delivered.map_err(SteeringError::map("open", FE_DELIVERED))?;
        Ok(Self { layout, flows, rings, ring_owners, fe_delivered, directory, path, owned })
    }

    /// Gives the directory to a user, whose agent can then remove the pins once the connections have ended.
    ///
    /// # Errors
    /// Returns the kernel's error of fchown(2).
    pub fn give_to(&self, user: u32) -> io::Result<()> {
        std::os::unix::fs::fchown(&self.directory, Some(user), None)
    }

    /// Takes the programs off all interfaces of this thread's network namespace, and removes the pins. To be called
    /// once the connections have ended. Needs CAP_NET_ADMIN.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn take_out(self) -> Result<(), SteeringError> {
        attach::take_all_off(&[FE_IN, FE_OUT], |program| self.owned.has(program))?;
        // The link ends with its pin: nothing else has it open.
        for name in pins::MAPS.iter().chain(&PROGRAMS).chain(&[CALLS, FE_SETSOCKOPT]) {
            match rustix::fs::unlinkat(self.directory.as_fd(), *name, rustix::fs::AtFlags::empty()) {
                Err(errno) if errno != rustix::io::Errno::NOENT => {
                    return Err(at("unlink", &self.path.join(name))(errno.into()));
                }
                _ => {}
            }
        }
        // Only root may remove the directory itself; empty, it does no harm.
        let _ = rustix::fs::unlinkat(rustix::fs::CWD, &self.path, rustix::fs::AtFlags::REMOVEDIR);
        Ok(())
    }
}
