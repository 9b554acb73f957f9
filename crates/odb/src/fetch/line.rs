//! A connection to a holder's store, and what is said there. Whoever has it waits for as long as something moves on it.

use std::io;

use rustix::event::PollFlags;
use zerocopy::FromBytes;

use super::Wanted;
use super::patience::Waiting;
use crate::channel::{Bench, Channel, is_served};
use crate::reference::PayloadId;
use crate::store::messages::{Answer, FETCH, Request};
use crate::store::session::{ANSWERS_MAX, request};
use crate::touched::Touched;

/// A request, as it is sent.
pub(super) type Sent = [u8; size_of::<Request>()];

#[derive(Debug)]
pub(super) struct Line {
    channel: Channel,
    bench: Bench,
}

impl Line {
    pub(super) fn new(channel: Channel) -> Self {
        // A batch of fetches, and shares that go back before it.
        Self { channel, bench: Bench::of(2 * ANSWERS_MAX * size_of::<Sent>()) }
    }

    /// Whether the store still serves it, without asking.
    pub(super) fn is_served(&self) -> bool {
        is_served(&self.channel)
    }

    /// Gives back some shares, and fetches a batch: the payload that is gone, if one is. `tell` hears when that takes long.
    ///
    /// # Errors
    /// The connection's; TimedOut where the other end says nothing.
    pub(super) fn fetch(
        &mut self,
        returns: &[Sent],
        batch: &mut [&mut Wanted<'_>],
        tell: &dyn Fn(),
    ) -> io::Result<Option<PayloadId>> {
        let mut waiting = Waiting::new(tell);
        let mut requests = returns.to_vec();
        requests.extend(batch.iter().map(|wanted| request(FETCH, &wanted.reference, Touched::default())));
        self.put(&requests)?;
        let mut is_sent = self.channel.send(&mut self.bench, false)?;
        while !is_sent {
            waiting.wait(&self.channel, PollFlags::OUT)?;
            is_sent = self.channel.flush()?;
        }
        let mut gone = None;
        for wanted in batch {
            if !self.receive(wanted, &mut waiting)? {
                gone = Some(wanted.reference.payload);
            }
        }
        Ok(gone)
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
        let mut answer = [0; size_of::<Answer>()];
        self.take_all(&mut answer, waiting)?;
        let answer = Answer::read_from_bytes(&answer).map_err(|_| io::ErrorKind::InvalidData)?;
        match (answer.found.get(), answer.length.get()) {
            (0, 0) => Ok(false),
            (1, length) if length == wanted.reference.length => self.take_all(wanted.into, waiting).map(|()| true),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the store answered what was not asked")),
        }
    }

    fn take_all(&mut self, mut into: &mut [u8], waiting: &mut Waiting<'_>) -> io::Result<()> {
        while !into.is_empty() {
            match self.channel.take(into) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => into = &mut into[got..],
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                    waiting.wait(&self.channel, PollFlags::IN)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
