//! A relay between a source and a sink, with a thread for each direction. All three run in this process, which forks
//! meanwhile. The library's calls block, as a program's do. All bytes must come through in order.
//!
//! ```text
//!   source ==> | relay | ==> sink        long bodies
//!          <-- |       | <--             short answers
//! ```

mod bed;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bed::connections::{Socket, connected, negotiate};
use bed::{Random, byte, process};
use rustix::net::{Shutdown, sockopt};
use shunt_process::connections::{receive, send};
use shunt_process::forks;
use shunt_process::memory::{blocks, has_threads};
use shunt_process::system::parts;
use shunt_testbed::{PATIENCE, needs_root};

const LONG: usize = 64 << 20;
const SHORT: usize = 1 << 20;

/// A block of malloc. Parts of a stream are put at random places in it.
struct Block {
    start: usize,
    bytes: usize,
}

impl Block {
    fn new(bytes: usize) -> Self {
        Self { start: blocks::allocate(bytes).unwrap(), bytes }
    }

    /// A random part of the block.
    fn part(&self, random: &mut Random) -> std::ops::Range<usize> {
        let from = if random.below(2) == 0 { 0 } else { random.below(self.bytes) };
        self.start + from..self.start + from + 1 + random.below(self.bytes - from)
    }

    /// Checks that a part holds the bytes of the stream from `at` on.
    fn check(part: &std::ops::Range<usize>, at: usize) {
        // SAFETY: memory of this block.
        let wrong = part
            .clone()
            .find(|address| unsafe { (*address as *const u8).read_volatile() } != byte(at + address - part.start));
        assert_eq!(wrong, None, "in {part:?}, which begins at {at}");
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        process().memory.forget(&(self.start..self.start + self.bytes));
        blocks::free(self.start);
    }
}

fn write_all(to: &Socket, mut part: std::ops::Range<usize>) {
    while !part.is_empty() {
        let wrote = send::write(process().runtime, to.number(), to.place, &[parts::of(&part)], 0);
        part.start += wrote.expect("the other end reads");
    }
}

/// Reads into `part`. Returns the number of bytes that it has got; 0 at the end of the stream.
fn read(from: &Socket, part: &std::ops::Range<usize>, flags: i32) -> usize {
    receive::read(process().runtime, from.number(), from.place, &[parts::of(part)], flags)
        .expect("the other end writes")
}

fn say(to: &Socket, bytes: usize, longest: usize, mut random: Random) {
    let (block, mut said) = (Block::new(longest), 0);
    while said < bytes {
        let mut part = block.part(&mut random);
        part.end = part.end.min(part.start + bytes - said);
        // SAFETY: memory of the block, in which nothing is absent.
        part.clone().for_each(|address| unsafe { (address as *mut u8).write(byte(said + address - part.start)) });
        said += part.len();
        write_all(to, part);
    }
    rustix::net::shutdown(to, Shutdown::Write).unwrap();
}

/// Passes on the bytes that come, and looks at some of them.
fn relay(from: &Socket, to: &Socket, longest: usize, mut random: Random) {
    let (all, mut at) = ([(); 3].map(|()| Block::new(longest)), 0);
    loop {
        let mut part = all[random.below(all.len())].part(&mut random);
        let flags = if random.below(8) == 0 { libc::MSG_WAITALL } else { 0 };
        let got = read(from, &part, flags);
        if got == 0 {
            break;
        }
        part.end = part.start + got;
        if random.below(4) == 0 {
            let middle = part.start + random.below(got);
            Block::check(&(middle..part.end.min(middle + 100)), at + middle - part.start);
        }
        at += got;
        write_all(to, part);
    }
    rustix::net::shutdown(to, Shutdown::Write).unwrap();
}

fn listen(from: &Socket, bytes: usize, longest: usize, mut random: Random) {
    let (block, mut heard) = (Block::new(longest), 0);
    loop {
        let mut part = block.part(&mut random);
        let got = read(from, &part, 0);
        if got == 0 {
            break;
        }
        part.end = part.start + got;
        Block::check(&part, heard);
        heard += got;
    }
    assert_eq!(heard, bytes);
}

/// Forks again and again. Calls before and after each fork what the library calls when a program forks.
fn fork_on(over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        forks::before();
        // SAFETY: the child ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            forks::after_in_child();
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        forks::after_in_parent();
        let mut status = 0;
        // SAFETY: waits for the child, and writes how it ended.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        std::thread::sleep(Duration::from_millis(5)); // the pace of the forks
    }
}

fn through(tight: bool, seed: u64) {
    println!("seed {seed}");
    let ([source, in_front], [behind, sink]) = (connected(tight), connected(tight));
    for socket in [&source, &in_front, &behind, &sink] {
        for way in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
            sockopt::set_socket_timeout(socket, way, Some(PATIENCE)).unwrap();
        }
    }
    let random = |number| Random(seed * 10 + number);
    let (long, short) = (if tight { LONG / 4 } else { LONG }, SHORT);
    let over = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (source, in_front, behind, sink) = (&source, &in_front, &behind, &sink);
        let streams = [
            scope.spawn(move || say(source, long, 700_000, random(0))),
            scope.spawn(move || relay(in_front, behind, 300_000, random(1))),
            scope.spawn(move || listen(sink, long, 500_000, random(2))),
            scope.spawn(move || say(sink, short, 9_000, random(3))),
            scope.spawn(move || relay(behind, in_front, 20_000, random(4))),
            scope.spawn(move || listen(source, short, 5_000, random(5))),
        ];
        scope.spawn(|| fork_on(over));
        let outcomes = streams.map(|stream| stream.join());
        over.store(true, Ordering::Relaxed);
        outcomes.into_iter().for_each(|outcome| outcome.unwrap());
    });
}

#[test]
fn all_bytes_arrive_whatever_else_the_process_does() {
    needs_root();
    let _negotiation = negotiate("relay");
    process();
    has_threads();
    let seed = u64::from(std::process::id());
    for turn in 0..4 {
        through(turn % 2 == 1, seed + turn);
    }
}
