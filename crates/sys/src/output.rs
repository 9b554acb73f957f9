//! Standard output, of which it is said where it cannot be written: `println!` panics.

use std::io::{self, Write};

/// Writes text. Whoever reads may have had enough (`| head`): that is no error.
///
/// # Errors
/// The kernel's, with a word of where.
pub fn write(text: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(io::Error::new(error.kind(), format!("standard output cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}

/// Writes a line, as [`write`] does.
#[macro_export]
macro_rules! say {
    () => { $crate::output::write("\n") };
    ($($words:tt)*) => { $crate::output::write(&(format!($($words)*) + "\n")) };
}
