//! `attention.decode`: attention of few queries to many keys on Hopper's tensor cores ([`verdigris_graph::AttentionProblem`] has the formulas).
//!
//! **What.** Up to 64 queries of each head; bf16 and f16, heads of multiples of 8 up to 256 elements, values of another length than keys, grouped heads,
//! windows around either diagonal, lengths, sinks. Keys and values of any strides that TMA takes, or paged ([`super::paged`]), in kernels of their own, in pages of
//! any multiple of 8 keys. Ragged queries, of at most 64 in a sequence, with ragged or paged keys ([`super::ragged`]), in kernels of their own too. How many keys
//! there are shapes no kernel. Longer heads, up to 576 elements with values of 512, where values are the first elements of the keys in the same memory
//! ([`AttentionProblem::has_values_in_keys`]), as latent attention has them: [`latent`]. Keys and values of 8 bits, e4m3 or e5m2, beside queries of 16, with their factors, as
//! a cache has them that takes half the room: [`widen`]. Of those there is no other engine of tensor cores, and any number of queries is taken.
//!
//! **Method.** The queries of all heads that share a head of keys are the rows of one tile, so that keys and values are read once. The keys to which a
//! tile attends are cut into equal parts, as many as it takes to fill the chip, a CTA each; where lengths differ, those of each batch are. A part leaves its
//! rows and their log-sum-exp in f32, and a second launch ([`super::combine`]), which begins while the first ends, adds them up: `o = Σ e^(L[part] − L) · o[part]`. With one part
//! there is no second launch. A CTA keeps a ring of blocks of keys and of values on their way by TMA, two CTAs stand on an SM (one where values have
//! more than 128 elements), and together they have 160 to 192 KiB on their way (96 KiB of 8 bits), several times what the latency of device memory asks for.
//!
//! **When it wins.** On compute capability 9.0, with few queries: wherever reading the keys takes longer than the products.
//!
//! **Numbers.** As in `attention.forward`: scores and sums in f32, `e^(s − m)` rounded to the type of the values before it is multiplied, its row's sum not;
//! of latent attention `m` is the greatest score so far or up to `8 ln 2` below it.
//! Parts are added in f32 and rounded once, in an order that their number fixes: results repeat bit for bit. Keys that are not attended to have the factor 0:
//! beyond a length anything may stand, but a value that is not finite and in one block with attended ones reaches the rows of that block.
//!
//! **Source.** Dao et al., "Flash-Decoding for long-context inference", 2023; Shah et al., "FlashAttention-3", 2024 (rows of grouped heads in one tile).

mod kernel;
mod latent;
mod part;
mod widen;

#[cfg(test)]
mod tests;

use verdigris_graph::{AttentionPass, AttentionProblem, Corner, Problem, View};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::band::{self, BandArgs, SinkArgs};
use super::blocks;
use super::combine::{self, CombineArgs, Parts};
use super::descale::DescaleArgs;
use super::dropout;
use super::half::Half;
use super::mapped;
use super::of_queries::OfQueriesArgs;
use super::paged::{self, PagesArgs};
use super::ragged::{self, OffsetsArgs};
use super::score_mod;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Join, Loop, Work, wgmma_cycles};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::layout::space::element;
use crate::split_k::MOST_PARTS_BYTES;

use kernel::{ParamsArgs, ROWS, Spec};
use widen::Byte;

/// The most queries of a head.
const MOST_QUERIES: u64 = 64;
/// The most parts of the keys.
const MOST_PARTS: u64 = 256;
/// Elements of keys and of values for which there are kernels, with the keys of a block and the blocks in shared memory.
const CLASSES: [[u32; 4]; 4] = [[64, 64, 128, 3], [128, 128, 64, 3], [192, 128, 64, 2], [256, 256, 64, 3]];
/// The same where values are the first elements of the keys, for longer heads.
const LATENT: [u32; 4] = [576, 512, 64, 2];
/// The same where keys and values are of 8 bits: bytes of the shortest heads stand in lines of 128, as others do.
const CACHED: [[u32; 4]; 4] = [[64, 64, 128, 2], [128, 128, 64, 3], [192, 128, 64, 2], [256, 256, 64, 3]];

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Decode {
    problem: AttentionProblem,
    o: View,
    log_sum_exp: Option<View>,
    max_scores: Option<View>,
    spec: Spec,
    scale: f32,
    arch: Arch,
}

/// A config: parts of the keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Config {
    parts: u32,
}

impl Algorithm for Decode {
    const ID: EngineId = EngineId { name: "attention.decode", number: 903 };
    const VERSION: u32 = 1;
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
        dropout::require_none(Self::ID, p)?;
        blocks::require_none(Self::ID, p)?;
        // Of 8 bits beside queries that are not.
        let cache = Byte::of(p.k.dtype).filter(|_| !p.q.dtype.is_fp8());
        Self::ID.require(
            p.s_q <= MOST_QUERIES || cache.is_some(),
            Reason::Extent,
            format_args!("{} queries, taken up to {MOST_QUERIES}", p.s_q),
        )?;
        let is_long = p.d.max(p.d_v) > 256;
        let latent = is_long && p.has_values_in_keys();
        Self::ID.require(
            latent || !is_long,
            Reason::Extent,
            format_args!(
                "heads of {} and {} elements, taken up to 256, and more where values are the first elements of the keys in the same memory",
                p.d, p.d_v
            ),
        )?;
        let most = if latent { [LATENT[0], LATENT[1]].map(u64::from) } else { mapped::MOST_ELEMENTS };
        let ty = match cache {
            None => mapped::require(Self::ID, p, most, &[("q", &p.q), ("k", &p.k), ("v", &p.v), ("o", o)])?,
            Some(_) => {
                Self::ID.require(!latent, Reason::DType, format_args!("values of {} in the keys, taken are bf16 and f16", p.k.dtype))?;
                Self::ID.require(p.v.dtype == p.k.dtype, Reason::DType, format_args!("v of {}, keys of {}", p.v.dtype, p.k.dtype))?;
                let ty = mapped::require(Self::ID, p, most, &[("q", &p.q), ("o", o)])?;
                mapped::require_maps(Self::ID, p, most, &[("k", &p.k), ("v", &p.v)])?;
                ty
            }
        };
        let scale = score_mod::plain_scale(Self::ID, p)?;
        // There what is taken off exponents follows the greatest score with some slack.
        let rule = "greatest scores beside values that are elements of the keys, taken without";
        Self::ID.require(!latent || max_scores.is_none(), Reason::Epilogue, rule)?;
        band::require(Self::ID, p, &[("log_sum_exp", log_sum_exp.as_ref()), ("max_scores", max_scores.as_ref())])?;
        let of_eight = p.d.is_multiple_of(8) && p.d_v.is_multiple_of(8);
        Self::ID.require(of_eight, Reason::Extent, format_args!("heads of {} and {} elements, taken are multiples of 8", p.d, p.d_v))?;
        let classes = if cache.is_some() { CACHED } else { CLASSES };
        let class = classes.into_iter().find(|[head, value, ..]| u64::from(*head) >= p.d && u64::from(*value) >= p.d_v);
        // What is beyond the classes is latent, which was asked above.
        let [head, value, block, stages] = class.unwrap_or(LATENT);
        ragged::require(Self::ID, p)?;
        paged::require(Self::ID, p, block)?;
        let rows = u128::from(p.b) * u128::from(p.h) * u128::from(p.s_q);
        Self::ID.require(
            rows * u128::from(MOST_PARTS) < 1 << 31,
            Reason::Extent,
            format_args!("{rows} queries of all heads, taken are fewer than 2^23"),
        )?;
        let spec = Spec { ty, head, value, block, stages, paged: p.is_paged(), ragged: p.is_ragged(), latent, cache };
        Ok(Decode {
            problem: p.clone(),
            o: o.clone(),
            log_sum_exp: log_sum_exp.clone(),
            max_scores: max_scores.clone(),
            spec,
            scale,
            arch: arch.clone(),
        })
    }

    fn configs(&self) -> Vec<Config> {
        // Sequences of ragged tensors have as many queries as all of them on average: CTAs of others end at once.
        let (tiles, blocks) = (self.of_mean_length().tiles().max(1), self.blocks());
        let resident = u64::from(self.resident());
        // As many parts as give each place on the chip one, half of that and twice; and numbers around these, for those who measure.
        let mut parts = vec![1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128];
        parts.extend([resident / 2, resident, 2 * resident].map(|ctas| ctas / tiles));
        // More CTAs than places twice over have nothing left to fill.
        let most = blocks.min(MOST_PARTS).min(2 * resident / tiles);
        let fits = |parts: u64| parts == 1 || (parts <= most && self.partial_bytes(parts) <= MOST_PARTS_BYTES);
        parts.retain(|&parts| parts > 0 && fits(parts));
        parts.sort_unstable();
        parts.dedup();
        parts.into_iter().map(|parts| Config { parts: parts as u32 }).collect()
    }

    fn knobs(config: &Config) -> Knobs {
        Knobs::new([("parts", config.parts)])
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes { tensor_core: true, ..Notes::of(DType::F32) }
    }

    fn work(&self, config: &Config) -> Work {
        if self.problem.is_ragged() {
            return self.of_mean_length().work(config);
        }
        let (p, spec) = (&self.problem, &self.spec);
        let [rows, block, head, value] = [ROWS, spec.block, spec.head, spec.value].map(f64::from);
        let (tiles, blocks, parts) = (self.tiles() as f64, self.blocks().max(1) as f64, f64::from(config.parts));
        let resident = f64::from(self.resident());
        let grid = tiles * parts;
        let waves = (grid / resident).ceil().max(1.0);
        let keys = (blocks * block).min(p.s_kv as f64);
        let bytes = |rows: f64, elements: u64| rows * elements as f64 * 2.0;
        let kv_heads = (p.b * p.h_kv) as f64;
        let queries = (p.b * p.h * p.s_q) as f64;
        // Of a key and its value.
        let loaded = if spec.latent { p.d } else { p.d + p.d_v };
        let kept_bytes = p.k.dtype.bytes() as f64;
        let loaded_bytes = block * loaded as f64 * kept_bytes;
        let widens = spec.cache.is_some();
        // A warpgroup has its part of a block's keys and of a value's elements.
        let consumers = f64::from(spec.consumers());
        let read_bytes = if spec.latent {
            // Queries and probabilities by each.
            (consumers * rows * (head + block) + block * (head + value)) * 2.0
        } else {
            (rows * head + block * (head + value)) * 2.0
        };
        let main = Loop {
            kernel: Self::ID.name,
            product: [p.s_q * p.group(), p.s_kv, p.d].map(|extent| extent as f64),
            matrices: kv_heads,
            window: [1.0; 3],
            tile: [rows, value],
            tiles,
            grid,
            resident,
            steps: blocks,
            longest_steps: waves * (blocks / parts).ceil(),
            longest_tiles: waves,
            parts,
            join: if config.parts > 1 { Join::Launch } else { Join::None },
            tensor_cycles: consumers
                * (wgmma_cycles(rows, block / consumers) * head / 64.0 + wgmma_cycles(rows, value / consumers) * block / 64.0),
            // Sixteen exponentials a cycle.
            fma_cycles: rows * block / 16.0,
            shared_bytes: read_bytes + loaded_bytes + if widens { block * (head + value) * 3.0 } else { 0.0 },
            loaded_bytes,
            issued: (5.0 * rows * block + rows * value + if widens { 2.5 * block * (head + value) } else { 0.0 }) / 32.0,
            tile_issued: 3.0 * rows * value / 32.0,
            tile_loaded_bytes: rows * head * 2.0,
            traffic_bytes: kv_heads * keys * loaded as f64 * kept_bytes + bytes(queries, p.d + p.d_v),
            operand_bytes: 2.0,
            result_bytes: 2.0,
            threads: f64::from(spec.threads()),
            cluster: 1.0,
            stages: f64::from(spec.stages),
            copy_bytes: 16.0,
            across_depth: [false, true],
            store_bytes: 4.0,
            // A block's products and its softmax follow each other.
            exposed: 0.7,
            ..Loop::default()
        };
        let combine = combine::work(queries, p.d_v as f64, parts);
        Work::of(main).beside((config.parts > 1).then_some(combine))
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, &self.spec);
        let mut program = empty_program(&p.slots());
        let is_split = config.parts > 1;
        let o = element(&self.o, []);
        let [partial, partial_log_sum_exp, partial_max_scores] =
            combine::scratch_of_parts(&mut program, o, [config.parts, p.d_v as u32], p.b * p.h * p.s_q, self.max_scores.is_some());
        let strides_bytes = |view: &View| [0, 1, 2].map(|i| view.strides[i] * view.dtype.bytes() as u64);
        let [log_sum_exp, max_scores] = [&self.log_sum_exp, &self.max_scores].map(|view| OfQueriesArgs::new(&self.o, view));
        let [k_stored, v_stored] = spec.stored_tiles();
        let args = ParamsArgs {
            q: element(&p.q, []),
            k: paged::map(p, "k", &p.k, k_stored),
            v: (!spec.latent).then(|| paged::map(p, "v", &p.v, v_stored)),
            o,
            log_sum_exp,
            max_scores,
            q_strides: strides_bytes(&p.q),
            o_strides: strides_bytes(&self.o),
            partial,
            partial_log_sum_exp,
            partial_max_scores,
            queries: p.s_q as u32,
            keys: p.s_kv as u32,
            q_vectors: (p.d / 8) as u32,
            elements: p.d_v as u32,
            scale: self.scale,
            band: BandArgs::new(p, spec.block),
            sinks: SinkArgs::new(p),
            group: p.group() as u32,
            heads_of_keys: p.h_kv as u32,
            parts: config.parts,
            row_tiles: self.row_tiles() as u32,
            pages: PagesArgs::of(p, spec.block),
            offsets: OffsetsArgs::of(p),
            descales: spec.cache.map(|_| DescaleArgs::of(p)),
        };
        let ctas = self.tiles() as u32 * config.parts;
        program.launch(Launch::new(spec.kernel(), [ctas, 1, 1], args.bound(spec)).overlapping());
        if is_split {
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
                offsets: OffsetsArgs::of_queries(p),
                offsets_if_any: None,
            };
            let ctas = (p.b * p.h * p.s_q) as u32;
            let of = Parts::Decode { ragged: spec.ragged };
            program.launch(Launch::new(combine::kernel(spec.ty, spec.value, of), [ctas, 1, 1], args.bound(&of)).overlapping());
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        if target != Target::Sm90a {
            return Vec::new();
        }
        let of = |ty| {
            let spec = move |cache: Option<Byte>, class: [u32; 4], [ragged, paged]: [bool; 2]| {
                let [head, value, block, stages] = class;
                Spec { ty, head, value, block, stages, paged, ragged, latent: class == LATENT, cache }
            };
            let among = [[false, false], [false, true], [true, false], [true, true]];
            let own = CLASSES.into_iter().chain([LATENT]).map(|class| (None, class));
            let cached = Byte::ALL.into_iter().flat_map(|byte| CACHED.map(|class| (Some(byte), class)));
            own.chain(cached).flat_map(move |(cache, class)| among.map(|of| spec(cache, class, of).kernel()))
        };
        let combines = |ty| [false, true].map(|ragged| [128, 256, 512].map(|value| combine::kernel(ty, value, Parts::Decode { ragged })));
        Half::ALL.into_iter().flat_map(|ty| of(ty).chain(combines(ty).into_iter().flatten())).collect()
    }
}

impl Decode {
    /// As if each sequence had the mean length; the same where tensors are not ragged.
    fn of_mean_length(&self) -> Decode {
        let problem = if self.problem.is_ragged() { self.problem.of_mean_length() } else { self.problem.clone() };
        Decode { problem, ..self.clone() }
    }

    /// Tiles of the rows of one head of keys.
    fn row_tiles(&self) -> u64 {
        (self.problem.s_q * self.problem.group()).div_ceil(u64::from(ROWS))
    }

    /// CTAs that the chip holds at a time.
    fn resident(&self) -> u32 {
        self.arch.sm_count * self.spec.ctas_of_sm()
    }

    fn tiles(&self) -> u64 {
        self.problem.b * self.problem.h_kv * self.row_tiles()
    }

    /// Blocks of keys to which the queries of a head attend, lengths aside.
    fn blocks(&self) -> u64 {
        let p = &self.problem;
        let (block, keys) = (i64::from(self.spec.block), p.s_kv as i64);
        let corner = if p.corner == Corner::BottomRight { keys - p.s_q as i64 } else { 0 };
        let until = p.right.map_or(keys, |right| (p.s_q as i64 + corner + i64::from(right)).clamp(0, keys));
        let from = p.left.map_or(0, |left| (corner - i64::from(left)).clamp(0, keys));
        ((until + block - 1) / block - from / block).max(0) as u64
    }

    /// Bytes of what so many parts leave for the second launch.
    fn partial_bytes(&self, parts: u64) -> u64 {
        let p = &self.problem;
        if parts > 1 { p.b * p.h * p.s_q * parts * (p.d_v + 1) * 4 } else { 0 }
    }
}
