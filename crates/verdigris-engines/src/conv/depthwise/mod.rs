//! `conv.depthwise`: convolutions in which each channel has filters of its own.
//!
//! **What.** All three directions, with one or more filters for a channel of x (groups = C, K a multiple of C), in one to three spatial
//! dims: filters of any size, strides 1 and 2, dilations, any padding, any strides of tensors, bf16, f16 and f32 operands. What is refused
//! is the steps before a convolution, larger strides, and a dgrad that is strided and dilated at once.
//!
//! **Method.** There is no sum over channels, hence no matrix product, and tensor cores would multiply by zeros. A CTA of 128 or 256
//! threads brings a tile of activations with the pixels around it to shared memory by `cp.async`, zeros in place of what is outside, and
//! multiplies it in f32:
//!
//! - *fprop and dgrad* ([`pixels`]): a thread has 4×7 outputs of the channels of a 32-bit word; each word of the tile is read and widened
//!   once for all outputs that meet it. A dgrad of stride 1 is an fprop with its taps reversed; one of stride 2 meets every second tap.
//! - *wgrad* ([`filter`]): a thread has all taps of a block and adds up over 4×7 gradients at a time, of stride 2 over 2×4; CTAs have shares of
//!   the pixels, which a second launch adds up in their order.
//!
//! Filters of 3×3, 5×5 and 7×7 are unrolled; others, and planes of taps along a third dim, are sequences of such blocks, or of 1×4. Dilated
//! taps meet pixels a dilation apart, so outputs of one phase (modulo the dilation) make tiles of their own, and dilation costs nothing.
//!
//! Channels come by as many bytes at a time as they are a multiple of: 16, 8 or 4, or one by one. A CTA has 64 bytes of them, for 3×3 taps
//! also 128, which L2 gives more readily; where tiles would leave SMs idle, threads have 2×4 outputs. Which of these is a knob.
//!
//! **When it wins.** Wherever it is taken, but for the tensor cores of `conv.grouped` where channels are whole channel tiles: what reads
//! and writes the tensors once is bound by memory up to about 30 taps, by multiplications beyond that.
//!
//! **Numbers.** Operands widen exactly; products and sums are fused multiply-adds in f32 in a fixed order, so results repeat bit for bit,
//! and f32 operands are not rounded where tf32 would be allowed. Zeros take the place of what is outside: of the pixels around x, which an
//! infinite tap turns into NaN, and of the gradients beyond y, so that an infinity near the edge of x may reach all taps of its channel in
//! a wgrad.

mod coordinates;
mod filter;
mod pixels;
mod spec;
mod tile;
mod view;

use verdigris_graph::ops::matmul::Precision;
use verdigris_graph::{ConvProblem, Direction, Problem};
use verdigris_kir::ir::Target;
use verdigris_kir::params::Arguments;
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use std::rc::Rc;

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::conv::geometry::spacing::Stride;
use crate::cost::{Loop, Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::layout::space::divisor;
use crate::split_k::filter::depthwise as reduction;
use crate::sums::statistics;
use coordinates::ShareArguments;
use pixels::{PixelsArguments, ProductArguments};
use spec::{Copying, Kind, Spec, Team};
use view::{Places, View};

const ID: EngineId = EngineId { name: "conv.depthwise", number: 202 };

/// What a launch counts in 32 bits stays below this.
const COUNT_LIMIT: u64 = 1 << 30;

/// An accepted problem: the kernels that may take it.
#[derive(Clone, Debug)]
pub(super) struct Depthwise(Vec<Rc<Cut>>);

/// A kernel for the problem, and how often its CTAs fill the chip.
#[derive(Clone, Debug)]
pub(super) struct Config {
    cut: Rc<Cut>,
    waves: u64,
}

impl Algorithm for Depthwise {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Conv(conv) = problem else {
            return Err(ID.refusal(Reason::Problem, format_args!("{}, takes conv", problem.kind())));
        };
        ID.require(
            conv.groups == conv.c && conv.c > 0,
            Reason::Extent,
            format_args!("{} channels in {} groups, takes one channel of x a group", conv.c, conv.groups),
        )?;
        ID.require(!conv.is_empty() && conv.gemm_extents().k > 0, Reason::Extent, "a result or a sum of no elements")?;
        ID.require(
            conv.prologue.is_empty(),
            Reason::Epilogue,
            format_args!("{} steps on the activations, takes them as they are stored", conv.prologue.len()),
        )?;
        statistics::require(ID, conv)?;
        let [(_, first, _), (_, second, _)] = conv.operands();
        let dtype = first.dtype;
        ID.require(
            dtype == second.dtype && matches!(dtype, DType::Bf16 | DType::F16 | DType::F32),
            Reason::DType,
            format_args!("{dtype} and {}, takes two of bf16, f16 or f32", second.dtype),
        )?;
        ID.require(
            matches!(conv.precision, Precision::Ieee | Precision::Fp32 | Precision::Tf32),
            Reason::Precision,
            format_args!("{:?}, sums in f32", conv.precision),
        )?;
        let cuts = Cut::all(conv, &View::new(conv)?, arch)?;
        let target = cuts[0].spec.target();
        ID.require(arch.runs(target), Reason::Target, format_args!("needs {}", target.ptx()))?;
        Ok(Depthwise(cuts.into_iter().map(Rc::new).collect()))
    }

    fn configs(&self) -> Vec<Config> {
        self.0.iter().flat_map(|cut| cut.waves().into_iter().map(|waves| Config { cut: cut.clone(), waves })).collect()
    }

    fn knobs(Config { cut, waves }: &Config) -> Knobs {
        Knobs::new([("block", cut.number), ("waves", *waves as u32)])
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes::of(DType::F32)
    }

    fn work(&self, Config { cut, waves }: &Config) -> Work {
        cut.work(*waves)
    }

    fn lower(&self, Config { cut, waves }: &Config) -> Result<Program, Refusal> {
        let mut program = empty_program(&cut.problem.slots());
        match cut.spec.kind {
            Kind::Pixels => cut.pixel_steps(*waves, &mut program),
            Kind::Filter => cut.filter_steps(*waves, &mut program),
        }
        if let Some(statistics) = &cut.problem.statistics {
            statistics::steps(&cut.problem, statistics, &mut program);
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut kernels = Vec::new();
        for dtype in [DType::Bf16, DType::F16, DType::F32] {
            for copying in [Copying::Vectors(16), Copying::Vectors(8), Copying::Vectors(4), Copying::Elements] {
                for kind in [Kind::Pixels, Kind::Filter] {
                    for stride in [Stride::One, Stride::Two, Stride::Half] {
                        for &(team, block, ragged) in blocks(kind, stride, copying) {
                            let epilogue = (kind == Kind::Pixels).then(|| plain(dtype, copying));
                            let spec = Spec { kind, stride, team, block, ragged, dtype, copying, epilogue };
                            kernels.extend((spec.target() <= target).then(|| spec.kernel()));
                        }
                    }
                }
            }
            kernels.push(reduction::kernel(EpilogueSpec::plain(OperandSpec::strided(dtype))));
        }
        if Target::Sm80 <= target { kernels } else { Vec::new() }
    }
}

/// Who works on a tile, a block of taps, and whether filters may be no whole number of them.
type Block = (Team, [u32; 2], bool);

/// The blocks of taps that kernels are unrolled for. One of each list is ragged, so that each filter has its kernel.
fn blocks(kind: Kind, stride: Stride, copying: Copying) -> &'static [Block] {
    use Team::{Fine, Plain, Wide};
    match (kind, stride, copying) {
        (Kind::Pixels, Stride::One, Copying::Vectors(16)) => &[
            (Plain, [3, 3], false),
            (Plain, [5, 5], false),
            (Plain, [7, 7], false),
            (Plain, [7, 7], true),
            (Plain, [1, 4], true),
            (Wide, [3, 3], false),
            (Fine, [3, 3], false),
            (Fine, [5, 5], false),
        ],
        (Kind::Filter, Stride::One, Copying::Vectors(16)) => {
            &[(Plain, [3, 3], false), (Plain, [5, 5], false), (Plain, [7, 7], false), (Plain, [7, 7], true), (Wide, [3, 3], false)]
        }
        (_, Stride::One, Copying::Vectors(_)) => &[(Plain, [3, 3], false), (Plain, [5, 5], false), (Plain, [7, 7], true)],
        (_, Stride::One, Copying::Elements) => &[(Plain, [7, 7], true)],
        (Kind::Filter, Stride::Two, Copying::Vectors(16)) => {
            &[(Plain, [3, 3], false), (Plain, [5, 5], false), (Plain, [5, 5], true), (Plain, [7, 7], false)]
        }
        (_, Stride::Two, Copying::Vectors(16)) => &[(Plain, [3, 3], false), (Plain, [5, 5], false), (Plain, [5, 5], true)],
        (_, Stride::Two, Copying::Vectors(_)) => &[(Plain, [3, 3], false), (Plain, [5, 5], true)],
        (_, Stride::Two, Copying::Elements) => &[(Plain, [5, 5], true)],
        // Taps and outputs are even together, so larger filters are cut at even taps.
        (Kind::Pixels, Stride::Half, _) => &[(Plain, [6, 6], true)],
        (Kind::Filter, Stride::Half, _) => &[],
    }
}

/// The epilogue of a plain problem: of vectors, channels lie side by side, and in pairs where a thread has two.
fn plain(d: DType, copying: Copying) -> EpilogueSpec {
    match copying {
        Copying::Vectors(_) => EpilogueSpec { pairs: d.bytes() < 4, ..EpilogueSpec::plain(OperandSpec { dtype: d, walk: Walk::Row }) },
        Copying::Elements => EpilogueSpec::plain(OperandSpec::strided(d)),
    }
}

/// A kernel for a problem, and how its launch is cut.
#[derive(Clone, Debug)]
struct Cut {
    /// Among the blocks that there are for such problems.
    number: u32,
    /// As it was asked.
    problem: ConvProblem,
    view: View,
    spec: Spec,
    places: Places,
    arch: Arch,
}

impl Cut {
    /// The kernels for a problem, with how it is cut for each.
    fn all(conv: &ConvProblem, view: &View, arch: &Arch) -> Result<Vec<Cut>, Refusal> {
        let kind = if conv.direction == Direction::Wgrad { Kind::Filter } else { Kind::Pixels };
        let dtype = conv.operands()[0].1.dtype;
        let epilogue = EpilogueSpec::of_conv(&view.problem);
        // Plain results keep to the catalog's two ways of lying.
        let is_plain = epilogue.is_plain();
        let lies_in_rows = epilogue.d.walk == Walk::Row && (epilogue.pairs || dtype.bytes() == 4);
        let copying = match view.vector_bytes() {
            Some(bytes) if kind == Kind::Filter || lies_in_rows || !is_plain => Copying::Vectors(bytes),
            _ => Copying::Elements,
        };
        let epilogue = match (is_plain, copying, kind) {
            (true, Copying::Vectors(_), Kind::Pixels) => EpilogueSpec { pairs: dtype.bytes() < 4, ..epilogue },
            (true, ..) => epilogue.strided(),
            (false, ..) => epilogue,
        };
        let all = blocks(kind, view.stride, copying);
        let is_whole = |block: [u32; 2]| (0..2).all(|dim| view.problem.filter[dim + 1].is_multiple_of(u64::from(block[dim])));
        let fewest =
            all.iter().filter(|&&(_, block, ragged)| !ragged && is_whole(block)).map(|&(_, block, _)| view.tap_blocks(block)).min();
        let mut cuts = Vec::new();
        for (number, &(team, block, ragged)) in (0..).zip(all) {
            // What steps over taps is of use where whole blocks would be more of them, or there are none.
            let fits = if ragged { fewest.is_none_or(|fewest| view.tap_blocks(block) < fewest) } else { is_whole(block) };
            let spec = Spec { kind, stride: view.stride, team, block, ragged, dtype, copying, epilogue: Some(epilogue.clone()) };
            // There is a plain one for every filter.
            if fits && (team == Team::Plain || arch.runs(spec.target())) {
                let places = Places::best(view, &spec);
                cuts.push(Cut { number, problem: conv.clone(), view: view.clone(), spec, places, arch: arch.clone() });
            }
        }
        for cut in &cuts {
            cut.require_counts()?;
        }
        ID.require(!cuts.is_empty(), Reason::Extent, format_args!("filters of {:?}", conv.filter))?;
        Ok(cuts)
    }

    /// The spec of the kernel that multiplies; of a wgrad, the epilogue is the second launch's.
    fn product(&self) -> Spec {
        let epilogue = self.spec.epilogue.clone().filter(|_| self.spec.kind == Kind::Pixels);
        Spec { epilogue, ..self.spec.clone() }
    }

    fn epilogue(&self) -> EpilogueSpec {
        self.spec.epilogue.clone().unwrap_or_else(|| plain(self.spec.dtype, Copying::Elements))
    }

    fn channel_blocks(&self) -> u64 {
        self.view.channels().div_ceil(u64::from(self.spec.cta_channels()))
    }

    fn items(&self) -> u64 {
        self.places.items(&self.view, &self.spec)
    }

    fn tap_blocks(&self) -> u64 {
        self.view.tap_blocks(self.spec.block)
    }

    /// CTAs that work side by side on one block of channels, and of a wgrad on one block of taps.
    fn columns(&self) -> u64 {
        let blocks = self.channel_blocks();
        if self.spec.kind == Kind::Filter { blocks.saturating_mul(self.tap_blocks()) } else { blocks }
    }

    /// Parts of the items, each a CTA's, if CTAs fill the chip so many times.
    fn parts(&self, waves: u64) -> u64 {
        let slots = u64::from(self.arch.sm_count * self.spec.ctas_of_sm()) * waves;
        // No CTA more than there is room for at a time: one would take another round.
        (slots / self.columns().max(1)).clamp(1, self.items().max(1))
    }

    /// The most items of a CTA.
    fn items_of_cta(&self, waves: u64) -> u64 {
        self.items().div_ceil(self.parts(waves)).max(1)
    }

    fn part_bytes(&self) -> u64 {
        self.tap_blocks() * u64::from(self.spec.taps()) * self.view.channels() * 4
    }

    /// What kernels count stays in their range.
    fn require_counts(&self) -> Result<(), Refusal> {
        let steps = self.items().saturating_mul(self.tap_blocks());
        ID.require(steps < COUNT_LIMIT, Reason::Extent, format_args!("{steps} tiles by blocks of taps, taken below 2^30"))?;
        let ctas = self.columns().saturating_mul(self.parts(4));
        ID.require(ctas < COUNT_LIMIT, Reason::Extent, format_args!("{ctas} CTAs, taken below 2^30"))?;
        let channels = self.view.channels().saturating_mul(self.tap_blocks()).saturating_mul(u64::from(self.spec.taps()));
        ID.require(channels < COUNT_LIMIT, Reason::Extent, format_args!("{channels} channels by taps, taken below 2^30"))
    }

    /// A step is a tile of activations under a block of taps.
    fn work(&self, waves: u64) -> Work {
        let (spec, p) = (&self.spec, &self.problem);
        let is_filter = spec.kind == Kind::Filter;
        let [rows, columns] = spec.outputs();
        let outputs = f64::from(rows * columns);
        let lines: f64 = spec.thread_lines().iter().map(|&lines| f64::from(lines)).product();
        let channels = f64::from(spec.channels());
        let warps = f64::from(spec.threads()) / 32.0;
        let share = if spec.stride == Stride::Half { 0.25 } else { 1.0 };
        let filter = &self.view.problem.filter;
        // Of a ragged block, the taps that there are.
        let taps = match spec.ragged {
            true => (filter[1] * filter[2]) as f64 / self.view.blocks(spec.block).iter().product::<u64>() as f64,
            false => f64::from(spec.taps()),
        };
        let tile_bytes = self.places.pixels(spec) as f64 * f64::from(spec.pixel_bytes());
        let copy_bytes = match spec.copying {
            Copying::Vectors(bytes) => f64::from(bytes),
            Copying::Elements => spec.dtype.bytes() as f64,
        };
        // Instructions of a warp for each copy, with its address and the guard at the edges.
        let copy_issue = if matches!(spec.copying, Copying::Elements) { 25.0 } else { 44.0 };
        let copies = tile_bytes / copy_bytes / 32.0 * copy_issue;
        let outputs_kept = match is_filter {
            true => warps * outputs * (4.0 * copy_issue / copy_bytes + 1.0 + channels),
            false => warps * outputs * 14.0,
        };
        let items = self.items_of_cta(waves) as f64;
        let blocks = if is_filter { 1.0 } else { self.tap_blocks() as f64 };
        let parts = self.parts(waves) as f64;
        let ctas = self.columns() as f64 * parts;
        let resident = f64::from(self.arch.sm_count * spec.ctas_of_sm());
        let rounds = (ctas / resident).ceil();
        let main = Loop {
            tile: [outputs * warps, f64::from(spec.cta_channels())],
            tiles: self.columns() as f64 * self.items() as f64,
            grid: ctas,
            resident,
            steps: blocks,
            longest_steps: rounds * items * blocks,
            longest_tiles: rounds * items,
            fma_cycles: warps * share * outputs * taps * channels / 4.0,
            shared_bytes: warps * lines * 128.0 + tile_bytes,
            // Where neighbouring channels do not touch, each element costs a sector.
            loaded_bytes: tile_bytes * if p.activations().is_channels_last() { 1.0 } else { 32.0 / copy_bytes },
            issued: warps * (lines * (1.0 + channels) + f64::from(spec.taps()) + 150.0) + copies,
            tile_issued: outputs_kept,
            traffic_bytes: p.traffic_bytes(),
            copy_bytes,
            threads: f64::from(spec.threads()),
            stages: f64::from(spec.stages()),
            exposed: if spec.stages() == 1 { 1.0 } else { 0.3 },
            along_columns: spec.ragged,
            ..Loop::of_conv(
                match (spec.kind, spec.stride) {
                    (Kind::Filter, _) => "conv.depthwise wgrad",
                    (Kind::Pixels, Stride::Half) => "conv.depthwise dgrad s2",
                    (Kind::Pixels, _) => "conv.depthwise",
                },
                p,
            )
        };
        let sums = is_filter.then(|| Stream::new(Traffic::Reduced, 2.0 * parts * self.part_bytes() as f64));
        Work::of(main).beside(sums).beside(statistics::work(p))
    }

    /// How often CTAs fill the chip: more of them share work out more evenly, fewer read taps and begin less often.
    const WAVES: [u64; 3] = [1, 2, 4];

    /// Those of [`Cut::WAVES`] that differ: where work does not fill the chip, they are alike.
    fn waves(&self) -> Vec<u64> {
        let mut all: Vec<u64> = Vec::new();
        for waves in Cut::WAVES {
            if !all.iter().any(|&other| self.parts(other) == self.parts(waves)) {
                all.push(waves);
            }
        }
        all
    }

    /// The arguments that both products begin with.
    fn product_arguments(&self, waves: u64) -> ProductArguments {
        let (view, spec) = (&self.view, &self.spec);
        let (extents, activations) = view.activation_arguments(spec, self.places);
        ProductArguments {
            channel_blocks: divisor(self.channel_blocks()),
            channels: view.channels() as u32,
            share: ShareArguments { items: self.items() as u32, most: self.items_of_cta(waves) as u32, parts: self.parts(waves) as u32 },
            all_tap_blocks: divisor(self.tap_blocks()),
            tap_blocks: view.tap_block_arguments(spec.block),
            tiles: view.tile_arguments(spec, self.places),
            places: self.places.0.map(divisor),
            extents,
            activations,
        }
    }

    /// Adds the launch of the product.
    fn launch(&self, waves: u64, args: Arguments, program: &mut Program) {
        let launch = Launch::new(self.product().kernel(), [(self.columns() * self.parts(waves)) as u32, 1, 1], args);
        program.launch(if self.spec.overlaps() { launch.overlapping() } else { launch });
    }

    fn pixel_steps(&self, waves: u64, program: &mut Program) {
        let args = PixelsArguments {
            product: self.product_arguments(waves),
            filter: self.view.filter_arguments(),
            epilogue: Some(self.epilogue().conv_arguments(&self.view.problem)),
        };
        self.launch(waves, args.bound(&self.product()), program);
    }

    fn filter_steps(&self, waves: u64, program: &mut Program) {
        let (view, spec, p) = (&self.view, &self.spec, &self.view.problem);
        let parts = program.add_scratch("parts of a filter's gradient", self.part_bytes() * self.parts(waves));
        let (gradient_extents, gradients) = view.gradient_arguments(spec, self.places);
        let args = filter::FilterArguments {
            product: self.product_arguments(waves),
            gradient_extents,
            gradients,
            filter: [p.filter[1] as u32, p.filter[2] as u32],
            parts,
        };
        self.launch(waves, args.bound(spec), program);

        let blocks = view.channels().div_ceil(u64::from(reduction::CHANNELS));
        let epilogue = self.epilogue();
        let args = reduction::SplitKReductionArguments {
            parts,
            count: self.parts(waves) as u32,
            part_bytes: self.part_bytes(),
            channel_blocks: divisor(blocks),
            channels: view.channels() as u32,
            tap_blocks: view.tap_block_arguments(spec.block),
            block_columns: spec.block[1],
            block_rows: spec.block[0],
            filter: p.filter.map(|extent| extent as u32),
            flipped: u32::from(p.flip),
            epilogue: epilogue.conv_arguments(p),
        };
        let taps = self.tap_blocks() * u64::from(spec.taps());
        let args = args.bound(&epilogue);
        program.launch(Launch::new(reduction::kernel(epilogue), [(taps * blocks) as u32, 1, 1], args));
    }
}
