//! A holder whose bytes come slowly, and a program with many clients, which waits for no call: it writes what has come, and the rest
//! when it is told that there is room.

mod bed;

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::mpsc;
use std::time::Duration;

use bed::store::give_slowly;
use bed::{body, process};
use rustix::event::{Timespec, epoll};
use shunt_odb::reference::{Holder, PayloadId, Reference, Weight};
use shunt_process::connections::waiting::comes_again;
use shunt_process::memory::{blocks, outside};
use shunt_process::system::parts;
use shunt_testbed::{PATIENCE, may_run};

const BYTES: usize = 1 << 20;

/// Both ends of a connection of which one never waits, and what tells of changes there.
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

/// Waits for a change.
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
    // Where there is none it hears later.
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

#[test]
fn a_client_gets_all_in_many_writes_whose_program_is_told_each_time() {
    if !may_run("a_client_gets_all_in_many_writes_whose_program_is_told_each_time") {
        return;
    }
    let (process, sent) = (process(), body(9, BYTES));
    let memory = blocks::allocate(BYTES).unwrap();
    let memory = memory..memory + BYTES;
    let payload = PayloadId { holder: Holder::named("slow"), segment: 1, slot: 1, secret: 1 };
    let reference = Reference { payload, weight: Weight::WHOLE, offset: 0, length: BYTES as u64 };
    let hold = process.memory.hold(&reference, Weight::WHOLE, false);
    let absent = process.memory.can_be_absent(&memory);
    let real = absent.end - memory.start..BYTES;
    assert!(absent.start == memory.start && process.memory.make_absent(absent, &hold, 0));
    // SAFETY: memory of the test's; this much of it is no whole page.
    unsafe {
        std::ptr::copy_nonoverlapping(sent[real.clone()].as_ptr(), (memory.start + real.start) as *mut u8, real.len())
    };
    let (ours, mut theirs, changes) = connection();
    let (got, ended_early) = std::thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        let sent = &sent;
        scope.spawn(move || {
            let bed = process.bed.lock();
            let (program, holder) = bed.wishes.recv_timeout(PATIENCE).unwrap();
            let mut store = bed.connects(program, holder);
            drop(bed);
            tell.send(store.try_clone().unwrap()).unwrap();
            give_slowly(&mut store, sent, usize::MAX);
        });
        let reader = scope.spawn(move || {
            let mut got = vec![0; BYTES];
            got.chunks_mut(50_000).for_each(|chunk| theirs.read_exact(chunk).unwrap());
            got
        });
        let (mut done, mut ended_early) = (0, 0);
        while done < BYTES {
            let fd = ours.as_raw_fd();
            let may_end = || {
                ended_early += 1;
                comes_again(fd, 0)
            };
            let may_end = std::cell::RefCell::new(may_end);
            let rest = [parts::of(&(memory.start + done..memory.end))];
            let wrote = outside::write(process.memory, &rest, outside::AT_ONCE, &|| may_end.borrow_mut()(), |iov| {
                outside::sendmsg(fd, iov, 0)
            });
            match wrote {
                Ok(more) => done += more,
                Err(errno) => assert_eq!(errno, libc::EAGAIN),
            }
            assert!(done == BYTES || changes_within(&changes, PATIENCE), "nobody says that there is room");
        }
        told.recv().unwrap().shutdown(std::net::Shutdown::Both).unwrap();
        (reader.join().unwrap(), ended_early)
    });
    assert!(got == sent);
    assert!(ended_early > 1, "{ended_early}");
}
