//! Files that programs have sent: their bytes are unchanged, or gone. A *reference* names bytes of a file that the
//! store has open. The store keeps these bytes for their *lease*, and longer while somebody reads them.

use std::fs::{File, FileTimes, OpenOptions, Permissions};
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;

use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, sendmsg, socket_with,
};
use shunt_odb::fetch::{FetchError, Holders};
use shunt_odb::hold::Returns;
use shunt_odb::place::{SentFile, Version};
use shunt_odb::reference::Reference;
use shunt_odb::segment::Writer;
use shunt_odb::store::Limits;
use shunt_odb::store::client::Connection;
use shunt_odb::store::pinned::Pinned;

use crate::{Bed, assert_fetched, assert_same_bytes, bytes, fetch, wait_for};

/// Limits of a store with hardly any memory: copies of the files do not fit.
fn small(limits: Limits) -> Limits {
    Limits { bytes: 4 << 20, segment_bytes: 64 << 10, ..limits }
}

/// Waits until each file has not changed for so long that every later change is noticed.
fn settle<'a>(files: impl IntoIterator<Item = &'a File>) {
    for file in files {
        let is_settled = || Version::of(file).unwrap().is_some_and(|version| version.is_settled());
        wait_for("a file has settled", is_settled).unwrap();
    }
}

fn create(path: &Path, content: &[u8]) -> File {
    std::fs::write(path, content).unwrap();
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Refers to a range of a file, as the library does for sendfile(2).
fn refer(program: &Connection, writer: &mut Writer, file: &File, from: u64, most: u64) -> Option<Reference> {
    let version = Version::of(file).unwrap()?;
    program.refer_to_file(writer, file.as_fd(), &version, from, most).unwrap()
}

fn part(whole: &Reference, offset: u64, length: u64) -> Reference {
    Reference { offset, length, ..*whole }
}

fn is_gone(holders: &Holders, reference: &Reference) -> bool {
    matches!(fetch(holders, reference), Err(FetchError::Gone(_)))
}

/// Sends a part of a file to a client, as the agent does. The client has got the first `had` bytes of the part before.
/// Returns what the client gets, and whether the file was unchanged.
fn sent_to_a_client(pinned: &Pinned, had: u64) -> (Vec<u8>, bool) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let reads = std::thread::spawn(move || {
        let mut got = Vec::new();
        theirs.read_to_end(&mut got).map(|_| got).unwrap()
    });
    let place = pinned.place();
    let mut at = had;
    while at < place.length() {
        match place.send(place.from() + at, (place.length() - at) as usize, ours.as_fd()).unwrap() {
            0 => break,
            more => at += more as u64,
        }
    }
    let unchanged = place.is_unchanged();
    drop(ours);
    (reads.join().unwrap(), unchanged)
}

impl Bed {
    fn files(&self) -> u64 {
        self.counters.files.load(Ordering::Relaxed)
    }
}

#[test]
fn a_file_is_not_copied_and_its_bytes_come_to_readers_of_any_kind() {
    let bed = Bed::new(small(Limits::default()));
    let content = bytes(1, 5_000_003);
    let file = create(&bed.dir.path().join("file"), &content);
    settle([&file]);
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    let whole = refer(&program, &mut writer, &file, 0, u64::MAX).unwrap();
    let middle = refer(&program, &mut writer, &file, 1_000_001, 3_000_000).unwrap();
    let end = refer(&program, &mut writer, &file, 4_999_999, 100).unwrap();
    assert_eq!((whole.length, middle.length, end.length), (5_000_003, 3_000_000, 4), "short at its end");
    assert!(refer(&program, &mut writer, &file, 5_000_003, 1).is_none(), "nothing is there");
    // The file is closed and the program ends. The bytes that it has sent stay available.
    drop((file, writer, program));
    for holders in [bed.holders(), bed.strange_holders()] {
        let before = bed.fetched_bytes();
        assert_fetched(&holders, &whole, &content, "the payload");
        assert_fetched(&holders, &middle, &content[1_000_001..4_000_001], "the payload");
        assert_fetched(&holders, &part(&middle, 77, 5000), &content[1_000_078..1_005_078], "the payload");
        assert_fetched(&holders, &end, &content[4_999_999..], "the payload");
        println!("{} bytes through the store", bed.fetched_bytes() - before);
    }
    assert_eq!(bed.fetched_bytes(), 8_005_007, "programs of the same user read the file themselves");
    wait_for("it is counted", || bed.files() == 1).unwrap();
    let returns = Returns::default();
    [whole, middle, end].iter().for_each(|reference| returns.give(reference.payload, reference.weight));
    let holders = bed.holders();
    wait_for("nobody needs it any more", || !holders.send_returns(&returns) && bed.files() == 0).unwrap();
}

/// Fate of a file that has been sent: its name, whether the sent bytes stay available, and what happens to the file.
type Fate = (&'static str, bool, fn(&Path, &File));

const FATES: [Fate; 9] = [
    ("nothing", true, |_, _| {}),
    ("truncated", false, |_, file| file.set_len(300_000).unwrap()),
    ("emptied and written anew", false, |path, _| drop(create(path, &bytes(99, 400_000)))),
    ("appended to", false, |path, _| OpenOptions::new().append(true).open(path).unwrap().write_all(b"x").unwrap()),
    ("overwritten", false, |_, file| file.write_all_at(b"other bytes", 200_000).unwrap()),
    ("overwritten, and its time set back", false, |_, file| {
        let before = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(b"other bytes", 200_000).unwrap();
        file.set_times(FileTimes::new().set_modified(before)).unwrap();
    }),
    ("replaced", true, |path, _| {
        let new = path.with_extension("new");
        drop(create(&new, &bytes(98, 400_000)));
        std::fs::rename(&new, path).unwrap();
    }),
    ("deleted", true, |path, _| std::fs::remove_file(path).unwrap()),
    ("given other permissions", true, |path, _| std::fs::set_permissions(path, Permissions::from_mode(0o400)).unwrap()),
];

#[test]
fn bytes_of_a_file_are_those_of_when_it_was_sent_or_gone() {
    let bed = Bed::new(small(Limits::default()));
    let content = bytes(2, 400_000);
    let path = |fate: &str| bed.dir.path().join(fate);
    let files = FATES.map(|(fate, ..)| create(&path(fate), &content));
    settle(&files);
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    let readers = [bed.holders(), bed.strange_holders()];
    for ((fate, stays, happens), file) in FATES.iter().zip(&files) {
        let whole = refer(&program, &mut writer, file, 0, u64::MAX).unwrap();
        for holders in &readers {
            assert_fetched(
                holders,
                &part(&whole, 0, 100_000),
                &content[..100_000],
                format_args!("before it is {fate}"),
            );
        }
        let pinned = bed.shelf.pin(&part(&whole, 100_000, 300_000)).unwrap();
        happens(&path(fate), file);
        for had in [0, 50_000] {
            let (got, unchanged) = sent_to_a_client(&pinned, had);
            let right: &[u8] = if *stays { &content[100_000 + had as usize..] } else { &[] };
            assert_same_bytes(&got, right, fate);
            assert_eq!(unchanged, *stays, "{fate}");
        }
        for holders in &readers {
            let rest = part(&whole, 100_000, 300_000);
            if *stays {
                assert_fetched(holders, &rest, &content[100_000..], fate);
            } else {
                assert!(is_gone(holders, &rest) && is_gone(holders, &part(&whole, 0, 10)), "{fate}");
            }
        }
        let now = refer(&program, &mut writer, file, 0, u64::MAX);
        assert_eq!(now.is_some(), *stays && *fate == "nothing", "{fate}: what has just changed is copied");
    }
}

/// A sparse file, longer than the longest range that a program refers to at once (1 GiB).
#[test]
fn a_file_of_a_gib_and_a_half_takes_no_room() {
    let bed = Bed::new(small(Limits::default()));
    let file = create(&bed.dir.path().join("file"), b"");
    const LENGTH: u64 = 3 << 29;
    file.set_len(LENGTH).unwrap();
    let marks = [0, (1 << 30) - 5, (1 << 30) + 12_345, LENGTH - 9];
    marks.iter().for_each(|at| file.write_all_at(b"not zeros", *at).unwrap());
    settle([&file]);
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    let first = refer(&program, &mut writer, &file, 0, 1 << 30).unwrap();
    let second = refer(&program, &mut writer, &file, 1 << 30, 1 << 30).unwrap();
    assert_eq!((first.length, second.length), (1 << 30, 1 << 29));
    for holders in [bed.holders(), bed.strange_holders()] {
        assert_eq!(fetch(&holders, &part(&first, 0, 12)).unwrap(), b"not zeros\0\0\0");
        assert_eq!(fetch(&holders, &part(&first, (1 << 30) - 7, 7)).unwrap(), b"\0\0not z");
        assert_eq!(fetch(&holders, &part(&second, 0, 6)).unwrap(), b"eros\0\0");
        assert_eq!(fetch(&holders, &part(&second, 12_344, 11)).unwrap(), b"\0not zeros\0");
        assert_eq!(fetch(&holders, &part(&second, (1 << 29) - 10, 10)).unwrap(), b"\0not zeros");
        assert!(is_gone(&holders, &part(&second, (1 << 29) - 10, 11)), "beyond its end");
    }
}

/// The reader takes longer than a lease in all, but less than a lease from one read to the next.
#[test]
fn a_slow_reader_of_a_file_finds_all_of_it() {
    let bed = Bed::new(small(Limits { lease_ms: 5000, ..Limits::default() }));
    let content = bytes(3, 600_000);
    let files = ["read", "left"].map(|name| create(&bed.dir.path().join(name), &content));
    settle(&files);
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    let holders = bed.strange_holders();
    let left = refer(&program, &mut writer, &files[1], 0, u64::MAX).unwrap();
    // All of the file is sent at once.
    let parts = [0, 1].map(|part| refer(&program, &mut writer, &files[0], part * 300_000, 300_000).unwrap());
    for turn in 0..10 {
        std::thread::sleep(std::time::Duration::from_millis(600)); // the subject of the test: a slow reader
        let at = turn % 5 * 60_000;
        let expected = &content[turn / 5 * 300_000 + at..][..60_000];
        let part = part(&parts[turn / 5], at as u64, 60_000);
        assert_fetched(&holders, &part, expected, format_args!("turn {turn}"));
    }
    assert!(is_gone(&holders, &left), "what nobody asks for is kept for its lease");
}

#[test]
fn files_beyond_the_limit_are_copied_and_those_before_stay() {
    let bed = Bed::new(Limits { files: 5, files_of_a_user: 3, ..Limits::default() });
    let content = bytes(4, 300_000);
    let files: Vec<File> = (0..6).map(|name| create(&bed.dir.path().join(name.to_string()), &content)).collect();
    settle(&files);
    let send = |files: &[File]| {
        let program = bed.program();
        let mut writer = program.lease().unwrap().unwrap();
        let sent = files.iter().map(|file| refer(&program, &mut writer, file, 0, u64::MAX)).collect::<Vec<_>>();
        let copied = writer.put(&[IoSlice::new(b"there is room for what is copied")]).is_some();
        assert!(copied);
        (program, writer, sent)
    };
    let first = send(&files);
    assert_eq!(first.2.iter().flatten().count(), 3, "of one user");
    *bed.user.lock() = 1002;
    let second = send(&files);
    assert_eq!(second.2.iter().flatten().count(), 2, "of all");
    let holders = bed.holders();
    for reference in first.2.iter().chain(&second.2).flatten() {
        assert_fetched(&holders, reference, &content, "the payload");
    }
}

/// More files, one after the other, than the store keeps open for one program's segment of memory (256).
#[test]
fn files_that_are_no_longer_referred_to_make_room_for_others() {
    let bed = Bed::new(Limits::default());
    let content = bytes(5, 300_000);
    const FILES: usize = 300;
    let files: Vec<File> = (0..FILES).map(|name| create(&bed.dir.path().join(name.to_string()), &content)).collect();
    settle(&files);
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    let (holders, returns) = (bed.strange_holders(), Returns::default());
    for (turn, file) in files.iter().enumerate() {
        let mut sent = None;
        wait_for("there is room", || {
            sent = refer(&program, &mut writer, file, 0, u64::MAX);
            sent.is_some()
        })
        .unwrap();
        let sent = sent.unwrap();
        assert_fetched(&holders, &part(&sent, turn as u64, 1000), &content[turn..turn + 1000], "the payload");
        returns.give(sent.payload, sent.weight);
        holders.send_returns(&returns);
    }
    assert!(bed.files() <= 256, "{} at once", bed.files());
}

#[test]
fn files_without_stored_bytes_are_copied() {
    for path in ["/proc/kallsyms", "/proc/self/maps", "/dev/zero", "/tmp", "/sys/kernel/btf/vmlinux"] {
        let file = File::open(path).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert_eq!(Version::of(&file).unwrap(), None, "{path}");
    }
    let (pipe, _) = rustix::pipe::pipe().unwrap();
    assert_eq!(Version::of(&pipe).unwrap(), None);
    assert!(SentFile::new(pipe).is_err());
    let in_memory = tempfile::tempfile_in("/dev/shm").unwrap();
    in_memory.write_all_at(&[1; 5000], 0).unwrap();
    assert!(SentFile::new(reopened(&in_memory, true)).is_ok(), "tmpfs");
    assert!(SentFile::new(reopened(&in_memory, false)).is_err(), "it could be written");
}

fn reopened(file: &File, read_only: bool) -> OwnedFd {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).write(!read_only).open(path).unwrap().into()
}

/// Sends a question as a hostile program would. Returns the outcome in the answer; `None` if the store closes the
/// connection.
fn ask(socket: &OwnedFd, kind: u32, segment: u32, file: u32, descriptors: &[BorrowedFd<'_>]) -> Option<u32> {
    let packet =
        [kind.to_le_bytes(), segment.to_le_bytes(), [0; 4], [0; 4], [0; 4], [0; 4], file.to_le_bytes(), [0; 4]];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    sendmsg(socket, &[IoSlice::new(packet.as_flattened())], &mut ancillary, SendFlags::NOSIGNAL).ok()?;
    let mut told = [0; 1024];
    let (got, _) = rustix::net::recv(socket, &mut told[..], RecvFlags::empty()).ok()?;
    (got >= 16).then(|| u32::from_le_bytes([told[4], told[5], told[6], told[7]]))
}

#[test]
fn a_program_that_gives_what_is_no_file_or_is_not_its_own_harms_nobody() {
    const HELLO: u32 = 1;
    const LEASE: u32 = 2;
    const KEEP_FILE: u32 = 7;
    const OPEN_FILE: u32 = 8;
    let bed = Bed::new(Limits::default());
    let content = bytes(6, 300_000);
    let file = create(&bed.dir.path().join("file"), &content);
    settle([&file]);
    let program = bed.program();
    let mut writer = program.lease().unwrap().unwrap();
    let sent = refer(&program, &mut writer, &file, 0, u64::MAX).unwrap();
    let hostile = || {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(bed.path()).unwrap()).unwrap();
        assert_eq!(ask(&socket, HELLO, 0, 0, &[]), Some(0));
        socket
    };
    let other = File::open("/etc/passwd").unwrap();
    let theirs = sent.payload.segment;
    assert_eq!(ask(&hostile(), KEEP_FILE, theirs, 256, &[other.as_fd()]), None, "another program's segment");
    assert_eq!(ask(&hostile(), KEEP_FILE, theirs.wrapping_add(1), 256, &[other.as_fd()]), None, "nobody's segment");
    let socket = hostile();
    assert_eq!(ask(&socket, LEASE, 0, 0, &[other.as_fd()]), Some(0), "what nobody asked for is closed");
    let own = theirs.wrapping_add(1);
    let (pipe, _into) = rustix::pipe::pipe().unwrap();
    let directory = File::open("/").unwrap();
    for bad in [pipe.as_fd(), directory.as_fd(), socket.as_fd(), file.as_fd()] {
        assert_eq!(ask(&socket, KEEP_FILE, own, 256, &[bad]), Some(2), "not allowed");
    }
    assert_eq!(ask(&socket, KEEP_FILE, own, 0, &[other.as_fd(), other.as_fd(), other.as_fd()]), Some(0), "one of them");
    assert_eq!(ask(&socket, KEEP_FILE, own, u32::MAX, &[other.as_fd()]), Some(0), "any number is one");
    assert_eq!(ask(&socket, KEEP_FILE, own, 256, &[]), None, "no file at all");
    *bed.user.lock() = 1001;
    let stranger = hostile();
    for number in [0, 256, 257, u32::MAX] {
        assert_eq!(ask(&stranger, OPEN_FILE, theirs, number, &[]), Some(2), "another user's");
    }
    *bed.user.lock() = 1000;
    for holders in [bed.holders(), bed.strange_holders()] {
        assert_fetched(&holders, &sent, &content, "the payload");
    }
}
