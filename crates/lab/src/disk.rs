//! A disk whose reads can be made to fail, to hang or to take long. It is our own FUSE file system, which shows the
//! files of a directory.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, Request,
};

/// Offset in bytes from which no byte of a file can be read while reads fail ([`Reads::Fail`]).
const BAD_FROM: u64 = 512 << 10;

/// Time that the kernel may cache a file's name and attributes: they never change.
const KEPT: Duration = Duration::from_secs(3600);
/// Inode number of the first file; number 1 is the root directory.
const FIRST: u64 = 2;

/// A mounted file system. Dropping it unmounts it.
#[derive(Debug)]
pub struct Disk {
    session: BackgroundSession,
    state: Arc<State>,
    files: u64,
}

/// Behaviour of the disk's reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reads {
    /// Reads are answered at once.
    #[default]
    Well,
    /// Reads fail if they ask for the byte at [`BAD_FROM`] or for a later one.
    Fail,
    /// Reads hang until the behaviour changes. Files can be opened.
    Hang,
    /// Reads hang, and so do calls that open a file, until the behaviour changes.
    Gone,
    /// Each read takes [`SLOWNESS`].
    Slowly,
}

/// Time of a slow read, as on an overloaded disk. The kernel asks for 128 KiB at a time.
const SLOWNESS: Duration = Duration::from_millis(300);

/// State shared with the threads that answer the kernel.
#[derive(Debug, Default)]
struct State {
    reads: Mutex<Reads>,
    changed: Condvar,
    /// Whether calls that close a file hang.
    closes_hang: Mutex<bool>,
    closes_changed: Condvar,
}

impl State {
    fn reads(&self) -> MutexGuard<'_, Reads> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, reads: Reads) {
        *self.reads() = reads;
        self.changed.notify_all();
    }

    /// Waits while reads hang and, if they are slow, for the time of one read. Returns how reads behave after the wait.
    fn wait(&self) -> Reads {
        let reads = self.reads();
        let end = self.changed.wait_while(reads, |reads| matches!(*reads, Reads::Hang | Reads::Gone));
        let reads = *end.unwrap_or_else(PoisonError::into_inner);
        if reads == Reads::Slowly {
            std::thread::sleep(SLOWNESS);
        }
        reads
    }
}

impl Files {
    /// Waits while calls that close a file hang.
    fn wait_to_close(&self) {
        let hang = self.state.closes_hang.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.state.closes_changed.wait_while(hang, |hang| *hang));
    }
}

impl Disk {
    /// Makes the directory `at`, and mounts the files of `directory` there.
    ///
    /// # Errors
    /// When a file cannot be opened, or the kernel refuses.
    pub fn mount(directory: &Path, at: &Path) -> Result<Self> {
        let entries = std::fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))?;
        let mut files = Vec::new();
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                files.push(Entry { name: entry.file_name(), file: File::open(entry.path())? });
            }
        }
        std::fs::create_dir(at).with_context(|| format!("making {}", at.display()))?;
        let (state, count) = (Arc::new(State::default()), files.len() as u64);
        let mut config = Config::default();
        config.mount_options = vec![MountOption::RO, MountOption::FSName("shunt-lab".to_owned())];
        let files = Files { files: Arc::new(files), state: state.clone() };
        let session =
            fuser::spawn_mount(files, at, &config).with_context(|| format!("mounting {} by FUSE", at.display()))?;
        Ok(Self { session, state, files: count })
    }

    /// Changes how reads behave, and makes the kernel forget what it has read already.
    ///
    /// # Errors
    /// When the kernel cannot forget what it has read.
    pub fn set(&self, reads: Reads) -> Result<()> {
        // Before the kernel forgets a page, it waits for the read of that page. So reads that hang have to end first.
        // New reads may hang only after the kernel has forgotten the pages.
        self.state.set(Reads::Well);
        let notifier = self.session.notifier();
        for number in FIRST..FIRST + self.files {
            match notifier.inval_inode(INodeNo(number), 0, 0) {
                // The kernel has never asked for this file.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                other => other.context("dropping the kernel's page cache")?,
            }
        }
        self.state.set(reads);
        Ok(())
    }
}

impl Disk {
    /// With `hang`, makes each close(2) of a file hang from now on; otherwise lets all of them continue.
    pub fn set_closes_hang(&self, hang: bool) {
        *self.state.closes_hang.lock().unwrap_or_else(PoisonError::into_inner) = hang;
        self.state.closes_changed.notify_all();
    }
}

impl Drop for Disk {
    /// Answers all waiting reads and closes, so that the file system can be unmounted.
    fn drop(&mut self) {
        self.state.set(Reads::Well);
        self.set_closes_hang(false);
    }
}

#[derive(Debug)]
struct Entry {
    name: OsString,
    file: File,
}

#[derive(Debug, Clone)]
struct Files {
    files: Arc<Vec<Entry>>,
    state: Arc<State>,
}

impl Files {
    fn entry(&self, number: u64) -> Result<&Entry, Errno> {
        let index = number.checked_sub(FIRST).ok_or(Errno::EISDIR)?;
        self.files.get(index as usize).ok_or(Errno::ENOENT)
    }

    fn attributes(&self, number: u64) -> Result<FileAttr, Errno> {
        let is_root = number == INodeNo::ROOT.0;
        let any = if is_root { self.files.first().ok_or(Errno::ENOENT)? } else { self.entry(number)? };
        let metadata = any.file.metadata()?;
        let modified = metadata.modified()?;
        Ok(FileAttr {
            ino: INodeNo(number),
            size: if is_root { 0 } else { metadata.len() },
            blocks: metadata.blocks(),
            atime: modified,
            mtime: modified,
            ctime: modified,
            crtime: modified,
            kind: if is_root { FileType::Directory } else { FileType::RegularFile },
            perm: if is_root { 0o755 } else { 0o644 },
            nlink: 1,
            uid: metadata.uid(),
            gid: metadata.gid(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn read(&self, number: u64, offset: u64, bytes: u32) -> Result<Vec<u8>, Errno> {
        let entry = self.entry(number)?;
        // A request that crosses BAD_FROM fails as a whole. The kernel then asks again for each page.
        if self.state.wait() == Reads::Fail && offset + u64::from(bytes) > BAD_FROM {
            return Err(Errno::EIO);
        }
        let mut read = vec![0; bytes as usize];
        let mut at = 0;
        while at < read.len() {
            match entry.file.read_at(&mut read[at..], offset + at as u64)? {
                0 => break,
                more => at += more,
            }
        }
        read.truncate(at);
        Ok(read)
    }
}

impl Filesystem for Files {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let index = self.files.iter().position(|entry| entry.name == name);
        let found = index.filter(|_| parent == INodeNo::ROOT).ok_or(Errno::ENOENT);
        match found.and_then(|index| self.attributes(FIRST + index as u64)) {
            Ok(attributes) => reply.entry(&KEPT, &attributes, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(number.0) {
            Ok(attributes) => reply.attr(&KEPT, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        bytes: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let answer = move |files: &Self| match Files::read(files, number.0, offset, bytes) {
            Ok(read) => reply.data(&read),
            Err(error) => reply.error(error),
        };
        let reads = *self.state.reads();
        match reads {
            Reads::Well | Reads::Fail => {}
            // Another thread waits and answers, so that the kernel's other requests do not wait for this read.
            Reads::Hang | Reads::Gone | Reads::Slowly => {
                let files = self.clone();
                drop(std::thread::spawn(move || answer(&files)));
                return;
            }
        }
        answer(self);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        let files = self.clone();
        drop(std::thread::spawn(move || {
            files.wait_to_close();
            reply.ok();
        }));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let answer = move || reply.opened(FileHandle(0), FopenFlags::empty());
        if *self.state.reads() == Reads::Gone {
            let state = self.state.clone();
            drop(std::thread::spawn(move || {
                state.wait();
                answer();
            }));
            return;
        }
        answer();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files;

    #[test]
    fn reads_fail_from_the_bad_part_on_and_nowhere_else() {
        shunt_testbed::needs_root();
        let directory = tempfile::tempdir().unwrap();
        files::write(&directory.path().join("1m"), "1m", 1 << 20).unwrap();
        let right = std::fs::read(directory.path().join("1m")).unwrap();
        let at = directory.path().join("disk");
        let disk = Disk::mount(directory.path(), &at).unwrap();
        assert!(std::fs::read(at.join("1m")).unwrap() == right, "other bytes");
        disk.set(Reads::Fail).unwrap();
        let file = File::open(at.join("1m")).unwrap();
        let mut bytes = vec![0; BAD_FROM as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == right[..bytes.len()], "other bytes");
        let error = file.read_exact_at(&mut [0], BAD_FROM).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
        disk.set(Reads::Well).unwrap();
        assert!(std::fs::read(at.join("1m")).unwrap() == right, "other bytes after the repair");
        drop((file, disk));
        assert!(std::fs::read_dir(&at).unwrap().next().is_none(), "nothing is mounted any more");
    }
}
