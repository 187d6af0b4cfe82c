//! Chains of pointwise ops, fused: a piece of every operand is brought into a register file that fits the cache, all functions are
//! applied to it, and what is wanted outside of the chain is written. Between two functions a value is rounded to the type of its tensor.

use std::collections::HashMap;

use rayon::prelude::*;
use verdigris_graph::{BinaryOp, Drawn, Node, Op, Pointwise, TernaryOp, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout};

use crate::elements::{View, ViewMut, narrow, widen};
use crate::engine::Engine;
use crate::functions;
use crate::graph_plan::Context;
use crate::operation::Operation;
use crate::philox::Stream;
use crate::real::Real;
use crate::scratch::made;

/// The longest chain: its registers stay within the second-level cache.
pub(crate) const LONGEST: usize = 32;
/// Elements of a register.
const REGISTER: usize = 1024;
/// Elements that one thread does at a time.
const CHUNK: usize = 16 * REGISTER;

/// The type in which an op computes. Coordinates are integers that f32 does not hold.
pub(crate) fn arithmetic(op: &Pointwise, dtype: impl Fn(Uid) -> DType) -> DType {
    match op {
        Pointwise::GenIndex { .. } => DType::F64,
        _ => Pointwise::compute_dtype(op.operands().into_iter().map(dtype)),
    }
}

/// Where an argument comes from.
#[derive(Clone, Copy, Debug)]
enum Argument {
    /// Loaded from memory.
    Operand(usize),
    /// The result of an earlier function.
    Result(usize),
}

#[derive(Debug)]
struct Instruction<T> {
    function: Function<T>,
    arguments: Vec<Argument>,
    /// The type that the result is rounded to, where it is not that of the arithmetic.
    rounded_to: Option<DType>,
    /// Which of the outputs the result is.
    stored: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
enum Function<T> {
    Unary(UnaryOp),
    Binary(BinaryOp),
    Ternary(TernaryOp),
    Scale(T),
    /// The coordinate along this dim, in the order of iteration.
    Coordinate(usize),
    /// Random numbers.
    Random(Stream, Drawn),
}

fn run(nodes: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
    let Some(Op::Pointwise(first)) = nodes.first().map(|node| &node.op) else { return };
    match arithmetic(first, |uid| context.tensor(uid).dtype) {
        DType::F64 => run_in::<f64>(nodes, context, outputs),
        _ => run_in::<f32>(nodes, context, outputs),
    }
}

fn run_in<T: Real + num_traits::Float>(nodes: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
    let Some((_, main)) = outputs.last() else { return };
    if main.layout.is_empty() {
        return;
    }
    let dims = main.layout.dims().to_vec();
    // Elements are visited in the order in which the last output lies.
    let mut by_stride: Vec<usize> = (0..dims.len()).collect();
    by_stride.sort_by_key(|&i| (std::cmp::Reverse(main.layout.strides()[i]), i));
    let visited = |layout: &Layout| {
        let wide = layout.broadcast_to(&dims).unwrap_or(*layout);
        wide.permuted(&by_stride).unwrap_or(wide)
    };

    let mut operands: Vec<(Uid, View<'_>)> = Vec::new();
    let mut results: HashMap<Uid, usize> = HashMap::new();
    let mut program: Vec<Instruction<T>> = Vec::new();
    for node in nodes {
        let Op::Pointwise(op) = &node.op else { continue };
        let arguments = op.operands().into_iter().map(|uid| match results.get(&uid) {
            Some(&result) => Argument::Result(result),
            None => Argument::Operand(operands.iter().position(|(operand, _)| *operand == uid).unwrap_or_else(|| {
                let view = context.view(uid);
                operands.push((uid, View { layout: visited(&view.layout), ..view }));
                operands.len() - 1
            })),
        });
        let arguments = arguments.collect();
        let y = context.tensor(op.output());
        let function = match *op {
            Pointwise::Unary { f, .. } => Function::Unary(f),
            Pointwise::Binary { f, .. } => Function::Binary(f),
            Pointwise::Ternary { f, .. } => Function::Ternary(f),
            Pointwise::Scale { factor, .. } => Function::Scale(T::from_f64(context.scalar(factor))),
            Pointwise::Random { distribution, state, offset, .. } => Function::Random(Stream::of(context, state, offset), distribution),
            Pointwise::GenIndex { axis, .. } => Function::Coordinate(by_stride.iter().position(|&dim| dim == axis as usize).unwrap_or(0)),
        };
        let is_same = y.dtype.is_float() && y.dtype.bytes() == size_of::<T>();
        results.insert(y.uid, program.len());
        program.push(Instruction {
            function,
            arguments,
            rounded_to: (!is_same).then_some(y.dtype),
            stored: outputs.iter().position(|(uid, _)| *uid == y.uid),
        });
    }

    // An output that lies in the order of the visit is written piece by piece; any other is collected and moved at the end.
    let elements = dims.iter().product::<u64>() as usize;
    let order = crate::elements::row_major(&visited(&outputs[outputs.len() - 1].1.layout));
    let mut collected = Vec::new();
    let mut places: Vec<Vec<&mut [u8]>> = Vec::new();
    let mut moved = Vec::new();
    let in_place: Vec<bool> = outputs.iter().map(|(_, view)| crate::elements::same_places(&visited(&view.layout), &order)).collect();
    for ((_, view), &in_place) in outputs.iter().zip(&in_place) {
        if !in_place {
            collected.push(made::<u8>(elements * view.dtype.bytes()));
        }
    }
    let mut next = collected.iter_mut();
    let dtypes: Vec<DType> = outputs.iter().map(|(_, view)| view.dtype).collect();
    for ((_, view), in_place) in outputs.into_iter().zip(in_place) {
        let size = view.dtype.bytes();
        if in_place {
            places.push(view.bytes[..elements * size].chunks_mut(CHUNK * size).collect());
        } else if let Some(bytes) = next.next() {
            places.push(bytes.chunks_mut(CHUNK * size).collect());
            moved.push(view);
        }
    }
    let chunks = elements.div_ceil(CHUNK);
    let mut tasks: Vec<Vec<&mut [u8]>> = (0..chunks).map(|_| Vec::with_capacity(places.len())).collect();
    for output in places {
        for (task, piece) in tasks.iter_mut().zip(output) {
            task.push(piece);
        }
    }
    let mut row_major = vec![1u64; dims.len()];
    for dim in (1..dims.len()).rev() {
        row_major[dim - 1] = row_major[dim] * dims[dim];
    }
    let weights: Vec<u64> = by_stride.iter().map(|&dim| row_major[dim]).collect();
    let chain = Chain { operands: &operands, program: &program, dtypes: &dtypes, order: &order, weights: &weights };
    tasks.into_par_iter().enumerate().for_each(|(chunk, mut pieces)| {
        let mut registers = T::pool(context.scratch).lend((operands.len() + program.len()) * REGISTER);
        let first = chunk * CHUNK;
        let count = CHUNK.min(elements - first);
        for start in (0..count).step_by(REGISTER) {
            chain.piece(first + start, start, REGISTER.min(count - start), &mut registers, &mut pieces);
        }
    });
    for (view, bytes) in moved.into_iter().zip(&collected) {
        let size = view.dtype.bytes();
        let to = visited(&view.layout);
        ViewMut { dtype: view.dtype, layout: to, bytes: view.bytes }.scatter(order, |offset, stride, to| {
            for (i, to) in to.chunks_exact_mut(size).enumerate() {
                let from = (offset + i * stride) * size;
                to.copy_from_slice(&bytes[from..from + size]);
            }
        });
    }
}

struct Chain<'c, T> {
    operands: &'c [(Uid, View<'c>)],
    program: &'c [Instruction<T>],
    dtypes: &'c [DType],
    order: &'c Layout,
    /// What an index along each dim of the order adds to an element's row-major number.
    weights: &'c [u64],
}

impl<T: Real + num_traits::Float> Chain<'_, T> {
    /// The row-major number of an element of the visit.
    fn number(&self, mut position: usize) -> u64 {
        let mut number = 0;
        for (&dim, &weight) in self.order.dims().iter().zip(self.weights).rev() {
            number += (position as u64 % dim) * weight;
            position /= dim as usize;
        }
        number
    }

    /// Elements `first .. first + len` of the visit, which begin at `start` in each of `pieces`.
    fn piece(&self, first: usize, start: usize, len: usize, registers: &mut [T], pieces: &mut [&mut [u8]]) {
        let (operands, results) = registers.split_at_mut(self.operands.len() * REGISTER);
        for ((_, view), register) in self.operands.iter().zip(operands.chunks_exact_mut(REGISTER)) {
            view.gather(first, &mut register[..len]);
        }
        let mut rounded = [0u8; REGISTER * 8];
        for (i, instruction) in self.program.iter().enumerate() {
            let (earlier, rest) = results.split_at_mut(i * REGISTER);
            let to = &mut rest[..len];
            let argument = |which: usize| match instruction.arguments[which] {
                Argument::Operand(i) => &operands[i * REGISTER..][..len],
                Argument::Result(i) => &earlier[i * REGISTER..][..len],
            };
            match instruction.function {
                Function::Unary(f) => functions::unary(f, argument(0), to),
                Function::Binary(f) => functions::binary(f, argument(0), argument(1), to),
                Function::Ternary(f) => functions::ternary(f, argument(0), argument(1), argument(2), to),
                Function::Scale(factor) => to.iter_mut().zip(argument(0)).for_each(|(to, &x)| *to = factor * x),
                Function::Coordinate(dim) => {
                    let dims = self.order.dims();
                    let inner = dims[dim + 1..].iter().product::<u64>() as usize;
                    let extent = dims[dim] as usize;
                    to.iter_mut().enumerate().for_each(|(i, to)| *to = T::from_i64(((first + i) / inner % extent) as i64));
                }
                Function::Random(stream, distribution) => {
                    let mut drawn = stream.numbers(distribution);
                    to.iter_mut().enumerate().for_each(|(i, to)| *to = T::from_f32(drawn(self.number(first + i))));
                }
            }
            if let Some(dtype) = instruction.rounded_to {
                let bytes = &mut rounded[..len * dtype.bytes()];
                narrow(dtype, to, bytes);
                widen(dtype, bytes, to);
            }
            if let Some(output) = instruction.stored {
                let size = self.dtypes[output].bytes();
                narrow(self.dtypes[output], to, &mut pieces[output][start * size..(start + len) * size]);
            }
        }
    }
}

impl Operation for Pointwise {
    const ENGINE: Engine = Engine::Pointwise;

    fn run(&self, nodes: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        run(nodes, context, outputs);
    }
}
