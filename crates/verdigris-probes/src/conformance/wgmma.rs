//! `wgmma`: all types, operands from shared memory and registers, transposes, negation, accumulation, widths, sparse operands, and the
//! four swizzles of their descriptors.
//!
//! Shared memory is full of random elements, so that every descriptor reads something: a wrong address shows as a wrong product.

use super::kit::{check, column, imm, operand, probe, register, results};
use super::mma::{element_is_integer, product_rule};
use super::values::{Random, elements, magnitudes, metadata};
use super::{Check, Contents, Probe, Rule};
use std::collections::BTreeMap;
use std::sync::Arc;
use verdigris_kir::face::{Header, Kernel, Val};
use verdigris_kir::inst::{Cache, MatrixType, Op, Order, Space, WgmmaShape};
use verdigris_kir::inst_samples::samples;
use verdigris_kir::ir::{Operand, Reg, Swizzle, Target, Ty};

const THREADS: usize = 128;
const CHUNK: usize = 12;
/// Bytes of shared memory behind the descriptors of A, and of B.
const A_BYTES: usize = 16 << 10;
const B_BYTES: usize = 56 << 10;
/// Accumulator registers of the widest product.
const MOST_ACCUMULATORS: usize = 128;

/// One product with its descriptors.
#[derive(Clone, Debug)]
struct Case {
    shape: WgmmaShape,
    scale_d: bool,
    selector: u64,
    /// Descriptors without the address of the piece.
    a: u64,
    b: u64,
}

const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

/// A descriptor of an operand in a piece at address 0: `turn` varies the swizzle and the place in the row, and under a swizzle the first row and
/// the rows from one group of eight to the next, which need not be whole repeats of the pattern.
fn descriptor(transposed: bool, depth_bytes: u32, turn: usize) -> u64 {
    let fits = |swizzle: &Swizzle| transposed || *swizzle == Swizzle::None || swizzle.span_bytes() >= depth_bytes;
    let some: Vec<Swizzle> = SWIZZLES.into_iter().filter(fits).collect();
    let swizzle = some[turn % some.len()];
    let span = swizzle.span_bytes();
    let (first_row, pitch) = (turn as u32 / 3 % 8, 8 + turn as u32 / 2 % 5);
    let (leading, stride, start) = match (swizzle, transposed) {
        (Swizzle::None, false) => (128, 128 * (depth_bytes / 16), 0),
        (Swizzle::None, true) => (128, 256, 0),
        (_, false) => (16, pitch * span, first_row * span + depth_bytes * (turn as u32 / 4 % (span / depth_bytes))),
        (_, true) => (24 * span, pitch * span, first_row * span),
    };
    let code: u64 = match swizzle {
        Swizzle::None => 0,
        Swizzle::B128 => 1,
        Swizzle::B64 => 2,
        Swizzle::B32 => 3,
    };
    let field = |bytes: u32| u64::from(bytes >> 4) & 0x3fff;
    field(start) | field(leading) << 16 | field(stride) << 32 | code << 62
}

/// Whether the interpreter has the layout of the shape's metadata: not of 8-bit elements.
fn is_modelled(shape: &WgmmaShape) -> bool {
    !shape.sparse || shape.a.bits() >= 16 || shape.k() == 64
}

pub(super) fn probes() -> Vec<Probe> {
    let mut groups: BTreeMap<(MatrixType, MatrixType, MatrixType, bool), Vec<WgmmaShape>> = BTreeMap::new();
    for sample in samples() {
        if let Op::Wgmma { shape } = sample.op
            && is_modelled(&shape)
        {
            groups.entry((shape.a, shape.b, shape.d, shape.n > 128)).or_default().push(shape);
        }
    }
    let mut probes = Vec::new();
    for ((a, b, d, wide), shapes) in groups {
        for (part, shapes) in shapes.chunks(if wide { CHUNK / 3 } else { CHUNK }).enumerate() {
            let cases: Vec<Case> = shapes
                .iter()
                .enumerate()
                .map(|(index, shape)| {
                    let turn = part * 5 + index;
                    Case {
                        shape: *shape,
                        scale_d: turn % 3 != 0,
                        selector: (turn % 2) as u64 * u64::from(shape.sparse && shape.a.bits() >= 16),
                        a: descriptor(shape.transpose_a, 32, turn),
                        b: descriptor(shape.transpose_b, if shape.sparse { 64 } else { 32 }, turn / 2),
                    }
                })
                .collect();
            let width = if wide { "-wide" } else { "" };
            probes.push(products(format!("wgmma/{}-{}-{}{width}-{part}", d.ptx(), a.ptx(), b.ptx()), &cases, false));
            if part == 0 && !wide && !element_is_integer(a) {
                probes.push(products(format!("wgmma/{}-{}-{}-special", d.ptx(), a.ptx(), b.ptx()), &cases, true));
            }
        }
    }
    probes
}

fn products(name: String, cases: &[Case], special: bool) -> Probe {
    let mut random = Random::new(&name);
    let WgmmaShape { a, b, d, .. } = cases[0].shape;
    let a_bytes = elements(a, A_BYTES, special, &mut random);
    let b_bytes = elements(b, B_BYTES, special, &mut random);
    let start = match d {
        MatrixType::S32 => random.bytes(MOST_ACCUMULATORS * THREADS * 4),
        _ => elements(d, MOST_ACCUMULATORS * THREADS * 4, special, &mut random),
    };
    let words: Vec<u8> = (0..THREADS).flat_map(|_| metadata(a, &mut random).to_le_bytes()).collect();
    let mut checks: Vec<Check> = Vec::new();
    let mut place = 0;
    for case in cases {
        let registers = case.shape.d_registers();
        let layout = format!("descriptors {:#x}, {:#x}, scale-d {}, selector {}", case.a, case.b, case.scale_d, case.selector);
        let what = format!("{:?}, {layout}", Op::Wgmma { shape: case.shape });
        let names = ["Wgmma", "WgmmaFence", "WgmmaCommit", "WgmmaWait", "MemoryFence"];
        let rule = product_rule(a, d, case.shape.k());
        checks.push(check(what, &names, column(4, place * THREADS * 4, 4, 4, registers * THREADS), rule));
        place += registers;
    }
    let output = results(place * THREADS * 4);
    let positive = [magnitudes(a, &a_bytes), magnitudes(b, &b_bytes), magnitudes(d, &start), words.clone()];
    let build = |data: [Vec<u8>; 4], cases: Vec<Case>| {
        let mut buffers: Vec<Contents> = data.into_iter().map(Contents::Bytes).collect();
        buffers.push(output.clone());
        let header = Header { name: name.clone(), target: Target::Sm90a, threads: THREADS as u32, ..Header::default() };
        let cases: Arc<[Case]> = cases.into();
        probe(header, 1, buffers, checks.clone(), move |k| kernel(k, &cases))
    };
    let mut probe = build([a_bytes, b_bytes, start, words], cases.to_vec());
    if checks.iter().any(|check| matches!(check.rule, Rule::Product { .. })) {
        let mut same_sign = cases.to_vec();
        for case in &mut same_sign {
            case.shape.negate_a = false;
            case.shape.negate_b = false;
        }
        probe.magnitudes = Some(Box::new(build(positive, same_sign)));
    }
    probe
}

/// Fills a piece of shared memory from a buffer.
#[track_caller]
fn fill<'k>(k: Kernel<'k>, from: verdigris_kir::face::Pointer<'k>, name: &'static str, bytes: usize) -> Val<'k, u32> {
    let piece = k.shared(name, bytes as u32, 1024);
    k.range_step(k.thread() * 16, bytes as u32, THREADS as u32 * 16, |at| {
        let words: Vec<Val<'_, u32>> = k.ld_global_vector(from.at(at, 1), 0, 4, Cache::Default);
        k.st_shared_vector(piece.address() + at, 0, &words);
    });
    k.uniform(piece.address())
}

fn kernel<'k>(k: Kernel<'k>, cases: &[Case]) {
    let (a, b) = (k.input("a", 256), k.input("b", 256));
    let (start, words) = (k.input("accumulators", 256), k.input("metadata", 256));
    let output = k.output("results", 256);
    let (a_at, b_at) = (fill(k, a, "a", A_BYTES), fill(k, b, "b", B_BYTES));
    k.fence_proxy_async();
    k.bar_sync();
    let own = operand(start.at(k.thread(), 4));
    let to = operand(output.at(k.thread(), 4));
    let from_a = operand(a.at(k.thread(), 4));
    let place_of = |at: Val<'k, u32>, descriptor: u64| {
        let low = (at >> 4) + (descriptor as u32);
        k.join32(low, k.constant((descriptor >> 32) as u32))
    };
    let ld = |from: Operand, offset: usize, to: Reg, ty: Ty| {
        let op = Op::Ld { space: Space::Global, ty, count: 1, order: Order::Weak, cache: Cache::Default };
        k.instruction(op, &[Some(to)], &[from, imm(offset as u64)]);
    };
    let mut place = 0;
    for case in cases {
        let shape = case.shape;
        let op = Op::Wgmma { shape };
        let types = op.signature();
        let accumulators: Vec<Reg> = types.outs.iter().map(|ty| register(k, *ty)).collect();
        for (index, (reg, ty)) in accumulators.iter().zip(&types.outs).enumerate() {
            ld(own, index * THREADS * 4, *reg, *ty);
        }
        let mut ins: Vec<Operand> = if shape.a_in_registers {
            (0..WgmmaShape::A_REGISTERS)
                .map(|index| {
                    let reg = register(k, Ty::B32);
                    ld(from_a, index * THREADS * 4, reg, Ty::B32);
                    reg.into()
                })
                .collect()
        } else {
            vec![operand(place_of(a_at, case.a))]
        };
        ins.push(operand(place_of(b_at, case.b)));
        if shape.sparse {
            let word: Val<'_, u32> = k.ld_global(words.at(k.thread(), 4), 0);
            ins.extend([operand(word), imm(case.selector)]);
        }
        ins.push(k.predicate(case.scale_d).into());
        k.wgmma_fence();
        let outs: Vec<Option<Reg>> = accumulators.iter().map(|reg| Some(*reg)).collect();
        k.instruction(op, &outs, &ins);
        k.wgmma_commit();
        k.wgmma_wait(0);
        for (index, (reg, ty)) in accumulators.iter().zip(&types.outs).enumerate() {
            let op = Op::St { space: Space::Global, ty: *ty, count: 1, order: Order::Weak, cache: Cache::Default };
            k.instruction(op, &[], &[to, imm(((place + index) * THREADS * 4) as u64), (*reg).into()]);
        }
        place += accumulators.len();
        // Keeps the loads of the next product behind this one's stores, so that the registers of both are not wanted at once.
        k.bar_sync();
    }
}
