//! What can go wrong while exporters are set up. Once they run, they do not fail: what they lose, they count.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Text that names no address.
    #[error("`{text}` names no address to listen on: write a port (9464), or a number address with one (127.0.0.1:9464, [::1]:9464)")]
    Address {
        /// What was given.
        text: String,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
    /// A thread could not be had.
    #[error("cannot start the thread `{name}`: {source}")]
    Thread {
        /// Its name.
        name: &'static str,
        /// What the system says.
        source: std::io::Error,
    },
    /// There is a recorder of metrics in this process.
    #[error("this process has a recorder of metrics already: give that one a `Registry` beside its own, or install telemetry first")]
    RecorderTaken,
    /// There is a subscriber of `tracing` in this process.
    #[error("this process has a subscriber of tracing already: add the layers of verdigris-telemetry to it, or install telemetry first")]
    SubscriberTaken,
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// Another process, or another part of this one, writes the file.
    #[error("{} is written by someone else; `%p` in a name stands for the number of the process", path.display())]
    FileInUse {
        /// The file.
        path: PathBuf,
    },
    /// A bound that leaves no room.
    #[error("{what} is bounded by {bytes} bytes; it needs at least {least}")]
    Bound {
        /// What is bounded.
        what: &'static str,
        /// The bound.
        bytes: u64,
        /// The least that serves.
        least: u64,
    },
    /// Text that names no collector.
    #[error("`{text}` is no endpoint of OTLP over HTTP: write http://HOST:PORT")]
    Endpoint {
        /// What was given.
        text: String,
    },
    /// Text that names no headers.
    #[error("entry {entry} of the headers for OTLP is no NAME=VALUE: separate entries by commas, and write %2C for a comma within one")]
    Headers {
        /// Which one, from 1 on. What stands there may be a password, and is not shown.
        entry: usize,
    },
    /// The exporter of spans could not be built.
    #[error("cannot set up OTLP to {endpoint}: {detail}")]
    Otlp {
        /// The collector.
        endpoint: String,
        /// Why not.
        detail: String,
    },
    /// The build has no such exporter.
    #[error("this build has no {exporter}: build it with the feature `{feature}`")]
    NotBuilt {
        /// The exporter.
        exporter: &'static str,
        /// The feature that brings it.
        feature: &'static str,
    },
}
