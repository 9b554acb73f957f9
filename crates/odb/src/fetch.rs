//! Bytes from the stores that hold them, for one process: a connection to each holder, one fetch at a time on it.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use zerocopy::IntoBytes;

use crate::hold::Returns;
use crate::reference::{PayloadId, Reference, Weight};
use crate::store::server::{Answer, FETCH, RETURN, Request};

/// How long a holder may be silent. It only copies memory.
const SILENCE: Duration = Duration::from_secs(10);

/// A reader's connections.
#[derive(Debug, Default)]
pub struct Holders {
    streams: Mutex<HashMap<SocketAddr, Arc<Mutex<Option<TcpStream>>>>>,
}

/// Why bytes cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Its lease has ended, or somebody has given back more than there was.
    #[error("{0:?} is gone: its lease has ended")]
    Gone(PayloadId),
    /// The machine, its store or the way to it.
    #[error("the store at {0} cannot be asked: {1}")]
    Holder(SocketAddr, #[source] io::Error),
}

impl Holders {
    /// Fetches the bytes of a reference, all of them: `into` is as long as the reference.
    ///
    /// # Errors
    /// They cannot be had, now or later.
    pub fn fetch(&self, reference: &Reference, into: &mut [u8]) -> Result<(), FetchError> {
        debug_assert_eq!(into.len() as u64, reference.length);
        let holder = reference.payload.holder;
        let connection = self.connection(holder);
        let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
        let reused = connection.is_some();
        let mut fetched = Self::try_fetch(&mut connection, reference, into);
        if fetched.is_err() && reused {
            // The store may have been restarted, or have closed an idle connection.
            *connection = None;
            fetched = Self::try_fetch(&mut connection, reference, into);
        }
        match fetched {
            Ok(true) => Ok(()),
            Ok(false) => Err(FetchError::Gone(reference.payload)),
            Err(error) => {
                *connection = None;
                Err(FetchError::Holder(holder, error))
            }
        }
    }

    fn connection(&self, holder: SocketAddr) -> Arc<Mutex<Option<TcpStream>>> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(streams.entry(holder).or_default())
    }

    fn try_fetch(connection: &mut Option<TcpStream>, reference: &Reference, into: &mut [u8]) -> io::Result<bool> {
        let stream: &TcpStream = Self::connected(connection, reference.payload.holder)?;
        let request = Request { kind: FETCH.into(), zero: 0.into(), reference: reference.emit() };
        send_all(stream, request.as_bytes())?;
        let mut answer = [0; size_of::<Answer>()];
        receive_all(stream, &mut answer)?;
        let answer: Answer = zerocopy::transmute!(answer);
        match (answer.found.get(), answer.length.get()) {
            (0, 0) => Ok(false),
            (1, length) if length == reference.length => receive_all(stream, into).map(|()| true),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the store answered what was not asked")),
        }
    }

    fn connected(connection: &mut Option<TcpStream>, holder: SocketAddr) -> io::Result<&TcpStream> {
        if connection.is_none() {
            let stream = TcpStream::connect_timeout(&holder, SILENCE)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(SILENCE))?;
            stream.set_write_timeout(Some(SILENCE))?;
            *connection = Some(stream);
        }
        connection.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// In the child of a fork: the connections are the parent's.
    pub fn after_fork(&self) {
        if let Ok(mut streams) = self.streams.try_lock() {
            streams.clear();
        }
    }

    /// Sends back the shares that nobody has a use for. Those whose holder cannot be reached end with their lease.
    pub fn send_returns(&self, returns: &Returns) {
        let mut by_holder: HashMap<SocketAddr, Vec<u8>> = HashMap::new();
        for (payload, weight) in returns.take() {
            let request = Request { kind: RETURN.into(), zero: 0.into(), reference: whole(payload, weight).emit() };
            by_holder.entry(payload.holder).or_default().extend_from_slice(request.as_bytes());
        }
        for (holder, requests) in by_holder {
            let connection = self.connection(holder);
            let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
            let sent = Self::connected(&mut connection, holder).and_then(|stream| send_all(stream, &requests));
            if sent.is_err() {
                *connection = None;
            }
        }
    }
}

/// A reference that is only about the share.
fn whole(payload: PayloadId, weight: Weight) -> Reference {
    Reference { payload, weight, offset: 0, length: 1 }
}

/// All of it. By system calls of our own (rustix), not libc's, which crates/preload interposes.
fn send_all(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::net::send(stream, bytes, rustix::net::SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// All of it, as above.
fn receive_all(stream: &TcpStream, mut into: &mut [u8]) -> io::Result<()> {
    while !into.is_empty() {
        match rustix::net::recv(stream, &mut *into, rustix::net::RecvFlags::empty()) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((got, _)) => into = &mut into[got..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
