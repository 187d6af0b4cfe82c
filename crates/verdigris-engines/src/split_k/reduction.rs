//! The split-K reduction: parts of tiles go to scratch as they stand in registers, and a launch of its own adds them up.
//!
//! **What.** `D[row, column] = epilogue(Σ part[row, column])`, in an order that the number of parts fixes, so repeats agree bit for bit.
//! **When it wins.** With more than a few parts a tile, where the last to arrive would be long in adding them: here every thread of the
//! chip adds four elements, or, where these are few and parts many, the parts of four elements are cut into slices, one a thread.
//! **Cost.** Every part is written and read once, 4 bytes an element, mostly in L2; and a launch, which begins while the product ends.
//!
//! **Scratch.** A *sum* is what one warpgroup holds of one tile: `((matrix · rows of tiles + row) · columns of tiles + column) ·
//! warpgroups + warpgroup`. Parts of a sum stand one behind the other; in each, the four registers of a thread that belong to 8
//! neighbouring columns of two rows are one 16-byte vector, threads side by side.

use std::fmt;

use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::inst::Cache;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::{Address, KernelRef, Launch};
use verdigris_kir::tile::fragment::Fragment;
use verdigris_tensor::DType;

use crate::cost::{Stream, Traffic};
use crate::fuse::epilogue::{EpilogueArgs, EpilogueSpec, OperandSpec, Place, Walk};
use crate::layout::batch::BatchIndexArgs;
use crate::store::Sum;

/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;
/// Threads of a CTA of the reduction.
const THREADS: u32 = 256;
/// Parts that a thread has on their way at a time.
const UNROLL: u32 = 8;
/// The most threads that share the parts of four elements.
const MOST_SLICES: u32 = 8;
/// Vectors of four elements that are enough threads to draw all that L2 gives, one each: [`UNROLL`] loads of as many are 4 MB under way.
const MANY_VECTORS: u64 = 1 << 15;

/// The tiles that parts are of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PartTile {
    /// Rows and columns, in 64 and in 8.
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    /// Warpgroups that hold a tile; each has an equal share of its rows.
    pub(crate) warpgroups: u32,
}

impl PartTile {
    /// f32 (or s32) words of one warpgroup's share.
    pub(crate) fn words(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.columns) / u64::from(self.warpgroups)
    }
}

verdigris_kir::parameters! {
    /// The scratch of a kernel whose parts are added up later.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct PartsValues / #[derive(Clone, Copy, Debug)] PartsArgs of () as _spec {
        parts: Write = 16,
        parts_of_a_tile: u32,
        /// Rows and columns of tiles of one matrix.
        tile_rows: u32,
        tile_columns: u32,
    }
}

/// How the warpgroups of a kernel keep parts that are added up later.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts<'k> {
    kernel: Kernel<'k>,
    tile: PartTile,
    values: PartsValues<'k>,
}

/// Tiles and parts of a split product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartGrid {
    pub(crate) tile: PartTile,
    /// Rows and columns of tiles of one matrix, those of a cluster counted each.
    pub(crate) tile_rows: u32,
    pub(crate) tile_columns: u32,
    pub(crate) matrices: u32,
    /// Parts of each tile.
    pub(crate) parts: u32,
}

impl PartGrid {
    /// Bytes of scratch.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        self.sums() * u64::from(self.parts) * self.tile.words() * 4
    }

    fn sums(&self) -> u64 {
        u64::from(self.tile_rows) * u64::from(self.tile_columns) * u64::from(self.matrices) * u64::from(self.tile.warpgroups)
    }

    /// The arguments of the kernel that forms the parts.
    pub(crate) fn arguments(&self, scratch: Address) -> PartsArgs {
        PartsArgs { parts: scratch, parts_of_a_tile: self.parts, tile_rows: self.tile_rows, tile_columns: self.tile_columns }
    }

    /// Vectors of four elements of D.
    pub(crate) fn vectors(&self) -> u64 {
        self.sums() * self.tile.words() / 4
    }

    /// Whether the adding launch can count its threads, and a word of scratch lies within 2³² of a sum's first.
    pub(crate) fn fits(&self) -> bool {
        self.vectors() < 1 << 31 && self.sums() * u64::from(self.parts) < 1 << 31
    }

    /// Threads that share the parts of four elements: one where elements are many or parts few.
    pub(crate) fn slices(&self) -> u32 {
        if self.parts >= 2 * MOST_SLICES && self.vectors() < MANY_VECTORS { MOST_SLICES } else { 1 }
    }

    /// What parts ask beside the product itself: their way to scratch and back, and a launch.
    pub(crate) fn work(&self) -> Stream {
        let ctas = (self.vectors() * u64::from(self.slices())) as f64 / f64::from(THREADS);
        Stream::new(Traffic::Reduced, 2.0 * self.scratch_bytes() as f64).of_ctas(ctas)
    }

    /// The launch that adds the parts up. `batch` and `epilogue` are those of the product, `rows` and `columns` the extents of D.
    pub(crate) fn launch(
        &self,
        adds: ReductionSpec,
        scratch: Address,
        batch: BatchIndexArgs,
        epilogue: EpilogueArgs,
        [rows, columns]: [u32; 2],
    ) -> Launch {
        let PartTile { rows: tile_m, columns: tile_n, warpgroups } = self.tile;
        let args = SumsArgs {
            parts: scratch,
            parts_of_a_sum: self.parts,
            vectors_of_d: self.vectors() as u32,
            vectors: self.tile.words() as u32 / 4 / WARPGROUP,
            column_blocks: tile_n / 8,
            warpgroups,
            tile_columns: self.tile_columns,
            tile_rows: self.tile_rows,
            tile_m,
            warpgroup_rows: tile_m / warpgroups,
            batch,
            epilogue,
            rows,
            columns,
        };
        let ctas = self.vectors().div_ceil(u64::from(adds.vectors_of_cta())) as u32;
        let args = args.bound(&adds);
        Launch::new(adds.kernel(), [ctas, 1, 1], args).overlapping()
    }
}

impl<'k> Parts<'k> {
    /// Of parameters that a group declares.
    pub(crate) fn new(k: Kernel<'k>, values: PartsValues<'k>, tile: PartTile) -> Self {
        Parts { kernel: k, tile, values }
    }

    /// Puts a warpgroup's sums of a part of a tile into scratch: their registers in order, and as `place` the tile's row, column and
    /// matrix, and the part.
    pub(crate) fn keep<T: Sum>(
        &self,
        sums: impl Iterator<Item = Var<'k, T>>,
        [row, column, matrix, part]: [Val<'k, u32>; 4],
        warpgroup: Val<'k, u32>,
        thread: Val<'k, u32>,
    ) {
        let PartsValues { parts, parts_of_a_tile, tile_rows, tile_columns } = self.values;
        let sum = ((matrix * tile_rows + row) * tile_columns + column) * self.tile.warpgroups + warpgroup;
        let bytes = (sum * parts_of_a_tile + part).mul_wide(self.tile.words() as u32 * 4);
        let own = parts.moved(bytes).at(thread, 16);
        let values: Vec<Val<'k, T>> = sums.map(|register| register.get()).collect();
        for (i, vector) in values.chunks(4).enumerate() {
            self.kernel.st_global_vector(own, i as i64 * 16 * i64::from(WARPGROUP), vector, Cache::Default);
        }
    }
}

/// The adding kernels of plain results of a type: pairs of columns, single ones where their number is odd, and (`strided`) any strides.
pub(crate) fn catalog(d: DType, strided: bool) -> impl Iterator<Item = KernelRef> {
    let results = [(Walk::Row, true), (Walk::Row, false), (Walk::Strided, false)];
    let results = results.into_iter().filter(move |(walk, _)| strided || *walk == Walk::Row);
    results.flat_map(move |(walk, pairs)| {
        let integer = d == DType::I32;
        let epilogue = EpilogueSpec { pairs, exact: integer, ..EpilogueSpec::plain(OperandSpec { dtype: d, walk }) };
        ReductionSpec::SLICES.map(|slices| ReductionSpec { integer, slices, epilogue: epilogue.clone() }.kernel())
    })
}

/// What shapes the adding kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ReductionSpec {
    /// Sums are kept in s32.
    pub(crate) integer: bool,
    /// Threads that share the parts of four elements, each taking parts in strides of their number: 1 or [`MOST_SLICES`].
    pub(crate) slices: u32,
    /// What stands between sums and D, which it stores.
    pub(crate) epilogue: EpilogueSpec,
}

impl fmt::Display for ReductionSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "add_parts_{}", if self.integer { "s32" } else { "f32" })?;
        if self.slices > 1 {
            write!(f, "_by{}", self.slices)?;
        }
        write!(f, "_{}", self.epilogue.name())
    }
}

impl ReductionSpec {
    /// The numbers of threads that may share the parts of four elements: what [`PartGrid::slices`] gives.
    pub(crate) const SLICES: [u32; 2] = [1, MOST_SLICES];

    /// A reference to the kernel.
    pub(crate) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }

    fn vectors_of_cta(&self) -> u32 {
        THREADS / self.slices
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.to_string(), target: Target::Sm90, threads: THREADS, ..Header::default() };
        if self.integer { build(header, |k| add::<i32>(k, self)) } else { build(header, |k| add::<f32>(k, self)) }
    }
}

verdigris_kir::parameters! {
    struct Sums / SumsArgs of ReductionSpec as spec {
        parts: Read = 16,
        parts_of_a_sum: u32,
        vectors_of_d: u32,
        /// Vectors of a thread.
        vectors: Divide,
        column_blocks: Divide,
        warpgroups: Divide,
        tile_columns: Divide,
        tile_rows: Divide,
        tile_m: u32,
        warpgroup_rows: u32,
        batch: BatchIndexArgs = (),
        epilogue: EpilogueArgs = spec.epilogue.over_matrices(),
        /// Extents of D.
        rows: u32,
        columns: u32,
    }
}

fn add<'k, T: Sum>(k: Kernel<'k>, spec: &ReductionSpec) {
    let given = Sums::declare(k, spec);
    let Sums { parts, parts_of_a_sum: count, vectors_of_d: wanted, vectors, column_blocks, rows, columns, .. } = given;
    k.griddep_wait();
    k.griddep_launch();

    let own = spec.vectors_of_cta();
    let (slice, lane) = (k.thread() >> own.trailing_zeros(), k.thread() & (own - 1));
    let index = k.cta() * own + lane;
    // The thread of the warpgroup that held these four elements, and where in its registers.
    let thread = index & (WARPGROUP - 1);
    let (sum, vector) = vectors.split(index >> WARPGROUP.trailing_zeros());
    let sums: Vec<_> = (0..4).map(|_| k.var(k.constant(T::ZERO))).collect();

    let add_slice = || {
        // A part is as many vectors as a sum has, 16 bytes for each thread of a warpgroup.
        let part_bytes = vectors.value() * (16 * WARPGROUP);
        let first = parts.moved((sum * count + slice).widen() * part_bytes.widen()).at(vector * WARPGROUP + thread, 16);
        let turns = if spec.slices == 1 { count } else { (count + (spec.slices - 1) - slice) >> spec.slices.trailing_zeros() };
        let step = part_bytes.widen() * u64::from(spec.slices);
        let last = turns - 1;
        k.range_step(0, turns, UNROLL, |turn| {
            // All on their way before the first is added, also where fewer are left: the last one stands for those.
            let loads = (0..UNROLL).map(|ahead| {
                let turn = turn + ahead;
                (turn.le(last), k.ld_global_vector::<T>(first + turn.min(last).widen() * step, 0, 4, Cache::Default))
            });
            for (there, values) in loads.collect::<Vec<_>>() {
                sums.iter().zip(values).for_each(|(sum, value)| sum.set(k.select(there, *sum + value, *sum)));
            }
        });
    };

    let write = || {
        let (block, column_block) = column_blocks.split(vector);
        let (rest, warpgroup) = given.warpgroups.split(sum);
        let (rest, tile_column) = given.tile_columns.split(rest);
        let (matrix, tile_row) = given.tile_rows.split(rest);
        let row = tile_row * given.tile_m + warpgroup * given.warpgroup_rows + block * 64 + Fragment::<T>::row(thread);
        let column = tile_column * (column_blocks.value() * 8) + column_block * 8 + Fragment::<T>::column(thread);
        let at = given.epilogue.begin(given.batch.split(matrix));
        for half in 0..2 {
            let place: Place<'_, 'k, f32> = at.at(row + 8 * half as u32, column);
            k.when((row + 8 * half as u32).lt(rows), || {
                let value = |odd: usize| sums[2 * half + odd].get();
                if spec.epilogue.pairs {
                    k.when((column + 1).lt(columns), || {
                        place.store_pair(place.apply_pair([T::to_f32(value(0)), T::to_f32(value(1))], 0), 0);
                    });
                    return;
                }
                for odd in 0..2 {
                    k.when((column + odd as u32).lt(columns), || {
                        if spec.epilogue.exact {
                            place.store_exact(value(odd).bitcast(), odd as u32);
                        } else {
                            place.store(place.apply(T::to_f32(value(odd)), odd as u32), odd as u32);
                        }
                    });
                }
            });
        }
    };

    if spec.slices == 1 {
        k.when(index.lt(wanted), || {
            add_slice();
            write();
        });
        return;
    }
    let slots = k.shared("sums of slices", 16 * THREADS, 16);
    let slot = slots.address() + k.thread() * 16;
    k.when(index.lt(wanted), || {
        add_slice();
        k.st_shared_vector(slot, 0, &sums.iter().map(|sum| sum.get()).collect::<Vec<_>>());
    });
    k.bar_sync();
    k.when(index.lt(wanted) & slice.eq(0), || {
        for other in 1..spec.slices {
            let values = k.ld_shared_vector::<T>(slot, i64::from(16 * own * other), 4);
            sums.iter().zip(values).for_each(|(sum, value)| sum.set(*sum + value));
        }
        write();
    });
}
