//! Scans, softmax, cross-entropy, pooling, resampling, normalization and attention, each by itself.

use verdigris_tensor::DType;

use crate::error::Error;
use crate::op::Op;
use crate::ops::attention::{AttentionSpec, Causal, ScoreFunction, entries_of};
use crate::ops::norm::NormSpec;
use crate::ops::pointwise::Pointwise;
use crate::ops::pool::{PoolMode, PoolWindows};
use crate::ops::resample::{Sampling, Taps};
use crate::ops::scan::Scan;
use crate::ops::softmax::CrossEntropySpec;
use crate::problem::{
    AttentionPass, AttentionProblem, BatchNormProblem, ChannelFunction, Corner, Loss, NormPass, NormProblem, PoolPass, PoolProblem,
    Problem, ResampleProblem, RowFunction, ScanProblem, SoftmaxProblem, View, Windows,
};
use crate::tensor::Uid;

use super::Subgraph;
use super::cut::Cut;
use super::gemm::Slots;

/// The problem of one op.
pub(super) fn lower(cut: &Cut<'_>, node: usize) -> Result<Subgraph, Error> {
    let node = &cut.graph.nodes[node];
    match &node.op {
        Op::Scan(op) => scan(cut, op),
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
            let (x, samples) = (view(op.x)?, op.samples.map(&mut *view).transpose()?);
            Ok(PoolPass::Forward { x, samples, y: view(op.y)?, index: op.index.map(view).transpose()? })
        }),
        Op::PoolBackward(op) => {
            let read: Vec<Uid> = [op.dy].into_iter().chain(op.x).collect();
            pool(cut, op.mode, &op.windows, op.dx, op.dy, &read, |view| {
                let (dy, x) = (view(op.dy)?, op.x.map(&mut *view).transpose()?);
                Ok(PoolPass::Backward { dy, x, index: op.index.map(&mut *view).transpose()?, dx: view(op.dx)? })
            })
        }
        Op::Resample(op) => resample(cut, false, &op.sampling, op.x, op.y),
        Op::ResampleBackward(op) => resample(cut, true, &op.sampling, op.dy, op.dx),
        Op::Normalize(op) => {
            let read: Vec<Uid> = [Some(op.x), op.residual, op.scale, op.bias].into_iter().flatten().collect();
            norm(cut, &op.spec, op.x, &read, |view| {
                Ok(NormPass::Forward {
                    x: view(op.x)?,
                    residual: op.residual.map(&mut *view).transpose()?,
                    scale: op.scale.map(&mut *view).transpose()?,
                    bias: op.bias.map(&mut *view).transpose()?,
                    y: view(op.y)?,
                    sum: op.sum.map(&mut *view).transpose()?,
                    mean: op.mean.map(&mut *view).transpose()?,
                    inv: op.inv.map(&mut *view).transpose()?,
                })
            })
        }
        Op::NormalizeBackward(op) => {
            let read: Vec<Uid> = [Some(op.x), Some(op.dy), op.scale, op.mean, op.inv, op.dsum].into_iter().flatten().collect();
            norm(cut, &op.spec, op.x, &read, |view| {
                Ok(NormPass::Backward {
                    x: view(op.x)?,
                    dy: view(op.dy)?,
                    scale: op.scale.map(&mut *view).transpose()?,
                    mean: op.mean.map(&mut *view).transpose()?,
                    inv: op.inv.map(&mut *view).transpose()?,
                    dsum: op.dsum.map(&mut *view).transpose()?,
                    dx: op.dx.map(&mut *view).transpose()?,
                    dscale: op.dscale.map(&mut *view).transpose()?,
                    dbias: op.dbias.map(&mut *view).transpose()?,
                })
            })
        }
        Op::BatchNorm(op) => {
            let read: Vec<Uid> = [op.scale, op.bias, op.add, op.running_mean, op.running_var].into_iter().flatten().chain([op.x]).collect();
            channels(cut, op.x, &read, |view| {
                Ok(ChannelFunction::Forward {
                    eps: op.eps,
                    momentum: op.momentum,
                    relu: op.relu,
                    activation: op.activation,
                    x: view(op.x)?,
                    scale: op.scale.map(&mut *view).transpose()?,
                    bias: op.bias.map(&mut *view).transpose()?,
                    add: op.add.map(&mut *view).transpose()?,
                    running_mean: op.running_mean.map(&mut *view).transpose()?,
                    running_var: op.running_var.map(&mut *view).transpose()?,
                    y: view(op.y)?,
                    mean: op.mean.map(&mut *view).transpose()?,
                    inv: op.inv.map(&mut *view).transpose()?,
                    next_mean: op.next_mean.map(&mut *view).transpose()?,
                    next_var: op.next_var.map(&mut *view).transpose()?,
                })
            })
        }
        Op::BatchNormBackward(op) => {
            let read: Vec<Uid> = [op.y, op.scale, op.bias].into_iter().flatten().chain([op.dy, op.x, op.mean, op.inv]).collect();
            channels(cut, op.x, &read, |view| {
                Ok(ChannelFunction::Backward {
                    relu: op.relu,
                    activation: op.activation,
                    dy: view(op.dy)?,
                    x: view(op.x)?,
                    y: op.y.map(&mut *view).transpose()?,
                    scale: op.scale.map(&mut *view).transpose()?,
                    bias: op.bias.map(&mut *view).transpose()?,
                    mean: view(op.mean)?,
                    inv: view(op.inv)?,
                    dx: op.dx.map(&mut *view).transpose()?,
                    dscale: op.dscale.map(&mut *view).transpose()?,
                    dbias: op.dbias.map(&mut *view).transpose()?,
                    dadd: op.dadd.map(&mut *view).transpose()?,
                })
            })
        }
        Op::BatchNormStatistics(op) => channels(cut, op.x, &[op.x], |view| {
            Ok(ChannelFunction::Statistics { x: view(op.x)?, mean: view(op.mean)?, m2: op.m2.map(view).transpose()? })
        }),
        Op::Attention(op) => {
            let floats = [Some(op.q), Some(op.k), Some(op.v), op.bias, op.slopes, op.sinks];
            let descales = [op.q_descale, op.k_descale, op.v_descale];
            let read = floats.into_iter().chain(descales).flatten().chain(op.score_operands.iter().copied()).collect::<Vec<_>>();
            let options = [op.bias, op.mask, op.slopes, op.sinks, op.q_lengths, op.kv_lengths, op.q_offsets, op.kv_offsets, op.page_table];
            let dropout = [op.dropout_state, op.dropout_offset];
            let blocks = [op.block_map, op.mask_blocks];
            attention(
                cut,
                &op.spec,
                [op.q, op.k, op.v],
                (options, dropout, descales, blocks, op.score.as_ref().map(|score| (score, &op.score_operands[..]))),
                &read,
                |[queries, _, values], _, view| {
                    let [b, h, s_q, _] = queries;
                    Ok(AttentionPass::Forward {
                        o: view(op.o, [b, h, s_q, values[3]])?,
                        log_sum_exp: op.log_sum_exp.map(|uid| view(uid, [b, h, s_q, 1])).transpose()?,
                        max_scores: op.max_scores.map(|uid| view(uid, [b, h, s_q, 1])).transpose()?,
                    })
                },
            )
        }
        Op::AttentionBackward(op) => {
            let floats = [Some(op.q), Some(op.k), Some(op.v), op.bias, op.slopes, op.sinks].into_iter().flatten();
            let floats = floats.chain(op.score_operands.iter().copied());
            let read = floats.chain([op.o, op.log_sum_exp, op.d_o]).collect::<Vec<_>>();
            let options = [op.bias, op.mask, op.slopes, op.sinks, op.q_lengths, op.kv_lengths, op.q_offsets, op.kv_offsets, None];
            let dropout = [op.dropout_state, op.dropout_offset];
            let blocks = [op.block_map, op.mask_blocks];
            attention(
                cut,
                &op.spec,
                [op.q, op.k, op.v],
                (options, dropout, [None; 3], blocks, op.score.as_ref().map(|score| (score, &op.score_operands[..]))),
                &read,
                |[queries, keys, values], scores, view| {
                    let [b, h, s_q, _] = queries;
                    let results = [b, h, s_q, values[3]];
                    Ok(AttentionPass::Backward {
                        o: view(op.o, results)?,
                        log_sum_exp: view(op.log_sum_exp, [b, h, s_q, 1])?,
                        d_o: view(op.d_o, results)?,
                        dq: op.dq.map(|uid| view(uid, queries)).transpose()?,
                        dk: op.dk.map(|uid| view(uid, keys)).transpose()?,
                        dv: op.dv.map(|uid| view(uid, values)).transpose()?,
                        dbias: op.dbias.map(|uid| view(uid, scores)).transpose()?,
                        dsinks: op.dsinks.map(|uid| view(uid, [1, h, 1, 1])).transpose()?,
                        d_score: (0..)
                            .zip(&op.d_score_operands)
                            .map(|(number, uid)| {
                                let Some(uid) = *uid else { return Ok(None) };
                                let is_table = op.score.as_ref().is_some_and(|score| score.is_table(number));
                                let [b, h, s_q, s_kv] = scores;
                                let entries = if is_table { entries_of(cut.tensor(uid)?) } else { s_kv };
                                view(uid, [b, h, s_q, entries]).map(Some)
                            })
                            .collect::<Result<Vec<_>, Error>>()?,
                    })
                },
            )
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

/// The problem of a function of channels, which the second dim of `whole` numbers.
fn channels(
    cut: &Cut<'_>,
    whole: Uid,
    read: &[Uid],
    function: impl FnOnce(Viewer<'_>) -> Result<ChannelFunction, Error>,
) -> Result<Subgraph, Error> {
    let dims = cut.tensor(whole)?.layout.dims().to_vec();
    let mut slots = Slots::default();
    let function = function(&mut |uid| over_with_last(cut, uid, &dims, 1, &mut slots))?;
    let mut rows = dims;
    let channels = rows.remove(1);
    let mut problem = BatchNormProblem { rows, channels, compute: computed(cut, read)?, function }.canonical()?;
    let bindings = problem.number_slots().into_iter().map(|slot| slots.uids[slot.0 as usize]).collect();
    Ok(Subgraph { problem: Problem::BatchNorm(problem), bindings })
}

/// A tensor over these dims, of which `last` comes to stand last.
fn over_with_last(cut: &Cut<'_>, uid: Uid, dims: &[u64], last: usize, slots: &mut Slots) -> Result<View, Error> {
    let seen = cut.see(uid)?;
    let slot = slots.slot(seen.uid);
    let mut view = seen.over(dims, slot);
    let along = view.strides.remove(last);
    view.strides.push(along);
    Ok(view)
}

/// A tensor of attention over these dims.
type AttentionViewer<'v> = &'v mut dyn FnMut(Uid, [u64; 4]) -> Result<View, Error>;

/// What attention may have beside queries, keys and values: its options, the state of dropout and the offset in it, the factors of 8-bit
/// floats, the map of blocks with their masks, and the function of scores with what it reads.
type AttentionOptions<'o> =
    ([Option<Uid>; 9], [Option<Uid>; 2], [Option<Uid>; 3], [Option<Uid>; 2], Option<(&'o ScoreFunction, &'o [Uid])>);

/// The problem of attention; `pass` is given the dims of queries, keys and values, and of scores.
fn attention(
    cut: &Cut<'_>,
    spec: &AttentionSpec,
    operands: [Uid; 3],
    (options, [state, offset], descales, blocks, score): AttentionOptions<'_>,
    read: &[Uid],
    pass: impl FnOnce([[u64; 4]; 3], [u64; 4], AttentionViewer<'_>) -> Result<AttentionPass, Error>,
) -> Result<Subgraph, Error> {
    let mut dims = [[0; 4]; 3];
    for (dims, uid) in dims.iter_mut().zip(operands) {
        dims.copy_from_slice(cut.tensor(uid)?.layout.dims());
    }
    let [[_, h, q_rows, d], [pages, h_kv, kv_rows, _], [.., d_v]] = dims;
    let extent = |uid: Option<Uid>, dim: usize| uid.map(|uid| Ok::<_, Error>(cut.tensor(uid)?.layout.dims()[dim])).transpose();
    let (offsets, entries) = (extent(options[6], 0)?, extent(options[8], 1)?);
    let [b, s_q, s_kv] = spec.extents(&dims[0], &dims[1], offsets, entries);
    let scores = [b, h, s_q, s_kv];
    let mut slots = Slots::default();
    let view = |uid: Uid, dims: [u64; 4], slots: &mut Slots| {
        let seen = cut.see(uid)?;
        let slot = slots.slot(seen.uid);
        Ok::<_, Error>(seen.over(&dims, slot))
    };
    let [q, k, v] = [(operands[0], dims[0]), (operands[1], dims[1]), (operands[2], dims[2])].map(|(uid, dims)| view(uid, dims, &mut slots));
    let over = [
        scores,
        scores,
        [b, h, 1, 1],
        [1, h, 1, 1],
        [b, 1, 1, 1],
        [b, 1, 1, 1],
        [b + 1, 1, 1, 1],
        [b + 1, 1, 1, 1],
        [b, entries.unwrap_or(0), 1, 1],
    ];
    let mut options = options.into_iter().zip(over).map(|(uid, dims)| uid.map(|uid| view(uid, dims, &mut slots)).transpose());
    let mut option = || options.next().unwrap_or(Ok(None));
    let (bias, mask, slopes, sinks) = (option()?, option()?, option()?, option()?);
    let (q_lengths, kv_lengths, q_offsets, kv_offsets, page_table) = (option()?, option()?, option()?, option()?, option()?);
    let mut descales = descales.map(|uid| uid.map(|uid| view(uid, [b, h_kv, 1, 1], &mut slots)).transpose()).into_iter();
    let mut descale = || descales.next().unwrap_or(Ok(None));
    let (q_descale, k_descale, v_descale) = (descale()?, descale()?, descale()?);
    let masks = blocks[1].map(|uid| Ok::<_, Error>(cut.tensor(uid)?.layout.dims().to_vec())).transpose()?;
    let (blocks_given, block_q, block_kv) = masks.map_or((0, 0, 0), |dims| (dims[0], dims[2], dims[3].saturating_mul(8)));
    let grid = [b, h, s_q.div_ceil(block_q.max(1)), s_kv.div_ceil(block_kv.max(1))];
    let of_blocks = [grid, [blocks_given, 1, block_q, block_kv / 8]];
    let mut views = blocks.into_iter().zip(of_blocks).map(|(uid, dims)| uid.map(|uid| view(uid, dims, &mut slots)).transpose());
    let mut next = || views.next().unwrap_or(Ok(None));
    let (block_map, mask_blocks) = (next()?, next()?);
    let score = score.map(|(score, operands)| {
        let of_operand = |(number, &uid): (u32, &Uid)| {
            // A table has a last dim of its own.
            let entries = if score.is_table(number) { entries_of(cut.tensor(uid)?) } else { s_kv };
            Ok((view(uid, [b, h, s_q, entries], &mut slots)?, entries))
        };
        let views = (0..).zip(operands).map(of_operand).collect::<Result<Vec<_>, Error>>()?;
        // A number that names no operand is refused by the op.
        let of = |number: u32| views[(number as usize).min(views.len() - 1)].clone();
        Ok::<_, Error>(score.over(of))
    });
    let (in_memory, by_value) = (state.filter(|_| offset.is_none()), state.zip(offset));
    let dropout_state = in_memory.map(|uid| {
        let seen = cut.see(uid)?;
        let stride = seen.strides.first().copied().unwrap_or(0);
        let (slot, offset) = (slots.slot(seen.uid), seen.offset);
        Ok::<_, Error>(View { slot, dtype: DType::I32, offset, strides: vec![stride, 0, 0, 0] })
    });
    let scale = slots.scalar(spec.scale);
    let dropout_seed = by_value.map(|(seed, offset)| [seed, offset].map(|uid| slots.slot(uid)));
    let pass = pass(dims, scores, &mut |uid, dims| view(uid, dims, &mut slots))?;
    // A window by itself lies as a causal one that ends at the last query and the last key.
    let corner = if spec.causal == Causal::TopLeft { Corner::TopLeft } else { Corner::BottomRight };
    let right = if spec.causal == Causal::None { spec.right } else { Some(0) };
    let mut problem = AttentionProblem {
        b,
        h,
        h_kv,
        s_q,
        s_kv,
        q_rows,
        kv_rows,
        pages: if entries.is_some() { pages } else { 0 },
        page_size: if entries.is_some() { kv_rows } else { 0 },
        blocks: blocks_given,
        block_q,
        block_kv,
        d,
        d_v,
        compute: computed(cut, read)?,
        determinism: cut.graph.determinism,
        corner,
        left: spec.left,
        right,
        soft_cap: spec.soft_cap,
        q: q?,
        k: k?,
        v: v?,
        bias,
        mask,
        slopes,
        sinks,
        q_lengths,
        kv_lengths,
        q_offsets,
        kv_offsets,
        page_table,
        dropout: spec.dropout,
        dropout_state: dropout_state.transpose()?,
        dropout_seed,
        q_descale,
        k_descale,
        v_descale,
        block_map,
        mask_blocks,
        score: score.transpose()?,
        scale,
        pass,
    }
    .canonical()?;
    let bindings = problem.number_slots().into_iter().map(|slot| slots.uids[slot.0 as usize]).collect();
    Ok(Subgraph { problem: Problem::Attention(problem), bindings })
}

fn scan(cut: &Cut<'_>, op: &Scan) -> Result<Subgraph, Error> {
    let mut rows = cut.tensor(op.x)?.layout.dims().to_vec();
    let mut slots = Slots::default();
    let axis = op.axis as usize;
    let [x, y] = [op.x, op.y].map(|uid| over_with_last(cut, uid, &rows, axis, &mut slots));
    let (x, y) = (x?, y?);
    let extent = rows.remove(axis);
    let (f, exclusive, reverse, compute) = (op.f, op.exclusive, op.reverse, computed(cut, &[op.x])?);
    let mut problem = ScanProblem { f, exclusive, reverse, rows, extent, compute, x, y }.canonical()?;
    let bindings = problem.number_slots().into_iter().map(|slot| slots.uids[slot.0 as usize]).collect();
    Ok(Subgraph { problem: Problem::Scan(problem), bindings })
}

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
    let function = function(&mut |uid| over_with_last(cut, uid, &dims, axis, &mut slots))?;
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
        (Some(i), PoolWindows::Fractional { window, .. }) => Windows::Fractional { taps: window[i] },
        (Some(i), PoolWindows::Sliding { window, strides, dilations, pads_before, .. }) => {
            Windows::Sliding { taps: window[i], stride: strides[i], dilation: dilations[i], pad_before: pads_before[i] }
        }
    });
    let mut slots = Slots::default();
    let pass = pass(&mut |uid| {
        let seen = cut.see(uid)?;
        let slot = slots.slot(seen.uid);
        let mut strides = seen.strides[..2].to_vec();
        // Samples have one dim in the place of the spatial ones: it is the last.
        strides.extend(vec![0; 5 - seen.strides.len()]);
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

fn resample(cut: &Cut<'_>, backward: bool, sampling: &Sampling, from: Uid, to: Uid) -> Result<Subgraph, Error> {
    let (x, y) = if backward { (to, from) } else { (from, to) };
    let (x_dims, y_dims) = (cut.tensor(x)?.layout.dims(), cut.tensor(y)?.layout.dims());
    let (missing, compute) = (3 - sampling.spatial(), computed(cut, &[from])?);
    let spatial = |dims: &[u64]| -> [u64; 3] { std::array::from_fn(|i| if i < missing { 1 } else { dims[2 + i - missing] }) };
    let (extents, out) = (spatial(x_dims), spatial(y_dims));
    let along = |i: usize| i.checked_sub(missing).map_or(Taps::Same, |own| sampling.taps(own, extents[i], out[i], compute == DType::F64));
    let mut slots = Slots::default();
    let mut view = |uid| -> Result<View, Error> {
        let seen = cut.see(uid)?;
        let slot = slots.slot(seen.uid);
        let mut strides = seen.strides[..2].to_vec();
        strides.extend(vec![0; missing]);
        strides.extend(&seen.strides[2..]);
        Ok(View { slot, dtype: seen.dtype, offset: seen.offset, strides })
    };
    let (from, to) = (view(from)?, view(to)?);
    let taps = std::array::from_fn(along);
    let mut problem = ResampleProblem { backward, n: x_dims[0], c: x_dims[1], extents, out, taps, compute, from, to }.canonical()?;
    let bindings = problem.number_slots().into_iter().map(|slot| slots.uids[slot.0 as usize]).collect();
    Ok(Subgraph { problem: Problem::Resample(problem), bindings })
}

/// Statistics have the groups where others have the channels that are cut into them, so that a dim of a tensor is that of the groups, that of what
/// lies in one, or both.
fn norm(
    cut: &Cut<'_>,
    spec: &NormSpec,
    whole: Uid,
    read: &[Uid],
    pass: impl FnOnce(Viewer<'_>) -> Result<NormPass, Error>,
) -> Result<Subgraph, Error> {
    let x_dims = cut.tensor(whole)?.layout.dims();
    let first = spec.axes[0] as usize;
    let inside = x_dims[first] / spec.groups;
    let axes: Vec<usize> = spec.axes.iter().map(|&axis| axis as usize).collect();
    // The dims of rows, the groups in the place of the axis that they cut, then those of a row's elements.
    let is_row = |axis: &usize| *axis == first || !axes.contains(axis);
    let row_axes: Vec<usize> = (0..x_dims.len()).filter(is_row).collect();
    let mut slots = Slots::default();
    let pass = pass(&mut |uid| {
        let seen = cut.see(uid)?;
        let slot = slots.slot(seen.uid);
        // Broadcast from the right; a dim of 1 is repeated.
        let lead = x_dims.len() - seen.dims.len();
        let of = |axis: usize| axis.checked_sub(lead).map_or((1, 0), |own| (seen.dims[own], seen.strides[own]));
        let stride = |axis: usize| match of(axis) {
            (1, _) if x_dims[axis] != 1 => 0,
            (_, stride) => stride,
        };
        let (extent, along) = of(first);
        let (of_group, of_element) = match extent {
            // A dim of the statistics has the groups alone.
            _ if extent == spec.groups && extent != x_dims[first] => (along, 0),
            _ if extent == x_dims[first] => (along.saturating_mul(inside), along),
            _ => (0, 0),
        };
        let rows = row_axes.iter().map(|&axis| if axis == first { of_group } else { stride(axis) });
        let elements = axes.iter().map(|&axis| if axis == first { of_element } else { stride(axis) });
        Ok(View { slot, dtype: seen.dtype, offset: seen.offset, strides: rows.chain(elements).collect() })
    })?;
    let rows = row_axes.iter().map(|&axis| if axis == first { spec.groups } else { x_dims[axis] }).collect();
    let elements = axes.iter().map(|&axis| if axis == first { inside } else { x_dims[axis] }).collect();
    let mut problem = NormProblem {
        kind: spec.kind,
        eps: spec.eps,
        zero_centred: spec.zero_centred,
        rows,
        elements,
        compute: computed(cut, read)?,
        pass,
    }
    .canonical()?;
    let bindings = problem.number_slots().into_iter().map(|slot| slots.uids[slot.0 as usize]).collect();
    Ok(Subgraph { problem: Problem::Norm(problem), bindings })
}
