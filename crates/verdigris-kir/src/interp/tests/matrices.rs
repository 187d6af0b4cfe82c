//! Warpgroup products in flight, and registers that change hands.

use super::*;
use crate::face::{Role, WgmmaA};
use crate::inst::MatrixType;
use crate::ir::MapType;
use crate::tile::fragment::{Fragment, wgmma_shape};
use crate::tile::operand::{Major, OperandTile};
use verdigris_tensor::num::{bf16_to_f32, f32_to_bf16};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    NoFence,
    TouchedBetween,
    NoWait,
    ReadTooEarly,
    NoProxyFence,
    /// Each warp knows what it wrote itself, and none of what the others did.
    NoBarrier,
    /// No group holds the products that are waited for.
    NoCommit,
    OneWarpFewer,
    PartUnwritten,
    WriteOperandsTooEarly,
}

/// D (64 × 64) = A (64 × 64) · Bᵀ (64 × 64) in bf16 from global memory through shared memory written by threads.
fn product(fault: Fault, plant: &Plant) -> KernelBody {
    kernel(128, 1, |k| {
        let x = k.input("x", 16);
        let y = k.output("y", 16);
        let tile = OperandTile { rows: 64, ty: MapType::Bf16, major: Major::Depth };
        let a = k.shared("a", 8192, 1024);
        let b = k.shared("b", 8192, 1024);
        let i = k.thread();
        for (piece, first) in [(a, 0u32), (b, 512)] {
            // 16-byte chunk c of row r stands at chunk c ^ (r % 8).
            k.range(if fault == Fault::PartUnwritten && first > 0 { 3u32 } else { 4u32 }, |part| {
                let chunk = part * 128u32 + i;
                let (row, column) = (chunk >> 3, chunk & 7u32);
                let values = k.ld_global_vector::<u32>(x.at(chunk + first, 16), 0, 4, crate::inst::Cache::Default);
                k.st_shared_vector(piece.address() + row * 128u32 + ((column ^ (row & 7u32)) << 4u32), 0, &values);
            });
        }
        if fault != Fault::NoProxyFence {
            k.fence_proxy_async();
        }
        if fault != Fault::NoBarrier {
            k.bar_sync();
        }
        let shape = wgmma_shape(64, MatrixType::Bf16, MatrixType::Bf16, MatrixType::F32);
        let sums = Fragment::<f32>::filled(k, 64, 0.0f32);
        if fault != Fault::NoFence {
            k.wgmma_fence();
        }
        if fault == Fault::TouchedBetween {
            sums.registers()[5].set(1.0f32);
        }
        let issue = || {
            for step in 0..4 {
                let (da, db) = (tile.descriptor(a.address(), 0u32, step), tile.descriptor(b.address(), 0u32, step));
                if step == 0 {
                    plant!(plant);
                    k.wgmma(shape, sums.registers(), WgmmaA::Shared(da), db, true);
                } else {
                    k.wgmma(shape, sums.registers(), WgmmaA::Shared(da), db, true);
                }
            }
        };
        if fault == Fault::OneWarpFewer {
            k.when(k.warp().lt(3u32), issue);
        } else {
            issue();
        }
        if fault != Fault::NoCommit {
            k.wgmma_commit();
        }
        match fault {
            Fault::ReadTooEarly => {
                plant!(plant);
                sums.registers()[0].set(sums.registers()[1].get());
            }
            Fault::WriteOperandsTooEarly => {
                plant!(plant);
                k.st_shared(b.address() + i * 4u32, 0, i);
            }
            _ => {}
        }
        if fault != Fault::NoWait {
            k.wgmma_wait(0);
        } else {
            return;
        }
        if fault == Fault::NoCommit {
            plant!(plant);
            sums.registers()[0].set(sums.registers()[1].get());
        }
        let (row, column) = (Fragment::<f32>::row(i), Fragment::<f32>::column(i));
        for block in 0..8 {
            for half in 0..2u32 {
                for odd in 0..2u32 {
                    let at = (row + 8 * half) * 64u32 + column + (8 * block + odd);
                    k.st_global(y.at(at, 4), 0, sums.element(block, half, odd).get());
                }
            }
        }
    })
}

fn values() -> Vec<f32> {
    (0..8192u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 28) as f32 - 7.0).collect()
}

fn memory() -> Memory {
    let mut memory = Memory::new();
    memory.add(&values().iter().flat_map(|&value| f32_to_bf16(value).to_le_bytes()).collect::<Vec<_>>());
    memory.add_unwritten(64 * 64 * 4);
    memory
}

#[test]
fn a_product_through_shared_memory() {
    passes(&product(Fault::None, &Plant::default()), 1, &[pointer(0), pointer(1)], memory, |memory, report| {
        let x = values();
        assert!(x.iter().all(|&value| bf16_to_f32(f32_to_bf16(value)) == value));
        let got = read_words(memory, 1);
        for row in 0..64 {
            for column in 0..64 {
                let want: f32 = (0..64).map(|k| x[row * 64 + k] * x[4096 + column * 64 + k]).sum();
                assert_eq!(f32::from_bits(got[row * 64 + column]), want, "{row}, {column}");
            }
        }
        assert_eq!(report.total.macs, 64 * 64 * 64);
        assert_eq!(report.total.bank_conflicts, 0);
    });
}

#[test]
fn faults_of_a_product() {
    for (fault, kind) in [
        (Fault::NoFence, FindingKind::WgmmaFence),
        (Fault::TouchedBetween, FindingKind::WgmmaFence),
        (Fault::NoWait, FindingKind::AccumulatorInFlight),
        (Fault::ReadTooEarly, FindingKind::AccumulatorInFlight),
        (Fault::NoProxyFence, FindingKind::ProxyFence),
        (Fault::NoBarrier, FindingKind::Race),
        (Fault::NoCommit, FindingKind::AccumulatorInFlight),
        (Fault::OneWarpFewer, FindingKind::Deadlock),
        (Fault::PartUnwritten, FindingKind::UnwrittenMemory),
        (Fault::WriteOperandsTooEarly, FindingKind::Race),
    ] {
        let plant = Plant::default();
        fails(&product(fault, &plant), 1, &[pointer(0), pointer(1)], memory, kind, &plant);
    }
}

#[test]
fn registers_that_nobody_gives_back() {
    let roles = |registers: [u32; 2]| {
        kernel(384, 1, move |k| {
            k.warp_roles(&[
                Role { name: "producer", warps: 4, registers: Some(registers[0]), body: &|| {} },
                Role { name: "consumer", warps: 8, registers: Some(registers[1]), body: &|| {} },
            ]);
        })
    };
    // 384 threads start with 168 registers each: 504 for three warps, one of each warpgroup.
    let body = roles([24, 240]);
    for seed in 0..SEEDS {
        run_unchecked(&body, 1, &[], &mut Memory::new(), &Options::schedule(seed)).unwrap_or_else(|findings| panic!("{findings}"));
    }
    let body = roles([240, 240]);
    for seed in 0..SEEDS {
        let findings = run_unchecked(&body, 1, &[], &mut Memory::new(), &Options::schedule(seed)).expect_err("no registers");
        assert!(matches!(findings.first().kind, FindingKind::Deadlock | FindingKind::RegisterBudget), "{findings}");
    }
}
