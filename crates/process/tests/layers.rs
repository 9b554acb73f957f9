//! Checks the layers of the library against its code: a module uses itself and those before it in the lists here.

use std::fs;
use std::path::{Path, PathBuf};

/// Modules from the lowest layer up. Each module at the top, in `system` and in `connections` must have a place in a
/// list. All other modules count as parts of the module around them.
const LAYERS: [&str; 8] = ["system", "memory", "store", "connections", "bypass", "tls", "descriptors", "forks"];
const SYSTEM: [&str; 13] = [
    "kernel", "ending", "real", "parts", "stack", "process", "program", "scarce", "signals", "counts", "ranks",
    "inside", "threads",
];
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

/// Index of a module in its list, or a message if it is in none.
fn place(list: &[&str], name: &str) -> Result<usize, String> {
    list.iter().position(|known| *known == name).ok_or_else(|| format!("{name} is in no list of layers"))
}

fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let of = |path: PathBuf| if path.is_dir() { sources(&path) } else { vec![path] };
    entries.flat_map(of).filter(|path| path.extension().is_some_and(|kind| kind == "rs")).collect()
}

/// The code without comments.
fn without_comments(code: &str) -> String {
    code.lines()
        .map(|line| line.split(" //").next().unwrap_or_default())
        .filter(|line| !line.trim().starts_with("//"))
        .fold(String::new(), |mut code, line| {
            code += line;
            code.push('\n');
            code
        })
}

/// The paths with which `text` begins: a single one, or all of a group in braces.
fn expand(text: &str) -> Vec<Vec<String>> {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').unwrap_or(text.len());
    let words: Vec<String> = text[..end].split("::").filter(|word| !word.is_empty()).map(str::to_owned).collect();
    if !text[end..].starts_with('{') {
        return vec![words];
    }
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for c in text[end..].chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        match c {
            '{' if depth == 1 => {}
            '}' if depth == 0 => break,
            ',' if depth == 1 => parts.push(String::new()),
            _ => parts.last_mut().unwrap().push(c),
        }
    }
    let inner = parts.iter().filter(|part| !part.trim().is_empty()).flat_map(|part| expand(part.trim()));
    inner.map(|path| [words.clone(), path].concat()).collect()
}

/// Paths of this crate that a module's code names, each from the crate's root.
fn named(module: &[&str], code: &str) -> Vec<Vec<String>> {
    let code = without_comments(code);
    let after = |root: &'static str| {
        let code = &code;
        code.match_indices(root).filter(|(at, _)| !code[..*at].ends_with("super::")).map(move |(at, _)| &code[at..])
    };
    let of_root = after("crate::").flat_map(|text| expand(&text["crate::".len()..]));
    let of_super = after("super::").flat_map(expand).map(|path| {
        let up = path.iter().take_while(|word| *word == "super").count();
        let around = module[..module.len().saturating_sub(up)].iter().map(|word| (*word).to_owned());
        around.chain(path.into_iter().skip(up)).collect()
    });
    of_root.chain(of_super).filter(|path: &Vec<String>| !path.is_empty()).collect()
}

/// Returns the faults of a module: each use of a module above it, and each name that is in no list of layers.
fn upward(module: &[&str], code: &str) -> Vec<String> {
    let inner = match module[0] {
        "system" => &SYSTEM[..],
        "connections" => &CONNECTIONS[..],
        _ => &[],
    };
    let own = place(&LAYERS, module[0]);
    let own_inner = module.get(1).filter(|_| !inner.is_empty()).map(|name| place(inner, name));
    let mut wrong: Vec<String> = own.clone().err().into_iter().collect();
    wrong.extend(own_inner.clone().and_then(Result::err));
    let (Ok(own), own_inner) = (own, own_inner.and_then(Result::ok)) else { return wrong };
    for path in named(module, code) {
        let is_above = match (place(&LAYERS, &path[0]), path.get(1).map(|name| place(inner, name)), own_inner) {
            (Err(_), ..) => true,
            (Ok(known), Some(Ok(known_inner)), Some(own_inner)) if known == own => known_inner > own_inner,
            (Ok(known), ..) => known > own,
        };
        if is_above {
            wrong.push(format!("{} -> {}", module.join("::"), path.join("::")));
        }
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
    assert!(found(&["connections", "send"], "use super::{waiting, pipe};"));
    assert!(found(&["connections", "send"], "use crate::connections::{\n    waiting,\n    pipe::{a, b},\n};"));
    assert!(found(&["system", "kernel"], "use super::{threads, inside};"));
    assert!(found(&["store"], "use super::{bypass, tls};"));
    assert!(found(&["memory", "faults"], "use super::super::bypass;"));
    assert!(found(&["memory", "faults"], "use crate::{system, bypass};"));
    assert!(found(&["nobody"], ""));
    assert!(found(&["connections", "nobody"], ""));
    assert!(!found(&["connections", "pipe"], "use crate::{memory, system::{kernel, real}};"));
    assert!(!found(&["memory", "block"], "use super::{State, filling};"));
    assert!(!found(&["connections", "pipe"], "use super::send;"));
    assert!(!found(&["memory"], "//! See [`crate::bypass`]."));
}
