//! Two programs under Shunt (as if started by `shunt run`) exchange bytes over a connection. Both are in this process,
//! and nothing is preloaded. Whatever they do to the connection and to their memory, each gets the bytes that the other
//! has sent, in order. The memory of each contains the bytes that were put there last.
//!
//! The kernel's part is real: the agreement in the handshake (shunt-negotiation), sockets, userfaultfd.

mod bed;

use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use bed::connections::{Socket, connected, negotiate};
use bed::regions::{KINDS, Part, Region};
use bed::{body, process};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;
use rustix::pipe::{PipeFlags, pipe_with};
use shunt_process::connections::{available, pipe, receive, send};
use shunt_process::system::kernel::borrow;
use shunt_process::system::parts;
use shunt_testbed::{assert_same_bytes, needs_root};

/// Longest wait for the kernel to report that there is something to read. No step takes so long.
const PATIENCE: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };
const FILE_BYTES: usize = 200_000;

/// One end, and the bytes that it has sent.
struct End {
    socket: Socket,
    said: Vec<u8>,
    /// Number of the other end's bytes that this end has taken.
    heard: usize,
}

/// Both ends of a connection, memory, and a file.
struct Conversation {
    ends: [End; 2],
    regions: Vec<Region>,
    file: File,
}

#[derive(Debug, Clone)]
enum Step {
    /// One end writes some memory. In this step and in all others of one end, the first number is that end's index.
    Writes(usize, Vec<Part>),
    /// One end sends a part of the file, between two places. A place is in units of 1/65,536 of the file's length.
    SendsFile(usize, u16, u16),
    /// One end sends some memory through a pipe, by splice(2).
    SplicesIn(usize, Part),
    Reads(usize, Vec<Part>),
    Peeks(usize, Part),
    SplicesOut(usize, usize),
    /// One end asks how many bytes there are to read (FIONREAD).
    Asks(usize),
    Loads(Part),
    Stores(Part, u8),
    Frees(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let end = 0..2_usize;
    let some = || prop::collection::vec(Part::any(), 1..4);
    let step = prop_oneof![
        6 => (end.clone(), some()).prop_map(|(end, parts)| Step::Writes(end, parts)),
        2 => (end.clone(), any::<u16>(), any::<u16>()).prop_map(|(end, from, to)| Step::SendsFile(end, from, to)),
        1 => (end.clone(), Part::any()).prop_map(|(end, part)| Step::SplicesIn(end, part)),
        8 => (end.clone(), some()).prop_map(|(end, parts)| Step::Reads(end, parts)),
        1 => (end.clone(), Part::any()).prop_map(|(end, part)| Step::Peeks(end, part)),
        1 => (end.clone(), 1..100_000_usize).prop_map(|(end, bytes)| Step::SplicesOut(end, bytes)),
        1 => end.prop_map(Step::Asks),
        2 => Part::any().prop_map(Step::Loads),
        2 => (Part::any(), any::<u8>()).prop_map(|(part, seed)| Step::Stores(part, seed)),
        1 => (0..KINDS.len()).prop_map(Step::Frees),
    ];
    prop::collection::vec(step, 1..80)
}

impl End {
    fn new(socket: Socket) -> Self {
        rustix::io::ioctl_fionbio(&socket, true).unwrap();
        Self { socket, said: Vec::new(), heard: 0 }
    }

    fn write(&mut self, bytes: &[u8], how: impl FnOnce(i32, u32) -> Result<usize, i32>) {
        match how(self.socket.number(), self.socket.place) {
            Ok(wrote) => self.said.extend_from_slice(&bytes[..wrote]),
            Err(errno) => assert_eq!(errno, libc::EAGAIN, "writing"),
        }
    }
}

impl Conversation {
    fn new(tight: bool) -> Self {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&body(99, FILE_BYTES)).unwrap();
        let regions = KINDS.into_iter().map(Region::new).collect();
        Self { ends: connected(tight).map(End::new), regions, file }
    }

    /// The contents of some memory. Bytes that the model does not know are written first.
    fn bytes(&mut self, part: Part) -> Vec<u8> {
        let (region, range) = (&mut self.regions[part.0], part.range());
        for at in range.clone() {
            if region.model[at].is_none() {
                let byte = (at % 251) as u8;
                // SAFETY: memory of this region.
                unsafe { ((region.memory.start + at) as *mut u8).write_volatile(byte) };
                region.model[at] = Some(byte);
            }
        }
        region.model[range].iter().map(|byte| byte.unwrap()).collect()
    }

    fn memory(&self, parts: &[Part]) -> Vec<libc::iovec> {
        parts.iter().map(|part| parts::of(&self.regions[part.0].addresses(&part.range()))).collect()
    }

    /// Bytes that have been sent to an end, and that it has not taken yet.
    fn left(&self, end: usize) -> &[u8] {
        &self.ends[1 - end].said[self.ends[end].heard..]
    }

    /// One end reads into some memory, or only looks (MSG_PEEK).
    fn read(&mut self, end: usize, into: &[Part], flags: i32) {
        let (runtime, fd, place) = (process().runtime, self.ends[end].socket.number(), self.ends[end].socket.place);
        let got = match receive::read(runtime, fd, place, &self.memory(into), flags | libc::MSG_DONTWAIT) {
            Ok(got) => got,
            Err(errno) => return assert_eq!(errno, libc::EAGAIN, "reading"),
        };
        assert!(got > 0, "nobody has said that it is the end");
        assert!(got <= self.left(end).len(), "{got} bytes of {}", self.left(end).len());
        let bytes = self.left(end)[..got].to_vec();
        let mut rest = &bytes[..];
        for part in into {
            let range = part.range();
            let now = rest.len().min(range.len());
            // The buffer behind the bytes may read as zeros, so nothing is expected there.
            let known = rest[..now].iter().copied().map(Some);
            self.regions[part.0].expect(range, known.chain(std::iter::repeat(None)));
            rest = &rest[now..];
        }
        if flags & libc::MSG_PEEK == 0 {
            self.ends[end].heard += got;
        }
    }

    fn splice_out(&mut self, end: usize, bytes: usize) {
        let (out, into) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let (fd, place) = (self.ends[end].socket.number(), self.ends[end].socket.place);
        let flags = libc::SPLICE_F_NONBLOCK;
        let moved = pipe::from_connection(process().runtime, fd, place, into.as_raw_fd(), bytes, flags);
        let Ok(moved) = moved.map_err(|errno| assert_eq!(errno, libc::EAGAIN, "splicing")) else { return };
        let mut got = vec![0; moved];
        assert_eq!(rustix::io::read(&out, &mut got), Ok(moved));
        let left = self.left(end);
        assert_same_bytes(&got, &left[..moved.min(left.len())], "what was spliced");
        self.ends[end].heard += moved;
    }

    fn take(&mut self, step: &Step) {
        let runtime = process().runtime;
        match step {
            Step::Writes(end, parts) => {
                // A part may occur twice. Then the method `bytes` fills in its unknown bytes at the first occurrence,
                // so the second occurrence has the same bytes.
                let bytes: Vec<u8> = parts.iter().flat_map(|part| self.bytes(*part)).collect();
                let memory = self.memory(parts);
                self.ends[*end].write(&bytes, |fd, place| send::write(runtime, fd, place, &memory, libc::MSG_DONTWAIT));
            }
            Step::SendsFile(end, from, to) => {
                let place = |at: u16| at as usize * FILE_BYTES / (1 << 16);
                let range = place(*from.min(to))..place(*from.max(to)) + 1;
                let bytes = body(99, FILE_BYTES)[range.clone()].to_vec();
                let file = self.file.as_fd();
                self.ends[*end].write(&bytes, |fd, place| {
                    if runtime.connections.at(place).frames(&runtime.connections, fd) {
                        return send::write_file(runtime, fd, place, file, range.start as u64, range.len());
                    }
                    let sent = rustix::fs::sendfile(borrow(fd), file, Some(&mut (range.start as u64)), range.len());
                    sent.map_err(|error| error.raw_os_error())
                });
            }
            Step::SplicesIn(end, part) => {
                let (out, into) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
                let bytes = self.bytes(*part);
                let there = rustix::io::write(&into, &bytes).unwrap();
                let flags = libc::SPLICE_F_NONBLOCK;
                self.ends[*end].write(&bytes, |fd, place| {
                    pipe::into_connection(runtime, out.as_raw_fd(), fd, place, there, flags)
                });
            }
            // After a read into parts that overlap, the contents of memory would be unknown. So only the first part is
            // read into.
            Step::Reads(end, parts) if !overlap(parts) => self.read(*end, parts, 0),
            Step::Reads(end, parts) => self.read(*end, &parts[..1], 0),
            Step::Peeks(end, part) => self.read(*end, &[*part], libc::MSG_PEEK),
            Step::SplicesOut(end, bytes) => self.splice_out(*end, *bytes),
            Step::Asks(end) => {
                let (fd, place) = (self.ends[*end].socket.number(), self.ends[*end].socket.place);
                let there = available::available(runtime, fd, place).unwrap();
                assert!(there <= self.left(*end).len(), "{there} bytes of {}", self.left(*end).len());
            }
            Step::Loads(part) => {
                let (region, range) = (&self.regions[part.0], part.range());
                region.assert_is(&range, &region.loaded(&range), "loaded");
            }
            Step::Stores(part, seed) => {
                let (region, range) = (&mut self.regions[part.0], part.range());
                let bytes = body(*seed, range.len());
                // SAFETY: memory of this region.
                region.addresses(&range).zip(&bytes).for_each(|(at, byte)| unsafe { (at as *mut u8).write(*byte) });
                region.expect(range, bytes.into_iter().map(Some));
            }
            Step::Frees(at) => {
                drop(self.regions.remove(*at));
                self.regions.insert(*at, Region::new(KINDS[*at]));
            }
        }
    }

    /// Both ends take what is left, and then see the end of the stream.
    fn end(mut self) {
        for end in [0, 1] {
            let mut buffer = vec![0; 30_000];
            let fd = self.ends[end].socket.number();
            while !self.left(end).is_empty() {
                self.wait(end);
                let into = parts::of(&address_range(&mut buffer));
                match receive::read(process().runtime, fd, self.ends[end].socket.place, &[into], 0) {
                    Ok(got) => {
                        assert!(got > 0, "the end, and {} bytes are left", self.left(end).len());
                        let left = self.left(end);
                        assert_same_bytes(&buffer[..got], &left[..got.min(left.len())], "what comes at the end");
                        self.ends[end].heard += got;
                    }
                    Err(errno) => assert_eq!(errno, libc::EAGAIN),
                }
            }
            rustix::net::shutdown(&self.ends[1 - end].socket, Shutdown::Write).unwrap();
            let into = parts::of(&address_range(&mut buffer));
            let read = || receive::read(process().runtime, fd, self.ends[end].socket.place, &[into], 0);
            let told = std::iter::repeat_with(|| {
                self.wait(end);
                read()
            });
            assert_eq!(told.take(10).find(|told| *told != Err(libc::EAGAIN)), Some(Ok(0)));
        }
        for region in &self.regions {
            let all = 0..region.model.len();
            region.assert_is(&all, &region.loaded(&all), "at the end");
        }
    }

    /// Waits until the kernel reports that there is something to read.
    fn wait(&self, end: usize) {
        let mut ready = [PollFd::new(&self.ends[end].socket, PollFlags::IN)];
        assert_eq!(poll(&mut ready, Some(&PATIENCE)), Ok(1), "{} bytes are left", self.left(end).len());
    }
}

fn address_range(buffer: &mut [u8]) -> Range<usize> {
    let start = buffer.as_mut_ptr() as usize;
    start..start + buffer.len()
}

/// Whether two of some parts overlap.
fn overlap(parts: &[Part]) -> bool {
    let meets = |one: &Part, other: &Part| {
        let (a, b) = (one.range(), other.range());
        one.0 == other.0 && a.start < b.end && b.start < a.end
    };
    parts.iter().enumerate().any(|(at, one)| parts[..at].iter().any(|other| meets(one, other)))
}

#[test]
fn each_gets_what_the_other_has_said() {
    needs_root();
    let _negotiation = negotiate("conversation");
    let config = ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() };
    let outcome = TestRunner::new(config).run(&(any::<bool>(), steps()), |(tight, steps)| {
        let mut conversation = Conversation::new(tight);
        for step in &steps {
            conversation.take(step);
        }
        conversation.end();
        Ok(())
    });
    outcome.unwrap();
}
