//! What is told of after it happened, as spans: the device's times, and what was found slow, overdue or wrong.

use std::collections::VecDeque;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use opentelemetry::trace::{Span as _, SpanContext, SpanKind, Status, TraceContextExt, Tracer};
use opentelemetry::{Context, KeyValue, Value as Attribute};
use opentelemetry_sdk::trace::SdkTracer;
use serde_json::{Map, Value};
use tracing::dispatcher::WeakDispatch;
use tracing::span::{Attributes, Id};
use tracing::{Dispatch, Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer;
use tracing_subscriber::registry::LookupSpan;

use crate::fields::Fields;
use crate::observe::{DEVICE_TARGET, epoch};

/// Executions whose spans can still be found: more than are sampled in a minute at the default rate.
const MOST_EXECUTIONS: usize = 4096;

/// Makes spans of events that stand in no span, and of all that tell of a device's time. It stands outside of OpenTelemetry's own layer, which has begun a span
/// when this one is told of it.
#[derive(Debug)]
pub(super) struct SeenSpans {
    tracer: SdkTracer,
    /// The subscriber that this is a layer of, in which spans of OpenTelemetry are looked up.
    subscriber: OnceLock<WeakDispatch>,
    executions: Mutex<VecDeque<(u64, SpanContext)>>,
    /// What times of devices count from.
    epoch: SystemTime,
}

impl SeenSpans {
    pub(super) fn new(tracer: SdkTracer) -> SeenSpans {
        let since = epoch().elapsed();
        let epoch = SystemTime::now() - since;
        SeenSpans { tracer, subscriber: OnceLock::new(), executions: Mutex::default(), epoch }
    }

    /// OpenTelemetry's side of a span.
    fn context_of(&self, id: &Id) -> Option<SpanContext> {
        let subscriber = self.subscriber.get()?.upgrade()?;
        let context = tracing_opentelemetry::get_otel_context(id, &subscriber)?;
        Some(context.span().span_context().clone())
    }

    fn execution(&self, number: u64) -> Option<SpanContext> {
        let executions = self.executions.lock().unwrap_or_else(PoisonError::into_inner);
        executions.iter().rev().find(|(of, _)| *of == number).map(|(_, context)| context.clone())
    }

    fn after(&self, us: f64) -> Option<SystemTime> {
        self.epoch.checked_add(Duration::try_from_secs_f64(us * 1e-6).ok()?)
    }
}

impl<S: Subscriber + for<'span> LookupSpan<'span>> Layer<S> for SeenSpans {
    fn on_register_dispatch(&self, subscriber: &Dispatch) {
        // A layer is of one subscriber.
        let _ = self.subscriber.set(subscriber.downgrade());
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _: layer::Context<'_, S>) {
        let metadata = attributes.metadata();
        if metadata.name() != "execute" || metadata.target() != "verdigris" {
            return;
        }
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let number = fields.0.get("execution").and_then(Value::as_u64);
        if let Some((number, context)) = number.zip(self.context_of(id)) {
            let mut executions = self.executions.lock().unwrap_or_else(PoisonError::into_inner);
            if executions.len() == MOST_EXECUTIONS {
                executions.pop_front();
            }
            executions.push_back((number, context));
        }
    }

    fn on_event(&self, event: &Event<'_>, context: layer::Context<'_, S>) {
        let metadata = event.metadata();
        let is_time = metadata.target() == DEVICE_TARGET;
        let around = context.event_span(event);
        // What stands in a span is an event of that span.
        let is_lost = around.is_none() && *metadata.level() <= Level::WARN && metadata.target().starts_with("verdigris");
        if !is_time && !is_lost {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let number = |name: &str| fields.0.get(name).and_then(Value::as_f64);
        let text = |name: &str| fields.0.get(name).and_then(Value::as_str);
        let (start, end) = if is_time {
            let (Some(start_us), Some(duration_us)) = (number("start_us"), number("duration_us")) else { return };
            let Some(both) = self.after(start_us).zip(self.after(start_us + duration_us)) else { return };
            both
        } else {
            let seen = SystemTime::now();
            (seen, seen)
        };
        let submitted = fields.0.get("execution").and_then(Value::as_u64).and_then(|number| self.execution(number));
        let parent = submitted.or_else(|| around.and_then(|span| self.context_of(&span.id())));
        let parent = parent.map_or_else(Context::new, |parent| Context::new().with_remote_span_context(parent));
        // Names are few: engines and kinds of events, and no shapes.
        let name = text(if is_time { "engine" } else { "event" }).unwrap_or(metadata.name()).to_owned();
        let builder = self.tracer.span_builder(name).with_kind(SpanKind::Internal).with_start_time(start);
        let mut span = builder.with_attributes(attributes_of(&fields.0)).start_with_context(&self.tracer, &parent);
        if *metadata.level() == Level::ERROR {
            span.set_status(Status::error(text("message").unwrap_or_default().to_owned()));
        }
        span.end_with_timestamp(end);
    }
}

/// Fields as attributes; the times of a span are its own.
fn attributes_of(fields: &Map<String, Value>) -> Vec<KeyValue> {
    let value = |value: &Value| match value {
        Value::Number(number) => number.as_i64().map(Attribute::I64).or_else(|| number.as_f64().map(Attribute::F64)),
        Value::Bool(is) => Some(Attribute::Bool(*is)),
        Value::String(text) => Some(Attribute::from(text.clone())),
        _ => None,
    };
    let are_kept = fields.iter().filter(|(name, _)| !matches!(name.as_str(), "start_us" | "duration_us"));
    are_kept.filter_map(|(name, field)| Some(KeyValue::new(name.clone(), value(field)?))).collect()
}
