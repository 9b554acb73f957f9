//! Attacks on a running service, one kind a file. SECURITY.md lists them by their tests' names.

mod agents;
mod exhaustion;
mod local;
mod offers;
mod optimistic;
mod privileges;
mod segments;
#[path = "../service/mod.rs"]
mod service;
mod table;
