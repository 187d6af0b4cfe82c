//! A whole tile of a matrix product as engines run it, under many schedules; its time is told to whoever looks.

use crate::SCHEDULES;
use std::sync::Arc;
use std::time::Instant;
use verdigris_kir::face::{Header, LoadOptions, Role, WgmmaA, build};
use verdigris_kir::inst::{Cache, MatrixType};
use verdigris_kir::interp::{Memory, Options, run_kernel};
use verdigris_kir::ir::{MapType, Target};
use verdigris_kir::program::{Address, Arg, Fill, L2Promotion, MapSpec};
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::operand::{Major, OperandTile};
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};
use verdigris_kir::verify::verify;
use verdigris_tensor::num::f32_to_bf16;

const ROWS: u32 = 128;
const COLUMNS: u32 = 256;
const DEPTH: u32 = 256;
const STAGES: u32 = 4;

fn element(index: u32) -> f32 {
    (index.wrapping_mul(2_654_435_761) >> 29) as f32 - 3.0
}

#[test]
fn a_tile_of_128_by_256() {
    let a_tile = OperandTile { rows: ROWS, ty: MapType::Bf16, major: Major::Depth };
    let b_tile = OperandTile { rows: COLUMNS, ty: MapType::Bf16, major: Major::Depth };
    let header = Header { name: "whole_tile".into(), target: Target::Sm90a, threads: 384, min_ctas: 1, cluster: 1 };
    let body = build(header, |k| {
        let (a_map, b_map) = (k.tensor_map("a", a_tile.map(ROWS)), k.tensor_map("b", b_tile.map(COLUMNS)));
        let d = k.output("d", 16);
        let a_slots = k.shared("a tiles", STAGES * a_tile.bytes(), 1024);
        let b_slots = k.shared("b tiles", STAGES * b_tile.bytes(), 1024);
        let ring = Ring::new(k, STAGES, 2, RingScope::Cta);
        k.when(k.thread().eq(0u32), || ring.init());
        publish_barriers(k);
        let steps = DEPTH / a_tile.depth();
        let load = || {
            let cursor = ring.cursor();
            k.when(k.thread().eq(0u32), || {
                k.range(steps, |step| {
                    let full = cursor.acquire(a_tile.bytes() + b_tile.bytes());
                    let (stage, depth, zero) = (cursor.stage(), step * a_tile.depth(), k.constant(0u32));
                    let options = LoadOptions::default();
                    a_tile.load(a_slots.address() + stage * a_tile.bytes(), zero, ROWS, &a_map, zero, depth, zero, full, options);
                    b_tile.load(b_slots.address() + stage * b_tile.bytes(), zero, COLUMNS, &b_map, zero, depth, zero, full, options);
                    cursor.advance();
                });
            });
        };
        let multiply = || {
            let thread = k.thread() & 127u32;
            let warpgroup = k.uniform(k.thread() >> 7u32) - 1u32;
            let cursor = ring.cursor();
            let sums = Fragment::<f32>::filled(k, COLUMNS, 0.0f32);
            let shape = wgmma_shape(COLUMNS, MatrixType::Bf16, MatrixType::Bf16, MatrixType::F32);
            k.range(steps, |_| {
                cursor.wait();
                let stage = cursor.stage();
                k.wgmma_fence();
                for part in 0..4 {
                    let a = a_tile.descriptor(a_slots.address() + stage * a_tile.bytes(), warpgroup * 64u32, part);
                    let b = b_tile.descriptor(b_slots.address() + stage * b_tile.bytes(), 0u32, part);
                    k.wgmma(shape, sums.registers(), WgmmaA::Shared(a), b, true);
                }
                k.wgmma_commit();
                k.wgmma_wait(0);
                cursor.release(stage, thread);
                cursor.advance();
            });
            let row = warpgroup * 64u32 + Fragment::<f32>::row(thread);
            for block in 0..COLUMNS / 8 {
                for half in 0..2 {
                    let at = (row + 8 * half) * COLUMNS + Fragment::<f32>::column(thread) + 8 * block;
                    let pair = [0, 1].map(|odd| sums.element(block, half, odd).get());
                    k.st_global_vector(d.at(at, 4), 0, &pair, Cache::Default);
                }
            }
        };
        k.warp_roles(&[
            Role { name: "producer", warps: 4, registers: Some(40), body: &load },
            Role { name: "consumer", warps: 8, registers: Some(232), body: &multiply },
        ]);
    });
    let body = Arc::new(verify(body).unwrap_or_else(|faults| panic!("{faults}")));
    let map = |slot: usize, tile: OperandTile| {
        let spec = MapSpec {
            decl: tile.map(tile.rows),
            dims: vec![u64::from(DEPTH), u64::from(tile.rows), 1],
            strides_bytes: vec![u64::from(2 * DEPTH), u64::from(2 * DEPTH * tile.rows)],
            element_strides: vec![1; 3],
            lower_corner: Vec::new(),
            upper_corner: Vec::new(),
            fill: Fill::Zero,
            l2: L2Promotion::None,
        };
        Arg::TensorMap(Address::buffer(slot), spec)
    };
    let numbers = |first: u32, rows: u32| (0..rows * DEPTH).map(|i| element(first + i)).collect::<Vec<f32>>();
    let (a, b) = (numbers(0, ROWS), numbers(99_991, COLUMNS));
    let halves = |values: &[f32]| values.iter().flat_map(|&value| f32_to_bf16(value).to_le_bytes()).collect::<Vec<u8>>();
    let args = [map(0, a_tile), map(1, b_tile), Arg::Pointer(Address::buffer(2))];
    let began = Instant::now();
    for seed in 0..SCHEDULES {
        let mut memory = Memory::new();
        memory.add(&halves(&a));
        memory.add(&halves(&b));
        memory.add_unwritten(u64::from(4 * ROWS * COLUMNS));
        let report = run_kernel(Arc::clone(&body), [1, 1, 1], args.to_vec(), &mut memory, &Options::schedule(seed))
            .unwrap_or_else(|findings| panic!("{findings}"));
        assert_eq!(report.total.macs, u64::from(ROWS * COLUMNS * DEPTH));
        assert_eq!(report.total.unique_load_bytes, u64::from(2 * DEPTH * (ROWS + COLUMNS)));
        assert_eq!(memory.first_unwritten(2, 0, u64::from(4 * ROWS * COLUMNS)), None);
        let got = memory.to_vec(2);
        // Small integers: every sum is exact. A few rows of each schedule are enough, others in each.
        for row in (seed as u32 % 16..ROWS).step_by(16) {
            for column in 0..COLUMNS {
                let dot = |k: u32| a[(row * DEPTH + k) as usize] * b[(column * DEPTH + k) as usize];
                let want: f32 = (0..DEPTH).map(dot).sum();
                let at = 4 * (row * COLUMNS + column) as usize;
                assert_eq!(f32::from_le_bytes([got[at], got[at + 1], got[at + 2], got[at + 3]]), want, "{row}, {column}");
            }
        }
    }
    eprintln!("128 × 256 × 256 bf16, {STAGES} stages: {:.0?} a schedule", began.elapsed() / SCHEDULES as u32);
}
