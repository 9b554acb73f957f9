//! Addresses of programs under `shunt run` that may exchange references with programs of this machine. Also the stores
//! that programs at each address can fetch from, and new connections to other machines' stores. A *store* has the
//! bodies that a machine's programs have written, and a *reference* stands for bytes of one such body.

pub mod ends;
pub mod reaching;
pub mod sources;
