//! Which memory is a thread's stack, even while a coroutine runs on another stack.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

use shunt_process::system::stack::is_own;

const BYTES: usize = 256 << 10;

/// Address that the coroutine asks about.
static ADDRESS: AtomicUsize = AtomicUsize::new(0);
/// Answers that the coroutine got. Bit 0: whether one of its own variables is in a stack. Bit 1: whether [`ADDRESS`]
/// is.
static TOLD: AtomicUsize = AtomicUsize::new(0);

fn ask() -> usize {
    let here = 0u8;
    let own = &raw const here as usize;
    let asked = [own, ADDRESS.load(Ordering::Relaxed)];
    asked.iter().enumerate().map(|(bit, address)| usize::from(is_own(*address)) << bit).sum()
}

extern "C" fn coroutine() {
    TOLD.store(ask(), Ordering::Relaxed);
}

/// Runs the coroutine on the stack `stack`, until it has ended.
fn on_another(stack: &mut [u8]) {
    let (mut back, mut there) = (MaybeUninit::<libc::ucontext_t>::uninit(), MaybeUninit::<libc::ucontext_t>::uninit());
    // SAFETY: both contexts are filled before they are used. The stack lives until the coroutine has ended, and
    // execution continues behind swapcontext(3) then.
    unsafe {
        assert_eq!(libc::getcontext(there.as_mut_ptr()), 0);
        let context = there.assume_init_mut();
        context.uc_stack.ss_sp = stack.as_mut_ptr().cast();
        context.uc_stack.ss_size = stack.len();
        context.uc_link = back.as_mut_ptr();
        libc::makecontext(there.as_mut_ptr(), coroutine, 0);
        assert_eq!(libc::swapcontext(back.as_mut_ptr(), there.as_ptr()), 0);
    }
}

/// Memory in a separate mapping, for a coroutine's stack or to be asked about.
fn mapping(bytes: usize) -> Vec<u8> {
    vec![0u8; bytes]
}

fn ask_all(stack: &mut [u8]) {
    let (elsewhere, on_own) = (mapping(4 * BYTES), 0u8);
    ADDRESS.store(elsewhere.as_ptr() as usize, Ordering::Relaxed);
    assert_eq!(ask(), 0b01, "on the thread's own");
    on_another(stack);
    assert_eq!(TOLD.load(Ordering::Relaxed) & 0b01, 0b01, "on the coroutine's");
    // The thread's own stack counts, too, because the library will run on it again.
    ADDRESS.store(&raw const on_own as usize, Ordering::Relaxed);
    on_another(stack);
    assert_eq!(TOLD.load(Ordering::Relaxed), 0b11, "on the coroutine's");
}

/// The test relies on where the kernel usually puts mappings: each new one below the one before.
#[test]
fn a_coroutines_stack_is_a_stack() {
    // The end of this mapping lies far above the coroutine's stack.
    let other = mapping(64 << 20);
    let mut stack = mapping(BYTES);
    ask_all(&mut stack);
    ADDRESS.store(other.as_ptr() as usize + other.len() - 1, Ordering::Relaxed);
    on_another(&mut stack);
    assert_eq!(TOLD.load(Ordering::Relaxed), 0b01, "what lies between two stacks");
    // Once more in a new thread, whose stack lies below the coroutine's.
    std::thread::spawn(move || ask_all(&mut stack)).join().unwrap();
}
