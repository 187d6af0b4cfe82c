//! Series as text: what Prometheus scrapes, and JSON.

use std::fmt::Write as _;
use std::sync::Arc;

use serde_json::{Value as Json, json};

use crate::observe::{MetricKind, Unit};
use crate::registry::{Family, REFUSED, Registry, Series, Value, read};

/// Which text of Prometheus.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Format {
    /// The text format 0.0.4, which every scraper reads.
    #[default]
    Text,
    /// OpenMetrics 1.0, which has units.
    OpenMetrics,
}

impl Format {
    /// The type of the content, as HTTP has it.
    pub const fn content_type(self) -> &'static str {
        match self {
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// What a header `Accept` asks for: OpenMetrics if it is named, else the plain text.
    pub fn accepted(accept: &str) -> Format {
        if accept.contains("application/openmetrics-text") { Format::OpenMetrics } else { Format::Text }
    }
}

/// A family at one moment, for exporters that do not speak text.
#[cfg_attr(not(feature = "otlp"), expect(dead_code, reason = "only the push of OTLP asks for families"))]
pub(crate) fn families(registry: &Registry) -> Vec<(Arc<Family>, Vec<Arc<Series>>)> {
    let families: Vec<Arc<Family>> = read(&registry.families).values().cloned().collect();
    let with_series = families.into_iter().map(|family| {
        let series = read(&family.series).by_text.values().cloned().collect();
        (family, series)
    });
    with_series.filter(|(_, series): &(_, Vec<_>)| !series.is_empty()).collect()
}

impl Registry {
    /// All series in the plain text format: [`Registry::render`] with [`Format::Text`].
    pub fn text(&self) -> String {
        let mut text = String::new();
        self.render(Format::Text, &mut text);
        text
    }

    /// Appends all series as text. It takes about a microsecond a line; recording goes on meanwhile.
    pub fn render(&self, format: Format, text: &mut String) {
        let families: Vec<Arc<Family>> = read(&self.families).values().cloned().collect();
        // Writing to a string does not fail.
        let _ = families.iter().try_for_each(|family| write_family(family, format, text));
        let _ = write_head(text, format, REFUSED, MetricKind::Counter, Unit::Count, refused_help());
        let _ = writeln!(text, "{REFUSED} {}", self.refused_count());
        if format == Format::OpenMetrics {
            text.push_str("# EOF\n");
        }
    }

    /// All series as JSON: `{"metrics": [{"name", "kind", "unit", "help", "series": [{"labels", "value"}]}]}`; of histograms, `count`, `sum` and
    /// `buckets` (pairs of an upper bound and how many values are not above it) in the place of `value`.
    pub fn json(&self) -> Json {
        let families: Vec<Arc<Family>> = read(&self.families).values().cloned().collect();
        let mut metrics: Vec<Json> = families.iter().filter_map(|family| json_family(family)).collect();
        metrics.push(json!({
            "name": REFUSED, "kind": "counter", "unit": "count", "help": refused_help(),
            "series": [{ "labels": {}, "value": self.refused_count() }],
        }));
        json!({ "metrics": metrics })
    }
}

fn refused_help() -> &'static str {
    crate::observe::metric_of(REFUSED).map_or("", |metric| metric.help)
}

fn write_head(text: &mut String, format: Format, name: &str, kind: MetricKind, unit: Unit, help: &str) -> std::fmt::Result {
    let name = match (format, kind) {
        // The family of a counter has no suffix there, its sample has.
        (Format::OpenMetrics, MetricKind::Counter) => name.strip_suffix("_total").unwrap_or(name),
        _ => name,
    };
    if !help.is_empty() {
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        let help = if format == Format::OpenMetrics { help.replace('"', "\\\"") } else { help };
        writeln!(text, "# HELP {name} {help}")?;
    }
    writeln!(text, "# TYPE {name} {}", kind.word())?;
    let unit = unit_word(unit);
    if format == Format::OpenMetrics && !unit.is_empty() && name.strip_suffix(unit).is_some_and(|stem| stem.ends_with('_')) {
        writeln!(text, "# UNIT {name} {unit}")?;
    }
    Ok(())
}

fn unit_word(unit: Unit) -> &'static str {
    match unit {
        Unit::Count => "",
        Unit::Seconds => "seconds",
        Unit::Bytes => "bytes",
        Unit::Ratio => "ratio",
        Unit::Hertz => "hertz",
        Unit::Celsius => "celsius",
        Unit::Watts => "watts",
    }
}

fn write_family(family: &Family, format: Format, text: &mut String) -> std::fmt::Result {
    let map = read(&family.series);
    let is_there = |series: &Series| !matches!(&series.value, Value::Gauge(newest) if newest.get().is_none());
    let mut lines = map.by_text.iter().filter(|(_, series)| is_there(series)).peekable();
    if lines.peek().is_none() {
        return Ok(());
    }
    write_head(text, format, &family.name, family.kind, family.unit, &read(&family.help))?;
    for (labels, series) in lines {
        let name = &family.name;
        match &series.value {
            Value::Counter(total) => {
                let suffix = if format == Format::OpenMetrics && !name.ends_with("_total") { "_total" } else { "" };
                write_line(text, name, suffix, labels, "")?;
                writeln!(text, " {}", total.get())?;
            }
            Value::Gauge(newest) => {
                // It may have gone since it was asked for the first time.
                let Some(value) = newest.get() else { continue };
                write_line(text, name, "", labels, "")?;
                writeln!(text, " {}", Number(value))?;
            }
            Value::Histogram(counts) => {
                let mut sum = 0;
                let ends = counts.bounds.iter().map(|bound| format!("{bound:?}")).chain(["+Inf".to_owned()]);
                for (bound, count) in ends.zip(counts.counts()) {
                    sum += count;
                    write_line(text, name, "_bucket", labels, &bound)?;
                    writeln!(text, " {sum}")?;
                }
                write_line(text, name, "_sum", labels, "")?;
                writeln!(text, " {}", Number(counts.sum()))?;
                write_line(text, name, "_count", labels, "")?;
                writeln!(text, " {sum}")?;
            }
        }
    }
    Ok(())
}

/// `name_suffix{labels,le="bound"}`.
fn write_line(text: &mut String, name: &str, suffix: &str, labels: &str, bound: &str) -> std::fmt::Result {
    text.write_str(name)?;
    text.write_str(suffix)?;
    match (labels.is_empty(), bound.is_empty()) {
        (true, true) => Ok(()),
        (false, true) => write!(text, "{{{labels}}}"),
        (true, false) => write!(text, "{{le=\"{bound}\"}}"),
        (false, false) => write!(text, "{{{labels},le=\"{bound}\"}}"),
    }
}

/// A number as Prometheus spells it.
struct Number(f64);

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            value if value == f64::INFINITY => f.write_str("+Inf"),
            value if value == f64::NEG_INFINITY => f.write_str("-Inf"),
            value if value.abs() >= 1e17 || (value != 0.0 && value.abs() < 1e-5) => write!(f, "{value:e}"),
            value => write!(f, "{value}"),
        }
    }
}

fn json_family(family: &Family) -> Option<Json> {
    let map = read(&family.series);
    let series: Vec<Json> = map.by_text.values().filter_map(|series| json_series(series)).collect();
    if series.is_empty() {
        return None;
    }
    let unit = if family.unit == Unit::Count { "count" } else { unit_word(family.unit) };
    Some(json!({ "name": &*family.name, "kind": family.kind.word(), "unit": unit, "help": &**read(&family.help), "series": series }))
}

fn json_series(series: &Series) -> Option<Json> {
    let labels: serde_json::Map<String, Json> =
        series.labels.iter().map(|(name, value)| (name.to_string(), Json::from(&**value))).collect();
    Some(match &series.value {
        Value::Counter(total) => json!({ "labels": labels, "value": total.get() }),
        Value::Gauge(newest) => json!({ "labels": labels, "value": newest.get()? }),
        Value::Histogram(counts) => {
            let mut sum = 0;
            let mut sums = Vec::new();
            for count in counts.counts() {
                sum += count;
                sums.push(sum);
            }
            let buckets: Vec<Json> = counts.bounds.iter().zip(&sums).map(|(bound, sum)| json!([bound, sum])).collect();
            json!({ "labels": labels, "count": sum, "sum": counts.sum(), "buckets": buckets })
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Bounds;
    use metrics::{Key, Label, Level, Metadata, Recorder};

    const WHERE: Metadata<'static> = Metadata::new("tests", Level::INFO, None);

    fn filled() -> Registry {
        let registry = Registry::new(Bounds::default());
        let device = |name: &'static str, value: &'static str| Key::from_parts(name, vec![Label::new("device", value)]);
        registry.register_counter(&device("verdigris_plans_total", "cpu"), &WHERE).increment(2);
        registry.register_gauge(&device("verdigris_gpu_power_watts", "a\"b\\c\nd"), &WHERE).set(123.25);
        let seconds = registry.register_histogram(&device("verdigris_plan_seconds", "cpu"), &WHERE);
        seconds.record(1.5e-5);
        seconds.record(400.0);
        registry.describe_counter("application_jobs".into(), None, "jobs \\ of\nmine".into());
        registry.register_counter(&Key::from_name("application_jobs"), &WHERE).increment(1);
        registry
    }

    #[test]
    fn text_is_what_prometheus_documents() {
        let text = filled().text();
        let expected = "# HELP application_jobs jobs \\\\ of\\nmine\n# TYPE application_jobs counter\napplication_jobs 1\n\
            # HELP verdigris_gpu_power_watts power drawn\n# TYPE verdigris_gpu_power_watts gauge\n\
            verdigris_gpu_power_watts{device=\"a\\\"b\\\\c\\nd\"} 123.25\n\
            # HELP verdigris_plan_seconds time of planning a graph, kernels included\n# TYPE verdigris_plan_seconds histogram\n\
            verdigris_plan_seconds_bucket{device=\"cpu\",le=\"1e-5\"} 0\n\
            verdigris_plan_seconds_bucket{device=\"cpu\",le=\"2e-5\"} 1\n";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.contains("verdigris_plan_seconds_bucket{device=\"cpu\",le=\"300.0\"} 1\n"), "{text}");
        assert!(text.contains("verdigris_plan_seconds_bucket{device=\"cpu\",le=\"+Inf\"} 2\n"), "{text}");
        assert!(text.contains("verdigris_plan_seconds_sum{device=\"cpu\"} 400.000015\nverdigris_plan_seconds_count{device=\"cpu\"} 2\n"));
        assert!(text.ends_with("# TYPE verdigris_series_refused_total counter\nverdigris_series_refused_total 0\n"), "{text}");
    }

    #[test]
    fn openmetrics_has_units_bare_counters_and_an_end() {
        let mut text = String::new();
        filled().render(Format::OpenMetrics, &mut text);
        assert!(text.contains("# TYPE application_jobs counter\napplication_jobs_total 1\n"), "{text}");
        assert!(text.contains("# TYPE verdigris_plans counter\nverdigris_plans_total{device=\"cpu\"} 2\n"), "{text}");
        assert!(text.contains("# TYPE verdigris_plan_seconds histogram\n# UNIT verdigris_plan_seconds seconds\n"), "{text}");
        assert!(text.ends_with("verdigris_series_refused_total 0\n# EOF\n"), "{text}");
        assert_eq!(Format::accepted("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"), Format::OpenMetrics);
        assert_eq!(Format::accepted("*/*"), Format::Text);
    }

    #[test]
    fn numbers_are_spelled_for_scrapers() {
        let spelled = [0.0, 1.0, 2.5e-6, 1e300, f64::INFINITY, -0.125, 85899345920.0].map(|value| Number(value).to_string());
        assert_eq!(spelled, ["0", "1", "2.5e-6", "1e300", "+Inf", "-0.125", "85899345920"]);
    }

    #[test]
    fn json_has_the_same_values() {
        let json = filled().json();
        let metrics = json["metrics"].as_array().expect("an array");
        let plan = metrics.iter().find(|metric| metric["name"] == "verdigris_plan_seconds").expect("is there");
        assert_eq!((&plan["unit"], &plan["kind"]), (&json!("seconds"), &json!("histogram")));
        assert_eq!((&plan["series"][0]["count"], &plan["series"][0]["labels"]["device"]), (&json!(2), &json!("cpu")));
        assert_eq!(plan["series"][0]["buckets"][1], json!([2e-5, 1]));
        assert_eq!(metrics.last().map(|metric| &metric["name"]), Some(&json!(REFUSED)));
    }
}
