//! A program's side of its connections to the store of its machine.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};
use shunt_sys::own::OwnFd;
use shunt_sys::shared::SharedMemory;
use zerocopy::{FromZeros, IntoBytes};

use super::messages::{Ask, Told, ask, outcome};
use crate::channel::Channel;
use crate::reference::Holder;
use crate::segment::{Mapped, Writer};

/// How long the store may be silent. It connects to another machine within half of that, or says that it cannot.
pub const SILENCE: Duration = Duration::from_secs(10);

/// One connection. It lives as long as the program means to write or to read.
#[derive(Debug)]
pub struct Connection {
    socket: OwnFd,
    holder: Holder,
}

impl Connection {
    /// Connects to the store that listens at `path`.
    ///
    /// # Errors
    /// The kernel's: there is no store; or that it does not answer as one, or does not let this program in.
    pub fn open(path: &Path) -> io::Result<Self> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, direction, Some(SILENCE))?;
        }
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        let socket = OwnFd::new(socket);
        let (told, _) = exchange(&socket, ask::HELLO, 0, None)?;
        Ok(Self { socket, holder: told.holder })
    }

    /// Whose store it is.
    #[must_use]
    pub fn holder(&self) -> Holder {
        self.holder
    }

    /// Asks for a segment. `None`: the store is full.
    ///
    /// # Errors
    /// The kernel's, or that the store does not answer as one.
    pub fn lease(&self) -> io::Result<Option<Writer>> {
        let (told, memory) = exchange(&self.socket, ask::LEASE, 0, None)?;
        let Some(memory) = memory else { return Ok(None) };
        Writer::new(SharedMemory::open(memory)?, self.holder, told.segment.get()).map(Some)
    }

    /// Asks to look into a segment of this store. `None`: this program may not, or there is no such segment.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn map(&self, segment: u32) -> io::Result<Option<Mapped>> {
        let (_, memory) = exchange(&self.socket, ask::MAP, segment, None)?;
        memory.map(|memory| Ok(Mapped::new(SharedMemory::open_to_read(memory)?))).transpose()
    }

    /// Asks for memory to count in (super::usage), which the store reads while this connection lives.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn counts(&self) -> io::Result<Option<SharedMemory>> {
        exchange(&self.socket, ask::COUNT, 0, None)?.1.map(SharedMemory::open).transpose()
    }

    /// Asks for a connection with the agent, for handoffs (include/shunt.h). `None`: this machine hands none off.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn agent(&self) -> io::Result<Option<OwnedFd>> {
        Ok(exchange(&self.socket, ask::HAND_OFF, 0, None)?.1)
    }

    /// Asks for a connection to a store, this one or another machine's. `None`: it cannot be had now.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn reach(&self, holder: Holder) -> io::Result<Option<Channel>> {
        let (told, socket) = exchange(&self.socket, ask::REACH, 0, Some(holder))?;
        let Some(socket) = socket else { return Ok(None) };
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, direction, Some(SILENCE))?;
        }
        Channel::of_reader(socket, &told.sealing).map(Some)
    }
}

/// Asks, and waits for the answer and the descriptor that comes with a good one.
fn exchange(socket: &OwnFd, kind: u32, segment: u32, holder: Option<Holder>) -> io::Result<(Told, Option<OwnedFd>)> {
    let mut ask = Ask::new_zeroed();
    (ask.kind, ask.segment) = (kind.into(), segment.into());
    ask.holder = holder.unwrap_or(ask.holder);
    let mut nothing = SendAncillaryBuffer::default();
    sendmsg(socket, &[IoSlice::new(ask.as_bytes())], &mut nothing, SendFlags::NOSIGNAL)?;
    let mut told = Told::new_zeroed();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let parts = &mut [IoSliceMut::new(told.as_mut_bytes())];
        match recvmsg(socket, parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptor = descriptors.by_ref().flatten().next();
    if got.bytes != size_of::<Told>() || told.kind.get() != kind {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the store's answer is not one"));
    }
    Ok((told, descriptor.filter(|_| told.outcome.get() == outcome::GOOD)))
}
