//! The reference inference service: a model from a folder, dynamic batches, deadlines, back-pressure, metrics; over HTTP, on a GPU or the CPU.
//!
//! ```text
//! connection ──limits──► request ──checked──► queue ──rows──► batch ──padded──► plan ──► rows ──► answer
//!      (any number)                       (bounded, deadlines)      (one thread a device)
//! ```
//!
//! A [`Model`] is a graph with a batch dimension, planned for several batch sizes, and its weights. [`Model::warm`] plans and runs them on a
//! [`verdigris::Device`]; a [`Service`] listens, forms batches of what clients ask for, and gives each its rows. It speaks the open inference
//! protocol (version 2 of KServe's) with binary tensors, so that its clients exist. Why a request got no result is a [`Refusal`]: typed, counted,
//! with an HTTP code. The counters are those of the library's table of metrics (`verdigris_serve_*`), emitted through the crate `metrics`;
//! spans `request` and `batch`, joined by `batch_id`, through `tracing`. See `docs/serve.md` for operators, and [`service`] for an example.
//!
//! What is computed never waits for the network, and the other way round: connections are served by two threads of tokio, batches are computed
//! by one thread of the device. Memory is bounded by [`Limits`] and by each model's `queue_rows`.
#![forbid(unsafe_code)]
#![allow(clippy::result_large_err, reason = "a model is loaded once, and what is wrong with it is named in full")]

mod batcher;
pub mod client;
mod connection;
pub mod error;
pub mod executor;
mod http;
pub mod limits;
pub mod load;
pub mod model;
pub mod protocol;
pub mod refusal;
pub mod service;
mod telemetry;
pub mod template;
mod warm;
pub mod weights;

pub use client::{Client, Reply};
pub use error::{LoadError, StartError};
pub use executor::{ExecuteError, Executor, Port};
pub use http::MetricsPage;
pub use limits::Limits;
pub use model::{Model, Served, Signature, Spec};
pub use refusal::{Kind, Refusal};
pub use service::{Ended, Service, Settings};
pub use weights::Weight;
