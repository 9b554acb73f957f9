//! Unmodified programs under `shunt run`, with real kernels, and every byte compared.

mod bed;
mod chain;
mod loss;
mod peers;
