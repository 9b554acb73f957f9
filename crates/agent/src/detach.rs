//! `shuntd --detach`: removes the BPF programs and maps that an agent leaves in the kernel. *Steering programs* rewrite
//! the packets of a client connection on which another machine has sent a payload (a handoff). Other BPF programs find
//! connections whose two ends are processes under `shunt run`.

use shunt_handoff::frontend::FlowKey;

use crate::os::alone::Alone;
use crate::os::closing::Closer;
use crate::steering::{SteerError, ends};
use crate::store::programs;
use shunt_config::Config;
use shunt_host::sockets;

/// Removes from the kernel everything that an agent with this configuration has put there, the store's parts included.
/// If an agent runs, `force` ends it first. Without `force`, a running agent is an error.
///
/// # Errors
/// Returns a [`SteerError`]: an agent runs or does not end, or something cannot be removed from the kernel.
pub fn detach(config: &Config, force: bool) -> Result<(), SteerError> {
    if config.pins.exists() {
        let _alone = if force { Alone::after_stopping(&config.pins) } else { Alone::with(&config.pins) }?;
        everything(config)?;
    }
    let frontend = config.frontend.iter().flat_map(|frontend| &frontend.interfaces);
    let backend = config.backend.iter().flat_map(|backend| &backend.interfaces);
    let all = frontend.map(|name| (name, true)).chain(backend.map(|name| (name, false)));
    all.into_iter().try_for_each(|(interface, is_frontend)| take_strays_off(interface, is_frontend, force))
}

/// Resets the connections that need the programs, and removes everything that is pinned. The caller holds the lock on
/// the pins ([`Alone`]).
pub(crate) fn everything(config: &Config) -> Result<(), SteerError> {
    programs::detach(config)
        .map_err(|error| SteerError::Host { what: "removing the store's programs and maps from the kernel", error })?;
    close(&shunt_handoff::end_handoffs(&config.pins)?);
    Ok(shunt_handoff::detach_all(&config.pins)?)
}

/// Guard of a start. If the start fails, and nothing was pinned before, the guard removes from the kernel what the
/// start has put there.
pub(crate) struct Beginning<'config> {
    config: &'config Config,
    takes_back: bool,
}

impl<'config> Beginning<'config> {
    /// Makes the guard, at the beginning of the start. The agent holds the lock on its pins (files in bpffs).
    pub(crate) fn of(config: &'config Config) -> Self {
        let is_first = std::fs::read_dir(&config.pins).is_ok_and(|mut pinned| pinned.next().is_none());
        Self { config, takes_back: is_first }
    }

    pub(crate) fn has_worked(mut self) {
        self.takes_back = false;
    }
}

impl Drop for Beginning<'_> {
    fn drop(&mut self) {
        if self.takes_back
            && let Err(error) = everything(self.config)
        {
            tracing::warn!(
                %error,
                "cannot remove the programs and maps that this start has put into the kernel: run `shuntd --detach`"
            );
        }
    }
}

/// Removes steering programs from an interface if their pins are gone. Only an operator knows whether such programs are
/// this agent's or another's. So without `force` they are only logged.
fn take_strays_off(interface: &str, is_frontend: bool, force: bool) -> Result<(), SteerError> {
    let Ok(ifindex) = shunt_host::interfaces::interface_index(interface) else { return Ok(()) };
    let strays = shunt_handoff::strays(ifindex, is_frontend);
    for stray in &strays {
        let program = stray.name();
        if !force {
            tracing::warn!(
                interface,
                program,
                "a steering program without pins stays attached: if no agent uses it, `shuntd --detach --force` \
                 removes it"
            );
        } else if let Some(process) = stray.process() {
            return Err(SteerError::InUse { program, interface: interface.to_owned(), process });
        }
    }
    if force {
        // Both programs of a role (frontend or backend) use one table of connections, so the first program finds all
        // connections.
        strays.first().into_iter().for_each(|stray| close(&stray.moved()));
        for stray in &strays {
            stray.take_off()?;
            tracing::info!(interface, program = stray.name(), "removed a steering program that had no pins");
        }
    }
    Ok(())
}

/// Closes connections that would hang without the steering programs. To be called while the programs still run: they
/// translate the resets into the clients' sequence numbers.
fn close(connections: &[FlowKey]) {
    if connections.is_empty() {
        return;
    }
    let mut failed = None;
    let mut closer = Closer::open().map_err(|error| failed = Some(error)).ok();
    let mut closed = 0;
    for (server, client) in connections.iter().map(ends) {
        match closer.as_mut().map(|closer| closer.close(server, client)) {
            Some(Ok(())) => closed += 1,
            Some(Err(error)) if error.kind() != std::io::ErrorKind::NotFound => failed = Some(error),
            _ => {}
        }
    }
    if closed > 0 {
        tracing::info!(connections = closed, "reset the connections that have had a shortcut");
    }
    // A kernel without sock_diag(7) cannot list connections, so nothing is known about them.
    let Ok(living) = sockets::held_connections() else { return };
    let hanging = connections.iter().filter(|key| living.contains(&ends(key))).count();
    if hanging > 0 {
        let error = failed.map_or_else(
            || {
                "sock_diag(7) does not list them; for connections in a VRF, run this command with `ip vrf exec`"
                    .to_owned()
            },
            |error| error.to_string(),
        );
        tracing::warn!(
            connections = hanging,
            error,
            "cannot close connections that have had a shortcut, and they hang from now on: restart their servers (the \
             kernel needs CONFIG_INET_DIAG_DESTROY to close connections)"
        );
    }
}
