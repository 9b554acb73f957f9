//! Takes everything that agents have pinned in a directory out of the kernel: the steering programs of frontend and
//! backend, and their maps.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use crate::attach::{self, BE_CONNECTED, BE_IN, BE_OUT, FE_DELIVERED, FE_IN, FE_OUT};
use crate::calls::{self, CALLS};
use crate::error::SteeringError;
use crate::older;
use crate::ownership::Owned;
use crate::pins::MAPS;

/// Takes all steering programs that use the maps under `pin_dir` off the interfaces of this network namespace, and
/// removes these maps from the kernel. From then on the connections that [`crate::end_handoffs`] returns hang, unless
/// they were closed. The clsact qdiscs and the programs of others stay.
///
/// # Errors
/// Returns an error if a pinned file cannot be removed.
pub fn detach_all(pin_dir: &Path) -> Result<(), SteeringError> {
    attach::log_libbpf();
    let (ours, places) = (Owned::by_all(pin_dir), [FE_IN, FE_OUT, BE_IN, BE_OUT]);
    attach::take_all_off(&places, |program| ours.has(program))?;
    calls::detach(pin_dir)?;
    attach::detach_cgroup(&pin_dir.join(BE_CONNECTED))?;
    MAPS.iter().try_for_each(|map| attach::remove(&pin_dir.join(map)))?;
    for program in places.map(|place| place.program).into_iter().chain([FE_DELIVERED, CALLS]) {
        attach::pins_of(pin_dir, program).iter().try_for_each(|pin| attach::remove(pin))?;
    }
    older::directories(pin_dir).iter().try_for_each(|aside| older::remove(aside))?;
    match fs::remove_dir(pin_dir) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(SteeringError::Path { call: "rmdir", path: pin_dir.into(), source: error })
        }
        _ => Ok(()),
    }
}
