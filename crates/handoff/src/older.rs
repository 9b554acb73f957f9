//! Programs and maps of another layout than ours. A *layout* is a version of the pinned maps' contents. An agent of
//! another version has left these programs. They stay until the connections in their table of flows (records of client
//! connections) have ended: only these programs can read the table, and translate the connections' numbers.
//!
//! ```text
//!   pins/            maps, programs and links of this layout
//!   pins/older_13/   maps and programs of layout 13, and a link for its fe_setsockopt
//! ```
//!
//! The two layouts share the work ("theirs" is what belongs to the other layout):
//!
//! * Packets: both layouts' fe_in (the program on ingress) and fe_out (on egress) are on each interface, at handles
//!   that are their layouts' numbers. Each program passes on packets of connections that are not in its own table.
//! * Calls of servers: our fe_setsockopt runs first (calls.rs). It begins nothing on a connection of theirs (noted.rs),
//!   and leaves it to their fe_setsockopt to tell how far a payload is, and to end it.
//! * Rings (BPF ring buffers for the answers): servers name them by their numbers, in calls that either fe_setsockopt
//!   may answer. So our rings are entered in their maps, too, at the same numbers.
//! * Words: a backend's word that a payload of theirs is acknowledged goes to their fe_delivered.
//!
//! All this rests on what no version may change: `struct flow_key`, `struct delivery`, the keys of the map `flows`, and
//! the maps `layout`, `rings` and `ring_owners` of bpf/. A backend's programs of another layout do not stay: its
//! senders (sockets that send payloads to clients) ended with the agent that had them.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use libbpf_rs::{MapFlags, MapHandle, Program};

use crate::attach::{self, BE_IN, BE_OUT, FE_DELIVERED, FE_IN, FE_OUT, FE_SETSOCKOPT};
use crate::bpf::STEERING_LAYOUT;
use crate::calls::{self, CALLS};
use crate::error::SteeringError;
use crate::ownership::{Owned, pinned_program};
use crate::pins;

/// First layout whose programs leave room for the programs of another layout.
pub(crate) const FIRST: u32 = 13;

const PREFIX: &str = "older_";
/// Names of the pins of a layout's programs.
const PROGRAMS: [&str; 10] = [
    "fe_in",
    "fe_in_next",
    "fe_out",
    "fe_out_next",
    FE_DELIVERED,
    CALLS,
    "be_in",
    "be_in_next",
    "be_out",
    "be_out_next",
];
/// Names of those pins of a layout that are put aside, and that only a backend has.
const SENDERS: [&str; 6] = ["be_in", "be_in_next", "be_out", "be_out_next", "senders", "sender_slots"];

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
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(SteeringError::path("mkdir", &aside)(error));
            }
            _ => {}
        }
        move_pins(pin_dir, &aside)?;
        move_pin("layout", pin_dir, &aside)?;
        tracing::info!(layout = found, "connections with shortcuts of another layout keep its programs until they end");
    }
    take_back(pin_dir)
}

/// Moves a layout's pins from one directory to another, except `layout`. That one is put aside last and taken back
/// first. If the agent ends in between, `layout` is in the directory of pins, and the next start finishes the move or
/// takes it back, whatever layout its agent has.
fn move_pins(from: &Path, to: &Path) -> Result<(), SteeringError> {
    let maps = pins::MAPS.iter().filter(|name| **name != "layout");
    maps.chain(&PROGRAMS).try_for_each(|name| move_pin(name, from, to))
}

/// Moves a pin, if it is there.
fn move_pin(name: &str, from: &Path, to: &Path) -> Result<(), SteeringError> {
    let (from, to) = (from.join(name), to.join(name));
    match fs::rename(&from, &to) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(SteeringError::path("rename", &from)(error)),
        _ => Ok(()),
    }
}

/// Takes our layout's pins back, except the link of its fe_setsockopt. That one answers until our program has a new
/// link ([`calls::attach`]).
fn take_back(pin_dir: &Path) -> Result<(), SteeringError> {
    let aside = directory_of(pin_dir, STEERING_LAYOUT);
    move_pin("layout", &aside, pin_dir)?;
    move_pins(&aside, pin_dir)
}

/// Removes the directory in which our layout was put aside, if there is one. To be called once the directory has no
/// link any more that answers calls.
///
/// # Errors
/// Returns an error if a pinned file cannot be removed.
pub(crate) fn leave_place(pin_dir: &Path) -> Result<(), SteeringError> {
    let aside = directory_of(pin_dir, STEERING_LAYOUT);
    if aside.exists() { remove(&aside) } else { Ok(()) }
}

/// Removes the backend's programs of other layouts. The sockets that they steered ended with their agent.
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
    calls::detach(aside)?;
    let entries = fs::read_dir(aside).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).try_for_each(|pin| attach::remove(&pin))?;
    fs::remove_dir(aside).map_err(SteeringError::path("rmdir", aside))
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
    /// Directory of the layout's pins. Once it is open, an agent that is not root any more can still remove the pins.
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
        let directory = File::open(&path).map_err(SteeringError::path("open", &path))?.into();
        let owned = Owned::by(&path);
        let (flows, rings, ring_owners) = (map("flows")?, map("rings")?, map("ring_owners")?);
        let fe_delivered = Program::fd_from_pinned_path(path.join(FE_DELIVERED));
        let fe_delivered = fe_delivered.map_err(SteeringError::map("open", FE_DELIVERED))?;
        Ok(Self { layout, flows, rings, ring_owners, fe_delivered, directory, path, owned })
    }

    /// Keys of the connections in the layout's table.
    pub(crate) fn keys(&self) -> impl Iterator<Item = Vec<u8>> {
        pins::entries(&self.flows, MapFlags::LOCK).map(|(key, _)| key)
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
        // An agent that is configured without `[backend]` has left the backend's programs of that layout there.
        attach::take_all_off(&[FE_IN, FE_OUT, BE_IN, BE_OUT], |program| self.owned.has(program))?;
        // The link ends with its pin: nothing else has it open.
        for name in pins::MAPS.iter().chain(&PROGRAMS).chain(&[FE_SETSOCKOPT]) {
            match rustix::fs::unlinkat(self.directory.as_fd(), *name, rustix::fs::AtFlags::empty()) {
                Err(errno) if errno != rustix::io::Errno::NOENT => {
                    return Err(SteeringError::path("unlink", &self.path.join(name))(errno.into()));
                }
                _ => {}
            }
        }
        // Only root may remove the directory itself. An empty one does no harm.
        let _ = rustix::fs::unlinkat(rustix::fs::CWD, &self.path, rustix::fs::AtFlags::REMOVEDIR);
        Ok(())
    }
}
