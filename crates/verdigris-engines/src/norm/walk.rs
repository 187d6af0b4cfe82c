//! What both engines share: items and the elements that each sums over, anywhere in memory, and the sums that are the gradients of scale and bias.
//!
//! An *item* is a row, or an element of a scale; its *elements* are those of the row, or those that the scale is repeated over. Where elements lie side by
//! side, a warp or a CTA takes an item and stands along them; where items do, lanes stand along the items and the warps of a CTA share the elements out.
//!
//! The gradients of a scale and a bias over the same elements are summed together, so that `dy` is read once. Where their items alone leave most of the
//! chip idle, a launch sums parts, each of an item and a share of its elements, and another adds the parts up, in their order.

use serde::{Deserialize, Serialize};
use verdigris_graph::{NormPass, NormProblem, View};
use verdigris_kir::face::{Header, Kernel, SharedPiece, Val, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use crate::fuse::compute::{self, Compute};
use crate::fuse::lanes;
use crate::fuse::operand::{OperandArgs, OperandDecl};
use crate::fuse::strided::{self, Strided};
use crate::fuse::value::AnyVal;
use crate::layout::space::{Extents, Region, Space};

/// Threads of a CTA.
pub(super) const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;
/// The most elements of an item that a warp takes by itself.
const WARP_ELEMENTS: u64 = 1024;
/// Beyond it, elements do not count in 31 bits.
pub(super) const LIMIT: u64 = 1 << 31;
/// Elements of a thread whose loads are on their way at a time.
const UNROLL: u32 = 4;
/// CTAs of sums that are worth a launch of their own to add up: so many fill the chip a few times over.
const MANY_CTAS: u64 = 1024;
/// Elements of a thread that are not worth cutting.
const FEW_ELEMENTS: u64 = 32;

/// How threads stand.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Form {
    /// So many threads, 32 or all, along the elements of one item.
    Team(u32),
    /// 32 lanes along items, the warps along elements.
    Beside,
}

impl Form {
    /// The form for items that are `item` elements of memory apart and their elements `element` apart.
    pub(super) fn of(item: Option<u64>, items: u64, element: Option<u64>, elements: u64) -> Form {
        let apart = |stride: Option<u64>| stride.filter(|&stride| stride > 0).unwrap_or(u64::MAX);
        if items >= 8 && apart(item) < apart(element) {
            Form::Beside
        } else if elements <= WARP_ELEMENTS {
            Form::Team(32)
        } else {
            Form::Team(THREADS)
        }
    }

    pub(super) fn name(self) -> String {
        match self {
            Form::Team(team) => format!("team{team}"),
            Form::Beside => "beside".to_owned(),
        }
    }

    /// Threads that share an item's elements.
    fn threads(self) -> u32 {
        match self {
            Form::Team(team) => team,
            Form::Beside => WARPS,
        }
    }

    /// Items that a CTA takes.
    pub(super) fn items(self) -> u32 {
        match self {
            Form::Team(team) => THREADS / team,
            Form::Beside => 32,
        }
    }
}

/// A thread among items and elements.
#[derive(Clone, Debug)]
pub(super) struct Walk<'k> {
    k: Kernel<'k>,
    form: Form,
    /// Whether it has one.
    pub(super) inside: Val<'k, bool>,
    index: Vec<Val<'k, u32>>,
    elements: Space<'k>,
    depth: Val<'k, u32>,
    /// The first element of this thread.
    member: Val<'k, u32>,
    scratch: Option<SharedPiece<'k>>,
}

impl<'k> Walk<'k> {
    /// Of a CTA of [`THREADS`] threads.
    #[track_caller]
    pub(super) fn new<T: Compute>(k: Kernel<'k>, form: Form, items: [Val<'k, u32>; 2], space: &Space<'k>, elements: Space<'k>) -> Walk<'k> {
        let [count, depth] = items;
        let (own, member, scratch) = match form {
            Form::Team(team) => {
                let own = k.cta() * (THREADS / team) + (k.thread() >> team.ilog2());
                (own, k.thread() & (team - 1), None)
            }
            Form::Beside => (k.cta() * 32 + k.lane(), k.thread() >> 5, Some(k.shared("beside", THREADS * T::TY.bytes(), 16))),
        };
        let inside = own.lt(count);
        // All threads stay together; those without an item take the last one and write nothing.
        let item = own.min(count - 1);
        Walk { k, form, inside, index: space.index(item), elements, depth, member, scratch }
    }

    /// Whether this thread writes what there is once an item.
    #[track_caller]
    pub(super) fn is_first(&self) -> Val<'k, bool> {
        self.inside & self.member.eq(0)
    }

    /// The item's index.
    pub(super) fn item(&self) -> &[Val<'k, u32>] {
        &self.index
    }

    /// Runs `f` for each element of this thread, by its index among all dims.
    #[track_caller]
    pub(super) fn each(&self, f: impl Fn(&[Val<'k, u32>])) {
        let step = self.form.threads();
        let turns = (self.depth + (step - 1) - self.member) >> step.ilog2();
        self.k.range_unrolled(turns, UNROLL, |turn| {
            let mut index = self.index.clone();
            index.extend(self.elements.index(self.member + turn * step));
            f(&index);
        });
    }

    /// The sum over the item's elements; every thread of the item gets it.
    #[track_caller]
    pub(super) fn sum<T: Compute>(&self, value: impl Fn(&[Val<'k, u32>]) -> Val<'k, T>) -> Val<'k, T> {
        let [sum] = self.sums(|index| [value(index)]);
        sum
    }

    /// Several sums over the item's elements; every thread of the item gets them.
    #[track_caller]
    pub(super) fn sums<T: Compute, const N: usize>(&self, value: impl Fn(&[Val<'k, u32>]) -> [Val<'k, T>; N]) -> [Val<'k, T>; N] {
        let k = self.k;
        let sums: [_; N] = std::array::from_fn(|_| k.var(T::constant(k, 0.0)));
        self.each(|index| {
            for (sum, value) in sums.iter().zip(value(index)) {
                sum.set(sum.get() + value);
            }
        });
        sums.map(|sum| self.joined(sum.get()))
    }

    /// The sum of what an item's threads have.
    #[track_caller]
    fn joined<T: Compute>(&self, sum: Val<'k, T>) -> Val<'k, T> {
        let k = self.k;
        match (self.form, self.scratch) {
            (Form::Team(team), _) => lanes::over_team(k, team, sum, &|x, y| x + y),
            (Form::Beside, Some(scratch)) => {
                let (bytes, base) = (T::TY.bytes(), scratch.address());
                k.st_shared(base + k.thread() * bytes, 0, sum);
                k.bar_sync();
                let line = base + k.lane() * bytes;
                let of = |warp: u32| k.ld_shared::<T>(line, i64::from(warp * 32 * bytes));
                let whole = (1..WARPS).fold(of(0), |sum, warp| sum + of(warp));
                // What follows may write the scratch again.
                k.bar_sync();
                whole
            }
            (Form::Beside, None) => sum,
        }
    }
}

/// The gradients of scale and bias, as a kernel: `dscale = Σ dy · (x − μ) · r`, `dbias = Σ dy`. Parts of sums are added up as a bias is, of which they are
/// the `dy`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct VectorSpec {
    /// Of the scale, where it is summed: whether there are means.
    scale: Option<bool>,
    /// Whether the bias is summed.
    bias: bool,
    double: bool,
    form: Form,
    /// Dims of the gradient, and dims that are summed over.
    ranks: [usize; 2],
    /// Of the operands: `dy`, then `x`, the means and the roots of a scale, then what is written, the scale's first.
    types: Vec<DType>,
}

verdigris_kir::parameters! {
    /// Of the kernel that sums gradients.
    struct Vectors / VectorsArgs of VectorSpec as spec {
        items: u32,
        depth: u32,
        space: Extents = spec.ranks[0],
        elements: Extents = spec.ranks[1],
        operands: Vec<OperandArgs> = spec.operands(),
    }
}

impl VectorSpec {
    fn written(&self) -> usize {
        usize::from(self.scale.is_some()) + usize::from(self.bias)
    }

    fn operands(&self) -> Vec<OperandDecl> {
        strided::declarations(&self.types, self.ranks[0] + self.ranks[1], self.written())
    }

    fn name(&self) -> String {
        let what = match (self.scale, self.bias) {
            (Some(true), true) => "dscale_dbias",
            (Some(false), true) => "dscale_dbias_rms",
            (Some(true), false) => "dscale",
            (Some(false), false) => "dscale_rms",
            (None, _) => "dbias",
        };
        let double = if self.double { "_f64" } else { "" };
        let types: Vec<&str> = self.types.iter().map(|dtype| dtype.name()).collect();
        let [items, elements] = self.ranks;
        format!("norm_{what}{double}_{}_d{items}x{elements}_{}", self.form.name(), types.join("_"))
    }

    /// The least chip that has the conversions.
    pub(super) fn target(&self) -> Target {
        compute::target_of_all(self.types.iter().copied())
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| if self.double { self.body::<f64>(k) } else { self.body::<f32>(k) })
    }

    fn body<'k, T: Compute>(&self, k: Kernel<'k>) {
        let Vectors { items, depth, space, elements, operands } = Vectors::declare(k, self);
        let operands = Strided::all(&self.types, operands);
        let walk = Walk::new::<T>(k, self.form, [items, depth], &space, elements);
        let (read, written) = operands.split_at(operands.len() - self.written());
        let [dy, read @ ..] = read else { return };
        let product = |index: &[Val<'k, u32>], dy: Val<'k, T>| match read {
            [x, mean, inv] => dy * ((x.load::<T>(index) - mean.load::<T>(index)) * inv.load::<T>(index)),
            [x, inv] => dy * (x.load::<T>(index) * inv.load::<T>(index)),
            _ => dy,
        };
        if self.written() == 2 {
            let sums = walk.sums(|index| {
                let dy = dy.load::<T>(index);
                [product(index, dy), dy]
            });
            k.when(walk.is_first(), || written.iter().zip(sums).for_each(|(to, sum)| to.store(walk.item(), AnyVal::of(sum))));
        } else {
            let sum = walk.sum(|index| product(index, dy.load::<T>(index)));
            k.when(walk.is_first(), || written.iter().for_each(|to| to.store(walk.item(), AnyVal::of(sum))));
        }
    }

    /// The kernels for gradients of one type, beside statistics in f32: of vectors along elements, and of vectors that rows have; the parts of either, and
    /// what adds them up.
    pub(super) fn catalog() -> Vec<VectorSpec> {
        let mut specs = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let whole = [(Form::Beside, [1, 1]), (Form::Team(32), [1, 2]), (Form::Team(THREADS), [1, 2])];
            // Shares of rows, and of planes of several images; what a warp takes alone is not cut.
            let parts = [(Form::Beside, [2, 1]), (Form::Team(THREADS), [2, 2])];
            let forms = whole.map(|form| (form, dtype)).into_iter().chain(parts.map(|form| (form, DType::F32)));
            for ((form, ranks), to) in forms {
                for (scale, statistics, bias) in [(Some(true), 2, true), (Some(false), 1, false), (None, 0, true)] {
                    let mut types = vec![dtype];
                    if scale.is_some() {
                        types.push(dtype);
                        types.extend(vec![DType::F32; statistics]);
                    }
                    types.extend(vec![to; usize::from(scale.is_some()) + usize::from(bias)]);
                    specs.push(VectorSpec { scale, bias, double: false, form, ranks, types });
                }
            }
            for form in [Form::Beside, Form::Team(32)] {
                specs.push(VectorSpec { scale: None, bias: true, double: false, form, ranks: [1, 1], types: vec![DType::F32, dtype] });
            }
        }
        // Of f32 sums and parts are the same kernel.
        let mut seen = std::collections::HashSet::new();
        specs.retain(|spec| seen.insert(spec.name()));
        specs
    }
}

/// Where the statistics of a backward pass lie that something else reads: what the caller gave, or scratch, packed by row.
#[derive(Clone, Debug)]
pub(super) struct Statistics {
    /// The means, where there are any.
    pub(super) mean: Option<(View, Address)>,
    /// The roots.
    pub(super) inv: (View, Address),
}

impl Statistics {
    /// Those that are given, or scratch for them, in the type that is computed in.
    pub(super) fn of(problem: &NormProblem, program: &mut Program) -> Option<Statistics> {
        let NormPass::Backward { mean, inv, .. } = &problem.pass else { return None };
        let given = |view: &View| (view.clone(), crate::layout::space::element(view, []));
        if let Some(inv) = inv {
            return Some(Statistics { mean: mean.as_ref().map(given), inv: given(inv) });
        }
        let mut strides = vec![0; problem.rows.len() + problem.elements.len()];
        let mut stride = 1;
        for (place, &extent) in strides.iter_mut().zip(&problem.rows).collect::<Vec<_>>().into_iter().rev() {
            *place = stride;
            stride *= extent;
        }
        let bytes = problem.row_count() * problem.compute.bytes() as u64;
        let view = View { slot: verdigris_graph::Slot(0), dtype: problem.compute, offset: 0, strides };
        let mut kept = |name: &'static str| (view.clone(), program.add_scratch(name, bytes));
        let mean = (problem.kind == verdigris_graph::NormKind::Layer).then(|| kept("mean"));
        Some(Statistics { mean, inv: kept("inv") })
    }
}

/// A view whose dims come in another order.
fn permuted(view: &View, order: &[usize]) -> View {
    View { strides: order.iter().map(|&dim| view.strides[dim]).collect(), ..view.clone() }
}

/// A gradient that is summed: where it goes, with its dims, and whether it is the scale's.
type Vector<'p> = (&'p View, bool);

/// Adds the launches that sum the gradients of scale and bias, from `x`, `dy` and statistics in memory.
pub(super) fn sum_vectors(problem: &NormProblem, statistics: &Statistics, program: &mut Program) {
    let NormPass::Backward { dscale, dbias, .. } = &problem.pass else { return };
    let kept = |to: &View| to.strides.iter().map(|&stride| stride != 0).collect::<Vec<bool>>();
    match (dscale, dbias) {
        (Some(scale), Some(bias)) if kept(scale) == kept(bias) => {
            sum_together(problem, statistics, &[(scale, true), (bias, false)], program)
        }
        _ => {
            for (to, is_scale) in [(dscale, true), (dbias, false)] {
                to.iter().for_each(|to| sum_together(problem, statistics, &[(to, is_scale)], program));
            }
        }
    }
}

/// The sums of vectors over the same dims.
fn sum_together(problem: &NormProblem, statistics: &Statistics, vectors: &[Vector<'_>], program: &mut Program) {
    let NormPass::Backward { x, dy, .. } = &problem.pass else { return };
    let mut space = problem.space();
    let given = |view: &View| (view.clone(), crate::layout::space::element(view, []));
    let mut read = vec![given(dy)];
    let scale = vectors.iter().any(|(_, is_scale)| *is_scale).then_some(statistics.mean.is_some());
    if scale.is_some() {
        read.push(given(x));
        read.extend(statistics.mean.clone());
        read.push(statistics.inv.clone());
    }
    let mut written: Vec<(View, Address)> = vectors.iter().map(|(to, _)| given(to)).collect();
    let is_kept = |to: &View| to.strides.iter().map(|&stride| stride != 0).collect::<Vec<bool>>();
    let mut kept = is_kept(vectors[0].0);
    let double = problem.compute == DType::F64;
    let spec = |form: Form, scale: Option<bool>, bias: bool| VectorSpec { scale, bias, double, form, ranks: [0, 0], types: Vec::new() };
    let bias = vectors.iter().any(|(_, is_scale)| !is_scale);
    // The outermost dim that is summed over becomes one of the parts', whole or cut into equal shares.
    let (form, items, depth) = form_of(&space, &kept, dy);
    let ctas = items.div_ceil(u64::from(form.items()));
    let of_thread = depth / u64::from(form.threads());
    let outer = (0..space.len()).find(|&dim| !kept[dim] && space[dim] > 1);
    let shares = outer.map_or(1, |outer| share_of(space[outer], MANY_CTAS.div_ceil(ctas.max(1)).min(of_thread / FEW_ELEMENTS)));
    let (Some(outer), true) = (outer, shares > 1) else {
        return launch_sums(&spec(form, scale, bias), &space, &kept, &read, &written, program);
    };
    let inner = space[outer] / shares;
    let cut = |view: &View, stride: u64| {
        let mut strides = view.strides.clone();
        strides.insert(outer, stride);
        View { strides, ..view.clone() }
    };
    space[outer] = inner;
    space.insert(outer, shares);
    kept.insert(outer, true);
    let read: Vec<(View, Address)> = read.iter().map(|(view, at)| (cut(view, view.strides[outer] * inner), *at)).collect();
    written.iter_mut().for_each(|(view, _)| *view = cut(view, 0));
    // Parts lie packed, their own number outermost.
    let mut packed = vec![0; space.len()];
    let mut size = 1;
    let inside = (0..space.len()).rev().filter(|&dim| kept[dim] && dim != outer);
    for dim in inside.chain([outer]) {
        packed[dim] = size;
        size *= space[dim];
    }
    let bytes = size * problem.compute.bytes() as u64;
    let part = View { slot: verdigris_graph::Slot(0), dtype: problem.compute, offset: 0, strides: packed };
    let parts: Vec<(View, Address)> = (vectors.iter())
        .map(|(_, is_scale)| (part.clone(), program.add_scratch(if *is_scale { "scale shares" } else { "bias shares" }, bytes)))
        .collect();
    let (form, ..) = form_of(&space, &kept, dy_of(&read));
    launch_sums(&spec(form, scale, bias), &space, &kept, &read, &parts, program);
    // Of the parts, all but their number is kept; what was summed has gone.
    let left: Vec<usize> = (0..space.len()).filter(|&dim| kept[dim]).collect();
    let of_left = |view: &View| permuted(view, &left);
    let space: Vec<u64> = left.iter().map(|&dim| space[dim]).collect();
    let kept: Vec<bool> = left.iter().map(|&dim| dim != outer).collect();
    for ((part, from), (to, at)) in parts.iter().zip(&written) {
        let (part, to) = (of_left(part), of_left(to));
        let (form, ..) = form_of(&space, &kept, &part);
        launch_sums(&spec(form, None, true), &space, &kept, &[(part, *from)], &[(to, *at)], program);
    }
}

fn dy_of(read: &[(View, Address)]) -> &View {
    &read[0].0
}

/// The largest number of equal shares of an extent that is at most `most`, and at least 1.
fn share_of(extent: u64, most: u64) -> u64 {
    (1..=most.min(extent).max(1)).rev().find(|shares| extent.is_multiple_of(*shares)).unwrap_or(1)
}

/// How threads stand for sums over the dims of a space that are not kept, items, and elements of each.
fn form_of(space: &[u64], kept: &[bool], dy: &View) -> (Form, u64, u64) {
    let extent = |wanted: bool| -> u64 { space.iter().zip(kept).filter(|(_, kept)| **kept == wanted).map(|(extent, _)| extent).product() };
    // Dims of one element stand nowhere.
    let last = |wanted: bool| (0..space.len()).rev().find(|&dim| kept[dim] == wanted && space[dim] > 1);
    let stride = |wanted: bool| last(wanted).map(|dim| dy.strides[dim]);
    let beside = last(true).map_or(1, |dim| space[dim]);
    (Form::of(stride(true), beside, stride(false), extent(false)), extent(true), extent(false))
}

/// Launches the sums of operands over the dims of a space that are not kept.
fn launch_sums(
    spec: &VectorSpec,
    space: &[u64],
    kept: &[bool],
    read: &[(View, Address)],
    written: &[(View, Address)],
    program: &mut Program,
) {
    let (items, elements): (Vec<usize>, Vec<usize>) = (0..space.len()).partition(|&dim| kept[dim]);
    let order: Vec<usize> = items.iter().chain(&elements).copied().collect();
    let extents = |dims: &[usize]| dims.iter().map(|&dim| space[dim]).collect::<Vec<u64>>();
    let (item_extents, element_extents) = (extents(&items), extents(&elements));
    let operands: Vec<&(View, Address)> = read.iter().chain(written).collect();
    let types = operands.iter().map(|(view, _)| view.dtype).collect();
    let spec = VectorSpec { ranks: [items.len(), elements.len()], types, ..spec.clone() };
    for region in Region::all(&item_extents, 1) {
        let items = region.points(1);
        let argument = |(view, address): &(View, Address)| {
            let view = permuted(view, &order);
            let elements: u64 = view.strides.iter().zip(&region.first).map(|(stride, first)| stride * first).sum();
            let first = Address { offset_bytes: address.offset_bytes + elements * view.dtype.bytes() as u64, ..*address };
            strided::argument_at(&view, first)
        };
        let args = VectorsArgs {
            items,
            depth: element_extents.iter().product::<u64>() as u32,
            space: region.extents.clone(),
            elements: element_extents.iter().map(|&extent| extent as u32).collect(),
            operands: operands.iter().map(|operand| argument(operand)).collect(),
        };
        let ctas = items.div_ceil(spec.form.items());
        program.launch(Launch::new(spec.clone().kernel(), [ctas, 1, 1], args.bound(&spec)));
    }
}

/// Launches that [`sum_vectors`] adds, of large sums.
pub(super) fn launches(problem: &NormProblem) -> f64 {
    let NormPass::Backward { dscale, dbias, .. } = &problem.pass else { return 0.0 };
    match dscale.iter().chain(dbias).count() {
        0 => 0.0,
        vectors => 1.0 + vectors as f64,
    }
}

/// The most elements that a gradient of scale or bias is a sum of.
pub(super) fn most_summed(problem: &NormProblem) -> u64 {
    let NormPass::Backward { dscale, dbias, .. } = &problem.pass else { return 0 };
    let summed = |to: &View| -> u64 {
        let dims = problem.space();
        dims.iter().zip(&to.strides).filter(|(_, stride)| **stride == 0).map(|(&dim, _)| dim).product()
    };
    [dscale, dbias].into_iter().flatten().map(summed).max().unwrap_or(0)
}
