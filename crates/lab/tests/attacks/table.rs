//! Compares SECURITY.md's table of attacks with the tests: each test that the table names exists, and the table names
//! each test of an attack.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: impl AsRef<Path>) -> String {
    let path = repository().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the names between backquotes in the table's column of tests. `MODULE::*` means every test of a file.
fn named() -> BTreeSet<String> {
    let text = read("SECURITY.md");
    let rows = text.lines().skip_while(|line| *line != "| attack | test |").skip(2);
    let tests = rows.take_while(|line| line.starts_with('|')).filter_map(|row| row.split(" | ").nth(1));
    tests.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

/// Adds the paths and texts of all source files in which tests may be to `all`.
fn sources(directory: &Path, all: &mut Vec<(PathBuf, String)>) {
    for entry in std::fs::read_dir(directory).expect("a directory").flatten() {
        let path = entry.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_dir() && !path.ends_with("target") && !path.ends_with("build") {
            sources(&path, all);
        } else if matches!(extension, Some("rs" | "py")) {
            let text = std::fs::read_to_string(&path).expect("a text");
            all.push((path, text));
        }
    }
}

#[test]
fn every_test_that_is_named_exists() {
    let mut all = Vec::new();
    sources(&repository().join("crates"), &mut all);
    sources(&repository().join("nginx/t"), &mut all);
    let named = named();
    assert!(named.len() > 25, "{named:?}");
    for name in named.iter().filter(|name| *name != "make fuzz") {
        let (module, test) = name.split_once("::").unwrap_or(("", name));
        let is_in = |path: &Path| module.is_empty() || path.ends_with(format!("{module}.rs"));
        let is_test = |text: &str| {
            let mut lines = text.lines().map(str::trim_start).skip_while(|line| *line != "#[test]");
            test == "*" && lines.next().is_some() || {
                let mut behind = text.lines().map(str::trim_start).skip_while(|line| *line != "#[test]").skip(1);
                behind.any(|line| line.starts_with(&format!("fn {test}(")))
            }
        };
        let found = |(path, text): &(PathBuf, String)| {
            is_in(path) && (is_test(text) || text.contains(&format!("    def {test}(self):")))
        };
        assert!(all.iter().any(found), "SECURITY.md names {name}, and no such test is there");
    }
}

#[test]
fn every_test_of_an_attack_is_named() {
    let named = named();
    let mut all = Vec::new();
    sources(&repository().join("crates/lab/tests/attacks"), &mut all);
    for (path, text) in all.iter().filter(|(path, _)| !path.ends_with("table.rs")) {
        let module = path.file_stem().and_then(|stem| stem.to_str()).expect("a name");
        for rest in text.split("#[test]\nfn ").skip(1) {
            let test = rest.split('(').next().expect("a name");
            assert!(named.contains(&format!("{module}::{test}")), "SECURITY.md does not name {module}::{test}");
        }
    }
}
