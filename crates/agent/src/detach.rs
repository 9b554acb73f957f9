//! `shuntd --detach`: takes out of the kernel what an agent leaves there.

use shunt_handoff::frontend::FlowKey;

use crate::alone::Alone;
use crate::closing::Closer;
use crate::config::Config;
use crate::steer::{SteerError, ends};
use crate::{host, store};

/// Takes everything that an agent with this configuration put into the kernel out again, the store's parts too. `force`:
/// an agent that runs is ended first, else it is refused.
///
/// # Errors
/// See [`SteerError`].
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

/// Takes out whatever has pins. The caller is alone with these.
pub(crate) fn everything(config: &Config) -> Result<(), SteerError> {
    store::detach(config).map_err(|error| SteerError::Host { what: "taking the store's parts out", error })?;
    close(&shunt_handoff::end_handoffs(&config.pins)?);
    Ok(shunt_handoff::detach_all(&config.pins)?)
}

/// Programs whose pins are gone may be this agent's, or another's: only an operator knows.
fn take_strays_off(interface: &str, is_frontend: bool, force: bool) -> Result<(), SteerError> {
    let Ok(ifindex) = host::interface_index(interface) else { return Ok(()) };
    let strays = shunt_handoff::strays(ifindex, is_frontend);
    for stray in &strays {
        let program = stray.name();
        if !force {
            tracing::warn!(
                interface,
                program,
                "a steering program whose pins are gone stays: `shuntd --detach --force` takes it off if no agent uses it"
            );
        } else if let Some(process) = stray.process() {
            return Err(SteerError::InUse { program, interface: interface.to_owned(), process });
        }
    }
    if force {
        // Both programs of a role use one table.
        strays.first().into_iter().for_each(|stray| close(&stray.moved()));
        for stray in &strays {
            stray.take_off()?;
            tracing::info!(interface, program = stray.name(), "a steering program whose pins were gone is taken off");
        }
    }
    Ok(())
}

/// Closes connections that would hang without the steering programs. Their resets pass these, which number them as the
/// clients count.
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
        tracing::info!(connections = closed, "connections that have had a shortcut are closed: they get a reset");
    }
    // A kernel without sock_diag(7) knows no connection, and says only that.
    let Ok(living) = host::held_connections() else { return };
    let hanging = connections.iter().filter(|key| living.contains(&ends(key))).count();
    if hanging > 0 {
        let error = failed.map_or_else(
            || "sock_diag(7) does not find them; in a VRF run this by `ip vrf exec`".to_owned(),
            |error| error.to_string(),
        );
        tracing::warn!(
            connections = hanging,
            error,
            "connections that have had a shortcut cannot be closed, and hang from now on: restart their servers, which \
             ends them (the kernel needs CONFIG_INET_DIAG_DESTROY to close them)"
        );
    }
}
