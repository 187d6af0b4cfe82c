//! `gemm.wgmma`: matrix products on Hopper's tensor cores, fed by TMA.
//!
//! **What.** `D = alpha · A · B` for 16-bit, tf32, 8-bit float and 8-bit integer operands, batched, all transposes.
//! **When it wins.** On compute capability 9.0. Operands whose rows are not 16-byte aligned, or that the tensor cores do not take in their
//! order, are copied into scratch first; or, of 16 bits and f32, moved into place or transposed on their way to the tensor cores
//! ([`crate::hopper::aligning`]), which takes no launch but more of each step: configs with the knob `aligns`. Wide results of
//! 16 bits whose rows begin by turns within a sector of L2 may be stored in whole sectors: configs with the knob `interleaved`. Operands of f32 under the policy `fp32` become three bf16 terms each ([`crate::terms`]), also in scratch:
//! six products of terms at the rate of bf16 are several times as fast as f32 multiply-adds, once the copies are small beside them. All six are formed
//! out of one load of each term.
//! **Numbers.** Products are exact; sums are kept in f32 by the tensor core, in an order fixed by the spec and the split, so repeats agree
//! bit for bit. fp8 sums keep about 14 bits unless promoted every 128 of depth. Sums of terms are promoted every 64 of depth, for the tensor core cuts
//! its sums off toward zero, and are as close as f32 multiply-adds.
//! **Source:** PTX ISA 9.0 (`wgmma`, `cp.async.bulk.tensor`); Osama et al., "Stream-K", PPoPP 2023, for the split of depth.

mod block_factors;
mod epilogue;
mod interleaved;
mod kernel;
mod lines;
mod planes;
mod spec;

use block_factors::Scaled;
use kernel::ParamsArgs;
pub(crate) use planes::{Planes, of_planes, over_planes};
use spec::Spec;
use verdigris_graph::ops::matmul::Precision;
use verdigris_graph::problem::Order;
use verdigris_graph::{GemmProblem, Matrix, Problem, Scale};
use verdigris_kir::ir::{MapDecl, Target};
use verdigris_kir::program::{Address, KernelRef, Launch, MapSpec, Program};
use verdigris_kir::tile::operand::{Major, ROW_BYTES};
use verdigris_tensor::DType;

use super::factors::FactorsArgs;
use crate::algorithm::{Algorithm, candidate};
use crate::arch::Arch;
use crate::cost::{Loop, Stream, Work};
use crate::engine::{Candidate, EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::hopper::aligning::Way;
use crate::hopper::epilogue::{TYPES, epilogue_of, store_bytes};
use crate::hopper::grid::{Layout, TileGrid, TileOrder};
use crate::hopper::spec::{MainLoopSpec, Operand, Split, TileShape};
use crate::hopper::sums::Keep;
use crate::hopper::tiled::{TiledArgs, matrix_map};
use crate::layout::batch::Chunk;
use crate::layout::repack::{self, Repack};
use crate::layout::transposed::transposed;
use crate::split_k::fixup::FixupArgs;
use crate::split_k::reduction::{self, PartGrid, ReductionSpec};
use crate::store::{Out, StoreArgs, is_mappable};
use crate::terms::{self, Terms};

/// One row of the table of tiles: the part of a spec that is chosen, not given.
#[derive(Clone, Copy, Debug)]
struct Shape {
    tile: TileShape,
    /// The results that it is offered for where D's lines run along the tile's rows, and where they run along its columns.
    along_rows: u32,
    along_columns: u32,
    /// Its kernel can split the depth of tiles over the grid. One that can costs a whole product 1 to 3 % of a short run.
    splits: bool,
    /// There is a kernel for it whose parts are added up by a launch of their own.
    adds_later: bool,
}

/// Results of two bytes, written by TMA.
const HALVES: u32 = 1;
/// Results of four bytes, written by TMA.
const WORDS: u32 = 2;
/// Results of either width whose lines begin anywhere.
const LINES: u32 = 4;
/// Results of any width and strides, element by element.
const ELEMENTS: u32 = 8;
/// Results of four bytes, written by TMA, of operands in terms: beside [`WORDS`].
const TERMS: u32 = 16;

const fn offered(tile: TileShape, along_rows: u32, along_columns: u32) -> Shape {
    Shape { tile, along_rows, along_columns, splits: false, adds_later: false }
}

const fn shape(m: u32, n: u32, consumers: u32, cluster: u32, shared: Operand, along_rows: u32, along_columns: u32) -> Shape {
    offered(TileShape::new(m, n, consumers, cluster, shared), along_rows, along_columns)
}

const fn splitting(shape: Shape) -> Shape {
    Shape { splits: true, ..shape }
}

/// Also for few tiles of much depth.
const fn in_parts(shape: Shape) -> Shape {
    Shape { adds_later: true, ..shape }
}

/// The tiles that the engine offers, by number; numbers are never reused, for plan caches hold them. What each is offered for was chosen by
/// a sweep over 87 problems (`bench/record/h200/2026-11-21-gemm-sweep.jsonl`): with the fourteen configs for halves, the best is 0.2 %
/// behind the best of all in the geometric mean, 6 % at worst. A row that serves nothing was tried and never won enough to be worth its
/// kernels: ping-pong wins by 1 to 2 % on products of short depth and many tiles (7000x2048x2048). Clusters that split the depth win on
/// few rows: they halve the work that the last wave is made of. Splits win where the depth is very long and tiles are few, whatever the
/// tile: two shapes have them. Where the parts of a tile become many, a launch of its own adds them up; of these kernels there is one for
/// all stores. Clusters that share B win there too (256×1024×50176: 44 µs against 49), if each reads one operand alone; clusters of four
/// lose (79 µs). Clusters that share both operands, each load serving two to four CTAs, win where tiles are small or lines begin within sectors of L2
/// (`bench/record/h100/2026-11-25-gemm-sweep.jsonl.gz`, 42 products, on which they were chosen: 0.87 of the time without them in the geometric mean, 0.55 at
/// best). Not timed yet but counted are 128×192 for halves along rows, clusters of four that split the depth, 192×192, and clusters
/// that share both operands for words: less is multiplied that is left out where N lies between tiles, 192 both ways make fewer waves (13920×1344 on
/// 132 SMs: 4 of 36,864 results a CTA, where 128×256 makes 5 of 32,768), and few tiles of much depth reach most SMs without a second launch.
const SHAPES: &[Shape] = &[
    shape(128, 256, 2, 2, Operand::B, HALVES | WORDS, 0),
    shape(128, 256, 2, 2, Operand::A, 0, 0),
    in_parts(shape(128, 256, 2, 1, Operand::B, HALVES | WORDS | LINES, HALVES)),
    shape(256, 128, 2, 2, Operand::B, 0, 0),
    shape(256, 128, 2, 2, Operand::A, 0, 0),
    shape(256, 128, 2, 1, Operand::B, 0, 0),
    shape(128, 192, 2, 2, Operand::B, 0, 0),
    shape(128, 192, 2, 1, Operand::B, HALVES | WORDS, HALVES),
    in_parts(shape(128, 128, 2, 2, Operand::B, TERMS, 0)),
    in_parts(splitting(shape(128, 128, 2, 1, Operand::B, HALVES | WORDS | LINES | ELEMENTS, 0))),
    shape(128, 64, 2, 1, Operand::B, WORDS | LINES, 0),
    in_parts(shape(64, 256, 1, 1, Operand::B, 0, 0)),
    shape(64, 128, 1, 1, Operand::B, WORDS, HALVES),
    in_parts(shape(64, 64, 1, 1, Operand::B, HALVES | WORDS | LINES, 0)),
    shape(64, 32, 1, 1, Operand::B, WORDS, HALVES | LINES),
    shape(64, 16, 1, 1, Operand::B, 0, HALVES | LINES),
    in_parts(splitting(shape(128, 32, 2, 1, Operand::B, WORDS, HALVES | LINES))),
    shape(128, 16, 2, 1, Operand::B, 0, 0),
    shape(128, 160, 2, 1, Operand::B, HALVES | WORDS, 0),
    shape(128, 96, 2, 1, Operand::B, WORDS, HALVES),
    shape(128, 224, 2, 1, Operand::B, 0, HALVES),
    shape(256, 96, 2, 1, Operand::B, 0, 0),
    shape(192, 128, 3, 1, Operand::B, 0, 0),
    offered(TileShape::ping_pong(64, 256, 2), 0, 0),
    offered(TileShape::ping_pong(128, 128, 1), HALVES, 0),
    offered(TileShape::ping_pong(128, 128, 2), 0, 0),
    offered(TileShape::deep(64, 32, 1, 1, 2), 0, HALVES),
    offered(TileShape::deep(64, 64, 1, 1, 2), 0, HALVES),
    offered(TileShape::deep(64, 64, 1, 1, 4), 0, HALVES),
    // Leaves room for two stages only.
    offered(TileShape::deep(128, 64, 2, 1, 4), 0, 0),
    offered(TileShape::deep(128, 32, 2, 1, 2), 0, 0),
    offered(TileShape::sharing(64, 64, 1, [2, 2]), HALVES, HALVES),
    offered(TileShape::sharing(64, 96, 1, [4, 2]), HALVES, HALVES),
    offered(TileShape::sharing(64, 128, 1, [2, 2]), HALVES | WORDS, HALVES),
    offered(TileShape::sharing(128, 96, 2, [2, 2]), HALVES | WORDS, HALVES),
    offered(TileShape::sharing(128, 160, 2, [2, 2]), HALVES, HALVES),
    offered(TileShape::sharing(128, 192, 2, [2, 2]), HALVES | WORDS, HALVES),
    offered(TileShape::deep(64, 128, 1, 1, 4), HALVES | WORDS, 0),
    shape(192, 192, 3, 1, Operand::B, HALVES, 0),
    offered(TileShape::sharing(192, 192, 3, [2, 2]), HALVES, 0),
];

/// The problem as the kernel sees it: with A and B swapped (swap-AB) or not, with the extents that fit the kernel's arguments.
#[derive(Clone, Debug)]
struct View {
    problem: GemmProblem,
    m: u32,
    n: u32,
    k: u32,
    batch: u32,
    /// Terms of each operand.
    terms: u32,
    swap_ab: bool,
    /// Columns in front of the second of two interleaved matrices, that are counted and are none.
    lead: u32,
    /// Where depth runs over planes, how many these are and how deep each: see [`planes`].
    planes: Option<planes::Depths>,
}

impl View {
    fn new(problem: GemmProblem, terms: u32, swap_ab: bool) -> Option<View> {
        let narrow = |extent: u64| u32::try_from(extent).ok().filter(|&extent| extent < 1 << 31);
        let (m, n) = (narrow(problem.m)?, narrow(problem.n)?);
        let (k, batch) = (narrow(problem.k)?, narrow(problem.batch_count())?);
        Some(View { problem, m, n, k, batch, terms, swap_ab, lead: 0, planes: None })
    }

    /// Bytes of both operands, of one term of each.
    fn operand_bytes(&self) -> f64 {
        let bytes = |rows: u32, matrix: &Matrix| {
            let matrices = if matrix.batch_strides.iter().all(|&stride| stride == 0) { 1.0 } else { f64::from(self.batch) };
            f64::from(rows) * f64::from(self.k) * matrices * matrix.dtype.bytes() as f64
        };
        bytes(self.m, &self.problem.a) + bytes(self.n, &self.problem.b)
    }

    /// A as rows by depth, and B as columns by depth.
    fn operands(&self) -> [Matrix; 2] {
        [self.problem.a.clone(), self.problem.b.transposed()]
    }

    fn major(matrix: &Matrix) -> Major {
        if matrix.order() == Order::RowMajor { Major::Depth } else { Major::Rows }
    }

    /// Factors of the operands' blocks in tiles of `tile_n` columns; `None` where such a tile has columns of several blocks.
    fn scaled(&self, tile_n: u32) -> Option<[Scaled; 2]> {
        let a = if matches!(self.problem.scale_a, Some(Scale::Block { .. })) { Scaled::Lines } else { Scaled::No };
        let b = match &self.problem.scale_b {
            Some(Scale::Block { outer: 1, .. }) => Scaled::Lines,
            Some(Scale::Block { outer, .. }) => {
                (outer.is_multiple_of(u64::from(tile_n)) || *outer >= self.problem.n).then_some(Scaled::Tile)?
            }
            _ => Scaled::No,
        };
        Some([a, b])
    }

    /// How results reach D, and whether its contiguous lines are columns of the view: by TMA where they begin at multiples of 16
    /// bytes, through shared memory line by line where they begin elsewhere, by elements where there are none.
    fn out(&self) -> (Out, bool) {
        let d = &self.problem.d;
        let bytes = d.dtype.bytes() as u64;
        let transposed = d.order() == Order::ColumnMajor;
        let aligned = is_mappable(d, if transposed { self.problem.m } else { self.problem.n });
        let out = match (d.order(), bytes) {
            (Order::Strided, _) => Out::Direct,
            (_, 2) if aligned => Out::Tma,
            (Order::RowMajor, 4) if aligned => Out::Tma,
            (_, 2 | 4) => Out::Rows,
            _ => Out::Direct,
        };
        (out, transposed && out != Out::Direct)
    }
}

/// A copy to be made of an operand.
#[derive(Clone, Debug)]
enum Copy {
    /// The operand in lines that TMA maps.
    Moved(Repack),
    /// As sums of terms.
    Terms(Terms),
    /// Terms that are there already, at the operand's slot.
    Given(Terms),
}

impl Copy {
    /// The operand behind the copy. Of one in terms: one term.
    fn packed(&self) -> &Matrix {
        match self {
            Copy::Moved(repack) => &repack.packed,
            Copy::Terms(terms) | Copy::Given(terms) => terms.packed(),
        }
    }

    fn work(&self) -> Option<Stream> {
        match self {
            Copy::Moved(repack) => Some(repack.work()),
            Copy::Terms(terms) => Some(terms.work()),
            Copy::Given(_) => None,
        }
    }

    /// Adds the copy to a program. Returns where it lies.
    fn launch(&self, from: Address, program: &mut Program) -> Address {
        let (name, bytes) = match self {
            Copy::Moved(repack) => ("repacked operand", repack.scratch_bytes()),
            Copy::Terms(terms) => ("terms of an operand", terms.scratch_bytes()),
            Copy::Given(_) => return from,
        };
        let to = program.add_scratch(name, bytes);
        let launches = match self {
            Copy::Moved(repack) => repack.launches(from, to),
            Copy::Terms(terms) | Copy::Given(terms) => terms.launches(from, to),
        };
        launches.into_iter().for_each(|launch| program.launch(launch));
        to
    }

    /// Matrices from a term to the next.
    fn term_matrices(&self) -> Option<u32> {
        match self {
            Copy::Moved(_) => None,
            Copy::Terms(terms) | Copy::Given(terms) => u32::try_from(terms.matrices()).ok(),
        }
    }
}

/// The terms that a number of f32 becomes, and their type.
pub(crate) const F32_TERMS: u32 = 3;
pub(crate) const TERM_TYPE: DType = DType::Bf16;

/// A product of f32 under the policy `fp32` whose A lies at its slot as terms already, row by row as [`Terms::of_matrix`] places them: the caller
/// wrote them instead of A. A's own strides say where its matrices and rows would lie.
pub(crate) fn of_terms(problem: &GemmProblem, arch: &Arch) -> Result<Box<dyn Candidate>, Refusal> {
    let mut accepted = Wgmma::accept(&Problem::Gemm(problem.clone()), arch)?;
    let given = match accepted.copies[0].take() {
        Some(Copy::Terms(terms)) => Some(Copy::Given(terms)),
        other => other,
    };
    accepted.copies[0] = given;
    candidate(accepted, arch)
}

/// The engine: an accepted problem.
pub(super) struct Wgmma {
    arch: Arch,
    promote: bool,
    /// The copies to be made of A and of B. Both views see the operands as they are behind them.
    copies: [Option<Copy>; 2],
    unswapped: View,
    swap_ab: View,
    /// Both views of the operands as they are given, where their lines may begin anywhere.
    as_given: Option<[View; 2]>,
    /// The even and the odd rows as two matrices, where every other row of D begins within a sector of L2.
    interleaved: Option<View>,
}

/// A config: its knobs, and what follows from them.
#[derive(Clone)]
pub(super) struct Config {
    chosen: ConfigKnobs,
    spec: Spec,
    layout: Layout,
}

impl Algorithm for Wgmma {
    const ID: EngineId = EngineId { name: "gemm.wgmma", number: 103 };
    const VERSION: u32 = 1;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let gemm = super::product(Self::ID, problem)?;
        Self::ID.require(
            arch.runs(Target::Sm90a),
            Reason::Target,
            format_args!("compute capability {:?}, needs (9, 0)", arch.capability),
        )?;
        Self::ID.require(
            !gemm.is_empty() && gemm.k > 0,
            Reason::Extent,
            format_args!("m, n, k = {}, {}, {}; none may be 0", gemm.m, gemm.n, gemm.k),
        )?;
        Self::ID.require(gemm.batch.len() <= 1, Reason::Batch, format_args!("{} batch dims, takes at most 1", gemm.batch.len()))?;
        let mut scaled = false;
        for (name, scale, extent) in [("A", &gemm.scale_a, gemm.m), ("B", &gemm.scale_b, gemm.n)] {
            let Some(Scale::Block { outer, k, .. }) = scale else { continue };
            scaled = true;
            // Along k a step of depth must not cross blocks; across, nor may the columns of a tile.
            let fits = k.is_multiple_of(128) || *k >= gemm.k;
            Self::ID.require(fits, Reason::Scale, format_args!("blocks of {name} of {k} along k, takes multiples of 128"))?;
            let fits = name == "A" || *outer == 1 || outer.is_multiple_of(128) || *outer >= extent;
            Self::ID.require(fits, Reason::Scale, format_args!("blocks of {name} of {outer} columns, takes 1 and multiples of 128"))?;
        }
        let (a, b) = (gemm.a.dtype, gemm.b.dtype);
        let takes = match gemm.precision {
            Precision::Fp32 => a == b && matches!(a, DType::Bf16 | DType::F16 | DType::F32),
            Precision::Tf32 => true,
            Precision::Fp8Fast | Precision::Fp8Promoted => true,
            Precision::I32 => true,
            Precision::F16 => true,
            Precision::F64 | Precision::Ieee => false,
        };
        Self::ID.require(takes, Reason::Precision, format_args!("{:?} of {a} and {b}", gemm.precision))?;
        let copied = |rows: u64| {
            [rows.saturating_add(128), gemm.k.saturating_add(128), gemm.batch_count()]
                .iter()
                .map(|&n| u128::from(n))
                .fold(1, u128::saturating_mul)
        };
        Self::ID.require(
            copied(gemm.m.max(gemm.n)) < 1 << 56,
            Reason::Extent,
            format_args!(
                "m, n, k, batch = {}, {}, {}, {}; operands must be below 2^56 elements",
                gemm.m,
                gemm.n,
                gemm.k,
                gemm.batch_count()
            ),
        )?;
        // Operands that cannot be mapped, or whose type the tensor cores take along the depth alone, are copied first.
        let either = matches!(a, DType::Bf16 | DType::F16);
        let terms = if gemm.precision == Precision::Fp32 && a == DType::F32 { F32_TERMS } else { 1 };
        let copies = [(gemm.a.clone(), gemm.m), (gemm.b.transposed(), gemm.n)].map(|(operand, rows)| match terms {
            1 => Repack::needed(&operand, rows, gemm.k, &gemm.batch, either).map(Copy::Moved),
            _ => Some(Copy::Terms(Terms::of_matrix(&operand, TERM_TYPE, terms, [rows, gemm.k], &gemm.batch))),
        });
        Self::ID.require(gemm.batch_count() < 1 << 29, Reason::Batch, format_args!("{} matrices, takes below 2^29", gemm.batch_count()))?;
        let as_given = [false, true].map(|swap_ab| View::new(if swap_ab { transposed(gemm) } else { gemm.clone() }, terms, swap_ab));
        let as_given = if let [Some(unswapped), Some(swap_ab)] = as_given { Some([unswapped, swap_ab]) } else { None };
        let as_given = as_given.filter(|[view, _]| view.terms == 1 && copies.iter().any(Option::is_some));
        let mut gemm = gemm.clone();
        if let Some(copy) = &copies[0] {
            gemm.a = copy.packed().clone();
        }
        if let Some(copy) = &copies[1] {
            gemm.b = copy.packed().transposed();
        }
        let views = (View::new(gemm.clone(), terms, false), View::new(transposed(&gemm), terms, true));
        let (Some(unswapped), Some(swap_ab)) = views else {
            let extents =
                format_args!("m, n, k, batch = {}, {}, {}, {}; each must be below 2^31", gemm.m, gemm.n, gemm.k, gemm.batch_count())
                    .to_string();
            return Err(Self::ID.refusal(Reason::Extent, extents));
        };
        let promote = scaled || terms > 1 || gemm.precision == Precision::Fp8Promoted;
        let interleaved = interleaved::view(&unswapped);
        Ok(Wgmma { arch: arch.clone(), promote, copies, unswapped, swap_ab, as_given, interleaved })
    }

    fn configs(&self) -> Vec<Config> {
        let mut configs = Vec::new();
        // Splits pay where tiles leave most of the chip idle; elsewhere, the fixup costs more than it saves.
        let few = self.arch.resident_clusters_of(1) / 5;
        for (shape, swap_ab) in (0..SHAPES.len() as u32).flat_map(|shape| [(shape, false), (shape, true)]) {
            let spec = self.spec(shape, swap_ab);
            let splits = |split: &u32| *split == 0 || spec.as_ref().is_some_and(|spec| spec.split == Split::Fixup);
            for split in [0, 1, 2, 3, 4, 5, 7].into_iter().filter(splits) {
                let along = [false, true].map(|along_columns| ConfigKnobs {
                    shape,
                    swap_ab,
                    split,
                    parts: 0,
                    group: 8,
                    along_columns,
                    aligns: false,
                    interleaved: false,
                });
                let along = along.into_iter().filter_map(|chosen| self.config(chosen, spec.clone()?));
                configs.extend(along.filter(|Config { layout, .. }| split == 0 || layout.schedule.tiles <= few));
            }
            configs.extend(self.in_parts(shape, swap_ab));
        }
        configs.extend([false, true].into_iter().flat_map(|swap_ab| lines::configs(self, swap_ab)));
        configs.extend(interleaved::configs(self));
        configs
    }

    fn knobs(config: &Config) -> Knobs {
        config.chosen.knobs()
    }

    fn notes(&self, _: &Config) -> Notes {
        let operand = self.unswapped.problem.a.dtype;
        Notes {
            tensor_core: true,
            down_convert: (operand == DType::F32).then_some(DType::Tf32),
            reduced_sums: operand.is_fp8() && !self.promote,
            split_operands: self.unswapped.terms > 1,
            ..Notes::of(self.unswapped.problem.precision.accumulator())
        }
    }

    fn work(&self, config: &Config) -> Work {
        let Config { chosen, spec, layout } = config;
        let view = self.view_of(chosen);
        let workers = self.tile_grid(view, &spec.main).workers;
        // A step of terms is one for each product of terms: as many cycles as a step of its own, with a share of the loads and of the promotion.
        let (products, terms) = (spec.main.products().count() as f64, f64::from(spec.main.terms));
        let steps = [f64::from(layout.schedule.steps); 2];
        let element_bytes = view.problem.d.dtype.bytes() * if spec.epilogue.pairs { 2 } else { 1 };
        let main = Loop {
            along_columns: chosen.along_columns,
            swap_ab: chosen.swap_ab,
            store_bytes: store_bytes(spec.out, element_bytes),
            ..layout.work(&spec.main, workers, steps, Loop::of_gemm(Self::ID.name, &view.problem))
        };
        let main = Loop {
            product: [main.product[0], main.product[1], main.product[2] * products],
            steps: main.steps * products,
            longest_steps: main.longest_steps * products,
            loaded_bytes: main.loaded_bytes * terms / products,
            shared_bytes: main.shared_bytes - main.loaded_bytes * (1.0 - terms / products),
            issued: main.issued / products,
            traffic_bytes: main.traffic_bytes + (terms - 1.0) * view.operand_bytes(),
            ..main
        };
        let main = match spec.aligning() {
            None => main,
            Some(aligning) => {
                let step = aligning.step();
                let loaded_bytes = step.loaded.iter().zip(main.load_cost).map(|(bytes, cost)| bytes * cost).sum();
                let tiles = f64::from((spec.main.tile.m + spec.main.tile.n) * ROW_BYTES);
                let shared_bytes = main.shared_bytes - tiles + step.passed;
                let threads = f64::from(aligning.threads());
                Loop { loaded_bytes, shared_bytes, issued: main.issued + step.issued, threads, ..main }
            }
        };
        let main = interleaved::counted(self, view, main);
        let copies = self.copies(view, chosen).into_iter().flatten().filter_map(Copy::work);
        Work::of(main).beside(copies.chain(layout.parts.iter().map(PartGrid::work)))
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let Config { chosen, spec, layout: Layout { schedule, grid, parts } } = config;
        let tile = &spec.main.tile;
        let view = self.view_of(chosen);
        let slot = |matrix: &Matrix| Address::buffer(matrix.slot.0 as usize);
        let [a, b] = view.operands();
        let d = &view.problem.d;
        let chunk = Chunk::all(&view.problem.batch).into_iter().next();
        let chunk = chunk.ok_or_else(|| Self::ID.refusal(Reason::Batch, "an empty batch"))?;

        let mut program = empty_program(&view.problem.slots());
        let mut place = |matrix: &Matrix, copy: Option<&Copy>| match copy {
            None => slot(matrix),
            Some(copy) => copy.launch(slot(matrix), &mut program),
        };
        let [a_copy, b_copy] = self.copies(view, chosen);
        let (a_place, b_place) = (place(&a, a_copy), place(&b, b_copy));
        let columns = view.n + view.lead;
        let [clusters_down, clusters_across] = tile.clusters([view.m, columns]);
        let [down, across] = tile.cluster;
        // Clusters are whole, also where there are fewer tiles.
        let a_clip = spec.main.clipped(Operand::A).args(view.m, clusters_down * down);
        let b_clip = spec.main.clipped(Operand::B).args(columns, clusters_across * across);
        let batched = |matrix: &Matrix, rows: u32| {
            if view.planes.is_some() { rows } else { u32::from(matrix.batch_strides.first().is_some_and(|&stride| stride != 0)) }
        };

        let parts = parts.map(|parts| {
            let scratch = program.add_scratch("parts", parts.scratch_bytes());
            let epilogue = Wgmma::epilogue_of_parts(view);
            let arguments = epilogue.arguments(&view.problem, &chunk, 0, 0);
            let adds = ReductionSpec { integer: spec.main.is_integer(), slices: parts.slices(), epilogue };
            (parts.arguments(scratch), parts.launch(adds, scratch, chunk.index(), arguments, [view.m, view.n]))
        });
        let (parts, adding) = parts.unzip();
        let store = adding.is_none().then(|| {
            let leading_bytes = d.leading_dimension().unwrap_or(1) * d.dtype.bytes() as u64;
            StoreArgs {
                epilogue: spec.epilogue.arguments(&view.problem, &chunk, 0, 0),
                place: spec.store().place(slot(d), [view.m, view.n, view.batch], leading_bytes, chunk.strides_bytes(d)),
                sums: None,
            }
        });
        let fixup = (spec.split == Split::Fixup).then(|| {
            if schedule.split_tiles == 0 {
                return FixupArgs::without_scratch(a_place);
            }
            let owners = u64::from(schedule.split_tiles) * u64::from(tile.peers()) * u64::from(tile.consumers);
            FixupArgs::with_scratch(&mut program, owners, schedule.most_parts(), tile.parts().words())
        });
        let operands = || TiledArgs {
            a: (a_place, operand_map(a_clip.boxed(spec.main.clipped(Operand::A).map()), &a, [view.m, view.k], view)),
            b: (b_place, operand_map(b_clip.boxed(spec.main.clipped(Operand::B).map()), &b, [view.n, view.k], view)),
            a_batches: batched(&a, view.m),
            b_batches: batched(&b, view.n),
            a_term: a_copy.and_then(Copy::term_matrices),
            b_term: b_copy.and_then(Copy::term_matrices),
            a_clip,
            b_clip,
        };
        let lines = spec.aligning();
        let lines = lines.map(|aligning| aligning.arguments(operands(), [&a, &b], [view.m, view.n], view.k, view.batch));
        let arguments = ParamsArgs {
            operands: lines.is_none().then(operands),
            lines,
            schedule: *schedule,
            batch: chunk.index(),
            lead: spec.interleaved.then_some(view.lead),
            plane_steps: view.planes.map(|planes| planes.depth.div_ceil(spec.main.depth())),
            a_factors: FactorsArgs::of(view.problem.scale_a.as_ref(), &chunk),
            b_factors: FactorsArgs::of(view.problem.scale_b.as_ref(), &chunk),
            store,
            fixup,
            parts,
        };
        let arguments = arguments.bound(spec);
        program.launch(Launch::new(reference(spec.clone()), [grid * tile.ctas(), 1, 1], arguments).overlapping());
        adding.into_iter().for_each(|launch| program.launch(launch));
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        if target != Target::Sm90a {
            return Vec::new();
        }
        let adds = PART_TYPES.iter().flat_map(|&(_, d)| reduction::catalog(d, true));
        let terms = terms::catalog().filter(|kernel| kernel.name().contains("f32_bf16x3"));
        catalog_specs()
            .into_iter()
            .chain(lines::catalog())
            .chain(interleaved::catalog())
            .map(reference)
            .chain(adds)
            .chain(repack::catalog())
            .chain(terms)
            .collect()
    }
}

/// The operand types of the kernels whose parts are added up later, and the result types that the catalog has for them.
const PART_TYPES: &[(DType, DType)] =
    &[(DType::Bf16, DType::Bf16), (DType::F16, DType::F16), (DType::F32, DType::F32), (DType::I8, DType::I32)];

/// The majors of operands of 16 bits; the first are those of all.
const EITHER: [[Major; 2]; 4] =
    [[Major::Depth, Major::Depth], [Major::Depth, Major::Rows], [Major::Rows, Major::Depth], [Major::Rows, Major::Rows]];

fn catalog_specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    let types = TYPES.iter().map(|&types| (types, 1)).chain([((DType::Bf16, DType::F32, true), F32_TERMS)]);
    for ((operands, d, promote), terms) in types {
        let majors = if matches!(operands, DType::Bf16 | DType::F16) && terms == 1 { &EITHER[..] } else { &EITHER[..1] };
        let keep = if promote { Keep::Promoted } else { Keep::InPlace };
        let exact = d == DType::I32;
        let epilogue = EpilogueSpec { stores_d: false, exact, ..EpilogueSpec::plain(OperandSpec { dtype: d, walk: Walk::Row }) };
        for (shape, &majors) in SHAPES.iter().flat_map(|shape| majors.iter().map(move |major| (shape, major))) {
            let ways = [(Out::Tma, false), (Out::Tma, true), (Out::Rows, false), (Out::Rows, true), (Out::Direct, false)];
            for (out, swap_ab) in ways {
                let given = Given {
                    a: operands,
                    b: operands,
                    majors,
                    terms,
                    keep,
                    scaled: [Scaled::No; 2],
                    out,
                    swap_ab,
                    interleaved: false,
                    planes: false,
                    ways: None,
                };
                let elements = EpilogueSpec { stores_d: true, d: OperandSpec::strided(d), ..epilogue.clone() };
                specs.extend(given.spec(shape, if out == Out::Direct { elements } else { epilogue.clone() }));
                specs.extend(given.in_parts(shape).filter(|_| out == Out::Direct));
            }
        }
    }
    specs
}

/// The tiles that engines for other problems may name for 16-bit products whose row-major sums stay in f32.
const SUM_SHAPES: [usize; 6] = [2, 9, 10, 13, 14, 16];

/// Whether a config leads to a kernel of [`sums`].
pub(crate) fn forms_sums(config: &Knobs) -> bool {
    let plain = ["turned", "along", "parts", "aligns", "interleaved"].iter().all(|&knob| config.value(knob).unwrap_or(0) == 0);
    plain && config.value("shape").is_some_and(|shape| SUM_SHAPES.contains(&(shape as usize)))
}

/// The kernels of 16-bit operands, both along their rows or A along the depth, whose sums stay in f32, row-major. They are in the catalogs
/// of those that name them.
pub(crate) fn sums() -> Vec<KernelRef> {
    let mut specs = Vec::new();
    let d = OperandSpec { dtype: DType::F32, walk: Walk::Row };
    let epilogue = EpilogueSpec { stores_d: false, pairs: false, ..EpilogueSpec::plain(d) };
    for operands in [DType::Bf16, DType::F16] {
        let majors = [[Major::Depth, Major::Depth], [Major::Depth, Major::Rows], [Major::Rows, Major::Rows]];
        for (shape, majors) in SUM_SHAPES.iter().flat_map(|&shape| majors.map(|majors| (&SHAPES[shape], majors))) {
            for out in [Out::Tma, Out::Rows] {
                let scaled = [Scaled::No; 2];
                let keep = Keep::InPlace;
                let given = Given {
                    a: operands,
                    b: operands,
                    majors,
                    terms: 1,
                    keep,
                    scaled,
                    out,
                    swap_ab: false,
                    interleaved: false,
                    planes: false,
                    ways: None,
                };
                specs.extend(given.spec(shape, epilogue.clone()));
            }
        }
    }
    specs.into_iter().map(reference).collect()
}

/// The part of a spec that the problem gives.
#[derive(Clone, Copy, Debug)]
struct Given {
    a: DType,
    b: DType,
    majors: [Major; 2],
    terms: u32,
    keep: Keep,
    scaled: [Scaled; 2],
    out: Out,
    swap_ab: bool,
    interleaved: bool,
    planes: bool,
    /// How operands come that are taken as they are given, their lines wherever these begin; `majors` are those of their lines.
    ways: Option<[Way; 2]>,
}

impl Given {
    /// The spec of a shape for this problem, or nothing where they do not suit each other.
    fn spec(self, shape: &Shape, epilogue: EpilogueSpec) -> Option<Spec> {
        let result = match (self.out, epilogue.d.dtype.bytes()) {
            (Out::Tma, 2) => HALVES,
            (Out::Tma, _) if self.terms > 1 => WORDS | TERMS,
            (Out::Tma, _) => WORDS,
            (Out::Rows, _) => LINES,
            (Out::Direct | Out::Scattered, _) => ELEMENTS,
        };
        let offered = if self.swap_ab { shape.along_columns } else { shape.along_rows } & result != 0;
        // A few columns are most often those of activations, whose depth is contiguous.
        let offered = offered && (shape.tile.cluster_split == 1 || self.ways.is_some() || self.majors[1] == Major::Depth);
        let split = if shape.splits { Split::Fixup } else { Split::No };
        offered.then(|| self.shaped(shape, split, epilogue).fitted()).flatten()
    }

    /// The same where the parts of all tiles are added up later: nothing of the result shapes this kernel.
    fn in_parts(self, shape: &Shape) -> Option<Spec> {
        let Given { a, b, keep, scaled, .. } = self;
        let plain = a == b && PART_TYPES.iter().any(|&(operands, _)| operands == a) && keep == Keep::InPlace && scaled == [Scaled::No; 2];
        let kept = EpilogueSpec::plain(OperandSpec::strided(DType::F32));
        let given = Given { out: Out::Direct, swap_ab: false, ..self };
        (shape.adds_later && plain).then(|| given.shaped(shape, Split::Reduced, kept).fitted()).flatten()
    }

    fn shaped(self, shape: &Shape, split: Split, epilogue: EpilogueSpec) -> Spec {
        let Given { a, b, majors, terms, keep, scaled, out, swap_ab, interleaved, planes, ways } = self;
        let waiting = u32::from(ways.is_some());
        let ways = ways.unwrap_or([Way::Straight; 2]);
        let majors = [0, 1].map(|i| ways[i].arrives(majors[i]));
        let main = MainLoopSpec { tile: shape.tile, a, b, majors, terms, stages: 2, keep };
        Spec { main, waiting, ways, split, scaled, out, swap_ab, interleaved, planes, epilogue }
    }
}

fn reference(spec: Spec) -> KernelRef {
    KernelRef::new(spec.to_string(), move || spec.build())
}

/// The knobs of a config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ConfigKnobs {
    shape: u32,
    swap_ab: bool,
    /// How depth is split: 0 not, 1 that of the tiles of the last wave, 2 of the last two waves, 3 and more every tile into 2 and more
    /// parts.
    split: u32,
    /// Parts of every tile, to be added up by a launch of their own; 0, and no knob, where there is none.
    parts: u32,
    group: u32,
    along_columns: bool,
    /// Operands come as they are given, their lines wherever these begin; no knob where they do not.
    aligns: bool,
    /// Even and odd rows are two matrices; no knob where they are not.
    interleaved: bool,
}

impl ConfigKnobs {
    fn order(&self) -> TileOrder {
        TileOrder { group: self.group, along_columns: self.along_columns }
    }

    fn knobs(&self) -> Knobs {
        let knobs = [
            ("shape", self.shape),
            ("turned", u32::from(self.swap_ab)),
            ("split", self.split),
            ("group", self.group),
            ("along", u32::from(self.along_columns)),
        ];
        let parts = (self.parts > 0).then_some(("parts", self.parts));
        let ways = self.aligns.then_some(("aligns", 1)).into_iter().chain(self.interleaved.then_some(("interleaved", 1)));
        Knobs::new(knobs.into_iter().chain(parts).chain(ways))
    }
}

/// The most parts that are added up later, in waves of CTAs.
const MOST_WAVES: u32 = 2;
/// The least of them a tile; fewer are reduced well by the fixup, or the tiles fill the chip.
const LEAST_PARTS: u32 = 5;

impl Wgmma {
    fn view(&self, swap_ab: bool) -> &View {
        if swap_ab { &self.swap_ab } else { &self.unswapped }
    }

    /// The problem as a config sees it.
    fn view_of(&self, chosen: &ConfigKnobs) -> &View {
        match (&self.as_given, &self.interleaved) {
            (Some(views), _) if chosen.aligns => &views[usize::from(chosen.swap_ab)],
            (_, Some(view)) if chosen.interleaved => view,
            _ => self.view(chosen.swap_ab),
        }
    }

    /// The copies that a config makes of the operands of its view.
    fn copies(&self, view: &View, chosen: &ConfigKnobs) -> [Option<&Copy>; 2] {
        if chosen.aligns {
            return [None; 2];
        }
        let [a, b] = self.copies.each_ref().map(Option::as_ref);
        if view.swap_ab { [b, a] } else { [a, b] }
    }

    /// What the problem gives to a spec of a shape; nothing where they do not suit each other.
    fn given(&self, shape: &Shape, view: &View) -> Option<Given> {
        let [a, b] = view.operands();
        let (out, transposed) = view.out();
        Some(Given {
            scaled: view.scaled(shape.tile.n)?,
            keep: match (self.promote, view.problem.precision) {
                (true, _) => Keep::Promoted,
                (false, Precision::F16) => Keep::Halves,
                (false, _) => Keep::InPlace,
            },
            a: a.dtype,
            b: b.dtype,
            majors: [&a, &b].map(View::major),
            terms: view.terms,
            out,
            swap_ab: transposed,
            interleaved: view.lead > 0,
            planes: view.planes.is_some(),
            ways: None,
        })
    }

    /// The spec of a shape whose kernel writes the result itself.
    fn spec(&self, shape: u32, swap_ab: bool) -> Option<Spec> {
        let view = self.view(swap_ab);
        let shape = &planes::shape_for(view, shape)?;
        let given = self.given(shape, view)?;
        let epilogue = epilogue_of(&view.problem, given.out == Out::Direct);
        let spec = given.spec(shape, if given.out == Out::Tma { epilogue.adding(&view.problem) } else { epilogue })?;
        // No CTA is without a step of its own.
        (view.k.div_ceil(spec.main.depth()) >= spec.main.tile.cluster_split).then_some(spec)
    }

    /// The config, or nothing where tiles are too many to count, or too few to be split so.
    fn config(&self, chosen: ConfigKnobs, spec: Spec) -> Option<Config> {
        let (grid, order) = (self.tile_grid(self.view_of(&chosen), &spec.main), chosen.order());
        let layout = match (chosen.parts, chosen.split) {
            (0, 0) => grid.whole(order),
            (0, waves @ 1..=2) => grid.last_waves(order, waves),
            (0, split) => grid.in_parts(order, split - 1, 1),
            (parts, _) => grid.reduced(&spec.main, order, parts, MOST_WAVES),
        };
        layout.map(|layout| Config { chosen, spec, layout })
    }

    /// What stands between sums and D in the launch that adds parts up.
    fn epilogue_of_parts(view: &View) -> EpilogueSpec {
        let whole = EpilogueSpec::of(&view.problem);
        let walk = if whole.d.walk == Walk::Row { Walk::Row } else { Walk::Strided };
        let pairs = whole.pairs && walk == Walk::Row && view.n.is_multiple_of(2);
        EpilogueSpec { d: OperandSpec { walk, ..whole.d }, pairs, ..whole }
    }

    fn tile_grid(&self, view: &View, main: &MainLoopSpec) -> TileGrid {
        let [rows, columns] = main.tile.clusters([view.m, view.n + view.lead]);
        // Interleaved matrices have their rows of tiles by turns.
        let [rows, matrices] = if view.lead > 0 { [rows * view.batch, 1] } else { [rows, view.batch] };
        TileGrid {
            extents: [rows, columns],
            matrices,
            steps: view.k.div_ceil(main.depth()),
            workers: self.arch.resident_clusters_of(main.tile.ctas()).max(1),
        }
    }

    /// The configs of a shape whose parts are added up later: whole waves of parts.
    fn in_parts(&self, shape: u32, swap_ab: bool) -> Vec<Config> {
        let view = self.view(swap_ab);
        let spec = planes::shape_for(view, shape).and_then(|shape| self.given(&shape, view)?.in_parts(&shape));
        spec.map_or_else(Vec::new, |spec| self.of_parts(shape, swap_ab, &spec))
    }

    /// The configs of a spec whose parts are added up later.
    fn of_parts(&self, shape: u32, swap_ab: bool, spec: &Spec) -> Vec<Config> {
        let least = if spec.waiting > 0 { lines::LEAST_PARTS_OF_LINES } else { LEAST_PARTS };
        let parts = self.tile_grid(self.view(swap_ab), &spec.main).part_counts(MOST_WAVES, least);
        let knobs = ConfigKnobs {
            shape,
            swap_ab,
            split: 0,
            parts: 0,
            group: 8,
            along_columns: false,
            aligns: spec.waiting > 0,
            interleaved: false,
        };
        parts.into_iter().filter_map(|parts| self.config(ConfigKnobs { parts, ..knobs }, spec.clone())).collect()
    }
}

/// The map of an operand of a view; its terms are further matrices of the batch.
fn operand_map(decl: MapDecl, matrix: &Matrix, [rows, depth]: [u32; 2], view: &View) -> MapSpec {
    let bytes = u64::from(decl.ty.bytes());
    let leading = matrix.leading_dimension().unwrap_or(1) * bytes;
    let contiguous_depth = View::major(matrix) == Major::Depth;
    if let Some(planes) = &view.planes {
        let apart = matrix.batch_strides.first().copied().unwrap_or(0) * bytes;
        let rows = u64::from(rows) * u64::from(view.batch);
        return matrix_map(decl, [u64::from(planes.depth), rows, u64::from(planes.count)], [leading, apart]);
    }
    let dims = if contiguous_depth { [u64::from(depth), u64::from(rows)] } else { [u64::from(rows), u64::from(depth)] };
    let stride = matrix.batch_strides.first().copied().unwrap_or(0) * bytes;
    // Behind the one matrix of an operand that all share lies, if any, its next term.
    let (batches, batch_stride) = match stride {
        0 if view.terms > 1 => (1, u64::from(rows) * leading),
        0 => (1, leading.max(16)),
        _ => (u64::from(view.batch), stride),
    };
    matrix_map(decl, [dims[0], dims[1], batches * u64::from(view.terms)], [leading, batch_stride])
}
