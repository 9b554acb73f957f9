//! Support of programs under `shunt run`: their store, and information on other machines for the kernel and for
//! programs.

pub(crate) mod ends;
pub(crate) mod programs;
