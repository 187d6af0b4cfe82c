//! The gradient of a bias: `dbias = Σ P ∘ (dP − Δ)` over the batches, heads and queries that the bias was repeated over; and of what a function of scores reads, where the slope of the function with
//! respect to it is one more factor.
//!
//! A launch of its own behind the others, for what those have in registers stands by keys and is gone after a turn. A CTA has a tile of the bias, 64 queries by
//! 64 or 128 keys, and goes through all that it was repeated over; the two products are made again, and the sum stays in f32 registers until it is written, once.
//! So nothing of the size of the scores is kept, nothing is added in memory, and results repeat bit for bit. Where tiles are fewer than the chip holds CTAs, what
//! each goes through is cut into parts, which the split-K reduction adds up ([`crate::split_k::reduction`]).
//!
//! What is read by query, by head or by batch alone, and entries of tables at places that steps say, are no element of a tile's own: a CTA adds what its pairs give to them in memory, in f32, a
//! thread those of neighbouring keys that give to one element as one share. So their gradients differ by their rounding from one execution to the next.
//!
//! **Cost.** Two products of the pairs of a tile a turn, and queries, keys, values and gradients of results read by each CTA once a turn. Scratch: none, or
//! 4 bytes for each part of each element.

mod kernel;

use std::fmt;

use verdigris_graph::{AttentionProblem, Matrix, View};
use verdigris_kir::face::{Header, build};
use verdigris_kir::inst::{MatrixType, WgmmaShape};
use verdigris_kir::ir::{Access, KernelBody, Target};
use verdigris_kir::program::{self, Address, KernelRef, Launch, Program};
use verdigris_kir::tile::fragment::wgmma_shape;
use verdigris_tensor::DType;

use super::super::function::{self, FunctionArgs, Lies, Source};
use super::super::half::Half;
use super::super::mapped;
use super::super::score_mod;
use super::super::sequences;
use super::super::tile::HeadTile;
use super::kernel::{BandArgs, ModArgs};
use super::spec::QUERIES;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic};
use crate::engine::{EngineId, Reason, Refusal};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::fuse::steps::Step;
use crate::hopper::WARPGROUP;
use crate::layout::batch::Chunk;
use crate::layout::space::element;
use crate::split_k::MOST_PARTS_BYTES;
use crate::split_k::reduction::{PartGrid, PartTile, ReductionSpec};

use kernel::{OutArgs, ParamsArgs, SharesArgs};

/// Instructions of a share: where it goes, and whether it is added to the one before.
const INSTRUCTIONS_OF_SHARE: f64 = 12.0;

/// Keys of a consumer.
const KEYS: u32 = 64;
/// Elements of the heads for which there are kernels; values have as many.
const HEADS: [u32; 4] = [64, 128, 192, 256];
/// The longest heads of kernels of two consumers: of longer ones their keys and values fill shared memory.
const MOST_OF_TWO: u32 = 128;
/// Shared memory for the rows of a CTA that has an SM to itself, and of one of two.
const ROWS_BYTES: [u32; 2] = [200 << 10, 104 << 10];
/// What a consumer keeps of a tile.
const PART: PartTile = PartTile { rows: QUERIES, columns: KEYS, warpgroups: 1 };

/// The function of scores, where the gradient is of what it reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ByFunction {
    /// With its slope with respect to that.
    steps: Vec<Step<Source>>,
    /// The step whose value is the score.
    score: u32,
    /// The number of what it reads.
    number: u32,
    /// Where elements are not those of a tile, how a pair finds its own.
    shares: Option<Shares>,
}

/// How a pair finds the element that it gives a share to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Shares {
    /// There is one for all keys of a query.
    OfQuery,
    /// It is the entry that the value of this step says.
    OfTable(u32),
}

/// What shapes the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Spec {
    ty: Half,
    /// Elements of queries, keys and values: one of [`HEADS`].
    head: u32,
    consumers: u32,
    /// The type of the gradient; of none where parts of sums are kept, and where it is added to.
    out: Option<DType>,
    by: Option<ByFunction>,
}

impl fmt::Display for Spec {
    /// `attention_backward_bias_bf16_d64_m64_n128_f32`, or `…_parts`: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "attention_backward_bias_{}_d{}_m{QUERIES}_n{}_", self.ty.name(), self.head, self.keys())?;
        match (self.out, self.shares()) {
            (Some(dtype), _) => write!(f, "{dtype}")?,
            (None, None) => f.write_str("parts")?,
            (None, Some(Shares::OfQuery)) => f.write_str("byquery")?,
            (None, Some(Shares::OfTable(place))) => write!(f, "table{place}")?,
        }
        let Some(by) = &self.by else { return Ok(()) };
        function::write_name(f, &by.steps)?;
        write!(f, "_score{}", by.score)
    }
}

impl Spec {
    const fn keys(&self) -> u32 {
        KEYS * self.consumers
    }

    fn shares(&self) -> Option<Shares> {
        self.by.as_ref().and_then(|by| by.shares)
    }

    const fn query_tile(&self) -> HeadTile {
        HeadTile { rows: QUERIES, elements: self.head, ty: self.ty.map() }
    }

    const fn key_tile(&self) -> HeadTile {
        HeadTile { rows: self.keys(), elements: self.head, ty: self.ty.map() }
    }

    /// Rows of queries with rows of keys, or of gradients of results with values.
    const fn slot_bytes(&self) -> u32 {
        self.query_tile().bytes() + self.key_tile().bytes()
    }

    /// CTAs of an SM.
    const fn resident(&self) -> u32 {
        if self.consumers == 1 && self.head < 256 { 2 } else { 1 }
    }

    fn stages(&self) -> u32 {
        (ROWS_BYTES[self.resident() as usize - 1] / self.slot_bytes()).min(6)
    }

    /// Registers of a thread that loads, and of one that multiplies.
    const fn registers(&self) -> [u32; 2] {
        if self.consumers == 1 { [24, 224] } else { [24, 240] }
    }

    /// Queries by keys of a consumer.
    fn shape(&self) -> WgmmaShape {
        wgmma_shape(KEYS, self.ty.matrix(), self.ty.matrix(), MatrixType::F32)
    }

    fn epilogue(&self) -> EpilogueSpec {
        epilogue(self.out.unwrap_or(DType::F32))
    }

    fn build(&self) -> KernelBody {
        let threads = WARPGROUP * (1 + self.consumers);
        let header = Header { name: self.to_string(), target: Target::Sm90a, threads, min_ctas: self.resident(), cluster: 1 };
        build(header, |k| kernel::bias(k, self))
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }
}

/// The gradient alone stands behind the sums.
fn epilogue(out: DType) -> EpilogueSpec {
    EpilogueSpec::plain(OperandSpec { dtype: out, walk: Walk::Row })
}

fn adds(out: DType, slices: u32) -> ReductionSpec {
    ReductionSpec { integer: false, slices, epilogue: epilogue(out) }
}

/// A gradient of what pairs read that is asked for.
#[derive(Clone, Debug)]
pub(super) struct PairGradient {
    gradient: View,
    /// Its dims.
    of_gradient: [u64; 4],
    spec: Spec,
    /// Batches, heads, queries and keys that tiles are of: of a bias, 1 where it is repeated.
    own: [u64; 4],
    /// What a tile goes through: batches, heads, blocks of queries.
    repeated: [u64; 3],
    parts: u64,
}

/// What the launches in front know.
pub(super) struct Known {
    pub(super) lse_log2: Address,
    pub(super) delta: Address,
    pub(super) band: BandArgs,
    pub(super) score_mod: ModArgs,
}

impl PairGradient {
    /// That of the bias.
    ///
    /// # Errors
    /// A refusal that names the first requirement not met.
    pub(super) fn of_bias(id: EngineId, p: &AttentionProblem, dbias: &View, ty: Half, arch: &Arch) -> Result<Self, Refusal> {
        Self::accept(id, p, ("dbias", dbias), ty, None, arch)
    }

    /// That of what the function of scores reads by this number.
    ///
    /// # Errors
    /// A refusal that names the first requirement not met.
    pub(super) fn of_read(
        id: EngineId,
        p: &AttentionProblem,
        (number, view): (u32, &View),
        ty: Half,
        arch: &Arch,
    ) -> Result<Self, Refusal> {
        let name = format!("d_score_{number}");
        let Some(chain) = p.operand_sloped_score(number) else {
            return Err(id.refusal(Reason::Epilogue, format_args!("{name} of a function that has no slope")));
        };
        let steps = function::steps_of_chain(&chain, Lies::of);
        let shares = match function::place_of_table(&steps, number) {
            Some(place) => Some(Shares::OfTable(place)),
            None if p.dims(&name, view)[3] == 1 => Some(Shares::OfQuery),
            None => None,
        };
        let score = p.score.as_ref().map_or(0, |own| own.steps.len() as u32 - 1);
        Self::accept(id, p, (&name, view), ty, Some(ByFunction { steps, score, number, shares }), arch)
    }

    fn accept(
        id: EngineId,
        p: &AttentionProblem,
        (name, gradient): (&str, &View),
        ty: Half,
        by: Option<ByFunction>,
        arch: &Arch,
    ) -> Result<Self, Refusal> {
        id.require(p.dropout.is_none(), Reason::Epilogue, format_args!("{name} with dropout, taken without"))?;
        let rule = format_args!("{name} of ragged tensors or with lengths, taken without");
        id.require(!sequences::has(p), Reason::Layout, rule)?;
        let dims = p.dims(name, gradient);
        let shares = by.as_ref().and_then(|by| by.shares);
        let is_taken = gradient.dtype == DType::F32 || (gradient.dtype == p.q.dtype && shares.is_none());
        let rule = format_args!("{name} of {}, taken is f32, and {} where it is not added to in memory", gradient.dtype, p.q.dtype);
        id.require(is_taken, Reason::DType, rule)?;
        let is_row = dims[3] == 1 || gradient.strides[3] == 1;
        let rule = format_args!("keys of {name} are {} elements apart, taken side by side", gradient.strides[3]);
        id.require(is_row, Reason::Layout, rule)?;
        if shares.is_some() {
            let is_packed = (0..4).rev().try_fold(1, |all, i| (dims[i] == 1 || gradient.strides[i] == all).then_some(all * dims[i]));
            id.require(is_packed.is_some(), Reason::Layout, format_args!("{name} has gaps, taken where it is added to is what has none"))?;
        }
        // What is added to in memory is no tile's: those are of pairs.
        let own = if shares.is_some() { [1, 1, p.s_q, p.s_kv] } else { dims };
        let whole = [p.b, p.h, p.s_q.div_ceil(u64::from(QUERIES))];
        let repeated = match shares {
            Some(_) => [p.b, p.h, 1],
            None => [0, 1, 2].map(|i| if own[i] == 1 { whole[i] } else { 1 }),
        };
        let longest = p.d.max(p.d_v);
        let head = HEADS.into_iter().find(|&head| longest <= u64::from(head)).unwrap_or(HEADS[HEADS.len() - 1]);
        let consumers = if p.s_kv > u64::from(KEYS) && head <= MOST_OF_TWO { 2 } else { 1 };
        let out = shares.is_none().then_some(gradient.dtype);
        let spec = Spec { ty, head, consumers, out, by };
        let resident = u64::from(arch.sm_count * spec.resident());
        let mut made = PairGradient { gradient: gradient.clone(), of_gradient: dims, spec, own, repeated, parts: 1 };
        made.parts = made.parts_for(resident);
        if made.parts > 1 {
            made.spec.out = None;
        }
        let ctas = u128::from(made.tiles()) * u128::from(made.parts);
        id.require(ctas < 1 << 31, Reason::Extent, format_args!("{ctas} tiles of {name}, taken are fewer than 2^31"))?;
        let turns = made.turns();
        id.require(turns < 1 << 31, Reason::Extent, format_args!("{name} is of what is repeated {turns} times, taken below 2^31"))?;
        Ok(made)
    }

    /// Whether shares are added in memory.
    pub(super) fn adds(&self) -> bool {
        self.spec.shares().is_some()
    }

    /// Makes the gradient 0, where shares are added to it.
    pub(super) fn clear(&self, to: &mut Program) {
        if self.adds() {
            let bytes =
                4 * self.gradient.strides.iter().zip(&self.of_gradient).map(|(stride, extent)| stride * (extent - 1)).sum::<u64>() + 4;
            to.steps.push(program::Step::Fill { at: element(&self.gradient, []), bytes, value: 0 });
        }
    }

    /// What a tile goes through.
    fn turns(&self) -> u64 {
        self.repeated.iter().product()
    }

    fn matrices(&self) -> u64 {
        self.own[0] * self.own[1]
    }

    /// Tiles along the queries, and along the keys.
    fn grid(&self) -> [u64; 2] {
        [self.own[2].div_ceil(u64::from(QUERIES)), self.own[3].div_ceil(u64::from(self.spec.keys()))]
    }

    fn tiles(&self) -> u64 {
        self.matrices() * self.grid().iter().product::<u64>()
    }

    fn turns_of_part(&self) -> u64 {
        self.turns().div_ceil(self.parts)
    }

    /// As many parts as fill a chip of so many CTAs, none of them empty.
    fn parts_for(&self, resident: u64) -> u64 {
        let turns = self.turns();
        let of_a_part = turns.div_ceil((resident / self.tiles()).clamp(1, turns));
        let parts = turns.div_ceil(of_a_part);
        // What is added to in memory is kept by no part.
        if self.adds() {
            return parts;
        }
        let split = PairGradient { parts, ..self.clone() }.part_grid();
        if split.fits() && split.scratch_bytes() <= MOST_PARTS_BYTES { parts } else { 1 }
    }

    fn part_grid(&self) -> PartGrid {
        let [tile_rows, key_tiles] = self.grid().map(|tiles| tiles as u32);
        let (matrices, tile_columns) = (self.matrices() as u32, key_tiles * self.spec.consumers);
        PartGrid { tile: PART, tile_rows, tile_columns, matrices, parts: self.parts as u32 }
    }

    /// What the launches ask of the chip.
    pub(super) fn work(&self, p: &AttentionProblem) -> impl Iterator<Item = Stream> {
        let ctas = (self.tiles() * self.parts) as f64;
        let turns = self.tiles() as f64 * self.turns() as f64;
        // Of tiles that the window leaves out, nothing is read.
        let kept = (p.pairs() / (p.s_q as f64 * p.s_kv as f64)).min(1.0);
        let scores = f64::from(QUERIES * self.spec.keys());
        let of_function = if self.spec.by.is_some() { 2.0 * function::instructions(p) } else { 0.0 };
        let of_shares = if self.adds() { INSTRUCTIONS_OF_SHARE } else { 0.0 };
        let issued = turns * kept * (10.0 + score_mod::instructions(p) + of_function + of_shares) * scores / 32.0;
        let rows = (p.b * p.h * p.s_q) as f64 + (p.b * p.h_kv * p.s_kv) as f64;
        let written = self.of_gradient.iter().product::<u64>() as f64 * self.gradient.dtype.bytes() as f64;
        let bytes = rows * (p.d + p.d_v) as f64 * 2.0 + written;
        let adding = (self.parts > 1 && !self.adds()).then(|| self.part_grid().work());
        [Stream::new(Traffic::Lines, bytes).issuing(issued).of_ctas(ctas)].into_iter().chain(adding)
    }

    /// Puts the launches behind those of the program.
    pub(super) fn launch(&self, program: &mut Program, p: &AttentionProblem, d_o: &View, known: Known) {
        let spec = &self.spec;
        let map = |name: &str, view: &View, tile: HeadTile| mapped::map(tile.map(Access::Read), view, p.dims(name, view));
        let [query_tiles, key_tiles] = self.grid().map(|tiles| tiles as u32);
        let [of_batch, of_head, of_query, _] = [0, 1, 2, 3].map(|i| self.gradient.strides[i]);
        let gradient = Matrix {
            slot: self.gradient.slot,
            dtype: self.gradient.dtype,
            row_stride: of_query,
            column_stride: 1,
            batch_strides: vec![of_batch, of_head],
        };
        let [rows, columns] = [self.own[2], self.own[3]].map(|extent| extent as u32);
        let chunk = Chunk { first: vec![0, 0], extents: [1, self.own[0] as u32, self.own[1] as u32] };
        let out = epilogue(self.gradient.dtype).plain_arguments(&gradient, &chunk, element(&self.gradient, []));
        let chain = spec.by.as_ref().and_then(|by| p.operand_sloped_score(by.number));
        let split = (self.parts > 1 && !self.adds()).then(|| {
            let grid = self.part_grid();
            (grid, program.add_scratch("parts of the gradient", grid.scratch_bytes()))
        });
        let args = ParamsArgs {
            q: map("q", &p.q, spec.query_tile()),
            k: map("k", &p.k, spec.key_tile()),
            v: map("v", &p.v, spec.key_tile()),
            d_o: map("d_o", d_o, spec.query_tile()),
            lse_log2: known.lse_log2,
            delta: known.delta,
            keys: p.s_kv as u32,
            query_blocks: p.s_q.div_ceil(u64::from(QUERIES)) as u32,
            heads: p.h as u32,
            group: p.group() as u32,
            parts: self.parts as u32,
            key_tiles,
            query_tiles,
            own_heads: self.own[1] as u32,
            turns: self.turns() as u32,
            turns_of_part: self.turns_of_part() as u32,
            repeated_blocks: self.repeated[2] as u32,
            repeated_heads: self.repeated[1] as u32,
            is_row: u32::from(self.own[2] == 1 && p.s_q > 1),
            function: chain.as_ref().map(|chain| FunctionArgs::with(p, chain)),
            shares: spec.shares().map(|_| SharesArgs {
                to: element(&self.gradient, []),
                strides: [0, 1, 2].map(|i| if self.of_gradient[i] == 1 { 0 } else { 4 * self.gradient.strides[i] }),
                last_entry: (self.of_gradient[3] - 1) as f32,
            }),
            band: known.band,
            score_mod: known.score_mod,
            kept: split.as_ref().map(|(grid, scratch)| grid.arguments(*scratch)),
            out: spec.out.map(|_| OutArgs { batch: chunk.index(), epilogue: out.clone(), rows, columns }),
        };
        let ctas = (self.tiles() * self.parts) as u32;
        program.launch(Launch::new(spec.clone().kernel(), [ctas, 1, 1], args.bound(spec)).overlapping());
        if let Some((grid, scratch)) = split {
            let adds = adds(self.gradient.dtype, grid.slices());
            program.launch(grid.launch(adds, scratch, chunk.index(), out, [rows, columns]));
        }
    }

    /// Every kernel that these launches may name.
    pub(super) fn catalog() -> Vec<KernelRef> {
        let mut kernels = Vec::new();
        for ty in Half::ALL {
            let types = [DType::F32, ty.dtype()];
            for head in HEADS {
                for consumers in if head <= MOST_OF_TWO { 1..=2 } else { 1..=1 } {
                    let outs = [None].into_iter().chain(types.map(Some));
                    kernels.extend(outs.map(|out| Spec { ty, head, consumers, out, by: None }.kernel()));
                }
            }
        }
        // Functions are the caller's; each way to take one in is judged by a few.
        let (steps, score) = function::sloped_sample();
        let [by_table, by_query] = function::read_samples();
        let slope_of_one = steps[..=score as usize].iter().cloned().chain([Step::Scalar]).collect();
        let samples = [
            (Half::Bf16, 64, 2, Some(DType::F32), (slope_of_one, score), None),
            (Half::Bf16, 64, 2, None, by_table.clone(), Some(Shares::OfTable(5))),
            (Half::F16, 128, 1, None, by_table, Some(Shares::OfTable(5))),
            (Half::F16, 128, 2, None, by_query, Some(Shares::OfQuery)),
        ];
        kernels.extend(samples.map(|(ty, head, consumers, out, (steps, score), shares)| {
            Spec { ty, head, consumers, out, by: Some(ByFunction { steps, score, number: 0, shares }) }.kernel()
        }));
        for out in [DType::F32, DType::Bf16, DType::F16] {
            kernels.extend(ReductionSpec::SLICES.map(|slices| adds(out, slices).kernel()));
        }
        kernels
    }
}
