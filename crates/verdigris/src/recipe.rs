//! Functions of tensors as graphs: what the tensors are goes in, a graph comes out, no memory is touched.
//!
//! Every door that offers functions draws them here, and runs the graph as a [`Plan`](crate::Plan) on the memory that it has:
//! [`crate::functional`] on [`Tensor`](crate::Tensor)s, the Python package on PyTorch's.
//!
//! **Where results lie.** Those of convolution and pooling are channels-last where the first tensor (or the filter) is, else packed
//! row-major; those of functions of elements lie as their first tensor does, without gaps. They have the element type of the first tensor
//! unless the function says otherwise.
//!
//! ```
//! use verdigris::recipe::{Function, Input, draw};
//! use verdigris_graph::UnaryOp;
//! use verdigris_tensor::{DType, Layout};
//!
//! let x = Input { dtype: DType::F16, layout: Layout::row_major(&[2, 3])?, alignment_bytes: None };
//! let recipe = draw(&Function::Activation(UnaryOp::Relu), [Some(x), None, None, None])?;
//! assert_eq!(recipe.graph.nodes.len(), 1);
//! assert_eq!((recipe.results[0].dtype, &recipe.results[0].layout), (DType::F16, &x.layout));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use verdigris_graph::{
    BinaryOp, Conv, ConvDirection, CrossEntropyBackward, CrossEntropySpec, Graph, GraphBuilder, LossReduction, Matmul, PoolBackward,
    PoolMode, PoolWindows, Precision, ReductionOp, TernaryOp, Uid, UnaryOp,
};
use verdigris_tensor::{DType, Layout};

use crate::error::Error;

/// Most tensors that a function reads.
pub const MAX_INPUTS: usize = 4;

/// A function of tensors, with its attributes.
#[derive(Clone, PartialEq, Debug)]
pub enum Function {
    /// `a, b` → `a · b` over the last two dims; those before them are batch dims.
    Matmul(Precision),
    /// `x [..., k], w [n, k], bias?` → `f(x · wᵀ + bias)`, `[..., n]`.
    Linear(Precision, UnaryOp),
    /// `dy [..., n], w [n, k]` → the gradient of `Linear` with respect to x, `[..., k]`.
    LinearInput(Precision),
    /// `dy [..., n], x [..., k]` → the gradient of `Linear` with respect to w, `[n, k]`.
    LinearWeight(Precision),
    /// `x, w, bias?` → `f(conv(x, w) + bias)`.
    ConvFprop(Convolution, UnaryOp),
    /// `y, w, bias?` → x, of these extents. Transposed convolution.
    ConvDgrad(Convolution, Extents),
    /// `x, y` → w, of these extents; channels-last or not, where that is said.
    ConvWgrad(Convolution, Extents, Option<bool>),
    /// `x` → its sum over all dims but this one.
    SumToAxis(usize),
    /// `x` → its maxima, and the index of each in this type, where one is given.
    MaxPool(PoolWindows, Option<DType>),
    /// `dy, index` → the gradient of `MaxPool` with respect to x, of these extents.
    MaxPoolBackward(PoolWindows, Extents),
    /// `x` → its means; whether padding counts.
    AveragePool(PoolWindows, bool),
    /// `dy` → the gradient of `AveragePool` with respect to x, of these extents.
    AveragePoolBackward(PoolWindows, bool, Extents),
    /// `x` → `f(x)`.
    Activation(UnaryOp),
    /// `dy, x` → `dy · f′(x)`, of the type of x.
    ActivationBackward(UnaryOp),
    /// `x, z` → `f(x, z)`, broadcast.
    Binary(BinaryOp),
    /// `x, z, t` → x where t is not 0, else z; broadcast.
    Select,
    /// `x` → x in another type.
    Cast(DType),
    /// `x` → its reduction over these axes, which stay with extent 1.
    Reduce(ReductionOp, Vec<u32>),
    /// `x` → softmax along the axis; its logarithm, where that is said.
    Softmax(u32, bool),
    /// `y, dy` → the gradient of `Softmax` with respect to x.
    SoftmaxBackward(u32, bool),
    /// `logits, labels` → the loss. Labels have the dims of the logits with 1 at the class axis, or without it.
    CrossEntropy(CrossEntropySpec, LossForm),
    /// `logits, labels, dloss, lse?` → the gradient of `CrossEntropy` with respect to the logits.
    CrossEntropyBackward(CrossEntropySpec),
    /// `x` → its elements in row-major order under other dims.
    Reshape(Vec<u64>),
}

/// How a loss is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LossForm {
    /// In f32 (f64 for f64 logits), with the class axis of extent 1.
    Wide,
    /// In the type of the logits and without the class axis, a mean or sum without dims; behind it each row's log-sum-exp, in f32 or f64.
    WithLse,
}

/// Attributes of a convolution; lists have one entry a spatial dim, or none, which stands for strides and dilations of 1 and no padding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Convolution {
    /// Elements of the input from one output to the next.
    pub strides: Vec<u64>,
    /// Elements of padding before the first.
    pub pads_before: Vec<u64>,
    /// Elements of padding behind the last.
    pub pads_after: Vec<u64>,
    /// Elements of the input from one filter tap to the next.
    pub dilations: Vec<u64>,
    /// Groups of channels.
    pub groups: u64,
    /// How products are formed and summed.
    pub precision: Precision,
}

/// Dims of a result that its function's tensors do not tell.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Extents {
    /// All.
    Whole(Vec<u64>),
    /// Those behind the first two, which follow.
    Spatial(Vec<u64>),
}

impl Extents {
    fn dims(&self, first: u64, second: u64) -> Vec<u64> {
        match self {
            Extents::Whole(dims) => dims.clone(),
            Extents::Spatial(spatial) => [first, second].into_iter().chain(spatial.iter().copied()).collect(),
        }
    }
}

impl Function {
    /// Its name, which is its graph's.
    pub const fn name(&self) -> &'static str {
        match self {
            Function::Matmul(_) => "matmul",
            Function::Linear(..) => "linear",
            Function::LinearInput(_) => "linear_input",
            Function::LinearWeight(_) => "linear_weight",
            Function::ConvFprop(..) => "conv_fprop",
            Function::ConvDgrad(..) => "conv_dgrad",
            Function::ConvWgrad(..) => "conv_wgrad",
            Function::SumToAxis(_) => "sum_to_axis",
            Function::MaxPool(..) => "max_pool",
            Function::MaxPoolBackward(..) => "max_pool_backward",
            Function::AveragePool(..) => "avg_pool",
            Function::AveragePoolBackward(..) => "avg_pool_backward",
            Function::Activation(_) => "activation",
            Function::ActivationBackward(_) => "activation_backward",
            Function::Binary(_) => "binary",
            Function::Select => "select",
            Function::Cast(_) => "cast",
            Function::Reduce(..) => "reduce",
            Function::Softmax(..) => "softmax",
            Function::SoftmaxBackward(..) => "softmax_backward",
            Function::CrossEntropy(..) => "cross_entropy",
            Function::CrossEntropyBackward(_) => "cross_entropy_backward",
            Function::Reshape(_) => "reshape",
        }
    }
}

/// A tensor that is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Input {
    /// Its element type.
    pub dtype: DType,
    /// Its dims and strides.
    pub layout: Layout,
    /// What its address is a multiple of, in bytes, where that is to be declared.
    pub alignment_bytes: Option<u64>,
}

/// A tensor that is written, as the caller is to see it: the graph may know its memory under other dims.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Its uid in the graph.
    pub uid: Uid,
    /// Its element type.
    pub dtype: DType,
    /// Its dims and strides.
    pub layout: Layout,
}

/// A function's graph, and which of its tensors is which.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The graph.
    pub graph: Graph,
    /// For each tensor that the function reads, its uid.
    pub inputs: [Option<Uid>; MAX_INPUTS],
    /// What it writes, in order.
    pub results: Vec<Outcome>,
}

/// The graph of a function of such tensors.
///
/// # Errors
/// [`Error::Graph`] where an op refuses, [`Error::Operand`] for a tensor that the function cannot take.
pub fn draw(function: &Function, given: [Option<Input>; MAX_INPUTS]) -> Result<Recipe, Error> {
    let mut d = Drawing { g: GraphBuilder::new(function.name()), given, inputs: [None; MAX_INPUTS], results: Vec::new() };
    match function {
        Function::Matmul(_) | Function::Linear(..) | Function::LinearInput(_) | Function::LinearWeight(_) => d.products(function)?,
        Function::ConvFprop(..) | Function::ConvDgrad(..) | Function::ConvWgrad(..) => d.convolutions(function)?,
        Function::MaxPool(..) | Function::MaxPoolBackward(..) | Function::AveragePool(..) | Function::AveragePoolBackward(..) => {
            d.pools(function)?;
        }
        Function::CrossEntropy(spec, form) => d.loss(*spec, *form)?,
        Function::CrossEntropyBackward(spec) => d.loss_backward(*spec)?,
        _ => d.elements(function)?,
    }
    let Drawing { g, inputs, results, .. } = d;
    Ok(Recipe { graph: g.finish()?, inputs, results })
}

/// The operands do not suit.
fn unfit(what: impl std::fmt::Display, rule: &'static str) -> Error {
    Error::Operand { what: what.to_string(), rule }
}

struct Drawing {
    g: GraphBuilder,
    given: [Option<Input>; MAX_INPUTS],
    inputs: [Option<Uid>; MAX_INPUTS],
    results: Vec<Outcome>,
}

impl Drawing {
    fn given(&self, place: usize) -> Result<Input, Error> {
        self.given[place].ok_or_else(|| unfit(format_args!("tensor {place} of the call is missing"), "only a bias may be"))
    }

    /// The tensor as it is given.
    fn input(&mut self, place: usize, name: &str) -> Result<Uid, Error> {
        let layout = self.given(place)?.layout;
        self.input_as(place, name, layout)
    }

    /// The tensor's memory under another layout.
    fn input_as(&mut self, place: usize, name: &str, layout: Layout) -> Result<Uid, Error> {
        let Input { dtype, alignment_bytes, .. } = self.given(place)?;
        let uid = self.g.tensor(name, dtype, layout);
        if let Some(bytes) = alignment_bytes {
            self.g.align(uid, bytes.max(dtype.bytes() as u64))?;
        }
        self.inputs[place] = Some(uid);
        Ok(uid)
    }

    /// The tensor as a matrix of `[rows, last dim]`; with a copy where its strides do not fold.
    fn matrix(&mut self, place: usize, name: &str) -> Result<Uid, Error> {
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
        let matrix = self.g.reshape("fold", uid, &[rows, columns])?;
        let dtype = self.given(place)?.dtype;
        self.g.round_to(matrix, dtype)?;
        Ok(matrix)
    }

    /// Adds a bias of one element a channel, where there is one.
    fn biased(&mut self, place: usize, y: Uid, trailing: usize) -> Result<Uid, Error> {
        let Some(Input { layout: bias, .. }) = self.given[place] else { return Ok(y) };
        let mut long = bias.dims().iter().zip(bias.strides()).filter(|&(&dim, _)| dim != 1);
        let (Some(_), (&channels, &stride), None) = (bias.dims().first(), long.next().unwrap_or((&1, &1)), long.next()) else {
            return Err(unfit(format_args!("a bias of dims {:?}", bias.dims()), "a bias has one dim"));
        };
        let (mut dims, mut strides) = (vec![channels], vec![stride]);
        dims.resize(1 + trailing, 1);
        strides.resize(1 + trailing, 0);
        let bias = self.input_as(place, "bias", layout(&dims, &strides)?)?;
        Ok(self.g.binary("bias", BinaryOp::Add, y, bias)?)
    }

    fn activated(&mut self, f: UnaryOp, y: Uid) -> Result<Uid, Error> {
        Ok(if f == UnaryOp::Identity { y } else { self.g.unary("activation", f, y)? })
    }

    fn dims_of(&self, uid: Uid) -> Vec<u64> {
        self.g.dims(uid).unwrap_or_default()
    }

    /// Stores a result, which the caller sees as the graph does.
    fn store(&mut self, uid: Uid, name: &str, dtype: DType, layout: Layout) -> Result<(), Error> {
        self.store_as(uid, name, dtype, layout, layout)
    }

    /// Stores a result, which the caller sees under another layout.
    fn store_as(&mut self, uid: Uid, name: &str, dtype: DType, stored: Layout, seen: Layout) -> Result<(), Error> {
        self.g.store_as(uid, name, dtype, stored)?;
        self.results.push(Outcome { uid, dtype, layout: seen });
        Ok(())
    }

    /// In channels-last order if asked for, else row-major.
    fn store_in(&mut self, uid: Uid, name: &str, dtype: DType, channels_last: bool) -> Result<(), Error> {
        let layout = in_format(&self.dims_of(uid), channels_last)?;
        self.store(uid, name, dtype, layout)
    }

    /// In the order of another tensor's dims.
    fn store_like(&mut self, uid: Uid, name: &str, dtype: DType, like: &Layout) -> Result<(), Error> {
        let layout = in_order_of(like, &self.dims_of(uid))?;
        self.store(uid, name, dtype, layout)
    }

    fn products(&mut self, function: &Function) -> Result<(), Error> {
        let (a, b) = (self.given(0)?, self.given(1)?);
        match *function {
            Function::Linear(precision, activation) => {
                let x = self.matrix(0, "x")?;
                let (&[rows, columns], &[row_stride, column_stride]) = (b.layout.dims(), b.layout.strides()) else {
                    return Err(unfit(format_args!("a weight of dims {:?}", b.layout.dims()), "a weight is [out, in]"));
                };
                let w = self.input_as(1, "w", layout(&[columns, rows], &[column_stride, row_stride])?)?;
                let y = self.g.matmul_with("linear", Matmul::new(x, w, Uid(0), precision))?;
                let y = self.biased(2, y, 0)?;
                let y = self.activated(activation, y)?;
                self.store_rows(y, "y", a)
            }
            Function::LinearInput(precision) => {
                let (dy, w) = (self.matrix(0, "dy")?, self.input(1, "w")?);
                let x = self.g.matmul_with("input", Matmul::new(dy, w, Uid(0), precision))?;
                self.store_rows(x, "dx", a)
            }
            Function::LinearWeight(precision) => {
                let (dy, x) = (self.matrix(0, "dy")?, self.matrix(1, "x")?);
                let dy = self.g.transpose("turned", dy, &[1, 0])?;
                let w = self.g.matmul_with("weight", Matmul::new(dy, x, Uid(0), precision))?;
                self.store_in(w, "dw", a.dtype, false)
            }
            Function::Matmul(precision) => {
                let (left, right) = (self.input(0, "a")?, self.input(1, "b")?);
                let d = self.g.matmul_with("matmul", Matmul::new(left, right, Uid(0), precision))?;
                self.store_like(d, "d", a.dtype, &a.layout)
            }
            _ => Ok(()),
        }
    }

    /// Stores a matrix, which is seen with the first dims of the tensor whose rows it has.
    fn store_rows(&mut self, matrix: Uid, name: &str, rows: Input) -> Result<(), Error> {
        let dims = self.dims_of(matrix);
        let mut seen = rows.layout.dims().to_vec();
        seen.pop();
        seen.extend(dims.last());
        self.store_as(matrix, name, rows.dtype, in_format(&dims, false)?, in_format(&seen, false)?)
    }

    fn convolutions(&mut self, function: &Function) -> Result<(), Error> {
        let (a, b) = (self.given(0)?, self.given(1)?);
        let spatial = a.layout.rank().saturating_sub(2);
        let whole = |list: &[u64], default: u64| if list.is_empty() { vec![default; spatial] } else { list.to_vec() };
        let conv = |c: &Convolution, x, w, y| Conv {
            pads_before: whole(&c.pads_before, 0),
            pads_after: whole(&c.pads_after, 0),
            strides: whole(&c.strides, 1),
            dilations: whole(&c.dilations, 1),
            groups: c.groups,
            ..Conv::new(ConvDirection::Fprop, x, w, y, spatial, c.precision)
        };
        let last = is_channels_last(&a.layout) || is_channels_last(&b.layout);
        match function {
            Function::ConvFprop(c, activation) => {
                let (x, w) = (self.input(0, "x")?, self.input(1, "w")?);
                let y = self.g.conv_fprop("conv", conv(c, x, w, Uid(0)))?;
                let y = self.biased(2, y, spatial)?;
                let y = self.activated(*activation, y)?;
                self.store_in(y, "y", a.dtype, last)
            }
            Function::ConvDgrad(c, extents) => {
                let (y, w) = (self.input(0, "y")?, self.input(1, "w")?);
                let (&[n, ..], &[_, channels, ..]) = (a.layout.dims(), b.layout.dims()) else {
                    let rule = "they are [n, k, out…] and [k, c / groups, filter…]";
                    return Err(unfit(format_args!("y {} and w {}", a.layout, b.layout), rule));
                };
                let x_dims = extents.dims(n, channels.saturating_mul(c.groups));
                let x = self.g.conv_dgrad("conv", conv(c, Uid(0), w, y), &x_dims)?;
                let x = self.biased(2, x, spatial)?;
                self.store_in(x, "x", a.dtype, last)
            }
            Function::ConvWgrad(c, extents, format) => {
                let (x, y) = (self.input(0, "x")?, self.input(1, "y")?);
                let (&[_, channels, ..], &[_, k, ..]) = (a.layout.dims(), b.layout.dims()) else {
                    return Err(unfit(format_args!("x {} and y {}", a.layout, b.layout), "they are [n, c, spatial…] and [n, k, out…]"));
                };
                let w_dims = extents.dims(k, channels.checked_div(c.groups).unwrap_or(0));
                let w = self.g.conv_wgrad("conv", conv(c, x, Uid(0), y), &w_dims)?;
                self.store_in(w, "w", a.dtype, format.unwrap_or(last))
            }
            _ => Ok(()),
        }
    }

    fn pools(&mut self, function: &Function) -> Result<(), Error> {
        let given = self.given(0)?;
        let average = |count_include_pad: bool| PoolMode::Average { count_include_pad };
        match function {
            Function::MaxPool(windows, Some(index_dtype)) => {
                let x = self.input(0, "x")?;
                let (y, index) = self.g.max_pool_with_index("max pool", windows.clone(), x, *index_dtype)?;
                let last = is_channels_last(&given.layout);
                self.store_in(y, "y", given.dtype, last)?;
                self.store_in(index, "index", *index_dtype, last)
            }
            Function::MaxPool(windows, None) => {
                let x = self.input(0, "x")?;
                let y = self.g.pool("max pool", PoolMode::Max, windows.clone(), x)?;
                self.store_in(y, "y", given.dtype, is_channels_last(&given.layout))
            }
            Function::AveragePool(windows, counts) => {
                let x = self.input(0, "x")?;
                let y = self.g.pool("average pool", average(*counts), windows.clone(), x)?;
                self.store_in(y, "y", given.dtype, is_channels_last(&given.layout))
            }
            Function::MaxPoolBackward(windows, extents) => {
                let (dy, index) = (self.input(0, "dy")?, self.input(1, "index")?);
                // The index was made beside the forward result, whose order the input's is.
                let told_by = self.given(1)?.layout;
                self.pool_backward(PoolMode::Max, windows, dy, Some(index), extents, &told_by)
            }
            Function::AveragePoolBackward(windows, counts, extents) => {
                let dy = self.input(0, "dy")?;
                self.pool_backward(average(*counts), windows, dy, None, extents, &given.layout)
            }
            _ => Ok(()),
        }
    }

    fn pool_backward(
        &mut self,
        mode: PoolMode,
        windows: &PoolWindows,
        dy: Uid,
        index: Option<Uid>,
        extents: &Extents,
        told_by: &Layout,
    ) -> Result<(), Error> {
        let given = self.given(0)?;
        let &[n, c, ..] = given.layout.dims() else {
            return Err(unfit(format_args!("dy of dims {:?}", given.layout.dims()), "it is [n, c, spatial…]"));
        };
        let pool = PoolBackward { mode, windows: windows.clone(), dy, x: None, index, dx: Uid(0) };
        let dx = self.g.pool_backward("pool backward", pool, &extents.dims(n, c))?;
        self.store_in(dx, "dx", given.dtype, is_channels_last(told_by))
    }

    fn elements(&mut self, function: &Function) -> Result<(), Error> {
        let given = self.given(0)?;
        match *function {
            Function::SumToAxis(axis) => {
                let x = self.input(0, "x")?;
                let rank = given.layout.rank();
                let Some(&extent) = given.layout.dims().get(axis) else {
                    return Err(unfit(format_args!("axis {axis} of a tensor of {rank} dims"), "the axis is one of its dims"));
                };
                let axes: Vec<u32> = (0..rank as u32).filter(|&other| other as usize != axis).collect();
                let sum = if axes.is_empty() {
                    self.g.unary("sum", UnaryOp::Identity, x)?
                } else {
                    self.g.reduction("sum", ReductionOp::Add, x, &axes)?
                };
                let stored = in_format(&self.dims_of(sum), false)?;
                self.store_as(sum, "sums", given.dtype, stored, in_format(&[extent], false)?)
            }
            Function::Activation(f) => {
                let x = self.input(0, "x")?;
                let y = self.g.unary("activation", f, x)?;
                self.store(y, "y", given.dtype, like(&given.layout)?)
            }
            Function::ActivationBackward(f) => {
                let (dy, x) = (self.input(0, "dy")?, self.input(1, "x")?);
                let x_given = self.given(1)?;
                let dx = self.g.binary("activation backward", BinaryOp::Backward(f), dy, x)?;
                self.store(dx, "dx", x_given.dtype, like(&x_given.layout)?)
            }
            Function::Binary(f) => {
                let (x, z) = (self.input(0, "x")?, self.input(1, "z")?);
                let y = self.g.binary("binary", f, x, z)?;
                self.store_like(y, "y", given.dtype, &given.layout)
            }
            Function::Select => {
                let (x, z, t) = (self.input(0, "x")?, self.input(1, "z")?, self.input(2, "t")?);
                let y = self.g.ternary("select", TernaryOp::Select, x, z, t)?;
                self.store_like(y, "y", given.dtype, &given.layout)
            }
            Function::Cast(dtype) => {
                let x = self.input(0, "x")?;
                let y = self.g.unary("cast", UnaryOp::Identity, x)?;
                self.store(y, "y", dtype, like(&given.layout)?)
            }
            Function::Reduce(f, ref axes) => {
                let x = self.input(0, "x")?;
                let y = self.g.reduction("reduce", f, x, axes)?;
                self.store_like(y, "y", given.dtype, &given.layout)
            }
            Function::Softmax(axis, log) => {
                let x = self.input(0, "x")?;
                let y = self.g.softmax("softmax", x, axis, log)?;
                self.store(y, "y", given.dtype, like(&given.layout)?)
            }
            Function::SoftmaxBackward(axis, log) => {
                let (y, dy) = (self.input(0, "y")?, self.input(1, "dy")?);
                let dx = self.g.softmax_backward("softmax backward", y, dy, axis, log)?;
                self.store(dx, "dx", given.dtype, like(&given.layout)?)
            }
            Function::Reshape(ref dims) => {
                let x = self.input(0, "x")?;
                let y = self.g.reshape("reshape", x, dims)?;
                self.store_in(y, "y", given.dtype, false)
            }
            _ => Ok(()),
        }
    }

    /// A tensor of one number a row of the logits: without the class axis, it is seen with it, of extent 1.
    fn rows(&mut self, place: usize, name: &str, axis: u32) -> Result<Uid, Error> {
        let given = self.given(place)?.layout;
        if given.rank() + 1 != self.given(0)?.layout.rank() {
            return self.input(place, name);
        }
        let at = (axis as usize).min(given.rank());
        let (mut dims, mut strides) = (given.dims().to_vec(), given.strides().to_vec());
        dims.insert(at, 1);
        strides.insert(at, 1);
        self.input_as(place, name, layout(&dims, &strides)?)
    }

    fn loss(&mut self, spec: CrossEntropySpec, form: LossForm) -> Result<(), Error> {
        let logits_given = self.given(0)?;
        let logits = self.input(0, "logits")?;
        let labels = self.rows(1, "labels", spec.axis)?;
        let wide = if logits_given.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        if form == LossForm::Wide {
            let loss = self.g.cross_entropy("loss", spec, logits, labels)?;
            return self.store_like(loss, "loss", wide, &logits_given.layout);
        }
        let (loss, lse) = self.g.cross_entropy_with_lse("cross entropy", spec, logits, labels)?;
        let rows = in_format(self.given(1)?.layout.dims(), false)?;
        let seen = if spec.reduction == LossReduction::None { rows } else { in_format(&[], false)? };
        let stored = in_format(&self.dims_of(loss), false)?;
        self.store_as(loss, "loss", logits_given.dtype, stored, seen)?;
        let stored = in_format(&self.dims_of(lse), false)?;
        self.store_as(lse, "lse", wide, stored, rows)
    }

    fn loss_backward(&mut self, spec: CrossEntropySpec) -> Result<(), Error> {
        let (logits_given, dloss_given) = (self.given(0)?, self.given(2)?);
        let logits = self.input(0, "logits")?;
        let labels = self.rows(1, "labels", spec.axis)?;
        let dloss = if spec.reduction != LossReduction::None && dloss_given.layout.elements() == 1 {
            let one = in_format(&vec![1; logits_given.layout.rank()], false)?;
            self.input_as(2, "dloss", one)?
        } else {
            self.rows(2, "dloss", spec.axis)?
        };
        let lse = if self.given[3].is_some() { Some(self.rows(3, "lse", spec.axis)?) } else { None };
        let backward = CrossEntropyBackward { spec, logits, labels, dloss, lse, dlogits: Uid(0) };
        let dlogits = self.g.cross_entropy_backward("cross entropy backward", backward)?;
        self.store(dlogits, "dlogits", logits_given.dtype, like(&logits_given.layout)?)
    }
}

pub(crate) fn layout_error(source: verdigris_tensor::LayoutError) -> Error {
    verdigris_graph::Error::Layout { tensor: "result".to_owned(), source }.into()
}

fn layout(dims: &[u64], strides: &[u64]) -> Result<Layout, Error> {
    Layout::new(dims, strides).map_err(layout_error)
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

/// Whether PyTorch would call the layout channels-last: its own rule, under which a tensor that is both is not; and the same of three
/// dims, for which PyTorch has no word.
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

fn in_format(dims: &[u64], channels_last: bool) -> Result<Layout, Error> {
    let order: Vec<usize> = match dims.len() {
        rank @ 3..=5 if channels_last => std::iter::once(0).chain(2..rank).chain([1]).collect(),
        rank => (0..rank).collect(),
    };
    Layout::with_order(dims, &order).map_err(layout_error)
}

/// As a result of a function of elements lies: as the tensor does if that has neither gaps nor overlaps, else in the same order of dims
/// without gaps.
fn like(given: &Layout) -> Result<Layout, Error> {
    if given.is_packed() { Ok(*given) } else { in_order_of(given, given.dims()) }
}

/// A packed layout of these dims in the memory order of another one of the same rank; row-major where there is none to follow.
fn in_order_of(like: &Layout, dims: &[u64]) -> Result<Layout, Error> {
    if like.rank() != dims.len() || like.is_row_major() {
        return Layout::row_major(dims).map_err(layout_error);
    }
    let mut order: Vec<usize> = (0..dims.len()).collect();
    // Dims of 1 may have any stride, and keep their place.
    order.sort_by_key(|&dim| std::cmp::Reverse(like.strides()[dim]));
    Layout::with_order(dims, &order).map_err(layout_error)
}
