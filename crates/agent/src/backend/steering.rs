//! The backend's steering programs, configured for the agent. These are BPF programs. A *sender* is this machine's
//! kernel socket for a client of a frontend; its *payload* is the body that it sends.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use serde_json::Value;
use shunt_handoff::sender::{SenderKey, SenderTable, Slot};
use shunt_handoff::{Backend, BackendConfig, TcPrograms};

use crate::steering::{Place, SteerError, named};
use shunt_config::Config;

/// The loaded programs of the backend.
pub struct BackendSteering(Backend);

impl BackendSteering {
    /// Loads the programs, or takes over those that an earlier agent has left pinned.
    ///
    /// # Errors
    /// Returns a [`SteerError`]: why the programs cannot be loaded or attached.
    pub fn load(config: &Config, interfaces: &[String], ports: RangeInclusive<u16>) -> Result<Self, SteerError> {
        let Place { cgroup, netns_cookie, interfaces } = Place::of(config, interfaces)?;
        let pin_dir = config.pins.clone();
        Ok(Self(Backend::load(&BackendConfig { pin_dir, netns_cookie, cgroup, interfaces, ports })?))
    }

    /// Returns the programs for the interfaces that payloads leave by.
    pub fn tc_programs(&self) -> Arc<TcPrograms> {
        self.0.tc_programs()
    }

    /// Returns the descriptor that is readable when a client has acknowledged the end of a payload, and a frontend
    /// waits for this news.
    pub fn reports(&self) -> BorrowedFd<'_> {
        self.0.reports()
    }

    /// Returns the programs' counters, and the number of senders.
    pub fn counters(&self) -> Value {
        let mut counters = named(self.0.counters());
        counters.insert("senders".into(), Value::from(self.0.senders()));
        Value::Object(counters)
    }
}

impl SenderTable for BackendSteering {
    fn write_slot(&mut self, index: u32, slot: &Slot) {
        self.0.write_slot(index, slot);
    }

    fn window(&self, index: u32) -> u32 {
        self.0.window(index)
    }

    fn insert(&mut self, key: &SenderKey, index: u32) -> io::Result<()> {
        self.0.insert(key, index)
    }

    fn remove(&mut self, key: &SenderKey) {
        self.0.remove(key);
    }

    fn await_end(&mut self, index: u32, end: u32) {
        self.0.await_end(index, end);
    }

    fn acked(&self, index: u32) -> u32 {
        self.0.acked(index)
    }

    fn take_reports(&mut self) -> Vec<SenderKey> {
        self.0.take_reports()
    }
}
