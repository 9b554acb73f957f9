//! Records of senders, as the steering programs need them. A *slot* is the record of one sender (a backend's socket for
//! a client). Slots have indices.

use std::io;

use shunt_wire::Endpoint;

/// Key of a sender's packets on its own machine: the client, and our port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SenderKey {
    /// The client's endpoint.
    pub client: Endpoint,
    /// Our port, in host order.
    pub port: u16,
}

/// Record of one sender for the steering programs. The fields have the meanings of those of `struct sender_slot` in
/// bpf/steering.h.
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
    /// Number of bytes from `start` on that the client may have got from an earlier sender.
    pub ahead: u32,
}

/// Table in which the steering programs look up senders: BPF maps, or a stand-in for tests.
pub trait SenderTable {
    /// Writes a slot. The programs may read it at once.
    fn write_slot(&mut self, index: u32, slot: &Slot);
    /// Window field of the newest ACK that the sender of a slot got. The sender's socket takes this field for the
    /// client's window.
    fn window(&self, index: u32) -> u32;
    /// Enters a key: from here on the slot `index` is used for packets of `key`.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2), for example if the map is full.
    fn insert(&mut self, key: &SenderKey, index: u32) -> io::Result<()>;
    /// Removes a key. From here on packets of `key` are dropped.
    fn remove(&mut self, key: &SenderKey);
    /// Asks the programs to report, from here on, an ACK that reaches `end`, a number in the sequence space of the
    /// slot's socket.
    fn await_end(&mut self, index: u32, end: u32);
    /// Highest ACK number that a slot's socket has got from its client, in the socket's own sequence space.
    fn acked(&self, index: u32) -> u32;
    /// Takes the senders whose awaited end has been acknowledged since the last call. A sender may be listed more than
    /// once.
    fn take_reports(&mut self) -> Vec<SenderKey>;
}
