//! A matmul and its epilogue.

use std::collections::HashMap;

use verdigris_tensor::{DType, Layout};

use crate::error::Error;
use crate::op::{HostScalar, Op};
use crate::ops::matmul::{Matmul, OperandScale};
use crate::ops::pointwise::{BinaryOp, Drawn, Pointwise, UnaryOp};
use crate::problem::{EpilogueStep, GemmProblem, Matrix, Problem, Scale, Slot};
use crate::tensor::{TensorDesc, Uid};

use super::Subgraph;
use super::cut::Cut;

/// The problem of a matmul and the chain behind it; `members` are both, in order.
pub(super) fn lower(cut: &Cut<'_>, anchor: usize, matmul: &Matmul, members: &[usize]) -> Result<Subgraph, Error> {
    let d_desc = cut.tensor(matmul.d)?;
    let dims = d_desc.layout.dims();
    let (batch, matrix_dims) = dims.split_at(dims.len() - 2);
    let (m, n) = (matrix_dims[0], matrix_dims[1]);
    let a_desc = cut.tensor(matmul.a)?;
    let k = a_desc.layout.dims()[a_desc.layout.rank() - 1];

    let mut slots = Slots::default();
    let mut with_batch = |uid: Uid, rows: u64, columns: u64| {
        let dims: Vec<u64> = batch.iter().copied().chain([rows, columns]).collect();
        slots.matrix(&cut.operand(uid)?, &dims)
    };
    let a = with_batch(matmul.a, m, k)?;
    let b = with_batch(matmul.b, k, n)?;
    let c = matmul.c.map(|c| with_batch(c, m, n)).transpose()?;
    let mut scale = |scale: Option<OperandScale>, outer: u64| {
        scale
            .map(|scale| match scale.block {
                None => Ok(Scale::Tensor { slot: slots.slot(cut.operand(scale.tensor)?.uid) }),
                Some([block, block_k]) => {
                    let blocks = [outer.div_ceil(block), k.div_ceil(block_k)];
                    let dims: Vec<u64> = batch.iter().copied().chain(blocks).collect();
                    let factors = slots.matrix(&cut.operand(scale.tensor)?, &dims)?;
                    Ok(Scale::Block { outer: block, k: block_k, factors })
                }
            })
            .transpose()
    };
    let scale_a = scale(matmul.scale_a, m)?;
    let scale_b = scale(matmul.scale_b, n)?;
    let alpha = slots.scalar(matmul.alpha);
    let beta = slots.scalar(matmul.beta);

    let mut epilogue = Vec::new();
    let mut drawn: HashMap<Uid, DrawnValue<'_>> = HashMap::new();
    let mut current = d_desc;
    // A plain sum of the accumulator's type is that type's value already.
    let mut is_rounded =
        current.dtype == matmul.precision.accumulator() && matmul.alpha.is_fixed(1.0) && (matmul.c.is_none() || matmul.beta.is_fixed(0.0));
    for &member in members.iter().filter(|&&member| member != anchor) {
        let node = &cut.graph.nodes[member];
        match node.op {
            Op::Pointwise(Pointwise::Random { distribution, state, offset, y }) => {
                drawn.insert(y, DrawnValue { distribution, state, offset, dims: cut.tensor(y)?.layout.dims(), through: Vec::new() });
                continue;
            }
            Op::Pointwise(Pointwise::Unary { f, x, y }) => {
                if let Some(mut value) = drawn.remove(&x) {
                    value.through.push(f);
                    drawn.insert(y, value);
                    continue;
                }
            }
            _ => {}
        }
        if !is_rounded {
            epilogue.push(EpilogueStep::Round { dtype: current.dtype });
        }
        if cut.in_memory(current.uid) {
            epilogue.push(EpilogueStep::Store { target: slots.matrix(current, dims)? });
        }
        epilogue.push(match node.op {
            Op::Pointwise(Pointwise::Unary { f, .. }) => EpilogueStep::Unary(f),
            Op::Pointwise(Pointwise::Scale { factor, .. }) => EpilogueStep::Scale { factor: slots.scalar(factor) },
            Op::Pointwise(Pointwise::Binary { f, x, z, .. }) => {
                let v_is_right = z == current.uid;
                let other = if v_is_right { x } else { z };
                match drawn.remove(&other) {
                    Some(value) => value.step(&mut slots, f, v_is_right, dims)?,
                    None => EpilogueStep::Binary { f, operand: slots.matrix(&cut.operand(other)?, dims)?, v_is_right },
                }
            }
            _ => {
                let rule = "an epilogue has pointwise steps of one or two operands";
                return Err(Error::Unsupported { op: node.name.clone(), rule });
            }
        });
        current = cut.tensor(node.op.output())?;
        is_rounded = false;
    }
    let d = slots.matrix(current, dims)?;

    let mut gemm = GemmProblem {
        batch: batch.to_vec(),
        m,
        n,
        k,
        precision: matmul.precision,
        determinism: cut.graph.determinism,
        a,
        b,
        c,
        scale_a,
        scale_b,
        alpha,
        beta,
        epilogue,
        d,
    }
    .canonical()?;
    let bindings = gemm.number_slots().into_iter().map(|slot| slots.uids[slot.0 as usize]).collect();
    Ok(Subgraph { problem: Problem::Gemm(gemm), bindings })
}

/// What a random number has become on its way to a step of the epilogue.
struct DrawnValue<'g> {
    distribution: Drawn,
    state: Uid,
    offset: Option<Uid>,
    /// Those over which its numbers count.
    dims: &'g [u64],
    through: Vec<UnaryOp>,
}

impl DrawnValue<'_> {
    /// The step that draws it for a result of `dims`.
    fn step(self, slots: &mut Slots, f: BinaryOp, v_is_right: bool, dims: &[u64]) -> Result<EpilogueStep, Error> {
        let DrawnValue { distribution, state, offset, dims: counted, through } = self;
        let layout = Layout::row_major(counted).map_err(|source| Error::Layout { tensor: "random number".to_owned(), source })?;
        let number = slots.matrix(&TensorDesc::new(state, "random number", DType::U8, layout), dims)?;
        Ok(EpilogueStep::Random { f, v_is_right, distribution, number, offset: offset.map(|offset| slots.slot(offset)), through })
    }
}

/// Uids in the order of their first use; the position is the slot.
#[derive(Default)]
pub(super) struct Slots {
    /// The uid of each slot.
    pub(super) uids: Vec<Uid>,
}

impl Slots {
    /// The slot of a uid.
    pub(super) fn slot(&mut self, uid: Uid) -> Slot {
        let position = self.uids.iter().position(|&known| known == uid).unwrap_or_else(|| {
            self.uids.push(uid);
            self.uids.len() - 1
        });
        Slot(position as u32)
    }

    /// A factor by slot.
    pub(super) fn scalar(&mut self, scalar: HostScalar<Uid>) -> HostScalar<Slot> {
        match scalar {
            HostScalar::Fixed(real) => HostScalar::Fixed(real),
            HostScalar::Bound(uid) => HostScalar::Bound(self.slot(uid)),
        }
    }

    /// A tensor broadcast to `[batch…, rows, columns]`, as a matrix.
    fn matrix(&mut self, tensor: &TensorDesc, dims: &[u64]) -> Result<Matrix, Error> {
        let layout = (tensor.layout.broadcast_to(dims)).map_err(|source| Error::Layout { tensor: tensor.name.clone(), source })?;
        let (batch_strides, matrix_strides) = layout.strides().split_at(dims.len() - 2);
        Ok(Matrix {
            slot: self.slot(tensor.uid),
            dtype: tensor.dtype,
            row_stride: matrix_strides[0],
            column_stride: matrix_strides[1],
            batch_strides: batch_strides.to_vec(),
        })
    }
}
