//! Compiles openssl/shunt_tls*.c and src/tls/openssl.c. The nginx module uses openssl/shunt_tls*.c, too. The
//! compilation needs OpenSSL's headers, but not its libraries.

use std::path::Path;

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let openssl = root.join("openssl");
    let shared = ["", "_gate", "_keys", "_watch"].map(|part| openssl.join(format!("shunt_tls{part}.c")));
    let own = Path::new("src/tls/openssl.c").to_path_buf();
    for file in shared.iter().chain([&own, &openssl.join("shunt_tls.h"), &openssl.join("shunt_tls_state.h")]) {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    println!("cargo::rerun-if-changed={}", root.join("include/shunt.h").display());
    cc::Build::new()
        .files(&shared)
        .file(&own)
        .include(openssl)
        .include(root.join("include"))
        .flag("-fvisibility=hidden")
        .flag("-Wno-unused-parameter")
        .warnings_into_errors(true)
        .compile("shunt_tls");
}
