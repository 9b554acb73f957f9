//! Fetches real responses with a client that the doctor makes in a network namespace. The namespace is removed at the
//! end, also after an error.
//!
//! ```text
//!   client (namespace)                             this machine, the frontend
//!   spare address --- veth ----------------------- shunt-doctor0, with the agent's programs: requests, headers, ACKs
//!         `---------- macvlan -------------------- interface towards the spare address: payload from the backend
//! ```
//!
//! A client with an address of the frontend itself would be no test, because packets between addresses of one machine
//! pass no Ethernet interface. The operator has to name an unused address, the spare address, for the client: the
//! doctor cannot know which addresses are unused.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use shunt_handoff::TcPrograms;
use shunt_sys::netns::Netns;

use shunt_config::Config;
use shunt_host::routes::Routes;

/// Time that a connection, and each part of a response, may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Names of the interfaces: this machine's end of the veth pair, the client's end of it, and the client's macvlan.
const NEAR: &str = "shunt-doctor0";
const FAR: &str = "shunt-doctor1";
const WIRE: &str = "shunt-doctor2";
/// Link addresses of the veth pair's ends, locally administered (IEEE 802). Each end has the link address of the other
/// end in its table of neighbours, so that neither has to ask for it.
const NEAR_LINK: &str = "02:00:53:48:55:00";
const FAR_LINK: &str = "02:00:53:48:55:01";

/// Returns the link address of the client's macvlan. It is made from the spare address, so that each trial with this
/// spare address has the same link address. A router on the path may remember it from the last trial.
fn link_address(client: IpAddr) -> String {
    let bytes = match client {
        IpAddr::V4(address) => address.octets(),
        IpAddr::V6(address) => std::array::from_fn(|at| address.octets()[12 + at]),
    };
    let [a, b, c, d] = bytes;
    format!("02:53:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}

/// A file of this machine's server, and the client that fetches it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Address at which nginx listens.
    pub server: SocketAddr,
    /// Value of the request's header field Host.
    pub host: String,
    /// Path and query of the file.
    pub path: String,
    /// The client's address: an unused one that backends reach through an interface of this machine.
    pub client: IpAddr,
}

impl Trial {
    /// Builds a trial of a URL with an IP address as its host: `http://10.0.0.1/file`, `http://[fd00::1]:8080/file`.
    ///
    /// # Errors
    /// Returns a sentence that says what is wrong.
    pub fn of(url: &str, client: IpAddr) -> Result<Self, String> {
        let rest = url.strip_prefix("http://").ok_or_else(|| format!("{url} must begin with http://"))?;
        let (host, path) = rest.split_once('/').map_or((rest, "/".into()), |(host, path)| (host, format!("/{path}")));
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let server = host.parse().or_else(|_| bare.parse().map(|address: IpAddr| SocketAddr::new(address, 80)));
        let server = server.map_err(|_| format!("{host} is no IP address: name one at which nginx listens"))?;
        if server.is_ipv4() != client.is_ipv4() {
            return Err(format!(
                "{server} and {client} are of different IP versions: name a client address of the server's version"
            ));
        }
        Ok(Self { server, host: host.to_owned(), path, client })
    }

    /// Makes the client, has it fetch the file `times` times over one connection, and removes the client. Returns the
    /// length in bytes of the last body.
    ///
    /// # Errors
    /// Returns a sentence that says what failed.
    pub fn run(&self, config: &Config, times: usize) -> Result<u64, String> {
        let namespace = Netns::anonymous()
            .map_err(|error| format!("cannot make a network namespace: {error}; run this command as root"))?;
        let path = namespace.path();
        let path = path.to_str().ok_or("a path")?;
        let far = ["peer", "name", FAR, "address", FAR_LINK, "netns", path];
        ip(&[&["link", "add", NEAR, "address", NEAR_LINK, "type", "veth"], &far[..]].concat())?;
        let joined = self.join(config, &namespace, path);
        let fetched = joined.and_then(|()| namespace.run(|| self.fetch(times)).map_err(|error| error.to_string())?);
        // The kernel would remove the interfaces with the namespace, but a moment later. Until then, the next trial
        // could not use their names and addresses.
        let _ = ip(&["link", "del", NEAR]);
        let _ = namespace.run(|| ip(&["link", "del", WIRE]));
        fetched
    }

    /// Connects the client's namespace, which already has its end of the veth pair, with this machine and its network.
    /// `path` is the namespace's path.
    fn join(&self, config: &Config, namespace: &Netns, path: &str) -> Result<(), String> {
        let port = self.port()?;
        let client = self.client.to_string();
        let own = link_address(self.client);
        let wire = ["link", "add", "link", &port, "name", WIRE, "address", &own, "netns", path];
        ip(&[&wire[..], &["type", "macvlan", "mode", "bridge"]].concat())?;
        ip(&["link", "set", NEAR, "up"])?;
        namespace.run(|| self.furnish()).map_err(|error| error.to_string())??;
        ip(&["route", "add", &client, "dev", NEAR])?;
        ip(&["neigh", "replace", &client, "lladdr", FAR_LINK, "dev", NEAR, "nud", "permanent"])?;
        let index = shunt_host::interfaces::interface_index(NEAR).map_err(|error| error.to_string())?;
        let programs = TcPrograms::of_frontend(&config.pins).map_err(|error| shunt_host::errors::chain(&error))?;
        programs.keep_on(index).map(drop).map_err(|error| shunt_host::errors::chain(&error))
    }

    /// Returns the name of the interface by which packets to the spare address leave this machine.
    fn port(&self) -> Result<String, String> {
        let asked = Routes::open().and_then(|mut routes| routes.port_towards(self.client));
        match asked.map_err(|error| error.to_string())? {
            Ok(index) => Ok(shunt_host::interfaces::interface_name(index)),
            Err(why) => {
                Err(format!("{}: {why}; name an unused address of a network that this machine is in", self.client))
            }
        }
    }

    /// Sets up interfaces, addresses and routes inside the client's namespace, which the calling thread is in.
    fn furnish(&self) -> Result<(), String> {
        let (client, server) = (self.client.to_string(), self.server.ip().to_string());
        for name in ["all", WIRE, FAR] {
            // Payload comes in by the macvlan, but the route to its source leaves by the veth pair. rp_filter would
            // drop it.
            let _ = std::fs::write(format!("/proc/sys/net/ipv4/conf/{name}/rp_filter"), "0");
            let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/accept_dad"), "0");
        }
        for device in ["lo", FAR, WIRE] {
            ip(&["link", "set", device, "up"])?;
        }
        ip(&["addr", "add", &client, "dev", WIRE])?;
        ip(&["route", "add", &server, "dev", FAR, "src", &client])?;
        ip(&["neigh", "replace", &server, "lladdr", NEAR_LINK, "dev", FAR, "nud", "permanent"])
    }

    fn fetch(&self, times: usize) -> Result<u64, String> {
        let connecting = |error| format!("no connection from {} to {}: {error}", self.client, self.server);
        let mut stream = TcpStream::connect_timeout(&self.server, PATIENCE).map_err(connecting)?;
        let bounded = stream.set_read_timeout(Some(PATIENCE)).and_then(|()| stream.set_write_timeout(Some(PATIENCE)));
        bounded.map_err(|error| error.to_string())?;
        let mut length = 0;
        for _ in 0..times {
            let request =
                format!("GET {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: shunt-doctor\r\n\r\n", self.path, self.host);
            stream.write_all(request.as_bytes()).map_err(|error| format!("cannot send the request: {error}"))?;
            length = read_response(&mut stream)?;
        }
        Ok(length)
    }
}

/// Reads one response to its end. Returns the length of its body in bytes.
fn read_response(stream: &mut impl Read) -> Result<u64, String> {
    const MOST_HEAD_BYTES: usize = 64 << 10;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        let read = read(stream, &mut byte).map_err(|why| format!("the response has no complete header: {why}"))?;
        if read == 0 || head.len() > MOST_HEAD_BYTES {
            return Err("the connection was closed before the header's end".into());
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
    let status = head.split(' ').nth(1).unwrap_or_default();
    if status != "200" {
        return Err(format!("the answer is {status}, not 200: name a static file"));
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    let length: u64 = length
        .and_then(|text| text.trim().parse().ok())
        .ok_or("the response has no Content-Length: name a static file")?;
    let (mut left, mut buffer) = (length, vec![0; 64 << 10]);
    while left > 0 {
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let here = length - left;
        let why = |why| format!("the body stopped after {here} of {length} bytes: {why}");
        match read(stream, &mut buffer[..most]).map_err(why)? {
            0 => return Err(why("the connection was closed".into())),
            bytes => left -= bytes as u64,
        }
    }
    Ok(length)
}

fn read(stream: &mut impl Read, buffer: &mut [u8]) -> Result<usize, String> {
    loop {
        match stream.read(buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(format!("no data for {PATIENCE:?}")),
            other => return other.map_err(|error| error.to_string()),
        }
    }
}

fn ip(words: &[&str]) -> Result<(), String> {
    let program = if Path::new("/sbin/ip").exists() { "/sbin/ip" } else { "ip" };
    let output = Command::new(program).args(words).output().map_err(|error| format!("cannot run ip: {error}"))?;
    let said = || String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(format!("ip {}: {}", words.join(" "), said())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_an_address_and_a_client_of_its_ip_version() {
        let client = "10.0.0.9".parse().unwrap();
        let trial = Trial::of("http://10.0.0.1/a/b?c", client).unwrap();
        assert_eq!((trial.server, trial.path.as_str()), ("10.0.0.1:80".parse().unwrap(), "/a/b?c"));
        assert_eq!(Trial::of("http://10.0.0.1:8080", client).unwrap().server.port(), 8080);
        let six = Trial::of("http://[fd00::1]:81/x", "fd00::9".parse().unwrap()).unwrap();
        assert_eq!((six.server, six.host.as_str()), ("[fd00::1]:81".parse().unwrap(), "[fd00::1]:81"));
        assert_eq!(Trial::of("http://[fd00::1]/x", "fd00::9".parse().unwrap()).unwrap().server.port(), 80);
        for url in ["https://10.0.0.1/", "http://example.org/", "http://[fd00::1]/"] {
            assert!(Trial::of(url, client).is_err(), "{url}");
        }
    }

    #[test]
    fn a_body_is_read_to_its_end_and_a_short_one_is_an_error() {
        let read = |text: &[u8]| read_response(&mut &text[..]);
        assert_eq!(read(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"), Ok(3));
        assert!(read(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab").unwrap_err().contains("after 2 of 3 bytes"));
        assert!(read(b"HTTP/1.1 404 Not Found\r\n\r\n").unwrap_err().contains("404"));
        assert!(read(b"HTTP/1.1 200 OK\r\n\r\n").unwrap_err().contains("Content-Length"));
        assert!(read(b"HTTP").unwrap_err().contains("closed"));
    }
}
