//! A convolution, what prepares its activations, and its epilogue.

use crate::error::Error;
use crate::op::Op;
use crate::ops::conv::{Conv, ConvDirection, ConvMode};
use crate::ops::pointwise::Pointwise;
use crate::ops::reduction::Reduction;
use crate::problem::{Channels, ConvProblem, EpilogueStep, Problem, Statistics, Tensor};
use crate::tensor::{TensorDesc, Uid};

use super::Subgraph;
use super::cut::Cut;
use super::gemm::Slots;

/// The operand that a prologue may prepare: x, or of a dgrad y.
pub(super) fn activations(conv: &Conv) -> Uid {
    if conv.direction == ConvDirection::Dgrad { conv.y } else { conv.x }
}

/// One op of a prologue, seen from behind: the tensor that it changes, and the vector over channels that it reads beside it.
pub(super) struct Before {
    pub(super) value: Uid,
    vector: Option<(TensorDesc, u64)>,
    v_is_right: bool,
}

impl Cut<'_> {
    /// An op as a step of a convolution's prologue, if it can be one.
    pub(super) fn step_of_prologue(&self, op: usize, conv: usize) -> Result<Option<Before>, Error> {
        let (Some(pointwise), Op::Conv(conv)) = (self.pointwise(op), self.web.op(conv)) else { return Ok(None) };
        self.in_prologue(pointwise, self.tensor(activations(conv))?.layout.dims())
    }

    /// Whether an op can be a step of a prologue that gives a tensor of these dims, and on what.
    fn in_prologue(&self, pointwise: &Pointwise, dims: &[u64]) -> Result<Option<Before>, Error> {
        let of_dims = |uid: Uid| Ok::<bool, Error>(self.tensor(uid)?.layout.dims() == dims);
        Ok(match *pointwise {
            Pointwise::Unary { x, .. } | Pointwise::Scale { x, .. } => {
                of_dims(x)?.then_some(Before { value: x, vector: None, v_is_right: false })
            }
            Pointwise::Binary { x, z, .. } => {
                for (value, other, v_is_right) in [(x, z, false), (z, x, true)] {
                    let vector = self.channel_vector(other, dims)?;
                    if value != other && of_dims(value)? && vector.is_some() {
                        return Ok(Some(Before { value, vector, v_is_right }));
                    }
                }
                None
            }
            Pointwise::Ternary { .. } | Pointwise::GenIndex { .. } | Pointwise::Random { .. } => None,
        })
    }

    /// A tensor in memory that has one value for each channel of `dims`, with its stride.
    fn channel_vector(&self, uid: Uid, dims: &[u64]) -> Result<Option<(TensorDesc, u64)>, Error> {
        if self.see(uid)?.offset != 0 {
            return Ok(None);
        }
        let tensor = self.operand(uid)?;
        let Ok(layout) = tensor.layout.broadcast_to(dims) else { return Ok(None) };
        let strides = layout.strides();
        let elsewhere = (0..dims.len()).any(|dim| dim != 1 && dims[dim] > 1 && strides[dim] != 0);
        Ok((!elsewhere).then(|| (tensor, strides[1])))
    }
}

/// The problem of a convolution and the chains before and behind it; `members` are all of them, in order.
pub(super) fn lower(cut: &Cut<'_>, anchor: usize, conv: &Conv, members: &[usize]) -> Result<Subgraph, Error> {
    let mut slots = Slots::default();
    // From the convolution back to what is loaded.
    let mut before = Vec::new();
    let mut input = activations(conv);
    while let Some(writer) = cut.writer(input).filter(|writer| members.contains(writer)) {
        let Op::Pointwise(pointwise) = &cut.graph.nodes[writer].op else { break };
        let dims = cut.tensor(input)?.layout.dims();
        let Some(step) = cut.in_prologue(pointwise, dims)? else { break };
        let value = step.value;
        before.push((writer, pointwise, step, cut.tensor(input)?));
        input = value;
    }
    before.reverse();

    let source = |uid: Uid| if uid == activations(conv) { input } else { uid };
    let mut tensor = |uid: Uid| {
        let dims = cut.tensor(uid)?.layout.dims();
        place(&mut slots, &cut.operand(source(uid))?, dims)
    };
    let (x, w, y) = (tensor(conv.x)?, tensor(conv.w)?, tensor(conv.y)?);

    let computed = conv.precision.epilogue();
    let mut prologue = Vec::new();
    for (writer, pointwise, step, made) in &before {
        prologue.push(match (pointwise, &step.vector) {
            (Pointwise::Unary { f, .. }, _) => EpilogueStep::Unary(*f),
            (Pointwise::Scale { factor, .. }, _) => EpilogueStep::Scale { factor: slots.scalar(*factor) },
            (Pointwise::Binary { f, .. }, Some((vector, stride))) => {
                let operand = Channels { slot: slots.slot(vector.uid), dtype: vector.dtype, stride: *stride };
                EpilogueStep::Binary { f: *f, operand, v_is_right: step.v_is_right }
            }
            _ => {
                let rule = "a prologue has pointwise steps of one operand, or of one beside a vector over channels";
                return Err(Error::Unsupported { op: cut.graph.nodes[*writer].name.clone(), rule });
            }
        });
        if made.dtype != computed {
            prologue.push(EpilogueStep::Round { dtype: made.dtype });
        }
    }

    // Sums over channels, and the op that squares for one of them.
    let sums: Vec<&Reduction> =
        members.iter().filter_map(|&op| if let Op::Reduction(sum) = &cut.graph.nodes[op].op { Some(sum) } else { None }).collect();
    let squares = |op: usize| sums.iter().any(|sum| sum.x == cut.graph.nodes[op].op.output());
    let ends_with = |op: usize| {
        matches!(cut.graph.nodes[op].op, Op::Reduction(_)) || sums.len() == 2 && reads_twice(&cut.graph.nodes[op].op) && squares(op)
    };

    let result = cut.tensor(conv.output())?;
    let dims = result.layout.dims();
    let mut epilogue = Vec::new();
    let mut current = result;
    // A plain sum of the accumulator's type is that type's value already.
    let mut is_rounded = current.dtype == conv.precision.accumulator();
    let is_step = |member: usize| member != anchor && !ends_with(member) && before.iter().all(|(writer, ..)| *writer != member);
    for &member in members.iter().filter(|&&member| is_step(member)) {
        let node = &cut.graph.nodes[member];
        if !is_rounded {
            epilogue.push(EpilogueStep::Round { dtype: current.dtype });
        }
        if cut.in_memory(current.uid) {
            epilogue.push(EpilogueStep::Store { target: place(&mut slots, current, dims)? });
        }
        epilogue.push(match node.op {
            Op::Pointwise(Pointwise::Unary { f, .. }) => EpilogueStep::Unary(f),
            Op::Pointwise(Pointwise::Scale { factor, .. }) => EpilogueStep::Scale { factor: slots.scalar(factor) },
            Op::Pointwise(Pointwise::Binary { f, x, z, .. }) => {
                let v_is_right = z == current.uid;
                let other = cut.operand(if v_is_right { x } else { z })?;
                EpilogueStep::Binary { f, operand: place(&mut slots, &other, dims)?, v_is_right }
            }
            _ => {
                let rule = "an epilogue has pointwise steps of one or two operands";
                return Err(Error::Unsupported { op: node.name.clone(), rule });
            }
        });
        current = cut.tensor(node.op.output())?;
        is_rounded = false;
    }
    let last = place(&mut slots, current, dims)?;
    let mut channels = |sum: &Reduction| {
        let sum = cut.tensor(sum.y)?;
        Ok::<Channels, Error>(Channels { slot: slots.slot(sum.uid), dtype: sum.dtype, stride: sum.layout.strides()[1].max(1) })
    };
    let (of_values, of_squares): (Vec<&Reduction>, Vec<&Reduction>) = sums.iter().partition(|sum| sum.x == current.uid);
    let statistics = match (of_values.first(), of_squares.first()) {
        (Some(sum), Some(squares)) => Some(Statistics { sum: channels(sum)?, sum_of_squares: channels(squares)? }),
        _ => None,
    };
    let (x, w, y) = match conv.direction {
        ConvDirection::Fprop => (x, w, last),
        ConvDirection::Dgrad => (last, w, y),
        ConvDirection::Wgrad => (x, last, y),
    };

    let of = |uid: Uid| cut.tensor(uid).map(|tensor| tensor.layout.dims());
    let (x_dims, y_dims, w_dims) = (of(conv.x)?, of(conv.y)?, of(conv.w)?);
    let mut problem = ConvProblem {
        direction: conv.direction,
        n: x_dims[0],
        c: x_dims[1],
        k: y_dims[1],
        groups: conv.groups,
        input: spatial(&x_dims[2..], 1),
        filter: spatial(&w_dims[2..], 1),
        output: spatial(&y_dims[2..], 1),
        pads_before: spatial(&conv.pads_before, 0),
        pads_after: spatial(&conv.pads_after, 0),
        strides: spatial(&conv.strides, 1),
        dilations: spatial(&conv.dilations, 1),
        flip: conv.mode == ConvMode::Convolution,
        precision: conv.precision,
        determinism: cut.graph.determinism,
        x,
        w,
        y,
        prologue,
        epilogue,
        statistics,
    }
    .canonical()?;
    let (problem, old) = match problem.cut_as_gemm() {
        Some(mut gemm) => {
            let old = gemm.number_slots();
            (Problem::Gemm(gemm), old)
        }
        None => {
            let old = problem.number_slots();
            (Problem::Conv(problem), old)
        }
    };
    let bindings = old.into_iter().map(|slot| slots.uids[slot.0 as usize]).collect();
    Ok(Subgraph { problem, bindings })
}

/// Whether an op has one operand twice, as a square.
fn reads_twice(op: &Op) -> bool {
    matches!(op, Op::Pointwise(Pointwise::Binary { x, z, .. }) if x == z)
}

/// Three spatial numbers from up to three: `fill` in front.
fn spatial(list: &[u64], fill: u64) -> [u64; 3] {
    let mut three = [fill; 3];
    for (place, &value) in three.iter_mut().rev().zip(list.iter().rev()) {
        *place = value;
    }
    three
}

/// A tensor broadcast to `dims`, with leading spatial dims to make three.
fn place(slots: &mut Slots, tensor: &TensorDesc, dims: &[u64]) -> Result<Tensor, Error> {
    let layout = tensor.layout.broadcast_to(dims).map_err(|source| Error::Layout { tensor: tensor.name.clone(), source })?;
    let strides = layout.strides();
    let [d, h, w] = spatial(&strides[2..], 0);
    Ok(Tensor { slot: slots.slot(tensor.uid), dtype: tensor.dtype, strides: [strides[0], strides[1], d, h, w] })
}
