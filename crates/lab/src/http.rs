//! HTTP/1.1 of the lab's own clients: writes requests, and reads responses from a byte stream. No I/O.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail, ensure};

/// Largest header of a response, in bytes.
const HEAD_LIMIT: usize = 64 << 10;

/// Formats a GET; `fields` are more header fields, each `Name: value`.
pub(crate) fn get_request(server: SocketAddr, path: &str, fields: &[String]) -> String {
    let fields: String = fields.iter().map(|field| format!("{field}\r\n")).collect();
    format!("GET {path} HTTP/1.1\r\nHost: {server}\r\n{fields}\r\n")
}

/// Reader of one response: bytes go in as they arrive, and body bytes come out.
#[derive(Debug, Default)]
pub(crate) struct ResponseReader {
    head: Vec<u8>,
    body: Body,
    status: u16,
    fields: Vec<(String, String)>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Body {
    #[default]
    Head,
    Sized(u64),
    ChunkSize(u64),
    /// The rest of a chunk's size line, with the size of the chunk in bytes.
    ChunkExtension(u64),
    Chunk(u64),
    /// The line end after a chunk.
    ChunkEnd,
    /// Trailer lines, with the length of the present one.
    Trailer(usize),
    UntilClose,
    Done,
}

impl ResponseReader {
    pub(crate) fn status(&self) -> u16 {
        self.status
    }

    /// A field's value, by its name in lower case.
    fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(field, _)| field == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn into_fields(self) -> Vec<(String, String)> {
        self.fields
    }

    pub(crate) fn is_done(&self) -> bool {
        self.body == Body::Done
    }

    /// Notes that the server has closed the connection. Fails if the response is not complete.
    pub(crate) fn closed(&mut self) -> Result<()> {
        ensure!(matches!(self.body, Body::UntilClose | Body::Done), "closed within a response ({:?})", self.body);
        self.body = Body::Done;
        Ok(())
    }

    /// Takes bytes and hands pieces of the body to `sink`. Returns the number of bytes that it used: all of them,
    /// unless the response ended before.
    pub(crate) fn feed(&mut self, input: &[u8], sink: &mut dyn FnMut(&[u8])) -> Result<usize> {
        let mut at = 0;
        while at < input.len() && self.body != Body::Done {
            at += self.step(&input[at..], sink)?;
        }
        Ok(at)
    }

    /// Takes a piece of the header or of the body, or one byte of the lines around a body's chunks.
    fn step(&mut self, input: &[u8], sink: &mut dyn FnMut(&[u8])) -> Result<usize> {
        let mut take = |left: u64| {
            let used = usize::try_from(left).unwrap_or(usize::MAX).min(input.len());
            sink(&input[..used]);
            (used, left - used as u64)
        };
        match self.body {
            Body::Head => self.take_head(input),
            Body::Sized(left) => {
                let (used, left) = take(left);
                self.body = if left == 0 { Body::Done } else { Body::Sized(left) };
                Ok(used)
            }
            Body::Chunk(left) => {
                let (used, left) = take(left);
                self.body = if left == 0 { Body::ChunkEnd } else { Body::Chunk(left) };
                Ok(used)
            }
            Body::UntilClose => Ok(take(u64::MAX).0),
            _ => {
                self.take_framing(input[0])?;
                Ok(1)
            }
        }
    }

    /// Takes a byte that belongs neither to the header nor to the body (RFC 9112, 7.1).
    fn take_framing(&mut self, byte: u8) -> Result<()> {
        self.body = match (self.body, byte) {
            (Body::ChunkSize(size) | Body::ChunkExtension(size), b'\n') if size == 0 => Body::Trailer(0),
            (Body::ChunkSize(size) | Body::ChunkExtension(size), b'\n') => Body::Chunk(size),
            (Body::ChunkSize(size), _) => match (byte as char).to_digit(16) {
                Some(digit) => Body::ChunkSize(size.checked_mul(16).context("chunk too large")? + u64::from(digit)),
                None => Body::ChunkExtension(size),
            },
            (Body::ChunkEnd, b'\r') => Body::ChunkEnd,
            (Body::ChunkEnd, b'\n') => Body::ChunkSize(0),
            (Body::ChunkEnd, _) => bail!("a chunk does not end where it should"),
            (Body::Trailer(0), b'\n') => Body::Done,
            (Body::Trailer(_), b'\n') => Body::Trailer(0),
            (Body::Trailer(length), b'\r') => Body::Trailer(length),
            (Body::Trailer(length), _) => Body::Trailer(length + 1),
            (Body::ChunkExtension(size), _) => Body::ChunkExtension(size),
            (Body::Head | Body::Sized(_) | Body::Chunk(_) | Body::UntilClose | Body::Done, _) => {
                unreachable!("step takes these, and feed stops at the end")
            }
        };
        Ok(())
    }

    fn take_head(&mut self, input: &[u8]) -> Result<usize> {
        let before = self.head.len();
        self.head.extend_from_slice(&input[..input.len().min(HEAD_LIMIT)]);
        let from = before.saturating_sub(3);
        let Some(end) = self.head[from..].windows(4).position(|window| window == b"\r\n\r\n") else {
            ensure!(self.head.len() < HEAD_LIMIT, "a response header of more than {HEAD_LIMIT} bytes");
            return Ok(self.head.len() - before);
        };
        self.head.truncate(from + end + 4);
        let used = self.head.len() - before;
        self.parse_head()?;
        Ok(used)
    }

    fn parse_head(&mut self) -> Result<()> {
        let text = std::str::from_utf8(&self.head).context("a response header that is not text")?;
        let mut lines = text.split("\r\n");
        let status_line = lines.next().unwrap_or_default();
        ensure!(status_line.starts_with("HTTP/1."), "not a response: {status_line:?}");
        self.status = status_line.split(' ').nth(1).and_then(|word| word.parse().ok()).context("no status")?;
        let fields = lines.filter_map(|line| line.split_once(':'));
        self.fields = fields.map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned())).collect();
        if (100..200).contains(&self.status) {
            *self = Self::default();
            return Ok(());
        }
        let chunked = self.field("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked"));
        self.body = if matches!(self.status, 204 | 304) {
            Body::Done
        } else if chunked {
            Body::ChunkSize(0)
        } else if let Some(length) = self.field("content-length") {
            match length.parse().context("a bad Content-Length")? {
                0 => Body::Done,
                length => Body::Sized(length),
            }
        } else {
            Body::UntilClose
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads `stream` in pieces of every size. Status, body and the rest after the response must be the given ones.
    fn check(stream: &str, status: u16, body: &str, rest: &str) {
        for size in 1..=stream.len() {
            let (mut reader, mut read, mut left) = (ResponseReader::default(), Vec::new(), Vec::new());
            for piece in stream.as_bytes().chunks(size) {
                let used = reader.feed(piece, &mut |bytes| read.extend_from_slice(bytes)).unwrap();
                left.extend_from_slice(&piece[used..]);
            }
            assert!(reader.is_done(), "{reader:?}");
            assert_eq!(reader.status(), status);
            assert_eq!(String::from_utf8_lossy(&read), body);
            assert_eq!(String::from_utf8_lossy(&left), rest, "pieces of {size}");
        }
    }

    #[test]
    fn sized_body() {
        check("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloHTTP", 200, "hello", "HTTP");
        check("HTTP/1.1 404 Not\r\ncontent-length: 0\r\n\r\nx", 404, "", "x");
        check("HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", 304, "", "");
    }

    #[test]
    fn chunked_body() {
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        check(&format!("{head}3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n\r\nnext"), 200, "abc0123456789", "next");
        check(&format!("{head}1\r\na\r\n0\r\nT: v\r\nU: w\r\n\r\n"), 200, "a", "");
    }

    #[test]
    fn interim_response_is_skipped() {
        check("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, "x", "");
    }

    #[test]
    fn body_until_close() {
        let mut reader = ResponseReader::default();
        reader.feed(b"HTTP/1.1 200 OK\r\n\r\nabc", &mut |_| {}).unwrap();
        assert!(!reader.is_done());
        reader.closed().unwrap();
        assert!(reader.is_done());
    }

    #[test]
    fn truncated_body_is_an_error() {
        let mut reader = ResponseReader::default();
        reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe", &mut |_| {}).unwrap();
        assert!(reader.closed().is_err());
    }
}
