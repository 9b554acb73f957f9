//! Faults of agents and of the network.

use std::time::Duration;

use crate::sender::Sender;
use crate::world::{Event, World};

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
        }
    }

    fn kill(&mut self, machine: usize, pause: Duration) {
        let Some(agent) = self.machines[machine].agent.take() else { return };
        self.cover("kill");
        self.machines[machine].worker.connected = None;
        self.machines[machine].unread.clear();
        self.machines[machine].stopped_until = Duration::ZERO;
        self.machines[machine].host.senders.values_mut().for_each(Sender::orphan);
        // The agent's connections with other agents are closed. The sockets of its senders still send the bytes that
        // they have.
        agent.links.into_iter().flatten().for_each(|link| self.close(link, machine));
        self.schedule.after(pause, Event::Start { machine });
    }

    /// Makes a random fault happen now.
    pub fn fail_somewhere(&mut self) {
        let machines = self.service.machines as u64;
        let machine = self.random.below(machines) as usize;
        let short = self.random.time(Duration::from_millis(1), Duration::from_millis(400));
        let long = self.random.time(Duration::from_millis(100), Duration::from_secs(4));
        let pause = if self.random.below(3) == 0 { short } else { long };
        let fault = match self.random.below(4) {
            0 => Fault::Kill { machine, pause },
            1 => Fault::Stop { machine, pause },
            _ => {
                let other = (machine + 1 + self.random.below(machines - 1) as usize) % machines as usize;
                Fault::Cut { one: machine, other, pause }
            }
        };
        self.fail(fault);
    }
}
