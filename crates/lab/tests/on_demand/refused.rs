//! Bodies that no backend sends to their clients, because the backend's agent refuses, or because the session
//! (connection) of the agents is over. A client gets every byte all the same, or its connection ends. A *handoff* lets
//! another machine's agent send bytes on a client's connection. The program's agent *claims* them: it asks the other
//! agent to send them. Handed-off bytes are *taken back* if the program has to write them itself after all.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::process::Signal;
use shunt_lab::{Ending, Fetch, Options, Process, Settings, faults::Client};
use shunt_testbed::{same_bytes, wait_for, wait_or_fail};

use crate::lost::until_handed_off;
use crate::service::Running;
use crate::{LIMIT, options, paths, program, run, trailers};

/// Runs eight clients of four kinds at once, each of which asks for every file 20 times: about a thousand requests.
fn thousand(service: &Running<'_>) -> Result<()> {
    const EACH: usize = 20;
    let fetch = Fetch { timeout: LIMIT, ..Fetch::new(service.service.chain().server()) };
    let kinds = [
        fetch.clone(),
        Fetch { pipeline: true, ..fetch.clone() },
        Fetch { read_bytes: 20_000, pause: Duration::from_micros(200), ..fetch.clone() },
        Fetch { headers: vec!["Connection: close".to_owned()], ..fetch },
    ];
    let one = |kind: &Fetch| -> Result<()> {
        if kind.headers.is_empty() {
            return service.whole(&kind.run(service.lab.client(), &paths(EACH))?);
        }
        paths(EACH).into_iter().try_for_each(|path| service.whole(&kind.run(service.lab.client(), &[path])?))
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = kinds.iter().chain(&kinds).map(|kind| scope.spawn(|| one(kind))).collect();
        clients
            .into_iter()
            .try_for_each(|client| client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// Asserts that no connection has broken.
fn all_is_well(service: &Running<'_>) -> Result<()> {
    let stats = service.frontend_stats()?;
    for nothing in ["frontend.fe_cancelled", "frontend.fe_out_fin_to_rst", "frontend.fe_drop_early_write"] {
        ensure!(stats.count(nothing) == 0, "{nothing}: {}", stats.count(nothing));
    }
    Ok(())
}

fn nobody_sends(settings: Settings) -> Result<()> {
    run(Options { settings, ..options() }, |service| {
        thousand(service)?;
        let stats = service.frontend_stats()?;
        ensure!(stats.count("frontend.fe_begun") == 0, "what nobody sends is not handed off");
        let (declined, said) = (stats.count("store.by_program.nginx.declined"), stats.count("agent.declined"));
        ensure!(declined > 100_000_000 && said > 0, "{declined} bytes were declined, in {said} answers");
        all_is_well(service)
    })
}

#[test]
fn a_server_that_nobody_may_speak_for() -> Result<()> {
    let settings = Settings { speaks_for: Some("\"192.0.2.77\""), ..Settings::default() };
    nobody_sends(settings)
}

/// No backend may send as the frontend, so nginx has to write all bodies itself. It writes the end of a chunked body in
/// the same pass of its event loop as the body.
#[test]
fn chunks_of_a_server_that_nobody_may_speak_for() -> Result<()> {
    let settings = Settings { speaks_for: Some("\"192.0.2.77\""), locations: Some(trailers), ..Settings::default() };
    nobody_sends(settings)
}

#[test]
fn more_clients_than_a_machine_may_send_to_wait() -> Result<()> {
    let settings = Settings { agent_backend: "senders = 1\n", ..Settings::default() };
    run(Options { settings, ..options() }, |service| {
        until_handed_off(service)?;
        thousand(service)?;
        let (frontend, backend) = (service.frontend_stats()?, service.service.stats(service.lab.backend())?);
        ensure!(backend.count("agent.claims_waited") > 0, "none had to wait");
        ensure!(frontend.count("agent.declined") >= backend.count("agent.claims_waited"), "its program is told");
        ensure!(frontend.count("store.by_program.nginx.handed_off") > 10_000_000, "some are sent so");
        ensure!(backend.count("agent.ended.Limit") == 0, "none is refused");
        all_is_well(service)
    })
}

/// Stops the frontend's agent for longer than its peers wait for it, and calls `what` meanwhile.
fn while_the_agent_stands_still<T>(service: &mut Running<'_>, what: impl FnOnce() -> Result<T>) -> Result<T> {
    let frontend = service.lab.frontend();
    let mut signal = |signal| service.service.agent_process(frontend)?.context("it runs")?.signal(signal);
    signal(Signal::STOP)?;
    let done = what()?;
    std::thread::sleep(Duration::from_secs(3)); // the subject of the test: the agent's silence
    signal(Signal::CONT)?;
    Ok(done)
}

/// Has each of eight clients ask for one body while the frontend's agent is stopped for longer than its peers wait for
/// it. When the agent reads of these handoffs, the session to which they belong is over. Returns how many clients got
/// the whole body. The others get nothing of it.
fn asked_meanwhile(service: &mut Running<'_>, fields: &[String]) -> Result<u64> {
    until_handed_off(service)?;
    let server = service.service.chain().server();
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(Client::connect(service.lab.client(), server, None)?);
    }
    while_the_agent_stands_still(service, || {
        clients.iter_mut().for_each(|client| client.ask_with(fields, "/64k", "64k", 64 << 10));
        Ok(())
    })?;
    let mut whole = 0;
    for client in &mut clients {
        match client.finish(LIMIT)? {
            Ending::Whole => whole += 1,
            Ending::Reset(0) => {}
            ending => bail!("{ending}"),
        }
    }
    Ok(whole)
}

const CLIENTS: u64 = 8;

/// Largest number of attempts. On a busy machine the agent may send claims before it notices that the session is over.
/// Then nothing is refused, and the attempt tests nothing.
const TURNS: usize = 5;

/// Makes up to [`TURNS`] attempts, each with a new service, until `turn` returns true: the attempt has met the case
/// that is to be tested.
fn in_turns(turn: impl Fn(&mut Running<'_>) -> Result<bool>) -> Result<()> {
    for _turn in 0..TURNS {
        let mut shows = false;
        run(options(), |service| {
            shows = turn(service)?;
            Ok(())
        })?;
        if shows {
            return Ok(());
        }
    }
    bail!("handoffs went out with their session {TURNS} times")
}

#[test]
fn a_handoff_of_a_session_that_is_over_is_taken_back() -> Result<()> {
    in_turns(|service| {
        let whole = asked_meanwhile(service, &[])?;
        let stats = service.frontend_stats()?;
        let (undone, lost) = (stats.count("frontend.fe_undone"), stats.count("agent.ended.PeerLost"));
        // The agent may have sent claims of some handoffs before it noticed that the session was over. These handoffs
        // are lost, and all others are taken back.
        ensure!(whole == undone && lost >= CLIENTS - whole, "{whole} whole, {undone} taken back, {lost} lost");
        let taken_back = stats.count("store.by_program.nginx.taken_back");
        ensure!(taken_back >= undone * 60_000, "{taken_back} bytes were taken back");
        until_handed_off(service)?;
        Ok(whole >= CLIENTS / 2)
    })
}

const BEGINNING: usize = 256 << 10;
/// Number of clients to which the program writes only the beginning of a body. Handoffs for the first of them may be
/// lost with the session.
const BEGUN: usize = 6;

/// Has a program write the beginning of a body to clients that read nothing, as handoffs, while no agent can send it.
/// So the bytes are taken back. Then the program writes more to the last client (`then` is "goes on"), or closes that
/// client's connection and greets a new client ("closes"). Returns the program's report on this last write, the
/// program, and the clients.
fn written_meanwhile(
    service: &mut Running<'_>,
    then: &str,
    new_client: impl FnOnce(SocketAddr) -> Result<Option<TcpStream>>,
) -> Result<(String, Process, Vec<TcpStream>)> {
    let [length, beginning, begun] = [LENGTH, BEGINNING, BEGUN].map(|number| number.to_string());
    let arguments = ["/1m", &length, &beginning, &begun, then];
    let (program, at) = program::start(service, include_str!("nonblocking.py"), &arguments)?;
    // After this body, the program knows which machine sends to such clients.
    wait_or_fail("something is handed off", || {
        service.lab.client().run(|| everything(service, asking(TcpStream::connect(at)?, b"w")?))??;
        Ok(service.counted("frontend.fe_begun")? > 0)
    })
    .with_context(|| program.log())?;
    let connect = || -> Result<(Vec<TcpStream>, TcpStream)> {
        let clients: Result<_> = (0..BEGUN).map(|_| asking(with_little_room(at)?, b"s")).collect();
        Ok((clients?, TcpStream::connect(at)?))
    };
    let client = service.lab.client();
    let (clients, mut other) = while_the_agent_stands_still(service, || client.run(connect)?)?;
    wait_for("each connection is taken back or cancelled", || {
        let stats = service.frontend_stats()?;
        let taken_back = stats.count("store.by_program.python3.taken_back") / BEGINNING as u64;
        let over = taken_back + stats.count("frontend.fe_cancelled");
        ensure!(taken_back > 0 && over >= BEGUN as u64, "{taken_back} of {over} are taken back{}", program.log());
        Ok(())
    })?;
    other.set_read_timeout(Some(LIMIT))?;
    other.write_all(b"!")?;
    let new = new_client(at)?;
    let mut told = [0; 7];
    other.read_exact(&mut told).with_context(|| program.log())?;
    Ok((String::from_utf8_lossy(&told).into_owned(), program, clients.into_iter().chain(new).collect()))
}

/// The client reads nothing, so the bytes that were taken back fill its connection. A program that writes to it without
/// blocking gets EAGAIN until there is room.
#[test]
fn what_comes_back_holds_up_no_program_that_does_not_wait() -> Result<()> {
    in_turns(|service| {
        let (told, program, mut clients) = written_meanwhile(service, "goes on", |_| Ok(None))?;
        if told == "is lost" {
            return Ok(false);
        }
        ensure!(told == "is full", "{told}{}", program.log());
        everything(service, clients.pop().context("no client")?).with_context(|| program.log())?;
        Ok(true)
    })
}

#[test]
fn what_comes_back_holds_up_nobody_who_gets_its_number() -> Result<()> {
    run(options(), |service| {
        let client = service.lab.client();
        let connect = |at| Ok(Some(client.run(|| TcpStream::connect(at))??));
        let (told, program, mut clients) = written_meanwhile(service, "closes", connect)?;
        ensure!(told == "went on", "{told}{}", program.log());
        let mut greeting = String::new();
        clients.pop().context("no client")?.read_to_string(&mut greeting)?;
        ensure!(greeting == "hello", "{greeting:?}");
        Ok(())
    })
}

const LENGTH: usize = 1 << 20;

/// Connects with a small receive buffer, so that few bytes come before the client reads.
fn with_little_room(at: SocketAddr) -> Result<TcpStream> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
    sockopt::set_socket_recv_buffer_size(&socket, 8 << 10)?;
    rustix::net::connect(&socket, &at)?;
    Ok(TcpStream::from(socket))
}

fn asking(mut client: TcpStream, what: &[u8]) -> Result<TcpStream> {
    client.write_all(what)?;
    Ok(client)
}

/// Reads all that a client gets, and asserts that it is the body.
fn everything(service: &Running<'_>, mut client: TcpStream) -> Result<()> {
    client.set_read_timeout(Some(LIMIT))?;
    let mut got = Vec::new();
    client.read_to_end(&mut got)?;
    Ok(same_bytes(&got, &std::fs::read(service.files.join("1m"))?)?)
}

/// The program has closed the connection, so nobody can write the bytes that are taken back. The client must not wait
/// for them.
#[test]
fn a_handoff_that_comes_back_to_a_closed_connection_ends_it() -> Result<()> {
    in_turns(|service| {
        let whole = asked_meanwhile(service, &["Connection: close".to_owned()])?;
        let stats = service.frontend_stats()?;
        let cancelled = stats.count("frontend.fe_cancelled");
        let lost = stats.count("agent.ended.PeerLost");
        ensure!(whole + cancelled + lost >= CLIENTS, "{whole} whole, {cancelled} cancelled, {lost} lost");
        ensure!(stats.count("store.by_program.nginx.taken_back") == 0, "there is nobody to take it back");
        until_handed_off(service)?;
        Ok(whole + cancelled >= CLIENTS && cancelled >= CLIENTS / 2)
    })
}
