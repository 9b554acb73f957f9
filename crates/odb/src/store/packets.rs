//! Packets with or without a descriptor (unix(7), SCM_RIGHTS), between programs and the store of their machine.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use shunt_sys::packet::{self, Packet};

/// Sends a packet.
///
/// # Errors
/// Returns the kernel's error of sendmsg(2).
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

/// Receives the next packet; `None`: there is none now, or a signal came first.
///
/// # Errors
/// Returns the kernel's error of recvmsg(2); `TimedOut` if none came within the socket's timeout.
pub(super) fn receive(socket: impl AsFd, into: &mut [u8], flags: RecvFlags) -> io::Result<Option<Packet>> {
    match packet::receive(socket, into, flags.bits().cast_signed()) {
        Ok(packet) => Ok(Some(packet)),
        Err(error) => match Errno::from_io_error(&error) {
            // The socket has waited for as long as its timeout allows.
            Some(Errno::AGAIN) if !flags.contains(RecvFlags::DONTWAIT) => Err(io::ErrorKind::TimedOut.into()),
            Some(Errno::AGAIN | Errno::INTR) => Ok(None),
            _ => Err(error),
        },
    }
}
