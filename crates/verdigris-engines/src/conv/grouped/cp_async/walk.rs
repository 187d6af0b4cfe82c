//! A tile's way over the activations: where its halo lies, in the tensor and in shared memory, as kernels see it.

use verdigris_graph::ConvProblem;
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::params::{Divide, Read};
use verdigris_kir::program::{Address, Base, Program};

use super::channel_tile::{PITCH_BYTES, SLOTS};
use super::tiling::{Cut, PHASE_TABLE_BYTES, PIXEL_BYTES, TAP_BYTES, Tiling, TilingArguments};
use crate::conv::geometry::phases::Phase;
use crate::conv::geometry::phases::{PixelGeometry, Steps, StepsArguments};
use crate::layout::space::divisor;

/// The high bit of each byte of a word.
const HIGH_BITS: u32 = 0x8080_8080;

verdigris_kir::parameters! {
    /// Which activations each pixel of the result meets, and how the result is cut into tiles.
    #[derive(Clone, Copy)]
    pub(super) struct WalkValues / WalkArguments of () as _spec {
        /// The tables of phases by depth, height and width, and where they begin.
        pub(super) tables: Read = 16,
        pub(super) starts: [u64; 3],
        /// Classes of height and width.
        pub(super) phases: [Divide; 2],
        pub(super) steps: StepsArguments = (),
        pub(super) images: u32,
        pub(super) cut: TilingArguments = (),
    }
}

/// The same with its place in shared memory.
pub(super) struct Walk<'k> {
    k: Kernel<'k>,
    values: WalkValues<'k>,
    pub(super) cut: Cut<'k>,
    /// The table of the phase, the tables of taps and of pixels, the filter, the halo and what stands beside it, in shared memory.
    phase_table_at: Val<'k, u32>,
    pub(super) taps_at: Val<'k, u32>,
    pub(super) pixels_at: Val<'k, u32>,
    pub(super) filter_at: Val<'k, u32>,
    pub(super) halo_at: Val<'k, u32>,
    pub(super) beside_at: Val<'k, u32>,
}

impl WalkArguments {
    /// Adds the table of phases to the program. `relative` are the distances of a tensor's neighbours in images, depths, heights and widths
    /// of the tile, in units of 16 bytes.
    pub(super) fn new(
        problem: &ConvProblem,
        geometry: &PixelGeometry,
        tiling: &Tiling,
        relative: [u64; 4],
        program: &mut Program,
    ) -> WalkArguments {
        let (tables, starts) = geometry.tables();
        program.constants.push(tables);
        let [_, height, width] = geometry.phase_counts();
        WalkArguments {
            tables: Address { base: Base::Constant(program.constants.len() - 1), offset_bytes: 0 },
            starts,
            phases: [height, width].map(divisor),
            steps: geometry.steps(),
            images: problem.n as u32,
            cut: tiling.arguments(relative),
        }
    }
}

/// One phase: its pixels and the taps that meet them, as they are read from the table of phases.
pub(super) struct Phases<'k> {
    pub(super) dims: [Phase<'k>; 3],
    /// The lowest coordinate that a tap adds, and the extent of the halo.
    lowest: [Val<'k, i32>; 3],
    halo: [Val<'k, u32>; 3],
}

/// The same as a CTA keeps it: in shared memory, for it is needed before and behind the products, and not between.
#[derive(Clone, Copy)]
pub(super) struct PhaseTable<'k> {
    k: Kernel<'k>,
    at: Val<'k, u32>,
}

impl<'k> PhaseTable<'k> {
    fn load(&self, index: i64) -> [Val<'k, u32>; 4] {
        let words = self.k.ld_shared_vector::<u32>(self.at, 16 * index, 4);
        [words[0], words[1], words[2], words[3]]
    }

    /// Pixels along depth, height and width.
    fn extents(&self) -> [Val<'k, u32>; 3] {
        let [d, h, w, _] = self.load(0);
        [d, h, w]
    }

    /// Taps that meet it.
    pub(super) fn taps(&self) -> Val<'k, u32> {
        self.load(0)[3]
    }

    /// The first activation of pixel 0's halo.
    fn origins(&self) -> [Val<'k, i32>; 3] {
        let [d, h, w, _] = self.load(1);
        [d, h, w].map(|at| at.signed())
    }

    /// Extents of the halo of a tile.
    fn halo(&self) -> [Val<'k, u32>; 3] {
        let [d, h, w, _] = self.load(2);
        [d, h, w]
    }

    /// The result's pixel is `index · step + phase`.
    pub(super) fn phase_indices(&self) -> [Val<'k, u32>; 3] {
        let [d, h, w, _] = self.load(3);
        [d, h, w]
    }
}

/// A tile: its first pixel within the phase, and the first activation of its halo.
pub(super) struct Place<'k> {
    /// Image, depth, height, width.
    pub(super) first: [Val<'k, u32>; 4],
    origin: [Val<'k, i32>; 3],
    /// Whether any of it lies inside of the result; then each coordinate's last, in the bytes of a word.
    any: Val<'k, bool>,
    last: Val<'k, u32>,
}

impl<'k> Place<'k> {
    /// Whether a pixel of the table of pixels lies inside of the result.
    pub(super) fn holds(&self, coordinates: Val<'k, u32>) -> Val<'k, bool> {
        self.any & (((self.last | HIGH_BITS) - coordinates) & HIGH_BITS).eq(HIGH_BITS)
    }
}

/// The four coordinates of a pixel of the table of pixels.
pub(super) fn coordinates(word: Val<'_, u32>) -> [Val<'_, u32>; 4] {
    [24, 16, 8, 0].map(|position| word.bits(position, 8))
}

/// Activations that a thread copies: one chunk of each pixel.
pub(super) struct Chunk<'k> {
    /// The chunk in the tensor's first pixel.
    pub(super) address: Val<'k, u64>,
    /// Distances of images, depths, heights and widths in bytes.
    pub(super) strides: [Val<'k, u64>; 4],
    /// Bytes of the chunk that the tensor has; 0 where it stands for no channels.
    pub(super) bytes: Val<'k, u32>,
    /// Chunks of a pixel that are ever read.
    pub(super) slots: u32,
}

impl<'k> Walk<'k> {
    /// Takes the shared memory of a kernel whose tiles have `pixels` pixels.
    pub(super) fn new(k: Kernel<'k>, values: WalkValues<'k>, pixels: u32, arena_bytes: u32) -> Self {
        let cut = values.cut;
        let arena = k.shared("arena", arena_bytes, 128).address();
        let pixels_at = k.shared("pixel_table", pixels * PIXEL_BYTES, 16).address();
        let phase_table_at = k.shared("residue", PHASE_TABLE_BYTES, 16).address();
        let [filter_at, halo_at, beside_at] = [cut.filter_at, cut.halo_at, cut.beside_at].map(|at| arena + at);
        Walk { k, values, cut, phase_table_at, taps_at: arena, pixels_at, filter_at, halo_at, beside_at }
    }

    /// How pixels meet activations.
    pub(super) fn steps(&self) -> Steps<'k> {
        self.values.steps
    }

    /// The phase of that number.
    pub(super) fn phases(&self, phase: Val<'k, u32>) -> Phases<'k> {
        let k = self.k;
        let (rest, w) = self.values.phases[1].split(phase);
        let (d, h) = self.values.phases[0].split(rest);
        let phase_indices = [d, h, w];
        let dims: [Phase<'k>; 3] =
            std::array::from_fn(|dim| Phase::read(k, self.values.tables.address() + self.values.starts[dim], phase_indices[dim]));
        // What the last tap adds to what the first does.
        let reach: [Val<'k, i32>; 3] = std::array::from_fn(|dim| {
            let count = dims[dim].count;
            (k.select(count.eq(0), 1u32, count) - 1).signed() * self.values.steps.taps[dim]
        });
        let zero = k.constant(0i32);
        let lowest = reach.map(|reach| reach.min(zero));
        let widths = [self.cut.tile[0].value(), self.cut.tile[1].value(), self.cut.tile[2].value()];
        let halo: [Val<'k, u32>; 3] = std::array::from_fn(|dim| {
            let taps = (reach[dim].max(zero) - lowest[dim]).unsigned();
            k.select(dims[dim].count.eq(0), 0u32, k.fma(widths[dim] - 1, self.values.steps.pixels[dim].unsigned(), taps + 1))
        });
        Phases { dims, lowest, halo }
    }

    /// Writes the tables of taps and pixels, by all threads: of a tap, how far its activations are from the tile's own in the halo, and
    /// the two words of `filter` of it; of a pixel, where its halo begins, how far it is from the tile's first one, and its coordinates, a
    /// byte each. For pixels that a tile does not have, these are larger than those of any tile. The table of the phase, too; behind a
    /// barrier, it is there.
    pub(super) fn write_tables(
        &self,
        phases: &Phases<'k>,
        pixels: u32,
        filter: impl Fn([Val<'k, u32>; 3]) -> [Val<'k, u32>; 2],
    ) -> PhaseTable<'k> {
        let (k, threads) = (self.k, self.k.threads());
        let [depth, height, width] = phases.dims;
        let taps = depth.count * height.count * width.count;
        k.when(k.thread().eq(0), || {
            let zero = k.constant(0u32);
            let origin = |dim: usize| (phases.dims[dim].offset + phases.lowest[dim]).unsigned();
            let [d, h, w] = phases.halo;
            k.st_shared_vector(self.phase_table_at, 0, &[depth.extent, height.extent, width.extent, taps]);
            k.st_shared_vector(self.phase_table_at, 16, &[origin(0), origin(1), origin(2), zero]);
            k.st_shared_vector(self.phase_table_at, 32, &[d, h, w, zero]);
            k.st_shared_vector(self.phase_table_at, 48, &[depth.phase_index, height.phase_index, width.phase_index, zero]);
        });
        let [column_phase, row, row_phase, plane, image] = self.cut.pitches;
        k.range_step(k.thread(), taps, threads, |tap| {
            let (rest, w) = width.taps.split(tap);
            let (d, h) = height.taps.split(rest);
            let taps = [d, h, w];
            let [d, h, w]: [Val<'k, u32>; 3] =
                std::array::from_fn(|dim| (taps[dim].signed() * self.values.steps.taps[dim] - phases.lowest[dim]).unsigned());
            let (line, phase_of_line) = self.cut.height_step.split(h);
            let (column, phase_of_column) = self.cut.width_step.split(w);
            let distance = d * plane + phase_of_line * row_phase + line * row + phase_of_column * column_phase + column;
            let [low, high] = filter(taps);
            k.st_shared_vector(self.taps_at + tap * TAP_BYTES, 0, &[low, high, distance * PITCH_BYTES, distance]);
        });
        let [image_relative, depth_relative, height_relative, width_relative] = self.cut.relative;
        for first in (0..pixels).step_by(threads as usize) {
            let pixel = k.thread() + first;
            k.when(pixel.lt(pixels), || {
                let (rest, w) = self.cut.tile[2].split(pixel);
                let (rest, h) = self.cut.tile[1].split(rest);
                let (n, d) = self.cut.tile[0].split(rest);
                let halo = n * image + d * self.values.steps.pixels[0].unsigned() * plane + h * row + w;
                let relative = n * image_relative + d * depth_relative + h * height_relative + w * width_relative;
                let packed = (n << 24) | (d << 16) | (h << 8) | w;
                let is_inside = pixel.lt(self.cut.tile_pixels);
                let words = [
                    k.select(is_inside, halo * PITCH_BYTES, 0u32),
                    k.select(is_inside, relative, 0u32),
                    k.select(is_inside, packed, !HIGH_BITS),
                ];
                k.st_shared_vector(self.pixels_at + pixel * PIXEL_BYTES, 0, &[words[0], words[1], words[2], words[2]]);
            });
        }
        PhaseTable { k, at: self.phase_table_at }
    }

    /// Tile `tile` of a phase.
    pub(super) fn place(&self, phase_table: &PhaseTable<'k>, tile: Val<'k, u32>) -> Place<'k> {
        let k = self.k;
        let (rest, w) = self.cut.tiles[2].split(tile);
        let (rest, h) = self.cut.tiles[1].split(rest);
        let (n, d) = self.cut.tiles[0].split(rest);
        let lengths = [self.cut.tile_images, self.cut.tile[0].value(), self.cut.tile[1].value(), self.cut.tile[2].value()];
        let first: [Val<'k, u32>; 4] = std::array::from_fn(|dim| [n, d, h, w][dim] * lengths[dim]);
        let ([depth, height, width], origins) = (phase_table.extents(), phase_table.origins());
        let ends = [self.values.images, depth, height, width];
        let origin: [Val<'k, i32>; 3] =
            std::array::from_fn(|dim| k.fma(first[dim + 1].signed(), self.values.steps.pixels[dim], origins[dim]));
        let any = (0..4).map(|dim| first[dim].lt(ends[dim])).reduce(|all, one| all & one).unwrap_or_else(|| unreachable!("four dims"));
        let last = (0..4).map(|dim| {
            let left = k.select(first[dim].lt(ends[dim]), ends[dim] - first[dim], 1u32);
            (left.min(lengths[dim]) - 1) << (24 - 8 * dim as u32)
        });
        let last = last.reduce(|all, one| all | one).unwrap_or_else(|| unreachable!("four dims"));
        Place { first, origin, any, last }
    }

    /// Starts copying the halo of a tile, by all warps: a warp takes rows, eight lanes a pixel. What lies outside of the tensor is zero.
    pub(super) fn fill(&self, phase_table: &PhaseTable<'k>, place: &Place<'k>, chunk: &Chunk<'k>) {
        let (k, lane, halo) = (self.k, self.k.lane(), phase_table.halo());
        let slot = lane & (SLOTS - 1);
        let [column_phase, row_pitch, row_phase, plane, image_pitch] = self.cut.pitches;
        let rows = self.cut.tile_images * self.cut.halo[0].value() * self.cut.halo[1].value();
        // Lanes whose chunk is not read copy no pixels.
        let first = k.select(slot.lt(chunk.slots), lane >> SLOTS.ilog2(), halo[2]);
        k.range_step(k.warp(), rows, k.threads() / 32, |row| {
            let (rest, y) = self.cut.halo[1].split(row);
            let (image, z) = self.cut.halo[0].split(rest);
            // A phase with fewer taps has a smaller halo.
            k.when(z.lt(halo[0]) & y.lt(halo[1]), || {
                let n = place.first[0] + image;
                let [d, h] = [place.origin[0] + z.signed(), place.origin[1] + y.signed()].map(|at| at.unsigned());
                let is_inside = n.lt(self.values.images) & d.lt(self.values.steps.extents[0]) & h.lt(self.values.steps.extents[1]);
                let source = [n, d, h]
                    .into_iter()
                    .zip(chunk.strides)
                    .fold(chunk.address, |address, (at, stride)| address + k.select(is_inside, at, 0u32).widen() * stride);
                let (line, phase) = self.cut.height_step.split(y);
                let at = image * image_pitch + z * plane + phase * row_phase + line * row_pitch;
                let to = k.fma(at, PITCH_BYTES, self.halo_at + (slot << 4));
                let bytes = k.select(is_inside, chunk.bytes, 0u32);
                k.range_step(first, halo[2], 32 / SLOTS, |x| {
                    let w = (place.origin[2] + x.signed()).unsigned();
                    let is_inside = w.lt(self.values.steps.extents[2]);
                    let (column, phase) = self.cut.width_step.split(x);
                    let from = source + k.select(is_inside, w, 0u32).widen() * chunk.strides[3];
                    let at = k.fma(phase * column_phase + column, PITCH_BYTES, to);
                    k.cp_async(at, 0, from, 0, 16, k.select(is_inside, bytes, 0u32));
                });
            });
        });
        k.cp_async_commit();
    }
}
