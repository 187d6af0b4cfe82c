//! What the library tells, brought to those who watch.
//!
//! `verdigris` counts through the facade `metrics` and speaks through `tracing`; here is who listens. An application asks for it all at once
//! ([`Telemetry`]), or takes the parts: it may have a recorder or a subscriber of its own.
//!
//! | part | brings |
//! |---|---|
//! | [`Registry`] | the series of a process, in bounded number, as text and JSON |
//! | [`Exporter`] | an endpoint that Prometheus scrapes, on the loopback unless an address is written out |
//! | [`RotatingFile`] | events as lines of JSON, in files of bounded size |
//! | [`TraceFile`], [`TraceLayer`] | a trace of host and device that Perfetto opens, also if the process was killed |
//! | [`NvtxLayer`] | spans as ranges in NVIDIA's profilers, loaded at run time |
//! | [`nvml`] | what the GPUs say of themselves, loaded at run time |
//! | [`OtlpCollector`], `otlp` (feature) | spans and metrics pushed to a collector of OpenTelemetry |
//!
//! Nothing goes over a network unless it is asked for. Once they run, exporters do not fail an application: what they cannot write, they count.
//!
//! ```
//! use verdigris_telemetry::Telemetry;
//!
//! let guard = Telemetry::builder().prometheus("127.0.0.1:0".parse()?).install()?;
//! println!("http://{}/metrics", guard.prometheus_address().expect("it was asked for"));
//! # Ok::<(), verdigris_telemetry::Error>(())
//! ```
#![forbid(unsafe_code)]

mod buckets;
mod collector;
mod error;
mod exposition;
mod fields;
mod files;
mod http;
pub mod nvml;
mod nvtx;
pub mod observe;
#[cfg(feature = "otlp")]
pub mod otlp;
mod registry;
mod stderr;
mod telemetry;
mod trace;

pub use collector::{MetricsPush, OTLP_INTERVAL, OtlpCollector};
pub use error::Error;
pub use exposition::Format;
pub use files::{RotatingFile, path_of_process};
pub use http::{CONNECTION_TIME, Exporter, HEADER_TIME, ListenAddress, MOST_CONNECTIONS, PORT};
pub use nvtx::NvtxLayer;
pub use registry::{Bounds, Registry};
pub use stderr::{Severity, log_to_stderr};
pub use telemetry::{EVENT_BYTES, Guard, Settings, Telemetry};
pub use trace::{TRACE_BYTES, TraceFile, TraceLayer};

/// The page for operators, whose lines of Rust are tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/telemetry.md")]
pub struct Page;
