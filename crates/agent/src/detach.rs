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
    if !config.pins.exists() {
        return Ok(());
    }
    let _alone = if force { Alone::after_stopping(&config.pins) } else { Alone::with(&config.pins) }?;
    store::detach(config).map_err(|error| SteerError::Host { what: "taking the store's parts out", error })?;
    close(&shunt_handoff::end_handoffs(&config.pins)?);
    Ok(shunt_handoff::detach_all(&config.pins)?)
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
    let Ok(living) = host::connections() else { return };
    let hanging = connections.iter().filter(|key| living.contains(&ends(key))).count();
    if hanging > 0 {
        let error = failed.map_or_else(|| "the kernel has no sock_diag(7)".to_owned(), |error| error.to_string());
        tracing::warn!(
            connections = hanging,
            error,
            "connections that have had a shortcut cannot be closed, and hang from now on: restart their servers, which \
             ends them (the kernel needs CONFIG_INET_DIAG_DESTROY to close them)"
        );
    }
}
