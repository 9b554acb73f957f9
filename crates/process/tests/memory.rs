//! Absent memory as a program uses it: memory that only stands for bytes in a store. The bytes are fetched when
//! something touches that memory. Whatever is done to such memory, in any order, it reads as if it had never been
//! absent. The kernel's userfaultfd, the threads that serve its faults, the store and the forks are real.

mod bed;

use std::io::Write;
use std::ops::Range;
use std::os::fd::AsFd;

use bed::regions::{KINDS, Part, Region};
use bed::{body, process};
use proptest::prelude::*;
use shunt_odb::fetch::Call;
use shunt_process::memory::outside::{self, AT_ONCE};
use shunt_process::system::parts;
use shunt_testbed::needs_root;

#[derive(Debug, Clone)]
enum Step {
    /// A reference, which names bytes in a store, is read into memory. The memory becomes absent.
    Receives(Part, u8),
    Loads(Part),
    Stores(Part, u8),
    /// The program reads a file into memory. The file fills only half of it.
    Reads(Part, u8),
    /// The library puts bytes into memory.
    Puts(Part, u8),
    Forgets(Part),
    /// Memory is written to a receiver that takes no references. The number is the most bytes that the receiver takes
    /// of the first write; 0: all.
    Sends(Part, usize),
    Copies(Part, Part),
    Fetches(Part),
    Frees(usize),
    Forks,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (Part::any(), any::<u8>()).prop_map(|(part, seed)| Step::Receives(part, seed)),
        2 => Part::any().prop_map(Step::Loads),
        2 => (Part::any(), any::<u8>()).prop_map(|(part, seed)| Step::Stores(part, seed)),
        2 => (Part::any(), any::<u8>()).prop_map(|(part, seed)| Step::Reads(part, seed)),
        2 => (Part::any(), any::<u8>()).prop_map(|(part, seed)| Step::Puts(part, seed)),
        1 => Part::any().prop_map(Step::Forgets),
        3 => (Part::any(), 0..100_000_usize).prop_map(|(part, most)| Step::Sends(part, most)),
        3 => (Part::any(), Part::any()).prop_map(|(from, to)| Step::Copies(from, to)),
        1 => Part::any().prop_map(Step::Fetches),
        1 => (0..KINDS.len()).prop_map(Step::Frees),
        1 => Just(Step::Forks),
    ];
    prop::collection::vec(step, 1..60)
}

fn take(regions: &mut Vec<Region>, step: &Step) {
    let memory = process().memory;
    let some = |bytes: &[u8]| bytes.iter().copied().map(Some).collect::<Vec<_>>();
    match step {
        Step::Receives(part, seed) => {
            let (region, part) = (&mut regions[part.0], part.range());
            let into = memory.can_be_absent(&region.addresses(&part));
            if into.is_empty() {
                return;
            }
            let part = into.start - region.memory.start..into.end - region.memory.start;
            let body = body(*seed, into.len());
            let made = process().receive(into, &body);
            region.expect(part, body.into_iter().map(|byte| made.then_some(byte)));
            assert!(made, "nothing keeps this memory from being absent");
        }
        Step::Loads(part) => {
            let (region, part) = (&regions[part.0], part.range());
            region.assert_is(&part, &region.loaded(&part), "loaded");
        }
        Step::Stores(part, seed) => {
            let (region, part) = (&mut regions[part.0], part.range());
            let bytes = body(*seed, part.len());
            // SAFETY: memory of this region.
            region.addresses(&part).zip(&bytes).for_each(|(at, byte)| unsafe { (at as *mut u8).write_volatile(*byte) });
            region.expect(part, some(&bytes));
        }
        Step::Reads(part, seed) => {
            let (region, part) = (&mut regions[part.0], part.range());
            let (into, bytes) = (region.addresses(&part), body(*seed, part.len() / 2));
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&bytes).unwrap();
            memory.overwriting(&into);
            // SAFETY: memory of this region.
            let read = unsafe { rustix::io::pread(file.as_fd(), slice(&into), 0).unwrap() };
            assert_eq!(read, bytes.len());
            region.expect(part, some(&bytes).into_iter().chain(std::iter::repeat(None)));
        }
        Step::Puts(part, seed) => {
            let (region, part) = (&mut regions[part.0], part.range());
            let bytes = body(*seed, part.len());
            // SAFETY: memory of this region.
            unsafe { memory.write(region.memory.start + part.start, &bytes) };
            region.expect(part, some(&bytes));
        }
        Step::Forgets(part) => {
            let (region, part) = (&mut regions[part.0], part.range());
            memory.forget(&region.addresses(&part));
            region.expect(part, std::iter::repeat(None));
        }
        Step::Sends(part, most) => {
            let (region, part) = (&regions[part.0], part.range());
            let (mut got, mut rest) = (Vec::new(), region.addresses(&part));
            let mut most = Some(*most).filter(|most| *most > 0);
            while !rest.is_empty() {
                let sent = std::cell::RefCell::new(Vec::new());
                let took = outside::write(memory, &[parts::of(&rest)], AT_ONCE, &Call::new(&|| false), |iov| {
                    let all = parts::slices(iov).iter().flat_map(|slice| slice.to_vec()).collect::<Vec<_>>();
                    let now = all.len().min(most.unwrap_or(usize::MAX));
                    sent.borrow_mut().extend_from_slice(&all[..now]);
                    Ok(now)
                });
                assert_eq!(took, Ok(sent.borrow().len()));
                got.append(&mut sent.borrow_mut());
                rest.start += took.unwrap_or(0);
                most = None;
            }
            region.assert_is(&part, &got, "sent");
        }
        Step::Copies(from, to) => {
            let (source, target) = (from.range(), to.range());
            let bytes = source.len().min(target.len());
            let (source, target) = (source.start..source.start + bytes, target.start..target.start + bytes);
            let (addresses, at) = (regions[from.0].addresses(&source), regions[to.0].addresses(&target).start);
            // SAFETY: memory of these regions.
            let copied = unsafe { memory.copy(&addresses, at) };
            let model: Vec<_> = regions[from.0].model[source].iter().map(|byte| byte.filter(|_| copied)).collect();
            regions[to.0].expect(target, model);
        }
        Step::Fetches(part) => {
            let (region, part) = (&regions[part.0], part.range());
            memory.fetch_range(&region.addresses(&part)).unwrap();
            assert!(memory.absent_within(&region.addresses(&part)).is_empty());
        }
        Step::Frees(at) => {
            drop(regions.remove(*at));
            regions.insert(*at, Region::new(KINDS[*at]));
        }
        Step::Forks => fork(regions),
    }
}

/// Makes a slice of some memory.
///
/// # Safety
/// The memory may be written.
unsafe fn slice<'a>(range: &Range<usize>) -> &'a mut [u8] {
    // SAFETY: the caller promises that this memory may be written.
    unsafe { std::slice::from_raw_parts_mut(range.start as *mut u8, range.len()) }
}

/// Checks that a child has all bytes that its parent has.
fn fork(regions: &[Region]) {
    let memory = process().memory;
    memory.fetch_for_fork();
    let still = memory.hold_still();
    // SAFETY: the child only reads memory and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_same = |region: &Region| {
            let here = region.memory.clone().map(|address| {
                // SAFETY: memory of this region.
                unsafe { (address as *const u8).read_volatile() }
            });
            here.zip(&region.model).all(|(byte, model)| model.is_none_or(|model| model == byte))
        };
        // SAFETY: ends this process, without any clean-up of the parent's state.
        unsafe { libc::_exit(i32::from(!regions.iter().all(is_same))) };
    }
    drop(still);
    let mut status = 0;
    // SAFETY: waits for the child, and writes how it ended.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "a child reads something else");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn memory_reads_as_if_it_had_never_been_absent(steps in steps()) {
        needs_root();
        process();
        let mut regions: Vec<_> = KINDS.into_iter().map(Region::new).collect();
        for step in &steps {
            take(&mut regions, step);
        }
        for region in &regions {
            let all = 0..region.model.len();
            region.assert_is(&all, &region.loaded(&all), "at the end");
        }
    }
}
