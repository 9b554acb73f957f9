//! Receives packets of a Unix socket with the credentials of their sender (SCM_CREDENTIALS, unix(7)). rustix cannot be
//! used for this: it assumes that a process id is never 0, but the kernel reports 0 for a process of another PID
//! namespace.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::sockopt::PeerCredentials;

/// Bytes for control messages. There is room for more than one descriptor. So the kernel reports each descriptor that
/// it opens for this process, and all but the first can be closed.
const ANCILLARY_BYTES: usize = 256;

/// A received packet.
#[derive(Debug)]
pub struct Packet {
    /// Number of bytes in the buffer. Bytes of the packet that did not fit are lost.
    pub bytes: usize,
    /// First descriptor that came with the packet; the others are closed.
    pub descriptor: Option<OwnedFd>,
    /// Whether the packet had descriptors that this process did not get, usually because it may open no more
    /// (RLIMIT_NOFILE).
    pub is_cut: bool,
    /// Process that has sent the packet, with its real user and group. The process id is 0 where the process is in
    /// another PID namespace, or has sent the packet before this socket asked for credentials (SO_PASSCRED). `None`
    /// where the socket does not ask for credentials, or where the stream has ended and no packet came.
    pub sender: Option<PeerCredentials>,
}

#[repr(C, align(8))]
struct Ancillary([u8; ANCILLARY_BYTES]);

/// Receives the next packet. `flags` are the MSG_ flags of recvmsg(2). Received descriptors are closed on exec.
///
/// # Errors
/// Returns the kernel's error of recvmsg(2).
pub fn receive(socket: impl AsFd, into: &mut [u8], flags: i32) -> io::Result<Packet> {
    let mut ancillary = Ancillary([0; ANCILLARY_BYTES]);
    let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: all zeros are a valid message header without buffers.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    (message.msg_control, message.msg_controllen) = ((&raw mut ancillary).cast(), ANCILLARY_BYTES);
    // SAFETY: the buffers outlive the call, and are as long as the message says.
    let got = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags | libc::MSG_CMSG_CLOEXEC) };
    let bytes = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    let mut packet =
        Packet { bytes, descriptor: None, is_cut: message.msg_flags & libc::MSG_CTRUNC != 0, sender: None };
    // SAFETY: the kernel has filled in the message, and its control messages lie in `ancillary`.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: the pointer is null, or points to a control message in `ancillary`.
    while let Some(header) = unsafe { next.as_ref() } {
        // SAFETY: `next` points to a control message, whose length the kernel has set.
        let (data, length) = unsafe {
            let data = libc::CMSG_DATA(next);
            (data, header.cmsg_len - (data as usize - next as usize))
        };
        match (header.cmsg_level, header.cmsg_type) {
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                for at in 0..length / size_of::<RawFd>() {
                    // SAFETY: a descriptor that the kernel has opened for this process, and that nothing else closes.
                    let descriptor = unsafe { OwnedFd::from_raw_fd(data.cast::<RawFd>().add(at).read_unaligned()) };
                    packet.descriptor.get_or_insert(descriptor);
                }
            }
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if length >= size_of::<libc::ucred>() => {
                // SAFETY: the data is at least as long as a `ucred`, for which any bytes are valid.
                let libc::ucred { pid, uid, gid } = unsafe { data.cast::<libc::ucred>().read_unaligned() };
                packet.sender = Some(PeerCredentials { pid, uid, gid });
            }
            _ => {}
        }
        // SAFETY: `next` is a control message of this message.
        next = unsafe { libc::CMSG_NXTHDR(&raw const message, next) };
    }
    Ok(packet)
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;

    use rustix::net::sockopt::set_socket_passcred;
    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg,
        socketpair,
    };

    use super::*;

    #[test]
    fn a_packet_comes_with_its_first_descriptor_and_its_sender() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        for asks in [false, true] {
            set_socket_passcred(&ours, asks).unwrap();
            let (given, other) = (rustix::pipe::pipe().unwrap(), rustix::pipe::pipe().unwrap());
            let descriptors = [given.1.as_fd(), other.1.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
            sendmsg(&theirs, &[IoSlice::new(b"packet")], &mut ancillary, SendFlags::empty()).unwrap();
            drop((given.1, other.1));
            let mut into = [0; 16];
            let packet = receive(&ours, &mut into, 0).unwrap();
            assert_eq!(&into[..packet.bytes], b"packet");
            let sender = packet.sender.map(|sender| (sender.pid, sender.uid));
            let own = (std::process::id().cast_signed(), rustix::process::getuid().as_raw());
            assert_eq!(sender, asks.then_some(own));
            rustix::io::write(packet.descriptor.unwrap(), b"x").unwrap();
            assert_eq!(rustix::io::read(&given.0, &mut [0; 2]).unwrap(), 1);
            // No copy of the second pipe's write end is left open.
            assert_eq!(rustix::io::read(&other.0, &mut [0; 2]).unwrap(), 0);
        }
    }
}
