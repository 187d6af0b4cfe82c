//! Functions by number, and what their attributes say in the library's words.
//!
//! Attributes are words `name=value` with spaces between; lists have commas. Each function's line says which it has. What it computes and
//! how its results lie is told by [`verdigris::recipe`].

use pyo3::PyResult;
use verdigris::recipe::{self, Convolution, Extents, Input, LossForm, MAX_INPUTS};
use verdigris_graph::{CrossEntropySpec, LossReduction, PoolWindows, Precision, Real, UnaryOp};
use verdigris_tensor::DType;

use crate::errors::{Kind, raise};
use crate::memory::unfit;
use crate::policy::Policy;

/// A function of tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Function {
    /// `x, w, bias?` → y. `stride= padding= dilation= groups=`, `after=` where the padding's sides differ.
    ConvFprop,
    /// `y, w, bias?` → x; extra: the spatial dims of x. As `ConvFprop`. Transposed convolution.
    ConvDgrad,
    /// `x, y` → w; extra: the spatial dims of w. As `ConvFprop`, and `format=contiguous|channels_last` of w.
    ConvWgrad,
    /// `x` → its sum over all axes but `axis=`.
    SumToAxis,
    /// `x [..., k], w [n, k], bias?` → `[..., n]`.
    Linear,
    /// `dy [..., n], w [n, k]` → `[..., k]`.
    LinearInput,
    /// `dy [..., n], x [..., k]` → `[n, k]`.
    LinearWeight,
    /// `x` → y and the index of each maximum. `window= stride= padding= after= dilation=` or `adaptive=`; `index=i32|i64`.
    MaxPool,
    /// `dy, index` → dx; extra: the spatial dims of x. As `MaxPool`.
    MaxPoolBackward,
    /// `x` → y. As `MaxPool` without an index, and `pad=0|1`: whether padding counts.
    AveragePool,
    /// `dy` → dx; extra: the spatial dims of x. As `AveragePool`.
    AveragePoolBackward,
    /// `x` → f(x). `f=` and its attributes.
    Activation,
    /// `dy, x` → dx. As `Activation`.
    ActivationBackward,
    /// `x` → softmax along `axis=`, its logarithm with `log=1`.
    Softmax,
    /// `y, dy` → dx. As `Softmax`.
    SoftmaxBackward,
    /// `logits, labels` → loss, and each row's log-sum-exp in f32 or f64. `axis= smoothing= ignore= reduction=`.
    CrossEntropy,
    /// `logits, labels, dloss, lse` → dlogits. As `CrossEntropy`.
    CrossEntropyBackward,
}

impl Function {
    pub(crate) const ALL: [Function; 17] = [
        Function::ConvFprop,
        Function::ConvDgrad,
        Function::ConvWgrad,
        Function::SumToAxis,
        Function::Linear,
        Function::LinearInput,
        Function::LinearWeight,
        Function::MaxPool,
        Function::MaxPoolBackward,
        Function::AveragePool,
        Function::AveragePoolBackward,
        Function::Activation,
        Function::ActivationBackward,
        Function::Softmax,
        Function::SoftmaxBackward,
        Function::CrossEntropy,
        Function::CrossEntropyBackward,
    ];

    pub(crate) fn numbered(number: u8) -> Option<Function> {
        Function::ALL.get(usize::from(number)).copied()
    }

    /// How many tensors it reads at the most, and whether dims come behind its attributes.
    pub(crate) const fn signature(self) -> (usize, bool) {
        match self {
            Function::SumToAxis | Function::MaxPool | Function::AveragePool | Function::Activation | Function::Softmax => (1, false),
            Function::AveragePoolBackward => (1, true),
            Function::LinearInput
            | Function::LinearWeight
            | Function::ActivationBackward
            | Function::SoftmaxBackward
            | Function::CrossEntropy => (2, false),
            Function::ConvWgrad | Function::MaxPoolBackward => (2, true),
            Function::ConvFprop | Function::Linear => (3, false),
            Function::ConvDgrad => (3, true),
            Function::CrossEntropyBackward => (4, false),
        }
    }

    /// The operator's name.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Function::ConvFprop => "conv_fprop",
            Function::ConvDgrad => "conv_dgrad",
            Function::ConvWgrad => "conv_wgrad",
            Function::SumToAxis => "sum_to_axis",
            Function::Linear => "linear",
            Function::LinearInput => "linear_input",
            Function::LinearWeight => "linear_weight",
            Function::MaxPool => "max_pool",
            Function::MaxPoolBackward => "max_pool_backward",
            Function::AveragePool => "avg_pool",
            Function::AveragePoolBackward => "avg_pool_backward",
            Function::Activation => "activation",
            Function::ActivationBackward => "activation_backward",
            Function::Softmax => "softmax",
            Function::SoftmaxBackward => "softmax_backward",
            Function::CrossEntropy => "cross_entropy",
            Function::CrossEntropyBackward => "cross_entropy_backward",
        }
    }
}

/// Attributes by name.
struct Attributes<'a>(&'a str);

impl<'a> Attributes<'a> {
    fn get(&self, name: &str) -> Option<&'a str> {
        self.0.split_ascii_whitespace().filter_map(|word| word.split_once('=')).find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    fn parse<T: std::str::FromStr>(&self, name: &'static str, text: &str) -> PyResult<T> {
        text.parse()
            .map_err(|_| raise(Kind::Graph, format!("attribute `{name}` is `{text}`; it is a number, or numbers with commas between")))
    }

    fn one<T: std::str::FromStr>(&self, name: &'static str, default: T) -> PyResult<T> {
        self.get(name).map_or(Ok(default), |text| self.parse(name, text))
    }

    fn list(&self, name: &'static str) -> PyResult<Option<Vec<u64>>> {
        self.get(name).map(|text| text.split(',').map(|part| self.parse(name, part)).collect()).transpose()
    }
}

fn unary(attributes: &Attributes<'_>) -> PyResult<UnaryOp> {
    let name = attributes.get("f").ok_or_else(|| raise(Kind::Graph, "attribute `f` is missing; it names the function"))?;
    let mut map = serde_json::Map::new();
    for (key, value) in attributes.0.split_ascii_whitespace().filter_map(|word| word.split_once('=')).filter(|(key, _)| *key != "f") {
        let number: f64 = value.parse().map_err(|_| raise(Kind::Graph, format!("attribute `{key}` is `{value}`; it is a number")))?;
        map.insert(key.to_owned(), serde_json::json!(number));
    }
    let value = if map.is_empty() { serde_json::Value::String(name.to_owned()) } else { serde_json::json!({ name: map }) };
    serde_json::from_value(value).map_err(|error| raise(Kind::Graph, format!("the function `{name}`: {error}")))
}

fn precision(policy: &Policy, a: Input, b: Input) -> PyResult<Precision> {
    policy.precision(a.dtype, b.dtype).ok_or_else(|| {
        let what = format!("products of {} and {}", a.dtype, b.dtype);
        unfit(what, "operands are of one type: f64, f32, f16, bf16, or two of the 8-bit ones")
    })
}

fn windows(attributes: &Attributes<'_>) -> PyResult<PoolWindows> {
    if let Some(out) = attributes.list("adaptive")? {
        return Ok(PoolWindows::Adaptive { out });
    }
    let window = attributes.list("window")?.unwrap_or_default();
    let pads_before = attributes.list("padding")?.unwrap_or_else(|| vec![0; window.len()]);
    Ok(PoolWindows::Sliding {
        strides: attributes.list("stride")?.unwrap_or_else(|| window.clone()),
        dilations: attributes.list("dilation")?.unwrap_or_else(|| vec![1; window.len()]),
        pads_after: attributes.list("after")?.unwrap_or_else(|| pads_before.clone()),
        pads_before,
        window,
    })
}

fn loss(attributes: &Attributes<'_>) -> PyResult<CrossEntropySpec> {
    let reduction = match attributes.get("reduction") {
        Some("none") => LossReduction::None,
        Some("sum") => LossReduction::Sum,
        None | Some("mean") => LossReduction::Mean,
        Some(other) => return Err(raise(Kind::Graph, format!("the reduction is `{other}`; it is `none`, `sum` or `mean`"))),
    };
    let ignore_index = attributes.get("ignore").map(|text| attributes.parse("ignore", text)).transpose()?;
    Ok(CrossEntropySpec {
        axis: attributes.one("axis", 1)?,
        label_smoothing: Real(attributes.one("smoothing", 0.0)?),
        ignore_index,
        reduction,
    })
}

/// The spatial dims behind the attributes.
fn spatial(extra: &[i64]) -> PyResult<Extents> {
    let dim = |&dim: &i64| u64::try_from(dim).map_err(|_| unfit(format_args!("spatial dims {extra:?}"), "dims are not negative"));
    Ok(Extents::Spatial(extra.iter().map(dim).collect::<PyResult<_>>()?))
}

impl Function {
    /// The function with its attributes, as the library draws it.
    pub(crate) fn told(
        self,
        attributes: &str,
        given: &[Option<Input>; MAX_INPUTS],
        extra: &[i64],
        policy: &Policy,
    ) -> PyResult<recipe::Function> {
        use recipe::Function as F;
        let attributes = &Attributes(attributes);
        let precision = || {
            let given = |place: usize| {
                given[place].ok_or_else(|| unfit(format_args!("tensor {place} of the call is missing"), "only a bias may be"))
            };
            precision(policy, given(0)?, given(1)?)
        };
        let counts_padding = || Ok::<bool, pyo3::PyErr>(attributes.one("pad", 1_u8)? != 0);
        let log = || Ok::<bool, pyo3::PyErr>(attributes.one("log", 0_u8)? != 0);
        Ok(match self {
            Function::ConvFprop => F::ConvFprop(convolution(attributes, precision()?)?, UnaryOp::Identity),
            Function::ConvDgrad => F::ConvDgrad(convolution(attributes, precision()?)?, spatial(extra)?),
            Function::ConvWgrad => {
                let format = attributes.get("format").map(|format| format == "channels_last");
                F::ConvWgrad(convolution(attributes, precision()?)?, spatial(extra)?, format)
            }
            Function::SumToAxis => F::SumToAxis(attributes.one("axis", 1)?),
            Function::Linear => F::Linear(precision()?, UnaryOp::Identity),
            Function::LinearInput => F::LinearInput(precision()?),
            Function::LinearWeight => F::LinearWeight(precision()?),
            Function::MaxPool => {
                let index = if attributes.get("index") == Some("i64") { DType::I64 } else { DType::I32 };
                F::MaxPool(windows(attributes)?, Some(index))
            }
            Function::MaxPoolBackward => F::MaxPoolBackward(windows(attributes)?, spatial(extra)?),
            Function::AveragePool => F::AveragePool(windows(attributes)?, counts_padding()?),
            Function::AveragePoolBackward => F::AveragePoolBackward(windows(attributes)?, counts_padding()?, spatial(extra)?),
            Function::Activation => F::Activation(unary(attributes)?),
            Function::ActivationBackward => F::ActivationBackward(unary(attributes)?),
            Function::Softmax => F::Softmax(attributes.one("axis", 0)?, log()?),
            Function::SoftmaxBackward => F::SoftmaxBackward(attributes.one("axis", 0)?, log()?),
            Function::CrossEntropy => F::CrossEntropy(loss(attributes)?, LossForm::WithLse),
            Function::CrossEntropyBackward => F::CrossEntropyBackward(loss(attributes)?),
        })
    }
}

fn convolution(attributes: &Attributes<'_>, precision: Precision) -> PyResult<Convolution> {
    let list = |name| Ok::<Vec<u64>, pyo3::PyErr>(attributes.list(name)?.unwrap_or_default());
    let pads_before = list("padding")?;
    Ok(Convolution {
        strides: list("stride")?,
        pads_after: attributes.list("after")?.unwrap_or_else(|| pads_before.clone()),
        pads_before,
        dilations: list("dilation")?,
        groups: attributes.one("groups", 1)?,
        precision,
    })
}
