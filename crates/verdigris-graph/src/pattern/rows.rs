//! Softmax, cross-entropy and pooling, each by itself.

use verdigris_tensor::DType;

use crate::error::Error;
use crate::op::Op;
use crate::ops::pointwise::Pointwise;
use crate::ops::pool::{PoolMode, PoolWindows};
use crate::ops::softmax::CrossEntropySpec;
use crate::problem::{Loss, PoolPass, PoolProblem, Problem, RowFunction, SoftmaxProblem, View, Windows};
use crate::tensor::Uid;

use super::Subgraph;
use super::cut::Cut;
use super::gemm::Slots;

/// The problem of one op.
pub(super) fn lower(cut: &Cut<'_>, node: usize) -> Result<Subgraph, Error> {
    let node = &cut.graph.nodes[node];
    match &node.op {
        Op::Softmax(op) => {
            rows(cut, op.axis, op.x, &[op.x], |view| Ok(RowFunction::Softmax { log: op.log, x: view(op.x)?, y: view(op.y)? }))
        }
        Op::SoftmaxBackward(op) => rows(cut, op.axis, op.y, &[op.y, op.dy], |view| {
            Ok(RowFunction::SoftmaxBackward { log: op.log, y: view(op.y)?, dy: view(op.dy)?, dx: view(op.dx)? })
        }),
        Op::CrossEntropy(op) => rows(cut, op.spec.axis, op.logits, &[op.logits], |view| {
            let (logits, labels, loss) = (view(op.logits)?, view(op.labels)?, view(op.loss)?);
            Ok(RowFunction::CrossEntropy { loss_spec: loss_of(&op.spec), logits, labels, loss, lse: op.lse.map(view).transpose()? })
        }),
        Op::CrossEntropyBackward(op) => {
            let floats: Vec<Uid> = [op.logits, op.dloss].into_iter().chain(op.lse).collect();
            rows(cut, op.spec.axis, op.logits, &floats, |view| {
                Ok(RowFunction::CrossEntropyBackward {
                    loss_spec: loss_of(&op.spec),
                    logits: view(op.logits)?,
                    labels: view(op.labels)?,
                    dloss: view(op.dloss)?,
                    lse: op.lse.map(&mut *view).transpose()?,
                    dlogits: view(op.dlogits)?,
                })
            })
        }
        Op::Pool(op) => pool(cut, op.mode, &op.windows, op.x, op.y, &[op.x], |view| {
            Ok(PoolPass::Forward { x: view(op.x)?, y: view(op.y)?, index: op.index.map(view).transpose()? })
        }),
        Op::PoolBackward(op) => {
            let read: Vec<Uid> = [op.dy].into_iter().chain(op.x).collect();
            pool(cut, op.mode, &op.windows, op.dx, op.dy, &read, |view| {
                let (dy, x) = (view(op.dy)?, op.x.map(&mut *view).transpose()?);
                Ok(PoolPass::Backward { dy, x, index: op.index.map(&mut *view).transpose()?, dx: view(op.dx)? })
            })
        }
        other => Err(Error::NoProblem { op: node.name.clone(), kind: other.spec().name }),
    }
}

fn loss_of(spec: &CrossEntropySpec) -> Loss {
    Loss { smoothing: spec.label_smoothing, ignore_index: spec.ignore_index, reduction: spec.reduction }
}

fn computed(cut: &Cut<'_>, read: &[Uid]) -> Result<DType, Error> {
    Ok(Pointwise::compute_dtype(read.iter().map(|&uid| Ok(cut.tensor(uid)?.dtype)).collect::<Result<Vec<_>, Error>>()?))
}

type Viewer<'v> = &'v mut dyn FnMut(Uid) -> Result<View, Error>;

fn rows(
    cut: &Cut<'_>,
    axis: u32,
    whole: Uid,
    read: &[Uid],
    function: impl FnOnce(Viewer<'_>) -> Result<RowFunction, Error>,
) -> Result<Subgraph, Error> {
    let dims = cut.tensor(whole)?.layout.dims().to_vec();
    let axis = axis as usize;
    let mut slots = Slots::default();
    let function = function(&mut |uid| {
        let seen = cut.see(uid)?;
        let slot = slots.slot(seen.uid);
        let mut view = seen.over(&dims, slot);
        let along = view.strides.remove(axis);
        view.strides.push(along);
        Ok(view)
    })?;
    let mut rows = dims;
    let extent = rows.remove(axis);
    let mut problem = SoftmaxProblem { rows, extent, compute: computed(cut, read)?, function }.canonical()?;
    let bindings = problem.number_slots().into_iter().map(|slot| slots.uids[slot.0 as usize]).collect();
    Ok(Subgraph { problem: Problem::Softmax(problem), bindings })
}

fn pool(
    cut: &Cut<'_>,
    mode: PoolMode,
    windows: &PoolWindows,
    wide: Uid,
    narrow: Uid,
    read: &[Uid],
    pass: impl FnOnce(Viewer<'_>) -> Result<PoolPass, Error>,
) -> Result<Subgraph, Error> {
    let (x_dims, y_dims) = (cut.tensor(wide)?.layout.dims(), cut.tensor(narrow)?.layout.dims());
    let missing = 3 - windows.spatial();
    let spatial = |dims: &[u64]| -> [u64; 3] { std::array::from_fn(|i| if i < missing { 1 } else { dims[2 + i - missing] }) };
    let each = std::array::from_fn(|i| match (i.checked_sub(missing), windows) {
        (None, _) => Windows::NONE,
        (Some(_), PoolWindows::Adaptive { .. }) => Windows::Adaptive,
        (Some(i), PoolWindows::Sliding { window, strides, dilations, pads_before, .. }) => {
            Windows::Sliding { taps: window[i], stride: strides[i], dilation: dilations[i], pad_before: pads_before[i] }
        }
    });
    let mut slots = Slots::default();
    let pass = pass(&mut |uid| {
        let seen = cut.see(uid)?;
        let slot = slots.slot(seen.uid);
        let mut strides = seen.strides[..2].to_vec();
        strides.extend(vec![0; missing]);
        strides.extend(&seen.strides[2..]);
        Ok(View { slot, dtype: seen.dtype, offset: seen.offset, strides })
    })?;
    let mut problem = PoolProblem {
        mode,
        n: x_dims[0],
        c: x_dims[1],
        extents: spatial(x_dims),
        out: spatial(y_dims),
        windows: each,
        compute: computed(cut, read)?,
        pass,
    }
    .canonical()?;
    let bindings = problem.number_slots().into_iter().map(|slot| slots.uids[slot.0 as usize]).collect();
    Ok(Subgraph { problem: Problem::Pool(problem), bindings })
}
