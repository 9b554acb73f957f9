//! Programs that are killed. Their clients get right bytes only, and then the end of the connection, as with any
//! program. A *handoff* lets another machine's agent send a body on the client's connection.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use shunt_lab::faults::Client;
use shunt_testbed::same_bytes;

use crate::lost::{is_honest, signal_server, until_handed_off};
use crate::{LIMIT, options, program, run};

const LENGTH: usize = 1 << 20;

/// Longest wait for the end of the client's connection, and of the program. It is less than 10 s, after which the agent
/// cancels a handoff whose program is gone. So the end must come from the kernel.
const SOON: Duration = Duration::from_secs(6);

#[test]
fn what_was_handed_off_and_not_told_of_ends_soon() -> Result<()> {
    run(options(), |service| {
        for turn in 1..=3 {
            let length = LENGTH.to_string();
            let (mut program, at) = program::start(service, include_str!("killed.py"), &["/1m", &length])?;
            let mut client = service.lab.client().run(|| TcpStream::connect(at))??;
            client.set_read_timeout(Some(SOON))?;
            client.write_all(b"go")?;
            let mut got = vec![0; 2 * LENGTH];
            let mut bytes = 0;
            let ends = loop {
                match client.read(&mut got[bytes..]) {
                    Ok(0) => break "closed",
                    Ok(more) => bytes += more,
                    Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break "reset",
                    Err(error) => bail!("turn {turn}, after {bytes} bytes: {error}"),
                }
            };
            ensure!(bytes <= LENGTH, "turn {turn}: {bytes} bytes");
            let file = std::fs::read(service.files.join("1m"))?;
            same_bytes(&got[..bytes], &file[..bytes]).with_context(|| format!("turn {turn}"))?;
            ensure!(program.wait(SOON)?.code().is_none(), "it is killed: {}", program.log());
            let stats = service.frontend_stats()?;
            let (begun, told) = (stats.count("frontend.fe_begun"), stats.count("agent.handoffs"));
            let cancelled = stats.count("frontend.fe_cancelled");
            ensure!(begun == turn, "turn {turn}: {begun} have begun");
            ensure!(begun == told + cancelled, "turn {turn}, {ends}: {told} told of, {cancelled} cancelled");
        }
        ensure!(service.counted("frontend.fe_cancelled")? > 0, "each was told of before the end");
        Ok(())
    })
}

#[test]
fn clients_of_a_killed_server_see_an_end() -> Result<()> {
    run(options(), |service| {
        until_handed_off(service)?;
        let (frontend, server) = (service.lab.frontend(), service.service.chain().server());
        let mut clients = Vec::new();
        for turn in 0..12 {
            let mut client = Client::connect(service.lab.client(), server, Some(256 << 10))?;
            client.ask("/7m", "7m", 7 << 20);
            client.read_until(turn * 300_000, LIMIT)?;
            clients.push(client);
        }
        signal_server(service, frontend, Signal::KILL)?;
        for client in &mut clients {
            is_honest(&client.finish(LIMIT)?)?;
        }
        service.service.chain_mut().restart(frontend)?;
        until_handed_off(service)
    })
}
