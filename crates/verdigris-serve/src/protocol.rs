//! Requests and answers as the open inference protocol (KServe's version 2) writes them, with its extension for binary tensors.
//!
//! A request is a JSON object with `inputs`, each with `name`, `shape`, `datatype` and `data` (numbers in row-major order, flat or nested as
//! the shape says). With the header `inference-header-content-length`, the JSON is as long as that says, and what follows are the bytes of
//! those inputs that have `"parameters": {"binary_data_size": N}` in place of `data`, in their order, little-endian and packed row-major.
//! Results come as bytes where the request has `"parameters": {"binary_data_output": true}`, or an output `{"binary_data": true}`.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Error as _, SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use verdigris::DType;
use verdigris::tensor::layout::MAX_RANK;
use verdigris::tensor::num;

use crate::executor::Port;
use crate::model::Signature;
use crate::refusal::{Kind, Refusal};

/// The header that says how long the JSON before the bytes is.
pub(crate) const JSON_LENGTH: &str = "inference-header-content-length";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request<'r> {
    #[serde(borrow, default)]
    id: Option<Cow<'r, str>>,
    #[serde(default)]
    parameters: RequestParameters,
    #[serde(borrow)]
    inputs: Vec<Input<'r>>,
    #[serde(borrow, default)]
    outputs: Option<Vec<Output<'r>>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct RequestParameters {
    #[serde(default)]
    binary_data_output: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Input<'r> {
    #[serde(borrow)]
    name: Cow<'r, str>,
    #[serde(deserialize_with = "extents")]
    shape: Vec<u64>,
    #[serde(borrow)]
    datatype: Cow<'r, str>,
    #[serde(default)]
    parameters: InputParameters,
    #[serde(borrow, default)]
    data: Option<&'r RawValue>,
}

/// A shape, read no further than a tensor has dims.
fn extents<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u64>, D::Error> {
    struct Extents;

    impl<'de> Visitor<'de> for Extents {
        type Value = Vec<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a shape: an array of extents")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<u64>, A::Error> {
            let mut shape = Vec::with_capacity(MAX_RANK);
            while let Some(extent) = items.next_element()? {
                if shape.len() == MAX_RANK {
                    return Err(A::Error::custom(format!("a shape of more than {MAX_RANK} extents; tensors have no more dims")));
                }
                shape.push(extent);
            }
            Ok(shape)
        }
    }

    from.deserialize_seq(Extents)
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct InputParameters {
    binary_data_size: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Output<'r> {
    #[serde(borrow)]
    name: Cow<'r, str>,
    #[serde(default)]
    parameters: OutputParameters,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct OutputParameters {
    binary_data: Option<bool>,
}

/// What a request asks for, checked against the model.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) id: Option<String>,
    pub(crate) rows: u64,
    /// Packed rows, in the order of the signature.
    pub(crate) inputs: Vec<Vec<u8>>,
    /// Places of outputs, and whether as bytes.
    pub(crate) outputs: Vec<(usize, bool)>,
}

/// The name of an element type in the protocol.
pub(crate) const fn datatype(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "FP64",
        DType::F32 | DType::Tf32 => "FP32",
        DType::F16 => "FP16",
        DType::Bf16 => "BF16",
        // Models with such ports are not loaded.
        DType::E4m3 => "FP8_E4M3",
        DType::E5m2 => "FP8_E5M2",
        DType::I8 => "INT8",
        DType::U8 => "UINT8",
        DType::I32 => "INT32",
        DType::I64 => "INT64",
        DType::Bool => "BOOL",
    }
}

/// How many rows a request brings, if the model takes it: what the service checks before anything is queued. `json_bytes` is the value of the header
/// `inference-header-content-length`.
///
/// # Errors
/// The refusal that a client would get.
pub fn check(signature: &Signature, body: &[u8], json_bytes: Option<usize>) -> Result<u64, Refusal> {
    read(signature, body, json_bytes).map(|asked| asked.rows)
}

/// Reads a request for a model. `json_bytes` is the value of [`JSON_LENGTH`].
pub(crate) fn read(signature: &Signature, body: &[u8], json_bytes: Option<usize>) -> Result<Asked, Refusal> {
    let (text, mut binary) = match json_bytes {
        None => (body, &body[body.len()..]),
        Some(length) => body.split_at_checked(length).ok_or_else(|| {
            Refusal::bad(format!("{JSON_LENGTH} is {length}, and the body has {} bytes; the JSON is a part of the body", body.len()))
        })?,
    };
    let request: Request<'_> = serde_json::from_slice(text).map_err(|error| Refusal::bad(format!("the request's JSON: {error}")))?;
    let mut inputs: Vec<Option<Vec<u8>>> = vec![None; signature.inputs.len()];
    let mut rows: Option<(u64, String)> = None;
    for input in &request.inputs {
        let place = place_of(&signature.inputs, &input.name, "input")?;
        let port = &signature.inputs[place];
        if inputs[place].is_some() {
            return Err(Refusal::bad(format!("input `{}` is given twice", port.name)));
        }
        let wanted = datatype(port.dtype);
        if input.datatype != wanted {
            return Err(Refusal::bad(format!("input `{}` has datatype {}, the model's is {wanted}", port.name, shown(&input.datatype))));
        }
        let of_input = match input.shape.split_first() {
            Some((&rows, rest)) if rest == port.row_dims => rows,
            _ => {
                let wanted = shape_text(port);
                return Err(Refusal::bad(format!("input `{}` has shape {:?}, the model's is {wanted}", port.name, input.shape)));
            }
        };
        if of_input == 0 {
            return Err(Refusal::bad(format!("input `{}` has no rows: its shape is {:?}", port.name, input.shape)));
        }
        if of_input > signature.most_rows() {
            let message =
                format!("a request of {of_input} rows; the greatest batch of model `{}` is {}", signature.name, signature.most_rows());
            return Err(Refusal::new(Kind::TooLarge, message));
        }
        match &rows {
            Some((rows, other)) if *rows != of_input => {
                let message =
                    format!("input `{}` has {of_input} rows, input `{other}` has {rows}; a request has one number of rows", port.name);
                return Err(Refusal::bad(message));
            }
            _ => rows = Some((of_input, port.name.clone())),
        }
        // At most the greatest batch of a model that fits into memory.
        let need_bytes = port.row_bytes() * of_input as usize;
        let bytes = match (input.data, input.parameters.binary_data_size) {
            (Some(data), None) => numbers(port, &input.shape, need_bytes, data)?,
            (None, Some(size)) => {
                let cut = usize::try_from(size).ok().and_then(|size| binary.split_at_checked(size));
                let Some((bytes, rest)) = cut else {
                    let message =
                        format!("input `{}`: binary_data_size is {size}, and {} bytes are left of the body", port.name, binary.len());
                    return Err(Refusal::bad(message));
                };
                if bytes.len() != need_bytes {
                    let message = format!(
                        "input `{}`: binary_data_size is {size}, and shape {:?} of {wanted} has {need_bytes} bytes",
                        port.name, input.shape
                    );
                    return Err(Refusal::bad(message));
                }
                if port.dtype == DType::Bool && bytes.iter().any(|&byte| byte > 1) {
                    return Err(Refusal::bad(format!("input `{}`: a BOOL is a byte of 0 or 1", port.name)));
                }
                binary = rest;
                bytes.to_vec()
            }
            (data, _) => {
                let fault = if data.is_some() { "both data and binary_data_size" } else { "neither data nor binary_data_size" };
                return Err(Refusal::bad(format!("input `{}` has {fault}; it has one of them", port.name)));
            }
        };
        inputs[place] = Some(bytes);
    }
    if !binary.is_empty() {
        return Err(Refusal::bad(format!("{} bytes behind the last input; each belongs to an input", binary.len())));
    }
    let Some((rows, _)) = rows else { return Err(Refusal::bad(format!("no inputs; the model's are {}", names(&signature.inputs)))) };
    let missing = |place: usize| {
        Refusal::bad(format!("input `{}` is missing; the model's are {}", signature.inputs[place].name, names(&signature.inputs)))
    };
    let inputs = inputs.into_iter().enumerate().map(|(place, bytes)| bytes.ok_or_else(|| missing(place))).collect::<Result<_, _>>()?;
    let mut outputs = Vec::new();
    let as_bytes = request.parameters.binary_data_output;
    match &request.outputs {
        Some(wanted) if !wanted.is_empty() => {
            for output in wanted {
                let place = place_of(&signature.outputs, &output.name, "output")?;
                if outputs.iter().any(|(other, _)| *other == place) {
                    return Err(Refusal::bad(format!("output `{}` is asked for twice", signature.outputs[place].name)));
                }
                outputs.push((place, output.parameters.binary_data.unwrap_or(as_bytes)));
            }
        }
        _ => outputs.extend((0..signature.outputs.len()).map(|place| (place, as_bytes))),
    }
    Ok(Asked { id: request.id.map(Cow::into_owned), rows, inputs, outputs })
}

fn place_of(ports: &[Port], name: &str, role: &str) -> Result<usize, Refusal> {
    let place = ports.iter().position(|port| port.name == name);
    place.ok_or_else(|| Refusal::bad(format!("the model has no {role} {}; it has {}", shown(name), names(ports))))
}

/// A client's own word in a message, cut to a length that a log bears.
pub(crate) fn shown(word: &str) -> String {
    let cut: String = word.chars().filter(|c| !c.is_control()).take(64).collect();
    if cut.len() < word.len() { format!("`{cut}…`") } else { format!("`{cut}`") }
}

fn names(ports: &[Port]) -> String {
    ports.iter().map(|port| format!("`{}`", port.name)).collect::<Vec<_>>().join(", ")
}

fn shape_text(port: &Port) -> String {
    let dims: String = port.row_dims.iter().map(|dim| format!(", {dim}")).collect();
    format!("[rows{dims}]")
}

/// Numbers of JSON as the bytes of a port, straight from the text: a body of digits takes no more memory than its numbers.
fn numbers(port: &Port, dims: &[u64], need_bytes: usize, data: &RawValue) -> Result<Vec<u8>, Refusal> {
    let mut sink = Sink { dtype: port.dtype, dims, need_bytes, bytes: Vec::with_capacity(need_bytes), depth_of_numbers: None };
    let mut reader = serde_json::Deserializer::from_str(data.get());
    let done = Level { sink: &mut sink, depth: 0 }.deserialize(&mut reader);
    done.map_err(|error| Refusal::bad(format!("input `{}`: {error}", port.name)))?;
    if sink.bytes.len() != need_bytes {
        let (have, need) = (sink.bytes.len() / port.dtype.bytes(), need_bytes / port.dtype.bytes());
        return Err(Refusal::bad(format!("input `{}` has {have} numbers, and shape {dims:?} has {need}", port.name)));
    }
    Ok(sink.bytes)
}

struct Sink<'s> {
    dtype: DType,
    dims: &'s [u64],
    need_bytes: usize,
    bytes: Vec<u8>,
    /// How many arrays the numbers stand in.
    depth_of_numbers: Option<usize>,
}

impl Sink<'_> {
    fn begin<E: serde::de::Error>(&mut self, depth: usize) -> Result<(), E> {
        if depth != 1 && depth != self.dims.len() || self.depth_of_numbers.is_some_and(|before| before != depth) {
            return Err(E::custom("data is one array of numbers, or arrays nested as the shape says"));
        }
        self.depth_of_numbers = Some(depth);
        if self.bytes.len() >= self.need_bytes {
            return Err(E::custom(format!("more numbers than shape {:?} has", self.dims)));
        }
        Ok(())
    }

    fn real<E: serde::de::Error>(&mut self, depth: usize, value: f64) -> Result<(), E> {
        self.begin(depth)?;
        if !self.dtype.is_float() {
            return Err(E::custom(format!("{value} is no {}", datatype(self.dtype))));
        }
        let mut element = [0; 8];
        let element = &mut element[..self.dtype.bytes()];
        let held = num::write_element(self.dtype, value, element).and_then(|()| num::read_element(self.dtype, element));
        if !held.is_some_and(f64::is_finite) {
            return Err(E::custom(format!("{value} is beyond {}", datatype(self.dtype))));
        }
        self.bytes.extend_from_slice(element);
        Ok(())
    }

    fn integer<E: serde::de::Error>(&mut self, depth: usize, value: i64) -> Result<(), E> {
        if self.dtype.is_float() {
            return self.real(depth, value as f64);
        }
        self.begin(depth)?;
        let (least, greatest) = self.dtype.integer_range().unwrap_or((1, 0));
        if !(least..=greatest).contains(&value) {
            return Err(E::custom(format!("{value} is no {}", datatype(self.dtype))));
        }
        self.bytes.extend_from_slice(&value.to_le_bytes()[..self.dtype.bytes()]);
        Ok(())
    }

    fn truth<E: serde::de::Error>(&mut self, depth: usize, value: bool) -> Result<(), E> {
        self.begin(depth)?;
        if self.dtype != DType::Bool {
            return Err(E::custom(format!("{value} is no {}", datatype(self.dtype))));
        }
        self.bytes.push(u8::from(value));
        Ok(())
    }
}

/// A value of the data, inside so many arrays.
struct Level<'l, 's> {
    sink: &'l mut Sink<'s>,
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for Level<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Level<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number or an array of numbers")
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        self.sink.truth(self.depth, value)
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<(), E> {
        self.sink.integer(self.depth, value)
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<(), E> {
        match i64::try_from(value) {
            Ok(value) => self.sink.integer(self.depth, value),
            Err(_) if self.sink.dtype.is_float() => self.sink.real(self.depth, value as f64),
            Err(_) => Err(E::custom(format!("{value} is no {}", datatype(self.sink.dtype)))),
        }
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        self.sink.real(self.depth, value)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let mut count = 0;
        if self.depth >= self.sink.dims.len() {
            return Err(A::Error::custom("data is one array of numbers, or arrays nested as the shape says"));
        }
        while items.next_element_seed(Level { sink: &mut *self.sink, depth: self.depth + 1 })?.is_some() {
            count += 1;
        }
        // One array of all numbers is counted at the end.
        let is_flat = self.depth == 0 && self.sink.depth_of_numbers.is_none_or(|depth| depth == 1);
        if !is_flat && count != self.sink.dims[self.depth] {
            return Err(A::Error::custom(format!(
                "an array of {count} where shape {:?} has {}",
                self.sink.dims, self.sink.dims[self.depth]
            )));
        }
        Ok(())
    }
}

#[derive(Serialize)]
struct AnswerText<'a> {
    model_name: &'a str,
    model_version: &'a str,
    id: &'a str,
    parameters: AnswerParameters,
    outputs: Vec<OutputText<'a>>,
}

/// What joins an answer to the spans and to the other answers of its batch.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct AnswerParameters {
    pub(crate) batch_id: u64,
    pub(crate) batch_rows: u64,
    pub(crate) planned_rows: u64,
    pub(crate) queue_us: u64,
}

#[derive(Serialize)]
struct OutputText<'a> {
    name: &'a str,
    datatype: &'static str,
    shape: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<BinarySize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Numbers<'a>>,
}

#[derive(Serialize)]
struct BinarySize {
    binary_data_size: usize,
}

/// Elements, written as JSON numbers.
struct Numbers<'a>(DType, &'a [u8]);

impl Serialize for Numbers<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Numbers(dtype, bytes) = *self;
        let mut list = serializer.serialize_seq(Some(bytes.len() / dtype.bytes()))?;
        for element in bytes.chunks_exact(dtype.bytes()) {
            match dtype {
                DType::Bool => list.serialize_element(&(element[0] != 0))?,
                DType::I8 => list.serialize_element(&i8::from_le_bytes([element[0]]))?,
                DType::U8 => list.serialize_element(&element[0])?,
                DType::I32 | DType::I64 => {
                    let mut wide = if element[element.len() - 1] & 0x80 == 0 { [0; 8] } else { [0xff; 8] };
                    wide[..element.len()].copy_from_slice(element);
                    list.serialize_element(&i64::from_le_bytes(wide))?;
                }
                DType::F64 => list.serialize_element(&num::read_element(dtype, element).unwrap_or(f64::NAN))?,
                // As an f32, which holds them all, in the fewest digits that read back the same.
                _ => list.serialize_element(&(num::read_element(dtype, element).unwrap_or(f64::NAN) as f32))?,
            }
        }
        list.end()
    }
}

/// The body of an answer, and where it has bytes behind the JSON, the JSON's length.
pub(crate) fn write(
    signature: &Signature,
    id: &str,
    rows: u64,
    outputs: &[Vec<u8>],
    wanted: &[(usize, bool)],
    parameters: AnswerParameters,
) -> Result<(Vec<u8>, Option<usize>), Refusal> {
    let mut texts = Vec::new();
    let mut binary = Vec::new();
    for &(place, as_bytes) in wanted {
        let (port, bytes) = (&signature.outputs[place], &outputs[place]);
        let shape = std::iter::once(rows).chain(port.row_dims.iter().copied()).collect();
        let (name, datatype) = (port.name.as_str(), datatype(port.dtype));
        if as_bytes {
            binary.extend_from_slice(bytes);
            texts.push(OutputText { name, datatype, shape, parameters: Some(BinarySize { binary_data_size: bytes.len() }), data: None });
            continue;
        }
        if port.dtype.is_float() {
            let values = bytes.chunks_exact(port.dtype.bytes()).map(|element| num::read_element(port.dtype, element).unwrap_or(f64::NAN));
            if let Some((position, value)) = values.enumerate().find(|(_, value)| !value.is_finite()) {
                let message = format!("output `{name}`: element {position} is {value}, which JSON does not hold; ask for binary data");
                return Err(Refusal::new(Kind::NotInJson, message));
            }
        }
        texts.push(OutputText { name, datatype, shape, parameters: None, data: Some(Numbers(port.dtype, bytes)) });
    }
    let text = AnswerText { model_name: &signature.name, model_version: "1", id, parameters, outputs: texts };
    let mut body = serde_json::to_vec(&text).map_err(|error| Refusal::new(Kind::Failed, format!("the answer as JSON: {error}")))?;
    let json_bytes = wanted.iter().any(|(_, as_bytes)| *as_bytes).then_some(body.len());
    body.extend(binary);
    Ok((body, json_bytes))
}
