//! Faults of agents, servers, machines and the network, and the functions that make them happen. A *frame* is a message
//! between agents. A *store* has the payloads of a machine's programs under `shunt run`. A *payload* is the body of a
//! response.

use std::time::Duration;

use crate::world::World;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An agent ends at once, and starts again after a while.
    Kill {
        /// The agent's machine.
        machine: usize,
        /// Time until the agent starts again.
        pause: Duration,
    },
    /// An agent stands still for a while.
    Stop {
        /// The agent's machine.
        machine: usize,
        /// Duration of the fault.
        pause: Duration,
    },
    /// Two machines do not reach each other for a while.
    Cut {
        /// One machine.
        one: usize,
        /// The other machine.
        other: usize,
        /// Duration of the fault.
        pause: Duration,
    },
    /// An agent is told to end (SIGTERM). It ends when its work is done or its time is up, and starts again.
    Drain {
        /// The agent's machine.
        machine: usize,
    },
    /// An agent reads a configuration in which something is different for a while.
    Reload {
        /// The agent's machine.
        machine: usize,
        /// Duration of the difference.
        pause: Duration,
    },
    /// Machines that no configuration names, and machines under false names, connect to an agent.
    Strangers {
        /// The machine that they connect to.
        machine: usize,
    },
    /// Processes that are no servers, or that send what no correct server sends, connect to an agent.
    Crowd {
        /// The agent's machine.
        machine: usize,
    },
    /// An agent sends frames that no correct agent sends.
    Garble {
        /// The agent's machine.
        machine: usize,
        /// The machine that gets the frames.
        other: usize,
    },
    /// An agent has no free file descriptor for a while.
    Scarce {
        /// The agent's machine.
        machine: usize,
        /// Duration of the fault.
        pause: Duration,
    },
    /// Payload that a machine sends as a backend does not reach the clients of another machine.
    ClosedPath {
        /// The backend.
        machine: usize,
        /// The frontend.
        other: usize,
        /// Duration of the fault.
        pause: Duration,
    },
    /// A machine's nginx worker ends, and another one starts.
    WorkerEnds {
        /// The machine.
        machine: usize,
    },
    /// Addresses of a machine's interfaces change, three times in a row.
    Renumber {
        /// The machine.
        machine: usize,
    },
    /// Programs of a machine connect to the store of another machine, two at the same time.
    Reach {
        /// The programs' machine.
        machine: usize,
        /// The store's machine.
        other: usize,
    },
    /// The connection between two agents is reset.
    Reset {
        /// One machine.
        one: usize,
        /// The other machine.
        other: usize,
    },
}

impl World {
    /// Makes a fault happen now.
    pub fn fail(&mut self, fault: Fault) {
        match fault {
            Fault::Kill { machine, pause } => self.kill(machine, pause),
            Fault::Stop { machine, pause } => {
                self.cover("stop");
                let until = self.now() + pause;
                let stopped = &mut self.machines[machine].stopped_until;
                *stopped = until.max(*stopped);
            }
            Fault::Cut { one, other, pause } => {
                self.cover("cut");
                let until = self.now() + pause;
                self.cuts.insert((one.min(other), one.max(other)), until);
            }
            Fault::Drain { machine } => self.drain(machine),
            Fault::Reload { machine, pause } => self.reload(machine, pause),
            Fault::Strangers { machine } => self.strangers(machine),
            Fault::Crowd { machine } => self.crowd(machine),
            Fault::Garble { machine, other } => (0..3).for_each(|_| self.garble(machine, other)),
            Fault::Scarce { machine, pause } => self.make_scarce(machine, pause),
            Fault::ClosedPath { machine, other, pause } => self.close_path(machine, other, pause),
            Fault::WorkerEnds { machine } => self.end_worker(machine),
            Fault::Renumber { machine } => (0..3).for_each(|_| self.renumber(machine)),
            Fault::Reach { machine, other } => (0..2).for_each(|_| self.reach_store(machine, other)),
            Fault::Reset { one, other } => self.reset(one, other),
        }
    }

    /// Resets the connection between two agents. The agent of machine `one` sees the reset now, and the other agent
    /// when the reset arrives.
    fn reset(&mut self, one: usize, other: usize) {
        let peer = self.machines[one].peer(other);
        if self.machines[one].agent.as_ref().is_none_or(|agent| agent.links[peer].is_none()) {
            return;
        }
        self.cover("reset");
        self.lose_peer(one, peer, "reset");
        self.end_turn(one);
    }

    /// Makes a random fault happen now.
    pub fn fail_somewhere(&mut self) {
        let machines = self.service.machines as u64;
        let machine = self.random.below(machines) as usize;
        let short = self.random.time(Duration::from_millis(1), Duration::from_millis(400));
        let long = self.random.time(Duration::from_millis(100), Duration::from_secs(4));
        let pause = if self.random.below(3) == 0 { short } else { long };
        let other = (machine + 1 + self.random.below(machines - 1) as usize) % machines as usize;
        let kinds = if self.variety.has_all_faults { 15 } else { 4 };
        let fault = match self.random.below(kinds) {
            0 => Fault::Kill { machine, pause },
            1 => Fault::Stop { machine, pause },
            4 => Fault::Drain { machine },
            5 => Fault::Reload { machine, pause },
            6 => Fault::Strangers { machine },
            7 => Fault::Crowd { machine },
            8 => Fault::Garble { machine, other },
            9 => Fault::Scarce { machine, pause },
            10 => Fault::ClosedPath { machine, other, pause },
            11 => Fault::Renumber { machine },
            12 => Fault::Reach { machine, other },
            13 => Fault::WorkerEnds { machine },
            14 => Fault::Reset { one: machine, other },
            _ => Fault::Cut { one: machine, other, pause },
        };
        self.fail(fault);
    }
}
