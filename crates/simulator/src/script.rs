//! Scripted histories. A *history* is one simulated run of a service. Here a test decides when clients ask, and when
//! faults happen. All else is as in a random history (history.rs), and the same checks are made. A *session* is the use
//! of a connection between two agents. A *payload* is the body of a response.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use shunt_logic::Logic;
use shunt_logic::limits::Limits;
use shunt_logic::logic::Call;
use shunt_logic::settings::Settings;

use crate::client::Client;
use crate::host::{FIRST_PORT, Host};
use crate::world::{Fault, Service, Weather, World};

/// Seed of all that is random in a scripted history, for example delays and the choice of backends.
const SEED: u64 = 1;
/// Time within which all agents of a service have started and begun their sessions.
const STARTED: Duration = Duration::from_secs(1);
/// Time after the end of a script by which no response, handoff or other work may be left ([`World::left`]).
const QUIET: Duration = Duration::from_secs(60);
/// Length of a response's header, in bytes.
const HEADER: u64 = 300;
/// Longest pause of a client between two responses: so long that clients ask only when the script says.
const NEVER: Duration = Duration::from_secs(1_000_000);

/// A scripted history.
pub struct Script {
    world: World,
}

impl Script {
    /// Returns a service whose agents have begun all their sessions.
    pub fn new(machines: usize) -> Self {
        Self::with(machines, |_, _| ())
    }

    /// Returns a service as [`Script::new`] does. `change` gets the number and the settings of each machine before its
    /// agent starts.
    pub fn with(machines: usize, change: impl Fn(usize, &mut Settings)) -> Self {
        let (limits, weather) = (Limits::default(), Weather::default());
        let service = Service { machines, clients: 0, places: 1000, limits, weather, think: NEVER };
        let mut world = World::new(service, SEED);
        for machine in &mut world.machines {
            change(machine.index, machine.settings_mut());
        }
        let mut script = Self { world };
        script.run(STARTED);
        script
    }

    /// Adds a client, whose frontend is machine `frontend`. Returns the client's number.
    pub fn client(&mut self, frontend: usize) -> usize {
        let index = self.world.clients.len();
        let at = SocketAddr::from((IpAddr::from([198, 51, 100, 7]), FIRST_PORT + index as u16));
        let first = self.world.random.word();
        self.world.clients.push(Client::new(at.into(), frontend, first));
        self.world.service.clients += 1;
        index
    }

    /// Has a client ask for a payload of `length` bytes. In a service of more than two machines, a random one of the
    /// others is the backend.
    pub fn ask(&mut self, client: usize, length: u64) {
        self.world.ask_for(client, HEADER, length);
    }

    /// Makes a fault happen now.
    pub fn fail(&mut self, fault: Fault) {
        self.world.fail(fault);
    }

    /// Processes the events of a period.
    ///
    /// # Panics
    /// Panics with the violation, if there is one.
    pub fn run(&mut self, period: Duration) {
        let end = self.world.now() + period;
        while self.world.violations.is_empty() && self.world.step(end) {}
        assert!(self.world.violations.is_empty(), "{:#?}", self.world.violations);
        // After the last event, the clock still has that event's time.
        self.world.schedule.wait_until(end);
    }

    /// Processes events until `holds` is true.
    ///
    /// # Panics
    /// Panics with the violation, if there is one. Panics also if `holds` is false for longer than `period`.
    pub fn run_until(&mut self, period: Duration, holds: impl Fn(&Self) -> bool) {
        let end = self.world.now() + period;
        while !holds(self) {
            assert!(self.world.step(end), "it does not happen within {period:?}");
            assert!(self.world.violations.is_empty(), "{:#?}", self.world.violations);
        }
    }

    /// Ends the script: clients ask for nothing more, and events are processed until nothing is left.
    ///
    /// # Panics
    /// Panics with what is left after a minute, or with the first violation.
    pub fn end(&mut self) {
        self.world.is_closing = true;
        let end = self.world.now() + QUIET;
        while self.world.now() < end && !self.world.left().is_empty() {
            self.run(Duration::from_millis(200));
        }
        assert_eq!(self.world.left(), Vec::<String>::new());
    }

    /// Passes an event to a machine's agent, and carries out its actions.
    ///
    /// # Panics
    /// Panics if the machine has no agent.
    pub fn event<R>(&mut self, machine: usize, event: impl FnOnce(&mut Logic<Host>, &mut Call<'_, Host>) -> R) -> R {
        let (now, base) = (self.world.now(), self.world.base);
        let done = self.world.machines[machine].event(now, base, event).expect("an agent");
        self.world.act(machine);
        self.world.end_turn(machine);
        done
    }

    /// Returns the logic of a machine's agent.
    ///
    /// # Panics
    /// Panics if the machine has no agent.
    pub fn logic(&self, machine: usize) -> &Logic<Host> {
        &self.world.machines[machine].agent.as_ref().expect("an agent").logic
    }

    /// Returns the number by which a machine's agent knows another machine.
    pub fn peer(&self, machine: usize, other: usize) -> usize {
        self.world.machines[machine].peer(other)
    }

    /// Returns how often a thing has happened, by its name in [`World::covered`].
    pub fn count(&self, what: &str) -> u64 {
        self.world.covered().get(what).copied().unwrap_or(0)
    }

    /// Returns whether a client has all that it has asked for.
    pub fn is_served(&self, client: usize) -> bool {
        self.world.clients[client].waits_for.is_none()
    }
}
