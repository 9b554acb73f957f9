//! Units of the figures of a report.

use serde::Serialize;

/// Unit of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Unit {
    /// Microseconds of a core per response.
    #[serde(rename = "us/response")]
    MicrosecondsPerResponse,
    #[serde(rename = "us")]
    Microseconds,
    #[serde(rename = "responses/s")]
    ResponsesPerSecond,
    #[serde(rename = "bytes/response")]
    BytesPerResponse,
    #[serde(rename = "KiB/s")]
    KibibytesPerSecond,
    /// Fraction of the body's bytes, 0 to 1.
    #[serde(rename = "of the body")]
    OfTheBody,
}

impl Unit {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::MicrosecondsPerResponse => "us/response",
            Self::Microseconds => "us",
            Self::ResponsesPerSecond => "responses/s",
            Self::BytesPerResponse => "bytes/response",
            Self::KibibytesPerSecond => "KiB/s",
            Self::OfTheBody => "of the body",
        }
    }
}

impl std::fmt::Display for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
