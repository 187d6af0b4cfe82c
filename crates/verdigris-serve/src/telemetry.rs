//! What the service counts, under the names of the table of metrics.
//!
//! The label `model` is the name of a model that is served, or `unknown`: what clients write is never a label, so that the number of series
//! is bounded by the number of models.

use std::time::Duration;

use metrics::{counter, gauge, histogram};

/// The label of requests to models that there are not.
pub(crate) const UNKNOWN_MODEL: &str = "unknown";

pub(crate) fn request(model: &str, outcome: &'static str) {
    counter!("verdigris_serve_requests_total", "model" => model.to_owned(), "outcome" => outcome).increment(1);
}

/// From the last byte of a request to the first of its answer.
pub(crate) fn request_time(model: &str, time: Duration) {
    histogram!("verdigris_serve_request_seconds", "model" => model.to_owned()).record(time);
}

pub(crate) fn queue_rows(model: &str, rows: u64) {
    gauge!("verdigris_serve_queue_rows", "model" => model.to_owned()).set(rows as f64);
}

/// A batch begins, of requests that have waited for so long.
pub(crate) fn batch(model: &str, rows: u64, waited: impl Iterator<Item = Duration>) {
    histogram!("verdigris_serve_batch_rows", "model" => model.to_owned()).record(rows as f64);
    let queue_time = histogram!("verdigris_serve_queue_seconds", "model" => model.to_owned());
    waited.for_each(|time| queue_time.record(time));
}

/// Rows were answered.
pub(crate) fn rows(model: &str, rows: u64) {
    counter!("verdigris_serve_rows_total", "model" => model.to_owned()).increment(rows);
}
