//! `shunt run`: runs unmodified programs with on-demand buffers.
#![forbid(unsafe_code)]

pub mod calls;
pub mod explain;
pub mod launch;
