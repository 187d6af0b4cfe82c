//! Requests become batches: queues with a bound, deadlines, and the one thread of a device that computes.
//!
//! A batch begins when its rows fill the largest planned size, when the oldest request has waited for `max_wait`, or when waiting longer
//! would cost a request its deadline. Requests stay in their order and are never split. Of a request whose deadline is over, or whose client
//! has gone, nothing is computed. With several models, the batch that was due first comes first.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tracing::Span;

use crate::executor::{ExecuteError, Executor};
use crate::model::{Served, Signature};
use crate::refusal::{Kind, Refusal};
use crate::telemetry;

/// What a request gets of its batch.
#[derive(Debug)]
pub(crate) struct Answer {
    /// Packed rows, in the order of the signature.
    pub(crate) outputs: Vec<Vec<u8>>,
    pub(crate) batch_id: u64,
    /// Rows of all requests of the batch, and of the plan that ran.
    pub(crate) batch_rows: u64,
    pub(crate) planned_rows: u64,
    pub(crate) queued: Duration,
}

/// A request that waits.
pub(crate) struct Waiting {
    pub(crate) rows: u64,
    /// Packed rows, in the order of the signature.
    pub(crate) inputs: Vec<Vec<u8>>,
    pub(crate) arrived: Instant,
    pub(crate) deadline: Instant,
    pub(crate) answer: oneshot::Sender<Result<Answer, Refusal>>,
    pub(crate) span: Span,
    /// The memory that was lent for the request's body, of which the inputs are made.
    pub(crate) held: OwnedSemaphorePermit,
}

impl Waiting {
    fn refuse(self, kind: Kind, message: String) {
        self.told(Err(Refusal::new(kind, message)));
    }

    /// Ends the request: whether its client still waits. The memory is given back before the answer, after which the client may ask for as much again.
    fn told(self, answered: Result<Answer, Refusal>) -> bool {
        let Waiting { inputs, held, answer, .. } = self;
        drop((inputs, held));
        // A client that has gone needs no answer.
        answer.send(answered).is_ok()
    }
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    rows: u64,
    /// The time that the last batch took: what has to be left of a deadline when a batch begins.
    last_batch: Duration,
}

struct State {
    queues: Vec<Queue>,
    /// No more requests; what waits is computed.
    is_draining: bool,
    /// What waits is refused, and the thread ends.
    is_over: bool,
}

/// The queues of a device's models, and the door to them.
pub(crate) struct Batcher {
    state: Mutex<State>,
    changed: Condvar,
    signatures: Vec<Arc<Signature>>,
}

/// Requests that form the next batch.
struct Batch {
    model: usize,
    requests: Vec<Waiting>,
    rows: u64,
}

enum Next {
    Run(Batch),
    Wait(Option<Duration>),
    End,
}

impl Batcher {
    pub(crate) fn new(signatures: Vec<Arc<Signature>>) -> Batcher {
        let queues = signatures.iter().map(|_| Queue::default()).collect();
        Batcher { state: Mutex::new(State { queues, is_draining: false, is_over: false }), changed: Condvar::new(), signatures }
    }

    /// A panic of an executor happens while the lock is free, so that what the lock guards is whole even if it was poisoned.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a request into the queue of its model.
    pub(crate) fn submit(&self, model: usize, request: Waiting) -> Result<(), Refusal> {
        let signature = &self.signatures[model];
        let mut state = self.lock();
        if state.is_draining || state.is_over {
            return Err(Refusal::new(Kind::ShuttingDown, "the service is ending and takes no more requests"));
        }
        let queue = &mut state.queues[model];
        if queue.rows + request.rows > signature.queue_rows {
            // Rows of clients that have gone are no reason to send others away.
            purge(queue, signature, Instant::now());
        }
        if queue.rows + request.rows > signature.queue_rows {
            let message = format!(
                "model `{}`: {} rows wait, the request has {}, and the bound is {}; try again later",
                signature.name, queue.rows, request.rows, signature.queue_rows
            );
            return Err(Refusal::new(Kind::QueueFull, message));
        }
        queue.rows += request.rows;
        queue.waiting.push_back(request);
        telemetry::queue_rows(&signature.name, queue.rows);
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// After this, requests are refused, and those that wait are computed at once.
    pub(crate) fn drain(&self) {
        self.lock().is_draining = true;
        self.changed.notify_one();
    }

    /// Refuses what waits; the thread ends when it has done with the batch that it computes.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.is_over = true;
        for (queue, signature) in state.queues.iter_mut().zip(&self.signatures) {
            for request in queue.waiting.drain(..) {
                request.refuse(Kind::ShuttingDown, "the service ended before the request could be computed".to_owned());
            }
            queue.rows = 0;
            telemetry::queue_rows(&signature.name, 0);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Computes batches until the end; on a thread of its own.
    pub(crate) fn run(&self, mut executors: Vec<Box<dyn Executor>>) {
        let mut batch_id = 0;
        while let Some(batch) = self.next() {
            batch_id += 1;
            let model = batch.model;
            let start = Instant::now();
            execute(&self.signatures[model], executors[model].as_mut(), batch, batch_id);
            self.lock().queues[model].last_batch = start.elapsed();
        }
    }

    /// Waits for the next batch; `None` at the end.
    fn next(&self) -> Option<Batch> {
        let mut state = self.lock();
        loop {
            match self.decide(&mut state) {
                Next::Wait(None) => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Next::Wait(Some(time)) => {
                    state = self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0;
                }
                Next::Run(batch) => return Some(batch),
                Next::End => return None,
            }
        }
    }

    fn decide(&self, state: &mut State) -> Next {
        let now = Instant::now();
        if state.is_over {
            return Next::End;
        }
        let mut first: Option<(Instant, usize)> = None;
        for (model, (queue, signature)) in state.queues.iter_mut().zip(&self.signatures).enumerate() {
            purge(queue, signature, now);
            let due = due(queue, signature, state.is_draining);
            if due.is_some_and(|due| first.is_none_or(|(before, _)| due < before)) {
                first = due.map(|due| (due, model));
            }
        }
        match first {
            None => Next::Wait(None),
            Some((due, _)) if due > now => Next::Wait(Some(due - now)),
            Some((_, model)) => {
                let (queue, signature) = (&mut state.queues[model], &self.signatures[model]);
                let batch = take(queue, model, signature.most_rows());
                telemetry::queue_rows(&signature.name, queue.rows);
                Next::Run(batch)
            }
        }
    }
}

/// Refuses requests whose deadline is over, and drops those whose client has gone.
fn purge(queue: &mut Queue, signature: &Signature, now: Instant) {
    let is_dead = |request: &Waiting| request.deadline <= now || request.answer.is_closed();
    if !queue.waiting.iter().any(is_dead) {
        return;
    }
    for request in std::mem::take(&mut queue.waiting) {
        if !is_dead(&request) {
            queue.waiting.push_back(request);
            continue;
        }
        queue.rows -= request.rows;
        let waited = now.saturating_duration_since(request.arrived).as_millis();
        request.refuse(Kind::Deadline, format!("the deadline passed after {waited} ms in the queue; nothing was computed"));
    }
    telemetry::queue_rows(&signature.name, queue.rows);
}

/// When the next batch of a queue has to begin; in the past, if it may begin now.
fn due(queue: &Queue, signature: &Signature, is_draining: bool) -> Option<Instant> {
    let oldest = queue.waiting.front()?.arrived;
    if is_draining || queue.rows >= signature.most_rows() {
        return Some(oldest);
    }
    let tightest = queue.waiting.iter().map(|request| request.deadline).min()?;
    let latest = tightest.checked_sub(queue.last_batch * 2).unwrap_or(oldest);
    Some((oldest + signature.max_wait).min(latest))
}

/// The requests at the head of a queue that fit one batch.
fn take(queue: &mut Queue, model: usize, most_rows: u64) -> Batch {
    let mut batch = Batch { model, requests: Vec::new(), rows: 0 };
    while let Some(request) = queue.waiting.pop_front() {
        // A request never has more rows than a batch; such are refused at the door.
        if batch.rows + request.rows > most_rows && !batch.requests.is_empty() {
            queue.waiting.push_front(request);
            break;
        }
        batch.rows += request.rows;
        queue.rows -= request.rows;
        batch.requests.push(request);
    }
    batch
}

/// Computes a batch and gives each request its rows.
fn execute(signature: &Signature, executor: &mut dyn Executor, batch: Batch, batch_id: u64) {
    let planned_rows = signature.planned(batch.rows);
    let name = &signature.name;
    let span = tracing::info_span!("batch", model = name.as_str(), batch_id, rows = batch.rows, planned_rows);
    for request in &batch.requests {
        span.follows_from(&request.span);
        request.span.record("batch_id", batch_id);
    }
    let entered = span.enter();
    let start = Instant::now();
    telemetry::batch(name, batch.rows, batch.requests.iter().map(|request| start.saturating_duration_since(request.arrived)));
    let results = catch_unwind(AssertUnwindSafe(|| {
        let inputs: Vec<Vec<u8>> = (signature.inputs.iter().enumerate())
            .map(|(place, port)| {
                let mut bytes = Vec::with_capacity(port.row_bytes() * planned_rows as usize);
                batch.requests.iter().for_each(|request| bytes.extend_from_slice(&request.inputs[place]));
                // Rows that nobody asked for.
                bytes.resize(port.row_bytes() * planned_rows as usize, 0);
                bytes
            })
            .collect();
        executor.execute(planned_rows, &inputs)
    }));
    let results = results.unwrap_or_else(|panic| Err(ExecuteError { message: panicked(&*panic), is_lack_of_memory: false }));
    let results = results.and_then(|results| held_against(signature, planned_rows, results));
    drop(entered);
    match results {
        Ok(results) => {
            let mut row = 0;
            let mut answered = 0;
            for request in batch.requests {
                let part = |(bytes, port): (&Vec<u8>, &crate::executor::Port)| {
                    bytes[row as usize * port.row_bytes()..][..request.rows as usize * port.row_bytes()].to_vec()
                };
                let outputs = results.iter().zip(&signature.outputs).map(part).collect();
                row += request.rows;
                let queued = start.saturating_duration_since(request.arrived);
                let answer = Answer { outputs, batch_id, batch_rows: batch.rows, planned_rows, queued };
                let rows = request.rows;
                if request.told(Ok(answer)) {
                    answered += rows;
                }
            }
            telemetry::rows(name, answered);
        }
        Err(error) => {
            tracing::error!(model = name.as_str(), batch_id, error = error.message.as_str(), "a batch could not be computed");
            let kind = if error.is_lack_of_memory { Kind::OutOfMemory } else { Kind::Failed };
            for request in batch.requests {
                request.refuse(kind, format!("model `{name}`, batch of {planned_rows} rows: {error}"));
            }
        }
    }
}

/// Results of other lengths than the model's are a fault of the executor, not something to cut rows out of.
fn held_against(signature: &Signature, planned_rows: u64, results: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, ExecuteError> {
    let lengths: Vec<usize> = results.iter().map(Vec::len).collect();
    let wanted: Vec<usize> = signature.outputs.iter().map(|port| port.row_bytes() * planned_rows as usize).collect();
    if lengths == wanted {
        return Ok(results);
    }
    Err(ExecuteError { message: format!("results are {lengths:?} bytes long, wanted are {wanted:?}"), is_lack_of_memory: false })
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> String {
    let words = panic.downcast_ref::<&str>().map(|text| (*text).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
    format!("the executor panicked: {}", words.unwrap_or_else(|| "without words".to_owned()))
}

/// The queues of the models, and their executors for the thread.
pub(crate) fn of(models: Vec<Served>) -> (Batcher, Vec<Box<dyn Executor>>) {
    let (signatures, executors) = models.into_iter().map(|model| (Arc::new(model.signature), model.executor)).unzip();
    (Batcher::new(signatures), executors)
}

impl Batcher {
    pub(crate) fn signatures(&self) -> &[Arc<Signature>] {
        &self.signatures
    }
}
