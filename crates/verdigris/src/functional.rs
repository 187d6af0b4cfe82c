//! Functions of tensors, for those who do not want to draw graphs.
//!
//! Each call plans its graph ([`crate::recipe`]) on the first use with tensors of these types, dims and strides, and the device keeps the
//! plan; from then on it is found by a look-up that waits for nobody who looks up as well. The last [`MOST_PLANS`] that were asked for are kept; a plan
//! of more is made again when it is asked for again, and [`clear`] gives back all of them. On the CPU a plan keeps the memory that it works in. Results have the element type of the first input unless they say
//! otherwise, and what is channels-last stays so.
//!
//! ```
//! use verdigris::functional::{self as f, Conv2d};
//! use verdigris::{DType, Device, Tensor, UnaryOp};
//!
//! let device = Device::cpu();
//! let tensor = |dims: &[u64], values: &[f64]| Tensor::from_values(&device, DType::F32, dims, values);
//! let (a, b) = (tensor(&[2, 2], &[1.0, 2.0, 3.0, 4.0])?, tensor(&[2, 2], &[1.0, 0.0, 0.0, 2.0])?);
//! assert_eq!(f::matmul(&a, &b)?.to_values()?, [1.0, 4.0, 3.0, 8.0]);
//! assert_eq!(f::linear(&a, &b, &tensor(&[2], &[-2.0, 0.0])?, UnaryOp::Relu)?.to_values()?, [0.0, 4.0, 1.0, 8.0]);
//!
//! let (x, w) = (tensor(&[1, 1, 3, 3], &[1.0; 9])?, tensor(&[1, 1, 2, 2], &[0.25; 4])?);
//! let conv = Conv2d { padding: [1, 1], ..Conv2d::default() };
//! let y = f::conv2d(&x, &w, conv)?;
//! assert_eq!((y.dims(), &y.to_values()?[..2]), (&[1, 1, 4, 4][..], &[0.25, 0.5][..]));
//! assert_eq!(f::conv2d_bias(&x, &w, &tensor(&[1], &[-0.25])?, conv)?.to_values()?[..2], [0.0, 0.25]);
//! let dy = tensor(&[1, 1, 4, 4], &[1.0; 16])?;
//! assert_eq!(f::conv2d_backward_input(&dy, &w, [1, 1, 3, 3], conv)?.to_values()?, [1.0; 9]);
//! assert_eq!(f::conv2d_backward_filter(&x, &dy, [1, 1, 2, 2], conv)?.to_values()?, [9.0; 4]);
//! # Ok::<(), verdigris::Error>(())
//! ```
//!
//! Functions of elements, reductions and pooling:
//!
//! ```
//! use verdigris::functional::{self as f, Pool2d};
//! use verdigris::{BinaryOp, DType, Device, ReductionOp, Tensor, UnaryOp};
//!
//! let device = Device::cpu();
//! let tensor = |dims: &[u64], values: &[f64]| Tensor::from_values(&device, DType::F32, dims, values);
//! let (x, z) = (tensor(&[2, 2], &[-1.0, 2.0, -3.0, 4.0])?, tensor(&[1, 2], &[10.0, 100.0])?);
//! assert_eq!(f::relu(&x)?.to_values()?, [0.0, 2.0, 0.0, 4.0]);
//! assert_eq!(f::unary(UnaryOp::Abs, &x)?.to_values()?, [1.0, 2.0, 3.0, 4.0]);
//! assert_eq!(f::binary(BinaryOp::Mul, &x, &z)?.to_values()?, [-10.0, 200.0, -30.0, 400.0]);
//! assert_eq!(f::select(&f::relu(&x)?, &x, &z)?.to_values()?, [10.0, 2.0, 10.0, 4.0]);
//! assert_eq!(f::activation_backward(UnaryOp::Relu, &z, &z)?.to_values()?, [10.0, 100.0]);
//! assert_eq!(f::cast(&x, DType::F64)?.dtype(), DType::F64);
//! assert_eq!(f::reduce(ReductionOp::Add, &x, &[1])?.to_values()?, [1.0, 1.0]);
//! assert_eq!(f::reshape(&x, &[4])?.dims(), [4]);
//!
//! let (x, pool) = (tensor(&[1, 1, 2, 2], &[1.0, 4.0, 3.0, 2.0])?, Pool2d::tiles([2, 2]));
//! assert_eq!(f::max_pool2d(&x, pool)?.to_values()?, [4.0]);
//! let (y, index) = f::max_pool2d_with_index(&x, pool)?;
//! assert_eq!(f::max_pool2d_backward(&y, &index, [1, 1, 2, 2], pool)?.to_values()?, [0.0, 4.0, 0.0, 0.0]);
//! let mean = f::avg_pool2d(&x, pool)?;
//! assert_eq!(mean.to_values()?, f::adaptive_avg_pool2d(&x, [1, 1])?.to_values()?);
//! assert_eq!(f::avg_pool2d_backward(&mean, [1, 1, 2, 2], pool)?.to_values()?, [0.625; 4]);
//! # Ok::<(), verdigris::Error>(())
//! ```
//!
//! Plans are counted, and given back:
//!
//! ```
//! use verdigris::functional as f;
//! use verdigris::{DType, Device, Tensor};
//!
//! let device = Device::cpu();
//! let x = |elements: usize| Tensor::from_values(&device, DType::F32, &[elements as u64], &vec![1.0; elements]);
//! (f::relu(&x(2)?)?, f::relu(&x(3)?)?, f::relu(&x(2)?)?);
//! assert_eq!(f::plans_kept(&device), 2);
//! f::clear(&device);
//! assert!(f::plans_kept(&device) == 0 && f::MOST_PLANS >= 2);
//! # Ok::<(), verdigris::Error>(())
//! ```
//!
//! Dropout, which with the same seed and offset drops the same elements of the gradient:
//!
//! ```
//! use verdigris::functional as f;
//! use verdigris::{DType, Device, Tensor};
//!
//! let device = Device::cpu();
//! let x = Tensor::from_values(&device, DType::F32, &[2, 4], &[1.0; 8])?;
//! // Seed 7 and offset 0, in halves, low ones first.
//! let state = Tensor::from_values(&device, DType::I32, &[4], &[7.0, 0.0, 0.0, 0.0])?;
//! let y = f::dropout(&x, &state, 0.5)?.to_values()?;
//! assert!(y.iter().all(|&y| y == 0.0 || y == 2.0));
//! assert_eq!(f::dropout(&x, &state, 0.5)?.to_values()?, y);
//! assert_eq!(f::dropout(&x, &state, 0.0)?.to_values()?, [1.0; 8]);
//! # Ok::<(), verdigris::Error>(())
//! ```
//!
//! Softmax, and what is lost by a wrong guess:
//!
//! ```
//! use verdigris::functional as f;
//! use verdigris::{CrossEntropySpec, DType, Device, LossReduction, Tensor};
//!
//! let device = Device::cpu();
//! let tensor = |dims: &[u64], values: &[f64]| Tensor::from_values(&device, DType::F64, dims, values);
//! let near = |got: Tensor, want: [f64; 2]| -> Result<bool, verdigris::Error> {
//!     Ok(got.to_values()?.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-12))
//! };
//! let x = tensor(&[1, 2], &[0.0, 3_f64.ln()])?;
//! let (y, log) = (f::softmax(&x, 1)?, f::log_softmax(&x, 1)?);
//! let dy = tensor(&[1, 2], &[0.0, 1.0])?;
//! assert!(near(f::softmax_backward(&y, &dy, 1)?, [-0.1875, 0.1875])?);
//! assert!(near(f::log_softmax_backward(&log, &dy, 1)?, [-0.25, 0.25])?);
//! assert!(near(y, [0.25, 0.75])? && near(log, [0.25_f64.ln(), 0.75_f64.ln()])?);
//!
//! let (labels, spec) = (Tensor::from_values(&device, DType::I32, &[1], &[1.0])?, CrossEntropySpec::new(1, LossReduction::Mean));
//! let loss = f::cross_entropy(&x, &labels, spec)?;
//! assert!((loss.to_values()?[0] + 0.75_f64.ln()).abs() < 1e-12);
//! let dloss = tensor(loss.dims(), &[1.0])?;
//! assert!(near(f::cross_entropy_backward(&x, &labels, &dloss, spec)?, [0.25, -0.25])?);
//! # Ok::<(), verdigris::Error>(())
//! ```

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use verdigris_graph::{BinaryOp, CrossEntropySpec, PoolWindows, Precision, Real, ReductionOp, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout};

use crate::device::{Device, Tensor, row_major};
use crate::error::Error;
use crate::plan::{Plan, Workspace};
use crate::recipe::{Convolution, Divisor, Dropout, Extents, Function, Gradient, Input, LossForm, Outcome, Saved, draw};

/// Attributes of a convolution over two spatial dims, `[height, width]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Conv2d {
    /// Elements of the input from one output to the next.
    pub stride: [u64; 2],
    /// Elements of padding on each side.
    pub padding: [u64; 2],
    /// Elements of the input from one filter tap to the next.
    pub dilation: [u64; 2],
    /// Groups of channels.
    pub groups: u64,
    /// How products are formed and summed; `None` is [`Precision::usual`].
    pub precision: Option<Precision>,
    /// What becomes of each element at last.
    pub activation: UnaryOp,
}

impl Default for Conv2d {
    /// Stride and dilation 1, no padding, one group, no activation.
    fn default() -> Conv2d {
        Conv2d { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1, precision: None, activation: UnaryOp::Identity }
    }
}

impl Conv2d {
    fn convolution(&self, precision: Precision) -> Convolution {
        Convolution {
            strides: self.stride.to_vec(),
            pads_before: self.padding.to_vec(),
            pads_after: self.padding.to_vec(),
            dilations: self.dilation.to_vec(),
            groups: self.groups,
            precision,
        }
    }
}

/// Windows of pooling over two spatial dims, `[height, width]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Pool2d {
    /// Taps of a window.
    pub window: [u64; 2],
    /// Elements from one window to the next.
    pub stride: [u64; 2],
    /// Elements of padding on each side.
    pub padding: [u64; 2],
    /// Elements from one tap to the next.
    pub dilation: [u64; 2],
    /// Whether padding counts in a mean.
    pub count_include_pad: bool,
}

impl Pool2d {
    /// Windows side by side.
    pub fn tiles(window: [u64; 2]) -> Pool2d {
        Pool2d { window, stride: window, padding: [0, 0], dilation: [1, 1], count_include_pad: true }
    }

    fn divisor(&self) -> Divisor {
        if self.count_include_pad { Divisor::Taps } else { Divisor::Elements }
    }

    fn windows(&self) -> PoolWindows {
        PoolWindows::Sliding {
            window: self.window.to_vec(),
            strides: self.stride.to_vec(),
            dilations: self.dilation.to_vec(),
            pads_before: self.padding.to_vec(),
            pads_after: self.padding.to_vec(),
        }
    }
}

/// `a · b` over the last two dims; those before them are batch dims.
///
/// # Errors
/// Those of [`crate::Device::plan`] and [`crate::Device::run`], and [`Error::Operand`], as all functions here.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor, Error> {
    let precision = usual(a, b)?;
    one(Call::Matmul(precision), &[a, b], || Function::Matmul(precision))
}

/// `x · wᵀ + bias` with a `w` of `[out, in]`, and an activation.
///
/// # Errors
/// See [`matmul`].
pub fn linear(x: &Tensor, w: &Tensor, bias: &Tensor, activation: UnaryOp) -> Result<Tensor, Error> {
    let precision = usual(x, w)?;
    one(Call::Linear(precision, activation), &[x, w, bias], || Function::Linear(precision, activation))
}

/// The convolution (cross-correlation) of `x` `[n, c, h, w]` with `w` `[k, c / groups, h, w]`.
///
/// # Errors
/// See [`matmul`].
pub fn conv2d(x: &Tensor, w: &Tensor, conv: Conv2d) -> Result<Tensor, Error> {
    let precision = precision(&conv, x, w)?;
    one(Call::Conv(conv), &[x, w], || Function::ConvFprop(conv.convolution(precision), conv.activation))
}

/// As [`conv2d`], with a bias of one element a filter, added before the activation.
///
/// # Errors
/// See [`matmul`].
pub fn conv2d_bias(x: &Tensor, w: &Tensor, bias: &Tensor, conv: Conv2d) -> Result<Tensor, Error> {
    let precision = precision(&conv, x, w)?;
    one(Call::ConvBias(conv), &[x, w, bias], || Function::ConvFprop(conv.convolution(precision), conv.activation))
}

/// The gradient of [`conv2d`] (without its activation) with respect to `x`, which had these dims. Also transposed convolution, whose input
/// is `dy` and whose output has `x_dims`.
///
/// # Errors
/// See [`matmul`].
pub fn conv2d_backward_input(dy: &Tensor, w: &Tensor, x_dims: [u64; 4], conv: Conv2d) -> Result<Tensor, Error> {
    let precision = precision(&conv, dy, w)?;
    one(Call::ConvInput(conv, x_dims), &[dy, w], || Function::ConvDgrad(conv.convolution(precision), Extents::Whole(x_dims.to_vec())))
}

/// The gradient of [`conv2d`] (without its activation) with respect to `w`, which had these dims.
///
/// # Errors
/// See [`matmul`].
pub fn conv2d_backward_filter(x: &Tensor, dy: &Tensor, w_dims: [u64; 4], conv: Conv2d) -> Result<Tensor, Error> {
    let precision = precision(&conv, x, dy)?;
    one(Call::ConvFilter(conv, w_dims), &[dy, x], || {
        gradient(Function::ConvFprop(conv.convolution(precision), UnaryOp::Identity), 1, &[Saved::Tensor(0)], Some(&w_dims))
    })
}

/// `f(x)`.
///
/// # Errors
/// See [`matmul`].
pub fn unary(f: UnaryOp, x: &Tensor) -> Result<Tensor, Error> {
    one(Call::Unary(f), &[x], || Function::Activation(f))
}

/// `f(x, z)`, broadcast.
///
/// # Errors
/// See [`matmul`].
pub fn binary(f: BinaryOp, x: &Tensor, z: &Tensor) -> Result<Tensor, Error> {
    one(Call::Binary(f), &[x, z], || Function::Binary(f))
}

/// `x` where `t` is not 0, else `z`; broadcast.
///
/// # Errors
/// See [`matmul`].
pub fn select(t: &Tensor, x: &Tensor, z: &Tensor) -> Result<Tensor, Error> {
    one(Call::Select, &[x, z, t], || Function::Select)
}

/// `x` with each element 0 with probability `p`, and the others divided by `1 − p`. `state` is four i32, seed and offset with their low halves first:
/// with the same state the same elements are dropped, whatever their type and strides, so that the gradient is this function of dy. An execution uses
/// one of 2⁶⁴ offsets for each four elements; see [`verdigris_graph::Pointwise::Random`].
///
/// # Errors
/// See [`matmul`]; `p` outside of [0, 1], a state of another type or other dims.
pub fn dropout(x: &Tensor, state: &Tensor, p: f64) -> Result<Tensor, Error> {
    one(Call::Dropout(Real(p)), &[x, state], || Function::Dropout(Dropout::new(Real(p))))
}

/// `max(x, 0)`.
///
/// # Errors
/// See [`matmul`].
pub fn relu(x: &Tensor) -> Result<Tensor, Error> {
    unary(UnaryOp::Relu, x)
}

/// `dy · f′(x)` of an activation, of the type of `x`.
///
/// # Errors
/// See [`matmul`].
pub fn activation_backward(f: UnaryOp, dy: &Tensor, x: &Tensor) -> Result<Tensor, Error> {
    one(Call::ActivationBackward(f), &[dy, x], || gradient(Function::Activation(f), 0, &[Saved::Tensor(0)], None))
}

/// `x` in another type.
///
/// # Errors
/// See [`matmul`].
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor, Error> {
    one(Call::Cast(dtype), &[x], || Function::Cast(dtype))
}

/// A reduction over axes, which stay with extent 1.
///
/// # Errors
/// See [`matmul`].
pub fn reduce(f: ReductionOp, x: &Tensor, axes: &[u32]) -> Result<Tensor, Error> {
    let mask = axes.iter().fold(0_u32, |mask, axis| mask | 1_u32.checked_shl(*axis).unwrap_or(0));
    let mut sorted = axes.to_vec();
    sorted.sort_unstable();
    // An axis that is named twice or too large is the graph's to refuse; a mask would hide it, and so is not its key.
    let is_plain = sorted.is_sorted_by(|a, b| a < b) && sorted.last().is_none_or(|&last| last < 32);
    let call = if is_plain { Call::Reduce(f, mask) } else { Call::Unkept };
    one(call, &[x], || Function::Reduce(f, sorted))
}

/// Max pooling of `x` `[n, c, h, w]`.
///
/// # Errors
/// See [`matmul`].
pub fn max_pool2d(x: &Tensor, pool: Pool2d) -> Result<Tensor, Error> {
    one(Call::MaxPool(pool), &[x], || Function::MaxPool(pool.windows(), None))
}

/// Max pooling, and the index of each maximum as i32.
///
/// # Errors
/// See [`matmul`].
pub fn max_pool2d_with_index(x: &Tensor, pool: Pool2d) -> Result<(Tensor, Tensor), Error> {
    let mut results = call(Call::MaxPoolIndex(pool), &[x], || Function::MaxPool(pool.windows(), Some(DType::I32)))?;
    match (results.pop(), results.pop()) {
        (Some(index), Some(y)) => Ok((y, index)),
        _ => Err(Error::NoResult),
    }
}

/// The gradient of max pooling with respect to its input, which had these dims, from the index that the forward pass gave.
///
/// # Errors
/// See [`matmul`].
pub fn max_pool2d_backward(dy: &Tensor, index: &Tensor, x_dims: [u64; 4], pool: Pool2d) -> Result<Tensor, Error> {
    one(Call::MaxPoolBackward(pool, x_dims), &[dy, index], || {
        gradient(Function::MaxPool(pool.windows(), Some(index.dtype())), 0, &[Saved::Result(1)], Some(&x_dims))
    })
}

/// Average pooling of `x` `[n, c, h, w]`.
///
/// # Errors
/// See [`matmul`].
pub fn avg_pool2d(x: &Tensor, pool: Pool2d) -> Result<Tensor, Error> {
    one(Call::AveragePool(pool), &[x], || Function::AveragePool(pool.windows(), pool.divisor()))
}

/// The gradient of average pooling with respect to its input, which had these dims.
///
/// # Errors
/// See [`matmul`].
pub fn avg_pool2d_backward(dy: &Tensor, x_dims: [u64; 4], pool: Pool2d) -> Result<Tensor, Error> {
    one(Call::AveragePoolBackward(pool, x_dims), &[dy], || {
        gradient(Function::AveragePool(pool.windows(), pool.divisor()), 0, &[], Some(&x_dims))
    })
}

/// Average pooling to that many outputs.
///
/// # Errors
/// See [`matmul`].
pub fn adaptive_avg_pool2d(x: &Tensor, out: [u64; 2]) -> Result<Tensor, Error> {
    one(Call::Adaptive(out), &[x], || Function::AveragePool(PoolWindows::Adaptive { out: out.to_vec() }, Divisor::Elements))
}

/// Softmax along an axis.
///
/// # Errors
/// See [`matmul`].
pub fn softmax(x: &Tensor, axis: u32) -> Result<Tensor, Error> {
    one(Call::Softmax(axis, false), &[x], || Function::Softmax(axis, false))
}

/// The logarithm of softmax along an axis.
///
/// # Errors
/// See [`matmul`].
pub fn log_softmax(x: &Tensor, axis: u32) -> Result<Tensor, Error> {
    one(Call::Softmax(axis, true), &[x], || Function::Softmax(axis, true))
}

/// The gradient of [`softmax`] from its result and `dy`.
///
/// # Errors
/// See [`matmul`].
pub fn softmax_backward(y: &Tensor, dy: &Tensor, axis: u32) -> Result<Tensor, Error> {
    softmax_gradient(y, dy, axis, false)
}

/// The gradient of [`log_softmax`] from its result and `dy`.
///
/// # Errors
/// See [`matmul`].
pub fn log_softmax_backward(y: &Tensor, dy: &Tensor, axis: u32) -> Result<Tensor, Error> {
    softmax_gradient(y, dy, axis, true)
}

fn softmax_gradient(y: &Tensor, dy: &Tensor, axis: u32, log: bool) -> Result<Tensor, Error> {
    one(Call::SoftmaxBackward(axis, log), &[dy, y], || gradient(Function::Softmax(axis, log), 0, &[Saved::Result(0)], None))
}

/// The cross-entropy of logits and integer labels, in f32 (f64 for f64 logits). Labels have the dims of the logits with 1 at the class axis,
/// or without it.
///
/// # Errors
/// See [`matmul`].
pub fn cross_entropy(logits: &Tensor, labels: &Tensor, spec: CrossEntropySpec) -> Result<Tensor, Error> {
    one(Call::CrossEntropy(spec), &[logits, labels], || Function::CrossEntropy(spec, LossForm::Wide))
}

/// The gradient of [`cross_entropy`] with respect to the logits.
///
/// # Errors
/// See [`matmul`].
pub fn cross_entropy_backward(logits: &Tensor, labels: &Tensor, dloss: &Tensor, spec: CrossEntropySpec) -> Result<Tensor, Error> {
    one(Call::CrossEntropyBackward(spec), &[dloss, logits, labels], || {
        gradient(Function::CrossEntropy(spec, LossForm::Wide), 0, &[Saved::Tensor(0), Saved::Tensor(1)], None)
    })
}

/// The elements of `x` in row-major order under other dims; the same memory where `x` is packed.
///
/// # Errors
/// See [`matmul`].
pub fn reshape(x: &Tensor, dims: &[u64]) -> Result<Tensor, Error> {
    match x.viewed(dims) {
        Some(view) => Ok(view),
        None => {
            let layout = row_major(dims)?;
            one(Call::Reshape(layout), &[x], || Function::Reshape(dims.to_vec()))
        }
    }
}

fn usual(a: &Tensor, b: &Tensor) -> Result<Precision, Error> {
    Precision::usual(a.dtype(), b.dtype()).ok_or_else(|| {
        let rule = "products are of f64, f32, f16, bf16, fp8 or 8-bit integers, of one type or two of one kind";
        verdigris_graph::Error::DType { op: "product".to_owned(), tensor: "b".to_owned(), got: b.dtype(), rule }.into()
    })
}

fn precision(conv: &Conv2d, a: &Tensor, b: &Tensor) -> Result<Precision, Error> {
    conv.precision.map_or_else(|| usual(a, b), Ok)
}

/// A function with its attributes, small enough to be copied: what a plan is found by, beside types and layouts of its inputs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Call {
    Matmul(Precision),
    Linear(Precision, UnaryOp),
    Conv(Conv2d),
    ConvBias(Conv2d),
    ConvInput(Conv2d, [u64; 4]),
    ConvFilter(Conv2d, [u64; 4]),
    Unary(UnaryOp),
    Binary(BinaryOp),
    ActivationBackward(UnaryOp),
    Dropout(Real),
    Select,
    Cast(DType),
    Reduce(ReductionOp, u32),
    MaxPool(Pool2d),
    MaxPoolIndex(Pool2d),
    MaxPoolBackward(Pool2d, [u64; 4]),
    AveragePool(Pool2d),
    AveragePoolBackward(Pool2d, [u64; 4]),
    Adaptive([u64; 2]),
    Softmax(u32, bool),
    SoftmaxBackward(u32, bool),
    CrossEntropy(CrossEntropySpec),
    CrossEntropyBackward(CrossEntropySpec),
    Reshape(Layout),
    /// What is not worth keeping, or has no key.
    Unkept,
}

/// Most inputs of a function here.
const MAX_INPUTS: usize = 3;

/// What a plan is found by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Key {
    call: Call,
    inputs: [Option<(DType, Layout)>; MAX_INPUTS],
}

/// A function's plan, and which of its tensors is which.
struct FunctionPlan {
    plan: Plan,
    inputs: Vec<(Uid, usize)>,
    results: Vec<Outcome>,
}

type Hasher = BuildHasherDefault<DefaultHasher>;

/// So many plans a device keeps for functions; of more, the one that was asked for the longest ago goes.
pub const MOST_PLANS: usize = 512;

/// Parts of the table, each behind a lock of its own.
const PARTS: usize = 64;

/// Plans of functions, the last ones that were asked for. Finding one takes a part's lock to read, which others who read do not wait for.
pub(crate) struct Calls {
    parts: Box<[RwLock<HashMap<Key, Kept>>]>,
    count: AtomicUsize,
    /// Counts the plans that were kept: the time by which they grow old.
    clock: AtomicU64,
}

struct Kept {
    plan: Arc<FunctionPlan>,
    /// By the clock, when it was last asked for.
    asked: AtomicU64,
}

impl Default for Calls {
    fn default() -> Calls {
        Calls { parts: (0..PARTS).map(|_| RwLock::default()).collect(), count: AtomicUsize::new(0), clock: AtomicU64::new(0) }
    }
}

impl Calls {
    fn find(&self, key: &Key) -> Option<Arc<FunctionPlan>> {
        let part = self.part_of(key).read().unwrap_or_else(PoisonError::into_inner);
        let kept = part.get(key)?;
        kept.asked.store(self.clock.load(Ordering::Relaxed), Ordering::Relaxed);
        Some(Arc::clone(&kept.plan))
    }

    fn keep(&self, key: Key, plan: Arc<FunctionPlan>) {
        let now = self.clock.fetch_add(1, Ordering::Relaxed) + 1;
        let kept = Kept { plan, asked: AtomicU64::new(now) };
        let mut part = self.part_of(&key).write().unwrap_or_else(PoisonError::into_inner);
        let is_new = part.insert(key, kept).is_none();
        // Counted under the lock under which it may go again.
        let is_full = is_new && self.count.fetch_add(1, Ordering::Relaxed) >= MOST_PLANS;
        drop(part);
        if is_full {
            self.forget_the_oldest();
        }
    }

    fn forget_the_oldest(&self) {
        let oldest_of = |(place, part): (usize, &RwLock<HashMap<Key, Kept>>)| {
            let part = part.read().unwrap_or_else(PoisonError::into_inner);
            part.iter().map(|(key, kept)| (kept.asked.load(Ordering::Relaxed), place, *key)).min_by_key(|(asked, ..)| *asked)
        };
        let Some((_, place, key)) = self.parts.iter().enumerate().filter_map(oldest_of).min_by_key(|(asked, ..)| *asked) else { return };
        let mut part = self.parts[place].write().unwrap_or_else(PoisonError::into_inner);
        let gone = part.remove(&key);
        self.count.fetch_sub(usize::from(gone.is_some()), Ordering::Relaxed);
        drop(part);
        // With no lock held.
        drop(gone);
    }

    fn clear(&self) {
        for part in &self.parts {
            let mut part = part.write().unwrap_or_else(PoisonError::into_inner);
            let gone = std::mem::take(&mut *part);
            self.count.fetch_sub(gone.len(), Ordering::Relaxed);
            drop(part);
            drop(gone);
        }
    }

    fn part_of(&self, key: &Key) -> &RwLock<HashMap<Key, Kept>> {
        &self.parts[Hasher::default().hash_one(key) as usize % PARTS]
    }
}

/// How many plans the device keeps for functions.
pub fn plans_kept(device: &Device) -> usize {
    device.calls().count.load(Ordering::Relaxed)
}

/// Forgets the plans that the device keeps for functions, and gives back what they hold; those that run are dropped behind their executions. A call
/// makes its own anew.
pub fn clear(device: &Device) {
    device.calls().clear();
}

/// The gradient of a function with respect to one of its tensors, which has these dims where it is not saved.
fn gradient(of: Function, with_respect_to: usize, saved: &[Saved], dims: Option<&[u64]>) -> Function {
    Function::Gradient(Box::new(Gradient { of, with_respect_to, saved: saved.to_vec(), dims: dims.map(<[u64]>::to_vec), dtype: None }))
}

/// A function of one result.
fn one(call_: Call, inputs: &[&Tensor], function: impl FnOnce() -> Function) -> Result<Tensor, Error> {
    call(call_, inputs, function)?.pop().ok_or(Error::NoResult)
}

/// Runs the plan of a call, which is made and kept where there is none.
fn call(call: Call, inputs: &[&Tensor], function: impl FnOnce() -> Function) -> Result<Vec<Tensor>, Error> {
    let Some(device) = inputs.first().map(|tensor| tensor.device().clone()) else { return Err(Error::NoResult) };
    let mut key = Key { call, inputs: [None; MAX_INPUTS] };
    for ((place, tensor), name) in key.inputs.iter_mut().zip(inputs).zip(["first input", "second input", "third input"]) {
        tensor.is_on(&device, name)?;
        *place = Some((tensor.dtype(), *tensor.layout()));
    }
    let found = match device.calls().find(&key).filter(|_| call != Call::Unkept) {
        Some(found) => found,
        None => {
            let input = |tensor: &&Tensor| Some(Input { dtype: tensor.dtype(), layout: *tensor.layout(), alignment_bytes: None });
            let given: Vec<Option<Input>> = inputs.iter().map(input).collect();
            let recipe = draw(&function(), &given)?;
            let made = Arc::new(FunctionPlan { plan: device.plan(&recipe.graph)?, inputs: recipe.inputs, results: recipe.results });
            if call != Call::Unkept {
                device.calls().keep(key, Arc::clone(&made));
            }
            made
        }
    };
    let FunctionPlan { plan, inputs: uids, results } = &*found;
    let bound = uids.iter().filter_map(|&(uid, place)| Some((uid, *inputs.get(place)?)));
    let wanted = results.iter().map(|result| (result.uid, result.dtype, result.layout));
    device.compute(bound, &[], wanted, |bindings, stream| plan.run(bindings, stream, Workspace::Own)).map(|(outputs, ())| outputs)
}
