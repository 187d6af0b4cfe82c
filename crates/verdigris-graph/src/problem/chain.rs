//! Straight-line computation at each point of an iteration space: what a map computes, and what stands before and behind a reduction.
//!
//! A [`Chain`] is a list of [`ChainStep`]s, each of which gives a value that later steps name by its position. Every value has an element
//! type ([`Chain::dtypes`]): what is loaded has that of its buffer; functions compute in f64 if an operand is f64, else in f32, and operands
//! of other types are converted when they are used; rounding gives the type rounded to. A value that goes from a load to a store untouched
//! keeps all its bits.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use super::{Access, Operand, Slot, finite, views};
use crate::error::Error;
use crate::op::{HostScalar, Real};
use crate::ops::pointwise::{BinaryOp, Drawn, Pointwise, TernaryOp, UnaryOp};

/// Where the elements of a buffer lie in an iteration space.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct View {
    /// The buffer.
    pub slot: Slot,
    /// Its element type.
    pub dtype: DType,
    /// Elements of the buffer before that of index 0.
    pub offset: u64,
    /// Elements from one index to the next, one for each dim of the space; 0 repeats.
    pub strides: Vec<u64>,
}

/// The part of an iteration space in which a load reads, and what stands elsewhere. The view's index 0 is the window's first corner.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// The first index inside, for each dim.
    pub first: Vec<u64>,
    /// The first index behind, for each dim.
    pub end: Vec<u64>,
    /// The value outside, rounded to the type of the view.
    pub fill: Real,
    /// An earlier load of the same type, whose element stands outside instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<u32>,
}

/// The place of a row along an axis of a buffer, as a number in memory tells it: `length − rows + Σ index[d] · coordinate[d]`. What stands at a place below 0, or
/// from `extent` on, is not stored.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowPlace {
    /// The position of a load of i32: how many rows count, with those that are stored.
    pub length: u32,
    /// Rows that are stored.
    pub rows: u64,
    /// Rows that there is room for.
    pub extent: u64,
    /// Elements from one row of the buffer to the next.
    pub stride: u64,
    /// Which row an index is of, one stride for each dim of the space. Along those that are not 0 the view has none.
    pub coordinate: Vec<u64>,
}

/// One step; `x`, `z` and `t` are positions of earlier steps.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChainStep {
    /// An element of a buffer.
    Load {
        /// Where.
        from: View,
        /// Where not, if anywhere.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        window: Option<Window>,
    },
    /// An element of a table, of score functions alone: of those along its last dim the one that `x` says, rounded to a whole number, ties to even; below the first the first, and
    /// behind the last the last.
    Gather {
        /// The table.
        from: View,
        /// Elements along its last dim.
        extent: u64,
        /// The place.
        x: u32,
    },
    /// What is handed to the chain: the result of the reduction that it stands behind.
    Given,
    /// A factor from the host; of the type that the function using it computes in.
    Scalar(HostScalar<Slot>),
    /// A coordinate, `Σ index[d] · strides[d]`, as an exact integer.
    Index {
        /// One for each dim.
        strides: Vec<u64>,
    },
    /// Half of an integer from the host, as an i32 of the same bits.
    Half {
        /// The host scalar, of i64.
        slot: Slot,
        /// The upper 32 bits, not the lower.
        upper: bool,
    },
    /// A random number in f32: what [`Pointwise::Random`] has at element number `Σ index[d] · strides[d]`.
    Random {
        /// How it is distributed.
        distribution: Drawn,
        /// The words of seed and offset, low halves first: loads of i32, or halves of integers from the host.
        state: [u32; 4],
        /// One for each dim.
        strides: Vec<u64>,
    },
    /// `f(x)`.
    Unary {
        /// The function.
        f: UnaryOp,
        /// Its operand.
        x: u32,
    },
    /// `f(x, z)`.
    Binary {
        /// The function.
        f: BinaryOp,
        /// Left.
        x: u32,
        /// Right.
        z: u32,
    },
    /// `f(x, z, t)`.
    Ternary {
        /// The function.
        f: TernaryOp,
        /// First.
        x: u32,
        /// Second.
        z: u32,
        /// Third.
        t: u32,
    },
    /// `x`, as if it had been stored as `dtype` and read again.
    Round {
        /// The type.
        dtype: DType,
        /// The value.
        x: u32,
    },
    /// Stores `x`, rounded to the type of the buffer. Gives no value that may be named.
    Store {
        /// The value.
        x: u32,
        /// Where.
        to: View,
        /// The row of the buffer, where that is told by a number in memory.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at: Option<RowPlace>,
    },
}

impl ChainStep {
    /// The positions of its operands.
    pub fn operands(&self) -> Vec<u32> {
        match *self {
            ChainStep::Load { ref window, .. } => window.as_ref().and_then(|window| window.over).into_iter().collect(),
            ChainStep::Given | ChainStep::Scalar(_) | ChainStep::Index { .. } | ChainStep::Half { .. } => Vec::new(),
            ChainStep::Unary { x, .. } | ChainStep::Round { x, .. } | ChainStep::Gather { x, .. } => vec![x],
            ChainStep::Store { x, ref at, .. } => [x].into_iter().chain(at.as_ref().map(|at| at.length)).collect(),
            ChainStep::Random { state, .. } => state.to_vec(),
            ChainStep::Binary { x, z, .. } => vec![x, z],
            ChainStep::Ternary { x, z, t, .. } => vec![x, z, t],
        }
    }

    fn operands_mut(&mut self) -> Vec<&mut u32> {
        match self {
            ChainStep::Load { window, .. } => window.as_mut().and_then(|window| window.over.as_mut()).into_iter().collect(),
            ChainStep::Given | ChainStep::Scalar(_) | ChainStep::Index { .. } | ChainStep::Half { .. } => Vec::new(),
            ChainStep::Unary { x, .. } | ChainStep::Round { x, .. } | ChainStep::Gather { x, .. } => vec![x],
            ChainStep::Store { x, at, .. } => [x].into_iter().chain(at.as_mut().map(|at| &mut at.length)).collect(),
            ChainStep::Random { state, .. } => state.iter_mut().collect(),
            ChainStep::Binary { x, z, .. } => vec![x, z],
            ChainStep::Ternary { x, z, t, .. } => vec![x, z, t],
        }
    }

    /// What it reads or writes in memory.
    pub fn view(&self) -> Option<&View> {
        match self {
            ChainStep::Load { from: view, .. } | ChainStep::Gather { from: view, .. } | ChainStep::Store { to: view, .. } => Some(view),
            _ => None,
        }
    }

    /// The place of its row, where a number in memory tells it.
    pub fn row_place(&self) -> Option<&RowPlace> {
        if let ChainStep::Store { at, .. } = self { at.as_ref() } else { None }
    }

    /// Its strides over the space: those of its view, and of what counts.
    fn strides(&self) -> impl Iterator<Item = &Vec<u64>> {
        let own = match self {
            ChainStep::Index { strides } | ChainStep::Random { strides, .. } => Some(strides),
            step => step.view().map(|view| &view.strides),
        };
        own.into_iter().chain(self.row_place().map(|at| &at.coordinate))
    }

    fn strides_mut(&mut self) -> impl Iterator<Item = &mut Vec<u64>> {
        let (own, counted) = match self {
            ChainStep::Store { to: View { strides, .. }, at, .. } => (Some(strides), at.as_mut().map(|at| &mut at.coordinate)),
            ChainStep::Load { from: View { strides, .. }, .. }
            | ChainStep::Gather { from: View { strides, .. }, .. }
            | ChainStep::Index { strides }
            | ChainStep::Random { strides, .. } => (Some(strides), None),
            _ => (None, None),
        };
        own.into_iter().chain(counted)
    }

    fn window_mut(&mut self) -> Option<&mut Window> {
        if let ChainStep::Load { window, .. } = self { window.as_mut() } else { None }
    }
}

/// Steps in order.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Chain {
    /// The steps.
    pub steps: Vec<ChainStep>,
}

impl Chain {
    /// Adds a step and returns its position.
    pub fn push(&mut self, step: ChainStep) -> u32 {
        self.steps.push(step);
        self.steps.len() as u32 - 1
    }

    /// The type of each step's value; `given` is that of [`ChainStep::Given`]. A coordinate is i64. A factor stands as f32 here and takes the
    /// type of the function that uses it; so does an operand that does not exist.
    pub fn dtypes(&self, given: DType) -> Vec<DType> {
        let mut dtypes: Vec<DType> = Vec::with_capacity(self.steps.len());
        for step in &self.steps {
            let of = |x: u32| dtypes.get(x as usize).copied().unwrap_or(DType::F32);
            dtypes.push(match *step {
                ChainStep::Load { ref from, .. } | ChainStep::Gather { ref from, .. } => from.dtype,
                ChainStep::Given => given,
                ChainStep::Scalar(_) => DType::F32,
                ChainStep::Index { .. } => DType::I64,
                ChainStep::Half { .. } => DType::I32,
                ChainStep::Random { .. } => DType::F32,
                ChainStep::Round { dtype, .. } => dtype,
                ChainStep::Store { x, .. } => of(x),
                ChainStep::Unary { .. } | ChainStep::Binary { .. } | ChainStep::Ternary { .. } => {
                    Pointwise::compute_dtype(step.operands().into_iter().map(of))
                }
            });
        }
        dtypes
    }

    /// Steps that compute.
    pub fn functions(&self) -> usize {
        let computes = |step: &&ChainStep| {
            matches!(step, ChainStep::Unary { .. } | ChainStep::Binary { .. } | ChainStep::Ternary { .. } | ChainStep::Random { .. })
        };
        self.steps.iter().filter(computes).count()
    }

    /// The stores.
    pub fn stores(&self) -> impl Iterator<Item = &View> {
        self.steps.iter().filter_map(|step| if let ChainStep::Store { to, .. } = step { Some(to) } else { None })
    }

    /// The loads, those from tables among them.
    pub fn loads(&self) -> impl Iterator<Item = (&View, Option<&Window>)> {
        self.steps.iter().filter_map(|step| match step {
            ChainStep::Load { from, window } => Some((from, window.as_ref())),
            ChainStep::Gather { from, .. } => Some((from, None)),
            _ => None,
        })
    }

    pub(super) fn visit_slots(&mut self, visit: &mut dyn FnMut(&mut Slot)) {
        for step in &mut self.steps {
            match step {
                ChainStep::Load { from: view, .. } | ChainStep::Gather { from: view, .. } | ChainStep::Store { to: view, .. } => {
                    visit(&mut view.slot);
                }
                ChainStep::Scalar(HostScalar::Bound(slot)) | ChainStep::Half { slot, .. } => visit(slot),
                _ => {}
            }
        }
    }

    pub(super) fn scalars(&self) -> impl Iterator<Item = Slot> {
        self.steps.iter().filter_map(|step| match step {
            ChainStep::Scalar(HostScalar::Bound(slot)) | ChainStep::Half { slot, .. } => Some(*slot),
            _ => None,
        })
    }

    /// What [`super::Problem::buffers`] says, for a space of `dims`.
    pub(super) fn buffers(&self, dims: &[u64]) -> Result<Vec<Operand>, Error> {
        let mut list = Vec::new();
        for step in &self.steps {
            let (name, view, access, extents) = match step {
                ChainStep::Load { from, window: None } => ("input", from, Access::ReadInPlace, dims.to_vec()),
                ChainStep::Load { from, window: Some(window) } => {
                    let inside = window.first.iter().zip(&window.end).map(|(&first, &end)| end.saturating_sub(first));
                    ("input", from, Access::Read, inside.collect())
                }
                ChainStep::Store { to, at: None, .. } => ("output", to, Access::Written, dims.to_vec()),
                ChainStep::Store { to, at: Some(at), .. } => {
                    // Rows may come to any place: the dims that count them are one, of as many as there is room for.
                    let kept: Vec<usize> =
                        (0..to.strides.len().min(dims.len())).filter(|&dim| at.coordinate.get(dim) == Some(&0)).collect();
                    let strides = kept.iter().map(|&dim| to.strides[dim]).chain([at.stride]).collect();
                    let extents: Vec<u64> = kept.iter().map(|&dim| dims[dim]).chain([at.extent]).collect();
                    list.push(views::operand("output", &View { strides, ..to.clone() }, &extents, Access::Written)?);
                    continue;
                }
                _ => continue,
            };
            list.push(views::operand(name, view, &extents, access)?);
        }
        Ok(list)
    }

    /// Checks positions, types, strides and attributes.
    pub(super) fn check(&self, op: &str, dims: &[u64], has_given: bool) -> Result<(), Error> {
        let structure = |rule| Err(Error::Structure { op: op.to_owned(), tensor: "chain".to_owned(), rule });
        for (i, step) in self.steps.iter().enumerate() {
            for x in step.operands() {
                match self.steps.get(x as usize) {
                    Some(operand) if (x as usize) < i && !matches!(operand, ChainStep::Store { .. }) => {}
                    _ => return structure("a step names values of earlier steps"),
                }
            }
            match step {
                ChainStep::Given if !has_given => return structure("only what stands behind a reduction is given a value"),
                ChainStep::Gather { .. } => return structure("a table is read by functions of scores alone"),
                ChainStep::Scalar(factor) => finite(op, "factor", factor)?,
                ChainStep::Random { state, .. } => {
                    let is_word = |&x: &u32| {
                        let step = self.steps.get(x as usize);
                        let is_load = matches!(step, Some(ChainStep::Load { from, window: None }) if from.dtype == DType::I32);
                        is_load || matches!(step, Some(ChainStep::Half { .. }))
                    };
                    if !state.iter().all(is_word) {
                        return structure("the words of a random state are loads of i32 or halves of host scalars");
                    }
                }
                ChainStep::Unary { f, .. } => f.check(op)?,
                ChainStep::Binary { f, .. } => f.check(op)?,
                ChainStep::Round { dtype, .. } if !dtype.is_storage() || *dtype == DType::Bool => {
                    let rule = "a value is rounded to a storage type";
                    return Err(Error::DType { op: op.to_owned(), tensor: "chain".to_owned(), got: *dtype, rule });
                }
                _ => {}
            }
            step.strides().try_for_each(|strides| views::check_rank(op, "chain", strides, dims))?;
            if let ChainStep::Store { to, at: Some(at), .. } = step {
                if !matches!(self.steps.get(at.length as usize), Some(ChainStep::Load { from, window: None }) if from.dtype == DType::I32) {
                    return structure("the place of a row is told by a load of i32");
                }
                if to.strides.iter().zip(&at.coordinate).any(|(&stride, &coordinate)| stride != 0 && coordinate != 0) {
                    return structure("along dims that count rows the view of a store has no stride of its own");
                }
            }
            if let ChainStep::Load { window: Some(window), .. } = step
                && !(window.first.len() == dims.len()
                    && window.end.len() == dims.len()
                    && window.first.iter().zip(&window.end).zip(dims).all(|((first, end), dim)| first <= end && end <= dim))
            {
                return structure("a window lies within the space");
            }
            if let ChainStep::Load { from, window: Some(Window { over: Some(over), .. }) } = step
                && !matches!(self.steps.get(*over as usize), Some(ChainStep::Load { from: under, .. }) if under.dtype == from.dtype)
            {
                return structure("a load lies over another of its type");
            }
            if let Some(view) = step.view()
                && (!view.dtype.is_storage() || view.dtype == DType::Bool)
            {
                let rule = "a buffer holds numbers of a storage type";
                return Err(Error::DType { op: op.to_owned(), tensor: "chain".to_owned(), got: view.dtype, rule });
            }
        }
        let operands = self.buffers(dims)?;
        for (i, output) in operands.iter().enumerate().filter(|(_, operand)| operand.access == Access::Written) {
            if output.layout.may_overlap() {
                return structure("what is written has one place for each element");
            }
            for (j, other) in operands.iter().enumerate() {
                if i != j && other.slot == output.slot {
                    let same = (other.dtype, other.offset, &other.layout) == (output.dtype, output.offset, &output.layout);
                    if other.access == Access::Written || other.access == Access::Read || !same {
                        return structure("an output may share its buffer only with inputs of the same elements");
                    }
                }
            }
        }
        Ok(())
    }

    // ---- canonical form ------------------------------------------------------------------------------------------------

    /// Drops roundings and casts that change nothing, then steps whose value nobody uses; `kept` is a value that is used from outside. Returns where
    /// that stands afterwards.
    pub(super) fn simplify(&mut self, given: DType, kept: Option<u32>) -> Option<u32> {
        let mut kept = kept;
        for step in &mut self.steps {
            if let ChainStep::Binary { f, x, z } = step
                && f.is_commutative()
                && *x > *z
            {
                std::mem::swap(x, z);
            }
        }
        for i in 0..self.steps.len() {
            let (rounds_to, x) = match self.steps[i] {
                ChainStep::Round { dtype, x } => (Some(dtype), x),
                ChainStep::Unary { f: UnaryOp::Identity, x } => (None, x),
                _ => continue,
            };
            let own = self.dtypes(given)[x as usize];
            // Floats are computed with as they are; an integer is rounded to the type computed in first.
            let exact = rounds_to.map_or(own.is_float(), |dtype| own == dtype) && !matches!(self.steps[x as usize], ChainStep::Scalar(_));
            for step in self.steps.iter_mut().skip(i + 1) {
                let stores_it = matches!(step, ChainStep::Store { to, .. } if Some(to.dtype) == rounds_to);
                if exact || stores_it {
                    step.operands_mut().into_iter().filter(|operand| **operand as usize == i).for_each(|operand| *operand = x);
                }
            }
            if exact && kept == Some(i as u32) {
                kept = Some(x);
            }
        }
        let mut used = vec![false; self.steps.len()];
        if let Some(kept) = kept {
            used[kept as usize] = true;
        }
        for i in (0..self.steps.len()).rev() {
            used[i] |= matches!(self.steps[i], ChainStep::Store { .. });
            if used[i] {
                self.steps[i].operands().into_iter().for_each(|x| used[x as usize] = true);
            }
        }
        let mut place = 0;
        let places: Vec<u32> = used
            .iter()
            .map(|&used| {
                place += u32::from(used);
                place.saturating_sub(1)
            })
            .collect();
        let mut index = 0;
        self.steps.retain(|_| {
            index += 1;
            used[index - 1]
        });
        for step in &mut self.steps {
            step.operands_mut().into_iter().for_each(|operand| *operand = places[*operand as usize]);
        }
        kept.map(|kept| places[kept as usize])
    }

    /// Whether a dim of extent 1 may go.
    pub(super) fn can_remove(&self, axis: usize) -> bool {
        self.loads().all(|(_, window)| window.is_none_or(|window| (window.first[axis], window.end[axis]) == (0, 1)))
    }

    /// Takes a dim away.
    pub(crate) fn remove(&mut self, axis: usize) {
        for step in &mut self.steps {
            for strides in step.strides_mut() {
                strides.remove(axis);
            }
            if let Some(window) = step.window_mut() {
                window.first.remove(axis);
                window.end.remove(axis);
            }
        }
    }

    /// Whether dim `axis` and the one behind it, of extent `inner`, may become one.
    pub(super) fn can_merge(&self, axis: usize, inner: u64) -> bool {
        self.steps.iter().flat_map(ChainStep::strides).all(|strides| strides[axis + 1].checked_mul(inner) == Some(strides[axis]))
            && self.loads().all(|(_, window)| window.is_none_or(|window| (window.first[axis + 1], window.end[axis + 1]) == (0, inner)))
    }

    /// Makes them one.
    pub(super) fn merge(&mut self, axis: usize, inner: u64) {
        for step in &mut self.steps {
            if let Some(window) = step.window_mut() {
                window.first[axis + 1] = window.first[axis] * inner;
                window.end[axis + 1] = window.end[axis] * inner;
            }
        }
        self.remove(axis);
    }

    /// Puts the dims into another order: dim `i` becomes what `order[i]` was.
    pub(crate) fn permute(&mut self, order: &[usize]) {
        let permuted = |list: &Vec<u64>| order.iter().map(|&i| list[i]).collect::<Vec<u64>>();
        for step in &mut self.steps {
            step.strides_mut().for_each(|strides| *strides = permuted(strides));
            if let Some(window) = step.window_mut() {
                window.first = permuted(&window.first);
                window.end = permuted(&window.end);
            }
        }
    }

    /// The same over dims in another order: dim `i` is what `order[i]` was.
    pub fn permuted(&self, order: &[usize]) -> Chain {
        let mut chain = self.clone();
        chain.permute(order);
        chain
    }

    /// Windows that hold the whole space go; so do the strides of indices that take one value.
    pub(super) fn normalize(&mut self, dims: &[u64]) {
        for step in &mut self.steps {
            for strides in step.strides_mut() {
                strides.iter_mut().zip(dims).filter(|(_, dim)| **dim <= 1).for_each(|(stride, _)| *stride = 0);
            }
            if let ChainStep::Load { window, .. } = step
                && window.as_ref().is_some_and(|window| window.first.iter().all(|&first| first == 0) && window.end == dims)
            {
                *window = None;
            }
        }
    }

    /// What sorts the dims: the strides of the last store, then those of the loads.
    pub(super) fn sort_key(&self, axis: usize) -> Vec<u64> {
        let stores: Vec<u64> = (self.steps.iter())
            .filter_map(|step| match step {
                // Along rows, what lies between them.
                ChainStep::Store { to, at, .. } => {
                    Some(to.strides[axis].max(at.as_ref().map_or(0, |at| at.coordinate[axis].saturating_mul(at.stride))))
                }
                _ => None,
            })
            .collect();
        stores.into_iter().rev().chain(self.loads().map(|(view, _)| view.strides[axis])).collect()
    }
}

/// Drops dims of 1, sorts dims by falling strides and merges those that all chains run through alike. `axes` are the dims (of all chains)
/// that may be touched; returns their new extents. Chains are given with their own first axis.
pub(super) fn canonical_dims(dims: &mut Vec<u64>, first_axis: usize, chains: &mut [&mut Chain], leader: usize) {
    let range = |dims: &Vec<u64>| first_axis..first_axis + dims.len();
    let mut axis = 0;
    while axis < dims.len() {
        if dims[axis] == 1 && chains.iter().all(|chain| chain.can_remove(first_axis + axis)) {
            dims.remove(axis);
            chains.iter_mut().for_each(|chain| chain.remove(first_axis + axis));
        } else {
            axis += 1;
        }
    }
    let mut order: Vec<usize> = range(dims).collect();
    order.sort_by_key(|&axis| std::cmp::Reverse(chains[leader].sort_key(axis)));
    let new_dims: Vec<u64> = order.iter().map(|&i| dims[i - first_axis]).collect();
    *dims = new_dims;
    for chain in chains.iter_mut() {
        let rank = chain.steps.iter().flat_map(ChainStep::strides).next().map_or(first_axis + dims.len(), Vec::len);
        let whole: Vec<usize> = (0..first_axis).chain(order.iter().copied()).chain(first_axis + dims.len()..rank).collect();
        chain.permute(&whole);
    }
    let mut axis = 0;
    while axis + 1 < dims.len() {
        let inner = dims[axis + 1];
        if dims[axis].checked_mul(inner).is_some() && chains.iter().all(|chain| chain.can_merge(first_axis + axis, inner)) {
            chains.iter_mut().for_each(|chain| chain.merge(first_axis + axis, inner));
            dims[axis + 1] *= dims[axis];
            dims.remove(axis);
            axis = axis.saturating_sub(1);
        } else {
            axis += 1;
        }
    }
}
