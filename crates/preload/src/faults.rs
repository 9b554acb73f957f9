//! The thread that serves faults of absent memory (the paper's RZM): the program's threads wait for it in the kernel.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use shunt_odb::fetch::FetchError;
use shunt_sys::userfaultfd::{Event, Userfaultfd};

use crate::inside::Inside;
use crate::memory::Memory;

/// How often shares go back that are too few to go at once.
const RETURNS_EVERY: Duration = Duration::from_millis(100);

/// How often is looked for what has been absent for long.
const OLD_EVERY: Duration = Duration::from_secs(3);

/// Starts the thread. False: the process may have no more threads.
pub fn start(memory: &'static Memory, faults: Arc<Userfaultfd>) -> bool {
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are written before they are read. The new thread inherits a mask that blocks all: signals are
    // the program's threads'.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let builder = std::thread::Builder::new().name("shunt-faults".into()).stack_size(256 << 10);
    let started = crate::hooks::thread::start_ours(|| builder.spawn(move || serve(memory, &faults)));
    // SAFETY: the mask that the first call wrote.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    started.is_ok()
}

fn serve(memory: &Memory, faults: &Userfaultfd) {
    // Its own system calls end no turn of the program: whose thread may hold Handings, and wait for a lock that this one has
    // just dropped and is to wake it for.
    let _inside = Inside::enter();
    let (mut looked, mut tended) = (Instant::now(), Instant::now());
    let every = Timespec { tv_sec: 0, tv_nsec: RETURNS_EVERY.subsec_nanos().into() };
    loop {
        let is_idle = !faults.wait(every);
        if let Some(runtime) = crate::runtime::runtime()
            && tended.elapsed() >= RETURNS_EVERY
        {
            tended = Instant::now();
            crate::bypass::tend(runtime);
        }
        if is_idle && memory.returns.waiting() > 0 {
            memory.holders.send_returns(&memory.returns);
        }
        if looked.elapsed() > OLD_EVERY {
            looked = Instant::now();
            memory.fetch_old();
            memory.holders.close_idle_files();
        }
        while let Ok(Some(event)) = faults.next_event() {
            match event {
                Event::Fault(address) => {
                    if let Err(error) = memory.serve_fault(faults, address) {
                        end_without_bytes("touched", &error);
                    }
                }
                Event::Remap { from, to, bytes } => memory.moved(from, to, bytes),
                Event::Unmap { start, end } => memory.unmapped(faults, &(start..end)),
            }
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
    let text = format!("shunt: {why}; it ends here\n");
    let _ = rustix::io::write(crate::descriptors::borrow(libc::STDERR_FILENO), text.as_bytes());
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
