//! Negotiation of on-demand buffers: BPF programs find out in the TCP handshake whether programs under `shunt run` are
//! at both ends of a connection. This crate loads and attaches the BPF programs. bpf/negotiation.bpf.c says how they
//! work. include/shunt.h (SHUNT_SPEAK) says how a program under `shunt run` uses them.

mod ends;

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, MapCore, MapFlags};
use shunt_handoff::{SteeringError, attach_cgroup, pins};

pub use ends::{Ends, Key, LOOPBACK};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
mod bpf {
    include!(concat!(env!("OUT_DIR"), "/negotiation.skel.rs"));
}

/// Reasons why the negotiation cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum NegotiationError {
    /// The cgroup cannot be opened.
    #[error("cannot open cgroup {path}: {source}")]
    Cgroup { path: PathBuf, source: io::Error },
    /// The kernel refuses the programs.
    #[error("cannot {what} the programs that negotiate on-demand buffers, which need root and Linux 5.15: {source}")]
    Kernel { what: &'static str, source: libbpf_rs::Error },
    /// Programs or maps cannot be pinned.
    #[error(transparent)]
    Pins(#[from] SteeringError),
}

/// Users and groups whose programs may negotiate. Programs of the user root always may.
#[derive(Clone, Debug, Default)]
pub struct Speakers {
    /// User ids (uid).
    pub users: Vec<u32>,
    /// Group ids (gid). They are compared with a process's real group (bpf_get_current_uid_gid).
    pub groups: Vec<u32>,
}

/// Kinds of ids in the map `speakers` (bpf/negotiation.bpf.c).
const SPEAKER_USER: u32 = 1;
const SPEAKER_GROUP: u32 = 2;

impl Speakers {
    fn tell(&self, map: &impl MapCore) -> libbpf_rs::Result<()> {
        let users = self.users.iter().chain(&[0]).map(|user| (SPEAKER_USER, *user));
        let groups = self.groups.iter().map(|group| (SPEAKER_GROUP, *group));
        for (kind, id) in users.chain(groups) {
            let key = [kind.to_ne_bytes(), id.to_ne_bytes()].concat();
            map.update(&key, &[1], MapFlags::ANY)?;
        }
        Ok(())
    }
}

/// Names of all pinned programs and maps.
const PINNED: [&str; 13] = [
    "odb_setsockopt",
    "odb_getsockopt",
    "odb_handshake",
    "odb_release",
    "answered",
    "carried",
    "ends",
    "keepers",
    "marks",
    "over",
    "silenced",
    "silent",
    ENDED,
];
/// Name of the map that older agents pinned in place of `over`. Its keys had no user.
const ENDED: &str = "ended";

/// Attaches the programs to a cgroup permanently: they are pinned in the directory `pins` of a BPF file system, and
/// outlive this process. A later process takes them over. So even if an agent ends between a SYN and its answer, both
/// ends agree whether the connection carries frames (bytes, or references in their place). The returned [`Ends`] is the
/// map of the machines to negotiate with, which is pinned, too. Only programs of `speakers` may negotiate.
///
/// # Errors
/// Returns an error where the cgroup does not exist, the directory cannot be made or used, or the kernel refuses the
/// programs.
pub fn keep(cgroup: &Path, pins: &Path, speakers: &Speakers) -> Result<Ends, NegotiationError> {
    pins::prepare(pins)?;
    let failed = |what| move |source| NegotiationError::Kernel { what, source };
    let mut object = MaybeUninit::uninit();
    let mut open = bpf::NegotiationSkelBuilder::default().open(&mut object).map_err(failed("open"))?;
    open.maps.marks.set_pin_path(pins.join("marks")).map_err(failed("pin"))?;
    open.maps.answered.set_pin_path(pins.join("answered")).map_err(failed("pin"))?;
    open.maps.carried.set_pin_path(pins.join("carried")).map_err(failed("pin"))?;
    open.maps.keepers.set_pin_path(pins.join("keepers")).map_err(failed("pin"))?;
    open.maps.over.set_pin_path(pins.join("over")).map_err(failed("pin"))?;
    open.maps.ends.set_pin_path(pins.join("ends")).map_err(failed("pin"))?;
    open.maps.silenced.set_pin_path(pins.join("silenced")).map_err(failed("pin"))?;
    open.maps.silent.set_pin_path(pins.join("silent")).map_err(failed("pin"))?;
    let loaded = open.load().map_err(failed("load"))?;
    speakers.tell(&loaded.maps.speakers).map_err(failed("look into the maps of"))?;
    attach_cgroup(&loaded.progs.odb_setsockopt, "odb_setsockopt", cgroup, pins)?;
    attach_cgroup(&loaded.progs.odb_getsockopt, "odb_getsockopt", cgroup, pins)?;
    attach_cgroup(&loaded.progs.odb_release, "odb_release", cgroup, pins)?;
    attach_cgroup(&loaded.progs.odb_handshake, "odb_handshake", cgroup, pins)?;
    let _ = std::fs::remove_file(pins.join(ENDED));
    Ends::new(&loaded.maps.ends).map_err(failed("look into the maps of"))
}

/// Loads the programs, so that the kernel verifies them, and unloads them. Attaches and pins nothing.
///
/// # Errors
/// Returns an error where the kernel refuses the programs.
pub fn load_and_forget() -> Result<(), NegotiationError> {
    let failed = |what| move |source| NegotiationError::Kernel { what, source };
    let mut object = MaybeUninit::uninit();
    let open = bpf::NegotiationSkelBuilder::default().open(&mut object).map_err(failed("open"))?;
    open.load().map_err(failed("load"))?;
    Ok(())
}

/// Removes everything that [`keep`] has pinned. Connections keep what they have negotiated, but no program can ask
/// about it any more.
///
/// # Errors
/// Returns the kernel's error of unlink(2) or rmdir(2). Missing files are no error.
pub fn detach(pins: &Path) -> io::Result<()> {
    let gone = |removed: io::Result<()>| match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    PINNED.iter().try_for_each(|name| gone(std::fs::remove_file(pins.join(name))))?;
    gone(std::fs::remove_dir(pins))
}

/// BPF programs attached to a cgroup. While this value lives, they negotiate for the processes in the cgroup.
#[derive(Debug)]
pub struct Negotiation {
    _links: [Link; 4],
    ends: Ends,
}

impl Negotiation {
    /// Attaches the programs to a cgroup (version 2) and all groups below it. Only root's processes may negotiate.
    ///
    /// # Errors
    /// Returns an error where the cgroup does not exist, or the kernel refuses the programs.
    pub fn attach(cgroup: &Path) -> Result<Self, NegotiationError> {
        let directory =
            File::open(cgroup).map_err(|source| NegotiationError::Cgroup { path: cgroup.into(), source })?;
        let failed = |what| move |source| NegotiationError::Kernel { what, source };
        let mut object = MaybeUninit::uninit();
        let open = bpf::NegotiationSkelBuilder::default().open(&mut object).map_err(failed("open"))?;
        let loaded = open.load().map_err(failed("load"))?;
        Speakers::default().tell(&loaded.maps.speakers).map_err(failed("look into the maps of"))?;
        let attach = |program: &libbpf_rs::ProgramMut<'_>| {
            program.attach_cgroup(directory.as_raw_fd()).map_err(failed("attach"))
        };
        let links = [
            attach(&loaded.progs.odb_setsockopt)?,
            attach(&loaded.progs.odb_getsockopt)?,
            attach(&loaded.progs.odb_handshake)?,
            attach(&loaded.progs.odb_release)?,
        ];
        let ends = Ends::new(&loaded.maps.ends).map_err(failed("look into the maps of"))?;
        Ok(Self { _links: links, ends })
    }

    /// Map of the machines to negotiate with; empty at first.
    #[must_use]
    pub fn ends(&self) -> &Ends {
        &self.ends
    }
}
