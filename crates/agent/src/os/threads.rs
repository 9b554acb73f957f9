//! Threads for work that may block. They have no capability, and the caller waits until they have begun.

use std::io;
use std::sync::{Arc, Barrier};

use crate::os::privileges;

const STACK_BYTES: usize = 256 << 10;

/// Starts a thread for each item of `works`. Call it once the agent has given up its own capabilities, because a thread
/// begins with those of its maker. Call it before the agent restricts its system calls, because a thread begins with
/// calls that are forbidden afterwards.
///
/// `without` is for the log: it says what is not done if a thread cannot give up its capabilities.
///
/// # Errors
/// Returns an error if a thread cannot be made.
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
