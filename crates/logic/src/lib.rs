//! An agent's decisions, without sockets, clocks and BPF.
//!
//! [`Logic`] is one agent. The daemon (crates/agent) tells it of each event, with the time, and carries out the actions
//! that the logic asks for. The *board* is memory that the agent writes and its servers read. A *frame* is a message
//! between agents.
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
//! Five modules have the state machines. `peers` is for other agents, and `servers` for the programs of this machine
//! that connect to the agent. `frontend` and `backend` are for the two ends of a handoff, and `store` is for programs
//! under `shunt run`. In a *handoff*, the frontend lets the backend send a body on a client's connection. State that
//! several state machines use is passed to them as a [`Turn`].
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
