//! `attention.mma`: attention by `mma.sync`, for every chip from sm_80 on ([`verdigris_graph::AttentionProblem`] has the formulas).
//!
//! **What.** bf16 and f16, heads of up to 256 elements, values of another length than keys, grouped heads, windows around either diagonal, lengths, sinks; a soft
//! cap, a bias, slopes, a mask and a factor that is given at execution ([`super::score_mod`]), or the caller's function ([`super::function`]); ragged tensors
//! ([`super::ragged`]) and paged keys ([`super::paged`]), in pages of any size; dropout ([`super::dropout`]). Tensors of any
//! strides that are multiples of 4 bytes, 0 among them, whose elements lie side by side. Not: 8 bits, maps of blocks. Its gradient is [`gradient`]'s.
//!
//! A kernel is of two types, four classes of heads and one or two sizes of tiles, and either takes products for scores, or makes scores of them and drops some, or runs
//! a function. Where queries, keys and values lie is told at launch: offsets are read once a tile, and whether keys are paged is asked once a block of them, alike by all threads.
//!
//! **Method.** A CTA takes 128 or 64 queries of a head, of which each of four warps has 16 or twice 16; where that makes fewer tiles, of all heads that share one of keys, if
//! what stands between the products is alike for them. Twice where neither pairs are dropped nor a function runs. It goes through blocks of keys and values from the last to
//! the first; `cp.async` brings a block's values while its keys are multiplied, and the next keys while the values are. Heads are padded to the next of 64, 128, 192
//! (of keys alone) and 256 elements with zeros. Blocks of keys to which no query of a tile attends are not read; blocks in which each key is attended to are not masked. Where a
//! diagonal cuts tiles, the longest are first.
//!
//! Where tiles are fewer than the chip's multiprocessors have room for, the keys of each are cut into equal parts, a CTA each. A part leaves its rows and their log-sum-exp in f32, and a second
//! launch adds them up ([`super::combine`]).
//!
//! **When it wins.** On chips without `wgmma`; on others for tensors that TMA does not take: strides of 4 and 8 bytes, tensors that are repeated along a dim, pages
//! of fewer than 8 keys; and for few queries where `attention.decode` does not take what makes scores: tiles of 128 queries would be mostly empty.
//!
//! **Numbers.** As those of `attention.forward`: scores and sums in f32, probabilities rounded to the type of the values before they are multiplied, sums of rows
//! not. Parts are added in f32 and rounded once, in an order that their number fixes. Results repeat bit for bit. On an H200, which is not what it is for, up to 3.1 times as long as `attention.forward` where that takes the problem, and up to 1.3 times as long as `attention.decode`.
//!
//! **Source.** Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, section 3.

mod gradient;
mod kernel;
mod tiles;

#[cfg(test)]
mod tests;

use verdigris_graph::{AttentionPass, AttentionProblem, Problem, View};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::band::{self, BandArgs, SinkArgs};
use super::blocks;
use super::combine::{self, CombineArgs, Parts};
use super::dropout::{self, DropoutIfAnyArgs};
use super::function::{self, FunctionArgs, Lies};
use super::half::Half;
use super::mapped;
use super::of_queries::OfQueriesArgs;
use super::order::OrderArgs;
use super::paged::PagesIfAnyArgs;
use super::ragged::{self, OffsetsIfAnyArgs};
use super::score_mod::{self, ScoreModArgs};
use crate::algorithm::{Algorithm, Joined};
use crate::arch::Arch;
use crate::cost::{Join, Loop, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::layout::space::element;
use crate::split_k::MOST_PARTS_BYTES;

use kernel::{Given, ParamsArgs, Spec};
use tiles::{RowsArgs, THREADS};

/// A class of heads: elements of keys and of values, and the keys of a block where each warp has 16 rows twice, if sums leave registers for that, and once.
struct Class {
    head: u32,
    value: u32,
    blocks: [Option<u32>; 2],
}

/// Few, for a kernel pack has each in every way that scores are made.
const CLASSES: &[Class] = &[
    Class { head: 64, value: 64, blocks: [Some(64), Some(64)] },
    Class { head: 128, value: 128, blocks: [Some(32), Some(64)] },
    Class { head: 192, value: 128, blocks: [Some(32), Some(64)] },
    Class { head: 256, value: 256, blocks: [None, Some(32)] },
];

/// The most parts of the keys.
const MOST_PARTS: u64 = 256;

/// Bytes that copies are multiples of.
const LEAST_COPY_BYTES: u64 = 4;

// Coefficients of the estimate, fitted to 87 measured configs of this engine on an H200 (`bench/attention_engines.py`) and rounded: 19 % off in the mean, without the margin.
/// By how much estimates are raised on chips that have `wgmma`: of what an engine there takes too, this one was faster in few rows and by little, and slower by up to three times.
const MARGIN: f64 = 1.25;
/// Trips to memory of a step.
const EXPOSED: f64 = 1.2;
/// Instructions of a copy, with its address and its bounds.
const COPY_INSTRUCTIONS: f64 = 8.0;
/// Cycles of an SM's four tensor cores for one product of 16×8 by 16.
const CYCLES_OF_PRODUCT: f64 = 3.75;

/// Attention and its gradient.
pub(super) type MmaOrGradient = Joined<Mma, gradient::Gradient>;

/// An accepted problem of attention itself.
#[derive(Clone, Debug)]
pub(super) struct Mma {
    problem: AttentionProblem,
    o: View,
    log_sum_exp: Option<View>,
    max_scores: Option<View>,
    ty: Half,
    /// What is left of the scale where nothing else makes scores.
    scale: f32,
    score_mod: bool,
    copy_bytes: u32,
    arch: Arch,
}

/// A config: how often each warp has 16 rows, and parts of the keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Config {
    row_blocks: u32,
    block: u32,
    parts: u32,
}

impl Algorithm for Mma {
    const ID: EngineId = EngineId { name: "attention.mma", number: 904 };
    const VERSION: u32 = 2;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Attention(p) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is attention", problem.kind())));
        };
        let AttentionPass::Forward { o, log_sum_exp, max_scores } = &p.pass else {
            return Err(Self::ID.refusal(Reason::Direction, "the gradient, taken is attention itself"));
        };
        require_chip(arch)?;
        let ty = mapped::require(Self::ID, p, mapped::MOST_ELEMENTS, &[])?;
        let tensors = [("q", &p.q), ("k", &p.k), ("v", &p.v), ("o", o)];
        require_rows(p, &tensors)?;
        let is_even = p.d_v.is_multiple_of(2);
        Self::ID.require(is_even, Reason::Extent, format_args!("values of {} elements, taken is an even number", p.d_v))?;
        blocks::require_none(Self::ID, p)?;
        let score_mod = score_mod::is_needed(p) || p.dropout.is_some();
        score_mod::require(Self::ID, p)?;
        if p.score.is_some() {
            function::require(Self::ID, p)?;
            dropout::require_none(Self::ID, p)?;
        }
        let scale = if score_mod { 1.0 } else { score_mod::plain_scale(Self::ID, p)? };
        band::require(Self::ID, p, &[("log_sum_exp", log_sum_exp.as_ref()), ("max_scores", max_scores.as_ref())])?;
        ragged::require(Self::ID, p)?;
        if p.is_paged() {
            dropout::require_none(Self::ID, p)?;
            let most = p.pages.max(p.page_size);
            let rule = format_args!("{} pages of {} keys; each must be below 2^28", p.pages, p.page_size);
            Self::ID.require(most < mapped::MOST_ROWS, Reason::Extent, rule)?;
        }
        let tiles = p.s_q.div_ceil(64) as u128 * u128::from(p.b) * u128::from(p.h);
        Self::ID.require(tiles < 1 << 30, Reason::Extent, format_args!("{tiles} tiles of 64 queries, taken are fewer than 2^30"))?;
        let copied = tensors.into_iter().take(3).map(|(name, view)| alignment_bytes(p, name, view));
        let copy_bytes = copied.min().unwrap_or(LEAST_COPY_BYTES) as u32;
        let (o, log_sum_exp, max_scores) = (o.clone(), log_sum_exp.clone(), max_scores.clone());
        let accepted = Mma { problem: p.clone(), o, log_sum_exp, max_scores, ty, scale, score_mod, copy_bytes, arch: arch.clone() };
        let least = accepted.specs().map(|spec| spec.shared_bytes()).min().unwrap_or(0);
        let limit = arch.shared_bytes_per_cta;
        Self::ID.require(least <= limit, Reason::SharedMemory, format_args!("{least} bytes of {limit}"))?;
        let target = accepted.specs().next().map_or(Target::Sm80, |spec| spec.target());
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("the function's types need {}", target.ptx()))?;
        Ok(accepted)
    }

    fn configs(&self) -> Vec<Config> {
        let fits = |spec: &Spec| spec.shared_bytes() <= self.arch.shared_bytes_per_cta;
        let of =
            |spec: Spec| self.parts(&spec).into_iter().map(move |parts| Config { row_blocks: spec.row_blocks, block: spec.block, parts });
        self.specs().filter(fits).flat_map(of).collect()
    }

    fn knobs(config: &Config) -> Knobs {
        Knobs::new([("rows", 64 * config.row_blocks), ("keys", config.block), ("parts", config.parts)])
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes { tensor_core: true, ..Notes::of(DType::F32) }
    }

    fn work(&self, config: &Config) -> Work {
        if self.problem.is_ragged() {
            return Mma { problem: self.problem.of_mean_length(), ..self.clone() }.work(config);
        }
        let (p, spec) = (&self.problem, self.spec(config));
        let [rows, block, head, value] = [spec.rows(), spec.block, spec.head, spec.value].map(f64::from);
        let (members, row_tiles) = (self.members(&spec), self.row_tiles(&spec));
        let heads = (p.b * p.h / members) as f64;
        let of_tile = |tile: u64| band::blocks_of_tile(p, self.queries_of_tile(&spec), spec.block, tile) as f64;
        let (blocks, most) = (0..row_tiles).map(of_tile).fold((0.0, 0.0f64), |(all, most), blocks| (all + blocks, most.max(blocks)));
        let parts = f64::from(config.parts);
        let (tiles, all) = (row_tiles as f64 * heads, blocks * heads);
        let grid = tiles * parts;
        let resident = f64::from(self.arch.sm_count * spec.ctas_of_sm());
        let loaded_bytes = 2.0 * block * (head + value);
        let products = rows / 16.0 * (block / 8.0 * head / 16.0 + value / 8.0 * block / 16.0);
        // Of pages that no sequence has nothing is read.
        let read = AttentionProblem { page_table: None, ..p.clone() };
        let copies = loaded_bytes / f64::from(self.copy_bytes);
        let of_scores = if self.score_mod { score_mod::instructions(p) + function::instructions(p) } else { 0.0 }
            + if p.dropout.is_some() { dropout::INSTRUCTIONS } else { 0.0 };
        let margin = if self.arch.runs(Target::Sm90a) { MARGIN } else { 1.0 };
        let main = Loop {
            kernel: Self::ID.name,
            product: [p.s_q, p.s_kv, p.d].map(|extent| extent as f64),
            matrices: heads,
            window: [1.0; 3],
            tile: [rows, value],
            tiles,
            grid,
            resident,
            steps: all / tiles,
            longest_steps: (all / resident).max((most / parts).ceil()),
            longest_tiles: (grid / resident).ceil(),
            parts,
            join: if config.parts > 1 { Join::Launch } else { Join::None },
            tensor_cycles: margin * CYCLES_OF_PRODUCT * products,
            // Sixteen exponentials a cycle, and what is before and behind them.
            fma_cycles: margin * 2.2 * rows * block / 16.0,
            // Each warp reads all keys and values, and its own queries.
            shared_bytes: margin * 2.1 * (2.0 * rows * head + 4.0 * loaded_bytes + loaded_bytes),
            loaded_bytes,
            issued: margin * ((1.0 + of_scores) * rows * block + 0.25 * rows * value + COPY_INSTRUCTIONS * copies) / 32.0,
            tile_issued: margin * 8.0 * rows * value / 32.0,
            tile_loaded_bytes: 2.0 * rows * head,
            traffic_bytes: [("q", &p.q), ("k", &p.k), ("v", &p.v), ("o", &self.o)]
                .iter()
                .map(|(name, view)| margin * 2.0 * read.dims(name, view).iter().map(|&n| n as f64).product::<f64>())
                .sum(),
            operand_bytes: 2.0,
            result_bytes: 2.0,
            threads: f64::from(THREADS),
            cluster: 1.0,
            stages: 1.0,
            copy_bytes: f64::from(self.copy_bytes),
            across_depth: [false, true],
            store_bytes: 4.0,
            exposed: margin * EXPOSED,
            ..Loop::default()
        };
        let combine = combine::work((p.b * p.h * p.s_q) as f64, p.d_v as f64, parts);
        Work::of(main).beside((config.parts > 1).then_some(combine))
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, self.spec(config));
        let mut program = empty_program(&p.slots());
        let o = element(&self.o, []);
        let [partial, partial_log_sum_exp, partial_max_scores] =
            combine::scratch_of_parts(&mut program, o, [config.parts, p.d_v as u32], p.b * p.h * p.s_q, self.max_scores.is_some());
        let [log_sum_exp, max_scores] = [&self.log_sum_exp, &self.max_scores].map(|view| OfQueriesArgs::new(&self.o, view));
        let members = self.members(&spec);
        let group = (p.group() / members) as u32;
        let is_cut = p.left.is_some() || p.right.is_some();
        // Where tiles are alike, neighbours read the same keys.
        let section = if is_cut { group } else { 1 };
        let arguments = ParamsArgs {
            q: rows_of(&p.q, p.d),
            k: rows_of(&p.k, p.d),
            v: rows_of(&p.v, p.d_v),
            copy_bytes: self.copy_bytes,
            o,
            o_strides: strides_bytes(&self.o),
            o_elements: p.d_v as u32,
            log_sum_exp,
            max_scores,
            partial,
            partial_log_sum_exp,
            partial_max_scores,
            queries: p.s_q as u32,
            keys: p.s_kv as u32,
            heads: p.h as u32,
            scale: self.scale,
            order: OrderArgs::new(self.row_tiles(&spec) as u32, (p.h / members) as u32, p.b as u32, section),
            members: members as u32,
            group,
            parts: config.parts,
            band: BandArgs::new(p, spec.block),
            sinks: SinkArgs::new(p),
            score_mod: spec.score_mod.then(|| ScoreModArgs::of(p)),
            function: p.score.is_some().then(|| FunctionArgs::of(p)),
            offsets: OffsetsIfAnyArgs::of(p),
            pages: PagesIfAnyArgs::of(p, spec.block),
            dropout: spec.drops().then(|| DropoutIfAnyArgs::of(p)),
        };
        let grid = [arguments.order.tiles * config.parts, 1, 1];
        let given = Given { spec: spec.clone(), copy_bytes: self.copy_bytes };
        program.launch(Launch::new(given.spec.clone().kernel(), grid, arguments.bound(&given)));
        if config.parts > 1 {
            let args = CombineArgs {
                partial,
                partial_log_sum_exp,
                partial_max_scores,
                o,
                o_strides: strides_bytes(&self.o),
                log_sum_exp,
                max_scores,
                parts: config.parts,
                elements: p.d_v as u32,
                queries: p.s_q as u32,
                heads: p.h as u32,
                offsets: None,
                offsets_if_any: Some(OffsetsIfAnyArgs::of(p)),
            };
            let rows = (p.b * p.h * p.s_q) as u32;
            program.launch(Launch::new(combine::kernel(spec.ty, spec.value, Parts::Mma), [rows, 1, 1], args.bound(&Parts::Mma)));
        }
        Ok(program)
    }

    fn catalog(_: Target) -> Vec<KernelRef> {
        let of_class = |ty, class: &'static Class| {
            let among = |spec: Spec| {
                let of = |score_mod: bool| Spec { score_mod, ..spec.clone() };
                // Functions are the caller's: one stands for all of them.
                let of_function = Spec { score_mod: true, function: function::sample(), ..spec.clone() };
                [false, true].into_iter().map(of).chain([of_function]).filter(Spec::is_offered).collect::<Vec<_>>()
            };
            class.specs(ty).into_iter().flat_map(among)
        };
        let of_type = |ty| {
            let attending = CLASSES.iter().flat_map(move |class| of_class(ty, class)).map(Spec::kernel);
            attending.chain([128, 256].map(|value| combine::kernel(ty, value, Parts::Mma)))
        };
        Half::ALL.into_iter().flat_map(of_type).collect()
    }
}

/// That the chip has what attention and its gradient copy and multiply by.
///
/// # Errors
/// A refusal that names the chip's compute capability.
fn require_chip(arch: &Arch) -> Result<(), Refusal> {
    Mma::ID.require(arch.runs(Target::Sm80), Reason::Target, format_args!("compute capability {:?}, taken from 8.0 on", arch.capability))
}

/// What kernels ask of tensors that they copy, or write, row by row.
///
/// # Errors
/// A refusal that names the first requirement not met.
fn require_rows(p: &AttentionProblem, tensors: &[(&str, &View)]) -> Result<(), Refusal> {
    for &(name, view) in tensors {
        Mma::ID.require(view.dtype == p.q.dtype, Reason::DType, format_args!("{name} of {}, queries of {}", view.dtype, p.q.dtype))?;
        let is_in_a_row = view.strides[3] == 1 || p.dims(name, view)[3] == 1;
        let rule = format_args!("elements of {name} are {} apart, taken side by side", view.strides[3]);
        Mma::ID.require(is_in_a_row, Reason::Layout, rule)?;
        let bytes = alignment_bytes(p, name, view);
        let rule = format_args!("rows of {name} are multiples of {bytes} bytes apart, taken are multiples of {LEAST_COPY_BYTES}");
        Mma::ID.require(bytes >= LEAST_COPY_BYTES, Reason::Alignment, rule)?;
    }
    Ok(())
}

/// What all rows, heads and batches of a tensor, and its beginning, are multiples of, up to 16 bytes.
fn alignment_bytes(p: &AttentionProblem, name: &str, view: &View) -> u64 {
    let steps = p.dims(name, view).into_iter().zip(&view.strides).take(3).filter(|(extent, _)| *extent > 1).map(|(_, &stride)| stride);
    let of = |elements: u64| 1 << (elements * view.dtype.bytes() as u64).trailing_zeros().min(4);
    steps.chain([view.offset]).map(of).fold(16, u64::min)
}

/// Bytes from one batch, head and row to the next.
fn strides_bytes(view: &View) -> [u64; 3] {
    [0, 1, 2].map(|i| view.strides[i] * view.dtype.bytes() as u64)
}

/// A tensor that is copied, of so many elements a row.
fn rows_of(view: &View, elements: u64) -> RowsArgs {
    RowsArgs { at: element(view, []), strides: strides_bytes(view), bytes: 2 * elements as u32 }
}

impl Class {
    /// Its plain kernels.
    fn specs(&self, ty: Half) -> Vec<Spec> {
        let of = |(row_blocks, block): (u32, Option<u32>)| {
            let Class { head, value, .. } = *self;
            let plain = |block| Spec { ty, head, value, row_blocks, block, score_mod: false, function: Vec::new() };
            block.map(plain)
        };
        [2, 1].into_iter().zip(self.blocks).filter_map(of).collect()
    }
}

impl Mma {
    /// The kernels of the least class that has the problem's heads.
    fn specs(&self) -> impl Iterator<Item = Spec> {
        let p = &self.problem;
        let class = CLASSES.iter().find(|class| u64::from(class.head) >= p.d && u64::from(class.value) >= p.d_v);
        let function = function::steps_of(p, Lies::of);
        let (score_mod, drops) = (self.score_mod, p.dropout.is_some());
        let plain = class.map_or(Vec::new(), |class| class.specs(self.ty));
        let all = plain.into_iter().map(move |spec| Spec { score_mod, function: function.clone(), ..spec });
        all.filter(move |spec| spec.is_offered() && (!drops || spec.drops()))
    }

    /// Heads whose rows stand in one tile: all that share keys, where that makes fewer tiles and what makes scores is alike for each of them.
    fn members(&self, spec: &Spec) -> u64 {
        let (p, rows) = (&self.problem, u64::from(spec.rows()));
        let of_head_alone = [&p.bias, &p.mask, &p.slopes].into_iter().flatten().any(|view| view.strides[1] > 0);
        let is_alike = p.dropout.is_none() && p.score.is_none() && !of_head_alone;
        let all = p.group() * p.s_q;
        let is_less = all.div_ceil(rows) < p.group() * p.s_q.div_ceil(rows) && all < mapped::MOST_ROWS;
        if is_alike && is_less { p.group() } else { 1 }
    }

    /// Tiles of the heads that stand together.
    fn row_tiles(&self, spec: &Spec) -> u64 {
        (self.problem.s_q * self.members(spec)).div_ceil(u64::from(spec.rows()))
    }

    /// Parts into which the keys may be cut: as many as give each place on the chip one, and numbers around these, for those who measure.
    fn parts(&self, spec: &Spec) -> Vec<u32> {
        // Sequences of ragged tensors have as many queries as all of them on average: CTAs of others end at once.
        let mean = if self.problem.is_ragged() { self.problem.of_mean_length() } else { self.problem.clone() };
        let mean = Mma { problem: mean, ..self.clone() };
        let (p, row_tiles) = (&mean.problem, mean.row_tiles(spec).max(1));
        let tiles = row_tiles * (p.b * p.h / mean.members(spec)).max(1);
        let resident = u64::from(self.arch.sm_count * spec.ctas_of_sm());
        let blocks = band::blocks_of_tile(p, mean.queries_of_tile(spec), spec.block, row_tiles - 1);
        // More CTAs than places twice over have nothing left to fill, and what adds parts up takes four elements at a time.
        let most = if p.d_v.is_multiple_of(4) { blocks.min(MOST_PARTS).min(2 * resident / tiles) } else { 1 };
        let fits = |parts: u64| parts == 1 || (parts <= most && self.partial_bytes(parts) <= MOST_PARTS_BYTES);
        let mut parts = vec![1, 2, 4, 8, 16, 32, 64, 128];
        parts.extend([resident / 2, resident].map(|ctas| ctas / tiles));
        parts.retain(|&parts| parts > 0 && fits(parts));
        parts.sort_unstable();
        parts.dedup();
        parts.into_iter().map(|parts| parts as u32).collect()
    }

    /// Queries of a head that stand in one tile.
    fn queries_of_tile(&self, spec: &Spec) -> u32 {
        (spec.rows() / self.members(spec) as u32).max(1)
    }

    /// Bytes of what so many parts leave for the second launch.
    fn partial_bytes(&self, parts: u64) -> u64 {
        let p = &self.problem;
        if parts > 1 { p.b * p.h * p.s_q * parts * (p.d_v + 1) * 4 } else { 0 }
    }

    fn spec(&self, config: &Config) -> Spec {
        let mut specs = self.specs();
        let found = specs.find(|spec| [spec.row_blocks, spec.block] == [config.row_blocks, config.block]);
        found.expect("configs are of the problem's kernels")
    }
}
