//! Atomics and reductions: each lane on a word of its own, for the arithmetic; and all lanes on one word, for the count.

use super::kit::{SLOT, check, column, emit, imm, load, operand, own, probe, results, rule_of, slots, store, thread_of_grid};
use super::memory::{meet, places, space_word};
use super::values::{Domain, Random, value};
use super::{Contents, Probe, Rule};
use std::collections::BTreeMap;
use std::sync::Arc;
use verdigris_kir::face::{Header, Val};
use verdigris_kir::inst::{Atomic, Cache, Op, Order, Scope, Space};
use verdigris_kir::inst_samples::samples;
use verdigris_kir::ir::{Operand, Target, Ty};

const THREADS: u32 = 64;
const CTAS: u32 = 2;
const LANES: usize = (THREADS * CTAS) as usize;
const CHUNK: usize = 32;
/// Bytes of each lane that an instruction may change.
const REACH: usize = 16;

/// Space, type, operation and number of values.
fn form(op: &Op) -> Option<(Space, Ty, Atomic, usize)> {
    match *op {
        Op::Atom { space, op, ty, .. } => Some((space, ty, op, 1)),
        Op::Red { space, op, ty, count, .. } => Some((space, ty, op, count as usize)),
        _ => None,
    }
}

pub(super) fn probes() -> Vec<Probe> {
    let mut groups: BTreeMap<(Target, Space, Ty), Vec<Op>> = BTreeMap::new();
    for sample in samples() {
        if let Some((space, ty, ..)) = form(&sample.op) {
            groups.entry((sample.op.target(), space, ty)).or_default().push(sample.op);
        }
    }
    let mut probes = Vec::new();
    for ((target, space, ty), ops) in groups {
        for (part, ops) in ops.chunks(CHUNK).enumerate() {
            let name = format!("atomic/{}-{}/{}-{part}", space_word(space), ty.ptx(), target.ptx());
            let cluster = if space == Space::Cluster { CTAS } else { 1 };
            probes.push(apart(Header { name, target, threads: THREADS, cluster, ..Header::default() }, space, ty, ops));
        }
    }
    probes.extend([Space::Global, Space::Shared, Space::Cluster].map(together));
    probes
}

/// Old values and operands: for a compare-and-swap, half of the lanes compare with what is there.
fn inputs(ty: Ty, random: &mut Random) -> (Vec<u8>, Vec<u8>) {
    let width = ty.bytes() as usize;
    let any = |random: &mut Random| value(ty, Domain::Any, random).to_le_bytes()[..width].to_vec();
    let per_lane = REACH / width;
    let old: Vec<Vec<u8>> = (0..LANES * per_lane).map(|_| any(random)).collect();
    // Operand i of a lane stands SLOT bytes from the next lane's, in region i.
    let mut operands = vec![0u8; 8 * LANES * SLOT];
    for (at, slot) in operands.chunks_exact_mut(SLOT).enumerate() {
        let (operand, lane) = (at / LANES, at % LANES);
        let word = if operand == 0 && random.one_in(2) { old[lane * per_lane].clone() } else { any(random) };
        slot[..width].copy_from_slice(&word);
    }
    (old.concat(), operands)
}

fn apart(header: Header, space: Space, ty: Ty, ops: &[Op]) -> Probe {
    let mut random = Random::new(&header.name);
    let (old, operands) = inputs(ty, &mut random);
    let width = ty.bytes() as usize;
    let (region, words) = (LANES * SLOT, LANES * REACH);
    let mut checks = Vec::new();
    for (place, op) in ops.iter().enumerate() {
        let Some((.., atomic, count)) = form(op) else { continue };
        let arithmetic = matches!(atomic, Atomic::Add | Atomic::Min | Atomic::Max);
        let rule = if arithmetic { rule_of(ty) } else { Rule::Bits };
        for index in 0..count {
            let what = if count == 1 { format!("{op:?} in memory") } else { format!("{op:?} in memory, value {index}") };
            let mut check = check(what, &[op.name()], column(2, place * words + index * width, REACH, width, LANES), rule.clone());
            check.operands = vec![column(3, index * width, REACH, width, LANES)];
            // In a cluster the operand is that of a thread of the other CTA.
            if space != Space::Cluster {
                check.operands.push(column(0, index * region, SLOT, width, LANES));
            }
            checks.push(check);
        }
        if matches!(op, Op::Atom { .. }) {
            checks.push(check(format!("{op:?} returned"), &[op.name()], column(1, place * region, SLOT, width, LANES), Rule::Bits));
        }
    }
    let global = space == Space::Global;
    let memory = if global { Contents::Bytes(old.repeat(ops.len())) } else { results(ops.len() * words) };
    if !global {
        // What stands beside a changed value comes back from shared memory too.
        for (place, op) in ops.iter().enumerate() {
            let changed = width * form(op).map_or(1, |(.., count)| count);
            let beside = column(2, place * words + changed, REACH, REACH - changed, LANES);
            checks.push(check(format!("{op:?}, the bytes beside"), &[], beside, Rule::Bits));
        }
    }
    let buffers = vec![Contents::Bytes(operands), results(ops.len() * region), memory, Contents::Bytes(old)];
    let ops: Arc<[Op]> = ops.into();
    probe(header, CTAS, buffers, checks, move |k| {
        let (input, output) = (k.input("operands", 256), k.output("results", 256));
        let (memory, old) = (k.in_out("memory", 256), k.input("old", 256));
        let (from, to) = (own(k, input, SLOT as u32), own(k, output, SLOT as u32));
        let in_memory = memory.at(thread_of_grid(k), REACH as u32);
        let places = (!global).then(|| places(k, space, ops.len(), REACH));
        let step = THREADS as usize * REACH;
        if let Some(places) = places {
            let words: Vec<Val<'_, u32>> = k.ld_global_vector(old.at(thread_of_grid(k), REACH as u32), 0, 4, Cache::Default);
            for place in 0..ops.len() {
                k.st_shared_vector(places.own, (place * step) as i64, &words);
            }
            meet(k, space);
        }
        let values: Vec<Operand> = (0..REACH / width).map(|index| load(k, ty, from, index * region).into()).collect();
        for (place, op) in ops.iter().enumerate() {
            let (base, offset) = match places {
                Some(places) => (operand(places.there), place * step),
                None => (operand(in_memory), place * words),
            };
            let mut ins = vec![base, imm(offset as u64)];
            ins.extend_from_slice(&values[..op.signature().ins.len() - 2]);
            for reg in emit(k, op, &ins) {
                store(k, ty, to, place * region, reg);
            }
        }
        if let Some(places) = places {
            meet(k, space);
            for place in 0..ops.len() {
                let words: Vec<Val<'_, u32>> = k.ld_shared_vector(places.own, (place * step) as i64, 4);
                k.st_global_vector(in_memory, (place * REACH * LANES) as i64, &words, Cache::Default);
            }
        }
    })
}

const WORDS: usize = 64;

/// Every thread on the same word, where the order does not show in the end.
fn together(space: Space) -> Probe {
    let target = if space == Space::Cluster { Target::Sm90 } else { Target::Sm80 };
    let name = format!("atomic/together-{}", space_word(space));
    let mut random = Random::new(&name);
    let mut ops = Vec::new();
    for ty in [Ty::U32, Ty::S32, Ty::U64, Ty::S64, Ty::B32, Ty::B64] {
        for op in [Atomic::Add, Atomic::Min, Atomic::Max, Atomic::And, Atomic::Or, Atomic::Xor, Atomic::Inc, Atomic::Dec] {
            let red = Op::Red { space, op, ty, count: 1, order: Order::Relaxed(Scope::Gpu) };
            if red.legal().is_ok() {
                ops.push(red);
            }
        }
    }
    let old = slots((0..WORDS).map(|_| random.next()));
    let values = slots((0..LANES).map(|_| random.next()));
    let ctas = if space == Space::Shared { CTAS as usize } else { 1 };
    let checks = ops
        .iter()
        .enumerate()
        .map(|(place, op)| {
            let wrap = matches!(op, Op::Red { op: Atomic::Inc | Atomic::Dec, .. });
            let what = format!("{op:?} by {} threads{}", LANES / ctas, if wrap { ", all with the same bound" } else { "" });
            // The bytes beside a word of 32 bits must stay as they are.
            check(what, &["Red"], column(2, place * SLOT, WORDS * SLOT, SLOT, ctas), Rule::Bits)
        })
        .collect();
    let memory = if space == Space::Global { Contents::Bytes(old.clone()) } else { results(ctas * WORDS * SLOT) };
    let buffers = vec![Contents::Bytes(values), Contents::Bytes(old), memory];
    let cluster = if space == Space::Cluster { CTAS } else { 1 };
    let header = Header { name, target, threads: THREADS, cluster, ..Header::default() };
    let ops: Arc<[Op]> = ops.into();
    probe(header, CTAS, buffers, checks, move |k| {
        let (input, old, memory) = (k.input("operands", 256), k.input("old", 256), k.in_out("memory", 256));
        let from = own(k, input, SLOT as u32);
        let piece = (space != Space::Global).then(|| k.shared("words", (WORDS * SLOT) as u32, 128));
        let at = k.thread() * SLOT as u32;
        let base = match piece {
            Some(piece) => {
                let word: Val<'_, u64> = k.ld_global(old.at(k.thread(), SLOT as u32), 0);
                k.st_shared(piece.address() + at, 0, word);
                meet(k, space);
                // Every CTA of the cluster adds to the words of the first.
                operand(if space == Space::Cluster { k.mapa(piece.address(), 0u32) } else { piece.address() })
            }
            None => operand(memory.address()),
        };
        for (place, op) in ops.iter().enumerate() {
            let Some((_, ty, atomic, _)) = form(op) else { continue };
            let bound = matches!(atomic, Atomic::Inc | Atomic::Dec);
            let value = if bound { imm(100) } else { load(k, ty, from, 0).into() };
            k.instruction(op.clone(), &[], &[base, imm((place * SLOT) as u64), value]);
        }
        if let Some(piece) = piece {
            meet(k, space);
            let word: Val<'_, u64> = k.ld_shared(piece.address() + at, 0);
            let place = if space == Space::Cluster { k.thread() } else { k.cta() * WORDS as u32 + k.thread() };
            let mine = k.thread().lt(ops.len() as u32);
            let mine = if space == Space::Cluster { mine & k.cluster_rank().eq(0u32) } else { mine };
            k.when(mine, || k.st_global(memory.at(place, SLOT as u32), 0, word));
        }
    })
}
