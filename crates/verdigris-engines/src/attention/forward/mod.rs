//! `attention.forward`: attention on Hopper's tensor cores ([`verdigris_graph::AttentionProblem`] has the formulas).
//!
//! **What.** bf16 and f16, heads of up to 256 elements, values of another length than keys, grouped heads, windows around either diagonal, lengths, sinks; and
//! between the products a soft cap, a bias, slopes, a mask and a factor that is given at execution ([`super::score_mod`]), in kernels of their own; or the caller's
//! function with a mask ([`super::function`]), each in a kernel of its own, whose text its steps are a part of. Tensors of
//! any strides that TMA takes, so that the order of dims and packed queries, keys and values cost no copy; and ragged tensors ([`super::ragged`]), in kernels of
//! their own: where a sequence ends they store row by row, and values of the next one become 0; and paged keys ([`super::paged`]) in pages of any multiple of 8,
//! of ragged queries too; and dropout ([`super::dropout`]), in kernels of their own, of keys that are not paged.
//!
//! With a map of blocks whose queries and keys are multiples of 128, tiles go through the blocks that it lists ([`super::blocks`]), in kernels of their own: without
//! lengths, dropout, pages and offsets.
//!
//! And e4m3 with factors of heads and results in bf16 or f16 ([`fp8`]), without what stands between the products, of tensors that are neither ragged nor paged, and
//! without dropout.
//!
//! **Method.** A CTA takes 128 or 192 queries of a head, 64 for each warpgroup that multiplies. A warp brings keys and values in blocks, from the last to the
//! first. Scores and what is made of them never leave the registers. Heads are padded to the next of 64, 96, 128, 192 and 256 elements by TMA. Blocks of keys
//! to which no query of a tile attends are not read; blocks in which each key is attended to are not masked. Tiles that a diagonal cuts differ in length: the
//! longest are first, and CTAs take one each, or stay and take the next when they are free (`persistent` 2), so that a tile's first keys and values are
//! brought while the one in front ends; its queries too where outputs have shared memory of their own (heads of up to 128 elements, blocks of up to 128 keys).
//!
//! **When it wins.** On compute capability 9.0, wherever it takes the problem.
//!
//! **Numbers.** Scores under a soft cap, of up to 4,096, are off by 2⁻²⁴ of the cap. Scores and sums are in f32; `e^(s − L)` is rounded to the type of the values before it is multiplied, its row's sum is not. Exponentials below
//! the normal numbers of f32 become 0. Keys that are not attended to have the factor 0: beyond a length anything may stand, but a value that is not finite
//! and in one block with attended ones reaches the rows of that block. Results repeat bit for bit.
//!
//! **Source.** Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024, section 3.

mod fp8;
mod kernel;
mod spec;
mod tiles;

#[cfg(test)]
mod tests;

use verdigris_graph::{AttentionPass, AttentionProblem, Corner, Problem, View};
use verdigris_kir::ir::{Access, Target};
use verdigris_kir::program::{KernelRef, Launch, Program, Step};
use verdigris_tensor::DType;

use super::band::{self, BandArgs, SinkArgs};
use super::blocks::{self, ListOf, ListedArgs};
use super::descale::DescaleArgs;
use super::dropout::{self, DropoutArgs};
use super::function::{self, FunctionArgs, Lies};
use super::half::Half;
use super::mapped::{self, UNBOUNDED};
use super::of_queries::OfQueriesArgs;
use super::order::OrderArgs;
use super::paged::{self, PagesArgs};
use super::ragged::{self, OffsetsArgs, RowsOutArgs};
use super::score_mod::{self, ScoreModArgs};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Loop, Stream, Traffic, Work, wgmma_cycles};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};

use kernel::ParamsArgs;
use spec::{Mask, Spec};
use tiles::DiagonalArgs;

/// One row of the table of tiles.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// The knob's.
    number: u32,
    /// Elements of keys and of values: the class of problems that it is for.
    head: u32,
    value: u32,
    consumers: u32,
    block: u32,
    ping_pong: bool,
    /// What it is there for.
    masks: &'static [Mask],
}

const fn shape(number: u32, [head, value]: [u32; 2], consumers: u32, block: u32, ping_pong: bool, masks: &'static [Mask]) -> Shape {
    Shape { number, head, value, consumers, block, ping_pong, masks }
}

const ALL: &[Mask] = &[Mask::End, Mask::Causal, Mask::Band];

/// The tiles that the engine offers, by number; numbers are never reused, for plan caches hold them. Blocks are as long as registers allow (two consumers
/// of 240, three of 160) where all keys are attended to, and short where a diagonal cuts them. Consumers that take turns win where the products of a
/// block are short against its softmax, and lose where heads of 128 elements and more have many keys.
const SHAPES: &[Shape] = &[
    shape(0, [64, 64], 3, 128, true, ALL),
    shape(1, [64, 64], 2, 128, true, ALL),
    shape(2, [96, 96], 2, 128, true, ALL),
    shape(3, [128, 128], 2, 176, true, &[Mask::End]),
    shape(4, [128, 128], 2, 128, true, ALL),
    shape(5, [128, 128], 2, 128, false, &[Mask::Causal]),
    shape(6, [192, 128], 2, 128, true, ALL),
    shape(7, [192, 192], 2, 112, false, ALL),
    shape(8, [256, 256], 2, 80, false, ALL),
];

/// The same of queries, keys and values of 8 bits, whose tiles have half the bytes; blocks are whole halves of a panel of 128 keys. Timed on an H200, in TFLOP/s:
///
/// Heads of 128 elements have blocks of 192 keys, of which sums are rescaled once, and consumers that do not take turns: 16,384 keys 901, in turns 887, blocks of 128
/// keys in turns 862; causal 886, 860, 840. Where a diagonal leaves much of the last block empty, those of 128 win: 1,024 causal 368, of 192 keys 336. Heads of 64 elements
/// win by three consumers (577; two of blocks of 192 keys 490), of 256 elements by turns (1,214; 1,175), but where a diagonal cuts the blocks (1,075; 1,079). Shapes 1, 3 and 5 were
/// slower than one of these in every row.
const FP8_SHAPES: &[Shape] = &[
    shape(0, [64, 64], 3, 128, true, ALL),
    shape(6, [128, 128], 2, 192, false, &[Mask::End, Mask::Causal]),
    shape(2, [128, 128], 2, 128, true, ALL),
    shape(7, [256, 256], 2, 128, true, &[Mask::End]),
    shape(4, [256, 256], 2, 128, false, &[Mask::Causal, Mask::Band]),
];

/// How much longer a block takes of two consumers than of three, where its exponentials take as long as its products: while one of two waits for the other's products, nobody
/// makes exponentials. Timed on an H100 (heads of 64 elements, 1,024 to 16,384 keys and 197: 1.21 to 1.24).
const OF_TWO: f64 = 1.24;

/// From so many keys on, turns are not taken first.
const MANY_KEYS: u64 = 8192;

/// Blocks that are longer than this take longer where keys are few, for the first product of a tile and its last run by themselves. Measured on an H200 in turns, blocks of 176
/// keys beside those of 128, without a mask: 256 keys 310 and 437 TFLOP/s, 512 475 and 519, 1,024 523 and 559, 2,048 550 and 592, from 2,816 on alike; and as long as
/// fewer keys are behind the last (704, 1,056).
const SHORT_BLOCK: u32 = 128;
/// And where both have as many keys behind the last (352 keys 389 and 423, 1,408 555 and 569): what the model charges each step, of which short blocks have more, is hidden. The
/// number at which it ranks the measured rows as they were measured.
const LONG_BLOCK: f64 = 1.24;
const FEW_KEYS: u64 = 2560;

/// Heads of keys that are gone through together, and how often their tensors may fill the L2.
const TOGETHER: u64 = 16;
const MOST_OF_L2: u64 = 4;

/// Of a map of blocks, what its blocks' queries and keys are multiples of.
const LISTED_ROWS: u32 = 128;
const LISTED_KEYS: u32 = 128;

/// The longest heads of which lists of blocks and a function leave registers for the sums.
const MOST_OF_LISTED_FUNCTIONS: u64 = 192;

/// What all blocks are multiples of.
const BLOCK_STEP: u32 = 16;

/// Blocks in shared memory at a time.
const STAGES: u32 = 2;

impl Shape {
    fn spec(&self, ty: Half, mask: Mask, dynamic: bool, score_mod: bool) -> Spec {
        self.spec_of(ty, mask, [dynamic, score_mod], [false; 2])
    }

    /// Of queries, keys and values of 8 bits, with results in `ty`.
    fn spec_of_8_bits(&self, ty: Half, mask: Mask, dynamic: bool) -> Spec {
        Spec { fp8: true, ..self.spec(ty, mask, dynamic, false) }
    }

    /// One of the others with dropout.
    fn dropping(&self, spec: Spec) -> Spec {
        // Three consumers have registers for the generator beside shorter blocks.
        let block = if self.consumers == 3 { self.block - 32 } else { self.modified_block() };
        // Making scores and dropping some takes more registers than blocks that are as long as without either leave, but where sums are short.
        let block = if spec.score_mod && block == self.block && self.value > 64 { block - 16 } else { block };
        Spec { dropout: true, block, mask: Mask::Band, dynamic: true, ..spec }
    }

    /// One of the others that goes through lists of blocks, whose keys divide those of the map.
    fn listing(&self, spec: Spec) -> Spec {
        let is_short = self.block < LISTED_KEYS || (spec.score_mod && self.value >= 128);
        Spec { listed: true, block: if is_short { LISTED_KEYS / 2 } else { LISTED_KEYS }, mask: Mask::Band, dynamic: true, ..spec }
    }

    /// The same for ragged tensors, for paged keys, and for ragged queries with paged keys.
    fn spec_among(&self, ty: Half, score_mod: bool, [ragged, paged]: [bool; 2]) -> Spec {
        self.spec_of(ty, Mask::Band, [true, score_mod], [ragged, paged])
    }

    fn spec_of(&self, ty: Half, mask: Mask, [dynamic, score_mod]: [bool; 2], [ragged, paged]: [bool; 2]) -> Spec {
        let Shape { head, value, consumers, ping_pong, .. } = *self;
        let block = if score_mod { self.modified_block() } else { self.block };
        Spec {
            ty,
            fp8: false,
            head,
            value,
            consumers,
            block,
            stages: STAGES,
            mask,
            ping_pong,
            dynamic,
            score_mod,
            ragged,
            paged,
            dropout: false,
            listed: false,
            function: Vec::new(),
        }
    }

    /// Keys of a block where scores are made of products, or some dropped: what that is done with takes some registers, which sums of 128 values and more do not leave.
    const fn modified_block(&self) -> u32 {
        if self.value >= 128 && self.block > 80 { self.block - 16 } else { self.block }
    }

    /// Whether a thread has the registers to make scores beside the sums: three consumers leave 160.
    const fn takes_score_mod(&self) -> bool {
        self.consumers == 2
    }
}

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Forward {
    problem: AttentionProblem,
    o: View,
    log_sum_exp: Option<View>,
    max_scores: Option<View>,
    /// Of results.
    ty: Half,
    fp8: bool,
    scale: f32,
    mask: Mask,
    score_mod: bool,
    arch: Arch,
}

/// A config.
#[derive(Clone, Debug)]
pub(super) struct Config {
    shape: u32,
    spec: Spec,
    persistence: Persistence,
}

/// How CTAs come by tiles; the number is the knob's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Persistence {
    /// One each, as many CTAs as tiles.
    None = 0,
    /// As many CTAs as the chip holds, and each takes every so many.
    Static = 1,
    /// As many, and whoever is free takes the next.
    Dynamic = 2,
}

impl Algorithm for Forward {
    const ID: EngineId = EngineId { name: "attention.forward", number: 901 };
    const VERSION: u32 = 2;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Attention(p) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is attention", problem.kind())));
        };
        let AttentionPass::Forward { o, log_sum_exp, max_scores } = &p.pass else {
            return Err(Self::ID.refusal(Reason::Direction, "the gradient, taken is attention itself"));
        };
        Self::ID.require(
            arch.runs(Target::Sm90a),
            Reason::Target,
            format_args!("compute capability {:?}, needs (9, 0)", arch.capability),
        )?;
        let fp8 = p.q.dtype.is_fp8();
        let ty = match fp8 {
            true => fp8::require(Self::ID, p, o)?,
            false => mapped::require(Self::ID, p, mapped::MOST_ELEMENTS, &[("q", &p.q), ("k", &p.k), ("v", &p.v), ("o", o)])?,
        };
        // Of 8 bits what stands there is refused, with its reason.
        let score_mod = !fp8 && score_mod::is_needed(p);
        score_mod::require(Self::ID, p)?;
        if p.score.is_some() && !fp8 {
            function::require(Self::ID, p)?;
            dropout::require_none(Self::ID, p)?;
        }
        let scale = if score_mod { 1.0 } else { score_mod::plain_scale(Self::ID, p)? };
        band::require(Self::ID, p, &[("log_sum_exp", log_sum_exp.as_ref()), ("max_scores", max_scores.as_ref())])?;
        ragged::require(Self::ID, p)?;
        if p.block_map.is_some() {
            Self::ID.require(!fp8, Reason::DType, "8 bits beside a map of blocks, taken are bf16 and f16")?;
            blocks::require(Self::ID, p, LISTED_ROWS, LISTED_KEYS)?;
            let longest = p.d.max(p.d_v);
            let is_taken = p.score.is_none() || longest <= MOST_OF_LISTED_FUNCTIONS;
            let rule =
                format_args!("{longest} elements beside a map of blocks and a score function, taken are up to {MOST_OF_LISTED_FUNCTIONS}");
            Self::ID.require(is_taken, Reason::Extent, rule)?;
        }
        paged::require(Self::ID, p, BLOCK_STEP)?;
        if p.is_paged() {
            dropout::require_none(Self::ID, p)?;
        }
        let tiles = p.s_q.div_ceil(64) as u128 * u128::from(p.b) * u128::from(p.h);
        Self::ID.require(tiles < 1 << 30, Reason::Extent, format_args!("{tiles} tiles of 64 queries, taken are fewer than 2^30"))?;
        let is_band = p.left.is_some()
            || score_mod
            || p.is_ragged()
            || p.is_paged()
            || p.dropout.is_some()
            || p.block_map.is_some()
            || [&p.sinks, &p.q_lengths, &p.kv_lengths].iter().any(|view| view.is_some());
        let mask = match p.right {
            _ if is_band => Mask::Band,
            Some(_) => Mask::Causal,
            None => Mask::End,
        };
        Ok(Forward {
            problem: p.clone(),
            o: o.clone(),
            log_sum_exp: log_sum_exp.clone(),
            max_scores: max_scores.clone(),
            ty,
            fp8,
            scale,
            mask,
            score_mod,
            arch: arch.clone(),
        })
    }

    fn configs(&self) -> Vec<Config> {
        let (d, d_v) = (self.problem.d as u32, self.problem.d_v as u32);
        let is_paged = self.problem.is_paged();
        let has_dropout = self.problem.dropout.is_some();
        let is_listed = self.problem.block_map.is_some();
        let function = function::steps_of(&self.problem, Lies::of);
        let with_function = |spec: Spec| if function.is_empty() { spec } else { spec.with_function(function.clone()) };
        let is_alone = self.problem.is_ragged() || is_paged || has_dropout || is_listed;
        let of_two = self.score_mod || self.problem.is_ragged() || is_paged || is_listed;
        let holds = |shape: &Shape| shape.head >= d && shape.value >= d_v && (!of_two || shape.takes_score_mod());
        let shapes = if self.fp8 { FP8_SHAPES } else { SHAPES };
        let Some(class) = shapes.iter().find(|shape| holds(shape)) else { return Vec::new() };
        let of_class = shapes.iter().filter(|shape| [shape.head, shape.value] == [class.head, class.value]);
        let suits = of_class.filter(|shape| shape.masks.contains(&self.mask) && (!of_two || shape.takes_score_mod()));
        if is_alone {
            let config = |shape: &Shape| {
                let spec = shape.spec_of(self.ty, self.mask, [true, self.score_mod], [self.problem.is_ragged(), is_paged]);
                let spec = if has_dropout { shape.dropping(spec) } else { spec };
                let spec = with_function(if is_listed { shape.listing(spec) } else { spec });
                Config { shape: shape.number, spec, persistence: Persistence::Dynamic }
            };
            return suits.map(config).collect();
        }
        // Tiles differ in length where one side of the diagonal is open: then they are handed out, the longest first.
        let is_even = self.problem.left.is_some() == self.problem.right.is_some();
        let order = match is_even {
            true => [Persistence::Static, Persistence::None, Persistence::Dynamic],
            false => [Persistence::Dynamic, Persistence::None, Persistence::Static],
        };
        let config = |shape: &Shape, persistence| {
            let dynamic = persistence == Persistence::Dynamic;
            let spec = match self.fp8 {
                true => shape.spec_of_8_bits(self.ty, self.mask, dynamic),
                false => with_function(shape.spec(self.ty, self.mask, dynamic, self.score_mod)),
            };
            Config { shape: shape.number, spec, persistence }
        };
        let mut configs: Vec<Config> = suits.flat_map(|shape| order.map(|persistence| config(shape, persistence))).collect();
        // The first of equals is preferred.
        if self.problem.s_kv >= MANY_KEYS && self.mask == Mask::Causal && class.head == 128 {
            configs.sort_by_key(|config| config.spec.ping_pong);
        }
        configs
    }

    fn knobs(config: &Config) -> Knobs {
        Knobs::new([("shape", config.shape), ("persistent", config.persistence as u32)])
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes { tensor_core: true, ..Notes::of(DType::F32) }
    }

    fn work(&self, config: &Config) -> Work {
        if self.problem.is_ragged() {
            return Forward { problem: self.problem.of_mean_length(), ..self.clone() }.work(config);
        }
        let (p, spec) = (&self.problem, &config.spec);
        let [rows, block, head, value] = [spec.queries(), spec.block, spec.head, spec.value].map(f64::from);
        let heads = (p.b * p.h) as f64;
        let row_tiles = p.s_q.div_ceil(u64::from(spec.queries()));
        let (mut blocks, mut most) = (0.0, 0u64);
        for tile in 0..row_tiles {
            let of_tile = band::blocks_of_tile(p, spec.queries(), spec.block, tile);
            blocks += of_tile as f64;
            most = most.max(of_tile);
        }
        let (tiles, resident) = (row_tiles as f64 * heads, f64::from(self.arch.sm_count));
        let all = blocks * heads;
        let waits = if spec.consumers == 2 && spec.head <= 64 { OF_TWO } else { 1.0 } * self.long_blocks(spec);
        let bytes = p.q.dtype.bytes() as f64;
        let loaded_bytes = block * (head + value) * bytes;
        // Of pages that no sequence has nothing is read.
        let read = AttentionProblem { page_table: None, ..p.clone() };
        let main = Work::of(Loop {
            kernel: Self::ID.name,
            product: [p.s_q, p.s_kv, p.d].map(|extent| extent as f64),
            matrices: heads,
            window: [1.0; 3],
            tile: [rows, value],
            tiles,
            grid: tiles.min(resident),
            resident,
            steps: all / tiles,
            longest_steps: (all / resident).max(most as f64),
            longest_tiles: (tiles / resident).ceil(),
            parts: 1.0,
            tensor_cycles: waits * (wgmma_cycles(rows, block) * head + wgmma_cycles(rows, value) * block) * bytes / 128.0,
            // Sixteen exponentials a cycle.
            fma_cycles: waits * rows * block / 16.0,
            shared_bytes: (rows * head + block * (head + value) * rows / 64.0) * bytes + loaded_bytes,
            loaded_bytes,
            // Maximum, sum, scale, rounding, for each score, and what makes it of a product; each output is rescaled.
            issued: waits
                * ((5.0
                    + if self.score_mod { score_mod::instructions(p) + function::instructions(p) } else { 0.0 }
                    + if p.dropout.is_some() { dropout::INSTRUCTIONS } else { 0.0 })
                    * rows
                    * block
                    + rows * value)
                / 32.0,
            tile_issued: 3.0 * rows * value / 32.0,
            tile_loaded_bytes: rows * head * bytes,
            traffic_bytes: [("q", &p.q), ("k", &p.k), ("v", &p.v), ("o", &self.o)]
                .iter()
                .map(|(name, view)| read.dims(name, view).iter().map(|&n| n as f64).product::<f64>() * view.dtype.bytes() as f64)
                .sum(),
            operand_bytes: bytes,
            result_bytes: 2.0,
            threads: f64::from(128 * (1 + spec.consumers)),
            cluster: 1.0,
            stages: f64::from(spec.stages),
            copy_bytes: 16.0,
            across_depth: [false, true],
            store_bytes: 16.0,
            ..Loop::default()
        });
        match self.fp8 {
            true => main.beside([Stream::new(Traffic::Lines, 2.0 * fp8::turned_bytes(p) as f64)]),
            false => main,
        }
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, &config.spec);
        let mut program = empty_program(&p.slots());
        let map = |name: &str, view: &View, decl| mapped::map(decl, view, p.dims(name, view));
        let rows = p.s_q.div_ceil(u64::from(spec.queries())) as u32;
        let order = OrderArgs::new(rows, p.h as u32, p.b as u32, self.section(config));
        let behind = p.right.map_or(UNBOUNDED, |right| right as i32 + 1);
        let bottom_right = p.corner == Corner::BottomRight;
        // In front of all launches, which it would keep from overlapping.
        let next_tile = spec.dynamic.then(|| {
            let counter = program.add_scratch("next tile", 4);
            program.steps.push(Step::Fill { at: counter, bytes: 4, value: 0 });
            counter
        });
        let v = match self.fp8 {
            true => fp8::add_turning(p, &mut program, spec.v_map()),
            false => paged::map(p, "v", &p.v, spec.v_tile()),
        };
        let listed: Option<ListedArgs> = blocks::list(p, &mut program, ListOf::Keys { block: spec.block, tile: spec.queries() });
        let args = ParamsArgs {
            q: map("q", &p.q, spec.q_tile().map(Access::Read)),
            k: paged::map(p, "k", &p.k, spec.k_tile()),
            v,
            o: map("o", &self.o, spec.o_map()),
            log_sum_exp: OfQueriesArgs::new(&self.o, &self.log_sum_exp),
            max_scores: OfQueriesArgs::new(&self.o, &self.max_scores),
            queries: p.s_q as u32,
            keys: p.s_kv as u32,
            key_blocks: p.s_kv.div_ceil(u64::from(spec.block)) as u32,
            scale: self.scale,
            order,
            group: p.group() as u32,
            diagonal: (spec.mask == Mask::Causal)
                .then(|| DiagonalArgs { behind: behind + if bottom_right { p.s_kv as i32 - p.s_q as i32 } else { 0 }, block: spec.block }),
            band: (spec.mask == Mask::Band).then(|| BandArgs::new(p, spec.block)),
            sinks: (spec.mask == Mask::Band).then(|| SinkArgs::new(p)),
            score_mod: spec.score_mod.then(|| ScoreModArgs::of(p)),
            offsets: OffsetsArgs::of(p),
            rows_out: spec.ragged.then(|| RowsOutArgs::new(&self.o, p.d_v)),
            next_tile,
            pages: PagesArgs::of(p, spec.block),
            dropout: DropoutArgs::of(p),
            listed,
            descales: spec.fp8.then(|| DescaleArgs::of(p)),
            function: p.score.is_some().then(|| FunctionArgs::of(p)),
        };
        let grid = if config.persistence == Persistence::None { order.tiles } else { order.tiles.min(self.arch.sm_count) };
        program.launch(Launch::new(spec.clone().kernel(), [grid, 1, 1], args.bound(spec)).overlapping());
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        if target != Target::Sm90a {
            return Vec::new();
        }
        let of = |ty, dynamic| {
            let plain = SHAPES.iter().flat_map(move |shape| shape.masks.iter().map(move |&mask| shape.spec(ty, mask, dynamic, false)));
            let modified = SHAPES.iter().filter(|shape| shape.takes_score_mod() && shape.masks.contains(&Mask::Band));
            plain.chain(modified.map(move |shape| shape.spec(ty, Mask::Band, dynamic, true)))
        };
        let orders = Half::ALL.into_iter().flat_map(|ty| [(ty, false), (ty, true)]);
        let ragged = Half::ALL.into_iter().flat_map(|ty| {
            let shapes = SHAPES.iter().filter(|shape| shape.takes_score_mod() && shape.masks.contains(&Mask::Band));
            let among = move |shape: &'static Shape, score_mod| {
                [[true, false], [false, true], [true, true]].map(|of| shape.spec_among(ty, score_mod, of))
            };
            shapes.flat_map(move |shape| [false, true].map(|score_mod| among(shape, score_mod)))
        });
        let dropping = Half::ALL.into_iter().flat_map(|ty| {
            let shapes = SHAPES.iter().filter(|shape| shape.masks.contains(&Mask::Band));
            shapes.flat_map(move |shape| {
                let both = |score_mod| [shape.spec(ty, Mask::Band, true, score_mod), shape.spec_among(ty, score_mod, [true, false])];
                let all = [false, true].map(both).into_iter().flatten().map(|spec| shape.dropping(spec));
                all.filter(|spec| shape.takes_score_mod() || !(spec.score_mod || spec.ragged))
            })
        });
        let listing = Half::ALL.into_iter().flat_map(|ty| {
            let shapes = SHAPES.iter().filter(|shape| shape.takes_score_mod() && shape.masks.contains(&Mask::Band));
            shapes.flat_map(move |shape| [false, true].map(|score_mod| shape.listing(shape.spec(ty, Mask::Band, true, score_mod))))
        });
        // Functions are the caller's, and kernels with one are compiled at its first call: of each way to be fed there is one for each class of heads, by which they are judged.
        let of_function = Half::ALL.into_iter().flat_map(|ty| {
            let shapes = SHAPES.iter().filter(|shape| shape.takes_score_mod() && shape.masks.contains(&Mask::Band));
            shapes.flat_map(move |shape| {
                let among = [[true, false], [false, true], [true, true]].map(|of| shape.spec_among(ty, true, of));
                let whole = [true, false].map(|dynamic| shape.spec(ty, Mask::Band, dynamic, true));
                let [handed_out, fixed] = whole;
                let listed = (u64::from(shape.value) <= MOST_OF_LISTED_FUNCTIONS).then(|| shape.listing(handed_out.clone()));
                let others = among.into_iter().chain([fixed]).chain(listed).filter(move |_| ty == Half::Bf16);
                [handed_out].into_iter().chain(others).map(|spec| spec.with_function(function::sample()))
            })
        });
        let of_8_bits = Half::ALL.into_iter().flat_map(|ty| {
            let all = FP8_SHAPES.iter().flat_map(|shape| shape.masks.iter().map(move |&mask| (shape, mask)));
            all.flat_map(move |(shape, mask)| [false, true].map(|dynamic| shape.spec_of_8_bits(ty, mask, dynamic)))
        });
        let specs = orders
            .flat_map(|(ty, dynamic)| of(ty, dynamic))
            .chain(ragged.flatten())
            .chain(dropping)
            .chain(listing)
            .chain(of_8_bits)
            .chain(of_function);
        specs.map(Spec::kernel).chain([fp8::turning()]).chain(blocks::catalog()).collect()
    }
}

impl Forward {
    /// How much longer than with short blocks a tile takes.
    fn long_blocks(&self, spec: &Spec) -> f64 {
        let keys = self.problem.s_kv;
        if self.fp8 || spec.block <= SHORT_BLOCK || keys >= FEW_KEYS {
            return 1.0;
        }
        let with_one_alone = |block: u32| ((keys.div_ceil(u64::from(block)) + 1) * u64::from(block)) as f64;
        LONG_BLOCK * with_one_alone(spec.block) / with_one_alone(SHORT_BLOCK)
    }

    /// Heads of queries whose tiles are handed out together, the longest first; one where tiles are alike, for then neighbours run together. Among more heads tiles
    /// are balanced better, and fewer CTAs share the keys of one: sixteen heads of keys hold both, though their tensors be four times the L2 (one H200, causal, 128 elements,
    /// sides in random order: 72 heads of 11,072 positions 662 TFLOP/s, with as many heads as fit half of the L2 647, with 66 heads 543; 64 heads of 4,096
    /// positions 630, 587, 601). Each CTA is to find two tiles.
    fn section(&self, config: &Config) -> u32 {
        let p = &self.problem;
        if self.mask == Mask::End {
            return 1;
        }
        let head_bytes = (p.s_kv * (p.d + p.d_v) * p.q.dtype.bytes() as u64).max(1);
        let near = (self.arch.l2_bytes * MOST_OF_L2 / head_bytes).min(TOGETHER);
        let tiles = p.s_q.div_ceil(u64::from(config.spec.queries())).max(1) * p.group();
        let balanced = (2 * u64::from(self.arch.sm_count)).div_ceil(tiles);
        u32::try_from(near.max(balanced) * p.group()).unwrap_or(u32::MAX)
    }
}
