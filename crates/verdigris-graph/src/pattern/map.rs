//! Maps, and reductions with what stands around them.

use std::collections::HashMap;

use verdigris_tensor::DType;

use crate::error::Error;
use crate::op::{HostScalar, Op, Real};
use crate::ops::append::Append;
use crate::ops::movement::Movement;
use crate::ops::pointwise::{BinaryOp, Drawn, Pointwise, RandomState, UnaryOp};
use crate::ops::reduction::Reduction;
use crate::problem::{Chain, ChainStep, MapProblem, Problem, ReduceProblem, RowPlace, View, Window};
use crate::tensor::{TensorDesc, Uid};

use super::Subgraph;
use super::cut::Cut;
use super::gemm::Slots;
use super::strided_view::{StridedView, reshaped, sources};

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
    let mut builder = Builder::new(cut.space(first));
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
        let value = self.load(&cut.see(uid)?);
        self.values.insert(uid, value);
        Ok(value)
    }

    fn load(&mut self, strided_view: &StridedView) -> u32 {
        let slot = self.slots.slot(strided_view.uid);
        self.chain.push(ChainStep::Load { from: strided_view.over(&self.dims, slot), window: None })
    }

    /// A load of what stands in a window, of which it has the extents.
    fn load_inside(&mut self, strided_view: &StridedView, window: Window) -> u32 {
        let slot = self.slots.slot(strided_view.uid);
        let mut from = strided_view.over(&self.dims, slot);
        // A dim of 1 in a wider window's space has no stride to run along with.
        from.strides.clone_from(&strided_view.strides);
        self.chain.push(ChainStep::Load { from, window: Some(window) })
    }

    fn store(&mut self, strided_view: &StridedView, x: u32) {
        let slot = self.slots.slot(strided_view.uid);
        self.chain.push(ChainStep::Store { x, to: strided_view.over(&self.dims, slot), at: None });
    }

    /// Rounds a value to a tensor's type and stores it where it must lie in memory. `computed`: the type in which it was computed, `None`
    /// for what was only moved.
    fn finish(&mut self, cut: &Cut<'_>, y: &TensorDesc, value: u32, computed: Option<DType>) {
        let rounds = computed.is_some_and(|computed| computed != y.dtype);
        let value = if rounds { self.chain.push(ChainStep::Round { dtype: y.dtype, x: value }) } else { value };
        if cut.in_memory(y.uid) {
            self.store(&StridedView::own(y), value);
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
            Op::Append(append) => return self.append(cut, append),
            _ => return Err(Error::Unsupported { op: node.name.clone(), rule: "a map is of pointwise ops, movements and appended rows" }),
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
                computed = DType::I64;
                let mut strides = vec![0; self.dims.len()];
                if let Some(stride) = strides.get_mut(axis as usize) {
                    *stride = 1;
                }
                ChainStep::Index { strides }
            }
            Pointwise::Random { distribution, state, offset, .. } => self.random(cut, distribution, RandomState { state, offset })?,
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

    /// Rows that go where a length says, into the tensor that they are appended to.
    fn append(&mut self, cut: &Cut<'_>, append: &Append) -> Result<(), Error> {
        let (x, along) = (self.value(cut, append.rows)?, append.axis as usize);
        let length = self.load(&cut.see(append.lengths)?);
        let y = StridedView::own(cut.tensor(append.y)?);
        let slot = self.slots.slot(y.uid);
        let mut to = y.over(&self.dims, slot);
        // Of one row that there is room for the stride is not told by a view.
        let (extent, stride) = (y.dims[along], y.strides[along]);
        to.strides.clone_from(&y.strides);
        to.strides[along] = 0;
        let mut coordinate = vec![0; self.dims.len()];
        coordinate[along] = 1;
        let at = RowPlace { length, rows: self.dims[along], extent, stride, coordinate };
        self.chain.push(ChainStep::Store { x, to, at: Some(at) });
        Ok(())
    }

    /// A step of random numbers: the four words of the state, each the same at all points, and the row-major number of the point.
    fn random(&mut self, cut: &Cut<'_>, distribution: Drawn, RandomState { state, offset }: RandomState) -> Result<ChainStep, Error> {
        let state = match offset {
            Some(offset) => [(state, false), (state, true), (offset, false), (offset, true)].map(|(uid, upper)| {
                let slot = self.slots.slot(uid);
                self.chain.push(ChainStep::Half { slot, upper })
            }),
            None => self.words(cut, state)?,
        };
        let mut strides = vec![1; self.dims.len()];
        for dim in (1..self.dims.len()).rev() {
            strides[dim - 1] = strides[dim] * self.dims[dim].max(1);
        }
        Ok(ChainStep::Random { distribution, state, strides })
    }

    /// The four words of a state in memory.
    fn words(&mut self, cut: &Cut<'_>, state: Uid) -> Result<[u32; 4], Error> {
        let seen = cut.see(state)?;
        let slot = self.slots.slot(seen.uid);
        let stride = seen.strides.first().copied().unwrap_or(0);
        Ok([0, 1, 2, 3].map(|word| {
            let from = View { slot, dtype: DType::I32, offset: seen.offset + word * stride, strides: vec![0; self.dims.len()] };
            self.chain.push(ChainStep::Load { from, window: None })
        }))
    }

    /// The value of a movement's result.
    fn moved(&mut self, cut: &Cut<'_>, movement: &Movement, x: Uid, y: &TensorDesc) -> Result<u32, Error> {
        let strided_view = cut.see(x)?;
        if let Movement::Pad { before, value, .. } = movement {
            let end = before.iter().zip(&strided_view.dims).map(|(before, dim)| before + dim).collect();
            let window = Window { first: before.clone(), end, fill: *value, over: None };
            return Ok(self.load_inside(&strided_view, window));
        }
        match strided_view.moved(movement, y.layout.dims()) {
            Some(strided_view) => Ok(self.load(&strided_view)),
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
fn copy(dims: &[u64], from: &StridedView, to: &StridedView) -> Result<Subgraph, Error> {
    let mut builder = Builder::new(dims);
    let value = builder.load(from);
    builder.store(to, value);
    builder.map()
}

/// Inputs of a concatenation that one map copies: each costs every point of the map a test of its window.
const INPUTS_OF_A_MAP: usize = 8;

/// One map for as many neighbouring inputs as lie as the result does, and for every other one a copy into its part.
fn concat(cut: &Cut<'_>, axis: usize, xs: &[Uid], y: Uid) -> Result<Vec<Subgraph>, Error> {
    let whole = StridedView::own(cut.tensor(y)?);
    let mut groups: Vec<(u64, Vec<StridedView>)> = Vec::new();
    let (mut begin, mut last_is_alike) = (0, false);
    for &x in xs {
        let from = cut.see(x)?;
        let extent = from.dims[axis];
        if !from.dims.contains(&0) {
            let is_alike = runs_alike(&from, &whole);
            match groups.last_mut().filter(|(_, group)| is_alike && last_is_alike && group.len() < INPUTS_OF_A_MAP) {
                Some((_, group)) => group.push(from),
                None => groups.push((begin, vec![from])),
            }
            last_is_alike = is_alike;
        }
        begin += extent;
    }
    let maps = groups.into_iter().map(|(begin, group)| {
        let mut to = whole.clone();
        to.dims[axis] = group.iter().map(|from| from.dims[axis]).sum();
        to.offset += begin * whole.strides[axis];
        side_by_side(axis, &group, &to)
    });
    maps.collect()
}

/// Whether neighbours in the result are the nearest neighbours in this input, too.
fn runs_alike(from: &StridedView, to: &StridedView) -> bool {
    let innermost = (0..to.dims.len()).filter(|&dim| to.dims[dim] > 1).min_by_key(|&dim| to.strides[dim]);
    innermost.is_none_or(|inner| {
        let others = (0..from.dims.len()).filter(|&dim| dim != inner && from.dims[dim] > 1);
        others.map(|dim| from.strides[dim]).all(|stride| from.strides[inner] <= stride)
    })
}

/// Inputs side by side along an axis: each loaded in its own window over those before it.
fn side_by_side(axis: usize, inputs: &[StridedView], to: &StridedView) -> Result<Subgraph, Error> {
    let mut builder = Builder::new(&to.dims);
    let (mut over, mut begin) = (None, 0);
    for from in inputs {
        let (mut first, mut end) = (vec![0; to.dims.len()], to.dims.clone());
        first[axis] = begin;
        begin += from.dims[axis];
        end[axis] = begin;
        over = Some(builder.load_inside(from, Window { first, end, fill: Real(0.0), over }));
    }
    if let Some(value) = over {
        builder.store(to, value);
    }
    builder.map()
}

/// A copy over the dims of the source or of the result, whichever both can be seen with; if neither, by way of a packed copy.
fn reshape(cut: &mut Cut<'_>, x: Uid, y: Uid) -> Result<Vec<Subgraph>, Error> {
    let y = cut.tensor(y)?;
    let (from, to) = (cut.see(x)?, StridedView::own(y));
    if let Some(strides) = reshaped(&from.dims, &from.strides, &to.dims) {
        return Ok(vec![copy(&to.dims.clone(), &StridedView { dims: to.dims.clone(), strides, ..from }, &to)?]);
    }
    if let Some(strides) = reshaped(&to.dims, &to.strides, &from.dims) {
        return Ok(vec![copy(&from.dims.clone(), &from, &StridedView { dims: from.dims.clone(), strides, ..to })?]);
    }
    let packed = StridedView::own(&cut.make(y, &from.dims)?);
    let again = reshaped(&packed.dims, &packed.strides, &to.dims);
    let strides = again.ok_or_else(|| Error::Unsupported { op: y.name.clone(), rule: "packed elements have any dims" })?;
    let second = StridedView { dims: to.dims.clone(), strides, ..packed.clone() };
    Ok(vec![copy(&from.dims, &from, &packed)?, copy(&to.dims, &second, &to)?])
}
