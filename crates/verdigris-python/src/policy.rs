//! What a caller asks of plans beside their values.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use verdigris::{Limits, Mode, Pin, Tuning};
use verdigris_engines::engine::Knobs;
use verdigris_graph::{Precision, UnaryOp};
use verdigris_tensor::DType;

use crate::errors::{Kind, raise};

/// How f32 products are formed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Products {
    Ieee,
    Fp32,
    Tf32,
}

/// How plans are made: precision, determinism, limits, and how the choice among engines is made.
///
/// - `precision`: of products of floating-point operands, where an op does not say it itself. `"ieee"`: fused multiply-adds only, no
///   tensor cores. `"fp32"` (default): an error within four times that of `"ieee"`; 16-bit operands on tensor cores with f32 sums.
///   `"tf32"`: f32 operands rounded to tf32; other types as `"fp32"`.
/// - `reduced_accumulation`: f16 sums rounded to f16; fp8 sums kept in the tensor core's own accumulator. Off by default.
/// - `deterministic`: the same bits each time.
/// - `workspace_bytes`: the most workspace of a plan; `None` for any.
/// - `mode`: `"instant"` by estimate, nothing is run; `"measured"` by the clock of this machine, remembered in the plan cache; `"pinned"` by
///   `engines`.
/// - `engines`: for `"pinned"`, a list of engine names, or of `(part, name, knobs)` with `part` or `None` and knobs as a dict.
/// - `candidates`, `budget_ms`, `again`: for `"measured"`, how many ways of each part, the most time for each, and whether to measure
///   although an earlier choice is remembered.
/// - `shipped`: for `"measured"`, whether a choice that ships with the library is taken in place of measuring; off by default.
/// - `remember`: whether remembered choices are taken (with `"instant"` those that ship as well) and new ones kept.
/// - `down_convert`, `split_operands`, `reduced_sums`, `tensor_cores`: what engines may do within the precision; all allowed by default.
#[pyclass(frozen, eq, module = "verdigris")]
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Policy {
    products: Products,
    reduced_accumulation: bool,
    inner: verdigris::Policy,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy { products: Products::Fp32, reduced_accumulation: false, inner: verdigris::Policy::default() }
    }
}

impl Policy {
    /// What the library asks for.
    pub(crate) fn library(&self) -> verdigris::Policy {
        self.inner.clone()
    }

    /// The precision of products of these types; `None` if no product takes them.
    pub(crate) fn precision(&self, a: DType, b: DType) -> Option<Precision> {
        let usual = Precision::usual(a, b)?;
        Some(match (usual, self.products) {
            (Precision::Fp32, Products::Ieee) => Precision::Ieee,
            (Precision::Fp32, Products::Tf32) if a == DType::F32 => Precision::Tf32,
            (Precision::Fp32, _) if self.reduced_accumulation && a == DType::F16 => Precision::F16,
            (Precision::Fp8Promoted, Products::Ieee) => Precision::Ieee,
            (Precision::Fp8Promoted, _) if self.reduced_accumulation => Precision::Fp8Fast,
            (usual, _) => usual,
        })
    }

    /// The same, but nothing is measured: for when the device must not be touched.
    pub(crate) fn unmeasured(&self) -> Option<Policy> {
        let inner = verdigris::Policy { mode: Mode::Instant, ..self.inner.clone() };
        matches!(self.inner.mode, Mode::Measured(_)).then_some(Policy { inner, ..self.clone() })
    }
}

/// Every policy that was asked for, so that calls name it by a number.
static KNOWN: Mutex<Vec<Policy>> = Mutex::new(Vec::new());

/// The number of a policy.
pub(crate) fn number(policy: &Policy) -> u32 {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if known.is_empty() {
        known.push(Policy::default());
    }
    let found = known.iter().position(|other| other == policy).unwrap_or_else(|| {
        known.push(policy.clone());
        known.len() - 1
    });
    found as u32
}

/// The policy of a number; the default for one that was never given out.
pub(crate) fn numbered(number: u32) -> Policy {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner).get(number as usize).cloned().unwrap_or_default()
}

/// A precision by its name.
pub(crate) fn precision_named(name: &str) -> PyResult<Precision> {
    by_name("precision", name)
}

/// A value of an enumeration of the library by the name that it has in JSON.
pub(crate) fn by_name<T: serde::de::DeserializeOwned>(what: &str, name: &str) -> PyResult<T> {
    serde_json::from_value(serde_json::Value::String(name.to_owned()))
        .map_err(|error| raise(Kind::Graph, format!("{what} is `{name}`; {error}")))
}

/// A function of one value by its name and attributes.
pub(crate) fn unary_named(name: &str, attributes: Option<&Bound<'_, pyo3::types::PyDict>>) -> PyResult<UnaryOp> {
    let value = match attributes.filter(|dict| !dict.is_empty()) {
        None => serde_json::Value::String(name.to_owned()),
        Some(dict) => {
            let mut map = serde_json::Map::new();
            for (key, value) in dict.iter() {
                let number: f64 = value.extract()?;
                map.insert(key.extract()?, serde_json::json!(number));
            }
            let mut outer = serde_json::Map::new();
            outer.insert(name.to_owned(), serde_json::Value::Object(map));
            serde_json::Value::Object(outer)
        }
    };
    serde_json::from_value(value).map_err(|error| raise(Kind::Graph, format!("the function `{name}`: {error}")))
}

#[pymethods]
impl Policy {
    #[new]
    #[pyo3(signature = (*, precision = "fp32", reduced_accumulation = false, deterministic = false, workspace_bytes = None, mode = "instant",
        engines = None, candidates = 12, budget_ms = 500.0, again = false, shipped = false, remember = true, down_convert = true,
        split_operands = true, reduced_sums = true, tensor_cores = true))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python constructor")]
    fn new(
        precision: &str,
        reduced_accumulation: bool,
        deterministic: bool,
        workspace_bytes: Option<u64>,
        mode: &str,
        engines: Option<Vec<Bound<'_, PyAny>>>,
        candidates: usize,
        budget_ms: f64,
        again: bool,
        shipped: bool,
        remember: bool,
        down_convert: bool,
        split_operands: bool,
        reduced_sums: bool,
        tensor_cores: bool,
    ) -> PyResult<Policy> {
        let config = |text: String| raise(Kind::Config, text);
        let products = match precision {
            "ieee" => Products::Ieee,
            "fp32" => Products::Fp32,
            "tf32" => Products::Tf32,
            other => return Err(config(format!("precision is `{other}`; it is `ieee`, `fp32` or `tf32`"))),
        };
        let mode = match mode {
            "instant" => Mode::Instant,
            "measured" => {
                let budget = Duration::try_from_secs_f64(budget_ms * 1e-3)
                    .map_err(|_| config(format!("budget_ms is {budget_ms}; it is a finite number of milliseconds, not below 0")))?;
                Mode::Measured(Tuning { candidates, budget, again, shipped })
            }
            "pinned" => Mode::Pinned(engines.as_deref().unwrap_or_default().iter().map(pin).collect::<PyResult<_>>()?),
            other => return Err(config(format!("mode is `{other}`; it is `instant`, `measured` or `pinned`"))),
        };
        if engines.is_some() && !matches!(mode, Mode::Pinned(_)) {
            return Err(config("engines are named, but the mode is not `pinned`".to_owned()));
        }
        let limits = Limits { workspace_bytes, down_convert, split_operands, reduced_sums, tensor_cores, ..Limits::default() };
        Ok(Policy { products, reduced_accumulation, inner: verdigris::Policy { limits, deterministic, mode, remember } })
    }

    /// The same policy with results that are the same bits each time.
    fn made_deterministic(&self) -> Policy {
        Policy { inner: verdigris::Policy { deterministic: true, ..self.inner.clone() }, ..self.clone() }
    }

    /// The precision of products of two operands of this type, as `Graph.matmul` takes it: what functions of tensors ask for under this policy, and graphs do
    /// not by themselves. `None` if no product takes the type.
    fn product_precision(&self, dtype: &str) -> PyResult<Option<String>> {
        let dtype = crate::operands::dtype(dtype)?;
        let name = |precision| serde_json::to_value(precision).ok()?.as_str().map(str::to_owned);
        Ok(self.precision(dtype, dtype).and_then(name))
    }

    /// The same policy by estimate where it would measure, for when the device must not be touched; `None` where it does not measure.
    fn made_unmeasured(&self) -> Option<Policy> {
        self.unmeasured()
    }

    fn __repr__(&self) -> String {
        format!("{self:?}")
    }

    fn __hash__(&self) -> u64 {
        u64::from(number(self))
    }
}

/// A pin: a name, or part, name and knobs.
fn pin(object: &Bound<'_, PyAny>) -> PyResult<Pin> {
    if let Ok(engine) = object.extract::<String>() {
        return Ok(Pin { part: None, engine, knobs: Knobs::default() });
    }
    let (part, engine, knobs): (Option<usize>, String, std::collections::BTreeMap<String, u32>) =
        object.extract().map_err(|_| PyValueError::new_err("a pinned engine is its name, or `(part or None, name, {knob: value})`"))?;
    Ok(Pin { part, engine, knobs: Knobs::new(knobs.iter().map(|(name, value)| (name.as_str(), *value))) })
}
