//! Streams (our own and the caller's), events and the time between them, and work captured as a graph.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::device::{Context, ContextGuard};
use crate::driver::{Api, Driver};
use crate::error::{Doing, Error, status};

/// `CU_STREAM_NON_BLOCKING`: no implicit ordering with the legacy default stream.
const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const EVENT_DISABLE_TIMING: u32 = 2;

/// A queue of device work, done in order. Cheap to clone; the last clone of an own stream destroys it, after which the
/// driver still finishes what was submitted.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<StreamInner>,
}

struct StreamInner {
    context: Context,
    raw: sys::CUstream,
    owned: bool,
}

// SAFETY: the driver's stream functions may be called from any thread.
unsafe impl Send for StreamInner {}
// SAFETY: as above; the driver locks internally.
unsafe impl Sync for StreamInner {}

impl Drop for StreamInner {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_current) = self.context.enter()
        {
            // SAFETY: the stream is ours and nobody holds it any more.
            let _ = unsafe { self.context.driver().api().cuStreamDestroy_v2(self.raw) };
        }
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("raw", &self.inner.raw).field("owned", &self.inner.owned).finish()
    }
}

/// Whether a stream's work is being recorded rather than run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CaptureStatus {
    /// Work runs.
    None,
    /// Work is recorded.
    Active,
    /// Work was being recorded, and something forbidden ended that; the capture can only be closed.
    Invalidated,
}

impl Stream {
    /// A new stream of normal priority that no other stream waits for implicitly.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::OutOfMemory`].
    pub fn new(context: &Context) -> Result<Self, Error> {
        Self::with_priority(context, 0)
    }

    /// A new stream; a lower number is a higher priority, 0 the normal one. The driver clamps the number to what the device
    /// offers.
    ///
    /// # Errors
    /// As [`Stream::new`].
    pub fn with_priority(context: &Context, priority: i32) -> Result<Self, Error> {
        let _current = context.enter()?;
        let mut raw: sys::CUstream = std::ptr::null_mut();
        // SAFETY: `raw` outlives the call; the context is current.
        unsafe { context.driver().api().cuStreamCreateWithPriority(&mut raw, STREAM_NON_BLOCKING, priority) }
            .doing(|| "making a stream")?;
        Ok(Self { inner: Arc::new(StreamInner { context: context.clone(), raw, owned: true }) })
    }

    /// Uses a stream that the caller owns (a `CUstream`; null and the numbers 1 and 2 mean the default streams).
    ///
    /// # Safety
    /// `raw` must be a live stream of `context`, and outlive everything made from the result, buffers included. What programs gave it must be done before
    /// it is destroyed.
    pub unsafe fn borrow(context: &Context, raw: *mut c_void) -> Self {
        Self { inner: Arc::new(StreamInner { context: context.clone(), raw: raw.cast(), owned: false }) }
    }

    /// Uses a stream that the caller owns, in the context that the driver says it belongs to. For a default stream, that is the
    /// calling thread's current context.
    ///
    /// # Safety
    /// `raw` must be a live stream; it and its context must outlive everything made from the result, buffers included.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub unsafe fn adopt(driver: &Driver, raw: *mut c_void) -> Result<Self, Error> {
        let mut context: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: the caller vouches for the stream; `context` outlives the call.
        unsafe { driver.api().cuStreamGetCtx(raw.cast(), &mut context) }.doing(|| "asking for the context of a stream")?;
        // SAFETY: a live stream's context is live, and the caller vouches for its life.
        let context = unsafe { Context::adopt(driver, context.cast()) }?;
        // SAFETY: the caller vouches for the stream.
        Ok(unsafe { Self::borrow(&context, raw) })
    }

    /// The context that the stream belongs to.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The raw `CUstream`, for other libraries.
    pub fn raw(&self) -> *mut c_void {
        self.inner.raw.cast()
    }

    /// Waits until everything submitted so far is done.
    ///
    /// # Errors
    /// [`Error::Driver`], also for the fault of any earlier kernel.
    pub fn synchronize(&self) -> Result<(), Error> {
        let (api, _current) = self.enter()?;
        // SAFETY: the stream is alive.
        unsafe { api.cuStreamSynchronize(self.inner.raw) }.doing(|| "waiting for the stream")
    }

    /// Whether everything submitted so far is done.
    ///
    /// # Errors
    /// As [`Stream::synchronize`].
    pub fn is_idle(&self) -> Result<bool, Error> {
        let (api, _current) = self.enter()?;
        // SAFETY: the stream is alive.
        match unsafe { api.cuStreamQuery(self.inner.raw) } {
            Ok(()) => Ok(true),
            Err(failure) if failure.code() == Some(status::NOT_READY) => Ok(false),
            Err(failure) => Err(failure.into_error("asking whether the stream is done".to_owned())),
        }
    }

    /// Lets work submitted from now on start only after `event`.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        let (api, _current) = self.enter()?;
        // SAFETY: both are alive.
        unsafe { api.cuStreamWaitEvent(self.inner.raw, event.raw, 0) }.doing(|| "letting the stream wait for an event")
    }

    /// Whether work is run or recorded.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn capture_status(&self) -> Result<CaptureStatus, Error> {
        let (api, _current) = self.enter()?;
        let mut status = 0_u32;
        // SAFETY: the enumeration is 32 bits wide; it is read as the number that it is, so that a value newer than the bindings
        // cannot be an invalid one.
        unsafe { api.cuStreamIsCapturing(self.inner.raw, (&raw mut status).cast()) }.doing(|| "asking whether the stream captures")?;
        Ok(match status {
            0 => CaptureStatus::None,
            1 => CaptureStatus::Active,
            _ => CaptureStatus::Invalidated,
        })
    }

    /// Records what `body` submits to this stream as a graph, without running it. `body` may bring in other streams by events,
    /// if it joins them again.
    ///
    /// Capture is limited to this thread: other threads may go on as they like, while synchronizing or allocating outside
    /// the stream order is refused to this one.
    ///
    /// # Errors
    /// What `body` returns, else what the driver says of the capture. The stream is out of capture afterwards either way.
    pub fn capture<E: From<Error>>(&self, body: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        /// Ends the capture should `body` panic.
        struct Capture<'a>(&'a Stream);
        impl Capture<'_> {
            fn end(&self) -> Result<sys::CUgraph, Error> {
                let (api, _current) = self.0.enter()?;
                let mut graph: sys::CUgraph = std::ptr::null_mut();
                // SAFETY: `graph` outlives the call, and this thread began the capture.
                unsafe { api.cuStreamEndCapture(self.0.inner.raw, &mut graph) }.doing(|| "ending the capture")?;
                Ok(graph)
            }
        }
        impl Drop for Capture<'_> {
            fn drop(&mut self) {
                if let Ok(graph) = self.end()
                    && !graph.is_null()
                {
                    // SAFETY: the graph is ours and unused.
                    let _ = unsafe { self.0.context().driver().api().cuGraphDestroy(graph) };
                }
            }
        }
        let (api, _current) = self.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive; the guard ends what begins here.
        unsafe { api.cuStreamBeginCapture_v2(self.inner.raw, mode) }.doing(|| "beginning a capture")?;
        let capture = Capture(self);
        body()?;
        let ended = capture.end();
        std::mem::forget(capture);
        Ok(Graph { context: self.context().clone(), raw: ended? })
    }

    pub(crate) fn enter(&self) -> Result<(&Api, ContextGuard<'_>), Error> {
        Ok((self.context().driver().api(), self.context().enter()?))
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.inner.raw
    }
}

/// While this lives, a capture anywhere in the process does not forbid this thread to allocate, load modules or wait on *other* streams.
/// What it brings into the captured stream itself is recorded or refused as before. Made by [`Context::relax_capture`].
#[must_use = "the thread's former rule is back as soon as the guard is dropped"]
pub struct RelaxedCapture<'a> {
    context: &'a Context,
    former: sys::CUstreamCaptureMode,
    /// The rule is the thread's own.
    not_send: std::marker::PhantomData<*const ()>,
}

impl Context {
    /// Lets this thread make plans ready while some stream is being captured, be it by another library that captures in the driver's strictest
    /// mode, as PyTorch does.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn relax_capture(&self) -> Result<RelaxedCapture<'_>, Error> {
        let mut former = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `former` outlives the call, which leaves one of the three modes there.
        unsafe { self.driver().api().cuThreadExchangeStreamCaptureMode(&mut former) }.doing(|| "relaxing the thread's capture mode")?;
        Ok(RelaxedCapture { context: self, former, not_send: std::marker::PhantomData })
    }
}

impl Drop for RelaxedCapture<'_> {
    fn drop(&mut self) {
        // SAFETY: as above; the guard cannot have left its thread.
        let _ = unsafe { self.context.driver().api().cuThreadExchangeStreamCaptureMode(&mut self.former) };
        let _ = self.not_send;
    }
}

/// A point in a stream's work.
pub struct Event {
    context: Context,
    raw: sys::CUevent,
}

// SAFETY: the driver's event functions may be called from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver locks internally.
unsafe impl Sync for Event {}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Event").field("raw", &self.raw).finish()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: the event is ours; the driver keeps what a pending wait needs.
            let _ = unsafe { self.context.driver().api().cuEventDestroy_v2(self.raw) };
        }
    }
}

impl Event {
    /// An event that remembers the time at which it was reached.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn timing(context: &Context) -> Result<Self, Error> {
        Self::make(context, 0)
    }

    /// An event for ordering alone, cheaper than a timing one.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn ordering(context: &Context) -> Result<Self, Error> {
        Self::make(context, EVENT_DISABLE_TIMING)
    }

    fn make(context: &Context, flags: u32) -> Result<Self, Error> {
        let _current = context.enter()?;
        let mut raw: sys::CUevent = std::ptr::null_mut();
        // SAFETY: `raw` outlives the call; the context is current.
        unsafe { context.driver().api().cuEventCreate(&mut raw, flags) }.doing(|| "making an event")?;
        Ok(Self { context: context.clone(), raw })
    }

    /// Marks the end of the work submitted to `stream` so far, in place of any earlier mark.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn record(&self, stream: &Stream) -> Result<(), Error> {
        let (api, _current) = stream.enter()?;
        // SAFETY: both are alive.
        unsafe { api.cuEventRecord(self.raw, stream.handle()) }.doing(|| "recording an event")
    }

    /// Waits until the mark is reached.
    ///
    /// # Errors
    /// [`Error::Driver`], also for the fault of any earlier kernel.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _current = self.context.enter()?;
        // SAFETY: the event is alive.
        unsafe { self.context.driver().api().cuEventSynchronize(self.raw) }.doing(|| "waiting for an event")
    }

    /// Whether the mark is reached.
    ///
    /// # Errors
    /// As [`Event::synchronize`].
    pub fn is_reached(&self) -> Result<bool, Error> {
        let _current = self.context.enter()?;
        // SAFETY: the event is alive.
        match unsafe { self.context.driver().api().cuEventQuery(self.raw) } {
            Ok(()) => Ok(true),
            Err(failure) if failure.code() == Some(status::NOT_READY) => Ok(false),
            Err(failure) => Err(failure.into_error("asking whether an event is reached".to_owned())),
        }
    }

    /// Microseconds on the device from `start` to this event; both are timing events that have been reached. The driver's
    /// manual gives a resolution of about 0.5 µs.
    ///
    /// # Errors
    /// [`Error::Driver`], with `CUDA_ERROR_NOT_READY` before either is reached.
    pub fn elapsed_us_since(&self, start: &Event) -> Result<f64, Error> {
        let _current = self.context.enter()?;
        let mut milliseconds = 0_f32;
        // SAFETY: both events are alive and `milliseconds` outlives the call.
        unsafe { self.context.driver().api().cuEventElapsedTime(&mut milliseconds, start.raw, self.raw) }
            .doing(|| "asking for the time between two events")?;
        Ok(f64::from(milliseconds) * 1000.0)
    }
}

/// Work that was recorded by [`Stream::capture`].
pub struct Graph {
    context: Context,
    raw: sys::CUgraph,
}

// SAFETY: no function of ours changes the graph; the driver's reading functions may be called from any thread.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the graph is ours; executables made from it are independent.
        let _ = unsafe { self.context.driver().api().cuGraphDestroy(self.raw) };
    }
}

impl Graph {
    /// The number of launches, copies, fills and markers in the graph.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn node_count(&self) -> Result<usize, Error> {
        let mut count = 0;
        // SAFETY: with a null array the call only counts.
        unsafe { self.context.driver().api().cuGraphGetNodes(self.raw, std::ptr::null_mut(), &mut count) }
            .doing(|| "counting the nodes of a graph")?;
        Ok(count)
    }

    /// Prepares the graph for launching; costs milliseconds for thousands of nodes.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::OutOfMemory`].
    pub fn instantiate(&self) -> Result<GraphExecutable, Error> {
        let _current = self.context.enter()?;
        let mut raw: sys::CUgraphExec = std::ptr::null_mut();
        // SAFETY: `raw` outlives the call; the graph is alive.
        unsafe { self.context.driver().api().cuGraphInstantiateWithFlags(&mut raw, self.raw, 0) }.doing(|| "instantiating a graph")?;
        Ok(GraphExecutable { context: self.context.clone(), raw })
    }
}

/// A graph ready to be launched as one piece.
pub struct GraphExecutable {
    context: Context,
    raw: sys::CUgraphExec,
}

// SAFETY: the handle is not bound to a thread; launches take `&mut self`, since the driver forbids concurrent ones.
unsafe impl Send for GraphExecutable {}

impl Drop for GraphExecutable {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: the executable is ours; the driver keeps it while a launch of it runs.
            let _ = unsafe { self.context.driver().api().cuGraphExecDestroy(self.raw) };
        }
    }
}

impl GraphExecutable {
    /// Sends the graph to the device ahead of its first launch, so that this one costs what the later ones do.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn upload(&mut self, stream: &Stream) -> Result<(), Error> {
        let (api, _current) = stream.enter()?;
        // SAFETY: both are alive.
        unsafe { api.cuGraphUpload(self.raw, stream.handle()) }.doing(|| "uploading a graph")
    }

    /// Submits the whole graph to the stream. Every address that was captured must still be valid.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn launch(&mut self, stream: &Stream) -> Result<(), Error> {
        let (api, _current) = stream.enter()?;
        // SAFETY: both are alive.
        unsafe { api.cuGraphLaunch(self.raw, stream.handle()) }.doing(|| "launching a graph")
    }
}
