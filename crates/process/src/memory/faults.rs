//! Threads that serve faults of absent memory (the paper on on-demand buffers calls this part RZM). A thread of the
//! program that touches absent memory waits in the kernel until one of these threads has fetched the bytes. Absent
//! memory stands for bytes of a payload in a store. A *share* of the payload keeps the payload in the store.
//!
//! One of the threads leads: it reads the kernel's events and serves each fault itself. If that takes long, because a
//! holder (the store that has the bytes) is silent, another thread leads from then on. Faults for the same holder wait
//! until the first is served, so each silent holder occupies one thread at most.
//!
//! All threads are started before memory becomes absent. Starting a thread takes memory from glibc's heap, whose locks
//! may be held by a thread that waits for absent memory.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use shunt_odb::fetch::FetchError;
use shunt_odb::reference::Holder;
use shunt_odb::turns::Turns;
use shunt_sys::lock::Mutex;
use shunt_sys::userfaultfd::{Event, Userfaultfd};

use super::Memory;
use crate::system::ending::end_process;
use crate::system::threads;

/// Number of threads: one leads, one tends, and the others may wait for silent holders. Once all of them wait, further
/// faults wait, too, for a second at most.
const THREADS: usize = 3;
/// Fewest threads that are enough: one can lead while another waits.
const THREADS_MIN: usize = 2;

/// Interval at which one thread tends: among other work, it starts the return of shares that were too few to be sent
/// back before.
const TENDED_EVERY: Duration = Duration::from_millis(100);

/// Interval of the search for bytes that have been absent for long.
const OLD_EVERY: Duration = Duration::from_secs(3);

/// State that the threads share.
struct Service {
    memory: &'static Memory,
    faults: Arc<Userfaultfd>,
    /// Which thread does what. For each holder that a thread waits for, also further addresses that the program has
    /// touched, and whose bytes are at that holder. The waiting thread serves these faults, too.
    turns: Turns<Holder, usize>,
    /// Time of the last search for bytes that have been absent for long.
    looked: Mutex<Instant>,
}

/// Starts the threads. Returns false if fewer than [`THREADS_MIN`] can be started.
pub fn start(memory: &'static Memory, faults: Arc<Userfaultfd>) -> bool {
    let service = Arc::new(Service { memory, faults, turns: Turns::default(), looked: Mutex::new(Instant::now()) });
    let started = (0..THREADS).take_while(|_| {
        let service = Arc::clone(&service);
        threads::start("shunt-faults", move || service.run())
    });
    started.count() >= THREADS_MIN
}

impl Service {
    fn run(&self) {
        loop {
            self.turns.wait_to_lead(TENDED_EVERY, || self.tend());
            while self.lead() {}
        }
    }

    /// Does the work that no fault asks for. It may wait for a holder.
    fn tend(&self) {
        (self.memory.tend)();
        if self.memory.returns.waiting() > 0 {
            self.memory.holders.wake();
        }
        if self.is_time_to_look() {
            self.memory.fetch_old();
            self.memory.holders.close_idle_files();
        }
    }

    fn is_time_to_look(&self) -> bool {
        let mut looked = self.looked.lock();
        let is_time = looked.elapsed() > OLD_EVERY;
        if is_time {
            *looked = Instant::now();
        }
        is_time
    }

    /// Handles the kernel's next events. Returns false once another thread leads.
    fn lead(&self) -> bool {
        const LONG: Timespec = Timespec { tv_sec: 3600, tv_nsec: 0 };
        let _ = self.faults.wait(LONG);
        while let Ok(Some(event)) = self.faults.next_event() {
            match event {
                Event::Fault(address) if self.is_kept_for_later(address) => {}
                Event::Fault(address) => {
                    if let Some(slow) = self.serve(address) {
                        self.serve_kept(slow);
                        return false;
                    }
                }
                Event::Remap { from, to, bytes } => self.memory.moved(from, to, bytes),
                Event::Unmap { start, end } => self.memory.unmapped(&self.faults, &(start..end)),
            }
        }
        true
    }

    /// Serves a fault. Returns `Some` if that took long, so that another thread leads now. The value has the slow
    /// holder, if that is known.
    fn serve(&self, address: usize) -> Option<Option<Holder>> {
        let slow = Cell::new(None);
        let hand_over = || {
            if slow.get().is_none() {
                slow.set(Some(self.hand_over(address)));
            }
        };
        self.fetch(address, &hand_over);
        slow.get()
    }

    fn fetch(&self, address: usize, tell: &dyn Fn()) {
        if let Err(error) = self.memory.serve_fault(&self.faults, address, tell) {
            end_without_bytes("touched", &error);
        }
    }

    /// Makes another thread lead, and lets faults for the holder of the bytes at `address` wait for this thread.
    /// Returns that holder.
    fn hand_over(&self, address: usize) -> Option<Holder> {
        let holder = self.memory.holder_at(address);
        self.turns.hand_over(holder);
        holder
    }

    /// Whether another thread waits for the holder of the bytes at `address`. If so, that thread serves this fault,
    /// too.
    fn is_kept_for_later(&self, address: usize) -> bool {
        self.turns.any_slow() && self.memory.holder_at(address).is_some_and(|holder| self.turns.keep(holder, address))
    }

    /// Serves the faults that were kept for this thread.
    fn serve_kept(&self, holder: Option<Holder>) {
        let Some(holder) = holder else { return };
        loop {
            let kept = self.turns.kept(holder);
            if kept.is_empty() {
                return;
            }
            kept.into_iter().for_each(|address| self.fetch(address, &|| ()));
        }
    }
}

/// Ends the process because bytes cannot be fetched. `how`: the operation that needed them.
pub fn end_without_bytes(how: &str, error: &FetchError) -> ! {
    end_process(&format!(
        "bytes of absent memory that this process has touched cannot be fetched any more ({how}: {error})"
    ))
}
