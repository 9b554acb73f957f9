//! Programs under `shunt run`: the machines whose programs may exchange references with programs of this machine, and
//! the stores that they can fetch from.

pub mod ends;
pub mod reaching;
pub mod sources;
