//! Malformed and forged input to servers and agents. It ends at most the connection that it came on. Other connections
//! are not affected. A *shortcut* is a body that goes straight from the backend to the client.

mod service;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::net::{RecvFlags, SendFlags};
use service::impostor::{Impostor, Listening, agents_address};
use service::{connect_to_agent, needs_root, start_steady};
use shunt_lab::{Fetch, Host};
use shunt_testbed::wait_for;
use shunt_wire::local::{self, Reason};
use shunt_wire::peer::{self, Frame, Hello, Protocol, Refused, padded_name};
use zerocopy::{FromZeros, IntoBytes};

#[test]
fn forged_fields_of_a_client_are_stripped_and_counted() -> Result<()> {
    needs_root();
    start_steady(1, |service| {
        let mut forging = Fetch::new(service.service.chain().server());
        let consent = "Shunt-Consent: 1; frontend=frontend; nonce=00000000000000000000000000000000; \
                       to=0000000000000000; tiers=1";
        let payload = "Shunt-Payload: 1; backend=backend; offer=0000000100000001; length=65536; \
                       tag=00000000000000000000000000000000";
        forging.headers = vec![consent.into(), payload.into(), "shunt-anything: 1".into()];
        service.whole(&forging.run(service.lab.client(), &["/64k", "/1k", "/1m"])?)?;
        let stats = service.frontend_stats()?;
        let forged = stats.count("servers.forged_request_field");
        ensure!(forged == 9, "{forged} forged fields counted");
        // The frontend replaces the forged fields by its own consent field, and the two long bodies still take the
        // shortcut.
        ensure!(stats.count("servers.shortcuts") == 2, "{}", stats.under("servers"));
        service.still_good()
    })
}

/// Sends packets to an agent's Unix socket. Returns what the agent answered before it closed the connection, or `None`
/// if the agent neither answered nor closed it for 8 s. (After 10 s it closes the connection of a process that has said
/// nothing.)
fn provoke(host: &Host, packets: &[Vec<u8>]) -> Result<Option<Vec<u8>>> {
    let socket = connect_to_agent(host)?;
    let patience = Some(Duration::from_secs(8));
    rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, patience)?;
    for packet in packets {
        rustix::net::send(&socket, packet, SendFlags::NOSIGNAL)?;
    }
    let (mut answers, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        match rustix::net::recv(&socket, &mut buffer[..], RecvFlags::empty()) {
            Ok((0, _)) | Err(rustix::io::Errno::CONNRESET) => return Ok(Some(answers)),
            Ok((bytes, _)) => answers.extend_from_slice(&buffer[..bytes]),
            Err(_) => return Ok(None),
        }
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

#[test]
fn malformed_messages_close_only_their_session() -> Result<()> {
    needs_root();
    start_steady(0, |service| {
        let hello = local::Channel::Control.hello();
        let larger = local::Hello { header: local::Header { size: 64, ..hello.header }, ..hello }.as_bytes().to_vec();
        let newer = local::Hello { oldest: 99, newest: 99, ..hello }.as_bytes().to_vec();
        let hello = hello.as_bytes().to_vec();
        let zeros = |kind: u32, size: usize| [words(&[kind, size as u32]), vec![0; size - 8]].concat();
        let (offer, handoff) = (zeros(3, size_of::<local::Offer>()), zeros(4, size_of::<local::Handoff>()));
        let cases = [
            ("too short", vec![vec![1, 2, 3]]),
            ("a size beyond the packet", vec![larger]),
            ("another version", vec![newer]),
            ("a handoff before hello", vec![words(&[4, 8])]),
            ("hello twice", vec![hello.clone(), hello.clone()]),
            ("a kind that is not there", vec![hello.clone(), words(&[77, 8])]),
            ("an offer on a control connection", vec![hello.clone(), offer]),
            ("a handoff of zeros", vec![hello, handoff]),
        ];
        for (name, packets) in &cases {
            for host in [service.lab.frontend(), service.lab.backend()] {
                let answers = provoke(host, packets)?;
                ensure!(answers.is_some(), "{name}: the agent of {} keeps the session", host.name());
                // Before the agent closes, it sends ENDED (6, 24 bytes) with handoff 0 and the reason.
                let answers = answers.unwrap_or_default();
                let last = answers.len().checked_sub(24).map(|at| &answers[at..at + 4]);
                ensure!(last == Some(&6u32.to_ne_bytes()[..]), "{name}: no reason given ({answers:?})");
            }
        }
        let refused = service.service.all_stats()?.count("agent.malformed_local");
        ensure!(refused == 2 * cases.len() as u64, "{refused} refusals counted");
        service.still_good()
    })
}

#[test]
fn malformed_frames_close_only_their_connection() -> Result<()> {
    needs_root();
    start_steady(0, |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        let own = Impostor::with_certificate_of(service.lab, frontend.name())?;
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], &[8, 0, 0, 0, 2, 0, 0, 0], &[]] {
            let answer = own.connect(frontend, backend)?.ask(bytes)?;
            // The agent answers REFUSED (7) with a reason, or nothing to a connection that sent nothing.
            ensure!(answer.is_empty() == bytes.is_empty(), "{bytes:?} answered by {answer:?}");
            ensure!(bytes.is_empty() || answer[4] == 7, "{bytes:?} answered by {answer:?}");
        }
        // A client that does not speak TLS gets an alert (21) at most.
        let address = agents_address(backend)?;
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], &[22, 3, 1, 0, 4, 1, 0, 0, 0]] {
            let answer = frontend.run(|| -> Result<Vec<u8>> {
                let mut stream = TcpStream::connect(address)?;
                stream.set_read_timeout(Some(Duration::from_secs(30)))?;
                stream.write_all(bytes)?;
                let mut answer = Vec::new();
                match stream.read_to_end(&mut answer) {
                    Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => Err(error.into()),
                    _ => Ok(answer),
                }
            })??;
            ensure!(answer.first().is_none_or(|kind| *kind == 21) && answer.len() < 16, "{bytes:?}: {answer:?}");
        }
        service.still_good()
    })
}

/// Two agents get no session if there is no version of the protocol that both know.
#[test]
fn an_agent_of_another_version_is_told_so_and_tells() -> Result<()> {
    needs_root();
    start_steady(0, |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        let mut hello = Hello::new_zeroed();
        let before = (peer::VERSIONS.oldest - 1).into();
        hello.protocol = Protocol { oldest: before, newest: before, ..Protocol::OURS };
        hello.name = padded_name(frontend.name());
        let mut frame = Vec::new();
        hello.emit(&mut frame);
        let answer =
            Impostor::with_certificate_of(service.lab, frontend.name())?.connect(frontend, backend)?.ask(&frame)?;
        let parsed = Frame::parse(&answer);
        let is_version = |refused: &Refused| refused.reason.get() == Reason::Version as u32;
        ensure!(matches!(&parsed, Ok(Some((Frame::Refused(refused), _))) if is_version(refused)), "{answer:?}");
        service.still_good()?;
        // The other direction: the backend's agent dials an agent that refuses its version.
        service.service.kill_agent(frontend)?;
        let listening = frontend.run(|| Listening::at(service.lab, frontend))??;
        let mut connection = listening.accept()?;
        connection.frame()?.context("it says HELLO")?;
        let mut frame = Vec::new();
        Refused { reason: (Reason::Version as u32).into() }.emit(&mut frame);
        connection.send(&frame)?;
        connection.rest();
        drop(listening);
        wait_for("the log names the other version", || {
            let log = service.service.agent(backend)?.log();
            ensure!(log.contains("speaks another version"), "{log}");
            Ok(())
        })?;
        // The backend's agent gets its session with an agent of its own version.
        service.service.restart_agent(frontend)
    })
}
