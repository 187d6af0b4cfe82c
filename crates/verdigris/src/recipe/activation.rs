//! Activations that are no function of the graph's pointwise ops by themselves, composed of these: one map, whose gradient follows by the ops' rules of differentiation.

use verdigris_graph::{BinaryOp, HostScalar, Real, TernaryOp, Uid, UnaryOp};
use verdigris_tensor::DType;
use verdigris_tensor::num::round_to;

use super::view::{View, in_order_of, like};
use super::{Drawing, unfit};
use crate::error::Error;

/// The α of SELU and of alpha dropout, and what SELU is multiplied by: with them the mean 0 and the variance 1 are a fixed point (Klambauer, Unterthiner, Mayr and
/// Hochreiter, "Self-normalizing neural networks", 2017).
const SELU_ALPHA: f64 = 1.673_263_242_354_377_2;
const SELU_SCALE: f64 = 1.050_700_987_355_480_5;

/// An activation composed of pointwise ops: [`Function::Composed`](super::Function::Composed). Where it has a kink or a step, the derivative is that of the side that the
/// formula takes there. NaN gives NaN.
///
/// ```
/// use verdigris::recipe::{ComposedActivation, Function, Input, draw};
/// use verdigris::{DType, Layout, Real};
///
/// let x = Input { dtype: DType::Bf16, layout: Layout::row_major(&[2, 3])?, alignment_bytes: None };
/// let shrink = Function::Composed(ComposedActivation::SoftShrink { lambda: Real(0.5) });
/// assert_eq!((shrink.name(), draw(&shrink, &[Some(x)])?.results[0].dtype), ("soft_shrink", DType::Bf16));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ComposedActivation {
    /// `1.0507… · elu(x; 1.6732…)`.
    Selu,
    /// `x` if `x > 0`, else `alpha · (e^(x / alpha) − 1)`.
    Celu {
        /// Above 0.
        alpha: Real,
    },
    /// `−ln(1 + e^−x)`.
    LogSigmoid,
    /// 0 if `|x| ≤ lambda`, else x; lambda is rounded to the type of x first.
    HardShrink {
        /// Below 0 nothing is 0.
        lambda: Real,
    },
    /// 0 if `|x| ≤ lambda`, else x nearer to 0 by that.
    SoftShrink {
        /// At least 0.
        lambda: Real,
    },
    /// `x − tanh(x)`.
    TanhShrink,
    /// `x / (1 + |x|)`; ±∞ gives NaN.
    SoftSign,
    /// The value if `x ≤ bound`, else x.
    Threshold {
        /// From where down the value stands.
        bound: Real,
        /// What stands there.
        value: Real,
    },
}

impl ComposedActivation {
    /// One of each, for tests.
    #[cfg(test)]
    pub(super) const EACH: [ComposedActivation; 8] = [
        ComposedActivation::Selu,
        ComposedActivation::Celu { alpha: Real(0.5) },
        ComposedActivation::LogSigmoid,
        ComposedActivation::HardShrink { lambda: Real(0.5) },
        ComposedActivation::SoftShrink { lambda: Real(0.5) },
        ComposedActivation::TanhShrink,
        ComposedActivation::SoftSign,
        ComposedActivation::Threshold { bound: Real(0.5), value: Real(2.0) },
    ];

    /// The name used in attributes.
    pub const fn name(self) -> &'static str {
        match self {
            ComposedActivation::Selu => "selu",
            ComposedActivation::Celu { .. } => "celu",
            ComposedActivation::LogSigmoid => "log_sigmoid",
            ComposedActivation::HardShrink { .. } => "hard_shrink",
            ComposedActivation::SoftShrink { .. } => "soft_shrink",
            ComposedActivation::TanhShrink => "tanh_shrink",
            ComposedActivation::SoftSign => "soft_sign",
            ComposedActivation::Threshold { .. } => "threshold",
        }
    }

    fn check(self) -> Result<(), Error> {
        let (is_right, rule) = match self {
            ComposedActivation::Celu { alpha } => (alpha.0.is_finite() && alpha.0 > 0.0, "alpha is finite and above 0"),
            ComposedActivation::HardShrink { lambda } => (lambda.0.is_finite(), "lambda is finite"),
            ComposedActivation::SoftShrink { lambda } => (lambda.0.is_finite() && lambda.0 >= 0.0, "lambda is finite and at least 0"),
            ComposedActivation::Threshold { bound, value } => (bound.0.is_finite() && value.0.is_finite(), "bound and value are finite"),
            _ => (true, ""),
        };
        if is_right { Ok(()) } else { Err(unfit(format_args!("{self:?}"), rule)) }
    }
}

/// Dropout: [`Function::Dropout`](super::Function::Dropout).
///
/// ```
/// use verdigris::recipe::{Dropout, Function, Input, draw};
/// use verdigris::{DType, Layout, Real};
///
/// let tensor = |dtype, dims: &[u64]| Layout::row_major(dims).map(|layout| Some(Input { dtype, layout, alignment_bytes: None }));
/// let of_channels = Dropout { of_channels: true, ..Dropout::new(Real(0.2)) };
/// let recipe = draw(&Function::Dropout(of_channels), &[tensor(DType::F16, &[2, 3, 8, 8])?, tensor(DType::I32, &[4])?])?;
/// assert_eq!(recipe.results[0].layout.dims(), [2, 3, 8, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dropout {
    /// The probability with which an element is dropped; from 0 to 1.
    pub p: Real,
    /// Whether all elements of a channel, an index of the first two dims, are dropped or none: channel number `n` is dropped as element number `n` of a tensor of as
    /// many elements is. There are at least two dims then.
    pub of_channels: bool,
    /// Whether what is dropped becomes the least value of SELU in place of 0, and the result is scaled and moved so that mean 0 and variance 1 stay.
    pub keeps_moments: bool,
    /// Whether x is the gradient of the result, and the result that of x: nothing is moved.
    pub is_gradient: bool,
}

impl Dropout {
    /// That of elements, which become 0.
    pub const fn new(p: Real) -> Dropout {
        Dropout { p, of_channels: false, keeps_moments: false, is_gradient: false }
    }
}

impl Drawing {
    pub(super) fn composed(&mut self, f: ComposedActivation) -> Result<(), Error> {
        f.check()?;
        let given = self.given(0)?;
        let x = self.input(0, "x")?;
        let y = self.composed_of(f, x, given.dtype)?;
        self.store(y, "y", given.dtype, like(&given.layout)?)
    }

    fn composed_of(&mut self, f: ComposedActivation, x: Uid, dtype: DType) -> Result<Uid, Error> {
        Ok(match f {
            ComposedActivation::Selu => {
                let bent = self.g.unary("elu", UnaryOp::Elu { alpha: Real(SELU_ALPHA) }, x)?;
                self.g.scale("selu", bent, HostScalar::Fixed(Real(SELU_SCALE)))?
            }
            ComposedActivation::Celu { alpha } => {
                let narrow = self.g.scale("narrow", x, HostScalar::Fixed(Real(1.0 / alpha.0)))?;
                let bent = self.g.unary("elu", UnaryOp::Elu { alpha: Real(1.0) }, narrow)?;
                let wide = self.g.scale("wide", bent, HostScalar::Fixed(alpha))?;
                // Above 0 it is x itself, and no product with alpha and its inverse. NaN counts as above.
                let above = self.g.unary("above", UnaryOp::Relu, x)?;
                self.g.ternary("celu", TernaryOp::Select, x, wide, above)?
            }
            ComposedActivation::LogSigmoid => {
                let turned = self.g.unary("turned", UnaryOp::Neg, x)?;
                let bent = self.g.unary("softplus", UnaryOp::Softplus { beta: Real(1.0) }, turned)?;
                self.g.unary("log_sigmoid", UnaryOp::Neg, bent)?
            }
            ComposedActivation::HardShrink { lambda } => {
                // As a number of the type of x, so that an x that is lambda rounded counts as lambda.
                let beyond = self.beyond(x, round_to(dtype, lambda.0))?;
                // x where it is beyond, and 0 elsewhere whatever it is.
                self.g.binary("hard_shrink", BinaryOp::Backward(UnaryOp::Relu), x, beyond)?
            }
            ComposedActivation::SoftShrink { lambda } => {
                let beyond = self.beyond(x, lambda.0)?;
                let (rest, sign) = (self.g.unary("rest", UnaryOp::Relu, beyond)?, self.g.unary("sign", UnaryOp::Sign, x)?);
                self.g.binary("soft_shrink", BinaryOp::Mul, rest, sign)?
            }
            ComposedActivation::TanhShrink => {
                let tanh = self.g.unary("tanh", UnaryOp::Tanh, x)?;
                self.g.binary("tanh_shrink", BinaryOp::Sub, x, tanh)?
            }
            ComposedActivation::SoftSign => {
                let size = self.g.unary("size", UnaryOp::Abs, x)?;
                let divisor = self.affine(size, 1.0, 1.0)?;
                self.g.binary("soft_sign", BinaryOp::Div, x, divisor)?
            }
            ComposedActivation::Threshold { bound, value } => {
                let above = self.affine(x, 1.0, -bound.0)?;
                let above = self.g.unary("above", UnaryOp::Relu, above)?;
                // A number that an infinite x does not make NaN, as a product with 0 would.
                let other = self.g.unary("value", UnaryOp::Clamp { lower: value, upper: value }, x)?;
                self.g.ternary("threshold", TernaryOp::Select, x, other, above)?
            }
        })
    }

    /// `|x| − lambda`, whose sign is exact.
    fn beyond(&mut self, x: Uid, lambda: f64) -> Result<Uid, Error> {
        let size = self.g.unary("size", UnaryOp::Abs, x)?;
        self.affine(size, 1.0, -lambda)
    }

    pub(super) fn prelu(&mut self) -> Result<(), Error> {
        let (given, weight) = (self.given(0)?, self.given(1)?);
        let (rank, channels) = (given.layout.rank(), given.layout.dims().get(1).copied());
        let view = match weight.layout.dims() {
            [] | [1] => View::One { rank },
            [slopes] if Some(*slopes) == channels => View::Channel { rank, axis: 1 },
            dims => {
                let what = format!("a weight of dims {dims:?} for an input of {:?}", given.layout.dims());
                return Err(unfit(what, "it has one element, or one dim with an element for each index of dim 1"));
            }
        };
        let (x, slope) = (self.input(0, "x")?, self.input_as(1, "weight", view)?);
        let y = self.g.binary("prelu", BinaryOp::Prelu, x, slope)?;
        self.store(y, "y", given.dtype, like(&given.layout)?)
    }

    pub(super) fn random_prelu(&mut self, lower: f64, upper: f64) -> Result<(), Error> {
        if !(lower.is_finite() && upper.is_finite() && lower <= upper) {
            return Err(unfit(format_args!("slopes from {lower} to {upper}"), "bounds are finite, the lower one not above the upper one"));
        }
        let given = self.given(0)?;
        let (x, state) = (self.input(0, "x")?, self.input(1, "state")?);
        let drawn = self.g.random_uniform("drawn", given.layout.dims(), state)?;
        let drawn = self.wide_beside(drawn, given.dtype)?;
        let slope = self.affine(drawn, upper - lower, lower)?;
        let y = self.g.binary("rrelu", BinaryOp::Prelu, x, slope)?;
        self.store(y, "y", given.dtype, like(&given.layout)?)
    }

    /// A random number, or what became of it, as f64 beside f64, so that what is computed of it is not of f32.
    fn wide_beside(&mut self, drawn: Uid, dtype: DType) -> Result<Uid, Error> {
        if dtype != DType::F64 {
            return Ok(drawn);
        }
        let wide = self.g.unary("wide", UnaryOp::Identity, drawn)?;
        self.g.round_to(wide, DType::F64)?;
        Ok(wide)
    }

    /// The extent of the halves of x along an axis.
    fn half(&self, place: usize, axis: usize) -> Result<u64, Error> {
        let dims = self.given(place)?.layout.dims().to_vec();
        match dims.get(axis) {
            Some(extent) if extent % 2 == 0 => Ok(extent / 2),
            _ => Err(unfit(format_args!("halves along dim {axis} of {dims:?}"), "the dim is there, and its extent is even")),
        }
    }

    /// One of both halves of a tensor along an axis of the graph.
    fn half_of(&mut self, name: &str, x: Uid, axis: usize, [start, stop]: [u64; 2]) -> Result<Uid, Error> {
        let mut stops = self.dims_of(x);
        let (mut starts, steps) = (vec![0; stops.len()], vec![1; stops.len()]);
        (starts[axis], stops[axis]) = (start, stop);
        Ok(self.g.slice(name, x, &starts, &stops, &steps)?)
    }

    pub(super) fn glu(&mut self, axis: usize) -> Result<(), Error> {
        let half = self.half(0, axis)?;
        let given = self.given(0)?;
        let x = self.input(0, "x")?;
        let (value, gate) = (self.half_of("value", x, axis, [0, half])?, self.half_of("gate", x, axis, [half, 2 * half])?);
        let gate = self.g.unary("gate", UnaryOp::Sigmoid, gate)?;
        let y = self.g.binary("glu", BinaryOp::Mul, value, gate)?;
        let layout = in_order_of(&given.layout, &self.dims_of(y))?;
        self.store(y, "y", given.dtype, layout)
    }

    /// Both halves of the gradient as one map: its halves are a dim of 2, along which dy and the halves of x repeat. By the rules of differentiation each would be a map
    /// of its own, and another one would add them with zeros beside them.
    pub(super) fn glu_backward(&mut self, axis: usize) -> Result<(), Error> {
        let half = self.half(1, axis)?;
        let (given, of_result) = (self.given(1)?, self.given(0)?);
        let mut wanted = given.layout.dims().to_vec();
        wanted[axis] = half;
        if of_result.layout.dims() != wanted {
            let what = format!("a gradient of dims {:?} for an input of {:?}", of_result.layout.dims(), given.layout.dims());
            return Err(unfit(what, "it has the dims of the result"));
        }
        let halves = View::Halves { axis };
        let (dy, x) = (self.input_as(0, "dy", View::Across { axis })?, self.input_as(1, "x", halves)?);
        let dims = self.dims_of(x);
        let (value, gate) = (self.half_of("value", x, axis, [0, 1])?, self.half_of("gate", x, axis, [1, 2])?);
        let (dy, value, gate) =
            (self.g.broadcast("dy", dy, &dims)?, self.g.broadcast("value", value, &dims)?, self.g.broadcast("gate", gate, &dims)?);
        let open = self.g.unary("open", UnaryOp::Sigmoid, gate)?;
        let of_value = self.g.binary("of value", BinaryOp::Mul, dy, open)?;
        let factor = self.g.binary("of gate", BinaryOp::Mul, dy, value)?;
        let of_gate = self.g.binary("of gate", BinaryOp::Backward(UnaryOp::Sigmoid), factor, gate)?;
        let is_gate = self.g.gen_index("half", &dims, axis as u32)?;
        let dx = self.g.ternary("dx", TernaryOp::Select, of_gate, of_value, is_gate)?;
        self.store_as(dx, "dx", given.dtype, like(&given.layout)?, halves)
    }

    pub(super) fn dropout(&mut self, spec: Dropout) -> Result<(), Error> {
        let given = self.given(0)?;
        let (x, state, p) = (self.input(0, "x")?, self.input(1, "state")?, spec.p.0);
        let y = match spec {
            Dropout { of_channels: false, keeps_moments: false, .. } => self.g.dropout("dropout", x, state, p)?,
            Dropout { of_channels, keeps_moments, is_gradient, .. } => {
                let mut counted = given.layout.dims().to_vec();
                if of_channels {
                    let Some(within) = counted.get_mut(2..) else {
                        let what = format!("dropout of channels of dims {counted:?}");
                        return Err(unfit(what, "a channel is an index of the first two dims"));
                    };
                    within.fill(1);
                }
                let dropped = self.g.bernoulli("dropped", &counted, state, p)?;
                let keep = self.g.unary("keep", UnaryOp::Not, dropped)?;
                let keep = self.wide_beside(keep, given.dtype)?;
                let kept = self.g.binary("kept", BinaryOp::Mul, x, keep)?;
                // What is dropped becomes −alpha, and the result has the variance 1 by its factor and the mean 0 by what is added.
                let alpha = SELU_ALPHA * SELU_SCALE;
                let factor = match (p < 1.0, keeps_moments) {
                    (false, _) => 0.0,
                    (true, false) => 1.0 / (1.0 - p),
                    (true, true) => 1.0 / ((alpha * alpha * p + 1.0) * (1.0 - p)).sqrt(),
                };
                let scaled = self.g.scale("scaled", kept, HostScalar::Fixed(Real(factor)))?;
                if keeps_moments && !is_gradient && p < 1.0 {
                    let moved = self.affine(keep, alpha * factor, alpha * factor * (p - 1.0))?;
                    self.g.binary("moved", BinaryOp::Add, scaled, moved)?
                } else {
                    scaled
                }
            }
        };
        self.store(y, "y", given.dtype, like(&given.layout)?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use verdigris_engines::arch::Arch;
    use verdigris_engines::interpret::Parts;
    use verdigris_graph::pattern::partition;
    use verdigris_kir::interp::{Kernels, Options};

    use super::super::view::in_format;
    use super::super::{Function, Gradient, Input, Saved, draw};
    use super::*;

    fn tensor(dtype: DType, dims: &[u64], is_last: bool) -> Option<Input> {
        Some(Input { dtype, layout: in_format(dims, is_last).expect("a packed layout"), alignment_bytes: None })
    }

    fn half(dims: &[u64]) -> Option<Input> {
        tensor(DType::F16, dims, dims.len() == 4)
    }

    fn kinds(function: &Function, given: &[Option<Input>]) -> Vec<&'static str> {
        let graph = draw(function, given).expect("drawn").graph;
        partition(&graph).expect("cut").parts.iter().map(|part| part.problem.kind()).collect()
    }

    fn gradient(of: Function, with_respect_to: usize, saved: usize) -> Function {
        let saved = (0..saved).map(Saved::Tensor).collect();
        Function::Gradient(Box::new(Gradient { of, with_respect_to, saved, dims: None, dtype: None }))
    }

    /// Whatever an activation is composed of, it is one pass, and so is its gradient.
    #[test]
    fn activations_and_their_gradients_are_one_map_each() {
        let (x, state) = (half(&[2, 4, 6, 5]), tensor(DType::I32, &[4], false));
        for f in ComposedActivation::EACH {
            assert_eq!(kinds(&Function::Composed(f), &[x]), ["map"], "{f:?}");
            assert_eq!(kinds(&gradient(Function::Composed(f), 0, 1), &[x, x]), ["map"], "{f:?}");
        }
        for weight in [half(&[4]), half(&[1]), half(&[])] {
            assert_eq!(kinds(&Function::Prelu, &[x, weight]), ["map"]);
            assert_eq!(kinds(&gradient(Function::Prelu, 0, 2), &[x, x, weight]), ["map"]);
            // The sum of products, masked on their way into it.
            assert_eq!(kinds(&gradient(Function::Prelu, 1, 2), &[x, x, weight]), ["reduce"]);
        }
        let random = Function::RandomPrelu { lower: Real(0.1), upper: Real(0.4) };
        assert_eq!(kinds(&random, &[x, state]), ["map"]);
        assert_eq!(kinds(&gradient(random, 0, 2), &[x, x, state]), ["map"]);
        for axis in [0, 1, 2] {
            let mut dims = [2, 4, 6, 5];
            dims[axis] /= 2;
            let recipe = draw(&Function::Glu(axis as u32), &[x]).expect("drawn");
            // Channels-last, as x.
            assert_eq!((recipe.results[0].layout.dims(), recipe.results[0].layout.strides()[1]), (&dims[..], 1));
            assert_eq!(kinds(&Function::Glu(axis as u32), &[x]), ["map"]);
            for is_last in [false, true] {
                let dy = tensor(DType::F16, &dims, is_last);
                assert_eq!(kinds(&Function::GluBackward(axis as u32), &[dy, x]), ["map"]);
            }
        }
    }

    /// What a GPU's kernels write, on the interpreter: the result's elements as they lie in memory. Tensors are f32 in row-major order, or of i32.
    fn interpreted(function: &Function, given: &[Option<Input>], values: &[&[f64]]) -> Vec<f64> {
        let recipe = draw(function, given).expect("drawn");
        let bytes = |dtype: DType, values: &[f64]| -> Vec<u8> {
            match dtype {
                DType::I32 => values.iter().flat_map(|value| (*value as i32).to_le_bytes()).collect(),
                _ => values.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect(),
            }
        };
        let mut buffers = BTreeMap::new();
        for (uid, place) in &recipe.inputs {
            buffers.insert(*uid, bytes(given[*place].expect("given").dtype, values[*place]));
        }
        let result = &recipe.results[0];
        // What is not written shows.
        buffers.insert(result.uid, bytes(DType::F32, &vec![f64::NAN; result.layout.elements() as usize]));
        let engines: Vec<_> = verdigris_engines::engines().collect();
        let parts = Parts::all(&recipe.graph, &Arch::virtual_device(2), &engines).expect("is cut");
        let ran = parts.interpret(0, &mut buffers, &BTreeMap::new(), &Kernels::new(), &Options::schedule(1));
        ran.unwrap_or_else(|findings| panic!("{function:?}: {findings}"));
        buffers[&result.uid].chunks_exact(4).map(|word| f64::from(f32::from_le_bytes(word.try_into().expect("four bytes")))).collect()
    }

    /// Some roundings of f32 of numbers about 1, and of what is taken from them.
    fn agree(what: &dyn std::fmt::Debug, got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let is_alike = got == want || got.is_nan() && want.is_nan() || (got - want).abs() <= 1e-6 * (1.0 + want.abs());
            assert!(is_alike, "{what:?}: {got} for {want} at {i}");
        }
    }

    #[test]
    fn kernels_compute_the_formulas() {
        use ComposedActivation as A;
        let x = [-3.0, -1.0, -0.5, -0.25, -0.0, 0.0, 0.25, 0.5, 0.75, 2.0, f64::INFINITY, f64::NAN];
        let dy = [1.0, 2.0, f64::INFINITY, -1.0, 0.5, -0.5, 3.0, f64::NEG_INFINITY, 1.5, -2.0, 1.0, 1.0];
        let line = tensor(DType::F32, &[12], false);
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        // The function, and its slope: `None` where the gradient is 0 whatever dy is.
        type Formula = fn(f64) -> (f64, Option<f64>);
        let all: [(A, Formula); 6] = [
            (A::Selu, |x| {
                let bent = SELU_SCALE * SELU_ALPHA * x.exp();
                if x > 0.0 { (SELU_SCALE * x, Some(SELU_SCALE)) } else { (bent - SELU_SCALE * SELU_ALPHA, Some(bent)) }
            }),
            (A::Celu { alpha: Real(0.5) }, |x| if x > 0.0 { (x, Some(1.0)) } else { (0.5 * (2.0 * x).exp_m1(), Some((2.0 * x).exp())) }),
            (A::LogSigmoid, |x| (-(-x).exp().ln_1p(), Some(1.0 / (1.0 + x.exp())))),
            (A::HardShrink { lambda: Real(0.5) }, |x| if x.abs() <= 0.5 { (0.0, None) } else { (x, Some(1.0)) }),
            (A::SoftShrink { lambda: Real(0.5) }, |x| if x.abs() <= 0.5 { (0.0, None) } else { (x - 0.5 * x.signum(), Some(1.0)) }),
            (A::Threshold { bound: Real(0.25), value: Real(-2.0) }, |x| if x <= 0.25 { (-2.0, None) } else { (x, Some(1.0)) }),
        ];
        for (f, formula) in all {
            let want: Vec<f64> = x.iter().map(|&x| formula(x).0).collect();
            agree(&f, &interpreted(&Function::Composed(f), &[line], &[&x]), &want);
            let pass = |(&x, &dy): (&f64, &f64)| if x.is_nan() { f64::NAN } else { formula(x).1.map_or(0.0, |slope| slope * dy) };
            let want: Vec<f64> = x.iter().zip(&dy).map(pass).collect();
            agree(&f, &interpreted(&gradient(Function::Composed(f), 0, 1), &[line, line], &[&dy, &x]), &want);
        }
        // Without infinities, of which these make differences and quotients.
        let (x, dy) = (&x[..10], [1.0, 2.0, 0.25, -1.0, 0.5, -0.5, 3.0, 0.75, 1.5, -2.0]);
        let line = tensor(DType::F32, &[10], false);
        let all: [(A, Formula); 2] = [
            (A::TanhShrink, |x| (x - x.tanh(), Some(x.tanh().powi(2)))),
            (A::SoftSign, |x| (x / (1.0 + x.abs()), Some((1.0 + x.abs()).powi(-2)))),
        ];
        for (f, formula) in all {
            let want: Vec<f64> = x.iter().map(|&x| formula(x).0).collect();
            agree(&f, &interpreted(&Function::Composed(f), &[line], &[x]), &want);
            let want: Vec<f64> = x.iter().zip(dy).map(|(&x, dy)| formula(x).1.unwrap_or(0.0) * dy).collect();
            agree(&f, &interpreted(&gradient(Function::Composed(f), 0, 1), &[line, line], &[&dy, x]), &want);
        }
        let (pairs, slopes) = (tensor(DType::F32, &[2, 5], false), [0.25, -0.5, 2.0, 0.0, 1.0]);
        let given = [pairs, tensor(DType::F32, &[5], false)];
        let prelu = |i: usize| if x[i] > 0.0 { x[i] } else { slopes[i % 5] * x[i] };
        agree(&"prelu", &interpreted(&Function::Prelu, &given, &[x, &slopes]), &(0..10).map(prelu).collect::<Vec<_>>());
        let given = [pairs, pairs, given[1]];
        let of_x: Vec<f64> = (0..10).map(|i| if x[i] > 0.0 { dy[i] } else { slopes[i % 5] * dy[i] }).collect();
        agree(&"prelu, of x", &interpreted(&gradient(Function::Prelu, 0, 2), &given, &[&dy, x, &slopes]), &of_x);
        let of_slopes: Vec<f64> = (0..5).map(|c| (0..2).map(|n| x[5 * n + c].min(0.0) * dy[5 * n + c]).sum()).collect();
        agree(&"prelu, of slopes", &interpreted(&gradient(Function::Prelu, 1, 2), &given, &[&dy, x, &slopes]), &of_slopes);
        for dims in [[1, 10, 1], [2, 4, 1], [1, 2, 5], [2, 2, 2]] {
            let ([outer, extent, inner], mut half_dims) = (dims.map(|dim| dim as usize), dims);
            half_dims[1] /= 2;
            let (half, count) = (extent / 2, outer * extent * inner);
            let (x, dy) = (&x[..count], &dy[..count / 2]);
            // Where an element of the result has its value; its gate is half of the dim further.
            let place = |i: usize| (i / (half * inner)) * extent * inner + i % (half * inner);
            let (value, gate) = (|i: usize| x[place(i)], |i: usize| sigmoid(x[place(i) + half * inner]));
            let (whole, result) = (tensor(DType::F32, &dims, false), tensor(DType::F32, &half_dims, false));
            let want: Vec<f64> = (0..count / 2).map(|i| value(i) * gate(i)).collect();
            agree(&("glu", dims), &interpreted(&Function::Glu(1), &[whole], &[x]), &want);
            let mut want = vec![f64::NAN; count];
            for (i, dy) in dy.iter().enumerate() {
                want[place(i)] = dy * gate(i);
                want[place(i) + half * inner] = dy * value(i) * gate(i) * (1.0 - gate(i));
            }
            agree(&("its gradient", dims), &interpreted(&Function::GluBackward(1), &[result, whole], &[dy, x]), &want);
        }
    }

    /// Channels fall as the elements of a tensor of as many do, and slopes are those that the gradient draws.
    #[test]
    fn kernels_draw_the_same_numbers_again() {
        let (state, seed) = (tensor(DType::I32, &[4], false), [7.0, -3.0, 5.0, 0.0]);
        let (x, one_each) = (tensor(DType::F32, &[4, 9, 2, 3], false), tensor(DType::F32, &[4, 9], false));
        let ones = [1.0; 216];
        let dropped = |of_channels, keeps_moments, is_gradient, given: Option<Input>, count: usize| {
            let spec = Dropout { of_channels, keeps_moments, is_gradient, ..Dropout::new(Real(0.25)) };
            interpreted(&Function::Dropout(spec), &[given, state], &[&ones[..count], &seed])
        };
        let alpha = SELU_ALPHA * SELU_SCALE;
        let factor = 1.0 / ((alpha * alpha * 0.25 + 1.0) * 0.75).sqrt();
        let plain = dropped(false, false, false, one_each, 36);
        assert!(plain.contains(&0.0) && plain.iter().filter(|&&y| y > 1.0).count() > 18);
        for (keeps_moments, is_gradient) in [(false, false), (true, false), (true, true)] {
            let want = |&y: &f64| match (keeps_moments, is_gradient, y != 0.0) {
                (false, ..) => y,
                (true, true, kept) => factor * f64::from(u8::from(kept)),
                (true, false, true) => factor * (1.0 + alpha * 0.25),
                (true, false, false) => factor * alpha * -0.75,
            };
            let of_elements: Vec<f64> = plain.iter().map(want).collect();
            agree(&"elements", &dropped(false, keeps_moments, is_gradient, one_each, 36), &of_elements);
            let of_channels: Vec<f64> = of_elements.iter().flat_map(|&y| [y; 6]).collect();
            agree(&"channels", &dropped(true, keeps_moments, is_gradient, x, 216), &of_channels);
        }
        let random = Function::RandomPrelu { lower: Real(0.25), upper: Real(0.75) };
        let below: Vec<f64> = (0..216).map(|i| if i % 3 == 0 { 1.5 } else { -2.0 }).collect();
        let y = interpreted(&random, &[x, state], &[&below, &seed]);
        let slopes = interpreted(&gradient(random, 0, 2), &[x, x, state], &[&ones, &below, &seed]);
        agree(&"slopes", &y, &below.iter().zip(&slopes).map(|(x, slope)| x * slope).collect::<Vec<_>>());
        let drawn: Vec<f64> = slopes.iter().enumerate().filter(|(i, _)| i % 3 != 0).map(|(_, slope)| *slope).collect();
        assert!(drawn.iter().all(|slope| (0.25..0.75).contains(slope)) && drawn.iter().any(|slope| *slope > 0.6), "{drawn:?}");
    }

    /// Numbers of channels are drawn by a launch of their own: at each element they would cost as much as those of elements.
    #[test]
    fn dropout_draws_a_number_for_each_channel() {
        let (x, state) = (half(&[2, 4, 6, 5]), tensor(DType::I32, &[4], false));
        for is_gradient in [false, true] {
            for keeps_moments in [false, true] {
                let spec = Dropout { keeps_moments, is_gradient, ..Dropout::new(Real(0.2)) };
                assert_eq!(kinds(&Function::Dropout(spec), &[x, state]), ["map"]);
                let spec = Dropout { of_channels: true, ..spec };
                assert_eq!(kinds(&Function::Dropout(spec), &[x, state]), ["map", "map"]);
                assert_eq!(kinds(&Function::Dropout(spec), &[half(&[2, 4]), state]), ["map"]);
            }
        }
    }

    #[test]
    fn what_does_not_suit_is_told() {
        let told = |function: Function, given: &[Option<Input>]| draw(&function, given).unwrap_err().to_string();
        let (x, state) = (half(&[2, 3, 6, 5]), tensor(DType::I32, &[4], false));
        for (f, rule) in [
            (ComposedActivation::Celu { alpha: Real(0.0) }, "alpha is finite and above 0"),
            (ComposedActivation::Celu { alpha: Real(f64::INFINITY) }, "alpha is finite and above 0"),
            (ComposedActivation::HardShrink { lambda: Real(f64::NAN) }, "lambda is finite"),
            (ComposedActivation::SoftShrink { lambda: Real(-1.0) }, "lambda is finite and at least 0"),
            (ComposedActivation::Threshold { bound: Real(0.0), value: Real(f64::INFINITY) }, "bound and value are finite"),
        ] {
            let error = told(Function::Composed(f), &[x]);
            assert!(error.contains(rule), "{error}");
        }
        let error = told(Function::Prelu, &[x, half(&[6])]);
        assert!(error.contains("a weight of dims [6] for an input of [2, 3, 6, 5]"), "{error}");
        let error = told(Function::RandomPrelu { lower: Real(0.5), upper: Real(0.25) }, &[x, state]);
        assert!(error.contains("slopes from 0.5 to 0.25"), "{error}");
        for axis in [1, 4] {
            let error = told(Function::Glu(axis), &[x]);
            assert!(error.contains(&format!("halves along dim {axis} of [2, 3, 6, 5]")), "{error}");
        }
        let error = told(Function::GluBackward(2), &[x, x]);
        assert!(error.contains("a gradient of dims [2, 3, 6, 5] for an input of [2, 3, 6, 5]"), "{error}");
        let error = told(Function::Dropout(Dropout { of_channels: true, ..Dropout::new(Real(0.5)) }), &[half(&[3]), state]);
        assert!(error.contains("dropout of channels of dims [3]"), "{error}");
        let error = told(Function::Dropout(Dropout { of_channels: true, ..Dropout::new(Real(1.5)) }), &[x, state]);
        assert!(error.contains("1.5"), "{error}");
    }
}
