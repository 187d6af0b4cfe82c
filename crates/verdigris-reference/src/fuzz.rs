//! Random graphs, and the smallest one that still fails.
//!
//! [`graph`] makes a valid graph of one to eight ops (nine where the last is a pooling with its gradient) from a seed: all ops, shared inputs, several outputs, small tensors of random types
//! in random layouts (any order, gaps, steps, repeated elements), virtual tensors of random types between. The same seed gives the same
//! graph on every machine. [`shrink`] makes a failing graph smaller as long as it fails.

use std::collections::BTreeSet;

use verdigris_graph::{
    BinaryOp, Conv, ConvDirection, ConvMode, CrossEntropyBackward, CrossEntropySpec, Error, Graph, GraphBuilder, HostScalar, LossReduction,
    Node, Op, PoolBackward, PoolMode, PoolWindows, Precision, Real, ReductionOp, TensorDesc, TernaryOp, Uid, UnaryOp,
};
use verdigris_tensor::{DType, Layout};

use crate::data::{Distribution, Random};
use crate::graph_cases::GraphCase;
use crate::ops::conv::spreads;

/// Elements of a tensor, at most.
const MOST_ELEMENTS: u64 = 2048;
/// Products of a convolution or a matmul, at most.
const MOST_PRODUCTS: u64 = 60_000;

/// A random graph with data to run it on.
pub fn graph(seed: u64) -> GraphCase {
    let mut random = Random::new(seed ^ 0x5eed_f022);
    let distribution = match random.below(10) {
        0 => Distribution::SmallIntegers,
        1 => Distribution::Special,
        2 => Distribution::Uniform,
        3 => Distribution::WideRange,
        _ => Distribution::Normal,
    };
    let count = 1 + random.below(8);
    // A draft that breaks a rule after all is thrown away; the next one is as random.
    loop {
        let mut draft = Draft::new(Random::new(random.bits()), &format!("fuzz/{seed}"));
        for _ in 0..count {
            // An op that does not fit the values there are is another one's turn.
            let _ = draft.step();
        }
        if let Ok(graph) = draft.finish()
            && !graph.nodes.is_empty()
        {
            // What infinities do to their neighbours there is left to the engine, so that nothing would be judged.
            let is_left_open = graph.nodes.iter().any(|node| matches!(&node.op, Op::Conv(conv) if spreads(conv)));
            let distribution = if distribution == Distribution::Special && is_left_open { Distribution::Normal } else { distribution };
            return GraphCase { id: format!("fuzz/{seed}"), graph, distribution, seed, device_only: false };
        }
    }
}

/// A tensor that ops may read.
#[derive(Clone, Debug)]
struct Value {
    uid: Uid,
    dims: Vec<u64>,
    dtype: DType,
}

struct Draft {
    random: Random,
    builder: GraphBuilder,
    values: Vec<Value>,
    /// Results that are not stored yet, with their dims and types.
    unread: Vec<Value>,
    next: u32,
}

/// The types of inputs, the usual ones more often.
const TYPES: [DType; 14] = [
    DType::F32,
    DType::F32,
    DType::F32,
    DType::Bf16,
    DType::Bf16,
    DType::F16,
    DType::F16,
    DType::F64,
    DType::E4m3,
    DType::E5m2,
    DType::I8,
    DType::U8,
    DType::I32,
    DType::I64,
];

impl Draft {
    fn new(random: Random, name: &str) -> Draft {
        Draft { random, builder: GraphBuilder::new(name), values: Vec::new(), unread: Vec::new(), next: 0 }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    fn one_in(&mut self, bound: u64) -> bool {
        self.random.below(bound) == 0
    }

    fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.random.below(list.len() as u64) as usize].clone()
    }

    fn name(&mut self, what: &str) -> String {
        self.next += 1;
        format!("{what}{}", self.next)
    }

    fn real(&mut self) -> Real {
        Real((self.random.below(33) as f64 - 16.0) / 8.0)
    }

    fn dims(&mut self) -> Vec<u64> {
        let rank = [1, 2, 2, 3, 3, 4, 4, 5][self.below(8) as usize];
        let mut dims: Vec<u64> = (0..rank).map(|_| 1 + self.random.below(9)).collect();
        if self.one_in(6) {
            let dim = self.below(rank) as usize;
            dims[dim] = [1, 17, 33, 65][self.below(4) as usize];
        }
        if self.one_in(40) {
            let dim = self.below(rank) as usize;
            dims[dim] = 0;
        }
        while dims.iter().product::<u64>() > MOST_ELEMENTS {
            let longest = (0..dims.len()).max_by_key(|&dim| dims[dim]).unwrap_or(0);
            dims[longest] /= 2;
        }
        dims
    }

    /// Any order, now and then with gaps or a step; of an input also with repeated elements.
    fn layout(&mut self, dims: &[u64], is_input: bool) -> Result<Layout, Error> {
        let mut order: Vec<usize> = (0..dims.len()).collect();
        if !self.one_in(3) {
            for i in (1..order.len()).rev() {
                let j = self.below(i as u64 + 1) as usize;
                order.swap(i, j);
            }
        }
        let mut stride = if self.one_in(6) { 2 } else { 1 };
        let has_gaps = self.one_in(3);
        let mut strides = vec![0; dims.len()];
        for &dim in order.iter().rev() {
            strides[dim] = stride;
            stride = stride * dims[dim].max(1) + if has_gaps { self.below(4) } else { 0 };
        }
        if is_input && !dims.is_empty() && self.one_in(10) {
            let dim = self.below(dims.len() as u64) as usize;
            strides[dim] = 0;
        }
        Layout::new(dims, &strides).map_err(|source| Error::Layout { tensor: "random".to_owned(), source })
    }

    /// A new input.
    fn input(&mut self, dtype: DType, dims: &[u64]) -> Result<Value, Error> {
        let layout = self.layout(dims, true)?;
        let name = self.name("in");
        let uid = self.builder.tensor(&name, dtype, layout);
        Ok(Value { uid, dims: dims.to_vec(), dtype })
    }

    /// A value that fits: one that is there, or a new input of these dims.
    fn value(&mut self, fits: impl Fn(&Value) -> bool, dtype: DType, dims: &[u64]) -> Result<Value, Error> {
        let fitting: Vec<Value> = self.values.iter().filter(|value| fits(value)).cloned().collect();
        if !fitting.is_empty() && !self.one_in(4) {
            // The younger ones make the longer chains.
            let newest = fitting.len() - 1;
            let at = if self.one_in(2) { newest } else { self.below(fitting.len() as u64) as usize };
            return Ok(fitting[at].clone());
        }
        let value = self.input(dtype, dims)?;
        self.values.push(value.clone());
        Ok(value)
    }

    fn any(&mut self) -> Result<Value, Error> {
        let (dtype, dims) = (self.pick(&TYPES), self.dims());
        self.value(|_| true, dtype, &dims)
    }

    /// One that has a dim.
    fn with_axis(&mut self, float: bool) -> Result<Value, Error> {
        let (dtype, dims) = (self.pick(if float { &TYPES[..10] } else { &TYPES }), self.dims());
        self.value(|value| !value.dims.is_empty() && (value.dtype.is_float() || !float), dtype, &dims)
    }

    /// `[n, c, spatial…]` of one to three spatial dims.
    fn image(&mut self, fits: impl Fn(&Value) -> bool, types: &[DType]) -> Result<Value, Error> {
        let spatial = 1 + self.below(3);
        let most = [17, 8, 5][spatial as usize - 1];
        let mut dims = vec![1 + self.below(2), 1 + self.below(8)];
        dims.extend((0..spatial).map(|_| 1 + self.random.below(most)));
        let dtype = self.pick(types);
        self.value(|value| (3..=5).contains(&value.dims.len()) && !value.dims.contains(&0) && fits(value), dtype, &dims)
    }

    /// What reads `read` no longer leaves them unread.
    fn note_read(&mut self, read: &[Uid]) {
        self.unread.retain(|value| !read.contains(&value.uid));
    }

    /// Takes in a result: of a type of its own now and then, stored now and then.
    fn result(&mut self, uid: Uid, dims: &[u64], dtype: DType, types: &[DType]) -> Result<Value, Error> {
        let dtype = if types.is_empty() || !self.one_in(3) { dtype } else { self.pick(types) };
        let value = Value { uid, dims: dims.to_vec(), dtype };
        if self.one_in(4) {
            self.store(&value)?;
        } else {
            self.builder.round_to(uid, dtype)?;
            self.unread.push(value.clone());
        }
        self.values.push(value.clone());
        Ok(value)
    }

    fn store(&mut self, value: &Value) -> Result<(), Error> {
        let layout = self.layout(&value.dims, false)?;
        let name = self.name("out");
        self.builder.store_as(value.uid, &name, value.dtype, layout)
    }

    fn finish(mut self) -> Result<Graph, Error> {
        for value in std::mem::take(&mut self.unread) {
            self.store(&value)?;
        }
        let mut graph = self.builder.finish()?;
        drop_unnamed(&mut graph);
        Ok(graph)
    }

    fn step(&mut self) -> Result<(), Error> {
        match self.below(24) {
            0..=3 => self.unary(),
            4..=7 => self.binary(),
            8 => self.ternary(),
            9 => self.scale_or_index(),
            10..=11 => self.matmul(),
            12..=14 => self.conv(),
            15..=16 => self.reduction(),
            17 => self.pool(),
            18 => self.pool_backward(),
            19 => self.softmax(),
            20 => self.cross_entropy(),
            _ => self.movement(),
        }
    }

    fn activation(&mut self) -> UnaryOp {
        let (a, b) = (self.real(), self.real());
        let (low, high) = if a.0 <= b.0 { (a, b) } else { (b, a) };
        let beta = Real(0.25 * (1 + self.below(8)) as f64);
        self.pick(&[
            UnaryOp::Relu,
            UnaryOp::LeakyRelu { slope: a },
            UnaryOp::ClippedRelu { lower: low, upper: high, slope: b },
            UnaryOp::Clamp { lower: low, upper: high },
            UnaryOp::GeluErf,
            UnaryOp::GeluTanh,
            UnaryOp::Silu,
            UnaryOp::Swish { beta },
            UnaryOp::Sigmoid,
            UnaryOp::Tanh,
            UnaryOp::Elu { alpha: a },
            UnaryOp::Softplus { beta },
            UnaryOp::HardSwish,
            UnaryOp::HardSigmoid,
            UnaryOp::Mish,
        ])
    }

    fn unary(&mut self) -> Result<(), Error> {
        let x = self.any()?;
        let (scale, shift) = (self.real(), self.real());
        let others = [
            UnaryOp::Identity,
            UnaryOp::Neg,
            UnaryOp::Abs,
            UnaryOp::Exp,
            UnaryOp::Log,
            UnaryOp::Sqrt,
            UnaryOp::Rsqrt,
            UnaryOp::Reciprocal,
            UnaryOp::Erf,
            UnaryOp::Sin,
            UnaryOp::Cos,
            UnaryOp::Tan,
            UnaryOp::Ceil,
            UnaryOp::Floor,
            UnaryOp::Round,
            UnaryOp::Sign,
            UnaryOp::Not,
            UnaryOp::IsFinite,
            UnaryOp::IsNan,
            UnaryOp::Affine { scale, shift },
        ];
        let f = if self.one_in(2) { self.activation() } else { self.pick(&others) };
        let name = self.name(f.name());
        let y = self.builder.unary(&name, f, x.uid)?;
        self.note_read(&[x.uid]);
        self.pointwise_result(y, &x.dims, &[x.dtype])
    }

    fn pointwise_result(&mut self, y: Uid, dims: &[u64], read: &[DType]) -> Result<(), Error> {
        let compute = if read.contains(&DType::F64) { DType::F64 } else { DType::F32 };
        self.result(y, dims, compute, &TYPES).map(drop)
    }

    /// Dims that broadcast to `dims`.
    fn narrower(&mut self, dims: &[u64]) -> Vec<u64> {
        let drop = if self.one_in(4) { self.below(dims.len() as u64 + 1) as usize } else { 0 };
        dims[drop..].iter().map(|&dim| if self.random.below(4) == 0 { 1 } else { dim }).collect()
    }

    fn second(&mut self, dims: &[u64]) -> Result<Value, Error> {
        let (dtype, dims_of_input) = (self.pick(&TYPES), self.narrower(dims));
        let fits = |value: &Value| {
            value.dims.len() <= dims.len() && value.dims.iter().rev().zip(dims.iter().rev()).all(|(&own, &other)| own == other || own == 1)
        };
        self.value(fits, dtype, &dims_of_input)
    }

    fn binary(&mut self) -> Result<(), Error> {
        let x = self.any()?;
        let z = self.second(&x.dims)?;
        let f = match self.below(4) {
            0 => BinaryOp::Backward(self.activation()),
            1 => self.pick(&BinaryOp::ALL),
            _ => self.pick(&BinaryOp::IN_EPILOGUE),
        };
        let (left, right) = if self.one_in(3) { (&z, &x) } else { (&x, &z) };
        let name = self.name(f.name());
        let y = self.builder.binary(&name, f, left.uid, right.uid)?;
        self.note_read(&[x.uid, z.uid]);
        self.pointwise_result(y, &x.dims, &[x.dtype, z.dtype])
    }

    fn ternary(&mut self) -> Result<(), Error> {
        let x = self.any()?;
        let (z, t) = (self.second(&x.dims)?, self.second(&x.dims)?);
        let f = self.pick(&TernaryOp::ALL);
        let name = self.name(f.name());
        let y = self.builder.ternary(&name, f, x.uid, z.uid, t.uid)?;
        self.note_read(&[x.uid, z.uid, t.uid]);
        self.pointwise_result(y, &x.dims, &[x.dtype, z.dtype, t.dtype])
    }

    fn scale_or_index(&mut self) -> Result<(), Error> {
        if self.one_in(3) {
            let dims = self.dims();
            let axis = self.below(dims.len() as u64) as u32;
            let name = self.name("index");
            let y = self.builder.gen_index(&name, &dims, axis)?;
            return self.result(y, &dims, DType::I64, &TYPES).map(drop);
        }
        let x = self.any()?;
        let factor = if self.one_in(2) {
            let name = self.name("factor");
            HostScalar::Bound(self.builder.host_scalar(&name, DType::F32))
        } else {
            HostScalar::Fixed(self.real())
        };
        let name = self.name("scale");
        let y = self.builder.scale(&name, x.uid, factor)?;
        self.note_read(&[x.uid]);
        self.pointwise_result(y, &x.dims, &[x.dtype])
    }

    fn precision(&mut self, left: DType, right: DType) -> Option<Precision> {
        let fitting: Vec<Precision> =
            Precision::ALL.into_iter().filter(|precision| precision.rule_broken_by(left, right).is_none()).collect();
        if fitting.is_empty() { None } else { Some(self.pick(&fitting)) }
    }

    fn matmul(&mut self) -> Result<(), Error> {
        let (dtype, m, k) = (self.pick(&TYPES[..12]), 1 + self.below(20), 1 + self.below(40));
        let a = self.value(|value| value.dims.len() >= 2 && Precision::usual(value.dtype, value.dtype).is_some(), dtype, &[m, k])?;
        let (batch, rows) = a.dims.split_at(a.dims.len() - 2);
        let mut dims = self.narrower(batch);
        let n = 1 + self.below(20);
        dims.extend([rows[1], n]);
        let b = self.value(|value| value.dims == dims && value.dtype == a.dtype, a.dtype, &dims)?;
        let Some(precision) = self.precision(a.dtype, b.dtype) else { return Ok(()) };
        let out: Vec<u64> = batch.iter().copied().chain([rows[0], n]).collect();
        if out.iter().product::<u64>() > MOST_ELEMENTS || out.iter().product::<u64>() * rows[1] > MOST_PRODUCTS {
            return Ok(());
        }
        let name = self.name("matmul");
        let d = if self.one_in(3) {
            let c = self.second(&out)?;
            let (alpha, beta) = (HostScalar::Fixed(self.real()), HostScalar::Fixed(self.real()));
            let matmul =
                verdigris_graph::Matmul { c: Some(c.uid), alpha, beta, ..verdigris_graph::Matmul::new(a.uid, b.uid, Uid(0), precision) };
            let d = self.builder.matmul_with(&name, matmul)?;
            self.note_read(&[c.uid]);
            d
        } else {
            self.builder.matmul(&name, a.uid, b.uid, precision)?
        };
        self.note_read(&[a.uid, b.uid]);
        self.result(d, &out, precision.accumulator(), &TYPES).map(drop)
    }

    fn conv(&mut self) -> Result<(), Error> {
        let direction = self.pick(&ConvDirection::ALL);
        let left = self.image(|value| Precision::usual(value.dtype, value.dtype).is_some(), &TYPES[..12])?;
        let spatial = left.dims.len() - 2;
        let mut conv = Conv::new(direction, left.uid, left.uid, left.uid, spatial, Precision::F64);
        for i in 0..spatial {
            conv.pads_before[i] = self.below(4);
            conv.pads_after[i] = self.below(4);
            conv.strides[i] = 1 + self.below(3);
            conv.dilations[i] = 1 + self.below(3);
        }
        if self.one_in(3) {
            conv.mode = ConvMode::Convolution;
        }
        let taps: Vec<u64> = (0..spatial).map(|_| 1 + self.random.below(3)).collect();
        let divisors: Vec<u64> = (1..=left.dims[1]).filter(|groups| left.dims[1].is_multiple_of(*groups)).collect();
        conv.groups = if self.one_in(2) { 1 } else { self.pick(&divisors) };
        let other = conv.groups * (1 + self.below(4));
        let dims = |first: u64, second: u64, rest: &[u64]| [&[first, second], rest].concat();
        let (right, out) = match direction {
            ConvDirection::Fprop | ConvDirection::Wgrad => {
                let outs: Option<Vec<u64>> = (0..spatial).map(|i| conv.out_extent(i, left.dims[i + 2], taps[i])).collect();
                let Some(outs) = outs else { return Ok(()) };
                let (w, y) = (dims(other, left.dims[1] / conv.groups, &taps), dims(left.dims[0], other, &outs));
                if direction == ConvDirection::Fprop { (w, y) } else { (y, w) }
            }
            ConvDirection::Dgrad => {
                let least: Option<Vec<u64>> = (0..spatial).map(|i| conv.least_extent(i, left.dims[i + 2], taps[i])).collect();
                let Some(mut extents) = least else { return Ok(()) };
                for (extent, stride) in extents.iter_mut().zip(&conv.strides) {
                    *extent += self.random.below(*stride);
                }
                (dims(left.dims[1], other / conv.groups, &taps), dims(left.dims[0], other, &extents))
            }
        };
        let products = out.iter().product::<u64>() * right.iter().product::<u64>() / right[0].max(1);
        if out.iter().product::<u64>() > MOST_ELEMENTS || right.iter().product::<u64>() > MOST_ELEMENTS || products > MOST_PRODUCTS {
            return Ok(());
        }
        let operand = self.value(|value| value.dims == right && value.dtype == left.dtype, left.dtype, &right)?;
        let Some(precision) = self.precision(left.dtype, operand.dtype) else { return Ok(()) };
        conv.precision = precision;
        let name = self.name(direction.name());
        let result = match direction {
            ConvDirection::Fprop => self.builder.conv_fprop(&name, Conv { w: operand.uid, ..conv })?,
            ConvDirection::Dgrad => self.builder.conv_dgrad(&name, Conv { w: operand.uid, ..conv }, &out)?,
            ConvDirection::Wgrad => self.builder.conv_wgrad(&name, Conv { y: operand.uid, ..conv }, &out)?,
        };
        self.note_read(&[left.uid, operand.uid]);
        self.result(result, &out, precision.accumulator(), &TYPES).map(drop)
    }

    fn reduction(&mut self) -> Result<(), Error> {
        let x = self.with_axis(false)?;
        let mut axes: Vec<u32> = (0..x.dims.len() as u32).filter(|_| self.random.below(2) == 0).collect();
        if axes.is_empty() {
            axes = vec![x.dims.len() as u32 - 1];
        }
        let f = self.pick(&ReductionOp::ALL);
        let name = self.name(f.name());
        let y = self.builder.reduction(&name, f, x.uid, &axes)?;
        self.note_read(&[x.uid]);
        let dims: Vec<u64> = (0..x.dims.len()).map(|dim| if axes.contains(&(dim as u32)) { 1 } else { x.dims[dim] }).collect();
        self.pointwise_result(y, &dims, &[x.dtype])
    }

    fn windows(&mut self, extents: &[u64]) -> PoolWindows {
        if self.one_in(3) {
            return PoolWindows::Adaptive { out: extents.iter().map(|&extent| 1 + self.random.below(extent + 1)).collect() };
        }
        let window: Vec<u64> = extents.iter().map(|&extent| 1 + self.random.below(extent.min(3))).collect();
        let dilations: Vec<u64> =
            window.iter().zip(extents).map(|(&taps, &extent)| if (taps - 1) * 2 < extent { 1 + self.random.below(2) } else { 1 }).collect();
        let mut pads = || window.iter().zip(&dilations).map(|(taps, dilation)| self.random.below((taps - 1) * dilation + 1)).collect();
        let (pads_before, pads_after) = (pads(), pads());
        let strides = window.iter().map(|_| 1 + self.random.below(3)).collect();
        PoolWindows::Sliding { window, strides, dilations, pads_before, pads_after }
    }

    fn pool(&mut self) -> Result<(), Error> {
        let x = self.image(|_| true, &TYPES)?;
        let windows = self.windows(&x.dims[2..]);
        let Some(out) = window_outputs(&windows, &x.dims) else { return Ok(()) };
        let name = self.name("pool");
        let compute = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        match self.below(3) {
            0 => {
                let mode = PoolMode::Average { count_include_pad: self.one_in(2) };
                let y = self.builder.pool(&name, mode, windows, x.uid)?;
                self.note_read(&[x.uid]);
                self.result(y, &out, compute, &TYPES).map(drop)
            }
            1 => {
                let y = self.builder.pool(&name, PoolMode::Max, windows, x.uid)?;
                self.note_read(&[x.uid]);
                self.result(y, &out, x.dtype, &TYPES).map(drop)
            }
            _ => {
                let index_type = self.pick(&[DType::I32, DType::I64]);
                let (y, index) = self.builder.max_pool_with_index(&name, windows.clone(), x.uid, index_type)?;
                self.note_read(&[x.uid]);
                self.result(y, &out, x.dtype, &TYPES)?;
                let index = self.result(index, &out, index_type, &[])?;
                if self.one_in(2) {
                    let dtype = self.pick(&TYPES);
                    let dy = self.value(|value| value.dims == out && value.uid != index.uid, dtype, &out)?;
                    let back = PoolBackward { mode: PoolMode::Max, windows, dy: dy.uid, x: None, index: Some(index.uid), dx: Uid(0) };
                    let name = self.name("unpool");
                    let dx = self.builder.pool_backward(&name, back, &x.dims)?;
                    self.note_read(&[dy.uid, index.uid]);
                    self.pointwise_result(dx, &x.dims, &[dy.dtype])?;
                }
                Ok(())
            }
        }
    }

    fn pool_backward(&mut self) -> Result<(), Error> {
        let x = self.image(|_| true, &TYPES)?;
        let windows = self.windows(&x.dims[2..]);
        let Some(out) = window_outputs(&windows, &x.dims) else { return Ok(()) };
        let dtype = self.pick(&TYPES);
        let dy = self.value(|value| value.dims == out, dtype, &out)?;
        let mut back = PoolBackward { mode: PoolMode::Max, windows, dy: dy.uid, x: None, index: None, dx: Uid(0) };
        let mut read = vec![dy.uid];
        let mut types = vec![dy.dtype];
        match self.below(3) {
            0 => back.mode = PoolMode::Average { count_include_pad: self.one_in(2) },
            1 => {
                back.x = Some(x.uid);
                read.push(x.uid);
                types.push(x.dtype);
            }
            _ => {
                let index_type = self.pick(&[DType::I32, DType::I64]);
                let index = self.input(index_type, &out)?;
                // Each place holds one index, which a repeated one would not be for every window.
                back.index = Some(index.uid);
                let layout = self.layout(&out, false)?;
                self.builder.store_as(index.uid, "index", index_type, layout)?;
            }
        }
        let name = self.name("unpool");
        let dx = self.builder.pool_backward(&name, back, &x.dims)?;
        self.note_read(&read);
        self.pointwise_result(dx, &x.dims, &types)
    }

    fn softmax(&mut self) -> Result<(), Error> {
        let x = self.with_axis(true)?;
        let axis = self.below(x.dims.len() as u64) as u32;
        let log = self.one_in(2);
        let name = self.name("softmax");
        let (y, types) = if self.one_in(2) {
            let y = self.builder.softmax(&name, x.uid, axis, log)?;
            (y, vec![x.dtype])
        } else {
            let dtype = self.pick(&TYPES[..10]);
            let dy = self.value(|value| value.dims == x.dims && value.dtype.is_float(), dtype, &x.dims)?;
            let dx = self.builder.softmax_backward(&name, x.uid, dy.uid, axis, log)?;
            self.note_read(&[dy.uid]);
            (dx, vec![x.dtype, dy.dtype])
        };
        self.note_read(&[x.uid]);
        let compute = if types.contains(&DType::F64) { DType::F64 } else { DType::F32 };
        self.result(y, &x.dims, compute, &TYPES[..10]).map(drop)
    }

    fn cross_entropy(&mut self) -> Result<(), Error> {
        let x = self.with_axis(true)?;
        let axis = self.below(x.dims.len() as u64) as u32;
        let spec = CrossEntropySpec {
            label_smoothing: Real([0.0, 0.0, 0.125, 0.5][self.below(4) as usize]),
            ignore_index: if self.one_in(2) { Some([0, -100, 2][self.below(3) as usize]) } else { None },
            ..CrossEntropySpec::new(axis, self.pick(&[LossReduction::None, LossReduction::Sum, LossReduction::Mean]))
        };
        let mut rows = x.dims.clone();
        rows[axis as usize] = 1;
        let loss_dims = if spec.reduction == LossReduction::None { rows.clone() } else { vec![1; rows.len()] };
        let label_type = self.pick(&[DType::I32, DType::I64]);
        let labels = self.input(label_type, &rows)?;
        let compute = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let name = self.name("loss");
        if self.one_in(2) {
            let (loss, lse) = if self.one_in(2) {
                let (loss, lse) = self.builder.cross_entropy_with_lse(&name, spec, x.uid, labels.uid)?;
                (loss, Some(lse))
            } else {
                (self.builder.cross_entropy(&name, spec, x.uid, labels.uid)?, None)
            };
            self.note_read(&[x.uid]);
            if let Some(lse) = lse {
                self.result(lse, &rows, compute, &TYPES[..10])?;
            }
            return self.result(loss, &loss_dims, compute, &TYPES[..10]).map(drop);
        }
        let dtype = self.pick(&TYPES[..10]);
        let dloss = self.value(|value| value.dims == loss_dims && value.dtype.is_float(), dtype, &loss_dims)?;
        let lse = if self.one_in(3) { Some(self.input(DType::F32, &rows)?) } else { None };
        let back = CrossEntropyBackward {
            spec,
            logits: x.uid,
            labels: labels.uid,
            dloss: dloss.uid,
            lse: lse.map(|lse| lse.uid),
            dlogits: Uid(0),
        };
        let dx = self.builder.cross_entropy_backward(&name, back)?;
        self.note_read(&[x.uid, dloss.uid]);
        self.result(dx, &x.dims, compute, &TYPES[..10]).map(drop)
    }

    fn movement(&mut self) -> Result<(), Error> {
        let x = self.with_axis(false)?;
        let name = self.name("move");
        let rank = x.dims.len();
        let (y, dims) = match self.below(6) {
            0 => {
                let dims = match self.below(3) {
                    0 => vec![x.dims.iter().product()],
                    1 => vec![1].into_iter().chain(x.dims.iter().copied()).collect(),
                    _ => x.dims.iter().rev().copied().collect::<Vec<u64>>(),
                };
                (self.builder.reshape(&name, x.uid, &dims)?, dims)
            }
            1 => {
                let mut permutation: Vec<u32> = (0..rank as u32).collect();
                for i in (1..rank).rev() {
                    let j = self.below(i as u64 + 1) as usize;
                    permutation.swap(i, j);
                }
                let y = self.builder.transpose(&name, x.uid, &permutation)?;
                (y, permutation.iter().map(|&dim| x.dims[dim as usize]).collect())
            }
            2 => {
                let starts: Vec<u64> = x.dims.iter().map(|&dim| self.random.below(dim + 1)).collect();
                let stops: Vec<u64> = starts.iter().zip(&x.dims).map(|(&start, &dim)| dim - self.random.below(dim - start + 1)).collect();
                let steps: Vec<u64> = (0..rank).map(|_| 1 + self.random.below(3)).collect();
                let dims = (0..rank).map(|i| (stops[i] - starts[i]).div_ceil(steps[i])).collect();
                (self.builder.slice(&name, x.uid, &starts, &stops, &steps)?, dims)
            }
            3 => {
                let axis = self.below(rank as u64) as usize;
                let mut other = x.dims.clone();
                other[axis] = 1 + self.below(4);
                let fits = |value: &Value| {
                    value.dtype == x.dtype && value.dims.len() == rank && (0..rank).all(|i| i == axis || value.dims[i] == x.dims[i])
                };
                let second = self.value(fits, x.dtype, &other)?;
                let y = self.builder.concat(&name, &[x.uid, second.uid], axis as u32)?;
                self.note_read(&[second.uid]);
                let mut dims = x.dims.clone();
                dims[axis] += second.dims[axis];
                (y, dims)
            }
            4 => {
                let mut list = || -> Vec<u64> { (0..rank).map(|_| self.random.below(3)).collect() };
                let (before, after) = (list(), list());
                let value = self.real().0;
                let dims = (0..rank).map(|i| before[i] + x.dims[i] + after[i]).collect();
                (self.builder.pad(&name, x.uid, &before, &after, value)?, dims)
            }
            _ => {
                let mut dims: Vec<u64> = x.dims.iter().map(|&dim| if dim == 1 { 1 + self.random.below(4) } else { dim }).collect();
                if rank < 5 && self.one_in(2) {
                    dims.insert(0, 2);
                }
                (self.builder.broadcast(&name, x.uid, &dims)?, dims)
            }
        };
        self.note_read(&[x.uid]);
        self.result(y, &dims, x.dtype, &[]).map(drop)
    }
}

/// The dims of `y` under windows that fit; `None` if they do not.
fn window_outputs(windows: &PoolWindows, x_dims: &[u64]) -> Option<Vec<u64>> {
    let described = TensorDesc::new(Uid(0), "x", DType::F32, Layout::row_major(x_dims).ok()?);
    let dims = windows.infer("pool", &described).ok()?;
    (dims.iter().product::<u64>() <= MOST_ELEMENTS).then_some(dims)
}

/// The smallest graph found that is valid and still fails, starting from one that does. Ops are taken out (what they wrote and others
/// read becomes an input), outputs made virtual, extents cut, types and layouts made plain, one at a time, until nothing more can go.
pub fn shrink(graph: &Graph, mut fails: impl FnMut(&Graph) -> bool) -> Graph {
    let mut smallest = graph.clone();
    loop {
        let next =
            candidates(&smallest).into_iter().find(|candidate| verdigris_graph::validate::validate(candidate).is_ok() && fails(candidate));
        match next {
            Some(next) => smallest = next,
            None => return smallest,
        }
    }
}

/// Graphs a little smaller or plainer than this one, whether they are valid or not; each step leads nearer to an end.
fn candidates(graph: &Graph) -> Vec<Graph> {
    let mut list = Vec::new();
    for at in (0..graph.nodes.len()).rev() {
        list.push(without(graph, at));
    }
    let read: BTreeSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.inputs()).collect();
    let written: BTreeSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.outputs()).collect();
    let change = |at: usize, change: &dyn Fn(&mut TensorDesc)| {
        let mut changed = graph.clone();
        change(&mut changed.tensors[at]);
        changed
    };
    for (at, tensor) in graph.tensors.iter().enumerate() {
        if !tensor.is_virtual && read.contains(&tensor.uid) && written.contains(&tensor.uid) {
            list.push(change(at, &|tensor| tensor.is_virtual = true));
        }
    }
    let extents: BTreeSet<u64> =
        graph.tensors.iter().flat_map(|tensor| tensor.layout.dims().iter().copied()).filter(|&extent| extent > 1).collect();
    for &extent in extents.iter().rev() {
        for smaller in [1, extent / 2, extent - 1] {
            list.extend(resized(graph, extent, smaller));
        }
    }
    for (at, tensor) in graph.tensors.iter().enumerate() {
        if let Ok(plain) = Layout::row_major(tensor.layout.dims())
            && plain != tensor.layout
        {
            list.push(change(at, &|tensor| tensor.layout = plain));
        }
    }
    let types: BTreeSet<DType> = graph.tensors.iter().map(|tensor| tensor.dtype).filter(|&dtype| dtype != DType::F32).collect();
    for dtype in types {
        let mut changed = graph.clone();
        changed.tensors.iter_mut().filter(|tensor| tensor.dtype == dtype).for_each(|tensor| tensor.dtype = DType::F32);
        list.push(changed);
    }
    list
}

/// The graph without one op; what it wrote becomes an input if it is read.
fn without(graph: &Graph, at: usize) -> Graph {
    let mut graph = graph.clone();
    let Node { op, .. } = graph.nodes.remove(at);
    let outputs = op.outputs();
    drop_unnamed(&mut graph);
    let read: BTreeSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.inputs()).collect();
    let written: BTreeSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.outputs()).collect();
    for tensor in &mut graph.tensors {
        // A virtual tensor that lost its writer is an input now, one that lost its readers an output.
        if outputs.contains(&tensor.uid) || (written.contains(&tensor.uid) && !read.contains(&tensor.uid)) {
            tensor.is_virtual = false;
        }
    }
    graph
}

/// Takes out the tensors that no op names.
fn drop_unnamed(graph: &mut Graph) {
    let named: BTreeSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.inputs().into_iter().chain(node.op.outputs())).collect();
    graph.tensors.retain(|tensor| named.contains(&tensor.uid));
}

/// The graph with an extent replaced wherever it stands.
fn resized(graph: &Graph, extent: u64, smaller: u64) -> Option<Graph> {
    let mut graph = graph.clone();
    for tensor in &mut graph.tensors {
        let dims: Vec<u64> = tensor.layout.dims().iter().map(|&dim| if dim == extent { smaller } else { dim }).collect();
        if dims != tensor.layout.dims() {
            // The order in memory and repeated elements stay.
            let mut order: Vec<usize> = (0..dims.len()).collect();
            order.sort_by_key(|&dim| std::cmp::Reverse(tensor.layout.strides()[dim]));
            tensor.layout = Layout::with_order(&dims, &order).ok()?;
        }
    }
    Some(graph)
}
