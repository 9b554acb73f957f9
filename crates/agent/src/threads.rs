//! Threads for what may wait: they have no capability, and say when they have begun.

use std::io;
use std::sync::{Arc, Barrier};

use crate::privileges;

const STACK_BYTES: usize = 256 << 10;

/// Starts a thread for each piece of work. Once the agent has given up its own capabilities, of which a thread has as many as
/// its maker; and before it restricts its system calls, some of which a thread makes when it begins.
///
/// `without`: what the log says is not done where a thread cannot give up what it has.
///
/// # Errors
/// Where a thread cannot be made.
pub(crate) fn start<W>(name: &str, without: &'static str, works: Vec<W>) -> io::Result<()>
where
    W: FnOnce() + Send + 'static,
{
    let begun = Arc::new(Barrier::new(works.len() + 1));
    for work in works {
        let begun = begun.clone();
        std::thread::Builder::new().name(name.into()).stack_size(STACK_BYTES).spawn(move || {
            let harmless = privileges::give_up_all();
            begun.wait();
            match harmless {
                Ok(()) => work(),
                Err(error) => tracing::error!(%error, "{without}"),
            }
        })?;
    }
    begun.wait();
    Ok(())
}
