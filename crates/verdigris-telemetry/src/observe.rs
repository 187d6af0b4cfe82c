//! What the library tells, as exporters see it.

pub use verdigris::observe::table::metric_of;
pub use verdigris::observe::{
    DEVICE_TARGET, Listen, Listening, METRICS, Metric, MetricKind, Unit, collect, collect_metrics, epoch, is_listening, listen,
};
