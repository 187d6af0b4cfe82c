//! The words of a problem, written and read by one description: each kind shows its fields in order, and the text either takes down what it is shown or
//! fills it in.

use std::iter::Peekable;
use std::str::SplitAsciiWhitespace;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value as Json};
use verdigris_tensor::DType;

use crate::error::Error;
use crate::op::{HostScalar, Real};
use crate::problem::{Channels, Matrix, Slot, Tensor, View};

/// What is wrong with words.
pub(super) fn error(rule: impl Into<String>, found: &str) -> Error {
    Error::Words { rule: rule.into(), found: format!("found `{found}`") }
}

/// Where words are written to or read from.
pub(super) struct Text<'t> {
    direction: Direction<'t>,
    /// The element type of operands that tell none.
    pub(super) usual: DType,
    /// The next slot that nobody has used.
    fresh: u32,
}

enum Direction<'t> {
    Write(String),
    Read(Peekable<SplitAsciiWhitespace<'t>>),
}

/// A value in one word, without spaces.
pub(super) trait Word: Sized {
    /// What it is, for whoever wrote another.
    const WHAT: &'static str;
    fn print(&self) -> String;
    fn parse(text: &str) -> Option<Self>;
}

impl Word for u64 {
    const WHAT: &'static str = "a number";
    fn print(&self) -> String {
        self.to_string()
    }
    fn parse(text: &str) -> Option<u64> {
        text.parse().ok()
    }
}

/// Extents of a space: `8x4`.
impl Word for Vec<u64> {
    const WHAT: &'static str = "extents such as 8x4, `()` for none";
    fn print(&self) -> String {
        if self.is_empty() { "()".to_owned() } else { self.iter().map(u64::to_string).collect::<Vec<_>>().join("x") }
    }
    fn parse(text: &str) -> Option<Vec<u64>> {
        if text == "()" { Some(Vec::new()) } else { text.split('x').map(|extent| extent.parse().ok()).collect() }
    }
}

impl Word for Real {
    const WHAT: &'static str = "a number";
    fn print(&self) -> String {
        format!("{:?}", self.0)
    }
    fn parse(text: &str) -> Option<Real> {
        text.parse().ok().map(Real)
    }
}

/// An attribute by the name that it has in serialized form, with its own attributes in brackets.
#[derive(Clone, PartialEq)]
pub(super) struct Named<T>(pub(super) T);

impl<T: Serialize + DeserializeOwned> Word for Named<T> {
    const WHAT: &'static str = "a known name";
    fn print(&self) -> String {
        // An attribute has string keys and finite numbers only; what could not be written would not be read either.
        serde_json::to_value(&self.0).map(|json| name_of(&json)).unwrap_or_default()
    }
    fn parse(text: &str) -> Option<Named<T>> {
        serde_json::from_value(named(text)?).ok().map(Named)
    }
}

fn name_of(json: &Json) -> String {
    match json {
        Json::String(name) => name.clone(),
        Json::Object(variant) => variant
            .iter()
            .map(|(name, inside)| match inside {
                Json::Object(attributes) if attributes.values().all(|value| value.is_number() || value.is_boolean()) => {
                    let attributes: Vec<String> = attributes.iter().map(|(name, value)| format!("{name}={value}")).collect();
                    format!("{name}[{}]", attributes.join(","))
                }
                nested => format!("{name}[{}]", name_of(nested)),
            })
            .collect(),
        plain => plain.to_string(),
    }
}

fn named(text: &str) -> Option<Json> {
    let Some((name, inside)) = text.split_once('[') else { return Some(Json::String(text.to_owned())) };
    let inside = inside.strip_suffix(']')?;
    let has_attributes = inside.split('[').next().is_some_and(|first| first.contains('='));
    let inside = if has_attributes {
        let attribute = |text: &str| {
            let (name, value) = text.split_once('=')?;
            Some((name.to_owned(), serde_json::from_str::<Json>(value).ok().filter(|value| value.is_number() || value.is_boolean())?))
        };
        Json::Object(inside.split(',').map(attribute).collect::<Option<Map<_, _>>>()?)
    } else {
        named(inside)?
    };
    Some(Json::Object(Map::from_iter([(name.to_owned(), inside)])))
}

/// Strides by name, the usual ones first.
pub(super) type Layouts = Vec<(&'static str, Vec<u64>)>;

/// An operand: a buffer and where its elements lie.
#[derive(Clone)]
pub(super) struct Spot {
    slot: Slot,
    dtype: DType,
    offset: u64,
    strides: Vec<u64>,
}

/// What has a place in memory.
pub(super) trait Placed: Clone {
    fn spot(&self) -> Spot;
    /// The same at another place with as many strides as [`Placed::spot`] of a value for the same problem has.
    fn at(spot: Spot) -> Self;
}

impl Placed for Matrix {
    fn spot(&self) -> Spot {
        Spot { slot: self.slot, dtype: self.dtype, offset: 0, strides: self.all_strides() }
    }
    fn at(Spot { slot, dtype, mut strides, .. }: Spot) -> Matrix {
        let (column_stride, row_stride) = (strides.pop().unwrap_or(0), strides.pop().unwrap_or(0));
        Matrix { slot, dtype, row_stride, column_stride, batch_strides: strides }
    }
}

impl Placed for Tensor {
    fn spot(&self) -> Spot {
        Spot { slot: self.slot, dtype: self.dtype, offset: 0, strides: self.strides.to_vec() }
    }
    fn at(Spot { slot, dtype, strides, .. }: Spot) -> Tensor {
        Tensor { slot, dtype, strides: std::array::from_fn(|dim| strides.get(dim).copied().unwrap_or(0)) }
    }
}

impl Placed for Channels {
    fn spot(&self) -> Spot {
        Spot { slot: self.slot, dtype: self.dtype, offset: 0, strides: vec![self.stride] }
    }
    fn at(Spot { slot, dtype, strides, .. }: Spot) -> Channels {
        Channels { slot, dtype, stride: strides.first().copied().unwrap_or(0) }
    }
}

impl Placed for View {
    fn spot(&self) -> Spot {
        Spot { slot: self.slot, dtype: self.dtype, offset: self.offset, strides: self.strides.clone() }
    }
    fn at(Spot { slot, dtype, offset, strides }: Spot) -> View {
        View { slot, dtype, offset, strides }
    }
}

/// A list of numbers in parentheses.
pub(super) fn list(numbers: &[u64]) -> String {
    format!("({})", numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(","))
}

/// What [`list`] prints.
pub(super) fn list_of(text: &str) -> Option<Vec<u64>> {
    let inside = text.strip_prefix('(')?.strip_suffix(')')?;
    if inside.is_empty() { Some(Vec::new()) } else { inside.split(',').map(|number| number.parse().ok()).collect() }
}

/// A step's name and, where it has parentheses, what stands between them, parted by commas outside of all brackets.
pub(super) fn call(text: &str) -> Result<(&str, Option<Vec<&str>>), Error> {
    let wrong = || error("a step is `name`, `name[attributes]` or either with `(operands)`", text);
    let mut depth = 0_u32;
    let (mut open, mut cuts) = (None, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '(' if depth == 0 && open.is_none() => open = Some(at),
            '(' | '[' => depth += 1,
            ')' if depth == 0 && open.is_some() && at + 1 == text.len() => cuts.push(at),
            ')' | ']' => depth = depth.checked_sub(1).ok_or_else(wrong)?,
            ',' if depth == 0 && open.is_some() => cuts.push(at),
            _ => {}
        }
    }
    let Some(open) = open else { return Ok((text, None)) };
    if !text.ends_with(')') || depth != 0 {
        return Err(wrong());
    }
    let mut from = open + 1;
    let mut parts = Vec::new();
    for cut in cuts {
        parts.push(&text[from..cut]);
        from = cut + 1;
    }
    if parts == [""] {
        parts.clear();
    }
    Ok((&text[..open], Some(parts)))
}

impl<'t> Text<'t> {
    /// Writes behind this word.
    pub(super) fn writer(kind: &str) -> Text<'static> {
        Text { direction: Direction::Write(kind.to_owned()), usual: DType::F32, fresh: 0 }
    }

    /// The first word, and what reads behind it.
    pub(super) fn reader(text: &'t str) -> (&'t str, Text<'t>) {
        let mut words = text.split_ascii_whitespace().peekable();
        let kind = words.next().unwrap_or("");
        (kind, Text { direction: Direction::Read(words), usual: DType::F32, fresh: 0 })
    }

    /// What was written.
    pub(super) fn written(&self) -> &str {
        match &self.direction {
            Direction::Write(text) => text,
            Direction::Read(_) => "",
        }
    }

    /// Checks that nothing is left to read.
    pub(super) fn end(&mut self) -> Result<(), Error> {
        match self.next() {
            Some(word) => Err(error("these words say no more", word)),
            None => Ok(()),
        }
    }

    fn next(&mut self) -> Option<&'t str> {
        if let Direction::Read(words) = &mut self.direction { words.next() } else { None }
    }

    fn peek(&mut self) -> Option<&'t str> {
        if let Direction::Read(words) = &mut self.direction { words.peek().copied() } else { None }
    }

    pub(super) fn is_reading(&self) -> bool {
        matches!(self.direction, Direction::Read(_))
    }

    fn push(&mut self, word: &str) {
        if let Direction::Write(text) = &mut self.direction {
            text.push(' ');
            text.push_str(word);
        }
    }

    /// A word without a name, always there.
    pub(super) fn word(&mut self, rule: &'static str, value: impl FnOnce() -> String) -> Result<String, Error> {
        if self.is_reading() {
            return self.next().map(str::to_owned).ok_or_else(|| missing(rule));
        }
        let word = value();
        self.push(&word);
        Ok(word)
    }

    /// An attribute by its name alone, always there.
    pub(super) fn named<T: Serialize + DeserializeOwned + Clone>(&mut self, rule: &'static str, value: &mut T) -> Result<(), Error> {
        let word = self.word(rule, || Named(value.clone()).print())?;
        if self.is_reading() {
            *value = Named::parse(&word).ok_or_else(|| error(rule, &word))?.0;
        }
        Ok(())
    }

    /// The type of operands that tell none.
    pub(super) fn usual_type(&mut self, of: impl FnOnce() -> DType) -> Result<(), Error> {
        let word = self.word("an element type", || of().to_string())?;
        self.usual = word.parse().map_err(|_| error("an element type", &word))?;
        Ok(())
    }

    /// The value behind `name=`, if it is there; what is written is `word`.
    pub(super) fn value(&mut self, name: &str, word: Option<String>) -> Option<String> {
        if self.is_reading() {
            let value = self.peek()?.strip_prefix(name)?.strip_prefix('=')?;
            self.next();
            return Some(value.to_owned());
        }
        let word = word?;
        self.push(&format!("{name}={word}"));
        Some(word)
    }

    /// Whether this word stands here.
    pub(super) fn flag(&mut self, word: &str, value: &mut bool) {
        if self.is_reading() {
            *value = self.peek() == Some(word);
            if *value {
                self.next();
            }
        } else if *value {
            self.push(word);
        }
    }

    /// `name=value`, left out where it is `usual`.
    pub(super) fn field<W: Word + Clone + PartialEq>(&mut self, name: &str, value: &mut W, usual: Option<W>) -> Result<(), Error> {
        let told = (usual.as_ref() != Some(&*value)).then(|| value.print());
        let read = self.value(name, told);
        if self.is_reading() {
            *value = match (read, usual) {
                (Some(word), _) => W::parse(&word).ok_or_else(|| error(format!("`{name}=` is {}", W::WHAT), &word))?,
                (None, Some(usual)) => usual,
                (None, None) => return Err(self.peek().map_or_else(|| missing(&format!("`{name}=`")), |found| lacks(name, found))),
            };
        }
        Ok(())
    }

    /// As [`Text::field`], of an attribute by its serialized name.
    pub(super) fn choice<T>(&mut self, name: &str, value: &mut T, usual: Option<T>) -> Result<(), Error>
    where
        T: Serialize + DeserializeOwned + Clone + PartialEq,
    {
        let mut named = Named(value.clone());
        self.field(name, &mut named, usual.map(Named))?;
        *value = named.0;
        Ok(())
    }

    /// An operand under its name, left out where all of it is usual.
    pub(super) fn operand<P: Placed>(&mut self, name: &str, value: &mut P, layouts: &Layouts) -> Result<(), Error> {
        if self.is_reading() {
            let word = self.value(name, None).unwrap_or_default();
            *value = self.parse_place(&word, layouts)?;
        } else {
            let word = self.print_place(value, layouts);
            self.value(name, (!word.is_empty()).then_some(word));
        }
        Ok(())
    }

    /// An operand that may not be there.
    pub(super) fn optional<P: Placed>(&mut self, name: &str, value: &mut Option<P>, layouts: &Layouts) -> Result<(), Error> {
        if self.is_reading() {
            *value = match self.value(name, None) {
                Some(word) => Some(self.parse_place(&word, layouts)?),
                None => None,
            };
        } else if let Some(value) = value {
            let word = self.print_told(value, layouts);
            self.value(name, Some(word));
        }
        Ok(())
    }

    /// Steps behind a mark each.
    pub(super) fn steps<S>(
        &mut self,
        mark: &str,
        steps: &mut Vec<S>,
        print: impl Fn(&mut Self, &S) -> String,
        parse: impl Fn(&mut Self, &str) -> Result<S, Error>,
    ) -> Result<(), Error> {
        if self.is_reading() {
            while self.peek() == Some(mark) {
                self.next();
                let word = self.next().ok_or_else(|| missing("a step"))?;
                steps.push(parse(self, word)?);
            }
        } else {
            for step in steps {
                let word = print(self, step);
                self.push(mark);
                self.push(&word);
            }
        }
        Ok(())
    }

    /// An operand; its layout's name where nothing else is to be told.
    pub(super) fn print_told<P: Placed>(&mut self, value: &P, layouts: &Layouts) -> String {
        let word = self.print_place(value, layouts);
        match (word.is_empty(), layouts.first()) {
            (true, Some((name, _))) => (*name).to_owned(),
            _ => word,
        }
    }

    fn print_place<P: Placed>(&mut self, value: &P, layouts: &Layouts) -> String {
        let Spot { slot, dtype, offset, strides } = value.spot();
        let mut parts = Vec::new();
        if dtype != self.usual {
            parts.push(dtype.to_string());
        }
        match layouts.iter().position(|(_, known)| *known == strides) {
            Some(0) => {}
            Some(place) => parts.push(layouts[place].0.to_owned()),
            None => parts.push(list(&strides)),
        }
        if offset != 0 {
            parts.push(format!("+{offset}"));
        }
        if slot.0 != self.fresh {
            parts.push(format!("@{}", slot.0));
        }
        self.uses(slot);
        parts.join(":")
    }

    pub(super) fn parse_place<P: Placed>(&mut self, text: &str, layouts: &Layouts) -> Result<P, Error> {
        let usual = layouts.first().map(|(_, strides)| strides.clone()).unwrap_or_default();
        let mut spot = Spot { slot: Slot(self.fresh), dtype: self.usual, offset: 0, strides: usual };
        for part in text.split(':').filter(|_| !text.is_empty()) {
            if let Some(slot) = part.strip_prefix('@') {
                spot.slot = Slot(slot.parse().map_err(|_| error("a slot is `@` and a number", part))?);
            } else if let Some(offset) = part.strip_prefix('+') {
                spot.offset = offset.parse().map_err(|_| error("an offset is `+` and a number of elements", part))?;
            } else if part.starts_with('(') {
                let rank = spot.strides.len();
                let strides = list_of(part).filter(|strides| strides.len() == rank);
                spot.strides = strides.ok_or_else(|| error(format!("a list of {rank} strides"), part))?;
            } else if let Some((_, strides)) = layouts.iter().find(|(name, _)| *name == part) {
                spot.strides.clone_from(strides);
            } else {
                let names: Vec<&str> = layouts.iter().map(|(name, _)| *name).collect();
                let rule = || format!("an operand has an element type, a layout ({}) or strides, `+offset`, `@slot`", names.join(", "));
                spot.dtype = part.parse().map_err(|_| error(rule(), part))?;
            }
        }
        self.uses(spot.slot);
        Ok(P::at(spot))
    }

    fn uses(&mut self, slot: Slot) {
        self.fresh = self.fresh.max(slot.0.saturating_add(1));
    }

    /// A slot without a layout: `name` alone where it is the next one.
    pub(super) fn print_slot(&mut self, name: &str, slot: Slot) -> String {
        let is_next = slot.0 == self.fresh;
        self.uses(slot);
        if is_next { name.to_owned() } else { format!("{name}@{}", slot.0) }
    }

    /// What [`Text::print_slot`] prints; `None` for other words.
    pub(super) fn parse_slot(&mut self, name: &str, text: &str) -> Option<Slot> {
        let slot = match text.strip_prefix(name)? {
            "" => Slot(self.fresh),
            told => Slot(told.strip_prefix('@')?.parse().ok()?),
        };
        self.uses(slot);
        Some(slot)
    }

    pub(super) fn print_factor(&mut self, factor: HostScalar<Slot>) -> String {
        match factor {
            HostScalar::Fixed(real) => real.print(),
            HostScalar::Bound(slot) => self.print_slot("bound", slot),
        }
    }

    pub(super) fn parse_factor(&mut self, text: &str) -> Result<HostScalar<Slot>, Error> {
        if let Some(real) = Real::parse(text) {
            return Ok(HostScalar::Fixed(real));
        }
        self.parse_slot("bound", text).map(HostScalar::Bound).ok_or_else(|| error("a factor is a number or `bound`", text))
    }

    /// A factor under its name, left out where it is `usual`.
    pub(super) fn factor(&mut self, name: &str, factor: &mut HostScalar<Slot>, usual: HostScalar<Slot>) -> Result<(), Error> {
        if self.is_reading() {
            *factor = match self.value(name, None) {
                Some(word) => self.parse_factor(&word)?,
                None => usual,
            };
        } else if *factor != usual {
            let word = self.print_factor(*factor);
            self.value(name, Some(word));
        }
        Ok(())
    }
}

fn missing(what: &str) -> Error {
    Error::Words { rule: format!("{what} is missing"), found: "the words end there".to_owned() }
}

fn lacks(name: &str, found: &str) -> Error {
    error(format!("`{name}=` is missing"), found)
}
