//! What the steering programs know of senders.

use std::io;

use shunt_wire::Endpoint;

/// What identifies a sender's packets in its own machine: the client, and our port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SenderKey {
    /// The client's end.
    pub client: Endpoint,
    /// Our port, host order.
    pub port: u16,
}

/// What the steering programs need to know of one sender (`struct sender_slot`).
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Slot {
    pub server: Endpoint,
    pub live: bool,
    pub start: u32,
    pub seq_delta: u32,
    pub ts_delta: u32,
    pub rcv_nxt: u32,
    pub ack: u32,
    pub snd_cwnd: u32,
    pub ts_recent: u32,
    /// Bytes from `start` on that the client may have from a sender before this one.
    pub ahead: u32,
}

/// Where the steering programs look senders up: BPF maps, or a table in a test.
pub trait SenderTable {
    /// Writes a slot. The programs may read it at once.
    fn write_slot(&mut self, index: u32, slot: &Slot);
    /// Window field of the newest ACK that a slot's sender got: its socket's idea of the client's window.
    fn window(&self, index: u32) -> u32;
    /// Lets packets of `key` find the slot.
    ///
    /// # Errors
    /// The kernel's, where the map is full.
    fn insert(&mut self, key: &SenderKey, index: u32) -> io::Result<()>;
    /// From here packets of `key` are dropped.
    fn remove(&mut self, key: &SenderKey);
    /// From here an ACK up to `end`, in the socket's own sequence space, is reported.
    fn await_end(&mut self, index: u32, end: u32);
    /// What a slot's client has acknowledged to its socket, in that one's own sequence space.
    fn acked(&self, index: u32) -> u32;
    /// Senders whose awaited end has been acknowledged since the last call; one may be there more than once.
    fn take_reports(&mut self) -> Vec<SenderKey>;
}
