//! Compiles the steering programs. Generates, into OUT_DIR, the Rust declarations of the contents of their maps, so
//! that these are not written twice:
//!
//! * `frontend.skel.rs`, `backend.skel.rs`: the objects and how to load them;
//! * `types.rs`: the structs of bpf/steering.h, from the objects' BTF, as plain bytes (zerocopy);
//! * `constants.rs`, `counters.rs`: the numbers of bpf/steering.h, and its STEER_COUNTER_LIST.

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use libbpf_cargo::SkeletonBuilder;

/// Structs that user space reads or writes, by the object whose BTF has them.
const FRONTEND_TYPES: [&str; 7] = ["bpf_spin_lock", "flow_break", "spaces", "flow", "flow_key", "steer_peer", "begun"];
const BACKEND_TYPES: [&str; 2] = ["sender_key", "sender_slot"];

fn main() {
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let out = Path::new(&out);
    let frontend = compile("frontend", out);
    let backend = compile("backend", out);
    let types: Vec<String> = FRONTEND_TYPES
        .iter()
        .map(|name| plain_type(&frontend, name))
        .chain(BACKEND_TYPES.iter().map(|name| plain_type(&backend, name)))
        .collect();
    fs::write(out.join("types.rs"), types.join("\n")).expect("OUT_DIR is writable");

    let header = fs::read_to_string("bpf/steering.h").expect("bpf/steering.h");
    fs::write(out.join("constants.rs"), constants(&with_layout(&header))).expect("OUT_DIR is writable");
    fs::write(out.join("counters.rs"), counters(&header)).expect("OUT_DIR is writable");

    println!("cargo::rerun-if-changed=bpf");
    println!("cargo::rerun-if-changed=../../include/shunt.h");
    println!("cargo::rerun-if-env-changed=CLANG");
}

/// Number of the layout (version of the maps' contents) of the feature `test-layout`. Its `struct flow` differs
/// (bpf/steering.h).
const TEST_LAYOUT: &str = "32";

fn is_test_layout() -> bool {
    env::var_os("CARGO_FEATURE_TEST_LAYOUT").is_some()
}

/// Replaces the layout's number in the header with [`TEST_LAYOUT`], if the feature `test-layout` is on.
fn with_layout(header: &str) -> String {
    let name = "#define STEERING_LAYOUT ";
    let number = header.lines().find(|line| is_test_layout() && line.starts_with(name));
    number.map_or_else(|| header.into(), |line| header.replace(line, &format!("{name}{TEST_LAYOUT}")))
}

/// Generates the skeleton of one object and returns its text.
fn compile(object: &str, out: &Path) -> String {
    let multiarch = format!("-I/usr/include/{}-linux-gnu", env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it"));
    let layout = is_test_layout().then(|| format!("-DSTEERING_LAYOUT={TEST_LAYOUT}"));
    let warnings = ["-Wall", "-Wextra", "-Wno-sign-compare", "-Wno-unused-function"];
    let skeleton = out.join(format!("{object}.skel.rs"));
    SkeletonBuilder::new()
        .source(format!("bpf/{object}.bpf.c"))
        .clang(env::var("CLANG").unwrap_or_else(|_| "clang-14".into()))
        .clang_args([multiarch.as_str()].into_iter().chain(warnings).chain(layout.as_deref()))
        .build_and_generate(&skeleton)
        .unwrap_or_else(|error| panic!("bpf/{object}.bpf.c: {error:?}"));
    fs::read_to_string(&skeleton).expect("the skeleton was just written")
}

/// Returns the Rust declaration of a struct of the skeleton, with a name in camel case. It derives zerocopy's traits,
/// so that a struct with padding does not compile.
fn plain_type(skeleton: &str, name: &str) -> String {
    let head = format!("pub struct {name} {{");
    let from = skeleton.find(&head).unwrap_or_else(|| panic!("no struct {name} in the BTF")) + head.len();
    let to = from + skeleton[from..].find('}').expect("a struct ends");
    let mut rust = format!(
        "/// `struct {name}` of bpf/steering.h.\n\
         #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]\n\
         #[repr(C)]\n#[allow(missing_docs)]\npub struct {} {{\n",
        camel_case(name)
    );
    for field in skeleton[from..to].lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (field, kind) = field.trim_end_matches(',').split_once(": ").expect("a field has a type");
        writeln!(rust, "    {field}: {},", kind_in_rust(kind)).expect("writing to a string");
    }
    rust + "}\n"
}

fn kind_in_rust(kind: &str) -> String {
    let is_struct = |name: &str| FRONTEND_TYPES.contains(&name) || BACKEND_TYPES.contains(&name);
    match kind.strip_prefix('[').and_then(|array| array.split_once(';')) {
        Some((element, rest)) if is_struct(element) => format!("[{};{rest}", camel_case(element)),
        None if is_struct(kind) => camel_case(kind),
        _ => kind.into(),
    }
}

fn camel_case(name: &str) -> String {
    name.split('_').map(|word| word[..1].to_uppercase() + &word[1..]).collect()
}

/// Turns each line `#define NAME 123` into a Rust constant.
fn constants(header: &str) -> String {
    let mut rust = String::new();
    for line in header.lines() {
        let mut words = line.split_whitespace();
        let (Some("#define"), Some(name), Some(value)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        if let Ok(value) = value.parse::<u32>() {
            writeln!(rust, "pub const {name}: u32 = {value};").expect("writing to a string");
        }
    }
    rust
}

/// Turns the lines `X(NAME, "meaning")` of STEER_COUNTER_LIST into an array of (name, meaning).
fn counters(header: &str) -> String {
    let list = header.lines().skip_while(|line| !line.starts_with("#define STEER_COUNTER_LIST"));
    let mut rust = String::from("&[\n");
    for line in list.skip(1).take_while(|line| line.trim_start().starts_with("X(")) {
        let entry = line.trim().trim_end_matches('\\').trim_end();
        let (name, meaning) = entry
            .strip_prefix("X(")
            .and_then(|entry| entry.strip_suffix(')'))
            .and_then(|entry| entry.split_once(", "))
            .unwrap_or_else(|| panic!("bpf/steering.h: one counter a line, not {line:?}"));
        writeln!(rust, "    ({:?}, {meaning}),", name.to_lowercase()).expect("writing to a string");
    }
    rust + "]\n"
}
