//! What both engines share: items and the elements that each sums over, anywhere in memory, and the sums that are the gradients of scale and bias.
//!
//! An *item* is a row, or an element of a scale; its *elements* are those of the row, or those that the scale is repeated over. Where elements lie side by
//! side, a warp or a CTA takes an item and stands along them; where items do, lanes stand along the items and the warps of a CTA share the elements out.

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
        let step = match self.form {
            Form::Team(team) => team,
            Form::Beside => WARPS,
        };
        self.k.range_step(self.member, self.depth, step, |at| {
            let mut index = self.index.clone();
            index.extend(self.elements.index(at));
            f(&index);
        });
    }

    /// The sum over the item's elements; every thread of the item gets it.
    #[track_caller]
    pub(super) fn sum<T: Compute>(&self, value: impl Fn(&[Val<'k, u32>]) -> Val<'k, T>) -> Val<'k, T> {
        let k = self.k;
        let sum = k.var(T::constant(k, 0.0));
        self.each(|index| sum.set(sum.get() + value(index)));
        match (self.form, self.scratch) {
            (Form::Team(team), _) => lanes::over_team(k, team, sum.get(), &|x, y| x + y),
            (Form::Beside, Some(scratch)) => {
                let (bytes, base) = (T::TY.bytes(), scratch.address());
                k.st_shared(base + k.thread() * bytes, 0, sum.get());
                k.bar_sync();
                let line = base + k.lane() * bytes;
                let of = |warp: u32| k.ld_shared::<T>(line, i64::from(warp * 32 * bytes));
                let whole = (1..WARPS).fold(of(0), |sum, warp| sum + of(warp));
                // What follows may write the scratch again.
                k.bar_sync();
                whole
            }
            (Form::Beside, None) => sum.get(),
        }
    }
}

/// The gradients of scale and bias, as a kernel: `dscale = Σ dy · (x − μ) · r`, `dbias = Σ dy`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct VectorSpec {
    /// Of the scale: whether there are means. None for the bias.
    scale: Option<bool>,
    double: bool,
    form: Form,
    /// Dims of the gradient, and dims that are summed over.
    ranks: [usize; 2],
    /// Of the operands: `dy`, then `x`, the means and the roots of a scale, then what is written.
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
    fn operands(&self) -> Vec<OperandDecl> {
        strided::declarations(&self.types, self.ranks[0] + self.ranks[1], 1)
    }

    fn name(&self) -> String {
        let what = match self.scale {
            Some(true) => "dscale",
            Some(false) => "dscale_rms",
            None => "dbias",
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
        let [dy, read @ .., to] = operands.as_slice() else { return };
        let sum = walk.sum(|index| {
            let dy = dy.load::<T>(index);
            match read {
                [x, mean, inv] => dy * ((x.load::<T>(index) - mean.load::<T>(index)) * inv.load::<T>(index)),
                [x, inv] => dy * (x.load::<T>(index) * inv.load::<T>(index)),
                _ => dy,
            }
        });
        k.when(walk.is_first(), || to.store(walk.item(), AnyVal::of(sum)));
    }

    /// The kernels for gradients of one type, beside statistics in f32: of vectors along elements, and of vectors that rows have.
    pub(super) fn catalog() -> Vec<VectorSpec> {
        let mut specs = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for (form, ranks) in [(Form::Beside, [1, 1]), (Form::Team(32), [1, 2]), (Form::Team(THREADS), [1, 2])] {
                let of = |scale: Option<bool>, statistics: usize| {
                    let mut types = vec![dtype];
                    if scale.is_some() {
                        types.push(dtype);
                        types.extend(vec![DType::F32; statistics]);
                    }
                    types.push(dtype);
                    VectorSpec { scale, double: false, form, ranks, types }
                };
                specs.extend([of(Some(true), 2), of(Some(false), 1), of(None, 0)]);
            }
        }
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

/// Adds the launches that sum the gradients of scale and bias, from `x`, `dy` and statistics in memory.
pub(super) fn sum_vectors(problem: &NormProblem, statistics: &Statistics, program: &mut Program) {
    let NormPass::Backward { x, dy, dscale, dbias, .. } = &problem.pass else { return };
    let space = problem.space();
    for (to, is_scale) in [(dscale, true), (dbias, false)] {
        let Some(to) = to else { continue };
        let (kept, summed): (Vec<usize>, Vec<usize>) = (0..space.len()).partition(|&dim| to.strides[dim] != 0);
        let order: Vec<usize> = kept.iter().chain(&summed).copied().collect();
        let extents = |dims: &[usize]| dims.iter().map(|&dim| space[dim]).collect::<Vec<u64>>();
        let (kept_extents, summed_extents) = (extents(&kept), extents(&summed));
        let depth: u64 = summed_extents.iter().product();
        let last = |dims: &[usize]| dims.last().map(|&dim| dy.strides[dim]);
        let form = Form::of(last(&kept), kept_extents.last().copied().unwrap_or(1), last(&summed), depth);
        let given = |view: &View| (view.clone(), crate::layout::space::element(view, []));
        let mut operands = vec![given(dy)];
        if is_scale {
            operands.push(given(x));
            operands.extend(statistics.mean.clone());
            operands.push(statistics.inv.clone());
        }
        operands.push(given(to));
        let spec = VectorSpec {
            scale: is_scale.then_some(statistics.mean.is_some()),
            double: problem.compute == DType::F64,
            form,
            ranks: [kept.len(), summed.len()],
            types: operands.iter().map(|(view, _)| view.dtype).collect(),
        };
        for region in Region::all(&kept_extents, 1) {
            let items = region.points(1);
            let argument = |(view, address): &(View, Address)| {
                let view = permuted(view, &order);
                let elements: u64 = view.strides.iter().zip(&region.first).map(|(stride, first)| stride * first).sum();
                let first = Address { offset_bytes: address.offset_bytes + elements * view.dtype.bytes() as u64, ..*address };
                strided::argument_at(&view, first)
            };
            let args = VectorsArgs {
                items,
                depth: depth as u32,
                space: region.extents.clone(),
                elements: summed_extents.iter().map(|&extent| extent as u32).collect(),
                operands: operands.iter().map(argument).collect(),
            };
            let kernel = spec.clone().kernel();
            program.launch(Launch::new(kernel, [items.div_ceil(form.items()), 1, 1], args.bound(&spec)));
        }
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
