//! Memory of the program, and a model of what it has to contain.

use std::ops::Range;

use proptest::prelude::*;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use shunt_process::memory::blocks;
use shunt_sys::userfaultfd::PAGE_BYTES;

use super::process;

/// Kind of a program's memory: a block of malloc, or a mapping that the program makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Block,
    Mapping,
}

pub const KINDS: [(Kind, usize); 5] = [
    (Kind::Block, 3 * PAGE_BYTES - 100),
    (Kind::Block, 17 * PAGE_BYTES),
    (Kind::Block, 40 * PAGE_BYTES + 7),
    (Kind::Mapping, 9 * PAGE_BYTES),
    (Kind::Mapping, 33 * PAGE_BYTES),
];

pub struct Region {
    kind: Kind,
    pub memory: Range<usize>,
    /// Byte that each place of `memory` has to contain; `None`: any byte.
    pub model: Vec<Option<u8>>,
}

impl Region {
    pub fn new((kind, bytes): (Kind, usize)) -> Self {
        let start = match kind {
            Kind::Block => blocks::allocate(bytes).unwrap(),
            Kind::Mapping => {
                let (flags, access) = (MapFlags::PRIVATE, ProtFlags::READ | ProtFlags::WRITE);
                // SAFETY: a new mapping at an address of the kernel's choice.
                unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, flags).unwrap() as usize }
            }
        };
        // A new mapping has zeros. A block may have been in use before, so its bytes are unknown.
        let known = (kind == Kind::Mapping).then_some(0);
        Self { kind, memory: start..start + bytes, model: vec![known; bytes] }
    }

    pub fn addresses(&self, part: &Range<usize>) -> Range<usize> {
        self.memory.start + part.start..self.memory.start + part.end
    }

    pub fn expect(&mut self, part: Range<usize>, bytes: impl IntoIterator<Item = Option<u8>>) {
        self.model[part].iter_mut().zip(bytes).for_each(|(model, byte)| *model = byte);
    }

    pub fn assert_is(&self, part: &Range<usize>, bytes: &[u8], what: &str) {
        assert_eq!(bytes.len(), part.len(), "{what}");
        for (at, (byte, model)) in bytes.iter().zip(&self.model[part.clone()]).enumerate() {
            assert!(model.is_none_or(|model| model == *byte), "{what}: byte {} of {part:?} is {byte}", part.start + at);
        }
    }

    /// Reads a part with the program's own instructions, not by a system call.
    pub fn loaded(&self, part: &Range<usize>) -> Vec<u8> {
        // SAFETY: memory of this region.
        self.addresses(part).map(|address| unsafe { (address as *const u8).read_volatile() }).collect()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        process().memory.forget(&self.memory);
        match self.kind {
            Kind::Block => blocks::free(self.memory.start),
            // SAFETY: the mapping is not used any more.
            Kind::Mapping => unsafe { munmap(self.memory.start as *mut _, self.memory.len()).unwrap() },
        }
    }
}

/// A part of a region: the region's index, and two places in units of 1/65,536 of the region's length.
#[derive(Debug, Clone, Copy)]
pub struct Part(pub usize, u16, u16);

impl Part {
    /// Any part of any region.
    pub fn any() -> impl Strategy<Value = Self> {
        (0..KINDS.len(), any::<u16>(), any::<u16>()).prop_map(|(at, from, to)| Self(at, from, to))
    }

    pub fn range(self) -> Range<usize> {
        let bytes = KINDS[self.0].1;
        let place = |at: u16| (at as usize * bytes) >> 16;
        place(self.1.min(self.2))..place(self.1.max(self.2)) + 1
    }
}
