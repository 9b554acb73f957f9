//! A process with the library's memory and connections, and a store. Nothing is preloaded.
#![allow(dead_code, reason = "each test uses a part of it")]

pub mod connections;
pub mod regions;
#[path = "../../../odb/tests/store/bed.rs"]
pub mod store;

use std::fs::File;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use shunt_odb::segment::Writer;
use shunt_odb::states;
use shunt_odb::store::Limits;
use shunt_odb::store::client::Connection;
use shunt_process::connections::runtime::{self, Runtime};
use shunt_process::connections::states::Connections;
use shunt_process::memory::{Calls, Memory, blocks};
use shunt_process::store::Store;
use shunt_process::system::ranks;
use shunt_sys::lock::Mutex;
use shunt_testbed::wait_for;
use store::Bed;

/// The library's state in this process.
pub struct Process {
    pub runtime: &'static Runtime,
    pub memory: &'static Memory,
    /// Segment (memory of the store) into which the bodies are written.
    writer: Mutex<Writer>,
    _segment: Connection,
    pub bed: Mutex<Bed>,
}

static PROCESS: OnceLock<Process> = OnceLock::new();

pub fn process() -> &'static Process {
    PROCESS.get_or_init(|| {
        ranks::check();
        blocks::begin(0);
        let bed = Bed::new(Limits::default());
        let segment = bed.program();
        let writer = Mutex::new(segment.lease().unwrap().unwrap());
        let device = File::options().read(true).write(true).open("/dev/userfaultfd").unwrap();
        let tick = || PROCESS.get().is_some_and(|of| of.memory.holders.send_returns(&of.memory.returns));
        let runtime = Runtime {
            connections: Connections::new(Arc::new(states::new().unwrap()), None),
            memory: Memory::new(device.into(), bed.path(), Calls { tick, tend: || () }),
            store: Store::new(bed.path()),
            // Nothing is learnt about receivers. So every body that may be sent by reference is sent so.
            learnt: None,
            inherited: -1,
        };
        let runtime = runtime::begin(Some(runtime)).unwrap();
        Process { runtime, memory: &runtime.memory, writer, _segment: segment, bed: Mutex::new(bed) }
    })
}

impl Process {
    /// Makes memory stand for a body, as a read of a reference does. Returns whether the memory can be absent. Waits
    /// for room in the store.
    pub fn receive(&self, into: Range<usize>, body: &[u8]) -> bool {
        let put = || self.writer.lock().put(&[IoSlice::new(body)]);
        let reference = wait_for("room in the store", put).unwrap();
        let hold = self.memory.hold(&reference, reference.weight, false);
        // Waits, because nothing becomes absent while another thread forks.
        wait_for("the memory is absent", || self.memory.make_absent(into.clone(), &hold, 0)).is_ok()
    }
}

/// The byte at a place of a stream. Nearby sequences of these bytes differ.
pub fn byte(at: usize) -> u8 {
    (at.wrapping_mul(0x9e37_79b1) >> 13) as u8
}

/// The first `bytes` bytes of a stream. Each seed has a different stream.
pub fn body(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| byte(at) ^ seed).collect()
}

/// Pseudo-random numbers from a seed, which the tests print.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}
