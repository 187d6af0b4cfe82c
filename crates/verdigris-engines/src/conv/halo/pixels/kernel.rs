//! The kernel: halo boxes (pixels with their halo) come by tiled copies, every tap of the filter multiplies from them by a shifted
//! descriptor.
//!
//! One page, top to bottom: the spec, parameters, the producer, the consumers' main loop, the roles. Rows of the product are pixels of a
//! box in blocks of 64: a block is eight runs of eight neighbouring pixels of the halo box at one pitch, so that a single descriptor reads
//! it.
//!
//! Filters are either kept, all of a tile's columns for as long as the CTA lives, and then the two consumers ping-pong, one's epilogue
//! overlapping the other's main loop; or they come through a ring, a tap and a block of channels at a time, and the consumers share a tile.

use std::fmt;

use verdigris_kir::face::{Header, Kernel, LoadOptions, Role, Val, WgmmaA, build};
use verdigris_kir::inst::{MatrixType, Special, WgmmaShape};
use verdigris_kir::ir::{KernelBody, MapDecl, MapType, Target};
use verdigris_kir::params::{Divide, Map};
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::halo::HaloTile;
use verdigris_kir::tile::operand::Major;
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};
use verdigris_tensor::DType;

use super::super::geometry::{AXES, RUN};
use super::super::{SHARED_BYTES, WARPGROUP, types};
use crate::fuse::epilogue::EpilogueSpec;
use crate::layout::batch::BatchIndexArgs;
use crate::store::{Out, Store, StoreArgs, StoreSpec, Tile};

/// Warpgroups that multiply.
const CONSUMERS: u32 = 2;
/// The named barrier of the first consumer; the second's follows.
const FIRST_BARRIER: u32 = 1;
/// The named barrier at which the first consumer waits for its main loop under ping-pong; the second's follows.
const PING_PONG_BARRIER: u32 = 8;
/// Halo boxes: one is multiplied, one is on its way.
const HALO_BOXES: u32 = 2;
/// Rows of a block of the product.
pub(super) const BLOCK: u32 = 64;
/// Dims of the pixels: channels, and the axes.
const RANK: u32 = AXES as u32 + 1;

/// Everything that shapes the kernel; extents, boxes, taps, dilations and paddings are arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Spec {
    pub(super) dtype: DType,
    /// Channels of a halo box's pixel.
    pub(super) channels: u32,
    /// What is contiguous in the filter: the depth, or the columns.
    pub(super) filter: Major,
    /// Columns of a tile.
    pub(super) tile_n: u32,
    /// Groups of a tile: a share each of its channels and of its columns. More than one where filters are kept.
    pub(super) groups: u32,
    /// Blocks of a tile that one consumer multiplies.
    pub(super) blocks: u32,
    /// Stages of the ring through which filters come; none where they are kept.
    pub(super) stages: u32,
    /// What stands between sums and the result.
    pub(super) epilogue: EpilogueSpec,
}

impl fmt::Display for Spec {
    /// `conv_halo_bf16_k_c64_4x64_kept_bf16_map` and so on: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = if self.filter == Major::Depth { 'k' } else { 'r' };
        write!(f, "conv_halo_{}_{letter}_c{}_{}x{}_", self.dtype, self.channels, self.blocks, self.tile_n)?;
        if self.groups > 1 {
            write!(f, "by{}_", self.groups)?;
        }
        if self.is_kept() {
            f.write_str("kept")?;
        } else {
            write!(f, "s{}", self.stages)?;
        }
        write!(f, "_{}", self.epilogue.name())
    }
}

impl Spec {
    /// Whether filters are kept, and consumers ping-pong.
    pub(super) fn is_kept(&self) -> bool {
        self.stages == 0
    }

    /// Consumers that share a tile.
    fn sharers(&self) -> u32 {
        if self.is_kept() { 1 } else { CONSUMERS }
    }

    /// Blocks of a tile.
    pub(super) fn tile_blocks(&self) -> u32 {
        self.blocks * self.sharers()
    }

    fn map_type(&self) -> MapType {
        types(self.dtype).0
    }

    /// Halo boxes of pixels.
    pub(super) fn pixels(&self) -> HaloTile {
        HaloTile { channels: self.channels, ty: self.map_type() }
    }

    /// A group's columns of a tile, and its channels of a halo box's pixel.
    pub(super) fn group_columns(&self) -> u32 {
        self.tile_n / self.groups
    }

    pub(super) fn group_channels(&self) -> u32 {
        self.channels / self.groups
    }

    /// A tap's filter for one block of channels: rows of depth, or lines of columns in as many panels as these need. Those of several
    /// groups stand one below the other.
    pub(super) fn filter_tile(&self) -> HaloTile {
        let line = match self.filter {
            Major::Depth => self.group_channels(),
            Major::Rows => [64, 32].into_iter().find(|line| self.group_columns().is_multiple_of(*line)).unwrap_or(16),
        };
        HaloTile { channels: line, ty: self.map_type() }
    }

    /// The map of the filter: `{depth, columns, taps}` or `{columns, depth, taps}`.
    pub(super) fn filter_map(&self) -> MapDecl {
        self.filter_tile().boxed(&[if self.filter == Major::Depth { self.tile_n } else { self.channels }, 1])
    }

    /// Bytes of a tap's filter for one block of channels.
    pub(super) fn filter_bytes(&self) -> u32 {
        self.tile_n * self.group_channels() * self.map_type().bytes()
    }

    /// Instruction steps of one tap of a block of channels.
    pub(super) fn steps(&self) -> u32 {
        self.pixels().steps()
    }

    /// The epilogue store.
    pub(super) fn store(&self) -> StoreSpec {
        StoreSpec {
            out: Out::Scattered,
            transposed: false,
            tile_columns: self.tile_n,
            warpgroups: CONSUMERS,
            barrier: FIRST_BARRIER,
            epilogue: self.epilogue.clone(),
            has_sums: false,
        }
    }

    /// Room for filters and halo boxes.
    fn arena_bytes(&self) -> u32 {
        let barriers = 16 * (HALO_BOXES + self.stages.max(1)) + 64;
        (SHARED_BYTES - self.store().shared_bytes() - barriers) / HaloTile::ALIGNMENT_BYTES * HaloTile::ALIGNMENT_BYTES
    }

    /// Room for one halo box beside the filters: those that are kept are `kept` times a tap's.
    pub(super) fn halo_box_room_bytes(&self, kept: u32) -> u32 {
        let filters = u64::from(if self.is_kept() { kept } else { self.stages }) * u64::from(self.filter_bytes());
        let rest = u64::from(self.arena_bytes()).saturating_sub(filters.next_multiple_of(u64::from(HaloTile::ALIGNMENT_BYTES))) as u32;
        rest / HALO_BOXES / HaloTile::ALIGNMENT_BYTES * HaloTile::ALIGNMENT_BYTES
    }

    fn shape(&self) -> WgmmaShape {
        let (_, ty) = types(self.dtype);
        WgmmaShape { transpose_b: self.filter == Major::Rows, ..wgmma_shape(self.group_columns(), ty, ty, MatrixType::F32) }
    }

    /// Builds the kernel.
    pub(super) fn build(&self) -> KernelBody {
        let threads = WARPGROUP * (1 + CONSUMERS);
        build(Header { name: self.to_string(), target: Target::Sm90a, threads, min_ctas: 1, cluster: 1 }, |k| convolve(k, self))
    }
}

verdigris_kir::parameters! {
    /// How pixels are cut into boxes, boxes into blocks, and where taps read. Dims stand with the width first, then height, depth, images.
    pub(super) struct Walk / WalkArgs of Spec as spec {
        pub(super) pixels: Map = spec.pixels().map(RANK),
        pub(super) filter: Map = spec.filter_map(),
        /// Tiles of columns over all groups; a CTA keeps to one.
        pub(super) column_tiles: Divide,
        /// Those of a group, or of as many groups as a tile has; and the step from there to the next: in the channels that are read, in the
        /// result's columns, in the filter's depth and columns.
        pub(super) group_tiles: Divide,
        pub(super) group_steps: [u32; 4],
        /// CTAs that walk over the boxes of one tile of columns, and these boxes.
        pub(super) workers: u32,
        pub(super) boxes: u32,
        /// Boxes along the width, height and depth.
        pub(super) counts: [Divide; 3],
        /// Pixels of the result, and of a box, in each dim.
        pub(super) extents: [u32; 4],
        pub(super) box_extents: [u32; 4],
        /// Where the halo box of the box at 0 begins.
        pub(super) origin: [i32; 3],
        /// Extents of a halo box, but for images.
        pub(super) halo_box: [Divide; 3],
        pub(super) halo_box_bytes: u32,
        /// The same rounded up to where a halo box may begin.
        pub(super) halo_box_pitch_bytes: u32,
        /// Where halo boxes begin behind the filters.
        pub(super) halo_boxes_at_bytes: u32,
        /// Pixels of the halo box from one run of a block to the next.
        pub(super) run_pitch: u32,
        /// The halo box's pixel at which each block of a tile begins.
        pub(super) blocks: Vec<u32> = vec![(); spec.tile_blocks() as usize],
        pub(super) channel_blocks: u32,
        /// Instruction steps of the last block of channels.
        pub(super) last_steps: u32,
        pub(super) taps: u32,
        /// Taps along the width and height.
        pub(super) filter_width: u32,
        pub(super) filter_height: u32,
        /// How far descriptors move from a tap to the next one: in its row, to the next row, to the next plane.
        pub(super) tap_steps: [u32; 3],
        /// The first tap's position in the filter, and the step to the next.
        pub(super) first_position: u32,
        pub(super) position_step: u32,
    }
}

verdigris_kir::parameters! {
    /// All parameters of the kernel.
    pub(super) struct Halo / HaloArgs of Spec as spec {
        pub(super) walk: WalkArgs = *spec,
        pub(super) batch: BatchIndexArgs = (),
        pub(super) store: StoreArgs = spec.store(),
    }
}

/// A box: its first pixel, and image.
type Place<'k> = [Val<'k, u32>; 4];

impl<'k> Walk<'k> {
    /// The first pixel of box `index`.
    fn place(&self, index: Val<'k, u32>) -> Place<'k> {
        let (rest, w) = self.counts[0].split(index);
        let (rest, h) = self.counts[1].split(rest);
        let (n, d) = self.counts[2].split(rest);
        let boxes = [w, h, d, n];
        std::array::from_fn(|dim| boxes[dim] * self.box_extents[dim])
    }

    /// The row of the result that row `row` of a block belongs to, and whether there is one. The block begins at the halo box's pixel
    /// `block` in the box at `place`.
    fn target(&self, k: Kernel<'k>, place: &Place<'k>, block: Val<'k, u32>, row: Val<'k, u32>) -> (Val<'k, u32>, Val<'k, bool>) {
        let pixel = block + (row >> RUN.trailing_zeros()) * self.run_pitch + (row & (RUN - 1));
        let (rest, w) = self.halo_box[0].split(pixel);
        let (rest, h) = self.halo_box[1].split(rest);
        let (n, d) = self.halo_box[2].split(rest);
        let in_box = [w, h, d, n];
        // In a flat box runs go on into the halo: what stands there is not part of the result.
        let mut inside = w.lt(self.box_extents[0]);
        let mut target = k.constant(0);
        for dim in (0..4).rev() {
            let at = place[dim] + in_box[dim];
            inside = inside & in_box[dim].lt(self.box_extents[dim]) & at.lt(self.extents[dim]);
            target = target * self.extents[dim] + at;
        }
        (k.select(inside, target, 0u32), inside)
    }
}

fn convolve<'k>(k: Kernel<'k>, spec: &Spec) {
    let (pixels, filter) = (spec.pixels(), spec.filter_tile());
    let Halo { walk, batch, store } = Halo::declare(k, spec);
    let store = Store::new(k, store, spec.store());

    let arena = k.shared("filters and slabs", spec.arena_bytes(), HaloTile::ALIGNMENT_BYTES);
    let halo_boxes = Ring::new(k, HALO_BOXES, spec.sharers(), RingScope::Cta);
    let filters = (!spec.is_kept()).then(|| Ring::new(k, spec.stages, CONSUMERS, RingScope::Cta));
    let kept = spec.is_kept().then(|| {
        let barrier = k.mbarrier_array("filter is here", 1);
        barrier.arrivals().set(1);
        barrier
    });
    k.when(k.thread().eq(0), || {
        halo_boxes.init();
        filters.iter().for_each(|filter| filter.init());
        kept.iter().for_each(|barrier| barrier.init());
        [&walk.pixels, &walk.filter].into_iter().for_each(|map| k.prefetch_tensormap(map));
    });
    publish_barriers(k);
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();

    let zero = k.constant(0u32);
    let (first_box, column_tile) = walk.column_tiles.split(k.special(Special::CtaX));
    let (group, tile) = walk.group_tiles.split(column_tile);
    let [first_channel, first_result, first_depth, first_of_filter] = walk.group_steps.map(|step| group * step);
    let [first_column, filter_column] = [first_result, first_of_filter].map(|first| first + tile * spec.tile_n);
    let halo_box_at = |stage: Val<'k, u32>| arena.address() + walk.halo_boxes_at_bytes + stage * walk.halo_box_pitch_bytes;

    let load_filter = |slot: Val<'k, u32>, block: Val<'k, u32>, tap: Val<'k, u32>, barrier| {
        let position = (walk.first_position + tap * walk.position_step).signed();
        let channel = first_depth + block * spec.channels;
        match spec.filter {
            Major::Depth => {
                filter.load(slot, &walk.filter, channel, &[filter_column.signed(), position], barrier, LoadOptions::default());
            }
            Major::Rows => {
                for part in 0..spec.group_columns() / filter.channels {
                    let slot = slot + part * spec.channels * filter.row_bytes();
                    let column = filter_column + part * filter.channels;
                    filter.load(slot, &walk.filter, column, &[channel.signed(), position], barrier, LoadOptions::default());
                }
            }
        }
    };
    let load = || {
        k.when(k.elect(), || {
            let halo_box = halo_boxes.cursor();
            let ring = filters.map(|filters| filters.cursor());
            if let Some(kept) = kept {
                let full = kept.at(zero);
                full.arrive_expect_tx(walk.channel_blocks * walk.taps * spec.filter_bytes());
                k.range(walk.channel_blocks, |block| {
                    k.range(walk.taps, |tap| {
                        load_filter(arena.address() + (block * walk.taps + tap) * spec.filter_bytes(), block, tap, full);
                    });
                });
            }
            k.range_step(first_box, walk.boxes, walk.workers, |index| {
                let place = walk.place(index);
                let mut corner: Vec<Val<'k, i32>> = walk.origin.iter().zip(place).map(|(&origin, at)| origin + at.signed()).collect();
                corner.push(place[3].signed());
                k.range(walk.channel_blocks, |block| {
                    let full = halo_box.acquire(walk.halo_box_bytes);
                    let channel = first_channel + block * spec.channels;
                    pixels.load(halo_box_at(halo_box.stage()), &walk.pixels, channel, &corner, full, LoadOptions::default());
                    halo_box.advance();
                    let Some(ring) = ring else { return };
                    k.range(walk.taps, |tap| {
                        let full = ring.acquire(spec.filter_bytes());
                        load_filter(arena.address() + ring.stage() * spec.filter_bytes(), block, tap, full);
                        ring.advance();
                    });
                });
            });
        });
    };

    let multiply = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let sums: Vec<Fragment<'k, f32>> = (0..spec.blocks).map(|_| Fragment::unset(k, spec.tile_n)).collect();
        let own_block = |block: u32| match spec.is_kept() {
            true => walk.blocks[block as usize],
            false => k.select(warpgroup.eq(0), walk.blocks[block as usize], walk.blocks[(spec.blocks + block) as usize]),
        };
        let blocks: Vec<Val<'k, u32>> = (0..spec.blocks).map(own_block).collect();
        let block_starts: Vec<Val<'k, u32>> = blocks.iter().map(|&block| pixels.pixels(block)).collect();
        let a_high = pixels.descriptor_high(walk.run_pitch);
        let b_high = filter.descriptor_high(k.constant(8));
        let b_start = filter.descriptor_base(arena.address(), spec.filter, spec.channels * filter.row_bytes());
        // A group has its own steps of the depth, and its own columns.
        let steps_of_group = spec.steps() / spec.groups;
        let b_step = |step: u32| match spec.filter {
            Major::Depth => step / steps_of_group * spec.group_columns() * filter.pixel_advance() + filter.advance(step % steps_of_group),
            Major::Rows => 16 * step * filter.pixel_advance(),
        };
        let registers = (spec.group_columns() / 2) as usize;
        let halo_box = halo_boxes.cursor();
        let ring = filters.map(|filters| filters.cursor());
        let [previous_halo_box, previous_filter] = ["previous_slab", "previous_filter"].map(|name| k.var_named(name, 0u32));
        let [tap_w, tap_h, shift, kept_filter] = ["tap_w", "tap_h", "shift", "filter"].map(|name| k.var_named(name, 0u32));
        let add = k.var_named("add", k.thread().ge(0u32));
        if let Some(kept) = kept {
            kept.at(zero).wait(0);
        }

        let one_tile = |index: Val<'k, u32>| {
            kept_filter.set(b_start);
            if spec.is_kept() {
                k.barrier_sync(warpgroup + PING_PONG_BARRIER, CONSUMERS * WARPGROUP);
            }
            k.range(walk.channel_blocks, |block| {
                halo_box.wait();
                let a_start = pixels.descriptor_base(halo_box_at(halo_box.stage()), Major::Depth, zero);
                shift.set(a_start);
                tap_w.set(0);
                tap_h.set(0);
                let over_taps = |steps: u32| {
                    k.range(walk.taps, |tap| {
                        let b_low = match ring {
                            None => kept_filter.get(),
                            Some(ring) => {
                                ring.wait();
                                b_start + ring.stage() * (spec.filter_bytes() >> 4)
                            }
                        };
                        let first = block.eq(0) & tap.eq(0);
                        add.set(!first);
                        k.wgmma_fence();
                        for step in 0..steps {
                            let b_descriptor = k.join32(b_low + b_step(step), b_high);
                            for (start, sum) in block_starts.iter().zip(&sums) {
                                let a_descriptor = k.join32(shift + *start + pixels.advance(step), a_high);
                                let adds = if step % steps_of_group == 0 { add.get() } else { k.constant(true) };
                                let own = &sum.registers()[(step / steps_of_group) as usize * registers..][..registers];
                                k.wgmma(spec.shape(), own, WgmmaA::Shared(a_descriptor), b_descriptor, adds);
                            }
                        }
                        k.wgmma_commit();
                        // One group stays in flight while what the groups before it read goes back.
                        k.wgmma_wait(1);
                        k.when(tap.eq(0) & block.gt(0), || halo_box.release(previous_halo_box, thread));
                        match ring {
                            None => kept_filter.set(kept_filter + (spec.filter_bytes() >> 4)),
                            Some(ring) => {
                                k.when(!first, || ring.release(previous_filter, thread));
                                previous_filter.set(ring.stage());
                                ring.advance();
                            }
                        }
                        let (row_ends, plane_ends) = ((tap_w + 1).eq(walk.filter_width), (tap_h + 1).eq(walk.filter_height));
                        let to_next_row = k.select(plane_ends, walk.tap_steps[2], walk.tap_steps[1]);
                        shift.set(shift + k.select(row_ends, to_next_row, walk.tap_steps[0]));
                        tap_h.set(k.select(row_ends, k.select(plane_ends, 0u32, tap_h + 1), tap_h));
                        tap_w.set(k.select(row_ends, 0u32, tap_w + 1));
                    });
                };
                // The last block of channels may be part of one: what lies beyond is zero, and is not multiplied. The assembler wants
                // products in straight lines, so each number of steps has its own.
                let is_last = (block + 1).eq(walk.channel_blocks);
                let steps_here = k.select(is_last, walk.last_steps, spec.steps());
                (1..=spec.steps()).for_each(|steps| k.when(steps_here.eq(steps), || over_taps(steps)));
                previous_halo_box.set(halo_box.stage());
                halo_box.advance();
            });
            if spec.is_kept() {
                // The other begins when this one has seen all of its halo boxes: phases are told apart by parity.
                k.when((index + walk.workers).lt(walk.boxes), || {
                    k.barrier_arrive((warpgroup ^ 1) + PING_PONG_BARRIER, CONSUMERS * WARPGROUP);
                });
            }
            k.wgmma_wait(0);
            halo_box.release(previous_halo_box, thread);
            if let Some(ring) = ring {
                ring.release(previous_filter, thread);
            }
            let place = walk.place(index);
            let tile = Tile { row: zero, column: first_column, lead: None, batch: zero, indices: batch.split(zero), warpgroup, thread };
            for (sum, &block) in sums.iter().zip(&blocks) {
                store.write_placed(std::slice::from_ref(sum), &tile, &|row| walk.target(k, &place, block, row));
            }
        };
        if spec.is_kept() {
            // Halo boxes of the other's tiles are skipped.
            k.when(warpgroup.eq(1), || {
                k.barrier_arrive(PING_PONG_BARRIER, CONSUMERS * WARPGROUP);
                halo_box.skip(walk.channel_blocks);
            });
            k.range_step(first_box + warpgroup * walk.workers, walk.boxes, walk.workers * CONSUMERS, |index| {
                one_tile(index);
                halo_box.skip(walk.channel_blocks);
            });
        } else {
            k.range_step(first_box, walk.boxes, walk.workers, one_tile);
        }
        store.finish(thread);
    };

    let load_warp = || k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: &load }]);
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(40), body: &load_warp },
        Role { name: "consumer", warps: 4 * CONSUMERS, registers: Some(232), body: &multiply },
    ]);
}
