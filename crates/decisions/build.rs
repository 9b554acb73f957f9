//! Compiles the decisions of the steering programs for this machine, and generates their Rust declarations from the
//! same headers.

use std::env;
use std::path::Path;

use bindgen::EnumVariation;

fn main() {
    cc::Build::new().file("native.c").flag("-Wall").flag("-Wextra").flag("-Wno-sign-compare").compile("decisions");

    let bindings = bindgen::Builder::default()
        .header("native.h")
        .allowlist_function("native_.*")
        .allowlist_type("steer_counter")
        .allowlist_var("(FLOW|END|SHUNT_REGION|SHUNT_EVENT|SHUNT_OPTION|SHUNT_TAKE|SENDER|TH|SACK_BLOCKS|STEP)_.*")
        .allowlist_var(
            "BREAKS|NO_BREAK|ANCHOR_BYTES|IDLE_NS|UNHEARD_NS|SILENCE_NS|CLAIM_MAX|LATE_MAX|HANDSHAKE_SECONDS",
        )
        .default_enum_style(EnumVariation::Rust { non_exhaustive: false })
        .derive_default(true)
        .derive_partialeq(true)
        .layout_tests(true)
        .generate_comments(false)
        .formatter(bindgen::Formatter::None)
        .generate()
        .unwrap_or_else(|error| panic!("native.h: {error}"));
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    bindings.write_to_file(Path::new(&out).join("native.rs")).expect("OUT_DIR is writable");

    println!("cargo::rerun-if-changed=native.c");
    println!("cargo::rerun-if-changed=native.h");
    println!("cargo::rerun-if-changed=../handoff/bpf");
    println!("cargo::rerun-if-changed=../../include/shunt.h");
}
