//! Which ops stand together, and whether two parts may become one.
//!
//! Each part keeps its ops, the tensors that it has in memory, and its place in an order in which all parts can run. Two parts may be one
//! unless a third has to run between them. That is looked for from both sides at once, among the parts that stand between the two in the
//! order, and what one of the sides has looked at when it is through is what changes its place. So a join costs what lies around it, and not
//! what the graph has.

use std::collections::VecDeque;

use super::order::Order;
use super::web::Web;

/// The most tensors in memory, host scalars among them, of one part: a kernel's parameters are limited, and what is larger gains nothing
/// from being one. A convolution's sums come on top.
const PART_TENSORS: usize = 24;
/// The most ops of one part.
const PART_OPS: usize = 96;
/// Edges that are looked at for one join, at most: two parts that stay undecided stay two.
const EDGES_OF_A_JOIN: u64 = 1 << 12;
/// Of the parts that a search comes to on either side, so many are asked whether a known way leads on to the other side.
const ASKED: usize = 8;

/// The parts of a graph. Each goes by the number of one of its ops.
pub(super) struct Parts {
    of: Vec<usize>,
    /// The ops of each part, in order; none where a part has become one with another.
    ops: Vec<Vec<usize>>,
    /// The tensors in memory that each part reads or writes, views among them, in order.
    memory: Vec<Vec<usize>>,
    order: Order,
    sides: [Side; 2],
    /// Edges, ops and labels looked at so far.
    pub(super) work: u64,
}

/// What a search has come to from one side.
#[derive(Default)]
struct Side {
    /// The number of the last search that came to each part.
    marks: Vec<u32>,
    search: u32,
    found: Vec<usize>,
    open: VecDeque<usize>,
}

impl Side {
    fn begin(&mut self, at: usize, len: usize) {
        self.marks.resize(len, 0);
        self.search += 1;
        self.found.clear();
        self.open.clear();
        self.open.push_back(at);
    }

    fn knows(&self, node: usize) -> bool {
        self.marks[node] == self.search
    }

    fn comes_to(&mut self, node: usize) {
        if !self.knows(node) {
            self.marks[node] = self.search;
            self.found.push(node);
            self.open.push_back(node);
        }
    }
}

/// What a search finds.
enum Between {
    /// Something has to run between the two.
    Something,
    /// Nothing has. All that runs after the first and stands before the second.
    NothingAfter,
    /// Nothing has. All that runs before the second and stands behind the first.
    NothingBefore,
    /// The search was given up.
    Unknown,
}

/// Nodes in an order that fits their edges.
trait Dag {
    fn label(&self, node: usize) -> u64;
    fn after(&self, node: usize, visit: &mut dyn FnMut(usize));
    fn before(&self, node: usize, visit: &mut dyn FnMut(usize));
    /// Whether one certainly leads to the other; `false` says nothing.
    fn surely_leads(&self, from: usize, to: usize) -> bool;
}

/// Looks for a way from `first` to `last` that leads over a third node, or for any way.
fn search(dag: &impl Dag, [forward, backward]: &mut [Side; 2], [first, last]: [usize; 2], any: bool, work: &mut u64) -> Between {
    let len = forward.marks.len();
    forward.begin(first, len);
    backward.begin(last, len);
    let most = *work + EDGES_OF_A_JOIN;
    for step in 0.. {
        let Some(node) = forward.open.pop_front() else { return Between::NothingAfter };
        let mut is_met = false;
        dag.after(node, &mut |next| {
            *work += 1;
            if next == last {
                is_met |= any || node != first;
            } else if next != first && dag.label(next) < dag.label(last) {
                is_met |= backward.knows(next);
                forward.comes_to(next);
            }
        });
        let is_asked = (1..=ASKED).contains(&step);
        if is_met || is_asked && dag.surely_leads(node, last) {
            return Between::Something;
        }
        let Some(node) = backward.open.pop_front() else { return Between::NothingBefore };
        dag.before(node, &mut |next| {
            *work += 1;
            if next == first {
                is_met |= any || node != last;
            } else if next != last && dag.label(next) > dag.label(first) {
                is_met |= forward.knows(next);
                backward.comes_to(next);
            }
        });
        if is_met || is_asked && dag.surely_leads(first, node) {
            return Between::Something;
        }
        if *work > most {
            break;
        }
    }
    Between::Unknown
}

/// The parts, and what runs before what.
struct OfParts<'w> {
    web: &'w Web<'w>,
    of: &'w [usize],
    ops: &'w [Vec<usize>],
    order: &'w Order,
}

impl Dag for OfParts<'_> {
    fn label(&self, part: usize) -> u64 {
        self.order.label(part)
    }

    fn after(&self, part: usize, visit: &mut dyn FnMut(usize)) {
        let others = self.ops[part].iter().flat_map(|&op| self.web.after(op)).map(|op| self.of[op]);
        others.filter(|&other| other != part).for_each(visit);
    }

    fn before(&self, part: usize, visit: &mut dyn FnMut(usize)) {
        let others = self.ops[part].iter().flat_map(|&op| self.web.before(op)).map(|op| self.of[op]);
        others.filter(|&other| other != part).for_each(visit);
    }

    fn surely_leads(&self, from: usize, to: usize) -> bool {
        let ends = |part: usize| self.ops[part].first().into_iter().chain(self.ops[part].last()).copied();
        ends(from).any(|early| ends(to).any(|late| self.web.surely_waits(late, early)))
    }
}

/// The ops themselves.
struct OfOps<'w>(&'w Web<'w>);

impl Dag for OfOps<'_> {
    fn label(&self, op: usize) -> u64 {
        op as u64
    }

    fn after(&self, op: usize, visit: &mut dyn FnMut(usize)) {
        self.0.after(op).for_each(visit);
    }

    fn before(&self, op: usize, visit: &mut dyn FnMut(usize)) {
        self.0.before(op).for_each(visit);
    }

    fn surely_leads(&self, from: usize, to: usize) -> bool {
        self.0.surely_waits(to, from)
    }
}

impl Parts {
    /// Every op by itself.
    pub(super) fn new(web: &Web<'_>) -> Parts {
        let memory = |op: usize| {
            let mut tensors: Vec<usize> = web.inputs(op).iter().chain(web.outputs(op)).copied().collect();
            tensors.sort_unstable();
            tensors.dedup();
            tensors
        };
        let side = || Side { marks: vec![0; web.len()], ..Side::default() };
        Parts {
            of: (0..web.len()).collect(),
            ops: (0..web.len()).map(|op| vec![op]).collect(),
            memory: (0..web.len()).map(memory).collect(),
            order: Order::new(web.len()),
            sides: [side(), side()],
            work: 0,
        }
    }

    /// The part of an op.
    pub(super) fn of(&self, op: usize) -> usize {
        self.of[op]
    }

    /// The ops of a part, in order.
    pub(super) fn ops(&self, part: usize) -> &[usize] {
        &self.ops[part]
    }

    /// Whether nothing was fused with an op.
    pub(super) fn is_alone(&self, op: usize) -> bool {
        self.ops[self.of[op]].len() == 1
    }

    /// Whether a part may have the ops of all these, which are different: no more than a kernel takes.
    pub(super) fn are_small(&mut self, web: &Web<'_>, is_view: &dyn Fn(usize) -> bool, parts: &[usize]) -> bool {
        let count: usize = parts.iter().map(|&part| self.ops[part].len()).sum();
        if count > PART_OPS {
            return false;
        }
        self.work += parts.iter().map(|&part| self.memory[part].len() as u64).sum::<u64>();
        self.memory_of(web, is_view, parts).len() <= PART_TENSORS
    }

    /// As [`Parts::are_small`], of two, where tensors between them count.
    pub(super) fn both_are_small(&mut self, one: usize, other: usize) -> bool {
        let [these, those] = [one, other].map(|part| &self.memory[part]);
        self.work += (these.len() + those.len()) as u64;
        let (mut i, mut shared) = (0, 0);
        for tensor in these {
            while i < those.len() && those[i] < *tensor {
                i += 1;
            }
            shared += usize::from(those.get(i) == Some(tensor));
        }
        self.ops[one].len() + self.ops[other].len() <= PART_OPS && these.len() + those.len() - shared <= PART_TENSORS
    }

    /// The tensors that parts have in memory when they are one.
    fn memory_of(&self, web: &Web<'_>, is_view: &dyn Fn(usize) -> bool, parts: &[usize]) -> Vec<usize> {
        let is_ours = |op: usize| parts.contains(&self.of[op]);
        // Of what two have in memory, one may have written it for the others alone.
        let is_needed = |tensor: usize| {
            let is_written_here = web.producer(tensor).is_some_and(is_ours);
            let is_inside = is_written_here && web.tensor(tensor).is_virtual && !is_view(tensor);
            !(is_inside && web.readers(tensor).iter().all(|&reader| is_ours(reader)))
        };
        let mut all: Vec<usize> = parts.iter().flat_map(|&part| &self.memory[part]).copied().collect();
        all.sort_unstable();
        let groups = all.chunk_by(|a, b| a == b);
        groups.filter(|group| group.len() == 1 || is_needed(group[0])).map(|group| group[0]).collect()
    }

    /// Makes two parts one, under the name of `to`, unless another part has to run between them.
    pub(super) fn join(&mut self, web: &Web<'_>, is_view: &dyn Fn(usize) -> bool, from: usize, to: usize) -> bool {
        if from == to {
            return true;
        }
        let [first, last] = if self.order.label(from) < self.order.label(to) { [from, to] } else { [to, from] };
        let dag = OfParts { web, of: &self.of, ops: &self.ops, order: &self.order };
        let between = search(&dag, &mut self.sides, [first, last], false, &mut self.work);
        // What stands between the two either stays before both or goes behind both.
        let (place, is_behind, side) = match between {
            Between::Something | Between::Unknown => return false,
            Between::NothingAfter => (last, true, 0),
            Between::NothingBefore => (first, false, 1),
        };
        let order = &mut self.order;
        let moved = &mut self.sides[side].found;
        moved.sort_unstable_by_key(|&part| order.label(part));
        order.remove(if place == first { last } else { first });
        if place != to {
            order.replace(place, to);
        }
        self.work += if is_behind { order.move_behind(to, moved) } else { order.move_before(to, moved) } as u64;

        self.memory[to] = self.memory_of(web, is_view, &[from, to]);
        self.memory[from] = Vec::new();
        let ops = std::mem::take(&mut self.ops[from]);
        ops.iter().for_each(|&op| self.of[op] = to);
        self.ops[to].extend(ops);
        self.ops[to].sort_unstable();
        true
    }

    /// Whether `late` waits for `early`, however the ops stand together; `None` where that takes too long to tell.
    pub(super) fn waits(&mut self, web: &Web<'_>, late: usize, early: usize) -> Option<bool> {
        if late <= early {
            return Some(false);
        }
        if web.surely_waits(late, early) {
            return Some(true);
        }
        match search(&OfOps(web), &mut self.sides, [early, late], true, &mut self.work) {
            Between::Something => Some(true),
            Between::NothingAfter | Between::NothingBefore => Some(false),
            Between::Unknown => None,
        }
    }

    /// The parts in an order in which each can run: of those that can, always the one with the earliest op.
    pub(super) fn in_order(&self, web: &Web<'_>) -> Vec<&[usize]> {
        let mut waits_for = vec![0_usize; self.of.len()];
        let mut ready = std::collections::BTreeSet::new();
        let dag = OfParts { web, of: &self.of, ops: &self.ops, order: &self.order };
        (0..self.ops.len()).for_each(|part| dag.after(part, &mut |next| waits_for[next] += 1));
        for (part, ops) in self.ops.iter().enumerate() {
            if waits_for[part] == 0
                && let Some(&first) = ops.first()
            {
                ready.insert((first, part));
            }
        }
        let mut list = Vec::new();
        while let Some((_, part)) = ready.pop_first() {
            list.push(&self.ops[part][..]);
            dag.after(part, &mut |next| {
                // One for each time that it reads what is written here.
                waits_for[next] -= 1;
                if waits_for[next] == 0 {
                    ready.insert((self.ops[next][0], next));
                }
            });
        }
        list
    }
}
