//! Tiles whose depth is split into many parts: the parts go to scratch as they stand in registers, and a launch of its own adds them up.
//!
//! **What.** `D[row, column] = epilogue(Σ part[row, column])`, in the order of the parts, so repeats agree bit for bit.
//! **When it wins.** With more than a few parts a tile, where the last to arrive would be long in adding them: here every thread of the
//! chip adds four elements.
//! **Cost.** Every part is written and read once, 4 bytes an element, mostly in L2; and a launch, which begins while the product ends.
//!
//! **Scratch.** A *sum* is what one warpgroup holds of one tile: `((matrix · rows of tiles + row) · columns of tiles + column) · warpgroups +
//! warpgroup`. Parts of a sum stand one behind the other; in each, the four registers of a thread that belong to 8 neighbouring columns of two
//! rows are one 16-byte vector, threads side by side.

use std::fmt;

use verdigris_kir::face::{Divisor, Header, Kernel, Pointer, Val, build};
use verdigris_kir::inst::Cache;
use verdigris_kir::ir::{KernelBody, Target, Ty};
use verdigris_kir::program::{Address, Arg, KernelRef, Launch, Residency};
use verdigris_kir::tile::fragment::Fragment;

use super::kernel::{Spec, WARPGROUP};
use crate::parts::batch::BatchIndex;
use crate::parts::epilogue::{EpilogueSpec, Place};
use crate::parts::way_out::Sum;

/// Threads of a CTA of the adding launch.
const THREADS: u32 = 256;
/// Parts that are on their way at a time.
const UNROLL: u32 = 4;

/// The scratch of a kernel whose tiles are reduced later.
pub(super) struct Parts<'k> {
    parts: Pointer<'k>,
    count: Val<'k, u32>,
    tile_rows: Val<'k, u32>,
    tile_columns: Val<'k, u32>,
}

/// Tiles and parts of a split product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    /// Rows and columns of tiles of one matrix, those of a cluster counted each.
    pub(super) tile_rows: u32,
    pub(super) tile_columns: u32,
    pub(super) matrices: u32,
    /// Parts of each tile.
    pub(super) parts: u32,
}

fn number(n: u32) -> Arg {
    Arg::Scalar(Ty::U32, u64::from(n))
}

impl Grid {
    /// Bytes of scratch.
    pub(super) fn scratch_bytes(&self, spec: &Spec) -> u64 {
        self.sums(spec) * u64::from(self.parts) * spec.part_words() * 4
    }

    fn sums(&self, spec: &Spec) -> u64 {
        u64::from(self.tile_rows) * u64::from(self.tile_columns) * u64::from(self.matrices) * u64::from(spec.consumers)
    }

    /// Arguments in the order of [`Parts::declare`].
    pub(super) fn parts_args(&self, scratch: Address) -> Vec<Arg> {
        vec![Arg::Pointer(scratch), number(self.parts), number(self.tile_rows), number(self.tile_columns)]
    }

    /// Threads that add.
    fn threads(&self, spec: &Spec) -> u64 {
        self.sums(spec) * spec.part_words() / 4
    }

    /// Whether the adding launch can count its threads, and a word of scratch lies within 2³² of a sum's first.
    pub(super) fn fits(&self, spec: &Spec) -> bool {
        self.threads(spec) < 1 << 31 && self.sums(spec) * u64::from(self.parts) < 1 << 31
    }

    /// The launch that adds the parts up. `epilogue` are the arguments of the batch and of the epilogue, `rows` and `columns` the extents of D.
    pub(super) fn launch(&self, spec: &Spec, adds: AddSpec, scratch: Address, epilogue: Vec<Arg>, [rows, columns]: [u32; 2]) -> Launch {
        let mut args = vec![Arg::Pointer(scratch), number(self.parts), number(self.threads(spec) as u32)];
        let vectors = spec.part_words() as u32 / 4 / WARPGROUP;
        args.extend([vectors, spec.tile_n / 8, spec.consumers, self.tile_columns, self.tile_rows].map(Arg::Divisor));
        args.extend([spec.tile_m, spec.blocks() * 64].map(number));
        args.extend(epilogue);
        args.extend([rows, columns].map(number));
        Launch {
            grid: [self.threads(spec).div_ceil(u64::from(THREADS)) as u32, 1, 1],
            residency: Residency::Any,
            overlap: true,
            args,
            kernel: adds.kernel(),
        }
    }
}

impl<'k> Parts<'k> {
    /// Declares the parameters.
    pub(super) fn declare(k: Kernel<'k>) -> Self {
        Parts {
            parts: k.output("parts", 16),
            count: k.scalar("parts_of_a_tile"),
            tile_rows: k.scalar("tile_rows"),
            tile_columns: k.scalar("tile_columns"),
        }
    }

    /// Puts a warpgroup's sums of a part of a tile into scratch: `place` is the tile's row, column and matrix, and the part.
    pub(super) fn keep<T: Sum>(
        &self,
        k: Kernel<'k>,
        spec: &Spec,
        sums: &[Fragment<'k, T>],
        [row, column, matrix, part]: [Val<'k, u32>; 4],
        warpgroup: Val<'k, u32>,
        thread: Val<'k, u32>,
    ) {
        let sum = ((matrix * self.tile_rows + row) * self.tile_columns + column) * spec.consumers + warpgroup;
        let bytes = (sum * self.count + part).mul_wide(spec.part_words() as u32 * 4);
        let own = self.parts.moved(bytes).at(thread, 16);
        for (i, registers) in sums.iter().flat_map(|sum| sum.registers().chunks(4)).enumerate() {
            let values: Vec<Val<'k, T>> = registers.iter().map(|register| register.get()).collect();
            k.st_global_vector(own, i as i64 * 16 * i64::from(WARPGROUP), &values, Cache::Default);
        }
    }
}

/// What shapes the adding kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct AddSpec {
    /// Sums are kept in s32.
    pub(super) integer: bool,
    /// What stands between sums and D, which it stores.
    pub(super) epilogue: EpilogueSpec,
}

impl fmt::Display for AddSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "conv_add_parts_{}_{}", if self.integer { "s32" } else { "f32" }, self.epilogue.name())
    }
}

impl AddSpec {
    /// A reference to the kernel.
    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.to_string(), target: Target::Sm90, threads: THREADS, ..Header::default() };
        if self.integer { build(header, |k| add::<i32>(k, self)) } else { build(header, |k| add::<f32>(k, self)) }
    }
}

fn add<'k, T: Sum>(k: Kernel<'k>, spec: &AddSpec) {
    let parts = k.input("parts", 16);
    let (count, threads) = (k.scalar::<u32>("parts_of_a_sum"), k.scalar::<u32>("threads"));
    let vectors = k.divisor("vectors");
    let divisor = |name| -> Divisor<'k> { k.divisor(name) };
    let (column_blocks, warpgroups) = (divisor("column_blocks"), divisor("warpgroups"));
    let (tile_columns, tile_rows) = (divisor("tile_columns"), divisor("tile_rows"));
    let (tile_m, warpgroup_rows) = (k.scalar::<u32>("tile_m"), k.scalar::<u32>("warpgroup_rows"));
    let batch = BatchIndex::declare(k);
    let epilogue = spec.epilogue.declare::<f32>(k);
    let (rows, columns) = (k.scalar::<u32>("rows"), k.scalar::<u32>("columns"));
    k.griddep_wait();
    k.griddep_launch();

    let index = k.cta() * THREADS + k.thread();
    k.when(index.lt(threads), || {
        let thread = index & (WARPGROUP - 1);
        let (sum, vector) = vectors.split(index >> WARPGROUP.trailing_zeros());
        let (block, column_block) = column_blocks.split(vector);
        let (rest, warpgroup) = warpgroups.split(sum);
        let (rest, tile_column) = tile_columns.split(rest);
        let (matrix, tile_row) = tile_rows.split(rest);
        let row = tile_row * tile_m + warpgroup * warpgroup_rows + block * 64 + Fragment::<T>::row(thread);
        let column = tile_column * (column_blocks.value() * 8) + column_block * 8 + Fragment::<T>::column(thread);

        // A part is as many vectors as a sum has, 16 bytes for each thread of a warpgroup.
        let part_bytes = vectors.value() * (16 * WARPGROUP);
        let first = parts.moved((sum * count).widen() * part_bytes.widen()).at(vector * WARPGROUP + thread, 16);
        let sums: Vec<_> = (0..4).map(|_| k.var(k.constant(T::ZERO))).collect();
        k.range_unrolled(count, UNROLL, |part| {
            let values = k.ld_global_vector::<T>(first + part.widen() * part_bytes.widen(), 0, 4, Cache::Default);
            sums.iter().zip(values).for_each(|(sum, value)| sum.set(*sum + value));
        });

        let at = epilogue.begin(batch.split(matrix));
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
    });
}
