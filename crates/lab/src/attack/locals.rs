//! Attack by other users' processes on the service's machines. The processes write to the Unix socket of the machine's
//! agent (shuntd, Shunt's daemon).

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, send, socket_with};
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_res_gid, set_thread_res_uid};
use shunt_wire::local::{Channel, Header, kind};
use zerocopy::IntoBytes;

use super::Hostile;
use crate::chain::ShuntPart;
use crate::host::Host;
use crate::random::Random;

/// User and group ID of nobody.
const NOBODY: u32 = 65534;
/// Largest number of connections that are kept open and on which nothing is sent.
const HELD: usize = 300;
const PAUSE: Duration = Duration::from_millis(5);
/// Time after which the silent connections are replaced by new ones.
const HELD_LIFE: Duration = Duration::from_secs(5);
/// Largest random body, in bytes: larger than every message.
const MESSAGE_BYTES: usize = 8 << 10;

/// Writes to a host's agent, as a user that the agent's configuration does not name, until the attack is over.
pub(super) fn attack(host: &Host, mut random: Random, hostile: &Hostile) -> Result<()> {
    let socket = ShuntPart::agent_socket(host);
    host.run(|| {
        // The raw system calls change only this thread, which ends with this attack. libc's functions would change the
        // whole process.
        let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
        set_thread_res_gid(group, group, group).context("becoming another user's group")?;
        set_thread_res_uid(user, user, user).context("becoming another user")?;
        let (mut held, mut since) = (Vec::new(), Instant::now());
        while !hostile.over.load(Ordering::Relaxed) {
            if since.elapsed() > HELD_LIFE {
                (held, since) = (Vec::new(), Instant::now());
            }
            if held.len() < HELD {
                held.extend(connect(&socket));
            }
            if let Some(one) = connect(&socket) {
                for _ in 0..1 + random.below(4) {
                    let _ = send(&one, &message(&mut random), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
                    hostile.messages.fetch_add(1, Ordering::Relaxed);
                }
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    })?
}

/// Connects to the agent; `None` if that fails.
fn connect(path: &Path) -> Option<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
    Some(socket)
}

/// A message with a random body, or with the body of HELLO. The kind and the length in the header may be wrong, or the
/// header may be missing.
fn message(random: &mut Random) -> Vec<u8> {
    let body: Vec<u8> = (0..random.below(MESSAGE_BYTES)).map(|_| random.next() as u8).collect();
    let kind = match random.below(3) {
        0 => kind::HELLO,
        1 => kind::STATS,
        _ => random.next() as u32 % 32,
    };
    let size = if random.below(4) == 0 { random.next() as u32 } else { (size_of::<Header>() + body.len()) as u32 };
    let header = Header { kind, size };
    match random.below(4) {
        0 => body,
        1 => [header.as_bytes(), &Channel::Control.hello().as_bytes()[size_of::<Header>()..]].concat(),
        _ => [header.as_bytes(), &body].concat(),
    }
}
