//! Versions of Shunt in a lab: the version of this source, and the one before it, which scripts/build-older has built.
//! Each machine may have either version.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::built::{module_file, shunt_program, shuntd_program};
use crate::host::Host;

/// Number of the version before this one. scripts/build-older leaves that version's files in a directory of this name.
pub const OLDER: &str = "0.1.0";

/// A version of Shunt's programs and of its nginx module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Release {
    /// The version of this source.
    #[default]
    This,
    /// The version before the one of this source, [`OLDER`].
    Older,
    /// [`Self::Older`] with a special build of the agent: no release of Shunt has this build's *layout* (version of the
    /// pinned BPF maps' contents).
    OtherLayout,
}

/// Versions of one machine's parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Releases {
    /// Version of the agent, `shuntd`.
    pub agent: Release,
    /// Version of Shunt's part of the server: nginx's module, or `shunt run` and its library.
    pub server: Release,
}

/// Function that returns the versions of a host's parts.
pub type ReleasesOf = fn(&Host) -> Releases;

impl Releases {
    /// One version of both parts.
    #[must_use]
    pub fn all(release: Release) -> Self {
        Self { agent: release, server: release }
    }
}

impl Release {
    /// Path of the agent's program, `shuntd`.
    ///
    /// # Errors
    /// When that version is not built.
    pub fn shuntd(self) -> Result<PathBuf> {
        self.find(if self == Self::OtherLayout { "shuntd-other-layout" } else { "shuntd" }, shuntd_program)
    }

    /// Path of the program `shunt`. The library that `shunt run` preloads is in the same directory.
    ///
    /// # Errors
    /// When that version is not built.
    pub fn shunt(self) -> Result<PathBuf> {
        self.find("shunt", shunt_program)
    }

    /// Path of nginx's module.
    ///
    /// # Errors
    /// When that version is not built.
    pub fn module(self) -> Result<PathBuf> {
        self.find("ngx_http_shunt_module.so", module_file)
    }

    fn find(self, name: &str, this: fn() -> Result<PathBuf>) -> Result<PathBuf> {
        match self {
            Self::This => this(),
            Self::Older | Self::OtherLayout => Ok(older()?.join(name)),
        }
    }
}

/// File on a host from which the host's nginx loads the module.
pub(super) fn module_of(host: &Host) -> PathBuf {
    host.dir().join("ngx_http_shunt_module.so")
}

/// Installs a version of the module on a host, as an operator does. An nginx that runs keeps the file that it has
/// loaded.
///
/// # Errors
/// When that version is not built, or the file cannot be written.
pub fn install_module(host: &Host, release: Release) -> Result<()> {
    let (file, next) = (module_of(host), host.dir().join("module.next"));
    std::fs::copy(release.module()?, &next)
        .and_then(|_| std::fs::rename(&next, &file))
        .with_context(|| format!("installing {}", file.display()))
}

/// Directory of the version before this one: `$SHUNT_OLDER`, or else in the target directory of this program or of the
/// workspace.
fn older() -> Result<PathBuf> {
    let hint =
        "the version before this one is not built: run scripts/build-older, or name its directory in SHUNT_OLDER";
    if let Some(named) = std::env::var_os("SHUNT_OLDER") {
        let named = PathBuf::from(named);
        ensure!(named.is_dir(), "SHUNT_OLDER names {}, which is no directory", named.display());
        return std::fs::canonicalize(&named).with_context(|| format!("finding {}", named.display()));
    }
    let own = std::env::current_exe().unwrap_or_default();
    let above = own.ancestors().skip(1).map(Path::to_owned);
    let targets = above.chain([super::built::workspace().join("target")]);
    targets.map(|target| target.join("older").join(OLDER)).find(|directory| directory.is_dir()).context(hint)
}
