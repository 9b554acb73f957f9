//! HTTP client for the tests: requests one after the other on a persistent connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A plain or TLS connection.
pub trait Stream: Read + Write {}

impl<T: Read + Write> Stream for T {}

pub struct Client {
    connect: Box<dyn Fn() -> Box<dyn Stream>>,
    stream: BufReader<Box<dyn Stream>>,
}

/// A response. The chunks of its body are joined.
pub struct Response {
    pub head: String,
    pub body: Vec<u8>,
}

impl Response {
    pub fn status(&self) -> &str {
        self.head.split(' ').nth(1).unwrap_or_default()
    }
}

fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = head.lines().filter_map(|line| line.split_once(": "));
    fields.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
}

/// Returns a plain connection.
pub fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream
}

impl Client {
    pub fn new(to: SocketAddr) -> Self {
        Self::by(move || Box::new(connect(to)))
    }

    /// Returns a client that connects by this function.
    pub fn by(connect: impl Fn() -> Box<dyn Stream> + 'static) -> Self {
        let stream = BufReader::new(connect());
        Self { connect: Box::new(connect), stream }
    }

    pub fn get(&mut self, path: &str) -> (String, Vec<u8>) {
        let response = self.ask("GET", path, "", b"");
        (response.head, response.body)
    }

    /// Sends one request and reads the response. `fields` are lines that end in CR LF.
    pub fn ask(&mut self, method: &str, path: &str, fields: &str, body: &[u8]) -> Response {
        let mut request = format!("{method} {path} HTTP/1.1\r\nHost: test\r\n{fields}");
        if !body.is_empty() {
            request += &format!("Content-Length: {}\r\n", body.len());
        }
        let mut request = (request + "\r\n").into_bytes();
        request.extend_from_slice(body);
        self.stream.get_mut().write_all(&request).unwrap();
        let head = self.head();
        let body = self.body(method, &head);
        if field(&head, "Connection").is_some_and(|value| value.eq_ignore_ascii_case("close")) {
            self.stream = BufReader::new((self.connect)());
        }
        Response { head, body }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.stream.read_line(&mut line).unwrap() > 0, "the connection ended");
        line
    }

    fn head(&mut self) -> String {
        let mut head = String::new();
        loop {
            let line = self.line();
            if line == "\r\n" {
                return head;
            }
            head += &line;
        }
    }

    fn body(&mut self, method: &str, head: &str) -> Vec<u8> {
        let mut body = Vec::new();
        if method == "HEAD" {
        } else if let Some(length) = field(head, "Content-Length") {
            body.resize(length.parse().unwrap(), 0);
            self.stream.read_exact(&mut body).unwrap();
        } else if field(head, "Transfer-Encoding").is_some_and(|value| value == "chunked") {
            loop {
                let line = self.line();
                let size = usize::from_str_radix(line.trim(), 16).unwrap_or_else(|_| panic!("{line:?} in {head}"));
                let from = body.len();
                body.resize(from + size, 0);
                self.stream.read_exact(&mut body[from..]).unwrap();
                assert_eq!(self.line(), "\r\n", "the end of a chunk of {size} bytes");
                if size == 0 {
                    break;
                }
            }
        } else {
            panic!("a body without a length: {head}");
        }
        body
    }
}
