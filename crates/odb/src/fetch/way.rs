//! The way to one holder: its connection, which one thread has at a time, or why there is none.
//!
//! ```text
//!                 somebody asks                  an attempt has made it
//!      Unmade ---------------------> Making -----------------------------> Idle <---> Used
//!        ^                             | a second, or it cannot be had       |          |
//!        |                             v                                     |          | a second of silence
//!        |                            Lost <------------------------------------------- |
//!        |                             | an attempt has made it, and the     ^          |
//!        |                             | store has answered ----------------/           |
//!        '------------------------------------------------------------------------------' it broke
//! ```
//! The lock is held for moments only. Whoever waits does so for the state to change.

use std::io;
use std::time::{Duration, Instant};

use shunt_sys::lock::{Condvar, Mutex, MutexGuard};

use super::line::{Line, Sent};
use super::patience::{Call, PATIENCE, Waited};
use crate::reference::Reference;
use crate::store::client::GLANCE;
use crate::store::session::ANSWERS_MAX;

/// Shares that wait for a connection to one holder. What is more ends with its lease.
const RETURNS_MAX: usize = 1 << 16;

/// The number of an attempt, and of those that follow it while it comes to nothing. One of before the newest changes nothing: it may
/// have begun before the holder came back.
pub(super) type Attempt = u64;

/// Attempts under way for one holder at most: one of before, which may wait for an agent's patience yet, and one that knows better.
const UNDER_WAY_MAX: usize = 2;

/// How somebody waits for a connection.
#[derive(Clone, Copy)]
pub(super) struct Asks<'a> {
    /// Told that it takes long.
    pub(super) tell: &'a dyn Fn(),
    /// The call that waits for it, if it can end before there is one.
    pub(super) call: Option<&'a Call<'a>>,
}

/// Whether an attempt is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begins {
    Now,
    /// There are too many.
    Later,
    /// Nobody needs it.
    Never,
}

/// A holder that has come back no longer ago may well go again.
const JUST: Duration = Duration::from_secs(3);

#[derive(Debug, Default)]
pub(super) struct Way {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is: Is,
    /// The newest, and the last that nobody makes: there are no threads.
    attempt: Attempt,
    not_tried: Attempt,
    under_way: usize,
    /// How often the holder had come to be this machine's source when it was asked for last.
    came: u64,
    /// While somebody waits for a connection.
    waited: Option<Waited>,
    /// When it came back after a loss.
    came_back: Option<Instant>,
    /// Threads that wait for a change: as a rule there are none, and to wake nobody takes a system call, too.
    waiting: usize,
    /// What was asked for last, and when.
    asked: Option<(Reference, Instant)>,
    returns: Vec<Sent>,
}

#[derive(Debug, Default)]
enum Is {
    #[default]
    Unmade,
    /// An attempt is under way.
    Making,
    Idle(Box<Line>),
    Used,
    /// Nobody waits for it. Attempts are made until the holder is there again.
    Lost,
}

fn lost() -> io::Error {
    io::Error::new(
        io::ErrorKind::HostUnreachable,
        "it has said nothing for a second, or could not be reached a moment ago",
    )
}

impl Way {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Waits for the connection, and for one to be made where there is none: `make` begins an attempt. Shares that wait to
    /// go back come with it. `None`: the call ends before.
    ///
    /// # Errors
    /// The holder is lost.
    pub(super) fn take(
        &self,
        about: &Reference,
        make: impl Fn(Attempt),
        asks: Asks<'_>,
    ) -> io::Result<Option<(Turn<'_>, Vec<Sent>)>> {
        let mut state = self.lock();
        state.asked = Some((*about, Instant::now()));
        loop {
            let Some(made) = self.made(state, &make, asks)? else { return Ok(None) };
            state = made;
            match std::mem::replace(&mut state.is, Is::Used) {
                Is::Idle(line) => {
                    let some = state.returns.len().min(ANSWERS_MAX);
                    let returns = state.returns.drain(..some).collect();
                    return Ok(Some((Turn { way: self, line: Some(line) }, returns)));
                }
                // Whoever has it waits for a second at most, and then all know.
                other => {
                    state.is = other;
                    let waited = self.wait(state, GLANCE, asks.tell);
                    let Some(waited) = self.unless_ended(waited, asks) else { return Ok(None) };
                    state = waited;
                }
            }
        }
    }

    /// The holder has come to be this machine's source so often, as its agent knows. Where that is once more than at the loss, it
    /// is lost no longer: attempts of this process's own are a second apart.
    pub(super) fn came(&self, times: u64) {
        let mut state = self.lock();
        // An agent that has been started again counts from the beginning.
        if times != 0 && times != state.came {
            state.came = times;
            if matches!(state.is, Is::Lost) {
                state.becomes(Is::Unmade);
                state.came_back = Some(Instant::now());
            }
        }
    }

    /// Waits until there is a connection, perhaps in use; for one to be made where there is none, as [`Self::take`].
    ///
    /// # Errors
    /// The holder is lost.
    pub(super) fn open(&self, about: &Reference, make: impl Fn(Attempt), tell: &dyn Fn()) -> io::Result<()> {
        let mut state = self.lock();
        state.asked = Some((*about, Instant::now()));
        // Its agent may have ended since it was used last.
        if matches!(&state.is, Is::Idle(line) if !line.is_served()) {
            state.becomes(Is::Unmade);
        }
        self.made(state, &make, Asks { tell, call: None }).map(drop)
    }

    /// The state, once it is Idle or Used. `None`: the call ends before.
    fn made<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        make: &impl Fn(Attempt),
        asks: Asks<'_>,
    ) -> io::Result<Option<MutexGuard<'a, State>>> {
        loop {
            match state.is {
                Is::Idle(_) | Is::Used => return Ok(Some(state)),
                Is::Lost => return Err(lost()),
                Is::Unmade => {
                    let attempt = state.begin();
                    drop(state);
                    make(attempt);
                    state = self.lock();
                    if state.not_tried == attempt {
                        return Err(lost());
                    }
                }
                Is::Making => {
                    // Where it comes and goes, whoever asks is not to wait for as long each time.
                    let has_just = state.came_back.is_some_and(|then| then.elapsed() < JUST);
                    let patience = if has_just { PATIENCE / 2 } else { PATIENCE };
                    let Some(slice) = state.waited.get_or_insert_with(Waited::begin).slice_of(patience) else {
                        state.lose();
                        self.tell_waiting(&state);
                        return Err(lost());
                    };
                    state = self.wait(state, slice, asks.tell);
                    if matches!(state.is, Is::Making) {
                        let Some(goes_on) = self.unless_ended(state, asks) else { return Ok(None) };
                        state = goes_on;
                    }
                }
            }
        }
    }

    fn wait<'a>(&'a self, mut state: MutexGuard<'a, State>, slice: Duration, tell: &dyn Fn()) -> MutexGuard<'a, State> {
        state.waiting += 1;
        let (mut state, is_over) = self.changed.wait_timeout(state, slice);
        state.waiting -= 1;
        if !is_over {
            return state;
        }
        // Who is told may take locks of its own.
        drop(state);
        tell();
        self.lock()
    }

    /// The state for a call that goes on. `None`: it has taken long, and ends.
    fn unless_ended<'a>(&'a self, state: MutexGuard<'a, State>, asks: Asks<'_>) -> Option<MutexGuard<'a, State>> {
        let Some(call) = asks.call.filter(|call| call.is_long()) else { return Some(state) };
        // The program's answer, whether its call may end, may take locks of its own.
        drop(state);
        if call.ends() { None } else { Some(self.lock()) }
    }

    fn tell_waiting(&self, state: &State) {
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    /// Takes what waits to go back, and the connection, if it is free; has one made where there is none.
    pub(super) fn take_returns(&self, make: impl Fn(Attempt)) -> Option<(Turn<'_>, Vec<Sent>)> {
        let mut state = self.lock();
        if state.returns.is_empty() {
            return None;
        }
        match std::mem::replace(&mut state.is, Is::Used) {
            Is::Idle(line) => {
                let returns = std::mem::take(&mut state.returns);
                return Some((Turn { way: self, line: Some(line) }, returns));
            }
            Is::Unmade => {
                let attempt = state.begin();
                drop(state);
                make(attempt);
            }
            other => state.is = other,
        }
        None
    }

    /// Shares that go back to the holder, when there is a connection.
    pub(super) fn give_back(&self, shares: Vec<Sent>) {
        if shares.is_empty() {
            return;
        }
        let mut state = self.lock();
        if !matches!(state.is, Is::Lost) && state.returns.len() + shares.len() <= RETURNS_MAX {
            state.returns.extend(shares);
        }
    }

    /// Whether shares wait to go back.
    pub(super) fn owes(&self) -> bool {
        !self.lock().returns.is_empty()
    }

    /// What to ask for, to hear whether the store answers again: of a holder that is lost.
    pub(super) fn to_ask(&self) -> Option<Reference> {
        let state = self.lock();
        let reference = state.asked.as_ref().filter(|_| matches!(state.is, Is::Lost))?.0;
        Some(Reference { length: 1, ..reference })
    }

    /// Whether an attempt is to be made. Where it is lost and nobody has asked for it in a while, the next who asks has one made.
    pub(super) fn begins(&self, attempt: Attempt, interest: Duration) -> Begins {
        let mut state = self.lock();
        if state.is_there() || attempt != state.attempt {
            return Begins::Never;
        }
        let is_asked = state.asked.as_ref().is_some_and(|(_, asked)| asked.elapsed() < interest);
        if matches!(state.is, Is::Lost) && !is_asked {
            state.becomes(Is::Unmade);
            return Begins::Never;
        }
        if state.under_way == UNDER_WAY_MAX {
            return Begins::Later;
        }
        state.under_way += 1;
        Begins::Now
    }

    /// An attempt has ended, with a connection or without: whether no other has to follow it. Without one the holder is lost, until
    /// another attempt makes it.
    pub(super) fn ends(&self, attempt: Attempt, line: Option<Line>) -> bool {
        let mut state = self.lock();
        state.under_way -= 1;
        match line {
            // Another one that was under way has made it meanwhile.
            _ if state.is_there() => return true,
            Some(line) => state.becomes(Is::Idle(Box::new(line))),
            None if attempt != state.attempt => return true,
            None => {
                state.lose();
                self.tell_waiting(&state);
                return false;
            }
        }
        self.tell_waiting(&state);
        true
    }

    /// Nobody tries. The next who asks has an attempt made.
    pub(super) fn is_not_made(&self, attempt: Attempt) {
        let mut state = self.lock();
        if attempt == state.attempt && !state.is_there() {
            state.becomes(Is::Unmade);
            state.not_tried = attempt;
            self.tell_waiting(&state);
        }
    }

    /// It has broken every time. Where it is lost by that: the attempt to make.
    pub(super) fn give_up(&self) -> Option<Attempt> {
        let mut state = self.lock();
        if !matches!(state.is, Is::Unmade) {
            return None;
        }
        state.lose();
        self.tell_waiting(&state);
        Some(state.another())
    }
}

impl State {
    fn is_there(&self) -> bool {
        matches!(self.is, Is::Idle(_) | Is::Used)
    }

    /// Somebody asks for a connection where there is none.
    fn begin(&mut self) -> Attempt {
        self.is = Is::Making;
        self.another()
    }

    /// A new attempt, in place of all before.
    fn another(&mut self) -> Attempt {
        self.attempt += 1;
        self.attempt
    }

    fn becomes(&mut self, is: Is) {
        (self.is, self.waited) = (is, None);
    }

    /// What cannot go back ends with its lease.
    fn lose(&mut self) {
        self.becomes(Is::Lost);
        self.returns = Vec::new();
    }
}

/// The connection, in use. Where it is not put back it has broken.
pub(super) struct Turn<'a> {
    way: &'a Way,
    line: Option<Box<Line>>,
}

impl Turn<'_> {
    /// The connection.
    ///
    /// # Errors
    /// It has broken.
    pub(super) fn line(&mut self) -> io::Result<&mut Line> {
        self.line.as_deref_mut().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn ends(&mut self, is: Is) {
        let mut state = self.way.lock();
        state.becomes(is);
        self.way.tell_waiting(&state);
    }

    /// It is as good as it was.
    pub(super) fn put_back(mut self) {
        if let Some(line) = self.line.take() {
            self.ends(Is::Idle(line));
        }
    }

    /// Its holder says nothing: the attempt to make.
    pub(super) fn lose(mut self) -> Attempt {
        self.line = None;
        let mut state = self.way.lock();
        state.lose();
        self.way.tell_waiting(&state);
        state.another()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.line.take().is_some() {
            self.ends(Is::Unmade);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{Holder, PayloadId, Weight};

    fn is_lost(way: &Way) -> bool {
        matches!(way.lock().is, Is::Lost)
    }

    const INTEREST: Duration = Duration::from_secs(120);

    /// Somebody asks for a holder that is not there: the attempt that is made for it, and whether it has been lost meanwhile.
    fn asked(way: &Way, meanwhile: impl Fn(Attempt)) -> bool {
        let payload = PayloadId { holder: Holder::named("be1"), segment: 0, slot: 0, secret: 0 };
        let reference = Reference { payload, weight: Weight::WHOLE, offset: 0, length: 1 };
        way.open(&reference, &meanwhile, &|| ()).is_err()
    }

    #[test]
    fn a_holder_that_has_come_is_lost_no_longer_also_by_an_agent_that_counts_anew() {
        let way = Way::default();
        for (times, is_tried) in [(0, false), (7, true), (7, false), (8, true), (1, true), (0, false), (1, false)] {
            way.lock().lose();
            way.came(times);
            assert_eq!(!is_lost(&way), is_tried, "{times}");
        }
    }

    #[test]
    fn an_attempt_of_before_changes_nothing_and_no_other_follows_it() {
        let way = Way::default();
        let old = std::cell::Cell::new(0);
        // The first takes long, and comes to nothing when the holder has come back and a second one is under way.
        way.came(1);
        let is_lost = asked(&way, |first| {
            assert_eq!(way.begins(first, INTEREST), Begins::Now);
            way.lock().lose();
            old.set(first);
        });
        assert!(is_lost);
        way.came(2);
        let is_lost = asked(&way, |second| {
            assert_eq!(way.begins(second, INTEREST), Begins::Now);
            assert_eq!(way.begins(second, INTEREST), Begins::Later, "as many as there may be");
            assert!(way.ends(old.get(), None), "nobody needs another one");
            assert!(matches!(way.lock().is, Is::Making), "the second is under way");
            assert_eq!(way.begins(old.get(), INTEREST), Begins::Never);
            // In place of a connection.
            way.lock().becomes(Is::Used);
        });
        assert!(!is_lost);
        assert!(way.ends(old.get() + 1, None) && way.lock().is_there(), "it has been made by another");
    }
}
