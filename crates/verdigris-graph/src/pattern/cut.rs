//! Which ops belong to one problem.

use std::collections::{BTreeSet, HashMap};

use verdigris_tensor::DType;

use crate::error::Error;
use crate::graph::Graph;
use crate::op::Op;
use crate::ops::conv::{Conv, ConvDirection};
use crate::ops::movement::Movement;
use crate::ops::pointwise::{BinaryOp, Pointwise};
use crate::ops::reduction::ReductionOp;
use crate::tensor::{TensorDesc, Uid};

use super::seen::{Seen, sources};

/// The most tensors in memory, host scalars among them, of one part: a kernel's parameters are limited, and what is larger gains nothing
/// from being one. A convolution's sums come on top.
const PART_TENSORS: usize = 24;
/// The most ops of one part.
const PART_OPS: usize = 96;

/// Whether an op has a problem of its own, to which others may come.
pub(super) fn is_anchor(op: &Op) -> bool {
    !matches!(op, Op::Pointwise(_) | Op::Movement(_))
}

/// A graph whose ops are being gathered into parts.
pub(super) struct Cut<'g> {
    /// The graph.
    pub(super) graph: &'g Graph,
    tensors: HashMap<Uid, &'g TensorDesc>,
    producer: HashMap<Uid, usize>,
    /// The ops that read a tensor, each once.
    readers: HashMap<Uid, Vec<usize>>,
    /// The part of each op: the number of one of its ops.
    part: Vec<usize>,
    /// Virtual tensors that are only another way to see memory.
    seen: HashMap<Uid, Seen>,
    /// Temporaries that the graph does not have.
    made: Vec<TensorDesc>,
}

impl<'g> Cut<'g> {
    /// Every op by itself; movements that need no op are known.
    pub(super) fn new(graph: &'g Graph) -> Result<Cut<'g>, Error> {
        let mut cut = Cut {
            graph,
            tensors: graph.tensors.iter().map(|tensor| (tensor.uid, tensor)).collect(),
            producer: HashMap::new(),
            readers: HashMap::new(),
            part: (0..graph.nodes.len()).collect(),
            seen: HashMap::new(),
            made: Vec::new(),
        };
        for (i, node) in graph.nodes.iter().enumerate() {
            for uid in node.op.outputs() {
                cut.producer.insert(uid, i);
            }
            for uid in node.op.inputs().into_iter().collect::<BTreeSet<Uid>>() {
                cut.readers.entry(uid).or_default().push(i);
            }
        }
        for node in &graph.nodes {
            let Op::Movement(movement) = &node.op else { continue };
            let y = cut.tensor(movement.output())?;
            if !y.is_virtual {
                continue;
            }
            let seen = cut.see(sources(&node.op)[0])?.moved(movement, y.layout.dims());
            if let Some(seen) = seen
                && cut.readers(y.uid).iter().all(|&reader| takes(&graph.nodes[reader].op, &seen))
            {
                cut.seen.insert(y.uid, seen);
            }
        }
        Ok(cut)
    }

    /// The tensor of this uid.
    pub(super) fn tensor(&self, uid: Uid) -> Result<&'g TensorDesc, Error> {
        self.tensors.get(&uid).copied().ok_or_else(|| Error::UnknownTensor { op: self.graph.name.clone(), uid })
    }

    /// Where a tensor's elements lie.
    pub(super) fn see(&self, uid: Uid) -> Result<Seen, Error> {
        match self.seen.get(&uid) {
            Some(seen) => Ok(seen.clone()),
            None => self.tensor(uid).map(Seen::own),
        }
    }

    /// Whether this is only another way to see memory.
    pub(super) fn is_seen(&self, uid: Uid) -> bool {
        self.seen.contains_key(&uid)
    }

    /// The tensor as one that begins where its buffer does. Those who take no other were asked before it was made a view.
    pub(super) fn operand(&self, uid: Uid) -> Result<TensorDesc, Error> {
        let tensor = self.tensor(uid)?;
        Ok(self.seen.get(&uid).and_then(|seen| seen.as_tensor(&tensor.name)).unwrap_or_else(|| tensor.clone()))
    }

    fn readers(&self, uid: Uid) -> &[usize] {
        self.readers.get(&uid).map_or(&[], Vec::as_slice)
    }

    /// Whether a tensor must lie in memory: it is stored, or another part reads it.
    pub(super) fn in_memory(&self, uid: Uid) -> bool {
        let is_virtual = self.tensors.get(&uid).is_some_and(|tensor| tensor.is_virtual);
        let elsewhere = |&writer: &usize| self.readers(uid).iter().any(|&reader| self.part[reader] != self.part[writer]);
        !is_virtual || (!self.is_seen(uid) && self.producer.get(&uid).is_none_or(elsewhere))
    }

    /// Another temporary, of the type and dims of `like`, packed.
    pub(super) fn make(&mut self, like: &TensorDesc, dims: &[u64]) -> Result<TensorDesc, Error> {
        let last = self.graph.tensors.iter().chain(&self.made).map(|tensor| tensor.uid.0).max().unwrap_or(0);
        // Past the last uid there may be none; then the gaps below are searched.
        let is_free = |uid: &i64| !self.tensors.contains_key(&Uid(*uid)) && self.made.iter().all(|made| made.uid.0 != *uid);
        let uid = last.checked_add(1).or_else(|| (0..i64::MAX).find(is_free)).unwrap_or(0);
        let layout = verdigris_tensor::Layout::row_major(dims).map_err(|source| Error::Layout { tensor: like.name.clone(), source })?;
        let tensor = TensorDesc { is_virtual: true, ..TensorDesc::new(Uid(uid), &format!("{} packed", like.name), like.dtype, layout) };
        self.made.push(tensor.clone());
        Ok(tensor)
    }

    /// The tensors between parts, in the order in which they are written; then those made here.
    pub(super) fn temporaries(self) -> Vec<TensorDesc> {
        let written = self.graph.nodes.iter().flat_map(|node| node.op.outputs());
        let between = written.filter_map(|uid| self.tensors.get(&uid).copied()).filter(|tensor| tensor.is_virtual);
        let mut list: Vec<TensorDesc> = between.filter(|tensor| self.in_memory(tensor.uid)).cloned().collect();
        list.extend(self.made);
        list
    }

    // ---- gathering -----------------------------------------------------------------------------------------------------

    /// Puts `op` into the part of `host`, unless parts would then wait for each other.
    fn join(&mut self, op: usize, host: usize) -> bool {
        let before = self.part.clone();
        let (from, to) = (self.part[op], self.part[host]);
        if from == to {
            return true;
        }
        self.part.iter_mut().filter(|part| **part == from).for_each(|part| *part = to);
        if self.order().is_some() {
            return true;
        }
        self.part = before;
        false
    }

    /// As [`Cut::join`], unless the part would then have more than a kernel takes.
    fn join_small(&mut self, op: usize, host: usize) -> bool {
        let before = self.part.clone();
        if self.join(op, host) && self.is_small(&self.members(self.part[host])) {
            return true;
        }
        self.part = before;
        false
    }

    /// Whether one part may have all these ops.
    fn is_small(&self, ops: &[usize]) -> bool {
        let nodes = ops.iter().map(|&i| &self.graph.nodes[i].op);
        let uids: BTreeSet<Uid> = nodes.flat_map(|op| op.inputs().into_iter().chain(op.outputs())).collect();
        let lie_in_memory = uids.iter().filter(|&&uid| self.in_memory(uid) || self.is_seen(uid)).count();
        ops.len() <= PART_OPS && lie_in_memory <= PART_TENSORS
    }

    /// The parts in an order in which each can run, earliest ops first; `None` if some wait for each other.
    fn order(&self) -> Option<Vec<usize>> {
        let mut waits: HashMap<usize, BTreeSet<usize>> = HashMap::new();
        let mut first: HashMap<usize, usize> = HashMap::new();
        for (i, node) in self.graph.nodes.iter().enumerate() {
            let part = self.part[i];
            first.entry(part).or_insert(i);
            let writers = node.op.inputs().into_iter().filter_map(|uid| self.producer.get(&uid)).map(|&writer| self.part[writer]);
            waits.entry(part).or_default().extend(writers.filter(|&other| other != part));
        }
        let mut followers: HashMap<usize, Vec<usize>> = HashMap::new();
        for (&part, writers) in &waits {
            writers.iter().for_each(|&writer| followers.entry(writer).or_default().push(part));
        }
        let mut open: HashMap<usize, usize> = waits.iter().map(|(&part, writers)| (part, writers.len())).collect();
        let mut ready: BTreeSet<(usize, usize)> =
            open.iter().filter(|(_, count)| **count == 0).map(|(&part, _)| (first[&part], part)).collect();
        let mut order = Vec::new();
        while let Some((_, part)) = ready.pop_first() {
            order.push(part);
            for &follower in followers.get(&part).map_or(&[][..], Vec::as_slice) {
                let count = open.get_mut(&follower)?;
                *count -= 1;
                if *count == 0 {
                    ready.insert((first[&follower], follower));
                }
            }
        }
        (order.len() == first.len()).then_some(order)
    }

    /// The ops of each part, parts in an order in which each can run. Movements that need no op are left out.
    pub(super) fn in_order(&self) -> Vec<Vec<usize>> {
        let members = |part: &usize| {
            (0..self.graph.nodes.len()).filter(|&i| self.part[i] == *part && !self.is_seen(self.graph.nodes[i].op.output())).collect()
        };
        // Every join has kept the order possible.
        let order = self.order().unwrap_or_default();
        order.iter().map(members).filter(|members: &Vec<usize>| !members.is_empty()).collect()
    }

    fn is_alone(&self, op: usize) -> bool {
        self.part.iter().filter(|&&part| part == self.part[op]).count() == 1
    }

    /// Gathers what stands before and behind each anchor.
    pub(super) fn grow_anchors(&mut self) -> Result<(), Error> {
        for anchor in 0..self.graph.nodes.len() {
            // Sums that a convolution forms belong to it.
            if self.part[anchor] != anchor {
                continue;
            }
            match &self.graph.nodes[anchor].op {
                Op::Matmul(matmul) => {
                    let computed = matmul.precision.epilogue();
                    self.follow(anchor, matmul.d, |cut, pointwise, _| cut.in_epilogue(pointwise, computed))?;
                }
                Op::Conv(conv) => {
                    let computed = conv.precision.epilogue();
                    self.gather_prologue(anchor, conv)?;
                    let result = self.follow(anchor, conv.output(), |cut, pointwise, _| cut.in_epilogue(pointwise, computed))?;
                    self.take_statistics(anchor, conv, result)?;
                }
                Op::Reduction(reduction) => {
                    self.gather_before(anchor, reduction.x)?;
                    // What is stored on the way is not read again by the same launch, of which no CTA waits for another.
                    let made_here = |cut: &Self, uid: Uid, current: Uid| uid != current && cut.is_written_in(uid, anchor);
                    self.follow(anchor, reduction.y, |cut, pointwise, current| {
                        !pointwise.operands().into_iter().any(|uid| made_here(cut, uid, current))
                    })?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether an epilogue that computes in this type has this step.
    fn in_epilogue(&self, pointwise: &Pointwise, computed: DType) -> bool {
        let has_it = match pointwise {
            Pointwise::Unary { f, .. } => f.in_epilogue(),
            Pointwise::Binary { f, .. } => f.in_epilogue(),
            Pointwise::Scale { .. } => true,
            Pointwise::Ternary { .. } | Pointwise::GenIndex { .. } => false,
        };
        let types = pointwise.operands().into_iter().filter_map(|uid| self.tensors.get(&uid)).map(|tensor| tensor.dtype);
        has_it && (computed == DType::F64 || Pointwise::compute_dtype(types) == computed)
    }

    /// Takes the chain of ops behind `current`; the tensor at its end.
    fn follow(&mut self, anchor: usize, mut current: Uid, fits: impl Fn(&Self, &Pointwise, Uid) -> bool) -> Result<Uid, Error> {
        loop {
            let [reader] = *self.readers(current) else { return Ok(current) };
            let Op::Pointwise(pointwise) = &self.graph.nodes[reader].op else { return Ok(current) };
            let operands = pointwise.operands();
            let once = operands.iter().filter(|&&uid| uid == current).count() == 1;
            // What another part computes lies in memory then; join sees to it that it can be computed before.
            let mut others = operands.iter().filter(|&&uid| uid != current);
            let others_begin_their_buffers = others.all(|&uid| self.see(uid).is_ok_and(|seen| seen.offset == 0));
            let same_dims = self.tensor(pointwise.output())?.layout.dims() == self.tensor(current)?.layout.dims();
            if !(once
                && others_begin_their_buffers
                && same_dims
                && fits(self, pointwise, current)
                && self.is_alone(reader)
                && self.join_small(reader, anchor))
            {
                return Ok(current);
            }
            current = pointwise.output();
        }
    }

    /// Takes the sums that a batch norm needs of a convolution's result: of its values and of their squares, over all but its channels, where both
    /// are asked for. The result lies in memory, in lines of channels: what lies otherwise is summed up by a reduction.
    fn take_statistics(&mut self, anchor: usize, conv: &Conv, result: Uid) -> Result<(), Error> {
        let tensor = self.tensor(result)?;
        let (computed, layout) = (conv.precision.epilogue(), &tensor.layout);
        let axes: Vec<u32> = (0..layout.dims().len() as u32).filter(|&axis| axis != 1).collect();
        let is_stored = |dtype| matches!(dtype, DType::Bf16 | DType::F16 | DType::F32 | DType::F64);
        let lies_in_lines = |uid: Uid| self.see(uid).is_ok_and(|seen| seen.strides[1] == 1 || seen.dims[1] == 1);
        let fits = conv.direction != ConvDirection::Wgrad && is_stored(tensor.dtype) && !layout.dims().contains(&0);
        if !(fits && layout.strides()[1] == 1 && lies_in_lines(super::conv::activations(conv))) {
            return Ok(());
        }
        let is_sum = |op: usize, x: Uid| match &self.graph.nodes[op].op {
            Op::Reduction(sum) => {
                let types = [x, sum.y].map(|uid| self.tensors.get(&uid).map(|tensor| tensor.dtype));
                let in_type = types[0].is_some_and(|dtype| Pointwise::compute_dtype([dtype]) == computed);
                sum.f == ReductionOp::Add && sum.axes == axes && in_type && types[1] == Some(computed) && self.is_alone(op)
            }
            _ => false,
        };
        let sum = self.readers(result).iter().copied().find(|&op| is_sum(op, result));
        let squared = |op: usize| {
            let Op::Pointwise(Pointwise::Binary { f: BinaryOp::Mul, x, z, y }) = &self.graph.nodes[op].op else { return None };
            let square = self.tensors.get(y).filter(|square| square.is_virtual && square.dtype == computed)?;
            let same = (*x, *z) == (result, result) && square.layout.dims() == layout.dims() && self.is_alone(op);
            let [reader] = *self.readers(*y) else { return None };
            (same && is_sum(reader, *y)).then_some([op, reader])
        };
        let squares = self.readers(result).iter().find_map(|&op| squared(op));
        let (Some(sum), Some([square, sum_of_squares])) = (sum, squares) else { return Ok(()) };
        let ours = [sum, square, sum_of_squares];
        if tensor.is_virtual && self.readers(result).iter().all(|reader| ours.contains(reader)) {
            return Ok(());
        }
        let before = self.part.clone();
        if !ours.into_iter().all(|op| self.join(op, anchor)) {
            self.part = before;
        }
        Ok(())
    }

    /// The op that writes a tensor.
    pub(super) fn writer(&self, uid: Uid) -> Option<usize> {
        self.producer.get(&uid).copied()
    }

    /// Takes the longest chain that makes a convolution's activations, and nothing else, from a tensor of the same type.
    fn gather_prologue(&mut self, anchor: usize, conv: &Conv) -> Result<(), Error> {
        let activations = super::conv::activations(conv);
        let made = self.tensor(activations)?;
        let dims = made.layout.dims();
        let reads = self.graph.nodes[anchor].op.inputs();
        if reads.iter().filter(|&&uid| uid == activations).count() != 1 {
            return Ok(());
        }
        let computed = conv.precision.epilogue();
        let mut whole = self.part.clone();
        let (mut current, mut reader) = (activations, anchor);
        while let Some(writer) = self.writer(current)
            && self.tensor(current)?.is_virtual
            && !self.is_seen(current)
            && *self.readers(current) == [reader]
            && self.is_alone(writer)
            && let Op::Pointwise(pointwise) = &self.graph.nodes[writer].op
            && self.in_epilogue(pointwise, computed)
            && let Some(before) = self.in_prologue(pointwise, dims)?
            && self.join_small(writer, anchor)
        {
            (current, reader) = (before.value, writer);
            // What is loaded from a view of other memory begins where its buffer does; and activations are stored as they are multiplied.
            if self.tensor(current)?.dtype == made.dtype && self.see(current)?.offset == 0 {
                whole = self.part.clone();
            }
        }
        self.part = whole;
        Ok(())
    }

    /// Takes the pointwise ops that make `x`: those whose results nobody else reads, and those that are stored on the way.
    fn gather_before(&mut self, anchor: usize, x: Uid) -> Result<(), Error> {
        let dims = self.tensor(x)?.layout.dims().to_vec();
        let behind = self.behind(anchor);
        let mut wanted = vec![x];
        while let Some(uid) = wanted.pop() {
            let Some(&writer) = self.producer.get(&uid) else { continue };
            let Op::Pointwise(pointwise) = &self.graph.nodes[writer].op else { continue };
            let tensor = self.tensor(uid)?;
            let ours = self.part[anchor];
            let only_here = tensor.is_virtual && self.readers(uid).iter().all(|&reader| self.part[reader] == ours);
            if tensor.layout.dims() == dims
                && (only_here || self.may_store_before(tensor, pointwise, ours, &behind))
                && self.is_alone(writer)
            {
                let whole = self.part.clone();
                if self.join_small(writer, anchor) && (only_here || !self.reads_itself(ours)) {
                    wanted.extend(pointwise.operands());
                } else {
                    self.part = whole;
                }
            }
        }
        Ok(())
    }

    /// Whether a reduction's part may compute and store a tensor that lies in memory in any case: elements lie as those that they are made of,
    /// so that both are accessed alike; these lie in memory too or are computed for this alone, so that no map has to store them for it; and
    /// nobody else who reads it could have computed it for himself.
    fn may_store_before(&self, tensor: &TensorDesc, pointwise: &Pointwise, ours: usize, behind: &BTreeSet<usize>) -> bool {
        let is_pointwise = |op: usize| matches!(self.graph.nodes[op].op, Op::Pointwise(_));
        let elsewhere = |&&reader: &&usize| self.part[reader] != ours;
        let mut others = self.readers(tensor.uid).iter().filter(elsewhere);
        let operand = |uid: &Uid| {
            let Some(operand) = self.tensors.get(uid) else { return false };
            let lies_alike =
                operand.layout.dims() != tensor.layout.dims() || self.see(*uid).is_ok_and(|seen| seen.strides == tensor.layout.strides());
            let writer = self.producer.get(uid).copied().filter(|&writer| is_pointwise(writer) && self.part[writer] != ours);
            let stands = writer.is_none() || !operand.is_virtual || self.readers(*uid).len() == 1;
            lies_alike && stands
        };
        others.all(|&reader| !is_pointwise(reader) || behind.contains(&reader)) && pointwise.operands().iter().all(operand)
    }

    /// The ops that wait for this one.
    fn behind(&self, op: usize) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let mut open = vec![op];
        while let Some(op) = open.pop() {
            for uid in self.graph.nodes[op].op.outputs() {
                open.extend(self.readers(uid).iter().copied().filter(|&reader| found.insert(reader)));
            }
        }
        found
    }

    /// Whether this tensor, or what it is a view of, is written by the part of an op.
    fn is_written_in(&self, uid: Uid, op: usize) -> bool {
        let base = self.seen.get(&uid).map_or(uid, |seen| seen.uid);
        self.producer.get(&base).is_some_and(|&writer| self.part[writer] == self.part[op])
    }

    fn members(&self, part: usize) -> Vec<usize> {
        (0..self.part.len()).filter(|&op| self.part[op] == part).collect()
    }

    /// Gathers pointwise ops and copies over equal dims that hang together.
    pub(super) fn grow_maps(&mut self) {
        for op in 0..self.graph.nodes.len() {
            if !self.in_map(op) {
                continue;
            }
            let inputs = self.graph.nodes[op].op.inputs();
            let mut neighbours: Vec<usize> = inputs.iter().filter_map(|uid| self.producer.get(uid).copied()).collect();
            // Ops that read the same tensor read it once when they stand together.
            let same = inputs.iter().filter(|uid| self.tensors.get(uid).is_some_and(|tensor| tensor.layout.elements() > 1));
            neighbours.extend(same.flat_map(|&uid| self.readers(uid).iter().copied().filter(|&reader| reader < op)));
            for neighbour in neighbours {
                if self.in_map(neighbour) && self.part[neighbour] != self.part[op] && self.fit_together(op, neighbour) {
                    let before = self.part.clone();
                    if self.join(op, neighbour) && !self.reads_itself(self.part[op]) {
                        continue;
                    }
                    self.part = before;
                }
            }
        }
    }

    /// Whether an op may stand in a map with others.
    fn in_map(&self, op: usize) -> bool {
        let node = &self.graph.nodes[op].op;
        let kind = match node {
            Op::Pointwise(_) => true,
            Op::Movement(Movement::Concat { .. }) => false,
            Op::Movement(movement @ Movement::Reshape { .. }) => {
                let dims = self.tensors.get(&movement.output()).map(|tensor| tensor.layout.dims());
                let seen = self.see(sources(node)[0]);
                dims.zip(seen.ok()).is_some_and(|(dims, seen)| seen.moved(movement, dims).is_some())
            }
            Op::Movement(_) => true,
            _ => false,
        };
        let no_anchor = || (0..self.part.len()).all(|i| self.part[i] != self.part[op] || !is_anchor(&self.graph.nodes[i].op));
        kind && !self.is_seen(node.output()) && no_anchor()
    }

    fn fit_together(&self, one: usize, other: usize) -> bool {
        let dims = |op: usize| self.tensors.get(&self.graph.nodes[op].op.output()).map(|tensor| tensor.layout.dims());
        let both: Vec<usize> =
            (0..self.part.len()).filter(|&i| self.part[i] == self.part[one] || self.part[i] == self.part[other]).collect();
        dims(one) == dims(other) && self.is_small(&both)
    }

    /// Whether an op of a part reads, from memory, what the part writes: a copy reads its source there, and another reads through a view.
    fn reads_itself(&self, part: usize) -> bool {
        (0..self.part.len()).filter(|&i| self.part[i] == part).any(|i| {
            let node = &self.graph.nodes[i].op;
            let from_memory = |uid: &Uid| matches!(node, Op::Movement(_)) || self.is_seen(*uid);
            node.inputs().iter().filter(|uid| from_memory(uid)).any(|&uid| {
                let base = self.seen.get(&uid).map_or(uid, |seen| seen.uid);
                self.producer.get(&base).is_some_and(|&writer| self.part[writer] == part)
            })
        })
    }
}

/// Whether an op reads what strides and an offset can say.
fn takes(op: &Op, seen: &Seen) -> bool {
    match op {
        Op::Matmul(_) | Op::Conv(_) => seen.as_tensor("").is_some(),
        _ => true,
    }
}
