//! Gradients of graphs against differences of the reference in f64: each op by itself, random graphs, and rules that are wrong on purpose.
//!
//! Along a random direction `v` of the inputs, `Σ g · v` must be what the loss changes by. Where the loss has a kink, differences to both
//! sides disagree, and the direction is not judged; nor is one along which a step function or a condition changes.
#![forbid(unsafe_code)]

mod attention;
mod judging;
mod masks;
mod movement;
mod scans;

use std::collections::BTreeMap;

use verdigris_graph::{
    Attention, AttentionBackward, AttentionSpec, BatchNorm, BatchNormBackward, BinaryOp, Border, Causal, Conv, ConvDirection, ConvMode,
    CrossEntropySpec, Error, Filter, Graph, GraphBuilder, HostScalar, LossReduction, Matmul, NormKind, NormSpec, Normalize, Op,
    OperandScale, Pointwise, PoolMode, PoolWindows, Precision, Real, ReductionOp, Sampling, ScoreFunction, ScorePlace, ScoreStep,
    TernaryOp, Uid, UnaryOp,
};
use verdigris_reference::data::{Distribution, Random, graph_inputs};
use verdigris_reference::fuzz;
use verdigris_reference::graph::{Selection, evaluate};
use verdigris_reference::run::Inputs;
use verdigris_tensor::{DType, Layout, num};

const F64: DType = DType::F64;

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).unwrap()
}

fn read(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(dtype.bytes()).map(|element| num::read_element(dtype, element).unwrap()).collect()
}

fn write(dtype: DType, values: &[f64]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.bytes()];
    for (value, place) in values.iter().zip(bytes.chunks_exact_mut(dtype.bytes())) {
        num::write_element(dtype, *value, place).unwrap();
    }
    bytes
}

/// The elements of the outputs, row-major.
fn outputs(graph: &Graph, inputs: &Inputs<Uid>) -> BTreeMap<Uid, Vec<f64>> {
    let all = evaluate(graph, inputs, Selection::All).unwrap();
    all.into_iter().map(|expected| (expected.id, expected.values.iter().map(|value| value.value).collect())).collect()
}

/// How far each value of each output may be off.
fn errors(graph: &Graph, inputs: &Inputs<Uid>) -> BTreeMap<Uid, Vec<f64>> {
    let all = evaluate(graph, inputs, Selection::All).unwrap();
    all.into_iter().map(|expected| (expected.id, expected.values.iter().map(|value| value.error).collect())).collect()
}

/// How many directions were judged, and the worst relative error.
#[derive(Debug)]
struct Judged {
    directions: u32,
    kinks: u32,
    /// Directions that two steps were asked about.
    refined: u32,
    worst: f64,
}

/// Compares `Σ g · v` with differences of `Σ dy · y` along random directions of the tensors `of`. All are packed and f64.
fn judge(
    what: &str,
    forward: &Graph,
    with_gradient: &Graph,
    [results, dys, of, gradients]: [&[Uid]; 4],
    inputs: &Inputs<Uid>,
    seed: u64,
) -> Judged {
    let analytic = outputs(with_gradient, inputs);
    let errors = errors(with_gradient, inputs);
    let decided = deciding(forward);
    // The loss, the sum of the magnitudes of its terms, and what was decided.
    let terms = |inputs: &Inputs<Uid>| -> (f64, f64, Vec<u64>) {
        let all = outputs(forward, inputs);
        let weighed =
            |(y, dy): (&Uid, &Uid)| -> Vec<f64> { all[y].iter().zip(read(F64, &inputs.buffers[dy])).map(|(y, dy)| y * dy).collect() };
        let terms: Vec<f64> = results.iter().zip(dys).flat_map(weighed).collect();
        let values = |uid: &Uid| -> Vec<f64> {
            let given = || inputs.buffers.get(uid).map(|bytes| read(forward.tensor(*uid).unwrap().dtype, bytes));
            all.get(uid).cloned().or_else(given).unwrap_or_default()
        };
        let words = |(uid, is_condition): &(Uid, bool)| -> Vec<u64> {
            values(uid).into_iter().map(|value| if *is_condition { u64::from(value != 0.0) } else { value.to_bits() }).collect()
        };
        let decisions = decided.iter().flat_map(words).collect();
        (terms.iter().sum(), terms.iter().map(|term| term.abs()).sum(), decisions)
    };
    let (at, magnitude, decisions_at) = terms(inputs);
    let mut random = Random::new(seed);
    let mut judged = Judged { directions: 0, kinks: 0, refined: 0, worst: 0.0 };
    for (x, gradient) in of.iter().zip(gradients) {
        for _ in 0..3 {
            let values = read(F64, &inputs.buffers[x]);
            let direction: Vec<f64> = values.iter().map(|_| random.normal()).collect();
            let moved = |step: f64| {
                let moved: Vec<f64> = values.iter().zip(&direction).map(|(x, v)| x + step * v).collect();
                let mut inputs = Inputs { buffers: inputs.buffers.clone(), scalars: inputs.scalars.clone() };
                inputs.buffers.insert(*x, write(F64, &moved));
                let (loss, _, decisions) = terms(&inputs);
                // A jump may be of no height, and many of them look smooth.
                if decisions == decisions_at { loss } else { f64::NAN }
            };
            let step = 1e-5;
            let (above, below) = (moved(step), moved(-step));
            let (right, left) = ((above - at) / step, (at - below) / step);
            let size = right.abs().max(left.abs()).max(analytic[gradient].iter().fold(0.0, |most, g| f64::max(most, g.abs()))).max(1e-2);
            let slope = 0.5 * (right + left);
            // Of several elements that are equal any may be the maximum: then the truth says nothing of the gradient.
            let open: f64 = errors[gradient].iter().zip(&direction).map(|(error, v)| error * v.abs()).sum();
            let is_open = open.is_nan() || open >= NEAR * size;
            let ours: f64 = analytic[gradient].iter().zip(&direction).map(|(g, v)| g * v).sum();
            // Two sides that differ by more than curvature does, or that are not there, or a change that is lost in the loss.
            let is_lost = magnitude * f64::EPSILON / step > 0.1 * NEAR * size;
            if !(right.is_finite() && left.is_finite()) || (right - left).abs() > 2e-3 * size || is_lost || is_open {
                judged.kinks += 1;
                continue;
            }
            let mut off = (ours - slope).abs() / size;
            if off >= NEAR {
                // Where the loss bends much (a root or a reciprocal near zero, products of many), a difference errs by the square of its step. Half of the step
                // tells by how much, whatever the gradient says; where that is no small part, the two do not tell either.
                judged.refined += 1;
                let nearer = (moved(0.5 * step) - moved(-0.5 * step)) / step;
                if (nearer - slope).abs() > MOST_BENT * size {
                    judged.kinks += 1;
                    continue;
                }
                off = (ours - nearer - (nearer - slope) / 3.0).abs() / size;
            }
            judged.directions += 1;
            judged.worst = judged.worst.max(if off.is_nan() { f64::INFINITY } else { off });
            if off.is_nan() || off >= NEAR {
                eprintln!("{what}: {} is {ours}, differences say {slope}", forward.tensor(*x).unwrap().name);
            }
        }
    }
    judged
}

/// What decides by steps: the outputs of step functions, and the conditions of selects, of which it counts whether they are zero.
fn deciding(graph: &Graph) -> Vec<(Uid, bool)> {
    let of_op = |op: &Op| match op {
        Op::Pointwise(Pointwise::Unary { f, y, .. }) if STEPS.contains(f) => Some((*y, false)),
        Op::Pointwise(Pointwise::Ternary { f: TernaryOp::Select, t, .. }) => Some((*t, true)),
        _ => None,
    };
    graph.nodes.iter().filter_map(|node| of_op(&node.op)).collect()
}

/// The relative error that differences of step 1e-5 leave.
const NEAR: f64 = 2e-6;
/// The most that the error of a difference may be for two steps to tell the slope: what they leave is of the order of its square.
const MOST_BENT: f64 = 10.0 * NEAR;

struct Built {
    forward: Graph,
    with_gradient: Graph,
    results: Vec<Uid>,
    dys: Vec<Uid>,
    of: Vec<Uid>,
    gradients: Vec<Uid>,
}

/// A graph with the gradients of `of` from upstream gradients of `results`.
fn with_gradients(mut g: GraphBuilder, results: &[Uid], of: &[Uid]) -> Result<Built, Error> {
    for (i, &y) in results.iter().enumerate() {
        if g.described(y).unwrap().is_virtual {
            g.store(y, &format!("y{i}"), F64)?;
        }
    }
    let forward = g.clone().finish()?;
    let mut dys = Vec::new();
    for (i, &y) in results.iter().enumerate() {
        let dims = g.dims(y).unwrap();
        dys.push(g.tensor(&format!("dy{i}"), F64, rows(&dims)));
    }
    let pairs: Vec<(Uid, Uid)> = results.iter().copied().zip(dys.iter().copied()).collect();
    let gradients = g.gradient_from(&pairs, of)?;
    for (i, &gradient) in gradients.iter().enumerate() {
        g.store(gradient, &format!("dx{i}"), F64)?;
    }
    let with_gradient = g.finish()?;
    Ok(Built { forward, with_gradient, results: results.to_vec(), dys, of: of.to_vec(), gradients })
}

impl Built {
    fn inputs(&self, seed: u64) -> Inputs<Uid> {
        // Those of the graph with gradients, which reads all that the forward graph reads and the upstream gradients.
        let mut inputs = graph_inputs(&self.forward, Distribution::Normal, seed);
        let mut random = Random::new(seed ^ 77);
        for dy in &self.dys {
            let count = self.with_gradient.tensor(*dy).unwrap().layout.elements();
            let values: Vec<f64> = (0..count).map(|_| random.normal()).collect();
            inputs.buffers.insert(*dy, write(F64, &values));
        }
        inputs
    }

    fn judge(&self, what: &str, inputs: &Inputs<Uid>, seed: u64) -> Judged {
        let names = [&self.results[..], &self.dys, &self.of, &self.gradients];
        judge(what, &self.forward, &self.with_gradient, names, inputs, seed)
    }
}

/// Builds, judges and asserts; most directions must be judged.
#[track_caller]
fn hold(what: &str, build: impl FnOnce(&mut GraphBuilder) -> Result<(Vec<Uid>, Vec<Uid>), Error>) {
    let mut g = GraphBuilder::new(what);
    let (results, of) = build(&mut g).unwrap();
    let built = with_gradients(g, &results, &of).unwrap();
    let inputs = built.inputs(5);
    let judged = built.judge(what, &inputs, 9);
    assert!(judged.worst < NEAR, "{what}: off by {:e}", judged.worst);
    assert!(judged.directions > judged.kinks, "{what}: {} directions, {} kinks", judged.directions, judged.kinks);
}

fn input(g: &mut GraphBuilder, name: &str, dims: &[u64]) -> Uid {
    g.tensor(name, F64, rows(dims))
}

const UNARY: [UnaryOp; 28] = [
    UnaryOp::Identity,
    UnaryOp::Neg,
    UnaryOp::Abs,
    UnaryOp::Relu,
    UnaryOp::LeakyRelu { slope: Real(0.1) },
    UnaryOp::Clamp { lower: Real(-0.5), upper: Real(0.7) },
    UnaryOp::GeluErf,
    UnaryOp::GeluTanh,
    UnaryOp::Silu,
    UnaryOp::Sigmoid,
    UnaryOp::Tanh,
    UnaryOp::ClippedRelu { lower: Real(-0.3), upper: Real(0.8), slope: Real(0.2) },
    UnaryOp::Elu { alpha: Real(0.75) },
    UnaryOp::Softplus { beta: Real(1.25) },
    UnaryOp::Swish { beta: Real(1.5) },
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
    UnaryOp::Affine { scale: Real(-1.5), shift: Real(0.25) },
];

const STEPS: [UnaryOp; 7] = [UnaryOp::Ceil, UnaryOp::Floor, UnaryOp::Round, UnaryOp::Sign, UnaryOp::Not, UnaryOp::IsFinite, UnaryOp::IsNan];

#[test]
fn functions_of_one_tensor() {
    for f in UNARY {
        hold(f.name(), |g| {
            let x = input(g, "x", &[3, 4]);
            Ok((vec![g.unary(f.name(), f, x)?], vec![x]))
        });
    }
}

#[test]
fn functions_of_two_and_three_tensors() {
    let straight = [UnaryOp::Relu, UnaryOp::HardSigmoid, UnaryOp::Clamp { lower: Real(-0.5), upper: Real(0.7) }];
    let all = BinaryOp::ALL.into_iter().chain(straight.map(BinaryOp::Backward));
    let is_step = |f: BinaryOp| {
        use BinaryOp::{And, Eq, Ge, Gt, Le, Lt, Ne, Or};
        matches!(f, Eq | Ne | Gt | Ge | Lt | Le | And | Or)
    };
    for f in all.filter(|&f| !is_step(f)) {
        for [x_dims, z_dims] in [[&[3, 4][..], &[3, 4]], [&[2, 3, 4], &[3, 1]], [&[1, 4], &[5, 2, 1]]] {
            hold(f.name(), |g| {
                let (x, z) = (input(g, "x", x_dims), input(g, "z", z_dims));
                let y = g.binary(f.name(), f, x, z)?;
                let is_backward = matches!(f, BinaryOp::Backward(_));
                Ok((vec![y], if is_backward { vec![x] } else { vec![x, z] }))
            });
        }
    }
    for f in TernaryOp::ALL {
        hold(f.name(), |g| {
            let [x, z, t] = [("x", &[3, 4][..]), ("z", &[1, 4]), ("t", &[3, 1])].map(|(name, dims)| input(g, name, dims));
            let y = g.ternary(f.name(), f, x, z, t)?;
            Ok((vec![y], if f == TernaryOp::Select { vec![x, z] } else { vec![x, t] }))
        });
    }
    hold("scale", |g| {
        let x = input(g, "x", &[3, 4]);
        let factor = g.host_scalar("factor", DType::F64);
        let half = g.scale("half", x, HostScalar::Fixed(Real(0.5)))?;
        Ok((vec![g.scale("scale", half, HostScalar::Bound(factor))?], vec![x]))
    });
}

#[test]
fn products() {
    let dims: [[&[u64]; 2]; 7] = [
        [&[3, 4], &[4, 5]],
        [&[2, 3, 4], &[2, 4, 5]],
        [&[2, 3, 4], &[4, 5]],
        [&[2, 3, 4], &[1, 4, 5]],
        [&[3, 4], &[2, 4, 5]],
        [&[2, 1, 3, 4], &[5, 4, 2]],
        [&[3, 0], &[0, 2]],
    ];
    for [a_dims, b_dims] in dims {
        for c_dims in [None, Some(&[5][..]), Some(&[1, 1])] {
            hold(&format!("matmul {a_dims:?} {b_dims:?}"), |g| {
                let (a, b) = (input(g, "a", a_dims), input(g, "b", b_dims));
                let mut product = Matmul::new(a, b, Uid(0), Precision::F64);
                product.alpha = HostScalar::Fixed(Real(-1.5));
                let mut of = vec![a, b];
                if let Some(c_dims) = c_dims.filter(|dims| dims[0] == 1 || b_dims.last() == Some(&5)) {
                    let c = input(g, "c", c_dims);
                    product.c = Some(c);
                    product.beta = HostScalar::Bound(g.host_scalar("beta", DType::F64));
                    of.push(c);
                }
                Ok((vec![g.matmul_with("matmul", product)?], of))
            });
        }
    }
}

#[test]
fn convolutions_in_three_directions() {
    for (groups, mode) in [(1, ConvMode::CrossCorrelation), (2, ConvMode::Convolution)] {
        for direction in ConvDirection::ALL {
            hold(&format!("conv {} of {groups} groups", direction.name()), |g| {
                let (x_dims, w_dims) = ([2, 4, 7, 6], [6, 4 / groups, 3, 2]);
                let conv = Conv {
                    pads_before: vec![1, 0],
                    pads_after: vec![2, 1],
                    strides: vec![2, 1],
                    dilations: vec![1, 2],
                    groups,
                    mode,
                    ..Conv::new(direction, Uid(0), Uid(0), Uid(0), 2, Precision::F64)
                };
                let y_dims = [2, 6, 4, 5];
                let mut operand = |name: &str, dims: &[u64]| input(g, name, dims);
                Ok(match direction {
                    ConvDirection::Fprop => {
                        let (x, w) = (operand("x", &x_dims), operand("w", &w_dims));
                        (vec![g.conv_fprop("conv", Conv { x, w, ..conv })?], vec![x, w])
                    }
                    ConvDirection::Dgrad => {
                        let (y, w) = (operand("y", &y_dims), operand("w", &w_dims));
                        (vec![g.conv_dgrad("conv", Conv { y, w, ..conv }, &x_dims)?], vec![y, w])
                    }
                    ConvDirection::Wgrad => {
                        let (x, y) = (operand("x", &x_dims), operand("y", &y_dims));
                        (vec![g.conv_wgrad("conv", Conv { x, y, ..conv }, &w_dims)?], vec![x, y])
                    }
                })
            });
        }
    }
}

#[test]
fn reductions() {
    for f in ReductionOp::ALL {
        for axes in [&[1][..], &[0, 2], &[0, 1, 2]] {
            hold(f.name(), |g| {
                let x = input(g, "x", &[2, 3, 4]);
                Ok((vec![g.reduction(f.name(), f, x, axes)?], vec![x]))
            });
        }
    }
}

/// A product is smooth where an element is 0, and its gradient there is the product of the others; several greatest ones share.
#[test]
fn reductions_at_zeros_and_ties() {
    let gradient = |f: ReductionOp, x: [f64; 6]| {
        let mut g = GraphBuilder::new("reduction");
        let x_uid = input(&mut g, "x", &[2, 3]);
        let y = g.reduction("f", f, x_uid, &[1]).unwrap();
        let built = with_gradients(g, &[y], &[x_uid]).unwrap();
        let mut inputs = built.inputs(1);
        inputs.buffers.insert(x_uid, write(F64, &x));
        inputs.buffers.insert(built.dys[0], write(F64, &[1.0, 10.0]));
        outputs(&built.with_gradient, &inputs)[&built.gradients[0]].clone()
    };
    assert_eq!(gradient(ReductionOp::Mul, [2.0, 0.0, 3.0, 0.0, 5.0, 0.0]), [0.0, 6.0, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(gradient(ReductionOp::MulNoZeros, [2.0, 0.0, 3.0, 0.0, 5.0, 0.0]), [3.0, 0.0, 2.0, 0.0, 10.0, 0.0]);
    // What the others make lies within the range of f64, and what all of them make does not.
    let wanted = [1e-150 * 1e-100, 1e-200 * 1e-100, 0.0, 10.0 * (1e150 * 1e100), 10.0 * (1e200 * 1e100), f64::INFINITY];
    for f in [ReductionOp::Mul, ReductionOp::MulNoZeros] {
        assert_eq!(gradient(f, [1e-200, 1e-150, 1e-100, 1e200, 1e150, 1e100]), wanted);
    }
    assert_eq!(gradient(ReductionOp::Max, [2.0, 7.0, 7.0, 1.0, 1.0, 0.0]), [0.0, 0.5, 0.5, 5.0, 5.0, 0.0]);
    assert_eq!(gradient(ReductionOp::Amax, [-7.0, 7.0, 3.0, 1.0, -2.0, 0.0]), [-0.5, 0.5, 0.0, 0.0, -10.0, 0.0]);
    let norm = gradient(ReductionOp::Norm2, [3.0, 0.0, 4.0, 0.0, 0.0, 0.0]).into_iter().zip([0.6, 0.0, 0.8, 0.0, 0.0, 0.0]);
    assert!(norm.into_iter().all(|(got, want)| (got - want).abs() < 1e-15));
}

#[test]
fn pooling() {
    let windows = PoolWindows::Sliding {
        window: vec![3, 2],
        strides: vec![2, 1],
        dilations: vec![1, 2],
        pads_before: vec![1, 0],
        pads_after: vec![0, 1],
    };
    let average = |count_include_pad| PoolMode::Average { count_include_pad };
    for mode in [PoolMode::Max, average(true), average(false)] {
        for windows in [windows.clone(), PoolWindows::Adaptive { out: vec![3, 4] }] {
            hold("pool", |g| {
                let x = input(g, "x", &[2, 2, 7, 6]);
                Ok((vec![g.pool("pool", mode, windows.clone(), x)?], vec![x]))
            });
        }
    }
    hold("pool with index", |g| {
        let x = input(g, "x", &[2, 2, 7, 6]);
        let (y, index) = g.max_pool_with_index("pool", windows.clone(), x, DType::I32)?;
        g.store(index, "index", DType::I32)?;
        Ok((vec![y], vec![x]))
    });
    hold("fractional pool", |g| {
        let (x, samples) = (input(g, "x", &[2, 2, 7, 6]), input(g, "samples", &[2, 2, 2]));
        let (y, index) = g.fractional_max_pool("pool", x, samples, (&[2, 3], &[5, 3]), DType::I32)?;
        g.store(index, "index", DType::I32)?;
        Ok((vec![y], vec![x]))
    });
    hold("pool backward", |g| {
        let dy = input(g, "dy", &[2, 2, 3, 3]);
        let windows = PoolWindows::tiles(&[2, 2]);
        let pool = verdigris_graph::PoolBackward { mode: average(true), windows, dy, x: None, index: None, dx: Uid(0) };
        Ok((vec![g.pool_backward("back", pool, &[2, 2, 6, 7])?], vec![dy]))
    });
}

#[test]
fn resampling() {
    let filters = [
        Filter::Nearest,
        Filter::NearestExact,
        Filter::Linear { align_corners: false },
        Filter::Linear { align_corners: true },
        Filter::Cubic { align_corners: false },
        Filter::Cubic { align_corners: true },
    ];
    let interpolations = filters.into_iter().flat_map(|filter| {
        [(vec![7, 11], vec![]), (vec![2, 1], vec![]), (vec![6, 9], vec![Real(1.55), Real(1.9)])]
            .map(|(out, factors)| Sampling::Interpolate { filter, out, factors })
    });
    let borders = [Border::Reflect, Border::Replicate, Border::Circular];
    let pads = borders.into_iter().map(|border| Sampling::Pad {
        border,
        before: vec![3, if border == Border::Circular { 1 } else { -1 }],
        after: vec![1, 4],
    });
    for sampling in interpolations.chain(pads) {
        hold("resample", |g| {
            let x = input(g, "x", &[2, 2, 4, 5]);
            Ok((vec![g.resample("resample", sampling.clone(), x)?], vec![x]))
        });
    }
    hold("resample backward", |g| {
        let dy = input(g, "dy", &[2, 1, 7]);
        let sampling = Sampling::Interpolate { filter: Filter::Linear { align_corners: true }, out: vec![7], factors: vec![] };
        Ok((vec![g.resample_backward("back", sampling, dy, &[2, 1, 4])?], vec![dy]))
    });
}

#[test]
fn batch_norm() {
    let vectors = |g: &mut GraphBuilder| ["scale", "bias"].map(|name| input(g, name, &[1, 3, 1, 1]));
    for relu in [false, true] {
        for add in [false, true] {
            hold("batch norm", |g| {
                let (x, z, [scale, bias]) = (input(g, "x", &[4, 3, 2, 3]), input(g, "z", &[4, 3, 2, 3]), vectors(g));
                let add = add.then_some(z);
                let norm = BatchNorm { relu, scale: Some(scale), bias: Some(bias), add, ..BatchNorm::new(x, 1e-3) };
                let y = g.batch_norm("norm", norm)?.y;
                Ok((vec![y], [x, scale, bias].into_iter().chain(add).collect()))
            });
        }
    }
    let clamp = UnaryOp::Clamp { lower: Real(-0.5), upper: Real(0.75) };
    for f in [UnaryOp::Silu, UnaryOp::HardSwish, clamp, UnaryOp::LeakyRelu { slope: Real(0.1) }, UnaryOp::Mish] {
        hold("batch norm with an activation", |g| {
            let (x, [scale, bias]) = (input(g, "x", &[4, 3, 2, 3]), vectors(g));
            let norm = BatchNorm { activation: Some(f), scale: Some(scale), bias: Some(bias), ..BatchNorm::new(x, 1e-3) };
            Ok((vec![g.batch_norm("norm", norm)?.y], vec![x, scale, bias]))
        });
    }
    hold("batch norm without a scale", |g| {
        let x = input(g, "x", &[7, 3]);
        Ok((vec![g.batch_norm("norm", BatchNorm::new(x, 1e-3))?.y], vec![x]))
    });
    // What is stored narrow is formed again.
    hold("batch norm with statistics of bf16", |g| {
        let x = input(g, "x", &[7, 3]);
        let normed = g.batch_norm("norm", BatchNorm::new(x, 1e-3))?;
        g.store(normed.mean, "mean", DType::Bf16)?;
        g.store(normed.inv, "inv", DType::Bf16)?;
        Ok((vec![normed.y], vec![x]))
    });
    hold("statistics", |g| {
        let x = input(g, "x", &[5, 3, 4]);
        let (mean, m2) = g.batch_norm_statistics("moments", x)?;
        Ok((vec![mean, m2], vec![x]))
    });
    hold("batch norm with statistics that are given", |g| {
        let (x, [scale, bias]) = (input(g, "x", &[2, 3, 2, 2]), vectors(g));
        let (mean, var) = (g.tensor("mean", F64, rows(&[1, 3, 1, 1])), g.tensor("var", F64, rows(&[1, 3, 1, 1])));
        Ok((vec![g.batch_norm_inference("norm", x, [mean, var], Some(scale), Some(bias), 4.0)?], vec![x, scale, bias]))
    });
    let (op, _) = refusal(|g| {
        let (x, dy) = (input(g, "x", &[4, 3]), input(g, "dy", &[4, 3]));
        let (mean, inv) = (input(g, "mean", &[1, 3]), input(g, "inv", &[1, 3]));
        Ok((g.batch_norm_backward("back", BatchNormBackward::new(dy, x, mean, inv))?.0, x))
    });
    assert_eq!(op, "back");
    let (op, _) = refusal(|g| {
        let x = input(g, "x", &[4, 3]);
        Ok((g.batch_norm("norm", BatchNorm::new(x, 1e-3))?.inv, x))
    });
    assert_eq!(op, "norm");
}

#[test]
fn dropout() {
    hold("dropout", |g| {
        let x = input(g, "x", &[5, 9]);
        let state = g.tensor("state", verdigris_tensor::DType::I32, rows(&[4]));
        Ok((vec![g.dropout("dropout", x, state, 0.25)?], vec![x]))
    });
}

#[test]
fn softmax_and_cross_entropy() {
    for log in [false, true] {
        hold("softmax", |g| {
            let x = input(g, "x", &[3, 5, 2]);
            Ok((vec![g.softmax("softmax", x, 1, log)?], vec![x]))
        });
        hold("softmax backward", |g| {
            let (x, dy) = (input(g, "x", &[3, 5]), input(g, "dy", &[3, 5]));
            let y = g.softmax("softmax", x, 1, log)?;
            Ok((vec![g.softmax_backward("back", y, dy, 1, log)?], vec![x, dy]))
        });
    }
    for reduction in [LossReduction::None, LossReduction::Sum, LossReduction::Mean] {
        let spec = CrossEntropySpec { label_smoothing: Real(0.125), ignore_index: Some(2), ..CrossEntropySpec::new(1, reduction) };
        hold("cross-entropy", |g| {
            let x = input(g, "x", &[6, 5]);
            let labels = g.tensor("labels", DType::I32, rows(&[6, 1]));
            let (loss, lse) = g.cross_entropy_with_lse("loss", spec, x, labels)?;
            Ok((vec![loss, lse], vec![x]))
        });
        hold("cross-entropy without log-sum-exp", |g| {
            let x = input(g, "x", &[6, 5]);
            let labels = g.tensor("labels", DType::I64, rows(&[6, 1]));
            Ok((vec![g.cross_entropy("loss", spec, x, labels)?], vec![x]))
        });
    }
}

#[test]
fn normalizations() {
    for (kind, groups) in [(NormKind::Layer, 1), (NormKind::Layer, 2), (NormKind::Rms, 1), (NormKind::Rms, 3)] {
        let spec = |axes: &[u32], zero_centred| NormSpec { groups, zero_centred, ..NormSpec::new(kind, axes, 0.25) };
        hold("normalize", |g| {
            let (x, scale, bias) = (input(g, "x", &[2, 6, 3]), input(g, "scale", &[6, 1]), input(g, "bias", &[3]));
            let norm = Normalize { scale: Some(scale), bias: Some(bias), ..Normalize::new(spec(&[1, 2], false), x) };
            Ok((vec![g.normalize("norm", norm)?.y], vec![x, scale, bias]))
        });
        hold("normalize of a sum, with everything that it writes", |g| {
            let (x, residual, scale) = (input(g, "x", &[6, 5]), input(g, "residual", &[6, 5]), input(g, "scale", &[6, 5]));
            let norm = Normalize { residual: Some(residual), scale: Some(scale), ..Normalize::new(spec(&[0], true), x) };
            let made = g.normalize("norm", norm)?;
            let results = [Some(made.y), made.sum, made.mean, Some(made.inv)];
            Ok((results.into_iter().flatten().collect(), vec![x, residual, scale]))
        });
        hold("normalize, of the vectors alone", |g| {
            let (x, scale, bias) = (input(g, "x", &[4, 6]), input(g, "scale", &[1, 6]), input(g, "bias", &[1, 1]));
            let norm = Normalize { scale: Some(scale), bias: Some(bias), ..Normalize::new(spec(&[1], false), x) };
            Ok((vec![g.normalize("norm", norm)?.y], vec![scale, bias]))
        });
        hold("statistics alone", |g| {
            let x = input(g, "x", &[6, 5]);
            let made = g.normalize("norm", Normalize::new(spec(&[0, 1], false), x))?;
            g.store(made.y, "y", F64)?;
            Ok(([made.mean, Some(made.inv)].into_iter().flatten().collect(), vec![x]))
        });
    }
    hold("norms of channels", |g| {
        let (x, scale, bias) = (input(g, "x", &[2, 4, 3, 2]), input(g, "scale", &[4]), input(g, "bias", &[4]));
        let group = g.group_norm("group", x, 2, 0.5, Some(scale), Some(bias))?;
        let instance = g.instance_norm("instance", group, 0.5, Some(scale), None)?;
        let layer = g.layer_norm("layer", instance, &[1, 2, 3], 0.5, None, None)?;
        Ok((vec![g.rms_norm("rms", layer, &[3], 0.5, None)?], vec![x, scale, bias]))
    });
}

#[test]
fn movements() {
    hold("movements", |g| {
        let (x, z) = (input(g, "x", &[5, 7, 1]), input(g, "z", &[2, 8]));
        let turned = g.transpose("transpose", x, &[2, 0, 1])?;
        let flat = g.reshape("reshape", turned, &[5, 7])?;
        let padded = g.pad("pad", flat, &[1, 0], &[0, 1], 3.0)?;
        let joined = g.concat("concat", &[padded, z, padded], 0)?;
        let sliced = g.slice("slice", joined, &[1, 0], &[14, 8], &[3, 2])?;
        let last = g.slice("single", joined, &[3, 2], &[4, 8], &[5, 4])?;
        let wide = g.broadcast("broadcast", last, &[5, 3, 2])?;
        Ok((vec![sliced, wide], vec![x, z]))
    });
}

/// A tensor that is read often, intermediate ones that are asked for, two results, one of them on the way to the other.
#[test]
fn a_tensor_read_several_times_gets_the_sum() {
    hold("several", |g| {
        let (x, w) = (input(g, "x", &[4, 4]), input(g, "w", &[4, 4]));
        let h = g.matmul("h", x, w, Precision::F64)?;
        let square = g.binary("square", BinaryOp::Mul, h, h)?;
        let mixed = g.matmul("mixed", square, h, Precision::F64)?;
        let sum = g.binary("sum", BinaryOp::Add, mixed, x)?;
        let twice = g.binary("twice", BinaryOp::Add, sum, sum)?;
        Ok((vec![sum, twice], vec![x, w, x]))
    });
}

/// A random graph of the fuzzer with everything in f64 that may be; `None` where nothing has a gradient.
fn random_graph(seed: u64) -> Option<(Built, Inputs<Uid>)> {
    let mut graph = fuzz::graph(seed).graph;
    let written: Vec<Uid> = graph.nodes.iter().flat_map(|node| node.op.outputs()).collect();
    for node in &mut graph.nodes {
        match &mut node.op {
            Op::Matmul(op) => (op.precision, op.scale_a, op.scale_b) = (Precision::F64, None, None),
            Op::Conv(op) => op.precision = Precision::F64,
            _ => {}
        }
    }
    let keeps_type: Vec<Uid> = (graph.nodes.iter())
        .flat_map(|node| match &node.op {
            Op::CrossEntropy(op) => vec![op.labels],
            Op::CrossEntropyBackward(op) => vec![op.labels],
            Op::Append(op) => vec![op.lengths],
            Op::Pool(op) => op.index.into_iter().collect(),
            Op::PoolBackward(op) => op.index.into_iter().collect(),
            Op::Attention(op) => {
                let integers = [op.mask, op.q_lengths, op.kv_lengths, op.q_offsets, op.kv_offsets, op.dropout_state];
                integers.into_iter().chain([op.slopes]).flatten().collect()
            }
            Op::AttentionBackward(op) => {
                let integers = [op.mask, op.q_lengths, op.kv_lengths, op.q_offsets, op.kv_offsets, op.dropout_state];
                integers.into_iter().chain([op.slopes]).flatten().collect()
            }
            _ => Vec::new(),
        })
        .collect();
    for tensor in &mut graph.tensors {
        if !keeps_type.contains(&tensor.uid) && !tensor.by_value {
            tensor.dtype = F64;
        }
        tensor.layout = rows(tensor.layout.dims());
    }
    // What decides is looked at, so it is kept.
    let deciding: Vec<Uid> = deciding(&graph).into_iter().map(|(uid, _)| uid).collect();
    graph.tensors.iter_mut().filter(|tensor| deciding.contains(&tensor.uid)).for_each(|tensor| tensor.is_virtual = false);
    verdigris_graph::validate::validate(&graph).ok()?;
    let floats = |uid: &Uid| graph.tensor(*uid).is_some_and(|tensor| tensor.dtype == F64 && !tensor.by_value && !tensor.layout.is_empty());
    let results: Vec<Uid> = written.iter().copied().filter(floats).filter(|uid| !graph.tensor(*uid).unwrap().is_virtual).collect();
    let mut read: Vec<Uid> =
        graph.nodes.iter().flat_map(|node| node.op.inputs()).filter(|uid| !written.contains(uid)).filter(floats).collect();
    read.sort_unstable();
    read.dedup();
    let inputs = graph_inputs(&graph, Distribution::Normal, seed);
    // Of several inputs one may have a gradient where another has none.
    read.retain(|&x| with_gradients(GraphBuilder::from(graph.clone()), &results, &[x]).is_ok());
    if read.is_empty() {
        return None;
    }
    let built = with_gradients(GraphBuilder::from(graph), &results, &read).unwrap();
    let mut all = built.inputs(seed);
    all.buffers.extend(inputs.buffers);
    all.scalars = inputs.scalars;
    Some((built, all))
}

#[test]
fn random_graphs() {
    let (mut graphs, mut directions, mut kinks) = (0, 0, 0);
    for seed in 0..450 {
        let Some((built, inputs)) = random_graph(seed) else { continue };
        let judged = built.judge(&format!("seed {seed}"), &inputs, seed);
        graphs += 1;
        directions += judged.directions;
        kinks += judged.kinks;
        assert!(judged.worst < NEAR, "seed {seed}: off by {:e}\n{:#?}", judged.worst, built.forward.nodes);
    }
    eprintln!("{graphs} graphs, {directions} directions, {kinks} kinks");
    assert!(graphs > 300 && directions > 2 * kinks, "{graphs} graphs, {directions} directions, {kinks} kinks");
}

/// What a gradient of one op says where it says no.
fn refusal(build: impl FnOnce(&mut GraphBuilder) -> Result<(Uid, Uid), Error>) -> (String, String) {
    let mut g = GraphBuilder::new("graph");
    let (y, x) = build(&mut g).unwrap();
    let before = format!("{g:?}");
    let dims = g.dims(y).unwrap();
    let dy = g.tensor("dy", DType::F32, rows(&dims));
    let error = g.gradient_from(&[(y, dy)], &[x]).unwrap_err();
    assert_ne!(before, format!("{g:?}"), "dy is there");
    assert_eq!(g.gradient_from(&[(y, dy)], &[x]).unwrap_err(), error, "nothing was left behind");
    let (Error::Gradient { op, tensor, rule } | Error::Constant { op, tensor, rule }) = error else { panic!("{error}") };
    assert!(!rule.is_empty());
    (op, tensor)
}

#[test]
fn what_has_no_gradient_is_told_with_the_op_and_the_tensor() {
    let told = |op: &str, tensor: &str| (op.to_owned(), tensor.to_owned());
    for f in STEPS {
        let got = refusal(|g| {
            let x = input(g, "x", &[3]);
            let h = g.unary("before", UnaryOp::Exp, x)?;
            Ok((g.unary("step", f, h)?, x))
        });
        assert_eq!(got, told("step", "x"), "{}", f.name());
    }
    let got = refusal(|g| {
        let (x, z) = (input(g, "x", &[3]), input(g, "z", &[3]));
        Ok((g.unary("exp", UnaryOp::Exp, x)?, z))
    });
    assert_eq!(got, told("graph", "z"));
    let got = refusal(|g| {
        let x = g.tensor("x", DType::I32, rows(&[3]));
        Ok((g.unary("exp", UnaryOp::Exp, x)?, x))
    });
    assert_eq!(got, told("graph", "x"));
    let got = refusal(|g| {
        let x = input(g, "x", &[3]);
        let whole = g.unary("whole", UnaryOp::Identity, x)?;
        g.store(whole, "whole", DType::I32)?;
        Ok((g.unary("exp", UnaryOp::Exp, whole)?, x))
    });
    assert_eq!(got, told("whole", "x"));
    let got = refusal(|g| {
        let x = input(g, "x", &[3]);
        let factor = g.host_scalar("factor", DType::F32);
        Ok((g.scale("scale", x, HostScalar::Bound(factor))?, factor))
    });
    assert_eq!(got, told("graph", "factor"));
    let got = refusal(|g| {
        let (dy, x) = (input(g, "dy", &[1, 1, 2]), input(g, "x", &[1, 1, 4]));
        let windows = PoolWindows::tiles(&[2]);
        let pool = verdigris_graph::PoolBackward { mode: PoolMode::Max, windows, dy, x: Some(x), index: None, dx: Uid(0) };
        Ok((g.pool_backward("back", pool, &[1, 1, 4])?, dy))
    });
    assert_eq!(got, told("back", "dy"));
    let got = refusal(|g| {
        let (dy, x) = (input(g, "dy", &[3]), input(g, "x", &[3]));
        Ok((g.binary("back", BinaryOp::Backward(UnaryOp::Tanh), dy, x)?, x))
    });
    assert_eq!(got, told("back", "x"));
    let got = refusal(|g| {
        let (a, b) = (g.tensor("a", DType::E4m3, rows(&[2, 3])), g.tensor("b", DType::E4m3, rows(&[3, 2])));
        let factor = g.tensor("factor", DType::F32, rows(&[1]));
        let scale_a = Some(OperandScale { tensor: factor, block: None });
        Ok((g.matmul_with("product", Matmul { scale_a, ..Matmul::new(a, b, Uid(0), Precision::Fp8Promoted) })?, a))
    });
    assert_eq!(got, told("product", "a"));
    let mut g = GraphBuilder::new("graph");
    let x = input(&mut g, "x", &[3]);
    let y = g.unary("exp", UnaryOp::Exp, x).unwrap();
    assert!(matches!(g.gradient(y, &[x]), Err(Error::Mismatch { got: 3, want: 1, .. })));
    let dy = g.tensor("dy", DType::F32, rows(&[2]));
    assert!(matches!(g.gradient_from(&[(y, dy)], &[x]), Err(Error::Mismatch { .. })));
    assert!(matches!(g.gradient_from(&[(y, Uid(99))], &[x]), Err(Error::UnknownTensor { .. })));
}

/// Sixteen bits: operands beside gradients are of one type, gradients have the type of their tensors, and steps beside other ways leave
/// nothing behind.
#[test]
fn types_and_names_of_a_stored_gradient() {
    let mut g = GraphBuilder::new("network");
    let x = g.tensor("x", DType::Bf16, Layout::with_order(&[2, 3, 5, 5], &[0, 2, 3, 1]).unwrap());
    let w = g.tensor("w", DType::Bf16, rows(&[4, 3, 3, 3]));
    let bias = g.tensor("bias", DType::F32, rows(&[1, 4, 1, 1]));
    let repeated = g.tensor("repeated", DType::F32, Layout::new(&[4], &[0]).unwrap());
    let conv = g.conv_fprop("conv", Conv::new(ConvDirection::Fprop, x, w, Uid(0), 2, Precision::Fp32)).unwrap();
    let sum = g.binary("bias", BinaryOp::Add, conv, bias).unwrap();
    let kept = g.unary("relu", UnaryOp::Relu, sum).unwrap();
    g.store(kept, "relu", DType::Bf16).unwrap();
    let step = g.unary("floor", UnaryOp::Floor, kept).unwrap();
    let product = g.binary("product", BinaryOp::Mul, step, kept).unwrap();
    let last = g.reshape("last", repeated, &[1, 4, 1, 1]).unwrap();
    let last = g.binary("last", BinaryOp::Mul, product, last).unwrap();
    let loss = g.reduction("loss", ReductionOp::Add, last, &[0, 1, 2, 3]).unwrap();
    g.store(loss, "loss", DType::F32).unwrap();
    let mut graph = g.finish().unwrap();
    let forward = graph.clone();
    let gradients = graph.gradient(loss, &[x, w, bias, repeated]).unwrap();
    verdigris_graph::validate::validate(&graph).unwrap();
    let described: Vec<(&str, DType)> =
        gradients.iter().map(|&uid| graph.tensor(uid).unwrap()).map(|tensor| (tensor.name.as_str(), tensor.dtype)).collect();
    assert_eq!(described, [("d_x", DType::Bf16), ("d_w", DType::Bf16), ("d_bias", DType::F32), ("d_repeated", DType::F32)]);
    assert_eq!(graph.tensor(gradients[0]).unwrap().layout, forward.tensor(x).unwrap().layout);
    assert!(graph.tensor(gradients[3]).unwrap().layout.is_row_major());
    assert_eq!(graph.nodes[..forward.nodes.len()], forward.nodes);

    // The backward graph alone: ReLU's own result serves, so that the convolution is not computed again.
    let given = [x, w, bias, repeated, kept];
    let back = graph.part(&gradients, &given).unwrap();
    assert!(back.nodes.iter().all(|node| !matches!(&node.op, Op::Conv(conv) if conv.direction == ConvDirection::Fprop)), "{back:#?}");
    let inputs = graph_inputs(&graph, Distribution::Normal, 4);
    let all = evaluate(&graph, &inputs, Selection::All).unwrap();
    let mut alone = Inputs { buffers: inputs.buffers.clone(), scalars: inputs.scalars.clone() };
    let stored = all.iter().find(|expected| expected.id == kept).unwrap();
    alone.buffers.insert(kept, stored.rounded(&vec![0; stored.layout.span_bytes(stored.dtype) as usize]));
    for expected in evaluate(&back, &alone, Selection::All).unwrap() {
        let whole = all.iter().find(|other| other.id == expected.id).unwrap();
        assert!(gradients.contains(&expected.id));
        for (alone, whole) in expected.values.iter().zip(&whole.values) {
            assert!((alone.value - whole.value).abs() <= alone.error + whole.error, "{alone:?} {whole:?}");
        }
    }
    assert!(matches!(graph.part(&gradients, &[sum]), Err(Error::Structure { .. })));
    assert!(matches!(graph.part(&[x], &[]), Err(Error::Structure { .. })));
}
