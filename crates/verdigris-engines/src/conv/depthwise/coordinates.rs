//! Where a CTA works: which outputs, which tile of activations, which taps; and the thread coordinates in it.

use verdigris_kir::face::{Divisor, Kernel, Val, Var};
use verdigris_kir::params::Divide;

use super::spec::Spec;
use super::tile::Origin;
use crate::split_k::filter::depthwise::TapBlock;

verdigris_kir::parameters! {
    /// Rows or columns: tiles of outputs follow each other, for each phase modulo the dilation on its own.
    ///
    /// With tile `i` of phase `ρ` and block `b` of the taps, the first output is `ρ + i · tile_out + first_out`, and the first line read
    /// `i · tile_in + ρ · phase_in + b · block_in + first_in`; from line to line and from output to output it is `step`.
    #[derive(Clone, Copy)]
    pub(super) struct Axis / AxisArguments of () as _spec {
        pub(super) tiles: Divide,
        pub(super) phases: Divide,
        pub(super) tile_in: i32,
        pub(super) phase_in: i32,
        pub(super) block_in: i32,
        pub(super) first_in: i32,
        pub(super) tile_out: i32,
        pub(super) first_out: i32,
        pub(super) step: u32,
        /// Outputs.
        pub(super) extent: u32,
    }
}

impl<'k> Axis<'k> {
    /// The rest of a number of which tile and phase are the lowest digits; first line and first output.
    fn split(&self, number: Val<'k, u32>, block: Val<'k, u32>) -> (Val<'k, u32>, Val<'k, i32>, Val<'k, i32>) {
        let k = number.kernel();
        let (rest, tile) = self.tiles.split(number);
        let (rest, phase) = self.phases.split(rest);
        let (tile, phase) = (tile.signed(), phase.signed());
        let line = k.fma(tile, self.tile_in, k.fma(phase, self.phase_in, k.fma(block.signed(), self.block_in, self.first_in)));
        let output = k.fma(tile, self.tile_out, phase + self.first_out);
        (rest, line, output)
    }
}

verdigris_kir::parameters! {
    /// The depth, one plane at a time: output `o` reads with tap `t` plane `(o · plane + t · tap + first) / divisor` where that is whole
    /// and inside.
    #[derive(Clone, Copy)]
    pub(super) struct Depth / DepthArguments of () as _spec {
        pub(super) extent: Divide,
        pub(super) plane: i32,
        pub(super) tap: i32,
        pub(super) first: i32,
        pub(super) divisor: Divide,
        /// Planes of the activations.
        pub(super) planes: u32,
    }
}

/// What a step of a CTA works on, from where it is worked out to where the sums are kept.
#[derive(Clone, Copy)]
pub(super) struct Work<'k> {
    /// The first image.
    pub(super) image: Val<'k, u32>,
    /// The plane of the outputs.
    pub(super) plane: Val<'k, u32>,
    /// Row and column of the first output; outside at times.
    pub(super) first: [Val<'k, i32>; 2],
    /// The taps.
    pub(super) tap_block: TapBlock<'k>,
    /// Its number.
    pub(super) number: Val<'k, u32>,
}

/// Registers for the work of the next step.
pub(super) struct NextWork<'k>([Var<'k, u32>; 9]);

impl<'k> NextWork<'k> {
    pub(super) fn new(k: Kernel<'k>) -> Self {
        NextWork(std::array::from_fn(|_| k.var(0u32)))
    }

    pub(super) fn set(&self, work: &Work<'k>) {
        let Work { image, plane, first, tap_block: TapBlock { filter, depth, block }, number } = *work;
        let words = [image, plane, first[0].unsigned(), first[1].unsigned(), filter, depth, block[0], block[1], number];
        self.0.iter().zip(words).for_each(|(register, word)| register.set(word));
    }

    pub(super) fn get(&self) -> Work<'k> {
        let [image, plane, row, column, filter, depth, block_row, block_column, number] = self.0.map(|register| register.get());
        let tap_block = TapBlock { filter, depth, block: [block_row, block_column] };
        Work { image, plane, first: [row.signed(), column.signed()], tap_block, number }
    }
}

/// Which rows and columns of a block of taps the filter has.
pub(super) struct Present<'k>(Option<[Vec<Val<'k, bool>>; 2]>);

impl<'k> Present<'k> {
    /// Of a block of taps of a filter of these rows and columns.
    pub(super) fn new(spec: &Spec, tap_block: &TapBlock<'k>, extents: [Val<'k, u32>; 2]) -> Self {
        Present(spec.ragged.then(|| {
            std::array::from_fn(|dim| {
                let left = extents[dim] - tap_block.block[dim] * spec.block[dim];
                (0..spec.block[dim]).map(|tap| left.gt(tap)).collect()
            })
        }))
    }

    /// Runs `body` if the filter has such a row.
    pub(super) fn row(&self, row: usize, body: impl Fn()) {
        self.when(0, row, body);
    }

    /// Runs `body` if the filter has such a column.
    pub(super) fn column(&self, column: usize, body: impl Fn()) {
        self.when(1, column, body);
    }

    fn when(&self, dim: usize, tap: usize, body: impl Fn()) {
        match &self.0 {
            // A block has one tap of the filter at least.
            Some(present) if tap > 0 => present[dim][tap].kernel().when(present[dim][tap], body),
            _ => body(),
        }
    }
}

verdigris_kir::parameters! {
    /// The items of a CTA, grid-stride, so that CTAs work side by side in memory, and read each other's neighbours out of L2.
    #[derive(Clone, Copy)]
    pub(super) struct Share / ShareArguments of () as _spec {
        pub(super) items: u32,
        /// The most items of a part.
        pub(super) most: u32,
        pub(super) parts: u32,
    }
}

impl<'k> Share<'k> {
    /// How many items a part has.
    pub(super) fn count(&self, part: Val<'k, u32>) -> Val<'k, u32> {
        let whole = self.most - 1;
        whole + part.kernel().select((part + whole * self.parts).lt(self.items), 1u32, 0u32)
    }

    /// One of them.
    pub(super) fn item(&self, part: Val<'k, u32>, index: Val<'k, u32>) -> Val<'k, u32> {
        part + index * self.parts
    }
}

verdigris_kir::parameters! {
    /// All tiles of a launch.
    #[derive(Clone, Copy)]
    pub(super) struct Tiles / TilesArguments of () as _spec {
        pub(super) rows: AxisArguments = (),
        pub(super) columns: AxisArguments = (),
        pub(super) depth: DepthArguments = (),
        /// Images of a tile.
        pub(super) images_of_tile: u32,
        /// All images.
        pub(super) images: u32,
    }
}

/// One tile.
#[derive(Clone, Copy)]
pub(super) struct Tile<'k> {
    /// Of activations.
    pub(super) origin: Origin<'k>,
    /// The plane of the outputs.
    pub(super) plane: Val<'k, u32>,
    /// Row and column of the first output; outside at times.
    pub(super) first: [Val<'k, i32>; 2],
}

impl<'k> Tiles<'k> {
    /// The tile of an item of work, with a block of taps.
    pub(super) fn at(&self, item: Val<'k, u32>, tap_block: &TapBlock<'k>) -> Tile<'k> {
        let k = item.kernel();
        let (rest, column, first_column) = self.columns.split(item, tap_block.block[1]);
        let (rest, row, first_row) = self.rows.split(rest, tap_block.block[0]);
        let (images, plane) = self.depth.extent.split(rest);
        let reached = k.fma(plane.signed(), self.depth.plane, k.fma(tap_block.depth.signed(), self.depth.tap, self.depth.first));
        let (read, rest) = self.depth.divisor.split(reached.unsigned());
        let origin = Origin {
            image: images * self.images_of_tile,
            plane: read,
            has_plane: reached.ge(0) & rest.eq(0) & read.lt(self.depth.planes),
            first: [row, column],
            steps: self.steps(),
        };
        Tile { origin, plane, first: [first_row, first_column] }
    }

    /// From output to output.
    pub(super) fn steps(&self) -> [Val<'k, u32>; 2] {
        [self.rows.step, self.columns.step]
    }

    /// Rows and columns of outputs.
    pub(super) fn extents(&self) -> [Val<'k, u32>; 2] {
        [self.rows.extent, self.columns.extent]
    }
}

/// Where a thread stands in a tile: its word of a pixel, and its outputs among those of the CTA.
#[derive(Clone, Copy)]
pub(super) struct ThreadCoordinates<'k> {
    /// The word.
    pub(super) lane: Val<'k, u32>,
    /// Image, rows of blocks, columns of blocks.
    pub(super) place: [Val<'k, u32>; 3],
    /// Whether there is work at this place.
    pub(super) is_used: Val<'k, bool>,
}

impl<'k> ThreadCoordinates<'k> {
    /// Of this thread, if the places of a CTA are so many images, rows and columns.
    pub(super) fn new(k: Kernel<'k>, spec: &Spec, [images, rows, columns]: [Divisor<'k>; 3]) -> Self {
        let place = k.thread() >> spec.lanes().ilog2();
        let (rest, column) = columns.split(place);
        let (image, row) = rows.split(rest);
        let used = images.value() * rows.value() * columns.value();
        // What has no place stands at the first, and keeps nothing.
        let is_used = place.lt(used.min(spec.places()));
        let place = [image, row, column].map(|part| k.select(is_used, part, 0u32));
        ThreadCoordinates { lane: k.thread() & (spec.lanes() - 1), place, is_used }
    }

    /// Rows or columns of outputs, and lines of the tile, before the thread's own.
    pub(super) fn ahead(&self, spec: &Spec) -> ([Val<'k, u32>; 2], [Val<'k, u32>; 2]) {
        let outputs = spec.outputs();
        let of = |dim: usize, each: u32| self.place[dim + 1] * each;
        (std::array::from_fn(|dim| of(dim, outputs[dim])), std::array::from_fn(|dim| of(dim, spec.stride.apart(outputs[dim]))))
    }
}
