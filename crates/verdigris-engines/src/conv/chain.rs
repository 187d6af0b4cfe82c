//! Epilogues of convolutions over matrices: for kernels whose results are rows of pixels (or of filters) by channels.

use verdigris_graph::{EpilogueStep, Matrix, Tensor};

use crate::engine::Refusal;

/// The same steps with their operands as matrices, or the first refusal of `place`.
pub(super) fn over_matrices(
    steps: &[EpilogueStep<Tensor>],
    place: impl Fn(&Tensor) -> Result<Matrix, Refusal>,
) -> Result<Vec<EpilogueStep>, Refusal> {
    let step = |step: &EpilogueStep<Tensor>| {
        Ok(match step {
            EpilogueStep::Unary(f) => EpilogueStep::Unary(*f),
            EpilogueStep::Binary { f, operand, v_is_right } => {
                EpilogueStep::Binary { f: *f, operand: place(operand)?, v_is_right: *v_is_right }
            }
            EpilogueStep::Scale { factor } => EpilogueStep::Scale { factor: *factor },
            EpilogueStep::Round { dtype } => EpilogueStep::Round { dtype: *dtype },
            EpilogueStep::Store { target } => EpilogueStep::Store { target: place(target)? },
        })
    };
    steps.iter().map(step).collect()
}
