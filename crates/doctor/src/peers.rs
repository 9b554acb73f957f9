//! Checks of every other machine. It must be reachable, and have a certificate of the configured name. Its clock and
//! its routes must be right. If it is a backend, it must agree to send in this machine's name. The doctor makes its own
//! connection to the agent there, with this agent's certificate, and asks (EXAMINE). The *steering programs* are an
//! agent's BPF programs on network interfaces.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shunt_sys::sockopt::segment_bytes;
use shunt_wire::local::Reason;
use shunt_wire::peer::{Examine, Examined, Frame};

use super::finding::Finding;
use shunt_config::{Config, PeerConfig};
use shunt_host::interfaces;
use shunt_logic::store::ends::is_usable;
use shunt_transport::credentials::Credentials;
use shunt_transport::{Transport, TransportError};

/// Longest time for connecting to a peer, and longest time for the peer's answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Largest difference between the clocks of two machines that is no fault. With a larger one, logs and certificates'
/// dates are hard to compare.
const CLOCKS: Duration = Duration::from_secs(10);
/// Length in bytes of the IP header and the TCP header with timestamps, for IPv4 and for IPv6.
const HEADERS: (u32, u32) = (52, 72);

/// Runs all checks of one peer. `listens` are the addresses at which this machine's nginx listens.
pub(crate) fn all(config: &Config, peer: &PeerConfig, listens: &[SocketAddr]) -> Vec<Finding> {
    let about = format!("\"{}\" at {}", peer.name, peer.address);
    let stream = match TcpStream::connect_timeout(&peer.address, PATIENCE) {
        Ok(stream) => stream,
        Err(error) => {
            let advice = format!(
                "cannot connect: {error}. Check that shuntd runs there, that its `listen` is that address, and that \
                 no firewall drops the connection"
            );
            return vec![Finding::fault("port", about, advice)];
        }
    };
    let mut findings = vec![Finding::ok("port", about.clone()), mtu(peer, &stream)];
    let servers = asked_for(config, listens, &stream);
    match ask(config, peer, stream, &servers) {
        Ok((examined, took)) => {
            findings.push(Finding::ok("peer", format!("{about} has a certificate of that name")));
            findings.push(clock(peer, &examined, took));
            findings.extend(ways_back(peer, &examined));
            findings.extend(speaks_for(config, peer, &servers, &examined));
        }
        Err(why) => findings.push(Finding::fault("peer", about, why)),
    }
    findings
}

/// Returns the addresses by which clients know this machine: those at which nginx listens. Returns no address if the
/// machine is no frontend. `stream` is a connection to the peer.
fn asked_for(config: &Config, listens: &[SocketAddr], stream: &TcpStream) -> Vec<SocketAddr> {
    let Some(frontend) = &config.frontend else { return Vec::new() };
    let there = if_addrs::get_if_addrs().unwrap_or_default();
    let clients = there.iter().filter(|one| frontend.interfaces.contains(&one.name)).map(if_addrs::Interface::ip);
    let clients: Vec<IpAddr> = clients.filter(|address| is_usable(*address)).collect();
    let own = stream.local_addr().ok().map(|at| at.ip().to_canonical());
    known_by(listens, &clients, own)
}

/// Returns the addresses `listens` without loopback addresses. Replaces each wildcard address by the addresses of its
/// IP version in `clients`, or by `own` if there are none. `clients` are the addresses of the interfaces by which
/// clients' packets arrive. Returns at most [`Examine::MOST`] addresses.
fn known_by(listens: &[SocketAddr], clients: &[IpAddr], own: Option<IpAddr>) -> Vec<SocketAddr> {
    let mut servers = Vec::new();
    for at in listens.iter().filter(|at| !at.ip().is_loopback()) {
        if !at.ip().is_unspecified() {
            servers.push(*at);
            continue;
        }
        let is_alike = |address: &IpAddr| address.is_ipv4() == at.is_ipv4();
        let mut here: Vec<IpAddr> = clients.iter().copied().filter(is_alike).collect();
        if here.is_empty() {
            here.extend(own.filter(is_alike));
        }
        servers.extend(here.into_iter().map(|address| SocketAddr::new(address, at.port())));
    }
    servers.sort_unstable();
    servers.dedup();
    servers.truncate(Examine::MOST);
    servers
}

/// Checks that the path to the peer takes packets as large as the MTU of the interface by which they leave.
fn mtu(peer: &PeerConfig, stream: &TcpStream) -> Finding {
    let about = format!("packets to \"{}\"", peer.name);
    let segment = segment_bytes(stream);
    let ip = stream.local_addr().map(|at| at.ip().to_canonical());
    // An IPv4 packet has at most 65,535 bytes, although the MTU of loopback is 65,536.
    let Some((segment, mtu)) =
        segment.ok().zip(ip.ok().and_then(interfaces::mtu_at)).map(|(segment, mtu)| (segment, mtu.min(65_535)))
    else {
        return Finding::skipped("mtu", about, "the kernel does not know the path MTU");
    };
    let headers = if peer.address.is_ipv4() { HEADERS.0 } else { HEADERS.1 };
    let advice = (segment + headers < mtu).then(|| {
        format!(
            "the path takes {} bytes at most, and the interface's MTU is {mtu}: raise the MTU of the path or of \
             \"{}\", or lower the interface's",
            segment + headers,
            peer.name
        )
    });
    Finding::of("mtu", about, advice)
}

fn clock(peer: &PeerConfig, examined: &Examined, took: Duration) -> Finding {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let apart = now.abs_diff(Duration::from_nanos(examined.time_ns.get()));
    let advice = (apart > CLOCKS + took)
        .then(|| format!("it differs from this machine's clock by {} s: synchronise both by NTP", apart.as_secs()));
    Finding::of("clock", format!("of \"{}\"", peer.name), advice)
}

/// Reports the faults that the other machine sees: in its routes to this machine and to clients, and in its steering
/// programs.
fn ways_back(peer: &PeerConfig, examined: &Examined) -> Vec<Finding> {
    let name = &peer.name;
    let mut all = vec![
        (
            "route",
            "from there to here",
            Examined::NO_ROUTE,
            "there is no route, or it encapsulates packets: see `ip route get` with this machine's address there",
        ),
        (
            "programs",
            "on the interfaces there",
            Examined::WITHOUT_PROGRAMS,
            "one of its `interfaces` does not exist, or lacks its steering programs: `shunt doctor` there says which",
        ),
    ];
    if examined.is_backend() {
        all.extend([
            (
                "route",
                "from there to clients",
                Examined::PAYLOAD_ELSEWHERE,
                "payloads leave by an interface that its [backend] interfaces does not name: `shunt doctor` there \
                 says which",
            ),
            (
                "rp_filter",
                "there, where ACKs come in from here",
                Examined::FILTERED,
                "rp_filter is strict, and drops clients' ACKs because the route to clients uses another interface: \
                 `shunt doctor` there says which",
            ),
        ]);
    }
    let of = |(area, about, bit, advice): (&'static str, &str, u32, &str)| {
        let is_fault = examined.faults.get() & bit != 0;
        Finding::of(area, format!("of \"{name}\", {about}"), is_fault.then(|| advice.to_owned()))
    };
    all.into_iter().map(of).collect()
}

fn speaks_for(config: &Config, peer: &PeerConfig, servers: &[SocketAddr], examined: &Examined) -> Vec<Finding> {
    if !examined.is_backend() {
        return Vec::new();
    }
    let of = |(index, server): (usize, &SocketAddr)| {
        let may = examined.may.get() >> index & 1 == 1;
        let advice = format!(
            "it refuses: in its shuntd.toml, `[[peer]]` \"{}\", add \"{}\" to `speaks_for`",
            config.name,
            server.ip()
        );
        Finding::of("speaks_for", format!("\"{}\" sends as {server}", peer.name), (!may).then_some(advice))
    };
    servers.iter().enumerate().map(of).collect()
}

/// Asks a peer's agent about this machine's addresses `servers`, over the TCP connection `stream`. Returns the answer
/// and the time that it took. The error is a sentence for the operator.
fn ask(
    config: &Config,
    peer: &PeerConfig,
    stream: TcpStream,
    servers: &[SocketAddr],
) -> Result<(Examined, Duration), String> {
    let credentials = Credentials::read(&config.tls, &config.name).map_err(|error| error.to_string())?;
    let tls = credentials.dial(&peer.name).map_err(|error| error.to_string())?;
    let begun = Instant::now();
    let mut transport = Transport::dialled(stream, tls).map_err(|error| error.to_string())?;
    Examine::of(servers).emit(transport.output());
    loop {
        let filled = transport.fill();
        match transport.next_frame() {
            Ok(Some(Frame::Examined(examined))) => return Ok((examined, begun.elapsed())),
            Ok(Some(Frame::Refused(refused))) => {
                let reason = Reason::from_number(refused.reason.get()).unwrap_or(Reason::Malformed);
                return Err(why_refused(config, &TransportError::Refused(reason)));
            }
            Ok(Some(_)) => return Err("its answer cannot be read: install the same release on both machines".into()),
            Ok(None) => {}
            Err(error) => return Err(why_refused(config, &error)),
        }
        // Sends the messages of the handshake, and, once it is done, the question.
        filled.and_then(|()| transport.flush()).map_err(|error| why_refused(config, &error))?;
        let left = PATIENCE
            .checked_sub(begun.elapsed())
            .ok_or("it accepts the connection and does not answer: check that shuntd there is not stopped")?;
        wait(&transport, left).map_err(|error| error.to_string())?;
    }
}

fn why_refused(config: &Config, error: &TransportError) -> String {
    match error {
        TransportError::Refused(Reason::Version) => {
            "it speaks another version of the protocol: install the same release on both machines".into()
        }
        TransportError::Refused(Reason::NotAllowed) => {
            format!("it has no `[[peer]]` \"{}\": add one there", config.name)
        }
        // The texts of these errors say what to do.
        TransportError::Tls(_) | TransportError::RefusedBy(_) => error.to_string(),
        error => {
            format!("{error}; check that both certificates are valid, have these names, and come from the same `ca`")
        }
    }
}

fn wait(transport: &Transport, left: Duration) -> io::Result<()> {
    let descriptor = transport.descriptor();
    let mut ready = [PollFd::new(&descriptor, PollFlags::IN)];
    poll(&mut ready, Some(&Timespec::try_from(left).map_err(io::Error::other)?))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wildcard_is_each_address_that_clients_come_in_at() {
        let at = |all: &[&str]| all.iter().map(|one| one.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let clients = ["192.0.2.10", "2001:db8::10"].map(|one| one.parse().unwrap());
        let own = Some("10.0.0.10".parse().unwrap());
        let listens = at(&["0.0.0.0:80", "[::]:80", "0.0.0.0:443", "10.0.0.10:8080", "127.0.0.1:81"]);
        let asked = at(&["10.0.0.10:8080", "192.0.2.10:80", "192.0.2.10:443", "[2001:db8::10]:80"]);
        assert_eq!(known_by(&listens, &clients, own), asked);
        assert_eq!(known_by(&at(&["0.0.0.0:80", "[::]:80"]), &[], own), at(&["10.0.0.10:80"]));
    }

    #[test]
    fn an_error_that_says_what_to_do_gets_no_second_advice() {
        let text = "name = \"fe\"\nlisten = \"127.0.0.1:7440\"\n[frontend]\ninterfaces = [\"lo\"]\n\
                    [tls]\ncertificate = \"c\"\nkey = \"k\"\nca = \"a\"\n";
        let config = Config::parse(text, std::path::Path::new("x")).unwrap();
        let said = why_refused(&config, &TransportError::RefusedBy(Reason::Version));
        assert!(said.ends_with("install the same release on both machines"), "{said}");
        assert!(why_refused(&config, &TransportError::Closed).contains("closed the connection; check that both"));
    }
}
