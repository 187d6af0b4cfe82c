//! fprop: boxes of 256 pixels by a tile of y's channels.
//!
//! A CTA keeps its channels' filters in shared memory for as long as it lives and walks over boxes of pixels. The patch of the next box is
//! on its way while one is multiplied. A warp's fragments of pixels are read from the patch as they lie there: four bytes of depth for each
//! of eight pixels an instruction, at the places that the table of the depth names. Neighbouring pixels share most of what they read, so
//! the lanes of an instruction meet few banks twice.
//!
//! Channels are dealt out to the columns of the matrix instruction such that a thread's sums over 32 channels are eight neighbours, which
//! it stores at once.

use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::inst::{Cache, MatrixType, MmaShape, Special};
use verdigris_kir::ir::KernelBody;
use verdigris_kir::program::KernelRef;

use super::super::geometry::{NO_ELEMENT, Reads, STEP_BYTES, STEP_ENTRIES};
use super::super::patch::Source;
use crate::fuse::epilogue::{Epilogue, EpilogueSpec};

/// Pixels of a box.
pub(super) const BOX_PIXELS: u32 = 256;
/// Patches that a CTA holds: one is multiplied, one is on its way.
const STAGES: u32 = 2;
/// Bytes of depth of a step, and of its entries in the table.
const STEP: u32 = STEP_BYTES as u32;
const TABLE_STEP_BYTES: u32 = 8 * STEP_ENTRIES as u32;
/// Words of the filter that a thread has on their way at a time.
const ON_THEIR_WAY: u32 = 8;

/// What a CTA has room for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Size {
    /// Several CTAs an SM.
    Small,
    /// One CTA an SM.
    Large,
}

/// The part of a spec that is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Tile {
    /// Channels of y: 32 or 64.
    pub(super) channels: u32,
    pub(super) warps: u32,
    pub(super) size: Size,
}

impl Tile {
    /// By number; numbers are never reused, for plan caches hold them.
    pub(super) const ALL: [Tile; 5] = [
        Tile { channels: 64, warps: 4, size: Size::Small },
        Tile { channels: 32, warps: 4, size: Size::Small },
        Tile { channels: 64, warps: 8, size: Size::Large },
        Tile { channels: 32, warps: 8, size: Size::Large },
        Tile { channels: 64, warps: 8, size: Size::Small },
    ];

    /// Whether there are kernels for patches that are brought element by element.
    pub(super) fn is_general(self) -> bool {
        self.warps == 4 && self.channels == 64 || self.channels == 32 && self.size == Size::Large
    }

    /// Blocks of 16 pixels of a warp.
    const fn pixel_blocks(self) -> u32 {
        BOX_PIXELS / 16 / self.warps
    }

    /// Bytes of shared memory for the filters.
    const fn filter_bytes(self, element_bytes: u32) -> u32 {
        match self.size {
            Size::Small => 12 * 1024 * element_bytes,
            Size::Large => 100 * 1024,
        }
    }

    /// Bytes of shared memory for one patch.
    pub(super) const fn patch_bytes(self, element_bytes: u32) -> u32 {
        match self.size {
            Size::Small => 6 * 1024 * element_bytes,
            Size::Large => 27 * 1024,
        }
    }

    /// The most steps that filters of this many channels have room for.
    pub(super) const fn most_steps(self, element_bytes: u32) -> u32 {
        (self.filter_bytes(element_bytes) / self.channels - 16) / STEP
    }

    /// Bytes of shared memory in all.
    pub(super) const fn shared_bytes(self, element_bytes: u32) -> u32 {
        let table = self.most_steps(element_bytes) * TABLE_STEP_BYTES;
        self.filter_bytes(element_bytes) + table + STAGES * self.patch_bytes(element_bytes)
    }

    /// CTAs that share an SM.
    pub(super) const fn ctas(self) -> u32 {
        match self.size {
            Size::Small => 2,
            Size::Large => 1,
        }
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Spec {
    pub(super) operands: MatrixType,
    pub(super) reads: Reads,
    /// Patches are brought by asynchronous copies.
    pub(super) copies: bool,
    pub(super) tile: Tile,
    pub(super) epilogue: EpilogueSpec,
}

impl Spec {
    pub(super) fn name(&self) -> String {
        let reads = match self.reads {
            Reads::Pairs => "pairs",
            Reads::Singles => "singles",
            Reads::Words => "words",
        };
        let (copies, size) = (if self.copies { "async" } else { "direct" }, if self.tile.size == Size::Small { "small" } else { "large" });
        format!(
            "conv_small_fprop_{}_{BOX_PIXELS}x{}_w{}_{reads}_{copies}_{size}_{}",
            self.operands.ptx(),
            self.tile.channels,
            self.tile.warps,
            self.epilogue.name()
        )
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let (threads, min_ctas) = (32 * self.tile.warps, self.tile.ctas());
        let target = self.epilogue.target().with_room(self.tile.shared_bytes(self.element_bytes()));
        let header = Header { name: self.name(), target, threads, min_ctas, cluster: 1 };
        build(header, |k| fprop(k, self))
    }

    pub(super) fn element_bytes(&self) -> u32 {
        self.operands.bits() / 8
    }
}

/// A step of the matrix instruction over operands of this type.
pub(in super::super) fn shape(operands: MatrixType) -> MmaShape {
    let k = STEP * 8 / operands.bits();
    MmaShape { m: 16, n: 8, k, a: operands, b: operands, d: MatrixType::F32, saturate: false, sparse: false }
}

/// The filters of a CTA's channels, and the table of the depth, in shared memory.
struct Filters<'k> {
    k: Kernel<'k>,
    /// Where a lane's rows of a pair of column blocks begin.
    rows: Vec<Val<'k, u32>>,
    /// Where a lane's entries begin.
    table: Val<'k, u32>,
}

impl<'k> Filters<'k> {
    /// Brings them there; a barrier of the CTA has to follow. Takes the parameters.
    fn load(k: Kernel<'k>, spec: &Spec, first_channel: Val<'k, u32>, channels: Val<'k, u32>, all_steps: Val<'k, u32>) -> Self {
        let element_bytes = spec.element_bytes();
        let tile = spec.tile.channels;
        let table_in = k.input("table", 16);
        let elements_in = k.input("filter_elements", 8);
        let filter = k.input("filter", element_bytes);
        let channel_bytes = k.scalar::<u64>("channel_bytes");
        let row_words = k.divisor("row_words");
        let rows = k.shared("filters", spec.tile.filter_bytes(element_bytes), 128).address();
        let table = k.shared("table", spec.tile.most_steps(element_bytes) * TABLE_STEP_BYTES, 16).address();
        // An odd number of 16-byte chunks, so that eight rows stand in different banks.
        let pitch = all_steps * STEP + 16;

        k.range_step(k.thread() * 16, all_steps * TABLE_STEP_BYTES, k.threads() * 16, |at| {
            let words = k.ld_global_vector::<u32>(table_in.address() + at.widen(), 0, 4, Cache::Default);
            k.st_shared_vector(table + at, 0, &words);
        });
        let words = row_words.value() * tile;
        k.range_step(k.thread(), words, k.threads() * ON_THEIR_WAY, |first| {
            let places: Vec<_> = (0..ON_THEIR_WAY)
                .map(|i| {
                    let word = first + k.threads() * i;
                    let (row, at) = row_words.split(word.min(words - 1));
                    // Of 32 channels, columns 2t and 2t + 1 of block j hold channels 8t + 2j and the next.
                    let column = row & 7u32;
                    let channel = (row & !31u32) + ((column >> 1) << 3) + ((row >> 2) & 6u32) + (column & 1u32);
                    (word, row * pitch + at * 4, at, first_channel + channel)
                })
                .collect();
            let offsets: Vec<Vec<Val<'k, u32>>> = places
                .iter()
                .map(|&(_, _, at, _)| {
                    if element_bytes == 2 {
                        k.ld_global_vector::<u32>(elements_in.at(at, 8), 0, 2, Cache::Default)
                    } else {
                        vec![k.ld_global::<u32>(elements_in.at(at, 4), 0)]
                    }
                })
                .collect();
            // Where there is no element the filter's first is read and thrown away.
            let from = |offset: Val<'k, u32>, channel: Val<'k, u32>| {
                let exists = offset.ne(NO_ELEMENT) & channel.lt(channels);
                let address = filter.address() + k.select(exists, channel, 0u32).widen() * channel_bytes;
                (address + k.select(exists, offset, 0u32).widen(), exists)
            };
            let values: Vec<Val<'k, u32>> = if element_bytes == 2 {
                let halves: Vec<Vec<Val<'k, u16>>> = (places.iter().zip(&offsets))
                    .map(|(&(_, _, _, channel), offsets)| {
                        let half = |&offset: &Val<'k, u32>| {
                            let (address, exists) = from(offset, channel);
                            k.select(exists, k.ld_global::<u16>(address, 0), 0u16)
                        };
                        offsets.iter().map(half).collect()
                    })
                    .collect();
                halves.iter().map(|pair| k.join16(pair[0], pair[1])).collect()
            } else {
                (places.iter().zip(&offsets))
                    .map(|(&(_, _, _, channel), offsets)| {
                        let (address, exists) = from(offsets[0], channel);
                        k.select(exists, k.ld_global::<u32>(address, 0), 0u32)
                    })
                    .collect()
            };
            for (&(word, to, ..), value) in places.iter().zip(values) {
                k.when(word.lt(words), || k.st_shared(rows + to, 0, value));
            }
        });

        // Four 8×8 matrices at a time: both halves of a step of eight columns, then of the next eight.
        let lane = k.lane();
        let (within, matrix) = (lane & 7u32, lane >> 3);
        let row = (matrix >> 1) * 8 + within;
        let rows = (0..tile / 16).map(|pair| rows + (row + 16 * pair) * pitch + (matrix & 1u32) * 16).collect();
        Filters { k, rows, table: table + (lane & 3u32) * 16 }
    }

    /// Place and mask of the lane's four bytes of both halves of a step.
    fn entries(&self, step: Val<'k, u32>) -> [[Val<'k, u32>; 2]; 2] {
        let words = self.k.ld_shared_vector::<u32>(self.table + step * TABLE_STEP_BYTES, 0, 4);
        [[words[0], words[1]], [words[2], words[3]]]
    }

    /// The fragments of a step, two column blocks each.
    fn fragments(&self, step: Val<'k, u32>) -> Vec<Vec<Val<'k, u32>>> {
        self.rows.iter().map(|&row| self.k.ldmatrix(4, false, row + step * STEP, 0)).collect()
    }
}

/// Four bytes of depth of a pixel.
fn gather<'k>(k: Kernel<'k>, reads: Reads, pixel: Val<'k, u32>, [place, mask]: [Val<'k, u32>; 2]) -> Val<'k, u32> {
    match reads {
        Reads::Pairs | Reads::Words => k.ld_shared::<u32>(pixel + place, 0) & mask,
        Reads::Singles => {
            let low = k.ld_shared::<u16>(pixel + (place & 0xffffu32), 0);
            let high = k.ld_shared::<u16>(pixel + (place >> 16), 0);
            k.join16(low, high) & mask
        }
    }
}

fn fprop<'k>(k: Kernel<'k>, spec: &Spec) {
    let element_bytes = spec.element_bytes();
    let source = Source::declare(k, element_bytes, spec.copies);
    let ctas = k.divisor("ctas");
    let channels = k.scalar::<u32>("channels");
    let (steps, k_tiles) = (k.scalar::<u32>("steps"), k.scalar::<u32>("slabs"));
    let k_tiles_across = k.divisor("slabs_across");
    let k_tile_taps = ["slab_depth", "slab_rows"].map(|name| k.scalar::<u32>(name));
    let first_channel = k.special(Special::CtaY) * spec.tile.channels;
    let filters = Filters::load(k, spec, first_channel, channels, steps * k_tiles);
    let eight_at_once = k.scalar::<u32>("eight_at_once");
    let epilogue = spec.epilogue.declare_conv::<f32>(k);

    let patch_bytes = spec.tile.patch_bytes(element_bytes);
    let patches = k.shared("patches", STAGES * patch_bytes, 128).address();
    let blocks = spec.tile.pixel_blocks();
    let lane = k.lane();
    let first_pixel = k.warp() * (16 * blocks) + (lane >> 2);
    let pixel = |block: u32, half: u32| first_pixel + (16 * block + 8 * half);
    let offsets: Vec<[Val<'k, u32>; 2]> = (0..blocks).map(|block| [0, 1].map(|half| source.offset(pixel(block, half)))).collect();
    let sums: Vec<Vec<[Var<'k, f32>; 4]>> =
        (0..blocks).map(|_| (0..spec.tile.channels / 8).map(|_| [(); 4].map(|()| k.var(0.0f32))).collect()).collect();

    // What is brought next, and what is multiplied: a box and one of its K-tiles.
    let step_on = |number: Var<'k, u32>, k_tile: Var<'k, u32>| {
        let next = k_tile + 1;
        let is_last = next.eq(k_tiles);
        number.set(k.select(is_last, number + ctas.value(), number));
        k_tile.set(k.select(is_last, 0u32, next));
    };
    let (next_box, next_k_tile) = (k.var_named("next_box", k.cta()), k.var_named("next_slab", 0u32));
    let bring = |stage: Val<'k, u32>| {
        let (depth, row) = k_tiles_across.split(next_k_tile.get());
        let pixels = source.at(next_box.get());
        source.load(&pixels, [depth * k_tile_taps[0], row * k_tile_taps[1]], patches + stage * patch_bytes);
        step_on(next_box, next_k_tile);
    };
    let (number, k_tile) = (k.var_named("box", k.cta()), k.var_named("slab", 0u32));
    let turns = (ctas.quotient(source.boxes - 1 - k.cta()) + 1) * k_tiles;

    bring(k.constant(0));
    k.cp_async_commit();
    k.range(turns, |turn| {
        // This patch has arrived, for all threads; and all have done with the one before, whose place the next one takes.
        k.cp_async_wait(0);
        k.bar_sync();
        k.when((turn + 1).lt(turns), || bring((turn + 1) & 1u32));
        k.cp_async_commit();

        let pixels = source.at(number.get());
        let start = patches + (turn & 1u32) * patch_bytes + source.start_bytes(&pixels);
        let starts: Vec<[Val<'k, u32>; 2]> = offsets.iter().map(|block| block.map(|offset| start + offset)).collect();
        let first_step = k_tile * steps;
        k.range_unrolled(steps, 2, |step| {
            let step = first_step + step;
            let entries = filters.entries(step);
            let columns = filters.fragments(step);
            for (line, block) in sums.iter().zip(&starts) {
                let rows: Vec<Val<'k, u32>> =
                    entries.iter().flat_map(|&entry| block.map(|pixel| gather(k, spec.reads, pixel, entry))).collect();
                for (j, sum) in line.iter().enumerate() {
                    k.mma(shape(spec.operands), &rows, &columns[j / 2][j % 2 * 2..][..2], sum);
                }
            }
        });
        k.when((k_tile + 1).eq(k_tiles), || {
            let channel = first_channel + ((lane & 3u32) << 3);
            let visit = |by_eights: bool| {
                for (block, line) in (0..).zip(&sums) {
                    for half in 0..2 {
                        let ([n, d, h, w], inside) = source.place(&pixels, pixel(block, half));
                        k.when(inside, || {
                            let pixel_store = PixelStore { k, epilogue: &epilogue, pixel: [n, d, h, w], channel, channels };
                            let pairs: Vec<[Var<'k, f32>; 2]> =
                                line.iter().map(|sums| [0, 1].map(|odd| sums[2 * half as usize + odd])).collect();
                            if by_eights { pixel_store.store_eights(spec, &pairs) } else { pixel_store.store(&pairs) }
                        });
                    }
                }
            };
            k.when_else(eight_at_once.ne(0), || visit(true), || visit(false));
            sums.iter().flatten().flatten().for_each(|sum| sum.set(0.0f32));
        });
        step_on(number, k_tile);
    });
}

/// Where the sums of a pixel go.
struct PixelStore<'e, 'k> {
    k: Kernel<'k>,
    epilogue: &'e Epilogue<'k, f32>,
    pixel: [Val<'k, u32>; 4],
    /// The first of this thread's eights of channels; the next ones are 32 further on.
    channel: Val<'k, u32>,
    channels: Val<'k, u32>,
}

impl<'k> PixelStore<'_, 'k> {
    /// Stores a pixel's sums one by one: pairs of neighbours, four for each eight.
    fn store(&self, sums: &[[Var<'k, f32>; 2]]) {
        let place = self.epilogue.at_pixel(self.pixel, self.channel);
        for (right, &sum) in (0..).flat_map(|eight| (0..8).map(move |i| 32 * eight + i)).zip(sums.iter().flatten()) {
            self.k.when((self.channel + right).lt(self.channels), || place.store(place.apply(sum.get(), right), right));
        }
    }

    /// The same by eights, which are inside or outside as a whole.
    fn store_eights(&self, spec: &Spec, sums: &[[Var<'k, f32>; 2]]) {
        let place = self.epilogue.at_pixel(self.pixel, self.channel);
        for (eight, pairs) in (0..).zip(sums.chunks(4)) {
            let right = 32 * eight;
            self.k.when((self.channel + right).lt(self.channels), || {
                let values: Vec<Val<'k, f32>> = (0..)
                    .zip(pairs)
                    .flat_map(|(i, pair)| {
                        let right = right + 2 * i;
                        if spec.epilogue.pairs {
                            place.apply_pair(pair.map(|sum| sum.get()), right)
                        } else {
                            [place.apply(pair[0].get(), right), place.apply(pair[1].get(), right + 1)]
                        }
                    })
                    .collect();
                place.store_eight(std::array::from_fn(|i| values[i]), right);
            });
        }
    }
}
