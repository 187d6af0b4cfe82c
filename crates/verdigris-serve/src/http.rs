//! Paths, and what each answers.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::json;
use tokio::sync::oneshot::error::RecvError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tracing::Instrument as _;

use crate::batcher::{Answer, Batcher, Waiting};
use crate::limits::{HELD_UNIT_BYTES, Limits};
use crate::model::{LONGEST_DEADLINE_MS, Signature};
use crate::protocol::{self, AnswerParameters, Asked, JSON_LENGTH, datatype, shown};
use crate::refusal::{Kind, Refusal};
use crate::telemetry::{self, UNKNOWN_MODEL};

/// Renders the page of metrics, in Prometheus' text format.
pub type MetricsPage = Arc<dyn Fn() -> String + Send + Sync>;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const DEADLINE: &str = "x-deadline-ms";
const LONGEST_REQUEST_ID: usize = 128;
/// Longer bodies are parsed beside the threads that serve connections.
const PARSED_IN_PLACE_BYTES: usize = 64 << 10;
/// Of a body that is refused unread, so much is taken, so that the client reads the answer before it meets a closed connection.
const SWALLOWED_BYTES: usize = 1 << 20;
const SWALLOWED_TIME: Duration = Duration::from_millis(250);

type Answered = Response<Full<Bytes>>;

/// What all connections share.
pub(crate) struct Shared {
    pub(crate) limits: Limits,
    pub(crate) metrics: Option<MetricsPage>,
    /// Once the models are warm.
    pub(crate) batcher: OnceLock<Arc<Batcher>>,
    pub(crate) is_draining: AtomicBool,
    /// Becomes true when the grace is over: whoever still waits for a result is refused.
    pub(crate) is_over: watch::Sender<bool>,
    /// Memory for bodies, in units of [`HELD_UNIT_BYTES`].
    pub(crate) held: Arc<Semaphore>,
    /// Begins the ids of requests that bring none; another one in each process.
    pub(crate) id_prefix: u64,
    pub(crate) ids: AtomicU64,
}

/// One request's outcome, counted once: when it is told, or as cancelled when the client goes away and the work on the request is dropped.
struct Outcome {
    model: Arc<str>,
    told: Option<&'static str>,
}

impl Drop for Outcome {
    fn drop(&mut self) {
        telemetry::request(&self.model, self.told.unwrap_or("cancelled"));
    }
}

/// Answers one request.
pub(crate) async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Result<Answered, std::convert::Infallible> {
    let id = request_id(&shared, request.headers());
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let answered = match infer_target(path) {
        Some(name) if parts.method == Method::POST => {
            // Recorded when the request is in a batch, so that both spans can be joined.
            let span = tracing::info_span!(
                "request",
                request_id = id.as_str(),
                model = tracing::field::Empty,
                rows = tracing::field::Empty,
                batch_id = tracing::field::Empty,
                outcome = tracing::field::Empty
            );
            let within = span.clone();
            infer(&shared, name, &parts.headers, body, &id, within).instrument(span).await
        }
        Some(_) => {
            let refusal = Refusal::new(Kind::Method, format!("{} {}: inference is asked for by POST", parts.method, shown(path)));
            allowing("POST", refused(&refusal, &id))
        }
        None => page(&shared, &parts.method, path, &id),
    };
    Ok(with_id(answered, &id))
}

fn request_id(shared: &Shared, headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    match given.filter(|id| !id.is_empty() && id.len() <= LONGEST_REQUEST_ID) {
        Some(id) => id.to_owned(),
        None => format!("{:016x}-{}", shared.id_prefix, shared.ids.fetch_add(1, Ordering::Relaxed)),
    }
}

fn with_id(mut answered: Answered, id: &str) -> Answered {
    if let Ok(id) = HeaderValue::from_str(id) {
        answered.headers_mut().insert(REQUEST_ID, id);
    }
    answered
}

fn plain(status: u16, kind: &'static str, body: impl Into<Bytes>) -> Answered {
    let mut answered = Response::new(Full::new(body.into()));
    *answered.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    answered.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answered
}

fn json_page(value: &serde_json::Value) -> Answered {
    plain(200, "application/json", value.to_string())
}

/// The body of a refusal: `error` is a string, as clients of the protocol expect.
pub(crate) fn refusal_text(refusal: &Refusal, id: &str) -> String {
    json!({ "error": refusal.message, "kind": refusal.kind.name(), "request_id": id }).to_string()
}

fn refused(refusal: &Refusal, id: &str) -> Answered {
    let mut answered = plain(refusal.kind.status(), "application/json", refusal_text(refusal, id));
    if refusal.kind.may_be_tried_again() {
        answered.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    answered
}

/// With the methods that there are, as an answer of code 405 has them.
fn allowing(methods: &'static str, mut answered: Answered) -> Answered {
    answered.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    answered
}

/// The model that a path asks for inference of.
fn infer_target(path: &str) -> Option<&str> {
    path.strip_prefix("/v2/models/")?.strip_suffix("/infer").filter(|name| !name.contains('/'))
}

/// What a path but that of inference shows.
enum Page<'s> {
    Live,
    Ready,
    Service,
    Models,
    Metrics(&'s MetricsPage),
    Model(&'s Signature),
}

/// The page of a path, or that there is none.
fn page_of<'s>(shared: &'s Shared, path: &str) -> Result<Page<'s>, Refusal> {
    let unknown = |message: String| Err(Refusal::new(Kind::UnknownPath, message));
    match path {
        "/healthz" | "/v2/health/live" => Ok(Page::Live),
        "/readyz" | "/v2/health/ready" => Ok(Page::Ready),
        "/v2" => Ok(Page::Service),
        "/v2/models" => Ok(Page::Models),
        "/metrics" => match &shared.metrics {
            Some(render) => Ok(Page::Metrics(render)),
            None => unknown("this process renders no metrics".to_owned()),
        },
        _ => {
            let of_model = path.strip_prefix("/v2/models/");
            let target = of_model.map(|rest| rest.strip_suffix("/ready").map_or((rest, false), |name| (name, true)));
            let Some((name, asks_ready)) = target.filter(|(name, _)| !name.contains('/')) else {
                let versions = if of_model.is_some_and(|rest| rest.contains("/versions/")) { "models have no versions here; " } else { "" };
                return unknown(format!(
                    "no path {}; {versions}there are /v2/models/NAME/infer, /v2/models/NAME, /v2/models, /v2, /healthz, /readyz and /metrics",
                    shown(path)
                ));
            };
            let Some(batcher) = shared.batcher.get() else { return Err(not_warm()) };
            let models = batcher.signatures();
            let model = models.iter().find(|model| model.name == name).ok_or_else(|| unknown_model(models, name))?;
            Ok(if asks_ready { Page::Ready } else { Page::Model(model) })
        }
    }
}

/// Everything but inference.
fn page(shared: &Shared, method: &Method, path: &str, id: &str) -> Answered {
    let page = match page_of(shared, path) {
        Ok(page) => page,
        Err(refusal) => return refused(&refusal, id),
    };
    if method != Method::GET && method != Method::HEAD {
        let refusal = Refusal::new(Kind::Method, format!("{method} {}: this is read by GET", shown(path)));
        return allowing("GET, HEAD", refused(&refusal, id));
    }
    let models = shared.batcher.get().map(|batcher| batcher.signatures());
    match page {
        Page::Live => json_page(&json!({ "live": true })),
        Page::Ready => match models {
            None => refused(&not_warm(), id),
            Some(_) if shared.is_draining.load(Ordering::Relaxed) => {
                refused(&Refusal::new(Kind::ShuttingDown, "the service is ending"), id)
            }
            Some(_) => json_page(&json!({ "ready": true })),
        },
        Page::Service => {
            let version = env!("CARGO_PKG_VERSION");
            json_page(&json!({ "name": "verdigris", "version": version, "extensions": ["binary_tensor_data"] }))
        }
        Page::Models => {
            let names: Vec<&str> = models.unwrap_or_default().iter().map(|model| model.name.as_str()).collect();
            json_page(&json!({ "models": names }))
        }
        Page::Metrics(render) => plain(200, "text/plain; version=0.0.4; charset=utf-8", render()),
        Page::Model(model) => json_page(&described(model)),
    }
}

fn not_warm() -> Refusal {
    Refusal::new(Kind::NotReady, "the models are not warm yet")
}

fn unknown_model(models: &[Arc<Signature>], name: &str) -> Refusal {
    let known = models.iter().map(|model| format!("`{}`", model.name)).collect::<Vec<_>>().join(", ");
    let known = if known.is_empty() { "there is none".to_owned() } else { format!("there are {known}") };
    Refusal::new(Kind::UnknownModel, format!("no model {}; {known}", shown(name)))
}

/// A model's metadata: the protocol's, and what runs.
fn described(model: &Signature) -> serde_json::Value {
    let ports = |ports: &[crate::executor::Port]| -> Vec<serde_json::Value> {
        let shape = |dims: &[u64]| std::iter::once(-1).chain(dims.iter().map(|&dim| dim as i64)).collect::<Vec<i64>>();
        let text =
            |port: &crate::executor::Port| json!({ "name": port.name, "datatype": datatype(port.dtype), "shape": shape(&port.row_dims) });
        ports.iter().map(text).collect()
    };
    json!({
        "name": model.name,
        "versions": ["1"],
        "platform": "verdigris",
        "inputs": ports(&model.inputs),
        "outputs": ports(&model.outputs),
        "device": model.device,
        "batch_sizes": model.batch_sizes,
        "max_wait_us": model.max_wait.as_micros() as u64,
        "deadline_ms": model.deadline.as_millis() as u64,
        "queue_rows": model.queue_rows,
        "rows_proved_apart": model.rows_proved_apart,
        "engines": model.engines,
    })
}

/// Inference, with its outcome counted.
async fn infer(shared: &Shared, name: &str, headers: &HeaderMap, body: Incoming, id: &str, span: tracing::Span) -> Answered {
    let arrived = Instant::now();
    let batcher = shared.batcher.get();
    let models = batcher.map(|batcher| batcher.signatures()).unwrap_or_default();
    let model = models.iter().position(|model| model.name == name);
    let label: &str = model.map_or(UNKNOWN_MODEL, |model| &models[model].name);
    span.record("model", label);
    let mut outcome = Outcome { model: label.into(), told: None };
    let done = match (batcher, model) {
        (None, _) => {
            swallow(body).await;
            Err(not_warm())
        }
        (Some(_), None) => {
            swallow(body).await;
            Err(unknown_model(models, name))
        }
        (Some(batcher), Some(model)) => inferred(shared, batcher, model, headers, body, id, (arrived, &span)).await,
    };
    let (told, answered) = match done {
        Ok(answered) => ("ok", answered),
        Err(refusal) => {
            tracing::debug!(kind = refusal.kind.name(), message = refusal.message.as_str(), "refused");
            (refusal.kind.outcome(), refused(&refusal, id))
        }
    };
    span.record("outcome", told);
    outcome.told = Some(told);
    answered
}

async fn inferred(
    shared: &Shared,
    batcher: &Arc<Batcher>,
    model: usize,
    headers: &HeaderMap,
    body: Incoming,
    id: &str,
    (arrived, span): (Instant, &tracing::Span),
) -> Result<Answered, Refusal> {
    let signature = batcher.signatures()[model].clone();
    let deadline = match deadline(&signature, headers) {
        Ok(time) => arrived + time,
        Err(refusal) => {
            swallow(body).await;
            return Err(refusal);
        }
    };
    let json_bytes = match headers.get(JSON_LENGTH) {
        None => None,
        Some(value) => match value.to_str().ok().and_then(|value| value.parse::<usize>().ok()) {
            Some(bytes) => Some(bytes),
            None => {
                swallow(body).await;
                return Err(Refusal::bad(format!("{JSON_LENGTH} is no number of bytes")));
            }
        },
    };
    if let Some(coding) = headers.get_all(CONTENT_ENCODING).iter().find(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity")) {
        let coding = shown(&String::from_utf8_lossy(coding.as_bytes()));
        swallow(body).await;
        return Err(Refusal::bad(format!("{CONTENT_ENCODING} {coding}: bodies are sent as they are, not compressed")));
    }
    let (bytes, held) = collected(shared, headers, body).await?;
    let read_at = Instant::now();
    let parsed_by = signature.clone();
    let is_short = bytes.len() <= PARSED_IN_PLACE_BYTES;
    // What was lent for the body is given back with what is made of it, whoever still waits then: the text here, inputs in the queue.
    let parse = move || protocol::read(&parsed_by, &bytes, json_bytes).map(|asked| (asked, held));
    let (asked, held) = if is_short {
        parse()?
    } else {
        tokio::task::spawn_blocking(parse).await.map_err(|error| Refusal::new(Kind::Failed, error.to_string()))??
    };
    span.record("rows", asked.rows);
    let (sender, receiver) = oneshot::channel();
    let Asked { rows, inputs, .. } = asked;
    let waiting = Waiting { rows, inputs, arrived: Instant::now(), deadline, answer: sender, span: span.clone(), held };
    batcher.submit(model, waiting)?;
    let received = tokio::time::timeout_at(deadline.into(), answer_or_end(receiver, shared.is_over.subscribe())).await;
    let Answer { outputs, batch_id, batch_rows, planned_rows, queued } = match received {
        Ok(None) => return Err(Refusal::new(Kind::ShuttingDown, "the service ended before the result was there")),
        Ok(Some(Ok(answer))) => answer?,
        Ok(Some(Err(_))) => return Err(Refusal::new(Kind::Failed, "the thread that computes has ended")),
        Err(_) => {
            let message = format!("the deadline of {} ms passed before the result was there", (deadline - arrived).as_millis());
            return Err(Refusal::new(Kind::Deadline, message));
        }
    };
    let parameters = AnswerParameters { batch_id, batch_rows, planned_rows, queue_us: queued.as_micros() as u64 };
    let id = asked.id.as_deref().unwrap_or(id);
    let (text, json_bytes) = protocol::write(&signature, id, asked.rows, &outputs, &asked.outputs, parameters)?;
    let mut answered = plain(200, if json_bytes.is_some() { "application/octet-stream" } else { "application/json" }, text);
    if let Some(length) = json_bytes {
        answered.headers_mut().insert(JSON_LENGTH, HeaderValue::from(length as u64));
    }
    telemetry::request_time(&signature.name, read_at.elapsed());
    Ok(answered)
}

/// What comes first: the answer, or the end of the service (`None`).
async fn answer_or_end<T>(receiver: oneshot::Receiver<T>, mut is_over: watch::Receiver<bool>) -> Option<Result<T, RecvError>> {
    let mut receiving = std::pin::pin!(receiver);
    let mut ending = std::pin::pin!(is_over.wait_for(|is_over| *is_over));
    std::future::poll_fn(|context| match receiving.as_mut().poll(context) {
        Poll::Ready(answer) => Poll::Ready(Some(answer)),
        Poll::Pending => ending.as_mut().poll(context).map(|_| None),
    })
    .await
}

/// How long the client waits.
fn deadline(signature: &Signature, headers: &HeaderMap) -> Result<Duration, Refusal> {
    let Some(value) = headers.get(DEADLINE) else { return Ok(signature.deadline) };
    let time = value.to_str().ok().and_then(|value| value.parse::<u64>().ok()).filter(|&time| time <= LONGEST_DEADLINE_MS);
    let time = time.ok_or_else(|| Refusal::bad(format!("{DEADLINE} is a number of milliseconds, at most {LONGEST_DEADLINE_MS}")))?;
    Ok(Duration::from_millis(time))
}

/// The whole body, within the limits on its length, on all bodies and on time; with the memory that it takes of all.
async fn collected(shared: &Shared, headers: &HeaderMap, body: Incoming) -> Result<(Vec<u8>, OwnedSemaphorePermit), Refusal> {
    let limits = &shared.limits;
    let too_large = |length: String| {
        let message = format!("a body of {length} bytes; the limit is {}", limits.body_bytes);
        Refusal::new(Kind::TooLarge, message)
    };
    let stated = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if let Some(length) = stated.filter(|&length| length > limits.body_bytes as u64) {
        swallow(body).await;
        return Err(too_large(length.to_string()));
    }
    // A body that does not state its length may have any.
    let most_bytes = stated.map_or(limits.body_bytes, |length| length as usize);
    let units = most_bytes.div_ceil(HELD_UNIT_BYTES) as u32;
    let Ok(held) = shared.held.clone().try_acquire_many_owned(units) else {
        swallow(body).await;
        let message = format!("requests hold all of the {} bytes that bodies may take; try again later", limits.held_body_bytes);
        return Err(Refusal::new(Kind::QueueFull, message));
    };
    match tokio::time::timeout(limits.body_timeout, appended(body, most_bytes)).await {
        Err(_) => {
            let message = format!("the body did not arrive within {} ms", limits.body_timeout.as_millis());
            Err(Refusal::new(Kind::SlowClient, message))
        }
        Ok(Err(Unread::TooLong)) => Err(too_large(format!("more than {}", limits.body_bytes))),
        Ok(Err(Unread::NoMemory)) => Err(Refusal::new(Kind::OutOfMemory, format!("{most_bytes} bytes for the body cannot be had"))),
        // Only hyper knows whether the client has gone or has sent what is no body; the former is read by nobody.
        Ok(Err(Unread::Broken(error))) if !error.is_parse() => {
            Err(Refusal::new(Kind::Cancelled, format!("the client went away before the body was whole: {error}")))
        }
        Ok(Err(Unread::Broken(error))) => Err(Refusal::bad(format!("the body is none: {error}"))),
        Ok(Ok(bytes)) => Ok((bytes, held)),
    }
}

/// Why a body is not there.
enum Unread {
    TooLong,
    NoMemory,
    Broken(hyper::Error),
}

/// A body of at most so many bytes, in one buffer: pieces that were kept as they came would take many times the memory of their bytes where they are short.
async fn appended(mut body: Incoming, most_bytes: usize) -> Result<Vec<u8>, Unread> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(most_bytes).map_err(|_| Unread::NoMemory)?;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(Unread::Broken)?;
        let Some(piece) = frame.data_ref() else { continue };
        if piece.len() > most_bytes - bytes.len() {
            return Err(Unread::TooLong);
        }
        bytes.extend_from_slice(piece);
    }
    Ok(bytes)
}

/// Takes a little of a body that nobody reads. To close a connection whose bytes are unread is to reset it, and the answer is lost.
async fn swallow(mut body: Incoming) {
    let take = async {
        let mut taken = 0;
        while taken < SWALLOWED_BYTES && !body.is_end_stream() {
            match body.frame().await {
                Some(Ok(frame)) => taken += frame.data_ref().map_or(0, Bytes::len),
                _ => return,
            }
        }
    };
    let _ = tokio::time::timeout(SWALLOWED_TIME, take).await;
}
