//! The function of scores.

use verdigris_graph::{ScoreFunction, ScoreStep};
use verdigris_tensor::DType;

use crate::source::Source;
use crate::tolerance::Bounded;

/// As precise as functions are of what is stored in f32: an exponential of the score follows.
const BITS: u32 = 24;

/// What a function makes of a scaled product, at batch, head, query and key.
pub(super) fn made((function, operands): &(ScoreFunction, Vec<Source<'_>>), product: Bounded, at: [u64; 4], compute: DType) -> Bounded {
    let mut values: Vec<Bounded> = Vec::with_capacity(function.steps.len());
    for step in &function.steps {
        let of = |x: u32| values[x as usize];
        let next = match *step {
            ScoreStep::Given => product,
            ScoreStep::Number(number) => Bounded::exact(number.0).rounded(compute, compute),
            // An integer is rounded to the type computed in.
            ScoreStep::Operand(number) => operands[number as usize].at(&at).rounded(compute, compute),
            ScoreStep::Place(place) => Bounded::exact(at[place as usize] as f64),
            ScoreStep::Unary { f, x } => of(x).unary(f, BITS, compute),
            ScoreStep::Binary { f, x, z } => of(x).binary(f, of(z), false, BITS, compute),
            ScoreStep::Ternary { f, x, z, t } => of(x).ternary(f, of(z), of(t), compute),
            ScoreStep::Round { dtype, x } => of(x).rounded(dtype, compute),
        };
        values.push(next);
    }
    values.pop().unwrap_or(product)
}
