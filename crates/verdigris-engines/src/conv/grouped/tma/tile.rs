//! Which tiles a CTA takes, how they come to shared memory, and how a warp reads them there.

use std::cell::RefCell;
use std::collections::BTreeMap;

use verdigris_kir::face::{Divisor, Kernel, LoadOptions, Role, TensorMap, Val};
use verdigris_kir::ir::Swizzle;
use verdigris_kir::params::Divide;
use verdigris_kir::tile::ring::Cursor;

use super::super::CHUNK;
use super::spec::{STRIP, Spec, WARPS};

verdigris_kir::parameters! {
    /// How a launch is cut. Channel tiles of all their channels come first, side by side; then the last one, which has fewer and needs
    /// fewer CTAs.
    #[derive(Clone, Copy)]
    pub(super) struct TilesValues / TilesArguments of () as _spec {
        pub(super) across: Divide,
        pub(super) down: Divide,
        pub(super) count: u32,
        pub(super) whole_channel_tiles: Divide,
        /// CTAs of a whole channel tile, and of the last one.
        pub(super) whole_parts: u32,
        pub(super) last_parts: u32,
        /// Row and column of the pixel that tile 0 reads first.
        pub(super) first_read: [i32; 2],
    }
}

/// The tiles of a launch. A CTA has one channel tile and goes over its tiles grid-stride.
#[derive(Clone, Copy)]
pub(super) struct Tiles<'k> {
    across: Divisor<'k>,
    down: Divisor<'k>,
    count: Val<'k, u32>,
    /// The CTA's number among those of its channel tile, and how many these are.
    pub(super) part: Val<'k, u32>,
    parts: Val<'k, u32>,
    /// The first channel.
    pub(super) channel: Val<'k, u32>,
    /// Row and column of the pixel that tile 0 reads first.
    first_read: [Val<'k, i32>; 2],
}

/// A tile.
#[derive(Clone, Copy)]
pub(super) struct Tile<'k> {
    pub(super) image: Val<'k, u32>,
    /// Row and column of the first pixel that is read.
    pub(super) read: [Val<'k, i32>; 2],
    /// Row and column of its first pixel.
    pub(super) first: [Val<'k, u32>; 2],
}

impl<'k> Tiles<'k> {
    pub(super) fn new(k: Kernel<'k>, spec: &Spec, values: TilesValues<'k>) -> Self {
        let TilesValues { across, down, count, whole_channel_tiles, whole_parts, last_parts, first_read } = values;
        let (cta, whole) = (k.cta(), whole_channel_tiles.value() * whole_parts);
        let is_last = cta.ge(whole);
        let (part, channel_tile) = whole_channel_tiles.split(cta);
        Tiles {
            across,
            down,
            count,
            part: k.select(is_last, cta - whole, part),
            parts: k.select(is_last, last_parts, whole_parts),
            channel: k.select(is_last, whole_channel_tiles.value(), channel_tile) * spec.channels,
            first_read,
        }
    }

    /// Runs `body` for the CTA's tiles.
    pub(super) fn each(&self, k: Kernel<'k>, spec: &Spec, body: impl Fn(Tile<'k>)) {
        k.range_step(self.part, self.count, self.parts, |tile| {
            let (rest, column) = self.across.split(tile);
            let (image, row) = self.down.split(rest);
            let place = [row * spec.shape.rows, column * spec.shape.columns()];
            let [step, spread] = [spec.stride.step(), spec.stride.spread()];
            body(Tile {
                image: image * spec.shape.images,
                read: std::array::from_fn(|dim| (place[dim] * step).signed() + self.first_read[dim]),
                first: place.map(|place| place * spread),
            });
        });
    }

    /// Coordinates of a box of the tensor maps.
    pub(super) fn coordinates(&self, image: Val<'k, u32>, [row, column]: [Val<'k, i32>; 2]) -> [Val<'k, i32>; 4] {
        [self.channel.signed(), column, row, image.signed()]
    }

    /// The warp that loads: brings one tile after the other into the ring. `gradients` are what else a stage holds.
    pub(super) fn load(
        &self,
        k: Kernel<'k>,
        spec: &Spec,
        stages: Val<'k, u32>,
        cursor: &Cursor<'k>,
        activations: &TensorMap<'k>,
        gradients: Option<&TensorMap<'k>>,
    ) {
        k.when(k.elect(), || {
            k.prefetch_tensormap(activations);
            self.each(k, spec, |tile| {
                let full = cursor.acquire(spec.loaded_bytes());
                let to = stages + cursor.stage() * spec.stage_bytes();
                k.tma_load(to, activations, &self.coordinates(tile.image, tile.read), full, LoadOptions::default());
                if let Some(gradients) = gradients {
                    let to = to + spec.read_bytes();
                    let first = tile.first.map(|at| at.signed());
                    k.tma_load(to, gradients, &self.coordinates(tile.image, first), full, LoadOptions::default());
                }
                cursor.advance();
            });
        });
    }
}

/// The roles of a CTA: the warps that multiply, and the one that loads.
pub(super) fn roles(k: Kernel<'_>, spec: &Spec, multiply: &dyn Fn(), load: &dyn Fn()) {
    let (many, few) = spec.registers().unzip();
    let one = || k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: load }]);
    k.warp_roles(&[
        Role { name: "multiply", warps: WARPS, registers: many, body: multiply },
        Role { name: "loading", warps: spec.loading_warps(), registers: few, body: &one },
    ]);
}

/// Where a warp works: its chunks of the channel tile, and which of the units of these it takes.
#[derive(Clone, Copy)]
pub(super) struct ThreadCoordinates<'k> {
    /// The first chunk.
    pub(super) chunk: Val<'k, u32>,
    /// Its number among the warps that share these chunks.
    pub(super) turn: Val<'k, u32>,
}

impl<'k> ThreadCoordinates<'k> {
    pub(super) fn of_warp(k: Kernel<'k>, spec: &Spec) -> Self {
        let across = spec.across();
        ThreadCoordinates { chunk: (k.warp() & (across - 1)) * spec.chunks(), turn: k.warp() >> across.ilog2() }
    }

    /// Runs `body` for image and strip of each of the warp's units.
    pub(super) fn each_unit(&self, k: Kernel<'k>, spec: &Spec, body: impl Fn(Val<'k, u32>, Val<'k, u32>)) {
        let turns = spec.shape.units() / spec.sharing();
        let one = |turn: Val<'k, u32>| {
            let unit = self.turn + turn * spec.sharing();
            body(unit >> spec.shape.strips.ilog2(), unit & (spec.shape.strips - 1));
        };
        if turns == 1 { one(k.constant(0)) } else { k.range(turns, one) }
    }
}

/// Rows of matrices in a swizzled tile, each lane its own: the pattern of a row repeats after eight, so the addresses of all pixels that
/// differ by constants are eight registers and offsets.
pub(super) struct Rows<'k> {
    k: Kernel<'k>,
    /// The lane's row of the first matrix, before the swizzle.
    first: Val<'k, u32>,
    pixel_bytes: u32,
    swizzle: Swizzle,
    swizzled: RefCell<BTreeMap<u32, Val<'k, u32>>>,
}

impl<'k> Rows<'k> {
    pub(super) fn new(k: Kernel<'k>, spec: &Spec, first: Val<'k, u32>) -> Self {
        Rows { k, first, pixel_bytes: spec.pixel_bytes(), swizzle: spec.swizzle(), swizzled: RefCell::default() }
    }

    /// Register and offset of the row `pixels` further on.
    pub(super) fn at(&self, pixels: u32) -> (Val<'k, u32>, i64) {
        let phase = pixels % 8;
        let address = *self.swizzled.borrow_mut().entry(phase).or_insert_with(|| {
            let linear = self.first + phase * self.pixel_bytes;
            let mask = if self.swizzle == Swizzle::B128 { 0x70u32 } else { 0x30 };
            linear ^ ((linear >> 3) & mask)
        });
        (address, i64::from((pixels - phase) * self.pixel_bytes))
    }

    /// Reads `count` matrices.
    fn read(&self, pixels: u32, count: u8, transpose: bool) -> Vec<Val<'k, u32>> {
        let (address, offset) = self.at(pixels);
        self.k.ldmatrix(count, transpose, address, offset)
    }
}

/// The activations of a unit, as matrices of eight pixels of a row by eight channels. Each is read once.
pub(super) struct Window<'a, 'k> {
    spec: &'a Spec,
    /// Of four matrices: both rows of a pair, and both chunks, or where a warp has one chunk, two columns.
    fours: Rows<'k>,
    /// Of a column that has no second one: both rows of a pair.
    pairs: Rows<'k>,
    transpose: bool,
    /// By row, column and chunk.
    known: RefCell<BTreeMap<(u32, u32, u32), Val<'k, u32>>>,
}

impl<'a, 'k> Window<'a, 'k> {
    /// Of the unit at `image` and `strip` of the tile at `stage`.
    pub(super) fn new(
        k: Kernel<'k>,
        spec: &'a Spec,
        stage: Val<'k, u32>,
        chunk: Val<'k, u32>,
        [image, strip]: [Val<'k, u32>; 2],
        transpose: bool,
    ) -> Self {
        let [rows, columns] = spec.read();
        let (lane, step) = (k.lane(), spec.stride.step());
        let (low, high) = ((lane >> 3) & 1u32, lane >> 4);
        let pixel = |row: Val<'k, u32>| (image * rows + row) * columns + (strip * STRIP + (lane & (STRIP - 1))) * step;
        let two_chunks = spec.chunks() == 2;
        let of = |row: Val<'k, u32>, column: Val<'k, u32>, chunk: Val<'k, u32>| {
            Rows::new(k, spec, stage + (pixel(row) + column) * spec.pixel_bytes() + chunk * (2 * CHUNK))
        };
        let zero = k.constant(0);
        let fours = if two_chunks { of(high, zero, chunk + low) } else { of(high, low, chunk) };
        Window { spec, fours, pairs: of(low, zero, chunk), transpose, known: RefCell::default() }
    }

    /// The matrix of a row, from a column on, of one of the warp's chunks. Rows are read in pairs.
    pub(super) fn matrix(&self, row: u32, column: u32, chunk: u32) -> Val<'k, u32> {
        if let Some(&known) = self.known.borrow().get(&(row, column, chunk)) {
            return known;
        }
        let [rows, columns] = self.spec.read();
        let first_row = row & !1;
        let has_pair = first_row + 1 < rows;
        let mut found = Vec::new();
        if self.spec.chunks() == 2 {
            let read = self.fours.read(first_row * columns + column, if has_pair { 4 } else { 2 }, self.transpose);
            found.extend((0..).zip(read).map(|(i, value)| ((first_row + i / 2, column, i % 2), value)));
        } else {
            let first = column & !1;
            if first + 1 < self.spec.reach() {
                let read = self.fours.read(first_row * columns + first, if has_pair { 4 } else { 2 }, self.transpose);
                found.extend((0..).zip(read).map(|(i, value)| ((first_row + i / 2, first + i % 2, 0), value)));
            } else {
                let read = self.pairs.read(first_row * columns + first, if has_pair { 2 } else { 1 }, self.transpose);
                found.extend((0..).zip(read).map(|(i, value)| ((first_row + i, first, 0), value)));
            }
        }
        let mut known = self.known.borrow_mut();
        known.extend(found);
        known[&(row, column, chunk)]
    }
}
