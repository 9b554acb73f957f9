//! A program's side of leasing.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, recvmsg, send, socket_with,
};
use shunt_sys::shared::SharedMemory;
use shunt_wire::address::Endpoint;

use super::server::Lease;
use crate::segment::Writer;

/// Connects to the store of this machine. The connection lives as long as the program means to write.
///
/// # Errors
/// The kernel's: there is no store.
pub fn connect(store: &Path) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(store)?)?;
    Ok(socket)
}

/// Asks for a segment. `None`: the store is full.
///
/// # Errors
/// The kernel's, or that the store does not answer as one.
pub fn lease(store: impl AsFd) -> io::Result<Option<Writer>> {
    send(&store, b"lease", SendFlags::NOSIGNAL)?;
    let mut answer = [0; size_of::<Lease>()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(&store, &mut [IoSliceMut::new(&mut answer)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let memory: Option<OwnedFd> = descriptors.next().and_then(|mut descriptors| descriptors.next());
    if got.bytes != answer.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the store's answer is not one"));
    }
    let answer: Lease = zerocopy::transmute!(answer);
    let Some(memory) = memory.filter(|_| answer.leased.get() == 1) else { return Ok(None) };
    let holder = Endpoint { address: answer.holder, port_be: answer.port_be }.socket_addr();
    Writer::new(SharedMemory::open(memory)?, holder, answer.segment.get()).map(Some)
}
