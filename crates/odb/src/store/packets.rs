//! Packets with or without a descriptor (unix(7), SCM_RIGHTS), between programs and the store of their machine.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
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

/// Takes the next: its bytes, and the first descriptor with it; others are closed. `None`: there is none now.
///
/// # Errors
/// The kernel's.
pub(super) fn receive(
    socket: impl AsFd,
    packet: &mut [u8],
    flags: RecvFlags,
) -> io::Result<Option<(usize, Option<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = match recvmsg(socket, &mut [IoSliceMut::new(packet)], &mut ancillary, flags | RecvFlags::CMSG_CLOEXEC) {
        Ok(got) => got,
        // Of a socket that waits: for longer than it is to.
        Err(Errno::AGAIN) if !flags.contains(RecvFlags::DONTWAIT) => return Err(io::ErrorKind::TimedOut.into()),
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptor = descriptors.by_ref().flatten().next();
    Ok(Some((got.bytes, descriptor)))
}
