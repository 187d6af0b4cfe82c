//! A convolution by implicit product, one tile a CTA: `y[n,p,q,·] = Σ_{r,s,c} x[n, p·stride + r − pad, q·stride + s − pad, c] ·
//! w[·,r,s,c]`.
//!
//! Rows are output pixels, columns filters, depth runs over filter positions and channels. TMA gathers A in im2col order: a tile
//! may run over the ends of rows and images, and what falls outside of the image is zero. Per stage the producer only moves an offset.
//!
//! Source: PTX ISA 9.0, "im2col mode"; Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014, for the implicit product.

use super::{Allowances, Probe};
use verdigris_kir::face::{Header, Kernel, LoadOptions, Role, Val, WgmmaA, build as build_kernel};
use verdigris_kir::inst::{MatrixType, Packed, Special};
use verdigris_kir::ir::{KernelBody, MapType, Target};
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::im2col::Im2colTile;
use verdigris_kir::tile::operand::{Major, OperandTile};
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};
use verdigris_kir::tile::staging::{Staging, store_map};

/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;

/// What shapes the kernel.
///
/// Parameters: im2col map `x` over `{C, W, H, N}` with the padding in its corners and the stride in its element strides; map `w`,
/// `{C, K, R·S}`; map `y`, `{K, N·P·Q, 1}`; divisors `output_width` Q and `output_pixels` P·Q; `stride`, `padding`, `filter_height` R,
/// `filter_width` S, `channel_blocks = ⌈C / 64⌉`. All bf16, strides and padding alike in both dimensions. The grid is
/// `[⌈N·P·Q / pixels⌉, ⌈K / filters⌉, 1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Output pixels of a CTA: 64 for each warpgroup that multiplies.
    pub pixels: u32,
    /// Filters of a CTA: a multiple of 64.
    pub filters: u32,
    /// Stages of the ring.
    pub stages: u32,
}

impl Spec {
    /// Two warpgroups of 64 pixels, 128 filters.
    pub const FULL: Spec = Spec { pixels: 128, filters: 128, stages: 4 };

    /// Pixels by channels.
    pub fn x_tile(&self) -> Im2colTile {
        Im2colTile { pixels: self.pixels, ty: MapType::Bf16, spatial: 2 }
    }

    /// Filters by channels, at one filter position.
    pub fn w_tile(&self) -> OperandTile {
        OperandTile { rows: self.filters, ty: MapType::Bf16, major: Major::Depth }
    }

    fn consumers(&self) -> u32 {
        self.pixels / 64
    }

    /// Builds the kernel.
    pub fn build(&self) -> KernelBody {
        let name = format!("probe_im2col_tile_{}x{}_s{}", self.pixels, self.filters, self.stages);
        let threads = WARPGROUP * (1 + self.consumers());
        build_kernel(Header { name, target: Target::Sm90a, threads, min_ctas: 1, cluster: 1 }, |k| kernel(k, self))
    }
}

pub(super) fn probe() -> Probe {
    Probe {
        name: "im2col_tile",
        build: || Spec::FULL.build(),
        allowances: Allowances { wgmma_stages: 1 },
        what_it_shows: "im2col tensor loads with filter offsets as the A operand; a tiled filter beside it; three loops of a producer over \
                        one ring",
    }
}

fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let (x_tile, w_tile) = (spec.x_tile(), spec.w_tile());
    let x_map = k.tensor_map("x", x_tile.map());
    let w_map = k.tensor_map("w", w_tile.map(spec.filters));
    let y_map = k.tensor_map("y", store_map(MapType::Bf16, 64));
    let (output_width, output_pixels) = (k.divisor("output_width"), k.divisor("output_pixels"));
    let (stride, padding) = (k.scalar::<u32>("stride"), k.scalar::<u32>("padding"));
    let (filter_height, filter_width) = (k.scalar::<u32>("filter_height"), k.scalar::<u32>("filter_width"));
    let channel_blocks = k.scalar::<u32>("channel_blocks");

    let x_slots = k.shared("pixels", spec.stages * x_tile.operand().bytes(), 1024);
    let w_slots = k.shared("filters", spec.stages * w_tile.bytes(), 1024);
    let staging = Staging::new(k, spec.consumers(), 2, 1);
    let ring = Ring::new(k, spec.stages, spec.consumers(), RingScope::Cta);
    k.when(k.thread().eq(0), || ring.init());
    publish_barriers(k);

    let first_pixel = k.cta() * spec.pixels;
    let first_filter = k.special(Special::CtaY) * spec.filters;
    let slot_bytes = x_tile.operand().bytes() + w_tile.bytes();

    let load = || {
        let cursor = ring.cursor();
        let options = LoadOptions::default();
        k.when(k.elect(), || {
            let (image, pixel) = output_pixels.split(first_pixel);
            let (row, column) = output_width.split(pixel);
            let base = [(column * stride - padding).signed(), (row * stride - padding).signed()];
            k.range(filter_height, |r| {
                k.range(filter_width, |s| {
                    k.range(channel_blocks, |block| {
                        let full = cursor.acquire(slot_bytes);
                        let stage = cursor.stage();
                        let channel = block * w_tile.depth();
                        let x_slot = x_slots.address() + stage * x_tile.operand().bytes();
                        let w_slot = w_slots.address() + stage * w_tile.bytes();
                        x_tile.load(x_slot, &x_map, channel, &base, image, &[s, r], full, options);
                        let position = r * filter_width + s;
                        w_tile.load(w_slot, k.constant(0), spec.filters, &w_map, first_filter, channel, position, full, options);
                        cursor.advance();
                    });
                });
            });
        });
    };

    let multiply = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let sums = Fragment::<f32>::unset(k, spec.filters);
        let shape = wgmma_shape(spec.filters, MatrixType::Bf16, MatrixType::Bf16, MatrixType::F32);
        let x_low = x_tile.operand().descriptor_base(x_slots.address(), warpgroup * 64);
        let w_low = w_tile.descriptor_base(w_slots.address(), 0u32);
        let cursor = ring.cursor();
        let previous = k.var_named("previous", 0u32);
        k.range(filter_height * filter_width * channel_blocks, |turn| {
            cursor.wait();
            let stage: Val<'k, u32> = cursor.stage();
            let x_stage = x_low + stage * (x_tile.operand().bytes() >> 4);
            let w_stage = w_low + stage * (w_tile.bytes() >> 4);
            k.wgmma_fence();
            for step in 0..4 {
                let a = w_tile.descriptor_from(x_stage + x_tile.operand().advance(0, step));
                let b = w_tile.descriptor_from(w_stage + w_tile.advance(0, step));
                let adds = if step == 0 { turn.gt(0) } else { k.constant(true) };
                k.wgmma(shape, sums.registers(), WgmmaA::Shared(a), b, adds);
            }
            k.wgmma_commit();
            k.wgmma_wait(1);
            k.when(turn.gt(0), || cursor.release(previous, thread));
            previous.set(stage);
            cursor.advance();
        });
        k.wgmma_wait(0);

        for part in 0..spec.filters / 64 {
            let stage = staging.stage(warpgroup, part % staging.stages());
            staging.acquire(warpgroup, thread, staging.stages() - 1);
            for pair in 0..4 {
                staging.write_halves(stage, thread, pair, &sums.pack_a(4 * part + pair, Packed::Bf16x2));
            }
            staging.store(stage, warpgroup, thread, &y_map, first_filter + 64 * part, first_pixel + warpgroup * 64, 0u32);
        }
        staging.finish(thread);
    };

    let (few, many) = (40, 232);
    let load_warp = || k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: &load }]);
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(few), body: &load_warp },
        Role { name: "consumer", warps: 4 * spec.consumers(), registers: Some(many), body: &multiply },
    ]);
}
