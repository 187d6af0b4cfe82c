//! Results and epilogues of convolutions over matrices: for kernels whose results are rows of pixels (or of filters) by channels.

use verdigris_graph::{ConvProblem, EpilogueStep, GemmProblem, HostScalar, Matrix, Tensor};

use crate::engine::{EngineId, Reason, Refusal};

/// The same steps with their operands as matrices, or the first refusal of `place`.
pub(crate) fn over_matrices(
    steps: &[EpilogueStep<Tensor>],
    place: impl Fn(&Tensor) -> Result<Matrix, Refusal>,
) -> Result<Vec<EpilogueStep>, Refusal> {
    let step = |step: &EpilogueStep<Tensor>| {
        Ok(match step {
            EpilogueStep::Unary(f) => EpilogueStep::Unary(*f),
            EpilogueStep::Binary { f, operand, v_is_right } => {
                EpilogueStep::Binary { f: *f, operand: place(operand)?, v_is_right: *v_is_right }
            }
            EpilogueStep::Random { f, v_is_right, distribution, number, offset, through } => EpilogueStep::Random {
                f: *f,
                v_is_right: *v_is_right,
                distribution: *distribution,
                number: place(number)?,
                offset: *offset,
                through: through.clone(),
            },
            EpilogueStep::Scale { factor } => EpilogueStep::Scale { factor: *factor },
            EpilogueStep::Round { dtype } => EpilogueStep::Round { dtype: *dtype },
            EpilogueStep::Store { target } => EpilogueStep::Store { target: place(target)? },
        })
    };
    steps.iter().map(step).collect()
}

/// The tensor as one matrix an image, a batch of them: rows are `[depth, height, width]`, columns channels. `None` where the rows have no single
/// stride. Channels-first tensors have one within an image and none over all of them.
pub(crate) fn of_images(tensor: &Tensor, extents: [u64; 5]) -> Option<Matrix> {
    let [image, channel, depth, height, width] = tensor.strides;
    let strides = [depth.checked_mul(extents[2])?, channel, depth, height, width];
    let matrix = Tensor { strides, ..tensor.clone() }.as_matrix(extents)?;
    Some(Matrix { batch_strides: vec![image], ..matrix })
}

/// The epilogue and the result as those of a product. Its operands' slots are the problem's; A and B stand for their types alone.
pub(in crate::conv) fn product(
    id: EngineId,
    conv: &ConvProblem,
    [m, n, k]: [u64; 3],
    batch: Vec<u64>,
    matrix: impl Fn(&Tensor) -> Option<Matrix>,
) -> Result<GemmProblem, Refusal> {
    let place = |tensor: &Tensor| {
        matrix(tensor).ok_or_else(|| {
            id.refusal(
                Reason::Layout,
                format_args!("a result or operand with strides {:?}; its pixels must have a single one", tensor.strides),
            )
        })
    };
    let epilogue = over_matrices(&conv.epilogue, place)?;
    let [(_, a, _), (_, b, _)] = conv.operands();
    let packed = |tensor: &Tensor, columns: u64| Matrix::row_major(tensor.slot, tensor.dtype, columns);
    Ok(GemmProblem {
        batch,
        m,
        n,
        k,
        precision: conv.precision,
        determinism: conv.determinism,
        a: packed(a, k),
        b: packed(b, n),
        c: None,
        scale_a: None,
        scale_b: None,
        alpha: HostScalar::ONE,
        beta: HostScalar::ZERO,
        epilogue,
        d: place(conv.result())?,
    })
}
