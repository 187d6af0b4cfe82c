//! Numeric guards: now and then the results of an execution are looked at.
//!
//! Two of them, both off until somebody listens and asks. *Numbers* looks for NaN and infinity, and how near the largest value is to the largest
//! that the type holds. *Drift* computes the execution a second time, by the reference's plain loops in f64 (a shadow execution), and holds the
//! results against what rounding allows.
//!
//! A guarded execution runs as any other, on the caller's memory, and what it wrote stays as it is: bytes are copied aside, on a GPU by the device, in the
//! stream's order, without anybody waiting. The look at them is [`super::collect`]'s, on the thread that called it. Whatever stands in the way (a stream that
//! captures, tensors beyond the bound, no memory for the copies, too much to compute) is a check left out, which is counted, and never an error.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metrics::{counter, histogram};
use verdigris_cuda::{CaptureStatus, Context, DeviceBuffer, DeviceSlice, Event, Pool, Stream};
use verdigris_graph::{Graph, TensorDesc, Uid};
use verdigris_reference::compare::{Compared, compare};
use verdigris_reference::graph::{Selection, evaluate};
use verdigris_reference::run::Inputs;
use verdigris_reference::tolerance::Range;
use verdigris_tensor::num;

use super::{Budget, Sampling, is_listening, lock};
use crate::error::Error;

/// Checks that may wait to be looked at, as many as five a second leave between two collections and some; beyond it nobody reads, and what comes is left out.
const MOST_PENDING: usize = 8;
/// How long one collection looks; a look that has begun is ended.
const LOOK_TIME: Duration = Duration::from_millis(250);
/// Elements of each output that a shadow execution computes.
const SHADOW_ELEMENTS: u64 = 64;
/// Operations of the largest shadow execution: about a second of the reference's plain loops.
const MOST_SHADOW_FLOPS: f64 = 1e8;
/// Alignment of a tensor among the copies of a device.
const COPY_ALIGNMENT_BYTES: u64 = 256;
/// What a histogram shows for a result that is infinitely far from right.
const FARTHEST: f64 = 1e9;

/// Whose results are looked at. Nobody's, unless it is asked for.
///
/// ```
/// use verdigris::observe::{Guards, Sampling};
///
/// assert!(Guards::default().are_off());
/// // Every thousandth execution of a plan is looked at, at most two a second.
/// let guards = Guards { numbers: Sampling { every: 1000, per_second: 2 }, ..Guards::default() };
/// assert!(!guards.are_off() && guards.most_bytes == 16 << 20);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Guards {
    /// Whose outputs are looked through for NaN and infinity: of each plan, the first execution and every one of that many.
    pub numbers: Sampling,
    /// Who is computed again by the reference.
    pub drift: Sampling,
    /// Most bytes that are copied aside for one check. Outputs are looked at as far as this goes; a shadow execution needs all tensors that are bound.
    pub most_bytes: u64,
}

impl Default for Guards {
    /// Off; 16 MiB.
    fn default() -> Guards {
        let off = Sampling { every: 0, per_second: 0 };
        Guards { numbers: off, drift: off, most_bytes: 16 << 20 }
    }
}

impl Guards {
    /// Whether nothing is looked at.
    pub fn are_off(&self) -> bool {
        self.numbers.every == 0 && self.drift.every == 0
    }
}

static ARE_ON: AtomicBool = AtomicBool::new(false);
static GUARDS: Mutex<Option<Guards>> = Mutex::new(None);
static NUMBERS: Budget = Budget::new();
static DRIFT: Budget = Budget::new();
static PENDING: Mutex<VecDeque<Check>> = Mutex::new(VecDeque::new());
/// One thread looks; whoever comes meanwhile need not.
static LOOKING: Mutex<()> = Mutex::new(());

/// From now on by these.
pub(super) fn set(guards: Guards) {
    *lock(&GUARDS) = Some(guards);
    ARE_ON.store(!guards.are_off(), Ordering::Relaxed);
}

/// What one execution is looked at for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Wanted {
    numbers: bool,
    drift: bool,
    most_bytes: u64,
}

/// What this execution is to be looked at for: `turns` counts those of its plan.
#[inline]
pub(crate) fn wanted(turns: &AtomicU64) -> Option<Wanted> {
    if !ARE_ON.load(Ordering::Relaxed) || !is_listening() { None } else { wanted_now(turns) }
}

fn wanted_now(turns: &AtomicU64) -> Option<Wanted> {
    let guards = (*lock(&GUARDS))?;
    let turn = turns.fetch_add(1, Ordering::Relaxed);
    let is_due = |sampling: Sampling, budget: &Budget| {
        sampling.every > 0 && turn.is_multiple_of(u64::from(sampling.every)) && budget.takes(sampling.per_second)
    };
    let (numbers, drift) = (is_due(guards.numbers, &NUMBERS), is_due(guards.drift, &DRIFT));
    (numbers || drift).then_some(Wanted { numbers, drift, most_bytes: guards.most_bytes })
}

/// Who writes a tensor: what is computed, as labels have it, and the engine of the chosen way. (An execution that fell back took another, which the event
/// `fallback` says.)
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Writer {
    pub(crate) op: &'static str,
    pub(crate) engine: &'static str,
}

/// A plan, as guards know it.
#[derive(Debug)]
pub(crate) struct Subject {
    graph: Arc<Graph>,
    device: String,
    /// Of the tensors that are bound: what it is, and what computes it if it is written. Host scalars are left out.
    tensors: Vec<(TensorDesc, Option<Writer>)>,
    /// Arithmetic work of one execution.
    flops: f64,
}

impl Subject {
    /// Of each tensor its writer; `None` for those that are read.
    pub(crate) fn new(graph: Arc<Graph>, device: &str, tensors: &[(TensorDesc, Option<Writer>)], flops: f64) -> Arc<Subject> {
        Arc::new(Subject { graph, device: device.to_owned(), tensors: tensors.to_vec(), flops })
    }

    /// Why a shadow execution is out of the question; `None` where it is not.
    fn too_large(&self, most_bytes: u64) -> Option<&'static str> {
        let bytes: u128 = self.tensors.iter().map(|(tensor, _)| tensor.layout.span_bytes(tensor.dtype)).sum();
        // Of a single op the elements alone that are compared are computed; of several all that lies between.
        let elements = || self.tensors.iter().filter(|(_, op)| op.is_some()).map(|(tensor, _)| tensor.layout.elements()).max().unwrap_or(0);
        let part = if self.graph.nodes.len() == 1 { (SHADOW_ELEMENTS as f64 / elements().max(1) as f64).min(1.0) } else { 1.0 };
        if bytes > u128::from(most_bytes) { Some("size") } else { (self.flops * part > MOST_SHADOW_FLOPS).then_some("work") }
    }

    /// Which tensors are copied, how much of each, and for what: `None` where nothing is left to look at.
    fn copied(&self, wanted: Wanted) -> Option<(Wanted, Vec<(usize, u64)>)> {
        let too_large = wanted.drift.then(|| self.too_large(wanted.most_bytes)).flatten();
        if let Some(reason) = too_large {
            self.left_out("drift", reason);
        }
        let wanted = Wanted { drift: wanted.drift && too_large.is_none(), ..wanted };
        let mut left = wanted.most_bytes;
        let mut copied = Vec::new();
        for (number, (tensor, op)) in self.tensors.iter().enumerate() {
            let is_needed = wanted.drift || wanted.numbers && op.is_some() && tensor.dtype.is_float();
            let bytes = u64::try_from(tensor.layout.span_bytes(tensor.dtype)).unwrap_or(u64::MAX).min(left);
            if is_needed {
                left -= bytes;
                copied.push((number, bytes));
            }
        }
        (wanted.drift || wanted.numbers && copied.iter().any(|(_, bytes)| *bytes > 0)).then_some((wanted, copied))
    }

    fn left_out(&self, guard: &'static str, reason: &'static str) {
        counter!("verdigris_guard_skips_total", "guard" => guard, "reason" => reason, "device" => self.device.clone()).increment(1);
    }

    fn left_out_all(&self, wanted: Wanted, reason: &'static str) {
        for (guard, is_wanted) in [("numbers", wanted.numbers), ("drift", wanted.drift)] {
            if is_wanted {
                self.left_out(guard, reason);
            }
        }
    }
}

/// An execution that is looked at: what it read, before it runs, and what it wrote, behind it.
pub(crate) struct Check {
    subject: Arc<Subject>,
    wanted: Wanted,
    /// Tensors of the subject by number, with the bytes that are copied of each.
    copied: Vec<(usize, u64)>,
    scalars: Vec<(Uid, f64)>,
    copies: Copies,
}

enum Copies {
    Host(Vec<Vec<u8>>),
    Device(DeviceCopies),
}

/// Copies in memory of the device.
struct DeviceCopies {
    /// One behind the other.
    buffer: Option<DeviceBuffer>,
    offsets_bytes: Vec<u64>,
    /// A stream that nobody else uses: whose order the buffer lives in.
    reader: Stream,
    /// Behind the latest copies.
    event: Event,
    context: Context,
}

impl Drop for DeviceCopies {
    fn drop(&mut self) {
        // The buffer is freed in the order of the reader's stream, behind the copies into it. Where not even that can be asked for, the device has
        // failed, and no copy is on its way.
        let _ = self.reader.wait(&self.event);
        self.buffer.take();
    }
}

impl DeviceCopies {
    /// Memory for so many bytes of each, ready for `stream`. Nobody waits for the stream, not even where memory is lacking.
    fn new(pool: &Pool, stream: &Stream, sizes_bytes: impl Iterator<Item = u64>) -> Result<DeviceCopies, Error> {
        let mut total_bytes = 0;
        let offsets_bytes = sizes_bytes.map(|bytes| {
            let offset = total_bytes;
            total_bytes += bytes.next_multiple_of(COPY_ALIGNMENT_BYTES);
            offset
        });
        let (offsets_bytes, context) = (offsets_bytes.collect(), stream.context().clone());
        let (reader, event) = (Stream::new(&context)?, Event::ordering(&context)?);
        let buffer = pool.alloc(&reader, total_bytes)?;
        event.record(&reader)?;
        stream.wait(&event)?;
        Ok(DeviceCopies { buffer: Some(buffer), offsets_bytes, reader, event, context })
    }

    fn copy(&mut self, stream: &Stream, slices: &[(usize, DeviceSlice<'_>)]) -> Result<(), Error> {
        let copied = slices.iter().try_for_each(|(place, slice)| match &mut self.buffer {
            Some(buffer) => buffer.copy_from(stream, self.offsets_bytes[*place], *slice),
            None => Ok(()),
        });
        // Also behind those that were submitted before one failed.
        self.event.record(stream)?;
        Ok(copied?)
    }
}

impl Check {
    /// A check on the host; `memory` gives the bytes of a tensor that is read.
    pub(crate) fn on_host<'m>(
        subject: &Arc<Subject>,
        wanted: Wanted,
        scalars: Vec<(Uid, f64)>,
        memory: impl Fn(Uid) -> Option<&'m [u8]>,
    ) -> Option<Check> {
        if lock(&PENDING).len() >= MOST_PENDING {
            subject.left_out_all(wanted, "unread");
            return None;
        }
        let (wanted, copied) = subject.copied(wanted)?;
        let of = |&(number, bytes): &(usize, u64)| {
            let (tensor, op) = &subject.tensors[number];
            let source = if op.is_none() { memory(tensor.uid) } else { None };
            source.and_then(|source| source.get(..bytes as usize)).map_or_else(Vec::new, <[u8]>::to_vec)
        };
        let copies = Copies::Host(copied.iter().map(of).collect());
        Some(Check { subject: Arc::clone(subject), wanted, copied, scalars, copies })
    }

    /// The execution is done; `memory` gives the bytes of a tensor that it wrote.
    pub(crate) fn done_on_host<'m>(mut self, memory: impl Fn(Uid) -> Option<&'m [u8]>) {
        let Copies::Host(copies) = &mut self.copies else { return };
        for (&(number, bytes), copy) in self.copied.iter().zip(copies) {
            let (tensor, op) = &self.subject.tensors[number];
            if let Some(source) = op.and_then(|_| memory(tensor.uid)).and_then(|source| source.get(..bytes as usize)) {
                *copy = source.to_vec();
            }
        }
        self.keep();
    }

    /// A check on a GPU, in front of an execution on `stream`; `memory` gives where a tensor lies. `None` where it is left out.
    pub(crate) fn on_device<'m>(
        subject: &Arc<Subject>,
        wanted: Wanted,
        scalars: Vec<(Uid, f64)>,
        (pool, stream): (&Pool, &Stream),
        memory: impl Fn(Uid) -> Option<DeviceSlice<'m>>,
    ) -> Option<Check> {
        if !matches!(stream.capture_status(), Ok(CaptureStatus::None)) {
            subject.left_out_all(wanted, "capture");
            return None;
        }
        if lock(&PENDING).len() >= MOST_PENDING {
            subject.left_out_all(wanted, "unread");
            return None;
        }
        let (wanted, copied) = subject.copied(wanted)?;
        let begun = || -> Result<Check, Error> {
            let _relaxed = stream.context().relax_capture()?;
            let copies = Copies::Device(DeviceCopies::new(pool, stream, copied.iter().map(|(_, bytes)| *bytes))?);
            let mut check = Check { subject: Arc::clone(subject), wanted, copied, scalars, copies };
            check.copy_on_device(stream, false, memory)?;
            Ok(check)
        };
        begun().map_err(|error| subject.left_out_all(wanted, reason(&error))).ok()
    }

    /// The execution is submitted.
    pub(crate) fn done_on_device<'m>(mut self, stream: &Stream, memory: impl Fn(Uid) -> Option<DeviceSlice<'m>>) {
        match self.copy_on_device(stream, true, memory) {
            Ok(()) => self.keep(),
            Err(error) => self.subject.left_out_all(self.wanted, reason(&error)),
        }
    }

    fn copy_on_device<'m>(&mut self, stream: &Stream, written: bool, memory: impl Fn(Uid) -> Option<DeviceSlice<'m>>) -> Result<(), Error> {
        let Copies::Device(copies) = &mut self.copies else { return Ok(()) };
        let mut slices = Vec::with_capacity(self.copied.len());
        for (place, (number, bytes)) in self.copied.iter().enumerate() {
            let (tensor, op) = &self.subject.tensors[*number];
            if op.is_some() == written
                && let Some(slice) = memory(tensor.uid)
            {
                slices.push((place, slice.part(0, *bytes)?));
            }
        }
        copies.copy(stream, &slices)
    }

    /// Has it looked at by and by.
    fn keep(self) {
        let mut pending = lock(&PENDING);
        if !is_listening() {
            // The last one went while this ran: nobody will look, and nobody else would give the copies back.
            drop(pending);
        } else if pending.len() < MOST_PENDING {
            pending.push_back(self);
        } else {
            drop(pending);
            self.subject.left_out_all(self.wanted, "unread");
        }
    }

    /// Whether the copies are there.
    fn is_ready(&self) -> Result<bool, Error> {
        match &self.copies {
            Copies::Host(_) => Ok(true),
            Copies::Device(copies) => {
                let _relaxed = copies.context.relax_capture()?;
                Ok(copies.event.is_reached()?)
            }
        }
    }

    /// The copies, as bytes of the host.
    fn bytes(&mut self) -> Result<Vec<Vec<u8>>, Error> {
        match &mut self.copies {
            Copies::Host(copies) => Ok(std::mem::take(copies)),
            Copies::Device(copies) => {
                let _relaxed = copies.context.relax_capture()?;
                let Some(buffer) = &copies.buffer else { return Ok(Vec::new()) };
                let read = |((_, bytes), offset): (&(usize, u64), &u64)| {
                    let mut copy = vec![0; *bytes as usize];
                    buffer.download(&copies.reader, *offset, &mut copy).map(|()| copy)
                };
                Ok(self.copied.iter().zip(&copies.offsets_bytes).map(read).collect::<Result<_, _>>()?)
            }
        }
    }

    fn look(mut self) {
        let bytes = match self.bytes() {
            Ok(bytes) => bytes,
            Err(error) => return self.subject.left_out_all(self.wanted, reason(&error)),
        };
        let subject = &self.subject;
        let held = || self.copied.iter().zip(&bytes).map(|((number, _), bytes)| (&subject.tensors[*number], bytes));
        if self.wanted.numbers {
            for ((tensor, writer), bytes) in held() {
                if let Some(writer) = writer.filter(|_| tensor.dtype.is_float()) {
                    look_at_numbers(subject, writer, tensor, bytes);
                }
            }
        }
        if self.wanted.drift {
            let mut inputs = Inputs { scalars: self.scalars.iter().copied().collect(), ..Inputs::default() };
            for ((tensor, op), bytes) in held() {
                if op.is_none() {
                    inputs.buffers.insert(tensor.uid, bytes.clone());
                }
            }
            let results: Vec<_> = held().filter_map(|((tensor, op), bytes)| Some((tensor, (*op)?, bytes.as_slice()))).collect();
            look_for_drift(subject, &inputs, &results);
        }
    }
}

/// Why a check is left out, in a word.
fn reason(error: &Error) -> &'static str {
    if error.is_lack_of_memory() { "memory" } else { "failed" }
}

/// Looks at the executions whose copies are there, one at the least, as long as there is time.
pub(super) fn collect() {
    let Ok(_looking) = LOOKING.try_lock() else { return };
    let begun = Instant::now();
    loop {
        let next = {
            let mut pending = lock(&PENDING);
            let ready = pending.iter().position(|check| check.is_ready().unwrap_or(true));
            ready.and_then(|place| pending.remove(place))
        };
        let Some(check) = next else { return };
        check.look();
        if begun.elapsed() >= LOOK_TIME {
            return;
        }
    }
}

/// Nobody listens any more: what waits is given up, and with it the memory of the device that its copies are in.
pub(super) fn clear() {
    // Outside the lock: memory of a device is freed by its driver.
    let given_up = std::mem::take(&mut *lock(&PENDING));
    drop(given_up);
}

/// What was seen of the elements of a tensor.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Numbers {
    elements: u64,
    nonfinite: u64,
    /// The row-major position of the first of them.
    first: Option<u64>,
    /// The largest magnitude among the others.
    largest: f64,
}

/// Looks at the elements that lie whole within the bytes.
fn numbers(tensor: &TensorDesc, bytes: &[u8]) -> Numbers {
    let size = tensor.dtype.bytes();
    let mut seen = Numbers::default();
    let mut look = |position: u64, bytes: &[u8]| {
        let Some(value) = num::read_element(tensor.dtype, bytes) else { return };
        seen.elements += 1;
        if value.is_finite() {
            seen.largest = seen.largest.max(value.abs());
        } else {
            seen.nonfinite += 1;
            seen.first.get_or_insert(position);
        }
    };
    if tensor.layout.is_row_major() {
        (0..).zip(bytes.chunks_exact(size)).for_each(|(position, element)| look(position, element));
    } else {
        for position in 0..tensor.layout.elements() {
            let start = tensor.layout.offset_of_position(position).and_then(|offset| usize::try_from(offset).ok()?.checked_mul(size));
            if let Some(element) = start.and_then(|start| bytes.get(start..start + size)) {
                look(position, element);
            }
        }
    }
    seen
}

fn look_at_numbers(subject: &Subject, Writer { op, engine }: Writer, tensor: &TensorDesc, bytes: &[u8]) {
    let seen = numbers(tensor, bytes);
    if seen.elements == 0 {
        return;
    }
    let device = || subject.device.clone();
    counter!("verdigris_number_checks_total", "op" => op, "device" => device()).increment(1);
    histogram!("verdigris_amax_ratio", "op" => op, "device" => device()).record(seen.largest / Range::of(tensor.dtype).largest);
    if seen.nonfinite > 0 {
        counter!("verdigris_nonfinite_total", "op" => op, "device" => device()).increment(1);
        tracing::warn!(
            target: "verdigris", event = "nonfinite", device = subject.device, graph = subject.graph.name, op, engine, tensor = tensor.name,
            elements = seen.elements, nonfinite = seen.nonfinite, first = seen.first, largest = seen.largest
        );
    }
}

/// How far a result is from right, over what rounding allows; `None` where the rounding model says nothing.
fn distance(worst: Option<&Compared>, failures: u64) -> Option<f64> {
    let of = |worst: &Compared| {
        let distance = (worst.got - worst.want).abs();
        match distance {
            0.0 => 0.0,
            distance if distance.is_finite() && worst.tolerance > 0.0 => (distance / worst.tolerance).min(FARTHEST),
            // The same infinity, or NaN where NaN is due.
            _ if failures == 0 => 0.0,
            _ => FARTHEST,
        }
    };
    worst.map(of).or((failures > 0).then_some(FARTHEST))
}

fn look_for_drift(subject: &Subject, inputs: &Inputs<Uid>, results: &[(&TensorDesc, Writer, &[u8])]) {
    let selection = Selection::Sample { count: SHADOW_ELEMENTS, seed: 1 };
    let expected = match evaluate(&subject.graph, inputs, selection) {
        Ok(expected) => expected,
        Err(error) => {
            tracing::warn!(target: "verdigris", event = "drift", device = subject.device, graph = subject.graph.name, %error);
            return subject.left_out("drift", "failed");
        }
    };
    for output in &expected {
        let Some((tensor, Writer { op, engine }, bytes)) = results.iter().find(|(tensor, ..)| tensor.uid == output.id) else { continue };
        // What stood there before is not known: anything else, so that no element counts as unwritten.
        let before: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
        let report = compare(output, &before, bytes);
        let outcome = if report.failures == 0 { "within" } else { "beyond" };
        counter!("verdigris_drift_checks_total", "op" => *op, "outcome" => outcome, "device" => subject.device.clone()).increment(1);
        let ratio = distance(report.worst.as_ref(), report.failures);
        if let Some(ratio) = ratio {
            histogram!("verdigris_drift_ratio", "op" => *op, "device" => subject.device.clone()).record(ratio);
        }
        if report.failures > 0 {
            let worst = report.worst.as_ref();
            tracing::error!(
                target: "verdigris", event = "drift", device = subject.device, graph = subject.graph.name, op, engine, tensor = tensor.name,
                elements = report.elements, wrong = report.failures, ratio,
                got = worst.map(|worst| worst.got), want = worst.map(|worst| worst.want), allowed = worst.map(|worst| worst.tolerance)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::{GraphBuilder, Precision};
    use verdigris_tensor::{DType, Layout};

    fn tensor(dtype: DType, layout: Layout) -> TensorDesc {
        let mut g = GraphBuilder::new("one");
        let x = g.tensor("x", dtype, layout);
        let y = g.matmul("product", x, x, Precision::Ieee).expect("square");
        g.store(y, "y", dtype).expect("known");
        let graph = g.finish().expect("valid");
        graph.tensor(x).expect("its input").clone()
    }

    #[test]
    fn gaps_between_rows_are_nobodys_numbers() {
        // Rows of two with a gap of one, which holds a NaN.
        let bytes: Vec<u8> = [1.0_f32, -3.0, f32::NAN, 2.0, f32::INFINITY].iter().flat_map(|value| value.to_le_bytes()).collect();
        let seen = numbers(&tensor(DType::F32, Layout::new(&[2, 2], &[3, 1]).expect("a layout")), &bytes);
        assert_eq!(seen, Numbers { elements: 4, nonfinite: 1, first: Some(3), largest: 3.0 });
        // Cut short: the elements that are there.
        let packed = tensor(DType::F32, Layout::row_major(&[2, 2]).expect("a layout"));
        assert_eq!(numbers(&packed, &bytes[..10]), Numbers { elements: 2, nonfinite: 0, first: None, largest: 3.0 });
    }

    #[test]
    fn what_is_infinitely_far_stays_a_number() {
        let worst = |got: f64, want: f64, tolerance: f64| Compared { index: vec![0], got, want, tolerance };
        assert_eq!(distance(Some(&worst(1.5, 1.0, 0.25)), 1), Some(2.0));
        assert_eq!(distance(Some(&worst(1.0, 1.0, 0.0)), 0), Some(0.0));
        assert_eq!(distance(Some(&worst(f64::NAN, 1.0, 0.25)), 1), Some(FARTHEST));
        assert_eq!(distance(Some(&worst(f64::INFINITY, f64::INFINITY, 0.25)), 0), Some(0.0));
        assert_eq!(distance(None, 0), None);
    }
}
