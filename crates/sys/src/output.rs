//! Writing to standard output with errors returned: `println!` would panic on them.

use std::io::{self, Write};

/// Writes text. A reader that has closed the pipe (`| head`) is no error.
///
/// # Errors
/// Returns the kernel's error of write(2), with a message that names standard output.
pub fn write(text: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(io::Error::new(error.kind(), format!("cannot write to standard output: {error}")))
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
