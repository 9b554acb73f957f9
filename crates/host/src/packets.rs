//! Unix sockets of type SOCK_SEQPACKET, by which servers and the agent exchange packets and descriptors (unix(7),
//! SCM_RIGHTS).

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Mode};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use shunt_wire::local::MAX_PACKET_BYTES;

/// Largest number of descriptors in one packet. The agent's answer to a server (WELCOME) has three: the board (memory
/// that tells servers of peers and limits), the counters, and the ring by which the kernel tells of completed payloads.
const MAX_DESCRIPTORS: usize = 3;

/// Why a socket cannot listen at a path.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// A file that is no socket is at the path. It stays there.
    #[error("{0} exists and is no socket: name another path")]
    NoSocket(PathBuf),
    /// A system call failed.
    #[error("cannot listen at {0}: {1}; check that its directory exists and that the agent may write there")]
    Kernel(PathBuf, io::Error),
}

/// Checks that nothing is at a path, or a socket, which [`listen`] replaces. A symbolic link does not count as a
/// socket: whoever made the link would choose which socket is replaced. If the path cannot be examined, returns no
/// error, because [`listen`] then fails and says why.
///
/// # Errors
/// Returns [`ListenError::NoSocket`].
pub fn is_for_a_socket(path: &Path) -> Result<(), ListenError> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => Err(ListenError::NoSocket(path.into())),
        _ => Ok(()),
    }
}

/// Removes the socket at `path`, where there is one. A file of another kind stays.
///
/// # Errors
/// See [`ListenError`].
fn remove(path: &Path) -> Result<(), ListenError> {
    is_for_a_socket(path)?;
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

    /// Removes the file, unless another agent has put its own socket there meanwhile. The listening socket must still
    /// be open: an open socket keeps a reference to its file (unix(7)), so no other file can have the same inode
    /// number.
    pub fn leave(&self) {
        let is_here = Self::of(&self.path).is_ok_and(|found| (found.device, found.inode) == (self.device, self.inode));
        if is_here {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens at `path`, and removes a socket that is there already. The file's mode lets the agent's user connect. With a
/// `group` its members may connect, too; with `anybody` all users may, and the agent checks each caller.
///
/// # Errors
/// See [`ListenError`].
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

/// Accepts the next connection. Returns `None` where none waits.
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
    /// One packet: its length in bytes, the first descriptor that came with it, if any, and the others, which the
    /// protocol does not have. To close one may take long: on FUSE, close(2) waits for a program.
    Packet(usize, Option<File>, Vec<File>),
    /// One packet, by its length in bytes, whose descriptors the kernel has dropped, because this process may open no
    /// more.
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
        let _listener = listen(&socket, None, false).unwrap();
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
    fn a_second_agent_takes_the_path_over_and_keeps_it_when_the_first_one_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (_first, place_of_first) = listen(&path, None, false).unwrap();
        let (second, place) = listen(&path, None, false).unwrap();
        place_of_first.leave();
        let _client = connect(&path).unwrap();
        assert!(accept(&second).unwrap().is_some());
        place.leave();
        assert!(!path.exists(), "its own");
        place.leave();
    }
}
