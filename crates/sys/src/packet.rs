//! Packets of a Unix socket with who sent them (SCM_CREDENTIALS, unix(7)). rustix takes a process's id for one that is never
//! 0, which the kernel says of a process of another PID namespace.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::sockopt::PeerCredentials;

/// Room for what may come with a packet: more descriptors than one, so that each that the kernel has opened is closed.
const ANCILLARY_BYTES: usize = 256;

/// A packet.
#[derive(Debug)]
pub struct Packet {
    /// How long it is; what did not fit is gone.
    pub bytes: usize,
    /// The first descriptor that came with it; others are closed.
    pub descriptor: Option<OwnedFd>,
    /// Descriptors came with it that this process did not get: it may have no more (RLIMIT_NOFILE), as a rule.
    pub is_cut: bool,
    /// The process that has sent it, with its real user and group; 0: one of another PID namespace, or one that sent before
    /// this socket asked for it (SO_PASSCRED). `None`: it does not ask, or this is no packet but the other side's end.
    pub sender: Option<PeerCredentials>,
}

#[repr(C, align(8))]
struct Ancillary([u8; ANCILLARY_BYTES]);

/// Takes the next packet, with MSG_ flags. Descriptors are closed on exec.
///
/// # Errors
/// The kernel's.
pub fn receive(socket: impl AsFd, into: &mut [u8], flags: i32) -> io::Result<Packet> {
    let mut ancillary = Ancillary([0; ANCILLARY_BYTES]);
    let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: all zero is a message without anything.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    (message.msg_control, message.msg_controllen) = ((&raw mut ancillary).cast(), ANCILLARY_BYTES);
    // SAFETY: the buffers outlive the call, and are as long as the message says.
    let got = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags | libc::MSG_CMSG_CLOEXEC) };
    let bytes = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    let mut packet =
        Packet { bytes, descriptor: None, is_cut: message.msg_flags & libc::MSG_CTRUNC != 0, sender: None };
    // SAFETY: the kernel has filled the message in, and its parts lie in `ancillary`.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: null, or a part.
    while let Some(header) = unsafe { next.as_ref() } {
        // SAFETY: as above; the header's length is the kernel's.
        let (data, length) = unsafe {
            let data = libc::CMSG_DATA(next);
            (data, header.cmsg_len - (data as usize - next as usize))
        };
        match (header.cmsg_level, header.cmsg_type) {
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                for at in 0..length / size_of::<RawFd>() {
                    // SAFETY: a descriptor that the kernel has opened for us, which nobody else closes.
                    let descriptor = unsafe { OwnedFd::from_raw_fd(data.cast::<RawFd>().add(at).read_unaligned()) };
                    packet.descriptor.get_or_insert(descriptor);
                }
            }
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if length >= size_of::<libc::ucred>() => {
                // SAFETY: as long as that, and any bytes are one.
                let libc::ucred { pid, uid, gid } = unsafe { data.cast::<libc::ucred>().read_unaligned() };
                packet.sender = Some(PeerCredentials { pid, uid, gid });
            }
            _ => {}
        }
        // SAFETY: a part of the same message.
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
            // Nobody has kept its other end open.
            assert_eq!(rustix::io::read(&other.0, &mut [0; 2]).unwrap(), 0);
        }
    }
}
