//! `conv.implicit_gemm`: convolutions on Hopper's tensor cores, whose pixels TMA gathers.
//!
//! **What.** All three directions in one to three spatial dims, 16-bit, tf32, 8-bit float and 8-bit integer operands, strides, dilations,
//! any padding, groups that begin at multiples of 16 bytes, a prologue on the activations. Operands that TMA cannot map as they lie, and those
//! behind a prologue, are copied into scratch first; results that it cannot write leave line by line, or through scratch.
//!
//! | direction | rows | columns | depth |
//! |---|---|---|---|
//! | fprop | pixels of y | channels of y | taps, channels of x |
//! | dgrad | pixels of x, by phases where strided | channels of x | taps, channels of y |
//! | wgrad | channels of y | taps, channels of x | pixels of y |
//!
//! Of few pixels and great depth, A and B of fprop and dgrad are swapped ([`swap_ab`]): a tile of pixels then wastes no rows, CTAs of a
//! cluster share its depth, and those with other channels of the same pixels load these once.
//! Swap-AB tiles also serve many pixels, each CTA with the whole depth, where 192 pixels a tile make whole waves and 256 channels a tile do
//! not.
//!
//! **When it wins.** On compute capability 9.0, from a few dozen channels on. A filter of one element with a stride needs no engine of its
//! own: TMA steps over the pixels that are not read, and the phases of a data gradient that have no taps are only written, by warps that
//! have nothing else to do while the others multiply.
//! **Numbers.** Products are exact; sums are kept in f32 by the tensor core, in an order fixed by the spec and the split, so repeats agree
//! bit for bit. fp8 sums keep about 14 bits unless promoted every 128 of depth. Operands of f32 under the policy `fp32` become three bf16
//! terms each, of whose products six are summed. The tensor core cuts its sums off toward zero, which over a long depth is a bias of many units;
//! sums of terms are therefore promoted after each 64 of depth, and are as close as f32 multiply-adds. Where a group's channels are no whole number of channel blocks, what
//! stands beyond them is multiplied by zeros of the filter, so that an infinity there makes NaN of the group before.
//! Sums over channels are formed of the stored values in f32, either in the epilogue (knob `sums`), so that y is not read again, or of the
//! stored result: the clock says which is quicker, for what a CTA does in its epilogue it does not multiply meanwhile. Where parts of a
//! split depth are added up by a launch of their own, where rows are scattered, and beside 160 accumulators of 32-bit results, the stored
//! result is read.
//! **Source:** PTX ISA 9.0, "im2col mode"; Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014, for the implicit product.

mod epilogue;
mod kernel;
mod prepare;
mod producer;
mod spec;
mod swap_ab;
mod transposed_tiles;
mod view;

use kernel::{ConvArgs, TileStoreArgs};
use spec::{Kind, Spec};
use swap_ab::SwapAbArgs;
use verdigris_graph::ops::matmul::Precision;
use verdigris_graph::{ConvProblem, Direction, Problem};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_kir::tile::operand::{Major, ROW_BYTES};
use verdigris_tensor::DType;
use view::View;

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::conv::geometry::require_elements;
use crate::cost::{Loop, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::hopper::epilogue::{TYPES, epilogue_of, store_bytes};
use crate::hopper::grid::{Layout, TileGrid, TileOrder};
use crate::hopper::spec::{MainLoopSpec, Operand, Split, TileShape};
use crate::hopper::sums::Keep;
use crate::layout::batch::Chunk;
use crate::layout::repack;
use crate::split_k::MOST_PARTS_BYTES;
use crate::split_k::fixup::FixupArgs;
use crate::split_k::reduction::{self, PartGrid, ReductionSpec};
use crate::store::{Out, StoreArgs};
use crate::sums::column_sums::{self, SumGrid};
use crate::sums::statistics;
use crate::terms;

const ID: EngineId = EngineId { name: "conv.implicit_gemm", number: 203 };

/// One row of the table of tiles: the part of a spec that is chosen, not given.
#[derive(Clone, Copy, Debug)]
struct Shape {
    tile: TileShape,
    /// Rows are channels, columns are pixels.
    swap_ab: bool,
}

const fn shape(m: u32, n: u32, consumers: u32, cluster: u32, shared: Operand) -> Shape {
    Shape { tile: TileShape::new(m, n, consumers, cluster, shared), swap_ab: false }
}

/// Tiles of channels by pixels, whose depth `ctas` CTAs of a cluster share.
const fn swap_ab(m: u32, n: u32, consumers: u32, ctas: u32) -> Shape {
    swap_ab_by(1, m, n, consumers, ctas)
}

/// The same of `tiles` tiles one below the other in a cluster, which share pixels.
const fn swap_ab_by(tiles: u32, m: u32, n: u32, consumers: u32, ctas: u32) -> Shape {
    Shape { tile: TileShape::deep(m, n, consumers, tiles, ctas), swap_ab: true }
}

/// Ping-pong of two consumers.
const fn ping_pong(m: u32, n: u32, cluster: u32) -> Shape {
    Shape { tile: TileShape::ping_pong(m, n, cluster), swap_ab: false }
}

/// The tiles that the engine offers, by number; numbers are never reused, for plan caches hold them.
const SHAPES: &[Shape] = &[
    shape(128, 256, 2, 2, Operand::B),
    shape(128, 256, 2, 1, Operand::B),
    shape(256, 128, 2, 2, Operand::B),
    shape(256, 128, 2, 2, Operand::A),
    shape(256, 128, 2, 1, Operand::B),
    shape(128, 192, 2, 2, Operand::B),
    shape(128, 192, 2, 1, Operand::B),
    shape(128, 128, 2, 2, Operand::B),
    shape(128, 128, 2, 1, Operand::B),
    shape(128, 64, 2, 1, Operand::B),
    shape(64, 256, 1, 1, Operand::B),
    shape(64, 128, 1, 1, Operand::B),
    shape(64, 64, 1, 1, Operand::B),
    shape(128, 32, 2, 1, Operand::B),
    shape(256, 64, 2, 1, Operand::B),
    shape(128, 256, 2, 2, Operand::A),
    shape(192, 128, 3, 1, Operand::B),
    ping_pong(64, 256, 2),
    ping_pong(128, 128, 1),
    ping_pong(128, 128, 2),
    shape(256, 160, 2, 1, Operand::B),
    shape(256, 160, 2, 2, Operand::B),
    shape(128, 192, 2, 2, Operand::A),
    shape(128, 128, 2, 2, Operand::A),
    // No longer offered: those below are quicker.
    swap_ab(64, 104, 1, 4),
    swap_ab(128, 104, 2, 4),
    swap_ab(256, 104, 2, 8),
    swap_ab_by(2, 128, 96, 2, 4),
    swap_ab_by(4, 128, 96, 2, 2),
    swap_ab_by(2, 64, 96, 1, 4),
    swap_ab(64, 128, 1, 4),
    swap_ab_by(2, 128, 192, 2, 1),
    swap_ab(128, 64, 2, 2),
];

/// Those that serve each kind of product, those that serve the rarer ones, and the one that serves all.
const USUAL: &[usize] = &[0, 1, 2, 8, 9, 12];
const FEW: &[usize] = &[0, 8, 12];
const ONE: usize = 8;
/// Those whose tiles are transposed in shared memory.
const TRANSPOSED: &[usize] = &[1, 4, 8, 10, 12];
/// The smallest.
const LEAST: usize = 12;
/// Shapes for multiples of 320 channels, where tiles of whole channel blocks waste a sixth. A filter that lies along its columns is
/// loaded in whole panels; kernels with a fixup would spill.
const FIFTHS: &[usize] = &[20, 21];
/// Those for filter gradients whose taps come in threes: fewer tiles draw dy, and a cluster draws it once.
const THREES: &[usize] = &[6, 22];
/// The one whose clusters draw pixels once, for few pixels of many channels, which wait for L2.
const PAIR: usize = 23;
/// The one whose tiles leave room for promoted sums, in clusters that draw B once.
const PROMOTED_PAIR: usize = 7;
/// The shape of 192 rows: a volume may have as many such tiles as the chip has SMs.
const TALL: usize = 16;
/// The first swap-AB shape that is still offered.
const SWAP_AB: usize = 27;
/// The swap-AB shape without split-K: 192 pixels a tile make a whole wave of tiles where 256 channels a tile do not.
const WIDE: usize = 31;
/// The one of 64 pixels whose depth two CTAs share: some thousand pixels of a few hundred channels, whose time is that of a chain of steps.
const FLAT: usize = 32;
/// The ping-pong shape that serves f16 too.
const PING_PONG: usize = 18;

/// The most parts that are added up by a launch of their own, in waves of CTAs.
const MOST_WAVES: u32 = 4;

/// The class of the catalog that a problem belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CatalogClass {
    /// Operands as they are, results through a map.
    Usual,
    /// Operands that became terms of 16 bits, whose sums are promoted and are the results.
    Terms,
    /// Results that leave line by line.
    Rows,
}

/// What may become of split tiles in the kernels of a shape: the catalog, short of the types of results.
fn modes(catalog_class: CatalogClass, kind: Kind, spatial: u32, operands: DType, shape: usize) -> &'static [Split] {
    use Split::{Fixup, No, Reduced};
    let (usual, few, one) = (USUAL.contains(&shape), FEW.contains(&shape), shape == ONE);
    let halves = matches!(operands, DType::Bf16 | DType::F16);
    let (ping_pong, cluster_split) = SHAPES.get(shape).map_or((false, 1), |shape| (shape.tile.ping_pong, shape.tile.cluster_split));
    match (catalog_class, kind, spatial, operands) {
        // Results leave as elements, aligned or not.
        (CatalogClass::Usual, Kind::Gather { phases: false, .. }, 2, DType::Bf16)
            if [FLAT, WIDE].contains(&shape) || cluster_split == 4 && shape >= SWAP_AB =>
        {
            &[No]
        }
        // So many channels of few pixels are most often those of a data gradient.
        (CatalogClass::Usual, Kind::Gather { phases: false, filter: Major::Rows }, 2, DType::Bf16) if cluster_split == 2 => &[No],
        _ if cluster_split > 1 || shape == WIDE => &[],
        // Nothing of the sweep was quickest by the first ping-pong shape.
        (CatalogClass::Usual, Kind::Gather { phases: false, .. }, 2, DType::Bf16) if ping_pong && shape >= PING_PONG => &[No],
        (CatalogClass::Usual, Kind::Gather { phases: false, .. }, 2, DType::F16)
        | (CatalogClass::Usual, Kind::Gather { .. }, 2, DType::Bf16)
            if shape == PING_PONG =>
        {
            &[No]
        }
        _ if ping_pong => &[],
        (CatalogClass::Usual, Kind::Gather { phases: false, filter: Major::Depth }, 2, DType::Bf16) if shape == FIFTHS[0] => &[No, Reduced],
        (CatalogClass::Usual, Kind::Gather { phases: false, filter: Major::Depth }, 2, DType::Bf16) if shape == FIFTHS[1] => &[No],
        _ if FIFTHS.contains(&shape) => &[],
        (CatalogClass::Rows, Kind::Gather { phases: false, .. }, 2, DType::Bf16) if few => &[Fixup, Reduced],
        (CatalogClass::Rows, Kind::Gather { phases: false, .. }, 2, _) if one || shape == LEAST || (few && halves) => &[Fixup],
        (CatalogClass::Rows, ..) => &[],
        // Two sets of accumulators leave room for tiles of 128 by 128.
        (CatalogClass::Terms, Kind::Gather { phases: true, .. }, 2, _) if few => &[No],
        (CatalogClass::Terms, Kind::Gather { phases: false, .. }, 2, _) if usual || shape == PROMOTED_PAIR => &[Fixup],
        (CatalogClass::Terms, Kind::Gather { phases: true, .. }, ..) if one => &[No],
        (CatalogClass::Terms, Kind::Gather { phases: false, .. }, ..) if one => &[Fixup],
        (CatalogClass::Terms, Kind::Gather { .. }, ..) => &[],
        (CatalogClass::Terms, Kind::Filter, 2, _) if one || shape == LEAST => &[No, Reduced],
        (CatalogClass::Terms, Kind::Filter, 2, _) => &[],
        (CatalogClass::Usual, Kind::Filter, 2, DType::Bf16) if THREES.contains(&shape) => &[Reduced],
        // Of phases, clusters of tiles of 256 pixels were never quicker than those of 256 channels by more than a measurement is off.
        (_, Kind::Gather { phases: true, .. }, 2, _) if few || (usual && halves && shape != 2) => &[No],
        (_, Kind::Gather { phases: true, .. }, 3, _) if one || (few && halves) => &[No],
        (_, Kind::Gather { phases: true, .. }, 1, _) if one => &[No],
        (_, Kind::Gather { phases: true, .. }, ..) => &[],
        (CatalogClass::Usual, Kind::Gather { .. }, 2, DType::Bf16) if shape == PAIR => &[Reduced],
        (CatalogClass::Usual, Kind::Gather { .. }, 3, DType::Bf16) if shape == PAIR => &[No, Reduced],
        (CatalogClass::Usual, Kind::Gather { .. }, 3, DType::Bf16) if shape == TALL => &[No],
        (CatalogClass::Usual, Kind::Gather { .. }, 3, DType::Bf16) if few => &[Fixup, Reduced],
        (_, Kind::Gather { .. }, 2, DType::Bf16) if few => &[No, Fixup, Reduced],
        (_, Kind::Gather { .. }, 2, DType::Bf16) if usual => &[No, Fixup],
        (_, Kind::Gather { .. }, 2, _) if usual => &[Fixup],
        (_, Kind::Gather { .. }, 3, _) if one || (few && halves) => &[Fixup],
        (_, Kind::Gather { .. }, 1, _) if one => &[Fixup],
        (_, Kind::Filter, 2, DType::F32) if TRANSPOSED.contains(&shape) => &[No, Reduced],
        (_, Kind::Filter, _, DType::F32) if one => &[No, Reduced],
        (_, Kind::Filter, _, DType::F32) => &[],
        (_, Kind::Filter, 2, DType::Bf16) if usual => &[No, Fixup, Reduced],
        (_, Kind::Filter, 2, _) if few => &[No, Reduced],
        (_, Kind::Filter, 2, _) if usual => &[Reduced],
        (CatalogClass::Usual, Kind::Filter, 3, DType::Bf16) if shape == THREES[0] => &[Reduced],
        (_, Kind::Filter, 3, _) if few => &[No, Reduced],
        (_, Kind::Filter, 1, _) if one => &[No, Reduced],
        _ => &[],
    }
}

/// What this engine asks of the problem as a whole.
fn require_operands(conv: &ConvProblem) -> Result<(), Refusal> {
    require_elements(ID, conv)?;
    let [(_, a, _), (_, b, _)] = conv.operands();
    let halves = a.dtype == b.dtype && matches!(a.dtype, DType::Bf16 | DType::F16);
    let takes = match conv.precision {
        Precision::Fp32 => halves || a.dtype == DType::F32 && b.dtype == DType::F32 || a.dtype.is_fp8() && b.dtype.is_fp8(),
        Precision::Tf32 => a.dtype == DType::F32 && b.dtype == DType::F32,
        Precision::Fp8Fast | Precision::Fp8Promoted | Precision::I32 => true,
        Precision::F64 | Precision::Ieee | Precision::F16 => false,
    };
    ID.require(takes, Reason::Precision, format_args!("{:?} of {} and {}", conv.precision, a.dtype, b.dtype))?;
    // The tensor cores read both operands of a filter's gradient across their depth, which they do for 16-bit types alone; others become
    // sums of these, which sums of integers outgrow.
    ID.require(
        conv.direction != Direction::Wgrad || conv.precision != Precision::I32,
        Reason::DType,
        format_args!("wgrad of {} and {}; takes floats", a.dtype, b.dtype),
    )
}

/// The epilogue of a plain problem.
fn plain(d: DType, stores_d: bool) -> EpilogueSpec {
    let exact = d == DType::I32;
    let whole = EpilogueSpec::plain(OperandSpec { dtype: d, walk: Walk::Row });
    EpilogueSpec { stores_d, exact, pairs: stores_d, ..whole }
}

fn catalog_specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    let mut catalog_class = |catalog_class: CatalogClass, (operands, d, promote): (DType, DType, bool), kinds: &[Kind]| {
        for &kind in kinds {
            let out = match (catalog_class, kind) {
                (CatalogClass::Rows, _) => Out::Rows,
                (_, Kind::Gather { phases: true, .. }) => Out::Scattered,
                _ => Out::Tma,
            };
            for (spatial, (number, shape)) in (1..=3).flat_map(|spatial| SHAPES.iter().enumerate().map(move |shape| (spatial, shape))) {
                let given = Given { kind, spatial, a: operands, b: operands, keep: keep(promote), out, has_sums: false };
                for &split in modes(catalog_class, kind, spatial, operands, number) {
                    specs.extend(given.spec(shape, split, plain(d, shape.tile.cluster_split > 1)));
                }
            }
        }
    };
    let gather = |phases, filter| Kind::Gather { phases, filter };
    let (along_depth, along_columns) = (gather(false, Major::Depth), gather(false, Major::Rows));
    for &(operands, d, promote) in TYPES {
        let halves = matches!(operands, DType::Bf16 | DType::F16);
        // The filter of a data gradient lies along its channels; of 8-bit and 32-bit types it is copied first.
        let kinds: &[Kind] = if halves {
            &[along_depth, along_columns, gather(true, Major::Rows), Kind::Filter]
        } else {
            &[along_depth, gather(true, Major::Depth), Kind::Filter][..if operands == DType::F32 { 3 } else { 2 }]
        };
        catalog_class(CatalogClass::Usual, (operands, d, promote), kinds);
        if halves || operands == DType::F32 {
            catalog_class(CatalogClass::Rows, (operands, d, promote), &[along_depth, along_columns][..if halves { 2 } else { 1 }]);
        }
    }
    // Operands of f32 that became terms. The parts of a filter's gradient are reduced by the split-K reduction.
    let sums = (DType::Bf16, DType::F32, true);
    catalog_class(CatalogClass::Terms, sums, &[along_depth, along_columns, gather(true, Major::Rows), Kind::Filter]);
    catalog_class(CatalogClass::Rows, sums, &[along_depth, along_columns]);
    // Parts are the same for each type of result.
    let mut names = std::collections::HashSet::new();
    specs.retain(|spec| names.insert(spec.to_string()));
    specs
}

/// The part of a spec that the problem gives.
#[derive(Clone, Copy, Debug)]
struct Given {
    kind: Kind,
    spatial: u32,
    a: DType,
    b: DType,
    keep: Keep,
    out: Out,
    /// Sums over channels are asked for. Kernels form them of what they store through a map; elsewhere a launch of its own does.
    has_sums: bool,
}

impl Given {
    /// The spec of a shape for this problem, or nothing where they do not suit each other.
    fn spec(self, shape: &Shape, split: Split, epilogue: EpilogueSpec) -> Option<Spec> {
        let Shape { tile, swap_ab } = *shape;
        let Given { kind, spatial, a, b, keep, out, has_sums } = self;
        let shares_depth = tile.cluster_split > 1;
        // Pairs of channels leave at a time, or whole lines of them, which are transposed in halves.
        let leaves = if shares_depth { epilogue.pairs } else { out == Out::Tma && epilogue.d.dtype.bytes() == 2 };
        if swap_ab && !leaves {
            return None;
        }
        let out = if shares_depth { Out::Direct } else { out };
        let stored_here = out == Out::Tma && !swap_ab && split != Split::Reduced && !epilogue.exact;
        let d = epilogue.d.dtype;
        // Beside 160 accumulators a thread, the sums of 32-bit results would spill.
        let registers_fit = d.bytes() == 2 || tile.m * tile.n <= 128 * 128 * tile.consumers;
        let has_sums = has_sums && stored_here && registers_fit && column_sums::takes(d);
        let main = MainLoopSpec { tile, a, b, majors: kind.majors(swap_ab), terms: 1, stages: 2, keep };
        Spec { kind, spatial, main, swap_ab, split, out, epilogue, has_sums }.fitted()
    }
}

fn keep(promote: bool) -> Keep {
    if promote { Keep::Promoted } else { Keep::InPlace }
}

fn reference(spec: Spec) -> KernelRef {
    KernelRef::new(spec.to_string(), move || spec.build())
}

/// The knobs of a config.
#[derive(Clone, Copy, Debug)]
struct ConfigKnobs {
    shape: u32,
    /// How depth is split: 0 not, 1 that of the tiles of the last wave, 2 of the last two waves, 3 and more every tile into 2 and more
    /// parts; more than 2 are added up by a launch of their own.
    split: u32,
    along_columns: bool,
    /// Whether sums over channels are formed in the epilogue, and not of the stored result; nothing where none are asked for.
    sums: Option<bool>,
}

impl ConfigKnobs {
    /// How many rows of tiles are walked together. Under swap-AB, tiles that read the same rows of the filter run side by side, which took up
    /// to 6 % less on an H200.
    fn order(self) -> TileOrder {
        let shares_depth = SHAPES.get(self.shape as usize).is_some_and(|shape| shape.tile.cluster_split > 1);
        TileOrder { group: if shares_depth { 1 } else { 8 }, along_columns: self.along_columns }
    }
}

/// A config: its knobs, and how it lays the work over the chip.
#[derive(Clone)]
pub(super) struct Config {
    chosen: ConfigKnobs,
    spec: Spec,
    layout: Layout,
}

/// An accepted problem.
pub(super) struct ImplicitGemm {
    arch: Arch,
    promote: bool,
    view: View,
}

impl ImplicitGemm {
    fn spec(&self, chosen: ConfigKnobs) -> Option<Spec> {
        let view = &self.view;
        let shape = SHAPES.get(chosen.shape as usize)?;
        let catalog_class = match view.out {
            Out::Rows => CatalogClass::Rows,
            _ if view.prepared.terms > 1 => CatalogClass::Terms,
            _ => CatalogClass::Usual,
        };
        let modes = modes(catalog_class, view.kind, view.spatial, view.a, chosen.shape as usize);
        let suits = |split: &Split| match split {
            Split::No => chosen.split == 0,
            // A kernel for split tiles serves whole ones too.
            Split::Fixup => chosen.split <= 3,
            Split::Reduced => chosen.split > 3,
        };
        let split = *modes.iter().find(|split| suits(split))?;
        let has_sums = chosen.sums == Some(true);
        let given =
            Given { kind: view.kind, spatial: view.spatial, a: view.a, b: view.b, keep: keep(self.promote), out: view.out, has_sums };
        let shares_depth = shape.tile.cluster_split > 1;
        let product = if shape.swap_ab && !shares_depth { &view.transposed } else { &view.product };
        let spec = given.spec(shape, split, epilogue_of(product, view.out == Out::Direct || shares_depth))?;
        let fits = self.sums(&spec).is_none_or(|sums| sums.scratch_bytes() <= MOST_PARTS_BYTES);
        (spec.has_sums == has_sums && fits).then_some(spec)
    }

    /// The parts of sums over channels that a kernel forms.
    fn sums(&self, spec: &Spec) -> Option<SumGrid> {
        let tile = &spec.main.tile;
        let [_, columns] = self.tile_grid(spec).extents;
        spec.has_sums.then(|| SumGrid {
            parts: self.view.rows.div_ceil(64 * tile.blocks()),
            matrices: self.view.matrices(spec),
            columns: self.view.columns,
            pitch: columns * tile.cluster[1] * tile.n,
            overlaps: true,
        })
    }

    fn tile_grid(&self, spec: &Spec) -> TileGrid {
        TileGrid {
            extents: spec.main.tile.clusters(self.view.extents(spec)),
            matrices: self.view.matrices(spec),
            steps: self.view.steps(spec.main.depth()),
            workers: self.arch.resident_clusters_of(spec.main.tile.ctas()).max(1),
        }
    }

    /// Nothing where the config does not suit the problem, or splits what cannot be split so.
    fn config(&self, chosen: ConfigKnobs) -> Option<Config> {
        let spec = self.spec(chosen)?;
        let (grid, order) = (self.tile_grid(&spec), chosen.order());
        let layout = match (chosen.split, spec.split) {
            (0, _) if spec.shares_depth() => {
                let has_depth = grid.steps >= spec.main.tile.cluster_split && !chosen.along_columns;
                // A cluster has one tile, and each of its CTAs some of the depth.
                grid.whole(order).filter(|_| has_depth).map(|layout| Layout { grid: layout.schedule.tiles, ..layout })
            }
            (0, _) => grid.whole(order),
            (waves @ 1..=2, _) => grid.last_waves(order, waves),
            (split, Split::Reduced) => grid.reduced(&spec.main, order, split - 1, MOST_WAVES),
            (split, _) => grid.in_parts(order, split - 1, 1),
        };
        layout.map(|layout| Config { chosen, spec, layout })
    }

    /// The splits that are worth a trial with a shape.
    fn splits(&self, shape: u32) -> Vec<u32> {
        if SHAPES.get(shape as usize).is_some_and(|shape| shape.tile.cluster_split > 1) {
            return vec![0];
        }
        let mut splits = vec![0, 1, 2, 3];
        let chosen = ConfigKnobs { shape, split: 4, along_columns: false, sums: None };
        let Some(spec) = self.spec(chosen) else { return splits };
        splits.extend(self.tile_grid(&spec).part_counts(MOST_WAVES, 3).into_iter().map(|parts| parts + 1));
        splits.sort_unstable();
        splits.dedup();
        splits
    }

    /// Every config, shape by shape.
    fn listed(&self) -> impl Iterator<Item = Config> + '_ {
        let sums: &[Option<bool>] = if self.view.prepared.conv.statistics.is_some() { &[Some(true), Some(false)] } else { &[None] };
        let splits = (0..SHAPES.len() as u32).flat_map(|shape| self.splits(shape).into_iter().map(move |split| (shape, split)));
        let all_chosen = splits.flat_map(move |(shape, split)| {
            let orders = [false, true].into_iter();
            orders.flat_map(move |along_columns| sums.iter().map(move |&sums| ConfigKnobs { shape, split, along_columns, sums }))
        });
        all_chosen.filter_map(|chosen| self.config(chosen))
    }
}

impl Algorithm for ImplicitGemm {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;

    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Conv(conv) = problem else {
            return Err(ID.refusal(Reason::Problem, "takes convolutions"));
        };
        ID.require(arch.runs(Target::Sm90a), Reason::Target, format_args!("compute capability {:?}, needs (9, 0)", arch.capability))?;
        require_operands(conv)?;
        let view = View::new(conv)?;
        let promote = conv.precision == Precision::Fp8Promoted && !view.prepared.converted || view.prepared.terms > 1;
        let accepted = ImplicitGemm { arch: arch.clone(), view, promote };
        ID.require(accepted.listed().next().is_some(), Reason::Epilogue, "no tile suits this chain")?;
        Ok(accepted)
    }

    /// Of equals, those first that draw less from L2: where the tensor cores are the limit, the estimate does not tell them apart.
    fn configs(&self) -> Vec<Config> {
        let mut configs: Vec<Config> = self.listed().collect();
        configs.sort_by_key(|Config { spec: Spec { main: MainLoopSpec { tile, .. }, .. }, .. }| {
            ((tile.loaded(Operand::A) + tile.loaded(Operand::B)) << 12) / (tile.m + tile.n)
        });
        configs
    }

    fn knobs(Config { chosen, .. }: &Config) -> Knobs {
        let ConfigKnobs { shape, split, along_columns, sums } = *chosen;
        let knobs = [("shape", shape), ("split", split), ("group", chosen.order().group), ("along", u32::from(along_columns))];
        Knobs::new(knobs.into_iter().chain(sums.map(|formed| ("sums", u32::from(formed)))))
    }

    fn notes(&self, _: &Config) -> Notes {
        let operand = self.view.a;
        Notes {
            tensor_core: true,
            down_convert: (operand == DType::F32).then_some(DType::Tf32),
            reduced_sums: operand.is_fp8() && !self.promote,
            split_operands: self.view.prepared.terms > 1,
            ..Notes::of(if matches!(operand, DType::I8 | DType::U8) { DType::I32 } else { DType::F32 })
        }
    }

    fn work(&self, config: &Config) -> Work {
        let Config { chosen, spec, layout } = config;
        let (view, tile) = (&self.view, &spec.main.tile);
        // Measured, of clusters that share a depth a few less are resident than an empty chip has room for.
        let room = self.tile_grid(spec).workers;
        let workers = if spec.shares_depth() { (room - room / 16).max(1) } else { room };
        let (rows, columns) = (f64::from(tile.m), f64::from(tile.n));
        // Where tiles are transposed in shared memory, each row of A is written and read, of B written twice, read, and read for each 64 rows of A.
        let transposing = if spec.transposes_tiles() { 2.0 * rows + 3.0 * columns + rows / 64.0 * columns } else { 0.0 };
        // Pixels that the launch leaves out of a tile, and those of them that this CTA would load.
        let left_out = if spec.shares_depth() { tile.n - view.pixels_of_tile(spec) } else { 0 };
        let unloaded = f64::from(left_out / tile.peers());
        let kernel = match (view.prepared.conv.direction, spec.transposes_tiles()) {
            (Direction::Fprop, _) => "conv.implicit_gemm fprop",
            (Direction::Dgrad, _) => "conv.implicit_gemm dgrad",
            (Direction::Wgrad, false) => "conv.implicit_gemm wgrad",
            (Direction::Wgrad, true) => "conv.implicit_gemm wgrad transposed",
        };
        let steps = [view.mean_steps(spec), f64::from(view.steps(spec.main.depth()))];
        let main = layout.work(&spec.main, workers, steps, Loop::of_conv(kernel, &view.prepared.conv));
        let main = Loop {
            tile: [rows, f64::from(tile.n - left_out)],
            parts: if spec.shares_depth() { f64::from(tile.cluster_split) } else { main.parts },
            shared_bytes: main.shared_bytes + (transposing - unloaded) * f64::from(ROW_BYTES),
            loaded_bytes: main.loaded_bytes - unloaded * f64::from(ROW_BYTES),
            tile_issued: if spec.has_sums { rows * columns / 8.0 } else { 0.0 },
            traffic_bytes: view.traffic_bytes,
            operand_bytes: view.a.bytes() as f64,
            along_columns: chosen.along_columns,
            swap_ab: spec.swap_ab,
            promoted: main.promoted || spec.has_sums,
            store_bytes: store_bytes(spec.out, view.prepared.conv.result().dtype.bytes()),
            ..main
        };
        let sums = match self.sums(spec) {
            Some(sums) => Some(sums.work()),
            None => statistics::work(&self.view.prepared.conv),
        };
        Work::of(main).beside(self.view.prepared.work()).beside(layout.parts.iter().map(PartGrid::work)).beside(sums)
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let Config { spec, layout: Layout { schedule, grid, parts: reduced }, .. } = config;
        let tile = &spec.main.tile;
        let view = &self.view;
        let Some(chunk) = Chunk::all(&view.product.batch).into_iter().next() else { unreachable!("there are groups, and taps") };

        let epilogue = if reduced.is_some() { epilogue_of(&view.product, true) } else { spec.epilogue.clone() };
        let epilogue_args = epilogue.arguments(view.product_of(spec), &chunk, 0, 0);
        let mut program = empty_program(&view.prepared.slots);
        let places = view.prepared.copy_ahead(&mut program);
        let ([rows, columns], [in_rows, in_columns]) = (self.tile_grid(spec).extents, tile.cluster);
        let producer = view.producer(spec, schedule.tiles, [rows * in_rows, columns * in_columns], &mut program);
        let mut args = ConvArgs { producer, schedule: *schedule, parts: None, swap_ab: None, store: None, fixup: None };
        let sums = self.sums(spec).map(|sums| (sums, program.add_scratch("sums of tiles", sums.scratch_bytes())));
        let mut add = None;
        if let Some(parts) = reduced {
            let scratch = program.add_scratch("parts", parts.scratch_bytes());
            args.parts = Some(parts.arguments(scratch));
            let adds = ReductionSpec { integer: spec.main.is_integer(), slices: parts.slices(), epilogue };
            add = Some(parts.launch(adds, scratch, chunk.index(), epilogue_args, [view.rows, view.columns]));
        } else if spec.shares_depth() {
            args.swap_ab = Some(SwapAbArgs { batch: chunk.index(), epilogue: epilogue_args, pixels: view.rows, channels: view.columns });
        } else {
            let sums = sums.as_ref().map(|(sums, scratch)| sums.arguments(*scratch));
            let store = StoreArgs { epilogue: epilogue_args, place: view.place(spec, &chunk), sums };
            args.store = Some(TileStoreArgs { batch: chunk.index(), store });
        }
        if spec.split == Split::Fixup {
            let owners = u64::from(schedule.split_tiles.max(1)) * u64::from(tile.peers()) * u64::from(tile.consumers);
            args.fixup = Some(FixupArgs::with_scratch(&mut program, owners, schedule.most_parts(), tile.parts().words()));
        }
        program.launch(Launch::new(reference(spec.clone()), [grid * tile.ctas(), 1, 1], args.bound(spec)).overlapping());
        add.into_iter().for_each(|add| program.launch(add));
        match (&view.prepared.conv.statistics, sums) {
            (Some(wanted), Some((sums, scratch))) => sums.steps(scratch, statistics::targets(wanted), &mut program),
            (Some(wanted), None) => statistics::steps(&view.prepared.conv, wanted, &mut program),
            (None, _) => {}
        }
        view.prepared.bind(&mut program, &places);
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        if target != Target::Sm90a {
            return Vec::new();
        }
        let mut results: Vec<DType> =
            TYPES.iter().filter(|(operands, ..)| !matches!(operands, DType::I8 | DType::U8)).map(|&(_, d, _)| d).collect();
        results.sort_by_key(|d| d.name());
        results.dedup();
        let adds = results.into_iter().flat_map(|d| reduction::catalog(d, false));
        catalog_specs()
            .into_iter()
            .map(reference)
            .chain(adds)
            .chain(repack::catalog_of_images([1, 2, 4], [1, 2, 4]))
            .chain(terms::catalog())
            .chain([column_sums::kernel()])
            .collect()
    }
}
