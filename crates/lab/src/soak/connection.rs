//! One connection of the load. It asks for one body after another, reads them as its [`Life`] (the client's behaviour)
//! says, and compares each byte.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::mix::{Abort, File, Life, Reader};
use super::response::{Response, Way};
use crate::answer::{Answer, Ending};
use crate::http::get_request;

/// Size of a slow reader's reads, in bytes.
const SLOW_PIECE: usize = 16 << 10;
/// Number of reads that a fast reader makes before other connections have their turn.
const FAST_PIECES: usize = 8;

/// The event that a connection waits for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Wants {
    /// Data to read.
    Read,
    /// The end of a pause. Until this time the connection is left alone.
    Sleep(Instant),
    /// Nothing: the caller has to close the connection.
    End,
}

/// Responses that have ended in one step of a connection.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub(super) done: Vec<Response>,
    /// Length in bytes of a body that the client did not read to its end, because it left.
    pub(super) aborted: Option<u64>,
}

enum State {
    Connecting,
    Thinking,
    Reading(Answer),
}

pub(super) struct Connection {
    pub(super) stream: TcpStream,
    server: SocketAddr,
    life: Life,
    state: State,
    /// Index of the present request.
    request: usize,
    opened: Instant,
    asked: Instant,
    before: Option<(Way, Instant)>,
    /// Time when the last byte came. Before the first byte, it is the time when the request was written.
    pub(super) heard: Instant,
    paused: bool,
}

impl Connection {
    /// Begins to connect. Must be called on a thread in the client host's namespace.
    pub(super) fn open(server: SocketAddr, life: Life) -> Result<Self> {
        let family = if server.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None).context("socket")?;
        if let Some(bytes) = life.receive_buffer {
            sockopt::set_socket_recv_buffer_size(&socket, bytes)?;
        }
        sockopt::set_tcp_nodelay(&socket, true)?;
        match rustix::net::connect(&socket, &server) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error).with_context(|| format!("connecting to {server}")),
        }
        let now = Instant::now();
        let (state, stream) = (State::Connecting, TcpStream::from(socket));
        let before = None;
        Ok(Self { stream, server, life, state, request: 0, opened: now, asked: now, before, heard: now, paused: false })
    }

    /// Continues after the connection was made or refused, became readable, or paused long enough.
    pub(super) fn step(&mut self, files: &[File], buffer: &mut [u8], step: &mut Step) -> Result<Wants> {
        match &self.state {
            State::Connecting => {
                if self.stream.take_error()?.is_some() {
                    return Ok(self.end(files, Ending::Unanswered, step));
                }
                self.ask(files, step)
            }
            State::Thinking => self.ask(files, step),
            State::Reading(_) => self.read(files, buffer, step),
        }
    }

    /// Whether the client pauses before its next request.
    pub(super) fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thinking)
    }

    /// Ends the present response as [`Ending::Hang`], because nothing came for too long.
    pub(super) fn give_up(&mut self, files: &[File], step: &mut Step) {
        let bytes = match &self.state {
            State::Reading(answer) => answer.body_bytes(),
            _ => 0,
        };
        self.end(files, Ending::Hang(bytes), step);
    }

    fn ask(&mut self, files: &[File], step: &mut Step) -> Result<Wants> {
        let (second, file) = self.life.requests[self.request];
        let path = format!("{}{}", Way::of(second).prefix(), files[file].name);
        let now = Instant::now();
        (self.asked, self.heard, self.paused) = (now, now, false);
        self.state = State::Reading(Answer::of(&files[file].name, files[file].size));
        // A request is small and the connection is idle, so the socket's send buffer has room, unless the connection is
        // broken.
        match self.stream.write_all(get_request(self.server, &path, &[]).as_bytes()) {
            Ok(()) => Ok(Wants::Read),
            Err(_) => Ok(self.end(files, Ending::Unanswered, step)),
        }
    }

    fn read(&mut self, files: &[File], buffer: &mut [u8], step: &mut Step) -> Result<Wants> {
        let slow = matches!(self.life.reader, Reader::Slow(_));
        for _ in 0..FAST_PIECES {
            let State::Reading(answer) = &mut self.state else { return Ok(Wants::Read) };
            let most = if slow { SLOW_PIECE.min(buffer.len()) } else { buffer.len() };
            let ending = match self.stream.read(&mut buffer[..most]) {
                Ok(0) => Some(answer.closed()),
                Ok(bytes) => {
                    self.heard = Instant::now();
                    answer.feed(&buffer[..bytes])?;
                    answer.ending()
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return Ok(Wants::Read),
                    ErrorKind::Interrupted => continue,
                    _ => Some(answer.reset()),
                },
            };
            if let Some(ending) = ending {
                return Ok(self.end(files, ending, step));
            }
            if self.aborts(files) {
                step.aborted = Some(files[self.life.requests[self.request].1].size);
                return Ok(Wants::End);
            }
            if let Some(until) = self.rests() {
                return Ok(Wants::Sleep(until));
            }
        }
        Ok(Wants::Read)
    }

    /// Whether the client leaves now. If it is to leave by a reset, sets SO_LINGER, so that the reset is sent when the
    /// socket is closed.
    fn aborts(&self, files: &[File]) -> bool {
        let (Some((request, part, kind)), State::Reading(answer)) = (self.life.abort, &self.state) else {
            return false;
        };
        let size = files[self.life.requests[self.request].1].size;
        let leaves = request == self.request && answer.body_bytes() as f64 >= part * size as f64;
        if leaves && kind == Abort::Reset {
            let _ = sockopt::set_socket_linger(&self.stream, Some(Duration::ZERO));
        }
        leaves
    }

    /// Time until which the reader pauses; `None` if it does not pause.
    fn rests(&mut self) -> Option<Instant> {
        match self.life.reader {
            Reader::Fast => None,
            Reader::Slow(rate) => Some(self.heard + Duration::from_secs_f64(SLOW_PIECE as f64 / rate as f64)),
            Reader::Pausing(_) if self.paused => None,
            Reader::Pausing(pause) => {
                self.paused = true;
                Some(self.heard + pause)
            }
        }
    }

    /// Notes how the present response ended, and prepares the next request.
    fn end(&mut self, files: &[File], ending: Ending, step: &mut Step) -> Wants {
        let (second, file) = self.life.requests[self.request];
        let body_bytes = match &self.state {
            State::Reading(answer) => answer.body_bytes(),
            _ => 0,
        };
        let (way, size) = (Way::of(second), files[file].size);
        let (asked, opened, before) = (self.asked, self.opened, self.before.replace((way, self.asked)));
        step.done.push(Response { way, size, ending, asked, opened, body_bytes, before });
        self.state = State::Thinking;
        self.request += 1;
        let goes_on = matches!(ending, Ending::Whole | Ending::Error(_)) && self.request < self.life.requests.len();
        if goes_on { Wants::Sleep(Instant::now() + self.life.think) } else { Wants::End }
    }
}
