//! Servers and clients other than nginx and rustls: a server with a thread for each connection, and OpenSSL's own
//! client.

use std::net::SocketAddr;
use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};
use memchr::memmem;
use shunt_lab::{OnDemand, Process};

use super::{handed_off, run};
use crate::bed::authority;
use crate::client::{Client, Shared, Target};
use crate::service::Running;

const PROGRAM: &str = include_str!("threads.py");
const PORT: u16 = 8443;

/// Starts threads.py on the frontend, under `shunt run`.
fn start(service: &Running<'_>) -> Result<Process> {
    let host = service.lab.frontend();
    let file = host.dir().join("threads.py");
    std::fs::write(&file, PROGRAM)?;
    let at = SocketAddr::new(service.service.chain().server().ip(), PORT);
    let intermediate = service.lab.intermediates().first().copied().context("an intermediate")?;
    let of = SocketAddr::new(intermediate.address().into(), service.service.chain().server().port());
    let mut command: Command = OnDemand::CHECKED.command(host)?;
    command.arg("python3").arg(file).arg(at.to_string());
    command.args(["frontend.pem", "frontend.key"].map(|name| host.dir().join("tls").join(name))).arg(of.to_string());
    host.serve(command, at)
}

/// The server (threads.py) writes by Python's `ssl` module (SSL_write_ex), on blocking sockets.
#[test]
fn threads_that_wait_in_their_writes_hand_bodies_off() -> Result<()> {
    run(|service| {
        let program = start(service)?;
        let mut target = Target::of(service);
        target.port = PORT;
        let one = || {
            let mut client = Client::connect_with(&target, &Shared::new(&target)?)?;
            for name in ["1m", "64k", "1m", "16k+1", "1k", "1m"] {
                client.get(&target, name).with_context(|| name)?;
            }
            Ok::<_, anyhow::Error>(())
        };
        let got = service.lab.client().run(|| {
            std::thread::scope(|scope| {
                let clients: Vec<_> = (0..6).map(|_| scope.spawn(one)).collect();
                clients.into_iter().try_for_each(|client| client.join().map_err(|_| anyhow!("a client panicked"))?)
            })
        })?;
        got.with_context(|| program.log())?;
        let of = |name: &str| service.counted(&format!("store.by_program.python3.{name}"));
        let (handed, absent) = (of("handed_off")?, of("received_absent")?);
        println!("{handed} of {absent} absent bytes were handed off");
        ensure!(absent > 12 << 20 && handed * 10 > absent * 8, "{handed} of {absent} absent bytes: {}", program.log());
        Ok(())
    })
}

/// OpenSSL's client asks for new keys after each body (the line `K`).
#[test]
fn openssls_client_gets_new_keys_between_bodies() -> Result<()> {
    run(|service| {
        let (before, client) = (handed_off(service)?, service.lab.client());
        let ask = |name: &str| {
            format!("printf 'GET /{name} HTTP/1.1\\r\\nHost: frontend\\r\\n\\r\\n'; sleep 1; echo K; sleep 0.3;")
        };
        let to = Target::of(service);
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(format!(
            "({} {} {} {}) | timeout 30 openssl s_client -connect {}:{} -CAfile {} 2>/dev/null",
            // While nginx writes the first body, it may not know yet which machine can send a part of it.
            ask("64k"),
            ask("1m"),
            ask("64k"),
            ask("1m"),
            service.lab.frontend().address(),
            to.port,
            authority(service).display(),
        ));
        let output = client.output(shell)?;
        let mut rest = &output.stdout[..];
        for name in ["64k", "1m", "64k", "1m"] {
            let body = std::fs::read(service.files.join(name))?;
            let at = memmem::find(rest, &body)
                .with_context(|| format!("{name} is not in what came: {} bytes", output.stdout.len()))?;
            rest = &rest[at + body.len()..];
        }
        let handed = handed_off(service)? - before;
        ensure!(handed >= 2 << 20, "{handed} bytes were handed off");
        Ok(())
    })
}
