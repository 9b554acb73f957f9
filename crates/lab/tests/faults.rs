//! Faults around a handoff: a body is whole, or the client sees that it is not. A *handoff* lets a backend send a body
//! on the client's connection.

mod service;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use service::{Running, needs_root, start};
use shunt_lab::faults::Client;
use shunt_lab::{Ending, Fetch, Host, TcpSocket, fetch, file_sha256};
use shunt_testbed::wait_for;

fn slow(service: &Running<'_>) -> Fetch {
    let mut fetch = Fetch::new(service.service.chain().server());
    fetch.read_bytes = 32 << 10;
    fetch.pause = Duration::from_millis(10);
    fetch
}

/// Changes a file while a slow client reads it. The client must get a reset, and not take a part for the whole.
fn spoil(change: impl Fn(&File) -> Result<()>) -> Result<()> {
    needs_root();
    start(0, |service| {
        let file = OpenOptions::new().write(true).open(service.files.join("7m"))?;
        let client = service.lab.client();
        let outcome = std::thread::scope(|scope| {
            let reader = scope.spawn(|| slow(service).run(client, &["/7m"]));
            let changed = service.until_sending(true).and_then(|()| change(&file));
            (changed, reader.join())
        });
        outcome.0?;
        match outcome.1 {
            Ok(Ok(_)) => bail!("the client took a changed file for the whole"),
            Ok(Err(error)) => ensure!(format!("{error:#}").contains("reset"), "not a reset: {error:#}"),
            Err(_) => bail!("the reader panicked"),
        }
        // The service still works.
        service.whole(&fetch(client, service.service.chain().server(), &["/64k", "/1m"])?)
    })
}

#[test]
fn a_file_truncated_in_flight_resets() -> Result<()> {
    spoil(|file| Ok(file.set_len(3 << 20)?))
}

#[test]
fn a_file_overwritten_in_flight_resets() -> Result<()> {
    spoil(|file| Ok(file.write_all_at(&[0x55; 4096], 6 << 20)?))
}

/// A growing file may be a log, a recording or an upload. The client gets as much as the header said, as from plain
/// nginx.
#[test]
fn a_file_that_grows_in_flight_is_sent_as_far_as_it_was() -> Result<()> {
    needs_root();
    start(0, |service| {
        let path = service.files.join("7m");
        let (old, client) = (file_sha256(&path)?, service.lab.client());
        let mut file = OpenOptions::new().append(true).open(&path)?;
        let outcome = std::thread::scope(|scope| {
            let reader = scope.spawn(|| slow(service).run(client, &["/7m"]));
            let mut grow = || -> Result<()> {
                service.until_sending(true)?;
                while !reader.is_finished() {
                    file.write_all(b"one more line\n")?;
                    std::thread::sleep(Duration::from_millis(5)); // the pace of the writer
                }
                Ok(())
            };
            (grow(), reader.join())
        });
        outcome.0?;
        let Ok(fetched) = outcome.1 else { bail!("the reader panicked") };
        ensure!(fetched?[0].sha256 == old, "other bytes");
        service.no_fallback()
    })
}

#[test]
fn a_file_replaced_in_flight_is_sent_as_it_was() -> Result<()> {
    needs_root();
    start(0, |service| {
        let old = file_sha256(service.files.join("7m"))?;
        let client = service.lab.client();
        let fetched = std::thread::scope(|scope| {
            let reader = scope.spawn(|| slow(service).run(client, &["/7m"]));
            let replaced = service.until_sending(true).and_then(|()| {
                let other = service.files.join("other");
                std::fs::write(&other, [1; 100_000])?;
                Ok(std::fs::rename(&other, service.files.join("7m"))?)
            });
            (replaced, reader.join())
        });
        fetched.0?;
        let Ok(Ok(fetched)) = fetched.1 else { bail!("the reader failed") };
        ensure!(fetched[0].sha256 == old, "bytes of another file");
        Ok(())
    })
}

/// Drops all packets that the client sends, or lets them pass again if `heard` is true. The client still gets others'
/// packets.
fn client_is_heard(service: &Running<'_>, heard: bool) -> Result<()> {
    let mut tc = Command::new("tc");
    let device = service.lab.client().ports()[0].device.as_str();
    // The bucket is so small that no packet fits into it.
    let bucket = ["root", "tbf", "rate", "1kbit", "burst", "10", "limit", "10"];
    if heard {
        tc.args(["qdisc", "del", "dev", device, "root"]);
    } else {
        tc.args(["qdisc", "add", "dev", device]).args(bucket);
    }
    service.lab.client().check(tc).map(drop)
}

/// Waits until the value that `of` computes from a host's sockets has not changed in ten looks in a row.
fn until_settled(host: &Host, of: impl Fn(&[TcpSocket]) -> u64) -> Result<()> {
    let (mut last, mut same) = (u64::MAX, 0);
    wait_for("the bytes in the sockets stay the same", || {
        let now = of(&host.tcp_sockets()?);
        same = if now == last { same + 1 } else { 0 };
        last = now;
        ensure!(same >= 10, "{now} bytes, and still changing");
        Ok(())
    })
}

/// The client's last ACKs are lost. Then the backend is lost, so nobody retransmits, and nothing makes the client send
/// an ACK any more. When the frontend resets the connection, the client has more than the frontend knows.
fn reset_after_lost_acks(service: &mut Running<'_>, fills_window: bool) -> Result<()> {
    let lab = service.lab;
    let server = service.service.chain().server();
    let mut client = Client::connect(lab.client(), server, None)?;
    let signal_agent = |service: &mut Running<'_>, signal| -> Result<()> {
        service.service.agent_process(lab.backend())?.context("the backend has an agent")?.signal(signal)
    };
    if fills_window {
        client.ask("/7m", "7m", 7 << 20);
        client.read_until(100_000, Duration::from_secs(60))?;
        client_is_heard(service, false)?;
    } else {
        // The backend sends an initial congestion window at most, which is less than the client's window.
        signal_agent(service, Signal::STOP)?;
        client.ask("/7m", "7m", 7 << 20);
        client.read_until(0, Duration::from_secs(60))?;
        until_settled(lab.frontend(), |sockets| sockets.iter().map(|socket| socket.unacknowledged_bytes).sum())?;
        client_is_heard(service, false)?;
        signal_agent(service, Signal::CONT)?;
    }
    let unread = |sockets: &[TcpSocket]| sockets.iter().map(|socket| socket.unread_bytes).sum();
    // On a busy machine, some time passes between the signal to the agent and the first bytes.
    wait_for("the body begins to arrive", || Ok(unread(&lab.client().tcp_sockets()?) > 0))?;
    until_settled(lab.client(), unread)?;
    let backend = service.service.chain_mut().process(lab.backend().name()).context("the backend has a server")?;
    backend.signal(Signal::KILL)?;
    let before = service.counted("frontend.fe_cancelled")?;
    service.service.kill_agent(lab.backend())?;
    // The backend's kernel retransmits segments. Without the cut, they would make the client send an ACK that arrives
    // as soon as the client's packets pass again.
    let cable = lab.backend().ports()[0].device.as_str();
    lab.cut(lab.backend(), cable)?;
    wait_for("the frontend resets its client", || Ok(service.counted("frontend.fe_cancelled")? > before))?;
    client_is_heard(service, true)?;
    // The test reads nothing from the connection meanwhile: reading might open the client's window, and the client
    // would then send an ACK.
    wait_for("the client's connection ends", || {
        let is_open = lab.client().tcp_sockets()?.iter().any(|socket| socket.remote == server && socket.inode != 0);
        ensure!(!is_open, "the client still has its connection");
        Ok(())
    })?;
    let ending = client.finish(Duration::from_secs(1))?;
    ensure!(matches!(ending, Ending::Reset(_)), "{ending}");
    lab.join(lab.backend(), cable)?;
    service.service.restart_agent(lab.backend())?;
    service.service.chain_mut().restart(lab.backend())?;
    service.good_again()
}

#[test]
fn a_client_whose_last_acks_were_lost_is_reset_all_the_same() -> Result<()> {
    needs_root();
    start(0, |service| {
        reset_after_lost_acks(service, true).context("with its window full")?;
        // On a busy machine, the frontend may have got an ACK of the last bytes. Then its first reset has the right
        // sequence number, and the client sends no challenge ACK (RFC 5961, 3.2). So the case is tried up to 5 times.
        for _ in 0..5 {
            let before = service.counted("frontend.fe_in_ended")?;
            reset_after_lost_acks(service, false).context("with room in its window")?;
            if service.counted("frontend.fe_in_ended")? > before {
                return Ok(());
            }
        }
        bail!("not the reset for its challenge ACK was what it took")
    })
}

#[test]
fn a_killed_frontend_agent_is_not_missed() -> Result<()> {
    needs_root();
    start(0, |service| {
        let (client, lab) = (service.lab.client(), service.lab);
        let server = service.service.chain().server();
        service.whole(&fetch(client, server, &["/64k", "/1m"])?)?;
        service.service.kill_agent(lab.frontend())?;
        service.whole(&fetch(client, server, &["/64k", "/1m"])?)?;
        service.service.restart_agent(lab.frontend())?;
        service.good_again()
    })
}

#[test]
fn a_killed_backend_agent_is_not_missed() -> Result<()> {
    needs_root();
    start(0, |service| {
        let (client, lab) = (service.lab.client(), service.lab);
        let server = service.service.chain().server();
        service.whole(&fetch(client, server, &["/64k", "/1m"])?)?;
        service.service.kill_agent(lab.backend())?;
        service.whole(&fetch(client, server, &["/64k", "/1m"])?)?;
        service.service.restart_agent(lab.backend())?;
        service.good_again()
    })
}

#[test]
fn a_connection_survives_the_restart_of_both_agents() -> Result<()> {
    needs_root();
    start(0, |service| {
        let lab = service.lab;
        let server = service.service.chain().server();
        let reader = std::thread::scope(|scope| {
            // Pauses between reads make the connection's responses last until after the restarts.
            let mut fetch = Fetch::new(server);
            fetch.pause = Duration::from_millis(150);
            let paths = ["/64k", "/32k", "/64k", "/32k", "/64k", "/32k", "/64k", "/32k", "/64k", "/32k", "/1k", "/64k"];
            let reader = scope.spawn(move || fetch.run(lab.client(), &paths));
            std::thread::sleep(Duration::from_millis(400)); // so that the restarts come amid the responses
            let restarted = [lab.frontend(), lab.backend()].into_iter().try_for_each(|host| {
                service.service.kill_agent(host)?;
                std::thread::sleep(Duration::from_millis(100)); // the subject of the test: a time without an agent
                service.service.restart_agent(host)
            });
            (restarted, reader.join())
        });
        reader.0?;
        match reader.1 {
            Ok(fetched) => service.whole(&fetched?),
            Err(_) => bail!("the reader panicked"),
        }
    })
}

/// Both agents stand still at the same time, for longer than four heartbeats. This happens on virtual machines that are
/// moved to another host, or whose host has no core for them.
#[test]
fn machines_that_stand_still_together_lose_no_session() -> Result<()> {
    needs_root();
    start(0, |service| {
        let mut hosts = [service.lab.frontend(), service.lab.backend()];
        for _ in 0..4 {
            for (signal, then) in
                [(Signal::STOP, Duration::from_millis(1500)), (Signal::CONT, Duration::from_millis(500))]
            {
                for host in hosts {
                    service.service.agent_process(host)?.context("an agent")?.signal(signal)?;
                }
                std::thread::sleep(then); // the subject of the test: the time for which they stand still
            }
            hosts.reverse();
        }
        for host in hosts {
            let lost = service.service.stats(host)?.count("agent.sessions_lost");
            ensure!(lost == 0, "{}'s agent lost {lost} sessions", host.name());
        }
        service.still_good()
    })
}

#[test]
fn reload_and_quit_let_bodies_finish() -> Result<()> {
    needs_root();
    start(1, |service| {
        let (client, lab) = (service.lab.client(), service.lab);
        let slow = slow(service);
        let fetched = std::thread::scope(|scope| {
            let reader = scope.spawn(|| slow.run(client, &["/7m"]));
            let sends = service.until_sending(true);
            for host in lab.tiers() {
                if let Some(nginx) = service.service.chain_mut().process(host.name()) {
                    nginx.signal(Signal::HUP)?;
                }
            }
            sends?;
            Ok::<_, anyhow::Error>(reader.join())
        })?;
        match fetched {
            Ok(fetched) => service.whole(&fetched?)?,
            Err(_) => bail!("the reader panicked"),
        }
        service.whole(&fetch(client, service.service.chain().server(), &["/64k", "/1m"])?)
    })
}

#[test]
fn a_client_that_goes_away_leaves_nothing() -> Result<()> {
    needs_root();
    start(0, |service| {
        let server = service.service.chain().server();
        let client = service.lab.client();
        for _ in 0..20 {
            client.run(|| -> Result<()> {
                let mut stream = std::net::TcpStream::connect(server)?;
                stream.write_all(b"GET /7m HTTP/1.1\r\nHost: x\r\n\r\n")?;
                std::thread::sleep(Duration::from_millis(20)); // then the client leaves, wherever in the body it is
                Ok(()) // closes with unread bytes, so the client's kernel sends a reset
            })??;
        }
        service.until_sending(false).context("senders are left")?;
        service.whole(&fetch(client, server, &["/64k", "/1m"])?)
    })
}
