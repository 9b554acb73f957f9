//! The buffer in which records of TLS 1.3 are sealed, that is, encrypted.

use shunt_wire::tls::{MAX_CONTENT_BYTES, OVERHEAD_BYTES};

/// Number of records that are sealed together. With more records, the first ones leave the processor's nearest caches
/// before the kernel copies them. With fewer records, there are more system calls.
pub(super) const RECORDS_AT_ONCE: usize = 4;

/// Buffer in which records are sealed, one for all streams of a thread. Nothing leaves it unsealed.
#[derive(Debug)]
pub struct Workbench(pub(super) Box<[u8]>);

impl Default for Workbench {
    fn default() -> Self {
        let each = usize::from(MAX_CONTENT_BYTES) + OVERHEAD_BYTES as usize;
        Self(vec![0; RECORDS_AT_ONCE * each].into_boxed_slice())
    }
}
