//! A response that is compared with a file while it arrives: the body must have the file's bytes.

use std::fmt;

use anyhow::Result;

use crate::files::Contents;
use crate::http::ResponseReader;

/// Ending of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The body has every byte of the file, and no other.
    Whole,
    /// A complete response with this status, which is not 200.
    Error(u16),
    /// The connection ended before the header of a response was complete. This is allowed: a server may close an idle
    /// connection just when a request comes. Clients then send the request again on another connection.
    Unanswered,
    /// The connection was reset after this number of body bytes.
    Reset(u64),
    /// The connection was closed after this number of body bytes, before the length that the header named.
    Short(u64),
    /// The body is wrong from this offset on: a byte differs from the file's, or the body ends before the file, or goes
    /// on after it.
    Wrong(u64),
    /// No byte came for the time that the caller waits, after this number of body bytes.
    Hang(u64),
}

impl Ending {
    /// Name of the kind of ending, one or two words.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Error(_) => "error",
            Self::Unanswered => "not answered",
            Self::Reset(_) => "reset",
            Self::Short(_) => "closed",
            Self::Wrong(_) => "wrong",
            Self::Hang(_) => "hang",
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => write!(f, "whole"),
            Self::Error(status) => write!(f, "error {status}"),
            Self::Unanswered => write!(f, "not answered"),
            Self::Reset(bytes) => write!(f, "reset after {bytes} bytes"),
            Self::Short(bytes) => write!(f, "closed after {bytes} bytes"),
            Self::Wrong(at) => write!(f, "WRONG BYTE at {at}"),
            Self::Hang(bytes) => write!(f, "nothing more after {bytes} bytes"),
        }
    }
}

/// A response while it is read, and the body that it must have.
pub struct Answer {
    reader: ResponseReader,
    body: Body,
}

struct Body {
    contents: Contents,
    length: u64,
    /// Number of bytes of the body that have been read.
    read: u64,
    wrong_at: Option<u64>,
}

impl Answer {
    /// Expects the file that [`crate::Lab::files`] made under this name, with this length in bytes.
    #[must_use]
    pub fn of(file: &str, length: u64) -> Self {
        let body = Body { contents: Contents::of(file), length, read: 0, wrong_at: None };
        Self { reader: ResponseReader::default(), body }
    }

    /// HTTP status; 0 before the header has arrived.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.reader.status()
    }

    /// Number of bytes of the body that have been read.
    #[must_use]
    pub fn body_bytes(&self) -> u64 {
        self.body.read
    }

    /// Takes bytes read from the connection. Bytes after the end of the response count as wrong.
    ///
    /// # Errors
    /// When the bytes are no HTTP.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<()> {
        let used = self.reader.feed(bytes, &mut |piece| self.body.take(piece))?;
        if used < bytes.len() {
            self.body.wrong_at.get_or_insert(self.body.length);
        }
        Ok(())
    }

    /// Ending of the response if its last byte, or a wrong one, has arrived; `None` before that.
    #[must_use]
    pub fn ending(&self) -> Option<Ending> {
        let body = &self.body;
        match (self.reader.status(), body.wrong_at, self.reader.is_done()) {
            (200, Some(at), _) => Some(Ending::Wrong(at)),
            (_, _, false) => None,
            (200, None, true) if body.read == body.length => Some(Ending::Whole),
            // The header named another length than the file has.
            (200, None, true) => Some(Ending::Wrong(body.read)),
            (status, _, true) => Some(Ending::Error(status)),
        }
    }

    /// Ending of the response if the connection is closed now.
    pub fn closed(&mut self) -> Ending {
        if self.status() == 0 {
            return Ending::Unanswered;
        }
        let whole = self.reader.closed().is_ok();
        self.ending().filter(|_| whole).unwrap_or(Ending::Short(self.body.read))
    }

    /// Ending of the response if the connection is reset now.
    #[must_use]
    pub fn reset(&self) -> Ending {
        if self.status() == 0 { Ending::Unanswered } else { Ending::Reset(self.body.read) }
    }
}

impl Body {
    fn take(&mut self, piece: &[u8]) {
        if self.wrong_at.is_none() {
            let room = usize::try_from(self.length - self.read).unwrap_or(usize::MAX);
            let compared = self.contents.compare(&piece[..piece.len().min(room)]);
            let wrong = compared.err().or((piece.len() > room).then_some(room));
            self.wrong_at = wrong.map(|at| self.read + at as u64);
        }
        self.read += piece.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, size: u64) -> Vec<u8> {
        let path = tempfile::NamedTempFile::new().unwrap();
        crate::files::write(path.path(), name, size).unwrap();
        std::fs::read(path.path()).unwrap()
    }

    fn answered(header: &str, body: &[u8]) -> Answer {
        let mut answer = Answer::of("x", 100);
        answer.feed(&[header.as_bytes(), body].concat()).unwrap();
        answer
    }

    #[test]
    fn only_all_bytes_of_the_file_are_whole() {
        let (right, header) = (file("x", 100), "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n");
        assert_eq!(answered(header, &right).ending(), Some(Ending::Whole));
        assert_eq!(answered(header, &right[..99]).ending(), None);
        assert_eq!(answered(header, &right[..99]).closed(), Ending::Short(99));
        assert_eq!(answered(header, &right[..99]).reset(), Ending::Reset(99));
        assert_eq!(answered(header, &[&right[..], b"H"].concat()).ending(), Some(Ending::Wrong(100)));
        assert_eq!(answered(header, &file("y", 100)).ending(), Some(Ending::Wrong(0)));
        let shorter = "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n";
        assert_eq!(answered(shorter, &right[..99]).ending(), Some(Ending::Wrong(99)));
    }

    #[test]
    fn an_error_is_told_from_a_body_and_from_no_answer() {
        let error = "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 3\r\n\r\n";
        assert_eq!(answered(error, b"bad").ending(), Some(Ending::Error(502)));
        assert_eq!(answered(error, b"b").closed(), Ending::Short(1));
        assert_eq!(
            (answered("", b"").closed(), answered("HTTP/1.1 2", b"").reset()),
            (Ending::Unanswered, Ending::Unanswered)
        );
    }
}
