//! Threads touch memory while another thread makes it absent again and again, each time for new bytes. *Absent* memory
//! stands for bytes in a store, which are fetched when the memory is touched. Each touch finds the old bytes or the new
//! ones, and no others. No thread waits for ever.

mod bed;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use bed::{Random, process};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use shunt_odb::fetch::Call;
use shunt_process::memory::outside::{self, AT_ONCE};
use shunt_process::memory::{blocks, has_threads};
use shunt_process::system::parts;
use shunt_sys::userfaultfd::PAGE_BYTES;
use shunt_testbed::needs_root;

const PAGES: usize = 24;
/// The test ends before a page gets this generation. A generation is a number that grows each time the page gets new
/// bytes. Each byte of the page is that number.
const GENERATIONS: u8 = 250;

struct Shared {
    memory: Range<usize>,
    /// By page: the newest generation that it has or is about to get.
    begun: [AtomicU8; PAGES],
    /// By page: the newest generation that it has for certain.
    done: [AtomicU8; PAGES],
    over: AtomicBool,
}

impl Shared {
    fn new(start: usize) -> Self {
        let generations = || [const { AtomicU8::new(0) }; PAGES];
        let memory = start..start + PAGES * PAGE_BYTES;
        Self { memory, begun: generations(), done: generations(), over: AtomicBool::new(false) }
    }

    fn part(&self, pages: &Range<usize>) -> Range<usize> {
        self.memory.start + pages.start * PAGE_BYTES..self.memory.start + pages.end * PAGE_BYTES
    }

    /// Reads pages by `how`, and checks that each page has bytes of a generation that it may have.
    fn look(&self, pages: &Range<usize>, how: impl FnOnce(&Range<usize>) -> Vec<u8>) {
        let before: Vec<u8> = pages.clone().map(|page| self.done[page].load(Ordering::SeqCst)).collect();
        let got = how(&self.part(pages));
        assert_eq!(got.len(), pages.len() * PAGE_BYTES);
        for ((page, bytes), before) in pages.clone().zip(got.chunks(PAGE_BYTES)).zip(before) {
            let after = self.begun[page].load(Ordering::SeqCst);
            let wrong = bytes.iter().find(|byte| !(before..=after).contains(byte));
            assert!(wrong.is_none(), "page {page} has {wrong:?}, and may have {before} to {after}");
        }
    }

    fn look_on(&self, mut random: Random) {
        while !self.over.load(Ordering::SeqCst) {
            let first = random.below(PAGES);
            let pages = first..first + 1 + random.below(PAGES - first);
            match random.below(12) {
                0..4 => self.look(&(first..first + 1), loaded),
                4..6 => self.look(&pages, loaded),
                6..8 => self.look(&pages, sent),
                8..11 => self.look(&pages, copied),
                _ => {
                    // The library does the same around a fork.
                    process().memory.fetch_for_fork();
                    drop(process().memory.hold_still());
                }
            }
        }
    }
}

/// Reads with the program's own instructions, not by a system call.
fn loaded(range: &Range<usize>) -> Vec<u8> {
    // SAFETY: memory of the test.
    range.clone().map(|address| unsafe { (address as *const u8).read_volatile() }).collect()
}

/// Reads by a write to a receiver that takes no references.
fn sent(range: &Range<usize>) -> Vec<u8> {
    let got = std::cell::RefCell::new(Vec::new());
    let wrote = outside::write(process().memory, &[parts::of(range)], AT_ONCE, &Call::new(&|| false), |iov| {
        let now: Vec<u8> = parts::slices(iov).iter().flat_map(|slice| slice.to_vec()).collect();
        got.borrow_mut().extend_from_slice(&now);
        Ok(now.len())
    });
    assert_eq!(wrote, Ok(range.len()));
    got.into_inner()
}

/// Reads a copy that the library makes in a block. The copy may be absent, too.
fn copied(range: &Range<usize>) -> Vec<u8> {
    let memory = process().memory;
    let target = blocks::allocate(range.len()).unwrap();
    let target = target..target + range.len();
    // SAFETY: memory of the test, and a block that is not used elsewhere.
    if !unsafe { memory.copy(range, target.start) } {
        memory.overwriting(&target);
        // SAFETY: memory of the test, and a block that is not used elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(range.start as *const u8, target.start as *mut u8, range.len()) };
    }
    let got = loaded(&target);
    memory.forget(&target);
    blocks::free(target.start);
    got
}

fn receive_again_and_again(shared: &Shared, random: &mut Random) {
    let memory = process().memory;
    for turn in 0.. {
        let first = random.below(PAGES);
        let pages = first..first + 1 + random.below(PAGES - first);
        let generations: Vec<u8> = pages.clone().map(|page| shared.begun[page].load(Ordering::SeqCst) + 1).collect();
        if generations.contains(&GENERATIONS) {
            return;
        }
        pages.clone().zip(&generations).for_each(|(page, to)| shared.begun[page].store(*to, Ordering::SeqCst));
        let body: Vec<u8> = generations.iter().flat_map(|to| [*to; PAGE_BYTES]).collect();
        assert!(process().receive(shared.part(&pages), &body));
        pages.clone().zip(&generations).for_each(|(page, to)| shared.done[page].store(*to, Ordering::SeqCst));
        if turn % 8 == 0 {
            memory.fetch_range(&shared.part(&pages)).unwrap();
        }
    }
}

fn test(start: usize, seed: u64) {
    let shared = Shared::new(start);
    // SAFETY: memory of the test, which is not used elsewhere yet.
    unsafe { std::ptr::write_bytes(start as *mut u8, 0, PAGES * PAGE_BYTES) };
    println!("seed {seed}");
    std::thread::scope(|scope| {
        let shared = &shared;
        let threads: Vec<_> = (1..4).map(|number| scope.spawn(move || shared.look_on(Random(seed + number)))).collect();
        let received = catch_unwind(AssertUnwindSafe(|| receive_again_and_again(shared, &mut Random(seed))));
        shared.over.store(true, Ordering::SeqCst);
        received.unwrap();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    shared.look(&(0..PAGES), loaded);
}

#[test]
fn threads_find_the_old_bytes_or_the_new() {
    needs_root();
    process();
    has_threads();
    let seed = u64::from(std::process::id());
    for turn in 0..10 {
        let block = blocks::allocate(PAGES * PAGE_BYTES).unwrap();
        test(block, seed + 1000 * turn);
        process().memory.forget(&(block..block + PAGES * PAGE_BYTES));
        blocks::free(block);
        let (flags, access) = (MapFlags::PRIVATE, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapping = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGES * PAGE_BYTES, access, flags).unwrap() };
        test(mapping as usize, seed + 1000 * turn + 500);
    }
}
