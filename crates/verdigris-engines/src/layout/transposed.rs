//! A product read the other way round.

use verdigris_graph::{EpilogueStep, GemmProblem};

/// The problem whose D is the transpose of this one's: `Dᵀ = epilogue(Bᵀ · Aᵀ)`. The same memory, read the other way round.
pub(crate) fn transposed(problem: &GemmProblem) -> GemmProblem {
    let mut turned = problem.clone();
    (turned.m, turned.n) = (problem.n, problem.m);
    (turned.a, turned.b) = (problem.b.transposed(), problem.a.transposed());
    // Factors of both operands stand with outer blocks as rows already.
    (turned.scale_a, turned.scale_b) = (problem.scale_b.clone(), problem.scale_a.clone());
    turned.c = problem.c.as_ref().map(|c| c.transposed());
    turned.d = problem.d.transposed();
    for step in &mut turned.epilogue {
        if let EpilogueStep::Binary { operand: matrix, .. }
        | EpilogueStep::Store { target: matrix }
        | EpilogueStep::Random { number: matrix, .. } = step
        {
            *matrix = matrix.transposed();
        }
    }
    turned
}
