//! Tests of clients whose packets netfilter translates before they reach the server. So there is no proof that these
//! packets pass the steering programs with the addresses and numbers of the server's socket, and responses are relayed.
//! The rules are written for nft(8).

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::{Command, Stdio};

use shunt_sys::{odb, sockopt};
use shunt_testbed::skipped;

use super::proof::{exchange, refused};
use super::steered::{RING, SHUNT_SOL, SHUNT_STATE, Steered};

/// Loads rules at the frontend. Returns false, and reports that `test` is skipped, if this kernel lacks what the rules
/// need.
pub fn load(test: &str, rules: &str) -> bool {
    let child = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("there is no nft(8): `make packages` installs it");
    child.stdin.take().expect("piped").write_all(rules.as_bytes()).expect("nft reads");
    let output = child.wait_with_output().expect("nft ends");
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!error.contains("syntax error"), "{error}");
        skipped(test, &format!("this kernel does not take `{rules}`: {error}"));
    }
    output.status.success()
}

/// Loads `rules`, which translate a client's connection to port 80 into one to the server's address and port. Checks
/// that each response on the connection is relayed.
fn translated(test: &str, steered: &Steered, listening: IpAddr, rules: impl Fn(SocketAddr) -> String) {
    let listener = TcpListener::bind((listening, 0)).expect("listen");
    odb::watch(&listener).expect("SHUNT_WATCH");
    let at = listener.local_addr().expect("bound");
    if !load(test, &rules(at)) {
        return;
    }
    let asked = SocketAddr::new(steered.hosts.frontend_address, 80);
    let (mut server, mut client) = steered.connect_by(&listener, asked);
    for _ in 0..3 {
        exchange(&mut server, &mut client);
        refused(steered, &mut server, &mut client);
    }
}

#[test]
fn a_client_that_is_redirected_is_relayed_to() {
    for (steered, family) in [(Steered::new as fn() -> Steered, "ip"), (Steered::ipv6, "ip6")] {
        let steered = steered();
        let test = "a_client_that_is_redirected_is_relayed_to";
        translated(test, &steered, steered.hosts.frontend_address, |at| {
            let rule = format!("tcp dport 80 redirect to :{}", at.port());
            format!("table {family} n {{ chain p {{ type nat hook prerouting priority -100; {rule}; }}; }}")
        });
    }
}

#[test]
fn a_client_whose_address_is_translated_is_relayed_to() {
    let steered = Steered::new();
    translated("a_client_whose_address_is_translated_is_relayed_to", &steered, [10, 1, 0, 1].into(), |at| {
        let rule = format!("tcp dport 80 dnat to {at}");
        format!("table ip n {{ chain p {{ type nat hook prerouting priority -100; {rule}; }}; }}")
    });
}

/// The proxy answers the SYN itself, so that the server's sequence numbers are not those that its client sees.
#[test]
fn a_client_behind_a_synproxy_is_relayed_to() {
    let steered = Steered::new();
    let listener = TcpListener::bind((steered.hosts.frontend_address, 0)).expect("listen");
    odb::watch(&listener).expect("SHUNT_WATCH");
    let at = listener.local_addr().expect("bound");
    let port = at.port();
    let rules = format!(
        "table ip s {{
            chain r {{ type filter hook prerouting priority -300; tcp dport {port} tcp flags syn notrack; }}
            chain i {{ type filter hook input priority 0;
                tcp dport {port} ct state invalid,untracked synproxy mss 1460 wscale 7 timestamp sack-perm;
                tcp dport {port} ct state invalid drop; }}
         }}"
    );
    // With the value 2, the server's initial sequence number would be the same SYN cookie as its proxy's.
    std::fs::write("/proc/sys/net/ipv4/tcp_syncookies", "1").expect("sysctl");
    if !load("a_client_behind_a_synproxy_is_relayed_to", &rules) {
        return;
    }
    let _ = std::fs::write("/proc/sys/net/netfilter/nf_conntrack_tcp_loose", "0");
    let (mut server, mut client) = steered.connect_by(&listener, at);
    for _ in 0..3 {
        exchange(&mut server, &mut client);
        refused(&steered, &mut server, &mut client);
    }
    assert_eq!(steered.count("fe_handshake"), 1, "the SYN-ACK that the client has got is another than the server's");
    sockopt::set(&server, SHUNT_SOL, SHUNT_STATE, &RING).expect("SHUNT_STATE");
    assert_eq!(steered.answer().status, 0, "nothing has begun");
    let mut rest = [0; 1];
    drop(server);
    assert_eq!(client.read(&mut rest).expect("a clean end"), 0);
}
