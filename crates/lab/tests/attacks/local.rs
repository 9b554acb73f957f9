//! Attacks by processes on a machine with an agent: by other users' processes, and by processes that may connect to the
//! agent. A *flow* is the frontend's entry for a client's connection. A *handoff* lets a backend send a payload on a
//! client's connection.

use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use shunt_host::packets;
use shunt_lab::{Disk, Host, Lab, Options, ShuntPart};
use shunt_testbed::wait_for;
use shunt_wire::Endpoint;
use shunt_wire::local::{Channel, Handoff, Header, VERSIONS, kind};
use zerocopy::{FromZeros, IntoBytes};

use crate::service::held::Held;
use crate::service::{FILES, Running, connect_to_agent, needs_root, start, start_on};

/// The system's Python, which every user can run.
const PYTHON: &str = "/usr/bin/python3";
/// User ID of `nobody`, whom no configuration in this file lets in.
const NOBODY: u32 = 65534;
/// User ID that `observers` in the configuration names.
const OBSERVER: u32 = 65533;

/// Runs a Python script as a user, in the control group of the host's servers. Returns what the script prints.
fn python_as(user: u32, host: &Host, script: &str, arguments: &[String]) -> Result<String> {
    let mut command = Command::new("setpriv");
    command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups", PYTHON, "-c", script]);
    command.args(arguments);
    let mut process = host.spawn(command)?;
    let status = process.wait(Duration::from_secs(20))?;
    ensure!(status.success(), "{}", process.log());
    Ok(process.log())
}

/// Python script that sends messages (in hexadecimal) to the agent. It prints the kind of each answer, and the reason
/// in an ENDED (6). It stops when the agent closes the connection or answers with counters (STATS_TEXT, 10).
const ASK: &str = "
import socket, struct, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.settimeout(5)
s.connect(sys.argv[1])
try:
    for message in sys.argv[2:]:
        s.send(bytes.fromhex(message))
except BrokenPipeError:
    pass  # it has answered and closed before
packet = True
while packet:
    try:
        packet = s.recv(65536)
    except ConnectionResetError:
        continue  # it has closed with our message unread; what it said before comes next
    if packet:
        kind, size = struct.unpack_from('=II', packet)
        print(kind, struct.unpack_from('=QI', packet, 8)[1] if kind == 6 else '')
        if kind == 10: break
";

fn ask(user: u32, host: &Host, messages: &[&[u32]]) -> Result<String> {
    let hex =
        |words: &&[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).map(|byte| format!("{byte:02x}")).collect();
    let socket = ShuntPart::agent_socket(host);
    let mut arguments = vec![socket.to_str().context("a path in UTF-8")?.to_owned()];
    arguments.extend(messages.iter().map(hex));
    python_as(user, host, ASK, &arguments)
}

/// Lets every user reach the socket's directory, so that only the socket's own mode counts.
fn open_way(service: &Running<'_>, host: &Host) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let socket = ShuntPart::agent_socket(host);
    for directory in socket.ancestors().skip(1).take_while(|directory| directory.starts_with(service.lab.dir())) {
        let mode = std::fs::metadata(directory)?.permissions().mode() | 0o011;
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

/// All servers' connections are in one table of flows. If a server could name another server's connection in a message
/// to the agent, a backend would send a payload on that connection.
#[test]
fn a_server_cannot_hand_off_another_servers_connection() -> Result<()> {
    needs_root();
    start(0, |service| {
        let (frontend, backend) = (service.lab.frontend(), service.lab.backend());
        let held = service.lab.client().run(|| Held::ask(service, "7m", ""))??;
        let claims = || -> Result<u64> { Ok(service.service.stats(backend)?.count("agent.claims")) };
        wait_for("there is a claim of the connection's own server", || Ok(claims()? > 0))?;
        let before = claims()?;
        let attacker = connect_to_agent(frontend)?;
        let say = |bytes: &[u8]| rustix::net::send(&attacker, bytes, rustix::net::SendFlags::empty());
        say(Channel::Control.hello().as_bytes())?;
        let epochs = [2, 4, 6, 8];
        for epoch in epochs {
            let mut named = Handoff { header: Handoff::HEADER, epoch, ..Handoff::new_zeroed() };
            (named.handoff, named.length) = (77, 1000);
            (named.flow.mss, named.flow.snd_wnd, named.flow.snd_cwnd) = (1448, 65535, 10);
            let (client, server) = (Endpoint::from(held.local()?), Endpoint::from(service.service.chain().server()));
            (named.flow.client_address, named.flow.client_port) = (client.address, client.port_be);
            (named.flow.server_address, named.flow.server_port) = (server.address, server.port_be);
            say(named.as_bytes())?;
        }
        service.until_counted("agent.handoffs_unknown", epochs.len() as u64)?;
        ensure!(claims()? == before, "a claim of another server's connection went out");
        held.finish(service)?;
        service.still_good()
    })
}

/// HELLO, as 32-bit words. The halves of the third word are the oldest and the newest version, which are equal here.
const HELLO: &[u32] = &[kind::HELLO, 24, VERSIONS.newest as u32 * 0x1_0001, 1, 0, 0];
const STATS: &[u32] = &[kind::STATS, 8];

#[test]
fn another_users_process_is_no_server() -> Result<()> {
    needs_root();
    let mut options = Options::shunt();
    options.settings.agent = "users = [\"www-data\"]\nobservers = [65533]\n";
    start_on(Lab::builder(), FILES, options, |service| {
        let frontend = service.lab.frontend();
        open_way(service, frontend)?;
        // The agent refuses a request by ENDED (6) with the reason "not allowed" (15). It refuses every request of a
        // user whom no setting names. An observer gets the counters (STATS_TEXT, 10), but is refused as a server.
        for messages in [&[HELLO][..], &[STATS]] {
            let answer = ask(NOBODY, frontend, messages)?;
            ensure!(answer.trim() == "6 15", "nobody: {answer:?}");
        }
        let answer = ask(OBSERVER, frontend, &[STATS])?;
        ensure!(answer.trim() == "10", "the observer's counters: {answer:?}");
        let answer = ask(OBSERVER, frontend, &[HELLO])?;
        ensure!(answer.trim() == "6 15", "the observer as a server: {answer:?}");
        let refused = service.counted("agent.refused_callers")?;
        ensure!(refused == 3, "{refused} refusals counted");
        wait_for("the log names the setting", || Ok(service.service.agent(frontend)?.log().contains("`observers`")))?;
        let said = stats_as_nobody(frontend)?;
        ensure!(said.contains("`observers`"), "{said}");
        service.still_good()
    })
}

/// Returns what `shunt stats` prints for a user that may not ask.
fn stats_as_nobody(host: &Host) -> Result<String> {
    let mut command = Command::new("setpriv");
    command.args([&format!("--reuid={NOBODY}"), &format!("--regid={NOBODY}"), "--clear-groups"]);
    command.arg(shunt_lab::shuntd_program()?.with_file_name("shunt")).args(["stats", "--socket"]);
    command.arg(ShuntPart::agent_socket(host));
    let output = host.output(command)?;
    ensure!(!output.status.success(), "it was answered");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn without_a_list_the_socket_is_its_owners() -> Result<()> {
    needs_root();
    start(0, |service| {
        let frontend = service.lab.frontend();
        open_way(service, frontend)?;
        let error = ask(NOBODY, frontend, &[STATS]).expect_err("the socket's mode keeps others away");
        ensure!(format!("{error:#}").contains("PermissionError"), "{error:#}");
        let said = stats_as_nobody(frontend)?;
        ensure!(said.contains("`observers`"), "{said}");
        Ok(())
    })
}

/// Python script that calls setsockopt with SHUNT_STATE on a connection of its own, with each ring number from 0 to 63.
/// (A ring is a BPF ring buffer by which the kernel tells one server of completed payloads.) It prints the set of the
/// kernel's answers.
const NAME_RINGS: &str = "
import errno, socket, struct, sys
s = socket.create_connection((sys.argv[1], 80))
said = set()
for ring in range(64):
    try:
        s.setsockopt(0x53485554, 3, struct.pack('=I', ring))
        said.add('good')
    except OSError as error:
        said.add(errno.errorcode[error.errno])
print(*sorted(said))
";

/// If the last descriptor of a FUSE file is closed, close(2) waits for the program that serves the file. So a process
/// that may connect could make the agent wait: it sends such a descriptor with a message that needs none.
#[test]
fn descriptors_whose_closing_hangs_stop_nobody() -> Result<()> {
    needs_root();
    start(0, |service| {
        let frontend = service.lab.frontend();
        let disk = Disk::mount(&service.files, &service.lab.dir().join("hanging"))?;
        let file = std::fs::File::open(service.lab.dir().join("hanging/1k"))?;
        let agents = [frontend, service.lab.backend()].map(connect_to_agent);
        disk.set_closes_hang(true);
        for agent in &agents {
            let agent = agent.as_ref().map_err(|error| anyhow!("{error:#}"))?;
            let stats = Header { kind: kind::STATS, size: size_of::<Header>() as u32 };
            let descriptors = [file.as_fd(), file.as_fd()];
            ensure!(packets::send(agent, stats.as_bytes(), &descriptors)?, "the agent does not read");
        }
        let good = service.still_good().and_then(|()| service.frontend_stats().map(drop));
        disk.set_closes_hang(false);
        drop(file);
        good
    })
}

#[test]
fn a_ring_is_its_users_alone() -> Result<()> {
    needs_root();
    start(0, |service| {
        let frontend = service.lab.frontend();
        let address = [frontend.address().to_string()];
        // nginx's worker, to which the ring belongs, runs as root here.
        let own = python_as(0, frontend, NAME_RINGS, &address)?;
        ensure!(own.trim() == "EPERM good", "its own user: {own:?}");
        let other = python_as(NOBODY, frontend, NAME_RINGS, &address)?;
        ensure!(other.trim() == "EPERM", "another user: {other:?}");
        service.still_good()
    })
}
