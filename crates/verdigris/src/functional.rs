//! Functions of tensors, for those who do not want to draw graphs.
//!
//! Each call makes its graph ready on the first use with tensors of these types, dims and strides, and keeps it with the device; from then on
//! it is found by a look-up that holds no lock. Results have the element type of the first input unless they say otherwise, and lie in
//! memory in the order of its dims: what is channels-last stays so.
//!
//! ```
//! use verdigris::functional::{self as f, Conv2d};
//! use verdigris::{Device, Tensor};
//! use verdigris_tensor::DType;
//!
//! let device = Device::cpu();
//! let x = Tensor::from_values(&device, DType::F32, &[1, 1, 3, 3], &[1.0; 9])?;
//! let w = Tensor::from_values(&device, DType::F32, &[1, 1, 2, 2], &[0.25; 4])?;
//! let y = f::conv2d(&x, &w, Conv2d { padding: [1, 1], ..Conv2d::default() })?;
//! assert_eq!(y.dims(), [1, 1, 4, 4]);
//! assert_eq!(f::relu(&y)?.to_values()?[..2], [0.25, 0.5]);
//! # Ok::<(), verdigris::Error>(())
//! ```

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use verdigris_graph::{
    BinaryOp, Conv, ConvDirection, CrossEntropyBackward, CrossEntropySpec, GraphBuilder, Matmul, PoolBackward, PoolMode, PoolWindows,
    Precision, ReductionOp, TernaryOp, Uid, UnaryOp,
};
use verdigris_tensor::{DType, Layout};

use crate::device::{Made, Tensor, layout_error, row_major};
use crate::error::Error;

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
    fn conv(&self, direction: ConvDirection, x: Uid, w: Uid, y: Uid, precision: Precision) -> Conv {
        Conv {
            pads_before: self.padding.to_vec(),
            pads_after: self.padding.to_vec(),
            strides: self.stride.to_vec(),
            dilations: self.dilation.to_vec(),
            groups: self.groups,
            ..Conv::new(direction, x, w, y, 2, precision)
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

    fn windows(&self) -> PoolWindows {
        PoolWindows::Sliding {
            window: self.window.to_vec(),
            strides: self.stride.to_vec(),
            dilations: self.dilation.to_vec(),
            pads_before: self.padding.to_vec(),
            pads_after: self.padding.to_vec(),
        }
    }

    fn average(&self) -> PoolMode {
        PoolMode::Average { count_include_pad: self.count_include_pad }
    }
}

/// `a · b` over the last two dims; those before them are batch dims.
///
/// # Errors
/// Those of [`crate::Device::prepare`] and [`crate::Ready::run`], as all functions here.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor, Error> {
    let precision = usual(a, b)?;
    one(Call::Matmul(precision), &[a, b], |g, u| {
        let d = g.matmul_with("matmul", Matmul::new(u[0], u[1], Uid(0), precision))?;
        Ok(vec![Output::like(d, a)])
    })
}

/// `x · wᵀ + bias` with a `w` of `[out, in]`, and an activation.
///
/// # Errors
/// See [`matmul`].
pub fn linear(x: &Tensor, w: &Tensor, bias: &Tensor, activation: UnaryOp) -> Result<Tensor, Error> {
    let wt = w.permuted(&[1, 0])?;
    let precision = usual(x, w)?;
    one(Call::Linear(precision, activation), &[x, &wt, bias], |g, u| {
        let d = g.matmul_with("linear", Matmul::new(u[0], u[1], Uid(0), precision))?;
        let d = g.binary("bias", BinaryOp::Add, d, u[2])?;
        let d = activate(g, activation, d)?;
        Ok(vec![Output::like(d, x)])
    })
}

/// The convolution (cross-correlation) of `x` `[n, c, h, w]` with `w` `[k, c / groups, h, w]`.
///
/// # Errors
/// See [`matmul`].
pub fn conv2d(x: &Tensor, w: &Tensor, conv: Conv2d) -> Result<Tensor, Error> {
    let precision = precision(&conv, x, w)?;
    one(Call::Conv(conv), &[x, w], |g, u| {
        let y = g.conv_fprop("conv", conv.conv(ConvDirection::Fprop, u[0], u[1], Uid(0), precision))?;
        let y = activate(g, conv.activation, y)?;
        Ok(vec![Output::like(y, x)])
    })
}

/// As [`conv2d`], with a bias of one element a filter, added before the activation.
///
/// # Errors
/// See [`matmul`].
pub fn conv2d_bias(x: &Tensor, w: &Tensor, bias: &Tensor, conv: Conv2d) -> Result<Tensor, Error> {
    let precision = precision(&conv, x, w)?;
    // Seen as [k, 1, 1], it broadcasts over n, h and w.
    let bias = bias.viewed(&[bias.layout().elements(), 1, 1]).unwrap_or_else(|| bias.clone());
    one(Call::ConvBias(conv), &[x, w, &bias], |g, u| {
        let y = g.conv_fprop("conv", conv.conv(ConvDirection::Fprop, u[0], u[1], Uid(0), precision))?;
        let y = g.binary("bias", BinaryOp::Add, y, u[2])?;
        let y = activate(g, conv.activation, y)?;
        Ok(vec![Output::like(y, x)])
    })
}

/// The gradient of [`conv2d`] (without its activation) with respect to `x`, which had these dims. Also transposed convolution, whose input
/// is `dy` and whose output has `x_dims`.
///
/// # Errors
/// See [`matmul`].
pub fn conv2d_backward_input(dy: &Tensor, w: &Tensor, x_dims: [u64; 4], conv: Conv2d) -> Result<Tensor, Error> {
    let precision = precision(&conv, dy, w)?;
    one(Call::ConvInput(conv, x_dims), &[dy, w], |g, u| {
        let dx = g.conv_dgrad("dgrad", conv.conv(ConvDirection::Dgrad, Uid(0), u[1], u[0], precision), &x_dims)?;
        Ok(vec![Output::like(dx, dy)])
    })
}

/// The gradient of [`conv2d`] (without its activation) with respect to `w`, which had these dims.
///
/// # Errors
/// See [`matmul`].
pub fn conv2d_backward_filter(x: &Tensor, dy: &Tensor, w_dims: [u64; 4], conv: Conv2d) -> Result<Tensor, Error> {
    let precision = precision(&conv, x, dy)?;
    one(Call::ConvFilter(conv, w_dims), &[x, dy], |g, u| {
        let dw = g.conv_wgrad("wgrad", conv.conv(ConvDirection::Wgrad, u[0], Uid(0), u[1], precision), &w_dims)?;
        Ok(vec![Output::like(dw, x)])
    })
}

/// `f(x)`.
///
/// # Errors
/// See [`matmul`].
pub fn unary(f: UnaryOp, x: &Tensor) -> Result<Tensor, Error> {
    one(Call::Unary(f), &[x], |g, u| Ok(vec![Output::like(g.unary("unary", f, u[0])?, x)]))
}

/// `f(x, z)`, broadcast.
///
/// # Errors
/// See [`matmul`].
pub fn binary(f: BinaryOp, x: &Tensor, z: &Tensor) -> Result<Tensor, Error> {
    one(Call::Binary(f), &[x, z], |g, u| Ok(vec![Output::like(g.binary("binary", f, u[0], u[1])?, x)]))
}

/// `x` where `t` is not 0, else `z`; broadcast.
///
/// # Errors
/// See [`matmul`].
pub fn select(t: &Tensor, x: &Tensor, z: &Tensor) -> Result<Tensor, Error> {
    one(Call::Select, &[x, z, t], |g, u| Ok(vec![Output::like(g.ternary("select", TernaryOp::Select, u[0], u[1], u[2])?, x)]))
}

/// `max(x, 0)`.
///
/// # Errors
/// See [`matmul`].
pub fn relu(x: &Tensor) -> Result<Tensor, Error> {
    unary(UnaryOp::Relu, x)
}

/// `dy · f′(x)` of an activation.
///
/// # Errors
/// See [`matmul`].
pub fn activation_backward(f: UnaryOp, dy: &Tensor, x: &Tensor) -> Result<Tensor, Error> {
    binary(BinaryOp::Backward(f), dy, x)
}

/// `x` in another type.
///
/// # Errors
/// See [`matmul`].
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor, Error> {
    one(Call::Cast(dtype), &[x], |g, u| {
        let y = g.unary("cast", UnaryOp::Identity, u[0])?;
        Ok(vec![Output { dtype: Some(dtype), ..Output::like(y, x) }])
    })
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
    one(call, &[x], |g, u| Ok(vec![Output::like(g.reduction("reduce", f, u[0], &sorted)?, x)]))
}

/// Max pooling of `x` `[n, c, h, w]`.
///
/// # Errors
/// See [`matmul`].
pub fn max_pool2d(x: &Tensor, pool: Pool2d) -> Result<Tensor, Error> {
    one(Call::MaxPool(pool), &[x], |g, u| Ok(vec![Output::like(g.pool("max pool", PoolMode::Max, pool.windows(), u[0])?, x)]))
}

/// Max pooling, and the index of each maximum as i32.
///
/// # Errors
/// See [`matmul`].
pub fn max_pool2d_with_index(x: &Tensor, pool: Pool2d) -> Result<(Tensor, Tensor), Error> {
    let mut results = call(Call::MaxPoolIndex(pool), &[x], |g, u| {
        let (y, index) = g.max_pool_with_index("max pool", pool.windows(), u[0], DType::I32)?;
        Ok(vec![Output::like(y, x), Output { dtype: Some(DType::I32), ..Output::like(index, x) }])
    })?;
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
    one(Call::MaxPoolBackward(pool, x_dims), &[dy, index], |g, u| {
        let backward = PoolBackward { mode: PoolMode::Max, windows: pool.windows(), dy: u[0], x: None, index: Some(u[1]), dx: Uid(0) };
        Ok(vec![Output::like(g.pool_backward("max pool backward", backward, &x_dims)?, dy)])
    })
}

/// Average pooling of `x` `[n, c, h, w]`.
///
/// # Errors
/// See [`matmul`].
pub fn avg_pool2d(x: &Tensor, pool: Pool2d) -> Result<Tensor, Error> {
    one(Call::AveragePool(pool), &[x], |g, u| Ok(vec![Output::like(g.pool("average pool", pool.average(), pool.windows(), u[0])?, x)]))
}

/// The gradient of average pooling with respect to its input, which had these dims.
///
/// # Errors
/// See [`matmul`].
pub fn avg_pool2d_backward(dy: &Tensor, x_dims: [u64; 4], pool: Pool2d) -> Result<Tensor, Error> {
    one(Call::AveragePoolBackward(pool, x_dims), &[dy], |g, u| {
        let backward = PoolBackward { mode: pool.average(), windows: pool.windows(), dy: u[0], x: None, index: None, dx: Uid(0) };
        Ok(vec![Output::like(g.pool_backward("average pool backward", backward, &x_dims)?, dy)])
    })
}

/// Average pooling to that many outputs.
///
/// # Errors
/// See [`matmul`].
pub fn adaptive_avg_pool2d(x: &Tensor, out: [u64; 2]) -> Result<Tensor, Error> {
    one(Call::Adaptive(out), &[x], |g, u| {
        let mode = PoolMode::Average { count_include_pad: false };
        Ok(vec![Output::like(g.pool("adaptive pool", mode, PoolWindows::Adaptive { out: out.to_vec() }, u[0])?, x)])
    })
}

/// Softmax along an axis.
///
/// # Errors
/// See [`matmul`].
pub fn softmax(x: &Tensor, axis: u32) -> Result<Tensor, Error> {
    one(Call::Softmax(axis, false), &[x], |g, u| Ok(vec![Output::like(g.softmax("softmax", u[0], axis, false)?, x)]))
}

/// The logarithm of softmax along an axis.
///
/// # Errors
/// See [`matmul`].
pub fn log_softmax(x: &Tensor, axis: u32) -> Result<Tensor, Error> {
    one(Call::Softmax(axis, true), &[x], |g, u| Ok(vec![Output::like(g.softmax("log softmax", u[0], axis, true)?, x)]))
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
    one(Call::SoftmaxBackward(axis, log), &[y, dy], |g, u| {
        Ok(vec![Output::like(g.softmax_backward("softmax backward", u[0], u[1], axis, log)?, y)])
    })
}

/// The cross-entropy of logits and integer labels, in f32 (f64 for f64 logits). Labels have the dims of the logits with 1 at the class axis,
/// or without it.
///
/// # Errors
/// See [`matmul`].
pub fn cross_entropy(logits: &Tensor, labels: &Tensor, spec: CrossEntropySpec) -> Result<Tensor, Error> {
    let labels = with_axis(labels, logits, spec.axis);
    one(Call::CrossEntropy(spec), &[logits, &labels], |g, u| {
        Ok(vec![Output { dtype: Some(wide(logits)), ..Output::like(g.cross_entropy("loss", spec, u[0], u[1])?, logits) }])
    })
}

/// The gradient of [`cross_entropy`] with respect to the logits.
///
/// # Errors
/// See [`matmul`].
pub fn cross_entropy_backward(logits: &Tensor, labels: &Tensor, dloss: &Tensor, spec: CrossEntropySpec) -> Result<Tensor, Error> {
    let labels = with_axis(labels, logits, spec.axis);
    one(Call::CrossEntropyBackward(spec), &[logits, &labels, dloss], |g, u| {
        let backward = CrossEntropyBackward { spec, logits: u[0], labels: u[1], dloss: u[2], lse: None, dlogits: Uid(0) };
        Ok(vec![Output::like(g.cross_entropy_backward("loss backward", backward)?, logits)])
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
            one(Call::Reshape(layout), &[x], |g, u| {
                Ok(vec![Output { layout: Some(layout), ..Output::like(g.reshape("reshape", u[0], dims)?, x) }])
            })
        }
    }
}

/// Labels with the class axis as a dim of 1, where they lack it.
fn with_axis(labels: &Tensor, logits: &Tensor, axis: u32) -> Tensor {
    let mut dims = logits.dims().to_vec();
    let lacks_it = labels.dims().len() + 1 == dims.len();
    match dims.get_mut(axis as usize) {
        Some(classes) if lacks_it => *classes = 1,
        _ => return labels.clone(),
    }
    labels.viewed(&dims).unwrap_or_else(|| labels.clone())
}

fn wide(x: &Tensor) -> DType {
    if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 }
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

fn activate(g: &mut GraphBuilder, f: UnaryOp, x: Uid) -> Result<Uid, verdigris_graph::Error> {
    if f == UnaryOp::Identity { Ok(x) } else { g.unary("activation", f, x) }
}

/// A function with its attributes: what a kept graph is found by, beside types and layouts of its inputs.
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

/// A result: which tensor, and how it is stored.
struct Output<'t> {
    uid: Uid,
    /// The tensor whose type and order of dims it takes.
    like: &'t Tensor,
    dtype: Option<DType>,
    layout: Option<Layout>,
}

impl<'t> Output<'t> {
    fn like(uid: Uid, like: &'t Tensor) -> Output<'t> {
        Output { uid, like, dtype: None, layout: None }
    }
}

/// Most inputs of a function here.
const MAX_INPUTS: usize = 3;

/// What a kept graph is found by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Key {
    call: Call,
    inputs: [Option<(DType, Layout)>; MAX_INPUTS],
}

/// A kept graph, and which of its tensors is which.
struct Kept {
    made: Made,
    inputs: Vec<Uid>,
    /// For each result, its place among the outputs.
    results: Vec<usize>,
}

type Hasher = BuildHasherDefault<DefaultHasher>;

/// Places of the table, and how many are looked at for one key.
const PLACES: usize = 1024;
const PROBES: usize = 16;

/// Written once.
type Place = OnceLock<(Key, Arc<Kept>)>;

/// Kept graphs. A place is written once and never changed, so finding one holds no lock; keys that find no place go into a map of their
/// own.
pub(crate) struct Calls {
    places: Box<[Place]>,
    others: RwLock<HashMap<Key, Arc<Kept>>>,
}

impl Default for Calls {
    fn default() -> Calls {
        Calls { places: (0..PLACES).map(|_| OnceLock::new()).collect(), others: RwLock::default() }
    }
}

impl Calls {
    fn find(&self, key: &Key) -> Option<Arc<Kept>> {
        for place in self.places_of(key) {
            match place.get() {
                Some((known, kept)) if known == key => return Some(Arc::clone(kept)),
                Some(_) => {}
                None => return None,
            }
        }
        self.others.read().unwrap_or_else(PoisonError::into_inner).get(key).map(Arc::clone)
    }

    fn keep(&self, key: Key, kept: Arc<Kept>) {
        let mut entry = (key, kept);
        for place in self.places_of(&key) {
            match place.set(entry) {
                Ok(()) => return,
                Err(back) => entry = back,
            }
        }
        self.others.write().unwrap_or_else(PoisonError::into_inner).insert(entry.0, entry.1);
    }

    fn places_of(&self, key: &Key) -> impl Iterator<Item = &Place> {
        let start = Hasher::default().hash_one(key) as usize;
        (0..PROBES).map(move |probe| &self.places[start.wrapping_add(probe) % PLACES])
    }
}

/// A function of one result.
fn one<'t>(
    call_: Call,
    inputs: &[&'t Tensor],
    build: impl FnOnce(&mut GraphBuilder, &[Uid]) -> Result<Vec<Output<'t>>, verdigris_graph::Error>,
) -> Result<Tensor, Error> {
    call(call_, inputs, build)?.pop().ok_or(Error::NoResult)
}

/// Runs the kept graph of a call, or makes it ready and keeps it.
fn call<'t>(
    call: Call,
    inputs: &[&Tensor],
    build: impl FnOnce(&mut GraphBuilder, &[Uid]) -> Result<Vec<Output<'t>>, verdigris_graph::Error>,
) -> Result<Vec<Tensor>, Error> {
    let Some(device) = inputs.first().map(|tensor| tensor.device().clone()) else { return Err(Error::NoResult) };
    let mut key = Key { call, inputs: [None; MAX_INPUTS] };
    for (place, tensor) in key.inputs.iter_mut().zip(inputs) {
        *place = Some((tensor.dtype(), *tensor.layout()));
    }
    let kept = match device.calls().find(&key).filter(|_| call != Call::Unkept) {
        Some(kept) => kept,
        None => {
            let mut g = GraphBuilder::new("functional");
            let names = ["first input", "second input", "third input"];
            let uids: Vec<Uid> = inputs.iter().zip(names).map(|(tensor, name)| g.tensor(name, tensor.dtype(), *tensor.layout())).collect();
            let outputs = build(&mut g, &uids)?;
            let results: Vec<Uid> = outputs.iter().map(|output| output.uid).collect();
            for output in outputs {
                let dims = g.dims(output.uid).unwrap_or_default();
                let layout = match output.layout {
                    Some(layout) => layout,
                    None => in_order_of(output.like.layout(), &dims)?,
                };
                g.store_as(output.uid, "result", output.dtype.unwrap_or(output.like.dtype()), layout)?;
            }
            let made = device.make(&g.finish()?, &mut |_| {})?;
            let place = |uid: &Uid| made.outputs().iter().position(|tensor| tensor.uid == *uid);
            let results = results.iter().map(place).collect::<Option<Vec<usize>>>().ok_or(Error::NoResult)?;
            let kept = Arc::new(Kept { made, inputs: uids, results });
            if call != Call::Unkept {
                device.calls().keep(key, Arc::clone(&kept));
            }
            kept
        }
    };
    let mut bound: [Option<(Uid, &Tensor)>; MAX_INPUTS] = [None; MAX_INPUTS];
    for ((place, uid), tensor) in bound.iter_mut().zip(&kept.inputs).zip(inputs) {
        *place = Some((*uid, *tensor));
    }
    let bound: Vec<(Uid, &Tensor)> = bound.into_iter().flatten().collect();
    let (outputs, _) = kept.made.compute(&device, &bound, &[], false)?;
    Ok(kept.results.iter().map(|&place| outputs[place].clone()).collect())
}

/// A packed layout of these dims in the memory order of another one of the same rank; row-major where there is none to follow.
fn in_order_of(like: &Layout, dims: &[u64]) -> Result<Layout, Error> {
    if like.rank() != dims.len() || like.is_row_major() {
        return row_major(dims);
    }
    let mut order: Vec<usize> = (0..dims.len()).collect();
    // Dims of 1 may have any stride, and keep their place.
    order.sort_by_key(|&dim| std::cmp::Reverse(like.strides()[dim]));
    Layout::with_order(dims, &order).map_err(layout_error)
}
