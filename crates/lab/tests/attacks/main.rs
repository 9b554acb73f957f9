//! Attacks on a running service, one kind in each file. SECURITY.md has a table of the attacks and their tests.

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
