//! Warpgroup products in flight, their registers and operands; register budgets; operands that the chip does not take.

use crate::{Planted, caught, cta, plant};
use verdigris_kir::face::{Role, SharedPiece, Val, Var, WgmmaA};
use verdigris_kir::inst::{MatrixType, Op, WgmmaShape};
use verdigris_kir::interp::FindingKind;
use verdigris_kir::ir::MapType;
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::operand::{Major, OperandTile};

const TILE: OperandTile = OperandTile { rows: 64, ty: MapType::Bf16, major: Major::Depth };
/// 1.0 and 2.0, twice, in bf16.
const ONES: u32 = 0x3F80_3F80;
const TWOS: u32 = 0x4000_4000;

fn shape(columns: u32) -> WgmmaShape {
    wgmma_shape(columns, MatrixType::Bf16, MatrixType::Bf16, MatrixType::F32)
}

/// Two tiles of 64 rows of 128 bytes, full of ones and of twos, written by 128 threads and fenced.
#[track_caller]
fn operands<'k>(p: Planted<'k>) -> [SharedPiece<'k>; 2] {
    let k = p.k;
    let pieces = [k.shared("a", 8192, 1024), k.shared("b", 8192, 1024)];
    for (piece, bits) in pieces.iter().zip([ONES, TWOS]) {
        let value = k.var(bits);
        let values = [value.get(), value.get(), value.get(), value.get()];
        k.range(4u32, |part| k.st_shared_vector(piece.address() + (part * 128u32 + k.thread()) * 16u32, 0, &values));
    }
    k.fence_proxy_async();
    k.bar_sync();
    pieces
}

fn descriptors<'k>([a, b]: [SharedPiece<'k>; 2], step: u32) -> (Val<'k, u64>, Val<'k, u64>) {
    (TILE.descriptor(a.address(), 0u32, step), TILE.descriptor(b.address(), 0u32, step))
}

/// One product of the warpgroup, in a group of its own.
#[track_caller]
fn product<'k>(p: Planted<'k>, sums: &[Var<'k, f32>], tiles: [SharedPiece<'k>; 2]) {
    let at = std::panic::Location::caller();
    p.k.scope(at, || {
        let (a, b) = descriptors(tiles, 0);
        p.k.wgmma(shape(2 * sums.len() as u32), sums, WgmmaA::Shared(a), b, true);
        p.k.wgmma_commit();
    });
}

#[track_caller]
fn store<'k>(p: Planted<'k>, sums: &[Var<'k, f32>]) {
    p.k.st_global(p.y.at(p.k.thread(), 4), 0, sums[0].get());
}

// ---- accumulators in flight ----------------------------------------------------------------------------------------

#[test]
fn an_accumulator_is_read_too_early() {
    caught(FindingKind::AccumulatorInFlight, &["accumulator", "is read here", "still in flight"], cta(128), |p, lines| {
        let k = p.k;
        let tiles = operands(p);
        let sums = Fragment::<f32>::filled(k, 64, 0.0f32);
        k.wgmma_fence();
        lines.also(line!() + 1);
        product(p, sums.registers(), tiles);
        p.unless(|| k.wgmma_wait(0));
        lines.here(line!() + 1);
        k.st_global(p.y.at(k.thread(), 4), 0, sums.element(1, 0, 1).get());
        k.wgmma_wait(0);
    });
}

#[test]
fn an_accumulator_is_written_too_early() {
    caught(FindingKind::AccumulatorInFlight, &["is written here"], cta(128), |p, lines| {
        let k = p.k;
        let tiles = operands(p);
        let sums = Fragment::<f32>::filled(k, 64, 0.0f32);
        k.wgmma_fence();
        lines.also(line!() + 1);
        product(p, sums.registers(), tiles);
        p.unless(|| k.wgmma_wait(0));
        lines.here(line!() + 1);
        sums.element(0, 1, 0).set(1.0f32);
        k.wgmma_wait(0);
        store(p, sums.registers());
    });
}

#[test]
fn a_wait_that_leaves_one_group_too_many() {
    caught(FindingKind::AccumulatorInFlight, &["is read here"], cta(128), |p, lines| {
        let k = p.k;
        let tiles = operands(p);
        let (first, second) = (Fragment::<f32>::filled(k, 16, 0.0f32), Fragment::<f32>::filled(k, 16, 0.0f32));
        k.wgmma_fence();
        product(p, first.registers(), tiles);
        lines.also(line!() + 1);
        product(p, second.registers(), tiles);
        k.wgmma_wait(1);
        store(p, first.registers());
        p.unless(|| k.wgmma_wait(0));
        lines.here(line!() + 1);
        store(p, second.registers());
        k.wgmma_wait(0);
    });
}

#[test]
fn products_that_share_some_accumulators() {
    caught(FindingKind::AccumulatorInFlight, &["this wgmma uses it in another way"], cta(128), |p, lines| {
        let k = p.k;
        let tiles = operands(p);
        let sums = Fragment::<f32>::filled(k, 64, 0.0f32);
        k.wgmma_fence();
        lines.also(line!() + 1);
        product(p, sums.registers(), tiles);
        p.unless(|| k.wgmma_wait(0));
        lines.here(line!() + 1);
        product(p, &sums.registers()[..8], tiles);
        k.wgmma_wait(0);
        store(p, sums.registers());
    });
}

#[test]
fn a_warp_ends_with_a_product_in_flight() {
    caught(FindingKind::AccumulatorInFlight, &["in flight when its warp exits"], cta(128), |p, lines| {
        let k = p.k;
        let tiles = operands(p);
        let sums = Fragment::<f32>::filled(k, 64, 0.0f32);
        k.wgmma_fence();
        lines.here(line!() + 1);
        product(p, sums.registers(), tiles);
        p.unless(|| k.wgmma_wait(0));
    });
}

/// A product whose A comes from registers: rows of ones.
fn from_registers<'k>(p: Planted<'k>, sums: &Fragment<'k, f32>, a: &[Var<'k, u32>], b: SharedPiece<'k>) {
    let shape = WgmmaShape { a_in_registers: true, ..shape(sums.columns()) };
    p.k.wgmma(shape, sums.registers(), WgmmaA::Fragment(a), TILE.descriptor(b.address(), 0u32, 0), true);
    p.k.wgmma_commit();
}

#[test]
fn an_a_register_is_written_in_flight() {
    let planting = plant(cta(128), |p, lines| {
        let k = p.k;
        let [_, b] = operands(p);
        let sums = Fragment::<f32>::filled(k, 16, 0.0f32);
        let a: Vec<Var<'_, u32>> = (0..4).map(|_| k.var(ONES)).collect();
        k.wgmma_fence();
        from_registers(p, &sums, &a, b);
        p.unless(|| k.wgmma_wait(0));
        lines.here(line!() + 1);
        a[2].set(0u32);
        k.wgmma_wait(0);
        store(p, sums.registers());
    });
    // 16 products of 1 and 2.
    planting.clean(|memory| assert_eq!(crate::words(memory, 1, 128), [32.0f32.to_bits(); 128]));
    planting.faulty(crate::Shows::Always, &[FindingKind::AccumulatorInFlight], &["A register", "is written here"]);
}

// ---- fences --------------------------------------------------------------------------------------------------------

#[test]
fn fresh_accumulators_without_a_fence() {
    caught(FindingKind::WgmmaFence, &["run wgmma.fence between"], cta(128), |p, lines| {
        let k = p.k;
        let tiles = operands(p);
        let sums = Fragment::<f32>::filled(k, 64, 0.0f32);
        p.unless(|| k.wgmma_fence());
        lines.here(line!() + 1);
        product(p, sums.registers(), tiles);
        k.wgmma_wait(0);
        store(p, sums.registers());
    });
}

#[test]
fn an_accumulator_changed_between_products() {
    caught(FindingKind::WgmmaFence, &["was written by another instruction since the last wgmma.fence"], cta(128), |p, lines| {
        let k = p.k;
        let tiles = operands(p);
        let sums = Fragment::<f32>::filled(k, 64, 0.0f32);
        k.wgmma_fence();
        product(p, sums.registers(), tiles);
        k.wgmma_wait(0);
        p.when(|| sums.element(3, 1, 1).set(1.0f32));
        lines.here(line!() + 1);
        product(p, sums.registers(), tiles);
        k.wgmma_wait(0);
        store(p, sums.registers());
    });
}

#[test]
fn a_registers_packed_without_a_fence() {
    caught(FindingKind::WgmmaFence, &["the product may use its old value"], cta(128), |p, lines| {
        let k = p.k;
        let [_, b] = operands(p);
        let sums = Fragment::<f32>::filled(k, 16, 0.0f32);
        let a: Vec<Var<'_, u32>> = (0..4).map(|_| k.var(ONES)).collect();
        k.wgmma_fence();
        k.range(3u32, |turn| {
            for register in &a {
                register.set(register.get() + turn);
            }
            k.when(p.fault.eq(0u32) | turn.eq(0u32), || k.wgmma_fence());
            let shape = WgmmaShape { a_in_registers: true, ..shape(16) };
            let b = TILE.descriptor(b.address(), 0u32, 0);
            lines.here(line!() + 1);
            k.wgmma(shape, sums.registers(), WgmmaA::Fragment(&a), b, true);
            k.wgmma_commit();
            k.wgmma_wait(0);
        });
        store(p, sums.registers());
    });
}

// ---- operands of products ------------------------------------------------------------------------------------------

#[test]
fn operands_that_were_not_fenced() {
    caught(FindingKind::ProxyFence, &["this wgmma (operand B)"], cta(128), |p, lines| {
        let k = p.k;
        let tiles = operands(p);
        lines.also(line!() + 1);
        k.st_shared(tiles[1].address() + p.index() * 4u32, 0, k.thread());
        p.unless(|| k.fence_proxy_async());
        k.bar_sync();
        let sums = Fragment::<f32>::filled(k, 16, 0.0f32);
        k.wgmma_fence();
        lines.here(line!() + 1);
        product(p, sums.registers(), tiles);
        k.wgmma_wait(0);
        store(p, sums.registers());
    });
}

#[test]
fn operands_overwritten_in_flight() {
    caught(FindingKind::Race, &["of shared b"], cta(128), |p, lines| {
        let k = p.k;
        let tiles = operands(p);
        let sums = Fragment::<f32>::filled(k, 16, 0.0f32);
        k.wgmma_fence();
        lines.also(line!() + 1);
        product(p, sums.registers(), tiles);
        p.unless(|| {
            k.wgmma_wait(0);
            k.bar_sync();
        });
        lines.here(line!() + 1);
        k.st_shared(tiles[1].address() + p.index() * 4u32, 0, k.thread());
        k.wgmma_wait(0);
        store(p, sums.registers());
    });
}

#[test]
fn a_descriptor_outside_of_shared_memory() {
    caught(FindingKind::OutOfBounds, &[], cta(128), |p, lines| {
        let k = p.k;
        let tiles = operands(p);
        let sums = Fragment::<f32>::filled(k, 16, 0.0f32);
        let (a, b) = descriptors(tiles, 0);
        let b = b + (p.fault * (32768 >> 4)).widen();
        k.wgmma_fence();
        lines.here(line!() + 1);
        k.wgmma(shape(16), sums.registers(), WgmmaA::Shared(a), b, true);
        k.wgmma_commit();
        k.wgmma_wait(0);
        store(p, sums.registers());
    });
}

#[test]
fn descriptors_that_differ() {
    // Between the lanes of a warp, and between the warps.
    for (shift, kind, said) in
        [(0u32, FindingKind::Uniform, "the descriptor of B is"), (5, FindingKind::Divergence, "all four must issue the same product")]
    {
        caught(kind, &[said], cta(128), |p, lines| {
            let k = p.k;
            let tiles = operands(p);
            let sums = Fragment::<f32>::filled(k, 16, 0.0f32);
            let (a, b) = descriptors(tiles, 0);
            let b = b + ((p.index() >> shift) * p.fault * 2u32).widen();
            k.wgmma_fence();
            lines.here(line!() + 1);
            k.wgmma(shape(16), sums.registers(), WgmmaA::Shared(a), b, true);
            k.wgmma_commit();
            k.wgmma_wait(0);
            store(p, sums.registers());
        });
    }
}

#[test]
fn a_product_that_one_warp_skips() {
    caught(FindingKind::Deadlock, &["the other warps of its warpgroup"], cta(128), |p, lines| {
        let k = p.k;
        let tiles = operands(p);
        let sums = Fragment::<f32>::filled(k, 16, 0.0f32);
        k.wgmma_fence();
        let warps = k.constant(4u32) - p.fault;
        let warp = k.uniform(p.index() >> 5u32);
        k.when(warp.lt(warps), || {
            lines.here(line!() + 1);
            product(p, sums.registers(), tiles);
            k.wgmma_wait(0);
        });
    });
}

// ---- illegal operands ----------------------------------------------------------------------------------------------

#[test]
fn a_descriptor_with_a_base_offset() {
    caught(FindingKind::IllegalOperand, &["base offset"], cta(128), |p, lines| {
        let k = p.k;
        let tiles = operands(p);
        let sums = Fragment::<f32>::filled(k, 16, 0.0f32);
        let (a, b) = descriptors(tiles, 0);
        let b = b + (k.join32(k.constant(0u32), p.fault << 17u32));
        k.wgmma_fence();
        lines.here(line!() + 1);
        k.wgmma(shape(16), sums.registers(), WgmmaA::Shared(a), b, true);
        k.wgmma_commit();
        k.wgmma_wait(0);
        store(p, sums.registers());
    });
}

#[test]
fn a_barrier_number_beyond_fifteen() {
    caught(FindingKind::IllegalOperand, &["barrier 16", "numbers are 0 to 15"], cta(64), |p, lines| {
        let k = p.k;
        lines.here(line!() + 1);
        k.barrier_sync(p.fault + 15u32, 64);
    });
}

#[test]
fn a_parity_that_is_neither() {
    caught(FindingKind::IllegalOperand, &["parity 2 is waited for at mbarrier full[0]"], cta(32), |p, lines| {
        let k = p.k;
        let full = p.barriers("full", 1, 32);
        k.when(k.thread().eq(0u32), || full.init());
        verdigris_kir::tile::ring::publish_barriers(k);
        full.at(0u32).arrive();
        lines.here(line!() + 1);
        full.at(0u32).wait(p.fault << 1u32);
    });
}

// ---- register budgets ----------------------------------------------------------------------------------------------

fn set_registers(p: Planted<'_>, increase: bool, registers: u32) {
    p.k.instruction(Op::Setmaxnreg { increase, registers }, &[], &[]);
}

#[test]
fn registers_lowered_to_more() {
    caught(FindingKind::RegisterBudget, &["setmaxnreg to 96 where each thread has 40"], cta(128), |p, lines| {
        set_registers(p, false, 40);
        p.when(|| {
            lines.here(line!() + 1);
            p.k.instruction(Op::Setmaxnreg { increase: false, registers: 96 }, &[], &[]);
        });
    });
}

#[test]
fn registers_raised_to_fewer() {
    caught(FindingKind::RegisterBudget, &["setmaxnreg to 32 where each thread has 64", "inc takes"], cta(128), |p, lines| {
        set_registers(p, false, 64);
        set_registers(p, true, 80);
        set_registers(p, false, 64);
        p.when(|| {
            lines.here(line!() + 1);
            p.k.instruction(Op::Setmaxnreg { increase: true, registers: 32 }, &[], &[]);
        });
    });
}

#[test]
fn registers_changed_again_in_a_loop() {
    caught(FindingKind::RegisterBudget, &["where each thread has 24"], cta(128), |p, lines| {
        let k = p.k;
        let turns = p.fault + 1u32;
        k.range(turns, |turn| {
            k.when(turn.eq(0u32), || set_registers(p, false, 24));
            k.when(turn.gt(0u32), || {
                lines.here(line!() + 1);
                k.instruction(Op::Setmaxnreg { increase: false, registers: 232 }, &[], &[]);
            });
        });
    });
}

#[test]
fn registers_that_nobody_gives_back() {
    // Three warpgroups enter with 168 registers: what one gives is just enough for the two others.
    caught(FindingKind::Deadlock, &["registers a thread, which no other warpgroup gives back"], cta(384), |p, _| {
        let k = p.k;
        k.warp_roles(&[
            Role { name: "producer", warps: 4, registers: Some(24), body: &|| {} },
            Role {
                name: "consumer",
                warps: 8,
                registers: Some(240),
                body: &|| {
                    p.when(|| set_registers(p, true, 248));
                },
            },
        ]);
    });
}
