//! Paths of the programs and of nginx's module that a service needs, at the places where the build leaves them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Path of the agent's program (`shuntd`): `$SHUNTD`, or else beside this program, or else in the workspace's target
/// directory.
///
/// # Errors
/// When it is at none of these places.
pub fn shuntd_program() -> Result<PathBuf> {
    let hint = "shuntd is not built: run `cargo build --release`, or name its file in SHUNTD";
    find("SHUNTD", built("shuntd"), hint)
}

/// Path of the program `shunt`: `$SHUNT`, or else in the same places as [`shuntd_program`].
///
/// # Errors
/// When it is at none of these places.
pub fn shunt_program() -> Result<PathBuf> {
    find("SHUNT", built("shunt"), "shunt is not built: run `cargo build --release`, or name its file in SHUNT")
}

fn built(program: &str) -> impl Iterator<Item = PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join(program)));
    let targets = ["release", "debug"].map(|profile| workspace().join("target").join(profile).join(program));
    beside.into_iter().chain(targets)
}

/// Path of nginx's module: `$SHUNT_NGINX_MODULE`, or else where `make -C nginx` leaves it.
///
/// # Errors
/// When it is at neither place.
pub fn module_file() -> Result<PathBuf> {
    let built = workspace().join("nginx/build/ngx_http_shunt_module.so");
    let hint = "the nginx module is not built: run `make -C nginx`, or name its file in SHUNT_NGINX_MODULE";
    find("SHUNT_NGINX_MODULE", [built].into_iter(), hint)
}

pub(super) fn workspace() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.ancestors().nth(2).unwrap_or(manifest).to_owned()
}

fn find(variable: &str, mut built: impl Iterator<Item = PathBuf>, hint: &'static str) -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(variable) {
        let named = PathBuf::from(named);
        ensure!(named.is_file(), "{variable} names {}, which is no file", named.display());
        return std::fs::canonicalize(&named).with_context(|| format!("finding {}", named.display()));
    }
    built.find(|path| path.is_file()).context(hint)
}
