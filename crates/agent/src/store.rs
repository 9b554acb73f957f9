//! Support of programs under `shunt run`: the store (their payloads on this machine), and information on other machines
//! for the kernel and for programs.

pub(crate) mod ends;
pub(crate) mod programs;
