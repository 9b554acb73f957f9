//! A program that closes a descriptor and gets its number again in the same turn. Each client must get what was written
//! to it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shunt_lab::Contents;

use crate::{options, program, run};

const LENGTH: usize = 1 << 20;

/// Connects two clients at once. Returns what each gets, in the order in which they are accepted.
fn ask(at: SocketAddr) -> Result<[Vec<u8>; 2]> {
    let mut clients = [TcpStream::connect(at)?, TcpStream::connect(at)?];
    clients[0].write_all(b"both")?;
    let mut got = [Vec::new(), Vec::new()];
    for (client, got) in clients.iter_mut().zip(&mut got) {
        client.set_read_timeout(Some(Duration::from_secs(20)))?;
        client.read_to_end(got).with_context(|| "a client's bytes")?;
    }
    Ok(got)
}

#[test]
fn a_number_that_is_used_again_is_another_connection() -> Result<()> {
    run("a_number_that_is_used_again_is_another_connection", options(), |service| {
        let length = LENGTH.to_string();
        let (program, at) = program::start(service, include_str!("same_number.py"), &["/1m", &length])?;
        // Before the body's machine has said that it sends to such clients, the kernel takes only as many bytes as
        // there is room for.
        let got = service.lab.client().run(|| ask(at))??;
        ensure!(Contents::of("1m").compare(&got[0]).is_ok(), "other bytes: {}", program.log());
        for turn in 0..20 {
            let got = service.lab.client().run(|| ask(at))?.with_context(|| format!("turn {turn}"))?;
            let mut contents = Contents::of("1m");
            for half in &got {
                ensure!(half.len() == LENGTH / 2, "turn {turn}: {} bytes: {}", half.len(), program.log());
                ensure!(contents.compare(half).is_ok(), "turn {turn}: other bytes: {}", program.log());
            }
        }
        let log = program.log();
        let again = log.lines().filter(|line| {
            let mut numbers = line.split(|letter: char| !letter.is_ascii_digit()).filter(|number| !number.is_empty());
            numbers.next() == numbers.next()
        });
        ensure!(again.count() >= 15, "numbers were not used again: {log}");
        let handed = service.frontend_stats()?.count("store.by_program.python3.handed_off");
        ensure!(handed >= 15 * LENGTH as u64, "{handed} bytes were handed off: {log}");
        Ok(())
    })
}
