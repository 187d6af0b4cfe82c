//! `norm.strided`: normalization and its gradients of rows that lie anywhere ([`verdigris_graph::NormProblem`] has the formulas).
//!
//! It takes all of them: any element types, any strides, vectors that broadcast in any way, rows of fewer than 2^31 elements.
//!
//! **Method.** A warp takes a row of up to 1024 elements, a CTA a longer one; where rows lie side by side and not their elements, lanes stand along
//! the rows and the warps of a CTA share the elements out. The row is read for the mean, for the squares of the deviations and for the result, one
//! element at a time. The gradients of scale and bias are sums of their own over `x`, `dy` and the rows' statistics.
//!
//! **When it wins.** Where neither `norm.rows` nor `norm.groups` takes the rows: tensors of two memory formats, rows over several dims with gaps. It reads `x` three times
//! (a gradient `x` and `dy` once more each for the scale), from L2 where rows of those CTAs that run at once fit there.
//!
//! **Numbers.** In f32 (f64 where an operand is f64): deviations are squared after the mean is known. Results repeat bit for bit.

use serde::{Deserialize, Serialize};
use verdigris_graph::{NormKind, NormPass, NormProblem, Problem, View};
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::walk::{self, Form, LIMIT, Statistics, THREADS, VectorSpec, Walk};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute::{self, Compute};
use crate::fuse::operand::{OperandArgs, OperandDecl};
use crate::fuse::strided::{self, Strided};
use crate::fuse::value::AnyVal;
use crate::layout::space::{Extents, Region, element};
use crate::sums::moments::require_eps;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Any {
    problem: NormProblem,
    spec: Spec,
}

impl Algorithm for Any {
    const ID: EngineId = EngineId { name: "norm.strided", number: 701 };
    const VERSION: u32 = 1;
    type Config = ();

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Norm(problem) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is norm", problem.kind())));
        };
        let extent = problem.row_elements();
        Self::ID.require(extent < LIMIT, Reason::Extent, format_args!("rows of {extent} elements, taken below 2^31"))?;
        let summed = walk::most_summed(problem);
        Self::ID.require(summed < LIMIT, Reason::Extent, format_args!("gradients that are sums of {summed} elements, taken below 2^31"))?;
        let rank = problem.space().len();
        Self::ID.require(rank <= verdigris_tensor::MAX_RANK + 1, Reason::Extent, format_args!("{rank} dims, taken are 9"))?;
        require_eps(Self::ID, problem.eps.0, problem.compute)?;
        let target = compute::target_of_all(problem.operands().iter().map(|(_, view, _)| view.dtype));
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        Ok(Any { problem: problem.clone(), spec: Spec::of(problem) })
    }

    fn configs(&self) -> Vec<()> {
        vec![()]
    }

    fn knobs((): &()) -> Knobs {
        Knobs::default()
    }

    fn notes(&self, (): &()) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, (): &()) -> Work {
        let elements = self.problem.row_count() as f64 * self.problem.row_elements() as f64;
        let whole = |(_, view, written): &(&str, &View, bool)| {
            let is_whole = view.strides.iter().zip(self.problem.space()).all(|(&stride, extent)| stride > 0 || extent <= 1);
            if is_whole { view.dtype.bytes() as f64 * if *written { 1.0 } else { 3.0 } } else { 0.0 }
        };
        let bytes: f64 = self.problem.operands().iter().map(whole).sum();
        // An element at a time, with its address, for the mean, the squares and the result.
        let issued = elements / 32.0 * 30.0 * 3.0;
        // Items are not cut: few of them leave most of the chip idle.
        let ctas = (self.problem.row_count() as f64 / f64::from(self.spec.form.items())).ceil();
        let launches = if self.spec.has_rows() { 1.0 } else { 0.0 } + walk::launches(&self.problem);
        Work::default().beside([Stream::new(Traffic::Transposed, elements * bytes).of_ctas(ctas).issuing(issued).in_launches(launches)])
    }

    fn lower(&self, (): &()) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, &self.spec);
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let statistics = Statistics::of(p, &mut program);
        let mut operands: Vec<(View, Address)> =
            spec.read_and_written(p).into_iter().map(|view| (view.clone(), element(view, []))).collect();
        if let Some(statistics) = statistics.as_ref().filter(|_| spec.keeps()) {
            operands.extend(statistics.mean.clone());
            operands.push(statistics.inv.clone());
        }
        let depth = p.row_elements();
        for region in Region::all(&p.rows, 1).into_iter().filter(|_| spec.has_rows()) {
            let rows = region.points(1);
            let argument = |(view, address): &(View, Address)| {
                let elements: u64 = view.strides.iter().zip(&region.first).map(|(stride, first)| stride * first).sum();
                strided::argument_at(
                    view,
                    Address { offset_bytes: address.offset_bytes + elements * view.dtype.bytes() as u64, ..*address },
                )
            };
            let args = OfRowsArgs {
                items: rows,
                depth: depth as u32,
                count: depth as f64,
                eps: p.eps.0,
                space: region.extents.clone(),
                elements: p.elements.iter().map(|&extent| extent as u32).collect(),
                operands: operands.iter().map(argument).collect(),
            };
            program.launch(Launch::new(spec.clone().kernel(), [rows.div_ceil(spec.form.items()), 1, 1], args.bound(spec)));
        }
        if let Some(statistics) = statistics {
            walk::sum_vectors(p, &statistics, &mut program);
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut specs = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            // Channels-last images by groups, by instances, and rows with gaps.
            for (form, ranks) in [(Form::Team(THREADS), [2, 2]), (Form::Beside, [2, 1]), (Form::Team(32), [1, 1])] {
                let pass = Pass::Forward { residual: false, scale: true, bias: true, sum: false, mean: false, inv: false };
                specs.push(Spec::plain(NormKind::Layer, pass, form, ranks, vec![dtype; 4]));
                let pass = Pass::Backward { scale: true, mean: false, inv: false, dsum: false, dx: true, keeps: true };
                let types = vec![dtype, dtype, dtype, dtype, DType::F32, DType::F32];
                specs.push(Spec::plain(NormKind::Layer, pass, form, ranks, types));
            }
        }
        let own = specs.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel);
        let vectors = VectorSpec::catalog().into_iter().filter(|spec| spec.target() <= target).map(VectorSpec::kernel);
        own.chain(vectors).collect()
    }
}

/// Which operands there are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Pass {
    Forward {
        residual: bool,
        scale: bool,
        bias: bool,
        sum: bool,
        mean: bool,
        inv: bool,
    },
    /// `keeps`: statistics that were computed are stored for the sums behind.
    Backward {
        scale: bool,
        mean: bool,
        inv: bool,
        dsum: bool,
        dx: bool,
        keeps: bool,
    },
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    kind: NormKind,
    pass: Pass,
    zero_centred: bool,
    double: bool,
    form: Form,
    /// Dims of the rows, and dims that their elements lie along.
    ranks: [usize; 2],
    /// Element types of the operands, in the order of slots; those of kept statistics behind them.
    types: Vec<DType>,
}

impl Spec {
    fn of(p: &NormProblem) -> Spec {
        let pass = match &p.pass {
            NormPass::Forward { residual, scale, bias, sum, mean, inv, .. } => Pass::Forward {
                residual: residual.is_some(),
                scale: scale.is_some(),
                bias: bias.is_some(),
                sum: sum.is_some(),
                mean: mean.is_some(),
                inv: inv.is_some(),
            },
            NormPass::Backward { scale, mean, inv, dsum, dx, dscale, .. } => Pass::Backward {
                scale: scale.is_some() && dx.is_some(),
                mean: mean.is_some(),
                inv: inv.is_some(),
                dsum: dsum.is_some(),
                dx: dx.is_some(),
                keeps: dscale.is_some() && inv.is_none(),
            },
        };
        let x = p.operand("x").map(|x| x.strides.as_slice()).unwrap_or_default();
        let last = |dims: &[u64], first: usize| dims.len().checked_sub(1).and_then(|dim| x.get(first + dim).copied());
        let form = Form::of(last(&p.rows, 0), p.rows.last().copied().unwrap_or(1), last(&p.elements, p.rows.len()), p.row_elements());
        let double = p.compute == DType::F64;
        let ranks = [p.rows.len(), p.elements.len()];
        let mut spec = Spec { kind: p.kind, pass, zero_centred: false, double, form, ranks, types: Vec::new() };
        spec.zero_centred = p.zero_centred && spec.has_scale();
        spec.types = spec.read_and_written(p).into_iter().map(|view| view.dtype).collect();
        if spec.keeps() {
            spec.types.extend(vec![p.compute; spec.statistics()]);
        }
        spec
    }

    fn plain(kind: NormKind, pass: Pass, form: Form, ranks: [usize; 2], types: Vec<DType>) -> Spec {
        Spec { kind, pass, zero_centred: false, double: false, form, ranks, types }
    }

    /// The operands of the kernel of rows, without what it keeps.
    fn read_and_written<'p>(&self, p: &'p NormProblem) -> Vec<&'p View> {
        let is_mine = |name: &str| match self.pass {
            Pass::Forward { .. } => true,
            Pass::Backward { dx, scale, .. } => match name {
                "dscale" | "dbias" => false,
                "dy" => dx,
                "scale" => scale,
                _ => true,
            },
        };
        p.operands().into_iter().filter(|(name, ..)| is_mine(name)).map(|(_, view, _)| view).collect()
    }

    /// Whether the kernel of rows has anything to do.
    fn has_rows(&self) -> bool {
        !matches!(self.pass, Pass::Backward { dx: false, keeps: false, .. })
    }

    fn keeps(&self) -> bool {
        matches!(self.pass, Pass::Backward { keeps: true, .. })
    }

    fn has_scale(&self) -> bool {
        matches!(self.pass, Pass::Forward { scale: true, .. } | Pass::Backward { scale: true, .. })
    }

    /// How many statistics a row has.
    fn statistics(&self) -> usize {
        if self.kind == NormKind::Layer { 2 } else { 1 }
    }

    fn outputs(&self) -> usize {
        match self.pass {
            Pass::Forward { sum, mean, inv, .. } => 1 + usize::from(sum) + usize::from(mean) + usize::from(inv),
            Pass::Backward { dx, keeps, .. } => usize::from(dx) + if keeps { self.statistics() } else { 0 },
        }
    }

    fn operands(&self) -> Vec<OperandDecl> {
        strided::declarations(&self.types, self.ranks[0] + self.ranks[1], self.outputs())
    }

    fn name(&self) -> String {
        let flag = |set: bool, word: &str| if set { format!("_{word}") } else { String::new() };
        let kind = if self.kind == NormKind::Layer { "layer" } else { "rms" };
        let pass = match self.pass {
            Pass::Forward { residual, scale, bias, sum, mean, inv } => format!(
                "forward{}{}{}{}{}{}",
                flag(residual, "residual"),
                flag(scale, "scale"),
                flag(bias, "bias"),
                flag(sum, "sum"),
                flag(mean, "mean"),
                flag(inv, "inv")
            ),
            Pass::Backward { scale, mean, inv, dsum, dx, keeps } => format!(
                "backward{}{}{}{}{}{}",
                flag(scale, "scale"),
                flag(mean, "mean"),
                flag(inv, "inv"),
                flag(dsum, "dsum"),
                flag(dx, "dx"),
                flag(keeps, "keeps")
            ),
        };
        let (centred, double) = (flag(self.zero_centred, "centred"), flag(self.double, "f64"));
        let types: Vec<&str> = self.types.iter().map(|dtype| dtype.name()).collect();
        let [rows, elements] = self.ranks;
        format!("norm_strided_{kind}_{pass}{centred}{double}_{}_d{rows}x{elements}_{}", self.form.name(), types.join("_"))
    }

    fn target(&self) -> Target {
        compute::target_of_all(self.types.iter().copied())
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| if self.double { self.body::<f64>(k) } else { self.body::<f32>(k) })
    }

    fn body<'k, T: Compute>(&self, k: Kernel<'k>) {
        let OfRows { items, depth, count, eps, space, elements, operands } = OfRows::declare(k, self);
        let mut operands = Strided::all(&self.types, operands).into_iter();
        let mut next = |there: bool| if there { operands.next() } else { None };
        let walk = Walk::new::<T>(k, self.form, [items, depth], &space, elements);
        let (count, eps) = (T::from_f64(count), T::from_f64(eps));
        let Some(x) = next(true) else { return };
        let store =
            |to: &Strided<'k>, index: &[Val<'k, u32>], value: Val<'k, T>| k.when(walk.inside, || to.store(index, AnyVal::of(value)));
        let once = |to: &Option<Strided<'k>>, value: Val<'k, T>| {
            if let Some(to) = to {
                k.when(walk.is_first(), || to.store(walk.item(), AnyVal::of(value)));
            }
        };
        let gamma = |scale: &Strided<'k>, index: &[Val<'k, u32>]| {
            let scale = scale.load::<T>(index);
            if self.zero_centred { scale + T::constant(k, 1.0) } else { scale }
        };
        match self.pass {
            Pass::Forward { residual, scale, bias, sum, mean, inv } => {
                let (residual, scale, bias) = (next(residual), next(scale), next(bias));
                let Some(y) = next(true) else { return };
                let (to_sum, to_mean, to_inv) = (next(sum), next(mean), next(inv));
                let value = |index: &[Val<'k, u32>]| {
                    let x = x.load::<T>(index);
                    residual.as_ref().map_or(x, |residual| x + residual.load::<T>(index))
                };
                let [mean, inv] = self.statistics_of(&walk, count, eps, value);
                once(&to_mean, mean);
                once(&to_inv, inv);
                walk.each(|index| {
                    let value = value(index);
                    if let Some(to) = &to_sum {
                        store(to, index, value);
                    }
                    let mut y_value = (value - mean) * inv;
                    if let Some(scale) = &scale {
                        y_value = y_value * gamma(scale, index);
                    }
                    if let Some(bias) = &bias {
                        y_value = y_value + bias.load::<T>(index);
                    }
                    store(&y, index, y_value);
                });
            }
            Pass::Backward { scale, mean, inv, dsum, dx, keeps } => {
                let (dy, scale) = (next(dx), next(scale));
                let (given_mean, given_inv, dsum, dx) = (next(mean), next(inv), next(dsum), next(dx));
                let kept_mean = next(keeps && self.kind == NormKind::Layer);
                let kept_inv = next(keeps);
                let [mean, inv] = match given_inv {
                    Some(inv) => {
                        let mean = given_mean.map_or(T::constant(k, 0.0), |mean| mean.load::<T>(walk.item()));
                        [mean, inv.load::<T>(walk.item())]
                    }
                    None => self.statistics_of(&walk, count, eps, |index| x.load::<T>(index)),
                };
                once(&kept_mean, mean);
                once(&kept_inv, inv);
                let (Some(dy), Some(dx)) = (dy, dx) else { return };
                let h = |index: &[Val<'k, u32>]| (x.load::<T>(index) - mean) * inv;
                let g = |index: &[Val<'k, u32>]| {
                    let dy = dy.load::<T>(index);
                    scale.as_ref().map_or(dy, |scale| dy * gamma(scale, index))
                };
                let product = T::quotient(walk.sum(|index| g(index) * h(index)), count);
                let of_g = match self.kind {
                    NormKind::Layer => T::quotient(walk.sum(g), count),
                    NormKind::Rms => T::constant(k, 0.0),
                };
                walk.each(|index| {
                    let mut value = inv * (g(index) - of_g - h(index) * product);
                    if let Some(dsum) = &dsum {
                        value = value + dsum.load::<T>(index);
                    }
                    store(&dx, index, value);
                });
            }
        }
    }

    /// `μ` and `r` of each item.
    fn statistics_of<'k, T: Compute>(
        &self,
        walk: &Walk<'k>,
        count: Val<'k, T>,
        eps: Val<'k, T>,
        value: impl Fn(&[Val<'k, u32>]) -> Val<'k, T>,
    ) -> [Val<'k, T>; 2] {
        let k = count.kernel();
        let mean = match self.kind {
            NormKind::Layer => T::quotient(walk.sum(&value), count),
            NormKind::Rms => T::constant(k, 0.0),
        };
        let squares = walk.sum(|index| {
            let deviation = value(index) - mean;
            deviation * deviation
        });
        [mean, T::rsqrt(T::quotient(squares, count) + eps)]
    }
}

verdigris_kir::parameters! {
    /// Of the kernel that goes through rows.
    struct OfRows / OfRowsArgs of Spec as spec {
        items: u32,
        depth: u32,
        /// Elements of a row, as a number.
        count: f64,
        eps: f64,
        space: Extents = spec.ranks[0],
        elements: Extents = spec.ranks[1],
        operands: Vec<OperandArgs> = spec.operands(),
    }
}
