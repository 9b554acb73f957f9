//! The layers of the library, held against its code: a module knows of itself and of those before it here.

use std::fs;
use std::path::{Path, PathBuf};

/// From the lowest up. A module that is in no list of its own is one with the module around it.
const LAYERS: [&str; 8] = ["system", "memory", "store", "connections", "bypass", "tls", "descriptors", "forks"];
const SYSTEM: [&str; 11] =
    ["kernel", "ending", "real", "parts", "stack", "process", "scarce", "counts", "ranks", "inside", "threads"];
const CONNECTIONS: [&str; 13] = [
    "entries",
    "states",
    "runtime",
    "users",
    "learning",
    "waiting",
    "ahead",
    "reading",
    "peek",
    "receive",
    "available",
    "send",
    "pipe",
];

/// Where a module is in its list, or what is wrong.
fn place(list: &[&str], name: &str) -> Result<usize, String> {
    list.iter().position(|known| *known == name).ok_or_else(|| format!("{name} is in no list of layers"))
}

fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let of = |path: PathBuf| if path.is_dir() { sources(&path) } else { vec![path] };
    entries.flat_map(of).filter(|path| path.extension().is_some_and(|kind| kind == "rs")).collect()
}

/// The words of paths that follow `root` in the code, without what comments say.
fn paths<'a>(code: &'a str, root: &'a str) -> impl Iterator<Item = Vec<&'a str>> {
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.flat_map(move |line| line.split(root).skip(1)).map(|rest| {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').unwrap_or(rest.len());
        rest[..end].split("::").collect()
    })
}

/// What a file knows of that is above it.
fn upward(module: &[&str], code: &str) -> Vec<String> {
    let list = |layer: &str| match layer {
        "system" => &SYSTEM[..],
        "connections" => &CONNECTIONS[..],
        _ => &[],
    };
    let own = place(&LAYERS, module[0]);
    let mut wrong: Vec<String> = own.clone().err().into_iter().collect();
    let inner = list(module[0]);
    let mut siblings: Vec<&str> = Vec::new();
    for path in paths(code, "crate::") {
        let known = place(&LAYERS, path[0]);
        if known.clone().is_err() || own.clone().is_ok_and(|own| known.is_ok_and(|known| known > own)) {
            wrong.push(format!("{} -> {}", module.join("::"), path.join("::")));
        }
        siblings.extend((path[0] == module[0]).then(|| path.get(1).copied()).flatten());
    }
    if module.len() == 2 && !inner.is_empty() {
        siblings.extend(paths(code, "super::").map(|path| path[0]).filter(|name| !name.is_empty()));
        let own = place(inner, module[1]);
        wrong.extend(own.clone().err());
        let above = siblings.iter().filter(|name| place(inner, name).is_ok_and(|known| own.clone() < Ok(known)));
        wrong.extend(above.map(|name| format!("{} -> {name}", module.join("::"))));
    }
    wrong
}

#[test]
fn no_module_knows_of_one_above_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut looked = 0;
    for file in sources(&root).iter().filter(|file| !file.ends_with("lib.rs")) {
        let module = file.strip_prefix(&root).unwrap().with_extension("");
        let module: Vec<&str> = module.iter().map(|part| part.to_str().unwrap()).collect();
        assert_eq!(upward(&module, &fs::read_to_string(file).unwrap()), Vec::<String>::new(), "{}", file.display());
        looked += 1;
    }
    assert!(looked > 30, "only {looked} files");
}

#[test]
fn an_arrow_that_points_up_is_found() {
    let found = |module: &[&str], code: &str| !upward(module, code).is_empty();
    assert!(found(&["memory", "faults"], "use crate::bypass;"));
    assert!(found(&["store"], "    let x = crate::connections::runtime::runtime();"));
    assert!(found(&["connections", "send"], "use super::pipe;"));
    assert!(found(&["connections", "send"], "use crate::connections::pipe::from;"));
    assert!(found(&["nobody"], ""));
    assert!(!found(&["connections", "pipe"], "use super::send;"));
    assert!(!found(&["memory"], "//! See [`crate::bypass`]."));
}
