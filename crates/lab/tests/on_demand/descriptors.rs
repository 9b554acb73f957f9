//! A program closes a client's connection. The next client's connection gets the same descriptor number, before the
//! program waits for anything. Each client must get the bytes that were written to it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shunt_testbed::same_bytes;

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
    run(options(), |service| {
        let length = LENGTH.to_string();
        let (program, at) = program::start(service, include_str!("same_number.py"), &["/1m", &length])?;
        // The first client may get only a part: until the backend's agent has said that it sends to such clients, a
        // write takes only as many bytes as the socket has room for.
        let got = service.lab.client().run(|| ask(at))??;
        let body = std::fs::read(service.files.join("1m"))?;
        let first = body.get(..got[0].len()).unwrap_or(&body);
        same_bytes(&got[0], first).with_context(|| program.log())?;
        for turn in 0..20 {
            let got = service.lab.client().run(|| ask(at))?.with_context(|| format!("turn {turn}"))?;
            for (half, expected) in got.iter().zip(body.chunks(LENGTH / 2)) {
                same_bytes(half, expected).with_context(|| format!("turn {turn}: {}", program.log()))?;
            }
        }
        let log = program.log();
        let again = log.lines().filter(|line| {
            let mut numbers = line.split(|letter: char| !letter.is_ascii_digit()).filter(|number| !number.is_empty());
            numbers.next() == numbers.next()
        });
        ensure!(again.count() >= 15, "numbers were not used again: {log}");
        let handed = service.counted("store.by_program.python3.handed_off")?;
        ensure!(handed >= 15 * LENGTH as u64, "{handed} bytes were handed off: {log}");
        Ok(())
    })
}
