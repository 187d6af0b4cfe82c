//! Exchange between lanes: shuffles, votes, matches, reductions over a warp, fragments in shared memory.

use super::kit::{SLOT, check, column, emit, imm, load, own, probe, results, slots, store};
use super::values::{Domain, Random, value};
use super::{Contents, Probe, Rule};
use std::sync::Arc;
use verdigris_kir::face::{AsVal, Header, Kernel, Val};
use verdigris_kir::inst::{Op, Shuffle};
use verdigris_kir::inst_samples::samples;
use verdigris_kir::ir::{Operand, Reg, Target, Ty};

const THREADS: u32 = 128;
const CTAS: u32 = 4;
const LANES: usize = (THREADS * CTAS) as usize;

/// Member masks: the whole warp, its lower half, odd lanes.
const MEMBERS: [u32; 3] = [u32::MAX, 0x0000_ffff, 0xaaaa_aaaa];

/// An instruction with what its operands are.
#[derive(Clone, Debug)]
struct Case {
    op: Op,
    members: u32,
    /// Shuffles: the clamp word.
    clamp: u32,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for sample in samples() {
        let op = sample.op;
        match op {
            Op::Shfl { mode } => {
                let segments: [u32; 4] = [0, 0x1000, 0x1800, 0x1c00];
                let clamp = if mode == Shuffle::Up { 0 } else { 0x1f };
                cases.extend(segments.map(|segment| Case { op: op.clone(), members: u32::MAX, clamp: segment | clamp }));
            }
            Op::VoteAcross { .. } | Op::Ballot {} | Op::MatchAny { .. } | Op::MatchAll { .. } | Op::ReduxAcross { .. } | Op::Elect {} => {
                cases.extend(MEMBERS.map(|members| Case { op: op.clone(), members, clamp: 0 }));
            }
            Op::ActiveMask {} => cases.push(Case { op, members: u32::MAX, clamp: 0 }),
            _ => {}
        }
    }
    cases
}

pub(super) fn probes() -> Vec<Probe> {
    let mut probes = Vec::new();
    for target in [Target::Sm80, Target::Sm90] {
        let cases: Vec<Case> = cases().into_iter().filter(|case| case.op.target() == target).collect();
        probes.push(exchange(format!("lanes/exchange/{}", target.ptx()), target, cases));
    }
    probes.push(fragments("lanes/ldmatrix", Target::Sm80, |op| matches!(op, Op::Ldmatrix { .. } | Op::Movmatrix {})));
    probes.push(fragments("lanes/stmatrix", Target::Sm90, |op| matches!(op, Op::Stmatrix { .. })));
    probes
}

fn exchange(name: String, target: Target, cases: Vec<Case>) -> Probe {
    let mut random = Random::new(&name);
    let region = LANES * SLOT;
    // Region 0: any values. 1: few different ones, in some warps only one. 2: lanes. 3: predicates, in some warps all alike.
    let mut input = slots((0..LANES).map(|_| random.next()));
    let same: Vec<u64> = (0..LANES / 32).map(|_| random.next()).collect();
    input.extend(slots((0..LANES).map(|lane| same[lane / 32] ^ if lane / 32 % 2 == 0 { 0 } else { random.below(3) })));
    input.extend(slots((0..LANES).map(|_| if random.one_in(8) { random.next() & 0xffff_ffff } else { random.below(32) })));
    input.extend(slots((0..LANES).map(|lane| match lane / 32 % 4 {
        0 => 0,
        1 => 1,
        _ => random.below(2),
    })));
    let checks = cases
        .iter()
        .enumerate()
        .map(|(place, case)| {
            let what = format!("{:?} members {:#010x} clamp {:#x}", case.op, case.members, case.clamp);
            let ty = super::kit::stored(case.op.signature().outs[0]);
            let mut check = check(what, &[case.op.name()], column(1, place * region, SLOT, ty.bytes() as usize, LANES), Rule::Bits);
            check.operands = (0..4).map(|at| column(0, at * region, SLOT, SLOT, LANES)).collect();
            check
        })
        .collect();
    let buffers = vec![Contents::Bytes(input), results(cases.len() * region)];
    let header = Header { name, target, threads: THREADS, ..Header::default() };
    let cases: Arc<[Case]> = cases.into();
    probe(header, CTAS, buffers, checks, move |k| {
        let (input, output) = (k.input("operands", 256), k.output("results", 256));
        let (from, to) = (own(k, input, SLOT as u32), own(k, output, SLOT as u32));
        let value = |ty: Ty, at: usize| -> Operand { load(k, ty, from, at * region).into() };
        for (place, case) in cases.iter().enumerate() {
            let members = imm(case.members.into());
            let run = || {
                let ins: Vec<Operand> = match case.op {
                    Op::Shfl { .. } => vec![value(Ty::B32, 0), value(Ty::U32, 2), imm(case.clamp.into()), members],
                    Op::VoteAcross { .. } | Op::Ballot {} => vec![value(Ty::Pred, 3), members],
                    Op::MatchAny { ty } | Op::MatchAll { ty } => vec![value(ty, 1), members],
                    Op::ReduxAcross { ty, .. } => vec![value(ty, 0), members],
                    Op::Elect {} => vec![members],
                    _ => vec![],
                };
                let ty = case.op.signature().outs[0];
                let out = emit(k, &case.op, &ins)[0];
                store(k, ty, to, place * region, out);
            };
            if case.members == u32::MAX {
                run();
            } else {
                let mine = (k.constant(1u32).shl(k.lane()) & case.members).ne(0u32);
                k.when(mine, run);
            }
        }
    })
}

/// Instructions that move 8×8 matrices between shared memory and registers.
fn fragments(name: &'static str, target: Target, wanted: fn(&Op) -> bool) -> Probe {
    let ops: Vec<Op> = samples().into_iter().map(|sample| sample.op).filter(wanted).collect();
    let mut random = Random::new(name);
    let region = LANES * SLOT;
    let input = slots((0..4 * LANES).map(|_| value(Ty::U64, Domain::Any, &mut random)));
    // Rows in another order in each warp: row r of the warp's 32 at 16·order[r].
    let mut orders = Vec::new();
    for _ in 0..LANES / 32 {
        let mut rows: Vec<u64> = (0..32).collect();
        for at in (1..32usize).rev() {
            rows.swap(at, random.below(at as u64 + 1) as usize);
        }
        orders.extend(rows);
    }
    let mut checks = Vec::new();
    let mut place = 0;
    for op in &ops {
        let stores = matches!(op, Op::Stmatrix { .. });
        let outs = if stores { 4 } else { op.signature().outs.len() };
        for index in 0..outs {
            let what = format!("{op:?} register {index}");
            checks.push(check(what, &[op.name(), "SharedAddress", "WarpSync"], column(2, place * region, SLOT, 4, LANES), Rule::Bits));
            place += 1;
        }
    }
    let buffers = vec![Contents::Bytes(input), Contents::Bytes(slots(orders)), results(place * region)];
    let header = Header { name: name.into(), target, threads: THREADS, ..Header::default() };
    let ops: Arc<[Op]> = ops.into();
    probe(header, CTAS, buffers, checks, move |k| {
        let (input, orders, output) = (k.input("data", 256), k.input("orders", 256), k.output("results", 256));
        let (from, to) = (own(k, input, SLOT as u32), own(k, output, SLOT as u32));
        let words: Vec<Reg> = (0..4).map(|at| load(k, Ty::B32, from, at * region)).collect();
        let tile = k.shared("tile", THREADS * 16, 128);
        let rows = tile.address() + (k.thread() >> 5) * 512;
        let own_row = rows + k.lane() * 16;
        let order: Val<'_, u32> = k.ld_global(orders.at(super::kit::thread_of_grid(k), SLOT as u32), 0);
        let row = rows + order * 16;
        let mut place = 0;
        let mut keep = |reg: Reg| {
            store(k, Ty::B32, to, place * region, reg);
            place += 1;
        };
        for op in ops.iter() {
            match op {
                Op::Movmatrix {} => keep(emit(k, op, &[words[0].into()])[0]),
                Op::Stmatrix { count, .. } => {
                    fill(k, own_row, &words);
                    let mut ins = vec![row.operand(), imm(0)];
                    ins.extend(words[..*count as usize].iter().rev().map(|word| Operand::from(*word)));
                    k.warp_sync();
                    k.instruction(op.clone(), &[], &ins);
                    k.warp_sync();
                    let back: Vec<Val<'_, u32>> = k.ld_shared_vector(own_row, 0, 4);
                    for word in back {
                        if let Operand::Reg(reg) = word.operand() {
                            keep(reg);
                        }
                    }
                    k.warp_sync();
                }
                _ => {
                    fill(k, own_row, &words);
                    k.warp_sync();
                    emit(k, op, &[row.operand(), imm(0)]).into_iter().for_each(&mut keep);
                    k.warp_sync();
                }
            }
        }
    })
}

/// The thread's own row of 16 bytes.
#[track_caller]
fn fill<'k>(k: Kernel<'k>, row: Val<'k, u32>, words: &[Reg]) {
    let op = Op::St {
        space: verdigris_kir::inst::Space::Shared,
        ty: Ty::B32,
        count: 4,
        order: verdigris_kir::inst::Order::Weak,
        cache: verdigris_kir::inst::Cache::Default,
    };
    let mut ins = vec![row.operand(), imm(0)];
    ins.extend(words.iter().map(|word| Operand::from(*word)));
    k.instruction(op, &[], &ins);
}
