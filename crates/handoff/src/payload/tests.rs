//! Tests of payloads from files and from memory, with reader threads and without.

use super::*;
use crate::flow_sender::KernelSocket;
use crate::in_memory::{self, Untold};
use shunt_sys::shared::SharedMemory;
use shunt_testbed::{assert_same_bytes, wait_for};
use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use zerocopy::FromZeros;

fn payload(file: &File, offset: u64, length: u64) -> Payload {
    let meta = file.metadata().unwrap();
    let mut offer = Offer::new_zeroed();
    (offer.offset, offer.length, offer.size) = (offset, length, meta.len());
    offer.mtime_ns = meta.mtime() * 1_000_000_000 + meta.mtime_nsec();
    Payload::new(file.try_clone().unwrap(), &offer)
}

fn file_of(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn memory_of(bytes: &[u8]) -> SharedMemory {
    let memory = SharedMemory::create("kept", bytes.len()).unwrap();
    memory.write(0, bytes);
    memory
}

/// A socket, and its other end.
fn pair() -> (KernelSocket, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (OwnedFd::from(ours).into(), theirs)
}

#[test]
fn a_payload_sends_exactly_its_range() {
    let file = file_of(b"0123456789");
    let (ours, mut theirs) = pair();
    assert_eq!(payload(&file, 2, 5).send_to(&ours), Ok(true));
    drop(ours);
    let mut got = Vec::new();
    theirs.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"23456");
}

#[test]
fn ranges_come_one_after_the_other() {
    let whole = || {
        let kept = |bytes: &[u8]| -> Box<dyn Source> { Box::new(memory_of(bytes)) };
        Payload::of_sources([(kept(b"0123456789"), 2, 5), (kept(b"abc"), 0, 3), (kept(b"xyz"), 1, 1)])
    };
    let (ours, mut theirs) = pair();
    let mut payload = whole();
    assert_eq!((payload.remaining(), payload.send_to(&ours), payload.remaining()), (9, Ok(true), 0));
    drop(ours);
    let mut got = Vec::new();
    theirs.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"23456abcy");
    for at in 0..=9 {
        let (mut first, mut second) = ([0; 2], vec![0; 9usize.saturating_sub(at + 2)]);
        let read = whole().read_exactly(at as u64, vec![&mut first, &mut second]);
        assert_eq!(read.is_ok(), at <= 7, "from {at}");
        assert!(read.is_err() || [&first[..], &second].concat() == got[at..]);
    }
}

#[test]
fn sent_bytes_do_not_change_when_their_memory_is_used_again() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let sends = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut reads, _) = listener.accept().unwrap();
    let memory = memory_of(&[b'a'; 40_000]);
    let file = File::from(memory.as_fd().try_clone_to_owned().unwrap());
    let mut payload = Payload::of_sources([(Box::new(memory) as Box<dyn Source>, 0, 40_000)]);
    sends.set_nonblocking(true).unwrap();
    let sends = KernelSocket::from(OwnedFd::from(sends));
    assert_eq!(payload.send_to(&sends), Ok(true));
    std::os::unix::fs::FileExt::write_all_at(&file, &[b'b'; 40_000], 0).unwrap();
    let mut got = vec![0; 40_000];
    std::io::Read::read_exact(&mut reads, &mut got).unwrap();
    assert_same_bytes(&got, &[b'a'; 40_000], "what was sent");
}

/// Bytes kept in a file. They count as unchanged as long as the file has the size of the second field.
#[derive(Debug)]
struct InFile(File, u64);

impl AsFd for InFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Kept for InFile {
    fn send(&self, mut offset: u64, bytes: usize, socket: BorrowedFd<'_>) -> io::Result<usize> {
        Ok(rustix::fs::sendfile(socket, &self.0, Some(&mut offset), bytes)?)
    }

    fn is_unchanged(&self) -> bool {
        self.0.metadata().is_ok_and(|now| now.len() == self.1)
    }
}

#[test]
fn kept_files_are_checked_after_they_were_sent_or_read() {
    let mut file = file_of(b"0123456789");
    let kept = |file: &File| {
        let kept: Box<dyn Source> = Box::new(InFile(file.try_clone().unwrap(), 10));
        Payload::of_sources([(kept, 2, 5)])
    };
    let (ours, mut theirs) = pair();
    assert_eq!(kept(&file).send_to(&ours), Ok(true));
    let mut got = [0; 5];
    theirs.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"23456");
    file.write_all(b"x").unwrap();
    assert_eq!(kept(&file).send_to(&ours), Err(Reason::FileChanged));
    assert_eq!(kept(&file).read(&mut got), Err(Reason::FileChanged));
    assert!(!kept(&file).is_unchanged());
}

#[test]
fn a_payload_reads_exactly_its_range_and_notices_a_change() {
    let file = file_of(b"0123456789");
    let (mut whole, mut buffer) = (payload(&file, 2, 5), [0; 3]);
    let mut got = Vec::new();
    while let Some(bytes @ 1..) = whole.read(&mut buffer).unwrap() {
        got.extend_from_slice(&buffer[..bytes]);
    }
    assert_eq!(got, b"23456");
    let mut cut = payload(&file, 2, 5);
    file.set_len(4).unwrap();
    assert_eq!(cut.read(&mut buffer), Err(Reason::FileChanged));
}

#[test]
fn a_file_that_cannot_be_read_is_told_from_one_that_has_changed() {
    // Nothing is mapped at address 0, so a read fails with EIO.
    let mut unreadable = payload(&File::open("/proc/self/mem").unwrap(), 0, 5);
    assert_eq!(unreadable.read(&mut [0; 5]), Err(Reason::Socket));
    assert_eq!(unreadable.read_exactly(0, vec![&mut [0; 5]]), Err(Reason::Socket));
}

#[test]
fn a_truncated_file_is_noticed() {
    let file = file_of(&[7; 1 << 20]);
    let mut payload = payload(&file, 0, 1 << 20);
    let (ours, _theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let ours = KernelSocket::from(OwnedFd::from(ours));
    assert_eq!(payload.send_to(&ours), Ok(false));
    file.set_len(10).unwrap();
    assert!(!payload.is_unchanged());
    assert_eq!(payload.send_to(&ours), Err(Reason::FileChanged));
}

#[test]
fn a_file_that_is_appended_to_is_sent_as_far_as_was_told() {
    let mut file = file_of(b"0123456789");
    let mut payload = payload(&file, 0, 10);
    let mut buffer = [0; 64];
    assert!(payload.is_unchanged());
    file.write_all(b"more").unwrap();
    assert!(payload.is_unchanged());
    assert_eq!((payload.read(&mut buffer), &buffer[..10]), (Ok(Some(10)), &b"0123456789"[..]));
    assert_eq!((payload.remaining(), payload.file().is_none()), (0, true));
}

#[test]
fn a_file_written_in_place_is_noticed() {
    let file = file_of(b"0123456789");
    let mut payload = payload(&file, 0, 10);
    let modified = || file.metadata().unwrap().modified().unwrap();
    let before = modified();
    wait_for("the clock of the file system has gone on", || {
        std::os::unix::fs::FileExt::write_all_at(&file, b"x", 0).unwrap();
        modified() != before
    })
    .unwrap();
    let (ours, _theirs) = pair();
    assert_eq!(payload.send_to(&ours), Err(Reason::FileChanged));
}

/// nginx rewrites the header in a file of its cache like this when it revalidates that file.
#[test]
fn a_body_behind_a_header_that_is_rewritten_is_whole() {
    let file = file_of(b"header, body");
    let body = || {
        let mut offer = Offer::new_zeroed();
        (offer.offset, offer.length, offer.size, offer.flags) = (8, 4, 12, Offer::BODY);
        Payload::new(file.try_clone().unwrap(), &offer)
    };
    let (mut begun, mut buffer) = (body(), [0; 4]);
    assert!(begun.is_unchanged());
    std::os::unix::fs::FileExt::write_all_at(&file, b"HEADER", 0).unwrap();
    assert_eq!((begun.is_unchanged(), begun.read(&mut buffer), &buffer), (true, Ok(Some(4)), b"body"));
    file.set_len(13).unwrap();
    assert_eq!(body().read(&mut buffer), Err(Reason::FileChanged));
}

/// Makes a file in tmpfs. That file system does not tell which bytes are in memory, so a reader thread has to read the
/// first ones. Returns `None`, and reports that `test` is skipped, if this kernel's tmpfs does tell.
fn untold(test: &str, bytes: &[u8]) -> Option<File> {
    let mut file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.write_all(bytes).unwrap();
    let is_untold = in_memory::bytes_from(&file, 0, 1) == Err(Untold);
    if !is_untold {
        shunt_testbed::skipped(test, "/dev/shm tells what is in memory");
    }
    is_untold.then_some(file)
}

fn readers() -> Reads {
    let reads = Reads::new().unwrap();
    for reads in [reads.clone(), reads.clone()] {
        std::thread::spawn(move || reads.work());
    }
    reads
}

/// Waits until a read has ended, and returns its result.
fn read(reads: &Reads) -> Done {
    wait_for("a read ends", || reads.take_done().pop()).unwrap()
}

#[test]
fn nobody_waits_for_bytes_that_a_thread_reads() {
    let bytes: Vec<u8> = (0..700_000u32).map(|at| (at % 251) as u8).collect();
    let Some(file) = untold("nobody_waits_for_bytes_that_a_thread_reads", &bytes) else { return };
    let (reads, (ours, mut theirs)) = (readers(), pair());
    let reader = std::thread::spawn(move || {
        let mut got = Vec::new();
        theirs.read_to_end(&mut got).unwrap();
        got
    });
    let mut first = payload(&file, 10, 600_000);
    first.read_by(&reads, Owner::Sender(3));
    assert!(first.is_unchanged());
    assert_eq!((first.send_to(&ours), first.is_reading(), first.remaining()), (Ok(false), true, 600_000));
    let other = Done { owner: Owner::Sender(3), id: u64::MAX, read: Err(Errno::IO) };
    assert_eq!(first.take_read(other), Ok(false), "somebody else's");
    assert_eq!(first.take_read(read(&reads)), Ok(true));
    // From here on the device is known to be memory.
    while !first.send_to(&ours).unwrap() {
        assert!(!first.is_reading());
    }
    drop(ours);
    assert_same_bytes(&reader.join().unwrap(), &bytes[10..600_010], "the payload");
    let (mut second, mut buffer) = (payload(&file, 0, 5), [0; 5]);
    second.read_by(&reads, Owner::Fetch(4));
    assert_eq!((second.is_unchanged(), second.read(&mut buffer)), (true, Ok(Some(5))));
}

#[test]
fn records_contents_are_read_by_a_thread_too_and_a_change_meanwhile_is_noticed() {
    let test = "records_contents_are_read_by_a_thread_too_and_a_change_meanwhile_is_noticed";
    let Some(file) = untold(test, b"0123456789") else { return };
    let begun = || {
        let (reads, mut payload) = (readers(), payload(&file, 0, 10));
        payload.read_by(&reads, Owner::Sender(0));
        assert!(payload.is_unchanged());
        (reads, payload)
    };
    let ((reads, mut whole), (others, mut cut)) = (begun(), begun());
    let mut contents = [0; 6];
    assert_eq!(whole.read_exactly(2, vec![&mut contents]), Ok(false));
    assert_eq!(whole.take_read(read(&reads)), Ok(true));
    assert_eq!((whole.read_exactly(2, vec![&mut contents]), &contents), (Ok(true), b"234567"));
    file.set_len(9).unwrap();
    assert_eq!(cut.read_exactly(0, vec![&mut contents]), Ok(false));
    assert_eq!(cut.take_read(read(&others)), Err(Reason::FileChanged));
}

#[test]
fn a_peer_that_is_gone_is_told_from_a_bad_file() {
    let file = file_of(b"0123456789");
    let (ours, theirs) = pair();
    drop(theirs);
    assert_eq!(payload(&file, 0, 10).send_to(&ours), Err(Reason::ClientGone));
}

/// A [`FlowSender`] that is no kernel socket, so that bytes are copied for it. It takes 1,000 bytes at a time, at most
/// 5,000 in all, and notes whether it was told that more come.
#[derive(Default)]
struct Collects(RefCell<(Vec<u8>, bool)>);

impl FlowSender for Collects {
    fn send(&self, bytes: &[u8], more: bool) -> Result<usize, Errno> {
        let mut taken = self.0.borrow_mut();
        let room = bytes.len().min(1000).min(5000 - taken.0.len());
        taken.0.extend_from_slice(&bytes[..room]);
        taken.1 = more;
        if room > 0 { Ok(room) } else { Err(Errno::AGAIN) }
    }

    fn socket(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn writable(&self) -> BorrowedFd<'_> {
        unimplemented!("nobody waits for it")
    }

    fn unacknowledged(&self) -> io::Result<u32> {
        Ok(0)
    }

    fn congestion_window(&self) -> io::Result<shunt_sys::sockopt::CongestionWindow> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn buffer_bytes(&self) -> io::Result<usize> {
        Ok(5000)
    }

    fn shrinks_only_by_loss(&self) -> bool {
        false
    }

    fn set_buffer_bytes(&self, _: usize) {}

    fn pace(&self, _: Option<u64>) {}

    fn set_window(&self, _: u32) -> Result<(), shunt_sys::repair::RepairError> {
        Ok(())
    }

    fn is_open(&self) -> bool {
        true
    }

    fn close_silently(self: Box<Self>) {}
}

#[test]
fn a_flow_without_a_socket_is_given_copies() {
    let bytes: Vec<u8> = (0..9000u32).map(|at| (at % 251) as u8).collect();
    let file = file_of(&bytes);
    let kept = || Payload::of_sources([(Box::new(memory_of(&bytes)) as Box<dyn Source>, 7, 4000)]);
    for mut payload in [payload(&file, 7, 4000), kept()] {
        let flow = Collects::default();
        assert_eq!(payload.send_to(&flow), Ok(true));
        let (taken, more) = flow.0.into_inner();
        assert_same_bytes(&taken, &bytes[7..4007], "what the flow took");
        assert!(!more, "nothing follows the end");
    }
    let (mut long, flow) = (payload(&file, 0, 9000), Collects::default());
    assert_eq!((long.send_to(&flow), long.remaining()), (Ok(false), 4000), "it is full");
}
