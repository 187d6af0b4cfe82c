//! A graph planned, and its runs.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use verdigris_graph::binding::{BoundTensor, bound_tensors, check};
use verdigris_graph::{Graph, HostScalar, Op, Pointwise, TensorDesc, Uid};
use verdigris_tensor::{BindingError, DType};

use crate::bindings::{Bindings, Bound};
use crate::elements::{View, ViewMut};
use crate::engine::Engine;
use crate::error::Error;
use crate::scratch::{Scratch, caught, grow};
use crate::{operation, pointwise};

/// A graph that has been checked, cut into steps, and given places for its temporaries.
///
/// It may be run any number of times and from several threads at once. Memory for temporaries and scratch is kept from run to run, so a
/// second run allocates nothing. Work is spread over the rayon pool that `run` is called in; the results do not depend on its size, bit
/// for bit.
#[derive(Debug)]
pub struct GraphPlan {
    graph: Graph,
    /// What a caller binds.
    bound: Vec<BoundTensor>,
    index: HashMap<Uid, usize>,
    steps: Vec<Step>,
    /// For each tensor, the buffer that holds it, if it is a temporary.
    places: Vec<Option<usize>>,
    /// Sizes in 8-byte words.
    buffers: Vec<usize>,
    free: Mutex<Vec<Vec<Vec<u64>>>>,
    scratch: Scratch,
}

/// One engine call.
#[derive(Clone, Debug)]
struct Step {
    engine: Engine,
    nodes: Range<usize>,
    /// Stored or temporary tensors written.
    outputs: Vec<Uid>,
    /// Temporaries read or written here for the last time.
    released: Vec<usize>,
    flops: u64,
}

/// What one engine call was, and what it cost in one run.
#[derive(Clone, PartialEq, Debug)]
pub struct StepReport {
    /// The names of the ops, joined by ` + ` where several were fused.
    pub name: String,
    /// The engine's id.
    pub engine: Engine,
    /// When it began.
    pub begun: Instant,
    /// Wall time.
    pub time: Duration,
    /// The most scratch that the call held at once, temporaries between steps not counted.
    pub workspace_bytes: u64,
    /// Multiplications and additions of a contraction; 0 for all else.
    pub flops: u64,
}

/// One run.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RunReport {
    /// In the order of execution.
    pub steps: Vec<StepReport>,
    /// Memory for tensors between steps.
    pub temporary_bytes: u64,
}

impl RunReport {
    /// The sum over all steps.
    pub fn time(&self) -> Duration {
        self.steps.iter().map(|step| step.time).sum()
    }

    /// Temporaries and the largest scratch.
    pub fn workspace_bytes(&self) -> u64 {
        self.temporary_bytes + self.steps.iter().map(|step| step.workspace_bytes).max().unwrap_or(0)
    }
}

impl GraphPlan {
    /// Checks a graph and plans its execution.
    ///
    /// # Errors
    /// A graph that breaks a rule, or tensors beyond this machine's address space.
    pub fn new(graph: &Graph) -> Result<GraphPlan, Error> {
        verdigris_graph::validate::validate(graph)?;
        let limit_bytes = isize::MAX as u64;
        for tensor in &graph.tensors {
            let need_bytes = tensor.layout.span_bytes(tensor.dtype).max(u128::from(tensor.layout.elements()) * 8);
            if need_bytes > u128::from(limit_bytes) {
                return Err(Error::TooLarge { tensor: tensor.name.clone(), need_bytes, limit_bytes });
            }
        }
        let index: HashMap<Uid, usize> = graph.tensors.iter().enumerate().map(|(i, tensor)| (tensor.uid, i)).collect();
        let mut steps = cut(graph, &index);
        let (places, buffers) = place(graph, &index, &mut steps);
        let bound = bound_tensors(graph);
        Ok(GraphPlan { graph: graph.clone(), bound, index, steps, places, buffers, free: Mutex::default(), scratch: Scratch::default() })
    }

    /// The graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// What a caller binds, in the order of the graph's list.
    pub fn tensors(&self) -> &[BoundTensor] {
        &self.bound
    }

    /// The engine of each step, with the names of the ops that it does.
    pub fn engines(&self) -> impl Iterator<Item = (Engine, String)> + '_ {
        self.steps.iter().map(|step| (step.engine, self.name_of(step)))
    }

    /// The engine that writes a tensor; `None` where none does, and for those that a fused chain has within.
    pub fn writer_of(&self, uid: Uid) -> Option<Engine> {
        self.steps.iter().find(|step| step.outputs.contains(&uid)).map(|step| step.engine)
    }

    /// Multiplications and additions of all contractions.
    pub fn flops(&self) -> u64 {
        self.steps.iter().map(|step| step.flops).sum()
    }

    /// Memory for tensors between steps. Each engine call needs scratch besides, which its [`StepReport`] tells.
    pub fn temporary_bytes(&self) -> u64 {
        self.buffers.iter().map(|&words| words as u64 * 8).sum()
    }

    fn name_of(&self, step: &Step) -> String {
        let names: Vec<&str> = self.graph.nodes[step.nodes.clone()].iter().map(|node| node.name.as_str()).collect();
        names.join(" + ")
    }

    /// Computes the outputs from the inputs.
    ///
    /// # Errors
    /// Bindings that are missing, too short or name no tensor; then nothing is written. [`Error::OutOfMemory`]; then the outputs are
    /// undefined.
    pub fn run(&self, bindings: &mut Bindings<'_>) -> Result<RunReport, Error> {
        let scalars: BTreeMap<Uid, Number> = bindings
            .list
            .iter()
            .filter_map(|(uid, bound)| match bound {
                Bound::Real(value) => Some((*uid, Number::Real(*value))),
                Bound::Integer(value) => Some((*uid, Number::Integer(*value))),
                Bound::Read(_) | Bound::Write(_) => None,
            })
            .collect();
        let mut cells = self.bind(bindings)?;
        let kept = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffers = kept.unwrap_or_else(|| vec![Vec::new(); self.buffers.len()]);
        let mut report = RunReport { steps: Vec::with_capacity(self.steps.len()), temporary_bytes: self.temporary_bytes() };
        for step in &self.steps {
            let begun = Instant::now();
            self.scratch.take_peak_bytes();
            let mut written = Vec::with_capacity(step.outputs.len());
            for uid in &step.outputs {
                let i = self.index[uid];
                let mut cell = std::mem::replace(&mut cells[i], Cell::Absent);
                if let Some(place) = self.places[i] {
                    let mut words = std::mem::take(&mut buffers[place]);
                    grow(&mut words, self.buffers[place])?;
                    cell = Cell::Temporary(words);
                }
                written.push(cell);
            }
            let outputs = step.outputs.iter().zip(&mut written).map(|(uid, cell)| {
                let tensor = &self.graph.tensors[self.index[uid]];
                (*uid, ViewMut { dtype: tensor.dtype, layout: tensor.layout, bytes: cell.bytes_mut() })
            });
            let context = Context { plan: self, cells: &cells, scalars: &scalars, scratch: &self.scratch };
            caught(|| self.execute(step, &context, outputs.collect()))?;
            for (uid, cell) in step.outputs.iter().zip(written) {
                cells[self.index[uid]] = cell;
            }
            for &i in &step.released {
                if let (Cell::Temporary(words), Some(place)) = (std::mem::replace(&mut cells[i], Cell::Absent), self.places[i]) {
                    buffers[place] = words;
                }
            }
            report.steps.push(StepReport {
                name: self.name_of(step),
                engine: step.engine,
                begun,
                time: begun.elapsed(),
                workspace_bytes: self.scratch.take_peak_bytes(),
                flops: step.flops,
            });
        }
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffers);
        Ok(report)
    }

    fn execute(&self, step: &Step, context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        operation::run(&self.graph.nodes[step.nodes.clone()], context, outputs);
    }

    /// Gives each stored tensor its buffer, after checking all of them.
    fn bind<'r>(&self, bindings: &'r mut Bindings<'_>) -> Result<Vec<Cell<'r>>, BindingError> {
        let count = bindings.list.len();
        // For each binding, whose it is.
        let mut owners = vec![0; count];
        check(&self.bound, count, |number| bindings.given(number), |tensor, number| owners[number] = self.index[&self.bound[tensor].uid])?;
        let mut cells: Vec<Cell<'r>> = self.graph.tensors.iter().map(|_| Cell::Absent).collect();
        for ((_, bound), owner) in bindings.list.iter_mut().zip(owners) {
            cells[owner] = match bound {
                Bound::Read(bytes) => Cell::Read(bytes),
                Bound::Write(bytes) => Cell::Write(bytes),
                Bound::Real(_) | Bound::Integer(_) => Cell::Absent,
            };
        }
        Ok(cells)
    }
}

/// Where a tensor is during a run.
#[derive(Debug)]
enum Cell<'r> {
    /// Not yet, no more, or being written right now.
    Absent,
    Read(&'r [u8]),
    Write(&'r mut [u8]),
    Temporary(Vec<u64>),
}

impl Cell<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Cell::Absent => &[],
            Cell::Read(bytes) => bytes,
            Cell::Write(bytes) => bytes,
            Cell::Temporary(words) => bytemuck::cast_slice(words),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Cell::Absent | Cell::Read(_) => &mut [],
            Cell::Write(bytes) => bytes,
            Cell::Temporary(words) => bytemuck::cast_slice_mut(words),
        }
    }
}

/// A number of the host.
#[derive(Clone, Copy, Debug)]
enum Number {
    Real(f64),
    Integer(i128),
}

/// What an engine call sees.
pub(crate) struct Context<'r> {
    plan: &'r GraphPlan,
    cells: &'r [Cell<'r>],
    scalars: &'r BTreeMap<Uid, Number>,
    pub(crate) scratch: &'r Scratch,
}

impl<'r> Context<'r> {
    /// A tensor that is read.
    pub(crate) fn view(&self, uid: Uid) -> View<'r> {
        let i = self.plan.index[&uid];
        let tensor = &self.plan.graph.tensors[i];
        View { dtype: tensor.dtype, layout: tensor.layout, bytes: self.cells[i].bytes() }
    }

    pub(crate) fn tensor(&self, uid: Uid) -> &'r TensorDesc {
        &self.plan.graph.tensors[self.plan.index[&uid]]
    }

    /// An integer of the host, exactly.
    pub(crate) fn integer(&self, uid: Uid) -> i128 {
        match self.scalars.get(&uid) {
            Some(Number::Integer(value)) => *value,
            Some(Number::Real(value)) => *value as i128,
            None => 0,
        }
    }

    /// The value of a factor, as its type holds it; an integer beyond 2⁵³ is rounded.
    pub(crate) fn scalar(&self, scalar: HostScalar<Uid>) -> f64 {
        match scalar {
            HostScalar::Fixed(real) => real.0,
            HostScalar::Bound(uid) => {
                let value = match self.scalars.get(&uid) {
                    Some(Number::Real(value)) => *value,
                    Some(Number::Integer(value)) => *value as f64,
                    None => f64::NAN,
                };
                if self.tensor(uid).dtype == DType::F32 { f64::from(value as f32) } else { value }
            }
        }
    }
}

/// Cuts the list of nodes into engine calls: runs of pointwise ops over the same dims in the same arithmetic are one, all else is one each.
fn cut(graph: &Graph, index: &HashMap<Uid, usize>) -> Vec<Step> {
    let tensor = |uid: Uid| &graph.tensors[index[&uid]];
    let kind =
        |pointwise: &Pointwise| (pointwise::arithmetic(pointwise, |uid| tensor(uid).dtype), tensor(pointwise.output()).layout.dims());
    let mut steps: Vec<Step> = Vec::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        if let (Op::Pointwise(this), Some(last)) = (&node.op, steps.last_mut())
            && let Op::Pointwise(first) = &graph.nodes[last.nodes.start].op
        {
            // A smaller tensor made in the same call could not be broadcast: it exists a piece at a time.
            let broadcasts = this.operands().iter().any(|&uid| {
                let is_made_here = graph.nodes[last.nodes.clone()].iter().any(|node| node.op.output() == uid);
                is_made_here && tensor(uid).layout.dims() != tensor(this.output()).layout.dims()
            });
            if kind(first) == kind(this) && !broadcasts && last.nodes.len() < pointwise::LONGEST {
                last.nodes.end = i + 1;
                continue;
            }
        }
        let flops = operation::flops(&node.op, &tensor);
        steps.push(Step { engine: operation::engine(&node.op), nodes: i..i + 1, outputs: Vec::new(), released: Vec::new(), flops });
    }
    let mut last_reader: HashMap<Uid, usize> = HashMap::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        last_reader.extend(node.op.inputs().into_iter().map(|uid| (uid, i)));
    }
    for step in &mut steps {
        for (i, node) in graph.nodes.iter().enumerate().take(step.nodes.end).skip(step.nodes.start) {
            for uid in node.op.outputs() {
                let leaves = last_reader.get(&uid).is_some_and(|&reader| reader >= step.nodes.end);
                if !tensor(uid).is_virtual || leaves || step.nodes.len() == 1 || i + 1 == step.nodes.end {
                    step.outputs.push(uid);
                }
            }
        }
    }
    steps
}

/// Gives each temporary a buffer that nothing else lives in at the same time: first come, first served, the best fit first.
fn place(graph: &Graph, index: &HashMap<Uid, usize>, steps: &mut [Step]) -> (Vec<Option<usize>>, Vec<usize>) {
    let mut last_use: HashMap<usize, usize> = HashMap::new();
    for (s, step) in steps.iter().enumerate() {
        let read = graph.nodes[step.nodes.clone()].iter().flat_map(|node| node.op.inputs());
        for uid in read.chain(step.outputs.iter().copied()) {
            last_use.insert(index[&uid], s);
        }
    }
    let mut released: Vec<Vec<usize>> = vec![Vec::new(); steps.len()];
    for (i, s) in last_use.into_iter().filter(|&(i, _)| graph.tensors[i].is_virtual) {
        released[s].push(i);
    }
    let mut places = vec![None; graph.tensors.len()];
    let mut buffers: Vec<usize> = Vec::new();
    let mut free: Vec<usize> = Vec::new();
    for (s, step) in steps.iter_mut().enumerate() {
        for uid in &step.outputs {
            let i = index[uid];
            let tensor = &graph.tensors[i];
            if !tensor.is_virtual {
                continue;
            }
            let words = (tensor.layout.span_bytes(tensor.dtype) as usize).div_ceil(8);
            let best = (0..free.len()).min_by_key(|&f| buffers[free[f]].abs_diff(words));
            let buffer = best.map(|f| free.swap_remove(f)).unwrap_or_else(|| {
                buffers.push(0);
                buffers.len() - 1
            });
            buffers[buffer] = buffers[buffer].max(words);
            places[i] = Some(buffer);
        }
        step.released = std::mem::take(&mut released[s]);
        step.released.retain(|&i| places[i].is_some());
        free.extend(step.released.iter().filter_map(|&i| places[i]));
    }
    (places, buffers)
}
