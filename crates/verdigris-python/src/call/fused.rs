//! Functions with steps behind them, as a compiler asks for them: what their attributes say, and what the library would make of such a call.

use pyo3::PyResult;
use pyo3::prelude::*;
use verdigris::recipe::{Fused, Input, Step, draw_together};
use verdigris_engines::arch::Arch;
use verdigris_graph::{BinaryOp, Problem, pattern};
use verdigris_tensor::DType;

use super::activation::unary_under;
use super::current;
use super::function::{Attributes, Function};
use crate::errors::{Kind, library, raise};
use crate::memory::{layout_of, unfit};
use crate::policy::{self, Policy};

/// Tensors of a call with steps behind it, as its operator declares them.
pub(super) const TENSORS: usize = 13;

/// What `of= tensors= type=;step;…;attributes of the function` say.
pub(super) fn fused(attributes: &str, given: &[Option<Input>], extra: &[i64], policy: &Policy, keeps: bool) -> PyResult<Fused> {
    let told = || {
        raise(
            Kind::Graph,
            format!(
                "the attributes `{attributes}` of a function with steps; `of= tensors= type=` come first, then the steps, then the function's own, with `;` between"
            ),
        )
    };
    let (head, rest) = attributes.split_once(';').ok_or_else(told)?;
    let (steps, own) = rest.rsplit_once(';').ok_or_else(told)?;
    let head = Attributes(head);
    let name = head.get("of").unwrap_or_default();
    let of = Function::ALL
        .into_iter()
        .find(|function| function.name() == name && !matches!(function, Function::Fused | Function::FusedKeeping))
        .ok_or_else(|| raise(Kind::Graph, format!("attribute `of` is `{name}`; it names a function that has no steps itself")))?;
    let tensors: usize = head.one("tensors", 0)?;
    let inner = given.get(..tensors).filter(|inner| (1..=TENSORS).contains(&inner.len())).ok_or_else(|| {
        unfit(format_args!("{tensors} tensors of `{name}` among {TENSORS}"), "they come first, and there is at least one")
    })?;
    let dtype: DType = head.one("type", DType::F32)?;
    let function = match &of.told(own, inner, extra, policy)?[..] {
        [only] => only.clone(),
        several => return Err(unfit(format_args!("{} gradients with steps behind them", several.len()), "steps stand behind one result")),
    };
    let steps = steps.split(';').map(step).collect::<PyResult<Vec<Step>>>()?;
    Ok(Fused { of: function, tensors, steps, keeps, dtype })
}

fn step(text: &str) -> PyResult<Step> {
    let words = Attributes(text);
    if let Some(name) = words.get("b") {
        let f: BinaryOp = serde_json::from_value(serde_json::Value::String(name.to_owned()))
            .map_err(|error| raise(Kind::Graph, format!("the function `{name}`: {error}")))?;
        let is_right = match words.get("value") {
            None | Some("left") => false,
            Some("right") => true,
            Some(other) => return Err(raise(Kind::Graph, format!("attribute `value` is `{other}`; it is `left` or `right`"))),
        };
        return Ok(Step::Binary { f, is_right });
    }
    if words.get("d").is_some() {
        return Ok(Step::Binary { f: BinaryOp::Backward(unary_under("d", &words)?), is_right: false });
    }
    Ok(Step::Unary(unary_under("f", &words)?))
}

/// A tensor by its element type, dims and strides.
type Described = (String, Vec<i64>, Vec<i64>);

/// What a call would be cut into, without tensors, a plan or a device: each part's kind, with the microseconds that the fastest engine's default would take on an
/// H200 by estimate (infinity where none takes it), and what was put together and what was not, and why. Tensors are told by element type, dims and strides, `None` for
/// those that are missing.
#[pyfunction]
pub(super) fn parts_of_call(
    function: u8,
    tensors: Vec<Option<Described>>,
    attributes: &str,
    dims: Vec<i64>,
) -> PyResult<(Vec<(&'static str, f64)>, String)> {
    let function =
        Function::numbered(function).ok_or_else(|| raise(Kind::Unsupported, format!("there is no function of number {function}")))?;
    let (most, _) = function.signature();
    if tensors.len() > most {
        let what = format!("{} tensors of `{}`", tensors.len(), function.name());
        return Err(unfit(what, "a function reads no more than it has places for"));
    }
    let mut given = tensors.into_iter().map(|tensor| tensor.map(described).transpose()).collect::<PyResult<Vec<Option<Input>>>>()?;
    given.resize(most, None);
    let functions = function.told(attributes, &given, &dims, &policy::numbered(current()))?;
    let graph = draw_together(&functions, &given).map_err(library)?.graph;
    let (partition, account) = pattern::partition_with_account(&graph).map_err(|error| library(verdigris::Error::from(error)))?;
    let arch = Arch::h200();
    let least_us = |problem: &Problem| {
        let accepted = verdigris_engines::engines().filter_map(|engine| engine.accept(problem, &arch).ok());
        accepted.filter_map(|candidate| candidate.cost(&candidate.best()).ok()).map(|cost| cost.us).fold(f64::INFINITY, f64::min)
    };
    Ok((partition.parts.iter().map(|part| (part.problem.kind(), least_us(&part.problem))).collect(), account.describe(&graph)))
}

fn described((dtype, dims, strides): Described) -> PyResult<Input> {
    if dims.len() != strides.len() {
        return Err(unfit(format_args!("dims {dims:?} and strides {strides:?}"), "there are as many strides as dims"));
    }
    let dtype = dtype.parse().map_err(|_| unfit(format_args!("elements of {dtype}"), "they are of a type of the library's"))?;
    Ok(Input { dtype, layout: layout_of(&dims, Some(&strides))?, alignment_bytes: None })
}
