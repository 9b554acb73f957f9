//! Servers of this machine: their connections, and the memory that they share with the agent (board, counters).

pub(crate) mod board;
pub(crate) mod connection;
