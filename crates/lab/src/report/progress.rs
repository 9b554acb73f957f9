//! Progress on standard error. At a terminal one line is rewritten in place; otherwise each step has a line.

use std::io::{IsTerminal, Write};
use std::time::Instant;

use shunt_report::Paint;

#[derive(Debug)]
pub struct Progress {
    begin: Instant,
    paint: Paint,
    /// Whether the last line may be overwritten.
    terminal: bool,
}

impl Progress {
    #[must_use]
    pub fn to_stderr() -> Self {
        let stderr = std::io::stderr();
        Self { begin: Instant::now(), paint: Paint::of(&stderr), terminal: stderr.is_terminal() }
    }

    /// Seconds since the progress began.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.begin.elapsed().as_secs_f64()
    }

    /// Prints the step that begins now.
    pub fn step(&self, what: &str) {
        let (before, after) = if self.terminal { ("\r\x1b[2K", "") } else { ("", "\n") };
        let time = self.paint.dim(&format!("{:5.1} s", self.seconds()));
        let _ = write!(std::io::stderr(), "{before}{time}  {what}{after}");
        let _ = std::io::stderr().flush();
    }

    /// Prints a result, and keeps its line.
    pub fn done(&self, what: &str) {
        self.step(what);
        if self.terminal {
            let _ = writeln!(std::io::stderr());
        }
    }

    /// Removes the last step's line, before other output.
    pub fn clear(&self) {
        if self.terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[2K");
        }
    }
}
