//! The function of scores.

use verdigris_graph::{ScoreFunction, ScoreStep, Uid};
use verdigris_tensor::DType;

use crate::operation::{Evaluation, GraphError};
use crate::source::Source;
use crate::tolerance::Bounded;

/// As precise as functions are of what is stored in f32: an exponential of the score follows.
const BITS: u32 = 24;

/// A function, and what it reads.
pub(super) struct Function<'a> {
    /// Of a gradient, the steps of its slope behind its own.
    steps: ScoreFunction,
    /// The step whose value is the score.
    score: usize,
    operands: Vec<Source<'a>>,
}

impl<'a> Function<'a> {
    /// Of scores of these dims.
    pub(super) fn new(own: ScoreFunction, operands: &[Uid], scores: [u64; 4], at: &mut Evaluation<'a>) -> Result<Function<'a>, GraphError> {
        let mut read = Vec::new();
        for (number, &uid) in (0..).zip(operands) {
            let (source, mut dims) = (at.source(uid)?, scores);
            if own.is_table(number) {
                dims[3] = source.dims().last().copied().unwrap_or(1);
            }
            read.push(source.broadcast(&dims));
        }
        Ok(Function::of(own, read))
    }

    fn of(own: ScoreFunction, operands: Vec<Source<'a>>) -> Function<'a> {
        Function { score: own.steps.len().saturating_sub(1), steps: own, operands }
    }

    /// With the steps of its slope, which the op asked for when it was checked.
    pub(super) fn sloped(self) -> Function<'a> {
        let steps = self.steps.slope("attention").unwrap_or_else(|_| self.steps.clone());
        Function { steps, ..self }
    }
}

/// What a function makes of a scaled product, at batch, head, query and key, and of a gradient its slope there.
pub(super) fn made(of: &Function<'_>, product: Bounded, at: [u64; 4], compute: DType) -> [Bounded; 2] {
    let values = of.values(&of.steps, product, at, compute);
    let last = values.last().copied().unwrap_or(product);
    [values.get(of.score).copied().unwrap_or(product), last]
}

/// What a pair gives to the gradient of what the function reads by a number: the slope there, and where along the last dim it reads.
pub(super) fn read(
    of: &Function<'_>,
    (number, sloped): (u32, &ScoreFunction),
    product: Bounded,
    at: [u64; 4],
    compute: DType,
) -> Option<(Bounded, u64)> {
    let values = of.values(sloped, product, at, compute);
    let place = sloped.steps.iter().find_map(|step| match *step {
        ScoreStep::Gather { operand, x } if operand == number => Some(x),
        _ => None,
    });
    let place = match place {
        None => at[3],
        Some(x) => entry(&of.operands[number as usize], values[x as usize])?,
    };
    Some((*values.last()?, place))
}

impl Function<'_> {
    /// The values of these steps, which read what the function reads.
    fn values(&self, function: &ScoreFunction, product: Bounded, at: [u64; 4], compute: DType) -> Vec<Bounded> {
        let operands = &self.operands;
        let mut values: Vec<Bounded> = Vec::with_capacity(function.steps.len());
        for step in &function.steps {
            let of = |x: u32| values[x as usize];
            let next = match *step {
                ScoreStep::Given => product,
                ScoreStep::Number(number) => Bounded::exact(number.0).rounded(compute, compute),
                // An integer is rounded to the type computed in.
                ScoreStep::Operand(number) => operands[number as usize].at(&at).rounded(compute, compute),
                ScoreStep::Gather { operand, x } => gathered(&operands[operand as usize], of(x), at).rounded(compute, compute),
                ScoreStep::Place(place) => Bounded::exact(at[place as usize] as f64),
                ScoreStep::Unary { f, x } => of(x).unary(f, BITS, compute),
                ScoreStep::Binary { f, x, z } => of(x).binary(f, of(z), false, BITS, compute),
                ScoreStep::Ternary { f, x, z, t } => of(x).ternary(f, of(z), of(t), compute),
                ScoreStep::Round { dtype, x } => of(x).rounded(dtype, compute),
            };
            values.push(next);
        }
        values
    }
}

/// The entry of a table that a place says; `None` where it may be one of several.
fn entry(table: &Source<'_>, place: Bounded) -> Option<u64> {
    let last = table.dims()[3] - 1;
    let near = |place: f64| place.round_ties_even().clamp(0.0, last as f64) as u64;
    (near(place.value - place.error) == near(place.value + place.error)).then(|| near(place.value))
}

/// The element of a table at a place; anything, where the place may be one of several.
fn gathered(table: &Source<'_>, place: Bounded, [b, h, i, _]: [u64; 4]) -> Bounded {
    let of = |entry: u64| table.at(&[b, h, i, entry]);
    entry(table, place).map_or(Bounded { error: f64::INFINITY, ..of(0) }, of)
}

#[cfg(test)]
mod tests {
    use verdigris_graph::{BinaryOp, Real, ScorePlace, TernaryOp, UnaryOp};

    use super::*;

    /// The slope of each kind of function is what the function's own values change by, on either side of a product.
    #[test]
    fn a_slope_is_the_quotient_of_differences() {
        let number = |function: &mut ScoreFunction, x: f64| function.push(ScoreStep::Number(Real(x)));
        let unary = |function: &mut ScoreFunction, f, x| function.push(ScoreStep::Unary { f, x });
        let binary = |function: &mut ScoreFunction, f, x, z| function.push(ScoreStep::Binary { f, x, z });
        let mut functions: Vec<ScoreFunction> = Vec::new();
        let unaries = [
            UnaryOp::Neg,
            UnaryOp::Abs,
            UnaryOp::Relu,
            UnaryOp::LeakyRelu { slope: Real(0.1) },
            UnaryOp::Clamp { lower: Real(-0.7), upper: Real(0.6) },
            UnaryOp::ClippedRelu { lower: Real(-0.3), upper: Real(0.6), slope: Real(0.25) },
            UnaryOp::GeluErf,
            UnaryOp::GeluTanh,
            UnaryOp::Silu,
            UnaryOp::Sigmoid,
            UnaryOp::Tanh,
            UnaryOp::Elu { alpha: Real(1.5) },
            UnaryOp::Softplus { beta: Real(2.0) },
            UnaryOp::Swish { beta: Real(1.5) },
            UnaryOp::HardSwish,
            UnaryOp::HardSigmoid,
            UnaryOp::Mish,
            UnaryOp::Exp,
            UnaryOp::Erf,
            UnaryOp::Sin,
            UnaryOp::Cos,
            UnaryOp::Tan,
            UnaryOp::Affine { scale: Real(3.0), shift: Real(-1.0) },
            UnaryOp::Floor,
        ];
        for f in unaries {
            // f(t) · t, which has both.
            let mut function = ScoreFunction::default();
            let t = function.push(ScoreStep::Given);
            let x = unary(&mut function, f, t);
            binary(&mut function, BinaryOp::Mul, x, t);
            functions.push(function);
        }
        for f in [UnaryOp::Log, UnaryOp::Sqrt, UnaryOp::Rsqrt, UnaryOp::Reciprocal] {
            // Of t² + 1, where they are numbers.
            let mut function = ScoreFunction::default();
            let t = function.push(ScoreStep::Given);
            let one = number(&mut function, 1.0);
            let x = binary(&mut function, BinaryOp::AddSquare, one, t);
            unary(&mut function, f, x);
            functions.push(function);
        }
        for f in BinaryOp::ALL {
            // f(e^t, place + 1 / 2 − t / 4) and the other way round.
            for turned in [false, true] {
                let mut function = ScoreFunction::default();
                let t = function.push(ScoreStep::Given);
                let x = unary(&mut function, UnaryOp::Exp, t);
                let part = unary(&mut function, UnaryOp::Affine { scale: Real(-0.25), shift: Real(0.5) }, t);
                let place = function.push(ScoreStep::Place(ScorePlace::Key));
                let z = binary(&mut function, BinaryOp::Add, place, part);
                let (x, z) = if turned { (z, x) } else { (x, z) };
                binary(&mut function, f, x, z);
                functions.push(function);
            }
        }
        // Chosen by what is steps of t.
        let mut function = ScoreFunction::default();
        let t = function.push(ScoreStep::Given);
        let (square, zero) = (binary(&mut function, BinaryOp::Mul, t, t), number(&mut function, 0.0));
        let above = binary(&mut function, BinaryOp::Gt, t, zero);
        function.push(ScoreStep::Ternary { f: TernaryOp::Select, x: square, z: t, t: above });
        functions.push(function);
        let mut function = ScoreFunction::default();
        let t = function.push(ScoreStep::Given);
        let (tanh, sigmoid) = (unary(&mut function, UnaryOp::Tanh, t), unary(&mut function, UnaryOp::Sigmoid, t));
        function.push(ScoreStep::Ternary { f: TernaryOp::PreluBackward, x: sigmoid, z: t, t: tanh });
        functions.push(function);

        let mut compared = 0;
        for own in functions {
            let function = Function::of(own.clone(), Vec::new()).sloped();
            assert!(function.steps.steps.len() > own.steps.len(), "{own:?}");
            for t in [-1.3, -0.41, 0.37, 0.52, 1.7] {
                let (at, h) = ([0, 0, 0, 1], 1e-6);
                let of = |t: f64| made(&function, Bounded::exact(t), at, DType::F64);
                let [[below, _], [value, slope], [above, _]] = [of(t - h), of(t), of(t + h)];
                let quotient = (above.value - below.value) / (2.0 * h);
                let difference = (slope.value - quotient).abs();
                assert!(difference <= 1e-7 * (1.0 + quotient.abs()), "{own:?}: {value:?} at {t} has {slope:?}, beside {quotient}");
                compared += usize::from(quotient != 0.0);
            }
        }
        assert!(compared > 200, "{compared}");
    }
}
