//! A program is a client of a server, and sends the server a body that another machine has. The program's own machine
//! sends all bytes. It does not let the other machine send them (a *handoff*): the server's packets may come in by an
//! interface without steering programs (BPF).

use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shunt_testbed::same_bytes;

use crate::{options, program, run};

const LENGTH: usize = 1 << 20;

#[test]
fn a_body_for_a_server_is_sent_by_who_writes_it() -> Result<()> {
    run(options(), |service| {
        let at = SocketAddr::new(service.service.chain().backend().ip(), 8001);
        let listener = service.lab.backend().run(|| TcpListener::bind(at))??;
        let (length, to) = (LENGTH.to_string(), at.to_string());
        let (mut program, _) = program::start(service, include_str!("upload.py"), &["/1m", &length, &to])?;
        let (mut stream, _) = listener.accept()?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        let mut got = vec![0; LENGTH];
        for turn in 0..3 {
            stream.read_exact(&mut got).with_context(|| format!("turn {turn}"))?;
            same_bytes(&got, &std::fs::read(service.files.join("1m"))?).with_context(|| format!("turn {turn}"))?;
        }
        ensure!(stream.read(&mut got)? == 0, "the end");
        drop(stream);
        ensure!(program.wait(Duration::from_secs(20))?.success(), "{}", program.log());
        let counted = service.frontend_stats()?;
        ensure!(counted.count("store.by_program.python3.received_absent") > 500_000, "it has looked at it");
        ensure!(counted.count("frontend.fe_begun") == 0, "it was handed off");
        Ok(())
    })
}
