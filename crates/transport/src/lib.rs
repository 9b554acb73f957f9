//! Ordered bytes to and from another agent: mutual TLS 1.3 (rustls) on TCP, non-blocking. The rest of the agent knows
//! only [`Transport`]. A *peer* is the agent at the other end.
//!
//! A *frame* is a message of the agents' protocol. All frames that one turn (pass) of the agent's event loop sends
//! leave together, in one record and one write if they are short enough. [`Transport::fill`] makes a few reads at most,
//! of bytes that have arrived already. The caller uses all bytes that [`Transport::fill`] decrypts in the same turn,
//! because epoll does not report bytes that wait in rustls. [`credentials`] checks who the other agent is. A *payload*
//! is a response's body that comes as a stream after a frame. A *store* has the bodies of programs under `shunt run`.
#![forbid(unsafe_code)]

pub mod credentials;

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustls::{ClientConnection, Connection, ConnectionTrafficSecrets, ExtractedSecrets, ServerConnection};
use shunt_odb::records::Sealing;
use shunt_wire::local::Reason;
use shunt_wire::peer::Frame;
use shunt_wire::tls::{Keys, Suite};
use zerocopy::FromZeros;

use crate::credentials::{ALPN, Credentials};

/// Largest number of bytes that may wait for a peer that does not read.
const MAX_OUTPUT_BYTES: usize = 4 << 20;
/// Size of the buffer for decrypted bytes.
const INPUT_BYTES: usize = 16 << 10;
/// Size of one read by rustls, in bytes.
const READ_BYTES: usize = 4096;
/// Largest number of reads in one call of [`Transport::fill`]. A read of fewer than [`READ_BYTES`] bytes is the last
/// one.
const READS: usize = 4;

/// Why a connection between agents ended.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer does not read, and too many bytes wait to be sent.
    #[error("the peer does not read: {MAX_OUTPUT_BYTES} bytes wait to be sent")]
    Stuck,
    /// The peer sent a frame that this agent refuses.
    #[error("the peer sent a frame that cannot be accepted: {0}")]
    Refused(Reason),
    /// The peer refuses this agent.
    #[error("the peer's agent refuses this one: {}", refusal(*.0))]
    RefusedBy(Reason),
    /// An error of TLS. For example, the certificate of either end is refused, or the peer does not speak TLS.
    #[error("TLS: {}", credentials::in_words(.0))]
    Tls(#[from] rustls::Error),
    /// Error of a system call on the socket.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Says why a peer's agent refuses this one, and what to do.
fn refusal(reason: Reason) -> String {
    match reason {
        Reason::Version => {
            "it speaks another version of the protocol: install the same release on both machines".into()
        }
        Reason::NotAllowed => {
            "it has no [[peer]] of this name, or must dial this agent itself: its log says which".into()
        }
        reason => format!("{reason}: see its log"),
    }
}

/// A non-blocking connection with another agent, with buffers for frames in both directions.
#[derive(Debug)]
pub struct Transport {
    stream: TcpStream,
    tls: Connection,
    /// Decrypted bytes. Allocated once, because a new buffer of zeros for each read would cost more than the read.
    input: Box<[u8]>,
    /// Range of `input` that the caller has not taken yet.
    unread: Range<usize>,
    /// Whether the caller has taken a frame with the TLS keys of a client's connection. rustls still has a copy of the
    /// frame in its receive buffer.
    keys_came: bool,
    /// Frames that rustls has not taken yet.
    output: Vec<u8>,
}

impl Transport {
    /// Begins to connect from any local address. [`Transport::connected`] tells the result once the socket is writable.
    ///
    /// # Errors
    /// Returns the kernel's error of socket(2), connect(2) or setsockopt(2).
    pub fn connect(to: SocketAddr, tls: ClientConnection) -> io::Result<Self> {
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => Self::new(TcpStream::from(socket), tls.into()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Wraps a TCP connection that this process has made.
    ///
    /// # Errors
    /// Returns the kernel's error of fcntl(2) or setsockopt(2).
    pub fn dialled(stream: TcpStream, tls: ClientConnection) -> io::Result<Self> {
        Self::new(stream, tls.into())
    }

    /// Wraps a TCP connection that this agent has accepted.
    ///
    /// # Errors
    /// Returns the kernel's error of fcntl(2) or setsockopt(2).
    pub fn accepted(stream: TcpStream, tls: ServerConnection) -> io::Result<Self> {
        Self::new(stream, tls.into())
    }

    fn new(stream: TcpStream, tls: Connection) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        let input = vec![0; INPUT_BYTES].into_boxed_slice();
        Ok(Self { stream, tls, input, unread: 0..0, keys_came: false, output: Vec::new() })
    }

    /// Returns whether the other end has proved to be the agent with this name.
    pub fn is_of(&self, name: &str) -> bool {
        let certificate = self.tls.peer_certificates().and_then(|chain| chain.first());
        !self.tls.is_handshaking() && certificate.is_some_and(|certificate| credentials::names(certificate, name))
    }

    /// Checks the other end's certificate against newer credentials than those that this connection began with. `name`
    /// is the other agent's name.
    ///
    /// # Errors
    /// Returns why the newer credentials would refuse the other end.
    pub fn is_good_for(&self, credentials: &Credentials, name: &str) -> Result<(), TransportError> {
        Ok(credentials.accepts(&self.tls, name)?)
    }

    /// Exports a 16-byte key that only the two ends of this connection have (RFC 8446, 7.5). `label` names its purpose.
    ///
    /// # Errors
    /// Returns an error where the handshake is not done.
    pub fn export_key(&self, label: &[u8]) -> Result<[u8; 16], TransportError> {
        Ok(self.tls.export_keying_material([0; 16], label, None)?)
    }

    /// Returns the result of a connect that was under way. Call it once the socket is writable.
    ///
    /// # Errors
    /// Returns why the connect failed.
    pub fn connected(&self) -> io::Result<()> {
        match self.stream.take_error()? {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Returns this end's address, which is known as soon as the connect has begun.
    ///
    /// # Errors
    /// Returns the kernel's error of getsockname(2).
    pub fn local(&self) -> io::Result<IpAddr> {
        Ok(self.stream.local_addr()?.ip().to_canonical())
    }

    /// Returns the other end's address.
    ///
    /// # Errors
    /// Returns the kernel's error of getpeername(2), for example where the connection is gone.
    pub fn remote(&self) -> io::Result<IpAddr> {
        Ok(self.stream.peer_addr()?.ip().to_canonical())
    }

    /// Returns the socket's descriptor, for epoll.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Reads and decrypts bytes that have arrived, perhaps not all of them: epoll is level-triggered, and reports the
    /// rest again. During the handshake call [`Transport::flush`] afterwards, because there may be an answer to send.
    ///
    /// # Errors
    /// See [`TransportError`].
    pub fn fill(&mut self) -> Result<(), TransportError> {
        for read in 0..READS {
            // rustls wants to read no more while decrypted bytes wait in it. The caller takes those first.
            if read > 0 && !self.tls.wants_read() {
                break;
            }
            let bytes = match self.tls.read_tls(&mut self.stream) {
                // The caller first uses the bytes that came before the end of the stream. epoll reports the end again.
                Ok(0) if read > 0 => break,
                Ok(0) => return Err(TransportError::Closed),
                Ok(bytes) => bytes,
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => break,
                Err(error) => return Err(error.into()),
            };
            self.decrypt()?;
            if bytes < READ_BYTES {
                break;
            }
        }
        Ok(())
    }

    fn decrypt(&mut self) -> Result<(), TransportError> {
        let processed = self.tls.process_new_packets();
        if processed.is_err() {
            // Sends the alert that rustls has queued, which tells the other end what was wrong.
            let _ = self.tls.write_tls(&mut self.stream);
        }
        processed?;
        if !self.tls.is_handshaking() && self.tls.alpn_protocol() != Some(ALPN) {
            return Err(rustls::Error::NoApplicationProtocol.into());
        }
        Ok(())
    }

    /// Returns the next frame, or `None` where no whole frame has been read yet.
    ///
    /// # Errors
    /// See [`TransportError`]. After a refused frame nothing can be read.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, TransportError> {
        loop {
            if let Some((frame, length)) =
                Frame::parse(&self.input[self.unread.clone()]).map_err(TransportError::Refused)?
            {
                let end = self.unread.start + length;
                self.input[self.unread.start..end].fill(0); // the frame may hold keys
                self.unread.start = end;
                self.keys_came |= frame.claim().is_some_and(|claim| claim.suite.get() != 0);
                return Ok(Some(frame));
            }
            if !self.take_plaintext()? {
                if std::mem::take(&mut self.keys_came) {
                    self.forget_decrypted();
                }
                return Ok(None);
            }
        }
    }

    /// Returns bytes of the payload that follows the last frame. Returns an empty slice where more must be read first.
    ///
    /// # Errors
    /// See [`TransportError`].
    pub fn payload(&mut self) -> Result<&[u8], TransportError> {
        if self.unread.is_empty() {
            self.take_plaintext()?;
        }
        Ok(&self.input[self.unread.clone()])
    }

    /// Removes the first `bytes` bytes of [`Transport::payload`], which the caller has used.
    ///
    /// # Panics
    /// Panics if there are fewer bytes.
    pub fn consume(&mut self, bytes: usize) {
        assert!(bytes <= self.unread.len(), "{bytes} bytes of {}", self.unread.len());
        self.unread.start += bytes;
    }

    /// Moves decrypted bytes from rustls into `input`. Returns whether there were some.
    fn take_plaintext(&mut self) -> Result<bool, TransportError> {
        // There is room: the unread bytes are less than a frame, and the buffer holds two frames of any length.
        let before = self.unread.end;
        self.input.copy_within(self.unread.clone(), 0);
        self.unread = 0..self.unread.len();
        self.input[self.unread.end..before.max(self.unread.end)].fill(0);
        match self.tls.reader().read(&mut self.input[self.unread.end..]) {
            Ok(bytes) => {
                self.unread.end += bytes;
                Ok(bytes > 0)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Overwrites decrypted bytes that rustls still has. rustls decrypts in its receive buffer. Bytes that were taken
    /// from it stay there until others are read into their place. So this method makes rustls read zeros into the whole
    /// buffer, except where bytes still wait in the buffer.
    fn forget_decrypted(&mut self) {
        struct Zeros;
        impl Read for Zeros {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                buffer.fill(0);
                Err(io::ErrorKind::WouldBlock.into())
            }
        }
        let _ = self.tls.read_tls(&mut Zeros);
    }

    /// Returns the buffer for frames to send. [`Transport::flush`] sends them together.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Sends frames, and overwrites and empties the buffer `frames`, because they may hold keys. Returns `true` where
    /// nothing is left to send.
    ///
    /// # Errors
    /// See [`TransportError`].
    pub fn send(&mut self, frames: &mut Vec<u8>) -> Result<bool, TransportError> {
        let is_first = self.output.is_empty() && !frames.is_empty();
        let taken = if is_first { self.tls.writer().write(frames)? } else { 0 };
        self.output.extend_from_slice(&frames[taken..]);
        frames.fill(0);
        frames.clear();
        self.flush()
    }

    /// Sends the bytes in [`Transport::output`] and the messages of the handshake. Returns `true` where nothing is left
    /// to send.
    ///
    /// # Errors
    /// See [`TransportError`].
    pub fn flush(&mut self) -> Result<bool, TransportError> {
        loop {
            // rustls takes a bounded number of bytes, and keeps them until the handshake is done.
            let taken = if self.output.is_empty() { 0 } else { self.tls.writer().write(&self.output)? };
            // `drain` would leave copies of the bytes that rustls took, perhaps keys, in the buffer's memory.
            // `split_off` and the assignment free the buffer, and the agent's allocator overwrites memory that it
            // frees.
            self.output = self.output.split_off(taken);
            if !self.write_records()? || taken == 0 {
                break;
            }
        }
        if self.output.len() > MAX_OUTPUT_BYTES {
            return Err(TransportError::Stuck);
        }
        Ok(self.output.is_empty() && !self.tls.wants_write())
    }

    /// Writes the records that rustls has. Returns `false` where the socket takes no more.
    fn write_records(&mut self) -> io::Result<bool> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut self.stream) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Sends the bytes in [`Transport::output`], and then close_notify (RFC 8446, 6.1). Returns `true` where nothing is
    /// left to send.
    ///
    /// # Errors
    /// See [`TransportError`].
    pub fn finish(&mut self) -> Result<bool, TransportError> {
        self.flush()?;
        if self.output.is_empty() {
            self.tls.send_close_notify();
        }
        self.flush()
    }

    /// Takes the connection apart into its socket and its keys, for a program or a store that continues it. The
    /// handshake must be done, and no bytes may wait to be taken or to be sent.
    ///
    /// # Errors
    /// Returns an error where bytes are left, or rustls does not give its keys out.
    pub fn into_channel(self) -> Result<(OwnedFd, Sealing), TransportError> {
        if !self.unread.is_empty() || !self.output.is_empty() {
            return Err(TransportError::Refused(Reason::Malformed));
        }
        // The socket becomes blocking, because programs wait for their answers. A store, which must not wait, passes
        // MSG_DONTWAIT with each call.
        self.stream.set_nonblocking(false)?;
        let sealing = sealing(&self.tls.dangerous_extract_secrets()?)?;
        Ok((self.stream.into(), sealing))
    }

    /// Closes the connection by a reset, so that the other end does not take the bytes that it has for the whole
    /// payload.
    pub fn reset(self) {
        let _ = sockopt::set_socket_linger(&self.stream, Some(std::time::Duration::ZERO));
    }
}

/// Returns the connection's keys in both directions, in the form of [`shunt_odb::records`].
fn sealing(secrets: &ExtractedSecrets) -> Result<Sealing, rustls::Error> {
    let keys = |secrets: &ConnectionTrafficSecrets| {
        let (suite, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (Suite::Aes128GcmSha256, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (Suite::Aes256GcmSha384, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (Suite::ChaCha20Poly1305Sha256, key, iv),
            _ => return None,
        };
        let mut keys = Keys::new_zeroed();
        keys.key.get_mut(..suite.key_bytes())?.copy_from_slice(key.as_ref().get(..suite.key_bytes())?);
        keys.iv.copy_from_slice(iv.as_ref());
        Some((suite, keys))
    };
    let unknown = || rustls::Error::General("the program's cipher suite is not supported".into());
    let (suite, send) = keys(&secrets.tx.1).ok_or_else(unknown)?;
    let (_, receive) = keys(&secrets.rx.1).ok_or_else(unknown)?;
    let (send_next, receive_next) = (secrets.tx.0.into(), secrets.rx.0.into());
    Ok(Sealing { suite: (suite as u16).into(), zero: [0; 6], send_next, receive_next, send, receive })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shunt_ca::{Authority, Files, Request};
    use shunt_config::TlsConfig;
    use shunt_wire::peer::{Ended, HEADER_BYTES};
    use std::net::TcpListener;

    const ENDED_BYTES: usize = HEADER_BYTES + size_of::<Ended>();

    fn credentials(authority: &Authority, name: &str) -> Credentials {
        let files = authority.issue(&Request { name: name.into(), addresses: Vec::new(), days: 1 }).unwrap();
        read(authority, files, name)
    }

    fn read(authority: &Authority, files: Files, name: &str) -> Credentials {
        let (ca, crl) = (authority.certificate(), Some(authority.list()));
        Credentials::read(&TlsConfig { certificate: files.certificate, key: files.key, ca, crl }, name).unwrap()
    }

    /// Returns both ends of a connection: the one that dials "be1", and the one that accepts.
    fn pair(dialler: &Credentials, listener: &Credentials) -> (Transport, Transport) {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        let dialled = Transport::connect(to, dialler.dial("be1").unwrap()).unwrap();
        (dialled, Transport::accepted(socket.accept().unwrap().0, listener.accept().unwrap()).unwrap())
    }

    /// Does what one turn of the event loop does, at each end.
    fn turn(one: &mut Transport, other: &mut Transport) -> Result<(), TransportError> {
        for side in [one, other] {
            side.connected()?;
            side.flush()?;
            side.fill()?;
            side.flush()?;
        }
        Ok(())
    }

    fn good_pair() -> (Transport, Transport) {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path()).unwrap();
        let (mut one, mut other) = pair(&credentials(&authority, "fe1"), &credentials(&authority, "be1"));
        assert!(shake_hands(&mut one, &mut other).is_none());
        (one, other)
    }

    /// Runs the handshake to its end. Returns the error if one end refuses the other.
    fn shake_hands(one: &mut Transport, other: &mut Transport) -> Option<TransportError> {
        while one.tls.is_handshaking() || other.tls.is_handshaking() {
            if let Err(error) = turn(one, other) {
                return Some(error);
            }
        }
        // In TLS 1.3, the end that dials completes the handshake before the other end has checked the dialler's
        // certificate.
        turn(one, other).err()
    }

    #[test]
    fn a_revoked_certificate_is_refused_on_either_side_and_of_those_that_are_there() {
        let is_revoked = |error: Option<TransportError>| {
            let revoked = rustls::Error::InvalidCertificate(rustls::CertificateError::Revoked);
            matches!(&error, Some(TransportError::Tls(error)) if *error == revoked)
        };
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path()).unwrap();
        let (fe1, be1) = (credentials(&authority, "fe1"), credentials(&authority, "be1"));
        let again = |name: &str| read(&authority, authority.files_of(name), name);
        let (mut one, mut other) = pair(&fe1, &be1);
        assert!(shake_hands(&mut one, &mut other).is_none());
        assert!(one.is_good_for(&again("fe1"), "be1").is_ok() && other.is_good_for(&again("be1"), "fe1").is_ok());

        authority.revoke("be1").unwrap();
        assert!(is_revoked(one.is_good_for(&again("fe1"), "be1").err()));
        assert!(other.is_good_for(&again("be1"), "fe1").is_ok());
        let (mut dialled, mut accepted) = pair(&again("fe1"), &be1);
        assert!(is_revoked(shake_hands(&mut dialled, &mut accepted)));

        authority.revoke("fe1").unwrap();
        assert!(is_revoked(other.is_good_for(&again("be1"), "fe1").err()));
        let (mut dialled, mut accepted) = pair(&fe1, &again("be1"));
        assert!(is_revoked(shake_hands(&mut dialled, &mut accepted)));
    }

    fn ended(handoff: u64) -> Ended {
        Ended { worker: 1.into(), reason: 1.into(), handoff: handoff.into(), trace: Default::default() }
    }

    #[test]
    fn frames_come_out_however_they_were_cut() {
        let (mut ours, mut theirs) = good_pair();
        let mut bytes = Vec::new();
        (0..1000).for_each(|handoff| ended(handoff).emit(&mut bytes));
        let mut next = 0;
        for part in bytes.chunks(ENDED_BYTES * 7 - 3) {
            theirs.output().extend_from_slice(part);
            turn(&mut theirs, &mut ours).unwrap();
            while let Some(frame) = ours.next_frame().unwrap() {
                assert!(matches!(frame, Frame::Ended(ended) if ended.handoff.get() == next));
                next += 1;
            }
        }
        while next < 1000 {
            turn(&mut theirs, &mut ours).unwrap();
            while let Some(frame) = ours.next_frame().unwrap() {
                assert!(matches!(frame, Frame::Ended(ended) if ended.handoff.get() == next));
                next += 1;
            }
        }
        drop(theirs);
        let error = (0..100).find_map(|_| ours.fill().err());
        assert!(matches!(error, Some(TransportError::Closed | TransportError::Io(_))), "{error:?}");
    }

    #[test]
    fn a_payload_behind_a_frame_comes_whole() {
        let (mut ours, mut theirs) = good_pair();
        ended(7).emit(theirs.output());
        let payload: Vec<u8> = (0..200_000u32).map(|at| (at % 251) as u8).collect();
        theirs.output().extend_from_slice(&payload);
        let (mut frame, mut got) = (None, Vec::new());
        while got.len() < payload.len() {
            turn(&mut theirs, &mut ours).unwrap();
            if frame.is_none() {
                frame = ours.next_frame().unwrap();
                continue;
            }
            while let bytes @ 1.. = ours.payload().unwrap().len() {
                got.extend_from_slice(ours.payload().unwrap());
                ours.consume(bytes);
            }
        }
        assert!(matches!(frame, Some(Frame::Ended(ended)) if ended.handoff.get() == 7));
        assert_eq!(got, payload);
    }

    #[test]
    fn the_frames_of_a_turn_are_one_record() {
        let (mut ours, _theirs) = good_pair();
        (0..20).for_each(|handoff| ended(handoff).emit(ours.output()));
        let plain = ours.output().len();
        let frames = std::mem::take(ours.output());
        let taken = ours.tls.writer().write(&frames).unwrap();
        let mut record = Vec::new();
        ours.tls.write_tls(&mut record).unwrap();
        assert_eq!((taken, record.len()), (plain, plain + 5 + 1 + 16), "header, content type, tag (RFC 8446, 5.2)");
    }

    #[test]
    fn each_end_knows_who_the_other_is() {
        let (ours, theirs) = good_pair();
        assert!(ours.is_of("be1") && !ours.is_of("fe1"));
        assert!(theirs.is_of("fe1") && !theirs.is_of("be1"));
    }

    #[test]
    fn a_certificate_of_another_name_or_authority_is_refused() {
        let (dir, other_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let authority = Authority::create(dir.path()).unwrap();
        let stranger = Authority::create(other_dir.path()).unwrap();
        let (good, wrong) = (credentials(&authority, "fe1"), credentials(&authority, "be2"));
        let foreign = credentials(&stranger, "be1");
        for (dialler, listener) in [(&good, &wrong), (&good, &foreign), (&foreign, &credentials(&authority, "be1"))] {
            let (mut one, mut other) = pair(dialler, listener);
            let failure = (0..1000).find_map(|_| turn(&mut one, &mut other).err());
            assert!(matches!(failure, Some(TransportError::Tls(_))), "{failure:?}");
            assert!(!one.is_of("be1") || !other.is_of("be1"));
        }
    }

    #[test]
    fn bytes_that_are_not_tls_are_refused_with_an_alert() {
        let dir = tempfile::tempdir().unwrap();
        let credentials = credentials(&Authority::create(dir.path()).unwrap(), "be1");
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stranger = TcpStream::connect(socket.local_addr().unwrap()).unwrap();
        let mut ours = Transport::accepted(socket.accept().unwrap().0, credentials.accept().unwrap()).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let error = (0..1_000_000).find_map(|_| ours.fill().err());
        assert!(matches!(error, Some(TransportError::Tls(_))), "{error:?}");
        drop(ours);
        let mut alert = Vec::new();
        let _ = stranger.read_to_end(&mut alert);
        assert_eq!(alert.first(), Some(&21), "{alert:?} is no alert (RFC 8446, 5.1)");
    }

    #[test]
    fn a_peer_that_does_not_read_is_given_up() {
        let (mut ours, _theirs) = good_pair();
        ours.output().resize(64 << 20, 0);
        assert!(matches!(ours.flush(), Err(TransportError::Stuck)));
    }
}
