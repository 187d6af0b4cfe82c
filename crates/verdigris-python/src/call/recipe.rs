//! From a function, its attributes and the shapes of its tensors to a graph.
//!
//! Attributes are words `name=value` with spaces between; lists have commas. Each function's line says which it has. Results have the element type
//! of the first tensor unless said otherwise. Those of convolution and pooling are channels-last where the first tensor (or the filter) is,
//! else packed row-major; those of functions of elements lie as their first tensor does.

use pyo3::PyResult;
use verdigris_graph::{
    BinaryOp, Conv, ConvDirection, CrossEntropyBackward, CrossEntropySpec, Graph, GraphBuilder, LossReduction, Matmul, PoolBackward,
    PoolMode, PoolWindows, Precision, Real, ReductionOp, Uid, UnaryOp,
};
use verdigris_tensor::{DType, Layout};

use super::MAX_INPUTS;
use crate::errors::{Kind, graph as refuse, raise};
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

/// A tensor that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input {
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
    /// What its address is a multiple of, where that is little.
    pub(crate) alignment_bytes: Option<u64>,
}

/// A tensor that is written, as PyTorch is to see it.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    pub(crate) uid: Uid,
    pub(crate) dtype: DType,
    pub(crate) dims: Vec<u64>,
    pub(crate) strides: Vec<u64>,
}

/// A call's graph, and which of its tensors is which.
pub(crate) struct Recipe {
    pub(crate) graph: Graph,
    pub(crate) inputs: [Option<Uid>; MAX_INPUTS],
    pub(crate) outputs: Vec<Output>,
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

struct Drawing<'i> {
    g: GraphBuilder,
    given: &'i [Option<Input>; MAX_INPUTS],
    inputs: [Option<Uid>; MAX_INPUTS],
    outputs: Vec<Output>,
}

impl Drawing<'_> {
    fn is_there(&self, place: usize) -> bool {
        self.given[place].is_some()
    }

    fn given(&self, place: usize) -> PyResult<Input> {
        self.given[place].ok_or_else(|| unfit(format_args!("tensor {place} of the call is missing"), "only a bias may be"))
    }

    fn dims(&self, place: usize) -> PyResult<Vec<u64>> {
        Ok(self.given(place)?.layout.dims().to_vec())
    }

    /// The tensor as it is given.
    fn input(&mut self, place: usize, name: &str) -> PyResult<Uid> {
        let layout = self.given(place)?.layout;
        self.input_as(place, name, layout)
    }

    /// The tensor's memory under another layout.
    fn input_as(&mut self, place: usize, name: &str, layout: Layout) -> PyResult<Uid> {
        let Input { dtype, alignment_bytes, .. } = self.given(place)?;
        let uid = self.g.tensor(name, dtype, layout);
        if let Some(bytes) = alignment_bytes {
            self.g.align(uid, bytes.max(dtype.bytes() as u64)).map_err(refuse)?;
        }
        self.inputs[place] = Some(uid);
        Ok(uid)
    }

    /// The tensor as a matrix of `[rows, last dim]`; with a copy where its strides do not fold.
    fn matrix(&mut self, place: usize, name: &str) -> PyResult<Uid> {
        let given = self.given(place)?.layout;
        let Some((&columns, leading)) = given.dims().split_last() else {
            return Err(unfit(format_args!("`{name}` has no dims"), "it has at least one"));
        };
        let rows = leading.iter().product();
        if let Some(row_stride) = folded(leading, &given.strides()[..leading.len()]) {
            let column_stride = given.strides()[leading.len()];
            return self.input_as(place, name, layout(&[rows, columns], &[row_stride, column_stride])?);
        }
        let uid = self.input(place, name)?;
        let matrix = self.g.reshape("fold", uid, &[rows, columns]).map_err(refuse)?;
        let dtype = self.given(place)?.dtype;
        self.g.round_to(matrix, dtype).map_err(refuse)?;
        Ok(matrix)
    }

    /// Adds a bias of one element a channel, where there is one.
    fn biased(&mut self, place: usize, y: Uid, trailing: usize) -> PyResult<Uid> {
        if !self.is_there(place) {
            return Ok(y);
        }
        let bias = self.given(place)?.layout;
        let (&[channels], &[stride]) = (bias.dims(), bias.strides()) else {
            return Err(unfit(format_args!("a bias of dims {:?}", bias.dims()), "a bias has one dim"));
        };
        let mut dims = vec![channels];
        let mut strides = vec![stride];
        dims.resize(1 + trailing, 1);
        strides.resize(1 + trailing, 0);
        let bias = self.input_as(place, "bias", layout(&dims, &strides)?)?;
        self.g.binary("bias", BinaryOp::Add, y, bias).map_err(refuse)
    }

    /// Stores a result, which PyTorch sees as the graph does.
    fn output(&mut self, uid: Uid, name: &str, dtype: DType, layout: Layout) -> PyResult<()> {
        self.output_as(uid, name, dtype, layout, layout.dims().to_vec(), layout.strides().to_vec())
    }

    /// Stores a result, which PyTorch sees under other dims.
    fn output_as(&mut self, uid: Uid, name: &str, dtype: DType, layout: Layout, dims: Vec<u64>, strides: Vec<u64>) -> PyResult<()> {
        self.g.store_as(uid, name, dtype, layout).map_err(refuse)?;
        self.outputs.push(Output { uid, dtype, dims, strides });
        Ok(())
    }

    fn drawn_dims(&self, uid: Uid) -> Vec<u64> {
        self.g.dims(uid).unwrap_or_default()
    }

    /// In channels-last order if asked for, else row-major.
    fn store_in(&mut self, uid: Uid, name: &str, dtype: DType, channels_last: bool) -> PyResult<()> {
        let dims = self.drawn_dims(uid);
        self.output(uid, name, dtype, in_format(&dims, channels_last)?)
    }
}

fn layout(dims: &[u64], strides: &[u64]) -> PyResult<Layout> {
    Layout::new(dims, strides).map_err(|error| raise(Kind::Graph, error.to_string()))
}

/// The one stride by which the leading dims can be walked as one, if there is such.
fn folded(dims: &[u64], strides: &[u64]) -> Option<u64> {
    let mut walked: Option<(u64, u64)> = None;
    for (&dim, &stride) in dims.iter().zip(strides).rev() {
        match walked {
            _ if dim == 1 => {}
            None => walked = Some((stride, stride.checked_mul(dim)?)),
            Some((_, next)) if next != stride => return None,
            Some((first, next)) => walked = Some((first, next.checked_mul(dim)?)),
        }
    }
    // Rows that are one or none have any stride.
    Some(walked.map_or(0, |(first, _)| first))
}

/// Whether PyTorch would call the layout channels-last: its own rule, under which a tensor that is both is not; and the same of three dims, for
/// which PyTorch has no word.
fn is_channels_last(layout: &Layout) -> bool {
    let (dims, strides) = (layout.dims(), layout.strides());
    let order: &[usize] = match dims.len() {
        3 => &[1, 2, 0],
        4 => &[1, 3, 2, 0],
        5 => &[1, 4, 3, 2, 0],
        _ => return false,
    };
    if strides[1] == 0 {
        return false;
    }
    let mut least = 0;
    for &dim in order {
        if dims[dim] == 0 || strides[dim] < least || (dim == 0 && least == strides[1]) {
            return false;
        }
        least = strides[dim].saturating_mul(dims[dim].max(1));
    }
    true
}

fn in_format(dims: &[u64], channels_last: bool) -> PyResult<Layout> {
    let order: Vec<usize> = match dims.len() {
        rank @ 3..=5 if channels_last => std::iter::once(0).chain(2..rank).chain([1]).collect(),
        rank => (0..rank).collect(),
    };
    Layout::with_order(dims, &order).map_err(|error| raise(Kind::Graph, error.to_string()))
}

/// As a result of PyTorch's functions of elements lies: as the tensor does if that has neither gaps nor overlaps, else in the same order of
/// dims without gaps.
fn like(given: &Layout) -> PyResult<Layout> {
    if given.is_packed() {
        return Ok(*given);
    }
    let mut order: Vec<usize> = (0..given.rank()).collect();
    order.sort_by_key(|&dim| std::cmp::Reverse(given.strides()[dim]));
    Layout::with_order(given.dims(), &order).map_err(|error| raise(Kind::Graph, error.to_string()))
}

fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
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

fn average(attributes: &Attributes<'_>) -> PyResult<PoolMode> {
    Ok(PoolMode::Average { count_include_pad: attributes.one("pad", 1_u8)? != 0 })
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

/// Dims before the spatial ones, and those.
fn with_spatial(n: u64, c: u64, spatial: &[i64]) -> PyResult<Vec<u64>> {
    let mut dims = vec![n, c];
    for &dim in spatial {
        dims.push(u64::try_from(dim).map_err(|_| unfit(format_args!("spatial dims {spatial:?}"), "dims are not negative"))?);
    }
    Ok(dims)
}

/// The dims with 1 at the axis.
fn with_axis(dims: &[u64], axis: usize) -> Vec<u64> {
    let mut dims = dims.to_vec();
    dims.insert(axis.min(dims.len()), 1);
    dims
}

/// Draws the graph of a call.
pub(crate) fn draw(
    function: Function,
    attributes: &str,
    given: &[Option<Input>; MAX_INPUTS],
    extra: &[i64],
    policy: &Policy,
) -> PyResult<Recipe> {
    let attributes = Attributes(attributes);
    let mut d = Drawing { g: GraphBuilder::new(function.name()), given, inputs: [None; MAX_INPUTS], outputs: Vec::new() };
    match function {
        Function::ConvFprop | Function::ConvDgrad | Function::ConvWgrad => draw_conv(&mut d, function, &attributes, extra, policy)?,
        Function::Linear | Function::LinearInput | Function::LinearWeight => draw_linear(&mut d, function, policy)?,
        Function::SumToAxis => {
            let (x, given) = (d.input(0, "x")?, d.given(0)?);
            let axis: usize = attributes.one("axis", 1)?;
            let rank = given.layout.rank();
            let Some(&extent) = given.layout.dims().get(axis) else {
                return Err(unfit(format_args!("axis {axis} of a tensor of {rank} dims"), "the axis is one of its dims"));
            };
            let axes: Vec<u32> = (0..rank as u32).filter(|&other| other as usize != axis).collect();
            let sum = if axes.is_empty() {
                d.g.unary("sum", UnaryOp::Identity, x).map_err(refuse)?
            } else {
                d.g.reduction("sum", ReductionOp::Add, x, &axes).map_err(refuse)?
            };
            let layout = in_format(&d.drawn_dims(sum), false)?;
            d.output_as(sum, "sums", given.dtype, layout, vec![extent], vec![1])?;
        }
        Function::MaxPool => {
            let (x, given) = (d.input(0, "x")?, d.given(0)?);
            let index_dtype = if attributes.get("index") == Some("i64") { DType::I64 } else { DType::I32 };
            let (y, index) = d.g.max_pool_with_index("max pool", windows(&attributes)?, x, index_dtype).map_err(refuse)?;
            let last = is_channels_last(&given.layout);
            d.store_in(y, "y", given.dtype, last)?;
            d.store_in(index, "index", index_dtype, last)?;
        }
        Function::AveragePool => {
            let (x, given) = (d.input(0, "x")?, d.given(0)?);
            let y = d.g.pool("average pool", average(&attributes)?, windows(&attributes)?, x).map_err(refuse)?;
            d.store_in(y, "y", given.dtype, is_channels_last(&given.layout))?;
        }
        Function::MaxPoolBackward | Function::AveragePoolBackward => {
            let (dy, given) = (d.input(0, "dy")?, d.given(0)?);
            let is_max = function == Function::MaxPoolBackward;
            let index = if is_max { Some(d.input(1, "index")?) } else { None };
            let mode = if is_max { PoolMode::Max } else { average(&attributes)? };
            let &[n, c, ..] = given.layout.dims() else {
                return Err(unfit(format_args!("dy of dims {:?}", given.layout.dims()), "it is [n, c, spatial…]"));
            };
            let x_dims = with_spatial(n, c, extra)?;
            let pool = PoolBackward { mode, windows: windows(&attributes)?, dy, x: None, index, dx: Uid(0) };
            let dx = d.g.pool_backward("pool backward", pool, &x_dims).map_err(refuse)?;
            // The index was made beside the forward result, whose order the input's is.
            let told_by = if is_max { d.given(1)?.layout } else { given.layout };
            d.store_in(dx, "dx", given.dtype, is_channels_last(&told_by))?;
        }
        Function::Activation => {
            let (x, given) = (d.input(0, "x")?, d.given(0)?);
            let y = d.g.unary("activation", unary(&attributes)?, x).map_err(refuse)?;
            d.output(y, "y", given.dtype, like(&given.layout)?)?;
        }
        Function::ActivationBackward => {
            let (dy, x) = (d.input(0, "dy")?, d.input(1, "x")?);
            let x_given = d.given(1)?;
            let dx = d.g.binary("activation backward", BinaryOp::Backward(unary(&attributes)?), dy, x).map_err(refuse)?;
            d.output(dx, "dx", x_given.dtype, like(&x_given.layout)?)?;
        }
        Function::Softmax => {
            let (x, given) = (d.input(0, "x")?, d.given(0)?);
            let y = d.g.softmax("softmax", x, attributes.one("axis", 0)?, attributes.one("log", 0_u8)? != 0).map_err(refuse)?;
            d.output(y, "y", given.dtype, like(&given.layout)?)?;
        }
        Function::SoftmaxBackward => {
            let (y, dy) = (d.input(0, "y")?, d.input(1, "dy")?);
            let y_given = d.given(0)?;
            let (axis, log) = (attributes.one("axis", 0)?, attributes.one("log", 0_u8)? != 0);
            let dx = d.g.softmax_backward("softmax backward", y, dy, axis, log).map_err(refuse)?;
            d.output(dx, "dx", y_given.dtype, like(&y_given.layout)?)?;
        }
        Function::CrossEntropy | Function::CrossEntropyBackward => draw_loss(&mut d, function, &attributes)?,
    }
    let Drawing { g, inputs, outputs, .. } = d;
    Ok(Recipe { graph: g.finish().map_err(refuse)?, inputs, outputs })
}

fn draw_conv(d: &mut Drawing<'_>, function: Function, attributes: &Attributes<'_>, extra: &[i64], policy: &Policy) -> PyResult<()> {
    let (a, b) = (d.given(0)?, d.given(1)?);
    let spatial = a.layout.rank().saturating_sub(2);
    let groups: u64 = attributes.one("groups", 1)?;
    let ones = || vec![1; spatial];
    let pads_before = attributes.list("padding")?.unwrap_or_else(|| vec![0; spatial]);
    let conv = |x, w, y| -> PyResult<Conv> {
        Ok(Conv {
            pads_after: attributes.list("after")?.unwrap_or_else(|| pads_before.clone()),
            pads_before: pads_before.clone(),
            strides: attributes.list("stride")?.unwrap_or_else(ones),
            dilations: attributes.list("dilation")?.unwrap_or_else(ones),
            groups,
            ..Conv::new(ConvDirection::Fprop, x, w, y, spatial, precision(policy, a, b)?)
        })
    };
    let last = is_channels_last(&a.layout) || is_channels_last(&b.layout);
    match function {
        Function::ConvDgrad => {
            let (y, w) = (d.input(0, "y")?, d.input(1, "w")?);
            let (&[n, ..], &[_, c, ..]) = (a.layout.dims(), b.layout.dims()) else {
                return Err(unfit(format_args!("y {} and w {}", a.layout, b.layout), "they are [n, k, out…] and [k, c / groups, filter…]"));
            };
            let x_dims = with_spatial(n, c.saturating_mul(groups), extra)?;
            let x = d.g.conv_dgrad("conv", conv(Uid(0), w, y)?, &x_dims).map_err(refuse)?;
            let x = d.biased(2, x, spatial)?;
            d.store_in(x, "x", a.dtype, last)
        }
        Function::ConvWgrad => {
            let (x, y) = (d.input(0, "x")?, d.input(1, "y")?);
            let (&[_, c, ..], &[_, k, ..]) = (a.layout.dims(), b.layout.dims()) else {
                return Err(unfit(format_args!("x {} and y {}", a.layout, b.layout), "they are [n, c, spatial…] and [n, k, out…]"));
            };
            let w_dims = with_spatial(k, c.checked_div(groups).unwrap_or(0), extra)?;
            let w = d.g.conv_wgrad("conv", conv(x, Uid(0), y)?, &w_dims).map_err(refuse)?;
            let last = attributes.get("format").map_or(last, |format| format == "channels_last");
            d.store_in(w, "w", a.dtype, last)
        }
        _ => {
            let (x, w) = (d.input(0, "x")?, d.input(1, "w")?);
            let y = d.g.conv_fprop("conv", conv(x, w, Uid(0))?).map_err(refuse)?;
            let y = d.biased(2, y, spatial)?;
            d.store_in(y, "y", a.dtype, last)
        }
    }
}

fn draw_linear(d: &mut Drawing<'_>, function: Function, policy: &Policy) -> PyResult<()> {
    let (a, b) = (d.given(0)?, d.given(1)?);
    let precision = precision(policy, a, b)?;
    let leading = |dims: &[u64]| dims[..dims.len().saturating_sub(1)].to_vec();
    let transposed = |given: &Layout| match (given.dims(), given.strides()) {
        (&[rows, columns], &[row_stride, column_stride]) => layout(&[columns, rows], &[column_stride, row_stride]),
        (dims, _) => Err(unfit(format_args!("a weight of dims {dims:?}"), "a weight is [out, in]")),
    };
    match function {
        Function::LinearWeight => {
            let (dy, x) = (d.matrix(0, "dy")?, d.matrix(1, "x")?);
            let dy = d.g.transpose("turned", dy, &[1, 0]).map_err(refuse)?;
            let w = d.g.matmul_with("weight", Matmul::new(dy, x, Uid(0), precision)).map_err(refuse)?;
            d.store_in(w, "dw", a.dtype, false)
        }
        Function::LinearInput => {
            let (dy, w) = (d.matrix(0, "dy")?, d.input(1, "w")?);
            let x = d.g.matmul_with("input", Matmul::new(dy, w, Uid(0), precision)).map_err(refuse)?;
            let columns = d.drawn_dims(x).last().copied().unwrap_or(0);
            rows_as(d, x, "dx", a.dtype, leading(&d.dims(0)?), columns)
        }
        _ => {
            let x = d.matrix(0, "x")?;
            let w = d.input_as(1, "w", transposed(&b.layout)?)?;
            let y = d.g.matmul_with("linear", Matmul::new(x, w, Uid(0), precision)).map_err(refuse)?;
            let y = d.biased(2, y, 0)?;
            let columns = d.drawn_dims(y).last().copied().unwrap_or(0);
            rows_as(d, y, "y", a.dtype, leading(&d.dims(0)?), columns)
        }
    }
}

/// Stores a matrix, which PyTorch sees with the leading dims unfolded.
fn rows_as(d: &mut Drawing<'_>, matrix: Uid, name: &str, dtype: DType, mut leading: Vec<u64>, columns: u64) -> PyResult<()> {
    let stored = in_format(&d.drawn_dims(matrix), false)?;
    leading.push(columns);
    let seen = in_format(&leading, false)?;
    d.output_as(matrix, name, dtype, stored, leading, seen.strides().to_vec())
}

fn draw_loss(d: &mut Drawing<'_>, function: Function, attributes: &Attributes<'_>) -> PyResult<()> {
    let spec = loss(attributes)?;
    let axis = spec.axis as usize;
    let logits_given = d.given(0)?;
    let logits = d.input(0, "logits")?;
    // What PyTorch has without the class axis has it here, with extent 1.
    let with_class = |given: &Layout| {
        let mut strides = given.strides().to_vec();
        strides.insert(axis.min(strides.len()), 1);
        layout(&with_axis(given.dims(), axis), &strides)
    };
    let labels_layout = with_class(&d.given(1)?.layout)?;
    let labels = d.input_as(1, "labels", labels_layout)?;
    if function == Function::CrossEntropy {
        let (loss, lse) = d.g.cross_entropy_with_lse("cross entropy", spec, logits, labels).map_err(refuse)?;
        let rows = d.dims(1)?;
        let rows_layout = in_format(&rows, false)?;
        let stored = in_format(&d.drawn_dims(loss), false)?;
        let (seen_dims, seen_strides) = match spec.reduction {
            LossReduction::None => (rows.clone(), rows_layout.strides().to_vec()),
            LossReduction::Sum | LossReduction::Mean => (Vec::new(), Vec::new()),
        };
        d.output_as(loss, "loss", logits_given.dtype, stored, seen_dims, seen_strides)?;
        let stored = in_format(&d.drawn_dims(lse), false)?;
        return d.output_as(lse, "lse", wide(logits_given.dtype), stored, rows, rows_layout.strides().to_vec());
    }
    let dloss_layout = match spec.reduction {
        LossReduction::None => with_class(&d.given(2)?.layout)?,
        LossReduction::Sum | LossReduction::Mean => in_format(&vec![1; logits_given.layout.rank()], false)?,
    };
    let dloss = d.input_as(2, "dloss", dloss_layout)?;
    let lse = if d.is_there(3) {
        let lse_layout = with_class(&d.given(3)?.layout)?;
        Some(d.input_as(3, "lse", lse_layout)?)
    } else {
        None
    };
    let backward = CrossEntropyBackward { spec, logits, labels, dloss, lse, dlogits: Uid(0) };
    let dlogits = d.g.cross_entropy_backward("cross entropy backward", backward).map_err(refuse)?;
    let like = like(&logits_given.layout)?;
    d.output(dlogits, "dlogits", logits_given.dtype, like)
}
