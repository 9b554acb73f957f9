//! Packets with or without a descriptor (unix(7), SCM_RIGHTS), between programs and the store of their machine.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, UCred,
    recvmsg, sendmsg,
};

/// Sends one.
///
/// # Errors
/// The kernel's.
pub(super) fn send(
    socket: impl AsFd,
    packet: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
    flags: SendFlags,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if let Some(descriptor) = &descriptor {
        ancillary.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(descriptor)));
    }
    sendmsg(socket, &[IoSlice::new(packet)], &mut ancillary, flags | SendFlags::NOSIGNAL)?;
    Ok(())
}

/// A packet.
#[derive(Debug)]
pub(super) struct Packet {
    pub(super) bytes: usize,
    /// The first; others are closed.
    pub(super) descriptor: Option<OwnedFd>,
    /// The process that has sent it (SO_PASSCRED).
    pub(super) sender: Option<UCred>,
}

/// Takes the next. `None`: there is none now.
///
/// # Errors
/// The kernel's.
pub(super) fn receive(socket: impl AsFd, packet: &mut [u8], flags: RecvFlags) -> io::Result<Option<Packet>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1), ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = match recvmsg(socket, &mut [IoSliceMut::new(packet)], &mut ancillary, flags | RecvFlags::CMSG_CLOEXEC) {
        Ok(got) => got,
        // Of a socket that waits: for longer than it is to.
        Err(Errno::AGAIN) if !flags.contains(RecvFlags::DONTWAIT) => return Err(io::ErrorKind::TimedOut.into()),
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let (mut descriptor, mut sender) = (None, None);
    for message in ancillary.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(descriptors) => descriptor = descriptors.into_iter().next(),
            RecvAncillaryMessage::ScmCredentials(credentials) => sender = Some(credentials),
            _ => {}
        }
    }
    Ok(Some(Packet { bytes: got.bytes, descriptor, sender }))
}
