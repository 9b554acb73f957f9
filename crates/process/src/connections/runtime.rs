//! State that all calls on the process's connections share. It is made once, when the library is loaded.

use std::os::fd::RawFd;
use std::sync::OnceLock;

use shunt_odb::learnt::Table;

use super::states::Connections;
use crate::memory::Memory;
use crate::store::Store;

/// State that all connections of the process share.
pub struct Runtime {
    pub connections: Connections,
    pub memory: Memory,
    pub store: Store,
    pub learnt: Option<Table>,
    /// Descriptor number by which programs that this one executes inherit the memory of the connections' states.
    pub inherited: RawFd,
}

static RUNTIME: OnceLock<Option<Runtime>> = OnceLock::new();

/// The runtime; `None` if the program is not under `shunt run`, and all calls go to glibc.
#[inline]
pub fn runtime() -> Option<&'static Runtime> {
    RUNTIME.get()?.as_ref()
}

/// Sets the runtime when the library is loaded.
pub fn begin(made: Option<Runtime>) -> Option<&'static Runtime> {
    RUNTIME.get_or_init(|| made).as_ref()
}
