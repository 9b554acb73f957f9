//! Tests with real handshakes, each test in its own cgroup: when both ends of a connection agree that they run under
//! `shunt run`, and what the SYN and the SYN-ACK carry. Such a connection carries *frames* in place of plain bytes. The
//! *account* of a connection is what a program has to know of its frames. To *mark* a socket is to make its handshakes
//! say that its program runs under `shunt run`.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};

use rustix::net::sockopt::Timeout;
use rustix::net::{AddressFamily, SocketType, accept, bind, connect, getsockname, listen, socket};
use shunt_negotiation::{Ends, LOOPBACK, Negotiation, Speakers};
use shunt_sys::odb;
use shunt_testbed::Group;
use shunt_wire::options::CARRIED_BYTES;

/// Attaches the programs to a cgroup, with only this machine in their map of machines.
fn negotiate(group: &std::path::Path) -> Negotiation {
    let negotiation = Negotiation::attach(group).unwrap();
    negotiation.ends().set(LOOPBACK, &[7; 16]).unwrap();
    negotiation
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

/// Makes a marked socket and connects it.
fn speaking(address: SocketAddr) -> OwnedFd {
    let client = tcp();
    odb::speak(&client).unwrap();
    connect(&client, &address).unwrap();
    client
}

/// Makes a connection. `connecting` and `accepting` say which ends are marked. Returns for each end, the connecting one
/// first, whether it is told that both ends run under `shunt run`.
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

/// Makes a control group for one test, and moves this process into it. The returned lock keeps other tests waiting,
/// because the whole process moves.
fn alone(name: &str) -> (MutexGuard<'static, ()>, Group) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    shunt_testbed::needs_root();
    let alone = ONE_AT_A_TIME.lock().unwrap();
    (alone, Group::enter(name))
}

#[test]
fn both_ends_agree_or_neither_does() {
    let (_alone, group) = alone("negotiation");
    let unknown = odb::speak(tcp().as_fd()).unwrap_err();
    assert_eq!(unknown.raw_os_error(), Some(92), "ENOPROTOOPT: nobody negotiates here");

    let negotiation = negotiate(&group.path);
    assert_eq!(connection(true, true), (true, true));
    assert_eq!(connection(true, false), (false, false));
    assert_eq!(connection(false, true), (false, false));
    assert_eq!(connection(false, false), (false, false));
    for _ in 0..50 {
        assert_eq!(connection(true, true), (true, true));
    }

    ends_once_with_its_last_descriptor();
    an_account_is_begun_once_and_goes_by_the_socket();

    // A socket that was marked only after connect gets no agreement. A socket that is not TCP cannot be marked.
    let (listener, address) = listening(true);
    let late = TcpStream::connect(address).unwrap();
    odb::speak(&late).unwrap();
    let server = accept(&listener).unwrap();
    assert!(!odb::speaks(&late) && !odb::speaks(&server));
    let datagrams = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    assert_eq!(odb::speak(&datagrams).unwrap_err().kind(), io::ErrorKind::PermissionDenied);

    // All other socket options reach the kernel, even with long values.
    let plain = TcpListener::bind("127.0.0.1:0").unwrap();
    shunt_sys::sockopt::set_i32(&plain, 1, 8, 100_000).unwrap();
    let long = [0u8; 8192];
    assert!(shunt_sys::sockopt::set(&plain, 0, 41, &long[..]).is_err(), "a filter that is none");
    one_above_the_other(&group);
    drop(negotiation);
    assert_eq!(connection_without(), (false, false));
}

/// Two agents may negotiate for one program: one for its cgroup, and one for the cgroup above. Both ends of a
/// connection must agree, also while the agent of the lower cgroup starts and ends.
fn one_above_the_other(group: &Group) {
    let below = group.path.join("below");
    fs::create_dir(&below).unwrap();
    fs::write(below.join("cgroup.procs"), "0").unwrap();
    let (listener, address) = listening(true);
    let both_say = |expected: bool| {
        let client = speaking(address);
        let server = accept(&listener).unwrap();
        assert_eq!((odb::speaks(&client), odb::speaks(&server)), (expected, expected));
    };
    both_say(true);
    let second = negotiate(&below);
    // The listener was marked before the inner group's programs were attached.
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
    let (asking, client) = (tcp(), speaking(address));
    let server = accept(&listener).unwrap();
    let cookies = [&client, &server].map(|end| rustix::net::sockopt::socket_cookie(end).unwrap());
    let copy = client.try_clone().unwrap();
    assert!(odb::adopt(&client) && odb::adopt(&server));
    drop(client);
    assert!(cookies.iter().all(|cookie| !odb::ended(&asking, *cookie)), "a copy leads to it");
    drop(copy);
    assert!(odb::ended(&asking, cookies[0]) && !odb::ended(&asking, cookies[0]), "it is said once");
    assert!(!odb::ended(&asking, cookies[1]), "the other end lives");
}

/// If several programs use a connection, even programs of different users, exactly one of them begins the account.
/// Exactly one takes an account that was left with the connection.
fn an_account_is_begun_once_and_goes_by_the_socket() {
    let (listener, address) = listening(true);
    let client = tcp();
    odb::speak(&client).unwrap();
    assert!(!odb::adopt(&client) && odb::carry(&client, &[1; CARRIED_BYTES]).is_err(), "it is no connection yet");
    connect(&client, &address).unwrap();
    let server = accept(&listener).unwrap();
    let copy = client.try_clone().unwrap();
    assert!(odb::take(&client).is_err(), "nobody has left anything");
    assert!(odb::adopt(&copy) && !odb::adopt(&client) && odb::speaks(&client));
    assert!(odb::adopt(&server), "the other end has an account of its own");
    for turn in [1, 2] {
        odb::carry(&client, &[turn; CARRIED_BYTES]).unwrap();
        odb::carry(&client, &[turn + 10; CARRIED_BYTES]).unwrap();
        assert_eq!(odb::take(&copy).unwrap(), [turn + 10; CARRIED_BYTES]);
        assert!(odb::take(&client).is_err() && odb::take(&server).is_err());
    }
    // The end of the connection is reported once for each account of it.
    let (asking, cookie) = (tcp(), rustix::net::sockopt::socket_cookie(&client).unwrap());
    drop((client, copy));
    assert!(!as_user(1234, 1234, || odb::ended(tcp(), cookie)), "another user hears nothing, and takes nothing away");
    let heard = (0..10).take_while(|_| odb::ended(&asking, cookie)).count();
    assert_eq!(heard, 3, "who has begun it, and two who have taken it");
    // A program that does not get the account, because another user's program has it, can ask to be told of the
    // connection's end, too (`adopt_too`). The end of a connection without any account is reported to no program.
    let (client, other) = (speaking(address), accept(&listener).unwrap());
    let cookie = rustix::net::sockopt::socket_cookie(&client).unwrap();
    drop(other);
    let copy = client.try_clone().unwrap();
    assert!(odb::adopt(&client) && as_user(1234, 1234, || !odb::adopt(&client)));
    as_user(1234, 1234, || odb::adopt_too(&client));
    drop((client, copy));
    assert!(odb::ended(&asking, cookie) && !odb::ended(&asking, cookie));
    assert!(as_user(1234, 1234, || odb::ended(tcp(), cookie) && !odb::ended(tcp(), cookie)));
    let unused = speaking(address);
    let cookie = rustix::net::sockopt::socket_cookie(&unused).unwrap();
    drop(unused);
    assert!(!odb::ended(&asking, cookie), "nobody has adopted it");
    // One user begins the account, and another user takes it over.
    let (client, other) = (speaking(address), accept(&listener).unwrap());
    let cookie = rustix::net::sockopt::socket_cookie(&client).unwrap();
    assert!(odb::adopt(&client));
    odb::carry(&client, &[1; CARRIED_BYTES]).unwrap();
    let client = as_user(1234, 1234, || odb::take(&client).map(|_| client)).unwrap();
    drop((client, other));
    assert!(as_user(1234, 1234, || odb::ended(tcp(), cookie) && !odb::ended(tcp(), cookie)));
    assert!(odb::ended(&asking, cookie) && !odb::ended(&asking, cookie));

    let plain = tcp();
    connect(&plain, &address).unwrap();
    assert!(odb::carry(&plain, &[1; CARRIED_BYTES]).is_err() && odb::take(&plain).is_err());
    let short = shunt_sys::sockopt::set(&server, 0x5348_5554, 20, &[1u8; 16][..]);
    assert!(short.is_err() && odb::take(&server).is_err(), "an account of another length");
    // The kernel itself answers all other options. This holds even if the caller has room for a value longer than a
    // page, or too little room for the value, so that the kernel returns only the value's length.
    assert_eq!(told_of_three_groups(), (Some(libc::ERANGE), 12));
    rustix::net::sockopt::set_socket_keepalive(&plain, true).unwrap();
    assert!(rustix::net::sockopt::socket_keepalive(&plain).unwrap());
    let (mut groups, mut length) = (vec![0u8; 64 << 10], 64 << 10);
    // SAFETY: the kernel writes at most `length` bytes into `groups`, which is that long.
    let asked = unsafe {
        let (to, length) = (groups.as_mut_ptr().cast(), &raw mut length);
        libc::getsockopt(plain.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, to, length)
    };
    assert!(asked == 0 && (100..4096).contains(&length), "{asked} {length}");
}

/// Asks for SO_PEERGROUPS in a thread with three groups, with too little room. Returns the error and the length in
/// bytes that would be needed.
fn told_of_three_groups() -> (Option<i32>, libc::socklen_t) {
    let asks = || {
        let groups = [1u32, 2, 3];
        // SAFETY: the array has three groups, and the bare system call changes only the calling thread's groups.
        let became = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
        assert_eq!(became, 0, "{}", io::Error::last_os_error());
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let (mut room, mut bytes) = (0u32, size_of::<u32>() as libc::socklen_t);
        // SAFETY: the kernel writes at most `bytes` bytes into `room`, which is that long.
        unsafe {
            let (to, bytes) = ((&raw mut room).cast(), &raw mut bytes);
            libc::getsockopt(one.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERGROUPS, to, bytes)
        };
        (io::Error::last_os_error().raw_os_error(), bytes)
    };
    std::thread::spawn(asks).join().unwrap()
}

/// By mistake two agents run, and the cgroup of one lies within the other's. Still both ends of a connection must be
/// told the same.
#[test]
fn a_negotiation_within_another_changes_nothing() {
    let (_alone, outer) = alone("negotiation-outer");
    let _outer = negotiate(&outer.path);
    let (listener, address) = listening(true);
    let inner = outer.path.join("inner");
    fs::create_dir(&inner).unwrap();
    fs::write(inner.join("cgroup.procs"), "0").unwrap();
    let (before, before_address) = listening(true);
    let _inner = negotiate(&inner);
    for marked in [(true, true), (true, false), (false, true), (false, false)] {
        let (connecting, accepting) = connection(marked.0, marked.1);
        assert_eq!((connecting, accepting), (marked == (true, true), marked == (true, true)), "{marked:?}");
    }
    // A listener that was told to speak no more is silent. This holds if the programs of both agents have marked it,
    // and also if only the outer agent's programs have.
    let (both_marked, both_address) = listening(true);
    odb::speak_no_more(&both_marked);
    assert!(!odb::speaks(speaking(both_address)) && !odb::speaks(accept(&both_marked).unwrap()));
    odb::speak_no_more(&before);
    assert!(!odb::speaks(speaking(before_address)) && !odb::speaks(accept(&before).unwrap()));
    // The client's socket belongs to the inner group, and the listener to the outer one.
    let client = speaking(address);
    assert_eq!(odb::speaks(&client), odb::speaks(accept(&listener).unwrap()));
    fs::write(outer.path.join("cgroup.procs"), "0").unwrap();
    fs::remove_dir(&inner).unwrap();
}

/// The answer in a SYN-ACK stays valid, even if the key is removed or replaced before the server gets the connection.
/// The reason is that the client sends frames as soon as it has the SYN-ACK.
#[test]
fn a_syn_ack_stays_valid_without_the_key() {
    let (_alone, group) = alone("negotiation-answered");
    let negotiation = negotiate(&group.path);
    let (listener, address) = listening(true);
    // The server gets no connection before the client's first bytes.
    shunt_sys::sockopt::set_i32(&listener, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, 60).unwrap();
    for other_key in [None, Some([8; 16])] {
        negotiation.ends().set(LOOPBACK, &[7; 16]).unwrap();
        let client = speaking(address);
        assert!(odb::speaks(&client));
        match other_key {
            None => negotiation.ends().remove(LOOPBACK).unwrap(),
            Some(key) => negotiation.ends().set(LOOPBACK, &key).unwrap(),
        }
        rustix::io::write(&client, b"framed").unwrap();
        assert!(odb::speaks(accept(&listener).unwrap()), "its client frames");
    }
    // An answer is remembered for its own connection only: the next connection needs the key.
    negotiation.ends().remove(LOOPBACK).unwrap();
    let client = speaking(address);
    rustix::io::write(&client, b"plain").unwrap();
    assert!(!odb::speaks(&client) && !odb::speaks(accept(&listener).unwrap()));
}

/// A socket's second connection inherits nothing from its first.
#[test]
fn a_socket_that_is_connected_again_has_agreed_on_nothing() {
    let (_alone, group) = alone("negotiation-again");
    let _negotiation = negotiate(&group.path);
    let ((listener, address), (plain, plain_address)) = (listening(true), listening(false));
    let client = speaking(address);
    let _first = accept(&listener).unwrap();
    assert!(odb::adopt(&client));
    odb::carry(&client, &[1; CARRIED_BYTES]).unwrap();
    odb::disconnect(&client).unwrap();
    connect(&client, &plain_address).unwrap();
    let _second = accept(&plain).unwrap();
    assert!(!odb::speaks(&client) && odb::take(&client).is_err());
}

/// An agent that is started again takes over the connections that its predecessor has negotiated.
#[test]
fn negotiated_connections_stay_so_while_agents_come_and_go() {
    let (_alone, group) = alone("negotiation-kept");
    let pins = PathBuf::from(shunt_testbed::of_process().pins_prefix() + "negotiation");
    let ends = shunt_negotiation::keep(&group.path, &pins, &Speakers::default()).unwrap();
    ends.set(LOOPBACK, &[7; 16]).unwrap();
    let (listener, address) = listening(true);
    let client = speaking(address);
    let server = accept(&listener).unwrap();
    for _ in 0..3 {
        assert!(odb::speaks(&client) && odb::speaks(&server));
        shunt_negotiation::keep(&group.path, &pins, &Speakers::default()).unwrap();
        let later = speaking(address);
        assert!(odb::speaks(&later) && odb::speaks(accept(&listener).unwrap()), "by a listener from before");
    }
    shunt_negotiation::detach(&pins).unwrap();
    shunt_negotiation::detach(&pins).unwrap();
    assert!(!pins.exists());
    // The kernel detaches a link's program when the last reference to the link is gone (bpf_link_put). That may be
    // after `detach` returns.
    shunt_testbed::wait_for("connections cannot be marked any more", || odb::speak(tcp()).is_err()).unwrap();
}

/// Makes a connection where no programs are attached: marking fails, and the connection works as usual.
fn connection_without() -> (bool, bool) {
    let (listener, address) = listening(false);
    let client = tcp();
    assert!(odb::speak(&client).is_err());
    connect(&client, &address).unwrap();
    (odb::speaks(&client), odb::speaks(accept(&listener).unwrap()))
}

/// Connects from one address to a listener at another, both sockets marked. Returns whether each end says that both
/// agree.
fn between(from: &str, to: &str) -> (bool, bool) {
    let (listener, client) = (tcp_of(to), tcp_of(from));
    for end in [&listener, &client] {
        odb::speak(end).unwrap();
    }
    bind(&listener, &address_of(to)).unwrap();
    listen(&listener, 16).unwrap();
    bind(&client, &address_of(from)).unwrap();
    connect(&client, &SocketAddr::try_from(getsockname(&listener).unwrap()).unwrap()).unwrap();
    let server = accept(&listener).unwrap();
    (odb::speaks(&client), odb::speaks(&server))
}

/// A listener can be silenced: connections of its clients then carry plain bytes, whether it listens at one address or
/// at all addresses. Other listeners are not affected, nor is a listener that later listens at the same address.
#[test]
fn a_listener_that_says_no_more_is_spoken_to_plainly() {
    let (_alone, group) = alone("negotiation-silent");
    let pins = PathBuf::from(shunt_testbed::of_process().pins_prefix() + "negotiation-silent");
    let keep = || shunt_negotiation::keep(&group.path, &pins, &Speakers::default()).unwrap();
    keep().set(LOOPBACK, &[7; 16]).unwrap();
    let both = |listener: &OwnedFd, to: SocketAddr| {
        let client = tcp_of(&to.ip().to_string());
        odb::speak(&client).unwrap();
        connect(&client, &to).unwrap();
        let server = accept(listener).unwrap();
        (odb::speaks(&client), odb::speaks(&server))
    };
    for (at, from) in [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.2"),
        ("::", "::1"),
        ("::", "127.0.0.1"),
        ("::ffff:0.0.0.0", "127.0.0.1"),
    ] {
        let listener_at = |port: u16| {
            let listener = tcp_of(at);
            rustix::net::sockopt::set_socket_reuseaddr(&listener, true).unwrap();
            odb::speak(&listener).unwrap();
            bind(&listener, &SocketAddr::new(at.parse().unwrap(), port)).unwrap();
            listen(&listener, 16).unwrap();
            listener
        };
        let (listener, other) = (listener_at(0), listener_at(0));
        let to = |listener: &OwnedFd| {
            let port = SocketAddr::try_from(getsockname(listener).unwrap()).unwrap().port();
            SocketAddr::new(from.parse().unwrap(), port)
        };
        let place = to(&listener);
        assert_eq!(both(&listener, place), (true, true), "{at}");
        // A user who may not mark sockets may silence a listener, too. A second call, on a copy of the descriptor,
        // changes nothing.
        as_user(1234, 1234, || odb::speak_no_more(&listener));
        odb::speak_no_more(listener.try_clone().unwrap());
        for _ in 0..2 {
            assert_eq!(both(&listener, place), (false, false), "{at} {from}");
            assert_eq!(both(&other, to(&other)), (true, true), "another place");
            keep();
        }
        drop(listener);
        assert_eq!(both(&listener_at(place.port()), place), (true, true), "one that comes to its place");
    }
    shunt_negotiation::detach(&pins).unwrap();
}

/// The first SYN-ACK decides for both ends, even if the listener is silenced before the SYN-ACK is sent again.
#[test]
fn an_answer_that_is_repeated_is_the_same() {
    let (_alone, group) = alone("negotiation-repeated");
    let _negotiation = negotiate(&group.path);
    let (listener, address) = listening(true);
    // For a second the server gets no connection, because the client sends nothing. Then the kernel sends the SYN-ACK
    // again, and the client's ACK of this one completes the connection.
    shunt_sys::sockopt::set_i32(&listener, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, 1).unwrap();
    let client = speaking(address);
    assert!(odb::speaks(&client));
    odb::speak_no_more(&listener);
    assert!(odb::speaks(accept(&listener).unwrap()), "its client frames");
    assert!(!odb::speaks(speaking(address)) && !odb::speaks(accept(&listener).unwrap()));
}

/// A silenced listener that is shut down and listens again agrees only if it was marked again in between.
#[test]
fn a_listener_that_listens_again_says_what_it_is_marked_with() {
    let (_alone, group) = alone("negotiation-relistens");
    let _negotiation = negotiate(&group.path);
    let (listener, _) = listening(true);
    odb::speak_no_more(&listener);
    for speaks in [false, true] {
        rustix::net::shutdown(&listener, rustix::net::Shutdown::Read).unwrap();
        if speaks {
            odb::speak(&listener).unwrap();
        }
        listen(&listener, 16).unwrap();
        let client = speaking(getsockname(&listener).unwrap().try_into().unwrap());
        assert_eq!((odb::speaks(client), odb::speaks(accept(&listener).unwrap())), (speaks, speaks));
    }
}

fn address_of(address: &str) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), 0)
}

fn tcp_of(address: &str) -> OwnedFd {
    let family = if address_of(address).is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    socket(family, SocketType::STREAM, None).unwrap()
}

fn ends_are(ends: &Ends, expected: &[&str]) {
    let mut all: Vec<String> = ends.addresses().iter().map(ToString::to_string).collect();
    all.sort();
    assert_eq!(all, expected);
}

/// Two control groups stand for two machines, the client's and the server's. Each has its own map of keys.
#[test]
fn a_peer_without_the_key_gets_plain_bytes() {
    let (_alone, group) = alone("negotiation-keys");
    let machines = ["client", "server"].map(|name| group.path.join(name));
    machines.iter().for_each(|path| fs::create_dir(path).unwrap());
    let negotiations = machines.each_ref().map(|path| Negotiation::attach(path).unwrap());
    let [client, server] = &negotiations;
    let move_to = |path: &PathBuf| fs::write(path.join("cgroup.procs"), "0").unwrap();
    // A socket belongs to the control group in which it was made: the listener to the server's, the client's socket to
    // the client's.
    let connect_to = |listener: &OwnedFd, from: &str| {
        move_to(&machines[0]);
        let client = tcp();
        odb::speak(&client).unwrap();
        bind(&client, &address_of(from)).unwrap();
        connect(&client, &SocketAddr::try_from(getsockname(listener).unwrap()).unwrap()).unwrap();
        let server = accept(listener).unwrap();
        (odb::speaks(&client), odb::speaks(&server))
    };
    move_to(&machines[1]);
    let (listener, _) = listening(true);

    let keys = [[1; 16], [2; 16]];
    for (ours, theirs, expected) in [
        (None, None, false),
        (Some(0), None, false), // the client sends the option, and the server without a key sends none back
        (None, Some(0), false),
        (Some(0), Some(1), false), // the client has another key
        (Some(0), Some(0), true),
    ] {
        for (negotiation, key) in [(client, ours), (server, theirs)] {
            match key {
                Some(key) => negotiation.ends().set(LOOPBACK, &keys[key]).unwrap(),
                None => negotiation.ends().remove(LOOPBACK).unwrap(),
            }
        }
        assert_eq!(connect_to(&listener, "127.0.0.1"), (expected, expected), "{ours:?} {theirs:?}");
    }
    move_to(&group.path);
    machines.iter().for_each(|path| fs::remove_dir(path).unwrap());
}

/// Connections between several addresses of this machine agree only while the addresses have a key.
#[test]
fn the_option_is_sent_only_to_named_addresses() {
    let (_alone, group) = alone("negotiation-addresses");
    let negotiation = Negotiation::attach(&group.path).unwrap();
    let ends = negotiation.ends();
    ends_are(ends, &[]);
    assert_eq!(between("127.0.0.1", "127.0.0.1"), (false, false));
    ends.set(LOOPBACK, &[3; 16]).unwrap();
    ends_are(ends, &["::1"]);
    assert_eq!(between("127.0.0.1", "127.0.0.7"), (true, true), "all loopback addresses are one end");
    assert_eq!(between("::1", "::1"), (true, true));
    assert_eq!(ends.key(LOOPBACK).unwrap(), Some([3; 16]));
    ends.set("192.0.2.1".parse().unwrap(), &[4; 16]).unwrap();
    ends_are(ends, &["192.0.2.1", "::1"]);
    ends.remove("192.0.2.1".parse().unwrap()).unwrap();
    ends.remove("192.0.2.1".parse().unwrap()).unwrap();
    ends.remove(LOOPBACK).unwrap();
    ends_are(ends, &[]);
    assert_eq!(between("::1", "::1"), (false, false));
    assert_eq!(ends.key(LOOPBACK).unwrap(), None);
}

/// An IPv4 address and its mapped IPv6 form are the same end.
#[test]
fn an_ipv4_address_is_the_same_in_ipv6_clothes() {
    let (_alone, group) = alone("negotiation-mapped");
    let _negotiation = negotiate(&group.path);
    for (from, to) in [("::ffff:127.0.0.1", "127.0.0.1"), ("127.0.0.1", "::ffff:127.0.0.1")] {
        let listener = tcp_of(to);
        let client = tcp_of(from);
        for end in [&listener, &client] {
            odb::speak(end).unwrap();
        }
        bind(&listener, &address_of(to)).unwrap();
        listen(&listener, 16).unwrap();
        let port = SocketAddr::try_from(getsockname(&listener).unwrap()).unwrap().port();
        let other = if from.contains(':') { "::ffff:127.0.0.1" } else { "127.0.0.1" };
        connect(&client, &SocketAddr::new(other.parse().unwrap(), port)).unwrap();
        let server = accept(&listener).unwrap();
        assert_eq!((odb::speaks(&client), odb::speaks(&server)), (true, true), "{from} to {to}");
    }
}

/// Only root, and the users and groups that `keep` is given, may mark sockets.
#[test]
fn a_user_who_is_in_no_list_cannot_say_it() {
    let (_alone, group) = alone("negotiation-users");
    let pins = PathBuf::from(shunt_testbed::of_process().pins_prefix() + "negotiation-users");
    let speakers = Speakers { users: vec![4201], groups: vec![4302] };
    shunt_negotiation::keep(&group.path, &pins, &speakers).unwrap();
    for (user, group, may) in [(4201, 4301, true), (4203, 4302, true), (4203, 4301, false), (0, 0, true)] {
        let said = as_user(user, group, || odb::speak(tcp()));
        assert_eq!(said.is_ok(), may, "{user} {group}");
    }
    shunt_negotiation::detach(&pins).unwrap();
}

/// Runs `work` in a new thread that has another user and group. The bare system calls change them for that thread
/// alone.
fn as_user<T: Send>(user: u32, group: u32, work: impl FnOnce() -> T + Send) -> T {
    use rustix::thread::{Gid, Uid, set_thread_gid, set_thread_uid};
    std::thread::scope(|scope| {
        let become_it = move || {
            set_thread_gid(Gid::from_raw(group)).unwrap();
            set_thread_uid(Uid::from_raw(user)).unwrap();
            work()
        };
        scope.spawn(become_it).join().unwrap()
    })
}

/// Returns sequence number, ACK number and token of the next packet between these ports (source, destination) with
/// exactly these TCP flags. Under load the kernel may drop packets of a packet socket. Then this returns `None` after a
/// second, or takes the packet of another connection with the same ports.
fn captured(packets: &OwnedFd, ports: [u16; 2], flags: u8) -> Option<(u32, u32, u64)> {
    let mut bytes = [0; 2048];
    let began = std::time::Instant::now();
    loop {
        if began.elapsed() > std::time::Duration::from_secs(1) {
            return None;
        }
        let (_, length) = rustix::net::recv(packets, &mut bytes[..], rustix::net::RecvFlags::empty()).ok()?;
        let at = usize::from(bytes[0] & 15) * 4;
        let Some(tcp) = bytes[..length].get(at..).filter(|tcp| tcp.len() >= 20 && bytes[9] == 6) else { continue };
        let number = |at: usize| u32::from_be_bytes(tcp[at..at + 4].try_into().unwrap());
        if tcp[13] & 0x3f != flags || [0, 2].map(|at| u16::from_be_bytes([tcp[at], tcp[at + 1]])) != ports {
            continue;
        }
        let options = &tcp[20..usize::from(tcp[12] >> 4) * 4];
        let ours = [254, 14, 0x53, 0x68, 0x4f, 0x42];
        let found = options.windows(14).find(|option| option.starts_with(&ours)).expect("no such option");
        return Some((number(4), number(8), u64::from_le_bytes(found[6..].try_into().unwrap())));
    }
}

/// Compares the tokens in SYN and SYN-ACK with those of another implementation of SipHash.
#[test]
fn tokens_are_siphash_of_both_ends_and_their_numbers() {
    const SYN: u8 = 2;
    const SYN_ACK: u8 = 18;
    let (_alone, group) = alone("negotiation-tokens");
    let _negotiation = negotiate(&group.path);
    let every_ip =
        rustix::net::Protocol::from_raw(rustix::net::RawProtocol::new(u32::from(0x0800_u16.to_be())).unwrap());
    let packets = socket(AddressFamily::PACKET, SocketType::DGRAM, Some(every_ip)).unwrap();
    let second = Some(std::time::Duration::from_secs(1));
    rustix::net::sockopt::set_socket_timeout(&packets, Timeout::Recv, second).unwrap();
    let (_listener, address) = listening(true);
    let ((client, server), port) = shunt_testbed::wait_for("a SYN and its SYN-ACK", || {
        let client = speaking(address);
        let port = SocketAddr::try_from(getsockname(&client).unwrap()).unwrap().port();
        let syn = captured(&packets, [port, address.port()], SYN)?;
        let answer = captured(&packets, [address.port(), port], SYN_ACK)?;
        Some(((syn, answer), port))
    })
    .unwrap();
    let token = |what: u16, client_isn: u32, server_isn: u32| {
        let mapped = std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        let ports = [what, port, address.port(), 0].map(u16::to_le_bytes).concat();
        let numbers = [client_isn, server_isn].map(u32::to_le_bytes).concat();
        siphasher::sip::SipHasher24::new_with_key(&[7; 16]).hash(&[&ports[..], &mapped, &mapped, &numbers].concat())
    };
    let (client_isn, _, of_syn) = client;
    assert_eq!(of_syn, token(1, client_isn, 0));
    let (server_isn, ack, of_answer) = server;
    assert_eq!((ack, of_answer), (client_isn.wrapping_add(1), token(2, client_isn, server_isn)));
}
