//! The recorder behind the facade `metrics`: series with fixed buckets, in bounded number.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use metrics::{Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString};

use crate::buckets;
use crate::observe::{METRICS, MetricKind, Unit, metric_of};

/// The counter of what was not kept.
pub(crate) const REFUSED: &str = "verdigris_series_refused_total";

/// How much a [`Registry`] keeps. What goes beyond is counted in `verdigris_series_refused_total` and not kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bounds {
    /// Label sets of one metric.
    pub series_per_metric: usize,
    /// Label sets of all metrics.
    pub series: usize,
    /// Metrics besides those of the library's table: an application may use the facade for its own.
    pub other_metrics: usize,
    /// Text of one label set: names and values.
    pub label_bytes: usize,
}

impl Default for Bounds {
    /// 512 label sets a metric, 4096 in all, 256 other metrics, 1024 bytes of labels.
    fn default() -> Bounds {
        Bounds { series_per_metric: 512, series: 4096, other_metrics: 256, label_bytes: 1024 }
    }
}

/// Every series of a process: a [`Recorder`] of the facade `metrics` that exporters read.
///
/// A histogram is an array of counts, so memory depends on how many label sets there are and not on how often they are recorded. The number of
/// label sets is bounded by [`Bounds`]; values beyond are counted and dropped.
///
/// ```
/// use metrics::{Key, Level, Metadata, Recorder};
/// use verdigris_telemetry::{Bounds, Registry};
///
/// let registry = Registry::new(Bounds::default());
/// let key = Key::from_parts("verdigris_plans_total", vec![metrics::Label::new("device", "cpu")]);
/// registry.register_counter(&key, &Metadata::new("doc", Level::INFO, None)).increment(3);
/// assert!(registry.text().contains("verdigris_plans_total{device=\"cpu\"} 3"));
/// ```
#[derive(Debug)]
pub struct Registry {
    bounds: Bounds,
    /// By name; what the table has is there from the beginning.
    pub(crate) families: RwLock<BTreeMap<Box<str>, Arc<Family>>>,
    series: AtomicUsize,
    refused: Arc<Refused>,
}

/// A metric with its series.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) name: Box<str>,
    pub(crate) kind: MetricKind,
    pub(crate) unit: Unit,
    pub(crate) help: RwLock<Box<str>>,
    bounds: &'static [f64],
    pub(crate) series: RwLock<Map>,
}

/// Series by their labels. A key whose labels stand in another order than they did first is found by `by_text`.
#[derive(Debug, Default)]
pub(crate) struct Map {
    by_key: HashMap<Key, Arc<Series>>,
    pub(crate) by_text: BTreeMap<Box<str>, Arc<Series>>,
}

/// Names with their values.
pub(crate) type Labels = Box<[(Box<str>, Box<str>)]>;

/// One label set with its value.
#[derive(Debug)]
pub(crate) struct Series {
    /// In the order of their names.
    pub(crate) labels: Labels,
    pub(crate) value: Value,
}

#[derive(Debug)]
pub(crate) enum Value {
    Counter(Arc<Total>),
    Gauge(Arc<Newest>),
    Histogram(Arc<Counts>),
}

/// A counter.
#[derive(Debug, Default)]
pub(crate) struct Total(AtomicU64);

impl Total {
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl CounterFn for Total {
    fn increment(&self, value: u64) {
        self.0.fetch_add(value, Ordering::Relaxed);
    }

    fn absolute(&self, value: u64) {
        self.0.fetch_max(value, Ordering::Relaxed);
    }
}

/// A gauge, as bits of an f64. NaN is no value: exporters leave the series out.
#[derive(Debug)]
pub(crate) struct Newest(AtomicU64);

impl Newest {
    pub(crate) fn get(&self) -> Option<f64> {
        Some(f64::from_bits(self.0.load(Ordering::Relaxed))).filter(|value| !value.is_nan())
    }

    fn change(&self, by: f64) {
        let change = |bits| {
            let old = f64::from_bits(bits);
            Some((if old.is_nan() { by } else { old + by }).to_bits())
        };
        // The closure always gives a value, so this does not fail.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
    }
}

impl GaugeFn for Newest {
    fn increment(&self, value: f64) {
        self.change(value);
    }

    fn decrement(&self, value: f64) {
        self.change(-value);
    }

    fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Ordering::Relaxed);
    }
}

/// A histogram: how many values fell into which bucket.
#[derive(Debug)]
pub(crate) struct Counts {
    pub(crate) bounds: &'static [f64],
    /// One more than there are bounds: the last takes what is beyond them.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Counts {
    fn new(bounds: &'static [f64]) -> Counts {
        Counts { bounds, counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(), sum: AtomicU64::new(0) }
    }

    /// Counts of the buckets, each without those before it.
    pub(crate) fn counts(&self) -> impl Iterator<Item = u64> {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed))
    }

    pub(crate) fn sum(&self) -> f64 {
        f64::from_bits(self.sum.load(Ordering::Relaxed))
    }
}

impl HistogramFn for Counts {
    fn record(&self, value: f64) {
        self.record_many(value, 1);
    }

    fn record_many(&self, value: f64, count: usize) {
        // NaN is in no bucket, and would be the sum for ever.
        if value.is_nan() {
            return;
        }
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(count as u64, Ordering::Relaxed);
        if value.is_finite() {
            let add = |bits| Some((f64::from_bits(bits) + value * count as f64).to_bits());
            // The closure always gives a value, so this does not fail.
            let _ = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        }
    }
}

/// Stands for every series beyond the bounds.
#[derive(Debug, Default)]
struct Refused(AtomicU64);

impl CounterFn for Refused {
    fn increment(&self, _: u64) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn absolute(&self, _: u64) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl GaugeFn for Refused {
    fn increment(&self, _: f64) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn decrement(&self, _: f64) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn set(&self, _: f64) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl HistogramFn for Refused {
    fn record(&self, _: f64) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn record_many(&self, _: f64, count: usize) {
        self.0.fetch_add(count as u64, Ordering::Relaxed);
    }
}

impl Registry {
    /// An empty registry that keeps at most so much.
    pub fn new(bounds: Bounds) -> Registry {
        let families = METRICS.iter().filter(|metric| metric.name != REFUSED).map(|metric| {
            let family = Family {
                name: metric.name.into(),
                kind: metric.kind,
                unit: metric.unit,
                help: RwLock::new(metric.help.into()),
                bounds: if metric.kind == MetricKind::Histogram { buckets::of(metric) } else { &[] },
                series: RwLock::default(),
            };
            (family.name.clone(), Arc::new(family))
        });
        Registry { bounds, families: RwLock::new(families.collect()), series: AtomicUsize::new(0), refused: Arc::default() }
    }

    /// How many label sets are kept.
    pub fn series_count(&self) -> usize {
        self.series.load(Ordering::Relaxed)
    }

    /// How many values were not kept.
    pub fn refused_count(&self) -> u64 {
        self.refused.0.load(Ordering::Relaxed)
    }

    /// The family, made if there is room; none where the name stands for another kind of metric, or cannot be a name.
    fn family(&self, name: &str, kind: MetricKind) -> Option<Arc<Family>> {
        if let Some(family) = read(&self.families).get(name) {
            return (family.kind == kind).then(|| Arc::clone(family));
        }
        if !is_metric_name(name) || name.len() > self.bounds.label_bytes || name == REFUSED {
            return None;
        }
        let mut families = write(&self.families);
        if let Some(family) = families.get(name) {
            return (family.kind == kind).then(|| Arc::clone(family));
        }
        // One of a histogram's lines may not be another metric.
        if families.len() + 1 >= METRICS.len() + self.bounds.other_metrics || clashes(&families, name, kind) {
            return None;
        }
        let family = Arc::new(Family {
            name: name.into(),
            kind,
            unit: Unit::Count,
            help: RwLock::default(),
            bounds: if kind == MetricKind::Histogram { buckets::of_name(name) } else { &[] },
            series: RwLock::default(),
        });
        families.insert(name.into(), Arc::clone(&family));
        Some(family)
    }

    fn series(&self, key: &Key, kind: MetricKind) -> Option<Arc<Series>> {
        let family = self.family(key.name(), kind)?;
        if let Some(series) = read(&family.series).by_key.get(key) {
            return Some(Arc::clone(series));
        }
        let labels = labels(key, self.bounds.label_bytes)?;
        let text: Box<str> = label_text(&labels).into();
        let mut map = write(&family.series);
        if let Some(series) = map.by_text.get(&text) {
            return Some(Arc::clone(series));
        }
        if map.by_text.len() >= self.bounds.series_per_metric {
            return None;
        }
        let room = |count: usize| (count < self.bounds.series).then_some(count + 1);
        self.series.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).ok()?;
        let value = match kind {
            MetricKind::Counter => Value::Counter(Arc::default()),
            MetricKind::Gauge => Value::Gauge(Arc::new(Newest(AtomicU64::new(f64::NAN.to_bits())))),
            MetricKind::Histogram => Value::Histogram(Arc::new(Counts::new(family.bounds))),
        };
        let series = Arc::new(Series { labels, value });
        map.by_key.insert(key.to_retained(), Arc::clone(&series));
        map.by_text.insert(text, Arc::clone(&series));
        Some(series)
    }

    /// Keeps an application's words about a metric of its own. Those of the table stay.
    fn describe(&self, name: &KeyName, kind: MetricKind, help: &SharedString) {
        if metric_of(name.as_str()).is_some() {
            return;
        }
        if let Some(family) = self.family(name.as_str(), kind) {
            let words: String = help.chars().take(self.bounds.label_bytes).collect();
            *write(&family.help) = words.into();
        }
    }
}

impl Recorder for Registry {
    fn describe_counter(&self, key: KeyName, _: Option<metrics::Unit>, description: SharedString) {
        self.describe(&key, MetricKind::Counter, &description);
    }

    fn describe_gauge(&self, key: KeyName, _: Option<metrics::Unit>, description: SharedString) {
        self.describe(&key, MetricKind::Gauge, &description);
    }

    fn describe_histogram(&self, key: KeyName, _: Option<metrics::Unit>, description: SharedString) {
        self.describe(&key, MetricKind::Histogram, &description);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        match self.series(key, MetricKind::Counter).as_deref() {
            Some(Series { value: Value::Counter(total), .. }) => Counter::from_arc(Arc::clone(total)),
            _ => Counter::from_arc(Arc::clone(&self.refused)),
        }
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        match self.series(key, MetricKind::Gauge).as_deref() {
            Some(Series { value: Value::Gauge(newest), .. }) => Gauge::from_arc(Arc::clone(newest)),
            _ => Gauge::from_arc(Arc::clone(&self.refused)),
        }
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        match self.series(key, MetricKind::Histogram).as_deref() {
            Some(Series { value: Value::Histogram(counts), .. }) => Histogram::from_arc(Arc::clone(counts)),
            _ => Histogram::from_arc(Arc::clone(&self.refused)),
        }
    }
}

/// Labels in the order of their names; none where they are too long, stand twice, or cannot be labels.
fn labels(key: &Key, most_bytes: usize) -> Option<Labels> {
    let bytes: usize = key.labels().map(|label| label.key().len() + label.value().len()).sum();
    if bytes > most_bytes {
        return None;
    }
    let mut labels: Vec<(Box<str>, Box<str>)> = key.labels().map(|label| (label.key().into(), label.value().into())).collect();
    labels.sort();
    let is_good = |name: &str| is_label_name(name) && name != "le" && name != "quantile";
    let are_good = labels.iter().all(|(name, _)| is_good(name)) && labels.windows(2).all(|pair| pair[0].0 != pair[1].0);
    are_good.then(|| labels.into())
}

/// `a="x",b="y"`, with what has a meaning of its own escaped.
fn label_text(labels: &[(Box<str>, Box<str>)]) -> String {
    let mut text = String::new();
    for (name, value) in labels {
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(name);
        text.push_str("=\"");
        for letter in value.chars() {
            match letter {
                '\\' => text.push_str("\\\\"),
                '"' => text.push_str("\\\""),
                '\n' => text.push_str("\\n"),
                letter => text.push(letter),
            }
        }
        // Writing to a string does not fail.
        let _ = text.write_char('"');
    }
    text
}

fn is_metric_name(name: &str) -> bool {
    let is_start = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_' || byte == b':';
    name.bytes().next().is_some_and(is_start) && name.bytes().all(|byte| is_start(byte) || byte.is_ascii_digit())
}

fn is_label_name(name: &str) -> bool {
    is_metric_name(name) && !name.contains(':') && !name.starts_with("__")
}

/// The names that a metric's lines have in either format: a histogram's end in `_bucket`, `_sum` and `_count`, and OpenMetrics tells the type of a counter by
/// its name without the end `_total`, and its values with it.
fn names_of_lines(name: &str, kind: MetricKind) -> Vec<String> {
    match kind {
        MetricKind::Gauge => vec![name.to_owned()],
        MetricKind::Counter => {
            let plain = name.strip_suffix("_total").unwrap_or(name);
            vec![plain.to_owned(), format!("{plain}_total")]
        }
        MetricKind::Histogram => ["", "_bucket", "_sum", "_count"].iter().map(|end| format!("{name}{end}")).collect(),
    }
}

/// Whether lines of a new metric would have the name of another's.
fn clashes(families: &BTreeMap<Box<str>, Arc<Family>>, name: &str, kind: MetricKind) -> bool {
    let own = names_of_lines(name, kind);
    let known = families.values().map(|family| (&*family.name, family.kind)).chain([(REFUSED, MetricKind::Counter)]);
    known.flat_map(|(name, kind)| names_of_lines(name, kind)).any(|taken| own.contains(&taken))
}

pub(crate) fn read<T>(lock: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    // What stands behind these locks is whole between any two statements.
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn write<T>(lock: &RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use metrics::{Label, Level};

    const WHERE: Metadata<'static> = Metadata::new("tests", Level::INFO, None);

    fn key(name: &'static str, labels: &[(&'static str, String)]) -> Key {
        Key::from_parts(name, labels.iter().map(|(name, value)| Label::new(*name, value.clone())).collect::<Vec<_>>())
    }

    #[test]
    fn ten_thousand_label_sets_of_one_metric_are_bounded() {
        let registry = Registry::new(Bounds::default());
        for shape in 0..10_000 {
            let key = key("verdigris_device_seconds", &[("op", format!("gemm {shape}")), ("device", "cpu".to_owned())]);
            registry.register_histogram(&key, &WHERE).record(1e-3);
        }
        assert_eq!(registry.series_count(), 512);
        assert_eq!(registry.refused_count(), 10_000 - 512);
        assert_eq!(registry.text().matches("verdigris_device_seconds_count").count(), 512);
        assert!(registry.text().contains("verdigris_series_refused_total 9488\n"));
    }

    #[test]
    fn series_of_all_metrics_are_bounded_together() {
        let registry = Registry::new(Bounds { series_per_metric: 10, series: 25, ..Bounds::default() });
        for name in ["verdigris_plans_total", "verdigris_pool_grown_total", "verdigris_workspace_failures_total", "verdigris_rest_total"] {
            for device in 0..20 {
                registry.register_counter(&key(name, &[("device", format!("cuda:{device}"))]), &WHERE).increment(1);
            }
        }
        assert_eq!((registry.series_count(), registry.refused_count()), (25, 80 - 25));
        // What was admitted goes on.
        registry.register_counter(&key("verdigris_plans_total", &[("device", "cuda:3".to_owned())]), &WHERE).increment(1);
        assert!(registry.text().contains("verdigris_plans_total{device=\"cuda:3\"} 2\n"));
    }

    #[test]
    fn other_metrics_are_bounded_too() {
        let registry = Registry::new(Bounds { other_metrics: 3, ..Bounds::default() });
        for number in 0..100 {
            let key = Key::from_name(format!("application_{number}"));
            registry.register_gauge(&key, &WHERE).set(1.0);
        }
        assert_eq!((registry.series_count(), registry.refused_count()), (3, 97));
    }

    #[test]
    fn order_of_labels_makes_no_second_series() {
        let registry = Registry::new(Bounds::default());
        let (op, device) = (("op", "gemm".to_owned()), ("device", "cpu".to_owned()));
        for labels in [[op.clone(), device.clone()], [device, op]] {
            registry.register_counter(&key("verdigris_choice_switches_total", &labels), &WHERE).increment(1);
        }
        assert_eq!(registry.series_count(), 1);
        assert!(registry.text().contains("verdigris_choice_switches_total{device=\"cpu\",op=\"gemm\"} 2\n"));
    }

    #[test]
    fn what_cannot_be_told_is_refused_and_counted() {
        let registry = Registry::new(Bounds::default());
        let refuse = |key: &Key| {
            let before = registry.refused_count();
            registry.register_gauge(key, &WHERE).set(1.0);
            assert_eq!(registry.refused_count(), before + 1, "{key}");
        };
        refuse(&key("verdigris_gpu_up", &[("device", "x".repeat(2000))]));
        refuse(&key("verdigris_gpu_up", &[("de vice", "x".to_owned())]));
        refuse(&key("verdigris_gpu_up", &[("le", "1".to_owned())]));
        refuse(&key("verdigris_gpu_up", &[("device", "a".to_owned()), ("device", "b".to_owned())]));
        refuse(&key("no name", &[]));
        refuse(&key("", &[]));
        refuse(&key("verdigris_plans_total", &[]));
        refuse(&key("verdigris_plan_seconds_count", &[]));
        refuse(&key(REFUSED, &[]));
        assert_eq!(registry.series_count(), 0);
    }

    /// OpenMetrics has one line of a type for each name, which of a counter lacks the end `_total`.
    #[test]
    fn no_name_of_a_line_stands_for_two_metrics() {
        let is_kept = |registry: &Registry, name: &'static str, kind: MetricKind| {
            let (key, before) = (key(name, &[]), registry.refused_count());
            match kind {
                MetricKind::Counter => registry.register_counter(&key, &WHERE).increment(1),
                MetricKind::Gauge => registry.register_gauge(&key, &WHERE).set(1.0),
                MetricKind::Histogram => registry.register_histogram(&key, &WHERE).record(1.0),
            }
            registry.refused_count() == before
        };
        use MetricKind::{Counter, Gauge, Histogram};
        for (one, other, are_two) in [
            (("foo_total", Counter), ("foo", Gauge), false),
            (("foo_total", Counter), ("foo", Histogram), false),
            (("foo_total", Counter), ("foo", Counter), false),
            (("foo_total", Gauge), ("foo", Counter), false),
            (("foo_sum_total", Counter), ("foo", Histogram), false),
            (("foo_count", Gauge), ("foo", Histogram), false),
            (("foo_total", Counter), ("foo_total", Gauge), false),
            (("foo_total", Counter), ("foo_bar", Gauge), true),
            (("foo_sum", Gauge), ("foo", Gauge), true),
            (("foo_total", Counter), ("foo_total_bytes", Histogram), true),
        ] {
            for (first, second) in [(one, other), (other, one)] {
                let registry = Registry::new(Bounds::default());
                assert!(is_kept(&registry, first.0, first.1), "{first:?} alone");
                assert_eq!(is_kept(&registry, second.0, second.1), are_two, "{second:?} behind {first:?}");
                let mut page = String::new();
                registry.render(crate::Format::OpenMetrics, &mut page);
                let mut types: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
                let count = types.len();
                types.sort_unstable();
                types.dedup();
                assert_eq!(types.len(), count, "{page}");
            }
        }
        let registry = Registry::new(Bounds::default());
        for name in ["verdigris_plans", "verdigris_series_refused"] {
            assert!(!is_kept(&registry, name, Gauge) && !is_kept(&registry, name, Histogram), "{name}");
        }
    }

    #[test]
    fn a_value_on_a_bound_is_in_the_bucket_of_that_bound() {
        let counts = Counts::new(&[1.0, 2.0]);
        for value in [0.5, 1.0, 1.5, 2.0, 3.0, f64::INFINITY, f64::NAN, -1.0] {
            counts.record(value);
        }
        assert_eq!(counts.counts().collect::<Vec<_>>(), [3, 2, 2]);
        assert_eq!(counts.sum(), 7.0, "neither NaN nor infinity spoils the sum");
    }

    #[test]
    fn a_gauge_without_a_value_is_absent() {
        let registry = Registry::new(Bounds::default());
        let gauge = registry.register_gauge(&key("verdigris_gpu_up", &[("device", "cuda:0".to_owned())]), &WHERE);
        assert!(!registry.text().contains("verdigris_gpu_up{"));
        gauge.increment(2.0);
        gauge.decrement(1.0);
        assert!(registry.text().contains("verdigris_gpu_up{device=\"cuda:0\"} 1\n"));
        gauge.set(f64::NAN);
        assert!(!registry.text().contains("verdigris_gpu_up{"));
    }

    #[test]
    fn threads_lose_nothing() {
        let registry = Registry::new(Bounds::default());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for number in 0..1000 {
                        let labels = [("op", format!("op{}", number % 50)), ("device", "cpu".to_owned())];
                        registry.register_counter(&key("verdigris_nonfinite_total", &labels), &WHERE).increment(1);
                        registry.register_histogram(&key("verdigris_drift_ratio", &labels), &WHERE).record(0.5);
                    }
                });
            }
        });
        assert_eq!((registry.series_count(), registry.refused_count()), (100, 0));
        assert!(registry.text().contains("verdigris_nonfinite_total{device=\"cpu\",op=\"op7\"} 160\n"));
        assert!(registry.text().contains("verdigris_drift_ratio_sum{device=\"cpu\",op=\"op7\"} 80\n"));
    }
}
