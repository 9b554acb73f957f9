//! A program's end of its connections to the store of its machine. An *entrance* is a connection to the store that
//! child processes inherit. A *segment* is memory that the store leases to a program. A *reference* names bytes of a
//! payload, a body that some program has written. By a *handoff*, another machine sends a payload to this program's
//! client. The *agent* is Shunt's daemon on each machine, and the store is a thread of it.

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

/// Longest silence of the store. If it has to connect to another machine, it does so within half of that time, or says
/// that it cannot.
pub const SILENCE: Duration = Duration::from_secs(10);
/// Longest silence of the store if a thread of the program itself waits for an answer that needs no other machine. With
/// the thread's other work it is less than a second.
pub const QUICK: Duration = Duration::from_millis(900);
/// Longest single wait on a connection to a store ([`Connection::reach`]). After it, the caller checks how long nothing
/// has moved.
pub(crate) const GLANCE: Duration = Duration::from_millis(20);

/// Entrance by which this process reaches the store, if it cannot find the store's socket any more (chroot(2)).
static ENTRANCE: OnceLock<OwnedFd> = OnceLock::new();

/// Sets the entrance that this process has inherited ([`entrance`]).
pub fn enter_by(entrance: OwnedFd) {
    let _ = ENTRANCE.set(entrance);
}

/// Opens an entrance to the store at `path`: a connection for child processes to inherit, whatever users they become.
/// By it, the store only admits programs, each as the user that it is at that time.
///
/// # Errors
/// As for [`Connection::open`].
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

/// Makes a connection through an entrance: sends one end of a pair of sockets to the store, to be served.
fn entered(entrance: &OwnedFd, patience: Duration) -> io::Result<OwnedFd> {
    let (own, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    send(entrance, about(ask::ENTER, 0).as_bytes(), Some(theirs.as_fd()), SendFlags::DONTWAIT)?;
    patient(own, patience)
}

/// Whether the store's socket cannot be found: in another root directory, or in a directory that this user may not
/// search.
fn is_out_of_sight(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP))
}

/// Connection of a program to its machine's store. The program keeps it open as long as it keeps payloads in the store,
/// or fetches.
#[derive(Debug)]
pub struct Connection {
    socket: OwnFd,
    holder: Holder,
    /// Longest time that a question waits for its answer.
    patience: Duration,
}

impl Connection {
    /// Connects to the store that listens at `path`.
    ///
    /// # Errors
    /// Returns the kernel's error of connect(2) if there is no store. Returns another error if the listener does not
    /// answer as a store does, or the store does not admit this program.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_within(path, SILENCE)
    }

    /// The same as [`Self::open`], where each answer may take at most `patience`.
    ///
    /// # Errors
    /// As for [`Self::open`]; `WouldBlock` or `TimedOut` if the store is silent.
    pub fn open_within(path: &Path, patience: Duration) -> io::Result<Self> {
        let socket = match (connected(path, patience), ENTRANCE.get()) {
            (Err(error), Some(entrance)) if is_out_of_sight(&error) => entered(entrance, patience)?,
            (connected, _) => connected?,
        };
        let socket = OwnFd::new(socket);
        let (told, _) = exchange(&socket, &about(ask::HELLO, 0), None, patience)?;
        Ok(Self { socket, holder: told.holder, patience })
    }

    /// Whether the store still serves the connection. Checked without a message.
    #[must_use]
    pub fn is_served(&self) -> bool {
        is_served(&self.socket)
    }

    /// Name of the store.
    #[must_use]
    pub fn holder(&self) -> Holder {
        self.holder
    }

    /// Asks for a segment. `None`: the store is full, or has leased this program as many segments as it may have.
    ///
    /// # Errors
    /// Returns the kernel's error of a system call, or an error if the store does not answer as one.
    pub fn lease(&self) -> io::Result<Option<Writer>> {
        let (told, memory) = self.exchange(&about(ask::LEASE, 0), None)?;
        let Some(memory) = memory else { return Ok(None) };
        Writer::new(SharedMemory::open(memory)?, self.holder, told.segment.get()).map(Some)
    }

    /// Asks to map a segment of this store. `None`: this program is not allowed to, or there is no such segment.
    ///
    /// # Errors
    /// As for [`Self::lease`].
    pub fn map(&self, segment: u32) -> io::Result<Option<Mapped>> {
        let (_, memory) = self.exchange(&about(ask::MAP, segment), None)?;
        memory.map(|memory| Ok(Mapped::new(SharedMemory::open_to_read(memory)?))).transpose()
    }

    /// Asks for memory in which the program keeps its counts (super::usage). The store reads it as long as this
    /// connection lives.
    ///
    /// # Errors
    /// As for [`Self::lease`].
    pub fn counts(&self) -> io::Result<Option<SharedMemory>> {
        self.exchange(&about(ask::COUNT, 0), None)?.1.map(SharedMemory::open).transpose()
    }

    /// Asks for the table of which machines' programs can fetch from which stores.
    ///
    /// # Errors
    /// As for [`Self::lease`].
    pub fn sources(&self) -> io::Result<Option<Sources>> {
        let (_, memory) = self.exchange(&about(ask::SOURCES, 0), None)?;
        memory.map(|memory| Sources::new(SharedMemory::open_to_read(memory)?)).transpose()
    }

    /// Asks for a connection with the agent, for handoffs (include/shunt.h). `None`: this machine hands off no
    /// connections.
    ///
    /// # Errors
    /// As for [`Self::lease`].
    pub fn agent(&self) -> io::Result<Option<OwnedFd>> {
        Ok(self.exchange(&about(ask::HAND_OFF, 0), None)?.1)
    }

    /// Asks for a connection to a store, this one or another machine's. `None`: it cannot be made now.
    ///
    /// # Errors
    /// As for [`Self::lease`].
    pub fn reach(&self, holder: Holder) -> io::Result<Option<Channel>> {
        // Waits longer than for other answers, because the agent waits for the other machine's agent.
        set_socket_timeout(&self.socket, Timeout::Recv, Some(SILENCE))?;
        let reached = exchange(&self.socket, &Ask { holder, ..about(ask::REACH, 0) }, None, SILENCE);
        set_socket_timeout(&self.socket, Timeout::Recv, Some(self.patience))?;
        let (told, Some(socket)) = reached? else { return Ok(None) };
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, direction, Some(GLANCE))?;
        }
        Channel::of_reader(socket, &told.sealing).map(Some)
    }

    /// Asks to read a file that a program has sent. `None`: this program is not allowed to, the store has closed the
    /// file, or the file has changed.
    ///
    /// # Errors
    /// As for [`Self::lease`].
    pub fn open_file(&self, segment: u32, number: u32) -> io::Result<Option<SentFile>> {
        let ask = Ask { file: number.into(), ..about(ask::OPEN_FILE, segment) };
        let (told, file) = self.exchange(&ask, None)?;
        let file = file.map(|file| SentFile::of(file, told.version));
        Ok(file.filter(SentFile::is_unchanged))
    }

    /// Makes a reference to at most `most` bytes of a file, from offset `from` on, where `version` is the file's state.
    /// Gives the file to the store first, if the store does not have it. `None`: the bytes have to be copied, or there
    /// are none.
    ///
    /// # Errors
    /// As for [`Self::lease`].
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
            // The store may have closed the file a moment ago.
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

    /// Gives the store a file. Returns false if the store refuses it, or the file has another state by now.
    fn keep_file(&self, segment: u32, number: u32, file: BorrowedFd<'_>, version: &Version) -> io::Result<bool> {
        // Opens a new read-only descriptor: the program's own descriptor would bring the program's locks (flock(2)) and
        // file offset along.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let opened =
            answers_at_once(file).then(|| rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()));
        let Some(Ok(own)) = opened else { return Ok(false) };
        let ask = Ask { file: number.into(), ..about(ask::KEEP_FILE, segment) };
        let (told, _) = self.exchange(&ask, Some(own.as_fd()))?;
        Ok(told.outcome.get() == outcome::GOOD && told.version == *version)
    }
}

/// Makes a question about a segment, or about none (0).
fn about(kind: u32, segment: u32) -> Ask {
    Ask { kind: kind.into(), segment: segment.into(), ..Ask::new_zeroed() }
}

/// Sends a question, with the descriptor `given`. Waits for the answer, and for the descriptor that comes with a good
/// one. Waits as long as the socket's timeout; a signal starts that wait anew, unless `patience` has passed.
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
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the store's answer cannot be read"));
    }
    if is_cut && descriptor.is_none() {
        return Err(Errno::MFILE.into());
    }
    Ok((told, descriptor.filter(|_| told.outcome.get() == outcome::GOOD)))
}
