//! The client's view of its connection: a capture on the client shows one intact TCP connection. A *shortcut* is a body
//! that the backend sends straight to the client. A *fetched* body comes through both agents to the frontend.

mod service;

use anyhow::{Result, bail, ensure};
use service::{FILES, counted_by_kernel, needs_root, start_steady};
use shunt_lab::{Capture, Expect, Fetch, Tcpdump};

/// Fetches every file twice over one connection; with `pipeline`, all requests are sent at once. Returns the number of
/// tail loss probes that the senders' kernels have sent.
fn try_one_connection(pipeline: bool) -> Result<u64> {
    start_steady(1, |service| {
        let paths: Vec<String> = FILES.iter().chain(FILES).map(|(name, _)| format!("/{name}")).collect();
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        let client = service.lab.client();
        let capture = Tcpdump::start(client, "client0", "tcp")?;
        let mut fetch = Fetch::new(service.service.chain().server());
        fetch.pipeline = pipeline;
        let fetched = fetch.run(client, &paths)?;
        let capture = Capture::read(capture.stop()?)?;
        service.whole(&fetched)?;
        for one in &fetched {
            ensure!(!one.fields.iter().any(|(name, _)| name.starts_with("shunt")), "{:?}", one.fields);
        }
        // A kernel whose timer expires while an ACK waits for a processor sends the last segment again: a tail loss
        // probe (RFC 8985, 7.3).
        let probes = |host| counted_by_kernel(host, "netstat", "TcpExt", "TCPLossProbes");
        let probes = probes(service.lab.frontend())? + probes(service.lab.backend())?;
        let verdict = capture.check(&Expect::of(client.address()).connections(1).duplicates(probes));
        verdict.check()?;
        // In a pipeline, bytes of the previous response may still be unsent. Then the next body is fetched.
        let stats = service.frontend_stats()?;
        let shortcuts =
            stats.count("servers.shortcuts") + if pipeline { stats.count("servers.fetched_unsent") } else { 0 };
        ensure!(shortcuts == 2 * 4, "{shortcuts} shortcuts: {}", stats.under("servers"));
        Ok(probes)
    })
}

/// Runs the test up to five times, until a run has less than 8 tail loss probes. On a busy machine, ACKs may wait for a
/// processor, which causes some probes. But if each run has a probe for each of its 8 long bodies, ACKs do not arrive.
fn one_connection(pipeline: bool) -> Result<()> {
    const TIMES: usize = 5;
    needs_root();
    let mut all = Vec::new();
    for _ in 0..TIMES {
        let probes = try_one_connection(pipeline)?;
        if probes < 8 {
            return Ok(());
        }
        all.push(probes);
    }
    bail!("{all:?} probes: the ACKs of the shortcuts do not arrive")
}

#[test]
fn one_whole_connection_request_by_request() -> Result<()> {
    one_connection(false)
}

#[test]
fn one_whole_connection_pipelined() -> Result<()> {
    one_connection(true)
}

/// Sequence numbers are compared by their 32-bit difference, which is ambiguous from 2 GiB on.
#[test]
fn a_payload_of_more_than_2_gib_arrives() -> Result<()> {
    needs_root();
    start_steady(0, |service| {
        // The file is sparse, except for marks at offset 0, at 1 GiB, 100 bytes before 2 GiB, at 2 GiB, and 64 MiB
        // behind it.
        let file = std::fs::File::create(service.files.join("2g"))?;
        for at in [0, 1 << 30, (1 << 31) - 100, 1 << 31, (1 << 31) + (64 << 20)] {
            std::os::unix::fs::FileExt::write_all_at(&file, format!("here is byte {at}").as_bytes(), at)?;
        }
        let mut fetch = Fetch::new(service.service.chain().server());
        fetch.read_bytes = 1 << 20;
        service.whole(&fetch.run(service.lab.client(), &["/2g", "/64k"])?)?;
        let stats = service.frontend_stats()?;
        ensure!(stats.count("servers.shortcuts") == 2, "{}", stats.under("servers"));
        service.no_fallback()
    })
}

#[test]
fn a_slow_reader_gets_everything() -> Result<()> {
    needs_root();
    start_steady(0, |service| {
        let mut fetch = Fetch::new(service.service.chain().server());
        fetch.read_bytes = 64 << 10;
        fetch.pause = std::time::Duration::from_millis(10);
        service.whole(&fetch.run(service.lab.client(), &["/7m", "/64k", "/1m"])?)?;
        service.no_fallback()
    })
}
