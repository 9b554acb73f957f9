//! Connections that other agents make, until each has shown its certificate and said what it is for.
//!
//! Whoever reaches the port can begin a handshake, which costs this agent's one thread about a fifth of a millisecond. So a
//! connection has little time and a place among few; those from addresses that no peer is dialled at share a part of
//! the places, and so many handshakes a second.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use shunt_wire::local::Reason;
use shunt_wire::peer::{Frame, Hello, Refused};
use slab::Slab;

use crate::agent::Agent;
use crate::poll::{Interest, Source};
use crate::transport::{Transport, TransportError};

/// How long a new connection may take to say what it is for.
const PATIENCE: Duration = Duration::from_secs(5);
/// Places in all.
const PLACES: usize = 256;
/// Of those, for addresses that are no peer's: together, and for each.
const STRANGERS: usize = 64;
const STRANGERS_AT_ONE_ADDRESS: usize = 8;
/// Handshakes a second with strangers.
const STRANGERS_A_SECOND: u32 = 50;
/// Refusals that the log has: the same one is told again after that time, or when so many others came in between.
const REFUSALS: usize = 64;
const REFUSED_AGAIN: Duration = Duration::from_secs(3600);

/// An accepted connection before its first frame.
pub(crate) struct Incoming {
    pub(crate) transport: Transport,
    pub(crate) from: IpAddr,
    /// No peer is dialled at that address.
    stranger: bool,
    deadline: Instant,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Waiting {
    places: Slab<Incoming>,
    /// Strangers that came in the second that began then.
    second: Option<(Instant, u32)>,
    refusals: OncePerSecond,
    told: Told,
}

/// The refusals that the log has told of, by address and reason: who tries again every few seconds is told of once.
#[derive(Default)]
struct Told(VecDeque<(IpAddr, String, Instant)>);

impl Told {
    fn is_news(&mut self, from: IpAddr, why: &str, now: Instant) -> bool {
        self.0.retain(|(_, _, at)| now.duration_since(*at) < REFUSED_AGAIN);
        !self.0.iter().any(|(whom, said, _)| *whom == from && said == why)
    }

    fn note(&mut self, from: IpAddr, why: &str, now: Instant) {
        self.0.truncate(REFUSALS - 1);
        self.0.push_front((from, why.to_owned(), now));
    }
}

/// Says when something may be logged, so often in a second: who causes it must not fill the disk.
#[derive(Default)]
pub(crate) struct PerSecond<const MOST: u32>(Option<(Instant, u32)>);

pub(crate) type OncePerSecond = PerSecond<1>;

/// Says when something may be logged that lasts, or comes again and again: after [`SELDOM`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seldom(Option<Instant>);

/// Between two lines about the same matter.
pub(crate) const SELDOM: Duration = Duration::from_secs(60);

impl Seldom {
    pub(crate) fn may_speak(&mut self, now: Instant) -> bool {
        let is_due = self.0.is_none_or(|said| now.duration_since(said) >= SELDOM);
        if is_due {
            self.0 = Some(now);
        }
        is_due
    }
}

impl<const MOST: u32> PerSecond<MOST> {
    pub(crate) fn may_speak(&mut self, now: Instant) -> bool {
        let begun = self.0.filter(|(begun, _)| now.duration_since(*begun) < Duration::from_secs(1));
        let (begun, spoken) = begun.unwrap_or((now, 0));
        self.0 = Some((begun, spoken.saturating_add(1)));
        spoken < MOST
    }
}

impl Waiting {
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    fn has_place(&mut self, from: IpAddr, stranger: bool, now: Instant) -> bool {
        if self.places.len() >= PLACES {
            return false;
        }
        if !stranger {
            return true;
        }
        let strangers = self.places.iter().filter(|(_, incoming)| incoming.stranger);
        let (all, here) =
            strangers.fold((0, 0), |(all, here), (_, incoming)| (all + 1, here + usize::from(incoming.from == from)));
        all < STRANGERS && here < STRANGERS_AT_ONE_ADDRESS && self.is_within_rate(now)
    }

    /// Whether a refusal is logged now. One that is kept back, because another was logged in that second, is news next time.
    fn may_tell(&mut self, from: IpAddr, why: &str, now: Instant) -> bool {
        let may = self.told.is_news(from, why, now) && self.refusals.may_speak(now);
        if may {
            self.told.note(from, why, now);
        }
        may
    }

    fn is_within_rate(&mut self, now: Instant) -> bool {
        let fresh = |began: &Instant| now.duration_since(*began) < Duration::from_secs(1);
        let (began, before) = self.second.filter(|(began, _)| fresh(began)).unwrap_or((now, 0));
        self.second = Some((began, before + 1));
        before < STRANGERS_A_SECOND
    }
}

impl Agent {
    pub(crate) fn add_incoming(&mut self, stream: TcpStream, from: SocketAddr) {
        let from = from.ip().to_canonical();
        let stranger = !self.config.is_peers_address(from);
        if !self.incoming.has_place(from, stranger, self.now) {
            self.counts.incoming_limit += 1;
            self.say_refused(from, "too many connections that have not said what they are");
            return;
        }
        let Ok(tls) = self.credentials.accept() else {
            return;
        };
        let entry = self.incoming.places.vacant_entry();
        let watched = Transport::accepted(stream, tls).and_then(|transport| {
            self.poll.set(transport.descriptor(), Source::Incoming(entry.key()), Interest::Readable)?;
            Ok(transport)
        });
        if let Ok(transport) = watched {
            entry.insert(Incoming { transport, from, stranger, deadline: self.now + PATIENCE });
        }
    }

    pub(crate) fn on_incoming(&mut self, index: usize) {
        match self.read_incoming(index) {
            Ok(None) => {}
            Ok(Some(Frame::Hello(hello))) => {
                let incoming = self.incoming.places.remove(index);
                self.admit(incoming, &hello);
            }
            Ok(Some(Frame::Fetch(fetch))) => {
                let incoming = self.incoming.places.remove(index);
                self.serve_fetch(incoming, &fetch);
            }
            Ok(Some(Frame::Store(_))) => {
                let incoming = self.incoming.places.remove(index);
                self.serve_reader(incoming);
            }
            Ok(Some(Frame::Examine(examine))) => {
                let incoming = self.incoming.places.remove(index);
                self.examine(incoming, &examine);
            }
            Ok(Some(_)) => self.refuse_at(index, Reason::Malformed),
            Err(TransportError::Refused(reason)) => self.refuse_at(index, reason),
            Err(error) => self.drop_incoming(index, &error),
        }
    }

    fn read_incoming(&mut self, index: usize) -> Result<Option<Frame>, TransportError> {
        let Some(incoming) = self.incoming.places.get_mut(index) else {
            return Ok(None);
        };
        let transport = &mut incoming.transport;
        transport.fill()?;
        let frame = transport.next_frame()?;
        // Our part of the handshake fits any socket's buffer, unless the other side takes nothing.
        let interest = if transport.flush()? { Interest::Readable } else { Interest::Both };
        self.poll.set(transport.descriptor(), Source::Incoming(index), interest)?;
        Ok(frame)
    }

    fn drop_incoming(&mut self, index: usize, error: &TransportError) {
        let Some(incoming) = self.incoming.places.try_remove(index) else {
            return;
        };
        if matches!(error, TransportError::Tls(_)) {
            self.counts.strangers += 1;
            self.say_refused(incoming.from, &error.to_string());
        }
    }

    fn refuse_at(&mut self, index: usize, reason: Reason) {
        if let Some(incoming) = self.incoming.places.try_remove(index) {
            self.refuse(incoming, reason);
        }
    }

    /// Of an agent with a certificate: it is told why.
    pub(crate) fn refuse(&mut self, incoming: Incoming, reason: Reason) {
        self.refuse_because(incoming, reason, &reason.to_string());
    }

    /// The same, for a reason that only this agent's log has in full.
    pub(crate) fn refuse_because(&mut self, incoming: Incoming, reason: Reason, why: &str) {
        self.counts.malformed_peer += 1;
        self.say_refused(incoming.from, why);
        self.refuse_fetch(incoming, reason);
    }

    /// Not a fault of its own: an offer may expire.
    pub(crate) fn refuse_fetch(&mut self, incoming: Incoming, reason: Reason) {
        let mut transport = incoming.transport;
        Refused { reason: (reason as u32).into() }.emit(transport.output());
        let _ = transport.finish();
    }

    fn say_refused(&mut self, from: IpAddr, why: &str) {
        if self.incoming.may_tell(from, why, self.now) {
            tracing::warn!(%from, why, "refused a connection to the agents' port");
        }
    }

    /// Which peer a session is of: its certificate's, which must be the one that it names.
    ///
    /// # Errors
    /// A sentence.
    pub(crate) fn peer_of(&self, incoming: &Incoming, hello: &Hello) -> Result<usize, String> {
        let name = hello.name().unwrap_or_default();
        if !incoming.transport.is_of(name) {
            return Err(format!("it calls itself \"{name}\", which its certificate is not of"));
        }
        let index = self.config.peers.iter().position(|peer| peer.name == name);
        index.ok_or_else(|| format!("\"{name}\" is no [[peer]] here: add it to the configuration, and restart"))
    }

    /// Gives up on who says nothing.
    pub(crate) fn tend_incoming(&mut self) {
        let now = self.now;
        self.incoming.places.retain(|_, incoming| incoming.deadline > now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_are_slowed_down_and_peers_are_not() {
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        let from = "192.0.2.1".parse().unwrap();
        let admitted = (0..1000).filter(|_| waiting.has_place(from, true, now)).count();
        assert_eq!(admitted, STRANGERS_A_SECOND as usize);
        assert!(waiting.has_place(from, false, now));
        assert!(waiting.has_place(from, true, now + Duration::from_secs(1)));
    }

    #[test]
    fn who_is_refused_again_and_again_is_told_of_once() {
        let (mut waiting, mut now) = (Waiting::default(), Instant::now());
        // A second after the one before: nothing is kept back.
        let mut is_told = |last, why| {
            now += Duration::from_secs(1);
            waiting.may_tell(IpAddr::from([192, 0, 2, last]), why, now)
        };
        assert!(is_told(1, "no") && !is_told(1, "no"));
        assert!(is_told(1, "another reason") && is_told(2, "no"));
        assert!((0..=255).filter(|last| is_told(*last, "no")).count() > 200);
        now += REFUSED_AGAIN;
        assert!(waiting.told.0.len() == REFUSALS && waiting.may_tell([192, 0, 2, 255].into(), "no", now));
    }

    #[test]
    fn a_refusal_that_is_kept_back_is_told_of_later() {
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        let [one, other] = [1, 2].map(|last| IpAddr::from([192, 0, 2, last]));
        assert!(waiting.may_tell(one, "no", now) && !waiting.may_tell(other, "no", now));
        let later = now + Duration::from_secs(1);
        assert!(waiting.may_tell(other, "no", later) && !waiting.may_tell(one, "no", later));
    }

    #[test]
    fn what_strangers_cause_is_logged_so_often_in_a_second() {
        let (mut refusals, now) = (OncePerSecond::default(), Instant::now());
        assert!(refusals.may_speak(now) && !refusals.may_speak(now));
        assert!(refusals.may_speak(now + Duration::from_secs(1)));
        let mut ends = PerSecond::<3>::default();
        let spoken = (0..10).filter(|step| ends.may_speak(now + Duration::from_millis(300) * *step)).count();
        assert_eq!(spoken, 8, "three, three and two in 2.7 seconds");
    }
}
