//! Socket options by which a server, or a program under `shunt run`, speaks to the kernel about its own connections
//! (`include/shunt.h`: setsockopt(2) with [`SOL`]). BPF programs answer them.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Level of all these options.
pub const SOL: i32 = 0x5348_5554;

/// Another machine sends the next bytes ([`Begin`]).
pub const BEGIN: i32 = 1;
/// The active region ends; only a reset may follow.
pub const CANCEL: i32 = 2;
/// Asks for the state of the connection's newest region.
pub const STATE: i32 = 3;
/// Another peer continues the active region ([`Move`]).
pub const MOVE: i32 = 4;
/// Begins a region like [`BEGIN`], but the caller may write on.
pub const APPEND: i32 = 5;
/// Removes a region of [`APPEND`].
pub const UNDO: i32 = 6;
/// Notes the handshakes of a socket's port.
pub const WATCH: i32 = 7;
/// Ends the active region at what the client has acknowledged ([`Take`]).
pub const TAKE: i32 = 8;

/// Handshakes of this socket tell that its program runs under Shunt.
pub const SPEAK: i32 = 16;
/// Asks whether the programs at both ends run under Shunt.
pub const SPEAKS: i32 = 17;
/// Asks whether every descriptor of a connection is closed.
pub const ENDED: i32 = 18;
/// Begins to keep account of a connection's frames.
pub const ADOPT: i32 = 19;
/// Value of [`ADOPT`]: also where a program keeps account already.
pub const ADOPT_TOO: u32 = 2;
/// Leaves the account of a connection's frames with it, or takes it away.
pub const CARRY: i32 = 20;
/// Length in bytes of that account.
pub const CARRIED_BYTES: usize = 304;

/// Argument of [`BEGIN`] and [`APPEND`] (`struct shunt_begin`).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Begin {
    pub peer: u32,
    pub ring: u32,
    pub handoff: u64,
    pub length: u64,
}

/// Argument of [`MOVE`] (`struct shunt_move`).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Move {
    pub peer: u32,
    pub ring: u32,
    pub handoff: u64,
    pub from: u64,
}

/// Argument of [`TAKE`] (`struct shunt_take`).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Take {
    pub ring: u32,
    pub when: u32,
    pub handoff: u64,
}

impl Take {
    /// Value of `when`: whatever the client has.
    pub const ALWAYS: u32 = 0;
    /// Value of `when`: only where the client has all of the region.
    pub const WHOLE: u32 = 1;
    /// Value of `when`: only where the client has nothing of it.
    pub const NONE: u32 = 2;
}
