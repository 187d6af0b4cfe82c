//! `attention.backward`: the gradient of attention on Hopper's tensor cores ([`verdigris_graph::AttentionProblem`] has the formulas).
//!
//! **What.** bf16 and f16, heads of up to 256 elements (multiples of 8), grouped heads, windows around either diagonal, sinks;
//! between the products a soft cap, a bias, slopes, a mask and a factor that is given at execution ([`super::score_mod`]), or the caller's function with a mask and its slope
//! ([`super::function`]) for heads of up to 128 elements, each in kernels of their own. Tensors of
//! any strides that TMA takes; and ragged tensors and lengths ([`super::ragged`], [`super::sequences`]: one kernel for both) and dropout ([`super::dropout`]), in kernels of their own. Workspace is of the size of the queries, in f32,
//! with up to 64 rows more for each sequence.
//!
//! **Method.** Three launches: two numbers of each query, and zeros for the sums of their gradient; the products, a CTA for each 128 keys ([`kernel`]; where queries or values have more than 128
//! elements, for each 64: [`long`]), which goes through all queries that attend to them and through all heads that share them; the gradient of the queries,
//! which the CTAs have added up in f32, rounded. Keys and values of heads of 64 elements stay in registers: out of shared memory the products of 64 by 64 were
//! bound by it (one H100, 4,096 positions: 454 beside 422 TFLOP/s, causal 392 beside 367). Shares of the gradient of the queries are added as they come, or in one order: then the CTA of the last keys is first, and each waits
//! for the one behind it. Of ragged tensors and of those with lengths, keys, queries and gradients of results behind the end of a sequence become 0 in shared memory, and gradients are
//! stored row by row there, 0 for rows of the tensors that do not count; CTAs beyond a sequence's end stop at once. The gradients of a bias, and of what a function of scores reads, are launches behind these ([`bias`]), refused beside
//! sequences and lengths, and so is that of sinks ([`super::sinks`]).
//!
//! **When it wins.** On compute capability 9.0, wherever it takes the problem.
//!
//! **Numbers.** Scores under a soft cap, of up to 4,096, are off by 2⁻²⁴ of the cap. Scores and sums are in f32; the probabilities and the gradients of the scores are rounded to the type of the queries before they are
//! multiplied; one beyond the range of f16 is infinite there. Results repeat bit for bit where shares are added in order; elsewhere the gradients of keys, values,
//! bias and sinks do. The latter is summed of scores that are not rounded. So are those of what a function of scores reads, but what it reads by query alone, and tables: their shares are added as they come.
//!
//! **Source.** Shah et al., "FlashAttention-3", 2024, appendix B; Dao, "FlashAttention-2", 2023, algorithm 2.

mod around;
mod bias;
mod kept;
mod kernel;
mod long;
mod slots;
mod spec;

#[cfg(test)]
mod tests;

use verdigris_graph::{AttentionPass, AttentionProblem, Chain, Corner, Problem, View};
use verdigris_kir::ir::{Access, Target};
use verdigris_kir::program::{Address, KernelRef, Launch, Program, Step};
use verdigris_tensor::DType;

use super::band;
use super::blocks::{self, ListOf};
use super::dropout::{self, DropoutArgs};
use super::function::{self, FunctionArgs, Lies};
use super::half::Half;
use super::mapped::{self, UNBOUNDED};
use super::order::OrderArgs;
use super::ragged::{self, RowsOutArgs};
use super::score_mod::{self, ScoreModArgs};
use super::sequences::{self, SequencesArgs};
use super::sinks;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Loop, Stream, Traffic, Work, wgmma_cycles};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::fuse::steps::host_number;
use crate::layout::space::element;

use around::{BeforeArgs, BehindArgs, MOST_ELEMENTS, RowsArgs};
use bias::{Known, PairGradient};
use kernel::{BandArgs, ModArgs, ParamsArgs, RaggedArgs, TurnsArgs};
use spec::{Around, CONSUMERS, HEADS, Mask, QUERIES, Spec, is_long, keys_of, may_keep_keys, piece_bytes};

/// Blocks of queries in shared memory at a time.
const STAGES: u32 = 2;

/// Of a map of blocks, what its blocks' queries and keys are multiples of.
const LISTED: u32 = 128;

/// Heads of keys that are gone through together where tiles are unlike.
const TOGETHER: u32 = 4;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Backward {
    problem: AttentionProblem,
    o: View,
    log_sum_exp: View,
    d_o: View,
    /// Of queries, keys, values.
    gradients: [Option<View>; 3],
    dsinks: Option<View>,
    /// Of the bias, and of what the function of scores reads.
    of_pairs: Vec<PairGradient>,
    ty: Half,
    scale: f32,
    /// Elements of queries and keys, and of values, of the kernels.
    head: u32,
    value: u32,
    mask: Mask,
    score_mod: bool,
    /// The function of scores, with its slope.
    function: Option<Chain>,
    arch: Arch,
}

impl Algorithm for Backward {
    const ID: EngineId = EngineId { name: "attention.backward", number: 902 };
    const VERSION: u32 = 3;
    type Config = Spec;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Attention(p) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is attention", problem.kind())));
        };
        let AttentionPass::Backward { o, log_sum_exp, d_o, dq, dk, dv, dbias, dsinks, d_score } = &p.pass else {
            return Err(Self::ID.refusal(Reason::Direction, "attention itself, taken is the gradient"));
        };
        Self::ID.require(
            arch.runs(Target::Sm90a),
            Reason::Target,
            format_args!("compute capability {:?}, needs (9, 0)", arch.capability),
        )?;
        let optional = [("dq", dq), ("dk", dk), ("dv", dv)].into_iter().filter_map(|(name, view)| Some((name, view.as_ref()?)));
        let mapped: Vec<(&str, &View)> =
            [("q", &p.q), ("k", &p.k), ("v", &p.v), ("o", o), ("d_o", d_o)].into_iter().chain(optional).collect();
        ragged::require(Self::ID, p)?;
        let ty = mapped::require(Self::ID, p, mapped::MOST_ELEMENTS, &mapped)?;
        // The longest take whatever is left.
        let (head, value) = HEADS.into_iter().find(|&(d, d_v)| p.d <= d.into() && p.d_v <= d_v.into()).unwrap_or(HEADS[HEADS.len() - 1]);
        if p.block_map.is_some() {
            blocks::require(Self::ID, p, LISTED, LISTED)?;
            let given = format_args!("heads of {} and {} elements beside a map of blocks, taken are up to 128", p.d, p.d_v);
            Self::ID.require(!spec::is_long(head), Reason::Extent, given)?;
            Self::ID.require(dbias.is_none(), Reason::Epilogue, "a gradient of a bias beside a map of blocks, taken without")?;
            let is_read_alone = d_score.iter().all(Option::is_none);
            Self::ID.require(
                is_read_alone,
                Reason::Epilogue,
                "gradients of what a score function reads beside a map of blocks, taken without",
            )?;
        }
        let function = p.sloped_score();
        if p.score.is_some() {
            function::require(Self::ID, p)?;
            let given = format_args!("heads of {} and {} elements beside a score function, taken are up to 128", p.d, p.d_v);
            Self::ID.require(!spec::is_long(head), Reason::Extent, given)?;
        }
        let score_mod = score_mod::is_needed(p);
        score_mod::require(Self::ID, p)?;
        let scale = if score_mod { 1.0 } else { score_mod::plain_scale(Self::ID, p)? };
        let of_eight = [p.d, p.d_v].iter().all(|extent| extent.is_multiple_of(8) && *extent <= u64::from(MOST_ELEMENTS));
        Self::ID.require(
            of_eight,
            Reason::Extent,
            format_args!("heads of {} and {} elements, taken are multiples of 8 up to {MOST_ELEMENTS}", p.d, p.d_v),
        )?;
        band::require(Self::ID, p, &[("log_sum_exp", Some(log_sum_exp))])?;
        sinks::require(Self::ID, p, dsinks.as_ref())?;
        let of_bias = dbias.as_ref().map(|dbias| PairGradient::of_bias(Self::ID, p, dbias, ty, arch));
        let of_read = (0..).zip(d_score).filter_map(|(number, view)| Some((number, view.as_ref()?)));
        let of_read = of_read.map(|(number, view)| PairGradient::of_read(Self::ID, p, (number, view), ty, arch));
        let of_pairs = of_bias.into_iter().chain(of_read).collect::<Result<Vec<_>, Refusal>>()?;
        let rows = u128::from(p.b) * u128::from(p.h) * u128::from(p.s_q.max(p.s_kv) + 256);
        Self::ID.require(rows < 1 << 31, Reason::Extent, format_args!("{rows} rows of all heads, taken are fewer than 2^31"))?;
        let padded = u128::from(p.h) * u128::from(sequences::blocks_of_head(p)) * u128::from(QUERIES);
        Self::ID.require(
            !sequences::has(p) || padded < 1 << 31,
            Reason::Extent,
            format_args!("{padded} rows of all heads in whole blocks of each sequence, taken are fewer than 2^31"),
        )?;
        let is_banded = p.left.is_some() || p.right.is_some() || p.block_map.is_some();
        let mask = if score_mod || sequences::has(p) || p.dropout.is_some() || is_banded { Mask::Band } else { Mask::End };
        Ok(Backward {
            problem: p.clone(),
            o: o.clone(),
            log_sum_exp: log_sum_exp.clone(),
            d_o: d_o.clone(),
            gradients: [dq, dk, dv].map(Clone::clone),
            dsinks: dsinks.clone(),
            of_pairs,
            ty,
            scale,
            head,
            value,
            mask,
            score_mod,
            function,
            arch: arch.clone(),
        })
    }

    fn configs(&self) -> Vec<Spec> {
        let Backward { ty, head, value, mask, score_mod, .. } = *self;
        let (ragged, dropout) = (sequences::has(&self.problem), self.problem.dropout.is_some());
        let listed = self.problem.block_map.is_some();
        // Lists say which blocks a tile adds to, not how many others do.
        let orders: &[bool] = if listed { &[false] } else { &[false, true] };
        let function = self.function.as_ref().map_or_else(Vec::new, |chain| function::steps_of_chain(chain, Lies::of));
        let score = self.problem.score.as_ref().map_or(0, |own| own.steps.len() as u32 - 1);
        let plain = Spec { ty, head, value, stages: STAGES, mask, in_order: false, score_mod, ragged, dropout, listed, function, score };
        orders.iter().map(|&in_order| Spec { in_order, ..plain.clone() }).collect()
    }

    fn knobs(spec: &Spec) -> Knobs {
        Knobs::new([("ordered", u32::from(spec.in_order))])
    }

    fn notes(&self, spec: &Spec) -> Notes {
        // The gradient of the queries is a sum of shares, and those of tables are.
        let of_queries = spec.in_order || self.gradients[0].is_none() || self.problem.s_kv <= u64::from(spec.keys());
        let deterministic = of_queries && !self.of_pairs.iter().any(PairGradient::adds);
        Notes { tensor_core: true, deterministic, ..Notes::of(DType::F32) }
    }

    fn work(&self, spec: &Spec) -> Work {
        if self.problem.is_ragged() {
            return Backward { problem: self.problem.of_mean_length(), ..self.clone() }.work(spec);
        }
        let p = &self.problem;
        let [queries, keys, head, value] = [QUERIES, spec.keys(), spec.head, spec.value].map(f64::from);
        let matrices = (p.b * p.h_kv) as f64;
        let key_blocks = self.key_blocks();
        let (mut turns, mut most) = (0.0, 0u64);
        for block in 0..key_blocks {
            let of_block = self.turns(block) * p.group();
            turns += of_block as f64;
            most = most.max(of_block);
        }
        let (tiles, resident) = (key_blocks as f64 * matrices, f64::from(self.arch.sm_count));
        let all = turns * matrices;
        let loaded_bytes = queries * (head + value) * 2.0;
        // Whoever adds in order starts later: as many turns as others are in front of it and run beside it.
        let waits = if spec.in_order { (resident / matrices).min(key_blocks as f64) } else { 0.0 };
        let rows = (p.b * p.h * p.s_q) as f64;
        let padded = (p.b * p.h) as f64 * (self.query_blocks() * u64::from(QUERIES)) as f64;
        let of = |elements: f64| rows * elements * 2.0;
        let dq_bytes = queries * head * 4.0;
        let (tensor_cycles, shared_bytes) = if is_long(spec.head) {
            // A consumer has a half of the columns of each product, whose rows both read.
            let consumers = f64::from(CONSUMERS);
            let of_columns = |columns: f64| consumers * wgmma_cycles(keys, columns / consumers);
            let cycles = (of_columns(queries) * (head + value) + of_columns(value) * queries + of_columns(head) * (queries + keys)) / 64.0;
            let read = consumers * keys * (head + value) + queries * (head + value) + 2.0 * queries * (head + value) + keys * head;
            (cycles, (read + 3.0 * consumers * keys * queries + 2.0 * keys * queries) * 2.0)
        } else {
            let cycles = 2.0 * wgmma_cycles(keys, queries) * head / 64.0
                + 2.0 * wgmma_cycles(keys, head) * queries / 64.0
                + wgmma_cycles(queries, head) * keys / 64.0;
            (cycles, (2.0 * keys * head + 4.0 * queries * head * keys / 64.0 + 2.0 * keys * queries + dq_bytes) * 2.0)
        };
        let main = Loop {
            kernel: Self::ID.name,
            product: [p.s_q, p.s_kv, p.d].map(|extent| extent as f64),
            matrices: (p.b * p.h) as f64,
            window: [1.0; 3],
            tile: [keys, head + value],
            tiles,
            grid: tiles.min(resident),
            resident,
            steps: all / tiles,
            longest_steps: (all / resident).max(most as f64) + waits,
            longest_tiles: (tiles / resident).ceil(),
            parts: 1.0,
            tensor_cycles,
            fma_cycles: keys * queries / 16.0,
            shared_bytes,
            loaded_bytes: loaded_bytes + dq_bytes,
            issued: (10.0
                + if self.score_mod { score_mod::instructions(p) } else { 0.0 }
                // And about as many for its slope.
                + 2.0 * function::instructions(p)
                + if spec.dropout { dropout::INSTRUCTIONS } else { 0.0 })
                * keys
                * queries
                / 32.0,
            tile_issued: 2.0 * keys * (head + value) / 32.0,
            tile_loaded_bytes: keys * (head + value) * 2.0,
            traffic_bytes: 3.0 * of((p.d + p.d_v) as f64) + padded * head * 8.0,
            operand_bytes: 2.0,
            result_bytes: 2.0,
            threads: 384.0,
            cluster: 1.0,
            stages: f64::from(spec.stages),
            copy_bytes: 16.0,
            across_depth: [false, true],
            store_bytes: 16.0,
            ..Loop::default()
        };
        let before = Stream::new(Traffic::Lines, of(2.0 * p.d_v as f64) + rows * 12.0);
        let zeros = Stream::new(Traffic::Lines, padded * head * 4.0);
        let behind = Stream::new(Traffic::Lines, padded * head * 4.0 + of(p.d as f64));
        let of_pairs = self.of_pairs.iter().flat_map(|of_pairs| of_pairs.work(p));
        let of_sinks = self.dsinks.is_some().then(|| sinks::work(p));
        let behind = self.gradients[0].is_some().then_some(behind);
        Work::of(main).beside([before, zeros].into_iter().chain(behind).chain(of_pairs).chain(of_sinks))
    }

    fn lower(&self, spec: &Spec) -> Result<Program, Refusal> {
        let p = &self.problem;
        let mut program = empty_program(&p.slots());
        let (query_blocks, key_blocks) = (self.query_blocks(), self.key_blocks() as u32);
        // Of sequences, tiles are those of the longest one for each, and blocks those of all rows.
        let tiles = p.b * p.h * query_blocks;
        let blocks = if spec.ragged { p.h * sequences::blocks_of_head(p) } else { tiles };
        let padded = blocks * u64::from(QUERIES);
        let [delta, lse_log2] = ["delta", "log-sum-exp"].map(|name| program.add_scratch(name, padded * 4));
        let pieces_bytes = blocks * u64::from(CONSUMERS * piece_bytes(spec.head));
        let pieces = program.add_scratch("gradient of the queries", pieces_bytes);
        let turns = spec.in_order.then(|| {
            // Consumers of long heads count for themselves.
            let counts = if is_long(spec.head) { blocks * u64::from(CONSUMERS) } else { blocks };
            let bytes = (counts + 1) * 4;
            let counts = program.add_scratch("shares added", bytes);
            program.steps.push(Step::Fill { at: counts, bytes, value: 0 });
            TurnsArgs { next: counts, added: Address { offset_bytes: counts.offset_bytes + 4, ..counts }, key_blocks }
        });
        // In front of all launches, which it would keep from overlapping.
        self.of_pairs.iter().for_each(|of_pairs| of_pairs.clear(&mut program));

        let rows =
            |view: &View| RowsArgs { at: element(view, []), strides_bytes: [0, 1, 2].map(|i| view.strides[i] * view.dtype.bytes() as u64) };
        let before = BeforeArgs {
            o: rows(&self.o),
            d_o: rows(&self.d_o),
            log_sum_exp: rows(&self.log_sum_exp),
            delta,
            lse_log2,
            queries: p.s_q as u32,
            pieces,
            block_bytes: CONSUMERS * piece_bytes(spec.head),
            vectors: (p.d_v / 8) as u32,
            blocks: query_blocks as u32,
            heads: p.h as u32,
            sequences: SequencesArgs::of(p),
        };
        let grid = [tiles as u32, 1, 1];
        program.launch(Launch::new(Around::Before(self.ty, spec.ragged).kernel(), grid, before.bound(&spec.ragged)));

        let listed = blocks::list(p, &mut program, ListOf::Queries { block: QUERIES, tile: spec.keys() });
        let map = |name: &str, view: &View, decl| mapped::map(decl, view, p.dims(name, view));
        let corner = if p.corner == Corner::BottomRight { p.s_kv as i32 - p.s_q as i32 } else { 0 };
        let band = BandArgs {
            before: p.left.map_or(-UNBOUNDED, |left| corner - left as i32),
            behind: p.right.map_or(UNBOUNDED, |right| corner + right as i32 + 1),
            queries: p.s_q as i32,
        };
        let score_mod = ModArgs {
            of: ScoreModArgs::of(p),
            last_query: p.s_q as u32 - 1,
            last_key: p.s_kv as u32 - 1,
            shift: p.s_kv as i32 - p.s_q as i32,
        };
        let order = OrderArgs::new(key_blocks, p.h_kv as u32, p.b as u32, self.section(spec));
        let [dq, dk, dv] = &self.gradients;
        let args = ParamsArgs {
            q: map("q", &p.q, spec.query_tile().map(Access::Read)),
            k: map("k", &p.k, spec.key_tile().map(Access::Read)),
            v: map("v", &p.v, spec.value_tile().map(Access::Read)),
            d_o: map("d_o", &self.d_o, spec.result_tile().map(Access::Read)),
            // Of one that is not written, a map that is not used.
            dk: map("dk", dk.as_ref().unwrap_or(&p.k), spec.gradient_map()),
            dv: map("dv", dv.as_ref().unwrap_or(&p.v), spec.gradient_map()),
            has_dk: u32::from(dk.is_some()),
            has_dv: u32::from(dv.is_some()),
            lse_log2,
            delta,
            dq: pieces,
            keys: p.s_kv as u32,
            query_blocks: query_blocks as u32,
            scale: host_number(p.scale),
            scale_log2: self.scale * std::f32::consts::LOG2_E,
            order,
            group: p.group() as u32,
            heads: p.h as u32,
            band: (spec.mask == Mask::Band && !spec.ragged).then_some(band),
            turns,
            score_mod: spec.score_mod.then_some(score_mod),
            ragged: SequencesArgs::of(p).map(|sequences| {
                // Of one that is not written, rows that are not used.
                let rows = |view: &Option<View>, of: &View, elements| RowsOutArgs::new(view.as_ref().unwrap_or(of), elements);
                let batch_bytes = [(dk, &p.k), (dv, &p.v)].map(|(view, of)| view.as_ref().unwrap_or(of).strides[0] * 2);
                RaggedArgs { sequences, dk: rows(dk, &p.k, p.d), dv: rows(dv, &p.v, p.d_v), batch_bytes }
            }),
            dropout: DropoutArgs::of(p),
            listed,
            function: self.function.as_ref().map(|chain| FunctionArgs::with(p, chain)),
        };
        program.launch(Launch::new(spec.clone().kernel(), [order.tiles, 1, 1], args.bound(spec)).overlapping());

        if let Some(dq) = dq {
            let args = BehindArgs {
                pieces,
                lse_log2,
                dq: element(dq, []),
                strides_bytes: [0, 1, 2].map(|i| dq.strides[i] * 2),
                queries: p.s_q as u32,
                keys: p.s_kv as u32,
                before: band.before,
                behind: band.behind,
                elements: p.d as u32,
                scale: host_number(p.scale),
                pieces_of_head: (query_blocks * u64::from(CONSUMERS)) as u32,
                heads: p.h as u32,
                sequences: SequencesArgs::of(p),
            };
            let grid = [(tiles * u64::from(CONSUMERS)) as u32, 1, 1];
            let behind = Around::Behind(self.ty, spec.head, spec.keeps_keys(), spec.ragged);
            program.launch(Launch::new(behind.kernel(), grid, args.bound(&spec.ragged)).overlapping());
        }
        for of_pairs in &self.of_pairs {
            of_pairs.launch(&mut program, p, &self.d_o, Known { lse_log2, delta, band, score_mod });
        }
        if let Some(dsinks) = &self.dsinks {
            let numbers = sinks::Numbers { lse_log2, delta, pitch: query_blocks * u64::from(QUERIES), sequences: SequencesArgs::of(p) };
            sinks::launch(&mut program, p, self.ty, dsinks, numbers);
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        if target != Target::Sm90a {
            return Vec::new();
        }
        let mut kernels = Vec::new();
        for ty in Half::ALL {
            let mut behind = Vec::new();
            for (head, value) in HEADS {
                let (end, band) = (Mask::End, Mask::Band);
                let of = [(end, false, false), (band, false, false), (band, true, false), (band, false, true), (band, true, true)];
                for (mask, score_mod, ragged) in of {
                    let plain = Spec { ty, head, value, mask, score_mod, ragged, ..Spec::plain(ty) };
                    let spec = |in_order, dropout| Spec { in_order, dropout, ..plain.clone() };
                    if mask == band && !ragged && !spec::is_long(head) {
                        kernels.push(Spec { listed: true, ..plain.clone() }.kernel());
                    }
                    kernels.extend([false, true].map(|in_order| spec(in_order, false).kernel()));
                    if mask == band {
                        kernels.extend([false, true].map(|in_order| spec(in_order, true).kernel()));
                    }
                }
                if !behind.contains(&head) {
                    behind.push(head);
                    kernels.extend([false, true].map(|ragged| Around::Behind(ty, head, false, ragged).kernel()));
                    if may_keep_keys(head) {
                        kernels.extend([false, true].map(|ragged| Around::Behind(ty, head, true, ragged).kernel()));
                    }
                }
            }
            kernels.extend([false, true].map(|ragged| Around::Before(ty, ragged).kernel()));
        }
        // Functions are the caller's, and kernels with one are compiled at its first call: there are a few by which they are judged.
        let (function, score) = function::sloped_sample();
        let samples =
            [(Half::Bf16, 64, false, false), (Half::F16, 96, false, false), (Half::F16, 128, true, false), (Half::Bf16, 128, false, true)];
        kernels.extend(samples.map(|(ty, head, in_order, listed)| {
            let of = Spec { head, value: head, mask: Mask::Band, score_mod: true, in_order, listed, ..Spec::plain(ty) };
            Spec { function: function.clone(), score, ..of }.kernel()
        }));
        kernels.extend(blocks::catalog());
        kernels.extend(sinks::catalog(true));
        kernels.extend(PairGradient::catalog());
        kernels
    }
}

impl Backward {
    fn keys(&self) -> u64 {
        keys_of(self.head).into()
    }

    fn key_blocks(&self) -> u64 {
        self.problem.s_kv.div_ceil(self.keys())
    }

    fn query_blocks(&self) -> u64 {
        self.problem.s_q.div_ceil(u64::from(QUERIES))
    }

    /// Blocks of queries that a block of keys goes through.
    fn turns(&self, block: u64) -> u64 {
        let p = &self.problem;
        let (queries, rows) = (p.s_q as i64, i64::from(QUERIES));
        let corner = if p.corner == Corner::BottomRight { p.s_kv as i64 - queries } else { 0 };
        let (first, last) = ((block * self.keys()) as i64, ((block + 1) * self.keys()).min(p.s_kv) as i64 - 1);
        let from = p.right.map_or(0, |right| (first - corner - i64::from(right)).clamp(0, queries));
        let until = p.left.map_or(queries, |left| (last - corner + i64::from(left) + 1).clamp(0, queries));
        ((until + rows - 1) / rows - from / rows).max(1) as u64
    }

    /// Heads of keys that are gone through together: in order, those whose queries and gradients stay in half of the L2. As shares come, one after the other where
    /// tiles are alike, and four where a diagonal makes them unlike: then CTAs of one length stand side by side and add to other queries (one H200, causal, sides in
    /// random order: 8,192 positions with 32 heads on 8 of keys 520 TFLOP/s beside 477, 96 elements with 8 on 2 401 beside 371, 64 heads of 4,096 503 beside 491).
    fn section(&self, spec: &Spec) -> u32 {
        let p = &self.problem;
        if !spec.in_order {
            return if p.left.is_some() || p.right.is_some() || p.block_map.is_some() { TOGETHER } else { 1 };
        }
        let head_bytes = (p.s_q * (p.d + p.d_v) * 4 * p.group()).max(1);
        (self.arch.l2_bytes / 2 / head_bytes).clamp(1, 1 << 16) as u32
    }
}
