//! Socket options by which a server, or a program under `shunt run`, speaks to the kernel about its own connections
//! (`include/shunt.h`: setsockopt(2) with [`SOL`]). BPF programs answer them. A *region* is a range of a connection's
//! sequence numbers that another machine sends. A *peer* is another machine's agent. A *frame* is a run of bytes, or a
//! reference that stands for bytes, in a connection between two programs. An *account* of a connection is what a
//! program knows of its frames.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Level of all these options.
pub const SOL: i32 = 0x5348_5554;

/// Hands off the next bytes of the connection: another machine sends them ([`Begin`]).
pub const BEGIN: i32 = 1;
/// Ends the active region. After that, only a reset may follow on the connection.
pub const CANCEL: i32 = 2;
/// Asks for the state of the connection's newest region. The answer is a record in the caller's BPF ring buffer.
pub const STATE: i32 = 3;
/// Has another peer continue the active region ([`Move`]).
pub const MOVE: i32 = 4;
/// Begins a region like [`BEGIN`], but the caller may write more, which the kernel sends after the region.
pub const APPEND: i32 = 5;
/// Removes a region that [`APPEND`] made.
pub const UNDO: i32 = 6;
/// Has the handshakes at a socket's port noted, so that their connections can be handed off.
pub const WATCH: i32 = 7;
/// Ends the active region after the bytes that the client has acknowledged ([`Take`]).
pub const TAKE: i32 = 8;

/// Has the handshakes of this socket tell that its program runs under `shunt run`.
pub const SPEAK: i32 = 16;
/// Asks whether the programs at both ends of a connection run under `shunt run`.
pub const SPEAKS: i32 = 17;
/// Asks whether every descriptor of a connection is closed.
pub const ENDED: i32 = 18;
/// Says that the calling program begins to keep an account of a connection's frames.
pub const ADOPT: i32 = 19;
/// Argument of [`ADOPT`] that makes it succeed even where a program keeps an account already.
pub const ADOPT_TOO: u32 = 2;
/// Stores an account with its connection (setsockopt), or returns and removes it (getsockopt).
pub const CARRY: i32 = 20;
/// Length in bytes of an account that [`CARRY`] stores.
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
    /// Value of `when`: ends the region whatever the client has of it.
    pub const ALWAYS: u32 = 0;
    /// Value of `when`: only where the client has all of the region.
    pub const WHOLE: u32 = 1;
    /// Value of `when`: only where the client has nothing of the region.
    pub const NONE: u32 = 2;
}
