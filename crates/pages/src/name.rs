//! Names of pages.
//!
//! A member sees names only. A name is a keyed hash of 128 bits (SipHash-2-4), so it tells nobody which file a page
//! belongs to, and whoever lacks the pool's key can neither guess a name nor choose files whose names collide. Among
//! 2^32 pages, two have the same name with a probability of 2^-65.

use siphasher::sip128::{Hash128, SipHasher24};

/// Number of pages in a group. A member gets whole groups, so one request fetches many neighbouring pages.
pub const GROUP_PAGES: u64 = 256;

/// Identity of a file for as long as it exists.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct FileId {
    /// Number of the file system, the same on all machines that mount it.
    pub filesystem: u64,
    pub inode: u64,
    /// Tells files that had the same inode number one after the other.
    pub generation: u64,
}

/// Name of a page of one version of a file.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PageName {
    pub high: u64,
    pub low: u64,
}

/// Name of a group of pages. It does not change with the file's version.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct GroupName(pub u64);

/// Gives names to the pages of one pool.
#[derive(Clone)]
pub struct Namer(SipHasher24);

impl Namer {
    /// Makes a namer from the pool's key, which all mounts of the pool share.
    pub fn new(key: &[u8; 16]) -> Self {
        Self(SipHasher24::new_with_key(key))
    }

    /// Returns the name of a page: `index` is its offset in the file, in pages.
    pub fn page(&self, file: FileId, version: u64, index: u64) -> PageName {
        let Hash128 { h1, h2 } =
            self.hash(&[u64::from(b'p'), file.filesystem, file.inode, file.generation, version, index]);
        PageName { high: h1, low: h2 }
    }

    /// Returns the name of the group that a page is in.
    pub fn group(&self, file: FileId, index: u64) -> GroupName {
        let group = index / GROUP_PAGES;
        GroupName(self.hash(&[u64::from(b'g'), file.filesystem, file.inode, file.generation, group]).h1)
    }

    fn hash<const N: usize>(&self, words: &[u64; N]) -> Hash128 {
        let mut bytes = [[0; 8]; N];
        for (to, word) in bytes.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        self.0.hash(bytes.as_flattened())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId { filesystem: 1, inode: 2, generation: 3 };

    #[test]
    fn names_differ_in_each_part() {
        let namer = Namer::new(&[7; 16]);
        let other = |filesystem, inode, generation| FileId { filesystem, inode, generation };
        let names = [
            namer.page(FILE, 4, 5),
            namer.page(FILE, 4, 6),
            namer.page(FILE, 5, 5),
            namer.page(other(1, 2, 4), 4, 5),
            namer.page(other(1, 3, 3), 4, 5),
            namer.page(other(2, 2, 3), 4, 5),
            Namer::new(&[8; 16]).page(FILE, 4, 5),
        ];
        for (at, name) in names.iter().enumerate() {
            assert!(!names[..at].contains(name), "name {at} is that of an earlier one");
        }
    }

    #[test]
    fn a_group_has_its_pages_and_no_others() {
        let namer = Namer::new(&[7; 16]);
        assert_eq!(namer.group(FILE, 0), namer.group(FILE, GROUP_PAGES - 1));
        assert_ne!(namer.group(FILE, GROUP_PAGES - 1), namer.group(FILE, GROUP_PAGES));
    }

    #[test]
    fn a_name_is_the_same_on_all_machines() {
        let name = Namer::new(&[7; 16]).page(FILE, 4, 5);
        assert_eq!((name.high, name.low), (6_550_525_133_263_211_753, 1_143_578_197_027_900_965));
    }
}
