//! What one client may take of the service.

use std::time::Duration;

use crate::error::StartError;

/// Bounds on connections, bytes and times. Whatever is beyond them is refused, so that memory and threads are bounded whatever clients do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The longest body, in bytes.
    pub body_bytes: usize,
    /// What all bodies that are held at once may take, in bytes; more requests are told to come later.
    pub held_body_bytes: usize,
    /// The longest head of a request, in bytes; 8192 at the least.
    pub header_bytes: usize,
    /// The most lines of a head.
    pub headers: usize,
    /// The most connections; more get 503 and are closed, beyond some dozens at once without a word.
    pub connections: usize,
    /// How long a head may take to arrive, and how long a connection may stay idle between requests.
    pub header_timeout: Duration,
    /// How long a body may take to arrive.
    pub body_timeout: Duration,
    /// How long a client may take none of an answer's bytes.
    pub write_timeout: Duration,
    /// How long requests that were accepted may still be computed when the service ends.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            body_bytes: 16 << 20,
            held_body_bytes: 256 << 20,
            header_bytes: 16 << 10,
            headers: 64,
            connections: 512,
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
            grace: Duration::from_secs(20),
        }
    }
}

impl Limits {
    /// Whether each limit leaves room for what it bounds; [`crate::Service::start`] asks first.
    ///
    /// # Errors
    /// [`StartError::Limit`], which names the first that does not.
    pub fn check(&self) -> Result<(), StartError> {
        let least = |field, value: usize, least: usize, rule| {
            if value >= least { Ok(()) } else { Err(StartError::Limit { field, value: value as u64, rule }) }
        };
        least("body_bytes", self.body_bytes, 1024, "a body may have 1024 bytes at the least")?;
        least(
            "held_body_bytes",
            self.held_body_bytes,
            self.body_bytes,
            "it is no less than body_bytes, or the longest body is never taken",
        )?;
        least("header_bytes", self.header_bytes, 8192, "a head may have 8192 bytes at the least")?;
        least("headers", self.headers, 8, "a head may have 8 lines at the least")?;
        least("connections", self.connections, 1, "one client at the least")?;
        let most = u32::MAX as usize;
        if self.held_body_bytes / HELD_UNIT_BYTES > most || self.connections > most {
            let value = self.held_body_bytes.max(self.connections) as u64;
            return Err(StartError::Limit { field: "held_body_bytes or connections", value, rule: "it is beyond any machine" });
        }
        Ok(())
    }
}

/// Memory for bodies is lent in pieces of so many bytes.
pub(crate) const HELD_UNIT_BYTES: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_cannot_work_are_refused() {
        assert!(Limits::default().check().is_ok());
        let told = |limits: Limits| limits.check().unwrap_err().to_string();
        assert!(told(Limits { header_bytes: 100, ..Limits::default() }).contains("header_bytes is 100; a head"));
        assert!(told(Limits { body_bytes: 1 << 30, ..Limits::default() }).contains("held_body_bytes"));
        assert!(told(Limits { connections: 0, ..Limits::default() }).contains("connections is 0"));
    }
}
