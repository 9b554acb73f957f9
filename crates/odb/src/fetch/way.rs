//! State of the connection to one holder. The connection belongs to one thread at a time; if there is none, the state
//! says why.
//!
//! ```text
//!                  a thread asks                 an attempt has made it
//!       Unmade ---------------------> Making -----------------------------> Idle <---> Used
//!         ^                             | a second, or it is impossible       |          |
//!         |                             v                                     |          | a second of silence
//!         |                            Lost <------------------------------------------- |
//!         |                             | an attempt has made it, and the     ^          |
//!         |                             | store has answered ----------------/           |
//!         '------------------------------------------------------------------------------' it broke
//! ```
//! Lost becomes Unmade if the holder has become a source of this machine anew, if no thread has asked for it for long,
//! or if no thread can be started for the attempt. Unmade becomes Lost if the connection has broken at every try of a
//! fetch. The lock is held only for moments, and by no thread that waits for the state to change.
//!
//! A *holder* is the store that has a payload. A *share* is a program's part of the right to fetch the payload; its
//! size is its *weight*. Unused shares go back to the holder, or end with the payload's *lease*, the time for which the
//! holder keeps it. A *source* is a store that this machine's programs can fetch from. A *reference* names bytes of a
//! payload. The *agent* is Shunt's daemon on each machine.

use std::io;
use std::time::{Duration, Instant};

use shunt_sys::lock::{Condvar, Mutex, MutexGuard};

use super::line::{Line, Sent};
use super::patience::{Call, PATIENCE, Waited};
use crate::reference::Reference;
use crate::store::client::GLANCE;
use crate::store::session::ANSWERS_MAX;

/// Most shares that wait for a connection to one holder. Further ones are dropped; their weight ends with the payload's
/// lease.
const RETURNS_MAX: usize = 1 << 16;

/// Number of an attempt to connect. If it fails, the attempts that repeat it have the same number. An attempt older
/// than the newest changes nothing when it fails, because it may have begun before the holder came back.
pub(super) type Attempt = u64;

/// Most attempts under way for one holder: an old one, which may still wait for an agent, and one that began after the
/// holder had come back.
const UNDER_WAY_MAX: usize = 2;

/// Parameters of a wait for a connection.
#[derive(Clone, Copy)]
pub(super) struct Asks<'a> {
    /// Called when the wait takes long.
    pub(super) tell: &'a dyn Fn(),
    /// Call for which the thread waits, if that call may end before there is a connection.
    pub(super) call: Option<&'a Call<'a>>,
}

/// Whether an attempt is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begins {
    Now,
    /// Not now: too many are under way.
    Later,
    /// Not at all: no thread needs another connection.
    Never,
}

/// Time after a holder's return in which threads wait only half as long for it, because it may be lost again.
const JUST: Duration = Duration::from_secs(3);

#[derive(Debug, Default)]
pub(super) struct Way {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is: Is,
    /// Number of the newest attempt.
    attempt: Attempt,
    /// Number of the last attempt that was not made, because no thread could be started.
    not_tried: Attempt,
    under_way: usize,
    /// How often the holder had become a source of this machine when a thread last needed it ([`Way::came`]).
    came: u64,
    /// Time that threads have waited for a connection so far. `None`: none has waited since `is` last changed.
    waited: Option<Waited>,
    /// Time at which the holder came back after a loss.
    came_back: Option<Instant>,
    /// Number of threads that wait for a change. As a rule it is 0, and then no system call is made to wake them.
    waiting: usize,
    /// Newest reference that was asked for, and when.
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
    /// The holder is lost: no thread waits for it. Attempts are made until it answers again, or until no thread has
    /// asked for it for a while.
    Lost,
}

fn lost() -> io::Error {
    io::Error::new(
        io::ErrorKind::HostUnreachable,
        "it has not answered for a second, or could not be reached a moment ago",
    )
}

impl Way {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Waits for the connection and takes it, together with shares that are to go back. If there is none, `make` begins
    /// an attempt to make one. `None`: the program's call (`asks.call`) ends first.
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
                // Another thread has the connection. That thread waits for the holder for a second at most. After that
                // the state says whether the holder is lost.
                other => {
                    state.is = other;
                    let waited = self.wait(state, GLANCE, asks.tell);
                    let Some(waited) = self.unless_ended(waited, asks) else { return Ok(None) };
                    state = waited;
                }
            }
        }
    }

    /// Notes how often the holder has become a source of this machine, as this machine's agent has counted. If that
    /// count has changed since the loss, the holder is no longer lost: the next request tries it at once. Without this,
    /// the holder would stay lost until an attempt of this process succeeds, and these attempts are at least a second
    /// apart.
    pub(super) fn came(&self, times: u64) {
        let mut state = self.lock();
        // An agent that was started again counts from the beginning.
        if times != 0 && times != state.came {
            state.came = times;
            if matches!(state.is, Is::Lost) {
                state.becomes(Is::Unmade);
                state.came_back = Some(Instant::now());
            }
        }
    }

    /// Waits until there is a connection, even if another thread has it. If there is none, `make` begins an attempt, as
    /// in [`Self::take`].
    ///
    /// # Errors
    /// The holder is lost.
    pub(super) fn open(&self, about: &Reference, make: impl Fn(Attempt), tell: &dyn Fn()) -> io::Result<()> {
        let mut state = self.lock();
        state.asked = Some((*about, Instant::now()));
        // The agent may have ended since the connection was last used.
        if matches!(&state.is, Is::Idle(line) if !line.is_served()) {
            state.becomes(Is::Unmade);
        }
        self.made(state, &make, Asks { tell, call: None }).map(drop)
    }

    /// Returns the state once it is Idle or Used. `None`: the program's call (`asks.call`) ends first.
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
                    // If the holder is lost again soon after its return, that costs the waiting threads only half of
                    // the patience.
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
        // `tell` is called without the lock, because it may take other locks.
        drop(state);
        tell();
        self.lock()
    }

    /// Returns the state if the program's call continues. `None`: the call has taken long, and ends.
    fn unless_ended<'a>(&'a self, state: MutexGuard<'a, State>, asks: Asks<'_>) -> Option<MutexGuard<'a, State>> {
        let Some(call) = asks.call.filter(|call| call.is_long()) else { return Some(state) };
        // `ends` is called without the lock. It asks the program whether the call may end, and the program's answer can
        // take other locks.
        drop(state);
        if call.ends() { None } else { Some(self.lock()) }
    }

    fn tell_waiting(&self, state: &State) {
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    /// Takes the shares that wait to go back, and the connection, if it is free. If there is none, `make` begins an
    /// attempt.
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

    /// Adds shares that go back to the holder as soon as there is a connection. If the holder is lost, or more than
    /// [`RETURNS_MAX`] would wait, they are dropped.
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

    /// Reference to ask for in order to learn whether a lost holder's store answers again. `None` if it is not lost.
    pub(super) fn to_ask(&self) -> Option<Reference> {
        let state = self.lock();
        let reference = state.asked.as_ref().filter(|_| matches!(state.is, Is::Lost))?.0;
        Some(Reference { length: 1, ..reference })
    }

    /// Decides whether to make this attempt now, later, or never. Never, if the connection exists or a newer attempt
    /// was ordered. Also never, if the holder is lost and no thread has asked for it during the last `interest`. Then
    /// the state becomes Unmade, and the next thread that asks orders a new attempt.
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

    /// Notes that an attempt has ended, with a connection or without. Without one the holder is lost until another
    /// attempt succeeds. Returns true if no further attempt has to follow.
    pub(super) fn ends(&self, attempt: Attempt, line: Option<Line>) -> bool {
        let mut state = self.lock();
        state.under_way -= 1;
        match line {
            // Another attempt has made the connection meanwhile.
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

    /// Notes that the attempt is not made, because no thread can be started. The next request orders one.
    pub(super) fn is_not_made(&self, attempt: Attempt) {
        let mut state = self.lock();
        if attempt == state.attempt && !state.is_there() {
            state.becomes(Is::Unmade);
            state.not_tried = attempt;
            self.tell_waiting(&state);
        }
    }

    /// Makes the holder lost after its connection has broken at every try of a fetch. Returns the attempt to make, or
    /// `None` if the state is no longer Unmade.
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

    /// Begins the first attempt, for a thread that asks for a connection while there is none.
    fn begin(&mut self) -> Attempt {
        self.is = Is::Making;
        self.another()
    }

    /// Number of a new attempt, which replaces all before it.
    fn another(&mut self) -> Attempt {
        self.attempt += 1;
        self.attempt
    }

    fn becomes(&mut self, is: Is) {
        (self.is, self.waited) = (is, None);
    }

    /// Makes the holder lost. The shares that cannot go back are dropped; their weight ends with the payload's lease.
    fn lose(&mut self) {
        self.becomes(Is::Lost);
        self.returns = Vec::new();
    }
}

/// Exclusive use of the connection. If this value is dropped without [`Turn::put_back`], the connection counts as
/// broken.
pub(super) struct Turn<'a> {
    way: &'a Way,
    line: Option<Box<Line>>,
}

impl Turn<'_> {
    /// The connection.
    ///
    /// # Errors
    /// The connection has been given up already.
    pub(super) fn line(&mut self) -> io::Result<&mut Line> {
        self.line.as_deref_mut().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn ends(&mut self, is: Is) {
        let mut state = self.way.lock();
        state.becomes(is);
        self.way.tell_waiting(&state);
    }

    /// Gives the connection back, for other threads to use.
    pub(super) fn put_back(mut self) {
        if let Some(line) = self.line.take() {
            self.ends(Is::Idle(line));
        }
    }

    /// Gives the connection up, because its holder is silent. Returns the attempt to make.
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

    /// Asks for a connection to a holder that has none, and calls `meanwhile` with the attempt that is begun. Returns
    /// whether the holder is lost in the end.
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
        // The first attempt takes long. It fails after the holder has come back and a second attempt has begun.
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
            // Stands for the connection that the second attempt would make.
            way.lock().becomes(Is::Used);
        });
        assert!(!is_lost);
        assert!(way.ends(old.get() + 1, None) && way.lock().is_there(), "it has been made by another");
    }
}
