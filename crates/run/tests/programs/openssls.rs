//! Processes with several OpenSSLs (openssls/main.c): each call must reach the OpenSSL that it would reach without
//! Shunt.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use shunt_ca::{Files, Request};
use shunt_odb::store::Limits;

use crate::bed::Bed;

/// Directory in which the linker finds the system's OpenSSL.
const SYSTEMS: &str = "/usr/lib/x86_64-linux-gnu";

/// Place in which the test programs are compiled and run.
struct Workshop {
    bed: Bed,
    main: PathBuf,
    certificate: Files,
}

fn source(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/openssls")).join(name)
}

impl Workshop {
    fn open() -> Self {
        let bed = Bed::new(Limits::default());
        let certificate = bed.authority.issue(&Request { name: "several".into(), addresses: Vec::new(), days: 1 });
        let mut workshop = Self { main: bed.path().join("main"), certificate: certificate.unwrap(), bed };
        workshop.main = workshop.compile("main", &["main.c"], &["-O2"]);
        workshop
    }

    fn compile(&self, name: &str, sources: &[&str], flags: &[&str]) -> PathBuf {
        let made = self.bed.path().join(name);
        let mut compiler = Command::new("gcc");
        compiler.arg("-o").arg(&made).args(sources.iter().map(|name| source(name))).args(flags);
        assert!(compiler.status().unwrap().success(), "{name} does not compile");
        made
    }

    fn library(&self, name: &str, sources: &[&str], flags: &[&str]) -> PathBuf {
        self.compile(name, sources, &[&["-shared", "-fPIC", "-Wl,--build-id=none"], flags].concat())
    }

    /// Builds a part (a library that is linked to its own OpenSSL) with the OpenSSL in the directory `from`. `names`
    /// are the names of this OpenSSL's libraries.
    fn part(&self, name: &str, from: &Path, names: [&str; 2], more: &[&str]) -> PathBuf {
        let paths = names.map(|name| from.join(name).to_str().unwrap().to_owned());
        let (defined, search) =
            (format!("-DNAME=\"{name}\""), format!("-Wl,--disable-new-dtags,-rpath,{}", from.display()));
        self.library(name, &["part.c"], &[&[defined.as_str(), &paths[0], &paths[1], &search], more].concat())
    }

    fn systems(&self, name: &str) -> PathBuf {
        self.part(name, Path::new(SYSTEMS), ["libssl.so.3", "libcrypto.so.3"], &["-O2"])
    }

    /// Builds a part with an OpenSSL like that of a Python wheel: the system's libraries under other names.
    fn wheels(&self, name: &str, more: &[&str]) -> PathBuf {
        let (names, from) = (["libwsl.so.3", "libwrypto.so.3"], self.bed.path());
        for (old, new) in ["libssl.so.3", "libcrypto.so.3"].into_iter().zip(names) {
            let bytes = fs::read(Path::new(SYSTEMS).join(old)).unwrap();
            let renamed =
                replaced(&replaced(&bytes, b"libssl.so.3", b"libwsl.so.3"), b"libcrypto.so.3", b"libwrypto.so.3");
            fs::write(from.join(new), renamed).unwrap();
        }
        self.part(name, &from, names, more)
    }

    /// Runs the program without Shunt and with it, and asserts that all of its parts work.
    fn runs(&self, how: &[(&str, &Path)]) {
        let Files { certificate, key } = &self.certificate;
        for mut command in
            [self.bed.plain(self.main.to_str().unwrap()), self.bed.under_shunt(self.main.to_str().unwrap())]
        {
            command.arg(certificate).arg(key);
            command.args(how.iter().map(|(how, library)| format!("{how}:{}", library.display())));
            let output = command.output().unwrap();
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{command:?}: {}, {text}", output.status);
        }
    }
}

fn replaced(bytes: &[u8], old: &[u8], new: &[u8]) -> Vec<u8> {
    assert_eq!(old.len(), new.len());
    let mut bytes = bytes.to_vec();
    for at in 0..bytes.len() - old.len() {
        if bytes[at..].starts_with(old) {
            bytes[at..at + new.len()].copy_from_slice(new);
        }
    }
    bytes
}

/// An OpenSSL that only one library sees, as psycopg2-binary brings it. It may be the only OpenSSL of a process. Or the
/// process also has the system's OpenSSL, which was loaded earlier or later, as by Python's `ssl`.
#[test]
fn one_that_only_its_library_sees() {
    let workshop = Workshop::open();
    let (jumps, calls) = (workshop.wheels("jumps", &["-O2"]), workshop.wheels("calls", &["-O0"]));
    let systems = workshop.systems("systems");
    for wheel in [&jumps, &calls] {
        workshop.runs(&[("local", wheel)]);
        workshop.runs(&[("local", wheel), ("local", &systems)]);
        workshop.runs(&[("local", &systems), ("local", wheel)]);
        workshop.runs(&[("global", &systems), ("deep", wheel)]);
    }
}

/// OpenSSL is linked statically into the part's library, which does not hide OpenSSL's symbols.
#[test]
fn one_that_is_a_part_of_its_library() {
    let workshop = Workshop::open();
    let archive = |name: &str| format!("{SYSTEMS}/{name}");
    let flags = ["-O2", "-DNAME=\"static\"", &archive("libssl.a"), &archive("libcrypto.a")];
    let (within, systems) = (workshop.library("within", &["part.c"], &flags), workshop.systems("systems"));
    workshop.runs(&[("local", &within)]);
    workshop.runs(&[("local", &within), ("local", &systems)]);
    workshop.runs(&[("local", &systems), ("local", &within)]);
    workshop.runs(&[("deep", &within), ("local", &systems)]);
}

/// An older OpenSSL beside the system's one. With `global` (RTLD_GLOBAL), the whole program sees the symbols of both,
/// which have different symbol versions.
#[test]
fn an_older_one_beside_the_systems() {
    let workshop = Workshop::open();
    let versions = workshop.bed.path().join("versions");
    fs::write(&versions, "OPENSSL_1_1_0 { global: *; };").unwrap();
    let script = format!("-Wl,--version-script={}", versions.display());
    let older = workshop.library("libolder.so", &["other.c"], &["-O2", "-Wl,-soname,libolder.so", &script]);
    let search = format!("-Wl,-rpath,{}", workshop.bed.path().display());
    let flags = ["-O2", "-DOLD", "-DNAME=\"older\"", older.to_str().unwrap(), &search];
    let (part, systems) = (workshop.library("part", &["part.c"], &flags), workshop.systems("systems"));
    for how in ["local", "global"] {
        workshop.runs(&[(how, &part), (how, &systems)]);
        workshop.runs(&[(how, &systems), (how, &part)]);
    }
}

/// After one OpenSSL is unloaded, another may be loaded at the same address, with its functions in other places.
#[test]
fn one_that_is_unloaded() {
    let workshop = Workshop::open();
    let flags = ["-O2", "-DOLD", "-DNAME=\"unloaded\""];
    let first = workshop.library("first", &["part.c", "other.c"], &flags);
    let second = workshop.library("second", &["part.c", "other.c"], &[&flags[..], &["-DLATER"]].concat());
    let systems = workshop.systems("systems");
    let turns = [("again", first.as_path()), ("again", second.as_path())].repeat(10);
    workshop.runs(&turns);
    workshop.runs(&[&[("local", systems.as_path())], &turns[..]].concat());
}
