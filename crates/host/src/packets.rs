//! Unix sockets of type SOCK_SEQPACKET, by which servers and the agent exchange packets and descriptors (unix(7),
//! SCM_RIGHTS).

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Gid, Mode};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use shunt_sys::sockopt::peer_credentials;
use shunt_wire::local::MAX_PACKET_BYTES;

/// Largest number of descriptors in one packet. The agent's answer to a server (WELCOME) has three: the board, the
/// counters, and the ring. The board is memory that tells servers of peers and limits. By the ring, the kernel tells of
/// completed payloads.
const MAX_DESCRIPTORS: usize = 3;
/// Longest path of a Unix socket, in bytes (`sun_path` of unix(7), without the zero byte at its end).
pub const PATH_BYTES_MAX: usize = 107;
/// Number of attempts to find a path free, and the time between two attempts. An agent that is killed may lose the lock
/// on its pins a moment before its sockets are closed.
const ATTEMPTS: u32 = 5;
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(100);

/// Why a socket cannot listen at a path.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// A file that is no socket is at the path. It stays there.
    #[error("{0} exists and is no socket: name another path")]
    NoSocket(PathBuf),
    /// A program listens at the path.
    #[error("{}", listens(.0, .1))]
    Taken(PathBuf, Listener),
    /// The path is longer than [`PATH_BYTES_MAX`].
    #[error("{0} has {bytes} bytes, and the path of a socket at most {PATH_BYTES_MAX}: name a shorter one", bytes = .0.as_os_str().len())]
    TooLong(PathBuf),
    /// A system call failed.
    #[error("cannot listen at {0}: {1}; check that its directory exists and that the agent may write there")]
    Kernel(PathBuf, io::Error),
}

/// A program that listens at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Process id, if the kernel tells it.
    pub process: Option<i32>,
}

fn listens(path: &Path, listener: &Listener) -> String {
    let process = listener.process.map(|process| format!(" (process {process})")).unwrap_or_default();
    format!("an agent{process} listens at {}: stop it first, or name another path", path.display())
}

/// Returns the program that listens at `path`. Returns `None` if no program listens there, as after an agent was
/// killed, or if this process may not connect.
pub fn listener(path: &Path) -> Option<Listener> {
    // An agent that is stopped accepts nothing. Once its backlog is full, connect(2) of a blocking socket would wait.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path).ok()?) {
        Ok(()) => {
            // Process 0 stands for one that this process cannot see, as from within a container.
            let process = peer_credentials(&socket).ok().map(|listens| listens.pid).filter(|pid| *pid > 0);
            Some(Listener { process })
        }
        // The backlog is full, or the socket is of another type: a program listens, and the kernel does not say which.
        Err(Errno::AGAIN | Errno::PROTOTYPE) => Some(Listener { process: None }),
        Err(_) => None,
    }
}

/// Checks that a path is free, or has a socket. [`listen`] replaces such a socket if nobody listens there. A symbolic
/// link does not count as a socket: otherwise its maker would choose which socket is replaced. If the path cannot be
/// examined, returns no error, because [`listen`] then fails and says why.
///
/// # Errors
/// Returns [`ListenError::NoSocket`] or [`ListenError::TooLong`].
pub fn is_for_a_socket(path: &Path) -> Result<(), ListenError> {
    if path.as_os_str().len() > PATH_BYTES_MAX {
        return Err(ListenError::TooLong(path.into()));
    }
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => Err(ListenError::NoSocket(path.into())),
        _ => Ok(()),
    }
}

/// Removes the socket at `path`, where there is one and nobody listens there. A file of another kind stays.
///
/// # Errors
/// Returns a [`ListenError`]: the path is too long, has another file or another program's socket, or cannot be freed.
fn remove(path: &Path) -> Result<(), ListenError> {
    is_for_a_socket(path)?;
    let mut attempts = 0;
    while let Some(listener) = listener(path) {
        attempts += 1;
        if attempts == ATTEMPTS {
            return Err(ListenError::Taken(path.into(), listener));
        }
        std::thread::sleep(BETWEEN_ATTEMPTS);
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(ListenError::Kernel(path.into(), error)),
        _ => Ok(()),
    }
}

/// The file of a listening socket.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Place {
    fn of(path: &Path) -> io::Result<Self> {
        let found = std::fs::symlink_metadata(path)?;
        Ok(Self { path: path.into(), device: found.dev(), inode: found.ino() })
    }

    /// Removes the file, unless another agent has put its own socket there meanwhile. Call it while the listening
    /// socket is still open. An open socket keeps a reference to its file (unix(7)), so no other file can have the same
    /// inode number.
    pub fn leave(&self) {
        let is_here = Self::of(&self.path).is_ok_and(|found| (found.device, found.inode) == (self.device, self.inode));
        if is_here {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens at `path`. First removes a socket there at which nobody listens any more. The file's mode lets the agent's
/// user connect. With a `group`, its members may connect, too. With `anybody`, all users may connect, and the agent
/// checks each caller.
///
/// # Errors
/// Returns a [`ListenError`]: the path is too long or not free, or the socket cannot be made.
pub fn listen(path: &Path, group: Option<u32>, anybody: bool) -> Result<(OwnedFd, Place), ListenError> {
    remove(path)?;
    bind(path, group, anybody).map_err(|error| ListenError::Kernel(path.into(), error))
}

fn bind(path: &Path, group: Option<u32>, anybody: bool) -> io::Result<(OwnedFd, Place)> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    let place = Place::of(path)?;
    let mode = match group {
        _ if anybody => 0o666,
        Some(_) => 0o660,
        None => 0o600,
    };
    rustix::fs::chmod(path, Mode::from_raw_mode(mode))?;
    if let Some(group) = group {
        rustix::fs::chown(path, None, Some(Gid::from_raw(group)))?;
    }
    rustix::net::listen(&socket, 128)?;
    Ok((socket, place))
}

/// Connects to an agent. The socket blocks.
///
/// # Errors
/// Returns the kernel's error of socket(2) or connect(2).
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Accepts the next connection. Returns `None` if there is none to accept now.
///
/// # Errors
/// Returns the kernel's error of accept4(2).
pub fn accept(listener: impl AsFd) -> io::Result<Option<OwnedFd>> {
    match rustix::net::accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
        Ok(socket) => Ok(Some(socket)),
        Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Result of [`receive`].
#[derive(Debug)]
pub enum Received {
    /// One packet: its length in bytes, the first descriptor that came with it, if any, and all further descriptors.
    /// The protocol has no further descriptors, so the receiver closes them. Closing may take long: on FUSE, close(2)
    /// waits for a program.
    Packet(usize, Option<File>, Vec<File>),
    /// One packet, by its length in bytes. The kernel has dropped the packet's descriptors, because this process may
    /// open no more.
    Cut(usize),
    /// No packet waits.
    Nothing,
    /// The other end is closed.
    Closed,
}

/// Receives one packet into `buffer`. Bytes that do not fit are lost: such a packet is longer than the protocol allows.
///
/// # Errors
/// Returns the kernel's error of recvmsg(2).
pub fn receive(socket: impl AsFd, buffer: &mut [u8; MAX_PACKET_BYTES]) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
        Ok(message) => message,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
        Err(Errno::CONNRESET | Errno::PIPE) => return Ok(Received::Closed),
        Err(errno) => return Err(errno.into()),
    };
    let mut descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let mut descriptors = descriptors.by_ref().flatten().map(File::from);
    let first = descriptors.next();
    match message.bytes {
        bytes if message.flags.contains(ReturnFlags::CTRUNC) && first.is_none() => Ok(Received::Cut(bytes)),
        0 if first.is_none() => Ok(Received::Closed),
        bytes => Ok(Received::Packet(bytes, first, descriptors.collect())),
    }
}

/// Sends one packet. Returns `false`, and sends nothing, where there is no room because the other end does not read.
///
/// # Errors
/// Returns the kernel's error of sendmsg(2).
pub fn send(socket: impl AsFd, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<bool> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match rustix::net::sendmsg(socket, &[IoSlice::new(packet)], &mut control, flags) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn a_packet_keeps_its_bounds_and_its_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (listener, _) = listen(&path, None, false).unwrap();
        let client = connect(&path).unwrap();
        let server = accept(&listener).unwrap().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"hello").unwrap();
        file.rewind().unwrap();
        assert!(send(&client, b"first", &[file.as_fd()]).unwrap());
        assert!(send(&client, b"second", &[]).unwrap());
        let mut buffer = [0; MAX_PACKET_BYTES];
        let Received::Packet(5, Some(mut got), _) = receive(&server, &mut buffer).unwrap() else { panic!("first") };
        let mut text = String::new();
        got.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello");
        assert!(
            matches!(receive(&server, &mut buffer).unwrap(), Received::Packet(6, None, others) if others.is_empty())
        );
        assert!(matches!(receive(&server, &mut buffer).unwrap(), Received::Nothing));
        drop(client);
        // The end may come later: a child that another test forks at this moment has a copy of the client's descriptor
        // until it calls exec.
        let is_closed = || matches!(receive(&server, &mut buffer).unwrap(), Received::Closed);
        shunt_testbed::wait_for("the server learns that the client has closed", is_closed).unwrap();
    }

    #[test]
    fn a_file_that_is_no_socket_stays_and_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let [file, link, socket] = ["shuntd.toml", "link", "s"].map(|name| dir.path().join(name));
        std::fs::write(&file, "name").unwrap();
        drop(listen(&socket, None, false).unwrap());
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        for path in [&file, &link, dir.path()] {
            let error = listen(path, None, false).unwrap_err().to_string();
            assert_eq!(error, format!("{} exists and is no socket: name another path", path.display()));
            assert!(is_for_a_socket(path).is_err() && remove(path).is_err());
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "name");
        assert!(link.exists() && is_for_a_socket(&socket).is_ok());
        remove(&socket).unwrap();
        assert!(!socket.exists() && remove(&socket).is_ok() && is_for_a_socket(&socket).is_ok());
    }

    #[test]
    fn a_path_at_which_somebody_listens_is_not_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (first, place) = listen(&path, None, false).unwrap();
        let error = listen(&path, None, false).unwrap_err().to_string();
        let (at, own) = (path.display(), std::process::id());
        let said = format!("an agent (process {own}) listens at {at}: stop it first, or name another path");
        assert_eq!(error, said);
        // The first agent still gets each connection. Its backlog is full once a non-blocking connect(2) fails.
        let waiting: Vec<_> = std::iter::from_fn(|| connect_at_once(&path)).collect();
        assert!(waiting.len() > 100 && accept(&first).unwrap().is_some());
        let _last = connect_at_once(&path).unwrap();
        assert_eq!(listener(&path), Some(Listener { process: None }), "and it does not block");
        place.leave();
        assert!(!path.exists() && listener(&path).is_none());
    }

    fn connect_at_once(path: &Path) -> Option<OwnedFd> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).ok().map(|()| socket)
    }

    #[test]
    fn the_socket_of_a_killed_agent_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (first, _) = listen(&path, None, false).unwrap();
        // The first agent's sockets close a moment after the next agent has begun to start.
        let ends = std::thread::spawn(move || {
            std::thread::sleep(BETWEEN_ATTEMPTS);
            drop(first);
        });
        let (second, _) = listen(&path, None, false).unwrap();
        ends.join().unwrap();
        let _client = connect(&path).unwrap();
        assert!(accept(&second).unwrap().is_some());
    }

    #[test]
    fn an_agent_leaves_its_own_socket_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (_first, place_of_first) = listen(&path, None, false).unwrap();
        std::fs::remove_file(&path).unwrap();
        let (_second, place) = listen(&path, None, false).unwrap();
        place_of_first.leave();
        assert!(path.exists(), "another's");
        place.leave();
        assert!(!path.exists(), "its own");
        place.leave();
    }

    #[test]
    fn a_path_that_is_too_long_is_named() {
        let long = Path::new("/run").join("x".repeat(PATH_BYTES_MAX));
        let error = listen(&long, None, false).unwrap_err().to_string();
        assert!(error.contains("has 112 bytes, and the path of a socket at most 107: name a shorter one"), "{error}");
        assert!(is_for_a_socket(Path::new(&"x".repeat(PATH_BYTES_MAX))).is_ok());
    }
}
