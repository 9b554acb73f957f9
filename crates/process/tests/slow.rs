//! A *holder* (a store that has a body) gives the body's bytes slowly to a program. As a rule, the program's calls do
//! not wait, because it has other clients. It writes the bytes that have come, and the rest when it is told that there
//! is room. A *share* of a payload keeps the payload in the store. The share goes back to the holder when the program
//! does not need the payload any more. A *wish* is a program's request for a connection to a holder.

mod bed;

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::mpsc;
use std::time::Duration;

use bed::connections::{connected, negotiate};
use bed::regions::{Kind, Region};
use bed::store::{Given, give_slowly};
use bed::{body, process};
use rustix::event::{Timespec, epoll};
use shunt_odb::fetch::Call;
use shunt_odb::reference::{Holder, PayloadId, Reference, Weight};
use shunt_process::connections::waiting::{comes_again, is_over};
use shunt_process::connections::{receive, send};
use shunt_process::memory::outside;
use shunt_process::system::parts;
use shunt_sys::lock::Mutex;
use shunt_testbed::{PATIENCE, assert_same_bytes, needs_root, wait_for};

const BYTES: usize = 1 << 20;

/// Both ends of a connection, the first of which is nonblocking, and an epoll descriptor that reports changes of that
/// end.
fn connection() -> (TcpStream, TcpStream, rustix::fd::OwnedFd) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (ours, _) = listener.accept().unwrap();
    ours.set_nonblocking(true).unwrap();
    let changes = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let wanted = epoll::EventFlags::OUT | epoll::EventFlags::ET;
    epoll::add(&changes, &ours, epoll::EventData::new_u64(0), wanted).unwrap();
    (ours, theirs, changes)
}

/// Waits for a change for at most `time`. Returns whether there was one.
fn changes_within(changes: &rustix::fd::OwnedFd, time: Duration) -> bool {
    let mut events = Vec::with_capacity(1);
    let time = Timespec::try_from(time).unwrap();
    epoll::wait(changes, rustix::buffer::spare_capacity(&mut events), Some(&time)).unwrap() > 0
}

#[test]
fn who_is_told_to_come_again_hears_of_room_and_who_waits_in_his_calls_is_not_told() {
    let (ours, mut theirs, changes) = connection();
    let ready = || changes_within(&changes, Duration::ZERO);
    assert!(ready() && !ready(), "there is room, and nothing changes");
    assert!(comes_again(ours.as_raw_fd(), 0));
    assert!(ready() && !ready());
    // If there is no room, the program hears of it later.
    while rustix::io::write(&ours, &[0; 65536]).is_ok() {}
    assert!(comes_again(ours.as_raw_fd(), 0) && !ready());
    theirs.read_exact(&mut vec![0; 1 << 16]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| while theirs.read(&mut [0; 65536]).is_ok_and(|got| got > 0) {});
        assert!(changes_within(&changes, PATIENCE));
        ours.shutdown(std::net::Shutdown::Both).unwrap();
    });
    let (ours, _theirs, _changes) = connection();
    ours.set_nonblocking(false).unwrap();
    assert!(!comes_again(ours.as_raw_fd(), 0) && comes_again(ours.as_raw_fd(), libc::MSG_DONTWAIT));
    let (local, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(!comes_again(local.as_raw_fd(), libc::MSG_DONTWAIT), "nobody could tell its program");
}

/// Makes memory that stands for the body `sent`. A holder has the body, in a number of payloads.
fn absent(holder: &str, sent: &[u8], payloads: usize, kind: Kind) -> Range<usize> {
    let process = process();
    let memory = std::mem::ManuallyDrop::new(Region::new((kind, BYTES))).memory.clone();
    let each = BYTES / payloads;
    for number in 0..payloads {
        let payload = PayloadId { holder: Holder::named(holder), segment: 1, slot: number as u32, secret: 1 };
        let (from, to) = (number * each, if number + 1 == payloads { BYTES } else { (number + 1) * each });
        let (offset, length) = (from as u64, (to - from) as u64);
        let reference = Reference { payload, weight: Weight::WHOLE, offset, length };
        let hold = process.memory.hold(&reference, Weight::WHOLE, false);
        let range = memory.start + from..memory.start + to;
        let absent = process.memory.can_be_absent(&range);
        let real = absent.end - memory.start..range.end - memory.start;
        assert!(absent.start == range.start && process.memory.make_absent(absent, &hold, offset));
        // SAFETY: memory of the test; these bytes are in no whole page, and so not absent.
        unsafe {
            let to = (memory.start + real.start) as *mut u8;
            std::ptr::copy_nonoverlapping(sent[real.clone()].as_ptr(), to, real.len());
        }
    }
    memory
}

/// Lock that a test holds while its holder gives bytes. The tests run in parallel, and the store receives their wishes
/// for connections to holders in one queue.
static ALONE: Mutex<()> = Mutex::new(());

/// Calls `what` while a holder slowly gives the body that it is asked for. Returns what `what` returns, and what the
/// holder has given.
fn while_given<T>(holder: &str, sent: &[u8], what: impl FnOnce() -> T) -> (T, Given) {
    let _alone = ALONE.lock();
    std::thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        let giving = scope.spawn(move || {
            let bed = process().bed.lock();
            // Earlier wishes for connections are of other tests, whose shares go back to their holders.
            let (program, holder) = std::iter::repeat_with(|| bed.wishes.recv_timeout(PATIENCE).unwrap())
                .find(|(_, wished)| *wished == Holder::named(holder))
                .unwrap();
            let mut store = bed.connects(program, holder);
            drop(bed);
            tell.send(store.try_clone().unwrap()).unwrap();
            give_slowly(&mut store, sent, usize::MAX)
        });
        let done = what();
        told.recv().unwrap().shutdown(std::net::Shutdown::Both).unwrap();
        (done, giving.join().unwrap())
    })
}

/// Checks that all of a body is written, in several writes, none of more than `most` bytes.
fn is_written_in_parts(holder: &str, payloads: usize, most: usize) {
    let (process, sent) = (process(), body(9, BYTES));
    let memory = absent(holder, &sent, payloads, Kind::Block);
    let (ours, mut theirs, changes) = connection();
    let (mut done, ended_early) = (0, std::cell::Cell::new(0));
    let (got, _) = while_given(holder, &sent, || {
        std::thread::scope(|scope| {
            let reader = scope.spawn(move || {
                let mut got = vec![0; BYTES];
                got.chunks_mut(50_000).for_each(|chunk| theirs.read_exact(chunk).unwrap());
                got
            });
            while done < BYTES {
                let fd = ours.as_raw_fd();
                let may_end = || {
                    ended_early.set(ended_early.get() + 1);
                    comes_again(fd, 0)
                };
                let rest = [parts::of(&(memory.start + done..memory.end))];
                let emit = |iov: &[libc::iovec]| outside::sendmsg(fd, iov, 0);
                match outside::write(process.memory, &rest, outside::AT_ONCE, &Call::new(&may_end), emit) {
                    Ok(more) => {
                        assert!(more <= most, "{more} bytes in one write");
                        done += more;
                    }
                    Err(errno) => assert_eq!(errno, libc::EAGAIN),
                }
                assert!(done == BYTES || changes_within(&changes, PATIENCE), "nobody says that there is room");
            }
            reader.join().unwrap()
        })
    });
    assert_same_bytes(&got, &sent, "the body");
    assert!(ended_early.get() > 1, "{}", ended_early.get());
}

#[test]
fn a_client_gets_all_in_many_writes_whose_program_is_told_each_time() {
    needs_root();
    is_written_in_parts("slow", 1, BYTES);
}

/// Each payload comes so fast that a call would not end early because of that payload alone.
#[test]
fn a_write_of_many_payloads_ends_for_what_they_take_together() {
    needs_root();
    is_written_in_parts("slow-by-many", 16, outside::AT_ONCE - 1);
}

#[test]
fn a_tier_that_fetches_for_the_next_one_writes_what_has_come() {
    needs_root();
    let (_negotiation, _group) = negotiate("slow-tier");
    let ([ours, theirs], runtime, sent) = (connected(false), process().runtime, body(3, BYTES));
    let memory = absent("slow-tier", &sent, 3, Kind::Block);
    rustix::io::ioctl_fionbio(&ours, true).unwrap();
    let ((got, calls), given) = while_given("slow-tier", &sent, || {
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut got = vec![0u8; BYTES];
                let mut done = 0;
                while done < BYTES {
                    let part = got[done..].as_ptr() as usize..got[done..].as_ptr_range().end as usize;
                    done += receive::read(runtime, theirs.number(), theirs.place, &[parts::of(&part)], 0).unwrap();
                }
                std::mem::take(&mut got)
            });
            let (mut done, mut calls) = (0, 0);
            while done < BYTES {
                let rest = [parts::of(&(memory.start + done..memory.end))];
                match send::write(runtime, ours.number(), ours.place, &rest, 0) {
                    Ok(more) => done += more,
                    Err(errno) => assert_eq!(errno, libc::EAGAIN),
                }
                calls += 1;
            }
            (reader.join().unwrap(), calls)
        })
    });
    assert_same_bytes(&got, &sent, "the body");
    assert!(calls > 2, "{calls}");
    // One share of each of the 3 payloads goes back, once all its bytes are in place. No share is taken for bytes that
    // are not passed on by reference.
    assert!(given.returns <= 3, "{given:?} in {calls}");
}

/// The test fetches bytes into place before anything reads them. A program does so before it sends them on to a program
/// that cannot fetch from the holder.
#[test]
fn bytes_that_must_be_in_place_come_in_many_calls() {
    needs_root();
    // In a mapping, only whole pages can be absent.
    for (holder, payloads, kind) in [("slow-in-block", 3, Kind::Block), ("slow-in-mapping", 4, Kind::Mapping)] {
        let sent = body(5, BYTES);
        let memory = absent(holder, &sent, payloads, kind);
        let (turns, given) = while_given(holder, &sent, || {
            let again = || process().memory.fetch_within(&memory, &Call::new(&|| true)).unwrap();
            1 + std::iter::repeat_with(again).take_while(|is_all| !is_all).count()
        });
        assert!(turns > 2, "{turns}");
        assert!(given.bytes < BYTES * 9 / 8, "{given:?}");
        // SAFETY: memory of the test, all of which is in place.
        let got = unsafe { std::slice::from_raw_parts(memory.start as *const u8, BYTES) };
        assert_same_bytes(got, &sent, "the body");
    }
}

#[test]
fn a_connection_is_over_when_it_has_broken_or_both_ends_have_said_so() {
    let (ours, theirs, _changes) = connection();
    let over = || is_over(ours.as_raw_fd());
    theirs.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(!over(), "this end can write on");
    rustix::net::sockopt::set_socket_linger(&theirs, Some(Duration::ZERO)).unwrap();
    drop(theirs);
    wait_for("it is over", over).unwrap();
}
