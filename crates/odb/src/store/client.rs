//! A program's side of its connections to the store of its machine.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, socket_with, socketpair,
};
use shunt_sys::own::OwnFd;
use shunt_sys::packet::Packet;
use shunt_sys::shared::SharedMemory;
use zerocopy::{FromZeros, IntoBytes};

use super::messages::{Ask, Told, ask, outcome};
use super::packets::{receive, send};
use crate::channel::{Channel, is_served};
use crate::place::{SentFile, Version, answers_at_once};
use crate::reference::{Holder, Reference};
use crate::segment::{Mapped, Way, Writer};
use crate::sources::Sources;

/// How long the store may be silent. It connects to another machine within half of that, or says that it cannot.
pub const SILENCE: Duration = Duration::from_secs(10);
/// The same where a program's own thread waits, for what the store says by itself: with what else it does, less than a second.
pub const QUICK: Duration = Duration::from_millis(900);
/// How long a call waits for another machine's store before its caller looks how long nothing has moved.
pub(crate) const GLANCE: Duration = Duration::from_millis(20);

/// By which programs reach the store that do not find its socket any more (chroot(2)).
static ENTRANCE: OnceLock<OwnedFd> = OnceLock::new();

/// An entrance of this process, which it has inherited ([`entrance`]).
pub fn enter_by(entrance: OwnedFd) {
    let _ = ENTRANCE.set(entrance);
}

/// A connection to the store at `path` for programs to inherit, whatever users they become: it only lets them in, each as
/// what it is by then.
///
/// # Errors
/// As [`Connection::open`].
pub fn entrance(path: &Path) -> io::Result<OwnedFd> {
    let socket = connected(path, SILENCE)?;
    let (told, _) = exchange(&socket, &about(ask::ENTRANCE, 0), None, SILENCE)?;
    if told.outcome.get() != outcome::GOOD {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(socket)
}

fn patient(socket: OwnedFd, patience: Duration) -> io::Result<OwnedFd> {
    for direction in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, direction, Some(patience))?;
    }
    Ok(socket)
}

fn connected(path: &Path, patience: Duration) -> io::Result<OwnedFd> {
    let socket =
        patient(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?, patience)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// One that the store is asked to serve, by an entrance of this process.
fn entered(entrance: &OwnedFd, patience: Duration) -> io::Result<OwnedFd> {
    let (own, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    send(entrance, about(ask::ENTER, 0).as_bytes(), Some(theirs.as_fd()), SendFlags::DONTWAIT)?;
    patient(own, patience)
}

/// Whether there is no socket to be found, as in another root directory, or in one that this user may not look into.
fn is_out_of_sight(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP))
}

/// One connection. It lives as long as the program means to write or to read.
#[derive(Debug)]
pub struct Connection {
    socket: OwnFd,
    holder: Holder,
    /// How long a question waits for its answer.
    patience: Duration,
}

impl Connection {
    /// Connects to the store that listens at `path`.
    ///
    /// # Errors
    /// The kernel's: there is no store; or that it does not answer as one, or does not let this program in.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_within(path, SILENCE)
    }

    /// The same, where each answer takes so long at most.
    ///
    /// # Errors
    /// As [`Self::open`]; WouldBlock and TimedOut where the store says nothing.
    pub fn open_within(path: &Path, patience: Duration) -> io::Result<Self> {
        let socket = match (connected(path, patience), ENTRANCE.get()) {
            (Err(error), Some(entrance)) if is_out_of_sight(&error) => entered(entrance, patience)?,
            (connected, _) => connected?,
        };
        let socket = OwnFd::new(socket);
        let (told, _) = exchange(&socket, &about(ask::HELLO, 0), None, patience)?;
        Ok(Self { socket, holder: told.holder, patience })
    }

    /// Whether the store still serves it, without asking.
    #[must_use]
    pub fn is_served(&self) -> bool {
        is_served(&self.socket)
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
        let (told, memory) = self.exchange(&about(ask::LEASE, 0), None)?;
        let Some(memory) = memory else { return Ok(None) };
        Writer::new(SharedMemory::open(memory)?, self.holder, told.segment.get()).map(Some)
    }

    /// Asks to look into a segment of this store. `None`: this program may not, or there is no such segment.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn map(&self, segment: u32) -> io::Result<Option<Mapped>> {
        let (_, memory) = self.exchange(&about(ask::MAP, segment), None)?;
        memory.map(|memory| Ok(Mapped::new(SharedMemory::open_to_read(memory)?))).transpose()
    }

    /// Asks for memory to count in (super::usage), which the store reads while this connection lives.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn counts(&self) -> io::Result<Option<SharedMemory>> {
        self.exchange(&about(ask::COUNT, 0), None)?.1.map(SharedMemory::open).transpose()
    }

    /// Asks to read which machines' programs can fetch from which stores.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn sources(&self) -> io::Result<Option<Sources>> {
        let (_, memory) = self.exchange(&about(ask::SOURCES, 0), None)?;
        memory.map(|memory| Sources::new(SharedMemory::open_to_read(memory)?)).transpose()
    }

    /// Asks for a connection with the agent, for handoffs (include/shunt.h). `None`: this machine hands none off.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn agent(&self) -> io::Result<Option<OwnedFd>> {
        Ok(self.exchange(&about(ask::HAND_OFF, 0), None)?.1)
    }

    /// Asks for a connection to a store, this one or another machine's. `None`: it cannot be had now.
    ///
    /// # Errors
    /// As [`Self::lease`].
    pub fn reach(&self, holder: Holder) -> io::Result<Option<Channel>> {
        // The agent waits for another one.
        set_socket_timeout(&self.socket, Timeout::Recv, Some(SILENCE))?;
        let reached = exchange(&self.socket, &Ask { holder, ..about(ask::REACH, 0) }, None, SILENCE);
        set_socket_timeout(&self.socket, Timeout::Recv, Some(self.patience))?;
        let (told, Some(socket)) = reached? else { return Ok(None) };
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, direction, Some(GLANCE))?;
        }
        Channel::of_reader(socket, &told.sealing).map(Some)
    }

    /// Asks for a file that a program has sent, to read it. `None`: this program may not, or the store has it no more.
    ///
    /// # Errors
    /// As [`Self::lease`], and that the file has changed.
    pub fn open_file(&self, segment: u32, number: u32) -> io::Result<Option<SentFile>> {
        let ask = Ask { file: number.into(), ..about(ask::OPEN_FILE, segment) };
        let (told, file) = self.exchange(&ask, None)?;
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

    fn exchange(&self, ask: &Ask, given: Option<BorrowedFd<'_>>) -> io::Result<(Told, Option<OwnedFd>)> {
        exchange(&self.socket, ask, given, self.patience)
    }

    /// Gives the store a file. False: it does not take it, or it is another version by now.
    fn keep_file(&self, segment: u32, number: u32, file: BorrowedFd<'_>, version: &Version) -> io::Result<bool> {
        // A descriptor of its own, that only reads: with the program's would go its locks (flock(2)) and its offset.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let opened =
            answers_at_once(file).then(|| rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()));
        let Some(Ok(own)) = opened else { return Ok(false) };
        let ask = Ask { file: number.into(), ..about(ask::KEEP_FILE, segment) };
        let (told, _) = self.exchange(&ask, Some(own.as_fd()))?;
        Ok(told.outcome.get() == outcome::GOOD && told.version == *version)
    }
}

/// A question about a segment, or about none.
fn about(kind: u32, segment: u32) -> Ask {
    Ask { kind: kind.into(), segment: segment.into(), ..Ask::new_zeroed() }
}

/// Asks, and waits for the answer and the descriptor that comes with a good one: as long as the socket's timeout says, and not
/// for longer where signals interrupt that.
fn exchange(
    socket: impl AsFd,
    ask: &Ask,
    given: Option<BorrowedFd<'_>>,
    patience: Duration,
) -> io::Result<(Told, Option<OwnedFd>)> {
    send(&socket, ask.as_bytes(), given, SendFlags::empty())?;
    let mut told = Told::new_zeroed();
    let began = Instant::now();
    let Packet { bytes, descriptor, is_cut, .. } = loop {
        if let Some(received) = receive(&socket, told.as_mut_bytes(), RecvFlags::empty())? {
            break received;
        }
        if began.elapsed() >= patience {
            return Err(io::ErrorKind::TimedOut.into());
        }
    };
    if bytes != size_of::<Told>() || told.kind != ask.kind {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the store's answer is not one"));
    }
    if is_cut && descriptor.is_none() {
        return Err(Errno::MFILE.into());
    }
    Ok((told, descriptor.filter(|_| told.outcome.get() == outcome::GOOD)))
}
