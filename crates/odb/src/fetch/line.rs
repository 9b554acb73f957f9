//! A connection to a holder's store, with its requests and answers. A thread that has the connection waits as long as
//! bytes move on it. A *reference* names bytes of a payload. A *share* is a program's part of the right to fetch a
//! payload; unused ones go back to the holder, the store that has the payload. A *caller* is a program's call that
//! needs payload bytes. A caller that is *sent away* ends without bytes, and the program tries again later.

use std::io;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::Wanted;
use super::patience::{Call, LONG, Limit, SOME, Silence, Waiting};
use super::rest::Rest;
use crate::channel::{Bench, Channel, is_served};
use crate::reference::{PayloadId, Reference};
use crate::store::messages::{FETCH, Request};
use crate::store::session::{ANSWERS_MAX, request};
use crate::touched::Touched;

/// A request, in its layout on the wire.
pub(super) type Sent = [u8; size_of::<Request>()];

/// Pause of a caller that is sent away and has not waited otherwise, at most once per [`PAUSE_EVERY`]. Without the
/// pause, a program whose many clients all come again at once would use a whole processor. The pause is short, so that
/// the program has most of its time for other clients.
const PAUSE: Duration = Duration::from_millis(2);
const PAUSE_EVERY: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Line {
    channel: Channel,
    bench: Bench,
    rest: Rest,
    /// How long nothing has come on the connection.
    silence: Silence,
    /// Whether a caller was sent away while another caller's answer was under way. The caller that was sent away is to
    /// have its turn next.
    others_wait: bool,
    /// Until this time, no call that may end early waits on this connection, because such a call has just waited its
    /// full time in vain.
    rests_until: Option<Instant>,
    paused: Instant,
    /// Number of bytes that a call that may end early asks for at a time.
    some: usize,
}

impl Line {
    pub(super) fn new(channel: Channel) -> Self {
        // The bench has room for a batch of fetches, and for shares that go back before it.
        Self {
            channel,
            bench: Bench::of(2 * ANSWERS_MAX * size_of::<Sent>()),
            rest: Rest::none(),
            others_wait: false,
            rests_until: None,
            paused: Instant::now(),
            silence: Silence::default(),
            some: *SOME.end(),
        }
    }

    /// Whether the store still serves the connection. Checked without a message.
    pub(super) fn is_served(&self) -> bool {
        is_served(&self.channel)
    }

    /// Gives back shares and fetches a batch. Returns a payload of the batch that is gone, if there is one. `tell` is
    /// called when this takes long.
    ///
    /// # Errors
    /// Returns the connection's error; `TimedOut` if the other end is silent.
    pub(super) fn fetch(
        &mut self,
        returns: &mut Vec<Sent>,
        batch: &mut [&mut Wanted<'_>],
        tell: &dyn Fn(),
    ) -> io::Result<Option<PayloadId>> {
        let (mut waiting, mut all) = (Waiting::after(std::mem::take(&mut self.silence), tell), Limit::none());
        self.drain(&mut waiting, &mut all)?;
        self.ask(returns, batch.iter().map(|wanted| &wanted.reference), &mut waiting)?;
        let mut gone = None;
        for Wanted { reference, into } in batch {
            self.rest = Rest::of(reference);
            if self.head(&mut waiting, &mut all)? == Some(false) {
                gone = Some(reference.payload);
            }
            let came = self.take_some(&mut into[..self.rest.bytes()], &mut waiting, &mut all)?;
            self.rest.came(came);
        }
        Ok(gone)
    }

    /// Gives back shares, and fetches the first bytes of a payload. Returns how many bytes; `None`: the payload is
    /// gone. Only a call that has taken long and may end gets fewer bytes than it wants, or none. While an earlier
    /// answer is under way, only as many shares go back as the socket takes now.
    ///
    /// # Errors
    /// As for [`Self::fetch`].
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
        let rests = self.rests_until.is_some_and(|until| Instant::now() < until);
        if rests {
            limit.wait_no_more();
        }
        self.channel.waits(!rests);
        let got = self.some_of(returns, wanted, waiting, limit)?;
        self.channel.waits(true);
        if got != Some(0) || !limit.is_over() {
            return Ok(got);
        }
        // If this caller has waited, the next callers do not wait for a while: a program with other work would
        // otherwise do nothing but wait. If this caller has not waited, a short pause keeps callers from coming again
        // and again while nothing arrives.
        if limit.has_waited() {
            self.rests_until = Some(Instant::now() + LONG);
        } else if self.paused.elapsed() > PAUSE_EVERY {
            std::thread::sleep(PAUSE);
            self.paused = Instant::now();
        }
        Ok(got)
    }

    fn some_of(
        &mut self,
        returns: &mut Vec<Sent>,
        wanted: &mut Wanted<'_>,
        waiting: &mut Waiting<'_>,
        limit: &mut Limit<'_>,
    ) -> io::Result<Option<usize>> {
        let Wanted { reference, into } = wanted;
        let mut got = 0;
        if self.rest.is_under_way() {
            // Shares can go back now, although an answer is under way: the store does not answer them. They are sent
            // without a wait, which could be long, because the store reads nothing while it sends.
            let posted = self.post(returns)?;
            returns.drain(..posted);
            let goes_on = self.rest.is_of(reference);
            if !goes_on && !self.rest.is_of_before(reference) && self.rest.is_kept() && limit.ends() {
                self.others_wait = true;
                return Ok(Some(0));
            }
            if !goes_on && (!self.drain(waiting, limit)? || limit.is_over()) {
                return Ok(Some(0));
            }
        }
        loop {
            let asks = !self.rest.is_under_way();
            if asks {
                // A caller that was sent away gets its turn now.
                if got > 0 && std::mem::take(&mut self.others_wait) && limit.ends() {
                    return Ok(Some(got));
                }
                let length = (into.len() - got).min(self.some) as u64;
                let part = Reference { offset: reference.offset + got as u64, length, ..*reference };
                self.ask(returns, [&part].into_iter(), waiting)?;
                self.rest = Rest::of(&part);
            }
            match self.head(waiting, limit)? {
                Some(true) => {}
                Some(false) => return Ok(None),
                None => {
                    if asks {
                        self.some = *SOME.start();
                    }
                    return Ok(Some(got));
                }
            }
            let now = self.rest.bytes().min(into.len() - got);
            let came = self.take_some(&mut into[got..got + now], waiting, limit)?;
            self.rest.came(came);
            got += came;
            if asks {
                self.some = limit.next(self.some, came);
            }
            if got == into.len() || limit.is_over() {
                return Ok(Some(got));
            }
        }
    }

    /// Reads the head of the answer under way. Returns whether the payload exists; `None`: the limit is reached before
    /// the whole head has come.
    fn head(&mut self, waiting: &mut Waiting<'_>, limit: &mut Limit<'_>) -> io::Result<Option<bool>> {
        let Some(head) = self.rest.head() else { return Ok(Some(true)) };
        let came = take_some(&mut self.channel, head, waiting, limit)?;
        self.rest.head_came(came)
    }

    /// Gives back shares, and asks for the bytes of some references.
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

    /// Reads and discards the rest of an answer that no caller wants. Returns false if more of it is still to come.
    fn drain(&mut self, waiting: &mut Waiting<'_>, limit: &mut Limit<'_>) -> io::Result<bool> {
        self.rest.is_nobodys();
        if self.head(waiting, limit)?.is_none() {
            return Ok(false);
        }
        let mut nowhere = [0; 4096];
        while self.rest.bytes() > 0 {
            let now = self.rest.bytes().min(nowhere.len());
            let took = self.take_some(&mut nowhere[..now], waiting, limit)?;
            self.rest.came(took);
            if took < now {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Gives back shares, as many as the socket takes now. Returns how many.
    ///
    /// # Errors
    /// Returns the connection's error.
    pub(super) fn post(&mut self, shares: &[Sent]) -> io::Result<usize> {
        let waits = self.channel.waits(false);
        let posted = self.post_some(shares);
        self.channel.waits(waits);
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

    fn take_some(&mut self, into: &mut [u8], waiting: &mut Waiting<'_>, limit: &mut Limit<'_>) -> io::Result<usize> {
        take_some(&mut self.channel, into, waiting, limit)
    }
}

/// Reads bytes until `into` is full or the limit is reached. Returns how many.
fn take_some(
    channel: &mut Channel,
    into: &mut [u8],
    waiting: &mut Waiting<'_>,
    limit: &mut Limit<'_>,
) -> io::Result<usize> {
    let mut got = 0;
    // The limit has to be checked here, too, because a caller does not wait while bytes keep coming.
    while got < into.len() && (got == 0 || !limit.is_over()) {
        match channel.take(&mut into[got..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => got += more,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                if limit.is_over() {
                    break;
                }
                waiting.wait(channel, PollFlags::IN)?;
                limit.waits();
            }
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}
