//! Attack by a hostile *peer*. The peers of an agent (shuntd, Shunt's daemon) are the agents of other machines. The
//! hostile one has a certificate of the service's authority, speaks the agents' protocol, and floods the agents.

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use shunt_wire::peer::{Closed, FrameHeader, Hello, Protocol, kind, padded_name};
use zerocopy::{FromZeros, IntoBytes};

use super::Hostile;
use crate::host::Host;
use crate::impostor::Impostor;
use crate::lab::Lab;
use crate::random::Random;

/// Name of the hostile peer. Between two peers, the one whose name sorts first connects to the other. This name sorts
/// before the names of the agents, so the hostile peer is the one that connects.
pub(super) const NAME: &str = "adversary";
const PAUSE: Duration = Duration::from_millis(30);
/// Number of frames in one flood.
const FLOOD: usize = 400;
/// Number of connections made at once, on which nothing is sent.
const DIALS: usize = 12;
/// Upper bounds of random frame types (`kind`), and of the random lengths of frames' bodies, in bytes.
const KINDS: usize = 32;
const BODY_BYTES: usize = 600;

/// Entry for the hostile peer in the agents' configuration. For this peer, an agent may send bodies with the peer's own
/// address only (`speaks_for`).
pub(super) const CONFIGURED: &str =
    "[[peer]]\nname = \"adversary\"\naddress = \"10.77.1.11:7440\"\nspeaks_for = [\"10.77.1.11\"]\n";

/// Attacks the agents of `targets` until the attack is over.
pub(super) fn attack(lab: &Lab, from: &Host, targets: &[&Host], mut random: Random, hostile: &Hostile) -> Result<()> {
    let own = Impostor::with_certificate_of(lab, NAME)?;
    while !hostile.over.load(Ordering::Relaxed) {
        let target = targets[random.below(targets.len())];
        let flood = flood(&mut random);
        let is_sent = match random.below(4) {
            // Several connections at once, which are closed without a message.
            0 => {
                drop((0..DIALS).map(|_| own.connect(from, target)).collect::<Vec<_>>());
                false
            }
            // A connection that does not begin with HELLO, the first message of the agents' protocol.
            1 => own.connect(from, target).is_ok_and(|mut connection| connection.send(&flood).is_ok()),
            _ => own.connect(from, target).is_ok_and(|mut connection| {
                // The agent may close the connection at any frame.
                let sent = connection.send(&hello(&mut random)).and_then(|()| connection.send(&flood));
                if sent.is_ok() {
                    std::thread::sleep(PAUSE);
                }
                sent.is_ok()
            }),
        };
        if is_sent {
            hostile.frames.fetch_add(FLOOD as u64, Ordering::Relaxed);
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

fn hello(random: &mut Random) -> Vec<u8> {
    let mut hello = Hello::new_zeroed();
    (hello.protocol, hello.name) = (Protocol::OURS, padded_name(NAME));
    hello.offer_key.fill(random.next() as u8);
    let mut frame = Vec::new();
    hello.emit(&mut frame);
    frame
}

/// A flood of frames, all of one sort, which is chosen at random.
fn flood(random: &mut Random) -> Vec<u8> {
    let mut frames = Vec::new();
    let sort = random.below(6);
    for _ in 0..FLOOD {
        match sort {
            0 | 1 => Closed { offers: (random.next() as u32 & 1).into() }.emit(&mut frames),
            2 => any(kind::CLAIM, random, &mut frames),
            3 => any(kind::ENDED, random, &mut frames),
            4 => any(random.below(KINDS) as u16, random, &mut frames),
            // Random bytes that are no frame.
            _ => frames.extend(random.next().to_le_bytes()),
        }
    }
    frames
}

/// Appends a frame of this kind with a random body.
fn any(kind: u16, random: &mut Random, frames: &mut Vec<u8>) {
    let length = match kind {
        kind::CLAIM => size_of::<shunt_wire::peer::Claim>(),
        kind::ENDED => size_of::<shunt_wire::peer::Ended>(),
        _ => random.below(BODY_BYTES),
    };
    let header =
        FrameHeader { length: ((size_of::<FrameHeader>() + length) as u32).into(), kind: kind.into(), zero: 0.into() };
    frames.extend(header.as_bytes());
    frames.extend((0..length).map(|_| random.next() as u8));
}
