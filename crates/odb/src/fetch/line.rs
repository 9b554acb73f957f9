//! A connection to a holder's store, and what is said there. Whoever has it waits for as long as something moves on it.

use std::io;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use zerocopy::FromBytes;

use super::Wanted;
use super::patience::{Call, Limit, SOME, Silence, Waiting};
use crate::channel::{Bench, Channel, is_served};
use crate::reference::{PayloadId, Reference};
use crate::store::messages::{Answer, FETCH, Request};
use crate::store::session::{ANSWERS_MAX, request};
use crate::touched::Touched;

/// A request, as it is sent.
pub(super) type Sent = [u8; size_of::<Request>()];

/// What nobody waited for is so long for who has asked for it, since that one took some of it last. Others are sent away meanwhile:
/// if each waited for a while, and threw away what comes, a program with many clients would do nothing else, and none get anything.
const KEPT: Duration = Duration::from_millis(400);

/// Who goes on with it as soon as it can, in the same turn of its program, does so within this time.
const COMES_AT_ONCE: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_millis(2);

/// What is to come of an answer that nobody waited for to its end.
#[derive(Debug)]
struct Rest {
    bytes: usize,
    /// Of which payload, and from where on.
    of: Option<(PayloadId, u64)>,
    since: Instant,
}

#[derive(Debug)]
pub(super) struct Line {
    channel: Channel,
    bench: Bench,
    rest: Rest,
    /// How long nothing has come of it.
    silence: Silence,
    /// Somebody was sent away meanwhile.
    others_wait: bool,
    /// So many bytes are asked for at a time by those who can do with some.
    some: usize,
}

impl Line {
    pub(super) fn new(channel: Channel) -> Self {
        // A batch of fetches, and shares that go back before it.
        Self {
            channel,
            bench: Bench::of(2 * ANSWERS_MAX * size_of::<Sent>()),
            rest: Rest { bytes: 0, of: None, since: Instant::now() },
            others_wait: false,
            silence: Silence::default(),
            some: *SOME.end(),
        }
    }

    /// Whether the store still serves it, without asking.
    pub(super) fn is_served(&self) -> bool {
        is_served(&self.channel)
    }

    /// Gives back shares, and fetches a batch: the payload that is gone, if one is. `tell` hears when that takes long.
    ///
    /// # Errors
    /// The connection's; TimedOut where the other end says nothing.
    pub(super) fn fetch(
        &mut self,
        returns: &mut Vec<Sent>,
        batch: &mut [&mut Wanted<'_>],
        tell: &dyn Fn(),
    ) -> io::Result<Option<PayloadId>> {
        let mut waiting = Waiting::after(std::mem::take(&mut self.silence), tell);
        self.drain(&mut waiting, &mut Limit::none())?;
        self.ask(returns, batch.iter().map(|wanted| &wanted.reference), &mut waiting)?;
        let mut gone = None;
        for wanted in batch {
            if !self.receive(wanted, &mut waiting)? {
                gone = Some(wanted.reference.payload);
            }
        }
        Ok(gone)
    }

    /// Gives back shares, where that takes no waiting, and fetches the first bytes of a payload: how many; `None`: it is gone. Fewer than are wanted, or
    /// none, only where the call has taken long and may end (see [`Limit`]).
    ///
    /// # Errors
    /// As [`Self::fetch`].
    pub(super) fn fetch_some(
        &mut self,
        returns: &mut Vec<Sent>,
        wanted: &mut Wanted<'_>,
        call: &Call<'_>,
    ) -> io::Result<Option<usize>> {
        let mut waiting = Waiting::after(std::mem::take(&mut self.silence), &|| ());
        let got = self.some(returns, wanted, &mut waiting, &mut Limit::of(call))?;
        self.silence = waiting.ends();
        Ok(got)
    }

    fn some(
        &mut self,
        returns: &mut Vec<Sent>,
        wanted: &mut Wanted<'_>,
        waiting: &mut Waiting<'_>,
        limit: &mut Limit<'_>,
    ) -> io::Result<Option<usize>> {
        let Wanted { reference, into } = wanted;
        let mut got = 0;
        if self.rest.bytes > 0 {
            // Shares have no answer that would wait for the end of that one. Nor do they wait: the store takes nothing while it gives.
            let posted = self.post(returns)?;
            returns.drain(..posted);
            let goes_on = self.rest.of == Some((reference.payload, reference.offset));
            if !goes_on && self.is_kept() && limit.ends() {
                self.send_away();
                return Ok(Some(0));
            }
            if !goes_on && (!self.drain(waiting, limit)? || limit.is_over()) {
                return Ok(Some(0));
            }
        }
        loop {
            let asked = (into.len() - got).min(self.some);
            let asks = self.rest.bytes == 0;
            if asks {
                // Each in its turn.
                if got > 0 && std::mem::take(&mut self.others_wait) && limit.ends() {
                    return Ok(Some(got));
                }
                let part = Reference { offset: reference.offset + got as u64, length: asked as u64, ..*reference };
                self.ask(returns, [&part].into_iter(), waiting)?;
                if !self.answer(&part, waiting)? {
                    return Ok(None);
                }
                self.rest.bytes = asked;
            }
            let now = self.rest.bytes.min(into.len() - got);
            let came = self.take_some(&mut into[got..got + now], waiting, limit)?;
            got += came;
            let of = Some((reference.payload, reference.offset + got as u64));
            self.rest = Rest { bytes: self.rest.bytes - came, of, since: Instant::now() };
            if asks {
                self.some = limit.next(self.some, came);
            }
            if got == into.len() || limit.is_over() {
                return Ok(Some(got));
            }
        }
    }

    /// Whether what is to come is for somebody who may come for it yet.
    fn is_kept(&self) -> bool {
        self.rest.of.is_some() && self.rest.since.elapsed() < KEPT
    }

    /// Somebody else is to come again. Where the one that it is kept for does not, as one whose client takes nothing, that would be at
    /// once, and again and again.
    fn send_away(&mut self) {
        self.others_wait = true;
        if self.rest.since.elapsed() > COMES_AT_ONCE {
            std::thread::sleep(PAUSE);
        }
    }

    /// Gives back shares, and asks for what is behind some references.
    fn ask<'b>(
        &mut self,
        returns: &mut Vec<Sent>,
        references: impl Iterator<Item = &'b Reference>,
        waiting: &mut Waiting<'_>,
    ) -> io::Result<()> {
        let mut requests = std::mem::take(returns);
        requests.extend(references.map(|reference| request(FETCH, reference, Touched::default())));
        self.put(&requests)?;
        let mut is_sent = self.channel.send(&mut self.bench, false)?;
        while !is_sent {
            waiting.wait(&self.channel, PollFlags::OUT)?;
            is_sent = self.channel.flush()?;
        }
        Ok(())
    }

    /// Takes what is left of an answer that nobody waited for. False: not all of it is there yet.
    fn drain(&mut self, waiting: &mut Waiting<'_>, limit: &mut Limit<'_>) -> io::Result<bool> {
        let mut nowhere = [0; 4096];
        while self.rest.bytes > 0 {
            let now = self.rest.bytes.min(nowhere.len());
            let took = self.take_some(&mut nowhere[..now], waiting, limit)?;
            self.rest.bytes -= took;
            self.rest.of = None;
            if took < now {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Gives back shares, as many as the socket takes now: how many.
    ///
    /// # Errors
    /// The connection's.
    pub(super) fn post(&mut self, shares: &[Sent]) -> io::Result<usize> {
        self.channel.waits(false);
        let posted = self.post_some(shares);
        self.channel.waits(true);
        posted
    }

    fn post_some(&mut self, shares: &[Sent]) -> io::Result<usize> {
        let (mut posted, mut chunks) = (0, shares.chunks(ANSWERS_MAX));
        let mut takes_more = self.channel.flush()?;
        while takes_more && let Some(chunk) = chunks.next() {
            self.put(chunk)?;
            takes_more = self.channel.send(&mut self.bench, false)?;
            posted += chunk.len();
        }
        Ok(posted)
    }

    fn put(&mut self, requests: &[Sent]) -> io::Result<()> {
        let bytes = requests.as_flattened();
        self.channel.put(&mut self.bench, bytes.len(), |at, into| into.copy_from_slice(&bytes[at..at + into.len()]))
    }

    /// False: it is gone.
    fn receive(&mut self, wanted: &mut Wanted<'_>, waiting: &mut Waiting<'_>) -> io::Result<bool> {
        let is_there = self.answer(&wanted.reference, waiting)?;
        if is_there {
            self.take_all(wanted.into, waiting)?;
        }
        Ok(is_there)
    }

    /// Whether bytes follow, as many as were asked for. False: it is gone.
    fn answer(&mut self, asked: &Reference, waiting: &mut Waiting<'_>) -> io::Result<bool> {
        let mut answer = [0; size_of::<Answer>()];
        self.take_all(&mut answer, waiting)?;
        let answer = Answer::read_from_bytes(&answer).map_err(|_| io::ErrorKind::InvalidData)?;
        match (answer.found.get(), answer.length.get()) {
            (0, 0) => Ok(false),
            (1, length) if length == asked.length => Ok(true),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the store answered what was not asked")),
        }
    }

    fn take_all(&mut self, into: &mut [u8], waiting: &mut Waiting<'_>) -> io::Result<()> {
        self.take_some(into, waiting, &mut Limit::none()).map(drop)
    }

    /// Takes bytes until there are enough, or the limit is over: how many.
    fn take_some(&mut self, into: &mut [u8], waiting: &mut Waiting<'_>, limit: &mut Limit<'_>) -> io::Result<usize> {
        let mut got = 0;
        // Where something comes all the time nobody waits.
        while got < into.len() && (got == 0 || !limit.is_over()) {
            match self.channel.take(&mut into[got..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(more) => got += more,
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                    if limit.is_over() {
                        break;
                    }
                    waiting.wait(&self.channel, PollFlags::IN)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(got)
    }
}
