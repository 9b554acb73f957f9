//! Links by which the fe_setsockopt of each layout answers the calls of servers. A *layout* is a version of the pinned
//! maps' contents. Programs of several layouts may run for one call (older.rs).
//!
//! The kernel runs the programs of a control group in the order in which their links were made. A program knows which
//! connections belong to layouts that were there before it, and leaves calls on these to the programs behind it. It
//! knows nothing of layouts that came later, and would answer in their place. So our program comes first, and then
//! those of the other layouts, from the last loaded to the first loaded.
//!
//! Each start makes a new link for each program in this order, and then removes the former links in the reverse order.
//! Here D is our layout, C the one before it, and A the oldest:
//!
//! ```text
//!   C B A              before the start
//!   C B A  D C B A     the new links are made
//!   C B    D C B A
//!   C      D C B A     C still answers all calls but those on the connections of A and B
//!          D C B A
//! ```
//!
//! So each call always reaches the program of its connection's layout before any program that would answer in its
//! place. A program that runs twice answers once (bpf/sockopt.h). The former links may be of another control group.
//!
//! A new link has its pin beside that of the former one until all are made. If the agent ends before, the former links
//! still answer, and the next start removes the new ones.

use std::cmp::Reverse;
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use libbpf_rs::query::ProgInfoIter;
use libbpf_rs::{Link, Program, ProgramMut, libbpf_sys};

use crate::attach::{self, FE_SETSOCKOPT, pins_of};
use crate::error::SteeringError;

/// Name of the pin of the program fe_setsockopt. The pin FE_SETSOCKOPT is that of its link.
pub(crate) const CALLS: &str = "fe_setsockopt_program";

fn failed(target: &Path) -> impl Fn(libbpf_rs::Error) -> SteeringError + '_ {
    move |source| SteeringError::Attach { program: FE_SETSOCKOPT, target: target.display().to_string(), source }
}

/// Attaches our fe_setsockopt and those of other layouts to a control group, in place of their former links. `aside`
/// has the other layouts' directories. A directory without the program keeps no link.
///
/// # Errors
/// Returns the kernel's error, or that there is no such control group. Then the former links answer.
pub(crate) fn attach(
    ours: &ProgramMut<'_>,
    cgroup: &Path,
    pin_dir: &Path,
    aside: &[PathBuf],
) -> Result<(), SteeringError> {
    let theirs = last_loaded_first(aside)?;
    let group = File::open(cgroup).map_err(SteeringError::path("open", cgroup))?;
    // Removes new links of an earlier agent that ended before it had made all of them.
    for directory in aside.iter().map(PathBuf::as_path).chain([pin_dir]) {
        let [_, new] = pins_of(directory, FE_SETSOCKOPT);
        attach::detach_cgroup(&new)?;
    }
    let theirs = theirs.iter().map(|(directory, program)| (*directory, program.as_fd()));
    for (directory, program) in std::iter::once((pin_dir, ours.as_fd())).chain(theirs) {
        let link = link_to(program, &group).map_err(|error| failed(cgroup)(error.into()))?;
        let [_, new] = pins_of(directory, FE_SETSOCKOPT);
        pin(&link, &new)?;
    }
    replace_former(pin_dir, aside)
}

/// Detaches the links of one layout.
///
/// # Errors
/// Returns an error if a pin cannot be removed.
pub(crate) fn detach(directory: &Path) -> Result<(), SteeringError> {
    pins_of(directory, FE_SETSOCKOPT).iter().try_for_each(|pin| attach::detach_cgroup(pin))
}

/// Returns the pinned programs of these directories, the last loaded first. How much a program knows of other layouts
/// depends on when it was loaded. The time at which its layout was put aside tells nothing: an agent may have ended
/// before it had loaded a program.
fn last_loaded_first(aside: &[PathBuf]) -> Result<Vec<(&Path, OwnedFd)>, SteeringError> {
    let mut found = Vec::new();
    for directory in aside {
        let pin = directory.join(CALLS);
        if pin.exists() {
            let program = Program::fd_from_pinned_path(&pin).map_err(failed(&pin))?;
            let loaded = load_time(program.as_fd()).map_err(failed(&pin))?;
            found.push((loaded, directory.as_path(), program));
        }
    }
    found.sort_by_key(|(loaded, ..)| Reverse(*loaded));
    Ok(found.into_iter().map(|(_, directory, program)| (directory, program)).collect())
}

fn load_time(program: BorrowedFd<'_>) -> libbpf_rs::Result<Duration> {
    let id = Program::id_from_fd(program)?;
    let found = ProgInfoIter::default().find(|found| found.id == id);
    found.map(|found| found.load_time).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound).into())
}

/// Removes the former links, and gives the names of their pins to the new links.
fn replace_former(pin_dir: &Path, aside: &[PathBuf]) -> Result<(), SteeringError> {
    let mut former = Vec::new();
    for directory in aside.iter().map(PathBuf::as_path).chain([pin_dir]) {
        let [pin, new] = pins_of(directory, FE_SETSOCKOPT);
        if pin.exists() {
            let link = Link::open(&pin).map_err(failed(&pin))?;
            former.push((link.info().map_err(failed(&pin))?.id, link));
        }
        if new.exists() {
            fs::rename(&new, &pin).map_err(SteeringError::path("rename", &new))?;
        } else {
            attach::remove(&pin)?;
        }
    }
    // Links have ascending numbers in the order in which they were made.
    former.sort_by_key(|(id, _)| Reverse(*id));
    for (id, link) in former {
        if let Err(error) = link.detach() {
            tracing::warn!(%error, link = id, "cannot take a former program off a control group");
        }
    }
    Ok(())
}

fn link_to(program: BorrowedFd<'_>, group: &File) -> io::Result<OwnedFd> {
    let kind = libbpf_sys::BPF_CGROUP_SETSOCKOPT;
    // SAFETY: both descriptors are open, and libbpf takes NULL for no options.
    let fd = unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), group.as_raw_fd(), kind, std::ptr::null()) };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the kernel has just made this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn pin(link: &OwnedFd, pin: &Path) -> Result<(), SteeringError> {
    let path =
        CString::new(pin.as_os_str().as_bytes()).map_err(|error| SteeringError::path("pin", pin)(error.into()))?;
    // SAFETY: the descriptor is open, and the path is a string that ends with 0.
    let status = unsafe { libbpf_sys::bpf_obj_pin(link.as_raw_fd(), path.as_ptr()) };
    if status == 0 { Ok(()) } else { Err(SteeringError::path("pin", pin)(io::Error::from_raw_os_error(-status))) }
}
