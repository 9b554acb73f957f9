//! Generates the list of the servers' counters from include/shunt.h, so that the list is written only once.

use std::path::Path;

fn main() {
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../include/shunt.h");
    println!("cargo:rerun-if-changed={}", header.display());
    let text = std::fs::read_to_string(&header).expect("include/shunt.h is part of the workspace");
    let list = text.split_once("#define SHUNT_COUNTER_LIST(X)").expect("the list is there").1;
    let rows = list.lines().skip(1).map_while(row).map(|(index, name, help)| format!("({index}, {name:?}, {help:?}),"));
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    let array = format!("&[{}]", rows.collect::<String>());
    std::fs::write(Path::new(&out).join("counters.rs"), array).expect("OUT_DIR is writable");
}

/// Parses a row `X(3, name, "help") \` into index, name and help. Returns `None` at the end of the list.
fn row(line: &str) -> Option<(usize, &str, &str)> {
    let inner = line.trim().trim_end_matches('\\').trim_end().strip_prefix("X(")?.strip_suffix(')')?;
    let (index, rest) = inner.split_once(", ")?;
    let (name, help) = rest.split_once(", ")?;
    Some((index.parse().ok()?, name, help.trim_matches('"')))
}
