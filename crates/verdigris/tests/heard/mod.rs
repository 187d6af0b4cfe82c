//! What the library says through `tracing` on one thread: its events with their fields, and its spans with who is around them.
#![allow(dead_code, reason = "each program of tests asks for some of it")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// A span, or an event.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    /// Of a span its name, of an event the field `event`; a span of a device's time has no such field, and is called by its target.
    pub(crate) name: String,
    pub(crate) target: &'static str,
    pub(crate) fields: BTreeMap<&'static str, String>,
    /// The span around it, by its place among the spans.
    pub(crate) within: Option<usize>,
    /// Spans that it follows from.
    pub(crate) follows: Vec<usize>,
}

impl Said {
    /// A field, as text.
    pub(crate) fn field(&self, name: &str) -> &str {
        self.fields.get(name).unwrap_or_else(|| panic!("no field `{name}` in {self:?}"))
    }

    /// A field that is a number.
    pub(crate) fn number(&self, name: &str) -> f64 {
        self.field(name).parse().unwrap_or_else(|_| panic!("`{name}` is no number in {self:?}"))
    }

    /// What it is about, and who computed it.
    pub(crate) fn part(&self) -> (String, String) {
        (self.field("problem").to_owned(), self.field("engine").to_owned())
    }
}

impl Visit for Said {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.fields.insert(field.name(), format!("{value:?}"));
    }
}

#[derive(Debug, Default)]
struct Notes {
    spans: Vec<Said>,
    events: Vec<Said>,
}

/// What was said since this listens.
#[derive(Clone, Debug, Default)]
pub(crate) struct Heard(Arc<Mutex<Notes>>);

thread_local! {
    /// Spans that this thread has entered, the innermost last.
    static ENTERED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Does `work` on this thread while its events and spans are taken down.
pub(crate) fn hear<R>(work: impl FnOnce(&Heard) -> R) -> R {
    let heard = Heard::default();
    tracing::subscriber::with_default(heard.clone(), || work(&heard))
}

impl Heard {
    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The events of a name so far, which are forgotten.
    pub(crate) fn take(&self, name: &str) -> Vec<Said> {
        self.notes().events.extract_if(.., |said| said.name == name).collect()
    }

    /// The spans of a name, with their places.
    pub(crate) fn spans(&self, name: &str) -> Vec<(usize, Said)> {
        self.notes().spans.iter().cloned().enumerate().filter(|(_, span)| span.name == name).collect()
    }

    /// The span at a place.
    pub(crate) fn span(&self, place: usize) -> Said {
        self.notes().spans[place].clone()
    }

    fn said(&self, metadata: &'static Metadata<'static>, is_root: bool, parent: Option<&Id>) -> Said {
        let within = match parent {
            Some(parent) => Some(place(parent)),
            None if is_root => None,
            None => ENTERED.with_borrow(|entered| entered.last().copied()),
        };
        Said { name: metadata.name().to_owned(), target: metadata.target(), fields: BTreeMap::new(), within, follows: Vec::new() }
    }
}

/// Ids count from 1.
fn place(id: &Id) -> usize {
    id.into_u64() as usize - 1
}

impl Subscriber for Heard {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("verdigris") || metadata.target() == "test"
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut said = self.said(attributes.metadata(), attributes.is_root(), attributes.parent());
        attributes.record(&mut said);
        let mut notes = self.notes();
        notes.spans.push(said);
        Id::from_u64(notes.spans.len() as u64)
    }

    fn record(&self, id: &Id, values: &Record<'_>) {
        values.record(&mut self.notes().spans[place(id)]);
    }

    fn record_follows_from(&self, id: &Id, follows: &Id) {
        self.notes().spans[place(id)].follows.push(place(follows));
    }

    fn event(&self, event: &Event<'_>) {
        let mut said = self.said(event.metadata(), event.is_root(), event.parent());
        event.record(&mut said);
        said.name = said.fields.get("event").cloned().unwrap_or_else(|| said.target.to_owned());
        self.notes().events.push(said);
    }

    fn enter(&self, id: &Id) {
        ENTERED.with_borrow_mut(|entered| entered.push(place(id)));
    }

    fn exit(&self, id: &Id) {
        ENTERED.with_borrow_mut(|entered| {
            let left = entered.iter().rposition(|&entered| entered == place(id));
            left.map(|left| entered.remove(left));
        });
    }
}

/// Does something whenever the library warns.
pub(crate) struct Warned {
    pub(crate) told: Arc<AtomicUsize>,
    pub(crate) then: Arc<dyn Fn() + Send + Sync>,
}

impl Subscriber for Warned {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "verdigris" && *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.told.fetch_add(1, Ordering::Relaxed);
        (self.then)();
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
