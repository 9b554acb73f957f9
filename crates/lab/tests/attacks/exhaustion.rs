//! Attacks that exhaust resources: connections that say nothing or little, and clients that acknowledge nothing. A
//! *shortcut* is a body that goes straight from the backend to the client. An *offer* is a body that the backend holds
//! ready for that. A *flow* is the steering programs' (BPF) entry for a client's connection.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shunt_lab::{Fetch, FlowTable, Host, Lab, Options, Role, fetch};
use shunt_testbed::wait_for;

use crate::offers::consenting;
use crate::service::impostor::agents_address;
use crate::service::{FILES, connect_to_agent, needs_root, start, start_on};

/// Time limit for the end of a connection that says nothing: longer than any timeout of an agent for such connections.
const LIMIT: Duration = Duration::from_secs(20);

/// Returns whether the other end has closed the connection, or closes it within [`LIMIT`].
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
    needs_root();
    start(1, |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        let stranger = service.lab.hosts_of(Role::Intermediate).next().context("an intermediate")?;
        for target in [frontend, backend] {
            let mut half_open = open(stranger, target, 300)?;
            // Half of them begin a handshake: they send a record's header, and only one byte of the record.
            for stream in half_open.iter_mut().step_by(2) {
                let _ = stream.write_all(&[22, 3, 1, 2, 0, 1]);
            }
            ensure!(service.service.stats(target)?.count("agent.incoming_limit") > 0, "all found a place");
            // The backend's agent dials, and the frontend's agent accepts. Both agents must get a session in spite of
            // the strangers.
            service.service.kill_agent(frontend)?;
            service.service.restart_agent(frontend)?;
            ensure!(half_open.iter_mut().all(is_closed), "a connection is kept that says nothing");
        }
        service.good_again()
    })
}

#[test]
fn a_slow_loris_loses_its_place() -> Result<()> {
    needs_root();
    start(0, |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        let mut slow = open(frontend, backend, 1)?.remove(0);
        // Sends the longest possible record, a byte at a time.
        let mut next = [22, 3, 1, 0x40, 0].into_iter().chain(std::iter::repeat(0));
        wait_for("the agent closes the connection", || Ok(slow.write_all(&[next.next().unwrap_or(0)]).is_err()))?;
        service.still_good()
    })
}

#[test]
fn silent_processes_lose_their_connections() -> Result<()> {
    needs_root();
    start(0, |service| {
        let frontend = service.lab.frontend();
        let silent: Vec<_> = (0..600).map(|_| connect_to_agent(frontend)).collect::<Result<_>>()?;
        // The service works while these connections say nothing.
        let fetched = fetch(service.lab.client(), service.service.chain().server(), &["/64k", "/1m"])?;
        service.whole(&fetched)?;
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
        service.still_good()
    })
}

#[test]
fn a_client_that_never_acknowledges_is_cut_off() -> Result<()> {
    needs_root();
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
            service.until_sending(true)?;
            let mut cut = Command::new("ip");
            cut.args(["link", "set", "client0", "down"]);
            mute.check(cut)?;
            Ok(reader.join().expect("the reader's thread"))
        })?;
        ensure!(outcome.is_err(), "a client that is cut off has it all");
        service.until_sending(false).context("its socket is kept")?;
        let ended = service.service.stats(backend)?.count("agent.ended.NoProgress");
        ensure!(ended == 1, "{ended} handoffs ended for want of progress");
        service.whole(&fetch(other, service.service.chain().server(), &["/64k", "/1m"])?)
    })
}

/// A tier that the backend trusts asks for many bodies in a frontend's name. The tier never claims these offers, which
/// means that it never asks the backend to send them.
#[test]
fn offers_that_nobody_claims_cost_only_shortcuts_and_not_for_long() -> Result<()> {
    const OFFERS: u64 = 20;
    needs_root();
    let mut options = Options::shunt();
    options.settings.agent = "[limits]\noffers_per_peer = 20\n";
    options.settings.agent_backend = "offer_lifetime = \"15s\"\n";
    start_on(Lab::builder(), FILES, options, |service| {
        let (client, frontend, backend) = (service.lab.client(), service.lab.frontend(), service.lab.backend());
        for _ in 0..OFFERS {
            ensure!(consenting(frontend, backend, "/64k")?.length == 0, "the body came with the header");
        }
        service.until_counted("agent.limited.offers_per_peer", 1)?;
        let more = (0..OFFERS).map(|_| consenting(frontend, backend, "/64k")).collect::<Result<Vec<_>>>()?;
        service.whole(&more)?;
        service.whole(&fetch(client, service.service.chain().server(), &["/64k", "/1m"])?)?;
        let stats = service.service.all_stats()?;
        let counted =
            ["servers.offers", "servers.shortcuts", "agent.limited.offers_per_peer"].map(|what| stats.count(what));
        ensure!(counted == [OFFERS, 0, 1], "offers, shortcuts, limits reached: {counted:?}");
        service.until_counted("agent.offers_expired", OFFERS)?;
        service.still_good()
    })
}

#[test]
fn connections_that_fill_the_flow_table_cost_others_only_the_shortcut() -> Result<()> {
    needs_root();
    start(0, |service| {
        let (client, server) = (service.lab.client(), service.service.chain().server());
        let table = FlowTable::of(service.lab)?;
        let mut slow = Fetch::new(server);
        (slow.read_bytes, slow.pause) = (16 << 10, Duration::from_millis(5));
        let fetched = std::thread::scope(|scope| -> Result<_> {
            let reader = scope.spawn(|| slow.run(client, &["/7m", "/1m"]));
            service.until_counted("servers.shortcuts", 1)?;
            table.fill()?;
            service.whole(&fetch(client, server, &["/64k", "/1m"])?)?;
            reader.join().expect("the reader's thread")
        })?;
        // A connection that has a flow keeps this flow, also for the connection's next responses.
        service.whole(&fetched)?;
        let stats = service.frontend_stats()?;
        // The first body is fetched (sent through both agents), because there is no room for a flow. The second body is
        // relayed (sent through all tiers) without another attempt.
        let counted =
            ["servers.shortcuts", "frontend.fe_refused_full", "servers.fetched_begin", "servers.relayed_vain"]
                .map(|what| stats.count(what));
        ensure!(counted == [2, 1, 1, 1], "shortcuts, refused, fetched, relayed: {counted:?}");
        table.empty();
        service.still_good()
    })
}

/// The flow table is more than half full, with flows of connections that have ended. Such flows are then forgotten
/// before the time `flow_quiet` is over, so that short connections cannot fill the table.
#[test]
fn flows_of_short_connections_make_room() -> Result<()> {
    needs_root();
    start(0, |service| {
        let table = FlowTable::of(service.lab)?;
        table.add_ended(40_000, Duration::from_secs(10))?;
        wait_for("ended flows are forgotten", || {
            let stats = service.frontend_stats()?;
            ensure!(stats.count("frontend.flows") <= 1000, "{}", stats.under("frontend"));
            Ok(())
        })?;
        service.good_again()
    })
}
