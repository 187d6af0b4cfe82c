//! Ops gathered into parts, as the table of fusions says ([`super::rules`]).

use verdigris_tensor::{DType, Layout};

use crate::error::Error;
use crate::graph::Graph;
use crate::op::Op;
use crate::ops::movement::Movement;
use crate::ops::pointwise::{BinaryOp, Pointwise};
use crate::ops::reduction::{Reduction, ReductionOp};
use crate::tensor::{TensorDesc, Uid};

use super::account::{Account, Decision};
use super::parts::Parts;
use super::rules::{Fusion, Host, NOTHING_BETWEEN, Walk};
use super::strided_view::StridedView;
use super::web::Web;

/// Of the ops that read a tensor before, so many are asked whether one joins them in a map, the last ones. Of tensors that are read more
/// often, such as a table that all layers share, the earlier readers have their parts and most of what is behind waits for them.
const EARLIER_READERS: usize = 64;
/// What may be looked at for this, for each op: with [`super::parts`]' bound for a single join, what keeps cutting linear in the number of
/// ops.
const WORK_OF_READERS: u64 = 1 << 10;

/// Whether an op has a problem of its own, to which others may come.
pub(super) fn is_anchor(op: &Op) -> bool {
    !matches!(op, Op::Pointwise(_) | Op::Movement(_) | Op::Append(_))
}

/// Where a fusion may happen.
pub(super) struct Site<'s> {
    /// An op of the part.
    pub(super) host: usize,
    /// The op that may come.
    pub(super) op: usize,
    /// The tensor by way of which.
    pub(super) value: usize,
    /// Further ops that come with it.
    pub(super) along: &'s [usize],
}

/// A graph whose ops are being gathered into parts.
pub(super) struct Cut<'g> {
    /// The graph.
    pub(super) graph: &'g Graph,
    /// The graph by number.
    pub(super) web: Web<'g>,
    /// Which ops stand together.
    pub(super) parts: Parts,
    /// Of the virtual tensors that are only another way to see memory: where.
    strided_view: Vec<Option<StridedView>>,
    /// For each op: the writers of what it reads from memory, being a movement or reading a view, and that an op writes.
    reads_memory_of: Vec<Vec<usize>>,
    /// Whether an op can stand in a map, where its part has no anchor.
    is_map: Vec<bool>,
    /// Of each part, whether it has an anchor.
    has_anchor: Vec<bool>,
    /// Temporaries that the graph does not have.
    made: Vec<TensorDesc>,
    decisions: Vec<Decision>,
}

impl<'g> Cut<'g> {
    /// Every op by itself; movements that need no op are known.
    pub(super) fn new(graph: &'g Graph) -> Result<Cut<'g>, Error> {
        let web = Web::new(graph)?;
        let parts = Parts::new(&web);
        let mut cut = Cut {
            graph,
            parts,
            strided_view: vec![None; graph.tensors.len()],
            reads_memory_of: vec![Vec::new(); web.len()],
            is_map: vec![false; web.len()],
            has_anchor: graph.nodes.iter().map(|node| is_anchor(&node.op)).collect(),
            made: Vec::new(),
            decisions: Vec::new(),
            web,
        };
        for op in 0..cut.web.len() {
            let Op::Movement(movement) = cut.web.op(op) else { continue };
            let y = cut.web.outputs(op)[0];
            if !cut.web.tensor(y).is_virtual {
                continue;
            }
            let strided_view = cut.see_number(cut.web.inputs(op)[0]).moved(movement, cut.dims(y));
            if let Some(strided_view) = strided_view
                && cut.web.readers(y).iter().all(|&reader| takes(cut.web.op(reader), &strided_view))
            {
                cut.strided_view[y] = Some(strided_view);
            }
        }
        for op in 0..cut.web.len() {
            let is_movement = matches!(cut.web.op(op), Op::Movement(_));
            // What rows were appended to is no value of a map: it lies in memory.
            let is_appended = |tensor: usize| cut.web.producer(tensor).is_some_and(|writer| matches!(cut.web.op(writer), Op::Append(_)));
            let is_from_memory = |tensor: usize| is_movement || cut.is_view(tensor) || is_appended(tensor);
            let from_memory = cut.web.inputs(op).iter().copied().filter(|&tensor| is_from_memory(tensor));
            cut.reads_memory_of[op] = from_memory.filter_map(|tensor| cut.writer_of_memory(tensor)).collect();
            cut.is_map[op] = cut.can_be_map(op);
        }
        Ok(cut)
    }

    /// The tensor of this uid.
    pub(super) fn tensor(&self, uid: Uid) -> Result<&'g TensorDesc, Error> {
        Ok(self.web.tensor(self.number(uid)?))
    }

    fn number(&self, uid: Uid) -> Result<usize, Error> {
        self.web.number(uid).ok_or_else(|| Error::UnknownTensor { op: self.graph.name.clone(), uid })
    }

    /// The dims of a tensor.
    pub(super) fn dims(&self, tensor: usize) -> &'g [u64] {
        self.web.tensor(tensor).layout.dims()
    }

    /// The dims of the points at which an op of a map is computed: those of its result, of appended rows their own.
    pub(super) fn space(&self, op: usize) -> &'g [u64] {
        match self.web.op(op) {
            Op::Append(append) => self.web.number(append.rows).map_or(&[], |rows| self.dims(rows)),
            _ => self.dims(self.web.outputs(op)[0]),
        }
    }

    /// Where a tensor's elements lie.
    pub(super) fn see(&self, uid: Uid) -> Result<StridedView, Error> {
        Ok(self.see_number(self.number(uid)?))
    }

    /// As [`Cut::see`].
    pub(super) fn see_number(&self, tensor: usize) -> StridedView {
        self.strided_view[tensor].clone().unwrap_or_else(|| StridedView::own(self.web.tensor(tensor)))
    }

    /// Elements from the begin of the buffer to a tensor's first.
    pub(super) fn offset(&self, tensor: usize) -> u64 {
        self.strided_view[tensor].as_ref().map_or(0, |strided_view| strided_view.offset)
    }

    /// Whether this is only another way to see memory.
    pub(super) fn is_view(&self, tensor: usize) -> bool {
        self.strided_view[tensor].is_some()
    }

    /// The tensor as one that begins where its buffer does. Those who take no other were asked before it was made a view.
    pub(super) fn operand(&self, uid: Uid) -> Result<TensorDesc, Error> {
        let number = self.number(uid)?;
        let tensor = self.web.tensor(number);
        Ok(self.strided_view[number]
            .as_ref()
            .and_then(|strided_view| strided_view.as_tensor(&tensor.name))
            .unwrap_or_else(|| tensor.clone()))
    }

    /// The op as a pointwise one.
    pub(super) fn pointwise(&self, op: usize) -> Option<&'g Pointwise> {
        if let Op::Pointwise(pointwise) = self.web.op(op) { Some(pointwise) } else { None }
    }

    /// The op that writes a tensor.
    pub(super) fn writer(&self, uid: Uid) -> Option<usize> {
        self.web.producer(self.web.number(uid)?)
    }

    /// The op that writes a tensor or what it is a view of.
    pub(super) fn writer_of_memory(&self, tensor: usize) -> Option<usize> {
        match &self.strided_view[tensor] {
            Some(strided_view) => self.writer(strided_view.uid),
            None => self.web.producer(tensor),
        }
    }

    /// Whether a tensor must lie in memory: it is stored, or another part reads it.
    pub(super) fn in_memory(&self, uid: Uid) -> bool {
        self.web.number(uid).is_none_or(|tensor| self.is_in_memory(tensor))
    }

    fn is_in_memory(&self, tensor: usize) -> bool {
        let elsewhere = |writer: usize| self.web.readers(tensor).iter().any(|&reader| self.parts.of(reader) != self.parts.of(writer));
        !self.web.tensor(tensor).is_virtual || (!self.is_view(tensor) && self.web.producer(tensor).is_none_or(elsewhere))
    }

    /// Another temporary, of the type and dims of `like`, packed.
    pub(super) fn make(&mut self, like: &TensorDesc, dims: &[u64]) -> Result<TensorDesc, Error> {
        let last = match self.made.last() {
            Some(made) => made.uid.0,
            None => self.graph.tensors.iter().map(|tensor| tensor.uid.0).max().unwrap_or(0),
        };
        // Past the last uid there may be none; then the gaps below are searched.
        let is_free = |uid: &i64| self.web.number(Uid(*uid)).is_none() && self.made.iter().all(|made| made.uid.0 != *uid);
        let uid = last.checked_add(1).filter(is_free).or_else(|| (0..i64::MAX).find(is_free)).unwrap_or(0);
        let layout = Layout::row_major(dims).map_err(|source| Error::Layout { tensor: like.name.clone(), source })?;
        let tensor = TensorDesc { is_virtual: true, ..TensorDesc::new(Uid(uid), &format!("{} packed", like.name), like.dtype, layout) };
        self.made.push(tensor.clone());
        Ok(tensor)
    }

    /// The ops of each part, parts in an order in which each can run. Movements that need no op are left out.
    pub(super) fn in_order(&self) -> Vec<Vec<usize>> {
        let stays = |op: &usize| !self.is_view(self.web.outputs(*op)[0]);
        let parts = self.parts.in_order(&self.web);
        let parts = parts.into_iter().map(|ops| ops.iter().copied().filter(stays).collect());
        parts.filter(|ops: &Vec<usize>| !ops.is_empty()).collect()
    }

    /// The tensors between parts, in the order in which they are written, then those made here; and how it came to these parts, which are
    /// `parts`.
    pub(super) fn finish(self, parts: Vec<Vec<usize>>) -> (Vec<TensorDesc>, Account) {
        let written = (0..self.web.len()).flat_map(|op| self.web.outputs(op)).copied();
        let between = written.filter(|&tensor| self.web.tensor(tensor).is_virtual && self.is_in_memory(tensor));
        let mut list: Vec<TensorDesc> = between.map(|tensor| self.web.tensor(tensor).clone()).collect();
        list.extend(self.made);
        (list, Account { parts, decisions: self.decisions, work: self.parts.work })
    }

    // ---- what conditions ask --------------------------------------------------------------------------------------------

    /// Whether one part may have the ops of both and those that come along.
    pub(super) fn are_small(&mut self, site: &Site<'_>) -> bool {
        let ops = [site.host, site.op].into_iter().chain(site.along.iter().copied());
        let parts: Vec<usize> = ops.map(|op| self.parts.of(op)).collect();
        let strided_view = &self.strided_view;
        self.parts.are_small(&self.web, &|tensor| strided_view[tensor].is_some(), &parts)
    }

    /// As [`Cut::are_small`], where tensors between the two count.
    pub(super) fn both_are_small(&mut self, site: &Site<'_>) -> bool {
        let [one, other] = [site.host, site.op].map(|op| self.parts.of(op));
        self.parts.both_are_small(one, other)
    }

    /// The ops of other parts that read the value.
    pub(super) fn others_who_read(&self, site: &Site<'_>) -> Vec<usize> {
        let ours = self.parts.of(site.host);
        self.web.readers(site.value).iter().copied().filter(|&reader| self.parts.of(reader) != ours).collect()
    }

    /// Whether an op of the two parts reads, from memory, what one of them writes.
    pub(super) fn read_themselves(&self, site: &Site<'_>) -> bool {
        let both = [self.parts.of(site.host), self.parts.of(site.op)];
        let mut ops = both.iter().flat_map(|&part| self.parts.ops(part));
        ops.any(|&op| self.reads_memory_of[op].iter().any(|&writer| both.contains(&self.parts.of(writer))))
    }

    /// Whether an op may stand in a map with others.
    pub(super) fn in_map(&self, op: usize) -> bool {
        self.is_map[op] && !self.has_anchor[self.parts.of(op)]
    }

    fn can_be_map(&self, op: usize) -> bool {
        let node = self.web.op(op);
        let y = self.web.outputs(op)[0];
        let can_be_seen = || match node {
            Op::Movement(movement @ Movement::Reshape { .. }) => {
                self.see_number(self.web.inputs(op)[0]).moved(movement, self.dims(y)).is_some()
            }
            _ => true,
        };
        Host::of(node) == Some(Host::Map) && !self.is_view(y) && can_be_seen()
    }

    /// The ops that draw what a step of an epilogue reads beside its value, from the random numbers on: functions of one operand.
    pub(super) fn drawn_for(&self, op: usize, value: usize) -> Option<Vec<usize>> {
        let others = self.web.inputs(op).iter().filter(|&&tensor| tensor != value);
        others.copied().find_map(|mut tensor| {
            let mut ops = Vec::new();
            loop {
                let op = self.web.producer(tensor)?;
                ops.push(op);
                match self.pointwise(op)? {
                    Pointwise::Random { .. } => break,
                    Pointwise::Unary { x, .. } => tensor = self.web.number(*x)?,
                    _ => return None,
                }
            }
            ops.reverse();
            Some(ops)
        })
    }

    /// Whether an op of these may stand in an epilogue: its result is f32, virtual and read once, and its state is where kernels find it.
    pub(super) fn is_drawn_alone(&self, op: usize) -> bool {
        let y = self.web.outputs(op)[0];
        let result = self.web.tensor(y);
        let is_ours = result.is_virtual && !self.is_view(y) && result.dtype == DType::F32 && self.web.readers(y).len() == 1;
        let can_be = match self.pointwise(op) {
            Some(Pointwise::Unary { f, .. }) => f.in_epilogue(),
            Some(Pointwise::Random { offset: Some(_), .. }) => true,
            Some(Pointwise::Random { state, .. }) => self.web.number(*state).is_some_and(|state| {
                let seen = self.see_number(state);
                seen.offset == 0 && seen.strides == [1]
            }),
            _ => false,
        };
        is_ours && can_be && self.parts.is_alone(op)
    }

    // ---- gathering ------------------------------------------------------------------------------------------------------

    /// Gathers parts as the table says: first what belongs to products, convolutions and reductions, then maps.
    pub(super) fn gather(&mut self) -> Result<(), Error> {
        for maps in [false, true] {
            for op in 0..self.web.len() {
                let Some(host) = Host::of(self.web.op(op)).filter(|&host| (host == Host::Map) == maps) else { continue };
                // Sums that a convolution forms belong to it.
                let is_taken = if maps { !self.in_map(op) } else { self.parts.of(op) != op };
                if is_taken {
                    continue;
                }
                let mut value = self.web.outputs(op)[0];
                for rows in host.fusions() {
                    match rows[0].walk {
                        Walk::Behind => value = self.behind(rows, op, value)?,
                        Walk::Activations => self.activations(rows, op)?,
                        Walk::Ahead => self.ahead(rows, op)?,
                        Walk::Sums => self.sums(rows, op, value)?,
                        Walk::Operands => self.operands(rows, op)?,
                        Walk::Readers => self.readers(rows, op)?,
                    }
                }
            }
        }
        Ok(())
    }

    /// The first row whose conditions hold.
    fn fitting(&mut self, rows: &'static [Fusion], site: &Site<'_>) -> Result<Option<&'static Fusion>, Error> {
        for row in rows {
            let mut broken = None;
            for condition in row.conditions {
                self.parts.work += 1;
                if !(condition.holds)(self, site)? {
                    broken = Some(condition.rule);
                    break;
                }
            }
            let Some(rule) = broken else { return Ok(Some(row)) };
            self.decide(row, site, Some(rule));
        }
        Ok(None)
    }

    fn decide(&mut self, row: &Fusion, site: &Site<'_>, refused: Option<&'static str>) {
        self.decisions.push(Decision { fusion: row.name, host: site.host, op: site.op, refused });
    }

    /// Puts an op into a part as the first row says whose conditions hold.
    fn fuse(&mut self, rows: &'static [Fusion], site: &Site<'_>) -> Result<bool, Error> {
        let Some(row) = self.fitting(rows, site)? else { return Ok(false) };
        Ok(self.join(row, site))
    }

    /// Makes two parts one, unless they would then wait for a third that waits for them.
    fn join(&mut self, row: &Fusion, site: &Site<'_>) -> bool {
        let (from, to) = (self.parts.of(site.op), self.parts.of(site.host));
        let strided_view = &self.strided_view;
        let is_joined = self.parts.join(&self.web, &|tensor| strided_view[tensor].is_some(), from, to);
        if is_joined {
            self.has_anchor[to] |= self.has_anchor[from];
        }
        self.decide(row, site, (!is_joined).then_some(NOTHING_BETWEEN));
        is_joined
    }

    /// [`Walk::Behind`]; the tensor at the end of the chain.
    fn behind(&mut self, rows: &'static [Fusion], host: usize, mut value: usize) -> Result<usize, Error> {
        while let Some(&op) = self.web.readers(value).first() {
            let along = if rows[0].host == Host::Matmul { self.drawn_for(op, value).unwrap_or_default() } else { Vec::new() };
            let Some(row) = self.fitting(rows, &Site { host, op, value, along: &along })? else { break };
            if !self.join(row, &Site { host, op, value, along: &[] }) {
                break;
            }
            // Nothing stands before these.
            for &drawn in along.iter().rev() {
                self.join(row, &Site { host, op: drawn, value, along: &[] });
            }
            value = self.web.outputs(op)[0];
        }
        Ok(value)
    }

    /// [`Walk::Activations`]: the longest chain that begins with a tensor that can be loaded, of the activations' type.
    fn activations(&mut self, rows: &'static [Fusion], host: usize) -> Result<(), Error> {
        let Op::Conv(conv) = self.web.op(host) else { return Ok(()) };
        let activations = self.number(super::conv::activations(conv))?;
        if self.web.inputs(host).iter().filter(|&&tensor| tensor == activations).count() != 1 {
            return Ok(());
        }
        let mut value = activations;
        let mut chain = Vec::new();
        let mut whole = 0;
        while let Some(op) = self.web.producer(value)
            && self.fitting(rows, &Site { host, op, value, along: &chain })?.is_some()
            && let Some(step) = self.step_of_prologue(op, host)?
        {
            chain.push(op);
            value = self.number(step.value)?;
            // What is loaded from a view of other memory begins where its buffer does; and activations are stored as they are multiplied.
            if self.web.tensor(value).dtype == self.web.tensor(activations).dtype && self.offset(value) == 0 {
                whole = chain.len();
            }
        }
        for &op in &chain[..whole] {
            let value = self.web.outputs(op)[0];
            if !self.join(&rows[0], &Site { host, op, value, along: &[] }) {
                break;
            }
        }
        Ok(())
    }

    /// [`Walk::Ahead`].
    fn ahead(&mut self, rows: &'static [Fusion], host: usize) -> Result<(), Error> {
        let mut wanted = self.web.inputs(host).to_vec();
        while let Some(value) = wanted.pop() {
            let Some(op) = self.web.producer(value) else { continue };
            if self.parts.of(op) != self.parts.of(host) && self.fuse(rows, &Site { host, op, value, along: &[] })? {
                let operands = self.pointwise(op).map(Pointwise::operands).unwrap_or_default();
                wanted.extend(operands.into_iter().filter_map(|uid| self.web.number(uid)));
            }
        }
        Ok(())
    }

    /// [`Walk::Sums`].
    fn sums(&mut self, rows: &'static [Fusion], host: usize, value: usize) -> Result<(), Error> {
        let Op::Conv(conv) = self.web.op(host) else { return Ok(()) };
        let (computed, dims) = (conv.precision.epilogue(), self.dims(value));
        let axes: Vec<u32> = (0..dims.len() as u32).filter(|&axis| axis != 1).collect();
        let dtype = |uid: Uid| self.web.number(uid).map(|tensor| self.web.tensor(tensor).dtype);
        let is_sum = |op: usize| match self.web.op(op) {
            Op::Reduction(Reduction { f: ReductionOp::Add, axes: summed, x, y }) => {
                let in_type = dtype(*x).is_some_and(|dtype| Pointwise::compute_dtype([dtype]) == computed);
                *summed == axes && in_type && dtype(*y) == Some(computed) && self.parts.is_alone(op)
            }
            _ => false,
        };
        let uid = self.web.tensor(value).uid;
        let squared = |op: usize| {
            let Pointwise::Binary { f: BinaryOp::Mul, x, z, .. } = self.pointwise(op)? else { return None };
            let y = self.web.outputs(op)[0];
            let square = self.web.tensor(y);
            let is_square = (*x, *z) == (uid, uid) && square.is_virtual && square.dtype == computed && square.layout.dims() == dims;
            let [sum] = *self.web.readers(y) else { return None };
            (is_square && self.parts.is_alone(op) && is_sum(sum)).then_some([op, sum])
        };
        let readers = self.web.readers(value);
        let sum = readers.iter().copied().find(|&op| is_sum(op));
        let (Some(op), Some(along)) = (sum, readers.iter().find_map(|&op| squared(op))) else { return Ok(()) };
        if let Some(row) = self.fitting(rows, &Site { host, op, value, along: &along })? {
            // All of them wait for the convolution alone, so that either all come or none.
            let [square, of_squares] = along;
            let _ = [op, square, of_squares].into_iter().all(|op| self.join(row, &Site { host, op, value, along: &[] }));
        }
        Ok(())
    }

    /// [`Walk::Operands`].
    fn operands(&mut self, rows: &'static [Fusion], op: usize) -> Result<(), Error> {
        for i in 0..self.web.inputs(op).len() {
            let value = self.web.inputs(op)[i];
            if let Some(host) = self.web.producer(value)
                && self.parts.of(host) != self.parts.of(op)
            {
                self.fuse(rows, &Site { host, op, value, along: &[] })?;
            }
        }
        Ok(())
    }

    /// [`Walk::Readers`].
    fn readers(&mut self, rows: &'static [Fusion], op: usize) -> Result<(), Error> {
        let most = self.parts.work + WORK_OF_READERS;
        for i in 0..self.web.inputs(op).len() {
            let value = self.web.inputs(op)[i];
            // Rows that are appended to several tensors by one length are one launch.
            let is_append = matches!(self.web.op(op), Op::Append(_));
            if self.web.tensor(value).layout.elements() <= 1 && !is_append {
                continue;
            }
            let earlier = self.web.readers(value).partition_point(|&reader| reader < op);
            // Parts that did not take the op, as long as it stands in the part in which it was then.
            let (mut refused, mut as_part) = (Vec::new(), self.parts.of(op));
            for place in earlier.saturating_sub(EARLIER_READERS)..earlier {
                let host = self.web.readers(value)[place];
                let part = self.parts.of(host);
                self.parts.work += 1;
                if self.parts.work > most {
                    return Ok(());
                }
                if part == self.parts.of(op) || refused.contains(&part) {
                    continue;
                }
                if !self.fuse(rows, &Site { host, op, value, along: &[] })? {
                    refused.push(part);
                } else if self.parts.of(op) != as_part {
                    refused.clear();
                    as_part = self.parts.of(op);
                }
            }
        }
        Ok(())
    }
}

/// Whether an op reads what strides and an offset can say.
fn takes(op: &Op, strided_view: &StridedView) -> bool {
    match op {
        Op::Matmul(_) | Op::Conv(_) => strided_view.as_tensor("").is_some(),
        _ => true,
    }
}
