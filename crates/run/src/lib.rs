//! `shunt run`: programs that nobody changes, under on-demand buffers.
#![forbid(unsafe_code)]

pub mod calls;
pub mod explain;
pub mod launch;
