//! Network namespaces: entering one, and reading its sysfs.
//!
//! A thread enters a namespace by setns(2) alone. `ip netns exec` would also mount a new `/sys`, which hides BPF
//! objects pinned under `/sys/fs/bpf`.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// Directory in which iproute2 keeps named namespaces.
pub const NAMED: &str = "/run/netns";

/// Descriptor of a network namespace, which lives at least as long as the descriptor.
#[derive(Debug)]
pub struct Netns(File);

impl Netns {
    /// Opens a namespace that `ip netns add` made with this name.
    ///
    /// # Errors
    /// Returns the kernel's error of open(2).
    pub fn named(name: &str) -> io::Result<Self> {
        Self::at(Self::path_of(name))
    }

    /// Makes a namespace without a name. It ends when no descriptor, thread or process has it any more.
    ///
    /// # Errors
    /// Returns the kernel's error of unshare(2), or of starting a thread.
    pub fn anonymous() -> io::Result<Self> {
        let make = || {
            // SAFETY: unshares only this thread's network namespace, which affects no memory and no descriptors.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            Self::at("/proc/thread-self/ns/net")
        };
        let thread = std::thread::Builder::new().name("netns".into()).spawn(make)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Returns the path at which other processes find the namespace while this process keeps it open.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }

    /// Opens the namespace at `path`, such as `/proc/PID/ns/net`.
    ///
    /// # Errors
    /// Returns the kernel's error of open(2).
    pub fn at(path: impl AsRef<Path>) -> io::Result<Self> {
        File::open(path).map(Self)
    }

    /// Returns the path of the namespace with this name.
    #[must_use]
    pub fn path_of(name: &str) -> PathBuf {
        Path::new(NAMED).join(name)
    }

    /// Inode number that `/proc/PID/ns/net` shows for this namespace.
    ///
    /// # Errors
    /// Returns the kernel's error of fstat(2).
    pub fn inode(&self) -> io::Result<u64> {
        self.0.metadata().map(|metadata| metadata.ino())
    }

    /// Moves the **calling thread** into the namespace for good. Threads and processes that it starts inherit the
    /// namespace.
    ///
    /// # Errors
    /// Returns the kernel's error of setns(2).
    pub fn enter(&self) -> io::Result<()> {
        move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network)).map_err(io::Error::from)
    }

    /// Runs `work` inside the namespace, on a new thread, and waits for it.
    ///
    /// # Errors
    /// Returns the error of starting the thread, or of setns(2). Then `work` did not run.
    ///
    /// # Panics
    /// Panics when `work` panics.
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

/// Makes a new instance of sysfs that shows the devices of the **calling thread's** network namespace. It is mounted
/// nowhere: open its files relative to the returned descriptor. `/sys` itself shows the network namespace in which it
/// was mounted.
///
/// # Errors
/// Returns the kernel's error of fsopen(2), fsconfig(2) or fsmount(2).
pub fn detached_sysfs() -> io::Result<OwnedFd> {
    let context = fsopen("sysfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}
