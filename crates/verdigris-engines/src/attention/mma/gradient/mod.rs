//! The gradient of attention by `mma.sync`, for every chip from sm_80 on.
//!
//! **What.** bf16 and f16, heads of up to 256 elements (even numbers), values of another length than keys, grouped heads, windows around either diagonal, lengths, sinks with their
//! gradient ([`super::super::sinks`]); a soft cap, a bias without its gradient, slopes, a mask and a factor that is given at execution, or the caller's function, in kernels of its own, without the gradients of what it reads;
//! dropout; maps of blocks; ragged tensors. Tensors of any strides that are multiples of 4 bytes, whose elements lie side by side.
//!
//! **Method.** Three launches, and one of the sinks' gradient where it is asked for: two numbers of each query ([`rows`]); the gradients of keys and values, a CTA for each 64 or 128 keys, which goes through all queries that attend to
//! them, of all heads that share them; the gradient of the queries, a CTA for each 64 or 128 of them, which goes through their keys ([`kernel`]). Scores and gradients of probabilities are
//! made in both, 7 products in place of 5, so that no sum is shared among CTAs: there is no workspace but the numbers, and nothing is added in memory. Where heads are longer than
//! registers have room for both sums of a key, keys and values are two launches, of 8 products in all.
//!
//! **When it wins.** On chips without `wgmma`; on others where `attention.backward` does not take tensors or options: strides of 4 and 8 bytes, maps of blocks of 64, or of heads beyond 128 elements, functions of those.
//!
//! **Numbers.** As those of `attention.backward`: scores and sums in f32; probabilities and the gradients of scores are rounded to the type of the queries before they are multiplied.
//! Results repeat bit for bit.
//!
//! **Source.** Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, algorithm 2.

mod kernel;
mod rows;

#[cfg(test)]
mod tests;

use std::f32::consts::LOG2_E;

use verdigris_graph::{AttentionPass, AttentionProblem, Chain, Problem, View};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::super::band::{self, BandArgs};
use super::super::blocks::{self, MapIfAnyArgs};
use super::super::dropout::{self, DropoutIfAnyArgs};
use super::super::function::{self, FunctionArgs, Lies, Source};
use super::super::half::Half;
use super::super::mapped;
use super::super::order::OrderArgs;
use super::super::ragged::{self, OffsetsIfAnyArgs};
use super::super::score_mod::{self, ScoreModArgs};
use super::super::sinks;
use super::tiles::{ROWS, THREADS};
use super::{
    COPY_INSTRUCTIONS, CYCLES_OF_PRODUCT, EXPOSED, MARGIN, Mma, alignment_bytes, require_chip, require_rows, rows_of, strides_bytes,
};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Loop, Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::fuse::steps::{self, Step, host_number};
use crate::layout::space::element;

use kernel::{Given, GradientArgs, ParamsArgs, Role, Spec};
use rows::Numbers;

/// A class of heads: elements of keys and of values, how often a warp has 16 own rows and how many partners a block has, and whether the sums of keys and of values fit into
/// registers together.
struct Class {
    head: u32,
    value: u32,
    tiles: &'static [[u32; 2]],
    is_whole: bool,
}

/// Few, for a kernel pack has each in every way that scores are made. The last tile of a class is of one row block, and has kernels that make scores.
const CLASSES: &[Class] = &[
    Class { head: 64, value: 64, tiles: &[[2, 32], [1, 64]], is_whole: true },
    Class { head: 128, value: 128, tiles: &[[1, 32]], is_whole: true },
    Class { head: 192, value: 128, tiles: &[[1, 32]], is_whole: true },
    Class { head: 256, value: 256, tiles: &[[1, 16]], is_whole: false },
];

/// Of a map of blocks, what its blocks' queries and keys are multiples of: own rows of the tiles that make scores, and what blocks of partners divide.
const BLOCKED: u32 = ROWS;

/// Heads of keys that are gone through together where tiles are unlike.
const TOGETHER: u32 = 4;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(in crate::attention) struct Gradient {
    problem: AttentionProblem,
    o: View,
    log_sum_exp: View,
    d_o: View,
    /// Of queries, keys, values.
    gradients: [Option<View>; 3],
    dsinks: Option<View>,
    ty: Half,
    /// The scale where nothing else makes scores.
    scale: f32,
    score_mod: bool,
    /// The function of scores, with its slope.
    function: Option<Chain>,
    copy_bytes: u32,
    arch: Arch,
}

/// A config: how often each warp has 16 own rows, and partners of a block.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Config {
    row_blocks: u32,
    block: u32,
}

impl Algorithm for Gradient {
    const ID: EngineId = Mma::ID;
    const VERSION: u32 = 1;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Attention(p) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is attention", problem.kind())));
        };
        let AttentionPass::Backward { o, log_sum_exp, d_o, dq, dk, dv, dbias, dsinks, d_score } = &p.pass else {
            return Err(Self::ID.refusal(Reason::Direction, "attention itself, taken is the gradient"));
        };
        require_chip(arch)?;
        Self::ID.require(dbias.is_none(), Reason::Epilogue, "a gradient of a bias, taken without")?;
        let reads_alone = d_score.iter().all(Option::is_none);
        Self::ID.require(reads_alone, Reason::Epilogue, "gradients of what a score function reads, taken without")?;
        if p.score.is_some() {
            function::require(Self::ID, p)?;
        }
        blocks::require(Self::ID, p, BLOCKED, BLOCKED)?;
        Self::ID.require(!p.is_paged(), Reason::Layout, "paged keys, taken side by side")?;
        let ty = mapped::require(Self::ID, p, mapped::MOST_ELEMENTS, &[])?;
        let gradients = [("dq", dq), ("dk", dk), ("dv", dv)].into_iter().filter_map(|(name, view)| Some((name, view.as_ref()?)));
        let read = [("q", &p.q), ("k", &p.k), ("v", &p.v), ("d_o", d_o)];
        let all: Vec<_> = read.into_iter().chain([("o", o)]).chain(gradients).collect();
        require_rows(p, &all)?;
        for (name, elements) in [("keys", p.d), ("values", p.d_v)] {
            let is_even = elements.is_multiple_of(2);
            Self::ID.require(is_even, Reason::Extent, format_args!("{name} of {elements} elements, taken is an even number"))?;
        }
        let score_mod = score_mod::is_needed(p) || p.dropout.is_some() || p.block_map.is_some();
        score_mod::require(Self::ID, p)?;
        let scale = if score_mod { 1.0 } else { score_mod::plain_scale(Self::ID, p)? };
        band::require(Self::ID, p, &[("log_sum_exp", Some(log_sum_exp))])?;
        sinks::require(Self::ID, p, dsinks.as_ref())?;
        ragged::require(Self::ID, p)?;
        let rows = u128::from(p.b) * u128::from(p.h) * u128::from(p.s_q.max(p.s_kv) + 128);
        Self::ID.require(rows < 1 << 31, Reason::Extent, format_args!("{rows} rows of all heads, taken are fewer than 2^31"))?;
        let copy_bytes = read.into_iter().map(|(name, view)| alignment_bytes(p, name, view)).fold(16, u64::min) as u32;
        let accepted = Gradient {
            problem: p.clone(),
            o: o.clone(),
            log_sum_exp: log_sum_exp.clone(),
            d_o: d_o.clone(),
            gradients: [dq, dk, dv].map(Clone::clone),
            dsinks: dsinks.clone(),
            ty,
            scale,
            score_mod,
            function: p.sloped_score(),
            copy_bytes,
            arch: arch.clone(),
        };
        let target = steps::target(&accepted.steps());
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("the function's types need {}", target.ptx()))?;
        let class = accepted.class();
        let least = class.configs(score_mod).iter().map(|config| accepted.shared_bytes(config)).min().unwrap_or(0);
        let limit = arch.shared_bytes_per_cta;
        Self::ID.require(least <= limit, Reason::SharedMemory, format_args!("{least} bytes of {limit}"))?;
        Ok(accepted)
    }

    fn configs(&self) -> Vec<Config> {
        let mut configs = self.class().configs(self.score_mod);
        configs.retain(|config| self.shared_bytes(config) <= self.arch.shared_bytes_per_cta);
        configs
    }

    fn knobs(config: &Config) -> Knobs {
        Knobs::new([("own_rows", 64 * config.row_blocks), ("partners", config.block)])
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes { tensor_core: true, ..Notes::of(DType::F32) }
    }

    fn work(&self, config: &Config) -> Work {
        if self.problem.is_ragged() {
            return Gradient { problem: self.problem.of_mean_length(), ..self.clone() }.work(config);
        }
        let (p, specs) = (&self.problem, self.specs(config));
        let Some(widest) = specs.iter().max_by_key(|spec| spec.shared_bytes()) else { return Work::default() };
        let [rows, block, head, value] = [widest.rows(), widest.block, widest.head, widest.value].map(f64::from);
        let heads = (p.b * p.h) as f64;
        let query_tiles = p.s_q.div_ceil(u64::from(widest.rows()));
        let of_tile = |tile: u64| band::blocks_of_tile(p, widest.rows(), widest.block, tile) as f64;
        let steps = (0..query_tiles).map(of_tile).sum::<f64>() * heads;
        // As if all launches were one: of as many tiles as have keys, each of which goes through the queries of a group.
        let tiles = (p.b * p.h_kv * p.s_kv.div_ceil(u64::from(widest.rows()))) as f64;
        let most = match (p.left, p.right) {
            (Some(left), Some(right)) => (u64::from(left) + u64::from(right) + 1 + u64::from(widest.rows())).min(p.s_q),
            _ => p.s_q,
        };
        let most = (most.div_ceil(u64::from(widest.block)) * p.group()) as f64;
        let ctas = (self.arch.shared_bytes_per_cta / widest.shared_bytes()).clamp(1, widest.ctas_of_registers());
        let resident = f64::from(self.arch.sm_count * ctas);
        let launches = specs.len() as f64;
        let loaded_bytes = launches * 2.0 * block * (head + value);
        let of_pair = |sums: fn([u32; 2]) -> u32| specs.iter().map(|spec| f64::from(sums(spec.role.products()))).sum::<f64>();
        let (along, across) = (of_pair(|[along, _]| along), of_pair(|[_, across]| across));
        let elements = (head + value) / 2.0;
        let products = (along + across) * rows / 16.0 * block / 8.0 * elements / 16.0;
        // A function has a slope of about as many.
        let of_scores = if self.score_mod { 2.0 * (score_mod::instructions(p) + 2.0 * function::instructions(p)) } else { 0.0 }
            + if p.dropout.is_some() { dropout::INSTRUCTIONS } else { 0.0 };
        let margin = if self.arch.runs(Target::Sm90a) { MARGIN } else { 1.0 };
        let row_bytes = |rows: u64| (p.b * rows * (p.d + p.d_v) * 2) as f64;
        let main = Loop {
            kernel: Self::ID.name,
            product: [p.s_q, p.s_kv, p.d].map(|extent| extent as f64),
            matrices: heads,
            window: [1.0; 3],
            tile: [rows, elements],
            tiles,
            grid: tiles,
            resident,
            steps: steps / tiles,
            longest_steps: (steps / resident).max(most),
            longest_tiles: (tiles / resident).ceil(),
            parts: 1.0,
            tensor_cycles: margin * CYCLES_OF_PRODUCT * products,
            fma_cycles: margin * launches * rows * block / 16.0,
            // Each warp reads its own rows and all partners; each sum all partners again.
            shared_bytes: margin * 2.0 * (along * (rows + 4.0 * block) + across * 4.0 * block) * elements + margin * loaded_bytes,
            loaded_bytes,
            issued: margin * launches * ((8.0 + of_scores) * rows * block + COPY_INSTRUCTIONS * loaded_bytes / f64::from(self.copy_bytes))
                / 32.0,
            tile_issued: margin * launches * 8.0 * rows * elements / 32.0,
            tile_loaded_bytes: launches * 2.0 * rows * (head + value),
            traffic_bytes: margin * (launches + 1.0) * (row_bytes(p.h * p.s_q) + row_bytes(p.h_kv * p.s_kv)),
            operand_bytes: 2.0,
            result_bytes: 2.0,
            threads: f64::from(THREADS),
            cluster: 1.0,
            stages: 2.0,
            copy_bytes: f64::from(self.copy_bytes),
            across_depth: [false, true],
            store_bytes: 4.0,
            exposed: margin * EXPOSED,
            ..Loop::default()
        };
        let rows = (p.b * p.h * p.s_q) as f64;
        let numbers = Stream::new(Traffic::Lines, rows * (4.0 * p.d_v as f64 + 12.0));
        // What a launch takes to begin.
        let others = (1..specs.len()).map(|_| Stream::new(Traffic::Lines, 0.0));
        Work::of(main).beside([numbers].into_iter().chain(others).chain(self.dsinks.is_some().then(|| sinks::work(p))))
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let p = &self.problem;
        let mut program = empty_program(&p.slots());
        let numbers_bytes = p.b * p.h * p.s_q * 4;
        let [lse_log2, delta] = ["log-sum-exp", "delta"].map(|name| program.add_scratch(name, numbers_bytes));
        let blocks = p.s_q.div_ceil(u64::from(rows::QUERIES)) as u32;
        let numbers = rows::ParamsArgs {
            o: rows_of(&self.o, p.d_v),
            d_o: rows_of(&self.d_o, p.d_v),
            log_sum_exp: element(&self.log_sum_exp, []),
            log_sum_exp_strides: strides_bytes(&self.log_sum_exp),
            lse_log2,
            delta,
            queries: p.s_q as u32,
            blocks,
            heads: p.h as u32,
            offsets: OffsetsIfAnyArgs::of(p),
        };
        let grid = [blocks * (p.b * p.h) as u32, 1, 1];
        program.launch(Launch::new(Numbers(self.ty).kernel(), grid, numbers.bound(&())));

        let [dq, dk, dv] = &self.gradients;
        let gradient = |view: &Option<View>, elements: u64| {
            let own = view.as_ref().unwrap_or(&p.q);
            GradientArgs::new(element(own, []), strides_bytes(own), if view.is_some() { elements as u32 } else { 0 })
        };
        let is_cut = p.left.is_some() || p.right.is_some();
        for spec in self.specs(config) {
            let [heads, rows, together] = match spec.role {
                Role::Queries => [p.h, p.s_q, p.group()],
                _ => [p.h_kv, p.s_kv, TOGETHER.into()],
            };
            // Where tiles are alike, neighbours read the same partners.
            let section = if is_cut { together as u32 } else { 1 };
            let tiles = rows.div_ceil(u64::from(spec.rows())) as u32;
            let of_scores = if spec.role == Role::Queries { gradient(dq, p.d) } else { gradient(dk, p.d) };
            let arguments = ParamsArgs {
                q: rows_of(&p.q, p.d),
                k: rows_of(&p.k, p.d),
                v: rows_of(&p.v, p.d_v),
                d_o: rows_of(&self.d_o, p.d_v),
                copy_bytes: self.copy_bytes,
                lse_log2,
                delta,
                of_scores: spec.role.sums_scores().then_some(of_scores),
                of_values: spec.role.sums_values().then(|| gradient(dv, p.d_v)),
                queries: p.s_q as u32,
                keys: p.s_kv as u32,
                heads: p.h as u32,
                scale: host_number(p.scale),
                scale_log2: self.scale * LOG2_E,
                order: OrderArgs::new(tiles, heads as u32, p.b as u32, section),
                group: p.group() as u32,
                band: BandArgs::new(p, spec.block),
                score_mod: spec.score_mod.then(|| ScoreModArgs::of(p)),
                dropout: spec.score_mod.then(|| DropoutIfAnyArgs::of(p)),
                map: spec.score_mod.then(|| MapIfAnyArgs::of(p)),
                function: self.function.as_ref().map(|chain| FunctionArgs::with(p, chain)),
                offsets: OffsetsIfAnyArgs::of(p),
            };
            let grid = [arguments.order.tiles, 1, 1];
            let given = Given { spec: spec.clone(), copy_bytes: self.copy_bytes };
            program.launch(Launch::new(spec.kernel(), grid, arguments.bound(&given)));
        }
        if let Some(dsinks) = &self.dsinks {
            sinks::launch(&mut program, p, self.ty, dsinks, sinks::Numbers { lse_log2, delta, pitch: p.s_q, sequences: None });
        }
        Ok(program)
    }

    fn catalog(_: Target) -> Vec<KernelRef> {
        let of_class = |ty, class: &'static Class| {
            let of = move |score_mod: bool| {
                let roles: &[Role] =
                    if class.is_whole { &[Role::KeysAndValues, Role::Queries] } else { &[Role::Keys, Role::Values, Role::Queries] };
                class
                    .configs(score_mod)
                    .into_iter()
                    .flat_map(move |config| roles.iter().map(move |&role| class.spec(ty, role, config, score_mod)))
            };
            [false, true].into_iter().flat_map(of)
        };
        let of_type = |ty| CLASSES.iter().flat_map(move |class| of_class(ty, class)).map(Spec::kernel).chain([Numbers(ty).kernel()]);
        // Functions are the caller's, and kernels with one are compiled at its first call: there are a few by which they are judged.
        let (function, score) = function::sloped_sample();
        let samples = [(Half::Bf16, 0), (Half::F16, 1), (Half::F16, 3)].into_iter().flat_map(|(ty, class)| of_class(ty, &CLASSES[class]));
        let samples = samples.filter(|spec| spec.score_mod).map(|spec| Spec { function: function.clone(), score, ..spec }.kernel());
        Half::ALL.into_iter().flat_map(of_type).chain(samples).chain(sinks::catalog(false)).collect()
    }
}

impl Class {
    /// Its tiles; what makes scores takes registers that two row blocks do not leave.
    fn configs(&self, score_mod: bool) -> Vec<Config> {
        let all = self.tiles.iter().map(|&[row_blocks, block]| Config { row_blocks, block });
        all.filter(|config| !score_mod || config.row_blocks == 1).collect()
    }

    fn spec(&self, ty: Half, role: Role, Config { row_blocks, block }: Config, score_mod: bool) -> Spec {
        Spec { ty, role, head: self.head, value: self.value, row_blocks, block, score_mod, function: Vec::new(), score: 0 }
    }
}

impl Gradient {
    /// The least class that has the problem's heads.
    fn class(&self) -> &'static Class {
        let p = &self.problem;
        let fits = |class: &&Class| u64::from(class.head) >= p.d && u64::from(class.value) >= p.d_v;
        CLASSES.iter().find(fits).expect("accepted problems have heads of a class")
    }

    /// The launches of the products: for gradients that are asked for.
    fn specs(&self, config: &Config) -> Vec<Spec> {
        let (class, [dq, dk, dv]) = (self.class(), self.gradients.each_ref().map(Option::is_some));
        let of_keys = match class.is_whole {
            true => vec![(Role::KeysAndValues, dk || dv)],
            false => vec![(Role::Keys, dk), (Role::Values, dv)],
        };
        let asked = of_keys.into_iter().chain([(Role::Queries, dq)]).filter(|(_, is_asked)| *is_asked);
        let (function, score) = (self.steps(), self.problem.score.as_ref().map_or(0, |own| own.steps.len() as u32 - 1));
        let spec = |role| Spec { function: function.clone(), score, ..class.spec(self.ty, role, *config, self.score_mod) };
        asked.map(|(role, _)| spec(role)).collect()
    }

    /// The function, as it shapes kernels.
    fn steps(&self) -> Vec<Step<Source>> {
        self.function.as_ref().map_or_else(Vec::new, |chain| function::steps_of_chain(chain, Lies::of))
    }

    fn shared_bytes(&self, config: &Config) -> u32 {
        self.specs(config).iter().map(Spec::shared_bytes).max().unwrap_or(0)
    }
}
