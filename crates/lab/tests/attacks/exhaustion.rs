//! Who takes and does not give: connections that say nothing or little, clients that acknowledge nothing.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use shunt_lab::{Fetch, Host, Lab, Options, Role, ShuntPart, fetch};

use crate::service::impostor::agents_address;
use crate::service::{FILES, may_run, start, start_on};
use crate::{still_good, whole};

/// Longer than any agent's patience.
const LIMIT: Duration = Duration::from_secs(20);

/// Whether the other end has closed, or does so in time.
fn is_closed(stream: &mut TcpStream) -> bool {
    let _ = stream.set_read_timeout(Some(LIMIT));
    match stream.read_to_end(&mut Vec::new()) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

fn open(from: &Host, to: &Host, count: usize) -> Result<Vec<TcpStream>> {
    let address = agents_address(to)?;
    let all: Vec<std::io::Result<TcpStream>> =
        from.run(|| (0..count).map(|_| TcpStream::connect(address)).collect())?;
    Ok(all.into_iter().collect::<Result<_, _>>()?)
}

#[test]
fn half_open_connections_of_strangers_do_not_keep_agents_apart() -> Result<()> {
    if !may_run("half_open_connections_of_strangers_do_not_keep_agents_apart") {
        return Ok(());
    }
    start(1, |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        let stranger = service.lab.hosts_of(Role::Intermediate).next().context("an intermediate")?;
        for target in [frontend, backend] {
            let mut half_open = open(stranger, target, 300)?;
            // Half of them begin a handshake: a record's header, and no record.
            for stream in half_open.iter_mut().step_by(2) {
                let _ = stream.write_all(&[22, 3, 1, 2, 0, 1]);
            }
            ensure!(service.service.stats(target)?.count("agent.incoming_limit") > 0, "all found a place");
            // The frontend's agent is dialled, the backend's dials: both get their session meanwhile.
            service.service.kill_agent(frontend)?;
            service.service.restart_agent(frontend)?;
            ensure!(half_open.iter_mut().all(is_closed), "a connection is kept that says nothing");
        }
        std::thread::sleep(Duration::from_secs(6)); // until the worker has found its agent again
        still_good(service)
    })
}

#[test]
fn a_slow_loris_loses_its_place() -> Result<()> {
    if !may_run("a_slow_loris_loses_its_place") {
        return Ok(());
    }
    start(0, |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        let mut slow = open(frontend, backend, 1)?.remove(0);
        // The longest record that there is, a byte at a time.
        let began = Instant::now();
        let mut next = [22, 3, 1, 0x40, 0].into_iter().chain(std::iter::repeat(0));
        while slow.write_all(&[next.next().unwrap_or(0)]).is_ok() {
            ensure!(began.elapsed() < LIMIT, "still open after {LIMIT:?}");
            std::thread::sleep(Duration::from_millis(200));
        }
        still_good(service)
    })
}

#[test]
fn silent_processes_lose_their_connections() -> Result<()> {
    if !may_run("silent_processes_lose_their_connections") {
        return Ok(());
    }
    start(0, |service| {
        let socket = ShuntPart::agent_socket(service.lab.frontend());
        let connect = || -> Result<_> {
            let flags = SocketFlags::CLOEXEC;
            let one = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            rustix::net::connect(&one, &SocketAddrUnix::new(&socket)?)?;
            Ok(one)
        };
        let silent: Vec<_> = (0..600).map(|_| connect()).collect::<Result<_>>()?;
        // The service does not wait for them.
        let fetched = fetch(service.lab.client(), service.service.chain().server(), &["/64k", "/1m"])?;
        whole(service, &fetched)?;
        let timeout = rustix::net::sockopt::Timeout::Recv;
        for one in &silent {
            rustix::net::sockopt::set_socket_timeout(one, timeout, Some(LIMIT))?;
            let receive = || rustix::net::recv(one, &mut [0u8; 64][..], rustix::net::RecvFlags::empty());
            let received = rustix::io::retry_on_intr(receive);
            ensure!(matches!(received, Ok((0, _))), "kept, or told something: {received:?}");
        }
        let stats = service.frontend_stats()?;
        let refused = stats.count("agent.refused_callers") + stats.count("agent.servers_refused");
        ensure!(refused > 0, "600 connections of one user, and none too many");
        still_good(service)
    })
}

#[test]
fn a_client_that_never_acknowledges_is_cut_off() -> Result<()> {
    if !may_run("a_client_that_never_acknowledges_is_cut_off") {
        return Ok(());
    }
    let mut options = Options::shunt();
    options.settings.agent_backend = "progress = \"2s\"\npark = \"2s\"\n";
    start_on(Lab::builder().clients(2), FILES, options, |service| {
        let (mute, backend) = (service.lab.client(), service.lab.backend());
        let other = service.lab.hosts_of(Role::Client).nth(1).context("a second client")?;
        let mut slow = Fetch::new(service.service.chain().server());
        (slow.read_bytes, slow.pause) = (16 << 10, Duration::from_millis(10));
        slow.timeout = Duration::from_secs(3);
        let outcome = std::thread::scope(|scope| -> Result<_> {
            let reader = scope.spawn(|| slow.run(mute, &["/7m"]));
            let began = Instant::now();
            while service.service.stats(backend)?.count("agent.senders.now") == 0 {
                ensure!(began.elapsed() < LIMIT, "no payload is being sent");
                std::thread::sleep(Duration::from_millis(10));
            }
            let mut cut = Command::new("ip");
            cut.args(["link", "set", "client0", "down"]);
            mute.check(cut)?;
            Ok(reader.join().expect("the reader's thread"))
        })?;
        ensure!(outcome.is_err(), "a client that is cut off has it all");
        let began = Instant::now();
        while service.service.stats(backend)?.count("agent.senders.now") > 0 {
            ensure!(began.elapsed() < LIMIT, "its socket is kept");
            std::thread::sleep(Duration::from_millis(50));
        }
        let ended = service.service.stats(backend)?.count("agent.ended.NoProgress");
        ensure!(ended == 1, "{ended} handoffs ended for want of progress");
        whole(service, &fetch(other, service.service.chain().server(), &["/64k", "/1m"])?)
    })
}
