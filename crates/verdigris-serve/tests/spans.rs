//! What is told of a request and what is told of its batch can be joined.

mod kit;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use kit::{affine_signature, connect, json, json_request, served, start};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use verdigris_serve::Limits;

#[derive(Clone, Default, Debug)]
struct Span {
    name: &'static str,
    fields: BTreeMap<&'static str, String>,
    follows: Vec<u64>,
}

impl Visit for Span {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.fields.insert(field.name(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

/// Keeps every span, and in which one the executor ran.
#[derive(Default)]
struct Listening {
    spans: Mutex<BTreeMap<u64, Span>>,
    next: AtomicU64,
    entered: Mutex<Vec<u64>>,
}

struct Shared(Arc<Listening>);

impl Subscriber for Shared {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let id = self.0.next.fetch_add(1, Ordering::Relaxed) + 1;
        let mut span = Span { name: attributes.metadata().name(), ..Span::default() };
        attributes.record(&mut span);
        self.0.spans.lock().unwrap().insert(id, span);
        Id::from_u64(id)
    }
    fn record(&self, id: &Id, values: &Record<'_>) {
        values.record(self.0.spans.lock().unwrap().get_mut(&id.into_u64()).unwrap());
    }
    fn record_follows_from(&self, id: &Id, follows: &Id) {
        self.0.spans.lock().unwrap().get_mut(&id.into_u64()).unwrap().follows.push(follows.into_u64());
    }
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, id: &Id) {
        if std::thread::current().name() == Some("verdigris-batches") {
            self.0.entered.lock().unwrap().push(id.into_u64());
        }
    }
    fn exit(&self, _: &Id) {}
}

#[test]
fn the_span_of_a_request_joins_that_of_its_batch() {
    let listening = Arc::new(Listening::default());
    tracing::subscriber::set_global_default(Shared(listening.clone())).unwrap();
    let service = start(Limits::default(), vec![served(affine_signature("spans", &[1, 2, 4]), |_| Ok(()))]);
    let mut client = connect(service.address());
    let mut ask = |id: &str, body: &str| client.post("/v2/models/spans/infer", &[("x-request-id", id)], body.as_bytes()).unwrap();
    let first = ask("first", &json_request(&[1.0, 2.0, 3.0]));
    assert_eq!(ask("second", "{").status, 400);
    drop(client);
    assert!(service.shutdown().is_clean());

    let spans = listening.spans.lock().unwrap().clone();
    let request_of = |id: &str| spans.iter().find(|(_, span)| span.name == "request" && span.fields["request_id"] == id).unwrap();
    let (number, request) = request_of("first");
    let batch_id = json(&first)["parameters"]["batch_id"].to_string();
    let wanted = [("request_id", "first"), ("model", "spans"), ("rows", "3"), ("batch_id", &batch_id), ("outcome", "ok")];
    assert_eq!(request.fields, wanted.map(|(name, value)| (name, value.to_owned())).into());
    let (batch_number, batch) = spans.iter().find(|(_, span)| span.name == "batch").unwrap();
    assert_eq!(
        (batch.fields["batch_id"].as_str(), batch.fields["rows"].as_str(), batch.fields["planned_rows"].as_str()),
        (&*batch_id, "3", "4")
    );
    assert_eq!(batch.follows, [*number]);
    // The executor ran within the batch's span, so that what the library emits of the execution belongs to it.
    assert!(listening.entered.lock().unwrap().contains(batch_number));
    let (_, refused) = request_of("second");
    assert_eq!((refused.fields["outcome"].as_str(), refused.fields.get("batch_id")), ("bad_request", None));
}
