//! Checks of a program's file: whether a library can be preloaded into it, and sees its calls.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, fgetxattr, fstat, openat};
use rustix::io::pread;

/// Number of bytes that are read of a file. A program's headers are at its beginning, and so is the line that names a
/// script's interpreter.
const LOOKED: usize = 4096;
/// Most scripts in a row, each the interpreter of the one before, that the kernel follows (fs/exec.c).
const SCRIPTS: usize = 5;
/// Constants of <elf.h>.
const EM_X86_64: u16 = 62;
const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;

/// Opens a file to look at. Returns `None` if it cannot be read.
#[must_use]
pub fn open(directory: Option<BorrowedFd<'_>>, path: &CStr) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    openat(directory.unwrap_or(CWD), path, flags, Mode::empty()).ok()
}

/// Opens the file that execvp(3) would find for a name. `path`: the directories to search, as in the variable PATH.
#[must_use]
pub fn find(name: &CStr, path: &[u8]) -> Option<OwnedFd> {
    if name.to_bytes().contains(&b'/') {
        return open(None, name);
    }
    path.split(|byte| *byte == b':').find_map(|directory| {
        let directory = if directory.is_empty() { b"." } else { directory };
        let full = [directory, b"/", name.to_bytes_with_nul()].concat();
        open(None, CStr::from_bytes_with_nul(&full).ok()?)
    })
}

/// Whether the library gets into the program in this file, and sees its calls. It does not if the program is for
/// another machine than x86-64, if it is linked statically, or if its file gives it privileges. Nor does it if the
/// program is written in Go, whose programs make system calls themselves. If the file does not tell, the answer is yes.
#[must_use]
pub fn is_covered(file: OwnedFd) -> bool {
    let mut file = file;
    for _ in 0..SCRIPTS {
        let mut start = [0; LOOKED];
        let Ok(bytes) = pread(&file, &mut start, 0) else { return true };
        let start = &start[..bytes];
        let Some(interpreter) = interpreter(start) else { return is_covered_program(file.as_fd(), start) };
        let Some(next) = open(None, &interpreter) else { return true };
        file = next;
    }
    true
}

/// The interpreter that a script's first line names; `None` if the file is no script.
fn interpreter(start: &[u8]) -> Option<std::ffi::CString> {
    let line = start.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let name = line.split(|byte| matches!(byte, b' ' | b'\t')).find(|word| !word.is_empty())?;
    std::ffi::CString::new(name).ok()
}

fn is_covered_program(file: BorrowedFd<'_>, start: &[u8]) -> bool {
    let Some(program) = Program::of(start) else { return true };
    let is_go = || program.segments(PT_NOTE).any(|segment| is_go(file, segment));
    program.machine == EM_X86_64 && program.segments(PT_INTERP).next().is_some() && !has_privileges(file) && !is_go()
}

fn has_privileges(file: BorrowedFd<'_>) -> bool {
    const SET_ID: u32 = 0o6000;
    let sets_id = fstat(file).is_ok_and(|status| status.st_mode & SET_ID != 0);
    sets_id || fgetxattr(file, "security.capability", &mut [0u8; 64]).is_ok_and(|bytes| bytes > 0)
}

/// Machine and program headers of a 64-bit ELF file.
struct Program<'a> {
    machine: u16,
    headers: &'a [u8],
    each: usize,
}

/// Offset of a segment in the file, and its length.
#[derive(Clone, Copy)]
struct Segment {
    offset: u64,
    bytes: u64,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

impl<'a> Program<'a> {
    /// Returns `None` if the file is no 64-bit ELF file, or its program headers are not within `start`.
    fn of(start: &'a [u8]) -> Option<Self> {
        const CLASS_64: u8 = 2;
        if !start.starts_with(b"\x7fELF") || start.get(4) != Some(&CLASS_64) {
            return None;
        }
        let machine = u16::from_le_bytes(number(start, 18)?);
        let from = usize::try_from(u64::from_le_bytes(number(start, 32)?)).ok()?;
        let each = usize::from(u16::from_le_bytes(number(start, 54)?));
        let all = each.checked_mul(usize::from(u16::from_le_bytes(number(start, 56)?)))?;
        let headers = start.get(from..from.checked_add(all)?)?;
        (each >= 56).then_some(Self { machine, headers, each })
    }

    fn segments(&self, kind: u32) -> impl Iterator<Item = Segment> {
        self.headers.chunks_exact(self.each).filter_map(move |header| {
            let segment = Segment {
                offset: u64::from_le_bytes(number(header, 8)?),
                bytes: u64::from_le_bytes(number(header, 32)?),
            };
            (u32::from_le_bytes(number(header, 0)?) == kind).then_some(segment)
        })
    }
}

/// Whether a segment of notes (PT_NOTE) has a note that only Go writes.
fn is_go(file: BorrowedFd<'_>, segment: Segment) -> bool {
    let mut notes = [0; 1024];
    let most = usize::try_from(segment.bytes).unwrap_or(usize::MAX).min(notes.len());
    let Ok(bytes) = pread(file, &mut notes[..most], segment.offset) else { return false };
    let mut rest = &notes[..bytes];
    // A note is three numbers of 4 bytes, a name and a description. Name and description are padded to a multiple of 4
    // bytes.
    while let (Some(name), Some(said)) = (number(rest, 0), number(rest, 4)) {
        let [name, said] = [name, said].map(|bytes| u32::from_le_bytes(bytes) as usize);
        if rest.get(12..).is_some_and(|rest| name == 4 && rest.starts_with(b"Go\0\0")) {
            return true;
        }
        let Some(next) =
            [name, said].iter().try_fold(12usize, |at, bytes| at.checked_add(bytes.checked_next_multiple_of(4)?))
        else {
            return false;
        };
        let Some(behind) = rest.get(next..) else { return false };
        rest = behind;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covered(path: &std::path::Path) -> bool {
        let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        is_covered(open(None, &path).unwrap())
    }

    #[test]
    fn this_program_is_covered_and_what_is_none_may_be() {
        assert!(covered(&std::env::current_exe().unwrap()));
        assert!(covered(std::path::Path::new("/etc/passwd")));
    }

    #[test]
    fn a_scripts_interpreter_counts() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        // A file that has only the headers of a program, and none for an interpreter.
        let mut header = [0u8; 120];
        header[..5].copy_from_slice(b"\x7fELF\x02");
        for (at, number) in [(18, 62u16), (32, 64), (54, 56), (56, 1)] {
            header[at..at + 2].copy_from_slice(&number.to_le_bytes());
        }
        let bare = write("bare", &header);
        assert!(!covered(&bare));
        header[64] = PT_INTERP as u8;
        assert!(covered(&write("linked", &header)));
        let script = write("script", format!("#! {} -x\n", bare.display()).as_bytes());
        assert!(!covered(&script));
        assert!(!covered(&write("of-script", format!("#!{}\n", script.display()).as_bytes())));
        let endless = dir.path().join("endless");
        std::fs::write(&endless, format!("#!{}\n", endless.display())).unwrap();
        assert!(covered(&endless));
    }

    #[test]
    fn a_program_of_gos_makes_its_calls_itself() {
        let note = |name: &[u8], said: &[u8]| {
            let filled = |bytes: &[u8]| [bytes, &vec![0; bytes.len().next_multiple_of(4) - bytes.len()]].concat();
            let numbers = [name.len(), said.len(), 4].map(|number| (number as u32).to_le_bytes()).concat();
            [numbers, filled(name), filled(said)].concat()
        };
        let file = |notes: &[u8]| {
            let file = tempfile::tempfile().unwrap();
            std::io::Write::write_all(&mut &file, &[&[0; 64], notes].concat()).unwrap();
            let segment = Segment { offset: 64, bytes: notes.len() as u64 };
            is_go(file.as_fd(), segment)
        };
        let (gnu, go) = (note(b"GNU\0", b"an odd number of bytes"), note(b"Go\0\0", b"build"));
        assert!(file(&go) && file(&[gnu.clone(), go.clone()].concat()));
        assert!(!file(&gnu) && !file(&[]) && !file(&go[..15]) && !file(&note(b"Gopher\0", b"build")));
        assert!(!file(&[&u32::MAX.to_le_bytes()[..], &u32::MAX.to_le_bytes(), &go].concat()));
    }

    #[test]
    fn a_name_is_found_as_the_shell_finds_it() {
        let found = |name: &CStr, path: &str| find(name, path.as_bytes()).is_some();
        assert!(found(c"sh", "/nowhere:/bin") && found(c"/bin/sh", "") && !found(c"sh", "/nowhere"));
    }
}
