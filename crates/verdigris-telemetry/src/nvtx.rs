//! Spans of the library as ranges in NVIDIA's profilers.

use std::path::Path;

use tracing::Subscriber;
use tracing::span::Id;
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;
use verdigris_cuda::nvtx::{Nvtx, NvtxError};

/// A layer of `tracing` that pushes a range for each span whose target begins with `verdigris`, and pops it when the span is left.
///
/// ```
/// use verdigris_telemetry::NvtxLayer;
///
/// // Without a profiler there is no layer, but a reason.
/// if let Err(reason) = NvtxLayer::load(None) {
///     assert!(!reason.to_string().is_empty());
/// }
/// ```
#[derive(Debug)]
pub struct NvtxLayer {
    nvtx: Nvtx,
}

impl NvtxLayer {
    /// A layer for the profiler that `injection` (the value of `NVTX_INJECTION64_PATH`) names, or that the older library of NVTX finds.
    ///
    /// # Errors
    /// [`NvtxError`]: nobody profiles, or the profiler's library is not as NVTX says.
    pub fn load(injection: Option<&Path>) -> Result<NvtxLayer, NvtxError> {
        Nvtx::load(injection).map(|nvtx| NvtxLayer { nvtx })
    }
}

/// Whether a span is a range. Both ends ask, and the answer is the same for as long as the span lives.
fn is_range<S: Subscriber + for<'span> LookupSpan<'span>>(id: &Id, context: &Context<'_, S>) -> Option<&'static str> {
    let metadata = context.span(id)?.metadata();
    metadata.target().starts_with("verdigris").then(|| metadata.name())
}

impl<S: Subscriber + for<'span> LookupSpan<'span>> Layer<S> for NvtxLayer {
    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        if let Some(name) = is_range(id, &context) {
            self.nvtx.push(name);
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        if is_range(id, &context).is_some() {
            self.nvtx.pop();
        }
    }
}
