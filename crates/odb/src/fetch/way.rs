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
use super::patience::Waited;
use crate::reference::Reference;
use crate::store::client::GLANCE;
use crate::store::session::ANSWERS_MAX;

/// Shares that wait for a connection to one holder. What is more ends with its lease.
const RETURNS_MAX: usize = 1 << 16;

#[derive(Debug, Default)]
pub(super) struct Way {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is: Is,
    /// How often the holder had come to be this machine's source when it was asked for last.
    came: u64,
    /// While somebody waits for a connection.
    waited: Option<Waited>,
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
    /// go back come with it.
    ///
    /// # Errors
    /// The holder is lost.
    pub(super) fn take(
        &self,
        about: &Reference,
        make: impl Fn(),
        tell: &dyn Fn(),
    ) -> io::Result<(Turn<'_>, Vec<Sent>)> {
        let mut state = self.lock();
        state.asked = Some((*about, Instant::now()));
        loop {
            state = self.made(state, &make, tell)?;
            match std::mem::replace(&mut state.is, Is::Used) {
                Is::Idle(line) => {
                    let some = state.returns.len().min(ANSWERS_MAX);
                    let returns = state.returns.drain(..some).collect();
                    return Ok((Turn { way: self, line: Some(line) }, returns));
                }
                // Whoever has it waits for a second at most, and then all know.
                other => {
                    state.is = other;
                    state = self.wait(state, GLANCE, tell);
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
            }
        }
    }

    /// Waits until there is a connection, perhaps in use; for one to be made where there is none, as [`Self::take`].
    ///
    /// # Errors
    /// The holder is lost.
    pub(super) fn open(&self, about: &Reference, make: impl Fn(), tell: &dyn Fn()) -> io::Result<()> {
        let mut state = self.lock();
        state.asked = Some((*about, Instant::now()));
        // Its agent may have ended since it was used last.
        if matches!(&state.is, Is::Idle(line) if !line.is_served()) {
            state.becomes(Is::Unmade);
        }
        self.made(state, &make, tell).map(drop)
    }

    /// The state, once it is Idle or Used.
    fn made<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        make: &impl Fn(),
        tell: &dyn Fn(),
    ) -> io::Result<MutexGuard<'a, State>> {
        loop {
            match state.is {
                Is::Idle(_) | Is::Used => return Ok(state),
                Is::Lost => return Err(lost()),
                Is::Unmade => {
                    state.is = Is::Making;
                    drop(state);
                    make();
                    state = self.lock();
                }
                Is::Making => {
                    let Some(slice) = state.waited.get_or_insert_with(Waited::begin).slice() else {
                        state.lose();
                        self.tell_waiting(&state);
                        return Err(lost());
                    };
                    state = self.wait(state, slice, tell);
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

    fn tell_waiting(&self, state: &State) {
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    /// Takes what waits to go back, and the connection, if it is free; has one made where there is none.
    pub(super) fn take_returns(&self, make: impl Fn()) -> Option<(Turn<'_>, Vec<Sent>)> {
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
                state.is = Is::Making;
                drop(state);
                make();
            }
            other => state.is = other,
        }
        None
    }

    /// Shares that go back to the holder, when there is a connection.
    pub(super) fn give_back(&self, shares: Vec<Sent>) {
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

    /// What became of an attempt. `None`: it is lost, until another one makes it.
    pub(super) fn is_made(&self, line: Option<Line>) {
        let mut state = self.lock();
        match line {
            Some(line) => state.becomes(Is::Idle(Box::new(line))),
            // Another one that was under way has made it meanwhile.
            None if state.is_there() => {}
            None => state.lose(),
        }
        self.tell_waiting(&state);
    }

    /// Whether there is a connection, perhaps in use.
    pub(super) fn is_there(&self) -> bool {
        self.lock().is_there()
    }

    /// Nobody tries. The next who asks has an attempt made.
    pub(super) fn is_not_made(&self) {
        let mut state = self.lock();
        state.becomes(Is::Unmade);
        self.tell_waiting(&state);
    }

    /// Whether it is lost and nobody has asked for it in a while: then the next who asks has an attempt made.
    pub(super) fn is_of_no_use(&self, interest: Duration) -> bool {
        let mut state = self.lock();
        let is_asked = state.asked.as_ref().is_some_and(|(_, asked)| asked.elapsed() < interest);
        let is_of_no_use = matches!(state.is, Is::Lost) && !is_asked;
        if is_of_no_use {
            state.becomes(Is::Unmade);
        }
        is_of_no_use
    }

    /// It has broken every time. True: it is lost by that.
    pub(super) fn give_up(&self) -> bool {
        let mut state = self.lock();
        let gives_up = matches!(state.is, Is::Unmade);
        if gives_up {
            state.lose();
            self.tell_waiting(&state);
        }
        gives_up
    }
}

impl State {
    fn is_there(&self) -> bool {
        matches!(self.is, Is::Idle(_) | Is::Used)
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
        match is {
            Is::Lost => state.lose(),
            is => state.becomes(is),
        }
        self.way.tell_waiting(&state);
    }

    /// It is as good as it was.
    pub(super) fn put_back(mut self) {
        if let Some(line) = self.line.take() {
            self.ends(Is::Idle(line));
        }
    }

    /// Its holder says nothing.
    pub(super) fn lose(mut self) {
        self.line = None;
        self.ends(Is::Lost);
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

    fn is_lost(way: &Way) -> bool {
        matches!(way.lock().is, Is::Lost)
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
}
