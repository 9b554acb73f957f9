//! Keeps the steering programs on the interfaces ("ports") that the configuration names. An interface may be deleted
//! and made anew while the agent runs (a container's veth, a bond, a VPN, a VLAN at ifdown and ifup). It may come after
//! the agent has started, or lose its programs to other software. The *steering programs* are the BPF programs of
//! handoffs.
//!
//! A thread hears of each change of an interface (rtnetlink(7), RTNLGRP_LINK), and checks all interfaces once per
//! EVERY. This is done in a thread because a question to the kernel may wait for its lock on all network settings. The
//! programs are loaded once, at the start. To put them on a new interface takes only their descriptors and the
//! capabilities that the agent keeps.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shunt_handoff::TcPrograms;

use shunt_host::interfaces::{InterfaceError, Sysfs};
use shunt_host::routes::Changes;

/// Time between two checks of all interfaces, because other software may have taken programs off.
const EVERY: Duration = Duration::from_secs(5);

/// The programs of one role (frontend or backend), and the interfaces that the configuration names for this role.
#[derive(Debug)]
pub(crate) struct Role {
    pub(crate) programs: Arc<TcPrograms>,
    pub(crate) interfaces: Vec<String>,
}

/// Results of the thread, for the agent.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    /// Number of times that programs were put on an interface since the start.
    pub(crate) attached: AtomicU64,
    /// Every interface existed, and had all of its programs, when the thread last checked it.
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
    /// The interface with this index has its programs.
    On(u32),
    /// There is no such interface.
    Missing,
    /// The interface cannot have the programs, for this reason.
    Refused(String),
}

impl State {
    /// Logs what has become of an interface, once for each change. `is_new` says that the interface lacked a program,
    /// and has all of its programs now.
    fn say(&self, before: &Self, name: &str, is_new: bool) {
        match (before, self) {
            (Self::On(before), Self::On(now)) if before == now && is_new => {
                tracing::warn!(
                    interface = name,
                    "attached the steering programs again to an interface that had lost them"
                );
            }
            (before, now) if before == now => {}
            (_, Self::On(_)) => {
                tracing::info!(interface = name, "an interface has appeared: attached the steering programs")
            }
            (_, Self::Missing) => tracing::warn!(
                interface = name,
                "an interface of `interfaces` does not exist: no shortcut uses it until it does; `ip link` lists the \
                 interfaces"
            ),
            (_, Self::Refused(why)) => {
                tracing::warn!(
                    interface = name,
                    "an interface has no steering programs, and no shortcut uses it: {why}"
                );
            }
        }
    }
}

/// The thread's state.
struct Keeper {
    roles: Vec<Role>,
    sysfs: Sysfs,
    changes: Changes,
    all: Vec<Port>,
    shared: Arc<Ports>,
    /// Called after each check of all interfaces.
    also: Box<dyn FnMut() + Send>,
}

impl Keeper {
    fn new(
        roles: Vec<Role>,
        sysfs: Sysfs,
        changes: Changes,
        shared: Arc<Ports>,
        also: Box<dyn FnMut() + Send>,
    ) -> Self {
        // The loader has put programs on the interfaces that exist. All other interfaces are noted as `Refused` without
        // a reason, so that the first look logs them.
        let port = |role: usize, name: &String| {
            let index = shunt_host::interfaces::interface_index(name);
            Port { role, name: name.clone(), state: index.map_or(State::Refused(String::new()), State::On) }
        };
        let of = |(role, one): (usize, &Role)| one.interfaces.iter().map(|name| port(role, name)).collect::<Vec<_>>();
        let all = roles.iter().enumerate().flat_map(of).collect();
        Self { roles, sysfs, changes, all, shared, also }
    }

    /// Runs for as long as the process lives.
    fn run(mut self) {
        let mut next_look = Instant::now();
        loop {
            let is_due = Instant::now() >= next_look;
            if is_due {
                next_look = Instant::now() + EVERY;
            }
            self.look(is_due);
            if is_due {
                (self.also)();
            }
            self.wait(next_look.saturating_duration_since(Instant::now()));
            self.changes.take();
        }
    }

    fn wait(&self, longest: Duration) {
        let changes = self.changes.descriptor();
        let longest = Timespec::try_from(longest).expect("a few seconds");
        // If a signal interrupts the call, the thread only looks once more than it needs to.
        let _ = poll(&mut [PollFd::new(&changes, PollFlags::IN)], Some(&longest));
    }

    /// Checks interfaces, and puts missing programs on them. With `is_whole`, checks all of them. Otherwise, skips each
    /// interface that had its programs at its last check and still has the same index.
    fn look(&mut self, is_whole: bool) {
        for at in 0..self.all.len() {
            let Port { role, name, state } = &self.all[at];
            let index = shunt_host::interfaces::interface_index(name).ok();
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
        // The kind of an interface that has got its programs is not checked again: it stays the same. The interfaces
        // below it may change, but were checked when it got the programs.
        let usable = if *before == State::On(index) { Ok(index) } else { self.sysfs.index(name, &role.interfaces) };
        match usable.map(|index| (index, role.programs.keep_on(index))) {
            Ok((index, Ok(is_new))) => (State::On(index), is_new),
            Ok((_, Err(error))) => (State::Refused(shunt_host::errors::chain(&error)), false),
            Err(InterfaceError::Missing { .. }) => (State::Missing, false),
            Err(error) => (State::Refused(error.to_string()), false),
        }
    }
}

/// Starts the thread that keeps the programs of some roles on their interfaces. The thread calls `also` after each
/// check of all interfaces. Call this once the agent has given up all privileges but those that it needs, and before
/// system calls are restricted.
///
/// # Errors
/// Returns why the socket or the thread cannot be made.
pub(crate) fn keep(
    roles: Vec<Role>,
    sysfs: Sysfs,
    shared: Arc<Ports>,
    also: impl FnMut() + Send + 'static,
) -> io::Result<()> {
    let keeper = Keeper::new(roles, sysfs, Changes::of_links()?, shared, Box::new(also));
    // Waits for the thread: its start takes system calls that are forbidden later.
    let begun = Arc::new(Barrier::new(2));
    let begins = Arc::clone(&begun);
    std::thread::Builder::new().name("ports".into()).stack_size(256 << 10).spawn(move || {
        begins.wait();
        keeper.run();
    })?;
    begun.wait();
    Ok(())
}
