//! Network namespaces: entering one, and seeing its sysfs.
//!
//! Namespaces are entered with setns(2) and nothing else. `ip netns exec` also mounts a new `/sys`, which hides
//! BPF objects pinned under `/sys/fs/bpf`.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// Where iproute2 keeps named namespaces.
pub const NAMED: &str = "/run/netns";

/// An open network namespace. It lives at least as long as this descriptor.
#[derive(Debug)]
pub struct Netns(File);

impl Netns {
    /// Opens the namespace that `ip netns add NAME` made.
    ///
    /// # Errors
    /// That of open(2).
    pub fn named(name: &str) -> io::Result<Self> {
        Self::at(Self::path_of(name))
    }

    /// Makes a namespace without a name. It ends with the last descriptor, thread and process.
    ///
    /// # Errors
    /// Those of unshare(2) and of making a thread.
    pub fn anonymous() -> io::Result<Self> {
        let make = || {
            // SAFETY: the thread's own network namespace alone; it shares no memory or descriptors less.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            Self::at("/proc/thread-self/ns/net")
        };
        let thread = std::thread::Builder::new().name("netns".into()).spawn(make)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Where other processes find it while this one keeps it open.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }

    /// Opens the namespace bound at `path`, such as `/proc/PID/ns/net`.
    ///
    /// # Errors
    /// That of open(2).
    pub fn at(path: impl AsRef<Path>) -> io::Result<Self> {
        File::open(path).map(Self)
    }

    /// Where a named namespace is bound.
    #[must_use]
    pub fn path_of(name: &str) -> PathBuf {
        Path::new(NAMED).join(name)
    }

    /// The number that `/proc/PID/ns/net` shows for this namespace.
    ///
    /// # Errors
    /// That of fstat(2).
    pub fn inode(&self) -> io::Result<u64> {
        self.0.metadata().map(|metadata| metadata.ino())
    }

    /// Moves the **calling thread** into the namespace, for good. Threads and processes that it starts inherit that.
    ///
    /// # Errors
    /// That of setns(2).
    pub fn enter(&self) -> io::Result<()> {
        move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network)).map_err(io::Error::from)
    }

    /// Runs `work` inside the namespace, on a thread of its own, and waits for it.
    ///
    /// # Errors
    /// That of starting the thread or of setns(2); then `work` did not run.
    ///
    /// # Panics
    /// When `work` panics.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("netns".into()).spawn_scoped(scope, || {
                self.enter()?;
                Ok(work())
            })?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// A new instance of sysfs that shows the devices of the **calling thread's** network namespace, mounted nowhere:
/// open its files relative to the descriptor. `/sys` itself shows the namespace of whoever mounted it.
///
/// # Errors
/// Those of fsopen(2), fsconfig(2) and fsmount(2).
pub fn detached_sysfs() -> io::Result<OwnedFd> {
    let context = fsopen("sysfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}
