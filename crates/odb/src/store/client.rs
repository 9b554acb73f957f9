//! A program's side of its connections to the store of its machine.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use shunt_sys::own::OwnFd;
use shunt_sys::shared::SharedMemory;
use zerocopy::{FromZeros, IntoBytes};

use super::messages::{Ask, Told, ask, outcome};
use super::packets::{receive, send};
use crate::channel::Channel;
use crate::place::{SentFile, Version, answers_at_once};
use crate::reference::{Holder, Reference};
use crate::segment::{Mapped, Way, Writer};

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
        let (told, _) = exchange(&socket, &about(ask::HELLO, 0), None)?;
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
        let (told, memory) = exchange(&self.socket, &about(ask::LEASE, 0), None)?;
        let Some(memory) = memory else { return Ok(None) };
        Writer::new(SharedMemory::open(memory)?, self.holder, told.segment.get()).map(Some)
    }

    /// Asks to look into a segment of this store. `None`: this program may not, or there is no such segment.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn map(&self, segment: u32) -> io::Result<Option<Mapped>> {
        let (_, memory) = exchange(&self.socket, &about(ask::MAP, segment), None)?;
        memory.map(|memory| Ok(Mapped::new(SharedMemory::open_to_read(memory)?))).transpose()
    }

    /// Asks for memory to count in (super::usage), which the store reads while this connection lives.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn counts(&self) -> io::Result<Option<SharedMemory>> {
        exchange(&self.socket, &about(ask::COUNT, 0), None)?.1.map(SharedMemory::open).transpose()
    }

    /// Asks for a connection with the agent, for handoffs (include/shunt.h). `None`: this machine hands none off.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn agent(&self) -> io::Result<Option<OwnedFd>> {
        Ok(exchange(&self.socket, &about(ask::HAND_OFF, 0), None)?.1)
    }

    /// Asks for a connection to a store, this one or another machine's. `None`: it cannot be had now.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn reach(&self, holder: Holder) -> io::Result<Option<Channel>> {
        let (told, socket) = exchange(&self.socket, &Ask { holder, ..about(ask::REACH, 0) }, None)?;
        let Some(socket) = socket else { return Ok(None) };
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, direction, Some(SILENCE))?;
        }
        Channel::of_reader(socket, &told.sealing).map(Some)
    }

    /// Asks for a file that a program has sent, to read it. `None`: this program may not, or the store has it no more.
    ///
    /// # Errors
    /// As [`Self::lease`], and that the file has changed.
    pub fn open_file(&self, segment: u32, number: u32) -> io::Result<Option<SentFile>> {
        let ask = Ask { file: number.into(), ..about(ask::OPEN_FILE, segment) };
        let (told, file) = exchange(&self.socket, &ask, None)?;
        let file = file.map(|file| SentFile::of(file, told.version));
        Ok(file.filter(SentFile::is_unchanged))
    }

    /// Refers to bytes of a file, which is as `version` says, from `from` on, at most `most` of them; gives it to the store
    /// first where it has to be. `None`: they are to be copied, or there are none.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn refer_to_file(
        &self,
        writer: &mut Writer,
        file: BorrowedFd<'_>,
        version: &Version,
        from: u64,
        most: u64,
    ) -> io::Result<Option<Reference>> {
        let length = version.size().saturating_sub(from).min(most);
        let mut way = writer.file(version, length);
        if let Way::Given(number) = way {
            let reference = writer.refer_to_file(number, from, length);
            if reference.is_some() {
                return Ok(reference);
            }
            // Perhaps it has been closed a moment ago.
            way = writer.file(version, length);
        }
        let Way::Give(number) = way else { return Ok(None) };
        if !self.keep_file(writer.segment(), number, file, version)? {
            writer.has_not_given();
            return Ok(None);
        }
        writer.has_given(number, *version);
        Ok(writer.refer_to_file(number, from, length))
    }

    /// Gives the store a file. False: it does not take it, or it is another version by now.
    fn keep_file(&self, segment: u32, number: u32, file: BorrowedFd<'_>, version: &Version) -> io::Result<bool> {
        // A descriptor of its own, that only reads: with the program's would go its locks (flock(2)) and its offset.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let opened =
            answers_at_once(file).then(|| rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()));
        let Some(Ok(own)) = opened else { return Ok(false) };
        let ask = Ask { file: number.into(), ..about(ask::KEEP_FILE, segment) };
        let (told, _) = exchange(&self.socket, &ask, Some(own.as_fd()))?;
        Ok(told.outcome.get() == outcome::GOOD && told.version == *version)
    }
}

/// A question about a segment, or about none.
fn about(kind: u32, segment: u32) -> Ask {
    Ask { kind: kind.into(), segment: segment.into(), ..Ask::new_zeroed() }
}

/// Asks, and waits for the answer and the descriptor that comes with a good one.
fn exchange(socket: &OwnFd, ask: &Ask, given: Option<BorrowedFd<'_>>) -> io::Result<(Told, Option<OwnedFd>)> {
    send(socket, ask.as_bytes(), given, SendFlags::empty())?;
    let mut told = Told::new_zeroed();
    let (got, descriptor) = loop {
        if let Some(received) = receive(socket, told.as_mut_bytes(), RecvFlags::empty())? {
            break received;
        }
    };
    if got != size_of::<Told>() || told.kind != ask.kind {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the store's answer is not one"));
    }
    Ok((told, descriptor.filter(|_| told.outcome.get() == outcome::GOOD)))
}
