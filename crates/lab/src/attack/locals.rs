//! Other users' processes on the service's machines: at the agent's Unix socket.

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

/// Of no account.
const NOBODY: u32 = 65534;
/// Connections that it keeps open and says nothing on.
const HELD: usize = 300;
const PAUSE: Duration = Duration::from_millis(5);
/// Its silent connections are made anew this often.
const HELD_LIFE: Duration = Duration::from_secs(5);
/// Larger than every message.
const MESSAGE_BYTES: usize = 8 << 10;

/// Talks to a host's agent as a user who is in no list, until the attack is over.
pub(super) fn attack(host: &Host, mut random: Random, hostile: &Hostile) -> Result<()> {
    let socket = ShuntPart::agent_socket(host);
    host.run(|| {
        // Of this thread alone, which ends with this: raw system calls, not libc's, which are the process's.
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

/// Where the agent lets it.
fn connect(path: &Path) -> Option<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
    Some(socket)
}

/// A message: whole, cut short, or of chance.
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
