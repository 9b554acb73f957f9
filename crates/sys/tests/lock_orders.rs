//! Tests of the mutex and the condition variable of this crate, in every order of the steps of a few threads (loom).
//! scripts/loom runs them.
#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use shunt_sys::lock::futex::{Condvar, Mutex};

/// A value whose accesses loom watches: loom fails the test if two threads have access at the same time.
struct Value(UnsafeCell<u32>);

// SAFETY: the lock under test keeps threads apart, which loom checks.
unsafe impl Sync for Value {}

impl Value {
    fn add(&self) {
        // SAFETY: the caller holds the lock under test. Loom fails the test if another thread has access.
        self.0.with_mut(|value| unsafe { *value += 1 });
    }

    fn get(&self) -> u32 {
        // SAFETY: the caller holds the lock under test. Loom fails the test if another thread has access.
        self.0.with(|value| unsafe { *value })
    }
}

/// Runs `steps` in every order of its threads' steps, with at most 3 preemptions per run: a mistake rarely needs more.
fn model(steps: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(steps);
}

#[test]
fn one_thread_at_a_time_has_it_and_all_get_it() {
    model(|| {
        let shared = Arc::new(Mutex::new(Value(UnsafeCell::new(0))));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.lock().add())
            })
            .collect();
        shared.lock().add();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(shared.lock().get(), 3);
    });
}

#[test]
fn a_thread_that_only_tries_does_not_wait() {
    model(|| {
        let shared = Arc::new(Mutex::new(Value(UnsafeCell::new(0))));
        let other = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            if let Some(value) = other.try_lock() {
                value.add();
            }
        });
        shared.lock().add();
        thread.join().unwrap();
        assert!((1..=2).contains(&shared.try_lock().unwrap().get()));
    });
}

/// Checks that all waiters hear of a change. With `late`, the changing thread reports the change after it has given up
/// the lock.
fn all_hear_of_a_change(waiters: usize, late: bool) {
    model(move || {
        let shared = Arc::new((Mutex::new(Value(UnsafeCell::new(0))), Condvar::new()));
        let threads: Vec<_> = (0..waiters)
            .map(|_| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let mut value = shared.0.lock();
                    while value.get() == 0 {
                        value = shared.1.wait(value);
                    }
                })
            })
            .collect();
        let value = shared.0.lock();
        value.add();
        if late {
            drop(value);
            shared.1.notify_all();
        } else {
            shared.1.notify_all();
            drop(value);
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn a_change_is_heard_of_with_the_lock_and_after_it() {
    all_hear_of_a_change(1, false);
    all_hear_of_a_change(1, true);
    all_hear_of_a_change(2, true);
}
