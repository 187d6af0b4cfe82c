//! Executions of one device that are watched: some have their time taken, of others the end alone is looked for.
//!
//! A sampled execution has events before it and behind each part ([`super::Sampling`]). Between samples a stream has *marks*: an event behind an execution, at
//! most one a [`MARK_INTERVAL`], so that an execution that hangs is seen whichever it is, as long as it is marked or another one follows it. Nobody waits for either: whoever
//! collects asks which were passed.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metrics::counter;
use verdigris_cuda::{CaptureStatus, Context, Event, Stream};

use super::{Budget, DEVICE_TARGET, Limits, Meter, epoch, is_listening, limits, lock, sampling};

/// Samples that may be on their way; beyond it the stream is far behind, and what comes is skipped.
const MOST_PENDING: usize = 256;
/// How old the event may be that device times are counted from: times between events lose digits as they grow.
const ANCHOR_AGE: Duration = Duration::from_secs(10);
/// How long no new one is asked for after one was not passed at once.
const ANCHOR_RETRY: Duration = Duration::from_secs(1);
/// A stream has no more marks than one in this time: at some microseconds each a ten-thousandth of the host's time.
const MARK_INTERVAL: Duration = Duration::from_millis(20);
/// A stream that nothing was submitted to for so long, and that has passed all, is forgotten.
const LINE_AGE: Duration = Duration::from_secs(60);
/// Streams that have marks; beyond it those go that nothing was submitted to for longest.
const MOST_STREAMS: usize = 1024;

/// The number of the next sampled execution.
static EXECUTIONS: AtomicU64 = AtomicU64::new(1);

/// How an execution is watched.
pub(crate) enum Wants {
    /// Not at all.
    Nothing,
    /// It is submitted as it is, and [`Samples::mark`] is called behind it.
    Mark,
    /// The time of each part.
    Times(Sampled),
}

/// An execution whose time is to be taken.
pub(crate) struct Sampled {
    /// Tells the sampled executions of the process apart: what the device's spans are joined with the host's by.
    execution: u64,
    /// One before the first part, and one behind each.
    events: Vec<Event>,
}

impl Sampled {
    /// One to be put before the first part, and one behind each.
    pub(crate) fn events(&self) -> &[Event] {
        &self.events
    }

    /// What the host does for it, beside the device's spans, which are told later and have the same number.
    pub(crate) fn span(&self, graph: &str, device: &str) -> tracing::Span {
        tracing::trace_span!(target: "verdigris", "execute", execution = self.execution, graph, device)
    }
}

/// An execution whose events were put on a stream.
struct Sample {
    execution: u64,
    /// One before the first part, and one behind each.
    events: Vec<Event>,
    parts: Vec<Arc<Meter>>,
    /// The stream, as a number.
    stream: u64,
    submitted: Instant,
    /// When the device was first seen to be at it.
    begun: Option<Instant>,
    is_overdue: bool,
}

/// An event behind an execution.
struct Mark {
    event: Event,
    /// The execution's last part.
    last: Arc<Meter>,
    estimate_us: f64,
    submitted: Instant,
}

/// What is known of a stream.
struct Line {
    /// When an execution on it was last watched.
    watched: Instant,
    /// When it was last seen to have passed anything.
    progress: Option<Instant>,
    /// The mark that is asked for; it stays where it is until it is passed.
    first: Option<Mark>,
    /// The latest one behind it.
    latest: Option<Mark>,
    /// An event that may be used.
    spare: Option<Event>,
    is_overdue: bool,
}

/// An event of a stream of its own, whose time on the host is known to some microseconds.
struct Anchor {
    stream: Stream,
    event: Event,
    host_us: f64,
    made: Instant,
}

/// Where device times are counted from.
#[derive(Default)]
struct Anchors {
    anchor: Option<Anchor>,
    /// A new one is not asked for before.
    retry: Option<Instant>,
}

/// What of the device is on its way.
pub(crate) struct Samples {
    device: Arc<str>,
    context: Context,
    pending: Mutex<VecDeque<Sample>>,
    /// Events that were used and may be again.
    events: Mutex<Vec<Event>>,
    lines: Mutex<HashMap<u64, Line>>,
    /// The stream that was last found to need no mark, and when: one number of both.
    fresh: AtomicU64,
    budget: Budget,
    /// One thread reads; whoever comes meanwhile need not. No lock: a subscriber may execute, and so come again, while it is told.
    is_read: AtomicBool,
    /// Only the reader asks for it.
    anchors: Mutex<Anchors>,
    overdue: AtomicUsize,
}

/// The reader's turn.
struct Turn<'s>(&'s AtomicBool);

impl<'s> Turn<'s> {
    fn take(is_read: &'s AtomicBool) -> Option<Turn<'s>> {
        (!is_read.swap(true, Ordering::Acquire)).then_some(Turn(is_read))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Samples {
    pub(crate) fn new(device: Arc<str>, context: &Context) -> Samples {
        Samples {
            device,
            context: context.clone(),
            pending: Mutex::default(),
            events: Mutex::default(),
            lines: Mutex::default(),
            fresh: AtomicU64::new(0),
            budget: Budget::new(),
            is_read: AtomicBool::new(false),
            anchors: Mutex::default(),
            overdue: AtomicUsize::new(0),
        }
    }

    /// How an execution of so many parts is watched: `turns` counts those of its plan.
    #[inline]
    pub(crate) fn wants(&self, turns: &AtomicU64, parts: usize, stream: &Stream) -> Wants {
        if !is_listening() { Wants::Nothing } else { self.wants_now(turns, parts, stream).unwrap_or(Wants::Nothing) }
    }

    fn wants_now(&self, turns: &AtomicU64, parts: usize, stream: &Stream) -> Option<Wants> {
        let sampling = sampling();
        let turn = turns.fetch_add(1, Ordering::Relaxed);
        // The first execution of a plan meets cold caches.
        let is_due = sampling.every > 0 && (turn == 1 || turn > 0 && turn.is_multiple_of(u64::from(sampling.every)));
        let is_mark_due = self.is_mark_due(stream);
        if !is_due && !is_mark_due || parts == 0 || stream.capture_status().ok()? != CaptureStatus::None {
            return None;
        }
        if is_due {
            if self.budget.takes(sampling.per_second) && lock(&self.pending).len() < MOST_PENDING {
                return Some(Wants::Times(self.sampled(parts)?));
            }
            self.count("skipped");
        }
        is_mark_due.then_some(Wants::Mark)
    }

    /// Each execution asks. Most come on the stream of the one before, within the interval in which that was found to need none, and lock nothing.
    fn is_mark_due(&self, stream: &Stream) -> bool {
        let number = stream.raw() as u64;
        let interval = epoch().elapsed().as_micros() as u64 / MARK_INTERVAL.as_micros() as u64;
        let both = number.rotate_left(32) ^ (interval + 1);
        if self.fresh.load(Ordering::Relaxed) == both {
            return false;
        }
        let is_due = lock(&self.lines).get(&number).is_none_or(|line| line.watched.elapsed() >= MARK_INTERVAL);
        if !is_due {
            self.fresh.store(both, Ordering::Relaxed);
        }
        is_due
    }

    fn sampled(&self, parts: usize) -> Option<Sampled> {
        let mut events = lock(&self.events);
        let kept = events.len().saturating_sub(parts + 1);
        let mut taken = events.split_off(kept);
        drop(events);
        while taken.len() < parts + 1 {
            taken.push(Event::timing(&self.context).ok()?);
        }
        Some(Sampled { execution: EXECUTIONS.fetch_add(1, Ordering::Relaxed), events: taken })
    }

    fn count(&self, outcome: &'static str) {
        counter!("verdigris_samples_total", "outcome" => outcome, "device" => Arc::clone(&self.device)).increment(1);
    }

    /// Keeps an execution whose events are on their way, and reads those that were passed.
    pub(crate) fn keep(&self, Sampled { execution, events }: Sampled, parts: Vec<Arc<Meter>>, stream: &Stream) {
        self.count("taken");
        let (stream, submitted) = (stream.raw() as u64, Instant::now());
        lock(&self.pending).push_back(Sample { execution, events, parts, stream, submitted, begun: None, is_overdue: false });
        self.watched(stream, submitted, |_| {});
        self.read(&limits(), submitted);
    }

    /// Puts an event behind an execution that was submitted and is not sampled: of its last part, with the estimate of all. One that cannot be put there is left
    /// out.
    pub(crate) fn mark(&self, last: &Arc<Meter>, estimate_us: f64, stream: &Stream) {
        let (number, submitted) = (stream.raw() as u64, Instant::now());
        let Ok(event) = self.watched(number, submitted, |line| line.spare.take()).map_or_else(|| Event::ordering(&self.context), Ok) else {
            return;
        };
        // A stream that hangs is full after a thousand launches, and this waits: nothing is locked, and the earlier marks stay where whoever reads finds them.
        if event.record(stream).is_err() {
            return;
        }
        let mark = Mark { event, last: Arc::clone(last), estimate_us, submitted };
        let unused = self.watched(number, submitted, |line| {
            // The first one stays until it is passed, or of a stream that is always behind nothing would ever be known.
            let place = if line.first.is_none() { &mut line.first } else { &mut line.latest };
            let before = place.replace(mark).map(|before| before.event);
            if line.spare.is_none() { std::mem::replace(&mut line.spare, before) } else { before }
        });
        drop(unused);
    }

    /// Takes down that an execution on the stream is watched.
    fn watched<R>(&self, stream: u64, at: Instant, how: impl FnOnce(&mut Line) -> R) -> R {
        let mut lines = lock(&self.lines);
        if lines.len() >= MOST_STREAMS && !lines.contains_key(&stream) {
            let oldest = lines.iter().min_by_key(|(_, line)| line.watched).map(|(stream, _)| *stream);
            oldest.map(|oldest| lines.remove(&oldest));
        }
        let new = || Line { watched: at, progress: None, first: None, latest: None, spare: None, is_overdue: false };
        let line = lines.entry(stream).or_insert_with(new);
        line.watched = at;
        how(line)
    }

    /// Reads what was passed by the time `at`: how many executions are overdue. Where another thread is at it, or a device cannot be asked, as many as were last
    /// known to be.
    ///
    /// What it tells is of earlier executions, so that it stands in no span of the caller's: the number of the execution leads to the span that it is of.
    pub(crate) fn read(&self, limits: &Limits, at: Instant) -> usize {
        let Some(_turn) = Turn::take(&self.is_read) else { return self.overdue.load(Ordering::Relaxed) };
        // Asking whether an event was passed would break another thread's capture.
        let Ok(_relaxed) = self.context.relax_capture() else { return self.overdue.load(Ordering::Relaxed) };
        // Those who are told may take their time, and those who execute do not wait for them: nothing is locked meanwhile.
        let taken = std::mem::take(&mut *lock(&self.pending));
        let mut left = VecDeque::with_capacity(taken.len());
        let mut hanging = Vec::new();
        let (is_traced, mut is_anchored) = (tracing::enabled!(target: DEVICE_TARGET, tracing::Level::TRACE), false);
        for mut sample in taken {
            let Some(last) = sample.events.last() else { continue };
            match last.is_reached() {
                Ok(true) => {
                    self.passed(sample.stream, at);
                    if is_traced && !std::mem::replace(&mut is_anchored, true) {
                        self.anchor();
                    }
                    if self.tell(&sample, limits, is_traced).is_err() {
                        self.count("lost");
                    } else {
                        let mut events = lock(&self.events);
                        events.append(&mut sample.events);
                        events.truncate(MOST_PENDING);
                    }
                }
                Ok(false) => {
                    if self.is_overdue(&mut sample, limits, at, &hanging) {
                        hanging.push(sample.stream);
                    }
                    left.push_back(sample);
                }
                // The device has failed, and with it all that was on its way.
                Err(_) => self.count("lost"),
            }
        }
        {
            let mut pending = lock(&self.pending);
            left.append(&mut pending);
            *pending = left;
        }
        let overdue = hanging.len() + self.overdue_marks(limits, at, &hanging);
        self.overdue.store(overdue, Ordering::Relaxed);
        overdue
    }

    /// The stream was seen to have passed something.
    fn passed(&self, stream: u64, at: Instant) {
        if let Some(line) = lock(&self.lines).get_mut(&stream) {
            line.progress = Some(at);
        }
    }

    fn tell(&self, sample: &Sample, limits: &Limits, is_traced: bool) -> Result<(), verdigris_cuda::Error> {
        for (part, pair) in sample.parts.iter().zip(sample.events.windows(2)) {
            let us = pair[1].elapsed_us_since(&pair[0])?;
            part.took(us);
            if us > limits.slow_factor * part.estimate_us && us > limits.slow_least.as_secs_f64() * 1e6 {
                part.was_slow();
                tracing::warn!(
                    target: "verdigris", parent: None, event = "slow", execution = sample.execution, device = &*self.device, problem = part.name, engine = part.engine,
                    us, estimate_us = part.estimate_us
                );
            }
            if is_traced && let Some(start_us) = self.host_us(&pair[0]) {
                tracing::trace!(
                    target: DEVICE_TARGET, parent: None, execution = sample.execution, device = &*self.device, stream = sample.stream, name = part.name,
                    engine = part.engine, start_us, duration_us = us
                );
            }
        }
        Ok(())
    }

    /// When the device passed an event, in microseconds since the epoch.
    fn host_us(&self, event: &Event) -> Option<f64> {
        let anchors = lock(&self.anchors);
        let anchor = anchors.anchor.as_ref()?;
        Some(anchor.host_us + event.elapsed_us_since(&anchor.event).ok()?)
    }

    /// Has an anchor that is not old, where one can be had. Asked for once a reading, for it may wait for 200 µs.
    fn anchor(&self) {
        let mut anchors = lock(&self.anchors);
        let is_old = anchors.anchor.as_ref().is_none_or(|anchor| anchor.made.elapsed() > ANCHOR_AGE);
        if !is_old || anchors.retry.is_some_and(|retry| retry > Instant::now()) {
            return;
        }
        match self.new_anchor(anchors.anchor.as_ref().map(|old| old.stream.clone())) {
            Some(new) => *anchors = Anchors { anchor: Some(new), retry: None },
            // The old one has fewer digits, and is better than none.
            None => anchors.retry = Some(Instant::now() + ANCHOR_RETRY),
        }
    }

    fn new_anchor(&self, stream: Option<Stream>) -> Option<Anchor> {
        let stream = match stream {
            Some(stream) => stream,
            None => Stream::new(&self.context).ok()?,
        };
        let event = Event::timing(&self.context).ok()?;
        event.record(&stream).ok()?;
        // A stream without work passes its event within microseconds; where it does not, a later reading tries again.
        let until = Instant::now() + Duration::from_micros(200);
        while !event.is_reached().ok()? {
            if Instant::now() > until {
                return None;
            }
        }
        Some(Anchor { stream, event, host_us: epoch().elapsed().as_secs_f64() * 1e6, made: Instant::now() })
    }

    /// Whether an execution that the device has not ended should have been. Told of once; what waits behind another one that hangs is not.
    fn is_overdue(&self, sample: &mut Sample, limits: &Limits, at: Instant, hanging: &[u64]) -> bool {
        if sample.begun.is_none() && sample.events[0].is_reached().unwrap_or(false) {
            sample.begun = Some(at);
            self.passed(sample.stream, at);
        }
        let estimate_us: f64 = sample.parts.iter().map(|part| part.estimate_us).sum();
        let (since, least, state) = match sample.begun {
            Some(begun) => (begun, limits.overdue_least, "running"),
            None => {
                let lines = lock(&self.lines);
                let line = lines.get(&sample.stream);
                if hanging.contains(&sample.stream) || line.is_some_and(|line| line.is_overdue) {
                    return false;
                }
                (line.and_then(|line| line.progress).unwrap_or(sample.submitted).max(sample.submitted), limits.waiting_least, "waiting")
            }
        };
        let allowed = allowed(estimate_us, limits, least);
        if at.saturating_duration_since(since) < allowed {
            return false;
        }
        if !std::mem::replace(&mut sample.is_overdue, true) {
            // The part whose end was not reached.
            let behind = sample.parts.iter().zip(&sample.events[1..]).find(|(_, event)| !event.is_reached().unwrap_or(false));
            let (problem, engine) = behind.map_or(("", ""), |(part, _)| (part.name.as_str(), part.engine));
            tracing::error!(
                target: "verdigris", parent: None, event = "overdue", execution = sample.execution, device = &*self.device, problem, engine, stream = sample.stream,
                state, estimate_us, allowed_us = allowed.as_secs_f64() * 1e6
            );
        }
        true
    }

    /// How many streams, beside the `hanging` ones, have a mark that should have been passed. Each is told of once.
    fn overdue_marks(&self, limits: &Limits, at: Instant, hanging: &[u64]) -> usize {
        let mut told = Vec::new();
        let mut overdue = 0;
        lock(&self.lines).retain(|stream, line| {
            // The latest becomes the first once that was passed; of a device that has failed none is kept.
            while let Some(first) = &line.first {
                match first.event.is_reached() {
                    Ok(false) => break,
                    Ok(true) => (line.first, line.progress, line.is_overdue) = (line.latest.take(), Some(at), false),
                    Err(_) => (line.first, line.latest, line.is_overdue) = (None, None, false),
                }
            }
            let Some(first) = &line.first else { return at.saturating_duration_since(line.watched) < LINE_AGE };
            let since = line.progress.unwrap_or(first.submitted).max(first.submitted);
            let allowed = allowed(first.estimate_us, limits, limits.waiting_least);
            if at.saturating_duration_since(since) >= allowed && !hanging.contains(stream) {
                overdue += 1;
                if !std::mem::replace(&mut line.is_overdue, true) {
                    told.push((*stream, Arc::clone(&first.last), first.estimate_us, allowed));
                }
            }
            true
        });
        for (stream, last, estimate_us, allowed) in told {
            tracing::error!(
                target: "verdigris", parent: None, event = "overdue", device = &*self.device, problem = last.name, engine = last.engine, stream, state = "waiting",
                estimate_us, allowed_us = allowed.as_secs_f64() * 1e6
            );
        }
        overdue
    }
}

/// How long an execution may take, or wait.
fn allowed(estimate_us: f64, limits: &Limits, least: Duration) -> Duration {
    Duration::from_secs_f64((estimate_us * limits.overdue_factor * 1e-6).clamp(0.0, 1e9)).max(least)
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_cuda::fake;

    /// F4: the factor of the limits is the bound, not a part of it, and neither is anything told before the least time. The clock is ours.
    #[test]
    fn an_execution_is_overdue_from_so_many_times_its_estimate_on() {
        let context = fake::context();
        let stream = Stream::new(&context).expect("a stream");
        let samples = Samples::new(Arc::from("cuda:0"), &context);
        // Two parts of 250 µs and 500 µs; the device begins with the first and does not come back.
        let meter = |us| Arc::new(Meter::new("gemm", "gemm.simt", "f32".to_owned(), Arc::from("cuda:0"), "a product".to_owned(), us, None));
        fake::hang_behind(Some(1));
        let events: Vec<Event> = (0..3).map(|_| Event::timing(&context).expect("an event")).collect();
        events.iter().for_each(|event| event.record(&stream).expect("recorded"));
        let parts = vec![meter(250.0), meter(500.0)];
        let begun = Instant::now();
        lock(&samples.pending).push_back(Sample {
            execution: 1,
            events,
            parts,
            stream: 0,
            submitted: begun,
            begun: None,
            is_overdue: false,
        });
        let after = |limits: &Limits, us: u64| samples.read(limits, begun + Duration::from_micros(us));
        let limits =
            |overdue_factor, least_us| Limits { overdue_factor, overdue_least: Duration::from_micros(least_us), ..Limits::default() };
        // From when it was first seen to have begun: 750 µs times the factor.
        assert_eq!(after(&limits(4.0, 0), 0), 0);
        for (factor, bound_us) in [(4.0, 3000), (2.0, 1500), (100.0, 75_000)] {
            assert_eq!(after(&limits(factor, 0), bound_us - 1), 0, "{factor} times");
            assert_eq!(after(&limits(factor, 0), bound_us), 1, "{factor} times");
        }
        // The least time is the bound where it is longer.
        assert_eq!(after(&limits(4.0, 5000), 4999), 0);
        assert_eq!(after(&limits(4.0, 5000), 5000), 1);
        fake::hang_behind(None);
        assert_eq!(after(&limits(4.0, 0), 1_000_000), 0, "it has ended after all");
        assert!(lock(&samples.pending).is_empty());
    }

    /// F4: an execution between samples is seen to hang by the mark behind it, from when it was submitted, or its stream last passed anything.
    #[test]
    fn a_mark_that_is_not_passed_is_overdue() {
        let context = fake::context();
        let stream = Stream::new(&context).expect("a stream");
        let samples = Samples::new(Arc::from("cuda:0"), &context);
        let last = Arc::new(Meter::new("gemm", "gemm.simt", "f32".to_owned(), Arc::from("cuda:0"), "a product".to_owned(), 250.0, None));
        let limits = Limits { overdue_factor: 4.0, waiting_least: Duration::from_secs(30), ..Limits::default() };
        let begun = Instant::now();
        let after = |ms: u64| samples.read(&limits, begun + Duration::from_millis(ms));
        fake::hang_behind(Some(1));
        samples.mark(&last, 250.0, &stream);
        samples.mark(&last, 250.0, &stream);
        samples.mark(&last, 250.0, &stream);
        // The first one is passed; that the stream got so far is known from here on.
        assert_eq!(after(20_000), 0);
        assert_eq!(after(49_999), 0);
        assert_eq!(after(50_000), 1);
        // What is submitted behind it changes nothing.
        samples.mark(&last, 250.0, &stream);
        assert_eq!(after(50_001), 1);
        // A thousand times the estimate is the bound where it is longer.
        let patient = Limits { overdue_factor: 1e6, ..limits };
        assert_eq!(samples.read(&patient, begun + Duration::from_secs(269)), 0, "250 seconds from the 20th on");
        assert_eq!(samples.read(&patient, begun + Duration::from_secs(271)), 1);
        fake::hang_behind(None);
        assert_eq!(after(300_000), 0, "it has ended after all");
        assert!(lock(&samples.lines).is_empty(), "a stream that nothing is submitted to is forgotten");
    }

    #[test]
    fn a_sample_that_has_not_begun_is_overdue_in_time() {
        let context = fake::context();
        let stream = Stream::new(&context).expect("a stream");
        let samples = Samples::new(Arc::from("cuda:0"), &context);
        let meter = || Arc::new(Meter::new("gemm", "gemm.simt", "f32".to_owned(), Arc::from("cuda:0"), "a product".to_owned(), 1.0, None));
        fake::hang_behind(Some(0));
        for _ in 0..3 {
            let sampled = samples.sampled(1).expect("events");
            sampled.events().iter().for_each(|event| event.record(&stream).expect("recorded"));
            samples.keep(sampled, vec![meter()], &stream);
        }
        let begun = lock(&samples.pending)[0].submitted;
        let after = |ms: u64| samples.read(&Limits::default(), begun + Duration::from_millis(ms));
        assert_eq!(after(29_999), 0);
        assert_eq!(after(30_000), 1, "those behind it wait for it");
        assert_eq!(lock(&samples.pending).iter().map(|sample| sample.is_overdue).collect::<Vec<_>>(), [true, false, false]);
        fake::hang_behind(None);
        assert_eq!(after(30_001), 0);
    }

    /// What watching costs is bounded by time, not by executions; and a stream that captures gets no events.
    #[test]
    fn a_stream_has_no_more_than_a_mark_an_interval() {
        let context = fake::context();
        let stream = Stream::new(&context).expect("a stream");
        let samples = Samples::new(Arc::from("cuda:0"), &context);
        let last = Arc::new(Meter::new("gemm", "gemm.simt", "f32".to_owned(), Arc::from("cuda:0"), "a product".to_owned(), 1.0, None));
        let turns = AtomicU64::new(2);
        fake::set_capturing(true);
        assert!(samples.wants_now(&turns, 1, &stream).is_none());
        fake::set_capturing(false);
        let begun = Instant::now();
        let mut marks: u128 = 0;
        while begun.elapsed() < 6 * MARK_INTERVAL {
            if matches!(samples.wants_now(&turns, 1, &stream), Some(Wants::Mark)) {
                samples.mark(&last, 1.0, &stream);
                marks += 1;
            }
        }
        let most = begun.elapsed().as_millis() / MARK_INTERVAL.as_millis() + 1;
        assert!((2..=most).contains(&marks), "{marks}");
    }

    /// What an execution pays between marks, while somebody listens. The least of many rounds is taken, for other programs share the processor.
    #[test]
    fn an_execution_that_is_not_watched_costs_less_than_two_microseconds() {
        const CALLS: u32 = 100;
        let context = fake::context();
        let stream = Stream::new(&context).expect("a stream");
        let samples = Samples::new(Arc::from("cuda:0"), &context);
        let turns = AtomicU64::new(2);
        samples.watched(stream.raw() as u64, Instant::now() + Duration::from_secs(3600), |_| {});
        let mut least_ns = f64::INFINITY;
        for _ in 0..200 {
            let begun = Instant::now();
            for _ in 0..CALLS {
                assert!(samples.wants_now(std::hint::black_box(&turns), 1, &stream).is_none());
            }
            least_ns = least_ns.min(begun.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS));
        }
        eprintln!("between marks: {least_ns:.0} ns a call");
        assert!(least_ns < 2000.0, "{least_ns} ns");
    }
}
