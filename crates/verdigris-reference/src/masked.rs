//! Gradients whose results are known beforehand where what comes in is infinite or NaN: what a function did not take, or holds constant, gets 0 and no product with 0.
//!
//! The results are those of PyTorch's masks (`threshold_backward`, `hardtanh_backward`, `where`, `masked_fill`) for the same functions.

use verdigris_graph::{BinaryOp, Error, Graph, GraphBuilder, Real, ReductionOp, TernaryOp, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout, num};

use crate::run::Inputs;

/// A graph, what it reads, and what each of its results has to be.
#[derive(Debug)]
pub struct MaskedGradient {
    /// The functions.
    pub name: String,
    /// The graph.
    pub graph: Graph,
    /// What it reads.
    pub inputs: Inputs<Uid>,
    /// Its results with their elements, row-major; every zero is +0.
    pub want: Vec<(Uid, Vec<f64>)>,
}

impl MaskedGradient {
    /// Whether an element of a result is what it has to be.
    pub fn is_right(got: f64, want: f64) -> bool {
        got == want && got.is_sign_negative() == want.is_sign_negative() || got.is_nan() && want.is_nan()
    }
}

/// A graph under way, of tensors of one type.
struct Draft {
    g: GraphBuilder,
    dtype: DType,
    inputs: Inputs<Uid>,
}

impl Draft {
    fn new(name: &str, dtype: DType) -> Draft {
        Draft { g: GraphBuilder::new(name), dtype, inputs: Inputs::default() }
    }

    fn input(&mut self, name: &str, values: &[f64]) -> Uid {
        let layout = Layout::row_major(&[values.len() as u64]).expect("a few elements");
        let uid = self.g.tensor(name, self.dtype, layout);
        let mut bytes = vec![0; values.len() * self.dtype.bytes()];
        for (value, place) in values.iter().zip(bytes.chunks_exact_mut(self.dtype.bytes())) {
            // Every value has a place in every floating-point type.
            let _ = num::write_element(self.dtype, *value, place);
        }
        self.inputs.buffers.insert(uid, bytes);
        uid
    }

    fn unary(&mut self, f: UnaryOp, x: Uid) -> Result<Uid, Error> {
        self.g.unary(f.name(), f, x)
    }

    /// The graph of these results.
    fn results(mut self, results: &[(Uid, &[f64])]) -> Result<MaskedGradient, Error> {
        for (number, (uid, _)) in results.iter().enumerate() {
            self.g.store(*uid, &format!("result{number}"), self.dtype)?;
        }
        let want = results.iter().map(|(uid, values)| (*uid, values.to_vec())).collect();
        let graph = self.g.finish()?;
        Ok(MaskedGradient { name: graph.name.clone(), graph, inputs: self.inputs, want })
    }

    /// The graph of the gradients of `√(y − at)`, whose own is infinite where `y` is `at`, of what is given with them.
    fn behind_root(mut self, y: Uid, at: f64, wanted: &[(Uid, &[f64])]) -> Result<MaskedGradient, Error> {
        let moved = self.unary(UnaryOp::Affine { scale: Real(1.0), shift: Real(-at) }, y)?;
        let root = self.unary(UnaryOp::Sqrt, moved)?;
        let ones = self.unary(UnaryOp::Affine { scale: Real(0.0), shift: Real(1.0) }, y)?;
        let of: Vec<Uid> = wanted.iter().map(|(uid, _)| *uid).collect();
        let gradients = self.g.gradient_from(&[(root, ones)], &of)?;
        let results: Vec<(Uid, &[f64])> = gradients.into_iter().zip(wanted).map(|(gradient, (_, want))| (gradient, *want)).collect();
        self.results(&results)
    }
}

/// All of them, in a floating-point type that is computed in.
///
/// # Errors
/// None: the graphs are valid.
pub fn masked_gradients(dtype: DType) -> Result<Vec<MaskedGradient>, Error> {
    let mut all = activations(dtype)?;
    all.extend(compositions(dtype)?);
    Ok(all)
}

/// `dy · f′(x)` of activations that are constant somewhere, and of dy that are not finite.
fn activations(dtype: DType) -> Result<Vec<MaskedGradient>, Error> {
    const INF: f64 = f64::INFINITY;
    let (lower, upper) = (Real(-1.0), Real(6.0));
    let clipped = UnaryOp::ClippedRelu { lower: Real(0.0), upper, slope: Real(0.25) };
    // Where it is constant, and where its slope is 1.
    let cases: [(UnaryOp, &[f64], &[f64]); 6] = [
        (UnaryOp::Relu, &[0.0, -0.0, -2.0, -INF], &[1.0, 1e-30, INF]),
        (UnaryOp::Clamp { lower, upper }, &[-1.0, -2.0, 6.0, 7.0, INF, -INF], &[0.0, 5.0, -0.5]),
        (UnaryOp::Clamp { lower: upper, upper }, &[5.0, 6.0, 7.0], &[]),
        (clipped, &[6.0, 7.0, INF], &[1e-30, 1.0, 5.0]),
        (UnaryOp::HardSwish, &[-3.0, -4.0, -INF], &[3.0, 4.0]),
        (UnaryOp::HardSigmoid, &[-3.0, -4.0, -INF, 3.0, 4.0, INF], &[]),
    ];
    let mut all = Vec::new();
    for (f, flat, straight) in cases {
        for dy in [INF, -INF, f64::NAN, 2.0, -2.0] {
            let mut draft = Draft::new(&format!("{} of {dy}", f.name()), dtype);
            let x = [flat, straight, &[f64::NAN]].concat();
            let want = [vec![0.0; flat.len()], vec![dy; straight.len()], vec![f64::NAN]].concat();
            let (dys, x) = (draft.input("dy", &vec![dy; x.len()]), draft.input("x", &x));
            let dx = draft.g.binary("back", BinaryOp::Backward(f), dys, x)?;
            all.push(draft.results(&[(dx, &want)])?);
        }
    }
    Ok(all)
}

/// Gradients of graphs behind which a root has an infinite one.
fn compositions(dtype: DType) -> Result<Vec<MaskedGradient>, Error> {
    const INF: f64 = f64::INFINITY;
    let mut all = Vec::new();
    // The first: `relu(x).sqrt()`.
    for (f, x, want) in [
        (UnaryOp::Relu, [-1.0, 0.0, 4.0, 16.0], [0.0, 0.0, 0.25, 0.125]),
        (UnaryOp::Clamp { lower: Real(0.0), upper: Real(9.0) }, [-1.0, 0.0, 4.0, 16.0], [0.0, 0.0, 0.25, 0.0]),
        (UnaryOp::HardSigmoid, [-4.0, -3.0, 3.0, 5.0], [0.0; 4]),
        (UnaryOp::HardSwish, [-4.0, -3.0, 4.0, 16.0], [0.0, 0.0, 0.25, 0.125]),
    ] {
        let mut draft = Draft::new(&format!("root of {}", f.name()), dtype);
        let x = draft.input("x", &x);
        let y = draft.unary(f, x)?;
        all.push(draft.behind_root(y, 0.0, &[(x, &want)])?);
    }
    for (f, sign) in [(BinaryOp::Max, 1.0), (BinaryOp::Min, -1.0)] {
        let mut draft = Draft::new(&format!("root of {}", f.name()), dtype);
        let signed = |values: [f64; 5]| values.map(|value| sign * value);
        let (x, z) = (draft.input("x", &signed([0.0, -1.0, 4.0, 1.0, 0.0])), draft.input("z", &signed([-1.0, 0.0, 1.0, 1.0, 0.0])));
        let y = draft.g.binary("extremum", f, x, z)?;
        let size = draft.unary(UnaryOp::Affine { scale: Real(sign), shift: Real(0.0) }, y)?;
        // Of two equal ones each gets half. What is masked is +0, whatever the sign in front.
        let dx = [INF, 0.0, 0.25, 0.25, INF].map(|value| if value == 0.0 { 0.0 } else { sign * value });
        let dz = [0.0, INF, 0.0, 0.25, INF].map(|value| if value == 0.0 { 0.0 } else { sign * value });
        all.push(draft.behind_root(size, 0.0, &[(x, &dx), (z, &dz)])?);
    }
    let mut draft = Draft::new("root of select", dtype);
    let (x, z) = (draft.input("x", &[0.0, 4.0, 0.0, 4.0, 0.0]), draft.input("z", &[4.0, 0.0, 4.0, 0.0, 4.0]));
    let t = draft.input("t", &[1.0, 0.0, -2.0, 1.0, f64::NAN]);
    let y = draft.g.ternary("select", TernaryOp::Select, x, z, t)?;
    all.push(draft.behind_root(y, 0.0, &[(x, &[INF, 0.0, INF, 0.25, INF]), (z, &[0.0, INF, 0.0, 0.0, 0.0])])?);

    let mut draft = Draft::new("root of prelu", dtype);
    let (x, slope) = (draft.input("x", &[4.0, 8.0, -16.0]), draft.input("slope", &[0.5, 0.5, -0.5]));
    let y = draft.g.binary("prelu", BinaryOp::Prelu, x, slope)?;
    all.push(draft.behind_root(y, 4.0, &[(x, &[INF, 0.25, -0.125]), (slope, &[0.0, 0.0, -4.0])])?);

    let mut draft = Draft::new("root of the gradient of prelu", dtype);
    let (x, dy, slope) = (draft.input("x", &[1.0, -1.0]), draft.input("dy", &[4.0, 16.0]), draft.input("slope", &[0.5, 0.5]));
    let y = draft.g.ternary("back", TernaryOp::PreluBackward, dy, x, slope)?;
    all.push(draft.behind_root(y, 4.0, &[(dy, &[INF, 0.125]), (slope, &[0.0, 4.0])])?);

    for (f, x, want) in [
        (ReductionOp::Max, [-1.0, 0.0, -2.0], [0.0, INF, 0.0]),
        (ReductionOp::Min, [1.0, 0.0, 2.0], [0.0, INF, 0.0]),
        (ReductionOp::Norm2, [0.0, 0.0, 0.0], [0.0; 3]),
        (ReductionOp::MulNoZeros, [0.0, 0.0, 1.0], [0.0, 0.0, INF]),
    ] {
        let mut draft = Draft::new(&format!("root of {}", f.name()), dtype);
        let at = if f == ReductionOp::MulNoZeros { 1.0 } else { 0.0 };
        let x = draft.input("x", &x);
        let y = draft.g.reduction("reduce", f, x, &[0])?;
        all.push(draft.behind_root(y, at, &[(x, &want)])?);
    }
    let mut draft = Draft::new("root of amax", dtype);
    let x = draft.input("x", &[0.0, -4.0, 1.0]);
    let y = draft.g.reduction("reduce", ReductionOp::Amax, x, &[0])?;
    all.push(draft.behind_root(y, 4.0, &[(x, &[0.0, -INF, 0.0])])?);
    Ok(all)
}
