//! One client connection of a frontend: its socket as the kernel would describe it, and its *flow*, the record that the
//! steering programs have of it. A *region* is a range of its sequence numbers that a backend sends.

use shunt_decisions::*;

/// Sequence number of the client's next byte.
pub const RCV_NXT: u32 = 4_294_967_290;
/// The backend of the first region.
pub const PEER: u32 = 3;
pub const HANDOFF: u64 = 77;
pub const MSS: u32 = 1448;

pub struct Server {
    pub socket: Socket,
    pub connection: Connection,
    pub flow: Flow,
    pub now: u64,
}

impl Server {
    /// Makes a server whose next byte has the number `next`. Its client has acknowledged all so far, and has room for
    /// `room` bytes, a multiple of 256.
    pub fn new(next: u32, room: u32) -> Self {
        let socket = Socket {
            snd_una: next,
            snd_nxt: next,
            rcv_nxt: RCV_NXT,
            snd_cwnd: 10,
            snd_ssthresh: u32::MAX,
            srtt_us: 8 * 20_000,
            mss_cache: MSS,
            ..Socket::default()
        };
        let connection = Connection {
            write_seq: next,
            snd_wnd: room,
            rcv_edge: RCV_NXT.wrapping_add(65536),
            snd_wscale: 8,
            rcv_wscale: 8,
            usable: true,
            ..Connection::default()
        };
        let flow = new_flow(&Asked { socket: &socket, connection: &connection, seen_to_begin: true }, 0x1234_5678);
        Self { socket, connection, flow, now: 1_000_000_000 }
    }

    pub fn asked(&self) -> Asked<'_> {
        Asked { socket: &self.socket, connection: &self.connection, seen_to_begin: true }
    }

    /// Writes `bytes` bytes, and has the server's kernel send them.
    pub fn send(&mut self, bytes: u32) -> Departure {
        let segment = self.segment(bytes);
        self.connection.write_seq = self.connection.write_seq.wrapping_add(bytes);
        self.socket.snd_nxt = self.connection.write_seq;
        self.depart(&segment)
    }

    /// Next segment of the server's kernel.
    pub fn segment(&self, bytes: u32) -> Packet {
        Packet {
            seq: self.socket.snd_nxt,
            ack: self.socket.rcv_nxt,
            window: 256,
            payload_bytes: bytes,
            flags: TH_ACK as u8,
            ..Packet::default()
        }
    }

    pub fn depart(&mut self, segment: &Packet) -> Departure {
        depart(&mut self.flow, segment, self.now)
    }

    pub fn begin(&mut self, length: u64) -> Counter {
        let wanted = Begin { peer: PEER, ring: 0, length, handoff: HANDOFF };
        let mut flow = self.flow;
        let result = begin(&mut flow, &wanted, &self.asked());
        self.flow = flow;
        result
    }

    /// Makes a server with an active region of `length` bytes. Before the region is a header of 100 bytes that the
    /// client has not acknowledged yet.
    pub fn with_region(next: u32, room: u32, length: u64) -> Self {
        let mut server = Self::new(next, room);
        server.send(100);
        assert_eq!(server.begin(length), Counter::FE_BEGUN);
        server
    }

    /// First sequence number of the newest region, as the client sees it.
    pub fn start(&self) -> u32 {
        self.newest().start
    }

    pub fn newest(&self) -> Break {
        self.flow.spaces.breaks[(self.flow.spaces.made.wrapping_sub(1) % BREAKS) as usize]
    }

    /// A pure ACK from the client, with the room that the client had at first.
    pub fn ack(&self, ack: u32) -> Packet {
        Packet {
            seq: self.socket.rcv_nxt,
            ack,
            window: (self.connection.snd_wnd >> 8) as u16,
            flags: TH_ACK as u8,
            ..Packet::default()
        }
    }

    pub fn route(&mut self, packet: &Packet) -> Route {
        self.route_with(packet, &[])
    }

    pub fn route_with(&mut self, packet: &Packet, blocks: &[(u32, u32)]) -> Route {
        let mut sack = Sack { blocks: blocks.len() as u32, ..Sack::default() };
        for (at, (left, right)) in blocks.iter().enumerate() {
            (sack.left[at], sack.right[at]) = (*left, *right);
        }
        route(&mut self.flow, packet, &sack, self.now)
    }
}
