//! Compiles the BPF programs of the negotiation, and generates their skeleton.

use std::env;
use std::path::Path;

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let multiarch = format!("-I/usr/include/{}-linux-gnu", env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it"));
    SkeletonBuilder::new()
        .source("bpf/negotiation.bpf.c")
        .clang(env::var("CLANG").unwrap_or_else(|_| "clang-14".into()))
        .clang_args([multiarch.as_str(), "-mcpu=v3", "-Wall", "-Wextra", "-Wno-sign-compare"])
        .build_and_generate(Path::new(&out).join("negotiation.skel.rs"))
        .unwrap_or_else(|error| panic!("bpf/negotiation.bpf.c: {error:?}"));
    println!("cargo::rerun-if-changed=bpf");
    println!("cargo::rerun-if-changed=../../include/shunt.h");
    println!("cargo::rerun-if-env-changed=CLANG");
}
