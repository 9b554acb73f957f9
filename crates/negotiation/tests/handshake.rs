//! Real handshakes in a cgroup of the test's own: who agrees, and what goes over the wire for everybody else.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::net::{AddressFamily, SocketType, accept, bind, connect, getsockname, listen, socket};
use shunt_negotiation::Negotiation;
use shunt_sys::odb;

/// The test's cgroup; the process leaves it at the end.
struct Group {
    path: PathBuf,
    before: PathBuf,
}

impl Group {
    fn enter(name: &str) -> Self {
        let root = shunt_sys::cgroup::root().unwrap();
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap().to_owned();
        // The watchdog starts before the process enters the group.
        let path = shunt_testbed::of_process().cgroup(&root, name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("cgroup.procs"), "0").unwrap();
        Self { path, before: root.join(own) }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::write(self.before.join("cgroup.procs"), "0");
        let _ = fs::remove_dir(&self.path);
    }
}

fn tcp() -> OwnedFd {
    socket(AddressFamily::INET, SocketType::STREAM, None).unwrap()
}

fn listening(marked: bool) -> (OwnedFd, SocketAddr) {
    let listener = tcp();
    if marked {
        odb::speak(&listener).unwrap();
    }
    bind(&listener, &"127.0.0.1:0".parse::<SocketAddr>().unwrap()).unwrap();
    listen(&listener, 16).unwrap();
    let address = getsockname(&listener).unwrap().try_into().unwrap();
    (listener, address)
}

/// Whether each end of a new connection says that both speak: the connecting one, the accepting one.
fn connection(connecting: bool, accepting: bool) -> (bool, bool) {
    let (listener, address) = listening(accepting);
    let client = tcp();
    if connecting {
        odb::speak(&client).unwrap();
    }
    connect(&client, &address).unwrap();
    let server = accept(&listener).unwrap();
    let answers = (odb::speaks(&client), odb::speaks(&server));
    let (mut client, mut server) = (TcpStream::from(client), TcpStream::from(server));
    client.write_all(b"request").unwrap();
    server.write_all(b"response").unwrap();
    let (mut request, mut response) = ([0; 7], [0; 8]);
    server.read_exact(&mut request).unwrap();
    client.read_exact(&mut response).unwrap();
    assert_eq!((&request, &response), (b"request", b"response"));
    answers
}

/// Both tests move the whole process to their control group.
static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[test]
fn both_ends_agree_or_neither_does() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    if !shunt_testbed::root() {
        return;
    }
    let group = Group::enter("negotiation");
    let unknown = odb::speak(tcp().as_fd()).unwrap_err();
    assert_eq!(unknown.raw_os_error(), Some(92), "ENOPROTOOPT: nobody negotiates here");

    let negotiation = Negotiation::attach(&group.path).unwrap();
    assert_eq!(connection(true, true), (true, true));
    assert_eq!(connection(true, false), (false, false));
    assert_eq!(connection(false, true), (false, false));
    assert_eq!(connection(false, false), (false, false));
    for _ in 0..50 {
        assert_eq!(connection(true, true), (true, true));
    }

    ends_once_with_its_last_descriptor();

    // What was not marked before its connect stays out, and so does a socket that is not TCP.
    let (listener, address) = listening(true);
    let late = TcpStream::connect(address).unwrap();
    odb::speak(&late).unwrap();
    let server = accept(&listener).unwrap();
    assert!(!odb::speaks(&late) && !odb::speaks(&server));
    let datagrams = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    assert_eq!(odb::speak(&datagrams).unwrap_err().kind(), io::ErrorKind::PermissionDenied);

    // Other options are the kernel's, however long.
    let plain = TcpListener::bind("127.0.0.1:0").unwrap();
    shunt_sys::sockopt::set_i32(&plain, 1, 8, 100_000).unwrap();
    let long = [0u8; 8192];
    assert!(shunt_sys::sockopt::set(&plain, 0, 41, &long[..]).is_err(), "a filter that is none");
    one_above_the_other(&group);
    drop(negotiation);
    assert_eq!(connection_without(), (false, false));
}

/// Two agents may negotiate for one program, and one may come and go: both ends say the same all the time.
fn one_above_the_other(group: &Group) {
    let below = group.path.join("below");
    fs::create_dir(&below).unwrap();
    fs::write(below.join("cgroup.procs"), "0").unwrap();
    let (listener, address) = listening(true);
    let both_say = |expected: bool| {
        let client = tcp();
        odb::speak(&client).unwrap();
        connect(&client, &address).unwrap();
        let server = accept(&listener).unwrap();
        assert_eq!((odb::speaks(&client), odb::speaks(&server)), (expected, expected));
    };
    both_say(true);
    let second = Negotiation::attach(&below).unwrap();
    // The listener was marked before this one was there.
    both_say(true);
    assert_eq!(connection(true, true), (true, true));
    assert_eq!(connection(false, true), (false, false));
    drop(second);
    both_say(true);
    fs::write(group.path.join("cgroup.procs"), "0").unwrap();
    fs::remove_dir(&below).unwrap();
}

fn ends_once_with_its_last_descriptor() {
    let (listener, address) = listening(true);
    let (asking, client) = (tcp(), tcp());
    odb::speak(&client).unwrap();
    connect(&client, &address).unwrap();
    let server = accept(&listener).unwrap();
    let cookies = [&client, &server].map(|end| rustix::net::sockopt::socket_cookie(end).unwrap());
    let copy = client.try_clone().unwrap();
    drop(client);
    assert!(cookies.iter().all(|cookie| !odb::ended(&asking, *cookie)), "a copy leads to it");
    drop(copy);
    assert!(odb::ended(&asking, cookies[0]) && !odb::ended(&asking, cookies[0]), "it is said once");
    assert!(!odb::ended(&asking, cookies[1]), "the other end lives");
}

/// Two agents by mistake, one for a part of the other's programs: both ends still agree, or neither does.
#[test]
fn a_negotiation_within_another_changes_nothing() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    if !shunt_testbed::root() {
        return;
    }
    let outer = Group::enter("negotiation-outer");
    let _outer = Negotiation::attach(&outer.path).unwrap();
    let (listener, address) = listening(true);
    let inner = outer.path.join("inner");
    fs::create_dir(&inner).unwrap();
    let _inner = Negotiation::attach(&inner).unwrap();
    fs::write(inner.join("cgroup.procs"), "0").unwrap();
    for marked in [(true, true), (true, false), (false, true), (false, false)] {
        let (connecting, accepting) = connection(marked.0, marked.1);
        assert_eq!((connecting, accepting), (marked == (true, true), marked == (true, true)), "{marked:?}");
    }
    // From the inner group to a listener of the outer one.
    let client = tcp();
    odb::speak(&client).unwrap();
    connect(&client, &address).unwrap();
    assert_eq!(odb::speaks(&client), odb::speaks(accept(&listener).unwrap()));
    fs::write(outer.path.join("cgroup.procs"), "0").unwrap();
    fs::remove_dir(&inner).unwrap();
}

/// An agent that is started again takes over what the one before has agreed on.
#[test]
fn what_is_agreed_on_stays_so_while_agents_come_and_go() {
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    if !shunt_testbed::root() {
        return;
    }
    let group = Group::enter("negotiation-kept");
    let pins = PathBuf::from(shunt_testbed::of_process().pins_prefix() + "negotiation");
    shunt_negotiation::keep(&group.path, &pins).unwrap();
    let (listener, address) = listening(true);
    let client = tcp();
    odb::speak(&client).unwrap();
    connect(&client, &address).unwrap();
    let server = accept(&listener).unwrap();
    for _ in 0..3 {
        assert!(odb::speaks(&client) && odb::speaks(&server));
        shunt_negotiation::keep(&group.path, &pins).unwrap();
        let later = tcp();
        odb::speak(&later).unwrap();
        connect(&later, &address).unwrap();
        assert!(odb::speaks(&later) && odb::speaks(accept(&listener).unwrap()), "by a listener from before");
    }
    shunt_negotiation::detach(&pins).unwrap();
    shunt_negotiation::detach(&pins).unwrap();
    assert!(!pins.exists());
    // The kernel takes a link's program off when nobody looks at it any more (bpf_link_put), which may be later.
    let ended = shunt_testbed::eventually(|| odb::speak(tcp()).err().ok_or("connections are still marked"));
    ended.unwrap();
}

/// Marking fails once nobody negotiates any more, and connections go on as ever.
fn connection_without() -> (bool, bool) {
    let (listener, address) = listening(false);
    let client = tcp();
    assert!(odb::speak(&client).is_err());
    connect(&client, &address).unwrap();
    (odb::speaks(&client), odb::speaks(accept(&listener).unwrap()))
}
