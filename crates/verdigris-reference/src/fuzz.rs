//! Random graphs, and the smallest one that still fails.
//!
//! [`graph`] makes a valid graph of one to eight ops (nine where the last is a pooling with its gradient) from a seed: all ops, shared inputs, several outputs, small tensors of random types
//! in random layouts (any order, gaps, steps, repeated elements), virtual tensors of random types between. The same seed gives the same
//! graph on every machine. [`shrink`] makes a failing graph smaller as long as it fails.

use std::collections::BTreeSet;

use verdigris_graph::{Error, Graph, GraphBuilder, Node, Op, Precision, Real, TensorDesc, Uid};
use verdigris_tensor::{DType, Layout};

use crate::data::{Distribution, Random};
use crate::graph_cases::GraphCase;
use crate::operation::Operation;
use crate::ops::conv::spreads;

/// Elements of a tensor, at most.
pub(crate) const MOST_ELEMENTS: u64 = 2048;
/// Products of a convolution or a matmul, at most.
pub(crate) const MOST_PRODUCTS: u64 = 60_000;

/// A random graph with data to run it on.
pub fn graph(seed: u64) -> GraphCase {
    let mut random = Random::new(seed ^ 0x5eed_f022);
    let distribution = match random.below(10) {
        0 => Distribution::SmallIntegers,
        1 => Distribution::Special,
        2 => Distribution::Uniform,
        3 => Distribution::WideRange,
        _ => Distribution::Normal,
    };
    let count = 1 + random.below(8);
    // A draft that breaks a rule after all is thrown away; the next one is as random.
    loop {
        let mut draft = Draft::new(Random::new(random.bits()), &format!("fuzz/{seed}"));
        for _ in 0..count {
            // An op that does not fit the values there are is another one's turn.
            let _ = draft.step();
        }
        if let Ok(graph) = draft.finish()
            && !graph.nodes.is_empty()
        {
            // What infinities do to their neighbours there is left to the engine, so that nothing would be judged.
            let is_left_open = graph.nodes.iter().any(|node| matches!(&node.op, Op::Conv(conv) if spreads(conv)));
            let distribution = if distribution == Distribution::Special && is_left_open { Distribution::Normal } else { distribution };
            return GraphCase { id: format!("fuzz/{seed}"), graph, distribution, seed, device_only: false };
        }
    }
}

/// One attention, with its gradient half of the times, and any of its options: in most graphs of 16-bit types, in rows that tensor cores take, and of extents
/// around the edges of their tiles, with no more than so many products (at least 1,000,000). The same seed gives the same graph on every machine.
pub fn attention(seed: u64, most_products: u64) -> GraphCase {
    let id = format!("fuzz/attention/{seed}");
    let mut random = Random::new(seed ^ 0xa77e_u64);
    loop {
        let mut draft = Draft { in_rows: Some(most_products.max(1_000_000)), ..Draft::new(Random::new(random.bits()), &id) };
        if draft.attention(seed / 4 % 2 == 1).is_ok()
            && let Ok(graph) = draft.finish()
        {
            return GraphCase { id, graph, distribution: Distribution::Normal, seed, device_only: false };
        }
    }
}

/// A tensor that ops may read.
#[derive(Clone, Debug)]
pub(crate) struct Value {
    pub(crate) uid: Uid,
    pub(crate) dims: Vec<u64>,
    pub(crate) dtype: DType,
}

/// A graph that grows op by op.
pub(crate) struct Draft {
    pub(crate) random: Random,
    pub(crate) builder: GraphBuilder,
    values: Vec<Value>,
    /// Results that are not stored yet, with their dims and types.
    unread: Vec<Value>,
    next: u32,
    /// Whether tensors are rows of elements side by side that begin at multiples of 16 bytes, and results have the types that were asked for; then the most
    /// products of an attention.
    pub(crate) in_rows: Option<u64>,
}

/// How an op is drawn: which of its draws it is comes with the draft.
type Draw = fn(&mut Draft, u64) -> Result<(), Error>;

macro_rules! generators {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// How often each op is drawn, and how.
        const GENERATORS: &[(u64, Draw)] = &[$((<verdigris_graph::$name as Operation>::DRAWS, <verdigris_graph::$name as Operation>::draw),)*];
    };
}
verdigris_graph::each_op!(generators);

/// The types of inputs, the usual ones more often.
pub(crate) const TYPES: [DType; 14] = [
    DType::F32,
    DType::F32,
    DType::F32,
    DType::Bf16,
    DType::Bf16,
    DType::F16,
    DType::F16,
    DType::F64,
    DType::E4m3,
    DType::E5m2,
    DType::I8,
    DType::U8,
    DType::I32,
    DType::I64,
];

impl Draft {
    fn new(random: Random, name: &str) -> Draft {
        Draft { random, builder: GraphBuilder::new(name), values: Vec::new(), unread: Vec::new(), next: 0, in_rows: None }
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    pub(crate) fn one_in(&mut self, bound: u64) -> bool {
        self.random.below(bound) == 0
    }

    pub(crate) fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.random.below(list.len() as u64) as usize].clone()
    }

    /// Names that have been given.
    pub(crate) fn named(&self) -> u32 {
        self.next
    }

    pub(crate) fn name(&mut self, what: &str) -> String {
        self.next += 1;
        format!("{what}{}", self.next)
    }

    pub(crate) fn real(&mut self) -> Real {
        Real((self.random.below(33) as f64 - 16.0) / 8.0)
    }

    pub(crate) fn dims(&mut self) -> Vec<u64> {
        let rank = [1, 2, 2, 3, 3, 4, 4, 5][self.below(8) as usize];
        let mut dims: Vec<u64> = (0..rank).map(|_| 1 + self.random.below(9)).collect();
        if self.one_in(6) {
            let dim = self.below(rank) as usize;
            dims[dim] = [1, 17, 33, 65][self.below(4) as usize];
        }
        if self.one_in(40) {
            let dim = self.below(rank) as usize;
            dims[dim] = 0;
        }
        while dims.iter().product::<u64>() > MOST_ELEMENTS {
            let longest = (0..dims.len()).max_by_key(|&dim| dims[dim]).unwrap_or(0);
            dims[longest] /= 2;
        }
        dims
    }

    /// Rows in either order of heads and positions, now and then with a gap behind each; whole multiples of 16 elements where a row is not one element.
    fn rows(&mut self, dims: &[u64]) -> Result<Layout, Error> {
        let [b, h, s, d] = dims[..] else {
            return Layout::row_major(dims).map_err(|source| Error::Layout { tensor: "rows".to_owned(), source });
        };
        let row = if d == 1 { 1 } else { d.next_multiple_of(16) + 16 * u64::from(self.one_in(4)) };
        let strides = if self.one_in(2) { [h * s * row, s * row, row, 1] } else { [s * h * row, row, h * row, 1] };
        Layout::new(&[b, h, s, d], &strides.map(|stride| stride.max(1)))
            .map_err(|source| Error::Layout { tensor: "rows".to_owned(), source })
    }

    /// Any order, now and then with gaps or a step; of an input also with repeated elements.
    pub(crate) fn layout(&mut self, dims: &[u64], is_input: bool) -> Result<Layout, Error> {
        if self.in_rows.is_some() {
            return self.rows(dims);
        }
        let mut order: Vec<usize> = (0..dims.len()).collect();
        if !self.one_in(3) {
            for i in (1..order.len()).rev() {
                let j = self.below(i as u64 + 1) as usize;
                order.swap(i, j);
            }
        }
        let mut stride = if self.one_in(6) { 2 } else { 1 };
        let has_gaps = self.one_in(3);
        let mut strides = vec![0; dims.len()];
        for &dim in order.iter().rev() {
            strides[dim] = stride;
            stride = stride * dims[dim].max(1) + if has_gaps { self.below(4) } else { 0 };
        }
        if is_input && !dims.is_empty() && self.one_in(10) {
            let dim = self.below(dims.len() as u64) as usize;
            strides[dim] = 0;
        }
        Layout::new(dims, &strides).map_err(|source| Error::Layout { tensor: "random".to_owned(), source })
    }

    /// A new input.
    pub(crate) fn input(&mut self, dtype: DType, dims: &[u64]) -> Result<Value, Error> {
        let layout = self.layout(dims, true)?;
        let name = self.name("in");
        let uid = self.builder.tensor(&name, dtype, layout);
        Ok(Value { uid, dims: dims.to_vec(), dtype })
    }

    /// A value that fits: one that is there, or a new input of these dims.
    pub(crate) fn value(&mut self, fits: impl Fn(&Value) -> bool, dtype: DType, dims: &[u64]) -> Result<Value, Error> {
        let fitting: Vec<Value> = self.values.iter().filter(|value| fits(value)).cloned().collect();
        if !fitting.is_empty() && !self.one_in(4) {
            // The younger ones make the longer chains.
            let newest = fitting.len() - 1;
            let at = if self.one_in(2) { newest } else { self.below(fitting.len() as u64) as usize };
            return Ok(fitting[at].clone());
        }
        let value = self.input(dtype, dims)?;
        self.values.push(value.clone());
        Ok(value)
    }

    pub(crate) fn any(&mut self) -> Result<Value, Error> {
        let (dtype, dims) = (self.pick(&TYPES), self.dims());
        self.value(|_| true, dtype, &dims)
    }

    /// One that has a dim.
    pub(crate) fn with_axis(&mut self, float: bool) -> Result<Value, Error> {
        let (dtype, dims) = (self.pick(if float { &TYPES[..10] } else { &TYPES }), self.dims());
        self.value(|value| !value.dims.is_empty() && (value.dtype.is_float() || !float), dtype, &dims)
    }

    /// `[n, c, spatial…]` of one to three spatial dims.
    pub(crate) fn image(&mut self, fits: impl Fn(&Value) -> bool, types: &[DType]) -> Result<Value, Error> {
        let spatial = 1 + self.below(3);
        let most = [17, 8, 5][spatial as usize - 1];
        let mut dims = vec![1 + self.below(2), 1 + self.below(8)];
        dims.extend((0..spatial).map(|_| 1 + self.random.below(most)));
        let dtype = self.pick(types);
        self.value(|value| (3..=5).contains(&value.dims.len()) && !value.dims.contains(&0) && fits(value), dtype, &dims)
    }

    /// One op more.
    fn step(&mut self) -> Result<(), Error> {
        let mut at = self.below(GENERATORS.iter().map(|(draws, _)| draws).sum());
        for (draws, draw) in GENERATORS {
            if at < *draws {
                return draw(self, at);
            }
            at -= draws;
        }
        Ok(())
    }

    /// What reads `read` no longer leaves them unread.
    pub(crate) fn note_read(&mut self, read: &[Uid]) {
        self.unread.retain(|value| !read.contains(&value.uid));
    }

    /// Takes in a result: of a type of its own now and then, stored now and then.
    pub(crate) fn result(&mut self, uid: Uid, dims: &[u64], dtype: DType, types: &[DType]) -> Result<Value, Error> {
        let dtype = if types.is_empty() || self.in_rows.is_some() || !self.one_in(3) { dtype } else { self.pick(types) };
        let value = Value { uid, dims: dims.to_vec(), dtype };
        if self.one_in(4) {
            self.store(&value)?;
        } else {
            self.builder.round_to(uid, dtype)?;
            self.unread.push(value.clone());
        }
        self.values.push(value.clone());
        Ok(value)
    }

    /// Takes in a result that is stored already.
    pub(crate) fn note_stored(&mut self, uid: Uid, dims: &[u64], dtype: DType) {
        self.values.push(Value { uid, dims: dims.to_vec(), dtype });
    }

    fn store(&mut self, value: &Value) -> Result<(), Error> {
        let layout = self.layout(&value.dims, false)?;
        let name = self.name("out");
        self.builder.store_as(value.uid, &name, value.dtype, layout)
    }

    fn finish(mut self) -> Result<Graph, Error> {
        for value in std::mem::take(&mut self.unread) {
            self.store(&value)?;
        }
        let mut graph = self.builder.finish()?;
        drop_unnamed(&mut graph);
        Ok(graph)
    }

    pub(crate) fn pointwise_result(&mut self, y: Uid, dims: &[u64], read: &[DType]) -> Result<(), Error> {
        let compute = if read.contains(&DType::F64) { DType::F64 } else { DType::F32 };
        self.result(y, dims, compute, &TYPES).map(drop)
    }

    /// Dims that broadcast to `dims`.
    pub(crate) fn narrower(&mut self, dims: &[u64]) -> Vec<u64> {
        let drop = if self.one_in(4) { self.below(dims.len() as u64 + 1) as usize } else { 0 };
        dims[drop..].iter().map(|&dim| if self.random.below(4) == 0 { 1 } else { dim }).collect()
    }

    pub(crate) fn second(&mut self, dims: &[u64]) -> Result<Value, Error> {
        let (dtype, dims_of_input) = (self.pick(&TYPES), self.narrower(dims));
        let fits = |value: &Value| {
            value.dims.len() <= dims.len() && value.dims.iter().rev().zip(dims.iter().rev()).all(|(&own, &other)| own == other || own == 1)
        };
        self.value(fits, dtype, &dims_of_input)
    }

    pub(crate) fn precision(&mut self, left: DType, right: DType) -> Option<Precision> {
        let fitting: Vec<Precision> =
            Precision::ALL.into_iter().filter(|precision| precision.rule_broken_by(left, right).is_none()).collect();
        if fitting.is_empty() { None } else { Some(self.pick(&fitting)) }
    }
}

/// The smallest graph found that is valid and still fails, starting from one that does. Ops are taken out (what they wrote and others
/// read becomes an input), outputs made virtual, extents cut, types and layouts made plain, one at a time, until nothing more can go.
pub fn shrink(graph: &Graph, mut fails: impl FnMut(&Graph) -> bool) -> Graph {
    let mut smallest = graph.clone();
    loop {
        let next =
            candidates(&smallest).into_iter().find(|candidate| verdigris_graph::validate::validate(candidate).is_ok() && fails(candidate));
        match next {
            Some(next) => smallest = next,
            None => return smallest,
        }
    }
}

/// Graphs a little smaller or plainer than this one, whether they are valid or not; each step leads nearer to an end.
fn candidates(graph: &Graph) -> Vec<Graph> {
    let mut list = Vec::new();
    for at in (0..graph.nodes.len()).rev() {
        list.push(without(graph, at));
    }
    let read: BTreeSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.inputs()).collect();
    let written: BTreeSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.outputs()).collect();
    let change = |at: usize, change: &dyn Fn(&mut TensorDesc)| {
        let mut changed = graph.clone();
        change(&mut changed.tensors[at]);
        changed
    };
    for (at, tensor) in graph.tensors.iter().enumerate() {
        if !tensor.is_virtual && read.contains(&tensor.uid) && written.contains(&tensor.uid) {
            list.push(change(at, &|tensor| tensor.is_virtual = true));
        }
    }
    let extents: BTreeSet<u64> =
        graph.tensors.iter().flat_map(|tensor| tensor.layout.dims().iter().copied()).filter(|&extent| extent > 1).collect();
    for &extent in extents.iter().rev() {
        for smaller in [1, extent / 2, extent - 1] {
            list.extend(resized(graph, extent, smaller));
        }
    }
    for (at, tensor) in graph.tensors.iter().enumerate() {
        if let Ok(plain) = Layout::row_major(tensor.layout.dims())
            && plain != tensor.layout
        {
            list.push(change(at, &|tensor| tensor.layout = plain));
        }
    }
    let types: BTreeSet<DType> = graph.tensors.iter().map(|tensor| tensor.dtype).filter(|&dtype| dtype != DType::F32).collect();
    for dtype in types {
        let mut changed = graph.clone();
        changed.tensors.iter_mut().filter(|tensor| tensor.dtype == dtype).for_each(|tensor| tensor.dtype = DType::F32);
        list.push(changed);
    }
    list
}

/// The graph without one op; what it wrote becomes an input if it is read.
fn without(graph: &Graph, at: usize) -> Graph {
    let mut graph = graph.clone();
    let Node { op, .. } = graph.nodes.remove(at);
    let outputs = op.outputs();
    drop_unnamed(&mut graph);
    let read: BTreeSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.inputs()).collect();
    let written: BTreeSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.outputs()).collect();
    for tensor in &mut graph.tensors {
        // A virtual tensor that lost its writer is an input now, one that lost its readers an output.
        if outputs.contains(&tensor.uid) || (written.contains(&tensor.uid) && !read.contains(&tensor.uid)) {
            tensor.is_virtual = false;
        }
    }
    graph
}

/// Takes out the tensors that no op names.
fn drop_unnamed(graph: &mut Graph) {
    let named: BTreeSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.inputs().into_iter().chain(node.op.outputs())).collect();
    graph.tensors.retain(|tensor| named.contains(&tensor.uid));
}

/// The graph with an extent replaced wherever it stands.
fn resized(graph: &Graph, extent: u64, smaller: u64) -> Option<Graph> {
    let mut graph = graph.clone();
    for tensor in &mut graph.tensors {
        let dims: Vec<u64> = tensor.layout.dims().iter().map(|&dim| if dim == extent { smaller } else { dim }).collect();
        if dims != tensor.layout.dims() {
            // The order in memory and repeated elements stay.
            let mut order: Vec<usize> = (0..dims.len()).collect();
            order.sort_by_key(|&dim| std::cmp::Reverse(tensor.layout.strides()[dim]));
            tensor.layout = Layout::with_order(&dims, &order).ok()?;
        }
    }
    Some(graph)
}
