//! Threads that free each other's blocks of memory while children are forked, and programs with another heap (malloc)
//! than glibc's.

use std::fs;
use std::path::{Path, PathBuf};

use shunt_odb::store::Limits;

use crate::actors::{built, conversations, seeds};
use crate::bed::Bed;
use crate::transfer::transfer;

/// Number of blocks of 64 KiB that each thread sends.
const BLOCKS: u32 = 1500;

struct Heap {
    name: &'static str,
    /// Libraries that a program is linked with to have this heap.
    libraries: &'static [&'static str],
}

const GLIBC: Heap = Heap { name: "libc", libraries: &[] };

/// Heaps other than glibc's. The last one is linked into the program itself, so its functions come before those of the
/// preloaded library.
const OTHERS: [Heap; 4] = [
    Heap { name: "libtcmalloc", libraries: &["-l:libtcmalloc_minimal.so.4"] },
    Heap { name: "libjemalloc.so", libraries: &["-l:libjemalloc.so.2"] },
    Heap { name: "libmimalloc.so", libraries: &["-l:libmimalloc.so.2"] },
    Heap {
        name: "<jemalloc>",
        libraries: &["-Wl,--whole-archive", "-l:libjemalloc.a", "-Wl,--no-whole-archive", "-lstdc++", "-lm"],
    },
];

impl Heap {
    /// Builds a program that has this heap.
    fn with(&self, directory: &Path, source: &str, name: &str) -> PathBuf {
        let flags = [&["-O2", "-Wall", "-pthread", "-Wl,--no-as-needed"], self.libraries].concat();
        let program = built(directory, source, name, "gcc", &flags);
        let has = fs::read(&program).unwrap().windows(self.name.len()).any(|bytes| bytes == self.name.as_bytes());
        assert!(has, "{source} does not bring {}", self.name);
        program
    }
}

fn crowd(heap: &Heap) {
    let bed = Bed::of(2, Limits::default());
    let program = heap.with(&bed.path(), "crowd.c", "crowd");
    transfer(&bed, &program, &[BLOCKS.to_string()], heap.name);
}

#[test]
fn threads_that_free_each_others_blocks_and_children_all_find_the_bytes() {
    crowd(&GLIBC);
}

#[test]
fn so_they_do_with_other_heaps() {
    OTHERS.iter().for_each(crowd);
}

#[test]
fn programs_with_other_heaps_get_what_they_would_get_without() {
    for heap in &OTHERS {
        println!("{}", heap.name);
        conversations(|directory| heap.with(directory, "actor.c", "actor"), 3, Limits::default(), seeds(1));
    }
}
