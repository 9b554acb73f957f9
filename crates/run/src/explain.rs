//! `shunt run --explain PROGRAM`: says which of a program's calls the library of `shunt run` will see. It reads the
//! program's file, and does not run it.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader};
use object::{Object, elf};

use crate::calls::CALLS;

/// Extent to which the library covers a program.
#[derive(Debug, PartialEq, Eq)]
pub enum Coverage {
    /// The calls that the program imports and that the library replaces, by the table [`CALLS`].
    Calls(Vec<String>),
    /// The library would not be loaded, or would see no calls, for this reason.
    None(&'static str),
}

/// Clients to which the machine that has a body can send it in the program's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clients {
    /// Clients over TCP. The program does not import OpenSSL's functions that write.
    Tcp,
    /// Clients over TCP, and over TLS 1.3: the program writes by OpenSSL, to sockets.
    Tls,
    /// Clients over TCP. To clients over TLS the program sends the bodies itself, and has to fetch them for that. The
    /// reason is that its OpenSSL writes to a BIO (OpenSSL's I/O object) of the program's own, and not to a socket.
    OwnBio,
}

impl Clients {
    fn of(imports: &BTreeSet<&str>) -> Self {
        match ["SSL_write", "SSL_write_ex"].iter().any(|name| imports.contains(name)) {
            false => Self::Tcp,
            true if imports.contains("BIO_meth_new") => Self::OwnBio,
            true => Self::Tls,
        }
    }
}

impl fmt::Display for Clients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "over TCP",
            Self::Tls => "over TCP, and over TLS 1.3 with OpenSSL 3",
            Self::OwnBio => "over TCP; over TLS it fetches bodies, because it gives OpenSSL a BIO of its own",
        })
    }
}

/// Facts that a program's file tells about it.
#[derive(Debug)]
pub struct Explanation {
    program: PathBuf,
    pub coverage: Coverage,
    /// Clients that do not run under `shunt run`, and to which another machine can send bodies in the program's place,
    /// if the program does not look at these bodies.
    pub clients: Clients,
    /// Remarks on calls that the library does not cover, or not in full.
    pub remarks: Vec<&'static str>,
}

/// Calls that the library does not cover, or not in full, and what that means for the program.
const AROUND: [(&str, &str); 5] = [
    (
        "io_uring_setup",
        "sets up io_uring, which fails with ENOSYS as on a kernel without it; the program must work without io_uring",
    ),
    (
        "io_uring_queue_init",
        "sets up io_uring by liburing, which fails with ENOSYS as on a kernel without it; the program must work \
         without io_uring",
    ),
    ("dlmopen", "loads libraries into a separate linker namespace (dlmopen), whose calls are not covered"),
    (
        "vmsplice",
        "gives memory to pipes without a copy (vmsplice); absent memory is fetched first, which is correct but slower",
    ),
    ("syscall", "makes some system calls by number; calls through syscall(2) are covered, its own machine code is not"),
];

/// Reads a program's file.
///
/// # Errors
/// Returns an error where the file cannot be read, or is no 64-bit ELF program.
pub fn explain(program: &Path) -> Result<Explanation> {
    let bytes = std::fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    let file: ElfFile64 = ElfFile64::parse(&*bytes).with_context(|| {
        format!("{} is not a 64-bit ELF program; explain its interpreter instead", program.display())
    })?;
    let headers = file.elf_header().program_headers(file.endian(), &*bytes)?;
    let interpreter = headers.iter().any(|header| header.p_type(file.endian()) == elf::PT_INTERP);
    let imports = file.imports().context("its list of imported functions cannot be read")?;
    let names: BTreeSet<&str> = imports.iter().filter_map(|import| std::str::from_utf8(import.name()).ok()).collect();
    let coverage = if !interpreter {
        Coverage::None("it is statically linked, as Go programs are, and no library can be preloaded")
    } else if file.section_by_name(".note.go.buildid").is_some() {
        Coverage::None("it is a Go program, and Go makes its system calls without the C library")
    } else if file.elf_header().e_machine(file.endian()) != elf::EM_X86_64 {
        Coverage::None("it is not for x86_64")
    } else {
        Coverage::Calls(
            CALLS
                .iter()
                .filter(|(class, _)| class.is_replaced())
                .flat_map(|(_, known)| *known)
                .filter(|name| names.contains(*name))
                .map(|name| (*name).into())
                .collect(),
        )
    };
    let privileged = is_privileged(program)?;
    let coverage = if privileged {
        Coverage::None("it is setuid, setgid or has file capabilities, and the loader ignores LD_PRELOAD")
    } else {
        coverage
    };
    let remarks = AROUND.iter().filter(|(name, _)| names.contains(name)).map(|(_, remark)| *remark).collect();
    Ok(Explanation { program: program.into(), coverage, clients: Clients::of(&names), remarks })
}

impl Explanation {
    /// Returns a sentence if the library sees no call of the program.
    pub fn uncovered(&self) -> Option<String> {
        match &self.coverage {
            Coverage::None(why) => Some(format!("{} runs without Shunt: {why}", self.program.display())),
            Coverage::Calls(_) => None,
        }
    }
}

fn is_privileged(program: &Path) -> Result<bool> {
    use std::os::unix::fs::MetadataExt;
    const SET_ID: u32 = 0o6000;
    let mode = std::fs::metadata(program)?.mode();
    let mut value = [0u8; 64];
    let capabilities = rustix::fs::getxattr(program, "security.capability", &mut value);
    Ok(mode & SET_ID != 0 || capabilities.is_ok_and(|bytes| bytes > 0))
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = self.program.display();
        match &self.coverage {
            Coverage::None(why) => writeln!(f, "{program} would run without Shunt: {why}.")?,
            Coverage::Calls(calls) => {
                writeln!(f, "{program} is covered. It imports these calls, which Shunt's library handles:")?;
                writeln!(f, "  {}", calls.join(" "))?;
                writeln!(f, "Libraries that it loads are covered too, except with dlopen's RTLD_DEEPBIND.")?;
                writeln!(
                    f,
                    "Bodies that it passes to clients unread bypass it: {}. This needs [frontend] in this machine's \
                     shuntd.toml, and [backend] on the machine that has the bodies.",
                    self.clients
                )?;
            }
        }
        for remark in &self.remarks {
            writeln!(f, "It {remark}.")?;
        }
        Ok(())
    }
}
