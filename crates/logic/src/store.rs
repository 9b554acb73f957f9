//! Programs under `shunt run`: the machines whose programs may exchange references with programs of this machine, and
//! the stores that they can fetch from. A *store* has the bodies that a machine's programs have written, and a
//! *reference* stands for bytes of one of them.

pub mod ends;
pub mod reaching;
pub mod sources;
