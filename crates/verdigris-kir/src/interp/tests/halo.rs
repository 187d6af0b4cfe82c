//! Products of halo boxes: boxes with a halo, read from any pixel on, at any pitch.

use super::*;
use crate::face::{LoadOptions, WgmmaA};
use crate::inst::MatrixType;
use crate::ir::MapType;
use crate::program::{Fill, L2Promotion, MapSpec};
use crate::tile::fragment::{Fragment, wgmma_shape};
use crate::tile::halo::HaloTile;
use crate::tile::operand::Major;
use crate::tile::ring::{Ring, RingScope, publish_barriers};
use verdigris_tensor::num::f32_to_bf16;

const CHANNELS: u32 = 64;
const COLUMNS: u32 = 64;

/// A view of the halo box: its first pixel, and how far groups of eight pixels are apart.
#[derive(Clone, Copy, Debug)]
struct View {
    first: u32,
    pitch: u32,
}

impl View {
    fn pixel(self, i: usize) -> usize {
        self.first as usize + i / 8 * self.pitch as usize + i % 8
    }
}

/// D = A · B of two views of one box of pixels with 64 channels, in as many halo boxes as these need: rows and columns are pixels and the
/// depth channels, or rows and columns are channels and the depth 64 pixels.
fn product(tile: HaloTile, major: Major) -> KernelBody {
    kernel(128, 1, |k| {
        let map = k.tensor_map("pixels", tile.map(3));
        let y = k.output("y", 16);
        let [place_x, place_y]: [_; 2] = ["place_x", "place_y"].map(|name| k.scalar::<i32>(name));
        let halo_bytes = k.scalar::<u32>("halo_bytes");
        let views = [["a_first", "a_pitch"], ["b_first", "b_pitch"]].map(|names| names.map(|name| k.scalar::<u32>(name)));
        let halos = CHANNELS / tile.channels;
        let room = (44 << 10) / halos;
        let piece = k.shared("halo", halos * room, HaloTile::ALIGNMENT_BYTES);
        let ring = Ring::new(k, 1, 1, RingScope::Cta);
        k.when(k.thread().eq(0), || ring.init());
        publish_barriers(k);
        let (filler, drainer) = (ring.cursor(), ring.cursor());
        k.when(k.thread().eq(0), || {
            let full = filler.acquire(halo_bytes * halos);
            for halo in 0..halos {
                let channel = k.constant(halo * tile.channels);
                tile.load(piece.address() + halo * room, &map, channel, &[place_x, place_y], full, LoadOptions::default());
            }
        });
        drainer.wait();
        let shape = crate::inst::WgmmaShape {
            transpose_a: major == Major::Rows,
            transpose_b: major == Major::Rows,
            ..wgmma_shape(COLUMNS, MatrixType::Bf16, MatrixType::Bf16, MatrixType::F32)
        };
        let sums = Fragment::<f32>::filled(k, COLUMNS, 0.0f32);
        let descriptors = |step: u32, halo: u32| {
            views.map(|[first, pitch]| {
                let low = tile.descriptor_base(piece.address() + halo * room, major, room) + tile.pixels(first);
                match major {
                    Major::Depth => k.join32(low + tile.advance(step), tile.descriptor_high(pitch)),
                    // Two groups of eight pixels a step.
                    Major::Rows => k.join32(low + tile.pixels(pitch * (2 * step)), tile.descriptor_high(pitch)),
                }
            })
        };
        k.wgmma_fence();
        let (steps, halos) = if major == Major::Depth { (tile.steps(), halos) } else { (4, 1) };
        for halo in 0..halos {
            for step in 0..steps {
                let [a, b] = descriptors(step, halo);
                k.wgmma(shape, sums.registers(), WgmmaA::Shared(a), b, true);
            }
        }
        k.wgmma_commit();
        k.wgmma_wait(0);
        drainer.release(k.constant(0), k.thread());
        let thread = k.thread();
        for block in 0..COLUMNS / 8 {
            for half in 0..2u32 {
                for odd in 0..2u32 {
                    let at = (Fragment::<f32>::row(thread) + 8 * half) * COLUMNS + Fragment::<f32>::column(thread) + (8 * block + odd);
                    k.st_global(y.at(at, 4), 0, sums.element(block, half, odd).get());
                }
            }
        }
    })
}

/// An image of 11 by 13 pixels; small integers, so that sums are exact.
const IMAGE: [usize; 2] = [11, 13];

fn element(y: usize, x: usize, c: usize) -> f32 {
    (((y * 13 + x) * 64 + c).wrapping_mul(2_654_435_761) >> 7 & 15) as f32 - 7.0
}

fn memory() -> Memory {
    let mut memory = Memory::new();
    let all = (0..IMAGE[0] * IMAGE[1] * 64).map(|i| element(i / 64 / 13, i / 64 % 13, i % 64));
    memory.add(&all.flat_map(|value| f32_to_bf16(value).to_le_bytes()).collect::<Vec<_>>());
    memory.add_unwritten(64 * u64::from(COLUMNS) * 4);
    memory
}

#[test]
fn views_of_a_halo_box_begin_and_step_anywhere() {
    // The box begins outside of the image and ends outside of it.
    let (extents, place) = ([19u32, 18], [-3i32, -2]);
    let pixel = |i: usize, c: usize| {
        let (y, x) = ((i / 19) as i32 + place[1], (i % 19) as i32 + place[0]);
        let inside = (0..11).contains(&y) && (0..13).contains(&x);
        if inside { element(y as usize, x as usize, c) } else { 0.0 }
    };
    for channels in [16, 32, 64] {
        let tile = HaloTile { channels, ty: MapType::Bf16 };
        for major in [Major::Depth, Major::Rows] {
            let body = product(tile, major);
            for (a, b) in [
                (View { first: 0, pitch: 8 }, View { first: 1, pitch: 19 }),
                (View { first: 61, pitch: 19 }, View { first: 22, pitch: 9 }),
                (View { first: 7, pitch: 38 }, View { first: 3, pitch: 19 }),
            ] {
                let map = MapSpec {
                    decl: tile.boxed(&extents),
                    dims: vec![64, 13, 11],
                    strides_bytes: vec![128, 13 * 128],
                    element_strides: vec![1; 3],
                    lower_corner: vec![],
                    upper_corner: vec![],
                    fill: Fill::Zero,
                    l2: L2Promotion::None,
                };
                let scalar = |n: u32| Arg::Scalar(crate::ir::Ty::U32, n.into());
                let signed = |n: i32| Arg::Scalar(crate::ir::Ty::S32, u64::from(n as u32));
                let mut args = vec![Arg::TensorMap(Address::buffer(0), map), pointer(1), signed(place[0]), signed(place[1])];
                args.extend([19 * 18 * tile.row_bytes(), a.first, a.pitch, b.first, b.pitch].map(scalar));
                passes(&body, 1, &args, memory, |memory, _| {
                    let got = read_words(memory, 1);
                    for row in 0..64 {
                        for column in 0..COLUMNS as usize {
                            let want: f32 = (0..64)
                                .map(|d| match major {
                                    Major::Depth => pixel(a.pixel(row), d) * pixel(b.pixel(column), d),
                                    Major::Rows => pixel(a.pixel(d), row) * pixel(b.pixel(d), column),
                                })
                                .sum();
                            let at = row * COLUMNS as usize + column;
                            assert_eq!(f32::from_bits(got[at]), want, "{channels} channels, {major:?}, {a:?}, {b:?}: {row}, {column}");
                        }
                    }
                });
            }
        }
    }
}

#[test]
fn a_box_is_the_kernels_or_the_launchs() {
    let tile = HaloTile { channels: 32, ty: MapType::Bf16 };
    let (open, closed) = (tile.map(3), tile.boxed(&[19, 18]));
    assert!(open.has_open_box() && !closed.has_open_box());
    assert!(open.takes(&closed) && closed.takes(&closed));
    assert!(!closed.takes(&tile.boxed(&[19, 17])) && !closed.takes(&open));
    assert!(!open.takes(&HaloTile { channels: 16, ..tile }.boxed(&[19, 18])) && !open.takes(&tile.boxed(&[19])));
    assert_eq!(closed.box_bytes(), 19 * 18 * 64);
}
