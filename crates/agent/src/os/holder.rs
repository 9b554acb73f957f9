//! Text for operators about the process that uses a directory of pins (BPF programs and maps, as files in bpffs).

use std::path::PathBuf;

use shunt_host::holder::holder;

/// Returns text for an operator: the process id in parentheses, or nothing if it is not known.
pub fn by(process: Option<i32>) -> String {
    process.map(|process| format!(" (process {process})")).unwrap_or_default()
}

/// Returns text for an operator: the process id of the agent that uses these pins, or no text if no agent does.
pub fn running(pins: Option<&PathBuf>) -> String {
    pins.and_then(|pins| holder(pins)).map(|process| format!("; it runs as process {process}")).unwrap_or_default()
}
