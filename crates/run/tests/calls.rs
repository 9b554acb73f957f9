//! Compares the table of calls (src/calls.rs) with the library that was built and this machine's glibc.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use object::SymbolIndex;
use object::elf;
use object::read::elf::{ElfFile64, Sym as _};
use shunt_run::calls::{CALLS, Class, class};

/// Returns the symbols that programs may link to.
fn exports(library: &Path) -> BTreeSet<String> {
    let bytes = std::fs::read(library).unwrap_or_else(|error| panic!("{}: {error}", library.display()));
    let file: ElfFile64 = ElfFile64::parse(&*bytes).unwrap();
    let (endian, sections) = (file.endian(), file.elf_section_table());
    let versions = sections.versions(endian, &*bytes).unwrap();
    let symbols = sections.symbols(endian, &*bytes, elf::SHT_DYNSYM).unwrap();
    let is_public = |index: SymbolIndex| {
        let version =
            versions.as_ref().map(|versions| versions.version(versions.version_index(endian, index)).unwrap());
        version.flatten().is_none_or(|version| version.name() != b"GLIBC_PRIVATE")
    };
    (symbols.enumerate())
        .filter(|(index, symbol)| !symbol.is_undefined(endian) && is_public(*index))
        .map(|(_, symbol)| String::from_utf8_lossy(symbol.name(endian, symbols.strings()).unwrap()).into_owned())
        .collect()
}

/// Returns the symbols of the library that was built with this test.
fn ours() -> BTreeSet<String> {
    let own = std::env::current_exe().unwrap();
    exports(&own.ancestors().nth(2).unwrap().join(shunt_run::launch::LIBRARY))
}

/// Returns the symbols of the C library that this process runs on.
fn glibc() -> BTreeSet<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.ends_with("/libc.so.6"));
    exports(&PathBuf::from(path.expect("this test runs on glibc")))
}

#[test]
fn each_call_is_in_the_table_once() {
    let mut seen = BTreeSet::new();
    for name in CALLS.iter().flat_map(|(_, names)| *names) {
        assert!(seen.insert(name), "{name} is there twice");
    }
}

#[test]
fn exactly_the_listed_calls_are_replaced() {
    let ours = ours();
    for (class, names) in CALLS {
        for name in *names {
            assert_eq!(ours.contains(*name), class.is_replaced(), "{name} is {class:?}");
        }
    }
    for name in &ours {
        assert!(class(name).is_some() || name.starts_with("rust_"), "{name} is exported and not in the table");
    }
}

/// glibc has some calls under several names (`read`, `__read`, `__read_chk`). The table must have each of these names,
/// because a program may use any of them.
#[test]
fn no_twin_of_a_call_is_forgotten() {
    let glibc = glibc();
    for (class, names) in CALLS {
        for name in *names {
            assert!(
                glibc.contains(*name) || matches!(class, Class::Refused | Class::Openssl) || *name == "cfree",
                "glibc has no {name}"
            );
            let bare = name.trim_start_matches("__").trim_end_matches("_chk").trim_end_matches("64");
            let twins = [
                bare.to_owned(),
                format!("__{bare}"),
                format!("{bare}64"),
                format!("__{bare}64"),
                format!("__{bare}_chk"),
                format!("__{bare}64_chk"),
                format!("_IO_{bare}"),
                format!("{bare}2"),
                format!("{bare}3"),
                format!("{bare}4"),
                format!("{bare}64v2"),
            ];
            for twin in twins.iter().filter(|twin| glibc.contains(*twin)) {
                assert!(shunt_run::calls::class(twin).is_some(), "glibc has {twin}, a twin of {name}");
            }
        }
    }
}
