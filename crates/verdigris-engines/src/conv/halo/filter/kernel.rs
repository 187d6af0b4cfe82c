//! The kernel: boxes of dy and halo boxes of x through a ring, every tap of a halo box by its first row, sums in registers from the first
//! box to the last.
//!
//! One page, top to bottom: the spec, parameters and shared memory, the producer, the warpgroups that multiply, the roles.

use std::fmt;

use verdigris_kir::face::{Header, Kernel, Role, Val, WgmmaA, build};
use verdigris_kir::inst::{Cache, MatrixType, WgmmaShape};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Map, Read};
use verdigris_kir::program::KernelRef;
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::halo::HaloTile;
use verdigris_kir::tile::operand::Major;
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};
use verdigris_tensor::DType;

use super::super::geometry::{AXES, Axes, BOX_AXES};
use super::super::{SHARED_BYTES, WARPGROUP, types};
use super::cluster_split_k::{ClusterSplitK, ClusterSplitKArgs, ClusterSplitKSpec, Taps};
use super::cover::{Cover, PixelBox, Stride, StrideValues, position};
use crate::split_k::reduction::{PartTile, Parts, PartsArgs};

/// Warpgroups that multiply.
pub(super) const CONSUMERS: u32 = 3;
/// Channels of dy that a CTA takes: the rows of one instruction.
pub(super) const ROWS: u32 = 64;
/// Shared memory for barriers.
const BARRIER_BYTES: u32 = 1024;
/// Registers of a producer's and of a consumer's thread.
const REGISTERS: (u32, u32) = (32, 160);
/// Bytes of a group, and of each of its units, in the table of taps.
const GROUP_BYTES: u32 = 16;
const UNIT_BYTES: u32 = 16;
/// Steps of sixteen pixels that are written out one after the other.
const UNROLL: u32 = 4;

/// Everything that shapes the kernel; extents, filters, dilations, paddings and boxes are arguments.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Spec {
    /// Of x and dy: bf16 or f16.
    pub(super) dtype: DType,
    /// Channels of x that a CTA takes.
    pub(super) channels: u32,
    /// Taps of a unit, and units of a warpgroup.
    pub(super) taps: u32,
    pub(super) units: u32,
    pub(super) stages: u32,
    /// The CTAs that share a tile's pixels add up their sums; otherwise these go to scratch, for a launch of its own.
    pub(super) cluster_split_k: Option<ClusterSplitKSpec>,
}

impl fmt::Display for Spec {
    /// `conv_halo_filter_bf16_64x32_t3x9_s3`: channels of y and x, taps of a unit and units of the CTA, stages; `_x8_bf16p` behind it are
    /// the CTAs of a cluster and the epilogue.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { dtype, channels, taps, stages, .. } = self;
        write!(f, "conv_halo_filter_{dtype}_{ROWS}x{channels}_t{taps}x{}_s{stages}", self.units_of_cta())?;
        match &self.cluster_split_k {
            Some(cluster_split_k) => write!(f, "_x{}_{}", cluster_split_k.ctas, cluster_split_k.epilogue.name()),
            None => Ok(()),
        }
    }
}

impl Spec {
    pub(super) fn dy(&self) -> HaloTile {
        HaloTile { channels: ROWS, ty: types(self.dtype).0 }
    }

    pub(super) fn x(&self) -> HaloTile {
        HaloTile { channels: self.channels, ty: types(self.dtype).0 }
    }

    pub(super) fn units_of_cta(&self) -> u32 {
        CONSUMERS * self.units
    }

    /// Columns of an instruction: channels, tap after tap.
    pub(super) fn columns(&self) -> u32 {
        self.taps * self.channels
    }

    /// The sums of one tap, as parts are kept of them.
    pub(super) fn part_tile(&self) -> PartTile {
        PartTile { rows: ROWS, columns: self.channels, warpgroups: 1 }
    }

    /// Bytes of a stage: as many as there are.
    pub(super) fn stage_bytes(&self) -> u32 {
        (SHARED_BYTES - BARRIER_BYTES) / self.stages / HaloTile::ALIGNMENT_BYTES * HaloTile::ALIGNMENT_BYTES
    }

    /// Where the halo box stands behind a box of dy, and the bytes of both.
    pub(super) fn places(&self, pixels: &PixelBox) -> (u32, u32) {
        let dy_bytes = pixels.pixels() * self.dy().row_bytes();
        let halo_box_at = dy_bytes.next_multiple_of(HaloTile::ALIGNMENT_BYTES);
        (halo_box_at, halo_box_at + pixels.halo_box_pixels().saturating_mul(self.x().row_bytes()))
    }

    fn shape(&self) -> WgmmaShape {
        let (_, ty) = types(self.dtype);
        WgmmaShape { transpose_a: true, transpose_b: true, ..wgmma_shape(self.columns(), ty, ty, MatrixType::F32) }
    }

    /// A reference to the kernel.
    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let threads = WARPGROUP * (1 + CONSUMERS);
        let cluster = self.cluster_split_k.as_ref().map_or(1, |cluster_split_k| cluster_split_k.ctas);
        let header = Header { name: self.to_string(), target: Target::Sm90a, threads, min_ctas: 1, cluster };
        build(header, |k| sum_products(k, self))
    }
}

/// The table of taps: for each group the place of its halo box against its box, by axis; then its units, each with its first row in the
/// halo box, its first tap's place in the result, and the first of its taps that is kept.
pub(super) fn tap_table(axes: &Axes, cover: &Cover, pixels: &PixelBox, flip: bool) -> Vec<u8> {
    let last: u64 = axes.iter().map(|axis| axis.filter).product::<u64>() - 1;
    let mut words: Vec<u32> = Vec::new();
    for group in &cover.groups {
        let shift = |i: usize| (group.first[i] * axes[i].dilation) as i64 + axes[i].origin;
        words.extend((0..BOX_AXES).map(|i| shift(i) as i32 as u32));
        words.push(0);
        for unit in &group.units {
            let tap: [u64; BOX_AXES] = std::array::from_fn(|i| unit.tap[i] - group.first[i]);
            let place = position(axes, unit.tap);
            let place = if flip { last - place } else { place };
            words.extend([pixels.tap_pixels(axes, tap) as u32, place as u32, unit.kept_from, 0]);
        }
    }
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

verdigris_kir::parameters! {
    /// What a launch is told, but for where its sums go.
    pub(super) struct Task / TaskArgs of Spec as spec {
        pub(super) dy: Map = spec.dy().map(AXES as u32 + 1),
        pub(super) x: Map = spec.x().map(AXES as u32 + 1),
        /// CTAs of one share of the boxes; the groups of taps and the columns of tiles among these.
        pub(super) ctas_of_part: Divide,
        pub(super) groups: Divide,
        pub(super) tile_columns: Divide,
        /// Boxes of each share, and the shares that have one more.
        pub(super) least_boxes: u32,
        pub(super) parts_of_one_more: u32,
        /// Boxes along the axes over which a box extends, and its pixels.
        pub(super) counts: [Divide; BOX_AXES],
        pub(super) extents: [u32; BOX_AXES],
        /// Where the halo box stands behind the box, and the bytes of both.
        pub(super) halo_box_at_bytes: u32,
        pub(super) loaded_bytes: u32,
        /// Steps of a line, and lines.
        pub(super) steps: [u32; 2],
        pub(super) of_box: Stride = (),
        pub(super) of_halo_box: Stride = (),
        /// Pixels of the halo box from one tap of a unit to the next, and the same in the filter's order.
        pub(super) tap_pixels: u32,
        pub(super) tap_step: u32,
        /// The table of taps.
        pub(super) taps: Read = 16,
    }
}

verdigris_kir::parameters! {
    /// All parameters of the kernel.
    pub(super) struct FilterKernel / FilterArgs of Spec as spec {
        pub(super) task: TaskArgs = *spec,
        pub(super) parts: Option<PartsArgs> = spec.cluster_split_k.is_none().then_some(()),
        pub(super) cluster_split_k: Option<ClusterSplitKArgs> = spec.cluster_split_k.clone(),
    }
}

/// How descriptors go through a tile, step by step.
struct Steps<'k> {
    high: Val<'k, u32>,
    inner: Val<'k, u32>,
    outer: Val<'k, u32>,
}

impl<'k> Steps<'k> {
    fn of(tile: HaloTile, StrideValues { pitch, inner, outer }: StrideValues<'k>) -> Self {
        Steps { high: tile.descriptor_high(pitch), inner: tile.pixels(inner), outer: tile.pixels(outer) }
    }
}

fn sum_products<'k>(k: Kernel<'k>, spec: &Spec) {
    let (dy, x) = (spec.dy(), spec.x());
    let FilterKernel { task, parts, cluster_split_k } = FilterKernel::declare(k, spec);
    let Task { dy: dy_map, x: x_map, ctas_of_part, groups, tile_columns, least_boxes, parts_of_one_more, counts, extents, .. } = task;
    let Task { halo_box_at_bytes: halo_box_at, loaded_bytes, steps: [steps, lines], tap_pixels, tap_step, taps, .. } = task;
    let parts = parts.map(|parts| Parts::new(k, parts, spec.part_tile()));
    let cluster_split_k = cluster_split_k.zip(spec.cluster_split_k.as_ref()).map(|(values, cluster_split_k)| ClusterSplitK {
        kernel: k,
        spec,
        cluster_split_k,
        values,
    });
    let (of_box, of_halo_box) = (Steps::of(dy, task.of_box), Steps::of(x, task.of_halo_box));

    let slots = k.shared("boxes and slabs", spec.stages * spec.stage_bytes(), HaloTile::ALIGNMENT_BYTES);
    let ring = Ring::new(k, spec.stages, CONSUMERS, RingScope::Cta);
    k.when(k.thread().eq(0), || {
        ring.init();
        [&dy_map, &x_map].into_iter().for_each(|map| k.prefetch_tensormap(map));
    });
    publish_barriers(k);
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();

    // CTAs of one share of the boxes stand side by side, so that what they read is in L2; those of one tile, where they are a cluster.
    let (part, tile) = match &spec.cluster_split_k {
        None => ctas_of_part.split(k.cta()),
        Some(ClusterSplitKSpec { ctas: 1, .. }) => (k.constant(0), k.cta()),
        Some(cluster_split_k) => (k.cluster_rank(), k.cta() >> cluster_split_k.ctas.ilog2()),
    };
    let (tile, group) = groups.split(tile);
    let (row, column) = tile_columns.split(tile);
    let own = cluster_split_k.as_ref().map(|cluster_split_k| cluster_split_k.channels([row, column]));
    let [first_row, first_column] = own.map_or([row * ROWS, column * spec.channels], |own| own.first);
    let first_box = part * least_boxes + part.min(parts_of_one_more);
    let own_boxes = least_boxes + k.select(part.lt(parts_of_one_more), 1u32, 0u32);
    let group_bytes = GROUP_BYTES + UNIT_BYTES * spec.units_of_cta();
    let entry = taps.at(group, group_bytes);

    let load = || {
        let cursor = ring.cursor();
        k.when(k.elect(), || {
            let shift = k.ld_global_vector::<u32>(entry, 0, 4, Cache::Default);
            k.range(own_boxes, |turn| {
                let mut rest = first_box + turn;
                let (mut of_dy, mut of_x) = (Vec::new(), Vec::new());
                for axis in 0..BOX_AXES {
                    let (outer, index) = counts[axis].split(rest);
                    let at = index * extents[axis];
                    of_dy.push(at.signed());
                    of_x.push((at + shift[axis]).signed());
                    rest = outer;
                }
                of_dy.push(rest.signed());
                of_x.push(rest.signed());
                let full = cursor.acquire(loaded_bytes);
                let slot = slots.address() + cursor.stage() * spec.stage_bytes();
                dy.load(slot, &dy_map, first_row, &of_dy, full, Default::default());
                x.load(slot + halo_box_at, &x_map, first_column, &of_x, full, Default::default());
                cursor.advance();
            });
        });
    };

    let multiply = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let sums: Vec<Fragment<'k, f32>> = (0..spec.units).map(|_| Fragment::filled(k, spec.columns(), 0.0f32)).collect();
        let first_unit = i64::from(GROUP_BYTES);
        let units = entry + (warpgroup * (spec.units * UNIT_BYTES)).widen();
        let word = |unit: u32, word: u32| k.ld_global::<u32>(units, first_unit + i64::from(unit * UNIT_BYTES + word * 4));
        let a_low = dy.descriptor_base(slots.address(), Major::Rows, 16u32);
        let b_low = x.descriptor_base(slots.address() + halo_box_at, Major::Rows, tap_pixels * x.row_bytes());
        let b_lows: Vec<Val<'k, u32>> = (0..spec.units).map(|unit| b_low + x.pixels(k.uniform(word(unit, 0)))).collect();
        let cursor = ring.cursor();
        let previous = k.var_named("previous", 0u32);
        let owed = k.var_named("owed", 0u32);
        let whole_steps = steps & !(UNROLL - 1);

        k.range(own_boxes, |_| {
            cursor.wait();
            let stage = cursor.stage();
            let at = stage * (spec.stage_bytes() >> 4);
            k.range(lines, |line| {
                let (a_line, b_line) = (at + line * of_box.outer, at + line * of_halo_box.outer);
                let product = |step: Val<'k, u32>| {
                    let a = k.join32(a_low + a_line + step * of_box.inner, of_box.high);
                    let b_step = b_line + step * of_halo_box.inner;
                    for (sum, &b_low) in sums.iter().zip(&b_lows) {
                        let b = k.join32(b_low + b_step, of_halo_box.high);
                        k.wgmma(spec.shape(), sum.registers(), WgmmaA::Shared(a), b, true);
                    }
                };
                // The assembler wants products, their fence and the wait for those before them in one block.
                let products = |first: Val<'k, u32>, count: u32| {
                    k.wgmma_fence();
                    (0..count).for_each(|turn| product(first + turn));
                    k.wgmma_commit();
                    k.wgmma_wait(1);
                    // What is in flight now belongs to this box: the stage before goes back.
                    k.when(owed.eq(1), || {
                        cursor.release(previous, thread);
                        owed.set(0);
                    });
                };
                k.range_step(0, whole_steps, UNROLL, |step| products(step, UNROLL));
                k.range_step(whole_steps, steps, 1, |step| products(step, 1));
            });
            previous.set(stage);
            owed.set(1);
            cursor.advance();
        });
        k.wgmma_wait(0);

        if let Some(parts) = &parts {
            let registers = (spec.channels / 2) as usize;
            for (unit, sum) in sums.iter().enumerate() {
                let (place, kept_from) = (word(unit as u32, 1), word(unit as u32, 2));
                for (tap, own) in sum.registers().chunks(registers).enumerate() {
                    let tap = tap as u32;
                    k.when(kept_from.le(tap), || {
                        parts.keep(own.iter().copied(), [row, column, place + tap_step * tap, part], k.constant(0), thread);
                    });
                }
            }
        }
        if let Some((cluster_split_k, channels)) = cluster_split_k.as_ref().zip(own) {
            let taps = Taps { units: entry + u64::from(GROUP_BYTES), unit_bytes: UNIT_BYTES, step: tap_step };
            cluster_split_k.write(&sums, slots.address(), channels, taps, [warpgroup, thread]);
        }
    };

    let (few, many) = REGISTERS;
    let load_warp = || k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: &load }]);
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(few), body: &load_warp },
        Role { name: "consumer", warps: 4 * CONSUMERS, registers: Some(many), body: &multiply },
    ]);
}
