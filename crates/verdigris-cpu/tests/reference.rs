//! Random graphs of every op against the reference: element types, layouts and attributes drawn from a seed.

mod score;

use verdigris_cpu::{Bindings, GraphPlan};
use verdigris_graph::{
    Attention, AttentionBackward, AttentionSpec, BinaryOp, Border, Causal, Conv, ConvDirection, ConvMode, CrossEntropyBackward,
    CrossEntropySpec, Error, Filter, Graph, GraphBuilder, HostScalar, LossReduction, Matmul, NormGradients, NormKind, NormSpec, Normalize,
    NormalizeBackward, PoolBackward, PoolMode, PoolWindows, Precision, Real, ReductionOp, Sampling, TernaryOp, Uid, UnaryOp,
};
use verdigris_reference::compare::compare;
use verdigris_reference::data::{Distribution, Random, graph_inputs, output_buffer};

use verdigris_reference::graph::{Selection, evaluate};
use verdigris_tensor::{DType, Layout};

/// Bytes of every output, in the order of the reference.
type Outputs = Vec<Vec<u8>>;

fn run(graph: &Graph, distribution: Distribution, seed: u64) -> Result<(Outputs, Vec<String>), String> {
    let inputs = graph_inputs(graph, distribution, seed);
    let expected = evaluate(graph, &inputs, Selection::All).map_err(|error| error.to_string())?;
    let plan = GraphPlan::new(graph).map_err(|error| error.to_string())?;
    let before: Outputs = expected.iter().map(|expected| output_buffer(expected, &inputs)).collect();
    let mut after = before.clone();
    let mut bindings = Bindings::new();
    for (&uid, bytes) in &inputs.buffers {
        bindings.input(uid, bytes);
    }
    for (&uid, &value) in &inputs.scalars {
        let is_integer = graph.tensor(uid).is_some_and(|tensor| tensor.dtype.is_integer());
        if is_integer {
            bindings.integer(uid, value as i64)
        } else {
            bindings.scalar(uid, value)
        };
    }
    for (expected, bytes) in expected.iter().zip(&mut after) {
        bindings.output(expected.id, bytes);
    }
    let report = plan.run(&mut bindings).map_err(|error| error.to_string())?;
    assert!(!report.steps.is_empty());
    let mut faults = Vec::new();
    for ((expected, before), after) in expected.iter().zip(&before).zip(&after) {
        let report = compare(expected, before, after);
        if !report.passes() {
            faults.push(format!("{:?}: {:?}", graph.tensor(expected.id), report));
        }
    }
    Ok((after, faults))
}

/// Adds ops to a graph until nothing virtual is left unread.
/// The types that attention takes.
const ATTENDED: [DType; 5] = [DType::F32, DType::F32, DType::F16, DType::Bf16, DType::F64];

type Build = fn(&mut Draw, &mut GraphBuilder) -> Result<(), Error>;

/// A draw of sizes, types and layouts.
struct Draw {
    random: Random,
}

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    /// A host scalar, a real number or an integer.
    fn factor(&mut self, g: &mut GraphBuilder, name: &str) -> Uid {
        let dtype = self.pick(&[DType::F32, DType::I8, DType::U8, DType::I32, DType::I64]);
        g.host_scalar(name, dtype)
    }

    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }

    fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }

    /// Packed in any order of dims, or with gaps.
    fn layout(&mut self, dims: &[u64]) -> Layout {
        let mut order: Vec<usize> = (0..dims.len()).collect();
        if self.chance(2) {
            for i in (1..order.len()).rev() {
                order.swap(i, self.below(i as u64 + 1) as usize);
            }
        } else if dims.len() > 2 && self.chance(2) {
            // Channels last.
            let channels = order.remove(1);
            order.push(channels);
        }
        let mut strides = vec![0; dims.len()];
        let mut stride = if self.chance(6) { 2 } else { 1 };
        for &dim in order.iter().rev() {
            strides[dim] = stride;
            stride *= dims[dim].max(1);
            if self.chance(6) {
                stride += self.below(3);
            }
        }
        Layout::new(dims, &strides).unwrap()
    }

    fn dims(&mut self, rank: u64, most: u64) -> Vec<u64> {
        (0..rank).map(|_| 1 + self.below(most)).collect()
    }

    fn float(&mut self) -> DType {
        self.pick(&[DType::F32, DType::F32, DType::F32, DType::F16, DType::Bf16, DType::F64, DType::E4m3, DType::E5m2])
    }

    fn any(&mut self) -> DType {
        if self.chance(3) { self.pick(&[DType::I8, DType::U8, DType::I32, DType::I64]) } else { self.float() }
    }

    fn tensor(&mut self, g: &mut GraphBuilder, name: &str, dtype: DType, dims: &[u64]) -> Uid {
        let layout = self.layout(dims);
        g.tensor(name, dtype, layout)
    }

    fn store(&mut self, g: &mut GraphBuilder, uid: Uid, dtype: DType, dims: &[u64]) -> Result<(), Error> {
        let layout = self.layout(dims);
        g.store_as(uid, "stored", dtype, layout)
    }

    fn operands(&mut self) -> (DType, DType, Precision) {
        self.pick(&[
            (DType::F32, DType::F32, Precision::Fp32),
            (DType::F32, DType::F32, Precision::Ieee),
            (DType::F32, DType::F32, Precision::Tf32),
            (DType::F64, DType::F64, Precision::F64),
            (DType::F16, DType::F16, Precision::Fp32),
            (DType::F16, DType::F16, Precision::F16),
            (DType::Bf16, DType::Bf16, Precision::Fp32),
            (DType::E4m3, DType::E5m2, Precision::Fp8Promoted),
            (DType::I8, DType::U8, Precision::I32),
        ])
    }

    fn result(&mut self, precision: Precision) -> DType {
        match precision {
            Precision::I32 => self.pick(&[DType::I32, DType::I32, DType::F32]),
            Precision::F64 => DType::F64,
            _ => self.pick(&[DType::F32, DType::F16, DType::Bf16]),
        }
    }

    fn conv(&mut self, g: &mut GraphBuilder) -> Result<(), Error> {
        let spatial = 1 + self.below(3) as usize;
        let direction = self.pick(&ConvDirection::ALL);
        let (left, right, precision) = self.operands();
        let groups = self.pick(&[1, 1, 1, 2, 3]);
        let (c, k) = (groups * (1 + self.below(9)), groups * (1 + self.below(19)));
        let n = self.below(4) + u64::from(!self.chance(12));
        let mut conv = Conv::new(direction, Uid(0), Uid(0), Uid(0), spatial, precision);
        conv.groups = groups;
        conv.mode = self.pick(&[ConvMode::CrossCorrelation, ConvMode::Convolution]);
        let (mut x_dims, mut w_dims, mut y_dims) = (vec![n, c], vec![k, c / groups], vec![n, k]);
        for i in 0..spatial {
            let filter = 1 + self.below(if spatial == 1 { 7 } else { 4 });
            conv.strides[i] = 1 + self.below(3);
            conv.dilations[i] = 1 + self.below(2);
            conv.pads_before[i] = self.below(4);
            conv.pads_after[i] = self.below(3);
            let reach = (filter - 1) * conv.dilations[i] + 1;
            let least = reach.saturating_sub(conv.pads_before[i] + conv.pads_after[i]).max(1);
            let extent = least + self.below(if spatial == 3 { 5 } else { 14 });
            x_dims.push(extent);
            w_dims.push(filter);
            y_dims.push(conv.out_extent(i, extent, filter).unwrap());
        }
        let dtype = self.result(precision);
        match direction {
            ConvDirection::Fprop => {
                conv.x = self.tensor(g, "x", left, &x_dims);
                conv.w = self.tensor(g, "w", right, &w_dims);
                let y = g.conv_fprop("conv", conv)?;
                if self.chance(2) && precision != Precision::I32 {
                    let bias = self.tensor(g, "bias", DType::F32, &[vec![k], vec![1; spatial]].concat());
                    let sum = g.binary("bias", BinaryOp::Add, y, bias)?;
                    let relu = g.unary("relu", UnaryOp::Relu, sum)?;
                    self.store(g, relu, dtype, &y_dims)
                } else {
                    self.store(g, y, dtype, &y_dims)
                }
            }
            ConvDirection::Dgrad => {
                conv.y = self.tensor(g, "y", left, &y_dims);
                conv.w = self.tensor(g, "w", right, &w_dims);
                let x = g.conv_dgrad("conv", conv, &x_dims)?;
                self.store(g, x, dtype, &x_dims)
            }
            ConvDirection::Wgrad => {
                conv.x = self.tensor(g, "x", left, &x_dims);
                conv.y = self.tensor(g, "y", right, &y_dims);
                let w = g.conv_wgrad("conv", conv, &w_dims)?;
                self.store(g, w, dtype, &w_dims)
            }
        }
    }

    fn matmul(&mut self, g: &mut GraphBuilder) -> Result<(), Error> {
        let (left, right, precision) = self.operands();
        let batch_rank = self.below(3);
        let batch = self.dims(batch_rank, 3);
        let (m, n, k) = (1 + self.below(70), 1 + self.below(70), self.below(300));
        let broadcast = |draw: &mut Draw| if draw.chance(3) { Vec::new() } else { batch.clone() };
        let a_dims = [batch.clone(), vec![m, k]].concat();
        let b_dims = [broadcast(self), vec![k, n]].concat();
        let d_dims = [batch.clone(), vec![m, n]].concat();
        let a = self.tensor(g, "a", left, &a_dims);
        let b = self.tensor(g, "b", right, &b_dims);
        let mut matmul = Matmul::new(a, b, Uid(0), precision);
        if self.chance(2) {
            let c_dims = [broadcast(self), vec![m, if self.chance(2) { 1 } else { n }]].concat();
            matmul.c = Some(self.tensor(g, "c", DType::F32, &c_dims));
            matmul.alpha = HostScalar::Fixed(Real(0.75));
            matmul.beta = if self.chance(2) { HostScalar::Bound(self.factor(g, "beta")) } else { HostScalar::ZERO };
        }
        let dtype = self.result(precision);
        let d = g.matmul_with("matmul", matmul)?;
        self.store(g, d, dtype, &d_dims)
    }

    fn unary_op(&mut self) -> UnaryOp {
        let real = |value: f64| Real(value);
        self.pick(&[
            UnaryOp::Identity,
            UnaryOp::Neg,
            UnaryOp::Abs,
            UnaryOp::Relu,
            UnaryOp::LeakyRelu { slope: real(0.1) },
            UnaryOp::Clamp { lower: real(-0.5), upper: real(0.75) },
            UnaryOp::GeluErf,
            UnaryOp::GeluTanh,
            UnaryOp::Silu,
            UnaryOp::Sigmoid,
            UnaryOp::Tanh,
            UnaryOp::ClippedRelu { lower: real(-0.5), upper: real(1.0), slope: real(0.2) },
            UnaryOp::Elu { alpha: real(1.5) },
            UnaryOp::Softplus { beta: real(2.0) },
            UnaryOp::Swish { beta: real(1.7) },
            UnaryOp::HardSwish,
            UnaryOp::HardSigmoid,
            UnaryOp::Mish,
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
            UnaryOp::Affine { scale: real(1.5), shift: real(-0.3) },
        ])
    }

    /// A chain over one set of dims, with broadcast operands, stored values on the way and a reduction of what comes out.
    fn pointwise(&mut self, g: &mut GraphBuilder) -> Result<(), Error> {
        let rank = 1 + self.below(4);
        let dims = if self.chance(5) { vec![3, 2000] } else { self.dims(rank, 12) };
        let dtype = self.any();
        let mut value = self.tensor(g, "x", dtype, &dims);
        for i in 0..1 + self.below(4) {
            let name = format!("op{i}");
            let other_dims: Vec<u64> = dims.iter().map(|&dim| if self.chance(3) { 1 } else { dim }).collect();
            value = match self.below(8) {
                0..3 => {
                    let f = self.unary_op();
                    g.unary(&name, f, value)?
                }
                3..6 => {
                    let dtype = self.any();
                    let z = self.tensor(g, "z", dtype, &other_dims);
                    let f = if self.chance(3) {
                        let f = self.unary_op();
                        BinaryOp::Backward(if f.is_activation() { f } else { UnaryOp::Relu })
                    } else {
                        self.pick(&BinaryOp::ALL)
                    };
                    g.binary(&name, f, value, z)?
                }
                6 => {
                    let z = self.tensor(g, "z", DType::F32, &other_dims);
                    let t = self.tensor(g, "t", DType::U8, &dims);
                    let f = self.pick(&TernaryOp::ALL);
                    g.ternary(&name, f, value, z, t)?
                }
                _ => {
                    let factor = if self.chance(2) { HostScalar::Bound(self.factor(g, "factor")) } else { HostScalar::Fixed(Real(0.3)) };
                    g.scale(&name, value, factor)?
                }
            };
            if self.chance(3) {
                let dtype = self.float();
                self.store(g, value, dtype, &dims)?;
            }
        }
        let y = if self.chance(3) {
            let index = g.gen_index("index", &dims, self.below(dims.len() as u64) as u32)?;
            g.binary("plus_index", BinaryOp::Add, value, index)?
        } else {
            g.unary("out", UnaryOp::Identity, value)?
        };
        let dtype = self.any();
        self.store(g, y, dtype, &dims)
    }

    /// Random numbers and dropout over dims of any strides, with more than one piece of the visit, and a sum behind them.
    fn random(&mut self, g: &mut GraphBuilder) -> Result<(), Error> {
        let rank = 1 + self.below(4);
        let dims = if self.chance(4) { vec![5, 4003] } else { self.dims(rank, 14) };
        let state = self.tensor(g, "state", DType::I32, &[4]);
        let y = if self.chance(3) {
            let is_normal = self.below(2) == 0;
            if is_normal { g.random_normal("random", &dims, state)? } else { g.random_uniform("random", &dims, state)? }
        } else {
            let dtype = self.float();
            let x = self.tensor(g, "x", dtype, &dims);
            let p = self.pick(&[0.0, 0.125, 0.5, 0.75, 1.0]);
            g.dropout("dropout", x, state, p)?
        };
        let dtype = self.any();
        self.store(g, y, dtype, &dims)?;
        let axis = self.below(dims.len() as u64) as u32;
        let drawn = g.bernoulli("drawn", &dims, state, 0.5)?;
        let count = g.reduction("count", ReductionOp::Add, drawn, &[axis])?;
        let left: Vec<u64> = (0..).zip(&dims).map(|(i, &dim)| if i == axis { 1 } else { dim }).collect();
        self.store(g, count, DType::F32, &left)
    }

    fn reduction(&mut self, g: &mut GraphBuilder) -> Result<(), Error> {
        let rank = 1 + self.below(4);
        let dims = if self.chance(4) { vec![3, 40_000] } else { self.dims(rank, 20) };
        let mut axes: Vec<u32> = (0..dims.len() as u32).filter(|_| self.chance(2)).collect();
        if axes.is_empty() {
            axes.push(self.below(dims.len() as u64) as u32);
        }
        let (dtype, f) = (self.any(), self.pick(&ReductionOp::ALL));
        let x = self.tensor(g, "x", dtype, &dims);
        let y = g.reduction("reduction", f, x, &axes)?;
        let kept: Vec<u64> = (0..dims.len()).map(|i| if axes.contains(&(i as u32)) { 1 } else { dims[i] }).collect();
        let dtype = self.any();
        self.store(g, y, dtype, &kept)
    }

    fn resample(&mut self, g: &mut GraphBuilder) -> Result<(), Error> {
        let spatial = 1 + self.below(3) as usize;
        let mut dims = vec![1 + self.below(2), 1 + self.below(5)];
        dims.extend((0..spatial).map(|_| 1 + self.below(9)));
        let extents = dims[2..].to_vec();
        let sampling = if self.chance(3) {
            let border = self.pick(&[Border::Reflect, Border::Replicate, Border::Circular]);
            let mut side = |extent: u64| self.below(if border == Border::Reflect { extent } else { extent + 1 }) as i64;
            let before = extents.iter().map(|&extent| side(extent)).collect();
            Sampling::Pad { border, before, after: extents.iter().map(|&extent| side(extent)).collect() }
        } else {
            let align_corners = self.chance(2);
            let filter =
                self.pick(&[Filter::Nearest, Filter::NearestExact, Filter::Linear { align_corners }, Filter::Cubic { align_corners }]);
            let out: Vec<u64> = extents.iter().map(|&extent| 1 + self.below(2 * extent + 2)).collect();
            let factor = |(&out, &extent): (&u64, &u64)| Real((out as f64 + 0.3) / extent as f64);
            let factors = if self.chance(3) { out.iter().zip(&extents).map(factor).collect() } else { Vec::new() };
            Sampling::Interpolate { filter, out, factors }
        };
        let dtype = self.any();
        let x = self.tensor(g, "x", dtype, &dims);
        let out_dtype = if self.chance(2) { dtype } else { self.any() };
        let y = g.resample("resample", sampling.clone(), x)?;
        let out: Vec<u64> = g.clone().dims_of(y);
        self.store(g, y, out_dtype, &out)?;
        let dtype = self.float();
        let dy = self.tensor(g, "dy", dtype, &out);
        let dx = g.resample_backward("back", sampling, dy, &dims)?;
        let dtype = self.any();
        self.store(g, dx, dtype, &dims)
    }

    fn pool(&mut self, g: &mut GraphBuilder) -> Result<(), Error> {
        let spatial = 1 + self.below(3) as usize;
        let mut dims = vec![1 + self.below(2), 1 + self.below(5)];
        dims.extend((0..spatial).map(|_| 5 + self.below(8)));
        let windows = if self.chance(3) {
            PoolWindows::Adaptive { out: dims[2..].iter().map(|&dim| 1 + self.below(dim + 2)).collect() }
        } else {
            let window: Vec<u64> = (0..spatial).map(|_| 1 + self.below(3)).collect();
            PoolWindows::Sliding {
                strides: (0..spatial).map(|_| 1 + self.below(3)).collect(),
                dilations: (0..spatial).map(|_| 1 + self.below(2)).collect(),
                pads_before: window.iter().map(|&window| self.below(window)).collect(),
                pads_after: window.iter().map(|&window| self.below(window)).collect(),
                window,
            }
        };
        let mode = self.pick(&[
            PoolMode::Max,
            PoolMode::Max,
            PoolMode::Average { count_include_pad: false },
            PoolMode::Average { count_include_pad: true },
        ]);
        let dtype = self.any();
        let x = self.tensor(g, "x", dtype, &dims);
        let index_dtype = self.pick(&[DType::I32, DType::I64]);
        let out_dtype = self.any();
        let (y, index) = if mode == PoolMode::Max && self.chance(2) {
            let (y, index) = g.max_pool_with_index("pool", windows.clone(), x, index_dtype)?;
            (y, Some(index))
        } else {
            (g.pool("pool", mode, windows.clone(), x)?, None)
        };
        let out: Vec<u64> = g.clone().dims_of(y);
        self.store(g, y, out_dtype, &out)?;
        if let Some(index) = index {
            self.store(g, index, index_dtype, &out)?;
        }
        let dtype = self.float();
        let dy = self.tensor(g, "dy", dtype, &out);
        let stored_index = if mode == PoolMode::Max && index.is_none() && self.chance(2) {
            Some(self.tensor(g, "index", index_dtype, &out))
        } else {
            None
        };
        let pool = PoolBackward {
            mode,
            windows,
            dy,
            x: (mode == PoolMode::Max && stored_index.is_none()).then_some(x),
            index: stored_index,
            dx: Uid(0),
        };
        let dx = g.pool_backward("backward", pool, &dims)?;
        let dtype = self.float();
        self.store(g, dx, dtype, &dims)
    }

    /// Dims that broadcast to these, from the right.
    fn vector(&mut self, g: &mut GraphBuilder, name: &str, dims: &[u64]) -> Option<Uid> {
        if self.chance(3) {
            return None;
        }
        let drop = self.below(dims.len() as u64) as usize;
        let own: Vec<u64> = dims[drop..].iter().map(|&dim| if self.chance(2) { 1 } else { dim }).collect();
        let dtype = self.float();
        Some(self.tensor(g, name, dtype, &own))
    }

    fn norm(&mut self, g: &mut GraphBuilder) -> Result<(), Error> {
        let rank = 1 + self.below(4);
        let dims = self.dims(rank, 12);
        let mut axes: Vec<u32> = (0..rank as u32).filter(|_| self.chance(2)).collect();
        if axes.is_empty() {
            axes.push(rank as u32 - 1);
        }
        let kind = self.pick(&[NormKind::Layer, NormKind::Rms]);
        let groups = self.pick(&[1, 2, 3]);
        let groups = if dims[axes[0] as usize].is_multiple_of(groups) { groups } else { 1 };
        let spec = NormSpec { groups, zero_centred: self.chance(3), ..NormSpec::new(kind, &axes, 1e-3) };
        let (dtype, out) = (self.float(), self.float());
        let x = self.tensor(g, "x", dtype, &dims);
        let residual = if self.chance(3) { Some(self.tensor(g, "residual", out, &dims)) } else { None };
        let (scale, bias) = (self.vector(g, "scale", &dims), self.vector(g, "bias", &dims));
        let made = g.normalize("norm", Normalize { residual, scale, bias, ..Normalize::new(spec.clone(), x) })?;
        self.store(g, made.y, out, &dims)?;
        let narrow = g.dims(made.inv).unwrap_or_default();
        let statistics: Vec<Uid> = made.mean.into_iter().chain([made.inv]).collect();
        let keeps = self.chance(2);
        for &uid in statistics.iter().filter(|_| keeps) {
            self.store(g, uid, DType::F32, &narrow)?;
        }
        if let Some(sum) = made.sum.filter(|_| self.chance(2)) {
            self.store(g, sum, out, &dims)?;
        }
        let dy = self.tensor(g, "dy", out, &dims);
        let dsum = if self.chance(3) { Some(self.tensor(g, "dsum", out, &dims)) } else { None };
        let back = NormalizeBackward {
            scale,
            mean: made.mean.filter(|_| keeps),
            inv: keeps.then_some(made.inv),
            dsum,
            ..NormalizeBackward::new(spec, x, dy)
        };
        let bias_dims = bias.and_then(|bias| g.dims(bias));
        let wanted = NormGradients { dx: true, dscale: scale.is_some(), dbias: bias_dims.as_deref() };
        let back = g.normalize_backward("backward", back, wanted)?;
        let of_scale = scale.and_then(|scale| g.dims(scale)).unwrap_or_default();
        for (uid, dims) in [(back.dx, &dims), (back.dscale, &of_scale), (back.dbias, &bias_dims.clone().unwrap_or_default())] {
            if let Some(uid) = uid {
                self.store(g, uid, out, dims)?;
            }
        }
        Ok(())
    }

    fn attention(&mut self, g: &mut GraphBuilder) -> Result<(), Error> {
        let is_fp8 = self.chance(5);
        let (dtype, out) = (self.pick(if is_fp8 { &[DType::E4m3, DType::E5m2] } else { &ATTENDED }), self.pick(&ATTENDED));
        let (b, h_kv) = (1 + self.below(3), 1 + self.below(3));
        let h = h_kv * (1 + self.below(3));
        let (s_q, s_kv, d, d_v) = (self.below(20), self.below(40), 1 + self.below(40), 1 + self.below(40));
        // Sequences behind each other in as many rows as they could have, or fewer.
        let ragged = self.chance(3);
        let rows = |draw: &mut Draw, longest: u64| if ragged { draw.below(b * longest + 1) } else { longest };
        let (own_b, q_rows, kv_rows) = (if ragged { 1 } else { b }, rows(self, s_q), rows(self, s_kv));
        let (s_q, s_kv) = (s_q.min(q_rows), s_kv.min(kv_rows));
        // Keys in pages, which have no gradients, of queries in sequences too.
        let paged = self.chance(4);
        let (page_size, pages, entries) = (1 + self.below(9), 1 + self.below(7), self.below(6));
        let s_kv = if paged { entries * page_size } else { s_kv };
        let [kv_b, kv_rows] = if paged { [pages, page_size] } else { [own_b, kv_rows] };
        let q = self.tensor(g, "q", dtype, &[own_b, h, q_rows, d]);
        let (k, v) = (self.tensor(g, "k", dtype, &[kv_b, h_kv, kv_rows, d]), self.tensor(g, "v", dtype, &[kv_b, h_kv, kv_rows, d_v]));
        let bound = |draw: &mut Draw| draw.chance(3).then(|| draw.below(9) as u32);
        let spec = AttentionSpec {
            causal: self.pick(&[Causal::None, Causal::TopLeft, Causal::BottomRight]),
            left: bound(self),
            right: bound(self),
            soft_cap: self.chance(4).then_some(Real(3.0)),
            scale: if self.chance(4) { HostScalar::Bound(g.host_scalar("scale", DType::F32)) } else { HostScalar::Fixed(Real(0.25)) },
            longest_q: ragged.then_some(s_q as u32),
            longest_kv: (ragged && !paged).then_some(s_kv as u32),
            dropout: self.chance(3).then(|| Real(self.pick(&[0.0, 0.1, 0.5, 1.0]))),
        };
        let mut option = |draw: &mut Draw, dtype: DType, dims: [u64; 4]| {
            let dims: Vec<u64> = dims.iter().map(|&dim| if draw.chance(3) { 1 } else { dim }).collect();
            draw.chance(4).then(|| draw.tensor(g, "option", dtype, &dims))
        };
        let of_options = self.pick(&ATTENDED);
        let mut attention = Attention::new(spec, q, k, v);
        attention.bias = option(self, of_options, [b, h, s_q, s_kv]);
        attention.mask = option(self, DType::U8, [b, h, s_q, s_kv]);
        attention.slopes = option(self, DType::F32, [b, h, 1, 1]);
        let mut whole = |draw: &mut Draw, dtype: DType, dims: [u64; 4]| draw.chance(4).then(|| draw.tensor(g, "option", dtype, &dims));
        attention.sinks = whole(self, of_options, [1, h, 1, 1]);
        attention.q_lengths = whole(self, DType::I32, [b, 1, 1, 1]);
        attention.kv_lengths = whole(self, DType::I32, [b, 1, 1, 1]);
        let mut descale = |draw: &mut Draw| {
            let dims = draw.pick(&[[b, h_kv, 1, 1], [1, h_kv, 1, 1], [1; 4]]);
            (is_fp8 && draw.chance(2)).then(|| draw.tensor(g, "descale", DType::F32, &dims))
        };
        (attention.q_descale, attention.k_descale, attention.v_descale) = (descale(self), descale(self), descale(self));
        let mut offsets = |draw: &mut Draw, is_there: bool| is_there.then(|| draw.tensor(g, "offsets", DType::I32, &[b + 1, 1, 1, 1]));
        attention.q_offsets = offsets(self, ragged);
        attention.kv_offsets = offsets(self, ragged && !paged);
        attention.dropout_state = spec.dropout.map(|_| g.tensor("state", DType::I32, Layout::row_major(&[4]).expect("small")));
        attention.page_table = paged.then(|| self.tensor(g, "table", DType::I32, &[b, entries, 1, 1]));
        if attention.spec.soft_cap.is_none() && self.chance(4) {
            let (score, operands) = self.score(g, [b, h, s_q, s_kv]);
            (attention.score, attention.score_operands) = (Some(score), operands);
        }
        let Attention { bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, dropout_state, .. } = attention;
        let (of_score, score_operands) = (attention.score.clone(), attention.score_operands.clone());
        let made = g.attention("attention", attention)?;
        self.store(g, made.o, out, &[own_b, h, q_rows, d_v])?;
        self.store(g, made.log_sum_exp, DType::F32, &[own_b, h, q_rows, 1])?;
        if paged || is_fp8 {
            return Ok(());
        }
        let d_o = self.tensor(g, "d_o", dtype, &[own_b, h, q_rows, d_v]);
        let plain = AttentionBackward::new(spec, [q, k, v], made.o, made.log_sum_exp, d_o);
        let plain = AttentionBackward { dropout_state, score: of_score, score_operands, ..plain };
        let back = AttentionBackward { bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, ..plain };
        let made = g.attention_backward("backward", back)?;
        for (gradient, of) in
            [(Some(made.dq), Some(q)), (Some(made.dk), Some(k)), (Some(made.dv), Some(v)), (made.dbias, bias), (made.dsinks, sinks)]
        {
            let dims = of.and_then(|of| g.dims(of)).unwrap_or_default();
            if let Some(gradient) = gradient {
                self.store(g, gradient, out, &dims)?;
            }
        }
        Ok(())
    }

    fn softmax(&mut self, g: &mut GraphBuilder) -> Result<(), Error> {
        let rank = 1 + self.below(4);
        let dims = self.dims(rank, 14);
        let axis = self.below(rank) as u32;
        let (dtype, out) = (self.float(), self.float());
        let x = self.tensor(g, "x", dtype, &dims);
        if self.chance(2) {
            let log = self.chance(2);
            let y = g.softmax("softmax", x, axis, log)?;
            self.store(g, y, out, &dims)?;
            let y = self.tensor(g, "y", dtype, &dims);
            let dy = self.tensor(g, "dy", dtype, &dims);
            let dx = g.softmax_backward("backward", y, dy, axis, log)?;
            return self.store(g, dx, out, &dims);
        }
        let mut spec = CrossEntropySpec::new(axis, self.pick(&[LossReduction::None, LossReduction::Sum, LossReduction::Mean]));
        if self.chance(2) {
            spec.label_smoothing = Real(0.1);
        }
        if self.chance(2) {
            spec.ignore_index = Some(self.pick(&[-1, 0, 100]));
        }
        let mut rows = dims.clone();
        rows[axis as usize] = 1;
        let loss_dims = if spec.reduction == LossReduction::None { rows.clone() } else { vec![1; dims.len()] };
        let label_dtype = self.pick(&[DType::I32, DType::I64, DType::I8]);
        let labels = self.tensor(g, "labels", label_dtype, &rows);
        let (loss, lse) = g.cross_entropy_with_lse("loss", spec, x, labels)?;
        self.store(g, loss, out, &loss_dims)?;
        self.store(g, lse, DType::F32, &rows)?;
        let dloss = self.tensor(g, "dloss", DType::F32, &loss_dims);
        let backward = CrossEntropyBackward { spec, logits: x, labels, dloss, lse: self.chance(2).then_some(lse), dlogits: Uid(0) };
        let dx = g.cross_entropy_backward("backward", backward)?;
        self.store(g, dx, out, &dims)
    }

    fn append(&mut self, g: &mut GraphBuilder) -> Result<(), Error> {
        let rank = 1 + self.below(4) as usize;
        let mut dims = self.dims(rank as u64, 7);
        let (axis, dtype) = (self.below(rank as u64) as usize, self.any());
        let rows = self.tensor(g, "rows", dtype, &dims);
        let of: Vec<u64> = (0..rank).map(|dim| if dim == axis || self.below(2) == 0 { 1 } else { dims[dim] }).collect();
        dims[axis] = self.below(9);
        let (x, lengths) = (self.tensor(g, "x", dtype, &dims), self.tensor(g, "lengths", DType::I32, &of));
        g.append("append", x, rows, lengths, axis as u32).map(drop)
    }

    fn movement(&mut self, g: &mut GraphBuilder) -> Result<(), Error> {
        let rank = 1 + self.below(4) as usize;
        let dims = self.dims(rank as u64, 7);
        let dtype = self.any();
        let x = self.tensor(g, "x", dtype, &dims);
        let mut out = dims.clone();
        let y = match self.below(6) {
            0 => {
                out = vec![dims.iter().product()];
                g.reshape("reshape", x, &out)?
            }
            1 => {
                let mut permutation: Vec<u32> = (0..rank as u32).collect();
                permutation.rotate_left(self.below(rank as u64) as usize);
                out = permutation.iter().map(|&dim| dims[dim as usize]).collect();
                g.transpose("transpose", x, &permutation)?
            }
            2 => {
                let starts: Vec<u64> = dims.iter().map(|&dim| self.below(dim)).collect();
                let steps: Vec<u64> = dims.iter().map(|_| 1 + self.below(3)).collect();
                out = (0..rank).map(|i| (dims[i] - starts[i]).div_ceil(steps[i])).collect();
                g.slice("slice", x, &starts, &dims, &steps)?
            }
            3 => {
                let axis = self.below(rank as u64) as usize;
                let mut other = dims.clone();
                other[axis] = 1 + self.below(5);
                out[axis] += other[axis] + dims[axis];
                let second = self.tensor(g, "second", dtype, &other);
                g.concat("concat", &[x, second, x], axis as u32)?
            }
            4 => {
                let before: Vec<u64> = dims.iter().map(|_| self.below(3)).collect();
                let after: Vec<u64> = dims.iter().map(|_| self.below(3)).collect();
                out = (0..rank).map(|i| dims[i] + before[i] + after[i]).collect();
                g.pad("pad", x, &before, &after, 1.5)?
            }
            _ => {
                let x = self.tensor(g, "thin", dtype, &vec![1; rank]);
                out.insert(0, 3);
                g.broadcast("broadcast", x, &out)?
            }
        };
        self.store(g, y, dtype, &out)
    }
}

trait Dims {
    fn dims_of(self, uid: Uid) -> Vec<u64>;
}

impl Dims for GraphBuilder {
    /// The dims of a result, by way of a graph that ends there.
    fn dims_of(mut self, uid: Uid) -> Vec<u64> {
        for other in 1..=uid.0 + 1 {
            // What is virtual and unread is stored, so that the graph is whole.
            let _ = self.store(Uid(other), "whole", DType::I32);
        }
        let _ = self.store(uid, "end", DType::F32);
        self.finish().ok().and_then(|graph| graph.tensor(uid).map(|tensor| tensor.layout.dims().to_vec())).unwrap_or_default()
    }
}

fn check(family: &str, count: u64, build: Build) {
    let mut failures = Vec::new();
    let one: u64 = std::env::var("VERDIGRIS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(u64::MAX);
    let seeds = if one == u64::MAX { 0..count } else { one..one + 1 };
    for seed in seeds {
        let mut draw = Draw { random: Random::new(seed * 7919 + family.len() as u64) };
        let mut g = GraphBuilder::new(family);
        let built = build(&mut draw, &mut g).and_then(|()| g.finish());
        let graph = built.unwrap_or_else(|error| panic!("{family}, seed {seed}: {error}"));
        let distribution = draw.pick(&[Distribution::Normal, Distribution::Normal, Distribution::SmallIntegers, Distribution::Special]);
        match run(&graph, distribution, seed) {
            Ok((_, faults)) if faults.is_empty() => {}
            Ok((_, faults)) => {
                failures.push(format!("{family}, seed {seed}, {distribution:?}: {:?}\n  {}", graph.nodes, faults.join("\n  ")))
            }
            Err(error) => failures.push(format!("{family}, seed {seed}: {error}")),
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {count} graphs:\n{}",
        failures.len(),
        failures.iter().take(6).cloned().collect::<Vec<_>>().join("\n")
    );
}

#[test]
fn convolutions() {
    check("conv", 400, Draw::conv);
}

#[test]
fn products() {
    check("matmul", 200, Draw::matmul);
}

#[test]
fn pointwise_chains() {
    check("pointwise", 600, Draw::pointwise);
}

#[test]
fn random_numbers() {
    check("random", 300, Draw::random);
}

#[test]
fn reductions() {
    check("reduction", 200, Draw::reduction);
}

#[test]
fn pooling() {
    check("pool", 200, Draw::pool);
}

#[test]
fn resampling() {
    check("resample", 300, Draw::resample);
}

#[test]
fn softmax_and_loss() {
    check("softmax", 200, Draw::softmax);
}

#[test]
fn normalizations() {
    check("norm", 300, Draw::norm);
}

#[test]
fn attention() {
    check("attention", 300, Draw::attention);
}

#[test]
fn movements() {
    check("movement", 200, Draw::movement);
}

#[test]
fn appended_rows() {
    check("append", 200, Draw::append);
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let pools = [1, 2, 3, 7].map(|threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    let families: [Build; 8] =
        [Draw::conv, Draw::matmul, Draw::reduction, Draw::pool, Draw::softmax, Draw::norm, Draw::attention, Draw::resample];
    for (i, family) in families.into_iter().enumerate() {
        for seed in 0..30 {
            let mut draw = Draw { random: Random::new(seed * 31 + i as u64) };
            let mut g = GraphBuilder::new("threads");
            family(&mut draw, &mut g).unwrap();
            let graph = g.finish().unwrap();
            let outputs = pools.each_ref().map(|pool| pool.install(|| run(&graph, Distribution::Normal, seed)).unwrap().0);
            assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]), "family {i}, seed {seed}");
        }
    }
}

/// A batch large enough that images, rows and pieces of sums go to several threads.
#[test]
fn large_sums_do_not_depend_on_threads() {
    let mut g = GraphBuilder::new("wgrad");
    let x = g.tensor("x", DType::F32, Layout::row_major(&[9, 16, 20, 20]).unwrap());
    let dy = g.tensor("dy", DType::F32, Layout::row_major(&[9, 32, 10, 10]).unwrap());
    let mut conv = Conv::new(ConvDirection::Wgrad, x, Uid(0), dy, 2, Precision::Fp32);
    conv.strides = vec![2, 2];
    conv.pads_before = vec![1, 1];
    conv.pads_after = vec![1, 1];
    let dw = g.conv_wgrad("wgrad", conv, &[32, 16, 3, 3]).unwrap();
    g.store(dw, "dw", DType::F32).unwrap();
    let sum = g.reduction("sum", ReductionOp::Add, x, &[0, 1, 2, 3]).unwrap();
    g.store(sum, "sum", DType::F32).unwrap();
    let graph = g.finish().unwrap();
    let run_on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let (outputs, faults) = pool.install(|| run(&graph, Distribution::Normal, 1)).unwrap();
        assert!(faults.is_empty(), "{faults:?}");
        outputs
    };
    let one = run_on(1);
    assert!([2, 3, 5].into_iter().all(|threads| run_on(threads) == one));
}

/// Sizes that fill whole register tiles, several blocks of the depth and of the columns, in both orders of the channels; the random ones
/// above stay below that.
#[test]
fn convolutions_of_many_tiles() {
    // n, c, k, extent, filter, stride, pad, dilation, groups
    let sizes: [[u64; 11]; 12] = [
        [2, 20, 70, 9, 50, 3, 3, 1, 1, 1, 1],
        [2, 70, 20, 11, 33, 3, 3, 1, 1, 2, 1],
        [3, 40, 51, 14, 14, 3, 3, 2, 1, 1, 1],
        [5, 30, 100, 7, 7, 3, 3, 1, 1, 1, 1],
        [3, 200, 50, 10, 10, 1, 1, 1, 0, 1, 1],
        [2, 3, 20, 31, 30, 7, 7, 2, 3, 1, 1],
        [1, 7, 66, 40, 41, 5, 4, 3, 2, 1, 1],
        [2, 32, 32, 12, 28, 3, 3, 1, 1, 1, 4],
        [1, 1, 5, 1, 300, 1, 9, 1, 4, 1, 1],
        [9, 33, 9, 12, 13, 3, 4, 2, 1, 1, 3],
        [2, 18, 24, 20, 40, 3, 3, 1, 2, 2, 6],
        [2, 12, 12, 14, 15, 3, 3, 1, 1, 1, 12],
    ];
    let pools = [1, 3].map(|threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    let orders: [&[usize]; 2] = [&[0, 1, 2, 3], &[0, 2, 3, 1]];
    for (i, [n, c, k, h, w, r, s, stride, pad, dilation, groups]) in sizes.into_iter().enumerate() {
        for (direction, order) in ConvDirection::ALL.into_iter().flat_map(|direction| orders.map(|order| (direction, order))) {
            for (dtype, precision) in [(DType::F32, Precision::Fp32), (DType::F64, Precision::F64)] {
                let mut g = GraphBuilder::new("conv");
                let mut conv = Conv::new(direction, Uid(0), Uid(0), Uid(0), 2, precision);
                (conv.strides, conv.dilations) = (vec![stride; 2], vec![dilation; 2]);
                // A line of one row is not padded across it.
                let pads = if h == 1 { vec![0, pad] } else { vec![pad; 2] };
                (conv.pads_before, conv.pads_after, conv.groups) = (pads.clone(), pads, groups);
                let out = [(h, r), (w, s)].into_iter().enumerate().map(|(dim, (extent, filter))| conv.out_extent(dim, extent, filter));
                let out: Vec<u64> = out.map(Option::unwrap).collect();
                let (x_dims, w_dims, y_dims) = ([n, c, h, w], [k, c / groups, r, s], [n, k, out[0], out[1]]);
                let mut tensor = |name: &str, dims: &[u64]| g.tensor(name, dtype, Layout::with_order(dims, order).unwrap());
                let (result, dims) = match direction {
                    ConvDirection::Fprop => {
                        (conv.x, conv.w) = (tensor("x", &x_dims), tensor("w", &w_dims));
                        (g.conv_fprop("conv", conv).unwrap(), y_dims)
                    }
                    ConvDirection::Dgrad => {
                        (conv.y, conv.w) = (tensor("y", &y_dims), tensor("w", &w_dims));
                        (g.conv_dgrad("conv", conv, &x_dims).unwrap(), x_dims)
                    }
                    ConvDirection::Wgrad => {
                        (conv.x, conv.y) = (tensor("x", &x_dims), tensor("y", &y_dims));
                        (g.conv_wgrad("conv", conv, &w_dims).unwrap(), w_dims)
                    }
                };
                g.store_as(result, "result", dtype, Layout::with_order(&dims, order).unwrap()).unwrap();
                let graph = g.finish().unwrap();
                let [one, three] = pools.each_ref().map(|pool| pool.install(|| run(&graph, Distribution::Normal, i as u64)).unwrap());
                assert!(one.1.is_empty(), "{i} {direction:?} {order:?} {dtype:?}: {:?}", one.1);
                assert!(one.0 == three.0, "{i} {direction:?} {order:?} {dtype:?}: threads change bits");
            }
        }
    }
}

#[test]
fn windows_of_much_padding_take_no_longer_than_their_elements() {
    let mut g = GraphBuilder::new("wide windows");
    let x = g.tensor("x", DType::F32, Layout::row_major(&[1, 1, 4]).expect("small"));
    let windows = PoolWindows::Sliding {
        window: vec![(1 << 31) - 1],
        strides: vec![1],
        dilations: vec![1],
        pads_before: vec![1 << 30],
        pads_after: vec![1 << 30],
    };
    let y = g.pool("mean", PoolMode::Average { count_include_pad: false }, windows, x).expect("fits");
    g.store(y, "y", DType::F32).expect("stores");
    let graph = g.finish().expect("valid");
    let plan = GraphPlan::new(&graph).expect("prepares");
    let x_bytes: Vec<u8> = [1.0f32, 2.0, 3.0, 6.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut y_bytes = vec![0; 6 * 4];
    plan.run(Bindings::new().input(x, &x_bytes).output(y, &mut y_bytes)).expect("runs");
    assert!(y_bytes.chunks_exact(4).all(|mean| mean == 3.0f32.to_le_bytes()), "{y_bytes:?}");
}
