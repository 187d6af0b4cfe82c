//! The gradient of a bias: `dbias = Σ P ∘ (dP − Δ)` over the batches, heads and queries that the bias was repeated over.
//!
//! A launch of its own behind the others, for what those have in registers stands by keys and is gone after a turn. A CTA has a tile of the bias, 64 queries by
//! 64 or 128 keys, and goes through all that it was repeated over; the two products are made again, and the sum stays in f32 registers until it is written, once.
//! So nothing of the size of the scores is kept, nothing is added in memory, and results repeat bit for bit. Where tiles are fewer than the chip holds CTAs, what
//! each goes through is cut into parts, which the split-K reduction adds up ([`crate::split_k::reduction`]).
//!
//! **Cost.** Two products of the pairs of a tile a turn, and queries, keys, values and gradients of results read by each CTA once a turn. Scratch: none, or
//! 4 bytes for each part of each element.

mod kernel;

use std::fmt;

use verdigris_graph::{AttentionProblem, Matrix, View};
use verdigris_kir::face::{Header, build};
use verdigris_kir::inst::{MatrixType, WgmmaShape};
use verdigris_kir::ir::{Access, KernelBody, Target};
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_kir::tile::fragment::wgmma_shape;
use verdigris_tensor::DType;

use super::super::half::Half;
use super::super::mapped;
use super::super::score_mod;
use super::super::tile::HeadTile;
use super::kernel::{BandArgs, ModArgs};
use super::spec::QUERIES;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic};
use crate::engine::{EngineId, Reason, Refusal};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::hopper::WARPGROUP;
use crate::layout::batch::Chunk;
use crate::layout::space::element;
use crate::split_k::MOST_PARTS_BYTES;
use crate::split_k::reduction::{PartGrid, PartTile, ReductionSpec};

use kernel::{OutArgs, ParamsArgs};

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

/// What shapes the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Spec {
    ty: Half,
    /// Elements of queries, keys and values: one of [`HEADS`].
    head: u32,
    consumers: u32,
    /// The type of the gradient; of none where parts of sums are kept.
    out: Option<DType>,
}

impl fmt::Display for Spec {
    /// `attention_backward_bias_bf16_d64_m64_n128_f32`, or `…_parts`: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "attention_backward_bias_{}_d{}_m{QUERIES}_n{}_", self.ty.name(), self.head, self.keys())?;
        match self.out {
            None => f.write_str("parts"),
            Some(dtype) => write!(f, "{dtype}"),
        }
    }
}

impl Spec {
    const fn keys(&self) -> u32 {
        KEYS * self.consumers
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

/// The gradient of a bias that is asked for.
#[derive(Clone, Debug)]
pub(super) struct BiasGradient {
    dbias: View,
    spec: Spec,
    /// Batches, heads, queries and keys of the bias: 1 where it is repeated.
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

impl BiasGradient {
    /// # Errors
    /// A refusal that names the first requirement not met.
    pub(super) fn accept(id: EngineId, p: &AttentionProblem, dbias: &View, ty: Half, arch: &Arch) -> Result<Self, Refusal> {
        id.require(!p.is_ragged(), Reason::Layout, "a gradient of the bias of ragged tensors, taken without offsets")?;
        id.require(p.dropout.is_none(), Reason::Epilogue, "a gradient of the bias with dropout, taken without")?;
        let is_taken = dbias.dtype == DType::F32 || dbias.dtype == p.q.dtype;
        id.require(is_taken, Reason::DType, format_args!("dbias of {}, taken are f32 and {}", dbias.dtype, p.q.dtype))?;
        let own = p.dims("dbias", dbias);
        id.require(
            own[3] == p.s_kv && (p.s_kv == 1 || dbias.strides[3] == 1),
            Reason::Layout,
            format_args!("keys of dbias are {} elements apart, taken side by side", dbias.strides[3]),
        )?;
        let whole = [p.b, p.h, p.s_q.div_ceil(u64::from(QUERIES))];
        let repeated = [0, 1, 2].map(|i| if own[i] == 1 { whole[i] } else { 1 });
        let longest = p.d.max(p.d_v);
        let head = HEADS.into_iter().find(|&head| longest <= u64::from(head)).unwrap_or(HEADS[HEADS.len() - 1]);
        let consumers = if p.s_kv > u64::from(KEYS) && head <= MOST_OF_TWO { 2 } else { 1 };
        let spec = Spec { ty, head, consumers, out: Some(dbias.dtype) };
        let mut made = BiasGradient { dbias: dbias.clone(), spec, own, repeated, parts: 1 };
        made.parts = made.parts_for(u64::from(arch.sm_count * spec.resident()));
        if made.parts > 1 {
            made.spec.out = None;
        }
        let ctas = u128::from(made.tiles()) * u128::from(made.parts);
        id.require(ctas < 1 << 31, Reason::Extent, format_args!("{ctas} tiles of the bias, taken are fewer than 2^31"))?;
        let turns = made.turns();
        id.require(turns < 1 << 31, Reason::Extent, format_args!("a bias that is repeated {turns} times, taken below 2^31"))?;
        Ok(made)
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
        let split = BiasGradient { parts, ..self.clone() }.part_grid();
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
        let issued = turns * kept * (10.0 + score_mod::instructions(p)) * scores / 32.0;
        let rows = (p.b * p.h * p.s_q) as f64 + (p.b * p.h_kv * p.s_kv) as f64;
        let written = self.own.iter().product::<u64>() as f64 * self.dbias.dtype.bytes() as f64;
        let bytes = rows * (p.d + p.d_v) as f64 * 2.0 + written;
        let adding = (self.parts > 1).then(|| self.part_grid().work());
        [Stream::new(Traffic::Lines, bytes).issuing(issued).of_ctas(ctas)].into_iter().chain(adding)
    }

    /// Puts the launches behind those of the program.
    pub(super) fn launch(&self, program: &mut Program, p: &AttentionProblem, d_o: &View, known: Known) {
        let spec = self.spec;
        let map = |name: &str, view: &View, tile: HeadTile| mapped::map(tile.map(Access::Read), view, p.dims(name, view));
        let [query_tiles, key_tiles] = self.grid().map(|tiles| tiles as u32);
        let [of_batch, of_head, of_query, _] = [0, 1, 2, 3].map(|i| self.dbias.strides[i]);
        let gradient = Matrix {
            slot: self.dbias.slot,
            dtype: self.dbias.dtype,
            row_stride: of_query,
            column_stride: 1,
            batch_strides: vec![of_batch, of_head],
        };
        let [rows, columns] = [self.own[2], self.own[3]].map(|extent| extent as u32);
        let chunk = Chunk { first: vec![0, 0], extents: [1, self.own[0] as u32, self.own[1] as u32] };
        let out = epilogue(self.dbias.dtype).plain_arguments(&gradient, &chunk, element(&self.dbias, []));
        let split = (self.parts > 1).then(|| {
            let grid = self.part_grid();
            (grid, program.add_scratch("parts of the bias' gradient", grid.scratch_bytes()))
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
            band: known.band,
            score_mod: known.score_mod,
            kept: split.as_ref().map(|(grid, scratch)| grid.arguments(*scratch)),
            out: spec.out.map(|_| OutArgs { batch: chunk.index(), epilogue: out.clone(), rows, columns }),
        };
        let ctas = (self.tiles() * self.parts) as u32;
        program.launch(Launch::new(spec.kernel(), [ctas, 1, 1], args.bound(&spec)).overlapping());
        if let Some((grid, scratch)) = split {
            let adds = adds(self.dbias.dtype, grid.slices());
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
                    kernels.extend(outs.map(|out| Spec { ty, head, consumers, out }.kernel()));
                }
            }
        }
        for out in [DType::F32, DType::Bf16, DType::F16] {
            kernels.extend(ReductionSpec::SLICES.map(|slices| adds(out, slices).kernel()));
        }
        kernels
    }
}
