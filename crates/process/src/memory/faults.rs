//! The threads that serve faults of absent memory (the paper's RZM): the program's threads wait for them in the kernel.
//!
//! One of them leads: it reads what the kernel says, and serves each fault itself. Where that takes long, because a holder says
//! nothing, another one leads from there on. Faults for the same holder wait until the first is served: so each silent holder
//! has one thread at most. All are started before memory becomes absent: to start a thread takes memory from glibc's heap,
//! whose locks somebody may hold who waits for a page.

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

/// One leads, one tends, and so many more holders may be silent at a time before faults wait, for a second at most.
const THREADS: usize = 3;
/// As few as may be: so one can lead while another one waits.
const THREADS_MIN: usize = 2;

/// How often shares go back that are too few to go at once.
const TENDED_EVERY: Duration = Duration::from_millis(100);

/// How often is looked for what has been absent for long.
const OLD_EVERY: Duration = Duration::from_secs(3);

/// What the threads have in common.
struct Service {
    memory: &'static Memory,
    faults: Arc<Userfaultfd>,
    /// By holders that a thread waits for, the addresses that stand for bytes of theirs and were touched meanwhile.
    turns: Turns<Holder, usize>,
    looked: Mutex<Instant>,
}

/// Starts the threads. False: the process may have no more.
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

    /// What nobody asks for: it may wait for a holder.
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

    /// Handles what the kernel says next. False: another thread leads now.
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

    /// Serves a fault. Where another thread leads meanwhile: for which holder it took so long, if that is known.
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

    /// Has another thread lead, and what is touched of the same holder's bytes wait.
    fn hand_over(&self, address: usize) -> Option<Holder> {
        let holder = self.memory.holder_at(address);
        self.turns.hand_over(holder);
        holder
    }

    /// Whether a thread waits for the holder of these bytes, and serves this fault then.
    fn is_kept_for_later(&self, address: usize) -> bool {
        self.turns.any_slow() && self.memory.holder_at(address).is_some_and(|holder| self.turns.keep(holder, address))
    }

    /// Serves what was kept for this thread.
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

/// `how`: what needed them.
pub fn end_without_bytes(how: &str, error: &FetchError) -> ! {
    end_process(&format!("bytes that this process has read cannot be fetched any more ({how}: {error})"))
}
