//! A small client: enough of HTTP/1.1 to ask a service, for measurements, tests and examples.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A connection to a service, kept for many requests.
pub struct Client {
    stream: BufReader<TcpStream>,
}

/// What a service answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// The HTTP code.
    pub status: u16,
    /// Names in lower case, and values.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
}

impl Reply {
    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(of, _)| of == name).map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the service's answer: {what}"))
}

impl Client {
    /// Connects; reads and writes that take longer than `timeout` fail.
    ///
    /// # Errors
    /// Those of the system.
    pub fn connect(address: SocketAddr, timeout: Duration) -> io::Result<Client> {
        let stream = TcpStream::connect_timeout(&address, timeout)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Client { stream: BufReader::new(stream) })
    }

    /// Asks by GET.
    ///
    /// # Errors
    /// As [`Client::post`].
    pub fn get(&mut self, path: &str) -> io::Result<Reply> {
        self.ask("GET", path, &[], &[])
    }

    /// Asks by POST.
    ///
    /// # Errors
    /// Those of the system, and [`io::ErrorKind::InvalidData`] for an answer that is no HTTP.
    pub fn post(&mut self, path: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<Reply> {
        self.ask("POST", path, headers, body)
    }

    fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<Reply> {
        let mut request = format!("{method} {path} HTTP/1.1\r\nhost: verdigris\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            request += &format!("{name}: {value}\r\n");
        }
        request += "\r\n";
        let mut bytes = request.into_bytes();
        bytes.extend_from_slice(body);
        self.stream.get_mut().write_all(&bytes)?;
        self.reply()
    }

    /// Sends bytes as they are, without waiting for an answer.
    ///
    /// # Errors
    /// Those of the system.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// The next answer.
    ///
    /// # Errors
    /// As [`Client::post`].
    pub fn reply(&mut self) -> io::Result<Reply> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let status = line.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or_else(|| broken("no status"))?;
        let mut headers = Vec::new();
        loop {
            line.clear();
            if self.stream.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let text = line.trim_end();
            if text.is_empty() {
                break;
            }
            let (name, value) = text.split_once(':').ok_or_else(|| broken("a header without a colon"))?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let mut reply = Reply { status, headers, body: Vec::new() };
        let length = reply.header("content-length").map_or(Some(0), |length| length.parse().ok()).ok_or_else(|| broken("no length"))?;
        reply.body.resize(length, 0);
        self.stream.read_exact(&mut reply.body)?;
        Ok(reply)
    }
}
