//! Maps, and reductions with what stands around them.

use std::collections::HashMap;

use crate::error::Error;
use crate::op::{HostScalar, Op, Real};
use crate::ops::movement::Movement;
use crate::ops::pointwise::{BinaryOp, Pointwise, UnaryOp};
use crate::ops::reduction::Reduction;
use crate::problem::{Chain, ChainStep, MapProblem, Problem, ReduceProblem, Window};
use crate::tensor::{TensorDesc, Uid};

use super::Subgraph;
use super::cut::Cut;
use super::gemm::Slots;
use super::seen::{Seen, reshaped, sources};

/// The problems of pointwise ops and copies that stand together: one, but for concatenations and for reshapes that need two copies.
pub(super) fn lower(cut: &mut Cut<'_>, members: &[usize]) -> Result<Vec<Subgraph>, Error> {
    if let [only] = *members
        && let Op::Movement(movement) = &cut.graph.nodes[only].op
    {
        match movement {
            Movement::Concat { axis, xs, y } => return concat(cut, *axis as usize, xs, *y),
            Movement::Reshape { x, y } => return reshape(cut, *x, *y),
            _ => {}
        }
    }
    let Some(&first) = members.first() else { return Ok(Vec::new()) };
    let dims = cut.tensor(cut.graph.nodes[first].op.output())?.layout.dims().to_vec();
    let mut builder = Builder::new(&dims);
    for &member in members {
        builder.op(cut, member)?;
    }
    Ok(vec![builder.map()?])
}

/// The problem of a reduction and what stands before and behind it; `members` are all of them, in order.
pub(super) fn lower_reduction(cut: &Cut<'_>, anchor: usize, reduction: &Reduction, members: &[usize]) -> Result<Subgraph, Error> {
    let x = cut.tensor(reduction.x)?;
    let dims = x.layout.dims();
    let is_reduced = |axis: usize| reduction.axes.contains(&(axis as u32));
    let (kept, reduced): (Vec<usize>, Vec<usize>) = (0..dims.len()).partition(|&axis| !is_reduced(axis));
    let accumulator = Pointwise::compute_dtype([x.dtype]);

    let mut before = Builder::new(dims);
    for &member in members.iter().filter(|&&member| member < anchor) {
        before.op(cut, member)?;
    }
    let value = before.value(cut, reduction.x)?;
    let order: Vec<usize> = kept.iter().chain(&reduced).copied().collect();
    before.chain.permute(&order);

    let y = cut.tensor(reduction.y)?;
    let mut after = Builder { slots: before.slots, ..Builder::new(y.layout.dims()) };
    let given = after.chain.push(ChainStep::Given);
    after.finish(cut, y, given, Some(accumulator));
    for &member in members.iter().filter(|&&member| member > anchor) {
        after.op(cut, member)?;
    }
    for &axis in reduced.iter().rev() {
        after.chain.remove(axis);
    }
    let extents = |axes: &[usize]| axes.iter().map(|&axis| dims[axis]).collect();
    let mut problem = ReduceProblem {
        f: reduction.f,
        accumulator,
        kept: extents(&kept),
        reduced: extents(&reduced),
        before: before.chain,
        value,
        after: after.chain,
    }
    .canonical()?;
    let bindings = problem.number_slots().into_iter().map(|slot| after.slots.uids[slot.0 as usize]).collect();
    Ok(Subgraph { problem: Problem::Reduce(problem), bindings })
}

/// A chain that is being written.
struct Builder {
    dims: Vec<u64>,
    chain: Chain,
    slots: Slots,
    /// The values that tensors have in the chain.
    values: HashMap<Uid, u32>,
}

impl Builder {
    fn new(dims: &[u64]) -> Builder {
        Builder { dims: dims.to_vec(), chain: Chain::default(), slots: Slots::default(), values: HashMap::new() }
    }

    /// The value of a tensor: computed here, or loaded.
    fn value(&mut self, cut: &Cut<'_>, uid: Uid) -> Result<u32, Error> {
        if let Some(&value) = self.values.get(&uid) {
            return Ok(value);
        }
        let value = self.load(&cut.see(uid)?, None);
        self.values.insert(uid, value);
        Ok(value)
    }

    fn load(&mut self, seen: &Seen, window: Option<Window>) -> u32 {
        let slot = self.slots.slot(seen.uid);
        self.chain.push(ChainStep::Load { from: seen.over(&self.dims, slot), window })
    }

    fn store(&mut self, seen: &Seen, x: u32) {
        let slot = self.slots.slot(seen.uid);
        self.chain.push(ChainStep::Store { x, to: seen.over(&self.dims, slot) });
    }

    /// Rounds a value to a tensor's type and stores it where it must lie in memory. `computed`: the type in which it was computed, `None` for
    /// what was only moved.
    fn finish(&mut self, cut: &Cut<'_>, y: &TensorDesc, value: u32, computed: Option<verdigris_tensor::DType>) {
        let rounds = computed.is_some_and(|computed| computed != y.dtype);
        let value = if rounds { self.chain.push(ChainStep::Round { dtype: y.dtype, x: value }) } else { value };
        if cut.in_memory(y.uid) {
            self.store(&Seen::own(y), value);
        }
        self.values.insert(y.uid, value);
    }

    /// The steps of one op.
    fn op(&mut self, cut: &Cut<'_>, member: usize) -> Result<(), Error> {
        let node = &cut.graph.nodes[member];
        let y = cut.tensor(node.op.output())?;
        let pointwise = match &node.op {
            Op::Pointwise(pointwise) => pointwise,
            Op::Movement(movement) => {
                let value = self.moved(cut, movement, sources(&node.op)[0], y)?;
                self.finish(cut, y, value, None);
                return Ok(());
            }
            _ => return Err(Error::Unsupported { op: node.name.clone(), rule: "a map is of pointwise ops and movements" }),
        };
        let types = pointwise.operands().into_iter().map(|uid| cut.tensor(uid).map(|tensor| tensor.dtype));
        let mut computed = Pointwise::compute_dtype(types.collect::<Result<Vec<_>, Error>>()?);
        let step = match *pointwise {
            Pointwise::Unary { f, x, .. } => ChainStep::Unary { f, x: self.value(cut, x)? },
            Pointwise::Binary { f, x, z, .. } => ChainStep::Binary { f, x: self.value(cut, x)?, z: self.value(cut, z)? },
            Pointwise::Ternary { f, x, z, t, .. } => {
                ChainStep::Ternary { f, x: self.value(cut, x)?, z: self.value(cut, z)?, t: self.value(cut, t)? }
            }
            Pointwise::GenIndex { axis, .. } => {
                computed = verdigris_tensor::DType::I64;
                let mut strides = vec![0; self.dims.len()];
                if let Some(stride) = strides.get_mut(axis as usize) {
                    *stride = 1;
                }
                ChainStep::Index { strides }
            }
            Pointwise::Scale { x, factor, .. } => {
                let x = self.value(cut, x)?;
                match factor {
                    // A factor of 1 converts and no more.
                    HostScalar::Fixed(Real(1.0)) => ChainStep::Unary { f: UnaryOp::Identity, x },
                    factor => {
                        let factor = self.slots.scalar(factor);
                        let z = self.chain.push(ChainStep::Scalar(factor));
                        ChainStep::Binary { f: BinaryOp::Mul, x, z }
                    }
                }
            }
        };
        let value = self.chain.push(step);
        self.finish(cut, y, value, Some(computed));
        Ok(())
    }

    /// The value of a movement's result.
    fn moved(&mut self, cut: &Cut<'_>, movement: &Movement, x: Uid, y: &TensorDesc) -> Result<u32, Error> {
        let seen = cut.see(x)?;
        if let Movement::Pad { before, value, .. } = movement {
            let end = before.iter().zip(&seen.dims).map(|(before, dim)| before + dim).collect();
            let window = Window { first: before.clone(), end, fill: *value };
            // A dim of 1 that grows by its border has no stride to run along with.
            let slot = self.slots.slot(seen.uid);
            let mut from = seen.over(&self.dims, slot);
            from.strides.clone_from(&seen.strides);
            return Ok(self.chain.push(ChainStep::Load { from, window: Some(window) }));
        }
        match seen.moved(movement, y.layout.dims()) {
            Some(seen) => Ok(self.load(&seen, None)),
            None => Err(Error::Unsupported { op: y.name.clone(), rule: "strides within 64 bits" }),
        }
    }

    fn map(self) -> Result<Subgraph, Error> {
        let mut problem = MapProblem { dims: self.dims, chain: self.chain }.canonical()?;
        let bindings = problem.number_slots().into_iter().map(|slot| self.slots.uids[slot.0 as usize]).collect();
        Ok(Subgraph { problem: Problem::Map(problem), bindings })
    }
}

/// A copy of elements from one place to another of the same dims.
fn copy(dims: &[u64], from: &Seen, to: &Seen) -> Result<Subgraph, Error> {
    let mut builder = Builder::new(dims);
    let value = builder.load(from, None);
    builder.store(to, value);
    builder.map()
}

/// One copy for each input, into its part of the result.
fn concat(cut: &Cut<'_>, axis: usize, xs: &[Uid], y: Uid) -> Result<Vec<Subgraph>, Error> {
    let whole = Seen::own(cut.tensor(y)?);
    let mut parts = Vec::new();
    let mut begin = 0;
    for &x in xs {
        let from = cut.see(x)?;
        let dims = from.dims.clone();
        let mut to = Seen { dims: dims.clone(), ..whole.clone() };
        if !dims.contains(&0) {
            to.offset += begin * whole.strides[axis];
            parts.push(copy(&dims, &from, &to)?);
        }
        begin += dims[axis];
    }
    Ok(parts)
}

/// A copy over the dims of the source or of the result, whichever both can be seen with; if neither, by way of a packed copy.
fn reshape(cut: &mut Cut<'_>, x: Uid, y: Uid) -> Result<Vec<Subgraph>, Error> {
    let y = cut.tensor(y)?;
    let (from, to) = (cut.see(x)?, Seen::own(y));
    if let Some(strides) = reshaped(&from.dims, &from.strides, &to.dims) {
        return Ok(vec![copy(&to.dims.clone(), &Seen { dims: to.dims.clone(), strides, ..from }, &to)?]);
    }
    if let Some(strides) = reshaped(&to.dims, &to.strides, &from.dims) {
        return Ok(vec![copy(&from.dims.clone(), &from, &Seen { dims: from.dims.clone(), strides, ..to })?]);
    }
    let packed = Seen::own(&cut.make(y, &from.dims)?);
    let again = reshaped(&packed.dims, &packed.strides, &to.dims);
    let strides = again.ok_or_else(|| Error::Unsupported { op: y.name.clone(), rule: "packed elements have any dims" })?;
    let second = Seen { dims: to.dims.clone(), strides, ..packed.clone() };
    Ok(vec![copy(&from.dims, &from, &packed)?, copy(&to.dims, &second, &to)?])
}
