//! `attention.simt`: attention and its gradient without tensor cores, for everything.
//!
//! It takes every problem whose positions number fewer than 2^28: all element types, any strides, every option, ragged tensors, paged keys
//! of any page size, forward and backward.
//!
//! **Method.** A warp has a few *rows* (queries, or keys for the gradients of keys and values) and goes through *partners* (keys, or the queries of all
//! heads that read the key), 32 at a time. Each lane works out the scores of one partner with all rows of the warp; forward, the greatest score so far
//! and the sum of exponentials follow by the online softmax, and what the warp has summed is scaled where the maximum rises. Then lanes stand along the
//! elements of the result, and the weights go round by shuffles. The window leaves out partners in front of the first and behind the last one that a row
//! of the warp attends. Results wider than 256 elements are computed in parts, each with scores of its own.
//!
//! The gradient takes a launch for `Σ d_o · o` of each query, one for each of dq, dk and dv, one for the bias, in which a lane or a warp has an element
//! and goes through what it was repeated over, likewise for what a function of scores reads, and one for the sinks; of a table that it reads at places two ([`shares`]). Nothing is added in memory by
//! more than one thread, so that all of it repeats bit for bit.
//!
//! **When it wins.** f32 and f64; what no other engine takes.
//!
//! **Numbers.** In f32, in f64 where an operand is f64: weights are not rounded. Products are summed in the order of elements, results in that of partners.
//! A score under a cap is off by some roundings of its own size, whatever the cap, which is a normal number of the type.
//!
//! Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Rabe and Staats, "Self-attention does not need O(n²) memory", 2021.

mod kernel;
mod name;
mod pass;
mod shares;

use verdigris_graph::{AttentionPass, AttentionProblem, Chain, Corner, Problem, View};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::dropout::DropoutArgs;
use super::function::{self, Lies};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Loop, Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::steps::host_number;
use crate::fuse::strided;
use crate::layout::space::divisor;
use kernel::{BlocksArgs, KernelArgs, PagedArgs, RaggedArgs, Spec, WARPS};
use name::Name;
use pass::Pass;
use shares::SharesArgs;

/// Warps that an SM is to have where what they go through is cut into parts, and the most memory for what these leave.
const WARPS_OF_SM: u64 = 16;
const MOST_SHARES_BYTES: u64 = 64 << 20;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Simt {
    problem: AttentionProblem,
    /// Of a gradient, the function of scores with its slope.
    sloped: Option<Chain>,
    /// And with those with respect to what it reads, of the numbers whose gradients are asked for.
    sloped_by: Vec<Option<Chain>>,
    arch: Arch,
}

impl Algorithm for Simt {
    const ID: EngineId = EngineId { name: "attention.simt", number: 900 };
    const VERSION: u32 = 1;
    type Config = ();

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Attention(problem) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is attention", problem.kind())));
        };
        let longest =
            [problem.s_q, problem.s_kv, problem.q_rows, problem.kv_rows, problem.pages, problem.page_size].into_iter().max().unwrap_or(0);
        let of_blocks = problem.blocks.max(problem.block_q).max(problem.block_kv);
        Self::ID.require(
            of_blocks < 1 << 28,
            Reason::Extent,
            format_args!("{of_blocks} masks of blocks or pairs of one, taken below 2^28"),
        )?;
        Self::ID.require(longest < 1 << 28, Reason::Extent, format_args!("{longest} positions, taken below 2^28"))?;
        let widest = problem.d.max(problem.d_v);
        Self::ID.require(widest < 1 << 24, Reason::Extent, format_args!("heads of {widest} elements, taken below 2^24"))?;
        if let Some(cap) = problem.soft_cap.filter(|_| problem.compute == DType::F32) {
            let is_held = (cap.0 as f32).is_normal();
            Self::ID.require(
                is_held,
                Reason::Scale,
                format_args!("a soft cap of {:e}, taken in f32 is one of its normal numbers", cap.0),
            )?;
        }
        let sloped = problem.sloped_score().filter(|_| problem.is_backward());
        let is_asked = |number: usize| problem.operand(Name::D_SCORE[number].word()).is_some();
        let sloped_by = (0..4).map(|number| problem.operand_sloped_score(number as u32).filter(|_| is_asked(number))).collect();
        let accepted = Simt { problem: problem.clone(), sloped, sloped_by, arch: arch.clone() };
        for pass in accepted.passes() {
            let (spec, ctas) = (accepted.spec(pass), accepted.ctas(pass));
            Self::ID.require(ctas < 1 << 31, Reason::Extent, format_args!("{ctas} CTAs, taken below 2^31"))?;
            let target = spec.target();
            Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        }
        for pass in accepted.passes() {
            let repeats = accepted.repeats(pass).iter().fold(1_u64, |all, &extent| all.saturating_mul(extent));
            let rule = format_args!("what is read by {}, repeated {repeats} times, taken below 2^31", pass.word());
            Self::ID.require(repeats < 1 << 31, Reason::Extent, rule)?;
            let elements = accepted.own_dims(pass).iter().fold(1_u64, |all, &extent| all.saturating_mul(extent));
            let is_table = matches!(pass, Pass::Shares(_));
            Self::ID.require(
                !is_table || elements < 1 << 31,
                Reason::Extent,
                format_args!("a table of {elements} elements, taken below 2^31"),
            )?;
        }
        Ok(accepted)
    }

    fn configs(&self) -> Vec<()> {
        vec![()]
    }

    fn knobs((): &()) -> Knobs {
        Knobs::new([("warps", WARPS)])
    }

    fn notes(&self, (): &()) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, (): &()) -> Work {
        if self.problem.is_ragged() {
            return Simt { problem: self.problem.of_mean_length(), ..self.clone() }.work(&());
        }
        let p = &self.problem;
        let double = p.compute == DType::F64;
        // As a product of the pairs of all heads: a lane reads a partner's element for each row, and each row's own.
        let (pairs, heads) = (p.pairs() / p.s_q.max(1) as f64, (p.b * p.h) as f64);
        let elements = p.flops() / (2.0 * heads.max(1.0) * p.pairs().max(1.0));
        let tile = [f64::from(WARPS * 4), 32.0];
        let tiles = heads * (p.s_q as f64 / tile[0]).ceil();
        let main = Loop {
            kernel: Self::ID.name,
            product: [p.s_q as f64, pairs, elements],
            matrices: heads,
            window: [1.0; 3],
            tile,
            fma_cycles: tile[0] * tile[1] * elements / if double { 64.0 } else { 128.0 },
            loaded_bytes: (tile[0] + tile[1]) * elements * p.q.dtype.bytes() as f64,
            issued: tile[0] * tile[1] * elements / 32.0 * 3.0,
            exposed: 0.6,
            threads: f64::from(32 * WARPS),
            stages: 1.0,
            copy_bytes: p.q.dtype.bytes() as f64,
            ..Loop::default()
        };
        let resident = f64::from(self.arch.sm_count * if double { 4 } else { 8 });
        // A gradient is several launches, each of which takes time to begin.
        let others = (1..self.passes().len()).map(|_| Stream::new(Traffic::Lines, 0.0));
        Work::of(main.in_waves(tiles, resident, (pairs / 32.0).ceil().max(1.0))).beside(others)
    }

    fn lower(&self, (): &()) -> Result<Program, Refusal> {
        let p = &self.problem;
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let sums = p
            .is_backward()
            .then(|| program.add_scratch("row sums", self.batches(Pass::RowSums) * p.h * p.q_rows * p.compute.bytes() as u64));
        let mut shares = None;
        for pass in self.passes() {
            let spec = self.spec(pass);
            let ctas = self.ctas(pass);
            if ctas == 0 {
                continue;
            }
            if let Pass::Shares(_) = pass {
                let [rows, entries] = self.table(pass);
                shares = Some(program.add_scratch("shares of a table", rows * self.parts(pass) * entries * p.compute.bytes() as u64));
            }
            let args = self.arguments(&spec, sums, shares).bound(&spec);
            program.launch(Launch::new(spec.kernel(), [ctas as u32, 1, 1], args));
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut specs = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for columns in [2, 4] {
                for right in [false, true] {
                    let plain = Spec { right, columns, ..Spec::plain(Pass::Forward) };
                    let forward = [(Name::Q, dtype), (Name::K, dtype), (Name::V, dtype), (Name::O, dtype), (Name::LogSumExp, DType::F32)];
                    specs.push(Spec { operands: forward.to_vec(), ..plain.clone() });
                    for (pass, out) in [(Pass::Queries, Name::Dq), (Pass::Keys, Name::Dk), (Pass::Values, Name::Dv)] {
                        let read = [(Name::Q, dtype), (Name::K, dtype), (Name::V, dtype), (Name::LogSumExp, DType::F32), (Name::Do, dtype)];
                        let operands = read.into_iter().chain([(out, dtype)]).filter(|&(name, _)| pass.has(name)).collect();
                        specs.push(Spec { pass, operands, ..plain.clone() });
                    }
                }
            }
            let operands = vec![(Name::O, dtype), (Name::Do, dtype)];
            specs.push(Spec { operands, ..Spec::plain(Pass::RowSums) });
        }
        specs.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

impl Simt {
    /// The launches, in order.
    fn passes(&self) -> Vec<Pass> {
        let p = &self.problem;
        match &p.pass {
            AttentionPass::Forward { .. } => vec![Pass::Forward],
            AttentionPass::Backward { dq, dk, dv, dbias, dsinks, d_score, .. } => {
                let asked = [
                    (Pass::Queries, dq.is_some()),
                    (Pass::Keys, dk.is_some()),
                    (Pass::Values, dv.is_some()),
                    (Pass::Bias, dbias.is_some()),
                    (Pass::Sinks, dsinks.is_some()),
                ];
                let is_table = |number: u32| p.score.iter().flat_map(function::last_entries).nth(number as usize).flatten().is_some();
                let of_read = (0..).zip(d_score).filter(|(_, view)| view.is_some()).flat_map(|(number, _)| match is_table(number) {
                    true => vec![Pass::Shares(number), Pass::SumOfShares(number)],
                    false => vec![Pass::Operand(number)],
                });
                let asked = asked.into_iter().filter(|(_, asked)| *asked).map(|(pass, _)| pass);
                [Pass::RowSums].into_iter().chain(asked).chain(of_read).collect()
            }
        }
    }

    fn spec(&self, pass: Pass) -> Spec {
        let p = &self.problem;
        let all = p.operands().into_iter().filter_map(|(name, view, _)| Some((Name::of(name)?, view.dtype)));
        let operands = all.filter(|&(name, _)| pass.has(name)).collect();
        let mut spec = Spec { operands, double: p.compute == DType::F64, ..Spec::plain(pass) };
        if pass.has_scores() {
            spec.left = p.left.is_some();
            spec.right = p.right.is_some();
            spec.bottom_right = p.corner == Corner::BottomRight;
            spec.soft_cap = p.soft_cap.is_some();
            spec.dropout = p.dropout.is_some();
            // One kernel for all strides.
            if let Some(chain) = self.function(pass) {
                spec.function = function::steps_of_chain(chain, |_| Lies::ANY);
                spec.score = pass.has_slope().then(|| p.score.as_ref().map_or(0, |own| own.steps.len() as u32 - 1));
            }
        }
        if pass.has_columns() {
            spec.columns = self.width(pass).div_ceil(32).next_power_of_two().min(8) as u32;
        }
        if matches!(pass, Pass::Bias | Pass::Operand(_)) && self.repeats(pass).iter().product::<u64>() >= 16 {
            spec.team = 32;
        }
        spec
    }

    /// The function of scores as a pass has it: with its slope, where that is a factor of what it sums.
    fn function(&self, pass: Pass) -> Option<&Chain> {
        match pass {
            Pass::Operand(number) | Pass::Shares(number) => self.sloped_by[number as usize].as_ref(),
            pass if pass.has_slope() => self.sloped.as_ref(),
            _ => self.problem.score.as_ref(),
        }
    }

    /// Elements of a row of what is written.
    fn width(&self, pass: Pass) -> u64 {
        if matches!(pass, Pass::Forward | Pass::Values) { self.problem.d_v } else { self.problem.d }
    }

    fn column_blocks(&self, pass: Pass) -> u64 {
        if pass.has_columns() { self.width(pass).div_ceil(32 * u64::from(self.spec(pass).columns)) } else { 1 }
    }

    /// Heads whose rows a pass has, and rows of one.
    fn rows(&self, pass: Pass) -> [u64; 2] {
        let p = &self.problem;
        match pass {
            Pass::Keys | Pass::Values => [p.h_kv, p.s_kv],
            // Of ragged tensors, all of them.
            Pass::RowSums => [p.h, p.q_rows],
            _ => [p.h, p.s_q],
        }
    }

    /// Batches that a pass has rows of.
    fn batches(&self, pass: Pass) -> u64 {
        if pass == Pass::RowSums && self.problem.is_ragged() { 1 } else { self.problem.b }
    }

    /// Tiles of the rows of one head.
    fn row_tiles(&self, pass: Pass) -> u64 {
        self.rows(pass)[1].div_ceil(u64::from(WARPS * self.spec(pass).rows()))
    }

    /// The name of the gradient that a pass gives of what pairs read: of the bias, or of what the function reads.
    fn summed(&self, pass: Pass) -> Option<&'static str> {
        match pass {
            Pass::Bias => Some(Name::Dbias.word()),
            Pass::Operand(number) | Pass::Shares(number) | Pass::SumOfShares(number) => Some(Name::D_SCORE[number as usize].word()),
            _ => None,
        }
    }

    /// Its dims.
    fn own_dims(&self, pass: Pass) -> [u64; 4] {
        let gradient = self.summed(pass).and_then(|name| Some((name, self.problem.operand(name)?)));
        gradient.map_or([1; 4], |(name, view)| self.problem.dims(name, view))
    }

    /// How often what it is the gradient of was repeated along each dim; of a table, along those in front of its entries.
    fn repeats(&self, pass: Pass) -> [u64; 4] {
        let p = &self.problem;
        if self.summed(pass).is_none() {
            return [1; 4];
        }
        let (own, whole) = (self.own_dims(pass), [p.b, p.h, p.s_q, p.s_kv]);
        let is_table = matches!(pass, Pass::Shares(_) | Pass::SumOfShares(_));
        std::array::from_fn(|i| if own[i] == whole[i] || (i == 3 && is_table) { 1 } else { whole[i] })
    }

    /// Rows of a table, and the entries of each.
    fn table(&self, pass: Pass) -> [u64; 2] {
        let [b, h, i, entries] = self.own_dims(pass);
        [b * h * i, entries]
    }

    /// Queries of a part of those that read a row of a table: as many parts as fill the chip, whose shares are no more than memory for them.
    fn queries_of_part(&self, pass: Pass) -> u64 {
        let ([rows, entries], queries) = (self.table(pass), self.repeats(pass).iter().product::<u64>().max(1));
        let filling = (u64::from(self.arch.sm_count) * WARPS_OF_SM).div_ceil(rows.max(1));
        let held = MOST_SHARES_BYTES / (rows * entries * self.problem.compute.bytes() as u64).max(1);
        queries.div_ceil(filling.min(held).clamp(1, queries))
    }

    fn parts(&self, pass: Pass) -> u64 {
        self.repeats(pass).iter().product::<u64>().max(1).div_ceil(self.queries_of_part(pass))
    }

    fn ctas(&self, pass: Pass) -> u64 {
        let p = &self.problem;
        match pass {
            Pass::Sinks => p.h,
            Pass::Shares(_) => (self.table(pass)[0].saturating_mul(self.parts(pass))).div_ceil(u64::from(WARPS)),
            Pass::SumOfShares(_) => self.table(pass).iter().product::<u64>().div_ceil(u64::from(32 * WARPS)),
            Pass::Bias | Pass::Operand(_) => {
                let [b, h, s_q, s_kv] = self.own_dims(pass);
                let columns = u64::from(32 * WARPS / self.spec(pass).team);
                b.saturating_mul(h).saturating_mul(s_q).saturating_mul(s_kv.div_ceil(columns))
            }
            _ => self
                .batches(pass)
                .saturating_mul(self.rows(pass)[0])
                .saturating_mul(self.row_tiles(pass))
                .saturating_mul(self.column_blocks(pass)),
        }
    }

    fn arguments(&self, spec: &Spec, sums: Option<Address>, shares: Option<Address>) -> KernelArgs {
        let p = &self.problem;
        let view = |name: Name| -> &View { p.operand(name.word()).unwrap_or(&p.q) };
        let extents = |dims: [u64; 4]| dims.iter().map(|&extent| divisor(extent)).collect::<Vec<_>>();
        let (own, repeats) = (self.own_dims(spec.pass), self.repeats(spec.pass));
        let is_summed = matches!(spec.pass, Pass::Bias | Pass::Operand(_));
        let row_tiles = if is_summed { own[3].div_ceil(u64::from(32 * WARPS / spec.team)) } else { self.row_tiles(spec.pass) };
        KernelArgs {
            row_tiles: divisor(row_tiles),
            column_blocks: divisor(self.column_blocks(spec.pass)),
            heads: divisor(self.rows(spec.pass)[0]),
            group: divisor(p.group()),
            b: p.b as u32,
            h: p.h as u32,
            s_q: if spec.pass == Pass::RowSums { p.q_rows } else { p.s_q } as u32,
            s_kv: p.s_kv as u32,
            paged: spec.is_paged().then(|| PagedArgs { last: p.pages as u32 - 1, page_size: divisor(p.page_size) }),
            ragged: spec.is_ragged().then_some(RaggedArgs { q_rows: p.q_rows as u32, kv_rows: p.kv_rows as u32 }),
            blocks: spec.has_blocks().then(|| BlocksArgs {
                last: p.blocks as u32 - 1,
                block_q: divisor(p.block_q),
                block_kv: divisor(p.block_kv),
            }),
            d: p.d as u32,
            d_v: p.d_v as u32,
            left: p.left.unwrap_or(0) as i32,
            right: p.right.unwrap_or(0) as i32,
            soft_cap: p.soft_cap.map_or(1.0, |cap| cap.0),
            dropout: DropoutArgs::of(p).filter(|_| spec.dropout),
            scale: spec.pass.has_scores().then(|| host_number(p.scale)),
            own: extents(own)[..3].to_vec(),
            columns_of_bias: own[3] as u32,
            repeats: extents(repeats),
            repeated: repeats.iter().product::<u64>() as u32,
            numbers: self.function(spec.pass).filter(|_| spec.pass.has_scores()).map(function::numbers_of_chain).unwrap_or_default(),
            last_entries: self.function(spec.pass).filter(|_| spec.pass.has_scores()).map(last_entries).unwrap_or_default(),
            operands: spec.operands.iter().map(|&(name, _)| strided::argument(view(name), &[0; 4])).collect(),
            sums: (spec.pass.reads_sums()).then_some(sums).flatten(),
            sums_to: (spec.pass == Pass::RowSums).then_some(sums).flatten(),
            shares: shares.filter(|_| matches!(spec.pass, Pass::Shares(_) | Pass::SumOfShares(_))).map(|at| {
                let ([rows, entries], parts) = (self.table(spec.pass), self.parts(spec.pass));
                let count = if let Pass::Shares(_) = spec.pass { rows * parts } else { rows * entries };
                SharesArgs {
                    at,
                    entries: divisor(entries),
                    parts: divisor(parts),
                    queries_of_part: self.queries_of_part(spec.pass) as u32,
                    count: count as u32,
                }
            }),
        }
    }
}

/// The last entries of the tables of a function.
fn last_entries(chain: &Chain) -> Vec<u32> {
    function::last_entries(chain).flatten().map(|last| last as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(words: &str) -> Result<Simt, Refusal> {
        let problem: Problem = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
        Simt::accept(&problem.canonical().expect("legal"), &Arch::h200())
    }

    #[test]
    fn a_gradient_has_a_launch_for_what_is_asked_and_one_for_what_they_share() {
        let words = "attention backward bf16 b=2 h=4 s_q=100 d=64 log_sum_exp=f32 dq=bhsd dv=bhsd";
        let program = accepted(words).expect("taken").lower(&()).expect("a program");
        let names: Vec<&str> = program.launches().map(|launch| launch.kernel.name()).collect();
        assert_eq!(names.len(), 3, "{names:?}");
        assert!(["row_sums", "queries", "values"].iter().zip(&names).all(|(word, name)| name.contains(word)), "{names:?}");
    }

    #[test]
    fn what_is_too_large_is_refused_by_name() {
        let long = accepted("attention forward bf16 b=1 h=1 s_q=1 s_kv=268435456 d=64").expect_err("too many keys");
        assert_eq!(long.reason, Reason::Extent);
        for (cap, is_taken) in [("1e-50", false), ("1e-40", false), ("1e-37", true), ("1e38", true), ("1e39", false)] {
            let capped = accepted(&format!("attention forward bf16 b=1 h=1 s_q=1 s_kv=9 d=64 soft_cap={cap}")).map_err(|no| no.reason);
            assert_eq!(capped.map(|_| ()), if is_taken { Ok(()) } else { Err(Reason::Scale) }, "{cap}");
            let wide = format!("attention forward f64 b=1 h=1 s_q=1 s_kv=9 d=64 compute=f64 soft_cap={cap}");
            accepted(&wide).unwrap_or_else(|no| panic!("{wide}: {no}"));
        }
        let other = accepted("gemm bf16 m=4 n=4 k=4").expect_err("a product");
        assert_eq!(other.reason, Reason::Problem);
    }
}
