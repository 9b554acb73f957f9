//! An agent's decisions, without sockets, clocks and BPF.
//!
//! [`Logic`] is one agent. The daemon (crates/agent) passes events to it, with the time, and carries out the actions
//! that it asks for:
//!
//! ```text
//!   daemon: epoll, descriptors, BPF, TLS          Logic: state machines
//!     a frame, a packet, a timer, an answer  -->    decide
//!     board, programs, sockets               <--    actions, and frames in outboxes
//! ```
//!
//! Nothing here waits, reads a clock, draws a random number or makes a system call. The simulator (crates/simulator)
//! runs many agents on a virtual clock.
//!
//! Each module below is for one role: `peers` for other agents, `servers` for the programs of this machine that connect
//! to the agent, `frontend` and `backend` for the two ends of a handoff (the frontend lets the backend send a body on a
//! client's connection), `store` for programs under `shunt run`. A state machine gets the state that it shares with
//! others as a [`Turn`].
#![forbid(unsafe_code)]

pub mod action;
pub mod backend;
pub mod board;
pub mod counts;
pub mod frontend;
pub mod limits;
pub mod logic;
pub mod machine;
pub mod peers;
pub mod rate;
pub mod servers;
pub mod settings;
pub mod store;
pub mod turn;

pub use action::{Action, Actions, Told};
pub use logic::Logic;
pub use settings::Settings;
pub use turn::Turn;
