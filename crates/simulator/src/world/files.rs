//! Writes to files, and payloads in stores. A *store* has the payloads of a machine's programs under `shunt run`. A
//! *payload* is the body of a response.

use crate::client::Response;
use crate::world::{Body, World};

impl World {
    /// Writes to a file whose payload was just offered or is being sent, as often as [`Variety`](super::Variety) says.
    pub(super) fn write_to_file(&mut self, machine: usize, file: u64) {
        if self.random.in_a_million(self.variety.writes) {
            self.cover("file is written to");
            let is_new = self.random.below(2) == 0;
            self.machines[machine].host.write_to(file, is_new);
        }
    }

    /// Has a program leave a body in the store of its machine.
    pub(super) fn store(&mut self, machine: usize, response: &Response) -> Body {
        let slot = response.number as u32;
        self.machines[machine].host.stored.insert(slot, response.file);
        self.cover("stored");
        Body::Slot(slot)
    }
}
