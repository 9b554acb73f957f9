//! Keeps the steering programs on the interfaces that the configuration names. One may be deleted and made anew while the
//! agent runs (a container's veth, a bond, a VPN, a VLAN at ifdown and ifup), may come after the agent has started, or may
//! lose its programs to other software.
//!
//! A thread hears of each change of an interface (rtnetlink(7), RTNLGRP_LINK) and looks at every interface each EVERY: a
//! question to the kernel may wait for its lock on all network settings. Programs are loaded once, and stay those of the
//! start: all that a new interface takes is a descriptor and CAP_NET_ADMIN.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shunt_handoff::TcPrograms;

use crate::agent::Agent;
use crate::interfaces::{InterfaceError, Sysfs};
use crate::routes::Changes;
use crate::views::Views;

/// A look at all of them without a change of an interface: other software may have taken programs off.
const EVERY: Duration = Duration::from_secs(5);

/// The programs of one role, and where they belong.
#[derive(Debug)]
pub(crate) struct Role {
    pub(crate) programs: Arc<TcPrograms>,
    pub(crate) interfaces: Vec<String>,
}

/// The thread's results, for the agent.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    /// Times that programs were put on an interface since the start.
    pub(crate) attached: AtomicU64,
    /// Every interface is there, with all its programs.
    pub(crate) are_whole: AtomicBool,
}

/// One interface, as it was last seen.
#[derive(Debug)]
struct Port {
    role: usize,
    name: String,
    state: State,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// It has its programs, and this index.
    On(u32),
    /// There is no such interface.
    Missing,
    /// It cannot have them, and this is why.
    Refused(String),
}

impl State {
    /// Logs what has become of an interface, once. `is_new`: it lacked a program and has all of them now.
    fn say(&self, before: &Self, name: &str, is_new: bool) {
        match (before, self) {
            (Self::On(before), Self::On(now)) if before == now && is_new => {
                tracing::warn!(interface = name, "steering programs were taken off an interface; they are on it again");
            }
            (before, now) if before == now => {}
            (_, Self::On(_)) => tracing::info!(interface = name, "an interface is there: it has the steering programs"),
            (_, Self::Missing) => tracing::warn!(
                interface = name,
                "an interface of `interfaces` is not there: no shortcut passes it until it is; `ip link` lists those that are"
            ),
            (_, Self::Refused(why)) => {
                tracing::warn!(
                    interface = name,
                    "no steering programs on an interface, and no shortcut passes it: {why}"
                );
            }
        }
    }
}

/// The thread's end.
struct Keeper {
    roles: Vec<Role>,
    sysfs: Sysfs,
    changes: Changes,
    all: Vec<Port>,
    shared: Arc<Ports>,
    views: Option<Views>,
}

impl Keeper {
    fn new(roles: Vec<Role>, sysfs: Sysfs, changes: Changes, shared: Arc<Ports>, views: Option<Views>) -> Self {
        // They are told apart from the start only by whether they are there: the loader has put programs on those.
        let port = |role: usize, name: &String| {
            let index = crate::host::interface_index(name);
            Port { role, name: name.clone(), state: index.map_or(State::Refused(String::new()), State::On) }
        };
        let of = |(role, one): (usize, &Role)| one.interfaces.iter().map(|name| port(role, name)).collect::<Vec<_>>();
        let all = roles.iter().enumerate().flat_map(of).collect();
        Self { roles, sysfs, changes, all, shared, views }
    }

    /// For as long as the process lives.
    fn run(mut self) {
        let mut next_look = Instant::now();
        loop {
            let is_due = Instant::now() >= next_look;
            if is_due {
                next_look = Instant::now() + EVERY;
            }
            self.look(is_due);
            if is_due && let Some(views) = &mut self.views {
                views.look();
            }
            self.wait(next_look.saturating_duration_since(Instant::now()));
            self.changes.take();
        }
    }

    fn wait(&self, longest: Duration) {
        let changes = self.changes.descriptor();
        let longest = Timespec::try_from(longest).expect("a few seconds");
        // Interrupted: a look too many.
        let _ = poll(&mut [PollFd::new(&changes, PollFlags::IN)], Some(&longest));
    }

    /// `is_whole`: also at interfaces that are those of the last look.
    fn look(&mut self, is_whole: bool) {
        for at in 0..self.all.len() {
            let Port { role, name, state } = &self.all[at];
            let index = crate::host::interface_index(name).ok();
            if !is_whole && matches!(state, State::On(known) if Some(*known) == index) {
                continue;
            }
            let (now, is_new) = self.put_on(&self.roles[*role], name, index, state);
            now.say(state, name, is_new);
            self.shared.attached.fetch_add(is_new.into(), Ordering::Relaxed);
            self.all[at].state = now;
        }
        let are_whole = self.all.iter().all(|port| matches!(port.state, State::On(_)));
        self.shared.are_whole.store(are_whole, Ordering::Relaxed);
    }

    fn put_on(&self, role: &Role, name: &str, index: Option<u32>, before: &State) -> (State, bool) {
        let Some(index) = index else { return (State::Missing, false) };
        // An interface stays what it is; what lies on it may change, and the start has looked at it.
        let usable = if *before == State::On(index) { Ok(index) } else { self.sysfs.index(name, &role.interfaces) };
        match usable.map(|index| (index, role.programs.keep_on(index))) {
            Ok((index, Ok(is_new))) => (State::On(index), is_new),
            Ok((_, Err(error))) => (State::Refused(crate::steer::chain(&error)), false),
            Err(InterfaceError::Missing { .. }) => (State::Missing, false),
            Err(error) => (State::Refused(error.to_string()), false),
        }
    }
}

impl Agent {
    /// Has the programs kept on their interfaces: after privileges were given up, but for those that this takes, and before
    /// system calls are restricted.
    ///
    /// # Errors
    /// Where there is no socket or no thread for it.
    pub fn start_ports(&mut self) -> io::Result<()> {
        let Some(sysfs) = self.sysfs.take() else { return Ok(()) };
        let frontend = self.frontend.as_ref().zip(self.config.frontend.as_ref());
        let frontend = frontend.map(|(steering, config)| (steering.tc_programs(), &config.interfaces));
        let backend = self.senders.as_ref().zip(self.config.backend.as_ref());
        let backend = backend.map(|(senders, config)| (senders.table().tc_programs(), &config.interfaces));
        let role = |(programs, interfaces): (_, &Vec<String>)| Role { programs, interfaces: interfaces.clone() };
        let roles = frontend.into_iter().chain(backend).map(role).collect();
        let views = Views::open(&self.config, Arc::clone(&self.seen))?;
        let keeper = Keeper::new(roles, sysfs, Changes::of_links()?, Arc::clone(&self.ports), Some(views));
        // System calls are restricted once it runs: to start takes others.
        let begun = Arc::new(Barrier::new(2));
        let begins = Arc::clone(&begun);
        std::thread::Builder::new().name("ports".into()).stack_size(256 << 10).spawn(move || {
            begins.wait();
            keeper.run();
        })?;
        begun.wait();
        Ok(())
    }
}
