//! The threads that serve faults of absent memory (the paper's RZM): the program's threads wait for them in the kernel.
//!
//! One of them leads: it reads what the kernel says, and serves each fault itself. Where that takes long, because a holder says
//! nothing, another one leads from there on. Faults for the same holder wait until the first is served: so each silent holder
//! has one thread at most. All are started before memory becomes absent: to start a thread takes memory from glibc's heap,
//! whose locks somebody may hold who waits for a page.

use std::cell::Cell;
use std::collections::HashMap;
use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use shunt_odb::fetch::FetchError;
use shunt_odb::reference::Holder;
use shunt_sys::userfaultfd::{Event, Userfaultfd};

use crate::hooks::thread::start_library;
use crate::memory::Memory;

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
    roles: Mutex<Roles>,
    changed: Condvar,
    /// Whether a fault is waited for: nearly always, none is.
    any_slow: AtomicBool,
}

struct Roles {
    is_led: bool,
    is_tended: bool,
    tended: Instant,
    looked: Instant,
    /// Holders that a thread waits for, and addresses that stand for bytes of theirs and were touched meanwhile.
    slow: HashMap<Holder, Vec<usize>>,
}

/// Starts the threads. False: the process may have no more.
pub fn start(memory: &'static Memory, faults: Arc<Userfaultfd>) -> bool {
    let now = Instant::now();
    let roles = Roles { is_led: false, is_tended: false, tended: now, looked: now, slow: HashMap::new() };
    let (roles, changed, any_slow) = (Mutex::new(roles), Condvar::new(), AtomicBool::new(false));
    let service = Arc::new(Service { memory, faults, roles, changed, any_slow });
    let started = (0..THREADS).take_while(|_| {
        let service = Arc::clone(&service);
        start_library("shunt-faults", move || service.run())
    });
    started.count() >= THREADS_MIN
}

impl Service {
    fn roles(&self) -> MutexGuard<'_, Roles> {
        self.roles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        loop {
            self.wait_to_lead();
            while self.lead() {}
        }
    }

    /// Until nobody leads. Meanwhile one thread tends.
    fn wait_to_lead(&self) {
        let mut roles = self.roles();
        while roles.is_led {
            if roles.is_tended {
                roles = self.changed.wait(roles).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            roles.is_tended = true;
            let waited = self.changed.wait_timeout(roles, TENDED_EVERY).unwrap_or_else(PoisonError::into_inner);
            roles = waited.0;
            if roles.is_led && roles.tended.elapsed() >= TENDED_EVERY {
                roles.tended = Instant::now();
                let looks = roles.looked.elapsed() > OLD_EVERY;
                if looks {
                    roles.looked = Instant::now();
                }
                drop(roles);
                self.tend(looks);
                roles = self.roles();
            }
            roles.is_tended = false;
        }
        roles.is_led = true;
        // Another one tends.
        self.changed.notify_all();
    }

    /// What nobody asks for: it may wait for a holder.
    fn tend(&self, looks: bool) {
        if let Some(runtime) = crate::runtime::runtime() {
            crate::bypass::tend(runtime);
        }
        if self.memory.returns.waiting() > 0 {
            self.memory.holders.wake();
        }
        if looks {
            self.memory.fetch_old();
            self.memory.holders.close_idle_files();
        }
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
        let mut roles = self.roles();
        roles.is_led = false;
        if let Some(holder) = holder {
            roles.slow.entry(holder).or_default();
            self.any_slow.store(true, Ordering::Release);
        }
        self.changed.notify_all();
        holder
    }

    /// Whether a thread waits for the holder of these bytes, and serves this fault then.
    fn is_kept_for_later(&self, address: usize) -> bool {
        if !self.any_slow.load(Ordering::Acquire) {
            return false;
        }
        let Some(holder) = self.memory.holder_at(address) else { return false };
        match self.roles().slow.get_mut(&holder) {
            Some(kept) => {
                kept.push(address);
                true
            }
            None => false,
        }
    }

    /// Serves what was kept for this thread.
    fn serve_kept(&self, holder: Option<Holder>) {
        let Some(holder) = holder else { return };
        loop {
            let kept = {
                let mut roles = self.roles();
                let kept = roles.slow.get_mut(&holder).map(std::mem::take).unwrap_or_default();
                if kept.is_empty() {
                    roles.slow.remove(&holder);
                    self.any_slow.store(!roles.slow.is_empty(), Ordering::Release);
                    return;
                }
                kept
            };
            kept.into_iter().for_each(|address| self.fetch(address, &|| ()));
        }
    }
}

/// `how`: what needed them.
pub fn end_without_bytes(how: &str, error: &FetchError) -> ! {
    end_process(&format!("bytes that this process has read cannot be fetched any more ({how}: {error})"))
}

/// A program must not go on with bytes that are not the right ones, and there is no error that a load from memory
/// could return.
pub fn end_process(why: &str) -> ! {
    // In one call, and without memory: there may be none.
    let text = [IoSlice::new(b"shunt: "), IoSlice::new(why.as_bytes()), IoSlice::new(b"; it ends here\n")];
    let _ = rustix::io::writev(crate::descriptors::borrow(libc::STDERR_FILENO), &text);
    // SAFETY: takes no pointers that are kept: SIGBUS is what a lost page of a file is, too; with its default action,
    // because a handler that jumps back would go on.
    unsafe {
        libc::signal(libc::SIGBUS, libc::SIG_DFL);
        let mut only = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(only.as_mut_ptr());
        libc::sigaddset(only.as_mut_ptr(), libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, only.as_ptr(), std::ptr::null_mut());
        libc::raise(libc::SIGBUS);
        libc::_exit(128 + libc::SIGBUS)
    }
}
