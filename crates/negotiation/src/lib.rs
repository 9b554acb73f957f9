//! Which connections lie between two programs under Shunt: the BPF programs that settle it in the handshake, loaded and
//! attached. How, and what a program asks: bpf/negotiation.bpf.c and include/shunt.h, SHUNT_SPEAK.

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

/// Why it cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum NegotiationError {
    /// No such cgroup.
    #[error("cannot open cgroup {path}: {source}")]
    Cgroup { path: PathBuf, source: io::Error },
    /// The kernel does not take the programs.
    #[error("cannot {what} the programs that negotiate on-demand buffers; it needs root and Linux 5.10: {source}")]
    Kernel { what: &'static str, source: libbpf_rs::Error },
    /// What is to outlive the process cannot.
    #[error(transparent)]
    Pins(#[from] SteeringError),
}

/// Whose programs may have their handshakes say that they are under Shunt, by number. Root's always may.
#[derive(Clone, Debug, Default)]
pub struct Speakers {
    /// uids.
    pub users: Vec<u32>,
    /// gids: of processes whose real group that is (bpf_get_current_uid_gid).
    pub groups: Vec<u32>,
}

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

/// What there is under the pins.
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
/// In place of `over` at agents before: it did not say for whom.
const ENDED: &str = "ended";

/// The same as [`Negotiation::attach`], for good: what is pinned in the directory `pins` of a BPF file system outlives this
/// process, and a later one takes it over. So connections never find only one of their ends' programs looking for
/// frames because an agent has ended in between. Which machines it is for, the [`Ends`] say, which are kept, too.
///
/// # Errors
/// There is no such cgroup or directory, or the kernel refuses.
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

/// Has the kernel check the programs, and forgets them: nothing is attached or pinned.
///
/// # Errors
/// The kernel refuses.
pub fn load_and_forget() -> Result<(), NegotiationError> {
    let failed = |what| move |source| NegotiationError::Kernel { what, source };
    let mut object = MaybeUninit::uninit();
    let open = bpf::NegotiationSkelBuilder::default().open(&mut object).map_err(failed("open"))?;
    open.load().map_err(failed("load"))?;
    Ok(())
}

/// Ends what [`keep`] began: connections that are agreed on stay so, and their programs no longer know it.
///
/// # Errors
/// The kernel's.
pub fn detach(pins: &Path) -> io::Result<()> {
    let gone = |removed: io::Result<()>| match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    PINNED.iter().try_for_each(|name| gone(std::fs::remove_file(pins.join(name))))?;
    gone(std::fs::remove_dir(pins))
}

/// Programs in a cgroup settle by themselves, while this lives, which of their connections have programs under Shunt at
/// both ends.
#[derive(Debug)]
pub struct Negotiation {
    _links: [Link; 4],
    ends: Ends,
}

impl Negotiation {
    /// Attaches to a cgroup (version 2) and all below it, for programs of root.
    ///
    /// # Errors
    /// There is no such cgroup, or the kernel refuses.
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

    /// Which machines it is for. None at first.
    #[must_use]
    pub fn ends(&self) -> &Ends {
        &self.ends
    }
}
