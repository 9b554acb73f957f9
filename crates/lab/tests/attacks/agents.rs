//! Attacks by agents. Some use another agent's name or certificate, and others abuse their own rights. A *claim* is a
//! frontend's message that asks a backend to send an *offer*: a payload that the backend holds ready. A *frame* is a
//! message between agents. A *handoff* lets a backend send a payload on a client's connection.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use shunt_ca::Authority;
use shunt_lab::{Fetch, Lab, Options, Role};
use shunt_testbed::{same_bytes, wait_for};
use shunt_wire::Address;
use shunt_wire::local::Reason;
use shunt_wire::peer::{Answer, Claim, Digest, Ended, Frame, Hello, Protocol, Spacing, padded_name};
use shunt_wire::prefixes::Prefixes;
use zerocopy::FromZeros;

use crate::offers::{Seen, served};
use crate::service::impostor::{Connection, Impostor, Listening};
use crate::service::{FILES, Running, needs_root, start, start_on};

fn hello(name: &str, senders: Option<SocketAddr>) -> Vec<u8> {
    let mut hello = Hello::new_zeroed();
    (hello.protocol, hello.name) = (Protocol::OURS, padded_name(name));
    hello.offer_key = [7; 16];
    if let Some(senders) = senders {
        (hello.sender_ipv4, hello.sender_port) = (Address::from(senders.ip()), senders.port().into());
    }
    let mut frame = Vec::new();
    hello.emit(&mut frame);
    frame
}

/// Sends a claim. Returns the reason for which the agent ended the claim.
fn ended(connection: &mut Connection, claim: &Claim) -> Result<Reason> {
    let mut frame = Vec::new();
    claim.emit(&mut frame);
    connection.send(&frame)?;
    loop {
        let frame = connection.frame()?.context("the session ended")?;
        if let Ok(Some((Frame::Ended(ended), _))) = Frame::parse(&frame) {
            return Reason::from_number(ended.reason.get()).context("a reason that is none");
        }
    }
}

#[test]
fn a_stranger_and_another_tenants_agent_get_no_session() -> Result<()> {
    needs_root();
    start(0, |service| {
        let (frontend, backend, lab) = (service.lab.frontend(), service.lab.backend(), service.lab);
        // A stranger has its own authority or no certificate. TLS refuses it, and no frame is read.
        for stranger in [Impostor::with_own_authority(lab, "frontend")?, Impostor::without_certificate(lab)?] {
            let answer = stranger.connect(frontend, backend)?.ask(&hello("frontend", None)).unwrap_or_default();
            ensure!(answer.is_empty(), "a stranger was answered: {answer:?}");
        }
        // A tenant's certificate is from the right authority, but has a name that no peer has. The tenant is told that
        // it is refused, whatever name it gives.
        let tenant = Impostor::with_certificate_of(lab, "tenant")?;
        for name in ["tenant", "frontend", "backend"] {
            let answer = tenant.connect(frontend, backend)?.ask(&hello(name, None))?;
            ensure!(matches!(Frame::parse(&answer), Ok(Some((Frame::Refused(_), _)))), "{name}: {answer:?}");
        }
        let stats = service.service.stats(backend)?;
        ensure!(stats.count("agent.strangers") == 2, "{} strangers", stats.count("agent.strangers"));
        ensure!(stats.count("agent.malformed_peer") == 3, "{} refusals", stats.count("agent.malformed_peer"));
        ensure!(stats.count("agent.sessions") == 1, "the frontend's session began again");
        service.still_good()
    })
}

fn claim(offer: &Seen, client: SocketAddr, server: SocketAddr) -> Claim {
    let mut claim = Claim::new_zeroed();
    (claim.worker, claim.handoff, claim.flow.first, claim.flow.mss) = (1.into(), 1.into(), 1, 1000.into());
    (claim.offer, claim.length, claim.tag) = (offer.number.into(), offer.length.into(), offer.tag);
    (claim.flow.client_address, claim.flow.client_port) = (Address::from(client.ip()), client.port().to_be_bytes());
    (claim.flow.server_address, claim.flow.server_port) = (Address::from(server.ip()), server.port().to_be_bytes());
    (claim.flow.snd_wnd, claim.flow.snd_cwnd) = (65535.into(), 10.into());
    claim
}

/// A frontend's key may be stolen, or its agent taken over. The backend's agent still limits what the attacker can do.
#[test]
fn a_frontends_agent_speaks_only_for_its_addresses() -> Result<()> {
    needs_root();
    start(0, |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        let own = Impostor::with_certificate_of(service.lab, frontend.name())?;
        service.service.kill_agent(frontend)?;
        let mut session = Listening::at(service.lab, frontend)?.accept()?;
        session.frame()?.context("the backend's agent says HELLO first")?;
        session.send(&hello(frontend.name(), None))?;
        session.wait_for_ping()?;
        let offer = Seen::made_for(frontend, backend, "/64k")?;

        let server = SocketAddr::new(frontend.address().into(), 80);
        let client = SocketAddr::new(service.lab.client().address().into(), 40_000);
        let others: SocketAddr = "198.51.100.1:80".parse()?;
        let backends = SocketAddr::new(backend.address().into(), 80);
        for stolen in [others, backends] {
            let reason = ended(&mut session, &claim(&offer, client, stolen))?;
            ensure!(reason == Reason::NotAllowed, "as {stolen}: {reason}");
        }
        for victim in ["127.0.0.1:80", "224.0.0.1:80", "255.255.255.255:80", "0.0.0.0:80"] {
            let reason = ended(&mut session, &claim(&offer, victim.parse()?, server))?;
            ensure!(reason == Reason::NotAllowed, "to {victim}: {reason}");
        }
        let reason = ended(&mut session, &claim(&offer.with_another_tag(), client, server))?;
        ensure!(reason == Reason::Tag, "a forged tag: {reason}");
        let refused = service.service.stats(backend)?.count("agent.ended.NotAllowed");
        ensure!(refused == 6, "{refused} refusals counted");
        // None of these claims has used up the offer, or made the backend send a byte of it.
        let bytes = served(own.connect(frontend, backend)?, &offer)?;
        same_bytes(&bytes, &std::fs::read(service.files.join("64k"))?)?;
        ensure!(service.service.stats(backend)?.count("agent.senders.restored") == 0, "a socket was made");
        drop(session);
        service.service.restart_agent(frontend)?;
        service.good_again()
    })
}

/// Kills the second backend's agent. Returns a connection to the frontend's agent with that backend's certificate, and
/// the HELLO that begins a session.
fn in_place_of_second_backend(service: &mut Running<'_>) -> Result<(Connection, Vec<u8>)> {
    let other = service.lab.hosts_of(Role::Backend).nth(1).context("a second backend")?;
    service.service.kill_agent(other)?;
    let rogue = Impostor::with_certificate_of(service.lab, other.name())?;
    let session = rogue.connect(other, service.lab.frontend())?;
    Ok((session, hello(other.name(), Some(SocketAddr::new(other.address().into(), 61_000)))))
}

/// The agent checks a certificate when the connection begins. The impostor's connection begins before its certificate
/// is revoked, and is used afterwards.
#[test]
fn a_connection_that_a_revoked_agent_has_kept_begins_no_session() -> Result<()> {
    needs_root();
    start_on(Lab::builder().backends(2), FILES, Options::shunt(), |service| {
        let frontend = service.lab.frontend();
        let (mut kept, greeting) = in_place_of_second_backend(service)?;
        kept.send(&[])?; // the handshake of TLS, and no frame
        let other = service.lab.hosts_of(Role::Backend).nth(1).context("a second backend")?;
        Authority::open(&service.lab.dir().join("ca")).revoke(other.name())?;
        service.service.agent_process(frontend)?.context("it has an agent")?.signal(Signal::HUP)?;
        wait_for("the certificates are read", || {
            Ok::<_, anyhow::Error>(service.service.agent(frontend)?.log().contains("read the certificates again"))
        })?;
        let _ = kept.send(&greeting); // may fail: the agent has closed the connection
        ensure!(kept.frame()?.is_none(), "the agent answers, and a session begins");
        Ok(())
    })
}

#[test]
fn a_backends_agent_has_no_say_in_anothers_handoffs() -> Result<()> {
    needs_root();
    start_on(Lab::builder().backends(2), FILES, Options::shunt(), |service| {
        let (mut session, begins) = in_place_of_second_backend(service)?;
        session.send(&begins)?;
        session.frame()?.context("the frontend's agent answers with HELLO")?;
        meddle(service, &mut session)
    })
}

/// Builds frames that a backend's agent may not send: answers to questions that nobody has asked, and reports on
/// handoffs that the agent does not have. The frames name many worker numbers (numbers of server connections) and many
/// handoffs. Returns the frames, and their number.
fn unasked() -> (Vec<u8>, u64) {
    let (mut frames, mut count) = (Vec::new(), 0);
    for (worker, handoff) in (0..8).flat_map(|worker| (0..1024u64).map(move |handoff| (worker, handoff))) {
        let mut digest = Digest::new_zeroed();
        (digest.worker, digest.handoff, digest.known) = (worker.into(), handoff.into(), 1.into());
        digest.emit(&mut frames);
        Answer { worker: worker.into(), reason: 0.into(), handoff: handoff.into() }.emit(&mut frames);
        let (reason, trace) = ((Reason::PeerLost as u32).into(), Default::default());
        Ended { worker: worker.into(), reason, handoff: handoff.into(), trace }.emit(&mut frames);
        count += 3;
    }
    (frames, count)
}

#[test]
fn a_backends_agent_that_answers_without_end_is_not_heard() -> Result<()> {
    needs_root();
    start_on(Lab::builder().backends(2), FILES, Options::shunt(), |service| {
        let (mut session, begins) = in_place_of_second_backend(service)?;
        session.send(&begins)?;
        session.frame()?.context("the frontend's agent answers with HELLO")?;
        let (before, (frames, count)) = (service.frontend_stats()?, unasked());
        session.send(&frames)?;
        let after = wait_for("all messages are dropped", || {
            let now = service.frontend_stats()?;
            let dropped = now.count("agent.unasked") - before.count("agent.unasked");
            ensure!(dropped >= count, "{dropped} of {count} were dropped");
            Ok(Some(now))
        })?;
        ensure!(after.count("agent.unread") == before.count("agent.unread"), "a server's socket was full");
        drop(session);
        let other = service.lab.hosts_of(Role::Backend).nth(1).context("a second backend")?;
        service.service.restart_agent(other)?;
        service.good_again()
    })
}

/// A clone of a machine has the machine's certificate. Machine and clone must not end each other's sessions again and
/// again.
#[test]
fn a_clone_of_a_machine_takes_no_session_from_it() -> Result<()> {
    needs_root();
    start_on(Lab::builder().backends(2), FILES, Options::shunt(), |service| {
        let frontend = service.lab.frontend();
        let one = service.lab.hosts_of(Role::Backend).next().context("a backend")?;
        let other = service.lab.hosts_of(Role::Backend).nth(1).context("a second backend")?;
        let clone = Impostor::with_certificate_of(service.lab, one.name())?;
        let sessions = service.counted("agent.sessions")?;
        let greeting = hello(one.name(), Some(SocketAddr::new(other.address().into(), 61_000)));
        for _ in 0..5 {
            let answer = clone.connect(other, frontend)?.ask(&greeting)?;
            ensure!(matches!(Frame::parse(&answer), Ok(Some((Frame::Refused(_), _)))), "not refused: {answer:?}");
        }
        let begun = service.counted("agent.sessions")? - sessions;
        ensure!(begun == 0, "{begun} sessions began");
        let addresses = [one, other].map(|host| host.service_address().map(|address| address.to_string()));
        let are_told = |line: &str| addresses.iter().flatten().all(|address| line.contains(address.as_str()));
        wait_for("the log names both machines once", || {
            let log = service.service.agent(frontend)?.log();
            let said = log.lines().filter(|line| line.contains("two machines use the certificate")).collect::<Vec<_>>();
            ensure!(said.len() == 1 && are_told(said[0]), "not said once with both addresses: {said:?}");
            Ok(())
        })?;
        service.still_good()
    })
}

/// A backend's agent lists once in a session the servers in whose name it sends (SPEAKS_FOR). If the agent sends this
/// list again, the session ends. Otherwise nginx workers would take the session for a new one at each repetition, and
/// refuse the session's offers.
#[test]
fn a_backends_agent_says_once_as_which_servers_it_sends() -> Result<()> {
    needs_root();
    start_on(Lab::builder().backends(2), FILES, Options::shunt(), |service| {
        let (mut session, begins) = in_place_of_second_backend(service)?;
        let mut again = Vec::new();
        Prefixes::default().emit(&mut again);
        session.send(&[&begins[..], &again[..]].concat())?;
        session.wait_for_ping()?;
        // Any message keeps a session alive, so only the repetition of SPEAKS_FOR can be the reason for the end.
        wait_for("the session ends", || session.send(&again).is_err())
    })
}

/// While a client downloads, sends messages about handoffs that another backend's agent has. ENDED has guessed worker
/// numbers and handoff numbers. SPACING names the true addresses and ports of the frontend's connections.
fn meddle(service: &mut Running<'_>, session: &mut Connection) -> Result<()> {
    let (client, frontend) = (service.lab.client(), service.lab.frontend());
    let mut slow = Fetch::new(service.service.chain().server());
    (slow.read_bytes, slow.pause) = (64 << 10, std::time::Duration::from_millis(5));
    let fetched = std::thread::scope(|scope| {
        let reader = scope.spawn(|| slow.run(client, &["/7m", "/7m"]));
        while !reader.is_finished() {
            let mut frames = Vec::new();
            for flow in flows_to(frontend, 80)? {
                spacing(flow, SocketAddr::new(frontend.address().into(), 80)).emit(&mut frames);
            }
            for worker in 0..8 {
                for handoff in 0..64u64 {
                    let reason = (Reason::FileChanged as u32).into();
                    let trace = Default::default();
                    Ended { worker: worker.into(), reason, handoff: handoff.into(), trace }.emit(&mut frames);
                }
            }
            session.send(&frames).with_context(|| format!("the session ended: {}", service.service.explain()))?;
            std::thread::sleep(std::time::Duration::from_millis(20)); // the pace of the attack
        }
        let fetched = reader.join().expect("the reader's thread");
        fetched.with_context(|| service.service.explain())
    })?;
    service.whole(&fetched)?;
    let stats = service.frontend_stats()?;
    ensure!(stats.count("servers.aborted") == 0, "aborted: {}", stats.under("servers"));
    ensure!(stats.count("servers.shortcuts") > 0, "nothing to meddle with: {}", stats.under("servers"));
    Ok(())
}

fn spacing(client: SocketAddr, server: SocketAddr) -> Spacing {
    let mut spacing = Spacing::new_zeroed();
    (spacing.client_address, spacing.client_port) = (Address::from(client.ip()), client.port().to_be_bytes());
    (spacing.server_address, spacing.server_port) = (Address::from(server.ip()), server.port().to_be_bytes());
    spacing.bytes = (1 << 31).into();
    spacing
}

/// Returns the clients that are connected to a port of a host.
fn flows_to(host: &shunt_lab::Host, port: u16) -> Result<Vec<SocketAddr>> {
    Ok(crate::segments::connections(host)?
        .into_iter()
        .filter(|(local, _)| local.port() == port)
        .map(|(_, remote)| remote)
        .collect())
}
