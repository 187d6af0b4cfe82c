//! Functions of one value, as attributes say them.

use pyo3::PyResult;
use verdigris::recipe::{self, ComposedActivation};
use verdigris_graph::{Real, UnaryOp};

use super::function::Attributes;
use crate::errors::{Kind, raise};

pub(super) fn unary(attributes: &Attributes<'_>) -> PyResult<UnaryOp> {
    unary_under("f", attributes)
}

/// The function that the attribute `called` names, with those beside it.
pub(super) fn unary_under(called: &str, attributes: &Attributes<'_>) -> PyResult<UnaryOp> {
    let name =
        attributes.get(called).ok_or_else(|| raise(Kind::Graph, format!("attribute `{called}` is missing; it names the function")))?;
    let mut map = serde_json::Map::new();
    for (key, value) in attributes.0.split_ascii_whitespace().filter_map(|word| word.split_once('=')).filter(|(key, _)| *key != called) {
        let number: f64 = value.parse().map_err(|_| raise(Kind::Graph, format!("attribute `{key}` is `{value}`; it is a number")))?;
        map.insert(key.to_owned(), serde_json::json!(number));
    }
    let value = if map.is_empty() { serde_json::Value::String(name.to_owned()) } else { serde_json::json!({ name: map }) };
    serde_json::from_value(value).map_err(|error| raise(Kind::Graph, format!("the function `{name}`: {error}")))
}

/// An activation: a function of the graph's, or one that is composed of these.
pub(super) fn activation_of(attributes: &Attributes<'_>) -> PyResult<recipe::Function> {
    use recipe::Function as F;
    let number = |name: &'static str| {
        let text = attributes.get(name).ok_or_else(|| raise(Kind::Graph, format!("attribute `{name}` is missing; it is a number")))?;
        attributes.parse(name, text).map(Real)
    };
    Ok(match (attributes.get("f"), attributes.get("threshold")) {
        (Some("softplus"), Some(_)) => F::Softplus { beta: Real(attributes.one("beta", 1.0)?), threshold: number("threshold")? },
        (Some("selu"), _) => F::Composed(ComposedActivation::Selu),
        (Some("celu"), _) => F::Composed(ComposedActivation::Celu { alpha: number("alpha")? }),
        (Some("log_sigmoid"), _) => F::Composed(ComposedActivation::LogSigmoid),
        (Some("hard_shrink"), _) => F::Composed(ComposedActivation::HardShrink { lambda: number("lambda")? }),
        (Some("soft_shrink"), _) => F::Composed(ComposedActivation::SoftShrink { lambda: number("lambda")? }),
        (Some("tanh_shrink"), _) => F::Composed(ComposedActivation::TanhShrink),
        (Some("soft_sign"), _) => F::Composed(ComposedActivation::SoftSign),
        (Some("threshold"), _) => F::Composed(ComposedActivation::Threshold { bound: number("bound")?, value: number("value")? }),
        _ => F::Activation(unary(attributes)?),
    })
}
