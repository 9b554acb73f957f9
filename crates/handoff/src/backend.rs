//! The backend's side of steering: loads bpf/backend.bpf.c, and writes and reads its maps. A *sender* is a kernel
//! socket of this machine that sends payloads to one client of a frontend. Its record in the programs' maps is its
//! *slot*. A *layout* is a version of the maps' contents.

use std::io;
use std::mem::MaybeUninit;
use std::mem::offset_of;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, MapHandle};
use shunt_sys::mapped::MappedArray;
use shunt_sys::ringbuf::RingBuffer;
use shunt_wire::{Address, Endpoint};
use zerocopy::{FromBytes, IntoBytes};

use crate::attach::{self, BE_CONNECTED, BE_IN, BE_OUT, TcPrograms};
use crate::bpf::backend::{BackendSkelBuilder, OpenBackendSkel};
use crate::bpf::{MAX_SENDERS, SENDER_LIVE, SENDER_WORD, SenderKey as KeyBytes, SenderSlot};
use crate::counters::{self, Counter};
use crate::error::SteeringError;
use crate::sender::{SenderKey, SenderTable, Slot};
use crate::{older, pins};

/// Configuration of the backend's programs.
#[derive(Clone, Debug)]
pub struct BackendConfig {
    /// Directory in a BPF file system, for this agent alone. Made if it is missing. [`crate::Frontend`] may share it.
    pub pin_dir: PathBuf,
    /// SO_NETNS_COOKIE of the agent's namespace. 0: any namespace.
    pub netns_cookie: u64,
    /// Directory of the cgroup (v2) that contains the agent.
    pub cgroup: PathBuf,
    /// Indices of the interfaces that lead to clients and frontends, in the calling thread's network namespace.
    pub interfaces: Vec<u32>,
    /// Ports of the agent's sockets. Packets of these ports that belong to no sender are dropped.
    pub ports: RangeInclusive<u16>,
}

/// The backend's loaded programs, with their maps open. The programs stay loaded when the value is dropped, until
/// [`crate::detach_all`].
#[derive(Debug)]
pub struct Backend {
    senders: MapHandle,
    counters: MapHandle,
    slots: MappedArray<SenderSlot>,
    tc: Arc<TcPrograms>,
    words: MapHandle,
    reports: RingBuffer,
}

/// Sets the values that the verifier takes for constants. The verifier skips the branches that they make unreachable.
pub(crate) fn set_constants(open: &mut OpenBackendSkel<'_>, netns_cookie: u64, ports: &RangeInclusive<u16>) {
    if let Some(rodata) = open.maps.rodata_data.as_mut() {
        rodata.netns_cookie = netns_cookie;
        rodata.sender_port_low = *ports.start();
        rodata.sender_port_high = *ports.end();
    }
}

impl Backend {
    /// Loads and attaches the programs. They replace those of an earlier agent, whose senders are forgotten: their
    /// sockets ended with that agent, and their late packets are dropped.
    ///
    /// # Errors
    /// Returns an error if something that the configuration names is missing, if the kernel refuses, if another agent
    /// has one of the interfaces, or if the maps under `pin_dir` have a layout that leaves no room for another.
    pub fn load(config: &BackendConfig) -> Result<Self, SteeringError> {
        attach::log_libbpf();
        pins::prepare(&config.pin_dir)?;
        older::set_aside(&config.pin_dir)?;
        attach::until_not_interrupted(|| Self::load_once(config))
    }

    fn load_once(config: &BackendConfig) -> Result<Self, SteeringError> {
        let load = |source| SteeringError::Load { object: "backend", source };

        let mut storage = MaybeUninit::uninit();
        let mut builder = BackendSkelBuilder::default();
        builder.obj_builder.pin_root_path(&config.pin_dir).map_err(load)?;
        let mut open = builder.open(&mut storage).map_err(load)?;
        set_constants(&mut open, config.netns_cookie, &config.ports);
        let maps = &open.maps;
        pins::check_layout(&config.pin_dir, [&maps.senders, &maps.sender_slots, &maps.counters])?;
        let mut loaded = open.load().map_err(load)?;
        pins::write_layout(&loaded.maps.layout)?;

        let handle = |map, name| MapHandle::try_from(map).map_err(SteeringError::map("dup", name));
        let slots = handle(&*loaded.maps.sender_slots, "sender_slots")?;
        let words = handle(&*loaded.maps.words, "words")?;
        let reports = RingBuffer::new(words.as_fd());
        let mut backend = Self {
            senders: handle(&*loaded.maps.senders, "senders")?,
            counters: handle(&*loaded.maps.counters, "counters")?,
            slots: MappedArray::new(&slots, MAX_SENDERS as usize)
                .map_err(|source| SteeringError::map("mmap", "sender_slots")(source.into()))?,
            tc: Arc::new(TcPrograms(Vec::new())),
            reports: reports.map_err(|source| SteeringError::map("mmap", "words")(source.into()))?,
            words,
        };
        backend.forget_senders()?;
        backend.tc = Arc::new(TcPrograms(vec![
            attach::attach_tc(&mut loaded.progs.be_out, BE_OUT, &config.interfaces, &config.pin_dir)?,
            attach::attach_tc(&mut loaded.progs.be_in, BE_IN, &config.interfaces, &config.pin_dir)?,
        ]));
        attach::attach_cgroup(&loaded.progs.be_connected, BE_CONNECTED, &config.cgroup, &config.pin_dir)?;
        older::end_senders(&config.pin_dir)?;
        Ok(backend)
    }

    fn forget_senders(&self) -> Result<(), SteeringError> {
        let keys: Vec<Vec<u8>> = self.senders.keys().collect();
        for key in keys {
            self.senders.delete(&key).map_err(SteeringError::map("delete", "senders"))?;
        }
        Ok(())
    }

    /// Programs for the interfaces that lead to clients and frontends.
    pub fn tc_programs(&self) -> Arc<TcPrograms> {
        Arc::clone(&self.tc)
    }

    /// Descriptor that is readable when [`SenderTable::take_reports`] has something to return.
    pub fn reports(&self) -> BorrowedFd<'_> {
        self.words.as_fd()
    }

    /// Number of senders that the programs know. All of them are this agent's.
    pub fn senders(&self) -> usize {
        self.senders.keys().count()
    }

    /// Reads the programs' counters.
    ///
    /// # Errors
    /// Returns the kernel's error of bpf(2).
    pub fn counters(&self) -> Result<Vec<Counter>, SteeringError> {
        counters::read(&self.counters, "be_")
    }
}

impl SenderTable for Backend {
    /// # Panics
    /// If `index` is not below MAX_SENDERS.
    fn write_slot(&mut self, index: u32, slot: &Slot) {
        let window = self.slots.read(index as usize).window;
        let bytes = SenderSlot { window, ..SenderSlot::from(slot) };
        // The slot is closed first, and then opened, so that no packet is handled by a slot that is half old and half
        // new.
        self.slots.write(index as usize, &SenderSlot { live: 0, ..bytes });
        fence(Ordering::Release);
        self.slots.write(index as usize, &bytes);
    }

    fn window(&self, index: u32) -> u32 {
        self.slots.read(index as usize).window.into()
    }

    fn insert(&mut self, key: &SenderKey, index: u32) -> io::Result<()> {
        let inserted = self.senders.update(KeyBytes::from(key).as_bytes(), &index.to_ne_bytes(), MapFlags::ANY);
        inserted.map_err(io::Error::other)
    }

    fn remove(&mut self, key: &SenderKey) {
        let removed = self.senders.delete(KeyBytes::from(key).as_bytes());
        if let Err(error) = removed
            && error.kind() != libbpf_rs::ErrorKind::NotFound
        {
            tracing::warn!(%error, ?key, "cannot remove a sender");
        }
    }

    fn await_end(&mut self, index: u32, end: u32) {
        self.slots.write_field(index as usize, offset_of!(SenderSlot, end), end);
        fence(Ordering::Release);
        self.slots.write_field(index as usize, offset_of!(SenderSlot, live), (SENDER_LIVE | SENDER_WORD) as u16);
        // The ACK of the payload's end may pass be_in at this moment. be_in writes `acked` and then reads `live`. This
        // function writes `live`, and its caller reads `acked` afterwards. So as a rule, one of the two sees that the
        // end is acknowledged. But be_in has no fence: if neither sees it, the caller's next sweep does.
        fence(Ordering::SeqCst);
    }

    fn acked(&self, index: u32) -> u32 {
        self.slots.read(index as usize).acked
    }

    fn take_reports(&mut self) -> Vec<SenderKey> {
        let mut reports = Vec::new();
        self.reports
            .drain(|record| reports.extend(KeyBytes::read_from_prefix(record).map(|(key, _)| SenderKey::from(key))));
        reports
    }
}

impl From<KeyBytes> for SenderKey {
    fn from(key: KeyBytes) -> Self {
        let client = Endpoint { address: Address(key.client_address), port_be: key.client_port.to_ne_bytes() };
        Self { client, port: u16::from_be(key.port) }
    }
}

impl From<&SenderKey> for KeyBytes {
    fn from(key: &SenderKey) -> Self {
        Self {
            client_address: key.client.address.0,
            client_port: u16::from_ne_bytes(key.client.port_be),
            port: key.port.to_be(),
        }
    }
}

impl From<&Slot> for SenderSlot {
    fn from(slot: &Slot) -> Self {
        Self {
            server_address: slot.server.address.0,
            server_port: u16::from_ne_bytes(slot.server.port_be),
            live: if slot.live { SENDER_LIVE as u16 } else { 0 },
            start: slot.start,
            seq_delta: slot.seq_delta,
            ts_delta: slot.ts_delta,
            rcv_nxt: slot.rcv_nxt,
            ack: slot.ack,
            end: 0,
            snd_cwnd: slot.snd_cwnd.try_into().unwrap_or(u16::MAX),
            ts_recent: slot.ts_recent,
            sent: slot.start.wrapping_sub(slot.seq_delta),
            edge: slot.start.wrapping_sub(slot.seq_delta).wrapping_add(slot.ahead),
            acked: slot.start.wrapping_sub(slot.seq_delta),
            window: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    #[test]
    fn ports_are_in_network_order_in_a_key() {
        let client: SocketAddr = "10.7.0.1:443".parse().unwrap();
        let key = KeyBytes::from(&SenderKey { client: client.into(), port: 258 });
        assert_eq!(key.as_bytes()[10..16], [0xff, 0xff, 10, 7, 0, 1]);
        assert_eq!(key.as_bytes()[16..], [1, 187, 1, 2]);
        assert_eq!(SenderKey::from(key), SenderKey { client: client.into(), port: 258 });
    }
}
