//! Tests of the roles of a few threads in every order of their steps (loom). One thread leads: it takes the events. If
//! it has to wait for a silent peer, another thread leads. One of the other threads tends: it does regular work.
//! scripts/loom runs the tests.
#![cfg(loom)]

use std::time::Duration;

use loom::sync::Arc;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicUsize, Ordering};
use shunt_odb::turns::Turns;

/// An event: the peer that it is for, and whether serving it takes long.
type Event = (char, bool);

struct World {
    turns: Turns<char, usize>,
    events: Mutex<Vec<Event>>,
    next: AtomicUsize,
    served: Vec<AtomicUsize>,
}

impl World {
    fn serve(&self, at: usize) {
        self.served[at].fetch_add(1, Ordering::SeqCst);
    }

    /// Runs a thread until no event is left.
    fn run(&self) {
        loop {
            self.turns.wait_to_lead(Duration::ZERO, loom::thread::yield_now);
            loop {
                let at = self.next.fetch_add(1, Ordering::SeqCst);
                let Some((whom, is_slow)) = self.events.lock().unwrap().get(at).copied() else {
                    // The next leader finds no event either, and ends.
                    return self.turns.hand_over(None);
                };
                if self.turns.any_slow() && self.turns.keep(whom, at) {
                    continue;
                }
                if !is_slow {
                    self.serve(at);
                    continue;
                }
                self.turns.hand_over(Some(whom));
                self.serve(at);
                loop {
                    let kept = self.turns.kept(whom);
                    if kept.is_empty() {
                        break;
                    }
                    kept.into_iter().for_each(|at| self.serve(at));
                }
                break;
            }
        }
    }
}

fn all_are_served_once(threads: usize, events: &[Event]) {
    let events = events.to_vec();
    let mut model = loom::model::Builder::new();
    // Three threads have too many orders; only those with at most two preemptions are tried.
    model.preemption_bound = (threads > 2).then_some(2);
    model.check(move || {
        let served = events.iter().map(|_| AtomicUsize::new(0)).collect();
        let (events, next) = (Mutex::new(events.clone()), AtomicUsize::new(0));
        let world = Arc::new(World { turns: Turns::default(), events, next, served });
        let others: Vec<_> = (1..threads)
            .map(|_| {
                let world = Arc::clone(&world);
                loom::thread::spawn(move || world.run())
            })
            .collect();
        world.run();
        others.into_iter().for_each(|other| other.join().unwrap());
        let served: Vec<usize> = world.served.iter().map(|count| count.load(Ordering::SeqCst)).collect();
        assert!(served.iter().all(|count| *count == 1), "{served:?}");
    });
}

#[test]
fn one_silent_peer_holds_up_one_thread() {
    all_are_served_once(2, &[('a', true), ('a', false), ('b', false)]);
}

#[test]
fn of_two_who_are_silent() {
    all_are_served_once(2, &[('a', true), ('b', true), ('a', false)]);
}

#[test]
fn of_one_who_is_silent_again() {
    all_are_served_once(2, &[('a', true), ('a', true), ('a', false)]);
}

/// One thread leads, one tends, and one waits.
#[test]
fn of_three_threads() {
    all_are_served_once(3, &[('a', true), ('a', false)]);
}
